#!/usr/bin/env python3
"""Draw what every streaming kernel achieves against the copy floor, from the results files; no GPU needed.

    python benchmark/roofline.py                                        # benchmark/results/h200: PNG files and a table
    python benchmark/roofline.py --results results --out charts         # somewhere else

Reads `requant.json`, `silu.json` and `streaming.json` (the three steps of a layer together), as `sglang-w4afp8 bench` writes
them. One picture per shape: achieved bytes per second over rows per expert, one line per provider; a column per number of
experts, a line of panels per routing.

A rate counts the bytes that the step must move. Within the L2 cache it may pass what the memory gives, and the copy's rate is
the floor's there too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from sglang_w4afp8.bench import report  # noqa: E402

RESULTS = ROOT / "benchmark" / "results" / "h200"
TITLES = {
    "requant": "Requant of DeepEP's fp8 rows to one scale",
    "silu": "SiLU, multiply and quantization",
    "streaming": "Streaming steps of one layer together",
}
NOTE = "The copy slows where what it moves no longer fits the L2 cache"
# Where a launch is short, the figure is launch and latency; beyond the L2 cache of an H200 it is memory.
FEW_ROWS = 8
L2_BYTES = 60e6


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The results files that the folder has, by kind.

    Raises:
        ValueError: a file is no results file; the message names it.
    """
    found = {}
    for kind in TITLES:
        path = folder / f"{kind}.json"
        if not path.is_file():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not content.get("cells") or "meta" not in content:
            raise ValueError(f"{path}: must have meta and cells")
        found[kind] = content
    return found


def by_shape(cells: Sequence[report.Cell]) -> dict[str, list[report.Cell]]:
    grouped: dict[str, list[report.Cell]] = {}
    for cell in cells:
        grouped.setdefault(report.shape_of(cell), []).append(cell)
    return grouped


def draw(kind: str, content: dict[str, Any], folder: Path) -> list[Path]:
    """One picture per shape; the paths that were written, none without matplotlib."""
    paths = []
    for shape, cells in by_shape(content["cells"]).items():
        routings = list(dict.fromkeys(cell["routing"] for cell in cells))
        panels = [
            [
                (
                    f"{experts} experts, {routing} routing",
                    [cell for cell in cells if (cell["experts"], cell["routing"]) == (experts, routing)],
                )
                for experts in sorted({cell["experts"] for cell in cells})
            ]
            for routing in routings
        ]
        path = folder / f"{kind}_{shape.lower().replace(', ', '_').replace(' ', '')}.png"
        title = f"{TITLES[kind]}, {shape}: bytes a second of what must move"
        if report.chart(path, title, content["meta"], panels, report.RATE_OVER_ROWS, NOTE):
            paths.append(path)
    return paths


def _ratios(cells: Sequence[report.Cell], over: str, under: str) -> list[float]:
    return [
        cell[f"{over}_us"] / cell[f"{under}_us"] for cell in cells if cell.get(f"{over}_us") and cell.get(f"{under}_us")
    ]


def _text(values: Sequence[float], fold: Callable[[Sequence[float]], float]) -> str:
    return f"{fold(values):.2f}" if values else report.NOT_AVAILABLE


def summary(kind: str, content: dict[str, Any]) -> str:
    """Per shape and number of experts: how much faster than the engine, and how far from the copy."""
    rows = [
        [
            "shape",
            "experts",
            "cells",
            "engine/ours",
            "worst",
            f"at 1-{FEW_ROWS} rows",
            f"ours/copy at 1-{FEW_ROWS} rows, worst",
            "beyond L2, worst",
        ]
    ]
    for shape, cells in by_shape(content["cells"]).items():
        for experts in [*sorted({cell["experts"] for cell in cells}), None]:
            of_experts = [cell for cell in cells if experts in (None, cell["experts"])]
            few = [cell for cell in of_experts if cell["rows"] <= FEW_ROWS]
            streamed = [cell for cell in of_experts if report.bytes_of(cell) > L2_BYTES]
            rows.append(
                [
                    shape,
                    "all" if experts is None else str(experts),
                    str(len(of_experts)),
                    _text(_ratios(of_experts, "engine", "ours"), report.geometric_mean),
                    _text(_ratios(of_experts, "engine", "ours"), min),
                    _text(_ratios(few, "engine", "ours"), report.geometric_mean),
                    _text(_ratios(few, "ours", "copy"), max),
                    _text(_ratios(streamed, "ours", "copy"), max),
                ]
            )
    return f"{TITLES[kind]} ({report.machine_line(content['meta'])})\n{report.text_table(rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and print; 2 when there is nothing to draw from, 1 without matplotlib."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results files")
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: beside the results)")
    options = parser.parse_args(argv)
    results = read_results(options.results)
    if not results:
        print(
            f"roofline: {options.results} has none of {', '.join(f'{kind}.json' for kind in TITLES)}", file=sys.stderr
        )
        return 2
    status = 0
    for kind, content in results.items():
        print(summary(kind, content))
        paths = draw(kind, content, options.out or options.results)
        for path in paths:
            print(path)
        if not paths:
            print("chart: N/A (matplotlib is not installed)", file=sys.stderr)
            status = 1
        print()
    return status


if __name__ == "__main__":
    sys.exit(main())
