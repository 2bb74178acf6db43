"""Results of the streaming kernels as text, CSV and charts; no GPU needed.

A result is ``{"meta": {...}, "cells": [...]}``: cells are flat, with the shape (``k``, ``n``), ``experts``, ``padded``,
``rows``, ``routing`` and ``<provider>_us``, None where a provider is absent. What a cell must move follows from its shape,
so the bytes per second of every provider do too.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean as geometric_mean
from typing import Any

from sglang_w4afp8.bench import streaming

Cell = Mapping[str, Any]
NOT_AVAILABLE = "N/A"

# Size (K or N), experts and mean rows of a cell, whatever its routing.
Shape = tuple[int, int, int]
# With another Triton a shape counts as slower from here, beside what took turns with it: a run as a whole is faster or slower.
TOOLCHAIN_DIFFERENCE = 1.03


@dataclass(frozen=True)
class Provider:
    """How one provider's column is named and drawn."""

    key: str
    label: str
    color: str
    line: str = "-"
    marker: str | None = "o"

    @property
    def column(self) -> str:
        return f"{self.key}_us"


PROVIDERS = (
    Provider("ours", "tuned", "C0"),
    Provider("legacy", "legacy-geometry", "C1", "--", "x"),
    Provider("engine", "engine", "C3", "-", "s"),
    Provider("copy", "copy floor", "0.4", ":", None),
)


def bytes_of(cell: Cell) -> int:
    """Bytes that a cell must move: the requant's where it has ``k``, SiLU's where it has ``n``, both for a layer.

    Every routing spreads the same total, ``experts * rows`` live rows.
    """
    total = cell["experts"] * cell["rows"]
    moved = streaming.requant_bytes(total, cell["k"]) if cell.get("k") else 0
    return moved + (streaming.silu_bytes(total, cell["n"]) if cell.get("n") else 0)


def terabytes_per_second(cell: Cell, provider: Provider) -> float | None:
    """Achieved rate over the bytes that must move, 10^12 bytes a second; None where the provider is absent."""
    us = cell.get(provider.column)
    return bytes_of(cell) / us * 1e-6 if us else None


def by_shape(cells: Sequence[Cell], size: str) -> dict[Shape, list[Cell]]:
    """Cells by ``(size, experts, rows)``, so that the routings of one shape lie together."""
    found: dict[Shape, list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell[size], cell["experts"], cell["rows"]), []).append(cell)
    return found


def quotient(one: Sequence[Cell], other: Sequence[Cell], column: str) -> float:
    """The geometric mean of a column over the cells of ``other`` divided by that over ``one``."""
    return geometric_mean(cell[column] for cell in other) / geometric_mean(cell[column] for cell in one)


def lost_beside(one: Sequence[Cell], other: Sequence[Cell], column: str) -> float:
    """By what factor our kernel is slower in ``other`` than in ``one``, once what ``column`` did is divided out."""
    return quotient(one, other, "ours_us") / quotient(one, other, column)


def lost_by_shape(
    one: Mapping[Shape, Sequence[Cell]], other: Mapping[Shape, Sequence[Cell]], column: str
) -> dict[Shape, float]:
    """:func:`lost_beside` of every shape that both have."""
    return {shape: lost_beside(one[shape], other[shape], column) for shape in one if shape in other}


def shape_of(cell: Cell) -> str:
    return ", ".join(f"{name.upper()} {cell[name]}" for name in ("k", "n") if cell.get(name))


