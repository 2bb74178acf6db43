#!/usr/bin/env python3
"""Same tokens? Greedy decoding of the same prompts by the engine and by the plugin, on a checkpoint with real weights.

    python benchmark/e2e/equality.py --model-path DIR
    python benchmark/e2e/equality.py --model-path DIR --arms cutlass triton reference

Four servers, one after the other, alike but for the arm and for DeepEP's tokens per rank (so the padded rows):

1. the engine with padded rows a multiple of 512, where its grouped GEMM is right: the reference;
2. the plugin with the same rows: must give the reference's tokens;
3. the engine with other rows (128 per rank): shows how far its GEMM is off;
4. the plugin with those rows: must give the reference's tokens.

Every server decodes all prompts one at a time, then all at once, twice. One at a time nothing depends on timing, and
tokens must be equal. All at once, batches form as requests arrive: the second pass shows how far a server repeats
itself, and the comparison counts only where the reference does.

A token that differs where the reference's two best logits are closer than ``--near-tie`` is counted apart; the default
allows none.

An arm that is served by the Triton backend rounds less often than the engine, so its tokens are not the engine's. With the arm
``reference``, whose expert layers are float32 (one more server, without CUDA graphs), it is judged against that: one at a time,
tokens must be equal but where the two best log-probabilities of the float server are closer than ``--float-tie``, and the gap
between those two must not be further off (root mean square) than the engine's is. How far the engine is from it is shown.

The float server has no CUDA graphs, the others prefill in one where a prompt fills half of it or more, and that alone changes
log-probabilities, of the engine's as of ours. So only prompts that both sides have prefilled alike are compared with it; the
server's log says which (all are where it does not say).

For that the checkpoint's last layer should be its only expert layer. Every fp8 layer behind one rounds anew whatever differs in
front of it, so that a few layers further on a small difference and a large one are alike, and no arm is near the reference.

Finished servers are kept in ``--work``, so that an interrupted run goes on. Exit status: 0 equal; 1 a
server failed; 3 the time ran out; 4 an arm was not what it says; 5 tokens differ.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import client, evidence, report
from harness.arms import CUTLASS, ENGINE, PLUGIN, REFERENCE, TRITON, Arm, parse_arm
from harness.cli import (
    FAILED,
    INCOMPLETE,
    NOT_PROVED,
    Clock,
    Journal,
    Model,
    NotProvedError,
    add_server_arguments,
    check_fits,
    conditions,
    fingerprint,
    launch_options,
    positive_int,
    wait_ready,
)
from harness.report import say
from harness.server import RIGHT_ROWS, LaunchOptions, Server, ServerError, install_cleanup

DIFFERENT = 5
SINGLE, BATCH, REPEAT = "one at a time", "all at once", "all at once again"
_PASSES = (SINGLE, BATCH, REPEAT)


@dataclass(frozen=True)
class Outputs:
    """What one server decoded.

    Attributes:
        tokens: per pass and prompt, the tokens.
        gaps: per prompt of the first pass and token, the log-probability between the best and the second best.
        backend: what computed the experts.
        graph_prefills: per prompt of the first pass, whether it was prefilled in a CUDA graph; None where the log does not say.
    """

    arm: str
    rows: int
    live: list[str]
    tokens: dict[str, list[list[int]]]
    gaps: list[list[float]]
    backend: str = CUTLASS
    graph_prefills: list[bool] | None = None


@dataclass(frozen=True)
class Difference:
    """Two servers' tokens of one pass compared. A prompt counts up to its first difference: after it, contexts differ.

    Attributes:
        prompts: how many there are.
        equal: prompts with all tokens equal.
        near_ties: prompts whose first difference is where the reference nearly ties.
        matching_tokens: part of all tokens before first differences.
        largest_gap: the reference's largest gap at a first difference; 0 where nothing differs or no gaps are known.
        gap_rms: by how much the gaps differ before first differences, root mean square; None where one side's are not known.
    """

    prompts: int
    equal: int
    near_ties: int
    matching_tokens: float
    largest_gap: float = 0.0
    gap_rms: float | None = None

    @property
    def different(self) -> int:
        """Prompts that differ where the reference was decided."""
        return self.prompts - self.equal - self.near_ties


def compare_tokens(
    reference: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    gaps: Sequence[Sequence[float]] | None = None,
    near_tie: float = 0.0,
    other_gaps: Sequence[Sequence[float]] | None = None,
) -> Difference:
    """Compare prompt by prompt; ``gaps`` are the reference's."""
    equal = near = matching = 0
    largest = 0.0
    squares: list[float] = []
    for index, (mine, theirs) in enumerate(zip(reference, other, strict=True)):
        first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        matching += len(mine) if first is None else first
        if gaps is not None and other_gaps is not None:
            pairs = zip(gaps[index][:first], other_gaps[index][:first], strict=True)
            squares += [(a - b) ** 2 for a, b in pairs]
        if first is None:
            equal += 1
        elif gaps is not None:
            largest = max(largest, gaps[index][first])
            near += gaps[index][first] < near_tie
    rms = math.sqrt(statistics.fmean(squares)) if squares else None
    return Difference(len(reference), equal, near, matching / max(1, sum(map(len, reference))), largest, rms)


