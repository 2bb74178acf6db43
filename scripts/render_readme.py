#!/usr/bin/env python3
"""Write the generated parts of README.md anew: engine versions, patches, switches, measured results.

    python scripts/render_readme.py            # rewrite README.md
    python scripts/render_readme.py --check    # exit status 1 and a diff when it is out of date

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``. Patches come from the plugin's
ledger, switches from its table of switches, engine versions from what ``scripts/check_engine_versions.py`` found in their
wheels, figures from the files below ``benchmark/results``. To show another
measurement, add a `ResultTable` to `RESULT_TABLES`. A results file that does not exist yet reads "not measured yet".
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))  # the tables of this checkout, whatever is installed

from sglang_w4afp8 import plugin, switches  # noqa: E402
from sglang_w4afp8.bench import report  # noqa: E402

README = ROOT / "README.md"
RESULTS = ROOT / "benchmark" / "results"
VERSIONS = ROOT / "docs" / "engine_versions.json"
# A figure without these cannot be reproduced. "command" is last: it is the longest.
META_KEYS = ("gpu", "driver", "torch", "triton", "sglang", "command")

Cell = Mapping[str, Any]


class RenderError(Exception):
    """README.md or a results file is not as it must be; the message names it."""


@dataclass(frozen=True)
class Column:
    """One column of a table: its heading and how a group of cells becomes its text."""

    heading: str
    text: Callable[[Sequence[Cell]], str]


@dataclass(frozen=True)
class ResultTable:
    """A table made from the ``cells`` of one results file.

    Attributes:
        title: heading above the table.
        file: the results file, below ``benchmark/results``.
        note: what the reader must know to read the table.
        group_by: fields whose values make a row; the first columns show them.
        columns: the other columns.
        where: field -> values that a cell must have to be shown. All cells when empty.
        measured: field that must not be null for a cell to be shown. All cells when empty.
        total: label of a last row over all shown cells; no such row when empty.
        required: field -> what every shown cell must have there, or the table would say what is not so.
    """

    title: str
    file: str
    note: str
    group_by: tuple[str, ...]
    columns: tuple[Column, ...]
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    measured: str = ""
    total: str = ""
    required: Mapping[str, Any] = field(default_factory=dict)

    def shows(self, cell: Cell) -> bool:
        """Whether the table is about this cell."""
        return all(cell[name] in values for name, values in self.where.items()) and (
            not self.measured or cell[self.measured] is not None
        )


def one(heading: str, name: str, digits: int = 2) -> Column:
    """The value of a field, in groups of one cell."""

    def text(cells: Sequence[Cell]) -> str:
        if len(cells) != 1:
            raise RenderError(
                f"column {heading!r} shows one cell a row, and a row has {len(cells)}: group by more fields"
            )
        value = cells[0][name]
        return "n/a" if value is None else f"{value:.{digits}f}"

    return Column(heading, text)


def count(heading: str = "cells") -> Column:
    """How many cells the row is about."""
    return Column(heading, lambda cells: str(len(cells)))


def mean(heading: str, name: str, digits: int = 2) -> Column:
    """Geometric mean of a field over the row's cells."""

    def text(cells: Sequence[Cell]) -> str:
        values = [cell[name] for cell in cells]
        return "n/a" if None in values else f"{geometric_mean(values):.{digits}f}"

    return Column(heading, text)


def most(heading: str, name: str, digits: int = 4) -> Column:
    """Largest value of a field over the row's cells."""
    return Column(heading, lambda cells: f"{max(cell[name] for cell in cells):.{digits}f}")


def share(heading: str, name: str) -> Column:
    """In how many of the row's cells a field is true, of how many."""
    return Column(heading, lambda cells: f"{sum(cell[name] is True for cell in cells)} of {len(cells)}")


def ratio(heading: str, above: str, below: str, reduce: Callable[[Sequence[float]], float]) -> Column:
    """``above / below`` of each cell, reduced over the row's cells (see `geometric_mean`; `min` for the worst)."""

    def text(cells: Sequence[Cell]) -> str:
        if any(cell[name] is None for cell in cells for name in (above, below)):
            return "n/a"  # not an average over whichever cells happen to be there
        return f"{reduce([cell[above] / cell[below] for cell in cells]):.2f}"

    return Column(heading, text)


def total(heading: str, name: str, digits: int = 0) -> Column:
    """Sum of a field over the row's cells."""
    return Column(heading, lambda cells: f"{math.fsum(cell[name] for cell in cells):.{digits}f}")


def entries(heading: str, name: str) -> Column:
    """Entries of a field's lists over the row's cells."""
    return Column(heading, lambda cells: str(sum(len(cell[name]) for cell in cells)))


def ratio_of_totals(heading: str, above: str, below: str) -> Column:
    """Sum of ``above`` over the row's cells, divided by the sum of ``below``."""

    def text(cells: Sequence[Cell]) -> str:
        return f"{math.fsum(cell[above] for cell in cells) / math.fsum(cell[below] for cell in cells):.2f}"

    return Column(heading, text)


