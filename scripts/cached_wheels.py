"""Wheels that checks need, fetched once through pip into the user's cache: engines to read, Tritons to compile with."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

# The engine's wheels are for one interpreter and platform. They are only read here, so any machine may fetch them.
_ENGINE_TAGS = ("--python-version=3.11", *(f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (34, 28, 17)))


class FetchError(Exception):
    """A wheel cannot be had; the message says which, and what pip said."""


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-w4afp8"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--only-binary=:all:"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise FetchError(f"pip {' '.join(arguments)} exited with status {done.returncode}: {' '.join(last)}")


def _staging(cache: Path) -> Path:
    """A directory beside the final place, so that what is there is always whole."""
    cache.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".fetching-", dir=cache))


def _announce(what: str, position: tuple[int, int]) -> None:
    print(f"[{position[0]}/{position[1]}] fetching {what}", file=sys.stderr, flush=True)


def engine_wheels(versions: Sequence[str], cache: Path | None = None) -> dict[str, Path]:
    """The wheel of each engine version (about 8 to 20 MB each).

    Raises:
        FetchError: pip cannot get one.
    """
    folder = (cache or cache_directory()) / "engine-wheels"
    found: dict[str, Path] = {}
    for index, version in enumerate(versions, 1):
        wheels = sorted(folder.glob(f"sglang-{version}-*.whl"))
        if not wheels:
            _announce(f"sglang {version}", (index, len(versions)))
            staging = _staging(folder)
            try:
                _pip("download", f"sglang=={version}", f"--dest={staging}", *_ENGINE_TAGS)
                (wheel,) = staging.glob("sglang-*.whl")
                wheels = [wheel.replace(folder / wheel.name)]
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        found[version] = wheels[0]
    return found


# The library of the kernels for Hopper inside an sglang-kernel wheel.
_KERNEL_LIBRARY = "sgl_kernel/sm90/common_ops.abi3.so"
_KERNEL_TAGS = ("--python-version=3.11", "--implementation=cp", "--abi=abi3", "--platform=manylinux2014_x86_64")


def kernel_libraries(versions: Sequence[str], cache: Path | None = None) -> dict[str, Path]:
    """The compiled library of each sglang-kernel version (370 MB to fetch, 12 to 21 MB kept).

    Raises:
        FetchError: pip cannot get one, or its wheel holds no such library.
    """
    folder = (cache or cache_directory()) / "kernel-libraries"
    for index, version in enumerate(versions, 1):
        if not (folder / f"{version}.so").is_file():
            _announce(f"sglang-kernel {version}", (index, len(versions)))
            staging = _staging(folder)
            try:
                _pip("download", f"sglang-kernel=={version}", f"--dest={staging}", *_KERNEL_TAGS)
                (wheel,) = staging.glob("sglang_kernel-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (staging / "library").write_bytes(archive.read(_KERNEL_LIBRARY))
                (staging / "library").replace(folder / f"{version}.so")
            except KeyError as error:
                raise FetchError(f"sglang-kernel {version} holds no {_KERNEL_LIBRARY}") from error
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return {version: folder / f"{version}.so" for version in versions}


def tritons(versions: Sequence[str], cache: Path | None = None) -> dict[str, Path]:
    """A directory for ``PYTHONPATH`` with each Triton version (about 200 MB to fetch, 700 MB unpacked), for this Python.

    Raises:
        FetchError: pip cannot get one.
    """
    folder = (cache or cache_directory()) / f"triton-cp{sys.version_info[0]}{sys.version_info[1]}"
    for index, version in enumerate(versions, 1):
        if not (folder / version).is_dir():
            _announce(f"triton {version}", (index, len(versions)))
            staging = _staging(folder)
            try:
                _pip("install", f"triton=={version}", f"--target={staging / 'site'}")
                with contextlib.suppress(OSError):  # somebody else was faster
                    (staging / "site").replace(folder / version)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return {version: folder / version for version in versions}
