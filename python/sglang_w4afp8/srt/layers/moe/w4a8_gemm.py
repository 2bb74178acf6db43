"""The grouped GEMM of the low-latency chain: right with every buffer size, and the right tile for the rows.

`sgl_kernel.cutlass_w4a8_moe_mm` chooses its tile from `m = a.size(0) / topk`, `n = d.size(1)` and `k = a.size(1)`. The
engine passes 3-D tensors, so the compiled code sees `m = E / topk` and `n = k = M` (the padded rows): it never reaches
a tuned tile, and where `M % 512 != 0` it takes a K tile of 128 and reads the interleaved scales in the wrong order
(relative error 0.61). Here the same kernel gets 2-D views and the row offsets `arange(E) * M`; it then sees the true
`n` and `k`, and `topk` only selects the tile: `m = E * M // topk`.

us per GEMM on one H200, E = 64, M = 512, random routing, sglang-kernel 0.4.5 (the engine's call / the chosen tile, from
`benchmark/results/h200/gemm_tiles.json`):

    rows   (4096, 7168)     (7168, 2048)
    8      333 / 324        198 / 198
    16     463 / 352        276 / 204
    32     751 / 473        448 / 285
    128    2513 / 1349      1400 / 686

Which tile: a table measured per (GPU, sglang-kernel version, n, k), else a rule over the tiles that this version's compiled
code has for (n, k) (`compiled_tiles`). A table of another version serves where both choose the same tiles. The live row
counts are on the device and a captured graph fixes the tile at capture, so one launch has one tile whatever the rows of
its experts; but a table may name a split, which is two launches, one over the experts with few rows and one over the others.

A choice is only ever a matter of speed: every tile gives the right result for every number of rows.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import metadata as importlib_metadata
from typing import Any

import torch

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe import compiled_tiles
from sglang_w4afp8.kernels.ops.moe.compiled_tiles import Branch, Tile
from sglang_w4afp8.kernels.ops.moe.launch_table import integer_field
from sglang_w4afp8.kernels.ops.moe.problem_sizes import split_problem_sizes

logger = logging.getLogger(__name__)

GROUP_SIZE = 128
# The K tile of the engine's 3-D call is right only where the padded rows, which it takes for k, are a multiple of this.
ENGINE_ROW_MULTIPLE = 512
# Name of the candidate that keeps the engine's 3-D call.
AS_SHIPPED = "as_shipped"
# Names of choices that come from the rule.
RULE_PREFIX = "rule:"
# Expert offsets are int32.
INT32_MAX = 2**31 - 1
# Without an estimate: the rows at which the engine's tile and the tuned one are nearly the same speed.
ROWS_WITHOUT_ESTIMATE = 8
TABLE_KIND = "gemm_tiles"
# What later engines may call the expected rows, once their signature carries them.
EXPECTED_ROWS_PARAMETERS = ("expected_m_per_group", "expected_m", "expected_rows")
KERNEL_PARAMETERS = frozenset(
    (
        "d",
        "a",
        "b",
        "a_scales",
        "b_scales",
        "experts_offsets",
        "expert_offsets",
        "problem_sizes",
        "a_strides",
        "b_strides",
        "d_strides",
        "s_strides",
        "chunk_size",
        "topk",
    )
)

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class TileBucket:
    """The values of the dispatch's `m` that lead to one tile.

    Attributes:
        low, high: first and last `m`, both included; `high` is None where there is no upper limit.
        kernel: short name of the compiled tile, where the probe could read it.
    """

    low: int
    high: int | None
    kernel: str | None = None

    @property
    def name(self) -> str:
        return f"m{self.low}+" if self.high is None else f"m{self.low}-{self.high}"

    def topk_for(self, total_rows: int) -> int | None:
        """The smallest `topk` with `total_rows // topk` in this bucket, or None where integer division skips it."""
        topk = 1 if self.high is None else total_rows // (self.high + 1) + 1
        return topk if total_rows // topk >= self.low else None


def buckets_from_limits(limits: Sequence[int], kernels: Sequence[str | None] | None = None) -> tuple[TileBucket, ...]:
    """Buckets from the upper `m` of all but the last: `(4, 32)` gives m1-4, m5-32 and m33+."""
    lows = (1, *(limit + 1 for limit in limits))
    highs = (*limits, None)
    names = kernels if kernels is not None else [None] * len(lows)
    return tuple(TileBucket(low, high, name) for low, high, name in zip(lows, highs, names, strict=True))


@dataclass(frozen=True)
class TileChoice:
    """How to call the kernel: with the engine's 3-D tensors, or with 2-D views and this `topk`.

    Attributes:
        name: the bucket's name, or `as_shipped`.
        topk: the divisor that selects the tile.
        m: what the compiled dispatch makes of it.
    """

    name: str
    topk: int
    m: int

    @property
    def as_shipped(self) -> bool:
        return self.name == AS_SHIPPED

    @property
    def measured(self) -> bool:
        """Whether a measured table named this bucket."""
        return not self.as_shipped and not self.name.startswith(RULE_PREFIX)


# Between the parts of a split's name: "m5-32|16|m257-1024".
_SPLIT = "|"


@dataclass(frozen=True)
class SplitChoice:
    """Two launches: experts of at most `rows` live rows with one tile, those of more with another.

    An estimate is a mean, and 17 rows need two steps of a tile of 16; here every expert gets the tile of its own rows. It
    costs a second launch and a small kernel; whether that pays is for the tuner to measure.
    """

    few: TileChoice
    rows: int
    many: TileChoice

    @property
    def name(self) -> str:
        return split_name(self.few.name, self.rows, self.many.name)


def split_name(few: str, rows: int, many: str) -> str:
    """Name of a split in tables and results, from its tiles' names."""
    return _SPLIT.join((few, str(rows), many))


