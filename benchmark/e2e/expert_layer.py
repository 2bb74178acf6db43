#!/usr/bin/env python3
"""Right over several ranks? One W4AFP8 layer behind real DeepEP, against a float64 reference of all its experts.

    python benchmark/e2e/expert_layer.py --ranks 2

Neither a server nor a checkpoint: the engine's dispatcher and method in one process a GPU, DeepSeek-V3's sizes, uneven loads,
an empty expert, a rank without tokens and one whose experts get none. Every arm is served with padded rows that are a multiple
of 512, where the engine's GEMM is right, and with others; the engine's outputs with the others are shown and not judged. No
server is started, so it also says early whether DeepEP works between these GPUs at all. What is finished is kept in ``--work``,
and the same command again goes on.

Exit status: 0 right; 1 a process failed; 2 wrong arguments; 4 an arm was not what it says; 5 an output is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import report
from harness.arms import CUTLASS, ENGINE, TRITON, Arm, parse_arm
from harness.cli import FAILED, NOT_PROVED, Journal, check_gpus, conditions, positive_int
from harness.report import say
from harness.server import RIGHT_ROWS, install_cleanup

WRONG = 5
_RANKS = Path(__file__).with_name("expert_layer_ranks.py")
_RESULT = "RESULT "
# bf16 keeps 8 bits, so that a right output is within 2^-8 of the reference; scales in the wrong order give errors near 1.
TOLERANCE = 2.0**-8


class RanksError(RuntimeError):
    """A rank failed, or they did not end; the message ends with what they said last."""


def run_ranks(words: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> list[dict[str, Any]]:
    """What every rank of one arm found.

    Raises:
        RanksError: no result, or none in time; nothing of them is left running.
    """
    process = subprocess.Popen(
        [sys.executable, str(_RANKS), *words],
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # with its ranks, so that all of them can be ended
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise RanksError(f"not done after {timeout_s:.0f} s\n{_tail(output)}") from error
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    if process.returncode or not lines:
        raise RanksError(f"exit status {process.returncode}\n{_tail(output)}")
    return json.loads(lines[-1].removeprefix(_RESULT))


def _tail(output: str, lines: int = 30) -> str:
    return "\n".join(output.splitlines()[-lines:])


def contradictions(arm: Arm, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the ranks say that contradicts the arm."""
    problems = []
    for rank, said in enumerate(found):
        live = said["live"]
        if bool(live) == arm.is_engine or (arm.patches and set(live) != set(arm.patches)):
            problems.append(f"rank {rank}: live patches are {', '.join(live) or 'none'}")
        if said["regrouped"] != (not arm.is_engine and arm.computes == TRITON):
            problems.append(f"rank {rank}: weights are {'' if said['regrouped'] else 'not '}regrouped")
    return problems


def cell_of(arm: Arm, ranks: int, tokens: int, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Cells are right when every step's output is, on every rank."""
    rows = tokens * ranks
    # A rank without tokens gets nothing back: its error is 0.
    errors = [step["error"] for said in found for step in said[str(rows)]]
    return {
        "arm": arm.name,
        "ranks": ranks,
        "dispatch_tokens": tokens,
        "padded_rows": rows,
        "outputs": len(errors),
        "equal": sum(step["right"] for said in found for step in said[str(rows)]),
        "largest_error": max(errors, key=lambda error: (math.isnan(error), error)),
        "right": all(error < TOLERANCE for error in errors),  # NaN is not
        "judged": not arm.is_engine or rows % RIGHT_ROWS == 0,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="One expert-parallel layer against a float64 reference.")
    parser.add_argument("--ranks", type=positive_int, required=True, help="GPUs of this host")
    parser.add_argument("--arms", nargs="+", default=[ENGINE, CUTLASS, TRITON])
    parser.add_argument(
        "--dispatch-tokens", type=positive_int, nargs="+", metavar="N", help="default: for 256 padded rows, and for 512"
    )
    parser.add_argument(
        "--ranks-args", nargs=argparse.REMAINDER, default=[], help="last: options of expert_layer_ranks.py"
    )
    parser.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="of one arm and row count")
    parser.add_argument("--out", type=Path, default=Path("e2e_layer.json"))
    parser.add_argument("--work", type=Path, default=Path("e2e_work"), help="finished arms, kept between calls")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    install_cleanup()
    try:
        arms = [parse_arm(text) for text in args.arms]
        if RIGHT_ROWS // 2 % args.ranks:
            raise ValueError(f"ranks: is {args.ranks}, must divide {RIGHT_ROWS // 2}")
        check_gpus("ranks", args.ranks)
    except ValueError as error:
        parser.error(str(error))
    caps = args.dispatch_tokens or [RIGHT_ROWS // 2 // args.ranks, RIGHT_ROWS // args.ranks]
    run_of = {"ranks": args.ranks, "words": args.ranks_args, **conditions(parse_arm(ENGINE).environ())}
    journal = Journal(args.work, "layer", run_of)
    cells, status = [], 0
    for tokens in caps:
        for arm in arms:
            cell = journal.load(name := f"{tokens}-{arm.slug}")
            if cell is None:
                words = ["--ranks", str(args.ranks), "--dispatch-tokens", str(tokens), *args.ranks_args]
                try:
                    found = run_ranks(words, arm.environ(), args.timeout)
                except RanksError as error:
                    say(f"FAILED: {arm.name}, {tokens} tokens a rank: {error}")
                    return FAILED
                if problems := contradictions(arm, found):
                    say(f"NOT PROVED: {arm.name} was not what it says: {'; '.join(problems)}")
                    return NOT_PROVED
                journal.save(name, cell := cell_of(arm, args.ranks, tokens, found))
            cells.append(cell)
            right = "right" if cell["right"] else "WRONG"
            say(f"{arm.name}, {cell['padded_rows']} padded rows: {right}, error {cell['largest_error']:.4f}")
            if cell["judged"] and not cell["right"]:
                status = WRONG
    report.write_json(args.out, {"meta": report.run_meta(tolerance=TOLERANCE), "cells": cells})
    columns = ["arm", "padded rows", "outputs", "equal", "largest error", "right", "judged"]
    report.print_table(
        f"One layer over {args.ranks} ranks against float64",
        columns,
        [[cell[name.replace(" ", "_")] for name in columns] for cell in cells],
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
