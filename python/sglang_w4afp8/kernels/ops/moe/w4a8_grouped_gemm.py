"""Masked W4A8 grouped GEMMs in Triton that take DeepEP's payload as it is: a layer in two launches.

The activation's scale groups and the weight's are both 128 wide, so ``acc += dot(w_g, x_g) * w_scale_g * x_scale_g`` needs no
requant before it and no second rounding of the activation. The first GEMM computes a block of gate rows and the up rows that
belong to it side by side, so SiLU, product and quantisation happen in its epilogue and the bf16 intermediate never reaches
memory.

Weights are regrouped in place when they have been loaded (:func:`regroup_weights`, undone by :func:`restore_weights`):

* tiles ``[E, N / block_n, K / 128, block_n, 64]`` bytes, so that a tile is one contiguous piece of memory for the bulk copy
  engine; for the first GEMM a block of gate rows is followed by its up rows;
* inside the 64 bytes of one row and group, low nibbles are the first and high nibbles the second 64 values of the group, each
  in natural order: both halves then meet the activation as DeepEP wrote it;
* a nibble holds its value plus 8.

A nibble alone in a byte is an e4m3 subnormal, ``(value + 8) / 512``: unpacking is a mask and a shift, and what the offset adds
to a product is ``8 / 512`` times the sum of the activations, which the tensor cores compute with a constant tile. That takes
far fewer instructions than a look-up and one matrix product more, so it is meant for few rows (see ``look_up`` below).

A third kernel computes plain products from the same weights over rows that stand one expert after another: what the engine's
prefill calls for. It needs no second copy of the weights and no scratch, and its speed is that of its tiles, not CUTLASS's.

Used where ``SGLANG_W4AFP8_BACKEND`` says so (``srt/layers/moe/two_kernels.py``).

What limits it, on an H200 with 64 experts of DeepSeek-V3 (``benchmark/results/h200``: times in ``two_kernels.json``, counters
in ``two_kernels_ncu.json``). Up to 8 rows an expert it is memory: both kernels read their weights once at 78 - 82% of the
DRAM's peak, with 17 - 30% of the warps that a multiprocessor could hold and half of its issue slots busy. From 32 rows on it is
the chain from a group's bytes to its scaled sums: DRAM at 64 - 68% (23 - 26% at 128 rows), issue slots still half busy, and no
warp ready in half of the cycles, because the sums leave registers for only two or three programs a multiprocessor.

Version by version, the whole layer:

* A program walks all rows of its expert (``two_kernels_serial_rows.json``): 357 us at one row, 366 at 8, even load; but 691
  at 8 rows where one expert has 16 times the mean. A second step over an expert's rows reads its weights again and nobody
  shares the work, so tiles had to be as large as the largest expert: 447 at 16 rows.
* Blocks of rows of all experts in one list, which any grid walks: 382 us in that skewed case, and 385 at 16 rows. It costs
  2 - 3% at even load: every program looks at all row counts, and an expert is no longer known to be the same in all lanes, so
  that addresses take registers, too many in the first kernel's tiles of 16 rows for three programs a multiprocessor. The launch
  caps them at 168, which spills nothing (``test_gemm_codegen.py``).
* Triton 3.8 reduces over 64 experts and more through shared memory, after which the assembler took the walk over blocks for
  divergent and ran the matrix products one by one: 3 - 14% slower than 3.6 up to 8 rows, 21 - 34% from 32 rows on
  (``two_kernels_shipped_triton38_one_by_one.json``). What the walk hangs on comes from the first lane there now
  (``_first_lanes``): at most 8% slower than 3.6. With 3.6 and 3.7, and with up to 32 experts, that changes no instruction of
  the shipped launches (``test_tritons.py``, ``test_gemm_codegen.py``).

Rejected, by the wide search (``two_kernels_wide.search.json``, 64 experts, up to 32 rows): eight warps, tiles of 64 columns,
two scale groups a step in tiles of more than 8 rows; five stages gain nothing. With 8 experts tiles of 128 columns are too few
to fill the GPU; in tiles of 64 columns the layer is ahead of CUTLASS in 10 of 12 measured cells and 4 - 6% behind in two, at 32
and 128 rows of random load.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import check_same_device, has_ptx

GROUP_SIZE = 128
_HALF = GROUP_SIZE // 2

# What a code of the offset form counts for: an e4m3 subnormal is a multiple of 2^-9.
_OFFSET_STEP = tl.constexpr(512.0)
_OFFSET = 8

# Four bytes of two nibbles to two words of four e4m3 codes each, low nibbles first.
_SPLIT_WORD = tl.constexpr("""
{
    .reg .b32 shifted;
    and.b32 $0, $2, 0x0F0F0F0F;
    shr.u32 shifted, $2, 4;
    and.b32 $1, shifted, 0x0F0F0F0F;
}
""")

# The same with the values themselves. `prmt` picks bytes by nibbles: three bits of a code choose among eight magnitudes, once
# for values -8..-1 and once for 0..7, and its top bit then chooses between the two; two more bring the low nibbles together.
_LOOK_UP_WORD = tl.constexpr("""
{
    .reg .b32 index, top, index_high, top_high, positive, negative, first, second;
    and.b32 index, $2, 0x77777777;
    shr.u32 top, $2, 1;
    and.b32 top, top, 0x44444444;
    or.b32 top, top, 0x32103210;
    shr.u32 index_high, index, 16;
    shr.u32 top_high, top, 16;
    prmt.b32 positive, 0x44403800, 0x4E4C4A48, index;
    prmt.b32 negative, 0xCACCCED0, 0xB8C0C4C8, index;
    prmt.b32 first, negative, positive, top;
    prmt.b32 positive, 0x44403800, 0x4E4C4A48, index_high;
    prmt.b32 negative, 0xCACCCED0, 0xB8C0C4C8, index_high;
    prmt.b32 second, negative, positive, top_high;
    prmt.b32 $0, first, second, 0x6420;
    prmt.b32 $1, first, second, 0x7531;
}
""")


@dataclass(frozen=True)
class GroupedGemmLaunch:
    """How one grouped GEMM is launched; ``block_n`` is part of the weights' layout, the others are hints.

    Attributes:
        block_n: output columns of one program (gate columns in the first GEMM); a power of two that divides N.
        block_m: rows of one step over an expert's rows; a power of two, 8 or more.
        groups_per_step: scale groups of one iteration of the main loop; divides K / 128.
        num_warps: warps of one program.
        num_stages: iterations whose loads are in flight.
        look_up: weights are unpacked by a look-up and not as offsets: more instructions, and a third to a half fewer matrix
            products, which is what counts with many rows.
        max_registers: most registers a thread may take, which decides how many programs share a multiprocessor; None: as
            many as the compiler likes.
    """

    block_n: int = 64
    block_m: int = 16
    groups_per_step: int = 1
    num_warps: int = 4
    num_stages: int = 4
    look_up: bool = False
    max_registers: int | None = None


@dataclass(frozen=True)
class TileLayout:
    """How one weight and its scales lie in memory after :func:`regroup_weights`; the arguments are those it was called with."""

    block_n: int
    gate_up: bool


def _nibble_order() -> torch.Tensor:
    """Int64 ``[128]``: which of a group's values stands in each nibble, low nibble of the first byte first."""
    values = torch.arange(GROUP_SIZE)
    return torch.stack((values[:_HALF], values[_HALF:]), dim=1).flatten()