def _split_parts(name: str) -> tuple[str, int, str] | None:
    """What `split_name` was given, or None for the name of one tile. Raises ValueError where it is malformed."""
    if _SPLIT not in name:
        return None
    few, rows, many = name.split(_SPLIT)
    if int(rows) < 1 or few == many:
        raise ValueError(f"split: {name!r}, must be two tiles around at least one row")
    return few, int(rows), many


Choice = TileChoice | SplitChoice


@dataclass(frozen=True)
class ShapeTable:
    """Measured tiles of one (n, k): the buckets, and per (experts, rows) their names from best to worst."""

    buckets: tuple[TileBucket, ...]
    orders: Mapping[tuple[int, int], tuple[str, ...]]

    def order(self, num_experts: int, rows: float) -> tuple[str, ...]:
        """Names from best to worst at the nearest measured (experts, rows), nearest on a logarithmic scale.

        Measured values are powers of two, so the nearest one to 24 rows is 32 and to 22 rows 16; a tie goes to the
        larger.
        """
        experts = _nearest(sorted({key[0] for key in self.orders}), num_experts)
        return self.orders[experts, _nearest(sorted(r for e, r in self.orders if e == experts), rows)]


@dataclass(frozen=True)
class GemmTileTable:
    """The measured table of one GPU and sglang-kernel version, by (n, k)."""

    shapes: Mapping[tuple[int, int], ShapeTable] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> GemmTileTable:
        """From the `data` of a tuned file. Raises KeyError, TypeError or ValueError where it is malformed.

        Nothing that passes raises when a tile is chosen from it.
        """
        shapes: dict[tuple[int, int], ShapeTable] = {}
        for shape in data["shapes"]:
            n, k = (integer_field(shape, field) for field in ("n", "k"))
            buckets = _parse_buckets(shape["buckets"])
            known = {bucket.name for bucket in buckets} | {AS_SHIPPED}
            orders: dict[tuple[int, int], tuple[str, ...]] = {}
            for choice in shape["choices"]:
                order = tuple(choice["order"])
                if not order or not all(isinstance(name, str) for name in order):
                    raise ValueError(f"order: is {choice['order']!r}, must be names of tiles")
                parts = [_split_parts(name) or (name, 0, name) for name in order]
                if not known.issuperset(tile for few, _, many in parts for tile in (few, many)):
                    raise ValueError(f"order: {order} names no bucket of n {n}, k {k}")
                orders[integer_field(choice, "experts"), integer_field(choice, "rows")] = order
            if not orders or (n, k) in shapes:
                raise ValueError(f"shapes: n {n}, k {k} {'has no choices' if not orders else 'stands there twice'}")
            shapes[n, k] = ShapeTable(buckets, orders)
        return cls(shapes)


