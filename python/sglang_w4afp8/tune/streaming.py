"""Measures launch candidates of the streaming kernels and writes the table that ``launch_table`` reads.

A cell is one (kernel, columns, experts, rows); its candidates are timed under even, random and skewed routing, because the
estimate that picks a launch at serving is only a mean. Each time is divided by the best that any candidate reached under
that routing; the score is the geometric mean of the three quotients' mean and their worst, so that no routing pays for
another, and it is raised where the installed engine's own kernel is faster. The search goes in stages: tiles and m-grid first,
then, around the best of them, phase 2 (cap, slices, their place in the grid), then rows loaded unseen, and the best few
again with more turns.
"""

import concurrent.futures
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.measure import run_metadata
from sglang_w4afp8.bench.report import geometric_mean
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as ours
from sglang_w4afp8.kernels.ops.moe import launch_table
from sglang_w4afp8.kernels.ops.moe.launch_table import MeasuredLaunch
from sglang_w4afp8.timing import capture, interleaved_medians, launches_for, replay_us

ROUTINGS = ("even", "random", "skew16")
# (row_block, scale groups or columns, warps) that were among the best of wider searches on an H200: up to 16 rows per expert,
# where a launch is a chain of latencies, and from 16 on, where bytes in flight decide.
_LATENCY_ROWS = 16
_ABOVE_MEAN = (1.25, 1.5)
_REQUANT_TILES = {
    True: (
        *((1, 8, 1), (1, 8, 4), (1, 16, 2), (1, 16, 4), (1, 32, 4), (1, 32, 8), (1, 64, 8), (1, 64, 16)),
        *((2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 16, 4), (2, 32, 8), (4, 4, 4), (4, 8, 4), (8, 2, 2), (8, 4, 2)),
    ),
    False: (
        *((1, 4, 1), (1, 16, 2), (1, 16, 4), (1, 32, 4), (1, 32, 8), (1, 64, 8)),
        *((2, 4, 1), (2, 8, 2), (2, 8, 4), (2, 16, 4), (2, 32, 8), (4, 4, 1), (4, 4, 2), (4, 4, 4), (4, 8, 4)),
        *((8, 1, 1), (8, 2, 1), (8, 2, 2), (8, 4, 2), (8, 4, 4), (16, 2, 4), (16, 4, 4)),
    ),
}
_SILU_TILES = {
    True: (
        *((1, 512, 2), (1, 512, 4), (1, 1024, 4), (1, 1024, 8), (1, 2048, 4), (1, 2048, 8)),
        *((2, 256, 4), (2, 512, 2), (2, 512, 4), (2, 1024, 8), (4, 256, 4)),
    ),
    False: (
        *((1, 512, 2), (1, 512, 4), (1, 1024, 2), (1, 1024, 4), (1, 2048, 4), (1, 2048, 8)),
        *((2, 512, 2), (2, 512, 4), (2, 1024, 4), (4, 512, 4)),
    ),
}
# Turns of a candidate in the search, and of the few that remain at its end.
_REPEATS = 5
_FINAL_REPEATS = 9
# Launches that go on to the next stage, and to the last one, which is timed at every placement.
_KEPT, _FINALISTS = 4, 8
# A gain below this factor is not told from noise: the rule stays.
_NOISE = 1.01
# What a launch pays for being slower than the engine's kernel in some routing: its quotient to this power.
_ENGINE_POWER = 4


def _rule(kernel: str, columns: int, expected_m: int, experts: int) -> MeasuredLaunch:
    """What serving uses without a table; a measured launch must beat it."""
    choose = ours._requant_launch if kernel == "requant" else ours._silu_launch
    launch = choose.__wrapped__(columns, experts, expected_m, streaming.PADDED, torch.device("cuda"), measured=False)
    return MeasuredLaunch(
        expected_m,
        launch.col_block,
        launch.m_grid,
        2,
        launch.row_block,
        launch.num_warps,
        launch.overflow_experts,
        1 if launch.speculative_rows else 0,
    )


