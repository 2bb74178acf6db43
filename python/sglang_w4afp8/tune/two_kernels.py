"""Searches the launches of the two Triton grouped GEMMs and writes the table that ``grouped_gemm_table`` reads.

Per size (N, K, local experts), in steps that each go on where an interrupted run stopped:

1. Every candidate is compiled, in processes of its own beside what the GPU measures.
2. Per cell (rows, routing) every candidate launch of each kernel is timed in turns.
3. One ``block_n`` a kernel is chosen, since it is the layout that a server's weights get whatever its rows, and per row count
   the launch that is best over all routings.
4. Per cell the layer with those launches is timed beside our CUTLASS chain and compared with a float64 reference. What both
   took is what ``auto`` decides by.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from tqdm import tqdm

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.expert_layer import Layer, LayerRuns, Regrouped, chains, error_of, reference_rows
from sglang_w4afp8.bench.measure import refuse_other_set_up, write_json
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.kernels.ops.moe import w4a8_grouped_gemm as two
from sglang_w4afp8.kernels.ops.moe.grouped_gemm_table import MeasuredPair, ShapeLaunches
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GroupedGemmLaunch
from sglang_w4afp8.timing import interleaved_medians
from sglang_w4afp8.tune.gemm_tiles import table_metadata

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUTINGS = ("even", "random", "skew16")
GEMMS = ("gate_up", "down")
# Holds 256 rows of random routing, and a hot expert of 64 times 16; a multiple of 512, where the engine's GEMM is right too.
PADDED = 1024
# Turns of a candidate in the search, and of the layer.
SEARCH_REPEATS, LAYER_REPEATS = 5, 9
# How much further from float64 than CUTLASS a layer may be: in every committed cell it is nearer.
ERROR_MARGIN = 1.05

Result = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """One layer's sizes: intermediate size N, hidden size K, experts on a rank."""

    n: int
    k: int
    experts: int

    def __str__(self) -> str:
        return f"N {self.n}, K {self.k}, {self.experts} experts"


# ---- candidates

# (block_m, groups a step, warps, stages, look-up, registers) by block_n: those that were the best, or within 2% of it, in some
# cell of wider searches on an H200 (8 to 256 experts, 1 to 128 rows; `benchmark/results/h200/two_kernels.search.json`).
_CORE: Mapping[bool, Mapping[int, tuple[tuple[int, int, int, int, bool, int | None], ...]]] = {
    True: {
        64: (
            *((8, 2, 4, 3, False, 168), (8, 1, 4, 3, False, 168), (16, 1, 4, 3, False, 168), (16, 1, 4, 4, False, 168)),
            *((32, 1, 4, 3, False, None), (32, 1, 4, 4, False, 168), (64, 1, 4, 3, False, None)),
        ),
        128: (
            *(
                (8, 1, 4, 3, False, None),
                (8, 1, 4, 3, False, 168),
                (16, 1, 4, 3, False, 168),
                (16, 1, 4, 4, False, 168),
            ),
            *(
                (16, 1, 4, 3, False, None),
                (32, 1, 4, 3, False, None),
                (32, 1, 4, 4, False, None),
                (64, 1, 8, 3, False, None),
            ),
        ),
    },
    False: {
        64: (
            *(
                (8, 2, 4, 3, False, None),
                (8, 1, 4, 3, False, None),
                (16, 1, 4, 3, False, None),
                (32, 1, 4, 3, False, 168),
            ),
            *((64, 1, 4, 3, True, None), (128, 1, 4, 3, True, 168), (128, 1, 4, 3, True, None)),
        ),
        128: (
            *(
                (8, 2, 4, 3, False, None),
                (8, 1, 4, 3, False, None),
                (16, 1, 4, 3, False, 128),
                (16, 1, 4, 3, False, None),
            ),
            *(
                (32, 1, 4, 3, False, 168),
                (64, 1, 4, 3, False, None),
                (64, 1, 4, 3, True, None),
                (128, 1, 8, 3, True, None),
            ),
        ),
    },
}


def _worth_timing(block_m: int, rows: int) -> bool:
    """A step over rows is one tile, or a hot expert's are a few."""
    return block_m <= max(16, 2 * rows) and 2 * block_m >= min(rows, 64)


