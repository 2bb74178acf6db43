"""Our registered tests as files of an engine checkout: they import the engine's module and hold their own reference.

The engine's own runner refuses a file in a lane that it does not know, so lanes are read from the checkout's runner.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_w4afp8 import __version__
from sglang_w4afp8.fork.edits import REFERENCE
from sglang_w4afp8.fork.source import Edit, ForkError, Source, bound_imports, defined, used

# Present in a checkout of this project and in its source distribution, not in the wheel.
REGISTERED = Path(__file__).resolve().parents[3] / "test" / "registered"
FOLDERS = ("unit/layers/moe", "kernels/ops/moe")
RUNNER = "test/run_suite.py"

_KERNELS_PACKAGE = "sglang_w4afp8.kernels.ops.moe"
_KERNELS_MODULE = f"{_KERNELS_PACKAGE}.ep_moe_kernels"
_REFERENCE_MODULE = f"{_KERNELS_PACKAGE}.reference"

# What an engine's test environment has for certain.
_AVAILABLE = {*sys.stdlib_module_names, "pytest", "sglang", "sglang_w4afp8", "torch", "triton"}

# (marker, our lane) -> the engine's lanes, newest first; 0.5.12 has the last ones. There is no CPU lane for kernels.
_LANES = {
    ("register_cpu_ci", "base-a-test-cpu"): ("base-a-test-cpu", "stage-a-test-cpu"),
    ("register_cpu_ci", "base-b-kernel-unit"): ("base-a-test-cpu", "stage-a-test-cpu"),
    ("register_cuda_ci", "base-b-kernel-unit"): (
        "base-b-kernel-unit-test-1-gpu-large",
        "base-b-kernel-unit-1-gpu-large",
        "stage-b-kernel-unit-1-gpu-large",
    ),
}


# A file goes along when most of its tests need nothing else of this package; the others are left out of it.
_LEAST_SHARE = 0.75


@dataclass(frozen=True)
class Suite:
    """One test file of ours that an engine checkout can run.

    Attributes:
        path: below ``test/registered``, here and there.
        source: the file, without the tests that an engine cannot run.
    """

    path: str
    source: Source


def _roots(statement: ast.stmt) -> set[str]:
    return {module.partition(".")[0] for _, (module, _) in bound_imports(statement)}


def _portable(statement: ast.Import | ast.ImportFrom) -> bool:
    """Whether an import names nothing of ours but the kernels and their reference."""
    if "sglang_w4afp8" not in _roots(statement):
        return True
    return isinstance(statement, ast.ImportFrom) and all(
        module in (_KERNELS_MODULE, _REFERENCE_MODULE) or (module, name) == (_KERNELS_PACKAGE, "ep_moe_kernels")
        for _, (module, name) in bound_imports(statement)
    )


def _tests(statements: Iterable[ast.stmt]) -> int:
    return sum(isinstance(s, ast.FunctionDef) and s.name.startswith("test_") for s in statements)


def _trimmed(source: Source) -> Source | None:
    """A test file without what needs more of this package; None where too little is left, or it is not ours to give."""
    if not any(module == _KERNELS_MODULE for s in source.imports for _, (module, _) in bound_imports(s)):
        return None
    body = source.tree.body
    left_out: list[ast.stmt] = [statement for statement in source.imports if not _portable(statement)]
    lost = {name for statement in left_out for name, _ in bound_imports(statement)}
    while True:
        more = [s for s in body if s not in left_out and used(s) & lost]
        if not more:
            break
        left_out += more
        lost |= {name for statement in more for name in defined(statement)}
    kept = [statement for statement in body if statement not in left_out]
    if _tests(kept) < _LEAST_SHARE * _tests(body):
        return None
    mentioned = {name for statement in left_out for name in used(statement)}
    needed = {name for statement in kept for name in used(statement)}
    unused = [
        s
        for s in source.imports
        if s in kept and all(name in mentioned and name not in needed for name, _ in bound_imports(s))
    ]
    edits = [source.removal(s) for s in left_out if not isinstance(s, ast.Import | ast.ImportFrom)]
    edits += [
        Edit(source.start(s), source.at((s.end_lineno or 0) + 1), b"")
        for s in [*left_out, *unused]
        if isinstance(s, ast.Import | ast.ImportFrom)
    ]
    trimmed = Source(source.name, source.edited(edits))
    inside = [node for node in ast.walk(trimmed.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    if not all(_portable(node) and _roots(node) <= _AVAILABLE for node in inside):
        return None
    return trimmed


def suites() -> list[Suite]:
    """Every test file of the two folders that an engine can run, most of it at least."""
    found = []
    for folder in FOLDERS:
        for path in sorted((REGISTERED / folder).glob("test_*.py")):
            trimmed = _trimmed(Source(f"{folder}/{path.name}", path.read_bytes()))
            if trimmed is not None:
                found.append(Suite(trimmed.name, trimmed))
    return found


def lanes_of(runner: bytes) -> set[str]:
    """Every string constant of the checkout's ``test/run_suite.py``, its lanes among them."""
    tree = Source(RUNNER, runner).tree
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def suite_file(suite: Suite, kernels_module: str, lanes: set[str]) -> bytes:
    """A test file for a checkout whose kernels are ``kernels_module``.

    Raises:
        ForkError: the checkout has none of the lanes that the file could go into.
    """
    source = suite.source
    package, _, module = kernels_module.rpartition(".")
    edits = [_lane_edit(source, call, lanes) for call in _markers(source)]
    reference: set[str] = set()
    for statement in source.tree.body:
        if not isinstance(statement, ast.ImportFrom):
            continue
        if statement.module == _REFERENCE_MODULE:
            reference |= {alias.name for alias in statement.names}
            edits.append(Edit(source.start(statement), source.at((statement.end_lineno or 0) + 1), b""))
        elif statement.module == _KERNELS_MODULE:
            at = source.start(statement) + len("from ")
            edits.append(Edit(at, at + len(_KERNELS_MODULE), kernels_module.encode()))
        elif statement.module == _KERNELS_PACKAGE:
            ((name, _),) = bound_imports(statement)
            alias = f" as {name}" if name != module else ""
            text = f"from {package} import {module}{alias}"
            edits.append(Edit(source.start(statement), source.end(statement), text.encode()))
    if reference:
        last = source.imports[-1]
        at = source.at((last.end_lineno or 0) + 1)
        edits = [edit for edit in edits if edit.end != at] + [
            Edit(edit.start, at, b"\n" + _reference_text(reference)) for edit in edits if edit.end == at
        ]
        if not any(edit.end == at for edit in edits):
            edits.append(Edit(at, at, b"\n\n" + _reference_text(reference)))
    head = f"# Written by `sglang-w4afp8 fork`, version {__version__}: change it there.\n"
    return head.encode() + source.edited(edits)