def _parse_buckets(entries: Sequence[Mapping[str, Any]]) -> tuple[TileBucket, ...]:
    """Buckets that follow one another from 1 on, the last one without an upper limit."""
    buckets: list[TileBucket] = []
    for entry in entries:
        low = integer_field(entry, "low", most=INT32_MAX)
        high = None if entry["high"] is None else integer_field(entry, "high", least=low, most=INT32_MAX)
        kernel = entry.get("kernel")
        if kernel is not None and not isinstance(kernel, str):
            raise ValueError(f"kernel: is {kernel!r}, must be a name or absent")
        expected = 1 if not buckets else (buckets[-1].high or 0) + 1
        if low != expected or (buckets and buckets[-1].high is None):
            raise ValueError(f"low: is {low}, must be {expected}: one bucket follows another")
        buckets.append(TileBucket(low, high, kernel))
    if not buckets or buckets[-1].high is not None:
        raise ValueError("buckets: the last one has an upper limit, must have none")
    return tuple(buckets)


# Rows per expert up to which a tile of 16 rows, and of 32 rows, is the fastest on average; from there on one of 64. Between two
# measured counts (8 and 16, 32 or 64 and 128) the geometric mean. The second limit is lower where K is short, since a tile's
# prologue and epilogue then weigh more (`benchmark/results/h200/gemm_tiles.json`).
ROWS_OF_16 = 11
ROWS_OF_32, ROWS_OF_32_SHORT_K, SHORT_K = 90, 45, 2048


def tile_preference(rows: float, k: int) -> tuple[tuple[int, int], ...]:
    """(rows, cluster) of compiled tiles from the one that suits a mean of `rows` best to the one that does least.

    Tiles of 16 rows gain from sharing loads over a cluster of two, those of 64 rows lose by it (3 - 4%).
    """
    sixteen, thirty_two, sixty_four = ((16, 2), (16, 1)), ((32, 2), (32, 1)), ((64, 1), (64, 2), (128, 1))
    if rows <= ROWS_OF_16:
        return (*sixteen, *thirty_two, *sixty_four)
    if rows <= (ROWS_OF_32_SHORT_K if k <= SHORT_K else ROWS_OF_32):
        return (*thirty_two, *sixty_four, *sixteen)
    return (*sixty_four, *thirty_two, *sixteen)


