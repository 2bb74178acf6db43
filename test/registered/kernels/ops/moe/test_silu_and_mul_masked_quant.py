"""SiLU-and-multiply with quantization (W4AFP8 low-latency chain), byte for byte.

On a GPU the suite runs on the device; without one it runs under Triton's interpreter. SiLU has no exact value in general, but
in float32 it has one at both ends: a gate of at least 32 is its own SiLU (``1 + exp(-32)`` rounds to 1), and one of at most
-104 gives -0.0 (the exponential overflows). The exact tests use such gates, so their tolerance is zero in both places. All
other gates are compared with the installed engine's own kernel, byte for byte as well.
"""

import itertools
import mmap
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

from sglang_w4afp8.bench.streaming import engine_function
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import (
    _MAX_NARROW_ELEMENTS,
    MaskedRowsLaunch,
    silu_and_mul_masked_post_per_tensor_quant_fwd,
)
from sglang_w4afp8.kernels.ops.moe.reference import live_mask, silu_and_mul_masked_post_per_tensor_quant_reference

register_cuda_ci(est_time=60, suite="base-b-kernel-unit")
register_cpu_ci(est_time=90, suite="base-b-kernel-unit")

# Overflow is meant (a far negative gate, a saturated product); under the interpreter it is numpy's to warn of.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = "silu_and_mul_masked_post_per_tensor_quant_fwd"
SENTINEL = 0x5A
# With the ups and scales below every product is a normal fp8 number, a zero of either sign, or saturates.
EXACT_GATES = (0.0, -0.0, 32.0, 36.0, 40.0, 64.0, 112.0, 1024.0, -104.0, -128.0, -1024.0)
EXACT_UPS = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)


def pick(values, shape, generator):
    return torch.tensor(values)[torch.randint(0, len(values), shape, generator=generator)]


def exact_inputs(num_experts, padded, inner_dim, rows, dtype=torch.bfloat16, scale=(4.0,), seed=0):
    """Gate and up whose result is exact, in a block whose padding is NaN: a live row that reads it shows."""
    generator = torch.Generator().manual_seed(seed)
    masked_m = torch.tensor(rows, dtype=torch.int32)
    gate = pick(EXACT_GATES, (num_experts, padded, inner_dim), generator)
    up = pick(EXACT_UPS, (num_experts, padded, inner_dim), generator)
    gate_up = torch.cat([gate, up], dim=2).to(dtype)
    gate_up[~live_mask(masked_m, padded)] = float("nan")
    return gate_up.to(DEVICE), masked_m.to(DEVICE), torch.tensor(scale, device=DEVICE)


def poisoned(gate_up):
    shape = (*gate_up.shape[:2], gate_up.size(2) // 2)
    return torch.full(shape, SENTINEL, dtype=torch.uint8, device=gate_up.device).view(torch.float8_e4m3fn)


def assert_same_bytes(output, expected):
    torch.testing.assert_close(output.view(torch.uint8), expected.view(torch.uint8), rtol=0, atol=0)


def check(gate_up, masked_m, scale, **kwargs):
    """Run the kernel into a poisoned output and compare every byte, padding included, with the reference."""
    output, expected = poisoned(gate_up), poisoned(gate_up)
    returned = silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, **kwargs)
    silu_and_mul_masked_post_per_tensor_quant_reference(gate_up, expected, masked_m, scale)
    assert returned is output
    assert_same_bytes(output, expected)
    return output


def engine_or_skip():
    function = engine_function(NAME)
    if function is None:
        pytest.skip("the engine is not installed")
    return function


def check_against_engine(gate_up, masked_m, scale, **kwargs):
    """Run both kernels into poisoned outputs and compare every byte, padding included."""
    output, expected = poisoned(gate_up), poisoned(gate_up)
    engine_or_skip()(gate_up, expected, masked_m, scale)
    silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, **kwargs)
    assert_same_bytes(output, expected)


