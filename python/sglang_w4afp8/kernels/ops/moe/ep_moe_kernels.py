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

Ideas measured on prototypes on one H200, K = 7168, us without -> with the idea ("re-tuned" is the kernel of sglang 0.5.19 -
0.5.23 in the same run, in brackets where there were two runs; the figures are those of
``benchmark/results/h200/requant_design.json``):

====================================================  ======================  ===================================
idea                                                  experts x rows, load    outcome
====================================================  ======================  ===================================
blocks of 2 - 8 rows, one round trip a block          64 x 32, skew16         kept: 7.49 -> 7.13, re-tuned 8.74
programs of their own for phase 2                     8 x 128, skew16         kept: 5.13 -> 4.88, re-tuned 6.40
first rows loaded before their count is known         64 x 4, random          kept where it wins: 2.70 -> 2.54
payload loads wait for no scale and no count          64 x 1, even            kept, two runs: 2.03 (2.21) -> 1.79 (2.17)
one flat row list for everything (persistent)         64 x 32, random         rejected: 7.11 -> 10.01
row loop unrolled by four                             256 x 32, random        rejected: 34.7 -> 35.4
next block loaded by hand before the store            64 x 8, random          rejected: 3.32 -> 4.60
evict_first on the payload                            64 x 128, random        rejected: 31.4 -> 32.4
programmatic dependent launch, foreign predecessor    64 x 1, random          rejected: 4.49 -> 4.34 for both kernels
====================================================  ======================  ===================================
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

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
# Below this many rows per expert the launch, not memory, is the limit: programs that find no row are not free, so no more
# than 1024 are started for one tile.
_REQUANT_ROWS_SATURATED = 64
_REQUANT_TARGET_PROGRAMS = 1024
# Twice the expected rows stay with their own expert: ordinary variation is then no overflow.
_REQUANT_ROW_CAP_SLACK = 2

# Phase 2 shares its rows among one extra slice of the grid for every 8 experts, and among enough of them that a hot expert
# with 16 times the mean load (14 times above its cap) leaves each program two rows.
_EXPERTS_PER_OVERFLOW_SLICE = 8
_HOT_ROWS_SHARED = 14 // 2
_OVERFLOW_SLICES_MAX = 16
# Up to this estimate a launch is a chain of latencies, and the rows of the mean are loaded before their count is known.
_SPECULATIVE_ROWS_MAX = 9

# SiLU tile: two bf16 loads of 16 bytes a lane and 8 bytes stored, over 4 warps.
_SILU_BLOCK = 1024
_SILU_NUM_WARPS = 4

# Offsets are computed in 32 bits below this many elements. The tile that an unpredicated load may reach past the last row
# is clamped to it, but the masked part of a tail tile still forms addresses, so a tile's worth stays in reserve.
_MAX_NARROW_ELEMENTS = 2**31 - 2**24

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# Exponent bytes in one int32 of packed UE8M0 scales, the format of DeepEP's dispatch for Blackwell.
_UE8M0_PER_WORD = 4


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
        speculative_rows: first row blocks that start below this row are loaded before it is known whether they are live
            (padding is always readable); 0 for none.
        overflow_first: the slices of phase 2 come before the experts in the grid, so that what takes longest starts first.
    """

    col_block: int
    m_grid: int
    row_cap: int
    row_block: int = 1
    num_warps: int = 4
    overflow_experts: int = 1
    speculative_rows: int = 0
    overflow_first: bool = False


# Read once, like Triton does where a kernel is defined; torch.compile could not trace the question.
_NVIDIA = torch.version.hip is None and not triton.knobs.runtime.interpret


def has_ptx(device: torch.device) -> bool:
    """Whether kernels on ``device`` are compiled to PTX: an NVIDIA GPU, and not Triton's interpreter."""
    return _NVIDIA and device.type == "cuda"


def _floor_pow2(value: int) -> int:
    """Largest power of two that is at most ``value``; 1 for anything below 1."""
    return 1 << (max(1, value).bit_length() - 1)


@functools.cache
def requant_warp_size(device: torch.device) -> int:
    """Lanes of one warp of ``device`` (32 on NVIDIA, 32 or 64 on AMD), read once from the device's properties."""
    if device.type != "cuda":
        return _DEFAULT_WARP_SIZE
    return torch.cuda.get_device_properties(device).warp_size


def requant_launch_geometry(
    num_groups: int,
    num_experts: int,
    group_size: int = 128,
    expected_rows: int | None = None,
    warp_size: int = _DEFAULT_WARP_SIZE,
    max_rows: int = 1 << 30,
    payload_bytes: int = 1,
) -> tuple[int, int, int]:
    """Launch hints of the requant where no measured table applies; any values give the same bytes.

    Args:
        num_groups: scale groups of one row, K / group_size.
        num_experts: local experts E.
        group_size: elements that share one scale.
        expected_rows: the dispatcher's mean of live rows per expert, ``(rows + E) // E`` of their total, or None.
        warp_size: lanes of one warp.
        max_rows: padded rows M of one expert.
        payload_bytes: bytes of one payload element: 1 for fp8, 2 for bfloat16.

    Returns:
        ``(g_block, m_grid, row_cap)``: scale groups of one program, programs that share an expert's rows, and the row from
        which an expert's rows are shared by the whole launch.
    """
    many = num_experts >= _REQUANT_MANY_EXPERTS
    bytes_per_lane = _REQUANT_BYTES_PER_LANE if many else _REQUANT_BYTES_PER_LANE_FEW_EXPERTS
    tile_elements = bytes_per_lane // payload_bytes * warp_size * _REQUANT_NUM_WARPS
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


