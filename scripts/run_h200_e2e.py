#!/usr/bin/env python3
"""Everything end to end on a GPU machine, in stages that fit into short commands.

    python scripts/run_h200_e2e.py check config ab-256 ab-64 --work /tmp/e2e --out OUT --seconds 580
    python scripts/run_h200_e2e.py checkpoint equality soak  --work /tmp/e2e --out OUT --seconds 580
    python scripts/run_h200_e2e.py --ranks 4                 --work /tmp/e2e --out OUT --seconds 580

Stages run in the order given until they are done or the time is over; the same command again goes on (exit status 3
says that it must). What is finished is kept in ``--work``; every call ends by copying the results of its stages and an
archive of all logs to ``--out``. The soak runs in a session of its own, so that it outlives the command that began it.

A stage is done for its own command, engine and plugin: with other arms, ranks, blocks and the like it runs again, in the same
``--work`` too, and its results are kept apart. Only `ab-N` stages of the same ranks and ``--merge-into`` share a file, whatever
their models and engines: e2e_decode.json, which goes on from ``--merge-into``.

Stages: ``check`` (engine, kernels, plugin, GPU), ``config`` and ``checkpoint`` (see make_synthetic_checkpoint.py),
``layer`` (expert_layer.py), ``ab-N`` (decode_ab.py with N routed experts), ``equality``, ``soak``.

``--ranks N`` is a whole run with expert parallelism over N GPUs: its stages, where none are named, and every default below
are those of `PRESETS`. What is given beside it wins. Every number of requests is served with the fewest tokens a rank that
hold it (see `Run.loads`), so that up to 512 requests on four GPUs have DeepEP's default of 128.

Exit status: 0 all stages done; 3 not all, run it again; otherwise that of the stage that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
E2E = ROOT / "benchmark" / "e2e"
sys.path.insert(0, str(E2E))

from harness import report  # noqa: E402
from harness.arms import plugin_digest  # noqa: E402
from harness.cli import graphs_fault  # noqa: E402
from harness.server import MODEL_ROUTING, ROUTING_SWITCHES, LaunchOptions, split_flags  # noqa: E402

from make_synthetic_checkpoint import ModelSpec  # noqa: E402
from model_memory import layers_that_fit  # noqa: E402

INCOMPLETE = 3
FIT = "fit"
# DeepSeek-V3's own depth, three of its layers dense.
_WHOLE_MODEL = ModelSpec(layers=61, dense_layers=3)
# Tokens of a request that decode_ab.py may have in the cache: its input and output, and what a longer profile adds.
_REQUEST_TOKENS = 128 + 256 + 256
# Left at the end of a command for stopping servers and copying results.
_MARGIN_S = 15.0
# A tool that was interrupted needs up to 20 s to end a server that ignores SIGTERM.
_INTERRUPTED_S = 30.0
# Archived of a log, its end, and of a JSON file, which is of no use in parts.
_LOG_BYTES, _JSON_BYTES = 2 << 20, 64 << 20


def _preset(ranks: int, **more: Any) -> dict[str, Any]:
    """Expert parallelism over all GPUs of a host: every default of the command line that differs from one GPU's."""
    return {
        "tp": ranks,
        "ep": ranks,
        "concurrency": [16, 64, 256, 1024],
        "arms": ["engine", "cutlass", "triton"],
        "equality_arms": ["cutlass", "triton", "reference"],
        "layers": FIT,
        "dense_layers": _WHOLE_MODEL.dense_layers,
        "blocks": 3,
        "merge_into": ROOT / "benchmark" / "results" / f"h200x{ranks}" / "e2e_decode.json",
        "stages": ["check", "layer", "config", "ab-256"],
        **more,
    }


PRESETS: dict[int, dict[str, Any]] = {
    # With two ranks DeepEP's default of 128 tokens is 256 padded rows, where the engine's GEMM is wrong: that comes first.
    2: _preset(2, stages=["check", "layer", "checkpoint", "equality", "config", "ab-256"]),
    4: _preset(4),
    8: _preset(8),
}


def say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


