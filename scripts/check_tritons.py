#!/usr/bin/env python3
"""Run the code-generation tests under every Triton that the supported engines bring, each in a process of its own.

    python scripts/check_tritons.py                      # all of them
    python scripts/check_tritons.py --triton 3.9.0 -- -x # one that no engine brings yet; the rest to pytest

Tritons are installed side by side in the user's cache (about 200 MB to fetch and 700 MB on disk each, once) and put in front
of the environment's own, which is used as it is where the version is the same. Only Triton changes: torch stays.

Exit status: 0 all pass; 1 a Triton fails, named; 2 one cannot be fetched.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]

import cached_wheels  # noqa: E402
import check_engine_versions  # noqa: E402

CODEGEN = ROOT / "test" / "registered" / "unit" / "kernels" / "test_codegen.py"


def run(version: str, directory: Path | None, pytest_args: Sequence[str] = (), test: Path = CODEGEN) -> int:
    """Run the code-generation tests with one Triton; ``directory`` is put in front of the environment's packages."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    front = [str(directory)] if directory else []
    environment["PYTHONPATH"] = os.pathsep.join([*front, *filter(None, [environment.get("PYTHONPATH")])])
    # A compiled kernel is cached by its source and by Triton's own version; apart, one cannot stand for another.
    environment["TRITON_CACHE_DIR"] = str(cached_wheels.cache_directory() / "triton-cache" / version)
    command = [sys.executable, "-m", "pytest", str(test), "-p", "no:cacheprovider", "-q", *pytest_args]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def directories(versions: Sequence[str]) -> dict[str, Path | None]:
    """Where each Triton is; None for the one that is installed.

    Raises:
        cached_wheels.FetchError: pip cannot get one.
    """
    try:
        installed = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    found = cached_wheels.tritons([version for version in versions if version != installed])
    return {version: found.get(version) for version in versions}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], epilog="Arguments after -- go to pytest.")
    known = sorted(set(check_engine_versions.TRITON_OF_TORCH.values()))
    parser.add_argument("--triton", nargs="+", metavar="VERSION", default=known, help=f"default: {' '.join(known)}")
    options = parser.parse_args(arguments[:cut])
    try:
        places = directories(options.triton)
    except cached_wheels.FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = []
    for version, directory in places.items():
        print(f"triton {version}", flush=True)
        if run(version, directory, arguments[cut + 1 :]) != 0:
            failed.append(version)
    if failed:
        print(f"error: code generation fails with triton {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
