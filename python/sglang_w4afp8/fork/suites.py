"""Our registered tests as files of an engine checkout: they import the engine's module and hold their own reference.

The engine's own runner refuses a file in a lane that it does not know, so lanes are read from the checkout's runner.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
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


@dataclass(frozen=True)
class Suite:
    """One test file of ours that an engine checkout can run.

    Attributes:
        path: below ``test/registered``, here and there.
        source: the file.
    """

    path: str
    source: Source


def _our_imports(source: Source) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [module for _, (module, _) in bound_imports(node)]
            if any(module.partition(".")[0] == "sglang_w4afp8" for module in modules):
                yield node


def _portable(statement: ast.Import | ast.ImportFrom) -> bool:
    """Whether an import of ours names nothing but the kernels and their reference."""
    origins = [origin for _, origin in bound_imports(statement)]
    return isinstance(statement, ast.ImportFrom) and all(
        module in (_KERNELS_MODULE, _REFERENCE_MODULE) or (module, name) == (_KERNELS_PACKAGE, "ep_moe_kernels")
        for module, name in origins
    )


def _available(source: Source) -> bool:
    """Whether an engine's test environment has everything that a file imports."""
    origins = [origin for node in ast.walk(source.tree) if isinstance(node, ast.stmt) for origin in bound_imports(node)]
    return all(module.partition(".")[0] in _AVAILABLE for _, (module, _) in origins)


def suites() -> list[Suite]:
    """Every test file of the two folders that needs nothing of this package but the kernels and their reference."""
    found = []
    for folder in FOLDERS:
        for path in sorted((REGISTERED / folder).glob("test_*.py")):
            source = Source(f"{folder}/{path.name}", path.read_bytes())
            ours = list(_our_imports(source))
            if ours and all(_portable(statement) for statement in ours) and _available(source):
                found.append(Suite(source.name, source))
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