def _interval(cells: Sequence[Cell]) -> str:
    """Gain of the one cell of a row, in percent with its interval."""
    (cell,) = cells
    low, high = cell["interval"]
    return f"{cell['gain_pct']:+.1f} ({low:+.1f} to {high:+.1f})"


def _part_of_step(heading: str, part: str) -> Column:
    """What a part takes of the step of the one cell of a row, in percent."""

    def text(cells: Sequence[Cell]) -> str:
        (cell,) = cells
        return f"{100 * cell['share_of_step'][part]:.1f}"

    return Column(heading, text)


def _bf16_per_byte(cells: Sequence[Cell]) -> str:
    """Bytes a second of the BF16 requant over those of the fp8 one; an element of it moves 3 bytes, one of fp8 2 and its
    share of a float32 scale for 128."""
    return f"{geometric_mean([3 / (2 + 4 / 128) * cell['fp8_us'] / cell['ours_us'] for cell in cells]):.2f}"


_ENGINE = ratio("engine / ours", "engine_us", "ours_us", geometric_mean)
_LOWEST = ratio("lowest", "engine_us", "ours_us", min)
_OLD_LAUNCH = ratio("old launch / ours", "legacy_us", "ours_us", geometric_mean)
_COPY = ratio("copy / ours", "copy_us", "ours_us", geometric_mean)
_RATIOS = (
    "Times divided by ours, geometric means over 1 to 128 rows per expert and even, random and 16-fold skewed routing: above "
    "1, ours is faster. Lowest: the cell that is worst for us. A copy of the same live bytes is what any kernel is up "
    "against."
)
_MICROSECONDS = "Microseconds and ratios, geometric means over even, random and 16-fold skewed routing."
# Rows per expert and experts of the tables in microseconds: decode of a small and of a large batch, on many ranks and few.
_ROWS, _EXPERTS = (1, 8, 32, 128), (8, 64, 256)
_GEMM_COLUMNS = (
    total("engine", "engine_us"),
    total("ours", "ours_us"),
    ratio_of_totals("engine / ours", "engine_us", "ours_us"),
    ratio_of_totals("best / ours", "best_us", "ours_us"),
)
_GEMM_CELLS = {"routing": ("random",), "padded": (512, 1024), "k": (7168, 2048)}
_DECODE_COLUMNS = (
    one("engine, tokens/s", "baseline_tokens_per_s", 0),
    one("arm, tokens/s", "tokens_per_s", 0),
    Column("gain, %", _interval),
    Column("interval", lambda cells: cells[0]["interval_method"]),
    one("starts of an arm", "blocks", 0),
    one("saved us a layer", "saved_us_per_moe_layer", 1),
    one("saved ms, 58 layers", "saved_ms_58_layers"),
)
_OVER_ENGINE = {"baseline": "engine"}  # as the columns are called
# Every arm but the baseline.
_DECODE_ARMS = {"arm": ("plugin", "cutlass", "triton", "auto")}

