"""What the registered benchmarks share: tuned, legacy geometry, the installed engine and a copy, over shapes and skews.

A cell is timed only after its bytes were compared: ours with the installed engine's (without an engine, ours under both
geometries). A cell whose check is red has no figures, no ratio is made of it, and the run's exit status is 1.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_w4afp8.bench import report, streaming
from sglang_w4afp8.bench.measure import run_metadata, write_json
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch

Providers = dict[str, Callable[[], Any]]
SKEWS = (1, 2, 4, 8, 16)
ENGINE, SELF, RED = "engine", "own geometries", "red"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One payload: ``columns`` is K of the requant and N of SiLU."""

    columns: int
    experts: int
    padded: int
    rows: tuple[int, ...]
    skews: tuple[int, ...] = SKEWS


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One kernel's registered benchmark.

    Attributes:
        name: of the files that it writes.
        title: of its chart.
        column_name: what the results call the shape's columns, ``k`` or ``n``.
        make_buffers: (experts, padded, columns) to the payload, as in :mod:`sglang_w4afp8.bench.streaming`.
        make_providers: (payload, cell) to the providers, ours among them as ``ours``; compares with the engine.
        function: our kernel's public function.
        legacy: padded rows to the launch parameters of the engine's old kernel.
        full: shapes of a full run.
        ci: shapes of ``--ci``.
    """

    name: str
    title: str
    column_name: str
    make_buffers: Callable[[int, int, int], Any]
    make_providers: Callable[[Any, streaming.Cell], Providers]
    function: Callable[..., Any]
    legacy: Callable[[int], MaskedRowsLaunch]
    full: Sequence[Shape]
    ci: Sequence[Shape]


def checked_providers(benchmark: Benchmark, buffers: Any, cell: streaming.Cell) -> tuple[str, Providers]:
    """What was compared, and the providers to time (none when the bytes differ)."""
    # Made once: a launch that is captured must not copy row counts to the device.
    arguments = buffers.arguments(cell)
    run_legacy = functools.partial(
        benchmark.function, *arguments, cell.expected_m(), launch=benchmark.legacy(cell.padded)
    )
    try:
        providers = benchmark.make_providers(buffers, cell)
        output = buffers.output[: cell.experts]
        streaming.check_same_bytes(f"legacy geometry, {cell}", providers["ours"], run_legacy, output)
    except streaming.MismatchError as error:
        print(error, file=sys.stderr)
        return RED, {}
    return ENGINE if "engine" in providers else SELF, {**providers, "legacy": run_legacy}


def run_cells(
    benchmark: Benchmark,
    shapes: Sequence[Shape],
    measure: Callable[[Providers], dict[str, float | None]],
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Check and time every cell of the shapes."""
    cells = []
    for shape in shapes:
        buffers = benchmark.make_buffers(shape.experts, shape.padded, shape.columns)
        for rows in shape.rows:
            for skew in shape.skews:
                cell = streaming.Cell(shape.experts, shape.padded, rows, f"skew{skew}")
                check, providers = checked_providers(benchmark, buffers, cell)
                timed: dict[str, float | None] = {provider.column: None for provider in report.PROVIDERS}
                if providers:
                    timed |= measure(providers)
                cells.append(
                    {
                        benchmark.column_name: shape.columns,
                        **dataclasses.asdict(cell),
                        "skew": skew,
                        "check": check,
                        **timed,
                    }
                )
                progress(f"{report.shape_of(cells[-1])}, {shape.experts} experts, rows {rows}, skew {skew}: {check}")
    return cells


def _figure(value: float | None, digits: int = 2) -> str:
    return report.NOT_AVAILABLE if value is None else f"{value:.{digits}f}"


def _ratio(cell: report.Cell, over: str, under: str) -> str:
    """A ratio of two providers' times; none of a cell whose bytes differ."""
    above, below = cell[f"{over}_us"], cell[f"{under}_us"]
    return report.NOT_AVAILABLE if cell["check"] == RED or not above or not below else f"{above / below:.2f}x"


def table(cells: Sequence[report.Cell]) -> str:
    """Microseconds, rate and ratios of every cell as text."""
    heading = ["shape", "experts", "padded", "rows", "skew", *(f"{p.label} us" for p in report.PROVIDERS)]
    rows = [[*heading, "tuned TB/s", "engine/tuned", "legacy/tuned", "tuned/copy", "bytes equal"]]
    for cell in cells:
        red = cell["check"] == RED
        rows.append(
            [
                report.shape_of(cell),
                *(str(cell[name]) for name in ("experts", "padded", "rows", "skew")),
                *(_figure(cell[provider.column]) for provider in report.PROVIDERS),
                report.NOT_AVAILABLE if red else _figure(report.terabytes_per_second(cell, report.PROVIDERS[0])),
                _ratio(cell, "engine", "ours"),
                _ratio(cell, "legacy", "ours"),
                _ratio(cell, "ours", "copy"),
                "RED" if red else cell["check"],
            ]
        )
    return report.text_table(rows)


def write(benchmark: Benchmark, folder: Path, meta: dict[str, Any], cells: Sequence[dict[str, Any]]) -> list[Path]:
    """JSON, CSV and PNG of a run; the paths that were written."""
    paths = [folder / f"{benchmark.name}.{suffix}" for suffix in ("json", "csv", "png")]
    write_json(paths[0], {"meta": meta, "cells": cells})
    report.write_csv(paths[1], meta, cells)
    grouped: dict[tuple[Any, ...], dict[int, list[report.Cell]]] = {}
    for cell in cells:
        key = (report.shape_of(cell), cell["experts"], cell["padded"])
        grouped.setdefault(key, {}).setdefault(cell["rows"], []).append(cell)
    panels = [
        [
            (f"{shape}, {experts} experts of {padded} rows\n{rows} live rows per expert", panel)
            for rows, panel in by_rows.items()
        ]
        for (shape, experts, padded), by_rows in grouped.items()
    ]
    axis = report.Axis(
        "skew",
        "load of the hot expert, times the mean",
        lambda cell, provider: cell[provider.column],
        report.MICROSECONDS,
        shared_y=False,
    )
    if not report.chart(paths[2], benchmark.title, meta, panels, axis):
        print("chart: N/A (matplotlib is not installed)")
        paths.pop()
    return paths


def main(benchmark: Benchmark, description: str, argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; 2 without a GPU, 1 when bytes differ anywhere."""
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    parser.add_argument("--ci", action="store_true", help="the short set")
    parser.add_argument(
        "--out", type=Path, help=f"folder for {benchmark.name}.json, .csv and .png (default: not written)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed turns of every provider")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"{benchmark.name}: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    cells = run_cells(
        benchmark,
        benchmark.ci if options.ci else benchmark.full,
        lambda providers: streaming.measure_cell(providers, options.repeats),
        lambda text: print(text, file=sys.stderr),
    )
    meta = run_metadata(repeats=options.repeats)
    print(report.machine_line(meta))
    print(table(cells))
    if options.out:
        for path in write(benchmark, options.out, meta, cells):
            print(path)
    return 1 if any(cell["check"] == RED for cell in cells) else 0
