"""Drift guard: does an engine still have the functions that our patches stand in for, with signatures and code that we know?

Everything is read from source by syntax tree. Nothing of the engine is imported, so the check costs no start-up time
and works on an engine that cannot be imported here (no GPU driver) or is merely unpacked in a directory:

    checks = guard.check_tree(plugin.LEDGER, roots=["/path/to/site-packages/sglang"], version="0.5.23")

The engine may be a namespace package, hence ``roots`` in the plural.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_w4afp8.plugin import Patch, Target

ENGINE_PACKAGE = "sglang"
# A fork that carries a patch in its own tree says so with this module-level string, whose value is our version.
IN_TREE_MARKER = "_SGLANG_W4AFP8_IN_TREE"


@dataclass(frozen=True)
class Parameter:
    """One argument of a function: what a caller can see of it."""

    name: str
    kind: str  # "positional only", "normal", "*", "keyword only" or "**"
    has_default: bool

    def __str__(self) -> str:
        star = self.kind if self.kind.startswith("*") else ""
        return f"{star}{self.name}{'=...' if self.has_default else ''}"


@dataclass(frozen=True)
class Signature:
    """Names, kinds and presence of defaults. Annotations and default values are no part of it."""

    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        parts: list[str] = []
        kinds = [p.kind for p in self.parameters]
        for index, parameter in enumerate(self.parameters):
            if parameter.kind == "keyword only" and "*" not in kinds and "keyword only" not in kinds[:index]:
                parts.append("*")
            parts.append(str(parameter))
            if parameter.kind == "positional only" and kinds[index + 1 : index + 2] != ["positional only"]:
                parts.append("/")
        return f"({', '.join(parts)})"


@functools.cache
def parse_signature(text: str) -> Signature:
    """The signature of ``def f(<text>)``, for the ledger: ``parse_signature("x, output, expected_rows=None")``."""
    function = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return signature_of(function)


def signature_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """The signature of a function definition."""
    arguments = function.args
    positional = [(a, "positional only") for a in arguments.posonlyargs] + [(a, "normal") for a in arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters = [Parameter(a.arg, kind, index >= first_default) for index, (a, kind) in enumerate(positional)]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, "*", False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(Parameter(argument.arg, "keyword only", default is not None))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, "**", False))
    return Signature(tuple(parameters))


def engine_roots() -> list[str]:
    """Directories of the installed engine package, in import order; empty when there is none."""
    spec = importlib.util.find_spec(ENGINE_PACKAGE)
    return list(spec.submodule_search_locations or ()) if spec else []


# Stands in for the engine's scheduler processes where a server runs on Ray; and what imports it.
_RAY_ACTOR, _RAY_ENGINE = "sglang.srt.ray.scheduler_actor", "sglang.srt.ray.engine"


def why_schedulers_load_no_plugins(
    roots: Sequence[str | Path], arguments: Sequence[str], imported: Collection[str]
) -> str | None:
    """Why the processes that will hold the model run without the plugin; None where they run with it.

    Args:
        roots: the engine package's directories.
        arguments: this process's command line.
        imported: names of the modules that it has imported.
    """
    if "--use-ray" not in arguments and _RAY_ENGINE not in imported:
        return None
    actor = module_file(_RAY_ACTOR, roots)
    if actor is None or "load_plugins" in actor.read_text(encoding="utf-8"):
        return None
    return (
        "THE SCHEDULERS WILL RUN UNPATCHED: on Ray (--use-ray, RayEngine) the engine runs them as actors, which load no "
        "plugins; write the change into the engine's tree instead (sglang-w4afp8 fork), or serve without Ray"
    )


def module_file(module: str, roots: Sequence[str | Path]) -> Path | None:
    """The source file that ``import module`` would run; None if there is none.

    Follows Python's order (in each directory a package with ``__init__.py``, then a module; directories without one are
    portions of a namespace package, as ``sglang.srt`` is). The import system's own finder needs the parents imported.
    """
    package, *parts = module.split(".")
    if package != ENGINE_PACKAGE or not parts:
        raise ValueError(f"module: is {module!r}, must be inside the package {ENGINE_PACKAGE!r}")
    search = [Path(root) for root in roots]
    for part in parts[:-1]:
        regular = next((folder / part for folder in search if (folder / part / "__init__.py").is_file()), None)
        search = [regular] if regular else [folder / part for folder in search if (folder / part).is_dir()]
    candidates = (folder / tail for folder in search for tail in (f"{parts[-1]}/__init__.py", f"{parts[-1]}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _definitions(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Statements that run when the body does, those inside ``if``, ``try`` and ``with`` included."""
    found: list[ast.stmt] = []
    for statement in body:
        found.append(statement)
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                found += _definitions(getattr(statement, block, ()))
        for handler in getattr(statement, "handlers", ()):
            found += _definitions(handler.body)
    return found