def _first_stage(
    tiles: Sequence[tuple[int, int, int]], columns: int, expected_m: int, experts: int
) -> list[MeasuredLaunch]:
    candidates = []
    for row_block, col_block, warps in tiles:
        if col_block >= 2 * columns:
            continue
        # From half of the mean rows in flight per expert up to four times as many; the estimate is one above the mean. With
        # many rows also programs that loop, so that what a program does once is paid for less often.
        factors = (0.5, 1, 2, 4) if expected_m <= _LATENCY_ROWS + 1 else (0.125, 0.25, 0.5, 1, 2, 4)
        mean = expected_m - 1
        grids = {triton.next_power_of_2(max(1, math.ceil(mean * factor / row_block))) for factor in factors}
        if expected_m > _LATENCY_ROWS + 1:
            # One step for nearly every expert whose rows scatter around the mean: a second step is a tail.
            grids |= {math.ceil(mean * factor / row_block) for factor in _ABOVE_MEAN}
        for m_grid in sorted({min(64, value) for value in grids}):
            # Enough of phase 2 for the skewed routing, or its time would judge what is chosen only later.
            hot_blocks = math.ceil((streaming.SKEW - 2) * (expected_m - 1) / row_block)
            slices = max(1, min(math.ceil(hot_blocks / m_grid), experts // 2))
            for speculative in (0, 1) if expected_m <= _LATENCY_ROWS + 1 else (0,):
                candidates.append(
                    MeasuredLaunch(expected_m, col_block, m_grid, 2, row_block, warps, slices, speculative)
                )
    return candidates


def _second_stage(best: Sequence[MeasuredLaunch]) -> list[MeasuredLaunch]:
    """Every arrangement of phase 2 around the best of the first stage."""
    return [
        dataclasses.replace(base, cap_slack=cap, overflow_experts=overflow, overflow_first=first)
        for base in best
        for overflow in sorted({1, *(math.ceil(base.overflow_experts / part) for part in (1, 2, 4))})
        for cap, first in itertools.product((2, 4), (False, True))
    ]


def _third_stage(best: Sequence[MeasuredLaunch]) -> list[MeasuredLaunch]:
    """Other shares of rows loaded unseen; far from few rows it is bytes that count, and such a row may be bytes for nothing."""
    return [
        dataclasses.replace(base, speculative_slack=slack)
        for base in best
        for slack in ((0, 0.5, 1, 4) if base.expected_m <= 2 * _LATENCY_ROWS + 1 else (0, 0.5, 1))
        if slack != base.speculative_slack
    ]


@dataclasses.dataclass
class _Cell:
    """What candidates of one cell are timed with: per placement a call per routing, the engine's own where it is installed,
    and how many calls fill a replay."""

    runs: Sequence[Sequence[Callable[[MeasuredLaunch], Any]]]
    engine: Sequence[Sequence[Callable[[], Any]]]
    launches: int = 1

    def times(
        self, candidates: Sequence[MeasuredLaunch], repeats: int = _REPEATS, placements: int = 1
    ) -> tuple[list[tuple[float, ...]], tuple[float, ...]]:
        """Microseconds per routing of every candidate, and of the engine's kernel: medians of turns, means over placements."""
        by_routing = []
        for routing in range(len(ROUTINGS)):
            by_placement = []
            for place in range(placements):
                run = self.runs[place][routing]
                providers = {str(index): lambda r=run, c=launch: r(c) for index, launch in enumerate(candidates)}
                if self.engine:
                    providers["engine"] = self.engine[place][routing]
                by_placement.append(interleaved_medians(providers, repeats, self.launches).values())
            by_routing.append([geometric_mean(times) for times in zip(*by_placement, strict=True)])
        all_times = list(zip(*by_routing, strict=True))
        return all_times[: len(candidates)], all_times[-1] if self.engine else ()

    def best(self, candidates: Sequence[MeasuredLaunch], count: int) -> list[MeasuredLaunch]:
        times, engine = self.times(candidates)
        ranked = sorted(zip(_scores(times, engine), candidates, strict=True), key=lambda entry: entry[0])
        return [candidate for _, candidate in ranked[:count]]


def _scores(times: Sequence[Sequence[float]], engine: Sequence[float] = ()) -> list[float]:
    """One number a candidate, the lower the better: between its mean and its worst quotient to the best of each routing,
    raised by what it loses to the engine."""
    best = [min(routing) for routing in zip(*times, strict=True)]
    scores = []
    for candidate in times:
        quotients = [us / least for us, least in zip(candidate, best, strict=True)]
        lost = max([1.0, *(us / theirs for us, theirs in zip(candidate, engine, strict=False))])
        scores.append(math.sqrt(geometric_mean(quotients) * max(quotients)) * lost**_ENGINE_POWER)
    return scores


def _runs_at_all(engine: Callable[[], Any]) -> bool:
    """Whether the engine serves the size: some releases refuse a K that is no multiple of 1024."""
    try:
        engine()
    except AssertionError:
        return False
    return True


def _cell(kernel: str, buffers: Sequence[Any], experts: int, rows: int) -> tuple[int, _Cell]:
    """The calls of one cell, and the estimate that serving would see."""
    cells = [streaming.Cell(experts, streaming.PADDED, rows, routing) for routing in ROUTINGS]
    if kernel == "requant":
        function, engine_call = ours.fp8_per_token_to_per_tensor_quant_triton, streaming.engine_requant
    else:
        function, engine_call = ours.silu_and_mul_masked_post_per_tensor_quant_fwd, streaming.engine_silu
    expected_m = cells[0].expected_m()

    def call(arguments: Sequence[Any]) -> Callable[[MeasuredLaunch], Any]:
        def run(candidate: MeasuredLaunch) -> Any:
            return function(*arguments, expected_m, launch=candidate.launch(expected_m, streaming.PADDED))

        return run

    arguments = [[place.arguments(cell) for cell in cells] for place in buffers]
    runs = [[call(entry) for entry in place] for place in arguments]
    engine = [[engine_call(entry, expected_m) for entry in place] for place in arguments]
    served = engine[0][0] is not None and _runs_at_all(engine[0][0])
    return expected_m, _Cell(runs, engine if served else [])


def _compile_ahead(run: Callable[[MeasuredLaunch], Any], candidates: Sequence[MeasuredLaunch]) -> None:
    """Compile every candidate in threads (the assembler runs outside the interpreter lock) before anything is timed."""
    distinct = {
        (c.col_block, c.row_block, c.num_warps, c.speculative_slack > 0, c.overflow_first): c for c in candidates
    }
    with concurrent.futures.ThreadPoolExecutor(max_workers=12) as pool:
        list(pool.map(run, distinct.values()))
    torch.cuda.synchronize()


def tune_cell(
    kernel: str, buffers: Sequence[Any], columns: int, experts: int, rows: int, incumbent: MeasuredLaunch | None = None
) -> tuple[MeasuredLaunch, float]:
    """The best launch of one cell, and its microseconds (geometric mean over the routings); ``incumbent`` is a finalist.

    ``buffers`` are the kernel's at several places in memory.
    """
    expected_m, cell = _cell(kernel, buffers, experts, rows)
    run = cell.runs[0][0]
    tiles = _REQUANT_TILES if kernel == "requant" else _SILU_TILES
    candidates = _first_stage(tiles[rows <= _LATENCY_ROWS], columns, expected_m, experts)
    _compile_ahead(run, candidates)
    cell.launches = launches_for(replay_us(capture(lambda: run(candidates[0]), 4), 4))
    best = cell.best(candidates, _KEPT)
    for next_stage, kept in ((_second_stage, _KEPT), (_third_stage, _FINALISTS)):
        candidates = list(dict.fromkeys([*best, *next_stage(best)]))
        _compile_ahead(run, candidates)
        best = cell.best(candidates, kept)
    if incumbent is not None and incumbent not in best:
        best.append(incumbent)
    best.append(_rule(kernel, columns, expected_m, experts))
    times, engine = cell.times(best, _FINAL_REPEATS, len(buffers))
    scores = _scores(times, engine)
    winner = scores.index(min(scores))
    if scores[-1] <= scores[winner] * _NOISE:
        winner = len(best) - 1
    return best[winner], geometric_mean(times[winner])


def launches_of(path: Path, gpu: str) -> dict[tuple[str, int, int], list[MeasuredLaunch]]:
    """The launches of a tuned file by kernel, columns (scale groups or N) and experts."""
    table = launch_table.parse(tuned_config.read_tuned(path, {"gpu": gpu, "schedule": launch_table.SCHEDULE}))
    return {
        (kernel, columns, count): list(entries)
        for kernel, by_columns in table.items()
        for columns, by_experts in by_columns.items()
        for count, entries in by_experts.items()
    }


def tune(
    out: Path,
    hidden: Sequence[int],
    inner: Sequence[int],
    experts: Sequence[int],
    rows: Sequence[int],
    keep: bool = True,
) -> Path:
    """Tune every cell and write ``out`` after each.

    Args:
        out: the tuned file; what it holds of other cells stays.
        hidden: K of the requant, one entry a size.
        inner: N of SiLU-and-multiply.
        experts: local experts.
        rows: mean live rows per expert.
        keep: leave cells that the file holds; otherwise they are measured again, against the launch in the file too.

    Raises:
        TunedConfigError: ``keep``, and the file is malformed or of another GPU or schedule.
    """
    gpu = tuned_config.gpu_name() or ""
    metadata: dict[str, str] = {
        "gpu": gpu,
        "schedule": launch_table.SCHEDULE,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "package_version": run_metadata()["sglang_w4afp8"],
        # The grouped GEMM's library plays no part here; the field is common to all tuned files.
        "kernel_version": "none",
    }
    launches: dict[tuple[str, int, int], list[MeasuredLaunch]] = {}
    if out.is_file():
        try:
            launches = launches_of(out, gpu)
        except (ValueError, KeyError, TypeError) as error:
            if keep:
                raise tuned_config.TunedConfigError(f"{out}: {error}; --fresh starts anew") from error
    kinds = [
        ("requant", k // streaming.GROUP, lambda k=k: streaming.RequantBuffers(max(experts), streaming.PADDED, k))
        for k in hidden
    ]
    kinds += [("silu", n, lambda n=n: streaming.SiluBuffers(max(experts), streaming.PADDED, n)) for n in inner]
    with tqdm(total=len(kinds) * len(experts) * len(rows), unit="cell", desc="tune", disable=None) as progress:
        for kernel, columns, make_buffers in kinds:
            buffers: list[Any] = []
            for count, row in itertools.product(experts, rows):
                done = launches.setdefault((kernel, columns, count), [])
                expected_m = streaming.Cell(count, streaming.PADDED, row, "even").expected_m()
                incumbent = next((entry for entry in done if entry.expected_m == expected_m), None)
                if incumbent is None or not keep:
                    buffers = buffers or [make_buffers() for _ in range(streaming.PLACEMENTS)]
                    winner, microseconds = tune_cell(kernel, buffers, columns, count, row, incumbent)
                    done[:] = [*(entry for entry in done if entry is not incumbent), winner]
                    tuned_config.write_tuned(
                        out, metadata, launch_table.to_data({k: v for k, v in launches.items() if v})
                    )
                    progress.set_postfix_str(f"{kernel} {columns} E{count} rows {row}: {microseconds:.2f} us")
                progress.update()
    return out
