"""Imitates ``python -m sglang.launch_server`` on a CPU: endpoints, log lines, the plugin's lines, processes.

What it decodes is a function of the prompt alone, so that arms can be compared; ``FAKE_*`` variables make it misbehave:

- ``FAKE_JOURNAL``: file that gets one JSON line per start (arm, pids, flags).
- ``FAKE_LIE``: ``silent`` (the plugin says nothing), ``live`` (patches are live although disabled), ``kernels`` (the
  profile shows the engine's kernels whatever is live), ``fewer`` (one patch less than asked for). Of several ranks: ``rank``
  (the last one's profile shows the engine's kernels), ``one rank`` (the others say nothing).
- ``FAKE_ENGINE``: the engine's version in the plugin's line; else the installed one's.
- ``FAKE_CRASH``: ``start`` or the number of the generate call in which it exits.
- ``FAKE_UNREADY``: so many times it says that it does not serve yet; else twice.
- ``FAKE_STUBBORN``: it and its child ignore SIGTERM.
- ``FAKE_WRONG_TOKENS``: the arms whose tokens are wrong, or ``rows``: the engine's where rows are no multiple of 512, or
  ``graph``: those after a prompt that was prefilled in a CUDA graph, of ``FAKE_GRAPH_TOKENS`` tokens or more.
- ``FAKE_FAIL_EVERY``: every so many-th request ends with an abort.
- ``FAKE_LOG_ERROR``: a line to print at the tenth request.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "python"))

from sglang_w4afp8 import lifecycle, plugin, switches

STEP_S = {"engine": 0.0012, "plugin": 0.001}
REQUANT = "_fp8_per_token_quant_to_per_tensor_quant_kernel"


def live_patches() -> tuple[str, ...]:
    """What the plugin would have made live in this environment."""
    lie = os.environ.get("FAKE_LIE", "")
    every = tuple(patch.name for patch in plugin.LEDGER)
    if os.environ.get("SGLANG_W4AFP8_DISABLE") == "1":
        return every if lie == "live" else ()
    picked = os.environ.get("SGLANG_W4AFP8_PATCHES")
    names = tuple(name for name in every if picked is None or name in picked.split(","))
    return names[:-1] if lie == "fewer" else names


LIVE = live_patches()
RANKS = int(sys.argv[sys.argv.index("--tp-size") + 1]) if "--tp-size" in sys.argv else 1
# Whoever may choose chooses Triton here.
BACKEND = switches.read().backend.replace("auto", "triton") if "two_kernels" in LIVE else "cutlass"
ARM = "plugin" if LIVE else "engine"
GRAPH_TOKENS = int(os.environ.get("FAKE_GRAPH_TOKENS", "128"))


def log(text: str) -> None:
    print(f"[2026-01-01 00:00:00 TP0] {text}", flush=True)


def log_plugin_start() -> None:
    if os.environ.get("FAKE_LIE") == "silent":
        return
    if not LIVE:
        print("sglang-w4afp8 0.0.0: disabled by SGLANG_W4AFP8_DISABLE, the engine is untouched", flush=True)
        return
    states = lifecycle.State
    statuses = tuple(
        lifecycle.PatchStatus(p.name, states.ACTIVE if p.name in LIVE else states.NOT_SELECTED) for p in plugin.LEDGER
    )
    version = os.environ.get("FAKE_ENGINE") or metadata.version("sglang")
    report = lifecycle.ActivationReport("0.0.0", engine_version=version, verified=True, patches=statuses)
    for _ in range(1 + RANKS):  # launcher and schedulers
        log(report.line())


class FakeServer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.health_calls = self.generate_calls = self.requests = 0
        self.running = 0
        self.aborted: set[str] = set()
        self.first_call_logged = False
        self.profile: tuple[Path, int] | None = None
        self.rows = int(os.environ.get("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "128")) * args.ep_size

    async def health(self, request: web.Request) -> web.Response:
        self.health_calls += 1
        unready = int(os.environ.get("FAKE_UNREADY", "2"))
        return web.Response(status=503 if self.health_calls <= unready else 200)

    def first_call(self) -> None:
        if LIVE and not self.first_call_logged and os.environ.get("FAKE_LIE") != "silent":
            call = f"experts=8, expected_m=1, backend={BACKEND}, patches={','.join(LIVE)}"
            for _ in range(1 if os.environ.get("FAKE_LIE") == "one rank" else RANKS):
                log(f"sglang-w4afp8: first low-latency call: {call}")
        self.first_call_logged = True

    def prefills_in_graph(self, tokens: int) -> bool:
        """Like the engine: a prompt that fills enough of a captured size."""
        return tokens >= GRAPH_TOKENS and not self.args.disable_cuda_graph

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        wrong = os.environ.get("FAKE_WRONG_TOKENS", "")
        kinds = {
            ARM: True,
            BACKEND if LIVE else "": True,
            "rows": ARM == "engine" and self.rows % 512,
            "graph": self.prefills_in_graph(len(prompt)),
        }
        salt = b"wrong" if wrong and kinds.get(wrong) else b""
        state, out = salt + json.dumps(prompt).encode(), []
        for _ in range(count):
            state = hashlib.sha256(state).digest()
            out.append(int.from_bytes(state[:2], "big"))
        return out

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.generate_calls += 1
        if os.environ.get("FAKE_CRASH") == str(self.generate_calls):
            print("Traceback (most recent call last):\n  RuntimeError: CUDA error: an illegal access", flush=True)
            os._exit(7)
        self.first_call()
        body = await request.json()
        single = not isinstance(body["input_ids"][0], list)
        prompts = [body["input_ids"]] if single else body["input_ids"]
        params = body["sampling_params"]
        count, interval = params["max_new_tokens"], params.get("stream_interval") or 1
        rids = body.get("rid") or [f"r{self.requests + i}" for i in range(len(prompts))]
        rids = [rids] if isinstance(rids, str) else rids
        first = self.requests
        self.requests += len(prompts)
        if first < 10 <= self.requests and os.environ.get("FAKE_LOG_ERROR"):
            log(os.environ["FAKE_LOG_ERROR"])
        outputs = [self.tokens(prompt, count) for prompt in prompts]
        every = int(os.environ.get("FAKE_FAIL_EVERY", "0"))
        failing = {i for i in range(len(prompts)) if every and (first + i + 1) % every == 0}

        def event(index: int, done: int, reason: dict[str, Any] | None) -> dict[str, Any]:
            meta: dict[str, Any] = {"id": rids[index], "finish_reason": reason, "completion_tokens": done}
            if body.get("return_logprob"):
                meta["output_top_logprobs"] = [[[-0.5, t, None], [-1.5, t + 1, None]] for t in outputs[index][:done]]
            return {"index": index, "output_ids": outputs[index][:done], "meta_info": meta}

        async def steps() -> Any:
            tokens = sum(map(len, prompts))
            graph = self.prefills_in_graph(tokens)
            log(f"Prefill batch, #new-seq: {len(prompts)}, #new-token: {tokens}, #cached-token: 0, cuda graph: {graph}")
            self.running += len(prompts)
            alive = set(range(len(prompts)))
            try:
                for done in range(1, count + 1):
                    await asyncio.sleep(STEP_S[ARM])
                    self.step(len(prompts))
                    for index in sorted(alive):
                        reason = None
                        # Like the engine, by prefix.
                        aborted = any(rids[index].startswith(rid) for rid in self.aborted)
                        if aborted or (index in failing and done == 2):
                            reason = {"type": "abort", "message": "Abort in test"}
                        elif done == count:
                            reason = {"type": "length", "length": count}
                        if reason or done % interval == 1 % interval:
                            yield event(index, done, reason)
                        if reason:
                            alive.discard(index)
                    if not alive:
                        return
            finally:
                self.running -= len(prompts)

        if not body.get("stream"):
            last: dict[int, dict[str, Any]] = {}
            async for item in steps():
                last[item["index"]] = item
            return web.json_response(last[0] if single else [last[i] for i in range(len(prompts))])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            async for item in steps():
                await response.write(b"data: " + json.dumps(item).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionResetError, asyncio.CancelledError):
            log("[http_server] Client disconnected: Request is disconnected from the client side (type 1).")
        return response

    def step(self, batch: int) -> None:
        if getattr(self, "decoded", 0) % 8 == 7:
            rate = self.running / STEP_S[ARM]
            log(
                f"Decode batch, #running-req: {self.running}, #token: 1, token usage: 0.00, cuda graph: True, "
                f"gen throughput (token/s): {rate:.2f}, #queue-req: 0"
            )
        self.decoded = getattr(self, "decoded", 0) + 1
        if self.profile is not None:
            directory, left = self.profile
            self.profile = (directory, left - 1) if left > 1 else None
            if left == 1:
                for rank in range(RANKS):
                    self.write_trace(directory, rank)

    def write_trace(self, directory: Path, rank: int) -> None:
        lie = os.environ.get("FAKE_LIE")
        shown = () if lie == "kernels" or (lie == "rank" and rank == RANKS - 1) else LIVE
        silu = "_silu_and_mul_masked_quant_kernel" if "silu" in shown else "_silu_and_mul_post_per_tensor_quant_kernel"
        names = [REQUANT, silu, "void deep_ep::internode_ll::dispatch<>", "void cutlass::CollectiveMmaArrayMixedInput"]
        names += [] if "problem_sizes" in shown else ["compute_problem_sizes_w4a8_kernel"]
        names = ["_gate_up_kernel", "_down_kernel", names[2]] if shown and BACKEND == "triton" else names
        events: list[dict[str, Any]] = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}]
        for i, name in enumerate(names):
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": 100 + 10 * i, "dur": 5})
        path = directory / f"{os.getpid()}-TP-{rank}.trace.json.gz"
        with gzip.open(path, "wt") as trace:
            json.dump({"traceEvents": events}, trace)

    async def start_profile(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.profile = (Path(body["output_dir"]), body["num_steps"])
        return web.Response(text="Start profiling.\n")

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.Response()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--ep-size", type=int, default=1)
    parser.add_argument("--disable-cuda-graph", action="store_true")
    args, _ = parser.parse_known_args()
    if os.environ.get("FAKE_CRASH") == "start":
        print("RuntimeError: no such model", flush=True)
        sys.exit(3)
    sleeper = "import signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);time.sleep(120)"
    if os.environ.get("FAKE_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        sleeper = "import time;time.sleep(120)"
    child = subprocess.Popen([sys.executable, "-c", sleeper])
    if journal := os.environ.get("FAKE_JOURNAL"):
        line = {"arm": ARM, "live": LIVE, "pids": [os.getpid(), child.pid], "flags": sys.argv[1:]}
        line["env"] = {key: value for key, value in os.environ.items() if key.startswith("SGLANG_")}
        with open(journal, "a") as file:
            file.write(json.dumps(line) + "\n")
    log_plugin_start()
    fake = FakeServer(args)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/health", fake.health)
    app.router.add_post("/generate", fake.generate)
    app.router.add_post("/start_profile", fake.start_profile)
    app.router.add_post("/abort_request", fake.abort)
    stubborn = bool(os.environ.get("FAKE_STUBBORN"))
    web.run_app(app, host=args.host, port=args.port, print=None, handle_signals=not stubborn, access_log=None)


if __name__ == "__main__":
    main()
