"""What the command-line tools share: exit codes, server arguments, what is said of a model, the time box."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness import engine_source, report
from harness.arms import plugin_digest
from harness.report import say
from harness.server import (
    LAUNCH,
    MODEL_ROUTING,
    ROUTING_SWITCHES,
    UNIFORM_ROUTING,
    LaunchOptions,
    Server,
    ServerError,
    parse_command,
    split_flags,
)

FAILED, USAGE, INCOMPLETE, NOT_PROVED = 1, 2, 3, 4


class NotProvedError(RuntimeError):
    """An arm was not what it says."""


@dataclass(frozen=True)
class Model:
    """What the results say of the model, from its ``config.json``."""

    name: str
    layers: int
    moe_layers: int
    experts: int
    vocab_size: int

    @classmethod
    def read(cls, path: Path, name: str | None) -> Model:
        """Raises ``ValueError`` if the directory has no config of a mixture-of-experts model."""
        try:
            config = json.loads((path / "config.json").read_text())
            layers, experts = config["num_hidden_layers"], config["n_routed_experts"]
            dense = min(layers, config.get("first_k_dense_replace", 0))
            return cls(name or Path(os.path.abspath(path)).name, layers, layers - dense, experts, config["vocab_size"])
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(
                f"model-path: {path} has no config.json of a mixture-of-experts model: {error!r}"
            ) from error


# Of a checkpoint's files those that are small, and that another checkpoint in its place would not share.
_SYNTHETIC_SUMMARY = "synthetic_checkpoint.json"
_CHECKPOINT_FILES = ("config.json", "model.safetensors.index.json", _SYNTHETIC_SUMMARY)
_Number = TypeVar("_Number", int, float)
_VERSIONS = ("sglang", "sglang-kernel", "torch", "triton")


def fingerprint(model: Model, path: Path) -> dict[str, Any]:
    """Which checkpoint it is, whatever stands at its path later: what is said of it, and what its files show.

    Small files are known by their digests. Weights are by size and time of change, but for a synthetic checkpoint's: the seed
    in its summary says what they are, wherever and whenever it is made.
    """
    files = [path / name for name in _CHECKPOINT_FILES]
    found: dict[str, Any] = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()
    }
    if _SYNTHETIC_SUMMARY not in found:
        stats = {file.name: file.stat() for file in sorted(path.glob("*.safetensors")) if file.is_file()}
        found.update({name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()})
    return {**dataclasses.asdict(model), "files": found}


def conditions(environ: Mapping[str, str]) -> dict[str, Any]:
    """What else decides how fast and with what result a process in this environment computes."""
    # The plugin's own are the arm's. Values are digests, as they are written to a file that is archived, and may be secrets.
    switches = {
        name: hashlib.sha256(value.encode()).hexdigest()[:12]
        for name, value in environ.items()
        if name.startswith("SGLANG_") and not name.startswith("SGLANG_W4AFP8_")
    }
    return {
        "versions": {name: report.version(name) for name in _VERSIONS},
        "environ": switches,
        "plugin": plugin_digest(),
        "gpus": report.nvidia_smi("uuid", "driver_version"),  # pairs from two machines would not be pairs
    }


class Journal:
    """Finished parts of a run, a JSON file each, so that a run can go on where the last one stopped.

    Parts of runs that differ in anything that ``fingerprint`` names are kept apart.
    """

    def __init__(self, work: Path, kind: str, fingerprint: Mapping[str, Any]) -> None:
        text = json.dumps(fingerprint, sort_keys=True, default=str)
        self.directory = work / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.directory.mkdir(parents=True, exist_ok=True)
        report.write_json(self.directory / "fingerprint.json", {"fingerprint": json.loads(text)})

    def load(self, name: str) -> dict[str, Any] | None:
        """A finished part, or None."""
        path = self.directory / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def save(self, name: str, part: Mapping[str, Any]) -> None:
        """Keep a finished part."""
        report.write_json(self.directory / f"{name}.json", part)


class Clock:
    """The time box: whether another step of a kind still fits."""

    def __init__(self, limit_s: float | None) -> None:
        self._begin, self._limit = time.monotonic(), limit_s
        self._spent: dict[str, list[float]] = {}

    @property
    def left_s(self) -> float:
        return float("inf") if self._limit is None else self._limit - (time.monotonic() - self._begin)

    def spent(self, kind: str, seconds: float) -> None:
        self._spent.setdefault(kind, []).append(seconds)

    def fits(self, kind: str) -> bool:
        """Whether the longest step of this kind so far would end in time. The first one is always tried.

        It may have taken minutes more than any later one, compiling what they find ready, so it counts only while it is alone.
        """
        spent = self._spent.get(kind, [0.0])
        return self.left_s > 0 and max(spent[1:] or spent) <= self.left_s


def wait_ready(server: Server, ready_s: float, clock: Clock) -> float | None:
    """Seconds that the server took to serve; None where the time ran out while it still started.

    Raises:
        ServerError: it exited, or took longer than ``ready_s``.
    """
    name, left_s = server.arm.name, max(1.0, clock.left_s)
    try:
        took = server.wait_ready(min(ready_s, left_s), report.ticker(f"{name}: starting"))
    except ServerError:
        with contextlib.suppress(ServerError):
            server.check_alive()
            if left_s < ready_s:
                say(f"{name}: not ready in the {left_s:.0f} s that were left of --time-limit")
                return None
        raise
    say(f"{name}: ready after {took:.0f} s")
    return took


def _positive(text: str, kind: type[_Number], what: str) -> _Number:
    try:
        number = kind(text)
    except ValueError:
        number = kind(0)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a positive {what}")
    return number


def positive_int(text: str) -> int:
    """A type for argparse, which puts the option's name before the message."""
    return _positive(text, int, "integer")


