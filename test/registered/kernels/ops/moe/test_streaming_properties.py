"""Properties of both streaming kernels over random shapes, row counts and launches: interpreted, or on the device.

Whatever the launch: live rows hold the reference's bytes, every other byte of the output is as it was, the inputs are
untouched. Sizes are small, because the interpreter runs one program after the other.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

import sglang_w4afp8
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import (
    MaskedRowsLaunch,
    fp8_per_token_to_per_tensor_quant_triton,
    requant_launch_geometry,
    silu_and_mul_masked_post_per_tensor_quant_fwd,
)
from sglang_w4afp8.kernels.ops.moe.reference import (
    fp8_per_token_to_per_tensor_quant_reference,
    live_mask,
    problem_sizes_reference,
    silu_and_mul_masked_post_per_tensor_quant_reference,
)

register_cuda_ci(est_time=60, suite="base-b-kernel-unit")
register_cpu_ci(est_time=60, suite="base-b-kernel-unit")

# Overflow is meant (a far negative gate); under the interpreter it is numpy's to warn of.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = 128
SENTINEL = 0x5A
NAN_BYTE = 0x7F
EXAMPLES = settings(max_examples=80)


@st.composite
def masked_rows(draw, max_experts=6, max_padded=13):
    """Padded rows M and one row count per expert; the kernel clamps counts outside of [0, M]."""
    padded = draw(st.integers(1, max_padded))
    count = st.one_of(st.integers(0, padded), st.sampled_from([0, padded]), st.sampled_from([-1, padded + 1]))
    return padded, draw(st.lists(count, min_size=1, max_size=max_experts))


@st.composite
def launches(draw, max_col_block_log2):
    return MaskedRowsLaunch(
        col_block=1 << draw(st.integers(0, max_col_block_log2)),
        m_grid=draw(st.integers(1, 5)),
        row_cap=draw(st.integers(0, 15)),
        row_block=1 << draw(st.integers(0, 4)),
        # Warps do not exist under the interpreter.
        num_warps=1 << draw(st.integers(0, 2)) if DEVICE == "cuda" else 1,
        overflow_experts=draw(st.integers(1, 4)),
        speculative_rows=draw(st.sampled_from([0, 1, 2, 5, 99])),
        overflow_first=draw(st.booleans()),
    )


def poisoned(*shape):
    return torch.full(shape, SENTINEL, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)


def same_bytes(left, right):
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@EXAMPLES
@given(
    rows=masked_rows(),
    groups=st.integers(1, 5),
    launch=st.one_of(st.none(), launches(max_col_block_log2=3)),
    expected_rows=st.one_of(st.none(), st.integers(0, 40)),
    column_major=st.booleans(),
    write_tables=st.booleans(),
    seed=st.integers(0, 2**31),
)
# Every expert overflows at once, blocks wider than the padding, more slices than rows.
@example((3, [3, 3, 3]), 3, MaskedRowsLaunch(2, 1, 0, 16, 1, 4, 99), None, True, True, 0)
def test_requant(rows, groups, launch, expected_rows, column_major, write_tables, seed):
    padded, counts = rows
    hidden, num_experts = groups * GROUP, len(counts)
    generator = torch.Generator().manual_seed(seed)
    masked_m = torch.tensor(counts, dtype=torch.int32)
    live = live_mask(masked_m, padded)
    x = torch.randint(-8, 9, (num_experts, padded, hidden), generator=generator).float().to(torch.float8_e4m3fn)
    x.view(torch.uint8)[~live] = NAN_BYTE
    scale = 2.0 ** torch.randint(-2, 3, (num_experts, padded, groups), generator=generator)
    scale[~live] = float("nan")
    if column_major:
        scale = scale.transpose(1, 2).contiguous().transpose(1, 2)
    x, scale, masked_m, live = x.to(DEVICE), scale.to(DEVICE), masked_m.to(DEVICE), live.to(DEVICE)
    output_scale = torch.tensor([0.5], device=DEVICE)
    before = x.clone(), scale.clone(), masked_m.clone()
    tables = torch.full((2, num_experts, 3), -1, dtype=torch.int32, device=DEVICE)
    sizes = {"problem_sizes1": tables[0], "problem_sizes2": tables[1], "intermediate_size": 96} if write_tables else {}
    output, expected = poisoned(*x.shape), poisoned(*x.shape)

    fp8_per_token_to_per_tensor_quant_triton(
        x, scale, masked_m, output_scale, output, expected_rows, launch=launch, **sizes
    )

    fp8_per_token_to_per_tensor_quant_reference(x, scale, masked_m, output_scale, expected)
    assert same_bytes(output, expected)
    assert (output.view(torch.uint8)[~live] == SENTINEL).all()
    assert all(same_bytes(now, then) for now, then in zip((x, scale, masked_m), before, strict=True))
    if write_tables:
        wanted = problem_sizes_reference(masked_m.clamp(0, padded), 96, hidden)
        assert tables.tolist() == [table.tolist() for table in wanted]
    else:
        assert (tables == -1).all()


@EXAMPLES
@given(
    rows=masked_rows(),
    inner_dim=st.integers(1, 70),
    launch=st.one_of(st.none(), launches(max_col_block_log2=6)),
    expected_rows=st.one_of(st.none(), st.integers(0, 40)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    per_expert=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example((3, [3, 3, 3]), 33, MaskedRowsLaunch(32, 1, 0, 16, 1, 4, 99), None, torch.bfloat16, True, 0)
def test_silu(rows, inner_dim, launch, expected_rows, dtype, per_expert, seed):
    padded, counts = rows
    num_experts = len(counts)
    generator = torch.Generator().manual_seed(seed)
    masked_m = torch.tensor(counts, dtype=torch.int32)
    live = live_mask(masked_m, padded)

    def pick(*values):
        return torch.tensor(values)[
            torch.randint(0, len(values), (num_experts, padded, inner_dim), generator=generator)
        ]

    # SiLU is exact for these gates: zero, itself from 32 up, -0.0 from -104 down.
    gate = pick(0.0, 32.0, 36.0, 64.0, 112.0, 1024.0, -104.0, -1024.0)
    up = pick(-4.0, -1.0, -0.5, 0.0, 0.5, 2.0, 4.0)
    gate_up = torch.cat([gate, up], dim=2).to(dtype)
    gate_up[~live] = float("nan")
    gate_up, masked_m, live = gate_up.to(DEVICE), masked_m.to(DEVICE), live.to(DEVICE)
    scale = 2.0 ** torch.randint(-1, 6, (num_experts if per_expert else 1,), generator=generator).to(DEVICE)
    before = gate_up.clone(), masked_m.clone(), scale.clone()
    output, expected = poisoned(num_experts, padded, inner_dim), poisoned(num_experts, padded, inner_dim)

    silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, expected_rows, launch=launch)

    silu_and_mul_masked_post_per_tensor_quant_reference(gate_up, expected, masked_m, scale)
    assert same_bytes(output, expected)
    assert (output.view(torch.uint8)[~live] == SENTINEL).all()
    assert not output.float()[live].isnan().any()
    assert all(same_bytes(now, then) for now, then in zip((gate_up, masked_m, scale), before, strict=True))


# Run in a process of its own: a load that leaves the buffer ends it.
_GUARDED = """
import ctypes, mmap, sys
import torch
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as kernels

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
kept = []


