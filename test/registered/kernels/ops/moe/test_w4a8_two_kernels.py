"""The Triton W4A8 grouped GEMMs: layouts both ways, and results against a float64 reference.

Without a GPU they run under Triton's interpreter, which knows no assembly: the device's unpacking is checked there by an
emulation of its instructions, and on the device by the results.
"""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

from sglang_w4afp8.kernels.ops.moe import w4a8_grouped_gemm as two
from sglang_w4afp8.kernels.ops.moe.reference import live_mask
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GroupedGemmLaunch
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import (
    interleave_scales,
    pack_int4,
    relative_error,
    unpack_int4,
)
from sglang_w4afp8.srt.layers.moe import two_kernels

register_cuda_ci(est_time=120, suite="base-b-kernel-unit")
register_cpu_ci(est_time=40, suite="base-b-kernel-unit")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SENTINEL = 0x5A


def weights(experts, n, k, seed=0):
    """Int4 values, power-of-two scales per group, and both as the engine holds them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (experts, n, k), generator=generator, dtype=torch.int8)
    scales = 2.0 ** torch.randint(-3, 2, (experts, n, k // 128), generator=generator)
    packed, interleaved = pack_int4(values), interleave_scales(scales).to(torch.bfloat16)
    return values, scales, packed.to(DEVICE), interleaved.to(DEVICE)


def dequantized(values, scales):
    return (values.double().unflatten(-1, (-1, 128)) * scales.double()[..., None]).flatten(-2)


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("k", [384, 512])
def test_regrouping_is_undone_byte_for_byte(gate_up, k):
    _, _, packed, scales = weights(2, 64, k)
    before = packed.clone(), scales.clone()
    two.regroup_weights(packed, scales, 16, gate_up=gate_up)
    assert not torch.equal(packed, before[0])
    two.restore_weights(packed, scales, 16, gate_up=gate_up)
    assert torch.equal(packed, before[0]) and torch.equal(scales, before[1])


def test_a_tile_holds_gate_rows_then_their_up_rows():
    values, scales, packed, interleaved = weights(2, 64, 256)
    two.regroup_weights(packed, interleaved, 16, gate_up=True)
    # Expert, tile, group, gate or up, row, nibble; a nibble is its value plus 8.
    tiles = unpack_int4(packed.cpu() ^ -0x78).view(2, 2, 2, 2, 16, 128)
    low, high = tiles[..., 0::2], tiles[..., 1::2]
    for expert, tile, group, part, row in [(0, 0, 0, 0, 0), (1, 1, 1, 1, 15), (1, 0, 1, 0, 7), (0, 1, 0, 1, 3)]:
        expected = values[expert, part * 32 + tile * 16 + row, group * 128 : (group + 1) * 128]
        assert torch.equal(torch.cat((low, high), dim=-1)[expert, tile, group, part, row], expected)
    assert torch.equal(interleaved.cpu().view(2, 2, 64).float(), scales.transpose(1, 2))


def prmt(a, b, selector):
    """PTX's byte permute, for selectors whose top bit is clear."""
    source = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    return int.from_bytes(bytes(source[(selector >> (4 * i)) & 7] for i in range(4)), "little")


# Codes 0..15 of the values -8..7, in every place of a word.
WORDS = [(0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15), (15, 0, 8, 7, 3, 12, 1, 9)]


def e4m3(*words):
    codes = b"".join(word.to_bytes(4, "little") for word in words)
    return torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()


@pytest.mark.parametrize("nibbles", WORDS)
def test_the_split_yields_every_offset_code_in_its_place(nibbles):
    word = sum(nibble << (4 * i) for i, nibble in enumerate(nibbles))
    values = e4m3(word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F)
    assert [512 * value for value in values] == [*nibbles[0::2], *nibbles[1::2]]
    # The tile of the offset itself.
    assert e4m3(0x08080808) == [8 / 512] * 4


