"""Engine trees of every supported version, from their wheels, and the scripts that make them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "scripts"))

# What the engine's test runner calls the lanes, up to 0.5.12 and since.
_LANES = {
    True: ("stage-a-test-cpu", "stage-b-kernel-unit-1-gpu-large"),
    False: ("base-a-test-cpu", "base-b-kernel-unit-test-1-gpu-large"),
}


@pytest.fixture(scope="session")
def checker() -> ModuleType:
    """``scripts/check_engine_versions.py``."""
    import check_engine_versions

    return check_engine_versions


@pytest.fixture
def unpacked(checker: ModuleType, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a directory that holds an engine version's package, as in an unpacked wheel."""

    def make(version: str) -> Path:
        (wheel,) = checker.cached_wheels.engine_wheels([version]).values()
        root = tmp_path / f"unpacked-{version}"
        checker.unpack(wheel, root)
        return root

    return make


@pytest.fixture
def checkout(checker: ModuleType, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a checkout of an engine version: its package below ``python``, and its test runner's lanes."""

    def make(version: str) -> Path:
        (wheel,) = checker.cached_wheels.engine_wheels([version]).values()
        root = tmp_path / f"checkout-{version}"
        checker.unpack(wheel, root / "python")
        (root / "test").mkdir()
        lanes = _LANES[version.startswith("0.5.12")]
        (root / "test" / "run_suite.py").write_text(f"PER_COMMIT_SUITES = {list(lanes)!r}\n")
        return root

    return make