def choose_by_rule(
    n: int, k: int, num_experts: int, padded_rows: int, rows: float, topk: int, branch: Branch | None
) -> TileChoice:
    """The tile without a measured table: of those that this version of the kernel has for (n, k), the one that suits the rows.

    Args:
        branch: what the compiled code chooses for (n, k) (`compiled_tiles.branch`); None for a version that nobody has read:
            then the engine's own call wherever it is right, since nothing says that another one is faster.
    """
    total_rows = num_experts * padded_rows
    engine_is_right = engine_gemm_is_right(padded_rows, k)
    if branch is None:
        if engine_is_right:
            return engine_choice(num_experts, topk)
        branch = Branch((), ("unknown",))
    candidates: dict[tuple[int, int], TileChoice] = {}
    suits_any: TileChoice | None = None
    for bucket in buckets_from_limits(branch.limits, branch.tiles):
        bucket_topk = bucket.topk_for(total_rows)
        if bucket_topk is None:
            continue
        choice = TileChoice(f"{RULE_PREFIX}{bucket.name}", bucket_topk, total_rows // bucket_topk)
        suits_any = suits_any or choice
        tile = Tile.of(bucket.kernel or "")
        # A tile of 64 columns runs 20 - 50% longer than one of 128 with as many rows.
        if tile is not None and tile.columns >= MIN_TILE_COLUMNS:
            candidates.setdefault((tile.rows, tile.cluster), choice)
    if engine_is_right and k % ENGINE_ROW_MULTIPLE == 0:
        # The engine's call takes the generic branch's tile of 16 rows, whatever (n, k) are.
        candidates.setdefault((16, 1), engine_choice(num_experts, topk))
    for tile_of in tile_preference(rows, k):
        if tile_of in candidates:
            return candidates[tile_of]
    assert suits_any is not None, "a bucket without an upper limit is always reached"
    return suits_any


# Of a tile that the rule may take.
MIN_TILE_COLUMNS = 128


def expected_rows_per_expert(expected_m: int | None) -> float:
    """Mean rows per expert behind the dispatcher's `expected_m = (tokens * ranks * topk + E) // E`, one below it."""
    return ROWS_WITHOUT_ESTIMATE if expected_m is None else max(1, expected_m - 1)


def choose_tile(
    n: int,
    k: int,
    num_experts: int,
    padded_rows: int,
    expected_m: int | None,
    topk: int,
    table: GemmTileTable | None = None,
    branch: Branch | None = None,
) -> Choice:
    """Tile for one GEMM, or two for experts of few and of many rows: from the measured table or, for a shape it lacks,
    by `choose_by_rule`.

    Args:
        n, k: the GEMM's output and input width.
        num_experts: local experts E.
        padded_rows: rows M of each expert's buffer.
        expected_m: the dispatcher's estimate, constant for one captured graph.
        topk: the model's, used as it is where the engine's own call is kept.
        table: measured table of this GPU and kernel version.
        branch: what the compiled code of this version chooses for (n, k) on this GPU; None where nobody has read it.
    """
    total_rows = num_experts * padded_rows
    rows = expected_rows_per_expert(expected_m)
    engine_is_right = engine_gemm_is_right(padded_rows, k)
    shape = table.shapes.get((n, k)) if table is not None else None
    if shape is not None:
        buckets = {bucket.name: bucket for bucket in shape.buckets}

        def tile(name: str) -> TileChoice | None:
            if name == AS_SHIPPED:
                return engine_choice(num_experts, topk) if engine_is_right else None
            bucket_topk = buckets[name].topk_for(total_rows)
            return None if bucket_topk is None else TileChoice(name, bucket_topk, total_rows // bucket_topk)

        for name in shape.order(num_experts, rows):
            parts = _split_parts(name)
            if parts is None:
                choice: Choice | None = tile(name)
            else:
                few, many = tile(parts[0]), tile(parts[2])
                choice = SplitChoice(few, parts[1], many) if few and many else None
            if choice is not None:
                return choice
    return choose_by_rule(n, k, num_experts, padded_rows, rows, topk, branch)


def engine_gemm_is_right(padded_rows: int, k: int = ENGINE_ROW_MULTIPLE) -> bool:
    """Whether the engine's 3-D call gives the right result: the K tile that it gets from the padded rows suits `k`.

    Weight scales are interleaved by four where `k` is a multiple of 512, which every supported model's is, else by one.
    """
    return (padded_rows % ENGINE_ROW_MULTIPLE == 0) == (k % ENGINE_ROW_MULTIPLE == 0)


def engine_choice(num_experts: int, topk: int) -> TileChoice:
    """The engine's 3-D call, with the model's `topk` or what keeps its tile."""
    # More than 32 experts a unit of topk would leave the 16-row tile, the one that was measured.
    topk = max(topk, -(-num_experts // 32))
    return TileChoice(AS_SHIPPED, topk, num_experts // topk)


def _nearest(measured: Sequence[int], value: float) -> int:
    return min(measured, key=lambda candidate: (abs(math.log2(candidate) - math.log2(max(value, 1))), -candidate))


def kernel_version() -> str | None:
    """Version of the installed sglang-kernel package, or None."""
    for package in ("sglang-kernel", "sgl-kernel"):
        try:
            return importlib_metadata.version(package)
        except importlib_metadata.PackageNotFoundError:
            continue
    return None


@cache
def installed_table() -> GemmTileTable | None:
    """The table for this process's GPU and sglang-kernel; says once in the log which one, or that the rule is used.

    Shapes that the version's own table lacks come from tables of other versions that choose the same tiles for them.
    """
    gpu, version = tuned_config.gpu_name(), kernel_version()
    if gpu is None or version is None:
        logger.info("w4afp8: grouped GEMM tiles by the rule (GPU %s, sglang-kernel %s)", gpu, version)
        return None
    shapes: dict[tuple[int, int], ShapeTable] = {}
    taken: list[str] = []
    for other in versions_by_nearness(version):
        table = _table_of(gpu, other)
        new = {
            sizes: shape
            for sizes, shape in (table.shapes if table is not None else {}).items()
            if sizes not in shapes and same_branch(version, other, gpu, *sizes)
        }
        shapes.update(new)
        if new and other != version:
            taken.append(f"sglang-kernel {other} for {', '.join(f'{n}x{k}' for n, k in sorted(new))}")
    if not compiled_tiles.same_tiles(version):
        logger.warning(
            "w4afp8: sglang-kernel %s is not among those whose tiles are known (%s): on %s grouped GEMM tiles %s by the rule, "
            "which takes the engine's own wherever they are right",
            *(
                version,
                ", ".join(compiled_tiles.known_versions()),
                gpu,
                "that its table lacks are" if shapes else "are",
            ),
        )
    elif not shapes:
        logger.info("w4afp8: no table of grouped GEMM tiles for %s and sglang-kernel %s, by the rule", gpu, version)
    if not shapes:
        return None
    if taken:
        logger.info("w4afp8: grouped GEMM tiles measured with %s, which chooses the same tiles", "; ".join(taken))
    return GemmTileTable(shapes)


def _table_of(gpu: str, version: str) -> GemmTileTable | None:
    return tuned_config.load_tuned(
        TABLE_KIND,
        (gpu, version),
        {"gpu": gpu, "kernel_version": version},
        GemmTileTable.parse,
        fallback="other tables or the rule for grouped GEMM tiles",
        absent=logging.DEBUG,
    )


def versions_by_nearness(version: str) -> list[str]:
    """This version, then the other known ones from the nearest to the farthest, the newer first of two as near."""
    known = compiled_tiles.known_versions()
    if version not in known:
        return [version]
    place = known.index(version)
    others = sorted(
        (name for name in known if name != version), key=lambda n: (abs(known.index(n) - place), -known.index(n))
    )
    return [version, *others]


def same_branch(version: str, other: str, gpu: str, n: int, k: int) -> bool:
    """Whether two versions choose the same tiles for (n, k) on a GPU, for 2-D tensors and for the engine's call."""
    if version == other:
        return True
    mine, theirs = (compiled_tiles.branch(name, gpu, n, k) for name in (version, other))
    engines = (compiled_tiles.branch(name, gpu, ENGINE_ROW_MULTIPLE, ENGINE_ROW_MULTIPLE) for name in (version, other))
    return mine is not None and mine == theirs and len(set(engines)) == 1


@dataclass(frozen=True)
class EngineGemmSignature:
    """What the engine's kernel takes.

    Attributes:
        expected_rows_parameter: name of the parameter that carries the expected rows itself, or None.
        stand_down_reason: why this wrapper must not call the kernel, or None.
    """

    expected_rows_parameter: str | None = None
    stand_down_reason: str | None = None


def engine_gemm_takes_expected_rows(kernel: Kernel | None = None) -> EngineGemmSignature:
    """Inspect the kernel's Python signature: a later engine may carry the expected rows itself, or anything else.

    A known name of the expected rows is passed on; any other unknown parameter, or a missing one, makes the patch
    stand down.
    """
    kernel = kernel if kernel is not None else _engine_kernel()
    try:
        parameters = inspect.signature(kernel).parameters
    except (TypeError, ValueError) as error:
        return EngineGemmSignature(stand_down_reason=f"signature of cutlass_w4a8_moe_mm cannot be read ({error})")
    names = [
        name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name != "self"
    ]
    expected = next((name for name in EXPECTED_ROWS_PARAMETERS if name in names), None)
    unknown = [name for name in names if name not in KERNEL_PARAMETERS and name not in EXPECTED_ROWS_PARAMETERS]
    if unknown:
        return EngineGemmSignature(stand_down_reason=f"cutlass_w4a8_moe_mm takes unknown {', '.join(unknown)}")
    if "topk" not in names:
        return EngineGemmSignature(expected, stand_down_reason="cutlass_w4a8_moe_mm takes no topk")
    return EngineGemmSignature(expected)


def look_at_engine_kernel() -> tuple[str, str]:
    """Why the patch must stand down for the loaded sgl_kernel, and what it does with arguments that are not today's.

    For the ledger, at activation. The engine's chain has loaded sgl_kernel by then wherever it can serve; where it has
    not, nothing is loaded here either: that needs a GPU driver.
    """
    kernel = getattr(sys.modules.get("sgl_kernel"), "cutlass_w4a8_moe_mm", None)
    if kernel is None:
        return "", ""
    signature = engine_gemm_takes_expected_rows(kernel)
    name = signature.expected_rows_parameter
    return signature.stand_down_reason or "", f"passes the expected rows on as {name}" if name else ""


def _engine_kernel() -> Kernel:
    from sgl_kernel import cutlass_w4a8_moe_mm

    return cutlass_w4a8_moe_mm


@cache
def _engine_kernel_and_signature() -> tuple[Kernel, EngineGemmSignature]:
    kernel = _engine_kernel()
    return kernel, engine_gemm_takes_expected_rows(kernel)


_offsets: dict[tuple[int, int, torch.device], torch.Tensor] = {}
_warned: set[Any] = set()


def expert_row_offsets(num_experts: int, padded_rows: int, device: torch.device) -> torch.Tensor:
    """First row of every expert in the 2-D view, int32 `[E]`: `arange(E) * M`. Made once per (E, M, device).

    A first call under graph capture is not kept: the kernel that writes it is recorded in that graph, so another graph
    or an eager call that shared the tensor could read it before it was written. It costs that graph one node a call;
    `prepare` avoids it.
    """
    key = (num_experts, padded_rows, device)
    offsets = _offsets.get(key)
    if offsets is None:
        if num_experts * padded_rows > INT32_MAX:
            raise ValueError(f"num_experts: {num_experts} x {padded_rows} rows, must be below 2**31 rows in all")
        offsets = torch.arange(0, num_experts * padded_rows, padded_rows, dtype=torch.int32, device=device)
        if _is_capturing(device):
            _warn_once("capture", "w4afp8: expert offsets first needed under graph capture, recorded in the graph")
        else:
            _offsets[key] = offsets
    return offsets


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def prepare(num_experts: int, padded_rows: int, device: torch.device) -> None:
    """Make what a captured call needs (the expert offsets), outside capture; for graphs of one's own.

    A server does not need it: it runs every graph eagerly before it captures it. It could not call it when weights are
    processed either: the padded rows are known from the first payload only, and depend on DeepEP's group and cap.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    expert_row_offsets(num_experts, padded_rows, device)


def w4a8_grouped_gemm(
    out: torch.Tensor,
    a: torch.Tensor,
    w_q: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    problem_sizes: torch.Tensor,
    a_strides: torch.Tensor,
    b_strides: torch.Tensor,
    c_strides: torch.Tensor,
    s_strides: torch.Tensor,
    *,
    expected_m: int | None,
    topk: int,
    kernel: Kernel | None = None,
    choice: Choice | None = None,
) -> None:
    """W4A8 grouped GEMM over DeepEP's padded buffers, into `out`'s live rows; padding rows are left as they are.

    Args:
        out: bf16 `[E, M, N]`, contiguous.
        a: fp8 e4m3 `[E, M, K]`, contiguous.
        w_q: int8 `[E, N, K/2]`, two int4 a byte, low nibble first.
        a_scale: fp32 `[1]`.
        w_scale: bf16 `[E, K/512, N*4]`, interleaved by four (`[E, K/128, N]` where K/128 is no multiple of four).
        expert_offsets: int32 `[E]` or `[E+1]`, the engine's; only passed where its own 3-D call is kept, which ignores
            it.
        problem_sizes: int32 `[E, 3]`: (N, live rows, K) an expert.
        a_strides, b_strides, c_strides, s_strides: int64 `[E, 3]`, the engine's.
        expected_m: the dispatcher's estimate of rows per expert; a hint, any value gives the right result.
        topk: the model's experts per token; used only where the engine's own call is kept.
        kernel: instead of `sgl_kernel.cutlass_w4a8_moe_mm` (tests, benchmarks).
        choice: instead of `choose_tile` (tests, benchmarks).

    Raises:
        ValueError: `out` or `a` is not a contiguous 3-D tensor, or their sizes do not belong together.
    """
    _check_operands(out, a, w_q)
    num_experts, padded_rows, k = a.shape
    n = out.shape[2]
    if kernel is None:
        kernel, signature = _engine_kernel_and_signature()
    else:
        signature = EngineGemmSignature()
    if choice is None:
        choice = _cached_choice(n, k, num_experts, padded_rows, expected_m, topk)
    if signature.stand_down_reason is not None:
        _warn_once("stand down", f"w4afp8: grouped GEMM called as the engine does: {signature.stand_down_reason}")
        choice = TileChoice(AS_SHIPPED, topk, num_experts // topk)
    parts: list[tuple[TileChoice, torch.Tensor]] = []
    if isinstance(choice, SplitChoice):
        few, many = split_problem_sizes(problem_sizes, choice.rows)
        parts = [(choice.few, few), (choice.many, many)]
    else:
        parts = [(choice, problem_sizes)]
    strides = (a_strides, b_strides, c_strides, s_strides)
    for tile, sizes in parts:
        extra = {}
        if signature.expected_rows_parameter is not None:
            # A measured bucket names its m; without one the engine's own estimate is passed on.
            estimate = tile.m if tile.measured else expected_m
            extra[signature.expected_rows_parameter] = max(1, estimate or ROWS_WITHOUT_ESTIMATE)
        if tile.as_shipped:
            offsets, rows_a, rows_out = expert_offsets[:num_experts], a, out
        else:
            offsets = expert_row_offsets(num_experts, padded_rows, a.device)
            rows_a, rows_out = a.view(-1, k), out.view(-1, n)
        kernel(rows_out, rows_a, w_q, a_scale, w_scale, offsets, sizes, *strides, GROUP_SIZE, tile.topk, **extra)


@lru_cache(maxsize=4096)
def _cached_choice(n: int, k: int, num_experts: int, padded_rows: int, expected_m: int | None, topk: int) -> Choice:
    branch = compiled_tiles.branch(kernel_version(), tuned_config.gpu_name(), n, k)
    return choose_tile(n, k, num_experts, padded_rows, expected_m, topk, installed_table(), branch)


def clear_cache() -> None:
    """Forget the table, the choices made from it, the kernel and what was logged (for tests, and after tuning)."""
    for cached in (installed_table, _cached_choice, _engine_kernel_and_signature):
        cached.cache_clear()
    _offsets.clear()
    _warned.clear()


def _check_operands(out: torch.Tensor, a: torch.Tensor, w_q: torch.Tensor) -> None:
    for name, tensor in (("out", out), ("a", a)):
        if tensor.dim() != 3 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}, must be 3-D and contiguous"
            )
    wanted = (a.shape[0], out.shape[2], a.shape[2] // 2)
    if tuple(w_q.shape) != wanted or out.shape[:2] != a.shape[:2]:
        raise ValueError(
            f"w_q: shape {tuple(w_q.shape)} with a {tuple(a.shape)} and out {tuple(out.shape)}, must be [E, N, K/2]"
        )


def warn_if_engine_gemm_is_wrong(padded_rows: int, k: int = ENGINE_ROW_MULTIPLE) -> bool:
    """Say once per buffer size that the engine's own grouped GEMM is wrong there; for chains with this patch off.

    Returns whether it is wrong: see `engine_gemm_is_right`.
    """
    wrong = not engine_gemm_is_right(padded_rows, k)
    if wrong:
        _warn_once(
            ("engine", padded_rows),
            f"w4afp8: the engine's W4A8 grouped GEMM gives WRONG RESULTS with {padded_rows} padded rows per expert (no "
            f"multiple of {ENGINE_ROW_MULTIPLE}: it reads the weight scales in the wrong order). Turn the `gemm` patch "
            "on, or set SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK so that it times the ranks is a multiple of "
            f"{ENGINE_ROW_MULTIPLE}.",
        )
    return wrong


def _warn_once(key: Any, message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)
