#!/usr/bin/env python3
"""Run the test lanes of ``test/registered``, picked by the engine's own registration markers.

    python test/run_suite.py --hw cpu                                # every lane of that hardware
    python test/run_suite.py --hw cuda --suite base-b-kernel-unit    # one lane
    python test/run_suite.py --list                                  # what there is
    python test/run_suite.py --hw cpu -- -k geometry -x              # the rest goes to pytest

A lane is what its files say: ``register_cpu_ci(est_time=2, suite="base-a-test-cpu")`` at module level. The engine's
parser reads the markers, so that a file which passes here is also accepted by the engine's own runner. All files of a
run share one pytest process. ``bench_*.py`` files are run as scripts with ``--ci`` (their short set);
``test/conftest.py`` does that.

Exit status: pytest's, or 2 when the lanes themselves are wrong: an unregistered file, an unknown lane, no GPU for
``--hw cuda``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TEST_DIR = Path(__file__).resolve().parent
REGISTERED = TEST_DIR / "registered"
HARDWARE = ("cpu", "cuda")


class LaneError(Exception):
    """The lanes cannot be run as asked; the message says what to do."""


def load_ci_register() -> ModuleType:
    """The installed engine's ``sglang.test.ci.ci_register``, loaded from its file.

    ``import sglang`` takes seconds and needs the whole engine; the parser needs neither, and a GPU box may lack both.
    """
    spec = importlib.util.find_spec("sglang")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(root, "test", "ci", "ci_register.py")
        if path.is_file():
            module_spec = importlib.util.spec_from_file_location("_engine_ci_register", path)
            assert module_spec is not None and module_spec.loader is not None
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[module_spec.name] = module  # dataclasses look their module up
            module_spec.loader.exec_module(module)
            return module
    raise LaneError("sglang.test.ci.ci_register not found: install the engine (`make env`), which has the lane markers")


def find_files(root: Path) -> list[str]:
    """Every test and benchmark file below ``root``, sorted."""
    return sorted(str(path) for pattern in ("test_*.py", "bench_*.py") for path in root.rglob(pattern))


def collect(ci_register: ModuleType, root: Path) -> list[Any]:
    """All registrations (the engine's ``CIRegistry``) below ``root``.

    Raises:
        LaneError: a file that the engine's parser rejects, unregistered ones above all; the message names it.
    """
    try:
        return ci_register.collect_tests(find_files(root), sanity_check=True)
    except (ValueError, SyntaxError) as error:
        raise LaneError(
            f"{error}\nEvery file under {shown(root)} carries the engine's markers; CONTRIBUTING.md shows them."
        ) from error


def of_hardware(registrations: Iterable[Any], hw: str) -> list[Any]:
    return [registration for registration in registrations if registration.backend.name == hw.upper()]


def select(registrations: Sequence[Any], hw: str, suite: str | None, nightly: bool) -> list[Any]:
    """The registrations of one run, disabled ones included.

    Raises:
        LaneError: nothing is registered for ``suite`` (the known lanes are listed), or only for ``--nightly``.
    """
    lanes = of_hardware(registrations, hw)
    if suite is not None:
        known = sorted({registration.effective_suite for registration in lanes})
        lanes = [registration for registration in lanes if registration.effective_suite == suite]
        if not lanes:
            raise LaneError(f"no lane {suite!r} for --hw {hw}; known: {', '.join(known) or 'none'}")
    elif not lanes:
        raise LaneError(f"no lanes for --hw {hw}")
    selected = [registration for registration in lanes if nightly or not registration.nightly]
    if not selected:
        raise LaneError(f"every file of the lane {suite or hw!r} is nightly only: add --nightly")
    return selected


def shown(path: str | Path) -> str:
    """``path`` as a person at the repository's root would type it."""
    return os.path.relpath(path, TEST_DIR.parent)


def print_lanes(registrations: Sequence[Any], hardware: Sequence[str]) -> None:
    for hw in hardware:
        lanes: dict[str, list[Any]] = defaultdict(list)
        for registration in of_hardware(registrations, hw):
            lanes[registration.effective_suite].append(registration)
        for suite, members in sorted(lanes.items()):
            seconds = sum(member.est_time for member in members if member.disabled is None)
            print(f"--hw {hw} --suite {suite}  ({len(members)} files, about {seconds:.0f} s)")
            for member in sorted(members, key=lambda member: member.filename):
                notes = [" (nightly)"] if member.nightly else []
                notes += [f" (disabled: {member.disabled})"] if member.disabled is not None else []
                print(f"    {shown(member.filename)}{''.join(notes)}")


def lane_environment(hw: str) -> dict[str, str]:
    """The environment that pytest runs in.

    Raises:
        LaneError: ``hw`` is cuda and torch sees no device.
    """
    environment = dict(os.environ)
    if hw == "cpu":
        environment.setdefault("TRITON_INTERPRET", "1")
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a CPU lane is the same on every machine
        return environment
    try:
        import torch
    except ImportError as error:
        raise LaneError(f"--hw cuda needs torch: {error}") from error
    if not torch.cuda.is_available():
        raise LaneError(f"--hw cuda needs a GPU, and torch {torch.__version__} sees none")
    if environment.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise LaneError("--hw cuda runs compiled kernels: unset TRITON_INTERPRET")
    return environment


def run(selected: Sequence[Any], environment: dict[str, str], pytest_args: Sequence[str]) -> int:
    """Run the files in one pytest process and return its exit status."""
    for registration in selected:
        if registration.disabled is not None:
            print(f"skipped {shown(registration.filename)} ({registration.effective_suite}): {registration.disabled}")
    # A file may stand in several lanes of one hardware: it runs once.
    files = sorted({registration.filename for registration in selected if registration.disabled is None})
    if not files:
        print("nothing to run: every file of the lane is disabled")
        return 0
    command = [sys.executable, "-m", "pytest", *files]
    if all(Path(file).name.startswith("bench_") for file in files):
        command.append("-rP")  # the tables of a benchmark that passes are what one runs it for
    sys.stdout.flush()
    return subprocess.run([*command, *pytest_args], cwd=TEST_DIR.parent, env=environment, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    pytest_args: list[str] = []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, pytest_args = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog="Arguments after -- go to pytest.", allow_abbrev=False
    )
    parser.add_argument("--hw", choices=HARDWARE, help="hardware of the lanes")
    parser.add_argument("--suite", metavar="NAME", help="one lane (default: all lanes of --hw)")
    parser.add_argument("--nightly", action="store_true", help="run nightly files too")
    parser.add_argument("--list", action="store_true", help="print the lanes and their files, run nothing")
    options = parser.parse_args(arguments)
    if options.hw is None and not options.list:
        parser.error("--hw is required (cpu or cuda), or --list")
    try:
        registrations = collect(load_ci_register(), REGISTERED)
        if options.list:
            print_lanes(registrations, [options.hw] if options.hw else HARDWARE)
            return 0
        selected = select(registrations, options.hw, options.suite, options.nightly)
        return run(selected, lane_environment(options.hw), pytest_args)
    except LaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
