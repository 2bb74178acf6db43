"""Streaming kernels of the W4AFP8 low-latency expert path, and how they are launched.

DeepEP hands every expert a padded block of ``M`` rows of which ``masked_m[e]`` are live. At decode most of the block is
padding, so what such a kernel costs is decided by the programs it launches for nothing and by how many dependent memory
round trips a live row waits for, and only from about 30 rows per expert by bytes.

Both kernels here (the requant and SiLU-and-multiply) share one schedule:

* Phase 1: the programs of an expert write its rows below ``row_cap``, in blocks of ``ROW_BLOCK`` rows strided over the
  m-grid. Rows of a block are loaded together, so a block costs one round trip and not ``ROW_BLOCK`` of them.
* Phase 2: the row blocks above the cap, over all experts, form one flat list that ``overflow_experts`` extra slices of the
  grid share. A hot expert is spread over them instead of serialising its own programs; with even load the list is empty.

Launch parameters are hints: any of them gives the same bytes. They come from a measured table where one fits this GPU and
shape, otherwise from :func:`requant_launch_geometry`.

Ideas measured on one H200 before the schedule was fixed (K = 7168, us, CUDA-graph replay; "re-tuned" is the kernel of
sglang 0.5.19 - 0.5.23; the committed comparison is ``benchmark/results/h200/requant.json``):

====================================================  ======================  =====================================
idea                                                  experts x rows, load    outcome
====================================================  ======================  =====================================
blocks of 2 - 8 rows, one round trip a block          64 x 32, skew16         kept: 8.74 re-tuned, 7.49 -> 7.13
programs of their own for phase 2                     8 x 128, skew16         kept: 6.40 re-tuned, 5.13 -> 4.88
first block loaded before its row count is known      64 x 8, random          kept where it wins: 3.69, 3.45 -> 3.33
one flat row list for everything (persistent)         64 x 32, random         rejected: 7.41 re-tuned, 10.0
unrolling the row loop by 2 or 4                      256 x 32, random        rejected: no gain over row blocks
====================================================  ======================  =====================================
"""

import functools
from dataclasses import dataclass
from typing import Callable, Optional, Tuple

import torch
import triton
import triton.language as tl

# Tiles are sized in bytes per lane, because the width of a load is what memory sees: wave32 and wave64 parts then get the
# same load. 16 bytes is the widest access; with few experts there are too few programs to fill the chip and half of it
# gives twice the programs.
_REQUANT_BYTES_PER_LANE = 16
_REQUANT_BYTES_PER_LANE_FEW_EXPERTS = 8
_REQUANT_MANY_EXPERTS = 32
_REQUANT_NUM_WARPS = 4
_DEFAULT_WARP_SIZE = 32

# 32 is what the legacy kernel launched for every expert, so a launch only ever shrinks. Fewer than 4 programs an expert
# leave its second row waiting for its first.
_REQUANT_M_GRID_MAX = 32
_REQUANT_M_GRID_MIN = 4
# Below this many rows per expert the launch, not memory, is the limit, and 1024 programs a tile are as many as the chip
# starts in the time that one row takes (an empty program costs 0.6 ns on an H200).
_REQUANT_ROWS_SATURATED = 64
_REQUANT_TARGET_PROGRAMS = 1024
# Twice the expected rows stay with their own expert: ordinary variation is then no overflow.
_REQUANT_ROW_CAP_SLACK = 2

# Phase 2 shares its rows among one extra slice of the grid for every 8 experts: under a hot expert with 16 times the mean
# load a quarter of the rows at 64 experts are above the cap.
_EXPERTS_PER_OVERFLOW_SLICE = 8
_OVERFLOW_SLICES_MAX = 16

# SiLU tile: two bf16 loads of 16 bytes a lane and 8 bytes stored, over 4 warps.
_SILU_BLOCK = 1024
_SILU_NUM_WARPS = 4

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class MaskedRowsLaunch:
    """How one streaming kernel is launched. Hints only: every combination writes the same bytes.

    Attributes:
        col_block: columns of one program, in scale groups for the requant and in elements for SiLU; a power of two.
        m_grid: programs that share the rows of one expert in phase 1.
        row_cap: rows of an expert that stay with its own programs; those above go to phase 2.
        row_block: rows that one program loads together; a power of two.
        num_warps: warps of one program.
        overflow_experts: extra expert slices of the grid that share phase 2; at least 1.
        speculative: load the first row block before knowing that it is live (padding is always readable).
    """

    col_block: int
    m_grid: int
    row_cap: int
    row_block: int = 1
    num_warps: int = 4
    overflow_experts: int = 1
    speculative: bool = False


