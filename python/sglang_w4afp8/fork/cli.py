"""``sglang-w4afp8 fork TREE``: write the change into an engine's own tree, check it, show it, take it back."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_w4afp8 import __version__
from sglang_w4afp8.fork import suites, tree
from sglang_w4afp8.fork.source import ForkError

_CURRENT, _NOT_PATCHED, _DIFFERS = 0, 1, 2
_READER_GONE = 141  # what a shell says of a program whose pipe was closed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-w4afp8 fork",
        description="Write the streaming kernels, and expected_m through the chain, into an sglang tree.",
        epilog="Exit status: 0 done; 2 refused, with what differs, and nothing written. "
        "With --check: 0 patched and current, 1 not patched, 2 differs or outdated.",
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="a checkout of sglang, or its unpacked package")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="say how the tree stands, write nothing")
    action.add_argument("--diff", action="store_true", help="print what would be written, write nothing")
    action.add_argument("--revert", action="store_true", help="put back, byte for byte, what was replaced here")
    parser.add_argument("--no-tests", action="store_true", help="in a checkout, leave the tests out")
    parser.add_argument(
        "--any-version",
        action="store_true",
        help="an engine version unknown to this release: go by its functions alone",
    )
    return parser


def _check(engine: tree.EngineTree, tests: bool, any_version: bool) -> int:
    changes = tree.plan(engine, tests, any_version)
    versions = tree.in_tree_versions(engine)
    behind = {engine.shown(change.path): change for change in changes if change.needed}
    if not any(versions.values()):
        print(f"not patched: sglang {engine.version or '(version unknown)'} in {engine.package}, which can be")
        return _NOT_PATCHED
    if not behind:
        print(f"patched and current: {__version__}")
        return _CURRENT
    for name, change in behind.items():
        version = versions.get(name, __version__)
        state = "carries no marker" if version is None else f"carries {version}"
        if version == __version__:
            state = "missing" if change.before is None else "differs"
        print(f"{name}: {state}, would become {__version__}")
    return _DIFFERS


def _diff(engine: tree.EngineTree, tests: bool, any_version: bool) -> None:
    for change in tree.plan(engine, tests, any_version):
        if change.needed:
            name = engine.shown(change.path)
            old = "/dev/null" if change.before is None else f"a/{name}"
            # The files' own bytes, whatever their encoding and the terminal's; only "\n" ends a line of a patch.
            before, after = (io.BytesIO(data).readlines() for data in (change.before or b"", change.after))
            lines = difflib.diff_bytes(difflib.unified_diff, before, after, os.fsencode(old), os.fsencode(f"b/{name}"))
            sys.stdout.buffer.writelines(lines)


def _apply(engine: tree.EngineTree, tests: bool, any_version: bool) -> None:
    changes = tree.apply(engine, tests, any_version)
    for change in changes:
        print(f"{'new    ' if change.before is None else 'written'}  {engine.shown(change.path)}")
    if not changes:
        print(f"nothing to do: patched and current, {__version__}")
    if engine.checkout and tests and not suites.suites():
        print("no tests written: an installed wheel has none; run scripts/apply_to_fork.py of a clone of sglang-w4afp8")


def _run(options: argparse.Namespace) -> int:
    engine = tree.find(options.tree)
    tests = not options.no_tests
    if options.check:
        return _check(engine, tests, options.any_version)
    if options.diff:
        _diff(engine, tests, options.any_version)
    elif options.revert:
        for path in tree.revert(engine):
            print(f"reverted  {engine.shown(path)}")
    else:
        _apply(engine, tests, options.any_version)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        status = _run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`
        # Python flushes once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except (ForkError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return _DIFFERS
    except ModuleNotFoundError as error:  # a bare interpreter, where no engine is installed
        print(f"refused: {error}: pip install {error.name}", file=sys.stderr)
        return _DIFFERS


if __name__ == "__main__":
    sys.exit(main())
