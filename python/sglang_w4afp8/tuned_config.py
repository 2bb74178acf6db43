"""Loader of tuned JSON files: what was measured on one kind of GPU, used on the same kind of GPU.

A file is `<kind>_<part>_<part>....json`, for example `gemm_tiles_nvidia_h200_0.4.5.json`:

    {"schema": 1, "metadata": {"gpu": ..., "triton": ..., "package_version": ..., "kernel_version": ..., ...}, "data":
    {...}}

`load_tuned` finds it by name, checks schema and metadata, and hands `data` to the caller's parser. An absent, stale or
malformed file never raises while serving: one warning in the log, and the caller's default rule.

Files of `sglang-w4afp8 tune` (in the user's directory) come before those shipped with the package.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

SCHEMA = 1
REQUIRED_METADATA = ("gpu", "triton", "package_version", "kernel_version")
SHIPPED_DIRECTORY = Path(__file__).parent / "configs"

Parsed = TypeVar("Parsed")

_lock = threading.Lock()
_cache: dict[tuple[Any, ...], Any] = {}


class TunedConfigError(ValueError):
    """A tuned file that must not be used; the message says why."""


def user_directory() -> Path:
    """Where `sglang-w4afp8 tune` writes its files.

    Raises:
        RuntimeError: this user has no home (no HOME in the environment, and no entry among the system's users).
    """
    return Path.home() / ".cache" / "sglang-w4afp8" / "configs"


def _directories() -> tuple[Path, ...]:
    """Where tuned files are looked for, the first first; a user without a home has none of their own."""
    try:
        return (user_directory(), SHIPPED_DIRECTORY)
    except RuntimeError:
        return (SHIPPED_DIRECTORY,)


def slug(text: str) -> str:
    """`text` as part of a file name: lower case, everything but letters, digits and dots as one underscore."""
    return re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")


def file_name(kind: str, *parts: str) -> str:
    """Name of the tuned file of one kind, for example `file_name("gemm_tiles", "NVIDIA H200", "0.4.5")`."""
    return "_".join((kind, *(slug(part) for part in parts))) + ".json"


def clear_cache() -> None:
    """Forget every loaded file (for tests, and after tuning in the same process)."""
    with _lock:
        _cache.clear()
    gpu_name.cache_clear()


@cache
def gpu_name(device_index: int | None = None) -> str | None:
    """The GPU's name as tuned files spell it, or None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(device_index)


def read_tuned(path: Path, match: Mapping[str, str]) -> Mapping[str, Any]:
    """The `data` of one tuned file.

    Args:
        path: the file.
        match: metadata that must be equal, for example `{"gpu": "NVIDIA H200", "kernel_version": "0.4.5"}`.

    Raises:
        TunedConfigError: the file is malformed, of another schema, or measured for something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TunedConfigError(f"unreadable ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("metadata"), dict):
        raise TunedConfigError("no metadata")
    if content.get("schema") != SCHEMA:
        raise TunedConfigError(f"schema is {content.get('schema')!r}, must be {SCHEMA}")
    metadata = content["metadata"]
    missing = [key for key in REQUIRED_METADATA if key not in metadata]
    if missing:
        raise TunedConfigError(f"metadata lacks {', '.join(missing)}")
    for key, wanted in match.items():
        if metadata.get(key) != wanted:
            raise TunedConfigError(f"measured with {key} {metadata.get(key)!r}, running {wanted!r}")
    if not isinstance(content.get("data"), dict):
        raise TunedConfigError("no data")
    return content["data"]


def write_tuned(path: Path, metadata: Mapping[str, str], data: Mapping[str, Any]) -> None:
    """Write one tuned file; `metadata` must hold `REQUIRED_METADATA`. Raises ValueError when it does not."""
    missing = [key for key in REQUIRED_METADATA if key not in metadata]
    if missing:
        raise ValueError(f"metadata: lacks {', '.join(missing)}, must hold {', '.join(REQUIRED_METADATA)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "metadata": dict(metadata), "data": data}
    # Written beside and renamed: a process that starts meanwhile reads the old file or the new one, never half a file.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load_tuned(
    kind: str,
    parts: tuple[str, ...],
    match: Mapping[str, str],
    parse: Callable[[Mapping[str, Any]], Parsed],
    *,
    directories: tuple[Path, ...] | None = None,
    fallback: str = "the default rule",
    absent: int = logging.WARNING,
) -> Parsed | None:
    """Load, check and parse the tuned file of one kind; None where there is no usable one. Cached for the process.

    Args:
        kind: first part of the file's name, for example `gemm_tiles`.
        parts: the rest of the name, for example the GPU and the kernel's version.
        match: metadata that must be equal.
        parse: turns `data` into what the caller uses; any exception it raises means a malformed file.
        directories: where to look, first match wins (the user's directory, then the shipped one).
        fallback: how the log names what is used instead.
        absent: the log level at which a file that does not exist is said; one that is refused is always a warning.
    """
    if directories is None:
        directories = _directories()
    name = file_name(kind, *parts)
    key = (name, directories, tuple(sorted(match.items())))
    with _lock:
        if key not in _cache:
            _cache[key] = _load(name, directories, match, parse, fallback, absent)
        return _cache[key]


def _load(
    name: str,
    directories: tuple[Path, ...],
    match: Mapping[str, str],
    parse: Callable[[Mapping[str, Any]], Parsed],
    fallback: str,
    absent: int,
) -> Parsed | None:
    refused = []
    for directory in directories:
        path = directory / name
        try:
            if not path.is_file():
                continue
            parsed = parse(read_tuned(path, match))
        # A tuned file is a hint: whatever is wrong with one (a parser may trip over anything), serving goes on.
        except Exception as error:
            refused.append(f"{path}: {type(error).__name__}: {error}")
            continue
        logger.info("w4afp8: using tuned file %s", path)
        if refused:
            logger.warning("w4afp8: tuned file refused (%s), using %s", "; ".join(refused), path)
        return parsed
    reason = "; ".join(refused) if refused else f"no tuned file {name}"
    logger.log(logging.WARNING if refused else absent, "w4afp8: %s, using %s", reason, fallback)
    return None
