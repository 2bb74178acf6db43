"""The W4AFP8 requant kernel, byte for byte.

On a GPU the suite runs on the device, with random payloads too; without one it runs under Triton's interpreter. Inputs of
the exact tests are representable at every step, so the tolerance is zero in both places.
"""

import itertools
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import (
    MaskedRowsLaunch,
    fp8_per_token_to_per_tensor_quant_triton,
    requant_launch_geometry,
)
from sglang_w4afp8.kernels.ops.moe.reference import (
    fp8_per_token_to_per_tensor_quant_reference,
    live_mask,
    problem_sizes_reference,
)

register_cuda_ci(est_time=60, suite="base-b-kernel-unit")
register_cpu_ci(est_time=90, suite="base-b-kernel-unit")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = 128
SENTINEL = 0x5A
NAN_BYTE = 0x7F


def exact_payload(num_experts, padded, hidden, rows, column_major=True, seed=0):
    """A payload laid out as DeepEP does, whose padding is NaN in payload and scales: a live row that reads it shows."""
    generator = torch.Generator().manual_seed(seed)
    groups = hidden // GROUP
    masked_m = torch.tensor(rows, dtype=torch.int32)
    live = live_mask(masked_m, padded)
    x = torch.randint(-8, 9, (num_experts, padded, hidden), generator=generator).float().to(torch.float8_e4m3fn)
    x.view(torch.uint8)[~live] = NAN_BYTE
    scale = 2.0 ** torch.randint(-2, 3, (num_experts, padded, groups), generator=generator)
    scale[~live] = float("nan")
    if column_major:
        scale = scale.transpose(1, 2).contiguous().transpose(1, 2)
    output_scale = torch.tensor([0.5])
    return tuple(t.to(DEVICE) for t in (x, scale, masked_m, output_scale))


def poisoned(x):
    return torch.full(x.shape, SENTINEL, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn)


def check(x, scale, masked_m, output_scale, inverse=None, **kwargs):
    """Run the kernel into a poisoned output and compare every byte, padding included, with the reference."""
    output, expected = poisoned(x), poisoned(x)
    fp8_per_token_to_per_tensor_quant_triton(x, scale, masked_m, output_scale, output, **kwargs)
    fp8_per_token_to_per_tensor_quant_reference(x, scale, masked_m, output_scale, expected, inverse)
    torch.testing.assert_close(output.view(torch.uint8), expected.view(torch.uint8), rtol=0, atol=0)
    return output


@pytest.mark.parametrize("column_major", [True, False], ids=["column-major", "row-major"])
@pytest.mark.parametrize("expected_rows", [None, 0, 3, 10_000])
def test_bytes_equal_the_reference(column_major, expected_rows):
    check(*exact_payload(5, 12, 512, [12, 0, 1, 5, 11], column_major), expected_rows=expected_rows)


@pytest.mark.parametrize("groups", [1, 3, 5, 7, 28])
def test_group_tails(groups):
    # 28 groups are K = 3584, which the legacy kernel refuses.
    check(*exact_payload(3, 5, groups * GROUP, [5, 2, 0]), expected_rows=2)


def test_padding_rows_are_untouched():
    x, scale, masked_m, output_scale = exact_payload(4, 9, 256, [0, 9, 4, 1])
    output = check(x, scale, masked_m, output_scale, expected_rows=4)
    padding = output.view(torch.uint8)[~live_mask(masked_m, 9)]
    assert padding.numel() == (4 * 9 - 14) * 256
    assert (padding == SENTINEL).all()
    assert not output.float()[live_mask(masked_m, 9)].isnan().any()


@pytest.mark.parametrize("num_experts, rows, m_grid", [(40, 32, 16), (128, 16, 8)])
def test_where_the_expert_limit_binds(num_experts, rows, m_grid):
    padded = 48
    assert requant_launch_geometry(2, num_experts, expected_rows=rows, max_rows=padded)[1] == m_grid
    counts = [(11 * expert) % (padded + 1) for expert in range(num_experts)]
    assert len(set(counts)) == min(num_experts, padded + 1)
    check(*exact_payload(num_experts, padded, 256, counts), expected_rows=rows)


