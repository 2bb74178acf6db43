"""Results as JSON (the committed form), CSV, a picture and a table, and how progress is said."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_BEGIN = time.monotonic()


def say(text: str) -> None:
    """A line of progress with the seconds since the start. Lines, not bars: these runs are read in logs."""
    print(f"[{time.monotonic() - _BEGIN:7.1f} s] {text}", file=sys.stderr, flush=True)


def ticker(what: str, every_s: float = 15.0) -> Callable[[float], None]:
    """A callback for waiting loops that says every so often how long it has been."""
    said = 0.0

    def tick(elapsed: float) -> None:
        nonlocal said
        if elapsed - said >= every_s:
            said = elapsed
            say(f"{what}: {elapsed:.0f} s")

    return tick


def version(distribution: str) -> str:
    """The installed version, or ``not installed``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def nvidia_smi(*fields: str) -> list[list[str]]:
    """One row of the fields per GPU that a server may use (``CUDA_VISIBLE_DEVICES``); empty where there is none.

    A process of its own: no CUDA context is made here.
    """
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        query.append(f"--id={visible}")
    try:
        out = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.strip()]


def shown_command(argv: Sequence[str] | None = None) -> str:
    """The command of this process without the folders of the machine it ran on."""
    words = list(sys.argv if argv is None else argv)
    return shlex.join([Path(words[0]).name, *(Path(word).name if word.startswith("/") else word for word in words[1:])])


def run_meta(**more: Any) -> dict[str, Any]:
    """What a results file must say of its run."""
    gpus = nvidia_smi("name", "driver_version")
    return {
        "gpu": gpus[0][0] if gpus else "none",
        "gpus": len(gpus),
        "driver": gpus[0][1] if gpus else "none",
        "torch": version("torch"),
        "triton": version("triton"),
        "sglang": version("sglang"),
        "sglang_kernel": version("sglang-kernel"),
        "sglang_w4afp8": version("sglang-w4afp8"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": shown_command(),
        **more,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write beside and rename, a cell a line, so that diffs stay readable and a crash leaves the previous file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**content, "cells": []} if "cells" in content else content, indent=1)
    if content.get("cells"):
        cells = ",\n".join(f"  {json.dumps(cell)}" for cell in content["cells"])
        text = text.replace('"cells": []', f'"cells": [\n{cells}\n ]')
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


# Runs of several engines, each with what it needs, may share a file.
_MERGED = ("sglang", "torch", "triton", "driver", "sglang_kernel")


def _joined(old: Any, new: Any, separator: str) -> str:
    parts = [part for part in str(old).split(separator) if part]
    return separator.join(parts if str(new) in parts else [*parts, str(new)])


def check_mergeable(path: Path, meta: Mapping[str, Any], key: Sequence[str]) -> None:
    """Whether cells can be put into a results file: it holds one kind of GPU, and its cells have all key fields.

    Raises:
        ValueError: the file is from another GPU, or from a version of the tool that did not say so much of a cell.
    """
    if not path.exists():
        return
    old = json.loads(path.read_text())
    if (gpu := old["meta"]["gpu"]) != meta["gpu"]:
        raise ValueError(f"out: {path} has gpu {gpu!r}, must be this machine's, {meta['gpu']!r}")
    if lacking := [name for name in key if any(name not in cell for cell in old["cells"])]:
        raise ValueError(
            f"out: {path} has cells without {', '.join(lacking)}, must have been written by this version; give "
            "another file with --out"
        )


def merge_results(path: Path, meta: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], key: Sequence[str]) -> None:
    """Put cells into a results file: they replace those with the same key fields, the others stay.

    Raises:
        ValueError: see `check_mergeable`.
    """
    check_mergeable(path, meta, key)
    if path.exists():
        old = json.loads(path.read_text())
        fresh = {tuple(cell[name] for name in key) for cell in cells}
        kept = [cell for cell in old["cells"] if tuple(cell[name] for name in key) not in fresh]
        cells = sorted([*kept, *cells], key=lambda cell: [(str(type(cell[name])), cell[name]) for name in key])
        merged = {name: _joined(old["meta"].get(name, ""), meta[name], ", ") for name in _MERGED}
        merged["servers"] = {**old["meta"].get("servers", {}), **meta.get("servers", {})}
        if remark := old["meta"].get("remark"):  # on cells that stay
            merged["remark"] = remark
        meta = {**meta, **merged, "command": _joined(old["meta"]["command"], meta["command"], "; ")}
    write_json(path, {"meta": dict(meta), "cells": list(cells)})


def write_csv(path: Path, meta: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> None:
    """The cells as CSV under a line with the machine and versions."""
    fields = list(dict.fromkeys(name for cell in cells for name in cell))
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(
            "# " + ", ".join(f"{name} {meta[name]}" for name in ("gpu", "driver", "torch", "triton", "sglang")) + "\n"
        )
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on standard output, as wide as it needs to be."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def draw_gains(path: Path, title: str, baseline: str, cells: Sequence[Mapping[str, Any]]) -> bool:
    """Gain over the baseline by concurrency, with intervals; False where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError:
        say("matplotlib is not installed: no picture")
        return False
    arms = list(dict.fromkeys(cell["arm"] for cell in cells if cell["gain_pct"] is not None))
    concurrencies = sorted({cell["concurrency"] for cell in cells})
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    width = 0.8 / max(1, len(arms))
    for position, arm in enumerate(arms):
        chosen = {cell["concurrency"]: cell for cell in cells if cell["arm"] == arm}
        present = [c for c in concurrencies if c in chosen]
        gains = [chosen[c]["gain_pct"] for c in present]
        below = [max(0.0, chosen[c]["gain_pct"] - chosen[c]["gain_low_pct"]) for c in present]
        above = [max(0.0, chosen[c]["gain_high_pct"] - chosen[c]["gain_pct"]) for c in present]
        at = [concurrencies.index(c) + (position - (len(arms) - 1) / 2) * width for c in present]
        axes.bar(at, gains, width, yerr=[below, above], capsize=4, label=arm)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    axes.set_xlabel("requests at once")
    axes.set_ylabel(f"decode tokens/s over {baseline}, %")
    axes.set_title(title)
    if arms:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