def _gaps(meta: dict[str, Any]) -> list[float]:
    return [top[0][0] - top[1][0] for top in meta["output_top_logprobs"]]  # each (logprob, token, text), best first


async def _decode(server: Server, prompts: list[list[int]], length: int) -> tuple[dict[str, list[list[int]]], Any]:
    tokens: dict[str, list[list[int]]] = {}
    async with client.session() as http:
        singles = []
        for index, prompt in enumerate(prompts):
            singles += await client.stream_batch(
                http, server.url, [prompt], length, return_logprob=True, top_logprobs_num=2
            )
            if (index + 1) % 16 == 0:
                say(f"{server.arm.name}: {index + 1} of {len(prompts)} prompts, one at a time")
        tokens[SINGLE] = [progress.output_ids for progress in singles]
        for name in (BATCH, REPEAT):
            batch = await client.stream_batch(http, server.url, prompts, length)
            tokens[name] = [progress.output_ids for progress in batch]
    return tokens, [_gaps(progress.meta) for progress in singles]


def decode_all(
    arm: Arm,
    options: LaunchOptions,
    prompts: list[list[int]],
    length: int,
    journal: Journal,
    clock: Clock,
    ready_s: float,
) -> Outputs | None:
    """One server's outputs, or None when the time ran out.

    Raises:
        NotProvedError: the arm was not what it says.
    """
    name = f"rows{options.padded_rows}-{arm.slug}"
    kept = journal.load(name)
    if kept is not None:
        say(f"{arm.name}, {options.padded_rows} padded rows: kept from the last run")
        return Outputs(**kept)
    if not clock.fits("server"):
        return None
    begin = time.monotonic()
    log = journal.directory / f"{name}.log"
    say(f"{arm.name}, {options.padded_rows} padded rows: starting, log {log}")
    with Server(arm, options, log).start() as server:
        if wait_ready(server, ready_s, clock) is None:
            return None
        tokens, gaps = asyncio.run(_decode(server, prompts, length))
        said = server.log_text()
    seen = evidence.read_log(said)
    problems = evidence.check_log(arm, seen, options.tp, report.version("sglang"))
    if problems:
        raise NotProvedError(f"{arm.name} was not what it says ({log}): {'; '.join(problems)}")
    clock.spent("server", time.monotonic() - begin)
    live = list(dict.fromkeys(name for names in seen.first_calls for name in names))
    graphs = evidence.graph_prefills(said, [len(prompt) for prompt in prompts])
    outputs = Outputs(arm.name, options.padded_rows, live, tokens, gaps, evidence.computed_by(arm, seen), graphs)
    journal.save(name, asdict(outputs))
    return outputs


def prefilled_alike(one: Outputs, other: Outputs) -> list[int]:
    """Prompts that both servers have prefilled in a CUDA graph, or both not; all where a log does not say."""
    prompts = range(len(one.tokens[SINGLE]))
    if one.graph_prefills is None or other.graph_prefills is None:
        return list(prompts)
    return [index for index in prompts if one.graph_prefills[index] == other.graph_prefills[index]]


