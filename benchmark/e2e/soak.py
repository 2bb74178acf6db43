#!/usr/bin/env python3
"""A long run with the plugin under changing load: requests of all lengths come, go and are cancelled.

    python benchmark/e2e/soak.py --model-path DIR --minutes 15

The number of requests at once changes every ``--hold`` seconds between 1 and the largest ``--concurrency``; first it
goes down from the largest, so that memory has its peak early, then in random order. One request in ten is cancelled,
half of them through ``/abort_request``, half by hanging up.

Wanted: no request fails, no line in the server's log reports a fault, memory of no GPU grows after the first round, the
arm is what it says. The summary is written every half minute and at the end. Exit status: 0 all of that; 1 the server
failed; 4 the plugin was not live; 6 something of it is not so. The summary says what.

GPU memory is that of the server's own processes. Where nvidia-smi does not show them (in a container it shows the host's
process numbers, or none) it is what is used on the server's GPUs, whoever uses it. ``gpu_memory_of`` in the summary says
which of the two; every GPU is judged alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
from harness import client, evidence, report
from harness.arms import PLUGIN, parse_arm
from harness.cli import (
    FAILED,
    NOT_PROVED,
    Model,
    add_server_arguments,
    check_fits,
    launch_options,
    positive_float,
    positive_int,
)
from harness.report import say
from harness.server import Server, ServerError, install_cleanup

UNSOUND = 6
OWN_PROCESSES, WHOLE_GPUS = "the server's processes", "whole GPUs"
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
    """Memory at a moment: seconds since the load began, MiB by GPU, MiB of the server's processes on the host."""

    at_s: float
    gpu_mib: dict[str, float] | None
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


class GpuMemory:
    """MiB by GPU, looked at in one of two ways for the whole run: the jump from one to the other would look like growth."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._own: bool | None = None

    @property
    def of(self) -> str | None:
        """Whose memory it is; None before the first look."""
        return None if self._own is None else OWN_PROCESSES if self._own else WHOLE_GPUS

    def now(self) -> dict[str, float] | None:
        """None where nvidia-smi says nothing."""
        if self._own is None:
            # Every rank has a context. Fewer are no server's: process numbers of a host may be ours by chance.
            self._own = len(self._of_processes() or ()) >= len(self._server.options.gpus)
        return self._of_processes() if self._own else self._of_gpus()

    def _of_processes(self) -> dict[str, float] | None:
        names = {uuid: index for index, uuid in _rows("--query-gpu=index,uuid", 2)}
        ours = {str(process.pid) for process in self._server.tree()}
        used: dict[str, float] = {}
        for pid, mib, uuid in _rows("--query-compute-apps=pid,used_memory,gpu_uuid", 3):
            if pid in ours:
                if not mib.isdecimal():  # [N/A]
                    return None
                gpu = names.get(uuid, uuid)
                used[gpu] = used.get(gpu, 0.0) + float(mib)
        return used or None

    def _of_gpus(self) -> dict[str, float] | None:
        rows = [row for row in _rows("--query-gpu=index,uuid,memory.used", 3) if row[2].isdecimal()]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:  # in this order
            entries = [entry.strip() for entry in visible.split(",")]
            rows = [row for entry in entries for row in rows if entry and (row[0] == entry or row[1].startswith(entry))]
        gpus = self._server.options.gpus
        return {rows[gpu][0]: float(rows[gpu][2]) for gpu in gpus} if max(gpus) < len(rows) else None


def _rows(query: str, columns: int) -> list[list[str]]:
    """What nvidia-smi answers, about all GPUs; nothing where it fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    return [row for row in rows if len(row) == columns]


def sample_memory(server: Server, gpu_memory: GpuMemory, at_s: float) -> MemorySample:
    """Memory now."""
    host = 0
    for process in server.tree():
        with contextlib.suppress(psutil.Error):
            host += process.memory_info().rss
    return MemorySample(round(at_s, 1), gpu_memory.now(), round(host / _MIB, 1))


def growth(values: Sequence[float]) -> float | None:
    """By how much the largest value of the last half exceeds that of the half before it; None where there are too few."""
    if len(values) < 4:
        return None
    middle = len(values) // 2
    return max(values[middle:]) - max(values[:middle])


def gpu_growth(samples: Sequence[MemorySample], after_s: float) -> dict[str, float] | None:
    """MiB by which the memory of every GPU grew, ``after_s`` and later; None where it was not measured, or too few times."""
    found = [sample.gpu_mib for sample in samples if sample.at_s >= after_s]
    measured = [mib for mib in found if mib is not None]
    if len(measured) < max(4, len(found)):
        return None
    gpus = sorted({gpu for mib in measured for gpu in mib})
    return {gpu: growth([mib.get(gpu, 0.0) for mib in measured]) or 0.0 for gpu in gpus}