LAUNCHES = [
    MaskedRowsLaunch(
        *(g_block, m_grid, row_cap, row_block, num_warps, overflow_experts, speculative_rows),
        # Either order of the grid with every value of the others, at half the combinations.
        overflow_first=(m_grid // 2 + row_cap // 4) % 2 == 1,
    )
    for g_block, m_grid, row_cap, row_block, num_warps, overflow_experts, speculative_rows in itertools.product(
        (1, 8), (1, 3, 32), (1, 5, 11), (1, 4), (1, 4), (1, 3), (0, 2, 64)
    )
    # Warps do not exist under the interpreter; there, one value is the whole set.
    if DEVICE == "cuda" or num_warps == 1
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: "-".join(str(v) for v in launch.__dict__.values()))
def test_every_launch_gives_the_same_bytes(launch):
    check(*exact_payload(3, 11, 384, [11, 0, 6]), launch=launch)


@pytest.mark.parametrize("hot", [0, 3, 6])
@pytest.mark.parametrize("row_block", [1, 2, 8])
def test_one_hot_expert_overflows_to_the_whole_launch(hot, row_block):
    rows = [1] * 7
    rows[hot] = 37
    launch = MaskedRowsLaunch(2, 2, 3, row_block, 1, 2)
    check(*exact_payload(7, 40, 256, rows), launch=launch)


@pytest.mark.parametrize("rows", [[0, 0, 0, 0], [0, 0, 0, 6], [6, 0, 0, 0], [0, 6, 0, 6]])
@pytest.mark.parametrize("speculative_rows", [0, 1, 99])
def test_empty_experts(rows, speculative_rows):
    launch = MaskedRowsLaunch(2, 4, 2, 2, 1, 1, speculative_rows)
    check(*exact_payload(4, 6, 256, rows), launch=launch)
    check(*exact_payload(4, 6, 256, rows), expected_rows=0)


def test_one_padded_row_is_not_read_past():
    launch = MaskedRowsLaunch(1, 4, 1, 8, 1, 1, 64)
    check(*exact_payload(3, 1, 128, [1, 0, 1]), launch=launch)


def test_row_counts_outside_the_block_are_clamped():
    x, scale, masked_m, output_scale = exact_payload(3, 4, 256, [4, 4, 4])
    masked_m.copy_(torch.tensor([9, -3, 4], dtype=torch.int32))
    output = check(x, scale, masked_m, output_scale, expected_rows=4)
    assert (output[1].view(torch.uint8) == SENTINEL).all()


@pytest.mark.parametrize("rows", [[5, 0, 2], [0, 0, 0]])
def test_problem_sizes_are_written_by_the_same_launch(rows):
    x, scale, masked_m, output_scale = exact_payload(3, 5, 256, rows)
    tables = torch.full((2, 3, 3), -1, dtype=torch.int32, device=DEVICE)
    check(
        x,
        scale,
        masked_m,
        output_scale,
        expected_rows=2,
        problem_sizes1=tables[0],
        problem_sizes2=tables[1],
        intermediate_size=96,
    )
    sizes1, sizes2 = problem_sizes_reference(masked_m, 96, 256)
    assert tables[0].tolist() == sizes1.tolist() == [[192, r, 256] for r in rows]
    assert tables[1].tolist() == sizes2.tolist() == [[256, r, 96] for r in rows]


def test_addresses_past_two_to_the_thirty_one_elements():
    # Untouched pages cost nothing: only the live rows and their scales are ever written.
    padded, hidden = 2**23 + 3, 256
    stride0 = 2**31 + 16
    x = torch.empty((2, padded, hidden), dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.empty(stride0 + 2 * padded, device=DEVICE).as_strided((2, padded, 2), (stride0, 1, padded))
    output = torch.empty_like(x)
    assert x.stride(0) > 2**31 and scale.stride(0) > 2**31
    rows = torch.randint(-8, 9, (2, 2, hidden), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x[:, :2] = rows.float().to(x.dtype)
    scale[:, :2] = torch.tensor([[[0.25, 1.0], [2.0, 4.0]], [[0.5, 2.0], [1.0, 0.25]]], device=DEVICE)
    masked_m = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    output.view(torch.uint8)[:, :3] = SENTINEL
    fp8_per_token_to_per_tensor_quant_triton(x, scale, masked_m, torch.tensor([0.5], device=DEVICE), output, 1)
    expected = (rows.float().view(2, 2, 2, GROUP) * scale[:, :2, :, None] * 2).view(2, 2, hidden)
    assert torch.equal(output[0, 0].float(), expected[0, 0])
    assert torch.equal(output[1, :2].float(), expected[1])
    assert (output.view(torch.uint8)[0, 1:3] == SENTINEL).all() and (output.view(torch.uint8)[1, 2] == SENTINEL).all()


def _valid():
    x, scale, masked_m, output_scale = exact_payload(2, 3, 256, [3, 1])
    return {"x": x, "x_scale": scale, "masked_m": masked_m, "output_scale": output_scale, "output": poisoned(x)}


REJECTED = {
    "x rank": ("x", lambda a: a["x"][0], ValueError),
    "x dtype": ("x", lambda a: a["x"].to(torch.bfloat16), TypeError),
    "x not whole groups": ("x", lambda a: a["x"][:, :, :200].contiguous(), ValueError),
    "x strided": ("x", lambda a: a["x"].transpose(0, 1).contiguous().transpose(0, 1), ValueError),
    "x_scale packed exponents": ("x_scale", lambda a: a["x_scale"].view(torch.int32), TypeError),
    "x_scale dtype": ("x_scale", lambda a: a["x_scale"].to(torch.bfloat16), TypeError),
    "x_scale groups": ("x_scale", lambda a: a["x_scale"][:, :, :1], ValueError),
    "x_scale rows": ("x_scale", lambda a: a["x_scale"][:, :2], ValueError),
    "masked_m dtype": ("masked_m", lambda a: a["masked_m"].long(), TypeError),
    "masked_m length": ("masked_m", lambda a: a["masked_m"][:1], ValueError),
    "masked_m rank": ("masked_m", lambda a: a["masked_m"][:, None], ValueError),
    "masked_m strided": ("masked_m", lambda a: a["masked_m"].repeat_interleave(2)[::2], ValueError),
    "output_scale elements": ("output_scale", lambda a: a["output_scale"].expand(2), ValueError),
    "output_scale dtype": ("output_scale", lambda a: a["output_scale"].to(torch.bfloat16), TypeError),
    "output dtype": ("output", lambda a: a["output"].to(torch.bfloat16), TypeError),
    "output shape": ("output", lambda a: a["output"][:, :2].contiguous(), ValueError),
    "output strided": ("output", lambda a: a["output"].transpose(0, 1).contiguous().transpose(0, 1), ValueError),
    "output device": ("output", lambda a: a["output"].to("meta"), ValueError),
    "x_scale device": ("x_scale", lambda a: a["x_scale"].to("meta"), ValueError),
    "masked_m device": ("masked_m", lambda a: a["masked_m"].to("meta"), ValueError),
    "expected_rows negative": ("expected_rows", lambda a: -1, ValueError),
    "one table alone": ("problem_sizes1", lambda a: torch.zeros(2, 3, dtype=torch.int32, device=DEVICE), ValueError),
}


@pytest.mark.parametrize("case", REJECTED)
def test_bad_input_is_refused_by_name_and_nothing_is_written(case):
    name, spoil, error = REJECTED[case]
    arguments = _valid()
    output = arguments["output"]
    arguments[name] = spoil(arguments)
    with pytest.raises(error, match=rf"^{name}: "):
        fp8_per_token_to_per_tensor_quant_triton(**arguments)
    assert (output.view(torch.uint8) == SENTINEL).all()


@pytest.mark.parametrize("shape", [(0, 4, 256), (2, 0, 256)])
def test_nothing_to_do_is_no_error(shape):
    x = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.empty(shape[0], shape[1], 2, device=DEVICE)
    masked_m = torch.zeros(shape[0], dtype=torch.int32, device=DEVICE)
    fp8_per_token_to_per_tensor_quant_triton(x, scale, masked_m, torch.ones(1, device=DEVICE), torch.empty_like(x))


@triton.jit
def _reciprocal_kernel(value_ptr, inverse_ptr):
    tl.store(inverse_ptr, 1.0 / tl.load(value_ptr))


@pytest.mark.skipif(
    DEVICE == "cpu", reason="random payloads meet fp8 subnormals, which the interpreter rounds differently"
)
@pytest.mark.parametrize("num_experts, padded, hidden", [(8, 256, 7168), (64, 512, 3584), (256, 64, 7168), (3, 1, 128)])
@pytest.mark.parametrize("skew", [1, 16])
def test_random_payloads_on_the_device(num_experts, padded, hidden, skew):
    generator = torch.Generator(DEVICE).manual_seed(num_experts + skew)
    codes = torch.randint(0, 256, (num_experts, padded, hidden), dtype=torch.uint8, device=DEVICE, generator=generator)
    x = codes.masked_fill_((codes & 0x7F) == NAN_BYTE, 0x7E).view(torch.float8_e4m3fn)
    scale = (
        torch.rand((num_experts, hidden // GROUP, padded), device=DEVICE, generator=generator).mul_(4).transpose(1, 2)
    )
    masked_m = torch.randint(0, padded + 1, (num_experts,), device=DEVICE, generator=generator, dtype=torch.int32)
    masked_m //= skew
    masked_m[num_experts // 2] = padded
    output_scale = torch.tensor([0.0371], device=DEVICE)
    inverse = torch.empty_like(output_scale)
    _reciprocal_kernel[(1,)](output_scale, inverse)
    mean = int(masked_m.sum()) // num_experts
    for expected_rows in (None, mean, mean + 1):
        check(x, scale, masked_m, output_scale, inverse, expected_rows=expected_rows)


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_replay_follows_the_row_counts_of_the_moment():
    x, scale, masked_m, output_scale = exact_payload(4, 8, 256, [8, 8, 8, 8])
    output = poisoned(x)
    fp8_per_token_to_per_tensor_quant_triton(x, scale, masked_m, output_scale, output, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_per_token_to_per_tensor_quant_triton(x, scale, masked_m, output_scale, output, 2)
    for rows in ([0, 8, 1, 3], [8, 0, 0, 5], [0, 0, 0, 0]):
        masked_m.copy_(torch.tensor(rows, dtype=torch.int32))
        output.copy_(poisoned(x))
        expected = poisoned(x)
        graph.replay()
        fp8_per_token_to_per_tensor_quant_reference(x, scale, masked_m, output_scale, expected)
        torch.testing.assert_close(output.view(torch.uint8), expected.view(torch.uint8), rtol=0, atol=0)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
