"""The console command ``sglang-w4afp8``: a table of subcommands, each imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_w4afp8 import __version__


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: what the user types.
        entry: ``module:function``; the function takes the remaining arguments and returns the exit status (None is 0).
        help: one line.
    """

    name: str
    entry: str
    help: str


COMMANDS: tuple[Command, ...] = (
    Command("doctor", "sglang_w4afp8.doctor:main", "say what a server on this machine would get, and why not more"),
    Command("demo", "sglang_w4afp8.demo:main", "run the requant through the patched engine and check its bytes"),
    Command("bench", "sglang_w4afp8.bench.sweep:main", "time the streaming kernels against the engine and a copy"),
    Command("tune", "sglang_w4afp8.tune.cli:main", "measure launches on this GPU for servers to use"),
    Command("fork", "sglang_w4afp8.fork.cli:main", "write the change into an engine tree of your own, or take it back"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-w4afp8", description="W4AFP8 low-latency kernels for SGLang.")
    parser.add_argument("--version", action="version", version=f"sglang-w4afp8 {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        # Its own module parses what follows the name, --help included.
        subparsers.add_parser(command.name, help=command.help, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    options, rest = _parser().parse_known_args(argv)
    command = next(c for c in COMMANDS if c.name == options.command)
    module, _, function = command.entry.partition(":")
    return getattr(importlib.import_module(module), function)(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
