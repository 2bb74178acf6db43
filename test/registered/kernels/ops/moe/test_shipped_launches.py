"""Every launch of every shipped table gives the reference's bytes, for a hot expert, few rows and an empty one."""

import functools
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe import launch_table
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import (
    MaskedRowsLaunch,
    fp8_per_token_to_per_tensor_quant_triton,
    silu_and_mul_masked_post_per_tensor_quant_fwd,
)
from sglang_w4afp8.kernels.ops.moe.reference import (
    fp8_per_token_to_per_tensor_quant_reference,
    silu_and_mul_masked_post_per_tensor_quant_reference,
)

register_cuda_ci(est_time=90, suite="base-b-kernel-unit")
register_cpu_ci(est_time=60, suite="base-b-kernel-unit")

# Overflow is meant (a far negative gate); under the interpreter it is numpy's to warn of.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SENTINEL = 0x5A
PADDED = 12
ROWS = [2, 0, 12, 1]
# What a program that finds no row does is the same for all of them, and the interpreter runs them one after the other.
PROGRAMS_MAX = 64 if DEVICE == "cuda" else 3


def launchable(launch: MaskedRowsLaunch) -> MaskedRowsLaunch:
    """The launch at this test's size, without what the place cannot tell apart."""
    return MaskedRowsLaunch(
        col_block=launch.col_block,
        m_grid=min(launch.m_grid, PROGRAMS_MAX),
        row_cap=min(launch.row_cap, PADDED),
        row_block=launch.row_block,
        num_warps=launch.num_warps if DEVICE == "cuda" else 1,
        overflow_experts=min(launch.overflow_experts, PROGRAMS_MAX),
        speculative_rows=min(launch.speculative_rows, PADDED),
        overflow_first=launch.overflow_first,
    )


def shipped() -> list[tuple[str, MaskedRowsLaunch]]:
    """Distinct (kernel, launch) of all shipped tables, each at the estimate it was measured at and at one above."""
    found: dict[tuple[str, MaskedRowsLaunch], None] = {}
    for path in sorted(tuned_config.SHIPPED_DIRECTORY.glob(f"{launch_table.KIND}_*.json")):
        for kernel, by_columns in launch_table.parse(tuned_config.read_tuned(path, {})).items():
            for by_experts in by_columns.values():
                for launches in by_experts.values():
                    for launch in launches:
                        for expected_rows in (launch.expected_m, launch.expected_m + 1):
                            found[kernel, launchable(launch.launch(expected_rows))] = None
    return list(found)


SHIPPED = shipped()


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, SENTINEL, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)


def masked_m() -> torch.Tensor:
    return torch.tensor(ROWS, dtype=torch.int32, device=DEVICE)


@functools.cache
def requant_case(groups: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Arguments of the requant and the expected bytes; groups that are no power of two leave a tail to every tile."""
    generator = torch.Generator().manual_seed(groups)
    x = torch.randint(-8, 9, (len(ROWS), PADDED, groups * 128), generator=generator).float().to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-2, 3, (len(ROWS), groups, PADDED), generator=generator)
    arguments = x.to(DEVICE), scale.to(DEVICE).transpose(1, 2), masked_m(), torch.tensor([0.5], device=DEVICE)
    expected = poisoned(*x.shape)
    fp8_per_token_to_per_tensor_quant_reference(*arguments, expected)
    return arguments, expected


@functools.cache
def silu_case(inner_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input and scale of SiLU and the expected bytes; gates whose SiLU is exact in float32."""
    generator = torch.Generator().manual_seed(inner_dim)
    values = torch.tensor([0.0, 32.0, 36.0, 64.0, 1024.0, -104.0]), torch.tensor([-4.0, -0.5, 0.5, 1.0, 4.0])
    halves = [v[torch.randint(0, len(v), (len(ROWS), PADDED, inner_dim), generator=generator)] for v in values]
    gate_up, scale = torch.cat(halves, dim=2).to(torch.bfloat16).to(DEVICE), torch.tensor([4.0], device=DEVICE)
    expected = poisoned(len(ROWS), PADDED, inner_dim)
    silu_and_mul_masked_post_per_tensor_quant_reference(gate_up, expected, masked_m(), scale)
    return gate_up, scale, expected


def test_there_are_shipped_launches_of_both_kernels():
    assert {kernel for kernel, _ in SHIPPED} == {"requant", "silu"}


@pytest.mark.parametrize(
    ("kernel", "launch"),
    SHIPPED,
    ids=[f"{k}-{'-'.join(str(v) for v in vars(launch).values())}" for k, launch in SHIPPED],
)
def test_a_shipped_launch_gives_the_references_bytes(kernel, launch):
    for whole_tiles in (True, False):
        if kernel == "requant":
            # 3 is a tail of every tile but the narrowest.
            arguments, expected = requant_case(launch.col_block if whole_tiles else 3)
            output = poisoned(*expected.shape)
            fp8_per_token_to_per_tensor_quant_triton(*arguments, output, launch=launch)
        else:
            gate_up, scale, expected = silu_case(launch.col_block if whole_tiles else launch.col_block + 48)
            output = poisoned(*expected.shape)
            silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m(), scale, launch=launch)
        assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
