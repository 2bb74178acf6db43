#!/usr/bin/env python3
"""A long run with the plugin under changing load: requests of all lengths come, go and are cancelled.

    python benchmark/e2e/soak.py --model-path DIR --minutes 15

The number of requests at once changes every ``--hold`` seconds between 1 and the largest ``--concurrency``; first it
goes down from the largest, so that memory has its peak early, then in random order. One request in ten is cancelled,
half of them through ``/abort_request``, half by hanging up.

Wanted: no request fails, no line in the server's log reports a fault, GPU memory does not grow after the first round.
The summary is written every half minute and at the end. Exit status: 0 all of that; 1 the server failed; 4 the plugin
was not live; 6 something of it is not so, the summary says what.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
from harness import client, evidence, report
from harness.arms import PLUGIN, parse_arm
from harness.cli import FAILED, NOT_PROVED, Model, add_server_arguments, check_fits, launch_options
from harness.report import say
from harness.server import Server, ServerError, install_cleanup

UNSOUND = 6
_SAMPLE_S = 5.0
_SUMMARY_S = 30.0
_DRAIN_S = 120.0
_KEPT_FAILURES = 20
_MIB = 1 << 20


@dataclass(frozen=True)
class Request:
    """One request: what is asked, and after how many tokens it is cancelled, if at all."""

    rid: str
    prompt: list[int]
    output_len: int
    cancel: str | None
    cancel_after: int


@dataclass
class Tally:
    """What became of the requests."""

    sent: int = 0
    finished: int = 0
    aborted: int = 0
    hung_up: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    most_at_once: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        self.failed += 1
        if len(self.failures) < _KEPT_FAILURES:
            self.failures.append(text)


@dataclass(frozen=True)
class MemorySample:
    """Memory at a moment: seconds since the load began, MiB on all GPUs, MiB of the server's processes on the host."""

    at_s: float
    gpu_mib: float | None
    host_mib: float


def log_uniform(rng: random.Random, most: int) -> int:
    """1 to ``most``, every octave equally likely: short requests are common, long ones are there."""
    return round(most ** rng.random())


class Requests:
    """Draws requests; the same ones for the same seed."""

    def __init__(self, seed: int, vocab_size: int, longest_input: int, longest_output: int) -> None:
        self._rng, self._drawn = random.Random(seed), 0
        self._vocab_size, self._inputs, self._outputs = vocab_size, longest_input, longest_output

    def draw(self) -> Request:
        rng, self._drawn = self._rng, self._drawn + 1
        input_len, output_len = log_uniform(rng, self._inputs), log_uniform(rng, self._outputs)
        cancel = rng.choices((None, "abort", "hang up"), (90, 5, 5))[0]
        return Request(
            # All of one length: the engine aborts every request whose identifier begins with the one that it is given.
            rid=f"soak-{self._drawn:08d}",
            prompt=client.random_prompts(1, input_len, self._vocab_size, rng.randrange(1 << 30))[0],
            output_len=output_len,
            cancel=cancel,
            cancel_after=rng.randrange(0, output_len),
        )