async def _watch_memory(server: Server, gpu_memory: GpuMemory, begin: float, samples: list[MemorySample]) -> None:
    while True:
        samples.append(await asyncio.to_thread(sample_memory, server, gpu_memory, time.monotonic() - begin))
        await asyncio.sleep(_SAMPLE_S)


async def _load(
    server: Server,
    requests: Requests,
    schedule: Schedule,
    seconds: float,
    tally: Tally,
    gpu_memory: GpuMemory,
    samples: list[MemorySample],
    write: Callable[[float, bool], Any],
) -> None:
    """Keep as many requests in flight as the schedule says, until the time is over; then let them finish."""
    running: set[asyncio.Task[None]] = set()
    begin = said = written = time.monotonic()
    async with client.session() as http:
        watcher = asyncio.create_task(_watch_memory(server, gpu_memory, begin, samples))
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
            samples.append(await asyncio.to_thread(sample_memory, server, gpu_memory, time.monotonic() - begin))
        finally:
            watcher.cancel()


def faults(
    tally: Tally,
    errors: Sequence[str],
    grown: Mapping[str, float] | None,
    tolerance_mib: float,
    largest: int,
    problems: Sequence[str] = (),
) -> list[str]:
    """What is not as wanted. ``problems``: why the arm is not what it says, or what ended the run."""
    found = list(problems)
    if tally.failed:
        found.append(f"{tally.failed} requests failed, first: {tally.failures[0]}")
    if errors:
        found.append(f"{len(errors)} log lines report a fault, first: {errors[0]}")
    if grown is None:
        found.append("GPU memory was not measured, or too few times")
    for gpu, mib in (grown or {}).items():
        if mib > tolerance_mib:
            found.append(f"memory of GPU {gpu} grew by {mib:.0f} MiB, more than {tolerance_mib:.0f}")
    if tally.most_at_once < largest:
        found.append(f"only {tally.most_at_once} requests at once, must reach {largest}")
    if not tally.aborted or not tally.hung_up:
        found.append("no request was cancelled by both ways: the run is too short")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A long run under changing load.")
    parser.add_argument("--arm", default=PLUGIN)
    parser.add_argument("--minutes", type=positive_float, default=15.0)
    parser.add_argument("--concurrency", type=positive_int, default=256, help="most requests at once")
    parser.add_argument("--hold", type=positive_float, default=15.0, metavar="SECONDS", help="time at one level")
    parser.add_argument("--longest-input", type=positive_int, default=1024)
    parser.add_argument("--longest-output", type=positive_int, default=256)
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
    gpu_memory = GpuMemory(server)

    def write(elapsed: float, complete: bool, problems: Sequence[str] = ()) -> list[str]:
        errors = evidence.error_lines(server.log_text(served_from))
        seen = evidence.read_log(server.log_text())
        grown = gpu_growth(samples, schedule.round_s)
        found = faults(tally, errors, grown, args.memory_tolerance, args.concurrency, problems)
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
            "gpu_memory_of": gpu_memory.of,
            "gpu_memory_mib": _range([mib for s in samples if s.gpu_mib is not None for mib in s.gpu_mib.values()]),
            "gpu_memory_growth_mib": max(grown.values()) if grown else None,  # of the GPU where it grew most
            "gpu_memory_growth_by_gpu_mib": grown,
            "host_memory_mib": _range([s.host_mib for s in samples]),
            "host_memory_growth_mib": growth([s.host_mib for s in samples if s.at_s >= schedule.round_s]),
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
            asyncio.run(_load(server, requests, schedule, args.minutes * 60.0, tally, gpu_memory, samples, write))
            elapsed = time.monotonic() - begin
            engine = report.version("sglang")
            problems = evidence.check_log(arm, evidence.read_log(server.log_text()), options.tp, engine)
            found = write(elapsed, True, [f"{arm.name} was not what it says: {problem}" for problem in problems])
    except (ServerError, *client.FAILURES) as error:
        text = str(error) or repr(error)
        write(
            time.monotonic() - begin, False, [f"the run failed: {text.splitlines()[0]}"]
        )  # the log's end is in the log
        say(f"FAILED: {text}")
        return FAILED
    say(
        f"{elapsed / 60.0:.1f} minutes, {tally.sent} requests: {tally.finished} finished, {tally.aborted} aborted, "
        f"{tally.hung_up} hung up, {tally.failed} failed"
    )
    for fault in found:
        say(f"UNSOUND: {fault}")
    if problems:
        return NOT_PROVED
    return UNSOUND if found else 0


def _range(values: Sequence[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None


if __name__ == "__main__":
    sys.exit(main())