RESULT_TABLES: tuple[ResultTable, ...] = (
    ResultTable(
        title="Every size that people serve",
        file="h200/shapes.json",
        note=(
            "A whole layer by model and experts on a rank: times divided by that of `auto` without any table, geometric means "
            "over the cells, and the cell that is worst for us. Table: `auto` with the shipped tables. Floor: reading the live "
            "experts' weights once."
        ),
        group_by=("model", "n", "k"),
        columns=(
            count(),
            ratio("engine / auto", "engine_us", "auto_us", geometric_mean),
            ratio("lowest", "engine_us", "auto_us", min),
            ratio("CUTLASS / auto", "cutlass_us", "auto_us", geometric_mean),
            ratio("two kernels / auto", "triton_us", "auto_us", geometric_mean),
            ratio("table / auto", "table_us", "auto_us", geometric_mean),
            ratio("floor / auto", "floor_us", "auto_us", geometric_mean),
        ),
        total="all",
    ),
    ResultTable(
        title="Requant against the engine's kernel",
        file="h200/requant.json",
        note=f"{_RATIOS} Old launch: our kernel with the launch parameters of engines up to 0.5.18.",
        group_by=("k", "experts"),
        columns=(count(), _ENGINE, _LOWEST, _OLD_LAUNCH, _COPY),
        total="all",
    ),
    ResultTable(
        title="Requant in microseconds",
        file="h200/requant.json",
        note=f"K 7168. {_MICROSECONDS}",
        group_by=("experts", "rows"),
        columns=(
            mean("old launch", "legacy_us"),
            mean("engine", "engine_us"),
            mean("ours", "ours_us"),
            mean("copy", "copy_us"),
            _ENGINE,
            _COPY,
        ),
        where={"k": (7168,), "experts": _EXPERTS, "rows": _ROWS},
    ),
    ResultTable(
        title="Requant of a BF16 payload",
        file="h200/bf16.json",
        note=(
            f"K 7168. {_MICROSECONDS} No engine decodes from a BF16 dispatch, so this stands beside our fp8 requant on the "
            "same rows. Last column: bytes a second of BF16 over those of fp8."
        ),
        group_by=("experts", "rows"),
        columns=(
            mean("BF16", "ours_us"),
            mean("copy of BF16", "copy_us"),
            mean("fp8", "fp8_us"),
            mean("copy of fp8", "copy_fp8_us"),
            ratio("copy / BF16", "copy_us", "ours_us", geometric_mean),
            ratio("copy / fp8", "copy_fp8_us", "fp8_us", geometric_mean),
            Column("BF16 / fp8 per byte", _bf16_per_byte),
        ),
        where={"experts": _EXPERTS, "rows": _ROWS},
    ),
    ResultTable(
        title="SiLU, multiply and quantisation against the engine's kernel",
        file="h200/silu.json",
        note=f"{_RATIOS} Old launch: our kernel with the engine's launch parameters.",
        group_by=("n", "experts"),
        columns=(count(), _ENGINE, _LOWEST, _OLD_LAUNCH, _COPY),
        total="all",
    ),
    ResultTable(
        title="SiLU, multiply and quantisation in microseconds",
        file="h200/silu.json",
        note=f"N 2048. {_MICROSECONDS}",
        group_by=("experts", "rows"),
        columns=(mean("engine", "engine_us"), mean("ours", "ours_us"), mean("copy", "copy_us"), _ENGINE, _COPY),
        where={"n": (2048,), "experts": _EXPERTS, "rows": _ROWS},
    ),
    ResultTable(
        title="Streaming steps of a layer in microseconds",
        file="h200/streaming.json",
        note=(
            f"Problem sizes, requant and SiLU of a DeepSeek-V3 layer (K 7168, N 2048) as one CUDA graph. {_MICROSECONDS} The "
            "copy moves the bytes of all steps at once."
        ),
        group_by=("experts", "rows"),
        columns=(mean("engine", "engine_us"), mean("ours", "ours_us"), mean("copy", "copy_us"), _ENGINE, _COPY),
        where={"experts": _EXPERTS, "rows": _ROWS},
    ),
    ResultTable(
        title="Both grouped GEMMs of a DeepSeek-V3 layer",
        file="h200/gemm_tiles.json",
        note=(
            "Microseconds of the two GEMMs together, random routing, buffers where the engine's call is right. Where the "
            "padded rows per expert are no multiple of 512 the engine's result is wrong, and there is nothing to compare. "
            "Best: the fastest compiled tile of each, found by trying all. sglang-kernel 0.4.5."
        ),
        group_by=("experts", "rows"),
        columns=_GEMM_COLUMNS,
        where={**_GEMM_CELLS, "kernel_version": ("0.4.5",), "experts": (32, 64, 256), "rows": (1, 8, 16, 32, 64, 128)},
    ),
    ResultTable(
        title="Both grouped GEMMs by version of sglang-kernel",
        file="h200/gemm_tiles.json",
        note="As above, 64 experts. Other versions may have other tiles, so each has a tuned table of its own.",
        group_by=("kernel_version", "rows"),
        columns=_GEMM_COLUMNS,
        where={**_GEMM_CELLS, "experts": (64,), "rows": (1, 8, 16, 32, 64, 128)},
    ),
    ResultTable(
        title="Grouped GEMM against a float reference",
        file="h200/gemm_tiles.json",
        note="Largest relative error over all sizes, rows and routings that were measured, by padded rows per expert.",
        group_by=("kernel_version", "padded"),
        columns=(count(), most("engine", "engine_rel_err"), most("ours", "ours_rel_err")),
    ),
    ResultTable(
        title="The whole low-latency chain of a DeepSeek-V3 layer",
        file="h200/moe_layer.json",
        note=(
            "Problem sizes, requant, GEMM, SiLU, GEMM as one CUDA graph; microseconds and ratios, geometric means over random "
            "and 16-fold skewed routing, buffers where the engine's GEMM is right. Equal: live rows of both outputs are the "
            "same bit for bit."
        ),
        group_by=("experts", "rows"),
        columns=(
            mean("engine", "engine_us", 1),
            mean("ours", "ours_us", 1),
            _ENGINE,
            _LOWEST,
            share("equal", "bit_equal"),
        ),
        where={"engine_is_right": (True,), "experts": _EXPERTS, "rows": _ROWS},
    ),
    ResultTable(
        title="A layer in two Triton kernels",
        file="h200/two_kernels.json",
        note=(
            "A DeepSeek-V3 layer on regrouped weights, even routing: microseconds of the whole low-latency layer. Floor: "
            "reading the weights once at the speed of a plain stream, measured in the same run."
        ),
        group_by=("experts", "rows"),
        columns=(
            mean("engine", "engine_us", 1),
            mean("CUTLASS chain", "cutlass_us", 1),
            mean("two kernels", "triton_us", 1),
            mean("floor", "floor_us", 1),
            ratio("engine / two kernels", "engine_us", "triton_us", geometric_mean),
            ratio("CUTLASS / two kernels", "cutlass_us", "triton_us", geometric_mean),
            mean("weights, TB/s", "weight_stream_tb_s"),
        ),
        where={"routing": ("even",), "hidden": (7168,), "experts": (64, 256), "rows": (1, 4, 8, 16, 32, 64, 128)},
    ),
    ResultTable(
        title="Error of a layer against float64",
        file="h200/two_kernels_accuracy.json",
        note=(
            "Relative error of the layer over sampled live rows, and the largest of any row, on payloads, weights and static "
            "input scales of several kinds; the largest over 1, 8 and 64 rows per expert. The two kernels round once less. "
            "A row far smaller than the largest keeps few bits of the static second scale in any chain."
        ),
        group_by=("case",),
        columns=(
            most("engine", "engine_rel_err"),
            most("CUTLASS chain", "cutlass_rel_err"),
            most("two kernels", "triton_rel_err"),
            most("worst row, engine", "engine_worst_row"),
            most("worst row, two kernels", "triton_worst_row"),
            share("layer never above the engine's", "not_above"),
        ),
    ),
    ResultTable(
        title="Prefill on regrouped weights",
        file="h200/two_kernels_prefill.json",
        note=(
            "One grouped GEMM over rows that stand one expert after another, as the engine's normal mode calls it: "
            "microseconds of the compiled kernel on weights as they were loaded, and of the Triton product on regrouped ones, "
            "with the launch that a server takes and with the best of those tried."
        ),
        group_by=("experts", "rows", "gemm"),
        columns=(
            one("CUTLASS", "cutlass_us", 0),
            one("Triton", "rule_us", 0),
            one("best", "best_us", 0),
            ratio("CUTLASS / Triton", "cutlass_us", "rule_us", geometric_mean),
        ),
    ),
    ResultTable(
        title="Decoding on the real server",
        file="h200/e2e_decode.json",
        note=(
            "Tokens per second of a server with the plugin against the same server without it, DeepSeek-V3 sizes with few "
            "layers on one GPU and real DeepEP; gain in percent with its 95% interval, which is Student's t over the starts of "
            "an arm. Where it is of resampled starts it is narrower than 95%, and its single samples are gone: with two "
            "starts Student's t is up to 12.7 times as wide. Few layers carry the whole LM head, so the last columns say what "
            "each expert layer saves, and what that is for the 58 of DeepSeek-V3. Engines may bring another Triton than the "
            "one named below: see the comparison of toolchains."
        ),
        group_by=("model", "engine", "routing", "concurrency", "arm"),
        columns=_DECODE_COLUMNS,
        where=_DECODE_ARMS,
        required=_OVER_ENGINE,
    ),
    ResultTable(
        title="What a step is made of",
        file="h200/e2e_decode.json",
        note=(
            "Kernel time by a profile of the same servers, in percent of the step without a profiler. Expert layers are their "
            "requant, SiLU, problem sizes and GEMMs together; where Triton computes, its two kernels. The rest, attention and "
            "the LM head above all, is what few layers carry whole. A run takes a profile at one number of requests."
        ),
        group_by=("model", "engine", "routing", "concurrency", "arm"),
        columns=(
            _part_of_step("expert layers", "chain"),
            _part_of_step("requant", "requant"),
            _part_of_step("SiLU", "silu"),
            _part_of_step("GEMMs", "gemm"),
            _part_of_step("DeepEP", "deepep"),
            _part_of_step("rest", "other"),
        ),
        measured="share_of_step",
        required=_OVER_ENGINE,
    ),
    ResultTable(
        title="The same tokens?",
        file="h200/e2e_equality.json",
        note=(
            "Greedy decoding of a small DeepSeek-V3 checkpoint with real weights on the real server, prompts one at a time, "
            "against the engine where its grouped GEMM is right (padded rows a multiple of 512), and against float32 expert "
            "layers (`reference`), which whoever rounds otherwise than the engine is judged by, on the prompts that both "
            "servers prefill alike (in a CUDA graph or not). A near tie is a first difference where the reference's two best "
            "log-probabilities are hardly apart; gap: how far at most, where tokens differ; gaps off: by how much both "
            "servers' gaps differ before that, root mean square."
        ),
        group_by=("arm", "backend", "padded_rows", "against"),
        columns=(
            total("prompts", "prompts"),
            total("equal", "equal"),
            total("near ties", "near_ties"),
            Column("equal tokens, %", lambda cells: f"{100 * cells[0]['matching_tokens']:.1f}"),
            one("gap", "largest_gap", 3),
            one("gaps off", "gap_rms", 4),
            Column("judged", lambda cells: "yes" if cells[0]["judged"] else "no"),
        ),
        where={"pass": ("one at a time",)},
    ),
    ResultTable(
        title="Decoding over two GPUs",
        file="h200x2/e2e_decode.json",
        note=(
            "The same with expert parallelism over two GPUs, 256 experts and as many layers as fit; by requests at once. "
            "With one start of each arm the interval is of its rounds and says nothing of how two starts differ."
        ),
        group_by=("model", "engine", "padded_rows", "concurrency", "arm"),
        columns=_DECODE_COLUMNS,
        where=_DECODE_ARMS,
        required=_OVER_ENGINE,
    ),
    ResultTable(
        title="Decoding over four GPUs",
        file="h200x4/e2e_decode.json",
        note="The same with expert parallelism over four GPUs, 256 experts and as many layers as fit; by requests at once.",
        group_by=("model", "engine", "padded_rows", "concurrency", "arm"),
        columns=_DECODE_COLUMNS,
        where=_DECODE_ARMS,
        required=_OVER_ENGINE,
    ),
    ResultTable(
        title="One layer over two GPUs",
        file="h200x2/e2e_layer.json",
        note=(
            "Largest error of what comes back to a rank, real DeepEP between the GPUs, against a float64 layer of all experts. "
            "With 256 padded rows the engine reads its scales in the wrong order."
        ),
        group_by=("padded_rows", "arm"),
        columns=(one("outputs", "outputs", 0), one("equal", "equal", 0), one("largest error", "largest_error", 4)),
    ),
    ResultTable(
        title="Random calls on the device",
        file="h200/fuzz.json",
        note=(
            "Both streaming kernels on random payloads, scales, row counts and launches, NaN and infinities among them: calls "
            "with any byte, padding included, that is not the reference's."
        ),
        group_by=("kernel", "payload"),
        columns=(count("configurations"), total("calls", "cases"), entries("different", "different")),
        total="all",
    ),
)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> str:
    lines = [headings, [align] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def result_table(table: ResultTable, results: Path) -> str:
    """One table with its title, its note and where it comes from."""
    head = f"### {table.title}\n\n"
    path = results / table.file
    if not path.is_file():
        return f"{head}Not measured yet.\n"
    try:
        data = json.loads(path.read_text())
        source = _source(path, table.file, data["meta"])
        cells = [cell for cell in data["cells"] if table.shows(cell)]
        for name, value in table.required.items():
            for other in (cell[name] for cell in cells if cell[name] != value):
                raise RenderError(
                    f"{path}: a cell of the table {table.title!r} has {name} {other!r}, must be {value!r}"
                )
        groups: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in cells:
            groups.setdefault(tuple(cell[name] for name in table.group_by), []).append(cell)
        rows = [
            [*map(str, key), *(column.text(group) for column in table.columns)] for key, group in sorted(groups.items())
        ]
        if table.total:
            rows.append(
                [table.total, *[""] * (len(table.group_by) - 1), *(column.text(cells) for column in table.columns)]
            )
    except KeyError as error:
        raise RenderError(f"{path}: no field {error} for the table {table.title!r}") from error
    if not cells:
        raise RenderError(f"{path}: no cell for the table {table.title!r}")
    headings = [*table.group_by, *(column.heading for column in table.columns)]
    return f"{head}{table.note}\n\n{markdown_table(headings, rows, '---:')}\n{source}\n"


def _source(path: Path, name: str, meta: Mapping[str, Any]) -> str:
    """Where a table's figures come from.

    Raises:
        RenderError: the file does not say it.
    """
    missing = [key for key in META_KEYS if not meta.get(key)]
    if missing:
        raise RenderError(f"{path}: meta lacks {', '.join(missing)}")
    shown = "; ".join(f"{key} {meta[key]}" for key in META_KEYS[:-1])
    source = f"{shown}. `{meta['command']}` wrote [{name}](benchmark/results/{name})."
    return f"{source} {meta['remark']}" if meta.get("remark") else source


def soak_section(results: Path = RESULTS) -> str:
    """The long run under changing load: its summary in a row, and what was not as wanted."""
    name = "h200/e2e_soak.json"
    head, path = "### Under changing load\n\n", results / name
    if not path.is_file():
        return f"{head}Not measured yet.\n"
    content = json.loads(path.read_text())
    summary, levels = content["summary"], content["summary"]["levels"]
    note = (
        f"The real server with arm `{summary['arm']}` (experts by {summary['backend']}) while requests of up to "
        f"{summary['longest_input']} tokens come, are cancelled and go, {levels[0]} to {levels[-1]} at once."
    )
    figures = {
        "minutes": f"{summary['minutes']:.1f}",
        "requests": str(summary["sent"]),
        "finished": str(summary["finished"]),
        "cancelled": str(summary["aborted"] + summary["hung_up"]),
        "failed": str(summary["failed"]),
        "faults in the log": str(len(summary["log_errors"])),
        "GPU memory grown, MiB": f"{summary['gpu_memory_growth_mib']:.0f}",
        "sound": "yes" if summary["sound"] else "no",
    }
    table = markdown_table(list(figures), [list(figures.values())], "---:")
    return f"{head}{note}\n\n{table}\n{_source(path, name, content['meta'])}\n"


def results_section(results: Path = RESULTS) -> str:
    return "\n".join([*(result_table(table, results) for table in RESULT_TABLES), soak_section(results)])


def replaced(patch: plugin.Patch) -> str:
    """What of the engine a patch stands in for."""
    if not patch.targets:
        return f"a step inside {' and '.join(f'`{name}`' for name in patch.requires)}"
    around = {"around": "wraps ", "replace": ""}
    return "<br>".join(f"{around[t.kind]}`{t.homes[0].module}.{t.attribute}`" for t in patch.targets)


# Decode of one to a thousand requests on DeepSeek-V3 (top-8 of 256), by mean rows per expert.
_EXPECTED_ROWS = (1, 8, 16, 32, 64, 128)
_DEEPSEEK_V3_MOE_LAYERS = 58


def _saved(cells: Sequence[Cell]) -> float | None:
    """Microseconds that ours takes less, summed over cells that follow one another; None where one was not measured."""
    if not cells or any(cell[name] is None for cell in cells for name in ("engine_us", "ours_us")):
        return None
    return math.fsum(cell["engine_us"] - cell["ours_us"] for cell in cells)


def expectations_section(results: Path = RESULTS) -> str:
    """What one expert layer of DeepSeek-V3 saves, from the kernels' results files."""
    paths = [results / "h200" / name for name in ("streaming.json", "gemm_tiles.json")]
    if not all(path.is_file() for path in paths):
        return "Not measured yet.\n"
    streaming, gemms = (
        [cell for cell in json.loads(path.read_text())["cells"] if cell["routing"] == "random"] for path in paths
    )
    # One version of the compiled kernels: what they differ by is small, and a sum over them is nobody's layer.
    newest = max(
        {cell["kernel_version"] for cell in gemms}, key=lambda version: [*map(int, version.split("."))], default=None
    )
    gemms = [cell for cell in gemms if cell["kernel_version"] == newest]
    path = results / "h200" / "two_kernels.json"
    two = [
        {**cell, "ours_us": cell["triton_us"]}
        for cell in (json.loads(path.read_text())["cells"] if path.is_file() else [])
        if cell["routing"] == "random" and (cell["inner"], cell["hidden"]) == (2048, 7168)
    ]
    rows = []
    for experts, mean_rows in itertools.product((32, 64, 256), _EXPECTED_ROWS):
        here = [
            _saved([cell for cell in cells if (cell["experts"], cell["rows"]) == (experts, mean_rows)])
            for cells in (
                streaming,
                # The layer's two GEMMs, in a buffer where the engine's are right: elsewhere there is nothing to compare.
                [
                    cell
                    for cell in gemms
                    if (cell["n"], cell["k"]) in ((4096, 7168), (7168, 2048)) and cell["padded"] % 512 == 0
                ],
            )
        ]
        if None in here:
            continue
        layer = math.fsum(value for value in here if value is not None)
        whole = _saved([cell for cell in two if (cell["experts"], cell["rows"]) == (experts, mean_rows)])
        rows.append(
            [
                str(experts),
                str(mean_rows),
                *(f"{value:.0f}" for value in here),
                f"{layer:.0f}",
                f"{layer * _DEEPSEEK_V3_MOE_LAYERS / 1e3:.1f}",
                f"{whole:.0f}" if whole is not None else "",
                f"{whole * _DEEPSEEK_V3_MOE_LAYERS / 1e3:.1f}" if whole is not None else "",
            ]
        )
    headings = [
        "experts per rank",
        "rows per expert",
        "streaming steps, us",
        "GEMMs, us",
        "a layer, us",
        f"{_DEEPSEEK_V3_MOE_LAYERS} layers, ms a step",
        "two Triton kernels: a layer, us",
        f"{_DEEPSEEK_V3_MOE_LAYERS} layers, ms a step",
    ]
    return markdown_table(headings, rows, "---:")


# Measured with a second Triton in the same way: the kernel, its file without the ending, the size that tells its cells apart.
_TWICE = (
    ("requant", "requant", "k"),
    ("requant of bf16", "bf16", "k"),
    ("SiLU", "silu", "n"),
    ("the three steps", "streaming", "k"),
)
# Both of one session and launch table; the files without a suffix are measured again whenever launches change.
_TRITONS = ("_triton36", "_triton38")
# Of the two kernels, which are what a server computes with by default: every Triton that a supported engine brings.
_SHIPPED_TRITONS = ("_triton36", "_triton37", "_triton38")


def toolchains_section(results: Path = RESULTS) -> str:
    """The streaming kernels with a second Triton beside the first: times of one divided by those of the other."""
    rows, tritons = [], set()
    for kernel, name, size in _TWICE:
        paths = [results / "h200" / f"{name}{suffix}.json" for suffix in _TRITONS]
        if not all(path.is_file() for path in paths):
            continue
        contents = [json.loads(path.read_text()) for path in paths]
        tritons.add(tuple(content["meta"]["triton"] for content in contents))
        one, other = (report.by_shape(content["cells"], size) for content in contents)
        shapes = sorted(set(one) & set(other))

        def mean(column: str, one=one, other=other, shapes=shapes) -> str:
            return f"{geometric_mean([report.quotient(one[shape], other[shape], column) for shape in shapes]):.3f}"

        has_engine = all(cell["engine_us"] for shape in shapes for cell in (*one[shape], *other[shape]))
        lost = report.lost_by_shape(one, other, "engine_us" if has_engine else "copy_us")
        slower = [(lost[shape], shape) for shape in shapes if lost[shape] > report.TOOLCHAIN_DIFFERENCE]
        worst = ", ".join(
            f"{size} {a} E {b} rows {c}: {value:.2f}" for value, (a, b, c) in sorted(slower, reverse=True)[:4]
        )
        rows.append(
            [
                kernel,
                str(len(shapes)),
                mean("ours_us"),
                mean("engine_us") if has_engine else "",
                mean("copy_us"),
                f"{len(slower)}{f' ({worst})' if worst else ''}",
            ]
        )
    if not rows:
        return "Not measured yet.\n"
    if len(tritons) != 1:
        raise RenderError(f"{results}/h200: the files of two toolchains are of several: {sorted(tritons)}")
    ((one, other),) = tritons
    headings = ["kernel", "shapes", "ours", "engine's", "copy", "ours over 3% slower beside the engine's"]
    return f"Time with Triton {other} divided by time with Triton {one}.\n\n{markdown_table(headings, rows)}"


def _machine_codes(results: Path) -> list[dict[tuple[Any, ...], Cell]]:
    """Of both Tritons: what the assembler made of every launch of the table, by kernel, columns, experts and rows."""
    return [
        {
            (cell["kernel"], cell["columns"], cell["experts"], cell["rows"]): cell
            for cell in json.loads((results / "h200" / f"machine_code{suffix}.json").read_text())["cells"]
        }
        for suffix in _TRITONS
    ]


def _code(one: Cell, other: Cell) -> str:
    if one["digest"] == other["digest"]:
        return "the same"
    counts = ("instructions", "registers", "barriers")
    return ", ".join(f"{one[name]} to {other[name]} {name}" for name in counts if one[name] != other[name]) or "other"


def toolchain_turns_section(results: Path = RESULTS) -> str:
    """The shapes that lost in whole runs, as both Tritons in turns have them, and what differs in the machine code."""
    path = results / "h200" / "toolchains.json"
    if not path.is_file():
        return "Not measured yet.\n"
    content = json.loads(path.read_text())
    codes, rows = _machine_codes(results), []
    tritons = list(dict.fromkeys(cell["triton"] for cell in content["cells"]))
    if len(tritons) != len(_TRITONS):
        raise RenderError(f"{path}: must be of two Tritons, is of {', '.join(tritons)}")
    for kernel, name, size in _TWICE:
        mine = [cell for cell in content["cells"] if cell["kernel"] == name]
        if not mine:
            continue
        whole = report.lost_by_shape(
            *(
                report.by_shape(json.loads((results / "h200" / f"{name}{suffix}.json").read_text())["cells"], size)
                for suffix in _TRITONS
            ),
            "engine_us",
        )
        for shape, cells in sorted(report.by_shape(mine, "size").items()):
            runs = sorted({cell["run"] for cell in cells})
            one, other = (
                [[c for c in cells if (c["triton"], c["run"]) == (triton, run)] for run in runs] for triton in tritons
            )
            losses = [report.lost_beside(a, b, "engine_us") for a, b in zip(one, other, strict=True)]
            own = [[report.lost_beside(same[0], run, "engine_us") for run in same] for same in (one, other)]
            apart = max(max(part) / min(part) for part in own)
            tuned = [cell for cell in other[-1] if cell.get("tuned_us")]
            left = losses[-1] * geometric_mean([c["tuned_us"] / c["ours_us"] for c in tuned]) if tuned else None
            rows.append(
                [
                    f"{kernel}, {size} {shape[0]} E {shape[1]} rows {shape[2]}",
                    f"{whole[shape]:.3f}",
                    ", ".join(f"{loss:.3f}" for loss in losses),
                    f"{apart:.3f}",
                    _code(*(code[(name, *shape)] for code in codes)),
                    "" if left is None else f"{left:.3f}",
                ]
            )
    other = tritons[1]
    headings = ["shape", "whole runs", "in turns", "runs of one", "machine code", f"tuned by {other}"]
    return markdown_table(headings, rows)


def two_kernel_toolchains_section(results: Path = RESULTS) -> str:
    """A layer in two kernels with each Triton that was measured, and our CUTLASS chain in the same run of each."""
    paths = [results / "h200" / f"two_kernels_shipped{suffix}.json" for suffix in _SHIPPED_TRITONS]
    contents = [json.loads(path.read_text()) for path in paths if path.is_file()]
    if len(contents) < 2:
        return "Not measured yet.\n"
    versions = [content["meta"]["triton"] for content in contents]
    if len(set(versions)) != len(versions):
        raise RenderError(f"{results}/h200: the files of the two kernels are of Triton {', '.join(versions)}")
    found = [report.by_shape(content["cells"], "hidden") for content in contents]
    rows = []
    for shape in sorted(set().union(*found)):
        mine = [shapes.get(shape, []) for shapes in found]
        if sum(map(bool, mine)) < 2:
            continue
        ahead = [[cell["cutlass_us"] / cell["triton_us"] for cell in cells] for cells in mine]
        rows.append(
            [
                *map(str, shape[1:]),
                *(f"{geometric_mean([cell['triton_us'] for cell in cells]):.0f}" if cells else "" for cells in mine),
                *(f"{geometric_mean(factors):.2f} ({min(factors):.2f})" if factors else "" for factors in ahead),
            ]
        )
    headings = ["experts", "rows", *(f"{version}, us" for version in versions)]
    headings += [f"CUTLASS / two kernels, {version} (lowest)" for version in versions]
    return markdown_table(headings, rows, "---:")


def patches_section() -> str:
    rows = [
        [
            f"`{patch.name}`",
            replaced(patch),
            patch.what,
            f"[#{patch.upstream.rsplit('/', 1)[1]}]({patch.upstream})" if patch.upstream else "none",
        ]
        for patch in plugin.LEDGER
    ]
    return markdown_table(["patch", "replaces", "what it does", "upstream"], rows)


def versions_section(versions: Path = VERSIONS) -> str:
    """Supported engine versions; releases in a row that differ in nothing shown share a line."""

    def row(entry: Mapping[str, Any]) -> tuple[str, ...]:
        kernels = entry["modules"]["fp8_per_token_to_per_tensor_quant_triton"]
        ok = {True: "no", False: "yes"}
        return (
            f"{entry['torch']}, {entry['triton']}",
            f"`{kernels}`",
            "yes" if entry["threads_expected_m"] else "no",
            "wrong" if entry["drops_tokens"] else "right",
            ok[bool(entry["problems"])],
            ok[bool(entry["fork_problems"])],
        )

    try:
        entries = json.loads(versions.read_text())
        groups = [(rows, [e["version"] for e in group]) for rows, group in itertools.groupby(entries, key=row)]
    except (OSError, ValueError, KeyError) as error:
        raise RenderError(f"{versions}: cannot be read ({error})") from error
    headings = [
        "sglang",
        "torch, Triton",
        "Triton kernels in",
        "passes `expected_m` on",
        "one rank, several decode graphs",
    ]
    headings += ["plugin", "in-tree"]
    shown = ([" - ".join(dict.fromkeys([names[0], names[-1]])), *cells] for cells, names in groups)
    return markdown_table(headings, shown)


SECTIONS: Mapping[str, Callable[[], str]] = {
    "versions": versions_section,
    "patches": patches_section,
    "switches": switches.markdown_table,
    "results": results_section,
    "expectations": expectations_section,
    "toolchains": toolchains_section,
    "toolchain turns": toolchain_turns_section,
    "two kernel toolchains": two_kernel_toolchains_section,
}


def render(text: str, sections: Mapping[str, Callable[[], str]] = SECTIONS) -> str:
    """``text`` with every generated part made anew.

    Raises:
        RenderError: a part has no place in ``text``, or more than one.
    """
    for name, section in sections.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->\n"
        part = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if len(part.findall(text)) != 1:
            raise RenderError(f"README.md: must have {begin.strip()} ... {end.strip()} once")
        made = f"{begin}\n{section()}\n{end}"
        text = part.sub(lambda _, made=made: made, text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when README.md is out of date"
    )
    options = parser.parse_args(argv)
    old = README.read_text()
    try:
        new = render(old)
    except RenderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.check:
        README.write_text(new)
        return 0
    sys.stdout.writelines(
        difflib.unified_diff(old.splitlines(True), new.splitlines(True), "README.md", "README.md as it should be")
    )
    if old != new:
        print("error: README.md is out of date: run `make readme`", file=sys.stderr)
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