def levels(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    return sorted({min(largest, 1 << i) for i in range(largest.bit_length() + 1)})


class Schedule:
    """How many requests there should be at once at a moment."""

    def __init__(self, largest: int, hold_s: float, seed: int) -> None:
        self._levels, self._hold_s, self._rng = levels(largest), hold_s, random.Random(seed)
        self._planned = list(reversed(self._levels))

    @property
    def round_s(self) -> float:
        """One pass over all levels."""
        return len(self._levels) * self._hold_s

    def at(self, seconds: float) -> int:
        """The level; moments may be asked for in any order."""
        index = int(seconds / self._hold_s)
        while index >= len(self._planned):
            self._planned += self._rng.sample(self._levels, len(self._levels))
        return self._planned[index]


async def run_request(http: Any, url: str, request: Request, tally: Tally) -> None:
    """One request from beginning to end; what goes wrong is tallied, never raised."""
    body = {
        "rid": request.rid,
        "input_ids": request.prompt,
        "sampling_params": client.sampling(request.output_len, stream_interval=client.STREAM_INTERVAL),
        "stream": True,
    }
    tally.sent += 1
    tally.input_tokens += len(request.prompt)
    tokens, reason, asked = 0, None, False
    try:
        async with http.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                raise client.RequestError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for event in client.events(response):
                if "error" in event:
                    raise client.RequestError(str(event["error"]))
                tokens, reason = event["meta_info"]["completion_tokens"], event["meta_info"]["finish_reason"]
                if request.cancel and tokens > request.cancel_after and reason is None and not asked:
                    asked = True
                    if request.cancel == "hang up":
                        tally.hung_up += 1
                        return
                    await client.post(http, url, "/abort_request", {"rid": request.rid})
        if asked and reason is not None and reason.get("type") == "abort":
            tally.aborted += 1
            return
        client.check_finish(reason)
        if tokens != request.output_len:
            raise client.RequestError(f"gave {tokens} tokens, must be {request.output_len}")
        tally.finished += 1
    except client.FAILURES as error:
        tally.fail(f"{request.rid} ({len(request.prompt)} in, {request.output_len} out): {error!r}")
    finally:
        tally.output_tokens += tokens


def sample_memory(server: Server, at_s: float) -> MemorySample:
    """Memory now."""
    used = [float(row[0]) for row in report.nvidia_smi("memory.used")]
    host = 0
    for process in server.tree():
        with contextlib.suppress(psutil.Error):
            host += process.memory_info().rss
    return MemorySample(round(at_s, 1), sum(used) if used else None, round(host / _MIB, 1))


def growth(samples: Sequence[MemorySample], after_s: float, kind: str) -> float | None:
    """MiB by which the largest value of the last half exceeds that of the half before it, ``after_s`` and later.

    None where there are too few samples, or none of this kind.
    """
    values = [getattr(sample, kind) for sample in samples if sample.at_s >= after_s]
    if len(values) < 4 or None in values:
        return None
    middle = len(values) // 2
    return max(values[middle:]) - max(values[:middle])


async def _watch_memory(server: Server, begin: float, samples: list[MemorySample]) -> None:
    while True:
        samples.append(await asyncio.to_thread(sample_memory, server, time.monotonic() - begin))
        await asyncio.sleep(_SAMPLE_S)


async def _load(
    server: Server,
    requests: Requests,
    schedule: Schedule,
    seconds: float,
    tally: Tally,
    samples: list[MemorySample],
    write: Callable[[float, bool], Any],
) -> None:
    """Keep as many requests in flight as the schedule says, until the time is over; then let them finish."""
    running: set[asyncio.Task[None]] = set()
    begin = said = written = time.monotonic()
    async with client.session() as http:
        watcher = asyncio.create_task(_watch_memory(server, begin, samples))
        try:
            while (elapsed := time.monotonic() - begin) < seconds:
                server.check_alive()
                level = schedule.at(elapsed)
                while len(running) < level:
                    task = asyncio.create_task(run_request(http, server.url, requests.draw(), tally))
                    running.add(task)
                    task.add_done_callback(running.discard)
                tally.most_at_once = max(tally.most_at_once, len(running))
                now = time.monotonic()
                if now - said >= 15.0:
                    said = now
                    say(
                        f"{elapsed:.0f} of {seconds:.0f} s, {level} at once: "
                        f"{tally.finished} finished, {tally.failed} failed"
                    )
                if now - written >= _SUMMARY_S:
                    written = now
                    write(elapsed, False)
                await asyncio.sleep(0.02)
            if running:
                _, late = await asyncio.wait(running, timeout=_DRAIN_S)
                for task in late:
                    tally.fail("a request did not end after the load stopped")
                    task.cancel()
            samples.append(await asyncio.to_thread(sample_memory, server, time.monotonic() - begin))
        finally:
            watcher.cancel()


def faults(
    tally: Tally, errors: Sequence[str], gpu_growth: float | None, tolerance_mib: float, largest: int
) -> list[str]:
    """What is not as wanted."""
    found = []
    if tally.failed:
        found.append(f"{tally.failed} requests failed, first: {tally.failures[0]}")
    if errors:
        found.append(f"{len(errors)} log lines report a fault, first: {errors[0]}")
    if gpu_growth is None:
        found.append("GPU memory was not measured, or too few times")
    elif gpu_growth > tolerance_mib:
        found.append(f"GPU memory grew by {gpu_growth:.0f} MiB, more than {tolerance_mib:.0f}")
    if tally.most_at_once < largest:
        found.append(f"only {tally.most_at_once} requests at once, must reach {largest}")
    if not tally.aborted or not tally.hung_up:
        found.append("no request was cancelled by both ways: the run is too short")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A long run under changing load.")
    parser.add_argument("--arm", default=PLUGIN)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--concurrency", type=int, default=256, help="most requests at once")
    parser.add_argument("--hold", type=float, default=15.0, metavar="SECONDS", help="time at one level")
    parser.add_argument("--longest-input", type=int, default=1024)
    parser.add_argument("--longest-output", type=int, default=256)
    parser.add_argument("--memory-tolerance", type=float, default=64.0, metavar="MIB", help="growth per GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("e2e_soak.json"))
    parser.add_argument("--work", type=Path, default=Path("e2e_work"))
    add_server_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    install_cleanup()
    try:
        arm = parse_arm(args.arm)
        model = Model.read(args.model_path, args.model_name)
        options = launch_options(args, levels(args.concurrency), may_pad=True)
        check_fits(options, model)
    except ValueError as error:
        parser.error(str(error))
    requests = Requests(args.seed, model.vocab_size, args.longest_input, args.longest_output)
    schedule = Schedule(args.concurrency, args.hold, args.seed)
    tally, samples = Tally(), list[MemorySample]()
    server = Server(arm, options, args.work / f"soak-{arm.slug}.log")
    meta = report.run_meta(model=asdict(model), server=options.shown(arm))

    served_from = 0  # byte of the log from which on the server serves

    def write(elapsed: float, complete: bool) -> list[str]:
        errors = evidence.error_lines(server.log_text(served_from))
        seen = evidence.read_log(server.log_text())
        grown = growth(samples, schedule.round_s, "gpu_mib")
        found = faults(tally, errors, grown, args.memory_tolerance * options.tp, args.concurrency)
        summary = {
            "complete": complete,
            "minutes": round(elapsed / 60.0, 2),
            "sound": complete and not found,
            "faults": found,
            "arm": arm.name,
            "backend": evidence.computed_by(arm, seen),
            "patches": list(dict.fromkeys(name for names in seen.first_calls for name in names)),
            "levels": levels(args.concurrency),
            "hold_s": args.hold,
            "longest_input": args.longest_input,
            "longest_output": args.longest_output,
            **asdict(tally),
            "log_errors": errors[:_KEPT_FAILURES],
            "gpu_memory_mib": _range([s.gpu_mib for s in samples if s.gpu_mib is not None]),
            "gpu_memory_growth_mib": grown,
            "host_memory_mib": _range([s.host_mib for s in samples]),
            "host_memory_growth_mib": growth(samples, schedule.round_s, "host_mib"),
        }
        report.write_json(args.out, {"meta": meta, "summary": summary, "cells": [asdict(s) for s in samples]})
        return found

    begin = time.monotonic()
    try:
        say(f"{arm.name}: starting, log {server.log_path}")
        with server.start():
            took = server.wait_ready(args.ready_timeout, report.ticker("starting"))
            say(f"{arm.name}: ready after {took:.0f} s")
            begin, served_from = time.monotonic(), server.log_size()
            asyncio.run(_load(server, requests, schedule, args.minutes * 60.0, tally, samples, write))
            elapsed = time.monotonic() - begin
            problems = evidence.check_log(arm, evidence.read_log(server.log_text()), options.tp)
            found = write(elapsed, True)
    except (ServerError, *client.FAILURES) as error:
        write(time.monotonic() - begin, False)
        say(f"FAILED: {error!r}" if not str(error) else f"FAILED: {error}")
        return FAILED
    if problems:
        say(f"NOT PROVED: {'; '.join(problems)}")
        return NOT_PROVED
    say(
        f"{elapsed / 60.0:.1f} minutes, {tally.sent} requests: {tally.finished} finished, {tally.aborted} aborted, "
        f"{tally.hung_up} hung up, {tally.failed} failed"
    )
    for fault in found:
        say(f"UNSOUND: {fault}")
    return UNSOUND if found else 0


def _range(values: Sequence[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None


if __name__ == "__main__":
    sys.exit(main())