def _recode_nibbles(packed: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., 64]`` with their nibbles (low first) taken in ``order``, and between two's complement and offset form.

    The two forms differ in the top bit, so one function goes either way.
    """
    codes = packed.view(torch.uint8) ^ (_OFFSET * 0x11)
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)[..., order.to(packed.device)]
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).view(torch.int8)


def _check_weights(w_q: torch.Tensor, w_scale: torch.Tensor, block_n: int, gate_up: bool) -> tuple[int, int, int]:
    if w_q.dtype != torch.int8:
        raise TypeError(f"w_q: dtype is {w_q.dtype}, must be torch.int8 (two int4 values a byte)")
    if w_q.dim() != 3 or not w_q.is_contiguous():
        raise ValueError(f"w_q: shape is {list(w_q.shape)}, must be contiguous [E, N, K / 2]")
    num_experts, n, half_k = w_q.shape
    columns = n // 2 if gate_up else n
    if columns % block_n:
        raise ValueError(
            f"w_q: has {columns} output columns{' a half' if gate_up else ''}, must be a multiple of {block_n}"
        )
    if half_k % _HALF:
        raise ValueError(f"w_q: packs {2 * half_k} input columns, must be a multiple of {GROUP_SIZE}")
    groups = half_k // _HALF
    if w_scale.numel() != num_experts * n * groups or not w_scale.is_contiguous():
        raise ValueError(f"w_scale: shape is {list(w_scale.shape)}, must hold one contiguous scale a group of w_q")
    return num_experts, n, groups


def _interleave(groups: int) -> int:
    # The engine interleaves the scales of four groups where their number allows it.
    return 4 if groups % 4 == 0 else 1


def regroup_weights(w_q: torch.Tensor, w_scale: torch.Tensor, block_n: int, *, gate_up: bool) -> None:
    """Bring loaded weights and scales into this file's layouts, in place, one expert's copy at a time.

    Args:
        w_q: int8 ``[E, N, K / 2]``, two int4 values a byte, low nibble first; with ``gate_up`` the first half of N is gate.
        w_scale: the engine's scales ``[E, K / 512, N * 4]`` (or ``[E, K / 128, N]``); becomes ``[E, K / 128, N]`` in memory.
        block_n: rows of a tile.
        gate_up: whether the rows are gate and up rows of the first GEMM.

    Raises:
        TypeError, ValueError: the message begins with the argument's name; nothing has been changed then.
    """
    num_experts, n, groups = _check_weights(w_q, w_scale, block_n, gate_up)
    parts = 2 if gate_up else 1
    order = _nibble_order()
    width = _interleave(groups)
    for expert in range(num_experts):
        tiles = w_q[expert].view(parts, n // parts // block_n, block_n, groups, _HALF).permute(1, 3, 0, 2, 4)
        w_q[expert].copy_(_recode_nibbles(tiles, order).reshape(n, -1))
        scales = w_scale[expert].reshape(groups // width, n, width).transpose(1, 2)
        w_scale[expert].copy_(scales.reshape(w_scale[expert].shape))


def restore_weights(w_q: torch.Tensor, w_scale: torch.Tensor, block_n: int, *, gate_up: bool) -> None:
    """Undo :func:`regroup_weights`, byte for byte; arguments as there."""
    num_experts, n, groups = _check_weights(w_q, w_scale, block_n, gate_up)
    parts = 2 if gate_up else 1
    order = _nibble_order().argsort()
    width = _interleave(groups)
    for expert in range(num_experts):
        tiles = w_q[expert].view(n // parts // block_n, groups, parts, block_n, _HALF)
        w_q[expert].copy_(_recode_nibbles(tiles, order).permute(2, 0, 3, 1, 4).reshape(n, -1))
        scales = w_scale[expert].reshape(groups // width, width, n).transpose(1, 2)
        w_scale[expert].copy_(scales.reshape(w_scale[expert].shape))


@triton.jit
def _unpack(packed, LOOK_UP: tl.constexpr, PTX: tl.constexpr):
    """Packed bytes [N, 64] of one group as two e4m3 tiles [N, 64], its first and its second 64 values: with LOOK_UP the values,
    otherwise (value + 8) / 512."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            _LOOK_UP_WORD if LOOK_UP else _SPLIT_WORD,
            "=r,=r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = packed & 0xF, (packed >> 4) & 0xF
        if LOOK_UP:
            return (low - 8).to(tl.float32).to(tl.float8e4nv), (high - 8).to(tl.float32).to(tl.float8e4nv)
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _offset_products(x_low, x_high, BLOCK_N: tl.constexpr, LOOK_UP: tl.constexpr):
    """What the offset adds to every column's products with one group of the rows: the same in all BLOCK_N columns."""
    if LOOK_UP:
        return 0.0
    else:
        # The code of the offset itself, 8 / 512, everywhere.
        offset = tl.full((BLOCK_N, 64), 8, tl.int8).to(tl.float8e4nv, bitcast=True)
        return tl.dot(offset, x_high, tl.dot(offset, x_low))


