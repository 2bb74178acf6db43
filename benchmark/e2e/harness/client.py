"""Load on a server through its ``/generate`` endpoint, with token ids in and out.

``sglang.bench_serving`` cannot measure a server that runs with ``--skip-tokenizer-init``: it counts a token when a
reply has ``text``, and such a server sends ``output_ids`` only (read in 0.5.18, 0.5.21 and 0.5.23). It and
``sglang.bench_one_batch_server`` also load a tokenizer first, which a synthetic checkpoint does not have. So
`stream_batch` takes what the latter takes: one streamed batch, and decode throughput in the window in which every
request decodes. Where there is a tokenizer, `bench_serving` runs the engine's tool.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

# Tokens between two chunks of a stream: rare enough that client and server spend their time decoding.
STREAM_INTERVAL = 8
# An idle connection is used again only within this time. The engine closes it after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE), and a
# request that crosses with that is lost without the server having seen it.
KEEP_ALIVE_S = 2.0
_TIMEOUT_S = 600.0


class RequestError(RuntimeError):
    """A request that did not do what was asked of it."""


# All that a request may raise.
FAILURES = (RequestError, aiohttp.ClientError, asyncio.TimeoutError, OSError)


@dataclass
class Progress:
    """One request of a batch: when how many tokens had come, and how it ended."""

    observed: list[tuple[float, int]] = field(default_factory=list)
    finish: str | None = None
    output_ids: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.observed[-1][1] if self.observed else 0

    def tokens_at(self, moment: float) -> float:
        """Tokens at a moment, on a straight line between the chunks around it."""
        before_time, before = self.observed[0]
        for at, count in self.observed[1:]:
            if at >= moment:
                part = (moment - before_time) / (at - before_time) if at > before_time else 1.0
                return before + (count - before) * part
            before_time, before = at, count
        return before


@dataclass(frozen=True)
class DecodeRate:
    """Decode speed of one batch, prefill and the first chunk excluded.

    Attributes:
        tokens_per_s: of all requests together, over the window in which every one decodes.
        tpot_ms: median over the requests of the time per output token in that window.
        window_s: its length.
    """

    tokens_per_s: float
    tpot_ms: float
    window_s: float


def decode_rate(batch: Sequence[Progress]) -> DecodeRate:
    """Rate in the window from the last request's second chunk to the first request's end.

    The second chunk, because the prefill of the last request still stretches the others' chunk before it.

    Raises:
        RequestError: no such window: the outputs are too short for this batch.
    """
    start = max(progress.observed[min(1, len(progress.observed) - 1)][0] for progress in batch)
    end = min(progress.observed[-1][0] for progress in batch)
    counts = [progress.tokens_at(end) - progress.tokens_at(start) for progress in batch] if end > start else [0.0]
    if min(counts) <= 0:
        raise RequestError("no window in which every request decodes: ask for longer outputs")
    window = end - start
    return DecodeRate(sum(counts) / window, statistics.median(window / count for count in counts) * 1e3, window)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids without the special ones at the start of the vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(16, vocab_size) for _ in range(length)] for _ in range(count)]


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Lines may be longer than aiohttp's own line limit."""
    pending = b""
    async for piece in response.content.iter_any():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)


def sampling(output_len: int, **more: Any) -> dict[str, Any]:
    """Greedy sampling of exactly ``output_len`` tokens."""
    return {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True, **more}


def check_finish(reason: dict[str, Any] | None) -> str:
    """The type of a finish reason that greedy decoding to a given length may have: ``length``.

    Raises:
        RequestError: anything else: an abort, or the engine's NaN detector, which reports itself as a stop.
    """
    if reason is None or reason.get("type") != "length":
        raise RequestError(f"request ended with {reason}, must be by length")
    return "length"


async def stream_batch(
    session: aiohttp.ClientSession,
    url: str,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    started: asyncio.Event | None = None,
    **payload: Any,
) -> list[Progress]:
    """Send the prompts as one batch and follow it to the end.

    Args:
        started: set once every request has its second chunk: all of them decode.
        **payload: more fields of the request.

    Raises:
        RequestError: the server refused it, or a request ended early.
    """
    batch = [Progress() for _ in prompts]
    waiting = len(batch)
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": sampling(output_len, stream_interval=STREAM_INTERVAL),
        "stream": True,
        **payload,
    }
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200:
            raise RequestError(f"HTTP {response.status}: {(await response.text())[:500]}")
        async for event in events(response):
            if "error" in event:
                raise RequestError(str(event["error"]))
            now = time.perf_counter()
            progress, meta = batch[event.get("index", 0)], event["meta_info"]
            progress.observed.append((now, meta["completion_tokens"]))
            if len(progress.observed) == 2:
                waiting -= 1
                if not waiting and started is not None:
                    started.set()
            if meta["finish_reason"] is not None:
                progress.finish = check_finish(meta["finish_reason"])
                progress.output_ids, progress.meta = event["output_ids"], meta
    short = [index for index, progress in enumerate(batch) if progress.finish is None or progress.tokens != output_len]
    if short:
        raise RequestError(f"{len(short)} of {len(batch)} requests did not give {output_len} tokens, first: {short[0]}")
    return batch


async def bench_serving(
    command: Sequence[str], url: str, tokenizer: str, concurrency: int, input_len: int, output_len: int, seed: int
) -> DecodeRate:
    """Speed by the engine's ``bench_serving``: two waves of random requests, prefill included.

    Args:
        command: what starts it; ``python -m sglang.bench_serving``.

    Raises:
        RequestError: it failed, or not every request completed.
    """
    requests = 2 * concurrency
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.jsonl"
        words = [*command, "--backend", "sglang", "--base-url", url, "--tokenizer", tokenizer, "--dataset-name"]
        words += ["random-ids", "--random-input-len", input_len, "--random-output-len", output_len]
        words += ["--random-range-ratio", 1.0, "--num-prompts", requests, "--max-concurrency", concurrency]
        words += ["--seed", seed, "--output-file", out, "--disable-tqdm"]
        process = await asyncio.create_subprocess_exec(
            *map(str, words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        printed, _ = await process.communicate()
        if process.returncode or not out.exists():
            tail = printed.decode(errors="replace")[-2000:]
            raise RequestError(f"bench_serving ended with status {process.returncode}: {tail}")
        result = json.loads(out.read_text().splitlines()[-1])
    if result["completed"] != requests or not result["median_tpot_ms"] > 0:
        raise RequestError(
            f"bench_serving completed {result['completed']} of {requests} requests, median time per output token "
            f"{result['median_tpot_ms']} ms"
        )
    return DecodeRate(result["output_throughput"], result["median_tpot_ms"], result["duration"])


def session() -> aiohttp.ClientSession:
    """A session without aiohttp's limit of 100 connections, and without idle ones that the server may just be closing."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=30),
    )


async def post(http: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any] | None = None) -> None:
    """POST and want a 200.

    Raises:
        RequestError: another status.
    """
    async with http.post(f"{url}{path}", json=body or {}) as response:
        if response.status != 200:
            raise RequestError(f"{path}: HTTP {response.status}: {(await response.text())[:500]}")