@pytest.mark.parametrize("nibbles", WORDS)
def test_the_look_up_yields_every_value_in_its_place(nibbles):
    # As in the assembly: magnitudes by three bits, one of two tables by the top bit, then the low nibbles together.
    word = sum(nibble << (4 * i) for i, nibble in enumerate(nibbles))
    index, top = word & 0x77777777, ((word >> 1) & 0x44444444) | 0x32103210
    halves = []
    for shift in (0, 16):
        positive = prmt(0x44403800, 0x4E4C4A48, (index >> shift) & 0xFFFF)
        negative = prmt(0xCACCCED0, 0xB8C0C4C8, (index >> shift) & 0xFFFF)
        halves.append(prmt(negative, positive, (top >> shift) & 0xFFFF))
    values = e4m3(prmt(*halves, 0x6420), prmt(*halves, 0x7531))
    assert values == [nibble - 8 for nibble in [*nibbles[0::2], *nibbles[1::2]]]


def payload(experts, padded, k, rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    masked_m = torch.tensor(rows, dtype=torch.int32)
    live = live_mask(masked_m, padded)
    values = torch.randint(-8, 9, (experts, padded, k), generator=generator).float()
    scales = 2.0 ** torch.randint(-8, -5, (experts, padded, k // 128), generator=generator)
    x = values.to(torch.float8_e4m3fn)
    x.view(torch.uint8)[~live] = 0x7F
    poisoned = scales.clone()
    poisoned[~live] = float("nan")
    poisoned = poisoned.transpose(1, 2).contiguous().transpose(1, 2)
    return values, scales, x.to(DEVICE), poisoned.to(DEVICE), masked_m.to(DEVICE)


# Live rows per expert, and the estimate that sizes the grid: none, right, far too large, far too small.
ROWS = [([5, 0, 18], None), ([0, 0, 0], 4), ([1, 1, 1], 40), ([20, 3, 0], 1)]
LAUNCHES = [
    GroupedGemmLaunch(block_n, *rest, look_up=look_up)
    for block_n, *rest in ((64, 8, 1, 4, 3), (32, 16, 1, 4, 3), (64, 16, 2, 4, 2), (32, 32, 2, 4, 3))
    for look_up in (False, True)
] + [GroupedGemmLaunch(64, 16, 1, 4, 3, max_registers=128)]


def run_gate_up(values, scales, packed, interleaved, rows, launch, output_scale, n, expected_rows=None):
    """The kernel on a payload whose padding is NaN, into a poisoned output; returns the output on the CPU."""
    experts, padded = values.shape[:2]
    masked_m = torch.tensor(rows, dtype=torch.int32)
    live = live_mask(masked_m, padded)
    x = values.to(torch.float8_e4m3fn)
    x.view(torch.uint8)[~live] = 0x7F
    x_scale = scales.masked_fill(~live[..., None], float("nan")).transpose(1, 2).contiguous().transpose(1, 2)
    output = torch.full((experts, padded, n), SENTINEL, dtype=torch.uint8).view(torch.float8_e4m3fn)
    arguments = [
        t.to(DEVICE) for t in (x, x_scale, packed, interleaved, masked_m, torch.tensor([output_scale]), output)
    ]
    two.regroup_weights(arguments[2], arguments[3], launch.block_n, gate_up=True)
    two.w4a8_gate_up(*arguments, launch, expected_rows)
    assert (arguments[-1].cpu().view(torch.uint8)[~live] == SENTINEL).all()
    return arguments[-1].cpu()


@pytest.mark.parametrize("rows, expected_rows", ROWS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_gate_up_is_exact_where_every_step_is(rows, expected_rows, launch):
    # The interpreter's cast to e4m3 loses carries, so every result here is representable: a gate of 32, whose SiLU is 32
    # in float32, times a single product of an integer and powers of two.
    experts, padded, n, k = 3, 20, 64, 256
    generator = torch.Generator().manual_seed(3)
    weight_values = torch.zeros((experts, 2 * n, k), dtype=torch.int8)
    weight_values[:, :n, 0] = 4
    picked = torch.stack([torch.randperm(k - 1, generator=generator)[:n] + 1 for _ in range(experts)])
    for expert in range(experts):
        weight_values[expert, n + torch.arange(n), picked[expert]] = -2
    weight_scales = 2.0 ** torch.randint(-2, 2, (experts, 2 * n, k // 128), generator=generator)
    weight_scales[:, :n, 0] = 1.0
    values = torch.randint(-8, 9, (experts, padded, k), generator=generator).float()
    values[:, :, 0] = 8.0
    scales = 2.0 ** torch.randint(-2, 1, (experts, padded, k // 128), generator=generator)
    scales[:, :, 0] = 1.0
    packed, interleaved = pack_int4(weight_values), interleave_scales(weight_scales).to(torch.bfloat16)
    output = run_gate_up(values, scales, packed, interleaved, rows, launch, 4.0, n, expected_rows)
    dense = dequantized(weight_values, weight_scales)
    for expert, count in enumerate(rows):
        gate, up = (dequantized(values[expert, :count], scales[expert, :count]) @ dense[expert].T).chunk(2, dim=1)
        assert (gate == 32).all() or not count
        assert torch.equal(output[expert, :count].double(), gate * up / 4)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's cast to e4m3 loses carries")
@pytest.mark.parametrize("rows, expected_rows", ROWS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_gate_up_against_float64(rows, expected_rows, launch):
    experts, padded, n, k = 3, 20, 64, 256
    weight_values, weight_scales, packed, interleaved = weights(experts, 2 * n, k)
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-8, 9, (experts, padded, k), generator=generator).float()
    scales = 2.0 ** torch.randint(-8, -5, (experts, padded, k // 128), generator=generator)
    output = run_gate_up(values, scales, packed, interleaved, rows, launch, 0.25, n, expected_rows)
    dense = dequantized(weight_values, weight_scales)
    for expert, count in enumerate(rows):
        gate, up = (dequantized(values[expert, :count], scales[expert, :count]) @ dense[expert].T).chunk(2, dim=1)
        expected = (gate * torch.sigmoid(gate) * up / 0.25).clamp(-448, 448)
        # One rounding to e4m3 is all that separates them: 2^-4 of a value at most, or half the least step.
        difference = (output[expert, :count].double() - expected).abs()
        assert (difference <= expected.abs() * 2**-4 + 2**-10).all()


@pytest.mark.parametrize("rows, expected_rows", ROWS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_down_is_exact_where_the_arithmetic_is(rows, expected_rows, launch):
    experts, padded, n, k = 3, 20, 64, 256
    weight_values, weight_scales, packed, interleaved = weights(experts, n, k)
    two.regroup_weights(packed, interleaved, launch.block_n, gate_up=False)
    values, _, x, _, masked_m = payload(experts, padded, k, rows)
    # The interpreter truncates where the hardware rounds to bf16; there the sums themselves are compared.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    output = torch.full((experts, padded, n), -7.0, dtype=dtype, device=DEVICE)
    scale = torch.tensor([0.5], device=DEVICE)
    two.w4a8_down(x, scale, packed, interleaved, masked_m, output, launch, expected_rows)
    dense = dequantized(weight_values, weight_scales)
    for expert, count in enumerate(rows):
        # Integers times powers of two: float32 sums are exact, so the output's dtype is the only rounding.
        expected = (values[expert, :count].double() @ dense[expert].T * 0.5).to(dtype)
        assert torch.equal(output[expert, :count].cpu(), expected)
        assert (output[expert, count:] == -7.0).all()


@pytest.mark.parametrize("counts", [[0, 0, 90, 1, 0, 7, 8], [96] * 7, [0] * 6 + [1], [-3, 500, 0, 0, 0, 0, 9]])
@pytest.mark.parametrize("expected_rows", [1, 8, 100_000])
def test_every_block_of_rows_is_computed_once_whatever_the_grid(counts, expected_rows):
    # Counts that no dispatcher gives are taken as none and as all.
    experts, padded, n, k = 7, 96, 64, 128
    launch = GroupedGemmLaunch(64, 8, 1, 4, 3)
    weight_values, weight_scales, packed, interleaved = weights(experts, n, k)
    two.regroup_weights(packed, interleaved, launch.block_n, gate_up=False)
    live = [min(max(count, 0), padded) for count in counts]
    values, _, x, _, _ = payload(experts, padded, k, live)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    output = torch.full((experts, padded, n), -7.0, dtype=dtype, device=DEVICE)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    two.w4a8_down(x, torch.ones(1, device=DEVICE), packed, interleaved, masked_m, output, launch, expected_rows)
    dense = dequantized(weight_values, weight_scales)
    for expert, count in enumerate(live):
        expected = (values[expert, :count].double() @ dense[expert].T).to(dtype)
        assert torch.equal(output[expert, :count].cpu(), expected)
        assert (output[expert, count:] == -7.0).all()


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("counts", [[5, 0, 18], [0, 0, 0], [1, 40, 1]])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_rows_one_expert_after_another_are_exact(gate_up, counts, launch):
    experts, n, k, spare = 3, 128, 256, 3
    weight_values, weight_scales, packed, interleaved = weights(experts, n, k)
    two.regroup_weights(packed, interleaved, launch.block_n, gate_up=gate_up)
    generator = torch.Generator().manual_seed(1)
    # Rows of no expert stand behind the last one's, as where the engine reserves for the most that may come.
    values = torch.randint(-8, 9, (sum(counts) + spare, k), generator=generator).float()
    x = values.to(torch.float8_e4m3fn)
    x.view(torch.uint8)[sum(counts) :] = 0x7F
    # As the engine writes them: (N, rows, K) an expert.
    sizes = torch.tensor([[n, count, k] for count in counts], dtype=torch.int32, device=DEVICE)
    first_rows = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)[:experts].to(DEVICE)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    output = torch.full((len(values), n), -7.0, dtype=dtype, device=DEVICE)
    scale = torch.tensor([0.5], device=DEVICE)
    layout = two.TileLayout(launch.block_n, gate_up)
    two.w4a8_rows(x.to(DEVICE), scale, packed, interleaved, first_rows, sizes[:, 1], output, launch, layout)
    dense = dequantized(weight_values, weight_scales)
    owners = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    for row, expert in enumerate(owners.tolist()):
        expected = (values[row].double() @ dense[expert].T * 0.5).to(dtype)
        assert torch.equal(output[row].cpu(), expected)
    assert (output[sum(counts) :] == -7.0).all()


ROWS_REJECTED = {
    "launch": (lambda a: a.update(launch=GroupedGemmLaunch(32)), ValueError, "launch"),
    "x rank": (lambda a: a.update(x=a["x"][None]), ValueError, "x"),
    "x dtype": (lambda a: a.update(x=a["x"].view(torch.uint8)), TypeError, "x"),
    "output": (lambda a: a.update(output=a["output"][:, :1].contiguous()), ValueError, "output"),
    "first_rows": (lambda a: a.update(first_rows=a["first_rows"][:1]), ValueError, "first_rows"),
    "row_counts": (lambda a: a.update(row_counts=a["row_counts"].long()), TypeError, "row_counts"),
}


@pytest.mark.parametrize("case", ROWS_REJECTED)
def test_bad_rows_are_refused_by_name(case):
    spoil, error, name = ROWS_REJECTED[case]
    _, _, packed, interleaved = weights(2, 64, 256)
    numbers = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    arguments = {
        "x": torch.zeros((4, 256), dtype=torch.float8_e4m3fn, device=DEVICE),
        "x_scale": torch.ones(1, device=DEVICE),
        "w_q": packed,
        "w_scale": interleaved,
        "first_rows": numbers,
        "row_counts": numbers,
        "output": torch.zeros((4, 64), dtype=torch.bfloat16, device=DEVICE),
        "launch": GroupedGemmLaunch(64),
        "layout": two.TileLayout(64, False),
    }
    spoil(arguments)
    with pytest.raises(error, match=rf"^{name}: "):
        two.w4a8_rows(**arguments)


REJECTED = {
    "w_q dtype": (lambda a: a.update(w_q=a["w_q"].view(torch.uint8)), TypeError, "w_q"),
    "block_n": (lambda a: a.update(launch=GroupedGemmLaunch(128)), ValueError, "w_q"),
    "x width": (lambda a: a.update(x=a["x"][:, :, :128].contiguous()), ValueError, "x"),
    "x dtype": (lambda a: a.update(x=a["x"].view(torch.uint8)), TypeError, "x"),
    "x_scale rows": (lambda a: a.update(x_scale=a["x_scale"][:, :1]), ValueError, "x_scale"),
    "x_scale dtype": (lambda a: a.update(x_scale=a["x_scale"].half()), TypeError, "x_scale"),
    "masked_m dtype": (lambda a: a.update(masked_m=a["masked_m"].long()), TypeError, "masked_m"),
    "masked_m length": (lambda a: a.update(masked_m=a["masked_m"][:1]), ValueError, "masked_m"),
    "output shape": (lambda a: a.update(output=a["output"][:, :1].contiguous()), ValueError, "output"),
    "w_scale size": (lambda a: a.update(w_scale=a["w_scale"][:1]), ValueError, "w_scale"),
    "experts": (
        lambda a: a.update(x=a["x"][:1], x_scale=a["x_scale"][:1], masked_m=a["masked_m"][:1]),
        ValueError,
        "x",
    ),
    "masked_m stride": (lambda a: a.update(masked_m=a["masked_m"].repeat(2)[::2]), ValueError, "masked_m"),
    "output_scale dtype": (lambda a: a.update(output_scale=a["output_scale"].half()), TypeError, "output_scale"),
    "output_scale size": (lambda a: a.update(output_scale=a["output_scale"].repeat(2)), ValueError, "output_scale"),
    "groups per step": (lambda a: a.update(launch=GroupedGemmLaunch(64, groups_per_step=4)), ValueError, "launch"),
    "device": (lambda a: a.update(masked_m=a["masked_m"].to("meta")), ValueError, "masked_m"),
}
DOWN_REJECTED = {
    "experts": (lambda a: a.update(x=a["x"][:1], output=a["output"][:1]), ValueError, "x"),
    "masked_m stride": (lambda a: a.update(masked_m=a["masked_m"].repeat(2)[::2]), ValueError, "masked_m"),
    "x_scale dtype": (lambda a: a.update(x_scale=a["x_scale"].double()), TypeError, "x_scale"),
    "x_scale size": (lambda a: a.update(x_scale=torch.ones(2, device=DEVICE)), ValueError, "x_scale"),
    "groups per step": (lambda a: a.update(launch=GroupedGemmLaunch(64, groups_per_step=4)), ValueError, "launch"),
    "device": (lambda a: a.update(x_scale=a["x_scale"].to("meta")), ValueError, "x_scale"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_bad_input_is_refused_by_name(case):
    spoil, error, name = REJECTED[case]
    _, _, packed, interleaved = weights(2, 128, 256)
    _, _, x, x_scale, masked_m = payload(2, 4, 256, [1, 2])
    arguments = {
        "x": x,
        "x_scale": x_scale,
        "w_q": packed,
        "w_scale": interleaved,
        "masked_m": masked_m,
        "output_scale": torch.ones(1, device=DEVICE),
        "output": torch.zeros((2, 4, 64), dtype=torch.float8_e4m3fn, device=DEVICE),
        "launch": GroupedGemmLaunch(64),
    }
    spoil(arguments)
    with pytest.raises(error, match=rf"^{name}: "):
        two.w4a8_gate_up(**arguments)


@pytest.mark.parametrize("case", DOWN_REJECTED)
def test_bad_input_of_the_second_kernel_is_refused_by_name(case):
    spoil, error, name = DOWN_REJECTED[case]
    packed, interleaved = weights(2, 64, 256)[2:]
    arguments = {
        "x": torch.zeros((2, 4, 256), dtype=torch.float8_e4m3fn, device=DEVICE),
        "x_scale": torch.ones(1, device=DEVICE),
        "w_q": packed,
        "w_scale": interleaved,
        "masked_m": torch.ones(2, dtype=torch.int32, device=DEVICE),
        "output": torch.zeros((2, 4, 64), dtype=torch.bfloat16, device=DEVICE),
        "launch": GroupedGemmLaunch(64),
    }
    two.w4a8_down(**arguments)
    spoil(arguments)
    with pytest.raises(error, match=rf"^{name}: "):
        two.w4a8_down(**arguments)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are the device's")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("expected_m", [2, 40])
def test_a_captured_layer_follows_the_rows_of_each_replay(bf16, expected_m):
    experts, padded, hidden, inner = 8, 64, 1024, 512
    layer = []
    for gate_up, n, k in ((True, 2 * inner, hidden), (False, hidden, inner)):
        _, _, packed, scales = weights(experts, n, k)
        two.regroup_weights(packed, scales, 64, gate_up=gate_up)
        setattr(packed, two_kernels._LAYOUT, two.TileLayout(64, gate_up))
        layer.append((packed, scales))
    (w1, s1), (w2, s2) = layer
    values, scales, x, x_scale, masked_m = payload(experts, padded, hidden, [padded] * experts)
    if bf16:
        x, x_scale = (values.unflatten(2, (-1, 128)) * scales[..., None]).flatten(2).to(torch.bfloat16).to(DEVICE), None
    statics = torch.tensor([0.125], device=DEVICE), torch.tensor([64.0], device=DEVICE)

    def run():
        return two_kernels.moe_deepep_ll(x, x_scale, w1, w2, s1, s2, masked_m, *statics, expected_m)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for counts in ([padded] * experts, [1] * experts, [0] * experts, [0, 64, 3, 0, 17, 1, 33, 5]):
        masked_m.copy_(torch.tensor(counts, dtype=torch.int32))
        output.fill_(-7.0)
        graph.replay()
        eager, live = run(), live_mask(masked_m.cpu(), padded)
        assert torch.equal(output.cpu()[live], eager.cpu()[live])
        assert output.isfinite().all() and (output.cpu()[~live] == -7.0).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="full-size layers are for the device")
@pytest.mark.parametrize("hidden, inner", [(7168, 2048), (6144, 2048), (3584, 1536)])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_full_size_layers_on_the_device(hidden, inner, rows):
    experts, padded = 8, 64
    generator = torch.Generator().manual_seed(rows)
    counts = torch.randint(0, 2 * rows + 1, (experts,), generator=generator).clamp(max=padded).tolist()
    for gate_up, n, k in ((True, 2 * inner, hidden), (False, hidden, inner)):
        values, scales, packed, interleaved = weights(experts, n, k)
        launch = GroupedGemmLaunch(64, 16 if rows < 16 else 64, 1, 4, 3)
        two.regroup_weights(packed, interleaved, launch.block_n, gate_up=gate_up)
        activations, x_scales, x, x_scale, masked_m = payload(experts, padded, k, counts)
        dense = dequantized(values, scales)
        if gate_up:
            output = torch.zeros((experts, padded, inner), dtype=torch.float8_e4m3fn, device=DEVICE)
            output_scale = torch.tensor([64.0], device=DEVICE)
            two.w4a8_gate_up(x, x_scale, packed, interleaved, masked_m, output_scale, output, launch)
        else:
            output = torch.zeros((experts, padded, n), dtype=torch.bfloat16, device=DEVICE)
            two.w4a8_down(x, torch.ones(1, device=DEVICE), packed, interleaved, masked_m, output, launch)
        for expert, count in enumerate(counts):
            if not count:
                continue
            rows_in = activations[expert, :count].double()
            if gate_up:
                rows_in = dequantized(activations[expert, :count], x_scales[expert, :count])
            expected = rows_in @ dense[expert].T
            if gate_up:
                gate, up = expected.chunk(2, dim=1)
                expected = (gate * torch.sigmoid(gate) * up / 64).clamp(-448, 448)
            tolerance = 0.03 if gate_up else 0.003
            assert relative_error(output[expert, :count].cpu().double(), expected) < tolerance


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