class Run:
    """One call of this script."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = time.monotonic() + args.seconds - _MARGIN_S
        args.work.mkdir(parents=True, exist_ok=True)
        # Where `check` puts the plugin's wheel; empty where it is installed already.
        self.site = args.work / "plugin_site"
        python_path = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}
        self._identities: dict[str, str] = {}

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def tool(self, script: Path, *words: object) -> int:
        """Run one of our scripts to its end or to the deadline; its exit status."""
        process = subprocess.Popen([sys.executable, str(script), *map(str, words)], env=self.environ, cwd=ROOT)
        try:
            return process.wait(timeout=max(1.0, self.left_s))
        except subprocess.TimeoutExpired:
            return INCOMPLETE
        except KeyboardInterrupt:
            # A terminal has sent it to the tool as well, which stops its servers now.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_INTERRUPTED_S)
            raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it stops its servers
                process.wait()

    def identity(self, name: str) -> str:
        """A digest of what a stage does: its commands, the engine, the plugin and the results that an A/B goes on from.

        Time limits and folders for what it writes are none of it. The same for the whole call.
        """
        if name not in self._identities:
            unpacked = self.site / "sglang_w4afp8"
            plugin = plugin_digest(unpacked if unpacked.is_dir() else None)
            self._identities[name] = _digest(
                name, _engine_version(), plugin, self.commands(name), self.decode if _is_ab(name) else None
            )
        return self._identities[name]

    @property
    def decode(self) -> str:
        """The folder of results that this call's A/Bs share with those of other models, arms and engines."""
        args = self.args
        return f"decode-{_digest(args.tp, args.ep, args.dp, args.merge_into.absolute())}"

    def results(self, name: str) -> Path:
        """Where a stage's results are kept."""
        folder = self.decode if _is_ab(name) else f"{name}-{self.identity(name)}"
        return self.args.work / "results" / folder

    def model(self, experts: int, *, weights: bool) -> Path:
        kind = "weights" if weights else "config"
        layers, dense = self.layers(weights)
        kind = kind if dense == 1 else f"{dense}d-{kind}"
        return self.args.work / "models" / f"deepseek-v3-{layers}l-{experts}e-{kind}"

    def layers(self, weights: bool) -> tuple[int, int]:
        """Layers and how many of them are dense. With weights (for equality.py) the only expert layer is the last."""
        return (2, 1) if weights else (self.depth, self.args.dense_layers)

    @functools.cached_property
    def depth(self) -> int:
        """Layers of the model without weights: as asked for, or as many as the GPUs hold at the largest batch.

        Raises:
            ValueError: no GPU says how much memory it has, or not one layer fits.
        """
        args = self.args
        if args.layers != FIT:
            return args.layers
        memory = [float(row[0]) for row in report.nvidia_smi("memory.total")]
        if not memory:
            raise ValueError(f"layers: is {FIT!r}, must be a number where no GPU says how much memory it has")
        spec = dataclasses.replace(_WHOLE_MODEL, dense_layers=args.dense_layers)
        tokens = max(args.concurrency) * _REQUEST_TOKENS
        return layers_that_fit(spec, int(min(memory)) << 20, args.mem_fraction, tokens, args.tp, args.dp)

    def loads(self) -> list[tuple[int, list[int]]]:
        """Tokens that a rank may dispatch, and the numbers of requests that are measured with so many.

        Padded rows are part of what is measured, so a small batch does not get a large one's. ``--dispatch-tokens`` serves
        all of them alike, in half the starts where there would be two loads. Where the engine's graphs of several sizes are
        faulty, every number of requests has a load, and so servers, of its own.

        Raises:
            ValueError: they cannot be served; the message begins with the option's name.
        """
        args = self.args
        found: list[tuple[int, list[int]]] = []
        for count in sorted(set(args.concurrency)):
            tokens = self.options(count).rank_tokens
            if found and found[-1][0] == tokens and not self.graphs_fault:
                found[-1][1].append(count)
            else:
                found.append((tokens, [count]))
        return found

    def options(self, *concurrencies: int) -> LaunchOptions:
        """How so many requests are served, as far as it is the same for every model and arm."""
        args = self.args
        sizes = {"tp": args.tp, "ep": args.ep, "dp": args.dp, "dispatch_tokens": args.dispatch_tokens}
        return LaunchOptions("", concurrencies, extra=split_flags(args.server_args), **sizes)

    @functools.cached_property
    def graphs_fault(self) -> str:
        """Why one server must not decode all numbers of requests in CUDA graphs; empty where it may."""
        other_engine = self.args.launch_command is not None
        return "" if other_engine else graphs_fault(self.options(*self.args.concurrency))

    def commands(self, name: str) -> list[list[object]]:
        """The commands of a stage, a script and its words, without what changes from call to call."""
        args, experts = self.args, _routed_experts(name)
        if experts is not None:
            return [self.make_words(experts, weights=False), *self.ab_words(experts)]
        commands: dict[str, Callable[[], list[list[object]]]] = {
            "check": list,
            "config": lambda: [self.make_words(experts, weights=False) for experts in self.config_experts()],
            "layer": lambda: [self.layer_words()],
            "checkpoint": lambda: [self.make_words(args.equality_experts, weights=True)],
            "equality": lambda: [self.make_words(args.equality_experts, weights=True), self.equality_words()],
            "soak": lambda: [self.make_words(args.soak_experts, weights=False), self.soak_words()],
        }
        return commands[name]()

    def make_words(self, experts: int, *, weights: bool) -> list[object]:
        layers, dense = self.layers(weights)
        mode = [] if weights else ["--config-only"]
        sizes = ["--layers", layers, "--dense-layers", dense, "--experts", experts]
        return ["make_synthetic_checkpoint.py", self.model(experts, weights=weights), *mode, *sizes]

    def config_experts(self) -> list[int]:
        named = [experts for stage in self.args.stages if (experts := _routed_experts(stage)) is not None]
        return named or [256, 64]

    def layer_words(self) -> list[object]:
        return ["expert_layer.py", "--ranks", self.args.tp, "--arms", *self.args.layer_arms]

    def ab_words(self, experts: int) -> list[list[object]]:
        """A command for every load."""
        args = self.args
        words = ["decode_ab.py", *self.dummy_model(experts), "--mode", args.mode, "--arms", *args.arms]
        rest = ["--blocks", args.blocks, "--rounds", args.rounds, *self.serving()]
        return [
            [*words, "--concurrency", *concurrency, "--dispatch-tokens", tokens, *rest]
            for tokens, concurrency in self.loads()
        ]

    def equality_words(self) -> list[object]:
        model = self.model(self.args.equality_experts, weights=True)
        return ["equality.py", "--model-path", model, "--arms", *self.args.equality_arms, *self.serving()]

    def soak_words(self) -> list[object]:
        args = self.args
        words = ["soak.py", *self.dummy_model(args.soak_experts), "--arm", args.soak_arm]
        return [*words, "--minutes", args.minutes, "--concurrency", max(args.concurrency), *self.serving()]

    def dummy_model(self, experts: int) -> list[object]:
        """Flags of the model without weights."""
        words: list[object] = ["--model-path", self.model(experts, weights=False), "--load-format", "dummy"]
        return [*words, "--model-name", f"deepseek-v3-{self.depth}l-{experts}e"]

    def serving(self) -> list[object]:
        """Flags that every tool takes."""
        args = self.args
        flags: list[object] = ["--tp", args.tp, "--ep", args.ep, "--dp", args.dp]
        flags += ["--mem-fraction", args.mem_fraction]
        flags += ["--routing", args.routing] if args.routing else []
        for text in args.server_args:
            flags.append(f"--server-args={text}")  # the text begins with dashes
        return [*flags, *(["--launch-command", args.launch_command] if args.launch_command else [])]

    def make(self, experts: int, *, weights: bool) -> int:
        if (self.model(experts, weights=weights) / "config.json").exists():
            return 0
        script, *words = self.make_words(experts, weights=weights)
        return self.tool(ROOT / "scripts" / str(script), *words)

    def measure(self, command: Sequence[object], out: Path, *, limited: bool = True) -> int:
        """Run one of the end-to-end tools; ``limited``: it takes a time limit."""
        script, *words = command
        out.parent.mkdir(parents=True, exist_ok=True)
        limit = ["--time-limit", f"{self.left_s:.0f}"] if limited else []
        return self.tool(E2E / str(script), *words, "--out", out, "--work", self.args.work / "runs", *limit)

    # Stages. Each returns an exit status; 0 marks it done.

    def check(self) -> int:
        """What the other stages need, before any time is spent on a server."""
        if self.args.wheel is not None:
            shutil.rmtree(self.site, ignore_errors=True)
            pip = [
                sys.executable,
                *["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"],
                str(self.site),
            ]
            subprocess.run([*pip, str(self.args.wheel)], check=True)
        code = (
            "from importlib.metadata import entry_points, version\n"
            "print('plugin entry points:', [e.value for e in entry_points(group='sglang.srt.plugins')])\n"
            "import sglang, torch, sgl_kernel, deep_ep\n"
            "gpus = torch.cuda.device_count()\n"
            "print('sglang', version('sglang'), 'torch', torch.__version__, 'gpus', gpus)\n"
            f"assert gpus >= {self.args.tp}, f'{{gpus}} GPUs, must be {self.args.tp} at least'\n"
            "peers = [(i, j) for i in range(gpus) for j in range(gpus) if i != j]\n"
            "print('without peer access:', [p for p in peers if not torch.cuda.can_device_access_peer(*p)])\n"
            "assert any(e.name == 'w4afp8' for e in entry_points(group='sglang.srt.plugins')), 'plugin not installed'\n"
        )
        return subprocess.run([sys.executable, "-c", code], env=self.environ, check=False).returncode

    def config(self) -> int:
        return max(self.make(experts, weights=False) for experts in self.config_experts())

    def checkpoint(self) -> int:
        return self.make(self.args.equality_experts, weights=True)

    def layer(self) -> int:
        return self.measure(self.layer_words(), self.results("layer") / "e2e_layer.json", limited=False)

    def ab(self, name: str, experts: int) -> int:
        made = self.make(experts, weights=False)
        if made:
            return made
        if self.graphs_fault:
            say(f"servers of its own for every number of requests: {self.graphs_fault}")
        out = self.results(name) / "e2e_decode.json"
        if self.args.merge_into.is_file() and not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.args.merge_into, out)
        for command in self.ab_words(experts):
            status = self.measure(command, out)
            if status:
                return status
        return 0

    def equality(self) -> int:
        made = self.checkpoint()
        if made:
            return made
        return self.measure(self.equality_words(), self.results("equality") / "e2e_equality.json")

    def soak(self) -> int:
        """Begin the soak, or look after the one that runs. One that failed begins anew at the next call."""
        state = self.args.work / f"soak-{self.identity('soak')}"
        others = [path.parent for path in self.args.work.glob("soak*/pid") if path.parent != state]
        for other in filter(_soak_runs, others):
            pid = (other / "pid").read_text()
            say(f"waiting for a soak of another command, which still runs here (to end it: kill -- -{pid})")
            while _soak_runs(other):
                if self.left_s <= 0:
                    return INCOMPLETE
                time.sleep(1.0)
        status, pid = state / "status", state / "pid"
        process: subprocess.Popen[bytes] | None = None  # of a soak that another call began
        if not pid.exists():
            made = self.make(self.args.soak_experts, weights=False)
            if made:
                return made
            state.mkdir(exist_ok=True)
            out = self.results("soak") / "e2e_soak.json"
            out.parent.mkdir(parents=True, exist_ok=True)
            out.unlink(missing_ok=True)  # of one that failed
            script, *words = self.soak_words()
            words = [E2E / str(script), *words, "--out", out, "--work", state]
            # A session of its own, and a shell that notes how it ended: it may end when nobody waits.
            shell = '"$@" > "$0/output.log" 2>&1; echo $? > "$0/status"'
            command = ["sh", "-c", shell, str(state), sys.executable, *map(str, words)]
            # No pipe of ours is left open in it: whoever reads this script's output would wait for the soak.
            none = subprocess.DEVNULL
            process = subprocess.Popen(
                command, env=self.environ, cwd=ROOT, start_new_session=True, stdin=none, stdout=none, stderr=none
            )
            pid.write_text(str(process.pid))
        # What was started here is asked itself: for a moment after its start a process has no command line.
        while process.poll() is None if process else _soak_runs(state):
            if self.left_s <= 0:
                return INCOMPLETE
            time.sleep(1.0)
        text = status.read_text().strip() if status.exists() else ""
        if not text:
            say("the soak was killed")
        ended = int(text or 1)
        if ended:
            status.unlink(missing_ok=True)
            pid.unlink()
        return ended

    def stage(self, name: str) -> Callable[[], int]:
        if (experts := _routed_experts(name)) is not None:
            return lambda: self.ab(name, experts)
        stages = {
            "check": self.check,
            "config": self.config,
            "layer": self.layer,
            "checkpoint": self.checkpoint,
            "equality": self.equality,
            "soak": self.soak,
        }
        if name not in stages:
            raise ValueError(f"stage: {name!r}, must be one of {', '.join(stages)} or ab-<experts>")
        return stages[name]

    def collect(self, names: Sequence[str]) -> None:
        """Copy the results of these stages, and the end of every log, to ``--out``."""
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            for path in sorted(self.results(name).glob("*")):
                shutil.copy(path, out / path.name)
        with tarfile.open(out / "e2e_logs.tar.gz", "w:gz") as archive:
            for path in sorted(self.args.work.rglob("*")):
                name = path.relative_to(self.args.work)
                if path.suffix not in (".log", ".json") or name.parts[0] in ("models", "plugin_site"):
                    continue
                if path.suffix == ".json" and path.stat().st_size > _JSON_BYTES:
                    say(f"{name}: {path.stat().st_size >> 20} MiB, not archived")
                    continue
                info = archive.gettarinfo(path, str(name))
                with path.open("rb") as file:
                    file.seek(max(0, info.size - (_LOG_BYTES if path.suffix == ".log" else _JSON_BYTES)))
                    end = file.read(info.size - file.tell())
                info.size = len(end)
                archive.addfile(info, io.BytesIO(end))


