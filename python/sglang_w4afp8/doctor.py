"""``sglang-w4afp8 doctor``: what a server started on this machine, with this environment, would get from the plugin.

The engine's own ``load_plugins()`` is run in a fresh process, so the table shows what a server's processes do, not what
this command thinks they would do.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_w4afp8 import __version__, guard, switches
from sglang_w4afp8.lifecycle import ActivationReport, PatchStatus, State

_ENTRY_POINT_GROUP = "sglang.srt.plugins"
_PLUGIN = "w4afp8"
# Importing the engine takes about ten seconds; a cold disk or a loaded machine ten times that.
_PROBE_TIMEOUT_S = 300
# The engine's default of SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.
_DISPATCH_TOKENS = 128


@dataclass(frozen=True)
class Probe:
    """What a fresh process saw.

    Attributes:
        report: the activation report, or None if the plugin did not run.
        refusal: why the process refused to go on; empty when it did not.
        output: the end of what it printed, for when there is no report.
    """

    report: ActivationReport | None
    refusal: str = ""
    output: str = ""


def _probe_here(path: str) -> None:
    """Runs in the fresh process: load the plugins as a server does and write the outcome to ``path``."""
    from sglang.srt.plugins import load_plugins

    from sglang_w4afp8 import lifecycle

    refusal = ""
    try:
        load_plugins()
    except SystemExit as error:
        refusal = str(error)
    report = lifecycle.report()
    Path(path).write_text(json.dumps({"refusal": refusal, "report": report and dataclasses.asdict(report)}))


def _report_from(data: dict[str, Any] | None) -> ActivationReport | None:
    if data is None:
        return None
    patches = tuple(PatchStatus(**{**status, "state": State(status["state"])}) for status in data["patches"])
    return ActivationReport(**{**data, "patches": patches})


def probe() -> Probe:
    """Load the plugins in a fresh process with this environment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        code = f"from sglang_w4afp8.doctor import _probe_here; _probe_here({str(path)!r})"
        try:
            run = subprocess.run(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Probe(None, output=f"no answer within {_PROBE_TIMEOUT_S} s")
        if not path.exists():
            return Probe(None, output="\n".join(run.stdout.splitlines()[-20:]))
        data = json.loads(path.read_text())
        return Probe(_report_from(data["report"]), data["refusal"], run.stdout)


def _version_of(*names: str) -> str:
    """``name version`` of the first of these distributions that is installed."""
    for name in names:
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def gpu_line() -> str | None:
    """Name, compute capability and driver of GPU 0; None if there is none that torch can use."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return f"{torch.cuda.get_device_name(0)}, capability {major}.{minor}, driver {_driver_version()}"


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return text.splitlines()[0].strip() if text.strip() else "unknown"


def machine_rows(gpu: str | None) -> list[tuple[str, str]]:
    """The versions that decide what can be patched and what can run."""
    return [
        ("sglang-w4afp8", __version__),
        ("sglang", _version_of("sglang")),
        ("torch", _version_of("torch")),
        ("triton", _version_of("triton", "pytorch-triton-rocm")),
        ("sgl_kernel", _version_of("sglang-kernel", "sgl-kernel")),
        ("deep_ep", _version_of("sgl-deep-ep", "deep-ep", "deep_ep")),
        ("GPU", gpu or "none"),
    ]


def problems(result: Probe, has_gpu: bool, environ: Mapping[str, str]) -> list[str]:
    """What is wrong, one sentence each; empty when a server on this machine gets what was asked for.

    Args:
        result: what a fresh process saw.
        has_gpu: whether engine modules that need a GPU driver ought to be importable.
        environ: the environment, for the engine's own plugin switch.
    """
    report = result.report
    if report is None:
        return [_why_no_report(result, environ)]
    if report.error:
        return [f"activation failed: {report.error}"]
    found = [
        f"{status.name} stands down: {status.reason}"
        for status in report.failures
        if has_gpu or not status.needs_driver
    ]
    if not found and result.refusal and not report.failures:
        found.append(result.refusal)
    if not found and not report.verified and not report.disabled and not result.refusal:
        found.append("the engine did not apply its hooks after the plugin had registered its own")
    return found


def _why_no_report(result: Probe, environ: Mapping[str, str]) -> str:
    if result.refusal:
        return result.refusal
    if not guard.engine_roots():
        return "the engine (sglang) is not installed in this environment"
    if not any(point.name == _PLUGIN for point in importlib.metadata.entry_points(group=_ENTRY_POINT_GROUP)):
        return f"no entry point {_PLUGIN!r} in group {_ENTRY_POINT_GROUP!r}: the package is not installed here"
    allowed = [name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and _PLUGIN not in allowed:
        return f"SGLANG_PLUGINS={environ['SGLANG_PLUGINS']} excludes this plugin: add {_PLUGIN} or unset it"
    return f"the engine did not run the plugin; its process ended with:\n{result.output}"


def _table(rows: Iterable[Sequence[str]]) -> str:
    rows = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _patch_row(status: PatchStatus, has_gpu: bool) -> tuple[str, str, str]:
    if status.needs_driver and not has_gpu:
        return status.name, "not checked", f"no GPU here: {status.reason}"
    return status.name, status.state.value, status.reason or status.note


def expert_lines(model: str, ranks: int, tokens: int) -> list[str]:
    """Which back end the expert layers of a model get on this GPU, and from which entry, rule or measurement.

    Args:
        model: a ``config.json``, the folder of a checkpoint, or a name that ``tune`` knows.
        ranks: expert-parallel ranks.
        tokens: most tokens that a rank dispatches in one step.

    Raises:
        SizesError: the model's sizes cannot be told, or its experts do not divide.
    """
    from sglang_w4afp8 import tuned_config
    from sglang_w4afp8.kernels.ops.moe import compiled_tiles, grouped_gemm_table
    from sglang_w4afp8.srt.layers.moe import two_kernels, w4a8_gemm
    from sglang_w4afp8.tune import sizes

    found = sizes.of(model)
    try:
        experts = found.experts_on_a_rank(ranks)
    except ValueError as error:
        raise sizes.SizesError(str(error)) from error
    # As the dispatcher estimates it.
    largest = (tokens * ranks * found.topk + found.experts) // found.experts
    n, k = found.inner, found.hidden
    gpu = tuned_config.gpu_name()
    lines = [
        f"{model} over {ranks} ranks: N {n}, K {k}, {experts} experts a rank, up to {tokens} tokens a rank "
        f"({largest} expected rows)"
    ]
    backend = switches.read().backend
    if found.group_size != grouped_gemm_table.GROUP_SIZE:
        lines.append(f"experts: not served, the weights' scales are of {found.group_size} values, not 128")
        return lines
    if backend != "auto":
        lines.append(f"experts: {backend}, as {switches.PREFIX}BACKEND says")
    else:
        choice = two_kernels.by_table(gpu, n, k, experts, largest)
        if choice.measure:
            first, second = grouped_gemm_table.rule_block_ns(n, k, experts)
            lines.append(
                "experts: measured when weights are loaded, as no entry of a table covers this; the two kernels would have "
                f"tiles of {first} and {second} columns by the rule"
            )
        elif choice.block_ns is not None:
            lines.append(f"experts: the two kernels, by {choice.source}")
        else:
            lines.append(f"experts: CUTLASS, as {choice.reason}")
    version = w4a8_gemm.kernel_version()
    table = w4a8_gemm.installed_table()
    for width, depth in ((2 * n, k), (k, n)):
        if table is not None and (width, depth) in table.shapes:
            source = "a measured table"
        elif compiled_tiles.branch(version, gpu, width, depth) is not None:
            source = f"the rule over the tiles of sglang-kernel {version}"
        else:
            source = f"the engine's own choice wherever it is right: the tiles of sglang-kernel {version} are not known"
        lines.append(f"CUTLASS tiles of {width} x {depth}: by {source}")
    return lines


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a positive integer")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit status 1 when something is wrong, 2 when a model's sizes cannot be told."""
    parser = argparse.ArgumentParser(prog="sglang-w4afp8 doctor", description="Say what a server here would get.")
    parser.add_argument("--model", help="also say what serves the experts of this model: its config.json or a name")
    parser.add_argument(
        "--ep", type=_count, default=8, help="expert-parallel ranks, with --model (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=_count,
        default=_DISPATCH_TOKENS,
        help="most tokens that a rank dispatches in a step, with --model (default: DeepEP's cap, %(default)s)",
    )
    options = parser.parse_args(argv)
    experts: list[str] = []
    if options.model is not None:
        try:
            experts = expert_lines(options.model, options.ep, options.tokens)
        except ValueError as error:
            print(f"doctor: {error}", file=sys.stderr)
            return 2
    gpu = gpu_line()
    print("machine")
    print(_table(machine_rows(gpu)))
    print("switches")
    print(_table((name, value, "set" if is_set else "default") for name, value, is_set in switches.in_effect()))
    for name in switches.unknown():
        print(f"  {name}: no such switch, it has no effect")

    result = probe()
    print("patches, as a fresh server process gets them")
    report = result.report
    if report is not None and report.disabled:
        print(f"  none: {switches.PREFIX}DISABLE is set, the engine is untouched")
    elif report is not None and report.patches:
        print(_table(_patch_row(status, gpu is not None) for status in report.patches))
    else:
        print("  none")
    if experts:
        print("experts of the model")
        print("\n".join(f"  {line}" for line in experts))
    if gpu is None:
        print("no GPU: cannot serve; patches that need sgl_kernel are not checked")
    if result.refusal:
        print(f"a server in this environment does not start: {result.refusal}")

    found = problems(result, gpu is not None, os.environ)
    for problem in found:
        print(f"WRONG: {problem}")
    if not found:
        print("nothing wrong" if gpu else "nothing wrong in what can be checked here")
    return 1 if found else 0
