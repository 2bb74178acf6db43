"""What is written beside a figure, and how results files are kept; what is timed goes through ``timing``."""

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sglang_w4afp8 import __version__


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _command() -> str:
    """The command of this process without the folders of the machine it ran on."""
    program = Path(sys.argv[0]).name
    words = ["sglang-w4afp8" if program == "cli.py" else program, *sys.argv[1:]]
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)


def run_metadata(**extra: Any) -> dict[str, Any]:
    """What a results file says of its run: command, GPU, driver and every version on the path."""
    import triton

    return {
        "command": _command(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _driver(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang": _version("sglang"),
        "sglang_w4afp8": __version__,
        **extra,
    }


# Figures of runs that differ in one of these are not set beside each other in one file.
SET_UP = ("gpu", "driver", "torch", "triton", "sglang", "sglang_kernel", "sglang_w4afp8")


def refuse_other_set_up(path: Path, found: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Compare what a results file says of its run with this run.

    Raises:
        SystemExit: they differ; the message names the file and what differs.
    """
    differing = [key for key in SET_UP if found.get(key) != meta.get(key)]
    if differing:
        texts = ", ".join(f"{key} {found.get(key)}, not {meta.get(key)}" for key in differing)
        raise SystemExit(f"{path}: was measured with another set-up ({texts}); move it away or name another one")


class Results:
    """The cells of one results file, written after every cell; a second run of the same set-up goes on with them.

    Args:
        path: the file.
        meta: of this run, see :func:`run_metadata`.

    Raises:
        SystemExit: the file was measured with another set-up.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self.path, self.meta = path, meta
        self.cells: list[dict[str, Any]] = []
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            refuse_other_set_up(path, content["meta"], meta)
            self.cells = content["cells"]

    def holds(self, key: Mapping[str, Any]) -> bool:
        """Whether a cell with these values is measured already."""
        return any(all(cell.get(name) == value for name, value in key.items()) for cell in self.cells)

    def add(self, cell: dict[str, Any]) -> None:
        """Keep a cell and write the file."""
        self.cells.append(cell)
        write_json(self.path, {"meta": self.meta, "cells": self.cells})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write beside and rename, so that an interrupted run leaves the previous file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # One cell a line: diffs of results stay readable.
    head = {key: value for key, value in content.items() if key != "cells"}
    text = json.dumps(head, indent=1)[:-2]
    if "cells" in content:
        cells = ",\n".join("  " + json.dumps(cell) for cell in content["cells"])
        text += ',\n "cells": [\n' + cells + "\n ]"
    partial.write_text(text + "\n}\n", encoding="utf-8")
    partial.replace(path)
