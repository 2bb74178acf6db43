"""The float32 expert layer: what it rounds and what it refuses, and that it leaves torch's matmul precision as it was."""

import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8.kernels.ops.moe.w4a8_reference import (
    deinterleave_scales,
    dequantize_weight,
    interleave_scales,
    pack_int4,
    relative_error,
    unpack_int4,
)
from sglang_w4afp8.srt.layers.moe import reference_experts

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

E, M, K, N = 2, 4, 256, 128


def arguments(rows=(3, 0)):
    generator = torch.Generator().manual_seed(0)
    weights = [
        pack_int4(torch.randint(-8, 8, shape, dtype=torch.int8, generator=generator))
        for shape in ((E, 2 * N, K), (E, K, N))
    ]
    scales = [interleave_scales(torch.full((E, n, k // 128), 0.01)).bfloat16() for n, k in ((2 * N, K), (K, N))]
    x = torch.randn((E, M, K), generator=generator).to(torch.float8_e4m3fn)
    x_scale = torch.full((E, M, K // 128), 0.5)
    return [x, x_scale, *weights, *scales, torch.tensor(rows, dtype=torch.int32), torch.tensor([1e-3])]


def layer(values, rounded):
    """The first expert's three rows in float64; the second GEMM's input as the format stores it, or left alone."""
    x, x_scale, w1_q, w2_q, w1_scale, w2_scale, _, a2_scale = values
    w1, w2 = (
        dequantize_weight(q[0], deinterleave_scales(s[:1], q.size(1))[0]).double()
        for q, s in ((w1_q, w1_scale), (w2_q, w2_scale))
    )
    rows = x[0, :3].double() * x_scale[0, :3].double().repeat_interleave(128, dim=1)
    gate, up = (rows @ w1.T).chunk(2, dim=1)
    inner = torch.nn.functional.silu(gate) * up
    if rounded:
        scale = a2_scale.double()
        inner = (inner / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    return inner @ w2.T


@pytest.mark.parametrize("a2_scale, saturates", [(1e-3, True), (0.05, False), (20.0, False)])
def test_the_second_gemms_input_is_rounded_as_the_format_stores_it(a2_scale, saturates):
    values = arguments()
    values[-1] = torch.tensor([a2_scale])
    found = reference_experts.moe_deepep_ll(*values)[0, :3]
    assert relative_error(found, layer(values, rounded=True)) < 3e-3  # the result is bfloat16
    # An fp8 value is off by up to 1/16, or by whatever is cut off.
    assert relative_error(found, layer(values, rounded=False)) > (0.1 if saturates else 0.015)


def test_only_a_bfloat16_result_is_between_the_reference_and_the_layer():
    values = arguments()
    # Powers of two everywhere: gates far above zero are their own SiLU, and all that is stored fits into fp8.
    values[0] = torch.ones_like(values[0].float()).to(torch.float8_e4m3fn)
    for index in (2, 3):
        values[index] = pack_int4(torch.ones_like(unpack_int4(values[index])))
    for index in (4, 5):
        values[index] = torch.full_like(values[index], 0.5)
    values[-1] = torch.tensor([16.0])
    # 256 products of 0.5 and 0.5 are 64, 64 * 64 is 256 of 16, and 128 products of it with 0.5 are 2^18.
    assert (reference_experts.moe_deepep_ll(*values)[0, :3] == 2.0**18).all()


def test_counts_beyond_the_padding_are_all_rows_and_negative_ones_none():
    many = reference_experts.moe_deepep_ll(*arguments((M + 5, -1)))
    assert torch.equal(many, reference_experts.moe_deepep_ll(*arguments((M, 0))))


def test_packed_scales_are_refused_by_name():
    packed = arguments()
    packed[1] = torch.zeros((E, M, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^a_scales: dtype is torch.int32"):
        reference_experts.moe_deepep_ll(*packed)


def test_the_matmul_precision_is_left_as_it_was():
    torch.set_float32_matmul_precision("high")
    try:
        reference_experts.moe_deepep_ll(*arguments())
        assert torch.get_float32_matmul_precision() == "high"
        broken = arguments()
        broken[2] = broken[2][:, :, :5]
        with pytest.raises(RuntimeError):
            reference_experts.moe_deepep_ll(*broken)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