def judge(
    reference: Outputs, others: Sequence[Outputs], near_tie: float, float_tie: float = 0.0
) -> tuple[list[dict[str, Any]], list[str]]:
    """Cells of the results, and what must not be. One of ``others`` may be the float reference."""
    cells, faults = [], []
    exact = next((other for other in others if other.backend == REFERENCE), None)

    def from_exact(other: Outputs) -> Difference:
        alike = prefilled_alike(exact, other)
        sides = (exact.tokens[SINGLE], other.tokens[SINGLE], exact.gaps, other.gaps)
        mine, theirs, gaps, others_gaps = ([side[index] for index in alike] for side in sides)
        return compare_tokens(mine, theirs, gaps, float_tie, others_gaps)

    engines = from_exact(reference).gap_rms if exact is not None else None
    repeats = compare_tokens(reference.tokens[BATCH], reference.tokens[REPEAT])
    for other in (reference, *others):
        # The engine's own other rows are shown, not judged, and so is whoever rounds otherwise than the engine.
        must_equal = other.arm != ENGINE and other.backend == CUTLASS
        for name in _PASSES:
            gaps = reference.gaps if name == SINGLE else None
            # All at once, the reference itself is what it is on its first pass.
            base = reference.tokens[SINGLE if name == SINGLE else BATCH]
            others_gaps = other.gaps if name == SINGLE else None
            found = compare_tokens(base, other.tokens[name], gaps, near_tie, others_gaps)
            judged = must_equal and (name == SINGLE or repeats.equal == repeats.prompts)
            if judged and found.different:
                faults.append(
                    f"{other.arm} with {other.rows} padded rows, {name}: {found.different} of {found.prompts} prompts "
                    f"differ from the engine with {reference.rows}"
                )
            role = "reference" if other is reference else "must equal" if must_equal else "shown"
            cells.append(_cell(other, name, found, judged, role, ENGINE))
        if exact is not None and other is not exact:
            found = from_exact(other)
            judged = other.backend == TRITON
            if judged and not found.prompts:
                faults.append(
                    f"{other.arm} with {other.rows} padded rows: not judged, no prompt was prefilled as by the float reference"
                )
            if judged and found.gap_rms is not None and engines is not None and found.gap_rms > engines:
                faults.append(
                    f"{other.arm} with {other.rows} padded rows: gaps are {found.gap_rms:.4f} from the float reference's, "
                    f"the engine's {engines:.4f}"
                )
            if judged and found.different:
                faults.append(
                    f"{other.arm} with {other.rows} padded rows: {found.different} of {found.prompts} prompts differ from the "
                    f"float reference where it is decided, by up to {found.largest_gap:.3f}"
                )
            cells.append(_cell(other, SINGLE, found, judged, "must equal" if judged else "shown", REFERENCE))
        elif other.backend == TRITON:
            faults.append(
                f"{other.arm} with {other.rows} padded rows: not judged, its reference is missing: add {REFERENCE!r}"
            )
    return cells, faults