def _reference_text(names: set[str]) -> bytes:
    """Definitions of the plain references and of what they use, in their order."""
    source = Source(REFERENCE.name, REFERENCE.read_bytes())
    statements = [statement for statement in source.tree.body if defined(statement)]
    wanted = set(names)
    while True:
        more = {name for s in statements if defined(s) & wanted for name in used(s)} - wanted
        if not more:
            break
        wanted |= more
    missing = names - {name for statement in statements for name in defined(statement)}
    if missing:
        raise ForkError(f"{REFERENCE.name}: expected {', '.join(sorted(missing))}, found no such function")
    spans = [source.span(statement) for statement in statements if defined(statement) & wanted]
    return b"\n\n".join(source.data[start:end] for start, end in spans)


def _markers(source: Source) -> Iterator[ast.Call]:
    for statement in source.tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.startswith("register_"):
            yield call


def _lane_edit(source: Source, call: ast.Call, lanes: set[str]) -> Edit:
    assert isinstance(call.func, ast.Name)
    (value,) = [keyword.value for keyword in call.keywords if keyword.arg == "suite"]
    assert isinstance(value, ast.Constant)
    candidates = _LANES.get((call.func.id, value.value))
    if candidates is None:
        raise ForkError(f"{source.name}: {call.func.id}: no engine lane is known for {value.value!r}")
    lane = next((lane for lane in candidates if lane in lanes), None)
    if lane is None:
        raise ForkError(
            f"{RUNNER}: expected the lane {' or '.join(candidates)}, found neither (--no-tests leaves them out)"
        )
    return Edit(source.start(value), source.end(value), f'"{lane}"'.encode())