def candidates(rows: int, gate_up: bool, wide: bool = False) -> list[GroupedGemmLaunch]:
    """Launches worth timing at a mean of ``rows``; with ``wide`` every launch that fits, not only those near the known best."""
    if not wide:
        return [
            GroupedGemmLaunch(block_n, *launch)
            for block_n, launches in _CORE[gate_up].items()
            for launch in launches
            if _worth_timing(launch[0], rows)
        ]
    found = []
    blocks_m = [m for m in (8, 16, 32, 64, 128) if m <= max(16, 4 * rows) and 4 * m >= min(rows, 64)]
    for block_n, block_m, groups, warps, stages in itertools.product((64, 128), blocks_m, (1, 2), (4, 8), (3, 4, 5)):
        accumulators = block_n * block_m * (2 if gate_up else 1) // (warps * 32)
        # A warp group works on 64 rows of the weights; more accumulators than this a thread spill.
        if block_n < 16 * warps or accumulators > 128 or (groups == 2 and stages > 3):
            continue
        # With few rows a look-up only costs; with many it saves matrix products.
        # 168 registers let three programs of four warps share a multiprocessor, 128 four, or two of eight warps.
        for look_up in (False, True) if block_m >= 64 else (False,):
            for registers in dict.fromkeys((None, 168 if warps == 4 else 128, 128)):
                found.append(GroupedGemmLaunch(block_n, block_m, groups, warps, stages, look_up, registers))
    return found