def at_the_end_of_memory(tensor):
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // PAGE) * PAGE
    region = mmap.mmap(-1, pages + PAGE)
    kept.append(region)
    first = ctypes.addressof(ctypes.c_char.from_buffer(region))
    assert libc.mprotect(ctypes.c_void_p(first + pages), PAGE, 0) == 0
    placed = torch.frombuffer(region, dtype=tensor.dtype, count=tensor.numel(), offset=pages - size).view(tensor.shape)
    return placed.copy_(tensor)


for padded, row_block, col_block in ((1, 8, 1), (5, 4, 2), (5, 16, 8), (3, 2, 1)):
    for speculative_rows in (0, 1, 99):
        for m_grid, row_cap in ((1, 1), (4, 3), (2, 99)):
            launch = kernels.MaskedRowsLaunch(col_block, m_grid, row_cap, row_block, 1, 2, speculative_rows)
            masked_m = at_the_end_of_memory(torch.tensor([1, padded], dtype=torch.int32))
            x = at_the_end_of_memory(torch.ones(2, padded, 384).to(torch.float8_e4m3fn))
            x_scale = at_the_end_of_memory(torch.ones(2, 3, padded)).transpose(1, 2)
            one = at_the_end_of_memory(torch.ones(1))
            output = at_the_end_of_memory(torch.zeros_like(x))
            kernels.fp8_per_token_to_per_tensor_quant_triton(x, x_scale, masked_m, one, output, launch=launch)
            assert output[1].float().unique().tolist() == [1.0]
            gate_up = at_the_end_of_memory(torch.full((2, padded, 14), 32.0, dtype=torch.bfloat16))
            output = at_the_end_of_memory(torch.zeros(2, padded, 7).to(torch.float8_e4m3fn))
            scales = at_the_end_of_memory(torch.full((2,), 1024.0))
            kernels.silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scales, launch=launch)
            assert output[1].float().unique().tolist() == [1.0]
print("stayed inside")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or DEVICE == "cuda", reason="guards pages of the CPU's memory")
def test_no_access_leaves_the_buffers():
    package = Path(sglang_w4afp8.__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-c", _GUARDED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode} (-11: an access outside)\n{done.stderr[-2000:]}"
    assert "stayed inside" in done.stdout


@settings(max_examples=500)
@given(
    num_groups=st.integers(1, 200),
    num_experts=st.integers(1, 1024),
    group_size=st.sampled_from([64, 128, 256, 512]),
    expected_rows=st.one_of(st.none(), st.integers(0, 100_000)),
    warp_size=st.sampled_from([32, 64]),
    max_rows=st.integers(1, 1 << 20),
)
def test_geometry_is_always_launchable(num_groups, num_experts, group_size, expected_rows, warp_size, max_rows):
    g_block, m_grid, row_cap = requant_launch_geometry(
        num_groups, num_experts, group_size, expected_rows, warp_size, max_rows
    )
    assert g_block & (g_block - 1) == 0 and 1 <= g_block <= num_groups
    assert m_grid & (m_grid - 1) == 0 and 4 <= m_grid <= 32
    assert 1 <= row_cap <= max_rows
    if expected_rows is None:
        assert (m_grid, row_cap) == (32, max_rows)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
