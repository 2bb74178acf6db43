"""The float32 expert layer: what it refuses, and that it leaves torch's matmul precision as it was."""

import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8.kernels.ops.moe.w4a8_reference import interleave_scales, pack_int4
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


def test_the_second_input_scale_only_saturates():
    free, tight = arguments(), arguments()
    free[-1] = torch.tensor([1e6])
    assert not torch.equal(reference_experts.moe_deepep_ll(*free), reference_experts.moe_deepep_ll(*tight))
    looser = arguments()
    looser[-1] = torch.tensor([2e6])
    assert torch.equal(reference_experts.moe_deepep_ll(*free), reference_experts.moe_deepep_ll(*looser))


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
