"""Measuring the grouped GEMM's tiles: probe, sweep, choice. Behind `sglang-w4afp8 tune gemm` and `benchmark/gemm_tiles.py`.

1. `probe_buckets` finds which `m` lead to which compiled tile. The profiler's kernel names tell tiles apart exactly;
   one expert and one row are enough, since the dispatch only looks at sizes.
2. `measure_cell` times the engine's call and every tile for one (n, k, experts, padded rows, rows, routing), as CUDA
   graphs, interleaved, and compares each with the float reference.
3. `rank_tiles` orders the tiles of one (experts, rows) over its routings, `build_table` makes the tuned file's data.

Skew: `expected_m` is a mean, and a hot expert pays for a small tile. Among the tiles that are within 2% of the fastest
under random routing, the order is by the weighted time under random and skewed routing.

Figures are us per call, the pointer kernel included. Launches of one graph walk through different experts' weights
where there are more than the cell needs, so that weights come from memory as in a model with many layers.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_w4afp8 import __version__, tuned_config
from sglang_w4afp8.kernels.ops.moe.compiled_tiles import tile_label
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import (
    GROUP_SIZE,
    deinterleave_scales,
    dequantize_weight,
    relative_error,
    scale_interleave,
)
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.srt.layers.moe.w4a8_gemm import (
    Choice,
    Kernel,
    SplitChoice,
    TileBucket,
    TileChoice,
    buckets_from_limits,
)

# The engine's topk for DeepSeek-V3 and its kin; selects the tile of the engine's call together with the experts.
MODEL_TOPK = 8
SKEW = 16
# A tile's error against the float reference is bf16 rounding, 0.0017; a wrong K tile gives 0.61.
MAX_RELATIVE_ERROR = 0.003
# What a tile may lose to the fastest under random routing, and to the engine's call in any routing: tight, then loose.
# To the engine it counts in the worse of two passes: a split measured 1% faster in one and 2.5% slower in the next.
CLOSE = ((1.02, 1.01), (1.03, 1.02))
ROUTING_WEIGHTS = {"random": 2.0, "skew16": 1.0}
# Half the inter-quartile range, relative to the median, from which more turns are taken, and how often.
_QUIET, _ROUNDS_MAX = 0.005, 5
# Stages of a cell (see `run_sweep`), and how near to the sweep's fastest a tile must be to be timed again.
CHOOSING_STAGES = ("sweep", "confirm")
STAGES = (*CHOOSING_STAGES, "verify")
_NEAR = 1.05
# Largest m worth probing: 64 experts of 512 rows are 32768, and no known limit is above 4096.
LARGEST_M = 16384


def routed_rows(num_experts: int, padded_rows: int, rows: int, routing: str, seed: int = 0) -> list[int]:
    """Live rows per expert with `num_experts * rows` in all.

    `even`: all alike; `random`: uniform random experts; `skewS`: one hot expert (the middle one) with `S * rows`, as
    far as the total and the padded rows allow, the rest even.
    """
    total = num_experts * rows
    if routing == "even":
        counts = [rows] * num_experts
    elif routing == "random":
        generator = torch.Generator().manual_seed(seed)
        experts = torch.randint(0, num_experts, (total,), generator=generator)
        counts = torch.bincount(experts, minlength=num_experts).tolist()
    elif routing.startswith("skew"):
        hot = min(int(routing.removeprefix("skew")) * rows, total, padded_rows)
        share, extra = divmod(total - hot, max(1, num_experts - 1))
        counts = [share + (index < extra) for index in range(num_experts - 1)]
        counts.insert(num_experts // 2, hot)
    else:
        raise ValueError(f"routing: is {routing!r}, must be even, random or skewS")
    return [min(count, padded_rows) for count in counts]


def weight_bytes(n: int, k: int, live_experts: int) -> int:
    """Bytes of weights and bf16 scales that a GEMM over `live_experts` must read."""
    return live_experts * n * (k // 2 + k // GROUP_SIZE * 2)


@dataclass
class GemmProblem:
    """Weights and buffers of one (n, k), allocated once for the largest cell; cells are views."""

    n: int
    k: int
    max_experts: int
    max_total_rows: int
    device: torch.device
    seed: int = 0
    _references: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        groups = self.k // GROUP_SIZE
        width = scale_interleave(groups)

        def random_bytes(*shape: int) -> torch.Tensor:
            return torch.randint(-128, 128, shape, dtype=torch.int8, device=self.device, generator=generator)

        self.w_q = random_bytes(self.max_experts, self.n, self.k // 2)
        scales = torch.rand(self.max_experts, groups // width, self.n * width, device=self.device, generator=generator)
        self.w_scale = (scales * 0.01 + 0.005).to(torch.bfloat16)
        self.a_scale = torch.tensor([0.37], dtype=torch.float32, device=self.device)
        self._a = torch.empty(self.max_total_rows * self.k, dtype=torch.float8_e4m3fn, device=self.device)
        # In pieces: a float copy of the whole buffer would need four times its size.
        for piece in self._a.split(1 << 27):
            piece.copy_(torch.randn(piece.numel(), device=self.device, generator=generator))
        self._out = torch.empty(self.max_total_rows * self.n, dtype=torch.bfloat16, device=self.device)
        self._strides: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def buffers(self, num_experts: int, padded_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(a [E, M, K], out [E, M, N])` as views of the one allocation."""
        total = num_experts * padded_rows
        a = self._a[: total * self.k].view(num_experts, padded_rows, self.k)
        return a, self._out[: total * self.n].view(num_experts, padded_rows, self.n)

    def strides(self, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's stride tables: `(k, n)`, int64 `[E, 3]` each."""
        if num_experts not in self._strides:
            self._strides[num_experts] = tuple(
                torch.full((num_experts, 3), size, dtype=torch.int64, device=self.device) for size in (self.k, self.n)
            )
        return self._strides[num_experts]

    def problem_sizes(self, rows: Sequence[int]) -> torch.Tensor:
        sizes = [[self.n, count, self.k] for count in rows]
        return torch.tensor(sizes, dtype=torch.int32, device=self.device)

    def reference(self, a: torch.Tensor, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Float result of some rows of one expert, fp32 `[len(rows), n]`."""
        if expert not in self._references:
            scales = deinterleave_scales(self.w_scale[expert : expert + 1], self.n)[0]
            self._references[expert] = dequantize_weight(self.w_q[expert], scales)
        return a[expert, rows].float() @ self._references[expert].T * self.a_scale


# ---- probe


def kernel_names(calls: Sequence[Callable[[], None]], device: torch.device) -> list[str] | None:
    """Name of the grouped GEMM kernel that each call launches, by the profiler; None where it cannot be told."""
    from torch.profiler import ProfilerActivity, profile

    # The first session of a process can come back empty while the tracing library starts.
    for _ in range(2):
        calls[0]()
        torch.cuda.synchronize(device)
        try:
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                for call in calls:
                    call()
                torch.cuda.synchronize(device)
            events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        # No tracing library, or no right to trace: the caller falls back to timing.
        except RuntimeError:
            return None
        events.sort(key=lambda event: event.time_range.start)
        # The pointer kernel has cutlass types in its name too, but is no cutlass::device_kernel.
        names = [event.name for event in events if "cutlass" in event.name and "device_kernel" in event.name]
        if len(names) == len(calls):
            return names
    return None


def _probe_candidates() -> list[int]:
    """Every power of two, half-way between two, and one above each: limits are such numbers in every known version."""
    candidates = {1}
    power = 2
    while power <= LARGEST_M:
        candidates.update((power, power + 1, power + power // 2, power + power // 2 + 1))
        power *= 2
    return sorted(candidates)


def probe_buckets(
    kernel: Kernel,
    n: int,
    k: int,
    device: torch.device,
    names: Callable[[Sequence[Callable[[], None]], torch.device], list[str] | None] = kernel_names,
) -> tuple[tuple[TileBucket, ...], str, str | None]:
    """Buckets of one (n, k), how they were found, and the tile of the engine's own call.

    One expert, one live row, `topk` 1: the dispatch's `m` is exactly the rows of the 2-D view.

    Returns:
        `(buckets, method, engine_tile)`; method is `kernel names`, or `timing` where the profiler says nothing.
    """
    problem = GemmProblem(n, k, 1, LARGEST_M * 3 // 2 + 1, device)
    k_strides, n_strides = problem.strides(1)
    sizes = problem.problem_sizes([1])
    offsets = torch.zeros(1, dtype=torch.int32, device=device)

    def call(m: int) -> Callable[[], None]:
        a, out = problem.buffers(1, m)
        operands = (out[0], a[0], problem.w_q, problem.a_scale, problem.w_scale, offsets, sizes)
        return lambda: kernel(*operands, k_strides, k_strides, n_strides, n_strides, GROUP_SIZE, 1)

    def engine_call() -> None:
        a, out = problem.buffers(1, w4a8_gemm.ENGINE_ROW_MULTIPLE)
        operands = (out, a, problem.w_q, problem.a_scale, problem.w_scale, offsets, sizes)
        kernel(*operands, k_strides, k_strides, n_strides, n_strides, GROUP_SIZE, MODEL_TOPK)

    candidates = _probe_candidates()
    found = names([*(call(m) for m in candidates), engine_call], device)
    if found is None:
        return _probe_by_time(kernel, n, k, device), "timing", None
    *labels, engine_tile = (tile_label(name) for name in found)
    limits, tiles = [], [labels[0]]
    for index in range(1, len(candidates)):
        if labels[index] == labels[index - 1]:
            continue
        low, high = candidates[index - 1], candidates[index]
        while high - low > 1:
            middle = (low + high) // 2
            answer = names([call(middle)], device)
            if answer is not None and tile_label(answer[0]) == labels[index - 1]:
                low = middle
            else:
                high = middle
        limits.append(low)
        tiles.append(labels[index])
    return buckets_from_limits(limits, tiles), "kernel names", engine_tile


def _probe_by_time(kernel: Kernel, n: int, k: int, device: torch.device) -> tuple[TileBucket, ...]:
    """Without a profiler: neighbouring powers of two whose times agree at 8 and at 128 rows share a tile."""
    experts, padded = 32, 1024
    problem = GemmProblem(n, k, experts, experts * padded, device)
    ms = [1 << power for power in range(14)]
    times: dict[int, list[float]] = {m: [] for m in ms}
    for rows in (8, 128):
        cell = Cell(n, k, experts, padded, rows, "even")
        runs = {str(m): _runs(problem, cell, kernel, TileChoice(f"m{m}", experts * padded // m, m)) for m in ms}
        for name, (median, _) in time_runs(runs, device, repeats=7).items():
            times[int(name)].append(median)
    limits = [
        low
        for low, high in zip(ms, ms[1:], strict=False)
        if any(abs(a - b) > 0.02 * min(a, b) for a, b in zip(times[low], times[high], strict=True))
    ]
    return buckets_from_limits(limits)


# ---- timing


def _eager_time(run: Callable[[int], None], device: torch.device) -> float:
    """us of one warm call."""
    run(0)
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(0)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def time_runs(
    runs: Mapping[str, Callable[[int], None]],
    device: torch.device,
    repeats: int = 9,
    target_us: float = 2000.0,
) -> dict[str, tuple[float, float]]:
    """Median us per call and its relative spread (half the inter-quartile range), interleaved CUDA-graph replays.

    Args:
        runs: by name, a function of the launch's index (which weights to read).
        repeats: turns of every run, and as many again while one of them spreads more than 0.5%, five times at most.
        target_us: a graph holds as many calls as fill this time, so that the launch of a graph does not count.
    """
    if device.type != "cuda":
        return _time_runs_cpu(runs, repeats)
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    graphs, launches = {}, {}
    for name, run in runs.items():
        launches[name] = max(1, min(16, round(target_us / max(_eager_time(run, device), 1.0))))
        graphs[name] = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        # Not `with torch.cuda.graph`: that empties the allocator's cache before each of the sweep's thousands of
        # captures.
        with torch.cuda.stream(stream):
            graphs[name].capture_begin(pool=pool)
            for index in range(launches[name]):
                run(index)
            graphs[name].capture_end()
    for graph in graphs.values():
        graph.replay()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffler = list(runs), random.Random(0)
    for _ in range(_ROUNDS_MAX):
        events = []
        for _ in range(repeats):
            # Another order every turn: a run is slowed or helped by what ran just before it.
            shuffler.shuffle(order)
            for name in order:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graphs[name].replay()
                end.record()
                events.append((name, start, end))
        torch.cuda.synchronize(device)
        for name, start, end in events:
            times[name].append(start.elapsed_time(end) * 1e3 / launches[name])
        found = {name: _median_and_spread(values) for name, values in times.items()}
        if max(spread for _, spread in found.values()) < _QUIET:
            break
    del graph
    graphs.clear()
    torch.cuda.empty_cache()
    return found


def _time_runs_cpu(runs: Mapping[str, Callable[[int], None]], repeats: int) -> dict[str, tuple[float, float]]:
    """For the dry run with the double only."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run(index)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: _median_and_spread(values) for name, values in times.items()}


def _median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(values)
    if len(values) < 4:
        return median, 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return median, (high - low) / 2 / median


def stream_bandwidth(device: torch.device) -> float:
    """Bytes per us of the fastest plain stream over memory: what the weight-read floor divides by.

    A reduction (reads only) or an elementwise kernel (reads and writes, both counted), whichever is faster. Not
    `copy_`: captured, it becomes a memcpy node, which was a third slower than a kernel on an H200 (2.8 TB/s).
    """
    size = 1 << 30 if device.type == "cuda" else 1 << 18
    source = torch.zeros(size, dtype=torch.float32, device=device)
    target, total = torch.empty_like(source), torch.empty((), device=device)
    runs = {
        "read": lambda _: torch.sum(source, dim=0, out=total),
        "copy": lambda _: torch.neg(source, out=target),
    }
    us = {name: median for name, (median, _) in time_runs(runs, device).items()}
    return source.nbytes * max(1 / us["read"], 2 / us["copy"])


# ---- cells


@dataclass(frozen=True)
class Cell:
    """One point of the sweep: mean live rows per expert, and how they are spread."""

    n: int
    k: int
    experts: int
    padded: int
    rows: int
    routing: str

    @property
    def key(self) -> str:
        return f"{self.n}x{self.k}/E{self.experts}/M{self.padded}/r{self.rows}/{self.routing}"

    @property
    def expected_m(self) -> int:
        """What the dispatcher would report: (rows in all + E) // E."""
        return (self.experts * self.rows + self.experts) // self.experts


# Splits are tried from this many experts: a second launch costs the same for few, and has less to save.
_SPLIT_EXPERTS_MIN = 64
_TILE_ROWS = re.compile(r"co_\d+x(\d+)x")


def candidate_tiles(
    buckets: Sequence[TileBucket],
    engine_tile: str | None,
    num_experts: int,
    padded_rows: int,
    k: int,
    rows: int | None = None,
) -> dict[str, Choice]:
    """Tiles worth timing, by name: every bucket that can be reached, one per compiled tile, and the engine's 3-D call.

    The 3-D call is left out where its tile is also that of a bucket, and where its result is wrong. With the mean `rows`
    also splits: for rows from half a tile's up to twice, that tile for the experts it holds and the next larger for the
    others.
    """
    choices: dict[str, Choice] = {}
    tiles: set[str] = set()
    by_rows: dict[int, list[TileChoice]] = {}

    def add(choice: TileChoice, kernel: str | None) -> None:
        choices[choice.name] = choice
        found = _TILE_ROWS.match(kernel or "")
        if found:
            by_rows.setdefault(int(found[1]), []).append(choice)

    for bucket in buckets:
        topk = bucket.topk_for(num_experts * padded_rows)
        if topk is None or (bucket.kernel is not None and bucket.kernel in tiles):
            continue
        add(TileChoice(bucket.name, topk, num_experts * padded_rows // topk), bucket.kernel)
        if bucket.kernel is not None:
            tiles.add(bucket.kernel)
    if engine_tile not in tiles and w4a8_gemm.engine_gemm_is_right(padded_rows, k):
        add(w4a8_gemm.engine_choice(num_experts, MODEL_TOPK), engine_tile)
    if rows is not None and num_experts >= _SPLIT_EXPERTS_MIN:
        for few_rows, many_rows in itertools.pairwise(sorted(by_rows)):
            if few_rows <= 2 * rows <= 4 * few_rows:
                for few, many in itertools.product(by_rows[few_rows], by_rows[many_rows]):
                    split = SplitChoice(few, few_rows, many)
                    choices[split.name] = split
    return choices


def _runs(problem: GemmProblem, cell: Cell, kernel: Kernel, choice: Choice | None) -> Callable[[int], None]:
    """One way to run a cell, by the launch's index; `None` is the engine's own call."""
    a, out = problem.buffers(cell.experts, cell.padded)
    k_strides, n_strides = problem.strides(cell.experts)
    sizes = problem.problem_sizes(routed_rows(cell.experts, cell.padded, cell.rows, cell.routing))
    # What the engine passes: memory that nobody wrote. Zeros here, so that a kernel that reads it fails the check.
    engine_offsets = torch.zeros(cell.experts + 1, dtype=torch.int32, device=problem.device)
    weight_sets = problem.max_experts // cell.experts
    strides = (k_strides, k_strides, n_strides, n_strides)

    def run(index: int) -> None:
        first = (index % weight_sets) * cell.experts
        w_q = problem.w_q[first : first + cell.experts]
        w_scale = problem.w_scale[first : first + cell.experts]
        if choice is None:
            operands = (out, a, w_q, problem.a_scale, w_scale, engine_offsets[:-1], sizes, *strides)
            kernel(*operands, GROUP_SIZE, MODEL_TOPK)
            return
        operands = (out, a, w_q, problem.a_scale, w_scale, engine_offsets, sizes, *strides)
        w4a8_gemm.w4a8_grouped_gemm(
            *operands, expected_m=cell.expected_m, topk=MODEL_TOPK, kernel=kernel, choice=choice
        )

    return run


def check_runs(problem: GemmProblem, cell: Cell, runs: Mapping[str, Callable[[int], None]]) -> dict[str, float]:
    """Relative error of each way over a sample of experts and rows; NaN where rows are missed."""
    counts = routed_rows(cell.experts, cell.padded, cell.rows, cell.routing)
    a, out = problem.buffers(cell.experts, cell.padded)
    sample = []
    for expert in sorted({0, cell.experts // 2, cell.experts - 1}):
        rows = sorted({*range(min(counts[expert], 16)), *range(max(0, counts[expert] - 16), counts[expert])})
        if rows:
            index = torch.tensor(rows, device=problem.device)
            sample.append((expert, index, problem.reference(a, expert, index)))
    errors = {}
    for name, run in runs.items():
        for expert, *_ in sample:
            out[expert].fill_(float("nan"))
        run(0)
        got = torch.cat([out[expert, index] for expert, index, _ in sample]) if sample else out[:0]
        expected = torch.cat([reference for *_, reference in sample]) if sample else out[:0].float()
        errors[name] = relative_error(got, expected)
    return errors


def measure_cell(
    problem: GemmProblem,
    cell: Cell,
    kernel: Kernel,
    choices: Mapping[str, Choice],
    repeats: int = 9,
) -> dict[str, Any]:
    """us, spread and relative error of the engine's call (`engine`) and of every tile in `choices`."""
    runs = {"engine": _runs(problem, cell, kernel, None)}
    runs.update({name: _runs(problem, cell, kernel, choice) for name, choice in choices.items()})
    # Made before any capture, as the engine's warm-up would.
    w4a8_gemm.prepare(cell.experts, cell.padded, problem.device)
    errors = check_runs(problem, cell, runs)
    times = time_runs(runs, problem.device, repeats)
    counts = routed_rows(cell.experts, cell.padded, cell.rows, cell.routing)
    return {
        "us": {name: round(median, 2) for name, (median, _) in times.items()},
        "spread": {name: round(spread, 4) for name, (_, spread) in times.items()},
        "rel_err": {name: round(error, 6) for name, error in errors.items()},
        "live_experts": sum(count > 0 for count in counts),
        "max_rows": max(counts),
    }


# ---- choice


def rank_tiles(
    by_routing: Mapping[str, Mapping[str, float]],
    engine_is_right: bool = True,
    confirmed: Mapping[str, Mapping[str, float]] | None = None,
) -> list[str]:
    """Names of the tiles of one (experts, rows), best first.

    Args:
        by_routing: us by routing (`random`, and where measured `skew16`), then by name; `engine` is the engine's call.
        engine_is_right: whether the engine's time counts (a wrong result is no yardstick).
        confirmed: the same from a second pass, of some tiles; what a tile loses to the engine there counts too.

    First the tiles that under random routing are close to the fastest and that in no routing lose to the engine, first
    with the tight limits of `CLOSE`, then with its loose ones, by their weighted time over the routings; then those
    that only do not lose to the engine, then the rest, by time under random routing.
    """
    random = by_routing["random"]
    names = [name for name in random if name != "engine" and all(name in us for us in by_routing.values())]
    fastest = {routing: min(us[name] for name in names) for routing, us in by_routing.items()}

    def weighted(name: str) -> float:
        weights = {routing: ROUTING_WEIGHTS.get(routing, 1.0) for routing in by_routing}
        total = sum(weights[routing] * us[name] / fastest[routing] for routing, us in by_routing.items())
        return total / sum(weights.values())

    def order(name: str) -> tuple[int, float]:
        to_fastest = random[name] / fastest["random"]
        passes = [*by_routing.values(), *(us for us in (confirmed or {}).values() if name in us)]
        to_engine = max(us[name] / us["engine"] for us in passes) if engine_is_right else 0.0
        for tier, (fastest_limit, engine_limit) in enumerate(CLOSE):
            if to_fastest <= fastest_limit and to_engine <= engine_limit:
                return tier, weighted(name)
        return len(CLOSE) + (to_engine > CLOSE[-1][1]), random[name]

    return sorted(names, key=order)


def build_table(
    cells: Iterable[tuple[Cell, Sequence[Mapping[str, Any]]]],
    buckets: Mapping[tuple[int, int], Sequence[TileBucket]],
) -> dict[str, Any]:
    """`data` of the tuned file (`GemmTileTable.parse` reads it) from the passes over every cell, only tiles that are right."""
    groups: dict[tuple[int, int], dict[tuple[int, int], dict[int, list[dict[str, Any]]]]] = {}
    for cell, passes in cells:
        by_padded = groups.setdefault((cell.n, cell.k), {}).setdefault((cell.experts, cell.rows), {})
        by_routing = by_padded.setdefault(cell.padded, [{}, {}])
        for measured, found in zip(passes, by_routing, strict=False):
            found[cell.routing] = {
                name: us
                for name, us in measured["us"].items()
                if name == "engine" or measured["rel_err"][name] < MAX_RELATIVE_ERROR
            }
    shapes = []
    for (n, k), points in sorted(groups.items()):
        choices = []
        for (experts, rows), by_padded in sorted(points.items()):
            # One buffer size decides: the first for which the engine's own call is right, since that is a candidate
            # too.
            padded = min(by_padded, key=lambda size: not w4a8_gemm.engine_gemm_is_right(size, k))
            by_routing, confirmed = by_padded[padded]
            if "random" not in by_routing:
                continue
            order = rank_tiles(by_routing, w4a8_gemm.engine_gemm_is_right(padded, k), confirmed)
            choices.append({"experts": experts, "rows": rows, "order": order})
        listed = [{"low": b.low, "high": b.high, "kernel": b.kernel} for b in buckets[n, k]]
        if choices:
            shapes.append({"n": n, "k": k, "buckets": listed, "choices": choices})
    return {"shapes": shapes}


def table_metadata(gpu: str, version: str) -> dict[str, str]:
    """Metadata of a tuned file made in this process."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "gpu": gpu,
        "kernel_version": version,
        "package_version": __version__,
        "torch": torch.__version__,
        "triton": triton_version,
        "created": time.strftime("%Y-%m-%d"),
    }


def _set_up(metadata: Mapping[str, str]) -> dict[str, str]:
    """What must be equal for a run to go on with another's measurements: not the day."""
    return {name: value for name, value in metadata.items() if name != "created"}


def table_path(directory: Path, gpu: str, version: str) -> Path:
    """Where the table of one GPU and sglang-kernel version lies."""
    return directory / tuned_config.file_name(w4a8_gemm.TABLE_KIND, gpu, version)


# ---- sweep


def gemm_shapes(inner: int, hidden: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(n, k) of the two GEMMs of a layer with intermediate size N and hidden size K."""
    return (2 * inner, hidden), (hidden, inner)


DEEPSEEK_SHAPES = gemm_shapes(2048, 7168)
# Padded rows as deployments have them (experts x rows of one rank), but never a size where the engine's call is wrong.
PADDED_ROWS = {8: 2048, 16: 1024, 32: 1024, 64: 512, 128: 512, 256: 512}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUTINGS = ("random", "skew16")


def plan_cells(
    shapes: Sequence[tuple[int, int]],
    experts: Sequence[int],
    rows: Sequence[int] = ROWS,
    routings: Sequence[str] = ROUTINGS,
    padded_rows: Mapping[int, int] = PADDED_ROWS,
) -> list[Cell]:
    """Cells of a sweep in the given order of experts, the shapes side by side, where the rows fit the buffer."""
    return [
        Cell(n, k, num_experts, padded_rows.get(num_experts, 512), mean, routing)
        for num_experts in experts
        for mean in rows
        for n, k in shapes
        for routing in routings
        if mean <= padded_rows.get(num_experts, 512)
    ]


def run_sweep(
    run: dict[str, Any],
    cells: Sequence[Cell],
    kernel: Kernel,
    device: torch.device,
    *,
    deadline: float = float("inf"),
    repeats: int = 9,
    verify: bool = True,
    done: Callable[[Cell, str], None] = lambda cell, stage: None,
    names: Callable[[Sequence[Callable[[], None]], torch.device], list[str] | None] = kernel_names,
) -> bool:
    """Probe, measure and verify `cells` into `run`; what `run` already holds is not measured again.

    Stages of a cell: `sweep` times the engine's call and every tile, `confirm` again those within 5% of the fastest.
    `verify`, once these have given a table, times the engine's call, what `choose_tile` picks from that table
    (`chosen`) and the tiles within 5% of the fastest: a choice is not judged by the measurement that made it.

    Args:
        run: `{"probes": {...}, "cells": {...}}`, filled in place.
        deadline: `time.monotonic()` after which no cell is started.
        done: called after every stage of a cell, for progress and for saving.

    Returns:
        Whether everything was measured.
    """
    probes, stored = run.setdefault("probes", {}), run.setdefault("cells", {})
    shapes = list(dict.fromkeys((cell.n, cell.k) for cell in cells))
    for n, k in shapes:
        if f"{n}x{k}" not in probes:
            buckets, method, engine_tile = probe_buckets(kernel, n, k, device, names)
            listed = [{"low": b.low, "high": b.high, "kernel": b.kernel} for b in buckets]
            probes[f"{n}x{k}"] = {"buckets": listed, "method": method, "engine_tile": engine_tile}
    if "stream_bytes_per_us" not in run:
        run["stream_bytes_per_us"] = stream_bandwidth(device)
    problems = {
        (n, k): GemmProblem(
            n,
            k,
            max(cell.experts for cell in cells),
            max(cell.experts * cell.padded for cell in cells),
            device,
        )
        for n, k in shapes
    }
    for stage in STAGES if verify else CHOOSING_STAGES:
        table = w4a8_gemm.GemmTileTable.parse(table_data(run)) if stage == "verify" else None
        for cell in cells:
            entry = stored.setdefault(cell.key, {"cell": vars(cell).copy()})
            if stage in entry:
                continue
            if time.monotonic() > deadline:
                return False
            probe = probes[f"{cell.n}x{cell.k}"]
            choices = candidate_tiles(
                probed_buckets(probe), probe["engine_tile"], cell.experts, cell.padded, cell.k, cell.rows
            )
            if stage != "sweep":
                us = entry["sweep"]["us"]
                fastest = min(us[name] for name in choices)
                choices = {name: choice for name, choice in choices.items() if us[name] <= _NEAR * fastest}
            if table is not None:
                sizes = (cell.n, cell.k, cell.experts, cell.padded, cell.expected_m, MODEL_TOPK)
                chosen = w4a8_gemm.choose_tile(*sizes, table)
                choices.pop(chosen.name, None)
                choices["chosen"] = chosen
                entry["chosen"] = chosen.name
            entry[stage] = measure_cell(problems[cell.n, cell.k], cell, kernel, choices, repeats)
            done(cell, stage)
    return True


def probed_buckets(probe: Mapping[str, Any]) -> tuple[TileBucket, ...]:
    return tuple(TileBucket(b["low"], b["high"], b["kernel"]) for b in probe["buckets"])


def table_data(run: Mapping[str, Any]) -> dict[str, Any]:
    """`data` of the tuned file from the sweep and confirm stages that `run` holds."""
    measured = [
        (Cell(**entry["cell"]), [entry[stage] for stage in CHOOSING_STAGES if stage in entry])
        for entry in run["cells"].values()
        if "sweep" in entry
    ]
    buckets = {}
    for shape, probe in run["probes"].items():
        n, k = (int(size) for size in shape.split("x"))
        buckets[n, k] = probed_buckets(probe)
    return build_table(measured, buckets)


def tune_gemm(
    shapes: Sequence[tuple[int, int]],
    experts: Sequence[int],
    *,
    rows: Sequence[int] = ROWS,
    padded_rows: Mapping[int, int] = PADDED_ROWS,
    directory: Path | None = None,
    time_limit_s: float = float("inf"),
    keep: bool = True,
    done: Callable[[Cell, str], None] = lambda cell, stage: None,
) -> Path:
    """Measure the tiles of this machine's GPU and installed sglang-kernel, and write the table that serving then uses.

    What was measured is kept beside the table after every cell, and a later call goes on from there.

    Args:
        shapes: (n, k) of the GEMMs, for example `DEEPSEEK_SHAPES`.
        experts: local experts to measure (powers of two).
        rows: mean rows per expert to measure (powers of two).
        padded_rows: buffer rows by local experts, 512 for others.
        directory: where to write, the user's directory by default.
        time_limit_s: after this no further cell is started; the table holds what was measured.
        keep: go on with what an earlier call measured with the same GPU, kernel and Triton.
        done: called after each cell.

    Returns:
        The written file.

    Raises:
        RuntimeError: no GPU, no sgl_kernel, or a kernel that this package must not call.
    """
    gpu, version = tuned_config.gpu_name(), w4a8_gemm.kernel_version()
    if gpu is None or version is None:
        raise RuntimeError(f"tune: GPU {gpu}, sglang-kernel {version}, must both be there")
    from sgl_kernel import cutlass_w4a8_moe_mm as kernel

    signature = w4a8_gemm.engine_gemm_takes_expected_rows(kernel)
    if signature.stand_down_reason or signature.expected_rows_parameter:
        reason = signature.stand_down_reason or f"the kernel takes {signature.expected_rows_parameter} itself"
        raise RuntimeError(f"tune: {reason}")
    path = table_path(directory if directory is not None else tuned_config.user_directory(), gpu, version)
    metadata = table_metadata(gpu, version)
    measured = path.with_suffix(".measured")
    run: dict[str, Any] = {}
    if keep and measured.is_file():
        kept = json.loads(measured.read_text(encoding="utf-8"))
        run = kept["run"] if _set_up(kept["metadata"]) == _set_up(metadata) else {}

    def record(cell: Cell, stage: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = measured.with_name(measured.name + ".partial")
        partial.write_text(json.dumps({"metadata": metadata, "run": run}) + "\n", encoding="utf-8")
        partial.replace(measured)
        done(cell, stage)

    cells = plan_cells(shapes, experts, rows, padded_rows=padded_rows)
    device = torch.device("cuda", torch.cuda.current_device())
    run_sweep(run, cells, kernel, device, deadline=time.monotonic() + time_limit_s, verify=False, done=record)
    tuned_config.write_tuned(path, metadata, table_data(run))
    tuned_config.clear_cache()
    w4a8_gemm.clear_cache()
    return path
