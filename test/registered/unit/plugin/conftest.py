"""Engines and stand-ins for ``sgl_kernel`` that the plugin's tests share."""

import os
from pathlib import Path

import pytest

from engine_process import FakeEngine, sgl_kernel_with, write


@pytest.fixture
def fake_engine(tmp_path: Path) -> FakeEngine:
    """An engine of the test's own making."""
    return FakeEngine(tmp_path / "engine")


@pytest.fixture
def sgl_kernel_stub(tmp_path: Path) -> Path:
    """A directory with an ``sgl_kernel`` that has every name: without a GPU driver the engine's chain then imports.

    The grouped GEMM has the real one's arguments, which the plugin looks at; the rest is a stand-in.

    With a driver the directory is empty and the real library is used: the engine then looks its operators up too.
    """
    if os.path.exists("/dev/nvidiactl"):
        return write(tmp_path / "stub", {})
    return sgl_kernel_with(tmp_path / "stub")


@pytest.fixture
def sgl_kernel_broken(tmp_path: Path) -> Path:
    """A directory with an ``sgl_kernel`` that fails as the real one does without a driver: with a page of text."""
    text = (
        "\\n[sgl_kernel] CRITICAL: Could not load any common_ops library!\\n\\nAttempted locations:\\n1. somewhere\\n"
    )
    text += "GPU Info:\\n- Compute capability: None\\n- ImportError: libcuda.so.1: cannot open shared object file\\n"
    return write(tmp_path / "broken", {"sgl_kernel/__init__.py": f'raise ImportError("{text}")\n'})