@triton.jit
def _products(packed, x_low, x_high, offset_products, LOOK_UP: tl.constexpr, PTX: tl.constexpr):
    """Products of one group, [N, rows] float32; without LOOK_UP in units of 1 / 512."""
    low, high = _unpack(packed, LOOK_UP, PTX)
    return tl.dot(high, x_high, tl.dot(low, x_low)) - offset_products


@triton.jit
def _block_ends(
    row_counts_ptr,
    limit,
    COUNTS_STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Int32: where each expert's blocks of rows end, if all blocks are counted one expert after another."""
    experts = tl.arange(0, EXPERT_BLOCK)
    counts = tl.load(row_counts_ptr + experts * COUNTS_STRIDE, mask=experts < EXPERTS, other=0)
    return tl.cumsum((tl.minimum(tl.maximum(counts, 0), limit) + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def _first_lanes(value, EXPERT_BLOCK: tl.constexpr, PTX: tl.constexpr):
    """An int32 that was reduced over EXPERT_BLOCK values and is the same in all lanes, as the first lane of each warp has it.

    With more values than a warp has lanes the assembler cannot see that all lanes get the same. A loop that hangs on it counts
    as divergent, and in divergent code every matrix product waits for the one before.
    """
    if PTX and EXPERT_BLOCK > 32:
        value = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 0x1F, 0xFFFFFFFF;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1
        )
    return value


@triton.jit
def _expert_and_row(block, ends, EXPERT_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, PTX: tl.constexpr):
    """The expert (int64) that a block belongs to, and the block's first row among the expert's."""
    before = ends <= block
    expert = _first_lanes(tl.sum(before.to(tl.int32), 0), EXPERT_BLOCK, PTX)
    first_block = _first_lanes(tl.max(tl.where(before, ends, 0), 0), EXPERT_BLOCK, PTX)
    return expert.to(tl.int64), (block - first_block) * BLOCK_M


@triton.jit
def _gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    weights,
    weight_scale_ptr,
    masked_m_ptr,
    output_scale_ptr,
    output_ptr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_SCALE_STRIDE0: tl.constexpr,
    X_SCALE_STRIDE1: tl.constexpr,
    X_SCALE_STRIDE2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS_PER_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    LOOK_UP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Any 1-D grid: fp8(silu(gate) * up / output_scale) of every expert's live rows.

    x [E, M, K] fp8; weights: descriptor over tiles [E, N / BLOCK_N, K / 128, 2, BLOCK_N, 64]; weight scales
    [E, K / 128, 2 N]; output [E, M, N] fp8.
    """
    GROUPS: tl.constexpr = K // 128
    TILES: tl.constexpr = N // BLOCK_N
    ends = _block_ends(masked_m_ptr, M, 1, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    tasks = _first_lanes(tl.max(ends, 0), EXPERT_BLOCK, PTX) * TILES
    inner = tl.arange(0, 64)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        pid_n = task % TILES
        expert, first_row = _expert_and_row(task // TILES, ends, EXPERT_BLOCK, BLOCK_M, PTX)
        live_rows = tl.minimum(tl.load(masked_m_ptr + expert), M)
        first_tile = (((expert * TILES + pid_n) * GROUPS) * (2 * BLOCK_N)).to(tl.int32)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        gate_scales = weight_scale_ptr + expert * (GROUPS * 2 * N) + columns
        rows = first_row + tl.arange(0, BLOCK_M)
        live = rows < live_rows
        x_ptrs = x_ptr + (expert * M + rows)[None, :] * K + inner[:, None]
        x_scale_ptrs = x_scale_ptr + expert * X_SCALE_STRIDE0 + rows.to(tl.int64) * X_SCALE_STRIDE1
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        # The weight's scales are too narrow for the asynchronous copies that carry the rest, so they are loaded a group
        # ahead by hand.
        gate_scale = tl.load(gate_scales)
        up_scale = tl.load(gate_scales + N)
        for step in tl.range(0, GROUPS, GROUPS_PER_STEP, num_stages=STAGES):
            for offset in tl.static_range(GROUPS_PER_STEP):
                group = step + offset
                x_low = tl.load(x_ptrs + group * 128, mask=live[None, :], other=0.0)
                x_high = tl.load(x_ptrs + (group * 128 + 64), mask=live[None, :], other=0.0)
                x_scale = tl.load(x_scale_ptrs + group * X_SCALE_STRIDE2, mask=live, other=0.0)
                following = tl.minimum(group + 1, GROUPS - 1) * (2 * N)
                next_gate_scale = tl.load(gate_scales + following)
                next_up_scale = tl.load(gate_scales + (following + N))
                offset_products = _offset_products(x_low, x_high, BLOCK_N, LOOK_UP)
                packed = weights.load([first_tile + group * (2 * BLOCK_N), 0])
                products = _products(packed, x_low, x_high, offset_products, LOOK_UP, PTX)
                gate += products * (gate_scale.to(tl.float32)[:, None] * x_scale[None, :])
                packed = weights.load([first_tile + (group * (2 * BLOCK_N) + BLOCK_N), 0])
                products = _products(packed, x_low, x_high, offset_products, LOOK_UP, PTX)
                up += products * (up_scale.to(tl.float32)[:, None] * x_scale[None, :])
                gate_scale = next_gate_scale
                up_scale = next_up_scale
        if not LOOK_UP:
            gate *= _OFFSET_STEP
            up *= _OFFSET_STEP
        scaled = (gate / (1 + tl.exp(-gate))) * up * (1.0 / tl.load(output_scale_ptr))
        quantized = tl.clamp(scaled, -FP8_MAX, FP8_MAX).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + (expert * M + rows)[None, :] * N + columns[:, None], quantized, mask=live[None, :])


@triton.jit
def _write_rows(
    x_ptr,
    x_scale_ptr,
    weights,
    weight_scale_ptrs,
    output_ptr,
    rows,
    live,
    first_tile,
    columns,
    TILE_STEP: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS_PER_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    LOOK_UP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Products of the live ones of some rows with BLOCK_N columns, at one activation scale: one step of both kernels below.

    ``rows`` are int64 row numbers of x [.., K] and output [.., N]; tiles of one group after another stand TILE_STEP rows apart.
    """
    GROUPS: tl.constexpr = K // 128
    x_ptrs = x_ptr + rows[None, :] * K + tl.arange(0, 64)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scale = tl.load(weight_scale_ptrs)
    for step in tl.range(0, GROUPS, GROUPS_PER_STEP, num_stages=STAGES):
        for offset in tl.static_range(GROUPS_PER_STEP):
            group = step + offset
            x_low = tl.load(x_ptrs + group * 128, mask=live[None, :], other=0.0)
            x_high = tl.load(x_ptrs + (group * 128 + 64), mask=live[None, :], other=0.0)
            next_scale = tl.load(weight_scale_ptrs + tl.minimum(group + 1, GROUPS - 1) * N)
            offset_products = _offset_products(x_low, x_high, BLOCK_N, LOOK_UP)
            packed = weights.load([first_tile + group * TILE_STEP, 0])
            total += _products(packed, x_low, x_high, offset_products, LOOK_UP, PTX) * scale.to(tl.float32)[:, None]
            scale = next_scale
    unit = tl.load(x_scale_ptr)
    if not LOOK_UP:
        unit *= _OFFSET_STEP
    result = (total * unit).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + rows[None, :] * N + columns[:, None], result, mask=live[None, :])


@triton.jit
def _down_kernel(
    x_ptr,
    x_scale_ptr,
    weights,
    weight_scale_ptr,
    masked_m_ptr,
    output_ptr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS_PER_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    LOOK_UP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Any 1-D grid: bf16 products of every expert's live rows with one activation scale for all.

    x [E, M, K] fp8; weights: descriptor over tiles [E, N / BLOCK_N, K / 128, BLOCK_N, 64]; weight scales [E, K / 128, N];
    output [E, M, N].
    """
    GROUPS: tl.constexpr = K // 128
    TILES: tl.constexpr = N // BLOCK_N
    ends = _block_ends(masked_m_ptr, M, 1, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    tasks = _first_lanes(tl.max(ends, 0), EXPERT_BLOCK, PTX) * TILES
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        pid_n = task % TILES
        expert, first_row = _expert_and_row(task // TILES, ends, EXPERT_BLOCK, BLOCK_M, PTX)
        live_rows = tl.minimum(tl.load(masked_m_ptr + expert), M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = first_row + tl.arange(0, BLOCK_M)
        _write_rows(
            x_ptr,
            x_scale_ptr,
            weights,
            weight_scale_ptr + expert * (GROUPS * N) + columns,
            output_ptr,
            expert * M + rows,
            rows < live_rows,
            (((expert * TILES + pid_n) * GROUPS) * BLOCK_N).to(tl.int32),
            columns,
            BLOCK_N,
            N,
            K,
            BLOCK_N,
            BLOCK_M,
            GROUPS_PER_STEP,
            STAGES,
            LOOK_UP,
            PTX,
        )


@triton.jit
def _rows_kernel(
    x_ptr,
    x_scale_ptr,
    weights,
    weight_scale_ptr,
    first_rows_ptr,
    row_counts_ptr,
    output_ptr,
    total_rows,
    COUNTS_STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUPS_PER_STEP: tl.constexpr,
    STAGES: tl.constexpr,
    LOOK_UP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Any 1-D grid: products of every expert's rows, which begin at its first row, with one activation scale.

    x [rows, K] fp8; weights: descriptor over tiles [E, N / BLOCK_N / PARTS, K / 128, PARTS, BLOCK_N, 64]; weight scales
    [E, K / 128, N]; output [rows, N].
    """
    GROUPS: tl.constexpr = K // 128
    COLUMN_BLOCKS: tl.constexpr = N // BLOCK_N
    TILES: tl.constexpr = COLUMN_BLOCKS // PARTS
    ends = _block_ends(row_counts_ptr, total_rows, COUNTS_STRIDE, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    tasks = _first_lanes(tl.max(ends, 0), EXPERT_BLOCK, PTX) * COLUMN_BLOCKS
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        pid_n = task % COLUMN_BLOCKS
        expert, first_row = _expert_and_row(task // COLUMN_BLOCKS, ends, EXPERT_BLOCK, BLOCK_M, PTX)
        begin = tl.minimum(tl.maximum(tl.load(first_rows_ptr + expert), 0), total_rows)
        count = tl.minimum(tl.load(row_counts_ptr + expert * COUNTS_STRIDE), total_rows - begin)
        # Gate and up tiles alternate in memory; their columns are N / 2 apart.
        tile = pid_n // PARTS
        part = pid_n % PARTS
        columns = part * (N // PARTS) + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        offsets = first_row + tl.arange(0, BLOCK_M)
        _write_rows(
            x_ptr,
            x_scale_ptr,
            weights,
            weight_scale_ptr + expert * (GROUPS * N) + columns,
            output_ptr,
            (begin + offsets).to(tl.int64),
            offsets < count,
            (((expert * TILES + tile) * GROUPS * PARTS + part) * BLOCK_N).to(tl.int32),
            columns,
            PARTS * BLOCK_N,
            N,
            K,
            BLOCK_N,
            BLOCK_M,
            GROUPS_PER_STEP,
            STAGES,
            LOOK_UP,
            PTX,
        )


def _tile_descriptor(w_q: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Regrouped weights as rows of 64 bytes, one tile of ``block_n`` of them a load. Made on the host: no scratch memory."""
    return TensorDescriptor(w_q, [w_q.numel() // _HALF, _HALF], [_HALF, 1], [block_n, _HALF])


def _constants(launch: GroupedGemmLaunch, device: torch.device) -> dict[str, int | bool]:
    """A launch as every kernel here takes it."""
    return {
        "BLOCK_N": launch.block_n,
        "BLOCK_M": launch.block_m,
        "GROUPS_PER_STEP": launch.groups_per_step,
        "STAGES": launch.num_stages,
        "LOOK_UP": launch.look_up,
        "PTX": has_ptx(torch.device("cuda") if device.type == "meta" else device),
        "num_warps": launch.num_warps,
        # The name is a compiler's for NVIDIA; others refuse it.
        **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
    }


def _start(kernel: triton.JITFunction, programs: int, x: torch.Tensor, *operands: Any, **constants: Any) -> None:
    """Launch a kernel, or only compile it for the current GPU where the operands are on torch's meta device."""
    if x.device.type == "meta":
        kernel.warmup(x, *operands, grid=(programs,), **constants)
    else:
        kernel[(programs,)](x, *operands, **constants)


def _programs(blocks_n: int, num_experts: int, rows: int, launch: GroupedGemmLaunch) -> int:
    """One program for every tile of the output when each expert has ``rows``; with more rows programs go on to another tile."""
    return blocks_n * num_experts * max(1, triton.cdiv(rows, launch.block_m))


def _check_launch(launch: GroupedGemmLaunch, groups: int) -> None:
    if groups % launch.groups_per_step:
        raise ValueError(f"launch: groups_per_step is {launch.groups_per_step}, must divide the {groups} groups of K")


def _check_scale(name: str, scale: torch.Tensor) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: dtype is {scale.dtype}, must be torch.float32")
    if scale.numel() != 1:
        raise ValueError(f"{name}: shape is {list(scale.shape)}, must hold one element")


def _check_rows(
    x: torch.Tensor, output: torch.Tensor, masked_m: torch.Tensor, num_experts: int, k: int, n: int
) -> None:
    if x.dim() != 3 or x.size(0) != num_experts or x.size(2) != k or not x.is_contiguous():
        raise ValueError(f"x: shape is {list(x.shape)}, must be contiguous [{num_experts}, M, {k}]")
    if x.dtype != torch.float8_e4m3fn:
        raise TypeError(f"x: dtype is {x.dtype}, must be torch.float8_e4m3fn")
    if tuple(output.shape) != (num_experts, x.size(1), n) or not output.is_contiguous():
        raise ValueError(f"output: shape is {list(output.shape)}, must be contiguous {[num_experts, x.size(1), n]}")
    if masked_m.dtype != torch.int32:
        raise TypeError(f"masked_m: dtype is {masked_m.dtype}, must be torch.int32")
    if tuple(masked_m.shape) != (num_experts,) or not masked_m.is_contiguous():
        raise ValueError(f"masked_m: shape is {list(masked_m.shape)}, must be contiguous [{num_experts}]")


def w4a8_gate_up(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w_q: torch.Tensor,
    w_scale: torch.Tensor,
    masked_m: torch.Tensor,
    output_scale: torch.Tensor,
    output: torch.Tensor,
    launch: GroupedGemmLaunch,
    expected_rows: int | None = None,
) -> None:
    """``output = fp8(silu(x @ gate) * (x @ up) / output_scale)`` over live rows, from regrouped weights.

    With operands on torch's meta device the launch is compiled for the current GPU, and nothing runs.

    Args:
        x: fp8 e4m3 ``[E, M, K]``; x_scale: float32 ``[E, M, K / 128]``, any strides: DeepEP's payload.
        w_q, w_scale: regrouped with ``gate_up=True`` and this launch's ``block_n``; shapes as they were, ``[E, 2N, K / 2]``.
        masked_m: int32 ``[E]``, live rows per expert.
        output_scale: float32, one element: the static scale of the second GEMM's input.
        output: fp8 e4m3 ``[E, M, N]``, written in place.
        launch: tile and pipeline; ``block_n`` must be that of the weights, and ``groups_per_step`` divide K / 128.
        expected_rows: how many rows an expert has on average, as the dispatcher estimates: sizes the grid, changes no byte.
            None: one block of rows.

    Raises:
        TypeError, ValueError: the message begins with the argument's name.
    """
    num_experts, rows, groups = _check_weights(w_q, w_scale, launch.block_n, True)
    n, k = rows // 2, groups * GROUP_SIZE
    _check_launch(launch, groups)
    _check_rows(x, output, masked_m, num_experts, k, n)
    if tuple(x_scale.shape) != (num_experts, x.size(1), groups):
        raise ValueError(f"x_scale: shape is {list(x_scale.shape)}, must be {[num_experts, x.size(1), groups]}")
    if x_scale.dtype != torch.float32:
        raise TypeError(f"x_scale: dtype is {x_scale.dtype}, must be torch.float32")
    _check_scale("output_scale", output_scale)
    weights = {"w_q": w_q, "w_scale": w_scale}
    check_same_device(x, x_scale=x_scale, **weights, masked_m=masked_m, output_scale=output_scale, output=output)
    _start(
        _gate_up_kernel,
        _programs(n // launch.block_n, num_experts, min(expected_rows or 1, x.size(1)), launch),
        x,
        x_scale,
        _tile_descriptor(w_q, launch.block_n),
        w_scale,
        masked_m,
        output_scale,
        output,
        EXPERTS=num_experts,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        M=x.size(1),
        N=n,
        K=k,
        X_SCALE_STRIDE0=x_scale.stride(0),
        X_SCALE_STRIDE1=x_scale.stride(1),
        X_SCALE_STRIDE2=x_scale.stride(2),
        FP8_MAX=torch.finfo(output.dtype).max,
        **_constants(launch, x.device),
    )


def w4a8_down(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w_q: torch.Tensor,
    w_scale: torch.Tensor,
    masked_m: torch.Tensor,
    output: torch.Tensor,
    launch: GroupedGemmLaunch,
    expected_rows: int | None = None,
) -> None:
    """``output = x_scale * (x @ w)`` over live rows, bf16, from regrouped weights; meta operands as above.

    Args:
        x: fp8 e4m3 ``[E, M, K]`` with the one scale ``x_scale`` (float32, one element).
        w_q, w_scale: regrouped with ``gate_up=False`` and this launch's ``block_n``; shapes as they were, ``[E, N, K / 2]``.
        masked_m: int32 ``[E]``, live rows per expert.
        output: bfloat16 (or float32) ``[E, M, N]``, written in place.
        launch, expected_rows: as in :func:`w4a8_gate_up`.

    Raises:
        TypeError, ValueError: the message begins with the argument's name.
    """
    num_experts, n, groups = _check_weights(w_q, w_scale, launch.block_n, False)
    _check_launch(launch, groups)
    _check_rows(x, output, masked_m, num_experts, groups * GROUP_SIZE, n)
    _check_scale("x_scale", x_scale)
    check_same_device(x, x_scale=x_scale, w_q=w_q, w_scale=w_scale, masked_m=masked_m, output=output)
    _start(
        _down_kernel,
        _programs(n // launch.block_n, num_experts, min(expected_rows or 1, x.size(1)), launch),
        x,
        x_scale,
        _tile_descriptor(w_q, launch.block_n),
        w_scale,
        masked_m,
        output,
        EXPERTS=num_experts,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        M=x.size(1),
        N=n,
        K=groups * GROUP_SIZE,
        **_constants(launch, x.device),
    )


def w4a8_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w_q: torch.Tensor,
    w_scale: torch.Tensor,
    first_rows: torch.Tensor,
    row_counts: torch.Tensor,
    output: torch.Tensor,
    launch: GroupedGemmLaunch,
    layout: TileLayout,
) -> None:
    """``output = x_scale * (x @ w)`` for rows that stand one expert after another, bf16, from regrouped weights.

    Args:
        x: fp8 e4m3 ``[rows, K]`` with the one scale ``x_scale`` (float32, one element).
        w_q, w_scale: regrouped as ``layout`` says; gate and up rows come out as two halves, as they were loaded.
        first_rows: int32 ``[E]``, where each expert's rows begin; row_counts: int32 ``[E]``, any stride, how many they are.
        output: bfloat16 (or float32) ``[rows, N]``; rows that belong to no expert are left as they are.
        launch: tile and pipeline; ``block_n`` must be that of the layout, and ``groups_per_step`` divide K / 128.

    Raises:
        TypeError, ValueError: the message begins with the argument's name.
    """
    num_experts, n, groups = _check_weights(w_q, w_scale, layout.block_n, layout.gate_up)
    if launch.block_n != layout.block_n:
        raise ValueError(f"launch: block_n is {launch.block_n}, must be {layout.block_n}, that of the weights")
    k = groups * GROUP_SIZE
    if x.dim() != 2 or x.size(1) != k or not x.is_contiguous():
        raise ValueError(f"x: shape is {list(x.shape)}, must be contiguous [rows, {k}]")
    if x.dtype != torch.float8_e4m3fn:
        raise TypeError(f"x: dtype is {x.dtype}, must be torch.float8_e4m3fn")
    if output.dim() != 2 or output.size(1) != n or not output.is_contiguous():
        raise ValueError(f"output: shape is {list(output.shape)}, must be contiguous [rows, {n}]")
    for name, numbers in (("first_rows", first_rows), ("row_counts", row_counts)):
        if numbers.dtype != torch.int32:
            raise TypeError(f"{name}: dtype is {numbers.dtype}, must be torch.int32")
        if tuple(numbers.shape) != (num_experts,):
            raise ValueError(f"{name}: shape is {list(numbers.shape)}, must be [{num_experts}]")
    if not first_rows.is_contiguous():
        raise ValueError(f"first_rows: stride is {first_rows.stride(0)}, must be contiguous")
    _check_launch(launch, groups)
    _check_scale("x_scale", x_scale)
    rows = {"first_rows": first_rows, "row_counts": row_counts}
    check_same_device(x, x_scale=x_scale, w_q=w_q, w_scale=w_scale, **rows, output=output)
    # The engine makes one of them for the rows that came and the other for the most that may.
    total_rows = min(x.size(0), output.size(0))
    _start(
        _rows_kernel,
        _programs(n // launch.block_n, num_experts, triton.cdiv(total_rows, num_experts), launch),
        x,
        x_scale,
        _tile_descriptor(w_q, launch.block_n),
        w_scale,
        first_rows,
        row_counts,
        output,
        total_rows,
        COUNTS_STRIDE=row_counts.stride(0),
        EXPERTS=num_experts,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        N=n,
        K=k,
        PARTS=2 if layout.gate_up else 1,
        **_constants(launch, x.device),
    )
