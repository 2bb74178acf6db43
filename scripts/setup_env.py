#!/usr/bin/env python3
"""Make the virtual environment that `make demo` and `make test` work in: the pinned engine and this checkout.

    python3 scripts/setup_env.py --venv .venv [--engine 0.5.21]

Versions come from ``constraints.txt``; ``--engine`` replaces the engine's pin. A stamp in the environment holds a hash
of everything that decides what is in it, so that a second run returns at once and a changed file brings it up to date.
Only the standard library is used: nothing is installed yet when this runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# What an installation depends on; the version of the package is in its __init__.
INPUTS = (CONSTRAINTS, ROOT / "pyproject.toml", ROOT / "python" / "sglang_w4afp8" / "__init__.py")
STAMP = "sglang-w4afp8.stamp"
ENGINE_PIN = re.compile(r"^sglang==(\S+)$", re.MULTILINE)
# 10.5 GB installed (engine 0.5.23, Linux x86_64), and about 5 GB of wheels beside it while pip unpacks them.
NEEDED_GB = 16


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def pinned_engine() -> str:
    """The engine version in ``constraints.txt``."""
    match = ENGINE_PIN.search(CONSTRAINTS.read_text())
    if match is None:
        raise SetupError(f"{CONSTRAINTS}: no line sglang==VERSION")
    return match.group(1)


def constraints_for(engine: str) -> str:
    """``constraints.txt`` with the engine's pin replaced."""
    return ENGINE_PIN.sub(f"sglang=={engine}", CONSTRAINTS.read_text())


def stamp_key(venv: Path, engine: str) -> str:
    """Hash of everything that decides what is in the environment.

    The environment's path is part of it (scripts in it hold that path), and so is the checkout's (installed in place).
    """
    digest = hashlib.sha256()
    for part in (engine, str(venv), str(ROOT), str(sys.version_info[:2]), *(path.read_text() for path in INPUTS)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def usable(venv: Path) -> bool:
    """Whether the environment was made at this very path (its scripts hold it) and is of this interpreter's version."""
    try:
        made_here = f" {venv}\n" in (venv / "pyvenv.cfg").read_text()
        code = "import sys; print(sys.version_info[:2])"
        done = subprocess.run([python_of(venv), "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return made_here and done.stdout.strip() == str(sys.version_info[:2])


def has_engine(venv: Path, engine: str) -> bool:
    return any(venv.glob(f"lib/python*/site-packages/sglang-{engine}.dist-info"))


def check_disk(venv: Path) -> None:
    """Raise `SetupError` when the engine does not fit where the environment goes."""
    place = next(path for path in (venv, *venv.parents) if path.exists())
    free_gb = shutil.disk_usage(place).free / 1e9
    if free_gb < NEEDED_GB:
        raise SetupError(
            f"{free_gb:.1f} GB free at {place}, and installing the engine takes {NEEDED_GB} GB. "
            "Free some, or put the environment on another disk: make VENV=/path/to/venv ..."
        )


def install(venv: Path, engine: str) -> None:
    """Create the environment where it is missing or unusable, and bring what is in it up to date."""
    constraints = venv / CONSTRAINTS.name  # also the sign that this script made the environment
    reuse = usable(venv)
    if not reuse and venv.exists() and any(venv.iterdir()) and not constraints.exists():
        raise SetupError(
            f"{venv} is in the way: not empty, and not an environment of Python {sys.version_info[0]}."
            f"{sys.version_info[1]} made there. Remove it, or name another place: make VENV=/path/to/venv ..."
        )
    if reuse and has_engine(venv, engine):
        print(f"Bringing {venv} up to date with {CONSTRAINTS.name} and pyproject.toml (sglang {engine}).", flush=True)
    else:
        check_disk(venv)
        print(f"Installing sglang {engine} into {venv} (Python {sys.version.split()[0]}).")
        print("The first time takes about 4 minutes and 10.5 GB; later runs reuse it.", flush=True)
    if not reuse and subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=False).returncode != 0:
        raise SetupError(f"{sys.executable} -m venv failed; on Debian and Ubuntu: apt-get install python3-venv")
    constraints.write_text(constraints_for(engine))
    # Where /tmp is in memory, several GB of wheels do not fit there.
    downloads = venv / "tmp"
    downloads.mkdir(exist_ok=True)
    environment = {"TMPDIR": str(downloads), **os.environ}
    command = [python_of(venv), "-m", "pip", "install", "--constraint", constraints, "--editable", f"{ROOT}[test]"]
    try:
        status = subprocess.run(command, env=environment, check=False).returncode
    finally:
        shutil.rmtree(downloads, ignore_errors=True)
    if status != 0:
        # pip's status is the same for both.
        raise SetupError(
            f"pip exited with status {status}; the reason stands above. If it was the network or the disk, run the same "
            "command to go on. If pip found no version that fits, running it again does not help: name an engine that there "
            f"is (ENGINE={pinned_engine()} is the pinned one), or another Python (PYTHON=python3.12)."
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--venv", type=Path, required=True, help="directory of the environment")
    parser.add_argument("--engine", help="version of sglang (default: the one pinned in constraints.txt)")
    options = parser.parse_args(argv)
    venv = Path(os.path.abspath(options.venv))  # as venv writes it into pyvenv.cfg: without ".." too
    try:
        engine = options.engine or pinned_engine()
        key = stamp_key(venv, engine)
        stamp = venv / STAMP
        if stamp.is_file() and stamp.read_text() == key:
            return 0
        install(venv, engine)
        stamp.write_text(key)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
