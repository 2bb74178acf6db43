#!/usr/bin/env python3
"""Everything end to end on a GPU machine, in stages that fit into short commands.

    python scripts/run_h200_e2e.py check config ab-256 ab-64 --work /tmp/e2e --out OUT --seconds 580
    python scripts/run_h200_e2e.py checkpoint equality soak  --work /tmp/e2e --out OUT --seconds 580
    python scripts/run_h200_e2e.py --ranks 4                 --work /tmp/e2e --out OUT --seconds 580

Stages run in the order given until they are done or the time is over; the same command again goes on (exit status 3
says that it must). What is finished is kept in ``--work``; every call ends by copying the results and an archive of all
logs to ``--out``. The soak runs in a session of its own, so that it outlives the command that began it.

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

ROOT = Path(__file__).resolve().parents[1]
E2E = ROOT / "benchmark" / "e2e"
sys.path.insert(0, str(E2E))

from harness import report  # noqa: E402
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
_LOG_BYTES = 2 << 20


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
        self.results = args.work / "results"
        self.results.mkdir(parents=True, exist_ok=True)
        # Where `check` puts the plugin's wheel; empty where it is installed already.
        self.site = args.work / "plugin_site"
        python_path = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}
        self.decode = self.results / "e2e_decode.json"
        if args.merge_into.is_file() and not self.decode.exists():
            shutil.copy(args.merge_into, self.decode)

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

    def model(self, experts: int, *, weights: bool) -> Path:
        kind = "weights" if weights else "config"
        return self.args.work / "models" / f"deepseek-v3-{self.layers(weights)[0]}l-{experts}e-{kind}"

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

    def make(self, experts: int, *, weights: bool) -> int:
        out = self.model(experts, weights=weights)
        if (out / "config.json").exists():
            return 0
        layers, dense = self.layers(weights)
        mode = [] if weights else ["--config-only"]
        sizes = ["--layers", layers, "--dense-layers", dense, "--experts", experts]
        return self.tool(ROOT / "scripts" / "make_synthetic_checkpoint.py", out, *mode, *sizes)

    def serving(self) -> list[object]:
        """Flags that every tool takes."""
        args = self.args
        flags: list[object] = ["--tp", args.tp, "--ep", args.ep, "--dp", args.dp, "--work", args.work / "runs"]
        flags += ["--mem-fraction", args.mem_fraction]
        flags += ["--routing", args.routing] if args.routing else []
        for text in args.server_args:
            flags.append(f"--server-args={text}")  # the text begins with dashes
        return [*flags, *(["--launch-command", args.launch_command] if args.launch_command else [])]

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
        stages = [stage for stage in self.args.stages if stage.startswith("ab-")] or ["ab-256", "ab-64"]
        return max(self.make(int(stage.removeprefix("ab-")), weights=False) for stage in stages)

    def checkpoint(self) -> int:
        return self.make(self.args.equality_experts, weights=True)

    def layer(self) -> int:
        words = ["--ranks", self.args.tp, "--arms", *self.args.layer_arms, "--work", self.args.work / "runs"]
        return self.tool(E2E / "expert_layer.py", *words, "--out", self.results / "e2e_layer.json")

    def ab(self, experts: int) -> int:
        made = self.make(experts, weights=False)
        if made:
            return made
        args = self.args
        if self.graphs_fault:
            say(f"servers of its own for every number of requests: {self.graphs_fault}")
        for tokens, concurrency in self.loads():
            words = ["--model-path", self.model(experts, weights=False), "--load-format", "dummy"]
            words += ["--model-name", f"deepseek-v3-{self.depth}l-{experts}e", "--out", self.decode]
            words += ["--mode", args.mode, "--arms", *args.arms]
            words += ["--concurrency", *concurrency, "--dispatch-tokens", tokens]
            words += ["--blocks", args.blocks, "--rounds", args.rounds, "--time-limit", f"{self.left_s:.0f}"]
            status = self.tool(E2E / "decode_ab.py", *words, *self.serving())
            if status:
                return status
        return 0

    def equality(self) -> int:
        made = self.checkpoint()
        if made:
            return made
        model, arms = self.model(self.args.equality_experts, weights=True), self.args.equality_arms
        words = ["--model-path", model, "--arms", *arms]
        words += ["--out", self.results / "e2e_equality.json", "--time-limit", f"{self.left_s:.0f}"]
        return self.tool(E2E / "equality.py", *words, *self.serving())

    def soak(self) -> int:
        """Begin the soak, or look after the one that runs."""
        state = self.args.work / "soak"
        state.mkdir(exist_ok=True)
        status, pid = state / "status", state / "pid"
        if not pid.exists():
            experts = self.args.soak_experts
            made = self.make(experts, weights=False)
            if made:
                return made
            words = [E2E / "soak.py", "--model-path", self.model(experts, weights=False), "--load-format", "dummy"]
            words += ["--model-name", f"deepseek-v3-{self.depth}l-{experts}e", "--arm", self.args.soak_arm]
            words += ["--minutes", self.args.minutes, "--concurrency", max(self.args.concurrency)]
            words += ["--out", self.results / "e2e_soak.json", *self.serving()]
            # A session of its own, and a shell that notes how it ended: it may end when nobody waits.
            shell = '"$@" > "$0/output.log" 2>&1; echo $? > "$0/status"'
            command = ["sh", "-c", shell, str(state), sys.executable, *map(str, words)]
            # No pipe of ours is left open in it: whoever reads this script's output would wait for the soak.
            none = subprocess.DEVNULL
            process = subprocess.Popen(
                command, env=self.environ, cwd=ROOT, start_new_session=True, stdin=none, stdout=none, stderr=none
            )
            pid.write_text(str(process.pid))
        while not status.exists() or not status.read_text().strip():
            if self.left_s <= 0:
                return INCOMPLETE
            if not Path(f"/proc/{pid.read_text()}").exists():
                say("the soak was killed")
                return 1
            time.sleep(1.0)
        return int(status.read_text())

    def stage(self, name: str) -> Callable[[], int]:
        if name.startswith("ab-") and name.removeprefix("ab-").isdigit():
            return lambda: self.ab(int(name.removeprefix("ab-")))
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

    def collect(self) -> None:
        """Copy results, and the end of every log, to ``--out``."""
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.results.iterdir()):
            shutil.copy(path, out / path.name)
        kept = [path for path in self.args.work.rglob("*") if path.suffix in (".log", ".json")]
        with tarfile.open(out / "e2e_logs.tar.gz", "w:gz") as archive:
            for path in sorted(path for path in kept if "models" not in path.parts and "plugin_site" not in path.parts):
                if path.stat().st_size <= _LOG_BYTES:
                    archive.add(path, path.relative_to(self.args.work))


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
    run, engine = Run(args), _engine_version()
    try:
        stages = [(name, run.stage(name)) for name in args.stages]
        run.loads()
        if any(name in ("config", "soak") or name.startswith("ab-") for name in args.stages):
            say(f"{run.depth} layers")
    except ValueError as error:
        _parser().error(str(error))
    try:
        for name, stage in stages:
            # Another engine's environment, or a run with other ranks, may use the same folder.
            done = args.work / f"done-{name}-{engine}-tp{args.tp}"
            if done.exists() and name != "check":
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
            done.touch()
        say("all stages are done")
        return 0
    finally:
        run.collect()


if __name__ == "__main__":
    sys.exit(main())
