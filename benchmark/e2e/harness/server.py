"""Start a server, wait until it serves, and stop all of it whatever happens."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import itertools
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil

from harness.arms import Arm

LAUNCH = (sys.executable, "-m", "sglang.launch_server")
# The compiled grouped GEMM of the engine is right where the padded rows are a multiple of this.
RIGHT_ROWS = 512
# DeepEP's own default for the tokens that a rank may dispatch at once; caps are multiples of it.
DISPATCH_STEP = 128
# The engine's dispatcher refuses a larger cap.
LARGEST_DISPATCH = 1024
MODEL_ROUTING, UNIFORM_ROUTING, ROUND_ROBIN_ROUTING = "model", "uniform", "round-robin"
# The engine's own switches, which replace what the router says.
ROUTING_SWITCHES = {
    UNIFORM_ROUTING: "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    ROUND_ROBIN_ROUTING: "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
}
_HOST = "127.0.0.1"
# The engine looks for a finished drain every five seconds.
_TERM_SECONDS = 10.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class ServerError(RuntimeError):
    """The server did not start, or died; the message ends with the tail of its log."""


@dataclass(frozen=True)
class LaunchOptions:
    """How to serve, the same for every arm.

    Attributes:
        model_path: directory of the checkpoint, or of its ``config.json`` with ``load_format="dummy"``.
        concurrencies: batch sizes that will be decoded; each gets a CUDA graph, but for ``one_graph``.
        routing: ``model``: as the router says; through the engine's own switches, ``uniform``: every token draws its experts,
            and ``round-robin``: every token takes the ones after those of the token before it.
        tp, ep, dp: tensor, expert and (attention) data parallel size. With DeepEP the engine makes ``ep`` what ``tp`` is.
        dispatch_tokens: tokens that a rank may dispatch at once; DeepEP pads to ``dispatch_tokens * ep`` rows. None:
            as many as the largest batch needs, rounded up so that padded rows are a multiple of 512.
        max_total_tokens: cap on the KV cache; needed where two servers share a GPU.
        chunk: tokens of one prefill chunk; None: what all ranks may dispatch together.
        skip_tokenizer: serve token ids only.
        command: what starts a server, for tests and unusual installations.
        extra: more flags, after ours, so that they win.
        one_graph: a single CUDA graph of the largest batch, which smaller ones are padded to.
    """

    model_path: str
    concurrencies: tuple[int, ...]
    load_format: str = "auto"
    routing: str = MODEL_ROUTING
    tp: int = 1
    ep: int = 1
    dp: int = 1
    dispatch_tokens: int | None = None
    mem_fraction: float = 0.7
    max_total_tokens: int | None = None
    context_length: int = 4096
    chunk: int | None = None
    skip_tokenizer: bool = True
    command: tuple[str, ...] = LAUNCH
    extra: tuple[str, ...] = ()
    one_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: is {getattr(self, name)}, must be at least 1")
        if self.tp % self.dp:
            raise ValueError(
                f"dp: is {self.dp}, must divide tp ({self.tp}): attention data parallelism splits its ranks"
            )
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError(f"concurrencies: are {self.concurrencies}, must be at least one, each at least 1")
        if self.ep != self.tp:
            raise ValueError(
                f"ep: is {self.ep}, must be tp ({self.tp}): with DeepEP the engine spreads the experts over all ranks"
            )
        # What does not fit fails inside DeepEP, on some ranks, while the others wait for them.
        load = f"{max(self.concurrencies)} requests at once over {self.tp} ranks"
        if self.rank_tokens < self.decoded_tokens:
            raise ValueError(
                f"dispatch_tokens: is {self.dispatch_tokens}, must be at least {self.decoded_tokens}: {load}"
            )
        if self.rank_tokens > LARGEST_DISPATCH:
            raise ValueError(f"dispatch_tokens: is {self.rank_tokens}, must be at most {LARGEST_DISPATCH}: {load}")

    @property
    def attention_ranks(self) -> int:
        """Ranks that share one request's attention, and so its tokens: every one dispatches a part of a batch."""
        return self.tp // self.dp

    def graph_size(self, concurrency: int) -> int:
        """The batch of one data-parallel group that so many requests decode in.

        The engine pads a batch to a multiple of the ranks that share its attention, and captures no other size.
        """
        group = -(-concurrency // self.dp)
        return -(-group // self.attention_ranks) * self.attention_ranks

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batches that decode CUDA graphs are captured for, ``extra`` included; empty without graphs."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--cuda-graph-bs-decode", "--cuda-graph-bs", dest="sizes", type=int, nargs="+")
        parser.add_argument("--disable-cuda-graph", action="store_true")
        parser.add_argument("--cuda-graph-backend-decode")
        given, _ = parser.parse_known_args(self.extra)
        if given.disable_cuda_graph or given.cuda_graph_backend_decode == "disabled":
            return ()
        return tuple(sorted(set(given.sizes or self._own_graph_sizes)))

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of the ranks, counted among those that the server may use; ``extra`` included."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--base-gpu-id", type=int, default=0)
        parser.add_argument("--gpu-id-step", type=int, default=1)
        given, _ = parser.parse_known_args(self.extra)
        return tuple(given.base_gpu_id + given.gpu_id_step * rank for rank in range(self.tp))

    @property
    def _own_graph_sizes(self) -> list[int]:
        wanted = [max(self.concurrencies)] if self.one_graph else self.concurrencies
        return sorted({self.graph_size(count) for count in wanted})

    @property
    def decoded_tokens(self) -> int:
        """Tokens that a rank dispatches at the largest batch.

        A layer of experts takes a batch scattered over the ranks that share its attention, without attention data
        parallelism too: one token a request, divided by all ranks in either case.
        """
        return self.graph_size(max(self.concurrencies)) // self.attention_ranks

    @property
    def rank_tokens(self) -> int:
        """Tokens that a rank may dispatch at once (``SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK``)."""
        if self.dispatch_tokens is not None:
            return self.dispatch_tokens
        step = math.lcm(DISPATCH_STEP, RIGHT_ROWS // math.gcd(RIGHT_ROWS, self.ep))
        return -(-self.decoded_tokens // step) * step

    @property
    def padded_rows(self) -> int:
        """Rows per local expert of DeepEP's low-latency buffers."""
        return self.rank_tokens * self.ep

    def with_chunk(self, chunk: int) -> LaunchOptions:
        """The same with another prefill chunk."""
        return replace(self, chunk=chunk)

    def flags(self, port: int) -> list[str]:
        """The server's command line after ``command``."""
        # A prefill chunk is dispatched at once, spread over the ranks; the engine divides it by --dp-size itself.
        chunk = self.chunk or self.padded_rows
        # Divided by the groups, which must each hold their part of the largest batch.
        running = -(-max(self.concurrencies) // self.dp) * self.dp
        flags = ["--model-path", self.model_path, "--host", _HOST, "--port", port]
        flags += ["--load-format", self.load_format, "--quantization", "w4afp8"]
        flags += ["--skip-tokenizer-init"] if self.skip_tokenizer else []
        flags += ["--tp-size", self.tp, "--ep-size", self.ep]
        flags += ["--dp-size", self.dp, "--enable-dp-attention"] if self.dp > 1 else []
        flags += ["--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency"]
        flags += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-radix-cache"]
        flags += ["--cuda-graph-bs-decode", *self._own_graph_sizes, "--max-running-requests", running]
        flags += ["--mem-fraction-static", self.mem_fraction, "--context-length", self.context_length]
        flags += ["--chunked-prefill-size", chunk, "--max-prefill-tokens", chunk, "--cuda-graph-bs-prefill", chunk]
        flags += ["--max-total-tokens", self.max_total_tokens] if self.max_total_tokens else []
        return [*map(str, flags), *self.extra]

    def environ(self, arm: Arm) -> dict[str, str]:
        """The environment of an arm's server."""
        environ = {**arm.environ(), "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(self.rank_tokens)}
        for switch in ROUTING_SWITCHES.values():
            environ.pop(switch, None)
        return {**environ, ROUTING_SWITCHES[self.routing]: "1"} if self.routing in ROUTING_SWITCHES else environ

    def shown(self, arm: Arm) -> str:
        """The command as a user would type it, without folders of this machine."""
        shown = ("SGLANG_W4AFP8_", "SGLANG_DEEPEP_NUM_MAX", "SGLANG_JIT_DEEPGEMM", *ROUTING_SWITCHES.values())
        ours = {key: value for key, value in self.environ(arm).items() if key.startswith(shown)}
        words = [
            Path(word).name if word.startswith("/") else word
            for word in (*self.command, *self.flags(30000), *arm.flags)
        ]
        return " ".join([*(f"{key}={value}" for key, value in sorted(ours.items())), shlex.join(words)])


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]


_live: list[Server] = []


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """What asks this process to stop waits until the end of the block, where the first of it is raised again."""
    if threading.current_thread() is not threading.main_thread():  # handlers run, and can be set, in the main one only
        yield
        return
    held: list[int] = []
    # Handlers and no mask: a mask is the thread's own, and another one would take the signal. Nor are they ignored, which a
    # server that starts now would inherit, and a first request to stop would be lost.
    before = {signum: signal.signal(signum, lambda number, frame: held.append(number)) for signum in _STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        if held:
            signal.raise_signal(held[0])


def stop_all() -> None:
    """Stop every server that this process started."""
    with _signals_held():
        for server in list(_live):
            server.stop()


def _on_signal(signum: int, frame: FrameType | None) -> None:
    # SystemExit unwinds through every `finally` and ends in atexit, as Ctrl-C does.
    raise SystemExit(128 + signum)


def install_cleanup() -> None:
    """Stop all servers at exit, also on SIGINT, SIGTERM and SIGHUP, but on no SIGHUP that is ignored (``nohup``)."""
    atexit.register(stop_all)
    for signum in _STOP_SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _on_signal)


def _keep(log: Path) -> None:
    """Move the log of an earlier start aside, to the first number that is free: ``name.1.log``, ``name.2.log``."""
    if log.exists():
        names = (log.with_name(f"{log.stem}.{number}{log.suffix}") for number in itertools.count(1))
        log.rename(next(name for name in names if not name.exists()))


_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    # A driver that is killed outright (a time limit) runs no handler: the kernel then ends the launcher, and the
    # engine's own processes end with their launcher.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Server:
    """One running server process tree, its log kept in ``log_path``. A context manager.

    ``port`` 0 is one that nobody listens on when the server starts.
    """

    arm: Arm
    options: LaunchOptions
    log_path: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def start(self) -> Server:
        """Start the process tree; it does not serve yet.

        Raises:
            ServerError: another process listens on ``port``.
        """
        self.port = self.port or free_port()
        if not _is_free(self.port):
            raise ServerError(f"{self.arm.name}: port {self.port} is taken by {_shown(_listeners(self.port))}")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        _keep(self.log_path)
        with _signals_held(), self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.options.command, *self.options.flags(self.port), *self.arm.flags],
                env=self.options.environ(self.arm),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # one process group: all of it can be stopped at once
                preexec_fn=_die_with_parent,
            )
            _live.append(self)
        return self

    def wait_ready(self, timeout_s: float, tick: Callable[[float], None] = lambda seconds: None) -> float:
        """Wait until the server says that it is healthy; returns the seconds it took.

        Raises:
            ServerError: it exited, took longer than ``timeout_s``, or another process serves on its port.
        """
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < timeout_s:
            self.check_alive()
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=30) as reply,
            ):
                if reply.status == 200:
                    self._check_ours()
                    return time.monotonic() - begin
            tick(elapsed)
            time.sleep(0.2)
        raise ServerError(f"{self.arm.name}: not ready after {timeout_s:.0f} s\n{self.log_tail()}")

    def _check_ours(self) -> None:
        """Raise ``ServerError`` if the one that serves is seen, and is not of this server.

        Who listens may not be seen at all: nothing is said then, as the port was free when the server started. Another command
        than the engine's own may have it run elsewhere (in a container, under a daemon), but not since before it started.
        """
        assert self.process is not None
        ours = self.tree()
        listeners = _listeners(self.port)
        if not listeners or any(process in ours for process in listeners):
            return
        begin = ours[0].create_time() if ours and self.options.command != LAUNCH else math.inf
        if strangers := [process for process in listeners if process.create_time() < begin]:
            raise ServerError(
                f"{self.arm.name}: port {self.port} is served by {_shown(strangers)}, which this server did not start\n"
                f"{self.log_tail()}"
            )

    def check_alive(self) -> None:
        """Raise ``ServerError`` if the launcher has exited."""
        status = self.process.poll() if self.process else None
        if status is not None:
            raise ServerError(f"{self.arm.name}: the server exited with status {status}\n{self.log_tail()}")

    def log_text(self, start: int = 0) -> str:
        """The log from a byte offset on."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def log_tail(self, lines: int = 30) -> str:
        tail = self.log_text().splitlines()[-lines:]
        return "\n".join([f"--- last lines of {self.log_path}", *tail])

    def tree(self) -> list[psutil.Process]:
        """The launcher, everything below it, and the process group, which outlives a launcher that was killed."""
        if self.process is None:
            return []
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            found = [launcher, *launcher.children(recursive=True)]
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.getpgid(pid) == self.process.pid and (process := psutil.Process(pid)) not in found:
                    found.append(process)
        return found

    def stop(self) -> None:
        """Ask the whole process group to end, then kill what is left. Safe to call twice; signals wait for its end."""
        if self.process is None:
            return
        with _signals_held():
            self._end()
            # Last: whoever is interrupted before this point finds the server here again.
            _live.remove(self)
            self.process = None

    def _end(self) -> None:
        assert self.process is not None
        seen: set[psutil.Process] = set()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            seen.update(self.tree())
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signum)  # at once, also what is being forked
            for process in seen:
                with contextlib.suppress(psutil.Error):  # whoever left the group too
                    process.send_signal(signum)
            deadline = time.monotonic() + _TERM_SECONDS
            while time.monotonic() < deadline:
                self.process.poll()  # a child that nobody waits for stays
                if not any(_running(process) for process in seen.union(self.tree())):
                    return
                time.sleep(0.05)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do it: connections of a former one that are still closing take no port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _listeners(port: int) -> list[psutil.Process]:
    """Who listens on a TCP port, as far as this process may see it."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error, OSError, RuntimeError, ValueError):  # where /proc is another kind
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(connection.pid))
    return found


def _shown(processes: Sequence[psutil.Process]) -> str:
    return " and ".join(f"process {process.pid}" for process in processes) or "another process"


def _running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def parse_command(text: str) -> tuple[str, ...]:
    """A command line as its words."""
    return tuple(shlex.split(text))


def split_flags(texts: Sequence[str]) -> tuple[str, ...]:
    """Extra server flags, each text split as a shell would."""
    return tuple(word for text in texts for word in shlex.split(text))
