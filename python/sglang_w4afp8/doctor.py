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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit status 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="sglang-w4afp8 doctor", description="Say what a server here would get.")
    parser.parse_args(argv)
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