def positive_float(text: str) -> float:
    """As `positive_int`, of seconds and the like."""
    return _positive(text, float, "number")


def file_name(text: str) -> str:
    """A model's or an arm's name as part of a file name: ``org/model`` is no folder."""
    return text.replace("/", "--").replace(",", "+")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments on how to serve, shared by all tools."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--model-path", type=Path, required=True, help="a checkpoint, or a directory with its config.json"
    )
    group.add_argument("--model-name", help="its name in the results; default: the directory's")
    group.add_argument("--load-format", default="auto", help="auto, or dummy for random weights without files")
    group.add_argument(
        "--routing",
        choices=(MODEL_ROUTING, *ROUTING_SWITCHES),
        help="default: uniform for dummy weights, whose router sends every token to the same few experts",
    )
    group.add_argument("--tp", type=positive_int, default=1)
    group.add_argument("--ep", type=positive_int, default=1)
    group.add_argument("--dp", type=positive_int, default=1, help="attention data parallel size")
    group.add_argument(
        "--dispatch-tokens", type=positive_int, help="DeepEP tokens per rank; rows are padded to this times --ep"
    )
    group.add_argument("--mem-fraction", type=float, default=0.7)
    group.add_argument("--max-total-tokens", type=positive_int, help="cap on the KV cache")
    group.add_argument("--context-length", type=positive_int, default=4096)
    group.add_argument("--with-tokenizer", action="store_true", help="do not pass --skip-tokenizer-init")
    group.add_argument(
        "--launch-command", type=parse_command, default=LAUNCH, help="default: python -m sglang.launch_server"
    )
    group.add_argument("--server-args", action="append", default=[], metavar="TEXT", help="more flags, after ours")
    group.add_argument("--ready-timeout", type=float, default=600.0, metavar="SECONDS")


def check_gpus(name: str, ranks: int) -> None:
    """Whether this machine has a GPU a rank; where none can be seen, nothing is said.

    Raises:
        ValueError: fewer GPUs; the message begins with the option's name.
    """
    gpus = len(report.nvidia_smi("uuid"))
    if 0 < gpus < ranks:
        raise ValueError(f"{name}: is {ranks}, must be at most {gpus}, the GPUs that a server may use here")


