"""What became of the patches in this process: which are live, and the few log lines that prove it.

The plugin writes this state once, after the engine has applied all hooks; the chain's host code reads it on every call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

logger = logging.getLogger("sglang_w4afp8")

# The engine's own line format, for lines that are due before the engine has set its logging up.
_ENGINE_LOG_FORMAT = "[%(asctime)s] %(message)s"
_ENGINE_DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


class State(str, Enum):
    """Where a patch stands. The value is how it reads in a report."""

    ACTIVE = "active"
    IN_TREE = "in tree"
    NOT_IN_TREE = "not in the tree"
    NOT_NEEDED = "not needed"
    NOT_SELECTED = "not selected"
    STANDING_DOWN = "standing down"


@dataclass(frozen=True)
class PatchStatus:
    """One patch in this process.

    Attributes:
        name: its name in the ledger.
        state: where it stands.
        reason: why it is not active; empty when it is.
        needs_driver: it stands down only because sgl_kernel cannot be loaded, as on a machine without a GPU driver.
        note: what is particular about it here, though it is active; empty when nothing is.
    """

    name: str
    state: State
    reason: str = ""
    needs_driver: bool = False
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether somebody who selected this patch does not get it."""
        return self.state is State.STANDING_DOWN


@dataclass(frozen=True)
class ActivationReport:
    """What activation did in this process.

    Attributes:
        package_version: ours.
        engine_version: the engine's; empty when it was not looked at.
        disabled: the engine was left untouched because a switch says so.
        strict: a selected patch that is not live refuses the start.
        verified: the bindings were looked at after the engine applied all hooks.
        patches: one entry per ledger entry, in ledger order.
        error: the fault of ours that stopped activation; the engine then runs unpatched.
    """

    package_version: str
    engine_version: str = ""
    disabled: bool = False
    strict: bool = False
    verified: bool = False
    patches: tuple[PatchStatus, ...] = ()
    error: str = ""

    @property
    def failures(self) -> tuple[PatchStatus, ...]:
        """Selected patches that are not live."""
        return tuple(status for status in self.patches if status.failed)

    def line(self) -> str:
        """The one activation line of a process."""
        head = f"sglang-w4afp8 {self.package_version} on sglang {self.engine_version} (pid {os.getpid()})"
        parts = []
        for state in State:
            members = [status for status in self.patches if status.state is state]
            # Why a patch was not selected is known to whoever selected.
            details = {s.name: s.note if state in (State.ACTIVE, State.NOT_SELECTED) else s.reason for s in members}
            texts = [f"{name} ({detail})" if detail else name for name, detail in details.items()]
            if texts or state is State.ACTIVE:
                parts.append(f"{state.value}: {', '.join(texts) or 'none'}")
        return f"{head}: {'; '.join(parts)}"


_report: ActivationReport | None = None
_live: frozenset[str] = frozenset()
_first_call_logged = False


def report() -> ActivationReport | None:
    """What activation did in this process; None before it ran."""
    return _report


def record(activation: ActivationReport) -> None:
    """Set this process's state. Patches count as live only in a verified report."""
    global _report, _live
    _report = activation
    active = {status.name for status in activation.patches if status.state is State.ACTIVE}
    _live = frozenset(active if activation.verified else ())


def is_live(name: str) -> bool:
    """Whether the patch is ours in this process. Read on every call of the chain, hence a set look-up."""
    return name in _live


def live_patches() -> tuple[str, ...]:
    """Names of the live patches, in ledger order."""
    return tuple(status.name for status in _report.patches if status.name in _live) if _report else ()


def announce(level: int, message: str) -> None:
    """Log a line that must be seen whatever the state of logging is.

    The engine loads plugins before it configures logging: the root logger then has no handler, or has one and drops
    INFO. Such a line goes straight to stderr, which is where the engine's own lines go, in the engine's format.
    """
    if logger.hasHandlers() and logger.isEnabledFor(level):
        logger.log(level, message)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_ENGINE_LOG_FORMAT, _ENGINE_DATE_FORMAT))
    handler.handle(logger.makeRecord(logger.name, level, __file__, 0, message, (), None))


_said: set[str] = set()


def say_once(where: logging.Logger, level: int, text: str) -> None:
    """Log a line through a module's logger, once per process whatever the layer."""
    if text not in _said:
        _said.add(text)
        where.log(level, "sglang-w4afp8: %s", text)


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple | list) else str(value)


@contextlib.contextmanager
def not_serving() -> Iterator[None]:
    """Calls of the chain in here are measurements: none of them is the first low-latency call."""
    global _first_call_logged
    logged, _first_call_logged = _first_call_logged, True
    try:
        yield
    finally:
        _first_call_logged = logged


def log_first_call(**shapes: Any) -> None:
    """Log the shapes of the first low-latency call, once per process and through the engine's logging.

    Args:
        **shapes: what to show, in the order given: sizes as tuples or numbers, and ``expected_m``. Nothing here may
            read a tensor's values, as the call may be inside a CUDA graph capture.
    """
    global _first_call_logged
    if _first_call_logged:
        return
    _first_call_logged = True
    text = ", ".join(f"{name}={_shown(value)}" for name, value in shapes.items())
    logger.info("sglang-w4afp8: first low-latency call: %s, patches=%s", text, ",".join(live_patches()) or "none")