def _floor_pow2(value: int) -> int:
    """Largest power of two that is at most ``value``; 1 for anything below 1."""
    return 1 << (max(1, value).bit_length() - 1)


@functools.lru_cache(maxsize=None)
def requant_warp_size(device: torch.device) -> int:
    """Lanes of one warp of ``device`` (32 on NVIDIA, 32 or 64 on AMD), read once from the device's properties."""
    if device.type != "cuda":
        return _DEFAULT_WARP_SIZE
    return torch.cuda.get_device_properties(device).warp_size


def requant_launch_geometry(
    num_groups: int,
    num_experts: int,
    group_size: int = 128,
    expected_rows: Optional[int] = None,
    warp_size: int = _DEFAULT_WARP_SIZE,
    max_rows: int = 1 << 30,
) -> Tuple[int, int, int]:
    """Launch hints of the requant where no measured table applies; any values give the same bytes.

    Args:
        num_groups: scale groups of one row, K / group_size.
        num_experts: local experts E.
        group_size: elements that share one scale.
        expected_rows: the dispatcher's mean of live rows per expert, ``(rows + E) // E`` of their total, or None.
        warp_size: lanes of one warp.
        max_rows: padded rows M of one expert.

    Returns:
        ``(g_block, m_grid, row_cap)``: scale groups of one program, programs that share an expert's rows, and the row from
        which an expert's rows are shared by the whole launch.
    """
    many = num_experts >= _REQUANT_MANY_EXPERTS
    bytes_per_lane = _REQUANT_BYTES_PER_LANE if many else _REQUANT_BYTES_PER_LANE_FEW_EXPERTS
    # The payload is fp8: a byte is an element.
    tile_elements = bytes_per_lane * warp_size * _REQUANT_NUM_WARPS
    g_block = min(_floor_pow2(tile_elements // group_size), _floor_pow2(num_groups))
    if expected_rows is None:
        # Nothing to place a cap against: every row stays with its expert, under the legacy m-grid.
        return g_block, _REQUANT_M_GRID_MAX, max_rows
    # The dispatcher has already rounded up; rounding down here keeps the m-grid from doubling at every power of two.
    m_grid = _floor_pow2(expected_rows)
    if expected_rows < _REQUANT_ROWS_SATURATED:
        m_grid = min(m_grid, _floor_pow2(_REQUANT_TARGET_PROGRAMS // max(1, num_experts)))
    m_grid = max(_REQUANT_M_GRID_MIN, min(_REQUANT_M_GRID_MAX, m_grid))
    return g_block, m_grid, min(max_rows, _REQUANT_ROW_CAP_SLACK * max(1, expected_rows))


def _overflow_experts(num_experts: int) -> int:
    """Extra expert slices of the grid that share phase 2, by rule."""
    return max(1, min(_OVERFLOW_SLICES_MAX, num_experts // _EXPERTS_PER_OVERFLOW_SLICE))


# A measured table may answer before the rules do: (kernel, num_experts, columns, expected_rows, device) -> launch or None.
LaunchLookup = Callable[[str, int, int, int, torch.device], Optional[MaskedRowsLaunch]]
_launch_lookup: Optional[LaunchLookup] = None


def set_launch_lookup(lookup: Optional[LaunchLookup]) -> None:
    """Install a source of measured launches, or remove it with None. Choices already made are forgotten."""
    global _launch_lookup
    _launch_lookup = lookup
    _requant_launch.cache_clear()
    _silu_launch.cache_clear()


def _measured_launch(
    kernel: str, num_experts: int, columns: int, expected_rows: Optional[int], max_rows: int, device: torch.device
) -> Optional[MaskedRowsLaunch]:
    """The table's launch for this shape with its cap inside the payload, or None."""
    if _launch_lookup is None or expected_rows is None:
        return None
    launch = _launch_lookup(kernel, num_experts, columns, expected_rows, device)
    if launch is None or launch.row_cap <= max_rows:
        return launch
    return MaskedRowsLaunch(**{**launch.__dict__, "row_cap": max_rows})


# Cached: one captured graph always sees one choice, and an eager call pays a dictionary look-up.
@functools.lru_cache(maxsize=4096)
def _requant_launch(
    num_groups: int, num_experts: int, expected_rows: Optional[int], max_rows: int, device: torch.device
) -> MaskedRowsLaunch:
    measured = _measured_launch("requant", num_experts, num_groups, expected_rows, max_rows, device)
    if measured is not None:
        return measured
    g_block, m_grid, row_cap = requant_launch_geometry(
        num_groups, num_experts, expected_rows=expected_rows, warp_size=requant_warp_size(device), max_rows=max_rows
    )
    return MaskedRowsLaunch(
        g_block, m_grid, row_cap, num_warps=_REQUANT_NUM_WARPS, overflow_experts=_overflow_experts(num_experts)
    )


@functools.lru_cache(maxsize=4096)
def _silu_launch(
    inner_dim: int, num_experts: int, expected_rows: Optional[int], max_rows: int, device: torch.device
) -> MaskedRowsLaunch:
    measured = _measured_launch("silu", num_experts, inner_dim, expected_rows, max_rows, device)
    if measured is not None:
        return measured
    # The row rule is the requant's: both stream the same rows of the same experts.
    _, m_grid, row_cap = requant_launch_geometry(1, num_experts, expected_rows=expected_rows, max_rows=max_rows)
    return MaskedRowsLaunch(
        min(_SILU_BLOCK, triton.next_power_of_2(inner_dim)),
        m_grid,
        row_cap,
        num_warps=_SILU_NUM_WARPS,
        overflow_experts=_overflow_experts(num_experts),
    )


@triton.jit
def _live_rows(masked_m_ptr, expert, m):
    """Rows of ``expert`` that are live. A count outside [0, m] is clamped: no program may leave the expert's block."""
    return tl.minimum(tl.maximum(tl.load(masked_m_ptr + expert), 0), m)


@triton.jit
def _overflow_list(masked_m_ptr, num_experts, m, row_cap, ROW_BLOCK: tl.constexpr, EXPERT_BLOCK: tl.constexpr):
    """The flat list of row blocks above the cap: expert ids, their live rows, inclusive block counts, and its length."""
    expert_ids = tl.arange(0, EXPERT_BLOCK)
    rows = tl.load(masked_m_ptr + expert_ids, mask=expert_ids < num_experts, other=0)
    rows = tl.minimum(tl.maximum(rows, 0), m)
    blocks = (tl.maximum(rows - row_cap, 0) + (ROW_BLOCK - 1)) // ROW_BLOCK
    return expert_ids, rows, tl.cumsum(blocks), tl.sum(blocks)


@triton.jit
def _overflow_entry(index, expert_ids, rows, blocks_before, row_cap, ROW_BLOCK: tl.constexpr):
    """Entry ``index`` of the flat list as (expert, first row, live rows of that expert).

    The owner is however many experts end at or before the index; experts without overflow drop out of the count.
    """
    done = blocks_before <= index
    expert = tl.sum(done.to(tl.int32))
    first = row_cap + (index - tl.max(tl.where(done, blocks_before, 0))) * ROW_BLOCK
    live = tl.sum(tl.where(expert_ids == expert, rows, 0))
    return expert, first, live


@triton.jit
def _requant_row(
    x_ptr,
    x_scale_ptr,
    x_scale_stride0,
    x_scale_stride1,
    output_ptr,
    m,
    k,
    expert,
    first_row,
    live_rows,
    output_scale_inv,
    k_offsets,
    g_offsets,
    g_mask,
    HAS_G_TAIL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PREDICATE_LOADS: tl.constexpr,
):
    """Requantize one block of rows; the one place that writes a row, so both phases write the same bytes.

    Without PREDICATE_LOADS the rows are read whether they are live or not (always inside the expert's block), so that
    the loads need not wait for the row count; the stores always do.
    """
    rows = first_row + tl.arange(0, ROW_BLOCK)
    live = rows < live_rows
    # Only an unpredicated read can point past the block; 64-bit from here on, as E x M x K passes 2^31 elements.
    rows = tl.minimum(rows, m - 1).to(tl.int64)
    expert = expert.to(tl.int64)
    offsets = ((expert * m + rows) * k)[:, None, None] + k_offsets[None, :, :]
    scale_ptrs = x_scale_ptr + expert * x_scale_stride0 + (rows * x_scale_stride1)[:, None] + g_offsets[None, :]
    store_mask = live[:, None, None]
    if HAS_G_TAIL:
        store_mask = store_mask & g_mask[None, :, None]
    if PREDICATE_LOADS:
        scale_mask = live[:, None]
        if HAS_G_TAIL:
            scale_mask = scale_mask & g_mask[None, :]
        hidden = tl.load(x_ptr + offsets, mask=store_mask, other=0.0)
        scale = tl.load(scale_ptrs, mask=scale_mask, other=0.0)
    elif HAS_G_TAIL:
        hidden = tl.load(x_ptr + offsets, mask=g_mask[None, :, None], other=0.0)
        scale = tl.load(scale_ptrs, mask=g_mask[None, :], other=0.0)
    else:
        hidden = tl.load(x_ptr + offsets)
        scale = tl.load(scale_ptrs)
    scaled = hidden.to(tl.float32) * scale.to(tl.float32)[:, :, None]
    quantized = (scaled * output_scale_inv).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + offsets, quantized, mask=store_mask)


@triton.jit
def _fp8_per_token_quant_to_per_tensor_quant_kernel(
    x_ptr,
    x_scale_ptr,
    x_scale_stride0,
    x_scale_stride1,
    x_scale_stride2,
    masked_m_ptr,
    output_scale_ptr,
    output_ptr,
    problem_sizes1_ptr,
    problem_sizes2_ptr,
    m,
    k,
    n,
    num_experts,
    row_cap,
    K_SCALE_BLOCK_SIZE: tl.constexpr,
    G_BLOCK_SIZE: tl.constexpr,
    HAS_G_TAIL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    SPECULATIVE: tl.constexpr,
    WRITE_PROBLEM_SIZES: tl.constexpr,
):
    """Grid (group tiles, m-grid, experts + overflow slices): per-token-group fp8 rows to one per-tensor scale.

    Shapes: x, output [E, m, k] contiguous; x_scale [E, m, k / K_SCALE_BLOCK_SIZE] float32, any strides; masked_m [E].
    """
    pid_g, pid_m, pid_e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m_grid = tl.num_programs(1)

    # Whole scale groups: one scalar scale a group, and the payload contiguous along the fast axis.
    groups = pid_g * G_BLOCK_SIZE + tl.arange(0, G_BLOCK_SIZE)
    g_mask = groups < k // K_SCALE_BLOCK_SIZE
    k_offsets = groups[:, None] * K_SCALE_BLOCK_SIZE + tl.arange(0, K_SCALE_BLOCK_SIZE)[None, :]
    g_offsets = groups.to(tl.int64) * x_scale_stride2
    output_scale_inv = 1.0 / tl.load(output_scale_ptr).to(tl.float32)

    if pid_e < num_experts:
        live_rows = _live_rows(masked_m_ptr, pid_e, m)
        if WRITE_PROBLEM_SIZES:
            # The two tables of the grouped GEMMs ride along: one program an expert, six words.
            if pid_g == 0 and pid_m == 0:
                sizes1 = problem_sizes1_ptr + pid_e * 3
                sizes2 = problem_sizes2_ptr + pid_e * 3
                tl.store(sizes1, 2 * n)
                tl.store(sizes1 + 1, live_rows)
                tl.store(sizes1 + 2, k)
                tl.store(sizes2, k)
                tl.store(sizes2 + 1, live_rows)
                tl.store(sizes2 + 2, n)
        # Phase 1: this expert's rows below the cap.
        live_rows = tl.minimum(live_rows, row_cap)
        first_row = pid_m * ROW_BLOCK
        if SPECULATIVE:
            _requant_row(
                x_ptr,
                x_scale_ptr,
                x_scale_stride0,
                x_scale_stride1,
                output_ptr,
                m,
                k,
                pid_e,
                first_row,
                live_rows,
                output_scale_inv,
                k_offsets,
                g_offsets,
                g_mask,
                HAS_G_TAIL,
                ROW_BLOCK,
                False,
            )
            first_row += m_grid * ROW_BLOCK
        for row in tl.range(first_row, live_rows, m_grid * ROW_BLOCK):
            _requant_row(
                x_ptr,
                x_scale_ptr,
                x_scale_stride0,
                x_scale_stride1,
                output_ptr,
                m,
                k,
                pid_e,
                row,
                live_rows,
                output_scale_inv,
                k_offsets,
                g_offsets,
                g_mask,
                HAS_G_TAIL,
                ROW_BLOCK,
                True,
            )
    else:
        # Phase 2: the rows above the cap, shared by the overflow slices.
        expert_ids, rows, blocks_before, total = _overflow_list(
            masked_m_ptr, num_experts, m, row_cap, ROW_BLOCK, EXPERT_BLOCK
        )
        sharers = (tl.num_programs(2) - num_experts) * m_grid
        for index in tl.range((pid_e - num_experts) * m_grid + pid_m, total, sharers):
            expert, row, live_rows = _overflow_entry(index, expert_ids, rows, blocks_before, row_cap, ROW_BLOCK)
            _requant_row(
                x_ptr,
                x_scale_ptr,
                x_scale_stride0,
                x_scale_stride1,
                output_ptr,
                m,
                k,
                expert,
                row,
                live_rows,
                output_scale_inv,
                k_offsets,
                g_offsets,
                g_mask,
                HAS_G_TAIL,
                ROW_BLOCK,
                True,
            )


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _check_masked_rows(masked_m: torch.Tensor, num_experts: int, expected_rows: Optional[int]) -> None:
    """Checks common to the kernels: the row counts and the row estimate. Host metadata only, nothing syncs."""
    if masked_m.dtype != torch.int32:
        raise TypeError(f"masked_m: dtype is {masked_m.dtype}, must be torch.int32")
    if masked_m.dim() != 1 or masked_m.size(0) != num_experts:
        raise ValueError(f"masked_m: shape is {_shape(masked_m)}, must be [{num_experts}], one row count per expert")
    if not masked_m.is_contiguous():
        raise ValueError(f"masked_m: strides are {masked_m.stride()}, must be contiguous")
    if expected_rows is not None and expected_rows < 0:
        raise ValueError(f"expected_rows: is {expected_rows}, must be 0 or more, or None when unknown")


def _check_same_device(reference: torch.Tensor, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != reference.device:
            raise ValueError(f"{name}: is on {tensor.device}, must be on {reference.device} like the payload")


def _check_requant(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    masked_m: torch.Tensor,
    output_scale: torch.Tensor,
    output: torch.Tensor,
    expected_rows: Optional[int],
    group_size: int,
) -> None:
    if x.dim() != 3:
        raise ValueError(f"x: shape is {_shape(x)}, must be [num_experts, padded_rows, hidden]")
    if x.dtype not in _FP8_DTYPES:
        raise TypeError(f"x: dtype is {x.dtype}, must be one of {', '.join(map(str, _FP8_DTYPES))}")
    if x.size(2) % group_size:
        raise ValueError(f"x: hidden size is {x.size(2)}, must be a multiple of the group width {group_size}")
    if not x.is_contiguous():
        raise ValueError(f"x: strides are {x.stride()}, must be contiguous")
    if x_scale.dtype == torch.int32:
        raise TypeError("x_scale: int32 holds packed UE8M0 exponents, which are not float32 scales; must be torch.float32")
    if x_scale.dtype != torch.float32:
        raise TypeError(f"x_scale: dtype is {x_scale.dtype}, must be torch.float32")
    expected_shape = (x.size(0), x.size(1), x.size(2) // group_size)
    if tuple(x_scale.shape) != expected_shape:
        raise ValueError(f"x_scale: shape is {_shape(x_scale)}, must be {list(expected_shape)} for x {_shape(x)}")
    if output_scale.dtype != torch.float32:
        raise TypeError(f"output_scale: dtype is {output_scale.dtype}, must be torch.float32")
    if output_scale.numel() != 1:
        raise ValueError(f"output_scale: has {output_scale.numel()} elements, must have exactly one (per-tensor scale)")
    if output.dtype not in _FP8_DTYPES:
        raise TypeError(f"output: dtype is {output.dtype}, must be one of {', '.join(map(str, _FP8_DTYPES))}")
    if output.shape != x.shape:
        raise ValueError(f"output: shape is {_shape(output)}, must be {_shape(x)} like x")
    if not output.is_contiguous():
        raise ValueError(f"output: strides are {output.stride()}, must be contiguous")
    _check_masked_rows(masked_m, x.size(0), expected_rows)
    _check_same_device(x, x_scale=x_scale, masked_m=masked_m, output_scale=output_scale, output=output)


def _check_problem_sizes(name: str, table: torch.Tensor, num_experts: int) -> None:
    if table.dtype != torch.int32:
        raise TypeError(f"{name}: dtype is {table.dtype}, must be torch.int32")
    if tuple(table.shape) != (num_experts, 3) or not table.is_contiguous():
        raise ValueError(f"{name}: shape is {_shape(table)}, must be contiguous [{num_experts}, 3]")


def _grid(launch: MaskedRowsLaunch, columns: int, num_experts: int) -> Tuple[int, int, int]:
    return (
        triton.cdiv(columns, launch.col_block),
        launch.m_grid,
        num_experts + launch.overflow_experts,
    )


def fp8_per_token_to_per_tensor_quant_triton(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    masked_m: torch.Tensor,
    output_scale: torch.Tensor,
    output: torch.Tensor,
    expected_rows: Optional[int] = None,
    *,
    problem_sizes1: Optional[torch.Tensor] = None,
    problem_sizes2: Optional[torch.Tensor] = None,
    intermediate_size: Optional[int] = None,
    launch: Optional[MaskedRowsLaunch] = None,
) -> None:
    """Requantize DeepEP's per-token-group fp8 rows to one per-tensor scale, live rows only.

    ``output = fp8((x * x_scale) * (1 / output_scale))``, each product rounded to float32, the result saturated; rows at and
    above ``masked_m[e]`` of an expert are neither read for their value nor written.

    Args:
        x: fp8 e4m3 ``[E, M, K]``, contiguous; K a multiple of 128.
        x_scale: float32 ``[E, M, K / 128]``, any strides (DeepEP's are column-major in the last two axes).
        masked_m: int32 ``[E]``, live rows per expert.
        output_scale: float32, one element.
        output: fp8 e4m3 ``[E, M, K]``, contiguous; written in place.
        expected_rows: the dispatcher's ``expected_m``. A launch hint: any value is correct.
        problem_sizes1: int32 ``[E, 3]``, written with ``(2 * intermediate_size, rows, K)`` of the first grouped GEMM.
        problem_sizes2: int32 ``[E, 3]``, written with ``(K, rows, intermediate_size)`` of the second. Both or neither.
        intermediate_size: N of the layer; needed with the tables.
        launch: launch parameters to use instead of the chosen ones (tuning and tests).

    Raises:
        TypeError: an argument has the wrong dtype; the message begins with its name.
        ValueError: an argument has the wrong shape, layout, device or value; the message begins with its name.
    """
    # The tile spans a group with tl.arange, so the width is a power of two; DeepEP's is 128.
    group_size = 128
    _check_requant(x, x_scale, masked_m, output_scale, output, expected_rows, group_size)
    num_experts, max_rows, hidden = x.shape
    write_tables = problem_sizes1 is not None or problem_sizes2 is not None
    if write_tables:
        if problem_sizes1 is None or problem_sizes2 is None or intermediate_size is None:
            raise ValueError("problem_sizes1: needs problem_sizes2 and intermediate_size beside it, and they need it")
        _check_problem_sizes("problem_sizes1", problem_sizes1, num_experts)
        _check_problem_sizes("problem_sizes2", problem_sizes2, num_experts)
        _check_same_device(x, problem_sizes1=problem_sizes1, problem_sizes2=problem_sizes2)
    if num_experts == 0 or max_rows == 0 or hidden == 0:
        return

    num_groups = hidden // group_size
    if launch is None:
        launch = _requant_launch(num_groups, num_experts, expected_rows, max_rows, x.device)
    _fp8_per_token_quant_to_per_tensor_quant_kernel[_grid(launch, num_groups, num_experts)](
        x,
        x_scale,
        *x_scale.stride(),
        masked_m,
        output_scale,
        output,
        problem_sizes1,
        problem_sizes2,
        max_rows,
        hidden,
        intermediate_size or 0,
        num_experts,
        launch.row_cap,
        K_SCALE_BLOCK_SIZE=group_size,
        G_BLOCK_SIZE=launch.col_block,
        HAS_G_TAIL=num_groups % launch.col_block != 0,
        ROW_BLOCK=launch.row_block,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        SPECULATIVE=launch.speculative,
        WRITE_PROBLEM_SIZES=write_tables,
        num_warps=launch.num_warps,
    )


@triton.jit
def _silu_and_mul_row(
    input_ptr,
    output_ptr,
    m,
    inner_dim,
    expert,
    first_row,
    live_rows,
    scale_inv,
    columns,
    column_mask,
    fp8_max,
    HAS_TAIL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PREDICATE_LOADS: tl.constexpr,
):
    """SiLU(gate) * up of one block of rows, quantized; the one place that writes a row, for both phases.

    The order of roundings is part of the contract: SiLU in float32, rounded to the input's dtype, product in float32,
    times the inverse scale, clamped, cast.
    """
    rows = first_row + tl.arange(0, ROW_BLOCK)
    live = rows < live_rows
    row_ids = expert.to(tl.int64) * m + tl.minimum(rows, m - 1)
    gate_ptrs = input_ptr + (row_ids * (2 * inner_dim))[:, None] + columns[None, :]
    store_mask = live[:, None]
    if HAS_TAIL:
        store_mask = store_mask & column_mask[None, :]
    if PREDICATE_LOADS:
        gate = tl.load(gate_ptrs, mask=store_mask, other=0.0)
        up = tl.load(gate_ptrs + inner_dim, mask=store_mask, other=0.0)
    elif HAS_TAIL:
        gate = tl.load(gate_ptrs, mask=column_mask[None, :], other=0.0)
        up = tl.load(gate_ptrs + inner_dim, mask=column_mask[None, :], other=0.0)
    else:
        gate = tl.load(gate_ptrs)
        up = tl.load(gate_ptrs + inner_dim)
    gate = gate.to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(input_ptr.dtype.element_ty)
    scaled = (up.to(tl.float32) * gate) * scale_inv
    quantized = tl.clamp(scaled, -fp8_max, fp8_max).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + (row_ids * inner_dim)[:, None] + columns[None, :], quantized, mask=store_mask)


@triton.jit
def _silu_and_mul_masked_quant_kernel(
    input_ptr,
    output_ptr,
    masked_m_ptr,
    scale_ptr,
    scale_stride,
    m,
    inner_dim,
    num_experts,
    row_cap,
    fp8_max,
    BLOCK_N: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    SPECULATIVE: tl.constexpr,
):
    """Grid (column tiles, m-grid, experts + overflow slices): the requant's schedule over SiLU-and-multiply rows.

    Shapes: input [E, m, 2 * inner_dim] with gate first, output [E, m, inner_dim] fp8, both contiguous; scale_stride is 0
    for a per-tensor scale and 1 for one scale an expert.
    """
    pid_n, pid_m, pid_e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m_grid = tl.num_programs(1)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < inner_dim

    if pid_e < num_experts:
        # Phase 1: this expert's rows below the cap.
        live_rows = tl.minimum(_live_rows(masked_m_ptr, pid_e, m), row_cap)
        scale_inv = 1.0 / tl.load(scale_ptr + pid_e * scale_stride).to(tl.float32)
        first_row = pid_m * ROW_BLOCK
        if SPECULATIVE:
            _silu_and_mul_row(
                input_ptr,
                output_ptr,
                m,
                inner_dim,
                pid_e,
                first_row,
                live_rows,
                scale_inv,
                columns,
                column_mask,
                fp8_max,
                HAS_TAIL,
                ROW_BLOCK,
                False,
            )
            first_row += m_grid * ROW_BLOCK
        for row in tl.range(first_row, live_rows, m_grid * ROW_BLOCK):
            _silu_and_mul_row(
                input_ptr,
                output_ptr,
                m,
                inner_dim,
                pid_e,
                row,
                live_rows,
                scale_inv,
                columns,
                column_mask,
                fp8_max,
                HAS_TAIL,
                ROW_BLOCK,
                True,
            )
    else:
        # Phase 2: the rows above the cap, shared by the overflow slices.
        expert_ids, rows, blocks_before, total = _overflow_list(
            masked_m_ptr, num_experts, m, row_cap, ROW_BLOCK, EXPERT_BLOCK
        )
        sharers = (tl.num_programs(2) - num_experts) * m_grid
        for index in tl.range((pid_e - num_experts) * m_grid + pid_m, total, sharers):
            expert, row, live_rows = _overflow_entry(index, expert_ids, rows, blocks_before, row_cap, ROW_BLOCK)
            scale_inv = 1.0 / tl.load(scale_ptr + expert * scale_stride).to(tl.float32)
            _silu_and_mul_row(
                input_ptr,
                output_ptr,
                m,
                inner_dim,
                expert,
                row,
                live_rows,
                scale_inv,
                columns,
                column_mask,
                fp8_max,
                HAS_TAIL,
                ROW_BLOCK,
                True,
            )


def _check_silu(
    input: torch.Tensor,
    output: torch.Tensor,
    masked_m: torch.Tensor,
    scale: torch.Tensor,
    expected_rows: Optional[int],
) -> None:
    if input.dim() != 3:
        raise ValueError(f"input: shape is {_shape(input)}, must be [num_experts, padded_rows, 2 * inner_dim]")
    if input.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"input: dtype is {input.dtype}, must be bfloat16, float16 or float32")
    if input.size(2) % 2:
        raise ValueError(f"input: last axis is {input.size(2)}, must be even: gate and up halves")
    if not input.is_contiguous():
        raise ValueError(f"input: strides are {input.stride()}, must be contiguous")
    if output.dtype not in _FP8_DTYPES:
        raise TypeError(f"output: dtype is {output.dtype}, must be one of {', '.join(map(str, _FP8_DTYPES))}")
    expected_shape = (input.size(0), input.size(1), input.size(2) // 2)
    if tuple(output.shape) != expected_shape:
        raise ValueError(f"output: shape is {_shape(output)}, must be {list(expected_shape)} for input {_shape(input)}")
    if not output.is_contiguous():
        raise ValueError(f"output: strides are {output.stride()}, must be contiguous")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale: dtype is {scale.dtype}, must be torch.float32")
    if scale.numel() not in (1, input.size(0)) or not scale.is_contiguous():
        raise ValueError(
            f"scale: shape is {_shape(scale)}, must hold one element, or one per expert ({input.size(0)}), contiguous"
        )
    _check_masked_rows(masked_m, input.size(0), expected_rows)
    _check_same_device(input, output=output, masked_m=masked_m, scale=scale)


def silu_and_mul_masked_post_per_tensor_quant_fwd(
    input: torch.Tensor,
    output: torch.Tensor,
    masked_m: torch.Tensor,
    scale: torch.Tensor,
    expected_rows: Optional[int] = None,
    *,
    launch: Optional[MaskedRowsLaunch] = None,
) -> torch.Tensor:
    """``output = fp8(silu(gate) * up / scale)`` over the live rows of every expert, saturated.

    Args:
        input: bfloat16 (or float16, float32) ``[E, M, 2 * N]``, contiguous: gate in the first half, up in the second.
        output: fp8 e4m3 ``[E, M, N]``, contiguous; written in place.
        masked_m: int32 ``[E]``, live rows per expert.
        scale: float32, one element, or ``[E]`` with one scale per expert.
        expected_rows: the dispatcher's ``expected_m``. A launch hint: any value is correct.
        launch: launch parameters to use instead of the chosen ones (tuning and tests).

    Returns:
        ``output``.

    Raises:
        TypeError: an argument has the wrong dtype; the message begins with its name.
        ValueError: an argument has the wrong shape, layout, device or value; the message begins with its name.
    """
    _check_silu(input, output, masked_m, scale, expected_rows)
    num_experts, max_rows, inner_dim = output.shape
    if num_experts == 0 or max_rows == 0 or inner_dim == 0:
        return output
    if launch is None:
        launch = _silu_launch(inner_dim, num_experts, expected_rows, max_rows, input.device)
    _silu_and_mul_masked_quant_kernel[_grid(launch, inner_dim, num_experts)](
        input,
        output,
        masked_m,
        scale,
        0 if scale.numel() == 1 else 1,
        max_rows,
        inner_dim,
        num_experts,
        launch.row_cap,
        torch.finfo(output.dtype).max,
        BLOCK_N=launch.col_block,
        HAS_TAIL=inner_dim % launch.col_block != 0,
        ROW_BLOCK=launch.row_block,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        SPECULATIVE=launch.speculative,
        num_warps=launch.num_warps,
    )
    return output