def check_fits(options: LaunchOptions, model: Model) -> None:
    """Whether this model on this machine can be spread as the options say.

    Raises:
        ValueError: experts that cannot be shared out evenly, or fewer GPUs than ranks.
    """
    if model.experts % options.ep:
        raise ValueError(f"ep: is {options.ep}, must divide the model's experts ({model.experts})")
    check_gpus("tp", options.tp)


def _engine() -> Path | None:
    """The installed engine's package directory, where there is one."""
    engine = importlib.util.find_spec("sglang")
    return None if engine is None or engine.origin is None else Path(engine.origin).parent


def check_routing(routing: str) -> None:
    """Whether the installed engine has the switch of this routing: it ignores variables that it does not know.

    Raises:
        ValueError: it has not; the message begins with the option's name.
    """
    switch, engine = ROUTING_SWITCHES.get(routing), _engine()
    if switch is None or engine is None:
        return
    variables = engine / "srt" / "environ.py"
    if variables.is_file() and not re.search(rf"^\s*{switch}\b", variables.read_text(), re.MULTILINE):
        raise ValueError(
            f"routing: is {routing!r}, must be {MODEL_ROUTING!r}: sglang {report.version('sglang')} has no {switch}"
        )


def graphs_fault(options: LaunchOptions) -> str:
    """Why the installed engine must not decode in graphs of all these sizes; empty where it may. See `engine_source`."""
    engine, sizes = _engine(), options.graph_sizes
    if options.ep > 1 or len(sizes) < 2 or engine is None:
        return ""
    version = f"sglang {report.version('sglang')}"
    try:
        faulty = engine_source.drops_tokens_with_one_rank(engine)
    except LookupError as error:
        return f"whether {version} routes every token with one expert-parallel rank cannot be read ({error})"
    if not faulty:
        return ""
    return (
        f"with one expert-parallel rank {version} routes only the first {sizes[0]} tokens of every batch to an expert, as many "
        "as its smallest graph has"
    )


def check_graphs(options: LaunchOptions) -> None:
    """Whether the installed engine computes what it should in the decode graphs that it would capture.

    Raises:
        ValueError: it does not, or nobody knows; the message begins with the option's name.
    """
    fault, sizes = graphs_fault(options), options.graph_sizes
    if fault:
        raise ValueError(
            f"concurrency: is {', '.join(map(str, sizes))}, must be one number: {fault}. Measure one at a time, or all in one "
            f'graph: --server-args="--cuda-graph-bs-decode {sizes[-1]}"'
        )


def launch_options(
    args: argparse.Namespace, concurrencies: Sequence[int], *, may_pad: bool = False, **change: Any
) -> LaunchOptions:
    """The options that the arguments say.

    Args:
        args: of `add_server_arguments`.
        concurrencies: batch sizes that will be decoded.
        may_pad: all of them may be padded to the largest, as no speed is measured. That is done, and said, where the engine's
            graphs of several sizes are faulty.
        **change: fields that are to be otherwise.

    Raises:
        ValueError: they cannot be served; the message begins with the option's name.
    """
    routing = args.routing or (UNIFORM_ROUTING if args.load_format == "dummy" else MODEL_ROUTING)
    options = LaunchOptions(
        model_path=str(args.model_path),
        concurrencies=tuple(sorted(concurrencies)),
        load_format=args.load_format,
        routing=routing,
        tp=args.tp,
        ep=args.ep,
        dp=args.dp,
        dispatch_tokens=args.dispatch_tokens,
        mem_fraction=args.mem_fraction,
        max_total_tokens=args.max_total_tokens,
        context_length=args.context_length,
        skip_tokenizer=not args.with_tokenizer,
        command=args.launch_command,
        extra=split_flags(args.server_args),
    )
    options = dataclasses.replace(options, **change)
    if options.command == LAUNCH:  # another command may start another engine
        check_routing(routing)
        if may_pad and (fault := graphs_fault(options)):
            options = dataclasses.replace(options, one_graph=True)
            say(f"one CUDA graph of {max(options.graph_sizes)} for every batch: {fault}")
        check_graphs(options)
    return options
