"""Measures launch candidates of the streaming kernels and writes the table that ``launch_table`` reads.

A cell is one (kernel, columns, experts, rows); its candidates are timed under even, random and skewed routing, because the
estimate that picks a launch at serving is only a mean. The score is the geometric mean over them. The search goes in
stages: tiles and m-grid first, then, around the best of them, overflow slices, cap and speculation, and the best few again
with more turns.
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
from sglang_w4afp8.bench.measure import capture, launches_for, replay_us, run_metadata
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as ours
from sglang_w4afp8.kernels.ops.moe import launch_table
from sglang_w4afp8.kernels.ops.moe.launch_table import MeasuredLaunch

ROUTINGS = ("even", "random", "skew16")
# (row_block, scale groups, warps) that were among the best of a wider search on an H200.
_REQUANT_TILES = (
    *((1, 8, w) for w in (1, 2)),
    *((1, 16, w) for w in (2, 4)),
    *((1, 32, w) for w in (4, 8)),
    *((2, 8, 2), (2, 8, 4), (2, 16, 4)),
    *((4, 4, 1), (4, 4, 4), (4, 8, 2), (4, 8, 4)),
    *((8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 4, 2), (8, 4, 4), (8, 8, 4)),
)
_SILU_TILES = (
    *((1, 512, w) for w in (1, 2, 4)),
    *((1, 1024, w) for w in (2, 4)),
    *((1, 2048, w) for w in (4, 8)),
    *((2, 256, 2), (2, 512, 2), (2, 512, 4), (2, 1024, 4), (2, 1024, 8)),
    *((4, 256, 2), (4, 256, 4), (4, 512, 4), (8, 128, 2), (8, 256, 4), (8, 256, 8)),
)
# Turns of a candidate in the search, and of the few that remain at its end.
_REPEATS = 5
_FINAL_REPEATS = 21
# A gain below this factor is not told from noise: the rule stays.
_NOISE = 1.01


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
        0,
    )


def _first_stage(
    tiles: Sequence[tuple[int, int, int]], columns: int, expected_m: int, experts: int
) -> list[MeasuredLaunch]:
    slices = ours._overflow_experts(experts)
    candidates = []
    for row_block, col_block, warps in tiles:
        if col_block >= 2 * columns:
            continue
        # From half of the expected rows in flight per expert up to four times as many.
        wanted = {max(1, math.ceil(expected_m * factor / row_block)) for factor in (0.5, 1, 2, 4)}
        for m_grid in sorted({min(64, triton.next_power_of_2(value)) for value in wanted}):
            for speculative in (0, 1) if expected_m <= 9 else (0,):
                candidates.append(
                    MeasuredLaunch(expected_m, col_block, m_grid, 2, row_block, warps, slices, speculative)
                )
    return candidates


def _second_stage(best: Sequence[MeasuredLaunch], experts: int) -> list[MeasuredLaunch]:
    slices = sorted({1, max(1, experts // 8), max(1, experts // 4), max(1, experts // 2)})
    return [
        dataclasses.replace(base, cap_slack=slack, overflow_experts=overflow, speculative_slack=speculative)
        for base, slack, overflow, speculative in itertools.product(best, (2, 4), slices, (0, 1, 4))
        # From here on it is bytes that count, and a row read unseen is bytes for nothing.
        if not (speculative and base.expected_m > 33)
    ]


def _score(
    candidates: Sequence[MeasuredLaunch],
    runs: Sequence[Callable[[MeasuredLaunch], Any]],
    launches: int,
    repeats: int = _REPEATS,
) -> list[float]:
    """Geometric mean of microseconds over the routings, per candidate; all candidates take turns."""
    best: list[list[float]] = []
    for run in runs:
        graphs = [capture(lambda r=run, c=candidate: r(c), launches) for candidate in candidates]
        times: list[list[float]] = [[] for _ in candidates]
        for turn in range(repeats + 1):
            for graph, elapsed in zip(graphs, times, strict=True):
                us = replay_us(graph, launches)
                if turn:
                    elapsed.append(us)
        best.append([sorted(elapsed)[len(elapsed) // 2] for elapsed in times])
    return [math.exp(sum(map(math.log, per_run)) / len(per_run)) for per_run in zip(*best, strict=True)]


def _runs(kernel: str, buffers: Any, experts: int, rows: int) -> tuple[int, list[Callable[[MeasuredLaunch], Any]]]:
    """The kernel's calls for one cell, one per routing, and the estimate that serving would see."""
    cells = [streaming.Cell(experts, streaming.PADDED, rows, routing) for routing in ROUTINGS]
    function = (
        ours.fp8_per_token_to_per_tensor_quant_triton
        if kernel == "requant"
        else ours.silu_and_mul_masked_post_per_tensor_quant_fwd
    )
    runs = []
    for cell in cells:
        arguments = buffers.arguments(cell)
        expected_m = cell.expected_m()
        runs.append(
            lambda candidate, a=arguments, m=expected_m: function(
                *a,
                m,
                launch=dataclasses.replace(
                    candidate.launch(m), row_cap=min(streaming.PADDED, candidate.launch(m).row_cap)
                ),
            )
        )
    return cells[0].expected_m(), runs


