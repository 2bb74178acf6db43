#!/usr/bin/env python3
"""The shapes where another Triton lost beside the engine's kernel, measured again by both in turns of whole processes.

    PYTHONPATH=python               python3 benchmark/toolchains.py --out toolchains.json
    PYTHONPATH=triton-3.8:python    python3 benchmark/toolchains.py --out toolchains.json
    ... the two again, as often as wanted; --tune in the last one of the other Triton

One process holds one Triton, so two of them cannot take turns launch by launch. Here a process measures only the shapes that
lost in ``requant_<tag>.json`` and ``silu_<tag>.json``, which is short enough to alternate: how far two runs of one Triton
are apart is then seen beside how far the two are. With ``--tune`` every such shape is also tuned by the Triton that runs, and
what it would launch (``tuned``) takes turns with the shipped launch (``ours``) and the engine's kernel.

Every call adds one run to the file; a run that is cut off adds nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import report, streaming
from sglang_w4afp8.bench.measure import refuse_other_set_up, run_metadata, write_json
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels, launch_table
from sglang_w4afp8.kernels.ops.moe.launch_table import MeasuredLaunch
from sglang_w4afp8.tune import streaming as tune_streaming

RESULTS = Path(__file__).resolve().parent / "results" / "h200"
JOIN = "; "


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kernel: the size that tells its shapes apart, its buffers, its providers, and our function."""

    size: str
    make: Callable[[int, int, int], Any]
    providers: Callable[[Any, streaming.Cell], dict[str, Callable[[], Any]]]
    function: Callable[..., Any]
    columns: Callable[[int], int]


KINDS = {
    "requant": Kind(
        "k",
        streaming.RequantBuffers,
        streaming.requant_providers,
        ep_moe_kernels.fp8_per_token_to_per_tensor_quant_triton,
        lambda k: k // streaming.GROUP,
    ),
    "silu": Kind(
        "n",
        streaming.SiluBuffers,
        streaming.silu_providers,
        ep_moe_kernels.silu_and_mul_masked_post_per_tensor_quant_fwd,
        lambda n: n,
    ),
}


def shapes_that_lost(results: Path, kernel: str, tags: tuple[str, str]) -> list[report.Shape]:
    """Shapes (size, experts, rows) that the second run has more than 3% slower than the first, beside the engine's kernel.

    Raises:
        SystemExit: a file is missing, holds no figures of the engine, or nothing lost.
    """
    runs = []
    for tag in tags:
        path = results / f"{kernel}_{tag}.json"
        if not path.is_file():
            raise SystemExit(f"{path}: does not exist; measure it with `sglang-w4afp8 bench` first")
        runs.append(report.by_shape(json.loads(path.read_text(encoding="utf-8"))["cells"], KINDS[kernel].size))
    lost = report.lost_by_shape(*runs, "engine_us")
    return sorted(shape for shape, factor in lost.items() if factor > report.TOOLCHAIN_DIFFERENCE)


def shipped_launch(kernel: str, columns: int, experts: int, expected_m: int) -> MeasuredLaunch | None:
    """What the shipped table of this GPU holds for exactly this shape."""
    gpu = tuned_config.gpu_name() or ""
    path = tuned_config.SHIPPED_DIRECTORY / tuned_config.file_name(launch_table.KIND, gpu)
    if not path.is_file():
        return None
    entries = tune_streaming.launches_of(path, gpu).get((kernel, columns, experts), ())
    return next((entry for entry in entries if entry.expected_m == expected_m), None)


def measure(kernel: str, shapes: Sequence[report.Shape], repeats: int, tune: bool) -> list[dict[str, Any]]:
    """One run's cells of one kernel."""
    kind, cells = KINDS[kernel], []
    turns = -(-repeats // streaming.PLACEMENTS)
    progress = tqdm(total=len(shapes), unit="shape", desc=f"{kernel}, triton {triton.__version__}", disable=None)
    for size in sorted({shape[0] for shape in shapes}):
        mine = [shape for shape in shapes if shape[0] == size]
        most = max(experts for _, experts, _ in mine)
        places = [kind.make(most, streaming.PADDED, size) for _ in range(streaming.PLACEMENTS)]
        for _, experts, rows in mine:
            launch = None
            if tune:
                expected_m = streaming.Cell(experts, streaming.PADDED, rows, "even").expected_m()
                incumbent = shipped_launch(kernel, kind.columns(size), experts, expected_m)
                launch, _ = tune_streaming.tune_cell(kernel, places, kind.columns(size), experts, rows, incumbent)
            for routing in streaming.ROUTINGS:
                cell = streaming.Cell(experts, streaming.PADDED, rows, routing)
                timed = [streaming.measure_cell(_providers(kind, place, cell, launch), turns) for place in places]
                key = {"kernel": kernel, "size": size, **dataclasses.asdict(cell)}
                cells.append({**key, "triton": triton.__version__, **streaming.over_placements(timed)})
                if launch is not None:
                    cells[-1]["tuned"] = dataclasses.asdict(launch)
            progress.update()
    progress.close()
    return cells


def _providers(
    kind: Kind, place: Any, cell: streaming.Cell, launch: MeasuredLaunch | None
) -> dict[str, Callable[[], Any]]:
    providers = kind.providers(place, cell)
    if "engine" not in providers:
        raise SystemExit("the engine's kernels cannot be imported: without them there is nothing to judge a Triton by")
    del providers["legacy"]
    if launch is not None:
        expected_m = cell.expected_m()
        tuned = launch.launch(expected_m, cell.padded)
        providers["tuned"] = functools.partial(kind.function, *place.arguments(cell), expected_m, launch=tuned)
    return providers


def runs_before(out: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The file that this run is added to, with its Triton and command in ``meta``.

    Raises:
        SystemExit: it was measured with another GPU, driver, torch or engine.
    """
    if not out.is_file():
        return {"meta": {**meta}, "cells": []}
    document = json.loads(out.read_text(encoding="utf-8"))
    known = document["meta"]
    refuse_other_set_up(out, {**known, "triton": meta["triton"]}, meta)
    for key in ("triton", "command"):
        known[key] = JOIN.join(dict.fromkeys([*known[key].split(JOIN), meta[key]]))
    return document


def add_run(out: Path, meta: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> None:
    """Add one run; its number is counted per Triton. Raises as :func:`runs_before` does."""
    document = runs_before(out, meta)
    number = 1 + max((cell["run"] for cell in document["cells"] if cell["triton"] == meta["triton"]), default=0)
    document["cells"] += [{**cell, "run": number} for cell in cells]
    write_json(out, document)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and add one run; returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results file; a run is added to it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the files of both whole runs are")
    parser.add_argument("--tags", nargs=2, default=["triton36", "triton38"], help="endings of their names")
    parser.add_argument("--repeats", type=int, default=41, help="timed turns of every provider")
    parser.add_argument("--tune", action="store_true", help="also tune every shape with the Triton that runs")
    args = parser.parse_args(argv)
    shapes = {kernel: shapes_that_lost(args.results, kernel, tuple(args.tags)) for kernel in KINDS}
    if not torch.cuda.is_available():
        print("toolchains: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    meta = run_metadata(repeats=args.repeats, placements=streaming.PLACEMENTS)
    runs_before(args.out, meta)  # refuses before the time is spent
    cells = [cell for kernel in KINDS for cell in measure(kernel, shapes[kernel], args.repeats, args.tune)]
    add_run(args.out, meta, cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