def _digest(*what: object) -> str:
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:12]


def _routed_experts(stage: str) -> int | None:
    """The number in ``ab-N``; None for all other stages."""
    number = stage.removeprefix("ab-")
    return int(number) if number != stage and number.isdigit() else None


def _is_ab(stage: str) -> bool:
    return _routed_experts(stage) is not None


def _soak_runs(state: Path) -> bool:
    """Whether the soak of this folder runs. Its process number may be another process's by now, which does not name it."""
    try:
        return str(state) in psutil.Process(int((state / "pid").read_text())).cmdline()
    except (OSError, ValueError, psutil.Error):
        return False


def _engine_version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "none"


def _depth(text: str) -> int | str:
    return FIT if text == FIT else int(text)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the preset of ``--ranks`` below what is given. Exits with status 2 where it is wrong."""
    parser = _parser()
    ranks = parser.parse_known_args(argv)[0].ranks
    preset = PRESETS.get(ranks, {})
    parser.set_defaults(**{name: value for name, value in preset.items() if name != "stages"})
    args = parser.parse_args(argv)
    args.stages = args.stages or preset.get("stages", [])
    if not args.stages:
        parser.error("stages: are none, must be at least one without --ranks")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="see above")
    parser.add_argument(
        "--ranks",
        type=int,
        choices=sorted(PRESETS),
        help="the whole run with so many GPUs, an expert-parallel rank each",
    )
    parser.add_argument("--work", type=Path, required=True, help="kept between calls: models, logs, finished parts")
    parser.add_argument("--out", type=Path, required=True, help="results are copied here at the end of every call")
    parser.add_argument("--seconds", type=float, default=580.0, help="time for this call")
    parser.add_argument("--least", type=float, default=90.0, metavar="SECONDS", help="begin no server with less time")
    parser.add_argument("--wheel", type=Path, help="the plugin's wheel, where it is not installed; `check` unpacks it")
    parser.add_argument("--merge-into", type=Path, default=ROOT / "benchmark" / "results" / "h200" / "e2e_decode.json")
    parser.add_argument("--arms", nargs="+", default=["engine", "plugin"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument(
        "--layers", type=_depth, default=5, help=f"of the model without weights; {FIT}: as many as fit, at most 61"
    )
    parser.add_argument("--dense-layers", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", choices=("fresh", "resident"), default="fresh")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--dispatch-tokens", type=int, help="DeepEP tokens per rank of the A/B, whatever the requests")
    parser.add_argument("--mem-fraction", type=float, default=0.7)
    parser.add_argument(
        "--routing", choices=(MODEL_ROUTING, *ROUTING_SWITCHES), help="default: uniform for dummy weights"
    )
    parser.add_argument("--equality-experts", type=int, default=64)
    parser.add_argument("--equality-arms", nargs="+", default=["plugin", "reference"], help="see equality.py")
    parser.add_argument("--layer-arms", nargs="+", default=["engine", "cutlass", "triton"])
    parser.add_argument("--soak-experts", type=int, default=64)
    parser.add_argument("--soak-arm", default="plugin")
    parser.add_argument("--minutes", type=float, default=15.5, help="of the soak")
    parser.add_argument("--launch-command", help="instead of python -m sglang.launch_server")
    parser.add_argument("--server-args", action="append", default=[], metavar="TEXT")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = parse_arguments(argv)
    args.work, args.out = args.work.absolute(), args.out.absolute()
    # So that a stage that runs is told, and stops its servers.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    run, reached = Run(args), list[str]()
    try:
        stages = [(name, run.stage(name)) for name in args.stages]
        run.loads()
        if any(name in ("config", "soak") or name.startswith("ab-") for name in args.stages):
            say(f"{run.depth} layers")
    except ValueError as error:
        _parser().error(str(error))
    try:
        for name, stage in stages:
            # Other engines, plugins, ranks and arms may use the same folder.
            done = args.work / f"done-{name}-{run.identity(name)}" if name != "check" else None
            reached += [name] if done else []
            if done and done.exists():
                say(f"{name}: already done")
                continue
            if run.left_s < args.least and name not in ("check", "config"):
                say(f"{name}: {run.left_s:.0f} s left are too few; run it again")
                return INCOMPLETE
            say(f"{name}: {run.left_s:.0f} s left")
            status = stage()
            if status:
                say(f"{name}: {'not finished; run it again' if status == INCOMPLETE else f'exit status {status}'}")
                return status
            if done:
                done.touch()
        say("all stages are done")
        return 0
    finally:
        run.collect(reached)


if __name__ == "__main__":
    sys.exit(main())