def random_inputs(num_experts, padded, inner_dim, rows, dtype=torch.bfloat16, seed=0, spread=3.0):
    """Random gate and up everywhere, padding too."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    gate_up = torch.randn((num_experts, padded, 2 * inner_dim), generator=generator, device=DEVICE, dtype=torch.float32)
    masked_m = torch.as_tensor(rows, dtype=torch.int32, device=DEVICE)
    return (gate_up * spread).to(dtype), masked_m, torch.tensor([0.0371], device=DEVICE)


def test_known_values():
    gate_up = torch.tensor([[[32.0, 64.0, 0.0, -104.0, -1024.0, 1024.0, 40.0, 0.5, 2.0, 7.0, 0.5, -1.0, 4.0, -1.0]]])
    masked_m = torch.ones(1, dtype=torch.int32, device=DEVICE)
    output = check(gate_up.to(torch.bfloat16).to(DEVICE), masked_m, torch.tensor([4.0], device=DEVICE))
    assert output[0, 0].tolist() == [4.0, 32.0, 0.0, 0.0, 0.0, 448.0, -10.0]
    # Zeros keep their signs: -0.0 * 0.5 and -0.0 * -1.
    assert output[0, 0].view(torch.uint8)[2:5].tolist() == [0x00, 0x80, 0x00]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("expected_rows", [None, 0, 3, 10_000])
def test_bytes_equal_the_reference(dtype, expected_rows):
    check(*exact_inputs(5, 12, 96, [12, 0, 1, 5, 11], dtype), expected_rows=expected_rows)


@pytest.mark.parametrize("inner_dim", [1, 2, 7, 63, 64, 65, 129, 1025])
@pytest.mark.parametrize("row_block", [1, 4])
def test_column_tails(inner_dim, row_block):
    launch = MaskedRowsLaunch(64, 2, 3, row_block, overflow_experts=2, speculative_rows=4)
    check(*exact_inputs(3, 5, inner_dim, [5, 2, 0]), launch=launch)


def test_any_width_by_rule():
    # 2047 and 1537 leave a tail behind the tile of the rule; 1000 and 77 are below it.
    for inner_dim in (2047, 1537, 1000, 77):
        check(*exact_inputs(2, 3, inner_dim, [3, 1]), expected_rows=2)


def test_padding_rows_are_untouched_and_their_nan_is_not_spread():
    gate_up, masked_m, scale = exact_inputs(4, 9, 64, [0, 9, 4, 1])
    for launch in (None, MaskedRowsLaunch(32, 2, 3, 4, speculative_rows=99)):
        output = check(gate_up, masked_m, scale, expected_rows=4, launch=launch)
        live = live_mask(masked_m, 9)
        padding = output.view(torch.uint8)[~live]
        assert padding.numel() == (4 * 9 - 14) * 64
        assert (padding == SENTINEL).all()
        assert not output.float()[live].isnan().any()


@pytest.mark.parametrize("num_experts, rows", [(40, 32), (128, 16)])
def test_where_the_expert_limit_binds(num_experts, rows):
    padded = 48
    counts = [(11 * expert) % (padded + 1) for expert in range(num_experts)]
    assert len(set(counts)) == min(num_experts, padded + 1)
    check(*exact_inputs(num_experts, padded, 32, counts), expected_rows=rows)


LAUNCHES = [
    MaskedRowsLaunch(
        *(col_block, m_grid, row_cap, row_block, num_warps, overflow_experts, speculative_rows),
        # Either order of the grid with every value of the others, at half the combinations.
        overflow_first=(m_grid // 2 + row_cap // 4) % 2 == 1,
    )
    for col_block, m_grid, row_cap, row_block, num_warps, overflow_experts, speculative_rows in itertools.product(
        (16, 64), (1, 3, 16), (1, 5, 11), (1, 4), (1, 4), (1, 3), (0, 2, 64)
    )
    # Warps do not exist under the interpreter; there, one value is the whole set.
    if DEVICE == "cuda" or num_warps == 1
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: "-".join(str(v) for v in launch.__dict__.values()))
def test_every_launch_gives_the_same_bytes(launch):
    check(*exact_inputs(3, 11, 40, [11, 0, 6]), launch=launch)


@pytest.mark.parametrize("hot", [0, 3, 6])
@pytest.mark.parametrize("row_block", [1, 2, 8])
def test_one_hot_expert_overflows_to_the_whole_launch(hot, row_block):
    rows = [1] * 7
    rows[hot] = 37
    check(*exact_inputs(7, 40, 64, rows), launch=MaskedRowsLaunch(64, 2, 3, row_block, overflow_experts=2))


@pytest.mark.parametrize("rows", [[0, 0, 0, 0], [0, 0, 0, 6], [6, 0, 0, 0], [0, 6, 0, 6]])
@pytest.mark.parametrize("speculative_rows", [0, 1, 99])
def test_empty_experts(rows, speculative_rows):
    launch = MaskedRowsLaunch(32, 4, 2, 2, speculative_rows=speculative_rows)
    check(*exact_inputs(4, 6, 64, rows), launch=launch)
    check(*exact_inputs(4, 6, 64, rows), expected_rows=0)


def test_one_padded_row_is_not_read_past():
    check(*exact_inputs(3, 1, 48, [1, 0, 1]), launch=MaskedRowsLaunch(32, 4, 1, 8, speculative_rows=64))


def test_row_counts_outside_the_block_are_clamped():
    gate_up, masked_m, scale = exact_inputs(3, 4, 64, [4, 4, 4])
    masked_m.copy_(torch.tensor([9, -3, 4], dtype=torch.int32))
    output = check(gate_up, masked_m, scale, expected_rows=4)
    assert (output[1].view(torch.uint8) == SENTINEL).all()


PER_EXPERT = (4.0, 0.5, 64.0, 1.0)


@pytest.mark.parametrize(
    "launch",
    [None, MaskedRowsLaunch(32, 1, 1, 2, overflow_experts=2), MaskedRowsLaunch(32, 2, 9, 4, speculative_rows=9)],
    ids=["rule", "phase 2", "speculative"],
)
def test_one_scale_per_expert_is_honoured(launch):
    gate_up, masked_m, scale = exact_inputs(4, 9, 64, [9, 2, 5, 0], scale=PER_EXPERT)
    output = check(gate_up, masked_m, scale, expected_rows=4, launch=launch)
    for expert, value in enumerate(PER_EXPERT):
        alone = check(gate_up, masked_m, torch.tensor([value], device=DEVICE), expected_rows=4, launch=launch)
        assert_same_bytes(output[expert], alone[expert])


def test_the_engine_reads_the_first_scale_for_every_expert():
    # Why the patch is more than a launch: with one scale per expert the engine's own bytes are wrong.
    gate_up, masked_m, scale = exact_inputs(4, 9, 64, [9, 2, 5, 0], scale=PER_EXPERT)
    engine_bytes = poisoned(gate_up)
    engine_or_skip()(gate_up, engine_bytes, masked_m, scale)
    assert_same_bytes(engine_bytes, check(gate_up, masked_m, scale[:1]))
    honoured = check(gate_up, masked_m, scale)
    assert [torch.equal(engine_bytes[e].view(torch.uint8), honoured[e].view(torch.uint8)) for e in range(4)] == [
        True,
        False,
        False,
        True,  # no live rows
    ]


def huge(shape, dtype):
    """Memory of which only touched pages exist: on the CPU not even reserved, so that any machine can run it."""
    elements = torch.Size(shape).numel()
    if DEVICE == "cuda":
        return torch.empty(shape, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@pytest.mark.parametrize("launch", [None, MaskedRowsLaunch(256, 1, 1, 2)], ids=["rule", "phase 2"])
def test_addresses_past_two_to_the_thirty_one_elements(launch):
    padded, inner_dim = 2**21 + 3, 1024
    gate_up = huge((2, padded, 2 * inner_dim), torch.bfloat16)
    output = huge((2, padded, inner_dim), torch.float8_e4m3fn)
    assert gate_up.stride(0) > 2**32 and output.stride(0) > 2**31
    small, _, scale = exact_inputs(2, 3, inner_dim, [3, 3])
    gate_up[:, :3] = small
    masked_m = torch.tensor([1, 3], dtype=torch.int32, device=DEVICE)
    bytes_seen = output.view(torch.uint8)[:, :4]
    bytes_seen.fill_(SENTINEL)
    silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, 1, launch=launch)
    expected = poisoned(gate_up[:, :4])
    silu_and_mul_masked_post_per_tensor_quant_reference(gate_up[:, :4].contiguous(), expected, masked_m, scale)
    assert torch.equal(bytes_seen, expected.view(torch.uint8))


@pytest.mark.parametrize("padded", [255, 261], ids=["32-bit offsets", "64-bit offsets"])
def test_the_last_row_on_either_side_of_the_offsets_width(padded):
    num_experts, inner_dim = 2000, 2048
    gate_up = huge((num_experts, padded, 2 * inner_dim), torch.bfloat16)
    output = huge((num_experts, padded, inner_dim), torch.float8_e4m3fn)
    assert (gate_up.numel() > _MAX_NARROW_ELEMENTS) == (padded == 261)
    assert abs(gate_up.numel() / 2**31 - 1) < 0.03
    last, _, scale = exact_inputs(1, padded, inner_dim, [padded])
    gate_up[-1:] = last
    masked_m = torch.zeros(num_experts, dtype=torch.int32, device=DEVICE)
    masked_m[-1] = padded
    expected = poisoned(last)
    silu_and_mul_masked_post_per_tensor_quant_reference(last, expected, masked_m[-1:], scale)
    # All rows by their own expert, then all but 16 of them by the shared slices.
    for row_cap in (padded, 16):
        output[-1:] = poisoned(last)
        launch = MaskedRowsLaunch(2048, 1, row_cap, 16)
        silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, launch=launch)
        assert_same_bytes(output[-1:], expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="one expert's block is 2^32 bytes: 43 GB of device memory")
def test_the_engine_wraps_past_two_to_the_thirty_two_elements():
    # Strides of 2^32 (output) and 2^33 (input) are 0 in int32: the engine takes expert 1 for expert 0.
    padded, inner_dim = 2**22, 1024
    gate_up = huge((2, padded, 2 * inner_dim), torch.bfloat16)
    output = huge((2, padded, inner_dim), torch.float8_e4m3fn)
    gate_up[0, 0], gate_up[1, 0] = 32.0, 64.0
    masked_m, scale = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([16.0])
    engine_or_skip()(gate_up, output, masked_m, scale)
    assert output[0, 0].float().unique().tolist() == [64.0] and output[1, 0].float().unique().tolist() == [0.0]
    output[0, 0] = 0.0
    silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, 1)
    assert output[0, 0].float().unique().tolist() == [0.0] and output[1, 0].float().unique().tolist() == [256.0]


def _valid():
    gate_up, masked_m, scale = exact_inputs(2, 3, 32, [3, 1])
    return {"input": gate_up, "output": poisoned(gate_up), "masked_m": masked_m, "scale": scale}


REJECTED = {
    "input rank": ("input", lambda a: a["input"][0], ValueError),
    "input dtype": ("input", lambda a: a["input"].to(torch.float64), TypeError),
    "input integers": ("input", lambda a: a["input"].view(torch.int16), TypeError),
    "input odd": ("input", lambda a: a["input"][:, :, :63].contiguous(), ValueError),
    "input strided": ("input", lambda a: a["input"].transpose(0, 1).contiguous().transpose(0, 1), ValueError),
    "input row slice": ("input", lambda a: a["input"].repeat(1, 2, 1)[:, :3], ValueError),
    "output dtype": ("output", lambda a: a["output"].to(torch.bfloat16), TypeError),
    "output e5m2": ("output", lambda a: a["output"].view(torch.float8_e5m2), TypeError),
    "output shape": ("output", lambda a: a["output"][:, :2].contiguous(), ValueError),
    "output strided": ("output", lambda a: a["output"].transpose(0, 1).contiguous().transpose(0, 1), ValueError),
    "output device": ("output", lambda a: a["output"].to("meta"), ValueError),
    "masked_m dtype": ("masked_m", lambda a: a["masked_m"].long(), TypeError),
    "masked_m length": ("masked_m", lambda a: a["masked_m"][:1], ValueError),
    "masked_m rank": ("masked_m", lambda a: a["masked_m"][:, None], ValueError),
    "masked_m strided": ("masked_m", lambda a: a["masked_m"].repeat_interleave(2)[::2], ValueError),
    "masked_m device": ("masked_m", lambda a: a["masked_m"].to("meta"), ValueError),
    "scale dtype": ("scale", lambda a: a["scale"].to(torch.bfloat16), TypeError),
    "scale elements": ("scale", lambda a: a["scale"].repeat(3), ValueError),
    "scale empty": ("scale", lambda a: a["scale"][:0], ValueError),
    "scale strided": ("scale", lambda a: a["scale"].expand(2), ValueError),
    "scale device": ("scale", lambda a: a["scale"].to("meta"), ValueError),
    "expected_rows negative": ("expected_rows", lambda a: -1, ValueError),
}


@pytest.mark.parametrize("case", REJECTED)
def test_bad_input_is_refused_by_name_and_nothing_is_written(case):
    name, spoil, error = REJECTED[case]
    arguments = _valid()
    output = arguments["output"]
    arguments[name] = spoil(arguments)
    with pytest.raises(error, match=rf"^{name}: .*must "):
        silu_and_mul_masked_post_per_tensor_quant_fwd(**arguments)
    assert (output.view(torch.uint8) == SENTINEL).all()


@pytest.mark.parametrize("shape", [(0, 4, 64), (2, 0, 64), (2, 4, 0)])
def test_nothing_to_do_is_no_error(shape):
    gate_up = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    output = torch.empty((*shape[:2], shape[2] // 2), dtype=torch.float8_e4m3fn, device=DEVICE)
    masked_m = torch.zeros(shape[0], dtype=torch.int32, device=DEVICE)
    scale = torch.ones(1, device=DEVICE)
    assert silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale) is output


def rounding_cases(count=24):
    """(gate, up, scale, byte) at a tie of fp8, where another order of the roundings gives another byte."""
    generator = torch.Generator().manual_seed(0)
    gate = (32 + 400 * torch.rand(4096, generator=generator)).to(torch.bfloat16).float()
    up = (0.5 + torch.rand(4096, generator=generator)).to(torch.bfloat16).float()
    # 19, 23 and 27 lie half way between two neighbours of fp8 of which the upper one is even: hardware rounds them up, and
    # so does the interpreter, which rounds every tie away from zero (31 too, but it forgets the carry and makes 16 of it).
    tie = 19.0 + 4 * torch.randint(0, 3, (4096,), generator=generator)
    scale = gate * up / tie
    inverse = scale.reciprocal()
    ours = (up * gate) * inverse
    found = []
    for other in (up * (gate * inverse), gate * (up * inverse), (up * gate) / scale):
        apart = ((ours == tie) & (other < tie)) | ((ours < tie) & (other == tie))
        found.append(apart.nonzero().flatten().tolist())
    chosen = [case for cases in found for case in cases[: count // 3]]
    assert len(chosen) == count
    byte = ours.to(torch.float8_e4m3fn).view(torch.uint8)
    return [(float(gate[case]), float(up[case]), float(scale[case]), int(byte[case])) for case in chosen]


def test_the_order_of_roundings_is_the_engines():
    for gate, up, scale, byte in rounding_cases():
        gate_up = torch.tensor([[[gate, up]]], dtype=torch.bfloat16, device=DEVICE)
        masked_m = torch.ones(1, dtype=torch.int32, device=DEVICE)
        scale = torch.tensor([scale], device=DEVICE)
        launch = MaskedRowsLaunch(1, 1, 1)
        check_against_engine(gate_up, masked_m, scale, launch=launch)
        if DEVICE == "cpu":
            # On a GPU the reciprocal is not rounded correctly, so only the engine knows the byte.
            output = poisoned(gate_up)
            silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, launch=launch)
            assert output.view(torch.uint8).item() == byte


# The last ones lift the far negative gates, whose SiLU is about 1e-36, to numbers that a byte tells apart.
@pytest.mark.parametrize(
    ("up", "scale"),
    [(1.0, 0.0371), (-0.75, 0.0371), (300.0, 0.0371), (3e38, 1.0), (3e38, 0.0371), (-1e38, 1e-2), (1e37, 1e-20)],
    ids=str,
)
def test_every_finite_bfloat16_gate_gives_the_engines_byte(up, scale):
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()].view(1, 255, 256)
    gate_up = torch.cat([finite, torch.full_like(finite, up)], dim=2).to(DEVICE)
    masked_m = torch.tensor([255], dtype=torch.int32, device=DEVICE)
    launch = MaskedRowsLaunch(256, 8, 255, 8)
    check_against_engine(gate_up, masked_m, torch.tensor([scale], device=DEVICE), launch=launch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("inner_dim", [256, 300, 77])
def test_random_inputs_give_the_engines_bytes(dtype, inner_dim):
    for expected_rows, launch in ((3, None), (None, None), (1, MaskedRowsLaunch(128, 2, 2, 4, speculative_rows=5))):
        inputs = random_inputs(3, 9, inner_dim, [9, 0, 4], dtype, seed=inner_dim)
        check_against_engine(*inputs, expected_rows=expected_rows, launch=launch)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's cast to fp8 makes 384 of NaN")
def test_nan_of_a_live_row_stays_where_it_is():
    # A broken activation must show downstream, not turn into a number; the engine's clamp makes -448 or 448 of it.
    gate_up, masked_m, scale = exact_inputs(2, 4, 48, [4, 2])
    gate_up[0, 1, 5], gate_up[0, 2, 48 + 7], gate_up[1, 0, 0] = float("nan"), float("nan"), float("nan")
    for launch in (None, MaskedRowsLaunch(32, 1, 1, 2, speculative_rows=4)):
        output = check(gate_up, masked_m, scale, expected_rows=2, launch=launch)
        live = live_mask(masked_m, 4)
        found = (output.float().isnan() & live[:, :, None]).nonzero().tolist()
        assert found == [[0, 1, 5], [0, 2, 7], [1, 0, 0]]


@pytest.mark.skipif(DEVICE == "cpu", reason="serving sizes take minutes under the interpreter")
@pytest.mark.parametrize(
    "num_experts, padded, inner_dim", [(8, 256, 2048), (64, 512, 1536), (256, 128, 2048), (3, 1, 77)]
)
@pytest.mark.parametrize("skew", [1, 16])
def test_serving_sizes_give_the_engines_bytes_on_the_device(num_experts, padded, inner_dim, skew):
    generator = torch.Generator().manual_seed(num_experts + skew)
    rows = torch.randint(0, padded + 1, (num_experts,), generator=generator) // skew
    rows[num_experts // 2] = padded
    inputs = random_inputs(num_experts, padded, inner_dim, rows)
    mean = int(rows.sum()) // num_experts
    for expected_rows in (None, mean, mean + 1):
        check_against_engine(*inputs, expected_rows=expected_rows)


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_replay_follows_the_row_counts_of_the_moment():
    gate_up, masked_m, scale = exact_inputs(4, 8, 256, [8, 8, 8, 8])
    output = poisoned(gate_up)
    silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, 2)
    for rows in ([0, 8, 1, 3], [8, 0, 0, 5], [0, 0, 0, 0]):
        masked_m.copy_(torch.tensor(rows, dtype=torch.int32))
        output.copy_(poisoned(gate_up))
        expected = poisoned(gate_up)
        graph.replay()
        silu_and_mul_masked_post_per_tensor_quant_reference(gate_up, expected, masked_m, scale)
        assert_same_bytes(output, expected)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
