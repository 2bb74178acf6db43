"""What every lane shares: Triton's mode, hypothesis's profile, benchmarks as tests, versions in the header.

Triton decides at decoration time whether a kernel is interpreted, and one process cannot do both:

- Without a GPU, ``TRITON_INTERPRET=1`` is set here, before any test module imports triton: kernels run on CPU tensors.
  A value that is already set is kept.
- With a GPU, kernels are compiled, and the same files run on the device.
- A test that needs the compiler on a machine without a GPU (``triton.compile`` to PTX, say) runs it in a subprocess of
  its own, with ``TRITON_INTERPRET`` removed from that process's environment.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def _cuda_available() -> bool:
    if not os.path.exists("/dev/nvidiactl"):
        return False  # no driver: spares the import of torch
    import torch

    return torch.cuda.is_available()


if not _cuda_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # No deadline: the interpreter is slow, and no test here asserts a wall-clock time. Derandomised: a lane's result
    # depends on the code alone.
    hypothesis.settings.register_profile("lanes", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("lanes")


class BenchmarkFailed(Exception):
    """A benchmark script exited with a status other than 0."""


class BenchmarkScript(pytest.Item):
    """Runs one ``bench_*.py`` as a user would, with its short set (``--ci``)."""

    def runtest(self) -> None:
        status = subprocess.run([sys.executable, str(self.path), "--ci"], check=False).returncode
        if status != 0:
            raise BenchmarkFailed(f"{self.path.name} --ci exited with status {status}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # type: ignore[override]
        return str(excinfo.value) if excinfo.errisinstance(BenchmarkFailed) else str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


class BenchmarkFile(pytest.File):
    def collect(self) -> Iterator[BenchmarkScript]:
        yield BenchmarkScript.from_parent(self, name="--ci")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a benchmark as one item, without importing it; only files named on the command line get here."""
    return BenchmarkFile.from_parent(parent, path=module_path) if module_path.name.startswith("bench_") else None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def pytest_report_header() -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in ("sglang", "torch", "triton"))
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return f"{versions}; kernels {'interpreted on the CPU' if interpreted else 'compiled'}"