def _overflow_experts(num_experts: int, expected_rows: int | None, m_grid: int) -> int:
    """Extra expert slices of the grid that share phase 2, by rule. Without an estimate phase 2 is empty."""
    if expected_rows is None:
        return 1
    for_hot_rows = -(-_HOT_ROWS_SHARED * expected_rows // m_grid)
    return max(1, min(_OVERFLOW_SLICES_MAX, max(num_experts // _EXPERTS_PER_OVERFLOW_SLICE, for_hot_rows)))


def _speculative_rows(expected_rows: int | None) -> int:
    """Rows loaded unseen, by rule: the mean behind the dispatcher's estimate, which is one above it."""
    if expected_rows is None or expected_rows > _SPECULATIVE_ROWS_MAX:
        return 0
    return max(1, expected_rows - 1)


# A measured table may answer before the rules do: (kernel, num_experts, columns, expected_rows, device) -> launch or None.
LaunchLookup = Callable[[str, int, int, int, torch.device], MaskedRowsLaunch | None]
_launch_lookup: LaunchLookup | None = None


def set_launch_lookup(lookup: LaunchLookup | None) -> None:
    """Install a source of measured launches, or remove it with None. Choices already made are forgotten."""
    global _launch_lookup
    _launch_lookup = lookup
    _requant_launch.cache_clear()
    _silu_launch.cache_clear()


def _measured_launch(
    kernel: str, num_experts: int, columns: int, expected_rows: int | None, max_rows: int, device: torch.device
) -> MaskedRowsLaunch | None:
    """The table's launch for this shape with its cap inside the payload, or None."""
    if _launch_lookup is None or expected_rows is None:
        return None
    launch = _launch_lookup(kernel, num_experts, columns, expected_rows, device)
    if launch is None or launch.row_cap <= max_rows:
        return launch
    return replace(launch, row_cap=max_rows)


# Cached: one captured graph always sees one choice, and an eager call pays a dictionary look-up.
@functools.lru_cache(maxsize=4096)
def _requant_launch(
    num_groups: int,
    num_experts: int,
    expected_rows: int | None,
    max_rows: int,
    device: torch.device,
    measured: bool = True,
    payload_bytes: int = 1,
) -> MaskedRowsLaunch:
    """The table's launch where there is one and ``measured`` allows it, otherwise the rule's."""
    launch = _measured_launch("requant", num_experts, num_groups, expected_rows, max_rows, device) if measured else None
    if launch is not None:
        # Measured on fp8; a wider payload keeps the bytes of a lane.
        return replace(launch, col_block=max(1, launch.col_block // payload_bytes))
    g_block, m_grid, row_cap = requant_launch_geometry(
        num_groups,
        num_experts,
        expected_rows=expected_rows,
        warp_size=requant_warp_size(device),
        max_rows=max_rows,
        payload_bytes=payload_bytes,
    )
    return MaskedRowsLaunch(
        g_block,
        m_grid,
        row_cap,
        num_warps=_REQUANT_NUM_WARPS,
        overflow_experts=_overflow_experts(num_experts, expected_rows, m_grid),
        speculative_rows=_speculative_rows(expected_rows),
    )


@functools.lru_cache(maxsize=4096)
def _silu_launch(
    inner_dim: int,
    num_experts: int,
    expected_rows: int | None,
    max_rows: int,
    device: torch.device,
    measured: bool = True,
) -> MaskedRowsLaunch:
    """The table's launch where there is one and ``measured`` allows it, otherwise the rule's."""
    launch = _measured_launch("silu", num_experts, inner_dim, expected_rows, max_rows, device) if measured else None
    if launch is not None:
        return launch
    # The row rule is the requant's: both stream the same rows of the same experts.
    _, m_grid, row_cap = requant_launch_geometry(1, num_experts, expected_rows=expected_rows, max_rows=max_rows)
    return MaskedRowsLaunch(
        min(_SILU_BLOCK, triton.next_power_of_2(inner_dim)),
        m_grid,
        row_cap,
        num_warps=_SILU_NUM_WARPS,
        overflow_experts=_overflow_experts(num_experts, expected_rows, m_grid),
        speculative_rows=_speculative_rows(expected_rows),
    )


@triton.jit
def _live_rows(count, limit):
    """A row count clamped to [0, limit], so that no program leaves the expert's block whatever the count says.

    Counts are handed around as loaded and clamped where they are used: a warp issues in order, and a clamp right behind
    the load would make everything after it wait for memory.
    """
    return tl.minimum(tl.maximum(count, 0), limit)


@triton.jit
def _tied(scale, count):
    """``scale``, in a way that lets no arithmetic on it begin before ``count`` is there.

    The count of an unseen block decides only what is stored. Left to itself an assembler loads it behind the arithmetic, and
    the program waits for memory once more. A count below zero stores nothing, so the other value is never seen.
    """
    return tl.where(count >= 0, scale, 1.0)


@triton.jit
def _place(NUM_EXPERTS: tl.constexpr, OVERFLOW_FIRST: tl.constexpr):
    """What this program works on along the grid's last axis: whether one expert's own rows; that expert; else its slice of
    phase 2."""
    place = tl.program_id(2)
    if OVERFLOW_FIRST:
        expert = place - (tl.num_programs(2) - NUM_EXPERTS)
        own, overflow_slice = expert >= 0, place
    else:
        expert = place
        own, overflow_slice = place < NUM_EXPERTS, place - NUM_EXPERTS
    return own, expert, overflow_slice


@triton.jit
def _overflow_blocks(
    masked_m_ptr,
    row_cap,
    NUM_EXPERTS: tl.constexpr,
    M: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """Expert ids, their live rows, and how many row blocks each has above the cap."""
    expert_ids = tl.arange(0, EXPERT_BLOCK)
    rows = tl.load(masked_m_ptr + expert_ids, mask=expert_ids < NUM_EXPERTS, other=0)
    rows = _live_rows(rows, M)
    return expert_ids, rows, (tl.maximum(rows - row_cap, 0) + (ROW_BLOCK - 1)) // ROW_BLOCK


@triton.jit
def _overflow_keys(expert_ids, rows, blocks):
    """One word an expert: (expert, live rows, blocks before it in the flat list), the expert in the highest bits.

    The owner of an entry is then one minimum over the experts that end after it: a reduction across warps is what a
    program of phase 2 mostly waits for, so there is one and not three. The fields hold 2^11 experts, 2^24 rows of one
    expert and 2^28 row blocks.
    """
    before = tl.cumsum(blocks) - blocks
    return (expert_ids.to(tl.int64) << 52) | (rows.to(tl.int64) << 28) | before.to(tl.int64)


@triton.jit
def _overflow_entry(index, keys, blocks, row_cap, ROW_BLOCK: tl.constexpr):
    """Entry ``index`` of the flat list as (expert, first row, live rows of that expert)."""
    before = (keys & ((1 << 28) - 1)).to(tl.int32)
    owner = tl.min(tl.where(before + blocks > index, keys, (1 << 63) - 1))
    expert = (owner >> 52).to(tl.int32)
    live = ((owner >> 28) & ((1 << 24) - 1)).to(tl.int32)
    first = row_cap + (index - (owner & ((1 << 28) - 1)).to(tl.int32)) * ROW_BLOCK
    return expert, first, live


@triton.jit
def _ue8m0_to_float32(words, groups):
    """Scale of each group from its word of four exponent bytes, lowest group in the lowest byte (OCP MX, E8M0).

    A byte b is 2^(b - 127): the exponent field of a float32. 0 is 2^-127, which has no normal float32, and 255 is NaN.
    """
    exponents = (words >> ((groups % 4) * 8).to(tl.int32)) & 0xFF
    bits = tl.where(exponents == 0, 0x00400000, exponents << 23)
    bits = tl.where(exponents == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _requant_row(
    x_ptr,
    x_scale_ptr,
    masked_m_ptr,
    output_scale_ptr,
    output_ptr,
    expert,
    first_row,
    count,
    limit,
    output_scale,
    groups,
    M: tl.constexpr,
    K: tl.constexpr,
    X_SCALE_STRIDE0: tl.constexpr,
    X_SCALE_STRIDE1: tl.constexpr,
    X_SCALE_STRIDE2: tl.constexpr,
    K_SCALE_BLOCK_SIZE: tl.constexpr,
    HAS_G_TAIL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    PACKED_X_SCALE: tl.constexpr,
    UNSEEN: tl.constexpr,
):
    """Requantize one block of rows; the one place that writes a row, so both phases write the same bytes.

    The first row of a block is live, or UNSEEN: such rows are read whether they are live or not (always inside the expert's
    block), together with the count that decides what is stored, instead of behind it. Returns the count and the output's
    scale, which an UNSEEN block loads itself: where those words are at hand before the payload's loads, as values of another
    basic block, some assemblers wait for them first.
    """
    rows = first_row + tl.arange(0, ROW_BLOCK)
    # Only an unseen row can be past the block.
    read_rows = tl.minimum(rows, M - 1) if UNSEEN else rows
    wide_expert, wide_groups = expert, groups
    if WIDE_OFFSETS:
        wide_expert = expert.to(tl.int64)
        read_rows = read_rows.to(tl.int64)
        wide_groups = groups.to(tl.int64)
    columns = wide_groups[:, None] * K_SCALE_BLOCK_SIZE + tl.arange(0, K_SCALE_BLOCK_SIZE)[None, :]
    offsets = ((wide_expert * M + read_rows) * K)[:, None, None] + columns[None, :, :]
    if HAS_X_SCALE:
        scale_rows = wide_expert * X_SCALE_STRIDE0 + read_rows * X_SCALE_STRIDE1
        scale_columns = wide_groups // 4 if PACKED_X_SCALE else wide_groups
        scale_ptrs = x_scale_ptr + scale_rows[:, None] + (scale_columns * X_SCALE_STRIDE2)[None, :]
    g_mask = groups < K // K_SCALE_BLOCK_SIZE
    if not UNSEEN and ROW_BLOCK > 1:
        live = rows < _live_rows(count, limit)
        load_mask = live[:, None, None]
        scale_mask = live[:, None]
        if HAS_G_TAIL:
            load_mask = load_mask & g_mask[None, :, None]
            scale_mask = scale_mask & g_mask[None, :]
        hidden = tl.load(x_ptr + offsets, mask=load_mask, other=0.0)
        if HAS_X_SCALE:
            scale = tl.load(scale_ptrs, mask=scale_mask, other=0)
    elif HAS_G_TAIL:
        hidden = tl.load(x_ptr + offsets, mask=g_mask[None, :, None], other=0.0)
        if HAS_X_SCALE:
            scale = tl.load(scale_ptrs, mask=g_mask[None, :], other=0)
    else:
        hidden = tl.load(x_ptr + offsets)
        if HAS_X_SCALE:
            scale = tl.load(scale_ptrs)
    if UNSEEN:
        count = tl.load(masked_m_ptr + expert)
        output_scale = _tied(tl.load(output_scale_ptr), count)
    # Here and not where it was loaded: a warp that waits for the per-tensor scale cannot issue the loads above.
    output_scale_inv = 1.0 / output_scale
    scaled = hidden.to(tl.float32)
    if HAS_X_SCALE:
        if PACKED_X_SCALE:
            scale = _ue8m0_to_float32(scale, groups[None, :])
        scaled = scaled * scale.to(tl.float32)[:, :, None]
    quantized = (scaled * output_scale_inv).to(output_ptr.dtype.element_ty)
    store_mask = (rows < _live_rows(count, limit))[:, None, None]
    if HAS_G_TAIL:
        store_mask = store_mask & g_mask[None, :, None]
    tl.store(output_ptr + offsets, quantized, mask=store_mask)
    return count, output_scale


# Hints change from one captured batch size to the next: one kernel serves them all.
@triton.jit(do_not_specialize=["n", "row_cap", "speculative_rows"])
def _fp8_per_token_quant_to_per_tensor_quant_kernel(
    x_ptr,
    x_scale_ptr,
    masked_m_ptr,
    output_scale_ptr,
    output_ptr,
    problem_sizes1_ptr,
    problem_sizes2_ptr,
    n,
    row_cap,
    speculative_rows,
    NUM_EXPERTS: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    X_SCALE_STRIDE0: tl.constexpr,
    X_SCALE_STRIDE1: tl.constexpr,
    X_SCALE_STRIDE2: tl.constexpr,
    K_SCALE_BLOCK_SIZE: tl.constexpr,
    G_BLOCK_SIZE: tl.constexpr,
    HAS_G_TAIL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    SPECULATIVE: tl.constexpr,
    OVERFLOW_FIRST: tl.constexpr,
    WRITE_PROBLEM_SIZES: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    PACKED_X_SCALE: tl.constexpr,
):
    """Grid (group tiles, m-grid, experts + overflow slices): per-token-group fp8 rows to one per-tensor scale.

    Shapes: x, output [NUM_EXPERTS, M, K] contiguous; x_scale [NUM_EXPERTS, M, K / K_SCALE_BLOCK_SIZE] float32, any strides,
    with PACKED_X_SCALE int32 words of four E8M0 exponents, and without HAS_X_SCALE none (x is then a plain bfloat16
    payload); masked_m [NUM_EXPERTS]. Shapes and strides are constants of the kernel: a server has one set of them, and at two
    microseconds a launch the address arithmetic before the first load is a part of the time.
    """
    pid_g, pid_m = tl.program_id(0), tl.program_id(1)
    own, pid_e, overflow_slice = _place(NUM_EXPERTS, OVERFLOW_FIRST)
    m_grid = tl.num_programs(1)
    # Whole scale groups: one scalar scale a group, and the payload contiguous along the fast axis.
    groups = pid_g * G_BLOCK_SIZE + tl.arange(0, G_BLOCK_SIZE)

    if own:
        # Phase 1: this expert's rows below the cap.
        limit = tl.minimum(row_cap, M)
        first_row = pid_m * ROW_BLOCK
        unseen = first_row < speculative_rows if SPECULATIVE else False
        if unseen:
            count, output_scale = _requant_row(
                x_ptr,
                x_scale_ptr,
                masked_m_ptr,
                output_scale_ptr,
                output_ptr,
                pid_e,
                first_row,
                0,
                limit,
                1.0,
                groups,
                M,
                K,
                X_SCALE_STRIDE0,
                X_SCALE_STRIDE1,
                X_SCALE_STRIDE2,
                K_SCALE_BLOCK_SIZE,
                HAS_G_TAIL,
                ROW_BLOCK,
                WIDE_OFFSETS,
                HAS_X_SCALE,
                PACKED_X_SCALE,
                True,
            )
            first_row += m_grid * ROW_BLOCK
        else:
            count, output_scale = tl.load(masked_m_ptr + pid_e), tl.load(output_scale_ptr)
        if WRITE_PROBLEM_SIZES:
            # The two tables of the grouped GEMMs ride along: one program an expert, six words.
            first = (pid_g == 0) & (pid_m == 0)
            sizes1 = problem_sizes1_ptr + pid_e * 3
            sizes2 = problem_sizes2_ptr + pid_e * 3
            live_rows = _live_rows(count, M)
            tl.store(sizes1, 2 * n, mask=first)
            tl.store(sizes1 + 1, live_rows, mask=first)
            tl.store(sizes1 + 2, K, mask=first)
            tl.store(sizes2, K, mask=first)
            tl.store(sizes2 + 1, live_rows, mask=first)
            tl.store(sizes2 + 2, n, mask=first)
        for row in tl.range(first_row, _live_rows(count, limit), m_grid * ROW_BLOCK):
            _requant_row(
                x_ptr,
                x_scale_ptr,
                masked_m_ptr,
                output_scale_ptr,
                output_ptr,
                pid_e,
                row,
                count,
                limit,
                output_scale,
                groups,
                M,
                K,
                X_SCALE_STRIDE0,
                X_SCALE_STRIDE1,
                X_SCALE_STRIDE2,
                K_SCALE_BLOCK_SIZE,
                HAS_G_TAIL,
                ROW_BLOCK,
                WIDE_OFFSETS,
                HAS_X_SCALE,
                PACKED_X_SCALE,
                False,
            )
    else:
        # Phase 2: the rows above the cap, shared by the overflow slices.
        output_scale = tl.load(output_scale_ptr)
        expert_ids, rows, blocks = _overflow_blocks(masked_m_ptr, row_cap, NUM_EXPERTS, M, ROW_BLOCK, EXPERT_BLOCK)
        total = tl.sum(blocks)
        first_index = overflow_slice * m_grid + pid_m
        # With even load there is nothing to share: leave before the prefix sum, which phase 1 would be waiting for.
        if first_index >= total:
            return
        keys = _overflow_keys(expert_ids, rows, blocks)
        for index in tl.range(first_index, total, (tl.num_programs(2) - NUM_EXPERTS) * m_grid):
            expert, row, count = _overflow_entry(index, keys, blocks, row_cap, ROW_BLOCK)
            _requant_row(
                x_ptr,
                x_scale_ptr,
                masked_m_ptr,
                output_scale_ptr,
                output_ptr,
                expert,
                row,
                count,
                M,
                output_scale,
                groups,
                M,
                K,
                X_SCALE_STRIDE0,
                X_SCALE_STRIDE1,
                X_SCALE_STRIDE2,
                K_SCALE_BLOCK_SIZE,
                HAS_G_TAIL,
                ROW_BLOCK,
                WIDE_OFFSETS,
                HAS_X_SCALE,
                PACKED_X_SCALE,
                False,
            )


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _check_masked_rows(masked_m: torch.Tensor, num_experts: int, expected_rows: int | None) -> None:
    """Checks common to the kernels: the row counts and the row estimate. Host metadata only, nothing syncs."""
    if masked_m.dtype != torch.int32:
        raise TypeError(f"masked_m: dtype is {masked_m.dtype}, must be torch.int32")
    if masked_m.dim() != 1 or masked_m.size(0) != num_experts:
        raise ValueError(f"masked_m: shape is {_shape(masked_m)}, must be [{num_experts}], one row count per expert")
    if not masked_m.is_contiguous():
        raise ValueError(f"masked_m: strides are {masked_m.stride()}, must be contiguous")
    if expected_rows is not None and expected_rows < 0:
        raise ValueError(f"expected_rows: is {expected_rows}, must be 0 or more, or None when unknown")


def check_same_device(reference: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Refuse operands that are on another device than the payload, by their names.

    Raises:
        ValueError: one is; the message begins with its name.
    """
    for name, tensor in tensors.items():
        if tensor.device != reference.device:
            raise ValueError(f"{name}: is on {tensor.device}, must be on {reference.device} like the payload")


def _check_requant(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    masked_m: torch.Tensor,
    output_scale: torch.Tensor,
    output: torch.Tensor,
    expected_rows: int | None,
    group_size: int,
) -> None:
    if x.dim() != 3:
        raise ValueError(f"x: shape is {_shape(x)}, must be [num_experts, padded_rows, hidden]")
    if x_scale is None:
        if x.dtype in _FP8_DTYPES:
            raise ValueError(f"x_scale: is None, must be the scales of the {x.dtype} payload")
        if x.dtype != torch.bfloat16:
            raise TypeError(f"x: dtype is {x.dtype}, must be torch.bfloat16 where there is no x_scale")
    elif x.dtype not in _FP8_DTYPES:
        raise TypeError(f"x: dtype is {x.dtype}, must be one of {', '.join(map(str, _FP8_DTYPES))} with an x_scale")
    if x.size(2) % group_size:
        raise ValueError(f"x: hidden size is {x.size(2)}, must be a multiple of the group width {group_size}")
    if not x.is_contiguous():
        raise ValueError(f"x: strides are {x.stride()}, must be contiguous")
    if x_scale is not None:
        _check_x_scale(x, x_scale, x.size(2) // group_size)
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
    check_same_device(x, masked_m=masked_m, output_scale=output_scale, output=output)


def _check_x_scale(x: torch.Tensor, x_scale: torch.Tensor, num_groups: int) -> None:
    packed = x_scale.dtype == torch.int32
    if not packed and x_scale.dtype != torch.float32:
        raise TypeError(f"x_scale: dtype is {x_scale.dtype}, must be torch.float32, or torch.int32 for packed UE8M0")
    columns = -(-num_groups // _UE8M0_PER_WORD) if packed else num_groups
    expected_shape = (x.size(0), x.size(1), columns)
    if tuple(x_scale.shape) != expected_shape:
        text = f"x_scale: shape is {_shape(x_scale)}, must be {list(expected_shape)} for x {_shape(x)}"
        if packed:
            # Most likely one word a group, which is no layout of any dispatcher: the dtype is what is wrong.
            raise TypeError(f"{text}, as int32 holds {_UE8M0_PER_WORD} packed UE8M0 exponents a word")
        raise ValueError(text)
    check_same_device(x, x_scale=x_scale)


def _check_problem_sizes(name: str, table: torch.Tensor, num_experts: int) -> None:
    if table.dtype != torch.int32:
        raise TypeError(f"{name}: dtype is {table.dtype}, must be torch.int32")
    if tuple(table.shape) != (num_experts, 3) or not table.is_contiguous():
        raise ValueError(f"{name}: shape is {_shape(table)}, must be contiguous [{num_experts}, 3]")


def _grid(launch: MaskedRowsLaunch, columns: int, num_experts: int) -> tuple[int, int, int]:
    return (
        triton.cdiv(columns, launch.col_block),
        launch.m_grid,
        num_experts + launch.overflow_experts,
    )


# torch.compile calls it as it is: choosing a launch is host code with caches, which a trace would freeze.
@torch.compiler.disable
def fp8_per_token_to_per_tensor_quant_triton(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    masked_m: torch.Tensor,
    output_scale: torch.Tensor,
    output: torch.Tensor,
    expected_rows: int | None = None,
    *,
    problem_sizes1: torch.Tensor | None = None,
    problem_sizes2: torch.Tensor | None = None,
    intermediate_size: int | None = None,
    launch: MaskedRowsLaunch | None = None,
) -> None:
    """Requantize DeepEP's per-token-group fp8 rows to one per-tensor scale, live rows only.

    ``output = fp8((x * x_scale) * (1 / output_scale))``, each product rounded to float32, the result saturated; rows at and
    above ``masked_m[e]`` of an expert are neither read for their value nor written. NaN in payload or scale gives NaN. A
    bfloat16 payload has no scales: ``output = fp8(x * (1 / output_scale))``, one rounding.

    Args:
        x: fp8 e4m3 ``[E, M, K]``, contiguous; K a multiple of 128. Or bfloat16, with ``x_scale`` None.
        x_scale: float32 ``[E, M, K / 128]``, any strides (DeepEP's are column-major in the last two axes). Or int32
            ``[E, M, ceil(K / 512)]``, any strides: packed UE8M0, four exponent bytes a word, the lowest group in the
            lowest byte; a byte b is ``2^(b - 127)`` and 255 is NaN. None for a bfloat16 payload.
        masked_m: int32 ``[E]``, live rows per expert; counts outside of ``[0, M]`` are clamped to it.
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
        check_same_device(x, problem_sizes1=problem_sizes1, problem_sizes2=problem_sizes2)
    if num_experts == 0 or max_rows == 0 or hidden == 0:
        return

    num_groups = hidden // group_size
    if launch is None:
        launch = _requant_launch(
            num_groups, num_experts, expected_rows, max_rows, x.device, payload_bytes=x.element_size()
        )
    scale_strides, furthest_scale = (0, 0, 0), 0
    if x_scale is not None:
        scale_strides = x_scale.stride()
        furthest_scale = sum((size - 1) * stride for size, stride in zip(x_scale.shape, scale_strides, strict=True))
    _fp8_per_token_quant_to_per_tensor_quant_kernel[_grid(launch, num_groups, num_experts)](
        x,
        x_scale,
        masked_m,
        output_scale,
        output,
        problem_sizes1,
        problem_sizes2,
        intermediate_size or 0,
        launch.row_cap,
        launch.speculative_rows,
        NUM_EXPERTS=num_experts,
        M=max_rows,
        K=hidden,
        X_SCALE_STRIDE0=scale_strides[0],
        X_SCALE_STRIDE1=scale_strides[1],
        X_SCALE_STRIDE2=scale_strides[2],
        K_SCALE_BLOCK_SIZE=group_size,
        G_BLOCK_SIZE=launch.col_block,
        HAS_G_TAIL=num_groups % launch.col_block != 0,
        ROW_BLOCK=launch.row_block,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        WIDE_OFFSETS=max(x.numel(), furthest_scale + 1) > _MAX_NARROW_ELEMENTS,
        SPECULATIVE=launch.speculative_rows > 0,
        OVERFLOW_FIRST=launch.overflow_first,
        WRITE_PROBLEM_SIZES=write_tables,
        HAS_X_SCALE=x_scale is not None,
        PACKED_X_SCALE=x_scale is not None and x_scale.dtype == torch.int32,
        num_warps=launch.num_warps,
    )


# SiLU(gate) * up of two columns: $0, $1 float32 products, $2 and $3 the bfloat16 pairs of gate and up. The lower half of a
# word is the first column, and a bfloat16 is the upper half of a float32.
_SILU_AND_MUL_PAIR_PTX = tl.constexpr("""{
    .reg .b32 g0, g1, u0, u1, d0, d1, s;
    shl.b32 g0, $2, 16;
    and.b32 g1, $2, 0xffff0000;
    shl.b32 u0, $3, 16;
    and.b32 u1, $3, 0xffff0000;
    mul.rn.f32 d0, g0, 0fBFB8AA3B;
    mul.rn.f32 d1, g1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 d0, d0;
    ex2.approx.ftz.f32 d1, d1;
    fma.rn.f32 d0, d0, 0f3E800000, 0f3E800000;
    fma.rn.f32 d1, d1, 0f3E800000, 0f3E800000;
    rcp.approx.ftz.f32 d0, d0;
    rcp.approx.ftz.f32 d1, d1;
    mul.rn.f32 g0, g0, 0f3E800000;
    mul.rn.f32 g1, g1, 0f3E800000;
    mul.rn.f32 g0, g0, d0;
    mul.rn.f32 g1, g1, d1;
    cvt.rn.bf16x2.f32 s, g1, g0;
    shl.b32 g0, s, 16;
    and.b32 g1, s, 0xffff0000;
    mul.rn.f32 $0, u0, g0;
    mul.rn.f32 $1, u1, g1;
}""")


@triton.jit
def _silu_and_mul_bfloat16(gate, up):
    """``bf16(silu(gate)) * up`` in float32, of bfloat16 tensors: the bits of the plain expression in fewer instructions.

    The plain expression costs three operations of the slow unit an element (exponential, reciprocal, and a conversion of
    one value), and guards both approximations against ranges that cannot occur here. ``1 + exp(-gate)`` is at least 1, so
    only its upper end needs care: both sides of the quotient are scaled by a quarter, which is exact and keeps the
    reciprocal out of the subnormal range that it would flush. One block for gate and up, because between two the compiler
    sinks the load of ``up`` behind the arithmetic on ``gate``.
    """
    return tl.inline_asm_elementwise(
        _SILU_AND_MUL_PAIR_PTX, "=r,=r,r,r", [gate, up], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def _silu_and_mul_row(
    input_ptr,
    output_ptr,
    masked_m_ptr,
    scale_ptr,
    expert,
    first_row,
    count,
    limit,
    scale,
    columns,
    M: tl.constexpr,
    N: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    PTX_MATH: tl.constexpr,
    UNSEEN: tl.constexpr,
):
    """SiLU(gate) * up of one block of rows, quantized; the one place that writes a row, for both phases.

    The order of roundings is part of the contract: SiLU in float32, rounded to the input's dtype, product in float32,
    times the inverse scale, clamped, cast. UNSEEN, and what is returned, as in :func:`_requant_row`.
    """
    rows = first_row + tl.arange(0, ROW_BLOCK)
    read_rows = tl.minimum(rows, M - 1) if UNSEEN else rows
    wide_expert = expert
    if WIDE_OFFSETS:
        wide_expert = expert.to(tl.int64)
        read_rows = read_rows.to(tl.int64)
    row_ids = wide_expert * M + read_rows
    gate_ptrs = input_ptr + (row_ids * (2 * N))[:, None] + columns[None, :]
    column_mask = columns < N
    if not UNSEEN and ROW_BLOCK > 1:
        load_mask = (rows < _live_rows(count, limit))[:, None]
        if HAS_TAIL:
            load_mask = load_mask & column_mask[None, :]
        gate = tl.load(gate_ptrs, mask=load_mask, other=0.0)
        up = tl.load(gate_ptrs + N, mask=load_mask, other=0.0)
    elif HAS_TAIL:
        gate = tl.load(gate_ptrs, mask=column_mask[None, :], other=0.0)
        up = tl.load(gate_ptrs + N, mask=column_mask[None, :], other=0.0)
    else:
        gate = tl.load(gate_ptrs)
        up = tl.load(gate_ptrs + N)
    if UNSEEN:
        count = tl.load(masked_m_ptr + expert)
        scale = _tied(tl.load(scale_ptr + expert * SCALE_STRIDE), count)
    # Here and not where it was loaded: a warp that waits for the scale cannot issue the loads above.
    scale_inv = 1.0 / scale
    if PTX_MATH:
        # The conversion to fp8 saturates on NVIDIA and keeps NaN.
        quantized = (_silu_and_mul_bfloat16(gate, up) * scale_inv).to(output_ptr.dtype.element_ty)
    else:
        gate = gate.to(tl.float32)
        gate = (gate / (1 + tl.exp(-gate))).to(input_ptr.dtype.element_ty)
        scaled = (up.to(tl.float32) * gate) * scale_inv
        # NaN must stay NaN: by default the clamp would make a number of it.
        clamped = tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        quantized = clamped.to(output_ptr.dtype.element_ty)
    store_mask = (rows < _live_rows(count, limit))[:, None]
    if HAS_TAIL:
        store_mask = store_mask & column_mask[None, :]
    tl.store(output_ptr + (row_ids * N)[:, None] + columns[None, :], quantized, mask=store_mask)
    return count, scale


# Hints change from one captured batch size to the next: one kernel serves them all.
@triton.jit(do_not_specialize=["row_cap", "speculative_rows"])
def _silu_and_mul_masked_quant_kernel(
    input_ptr,
    output_ptr,
    masked_m_ptr,
    scale_ptr,
    row_cap,
    speculative_rows,
    NUM_EXPERTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    SPECULATIVE: tl.constexpr,
    OVERFLOW_FIRST: tl.constexpr,
    PTX_MATH: tl.constexpr,
):
    """Grid (column tiles, m-grid, experts + overflow slices): the requant's schedule over SiLU-and-multiply rows.

    Shapes: input [NUM_EXPERTS, M, 2 * N] with gate first, output [NUM_EXPERTS, M, N] fp8, both contiguous; SCALE_STRIDE is
    0 for a per-tensor scale and 1 for one scale an expert.
    """
    pid_n, pid_m = tl.program_id(0), tl.program_id(1)
    own, pid_e, overflow_slice = _place(NUM_EXPERTS, OVERFLOW_FIRST)
    m_grid = tl.num_programs(1)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)

    if own:
        # Phase 1: this expert's rows below the cap.
        limit = tl.minimum(row_cap, M)
        first_row = pid_m * ROW_BLOCK
        unseen = first_row < speculative_rows if SPECULATIVE else False
        if unseen:
            count, scale = _silu_and_mul_row(
                input_ptr,
                output_ptr,
                masked_m_ptr,
                scale_ptr,
                pid_e,
                first_row,
                0,
                limit,
                1.0,
                columns,
                M,
                N,
                SCALE_STRIDE,
                FP8_MAX,
                HAS_TAIL,
                ROW_BLOCK,
                WIDE_OFFSETS,
                PTX_MATH,
                True,
            )
            first_row += m_grid * ROW_BLOCK
        else:
            count, scale = tl.load(masked_m_ptr + pid_e), tl.load(scale_ptr + pid_e * SCALE_STRIDE)
        for row in tl.range(first_row, _live_rows(count, limit), m_grid * ROW_BLOCK):
            _silu_and_mul_row(
                input_ptr,
                output_ptr,
                masked_m_ptr,
                scale_ptr,
                pid_e,
                row,
                count,
                limit,
                scale,
                columns,
                M,
                N,
                SCALE_STRIDE,
                FP8_MAX,
                HAS_TAIL,
                ROW_BLOCK,
                WIDE_OFFSETS,
                PTX_MATH,
                False,
            )
    else:
        # Phase 2: the rows above the cap, shared by the overflow slices.
        expert_ids, rows, blocks = _overflow_blocks(masked_m_ptr, row_cap, NUM_EXPERTS, M, ROW_BLOCK, EXPERT_BLOCK)
        total = tl.sum(blocks)
        first_index = overflow_slice * m_grid + pid_m
        # With even load there is nothing to share: leave before the prefix sum, which phase 1 would be waiting for.
        if first_index >= total:
            return
        keys = _overflow_keys(expert_ids, rows, blocks)
        for index in tl.range(first_index, total, (tl.num_programs(2) - NUM_EXPERTS) * m_grid):
            expert, row, count = _overflow_entry(index, keys, blocks, row_cap, ROW_BLOCK)
            scale = tl.load(scale_ptr + expert * SCALE_STRIDE)
            _silu_and_mul_row(
                input_ptr,
                output_ptr,
                masked_m_ptr,
                scale_ptr,
                expert,
                row,
                count,
                M,
                scale,
                columns,
                M,
                N,
                SCALE_STRIDE,
                FP8_MAX,
                HAS_TAIL,
                ROW_BLOCK,
                WIDE_OFFSETS,
                PTX_MATH,
                False,
            )


def _check_silu(
    input: torch.Tensor,
    output: torch.Tensor,
    masked_m: torch.Tensor,
    scale: torch.Tensor,
    expected_rows: int | None,
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
    check_same_device(input, output=output, masked_m=masked_m, scale=scale)


# torch.compile calls it as it is: choosing a launch is host code with caches, which a trace would freeze.
@torch.compiler.disable
def silu_and_mul_masked_post_per_tensor_quant_fwd(
    input: torch.Tensor,
    output: torch.Tensor,
    masked_m: torch.Tensor,
    scale: torch.Tensor,
    expected_rows: int | None = None,
    *,
    launch: MaskedRowsLaunch | None = None,
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
        launch.row_cap,
        launch.speculative_rows,
        NUM_EXPERTS=num_experts,
        M=max_rows,
        N=inner_dim,
        SCALE_STRIDE=0 if scale.numel() == 1 else 1,
        FP8_MAX=torch.finfo(output.dtype).max,
        BLOCK_N=launch.col_block,
        HAS_TAIL=inner_dim % launch.col_block != 0,
        ROW_BLOCK=launch.row_block,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        WIDE_OFFSETS=input.numel() > _MAX_NARROW_ELEMENTS,
        SPECULATIVE=launch.speculative_rows > 0,
        OVERFLOW_FIRST=launch.overflow_first,
        # Works on pairs of columns; a tile is a power of two, so only that of one column and one row has none.
        PTX_MATH=has_ptx(input.device) and input.dtype == torch.bfloat16 and launch.col_block * launch.row_block > 1,
        num_warps=launch.num_warps,
    )
    return output