def find_functions(tree: ast.Module, attribute: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Definitions of ``name`` or ``Class.name`` in a module; more than one where the module defines it twice."""
    *classes, name = attribute.split(".")
    bodies: list[list[ast.stmt]] = [tree.body]
    for class_name in classes:
        bodies = [
            statement.body
            for body in bodies
            for statement in _definitions(body)
            if isinstance(statement, ast.ClassDef) and statement.name == class_name
        ]
    return [
        statement
        for body in bodies
        for statement in _definitions(body)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name
    ]


def in_tree_version(tree: ast.Module) -> str | None:
    """The version of ours that a fork's file says it carries."""
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
        if any(isinstance(t, ast.Name) and t.id == IN_TREE_MARKER for t in targets):
            value = statement.value  # type: ignore[attr-defined]
            return str(value.value) if isinstance(value, ast.Constant) else "unknown version"
    return None


def release(version: str) -> tuple[int, ...] | None:
    """The release numbers of a version; its development, local and post suffixes do not count. None if unreadable."""
    # Imported here because plugins are loaded before anyone has asked for it; the engine depends on it.
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release
    except InvalidVersion:
        return None


def version_within(version: str, first: str, last: str) -> bool:
    """Whether ``first <= version <= last`` by release numbers, so that 0.5.15.post1 counts as 0.5.15."""
    numbers, low, high = release(version), release(first), release(last)
    assert low is not None and high is not None
    return numbers is not None and low <= numbers <= high


# What every function of the ledger looks like in every published engine: attribute -> digest -> versions. Written by
# scripts/check_engine_versions.py from the wheels.
_CODE_FILE = Path(__file__).with_name("engine_code.json")


def _canonical(node: object) -> object:
    """A syntax tree as plain data that is the same on every Python: without positions, docstrings, annotations, or fields that
    only some versions have."""
    if isinstance(node, ast.AST):
        fields = {}
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment", "type_params", "kind", "ctx"):
                continue
            if (
                name == "body"
                and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and ast.get_docstring(node) is not None
            ):
                value = value[1:]
            plain = _canonical(value)
            if plain not in (None, []):
                fields[name] = plain
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [_canonical(entry) for entry in node]
    return node if node is None else repr(node)


def code_digest(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Digest of what a function does: formatting, comments, docstrings and annotations are no part of it."""
    return hashlib.sha256(json.dumps(_canonical(function), sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def known_code() -> dict[str, dict[str, list[str]]]:
    """Attribute -> digest -> versions of the engine that have the function so."""
    return json.loads(_CODE_FILE.read_text(encoding="utf-8"))


def _code_change(
    function: ast.FunctionDef | ast.AsyncFunctionDef, module: str, target: Target, version: str | None
) -> str | None:
    """What is said of a function whose code is not that of the published version; None where it is, or none is known."""
    known = {v: digest for digest, versions in known_code().get(target.attribute, {}).items() for v in versions}
    # A build of one's own is held against the releases that it calls itself after.
    numbers = release(version) if version is not None else None
    published = [version] if version in known else [v for v in known if release(v) == numbers] or [*known]
    if not published or code_digest(function) in {known[v] for v in published}:
        return None
    whose = f"sglang {' or '.join(published)}" if published != [*known] else "any published sglang"
    return f"{module}.{target.attribute}: its code is not that of {whose}"


@dataclass(frozen=True)
class TargetCheck:
    """What the guard found of one target.

    Attributes:
        module: where the target lives in this engine; None if nowhere that the ledger knows.
        problem: why the target must not be patched, with what was expected and found; None when it may.
        in_tree: version of ours that the engine's own file carries; None when it does not.
        changed: what is said where the function's code is not that of the published engine; None where it is.
    """

    module: str | None
    problem: str | None = None
    in_tree: str | None = None
    changed: str | None = None


def _check_function(tree: ast.Module, module: str, target: Target, version: str | None) -> TargetCheck:
    problem = _signature_problem(tree, module, target)
    if problem is not None:
        return TargetCheck(module, problem)
    (function,) = find_functions(tree, target.attribute)
    return TargetCheck(module, changed=_code_change(function, module, target, version))


def _signature_problem(tree: ast.Module, module: str, target: Target) -> str | None:
    where = f"{module}.{target.attribute}"
    found = find_functions(tree, target.attribute)
    if not found:
        return f"{where}: expected a function of that name, found none in the file"
    if len(found) > 1:
        lines = ", ".join(str(function.lineno) for function in found)
        return f"{where}: expected one definition, found {len(found)} (lines {lines})"
    function = found[0]
    if isinstance(function, ast.AsyncFunctionDef) or function.decorator_list:
        wrapped = "async" if isinstance(function, ast.AsyncFunctionDef) else ""
        wrapped += "".join(f" @{ast.unparse(decorator)}" for decorator in function.decorator_list)
        return f"{where}: expected a plain function, found one with {wrapped.strip()}"
    signature = signature_of(function)
    known = [parse_signature(text) for text in target.signatures]
    if signature not in known:
        return f"{where}: expected {' or '.join(map(str, known))}, found {signature}"
    return None


def check_target(target: Target, roots: Sequence[str | Path], version: str | None) -> TargetCheck:
    """Find one target in an engine and compare its signature with those that the ledger knows.

    Args:
        target: a ledger entry.
        roots: directories of the engine package.
        version: the engine's version: the module that the ledger names for it is tried first. The others follow,
            because 0.5.16.dev3 means "after 0.5.15" and may have the layout of either; None keeps the ledger's order.
    """
    homes = sorted(target.homes, key=lambda h: version is None or not version_within(version, h.first, h.last))
    for home in homes:
        path = module_file(home.module, roots)
        if path is None:
            continue
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except (OSError, SyntaxError, ValueError) as error:
            return TargetCheck(home.module, f"{home.module}: cannot be read ({error})")
        in_tree = in_tree_version(tree)
        if in_tree is not None and target.in_tree:
            return TargetCheck(home.module, in_tree=in_tree)
        return _check_function(tree, home.module, target, version)
    expected = " or ".join(home.module for home in homes)
    return TargetCheck(None, f"{target.attribute}: expected it in {expected}, found no such module")


def check_tree(
    patches: Iterable[Patch], roots: Sequence[str | Path], version: str | None
) -> dict[str, list[TargetCheck]]:
    """Check every target of every patch against one engine tree, installed or merely unpacked."""
    return {patch.name: [check_target(target, roots, version) for target in patch.targets] for patch in patches}