def machine_line(meta: Mapping[str, Any]) -> str:
    """GPU, driver and versions of a run in one line; what was absent is N/A."""
    versions = (f"{name} {meta.get(name) or NOT_AVAILABLE}" for name in ("torch", "triton", "sglang", "sglang_w4afp8"))
    return ", ".join([str(meta.get("gpu", NOT_AVAILABLE)), f"driver {meta.get('driver', NOT_AVAILABLE)}", *versions])


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def write_csv(path: Path, meta: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    """The cells with their rates; the machine line is the first line, after a ``#``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rates = [
        (provider, f"{provider.key}_tb_s") for provider in PROVIDERS if any(provider.column in cell for cell in cells)
    ]
    columns = list(dict.fromkeys(name for cell in cells for name in cell))
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {machine_line(meta)}; {meta.get('command', '')}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *(name for _, name in rates)])
        for cell in cells:
            achieved = [terabytes_per_second(cell, provider) for provider, _ in rates]
            values = [cell.get(name) for name in columns] + [rate and round(rate, 4) for rate in achieved]
            writer.writerow([NOT_AVAILABLE if value is None else value for value in values])


@dataclass(frozen=True)
class Axis:
    """What a chart's panels show: the cell's value along x, and a provider's value along y (None: absent), both on
    logarithmic scales: a launch of few rows and one of many are then equally readable."""

    x: str
    x_label: str
    y: Callable[[Cell, Provider], float | None]
    y_label: str
    shared_y: bool = True


MICROSECONDS = "us per launch"
RATE_OVER_ROWS = Axis("rows", "mean live rows per expert", terabytes_per_second, "TB/s of live bytes")

# Inches: of one panel, and of what stands above and below the grid.
_PANEL = (2.55, 2.2)
_HEAD, _FOOT = 0.7, 0.25


def chart(
    path: Path,
    title: str,
    meta: Mapping[str, Any],
    panels: Sequence[Sequence[tuple[str, Sequence[Cell]]]],
    axis: Axis,
    note: str = "",
) -> bool:
    """Draw a grid of panels, one line per provider, with the machine line below; False without matplotlib.

    Args:
        path: the picture.
        title: heading of the picture.
        meta: of the run.
        panels: rows of (panel's title, its cells).
        axis: what x and y are.
        note: what a reader must know of the lines; stands before the machine line.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    lines, columns = len(panels), max(len(row) for row in panels)
    width, height = 0.6 + _PANEL[0] * columns, _HEAD + _FOOT + _PANEL[1] * lines
    figure, axes = plt.subplots(lines, columns, figsize=(width, height), sharey=axis.shared_y, squeeze=False)
    drawn: dict[str, Any] = {}
    for line, row in enumerate(panels):
        for column in range(columns):
            if column >= len(row):
                axes[line][column].set_visible(False)
                continue
            panel, (name, cells) = axes[line][column], row[column]
            ordered = sorted(cells, key=lambda cell: cell[axis.x])
            for order, provider in enumerate(PROVIDERS):
                points = [(cell[axis.x], axis.y(cell, provider)) for cell in ordered]
                points = [(x, y) for x, y in points if y is not None]
                if points:
                    drawn[provider.label] = panel.plot(
                        *zip(*points, strict=True),
                        provider.line,
                        color=provider.color,
                        marker=provider.marker,
                        markersize=4,
                        label=provider.label,
                        # The first provider is what the picture is about: its line lies on top.
                        zorder=3 - order / len(PROVIDERS),
                    )[0]
            ticks = sorted({cell[axis.x] for cell in ordered})
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.set_xticks([], minor=True)
            panel.set_yscale("log")
            # Few powers of ten and short ones: enough ticks, none upon another.
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            panel.yaxis.set_minor_locator(NullLocator())
            panel.set_title(name, fontsize=9)
            panel.tick_params(labelsize=8)
            panel.grid(True, which="both", alpha=0.25)
            if line == lines - 1:
                panel.set_xlabel(axis.x_label, fontsize=8)
            if column == 0:
                panel.set_ylabel(axis.y_label, fontsize=8)
    # No suptitle: the layout below would keep room for it a second time.
    figure.text(0.5, 1 - 0.12 / height, title, ha="center", va="top", fontsize=12)
    if drawn:
        figure.legend(
            drawn.values(),
            drawn.keys(),
            loc="upper center",
            bbox_to_anchor=(0.5, 1 - 0.36 / height),
            ncols=len(drawn),
            fontsize=9,
            frameon=False,
        )
    below = ". ".join(text for text in (note, machine_line(meta)) if text)
    figure.text(0.01, 0.08 / height, below, fontsize=7, color="0.35")
    figure.tight_layout(rect=(0, _FOOT / height, 1, 1 - _HEAD / height))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
