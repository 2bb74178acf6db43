#!/usr/bin/env python3
"""Compile every kernel with every Triton that the supported engines bring, and look at what its speed hangs on.

    python scripts/check_tritons.py                                        # all of them
    python scripts/check_tritons.py --triton 3.9.0 -- --target cuda:90     # one that no engine brings yet

Each Triton runs ``test/kernel_codegen.py`` and ``test/gemm_codegen.py``, in processes of their own; arguments after ``--`` go
to the first, and there is no second then. They are installed side by side in the user's cache (about 200 MB to fetch and 700 MB
on disk each, once) and put in front of the environment's own, which is used as it is where the version is the same. Only Triton
changes: torch stays.

Exit status: 0 all well; 1 a Triton makes other code, named; 2 one cannot be fetched.
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

CODEGEN = ROOT / "test" / "kernel_codegen.py"
GEMM_CODEGEN = ROOT / "test" / "gemm_codegen.py"


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


def run(
    version: str, directory: Path | None, arguments: Sequence[str] = (), script: Path = CODEGEN
) -> subprocess.CompletedProcess[str]:
    """Run a code-generation script with one Triton; ``directory`` is put in front of the environment's packages."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    front = [str(directory)] if directory else []
    environment["PYTHONPATH"] = os.pathsep.join([*front, *filter(None, [environment.get("PYTHONPATH")])])
    # A compiled kernel of one Triton must never stand for another's.
    environment["TRITON_CACHE_DIR"] = str(cached_wheels.cache_directory() / "triton-cache" / version)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog="Arguments after -- go to test/kernel_codegen.py."
    )
    known = sorted(set(check_engine_versions.TRITON_OF_TORCH.values()))
    parser.add_argument("--triton", nargs="+", metavar="VERSION", default=known, help=f"default: {' '.join(known)}")
    options = parser.parse_args(arguments[:cut])
    try:
        places = directories(options.triton)
    except cached_wheels.FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = []
    more = arguments[cut + 1 :]
    for version, directory in places.items():
        runs = [run(version, directory, more)]
        if not more:
            runs.append(run(version, directory, script=GEMM_CODEGEN))
        for done in runs:
            print(done.stdout, flush=True)
        if any(done.returncode != 0 for done in runs):
            failed.append(version)
    if failed:
        print(f"error: other code than expected with triton {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