def _cell(other: Outputs, name: str, found: Difference, judged: bool, role: str, against: str) -> dict[str, Any]:
    return {
        "arm": other.arm,
        "backend": other.backend,
        "patches": ",".join(other.live),
        "padded_rows": other.rows,
        "pass": name,
        "against": against,
        "prompts": found.prompts,
        "equal": found.equal,
        "near_ties": found.near_ties,
        "matching_tokens": round(found.matching_tokens, 4),
        "largest_gap": round(found.largest_gap, 4),
        "gap_rms": None if found.gap_rms is None else round(found.gap_rms, 4),
        "judged": judged,
        "role": role,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare greedy tokens of the engine and the plugin.")
    # What the plugin computes with by default is its own choice, and may have to be judged against the reference.
    parser.add_argument("--arms", nargs="+", default=[PLUGIN, REFERENCE], help="arms beside the engine")
    parser.add_argument("--prompts", type=positive_int, default=64)
    parser.add_argument("--input-len", type=positive_int, default=64, help="longest prompt; shortest is half of it")
    parser.add_argument("--output-len", type=positive_int, default=32)
    parser.add_argument(
        "--other-dispatch-tokens",
        type=positive_int,
        metavar="N",
        help="DeepEP tokens per rank where the engine is wrong",
    )
    parser.add_argument("--near-tie", type=float, default=0.0, metavar="LOGPROB", help="against the engine")
    parser.add_argument("--float-tie", type=float, default=0.1, metavar="LOGPROB", help="against the float reference")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=Path("e2e_equality.json"))
    parser.add_argument("--work", type=Path, default=Path("e2e_work"))
    add_server_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    install_cleanup()
    try:
        arms = [parse_arm(text) for text in args.arms]
        if TRITON in args.arms and REFERENCE not in args.arms:
            raise ValueError(
                f"arms: are {args.arms}, must have {REFERENCE!r} beside {TRITON!r}, which is judged against it"
            )
        model = Model.read(args.model_path, args.model_name)
        right = launch_options(args, [1, args.prompts], may_pad=True)
        tokens = args.other_dispatch_tokens or next(n for n in (128, 64, 32, 16) if n * args.ep % RIGHT_ROWS)
        other = launch_options(args, [1, args.prompts], may_pad=True, dispatch_tokens=tokens)
        if right.padded_rows % RIGHT_ROWS or not other.padded_rows % RIGHT_ROWS:
            raise ValueError(
                f"dispatch-tokens: padded rows are {right.padded_rows} and {other.padded_rows}, must be a multiple of "
                f"{RIGHT_ROWS} and not one"
            )
        check_fits(right, model)
        # The same chunks and graphs with both row counts: nothing but DeepEP's buffers may differ.
        right, other = (options.with_chunk(other.padded_rows) for options in (right, other))
    except ValueError as error:
        parser.error(str(error))
    lengths = [args.input_len - i % (args.input_len // 2 + 1) for i in range(args.prompts)]
    prompts = [client.random_prompts(1, length, model.vocab_size, seed)[0] for seed, length in enumerate(lengths)]
    journal = Journal(
        args.work,
        "equality",
        {
            "model": fingerprint(model, args.model_path),
            "right": asdict(right),
            "other": asdict(other),
            "prompts": prompts,
            "output_len": args.output_len,
            **conditions(right.environ(parse_arm(ENGINE))),
        },
    )
    clock = Clock(args.time_limit)
    runs = [(parse_arm(ENGINE), right), *((arm, right) for arm in arms)]
    # Rows play no part in the float reference.
    runs += [(parse_arm(ENGINE), other), *((arm, other) for arm in arms if arm.name != REFERENCE)]
    outputs = []
    try:
        for arm, options in runs:
            done = decode_all(arm, options, prompts, args.output_len, journal, clock, args.ready_timeout)
            if done is None:
                say("the time is used up; run the same command again to go on")
                return INCOMPLETE
            outputs.append(done)
    except NotProvedError as error:
        say(f"NOT PROVED: {error}")
        return NOT_PROVED
    except (ServerError, *client.FAILURES) as error:
        say(f"FAILED: {error!r}" if not str(error) else f"FAILED: {error}")
        return FAILED
    cells, faults = judge(outputs[0], outputs[1:], args.near_tie, args.float_tie)
    distinct = len({token for row in outputs[0].tokens[SINGLE] for token in row})
    meta = report.run_meta(
        model=asdict(model),
        output_len=args.output_len,
        near_tie=args.near_tie,
        float_tie=args.float_tie,
        distinct_tokens=distinct,
        faults=faults,
        servers={f"{arm.name}, {options.padded_rows} rows": options.shown(arm) for arm, options in runs},
    )
    report.write_json(args.out, {"meta": meta, "cells": cells})
    columns = [
        "arm",
        "padded rows",
        "pass",
        "against",
        "equal prompts",
        "near ties",
        "matching tokens %",
        "gap",
        "gaps off",
        "role",
    ]
    report.print_table(
        f"Greedy tokens against the engine with {outputs[0].rows} padded rows, and against float32 expert layers",
        columns,
        [
            [
                cell["arm"],
                cell["padded_rows"],
                cell["pass"],
                cell["against"],
                f"{cell['equal']} / {cell['prompts']}",
                cell["near_ties"],
                100.0 * cell["matching_tokens"],
                f"{cell['largest_gap']:.3f}",
                "" if cell["gap_rms"] is None else f"{cell['gap_rms']:.4f}",
                cell["role"] + ("" if cell["judged"] or cell["role"] != "must equal" else " (not judged)"),
            ]
            for cell in cells
        ],
    )
    if distinct < args.prompts:
        say(f"only {distinct} distinct tokens: equal tokens of such a model prove little")
    for fault in faults:
        say(f"DIFFERENT: {fault}")
    return DIFFERENT if faults else 0


if __name__ == "__main__":
    sys.exit(main())