def fitting(launches: Sequence[GroupedGemmLaunch], gate_up: bool, size: Size) -> list[GroupedGemmLaunch]:
    """Those whose tiles and steps divide a size's columns and scale groups."""
    columns, groups = (size.n, size.k // two.GROUP_SIZE) if gate_up else (size.k, size.n // two.GROUP_SIZE)
    return [launch for launch in launches if columns % launch.block_n == 0 and groups % launch.groups_per_step == 0]


def launch_name(launch: GroupedGemmLaunch) -> str:
    """A launch as a key of a JSON file; :func:`launch_of` reads it."""
    return ",".join(str(value) for value in launch.__dict__.values())


def launch_of(name: str) -> GroupedGemmLaunch:
    *numbers, look_up, registers = name.split(",")
    return GroupedGemmLaunch(*map(int, numbers), look_up == "True", None if registers == "None" else int(registers))


# ---- compiling ahead


@dataclass(frozen=True)
class CompileJob:
    """One launch of one kernel at one size."""

    gate_up: bool
    size: Size
    padded: int
    launch: GroupedGemmLaunch


def compile_job(job: CompileJob) -> str:
    """Compile a launch for the current GPU into Triton's cache, in whatever process; why it cannot be, or an empty text."""
    try:
        compile_launch(job)
    except Exception as error:  # too much shared memory or too many registers, in the compiler's own words
        return f"{type(error).__name__}: {error}"
    return ""


def compile_launch(job: CompileJob) -> None:
    """As :func:`compile_job`, but raises what the compiler does."""
    n, k, experts = job.size.n, job.size.k, job.size.experts

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    columns, width = (2 * n, k) if job.gate_up else (k, n)
    groups = width // two.GROUP_SIZE
    x = meta(experts, job.padded, width, dtype=torch.float8_e4m3fn)
    w_q = meta(experts, columns, width // 2, dtype=torch.int8)
    w_scale = meta(experts, groups, columns, dtype=torch.bfloat16)
    masked_m, one = meta(experts, dtype=torch.int32), meta(1, dtype=torch.float32)
    if job.gate_up:
        x_scale = meta(experts, groups, job.padded, dtype=torch.float32).transpose(1, 2)
        output = meta(experts, job.padded, n, dtype=torch.float8_e4m3fn)
        two.w4a8_gate_up(x, x_scale, w_q, w_scale, masked_m, one, output, job.launch)
    else:
        output = meta(experts, job.padded, k, dtype=torch.bfloat16)
        two.w4a8_down(x, one, w_q, w_scale, masked_m, output, job.launch)


def jobs_of(size: Size, rows: Sequence[int], padded: int, wide: bool = False) -> list[CompileJob]:
    """Every launch that a search over these rows times at one size."""
    return [
        CompileJob(gate_up, size, padded, launch)
        for gate_up in (True, False)
        for launch in dict.fromkeys(
            launch for count in rows for launch in fitting(candidates(count, gate_up, wide), gate_up, size)
        )
    ]


class Compiler:
    """Processes that compile beside the measuring one: Triton holds the interpreter's lock for most of its time."""

    def __init__(self, processes: int | None = None) -> None:
        count = processes or max(1, min(14, (os.cpu_count() or 2) - 2))
        context = multiprocessing.get_context("spawn")
        self.pool = concurrent.futures.ProcessPoolExecutor(count, mp_context=context)
        self.pending: dict[CompileJob, concurrent.futures.Future[str]] = {}

    def start(self, jobs: Sequence[CompileJob]) -> None:
        for job in jobs:
            if job not in self.pending:
                self.pending[job] = self.pool.submit(compile_job, job)

    def compiled(self, job: CompileJob) -> bool:
        """Waits for a job that was started; whether it could be compiled."""
        return not self.pending[job].result()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


# ---- the search


def search_cell(
    layer: Layer, regrouped: Regrouped, cell: streaming.Cell, wide: bool = False, compiler: Compiler | None = None
) -> Result:
    """Medians of every candidate of both kernels, by its name; one that cannot be launched here is left out."""
    runs = LayerRuns(layer, regrouped, cell)
    size = Size(layer.inner, layer.hidden, cell.experts)
    found: Result = {"expected_m": cell.expected_m()}
    for gemm, make in zip(GEMMS, (runs.gate_up, runs.down), strict=True):
        gate_up = gemm == "gate_up"
        launches = fitting(candidates(cell.rows, gate_up, wide), gate_up, size)
        if compiler is not None:
            launches = [
                launch for launch in launches if compiler.compiled(CompileJob(gate_up, size, cell.padded, launch))
            ]
        providers = {launch_name(launch): make(launch) for launch in launches}
        medians = interleaved_medians(launchable(f"{gemm} for {cell}", providers), SEARCH_REPEATS)
        found[gemm] = {name: round(us, 2) for name, us in medians.items()}
    return found


def launchable(what: str, providers: Mapping[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    """The calls that can be launched here, all compiled. Those that cannot are left out, and why is said.

    Raises:
        SystemExit: there is none.
    """
    # The assembler runs outside of the interpreter's lock. A new thread has no context until it asks for one, and where
    # nothing is left to compile, a tensor map is the first thing that it would make.
    with concurrent.futures.ThreadPoolExecutor(max_workers=12, initializer=torch.cuda.synchronize) as pool:
        outcomes = list(pool.map(_error_of_call, providers.values()))
    torch.cuda.synchronize()
    for name, error in zip(providers, outcomes, strict=True):
        if error is not None:
            tqdm.write(f"two_kernels: {what}: left out {name}: {type(error).__name__}: {error}", file=sys.stderr)
    if all(outcomes):
        raise SystemExit(f"two_kernels: no candidate of {what} can be launched: {outcomes[0]}")
    return {name: run for (name, run), error in zip(providers.items(), outcomes, strict=True) if error is None}


def _error_of_call(run: Callable[[], None]) -> Exception | None:
    try:
        run()
    except Exception as error:  # too much shared memory or too many registers, in the compiler's own words
        return error
    return None


def choose_launches(cells: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, dict[int, GroupedGemmLaunch]]]:
    """Per kernel the ``block_n`` and, by ``expected_m``, the launch that the searched cells of one shape speak for.

    A launch's score at an estimate is the geometric mean over the routings, because the estimate is all that is known when it
    is chosen; a ``block_n``'s score is that of its best launches over all estimates.
    """
    chosen = {}
    for gemm in GEMMS:
        by_estimate: dict[int, list[Mapping[str, float]]] = {}
        for cell in cells:
            by_estimate.setdefault(cell["expected_m"], []).append(cell[gemm])
        best: dict[int, dict[int, tuple[float, GroupedGemmLaunch]]] = {}
        for expected_m, routings in by_estimate.items():
            for name in set.intersection(*(set(medians) for medians in routings)):
                launch, score = launch_of(name), geometric_mean(medians[name] for medians in routings)
                of_block = best.setdefault(launch.block_n, {})
                of_block[expected_m] = min(of_block.get(expected_m, (math.inf, launch)), (score, launch), key=_score)
        complete = {block_n: found for block_n, found in best.items() if len(found) == len(by_estimate)}
        if not complete:
            raise SystemExit(f"{gemm}: no block_n has a launch at every row count")
        block_n = min(complete, key=lambda block: geometric_mean(score for score, _ in complete[block].values()))
        chosen[gemm] = block_n, {expected_m: launch for expected_m, (_, launch) in complete[block_n].items()}
    return chosen


def _score(entry: tuple[float, GroupedGemmLaunch]) -> float:
    return entry[0]


# ---- the table


def matching(cells: Sequence[Mapping[str, Any]], key: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [cell for cell in cells if all(cell.get(name) == value for name, value in key.items())]


def make_table(
    searched: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, str] | None = None,
) -> dict[tuple[int, int, int], ShapeLaunches]:
    """Launches of every searched shape, and the layer's times where measured: of the routing that is Triton's worst."""
    table = {}
    shapes = sorted({(cell["inner"], cell["hidden"], cell["experts"]) for cell in searched})
    for n, k, experts in shapes:
        wanted = {"inner": n, "hidden": k, "experts": experts}
        chosen = choose_launches(matching(searched, wanted))
        pairs = []
        for expected_m in sorted(chosen["gate_up"][1]):
            launches = [chosen[gemm][1][expected_m] for gemm in GEMMS]
            times = [
                cell
                for cell in matching(measured, {**wanted, "expected_m": expected_m})
                if [cell[gemm] for gemm in GEMMS] == [launch.__dict__ for launch in launches]
            ]
            worst = max(times, key=lambda cell: cell["triton_us"] / cell["cutlass_us"], default={})
            pairs.append(MeasuredPair(expected_m, *launches, worst.get("triton_us"), worst.get("cutlass_us")))
        table[n, k, experts] = ShapeLaunches(tuple(pairs), dict(provenance or {}))
    return table


def write_table(path: Path, table: Mapping[tuple[int, int, int], ShapeLaunches], kernel_version: str) -> Path:
    """Write the tuned file of this GPU; shapes of other runs that it holds already are kept."""
    gpu = tuned_config.gpu_name() or ""
    match = {"gpu": gpu, "schedule": grouped_gemm_table.SCHEDULE}
    kept = grouped_gemm_table.parse(tuned_config.read_tuned(path, match)) if path.is_file() else {}
    data = grouped_gemm_table.to_data({**kept, **table})
    # What could not be read again must not be written.
    grouped_gemm_table.parse(data)
    tuned_config.write_tuned(path, {**table_metadata(gpu, kernel_version), **match}, data)
    return path


# ---- a whole run


def key_of(cell: streaming.Cell, hidden: int, inner: int) -> dict[str, Any]:
    """What names a cell in the files."""
    return {"hidden": hidden, "inner": inner, **dataclasses.asdict(cell)}


def plan(experts: Sequence[int], rows: Sequence[int], padded: int = PADDED) -> list[streaming.Cell]:
    return [
        cell
        for cell in streaming.grid(experts, rows, ROUTINGS, padded)
        if not cell.routing.startswith("skew") or cell.rows * streaming.SKEW <= padded
    ]


class Run:
    """What was measured so far, in a file that is written after every cell; a second run of the same set-up goes on with it."""

    def __init__(self, path: Path, meta: Mapping[str, Any], keep: bool = True) -> None:
        self.path, self.meta = path, meta
        self.searched: list[Result] = []
        self.measured: list[Result] = []
        if keep and path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            refuse_other_set_up(path, content["meta"], meta)
            self.searched, self.measured = content["searched"], content["cells"]

    def save(self) -> None:
        write_json(self.path, {"meta": self.meta, "searched": self.searched, "cells": self.measured})


def measure_layer(
    layer: Layer,
    regrouped: Regrouped,
    cell: streaming.Cell,
    kernel: Callable[..., Any],
    launches: tuple[GroupedGemmLaunch, GroupedGemmLaunch],
) -> Result:
    """Times of the two kernels with these launches and of our CUTLASS chain.

    Raises:
        RuntimeError: the two kernels are further from float64 than CUTLASS: no time of a wrong result is kept.
    """
    runs = LayerRuns(layer, regrouped, cell)
    providers = {"triton": runs.whole(*launches), "cutlass": chains(layer, cell, kernel)["ours"]}
    expected = reference_rows(layer, cell, runs.x, runs.x_scale)
    errors = {name: error_of(run(), expected) for name, run in providers.items()}
    if not errors["triton"] <= ERROR_MARGIN * errors["cutlass"]:
        raise RuntimeError(f"two-kernels: {cell}: error {errors['triton']:.4g}, CUTLASS {errors['cutlass']:.4g}")
    medians = interleaved_medians(providers, LAYER_REPEATS)
    return {
        "expected_m": cell.expected_m(),
        **{f"{name}_us": round(us, 2) for name, us in medians.items()},
        **{f"{name}_rel_err": round(error, 5) for name, error in errors.items()},
        **{gemm: dict(launch.__dict__) for gemm, launch in zip(GEMMS, launches, strict=True)},
    }


def tune(
    path: Path,
    sizes: Sequence[Size],
    kernel: Callable[..., Any],
    kernel_version: str,
    meta: Mapping[str, Any],
    *,
    rows: Sequence[int] = ROWS,
    wide: bool = False,
    keep: bool = True,
    time_limit_s: float = math.inf,
    compiler: Compiler | None = None,
) -> bool:
    """Search and measure every size, and write the table of those that are whole after each.

    Args:
        path: the table; what it holds of other sizes stays. What was measured is kept beside it (``.measured``).
        sizes: (N, K, experts), the most important first.
        kernel, kernel_version: `cutlass_w4a8_moe_mm` and the version of sglang-kernel, which CUTLASS is timed with.
        meta: of this run (``run_metadata``); a kept file of another set-up is refused by name.
        rows: mean live rows per expert.
        wide: search every launch that fits.
        keep: go on with what an earlier run measured; otherwise all is measured anew.
        time_limit_s: after this no cell is started; sizes that are whole by then are in the table.
        compiler: processes that compile ahead; none: candidates are compiled when they are timed.

    Returns:
        Whether every size is in the table.
    """
    deadline = time.monotonic() + time_limit_s
    run = Run(path.with_suffix(".measured"), meta, keep)
    provenance = {
        name: str(meta[name]) for name in ("date", "driver", "torch", "triton", "sglang_kernel", "sglang_w4afp8")
    }
    if compiler is not None:
        compiler.start([job for size in sizes for job in jobs_of(size, rows, PADDED, wide)])
    by_width: dict[tuple[int, int], list[int]] = {}
    for size in sizes:
        by_width.setdefault((size.n, size.k), []).append(size.experts)
    cells_in_all = sum(2 * len(plan(experts, rows)) for experts in by_width.values())
    with tqdm(total=cells_in_all, unit="cell", desc="tune two-kernels", disable=None) as progress:
        for (n, k), experts in by_width.items():
            layer = Layer(max(experts), PADDED, k, n, "cuda")
            regrouped = Regrouped(layer)
            for count in experts:
                cells = plan([count], rows)
                for cell in cells:
                    key = key_of(cell, k, n)
                    if not matching(run.searched, key):
                        if time.monotonic() > deadline:
                            return False
                        run.searched.append({**key, **search_cell(layer, regrouped, cell, wide, compiler)})
                        run.save()
                    progress.update()
                searched = matching(run.searched, {"inner": n, "hidden": k, "experts": count})
                (shape,) = make_table(searched, ()).values()
                for cell in cells:
                    key = key_of(cell, k, n)
                    pair = shape.at(cell.expected_m())
                    launches = (pair.gate_up, pair.down)
                    wanted = {gemm: dict(launch.__dict__) for gemm, launch in zip(GEMMS, launches, strict=True)}
                    if not matching(run.measured, {**key, **wanted}):
                        if time.monotonic() > deadline:
                            return False
                        run.measured = [entry for entry in run.measured if not matching([entry], key)]
                        run.measured.append({**key, **measure_layer(layer, regrouped, cell, kernel, launches)})
                        run.save()
                    progress.update()
                write_table(path, make_table(searched, run.measured, provenance), kernel_version)
                progress.set_postfix_str(str(Size(n, k, count)))
            del layer, regrouped
            torch.cuda.empty_cache()
    return True