def _compile_ahead(run: Callable[[MeasuredLaunch], Any], candidates: Sequence[MeasuredLaunch]) -> None:
    """Compile every candidate in threads (the assembler runs outside the interpreter lock) before anything is timed."""
    distinct = {(c.col_block, c.row_block, c.num_warps, c.speculative_slack > 0): c for c in candidates}
    with concurrent.futures.ThreadPoolExecutor(max_workers=12) as pool:
        list(pool.map(run, distinct.values()))
    torch.cuda.synchronize()


def tune_cell(kernel: str, buffers: Any, columns: int, experts: int, rows: int) -> tuple[MeasuredLaunch, float]:
    """The best launch of one cell and its score in microseconds."""
    expected_m, runs = _runs(kernel, buffers, experts, rows)
    tiles = _REQUANT_TILES if kernel == "requant" else _SILU_TILES
    first = _first_stage(tiles, columns, expected_m, experts)
    _compile_ahead(runs[0], first)
    launches = launches_for(replay_us(capture(lambda: runs[0](first[0]), 4), 4))
    scores = _score(first, runs, launches)
    ranked = [candidate for _, candidate in sorted(zip(scores, first, strict=True), key=lambda entry: entry[0])]
    second = _second_stage(ranked[:3], experts)
    _compile_ahead(runs[0], second)
    rule = _rule(kernel, columns, expected_m, experts)
    finalists = [*ranked[:2], *second]
    scores = _score(finalists, runs, launches)
    best = [candidate for _, candidate in sorted(zip(scores, finalists, strict=True), key=lambda entry: entry[0])][:4]
    best.append(rule)
    scores = _score(best, runs, launches, _FINAL_REPEATS)
    score, winner = min(zip(scores, best, strict=True), key=lambda entry: entry[0])
    if scores[-1] <= score * _NOISE:
        score, winner = scores[-1], rule
    return winner, score


def tune(
    out: Path,
    hidden: Sequence[int],
    inner: Sequence[int],
    experts: Sequence[int],
    rows: Sequence[int],
    keep: bool = True,
) -> Path:
    """Tune every cell and write ``out`` after each; with ``keep`` the cells that the file already holds are not repeated."""
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
    if keep and out.is_file():
        table = launch_table.parse(tuned_config.read_tuned(out, {"gpu": gpu, "schedule": launch_table.SCHEDULE}))
        for kernel, by_columns in table.items():
            for columns, by_experts in by_columns.items():
                for count, entries in by_experts.items():
                    launches[kernel, columns, count] = list(entries)
    kinds = [
        ("requant", k // streaming.GROUP, lambda k=k: streaming.RequantBuffers(max(experts), streaming.PADDED, k))
        for k in hidden
    ]
    kinds += [("silu", n, lambda n=n: streaming.SiluBuffers(max(experts), streaming.PADDED, n)) for n in inner]
    with tqdm(total=len(kinds) * len(experts) * len(rows), unit="cell", desc="tune", disable=None) as progress:
        for kernel, columns, make_buffers in kinds:
            buffers = None
            for count, row in itertools.product(experts, rows):
                done = launches.setdefault((kernel, columns, count), [])
                expected_m = streaming.Cell(count, streaming.PADDED, row, "even").expected_m()
                if not any(entry.expected_m == expected_m for entry in done):
                    buffers = make_buffers() if buffers is None else buffers
                    winner, score = tune_cell(kernel, buffers, columns, count, row)
                    done.append(winner)
                    tuned_config.write_tuned(
                        out, metadata, launch_table.to_data({k: v for k, v in launches.items() if v})
                    )
                    progress.set_postfix_str(f"{kernel} {columns} E{count} rows {row}: {score:.2f} us")
                progress.update()
    return out
