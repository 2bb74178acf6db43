"""What becomes of each engine file. Every function here takes a file and returns its new bytes, or the same ones.

A file that already carries the change is recognised by its syntax tree, so a formatter may have been over it.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sglang_w4afp8 import __version__, guard
from sglang_w4afp8.fork.source import (
    Edit,
    ForkError,
    Source,
    add_keyword,
    add_parameter,
    bound_imports,
    defined,
    one_call,
    one_function,
    used,
)

_PACKAGE = Path(__file__).resolve().parents[1]
KERNELS = _PACKAGE / "kernels" / "ops" / "moe" / "ep_moe_kernels.py"
REFERENCE = _PACKAGE / "kernels" / "ops" / "moe" / "reference.py"

REQUANT = "fp8_per_token_to_per_tensor_quant_triton"
SILU = "silu_and_mul_masked_post_per_tensor_quant_fwd"
CHAIN = "cutlass_w4a8_moe_deepep_ll"
METHOD = "W4AFp8MoEMethod.apply_deepep_ll"
DISPATCH_OUTPUT = "DeepEPLLDispatchOutput"

# The engine's oldest releases run on this Python, so what is written must be valid there.
ENGINE_PYTHON = (3, 10)
# Line width of the engine's formatter (black's default).
_ENGINE_WIDTH = 88

# The block is found again by these two lines. The formatter leaves it alone, so that it stays comparable with ours.
_BEGIN = "# --- begin sglang-w4afp8"
_BEGIN_NOTE = ": written by `sglang-w4afp8 fork`, change it there ---"
_END = "# --- end sglang-w4afp8 ---"
_FORMAT_OFF, _FORMAT_ON = "# fmt: off", "# fmt: on"


@dataclass(frozen=True)
class OurKernels:
    """Our kernels module, as it goes into an engine file.

    Attributes:
        source: the module.
        statements: everything in it but its docstring and imports.
        imports: name -> (module, attribute) that these statements need.
    """

    source: Source

    @cached_property
    def statements(self) -> list[ast.stmt]:
        body = self.source.tree.body
        kept = body[1:] if ast.get_docstring(self.source.tree) is not None else body
        return [statement for statement in kept if not isinstance(statement, ast.Import | ast.ImportFrom)]

    @cached_property
    def names(self) -> set[str]:
        return {name for statement in self.statements for name in defined(statement)}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str | None]]:
        needed = {name for statement in self.statements for name in used(statement)}
        bound = dict(pair for statement in self.source.imports for pair in bound_imports(statement))
        found = {name: origin for name, origin in bound.items() if name.partition(".")[0] in needed}
        for name, (module, _) in found.items():
            if module.partition(".")[0] not in {*sys.stdlib_module_names, "torch", "triton"} or module == "__future__":
                raise ForkError(f"{self.source.name}: {name} comes from {module}, which an engine file must not import")
        return found

    @cached_property
    def text(self) -> str:
        """The block, from the begin to the end line."""
        source = self.source
        cuts = [source.removal(statement) for statement in source.imports]
        docstring = ast.get_docstring(source.tree) or ""
        if docstring:
            cuts.append(source.removal(source.tree.body[0]))
        body = source.edited(cuts).decode().strip("\n")
        note = "".join(f"# {line}".rstrip() + "\n" for line in docstring.splitlines()) + "\n"
        marker = f'{guard.IN_TREE_MARKER} = "{__version__}"'
        return f"{_BEGIN}{_BEGIN_NOTE}\n{_FORMAT_OFF}\n{note}{marker}\n\n{body}\n{_FORMAT_ON}\n{_END}\n"


def our_kernels() -> OurKernels:
    """Our kernels module, read anew.

    Raises:
        ForkError: it holds something that cannot go into an engine file.
    """
    ours = OurKernels(Source(KERNELS.name, KERNELS.read_bytes()))
    for statement in ours.statements:
        if not defined(statement):
            raise ForkError(
                f"{KERNELS.name}: line {statement.lineno}: a statement that defines nothing cannot go in-tree"
            )
    return ours


def _block(source: Source) -> tuple[int, int] | None:
    """Where our block stands in an engine file, whole lines."""
    begins = [number for number, line in enumerate(source.lines, 1) if line.startswith(_BEGIN.encode())]
    ends = [number for number, line in enumerate(source.lines, 1) if line.startswith(_END.encode())]
    if not begins and not ends:
        return None
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        raise ForkError(
            f"{source.name}: expected one pair of lines {_BEGIN!r} and {_END!r}, found {len(begins)} and {len(ends)}"
        )
    return source.at(begins[0]), source.at(ends[0] + 1)


def _inside(source: Source, block: tuple[int, int] | None, statement: ast.stmt) -> bool:
    return block is not None and block[0] <= source.start(statement) < block[1]


def _is_marker(statement: ast.stmt) -> bool:
    return guard.IN_TREE_MARKER in defined(statement)


def kernels_file(source: Source, ours: OurKernels) -> bytes:
    """The engine's Triton kernels with ours in place of the requant and the SiLU kernel, their helpers included.

    Raises:
        ForkError: a function to replace is not there once, or a name of ours means something else in this file.
    """
    block = _block(source)
    if block is None and guard.in_tree_version(source.tree) is not None:
        raise ForkError(f"{source.name}: carries {guard.IN_TREE_MARKER} without the lines {_BEGIN!r} and {_END!r}")
    theirs = [statement for statement in source.tree.body if not _inside(source, block, statement)]
    removed = [statement for statement in theirs if defined(statement) & ours.names]
    if block is None:
        for name in (REQUANT, SILU):
            one_function(source, name)
    removed += _orphans(theirs, removed)
    kept = [statement for statement in theirs if statement not in removed]
    replaced = ours.names & {name for statement in removed for name in defined(statement)} - {REQUANT, SILU}
    for statement in kept:
        shared = used(statement) & replaced | {name for name, _ in bound_imports(statement)} & ours.names
        if shared:
            who = ", ".join(sorted(defined(statement))) or f"line {statement.lineno}"
            raise ForkError(
                f"{source.name}: {who}: expected nothing but what is replaced to know {', '.join(sorted(shared))}, "
                "which would become ours"
            )

    edits = [source.removal(statement) for statement in removed]
    if block is None:
        first = min(edit.start for edit in edits)
        # One edit for both, as they begin at the same byte.
        (taken,) = (edit for edit in edits if edit.start == first)
        edits.remove(taken)
        separator = b"\n\n" if taken.end < len(source.data) else b""
        edits.append(Edit(first, taken.end, ours.text.encode() + separator))
    else:
        inside = [statement for statement in source.tree.body if _inside(source, block, statement)]
        written = [statement for statement in inside if not _is_marker(statement)]
        current = guard.in_tree_version(source.tree) == __version__
        alike = [ast.dump(s) for s in written] == [ast.dump(s) for s in ours.statements]
        if not (current and alike):
            edits.append(Edit(*block, ours.text.encode()))
            removed += written
    edits += _import_edits(source, ours, removed, kept)
    data = source.edited(edits)
    if edits and source.data.endswith(b"\n"):
        data = data.rstrip(b"\r\n") + source.newline  # the file may have ended with what was taken out
    return _checked(source, data)


def _orphans(theirs: list[ast.stmt], removed: list[ast.stmt]) -> list[ast.stmt]:
    """Private definitions that only what is removed has used: kernels and constants behind the replaced functions."""
    orphans: list[ast.stmt] = []
    while True:
        gone = [*removed, *orphans]
        left = [statement for statement in theirs if statement not in gone]
        wanted = {name for statement in gone for name in used(statement)}
        more = [
            statement
            for statement in left
            if (names := defined(statement))
            and all(name.startswith("_") and not name.startswith("__") for name in names)
            and names <= wanted
            and not any(names & used(other) for other in left if other is not statement)
        ]
        if not more:
            return orphans
        orphans += more


def _import_edits(source: Source, ours: OurKernels, removed: list[ast.stmt], kept: list[ast.stmt]) -> list[Edit]:
    """Imports that our block needs and the file lacks; and those that nothing needs any longer."""
    theirs = dict(pair for statement in source.imports for pair in bound_imports(statement))
    new: dict[tuple[str, bool], list[str]] = {}
    for name, origin in ours.imports.items():
        if name not in theirs:
            module, attribute = origin
            what = module if attribute is None else attribute
            text = what if name == what else f"{what} as {name}"
            new.setdefault((module, attribute is not None), []).append(text)
        elif theirs[name] != origin:
            raise ForkError(f"{source.name}: {name} is {_origin(theirs[name])}, and ours is {_origin(origin)}")
    edits = [_new_import(source, module, is_from, sorted(names)) for (module, is_from), names in new.items()]
    mentioned = {name for statement in removed for name in used(statement)}
    needed = {name for statement in kept for name in used(statement)} | set(ours.imports)
    for statement in source.imports:
        bound = [name for name, _ in bound_imports(statement)]
        if bound and all(name in mentioned and name not in needed for name in bound):
            start, end = source.start(statement), source.at((statement.end_lineno or 0) + 1)
            edits.append(Edit(start, end, b""))
    return _merged(edits)


def _merged(edits: list[Edit]) -> list[Edit]:
    """Insertions at one place in the order that the engine's import sorter wants."""
    places: dict[tuple[int, int], list[bytes]] = {}
    for edit in edits:
        places.setdefault((edit.start, edit.end), []).append(edit.text)
    return [
        Edit(start, end, b"".join(sorted(texts, key=lambda text: (text.startswith(b"from"), text))))
        for (start, end), texts in places.items()
    ]


def _origin(origin: tuple[str, str | None]) -> str:
    return origin[0] if origin[1] is None else f"{origin[1]} of {origin[0]}"


def _new_import(source: Source, module: str, is_from: bool, names: list[str]) -> Edit:
    """An import line where isort would put it among the file's first imports: plain ones first, each by module."""
    line = f"from {module} import {', '.join(names)}\n" if is_from else f"import {', '.join(names)}\n"
    leading: list[ast.Import | ast.ImportFrom] = []
    for statement in source.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            if getattr(statement, "module", "") != "__future__":
                leading.append(statement)
        elif leading:
            break
    if not leading:
        raise ForkError(f"{source.name}: expected imports at the top, found none")

    def order(statement: ast.Import | ast.ImportFrom) -> tuple[bool, str]:
        plain = isinstance(statement, ast.Import)
        return not plain, statement.names[0].name if plain else statement.module or ""

    standard = [s for s in leading if order(s)[1].partition(".")[0] in sys.stdlib_module_names]
    before = [s for s in standard if order(s) < (is_from, module)]
    at = source.at((before[-1].end_lineno or 0) + 1) if before else source.start((standard or leading)[0])
    return Edit(at, at, line.encode())


def _marker_edit(source: Source, why: str) -> list[Edit]:
    """The module constant that says the file carries our change, after the imports; its version brought up to date."""
    for statement in source.tree.body:
        if _is_marker(statement):
            value = statement.value  # type: ignore[attr-defined]
            if isinstance(value, ast.Constant) and value.value == __version__:
                return []
            return [Edit(source.start(value), source.end(value), f'"{__version__}"'.encode())]
    if not source.imports:
        raise ForkError(f"{source.name}: expected imports at the top, found none")
    at = source.at((source.imports[-1].end_lineno or 0) + 1)
    return [Edit(at, at, f'\n# {why}\n{guard.IN_TREE_MARKER} = "{__version__}"\n'.encode())]


def _keyword_edit(source: Source, function: ast.FunctionDef, callee: str, keyword: str) -> list[Edit]:
    """``keyword=expected_m`` in the one call of ``callee``; nothing where it is there already."""
    call = one_call(source, function, callee)
    for existing in call.keywords:
        if existing.arg == keyword:
            if isinstance(existing.value, ast.Name) and existing.value.id == "expected_m":
                return []
            raise ForkError(
                f"{source.name}: {function.name}: expected {keyword}=expected_m in the call of {callee}, "
                f"found {keyword}={ast.unparse(existing.value)}"
            )
    if not (call.args or call.keywords) or any(k.arg is None for k in call.keywords):
        raise ForkError(f"{source.name}: {function.name}: expected plain arguments in the call of {callee}")
    return [add_keyword(source, call, f"{keyword}=expected_m")]


def chain_file(source: Source) -> bytes:
    """The low-latency chain with ``expected_m`` taken and handed to the requant and the SiLU kernel.

    Raises:
        ForkError: the function, its arguments or its calls are not as known.
    """
    function = one_function(source, CHAIN)
    edits = _marker_edit(source, "expected_m reaches every step below; the plugin stands down where it finds this.")
    if "expected_m" not in {argument.arg for argument in function.args.args}:
        optional = any(name == "Optional" for statement in source.imports for name, _ in bound_imports(statement))
        annotation = "Optional[int]" if optional else "int | None"
        edits.append(add_parameter(source, function, f"expected_m: {annotation} = None"))
    edits += _keyword_edit(source, function, REQUANT, "expected_rows")
    edits += _keyword_edit(source, function, SILU, "expected_rows")
    return _checked(source, source.edited(edits))


def method_file(source: Source) -> bytes:
    """The caller with the dispatcher's ``expected_m`` kept and handed on.

    Raises:
        ForkError: the method, its unpacking of the dispatch output, or its call is not as known.
    """
    function = one_function(source, METHOD)
    unpacked = [
        statement
        for statement in ast.walk(function)
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Name)
        and statement.value.id == "dispatch_output"
        and isinstance(statement.targets[0], ast.Tuple)
    ]
    if len(unpacked) != 1:
        raise ForkError(f"{source.name}: {METHOD}: expected one unpacking of dispatch_output, found {len(unpacked)}")
    (statement,) = unpacked
    target = statement.targets[0]
    assert isinstance(target, ast.Tuple)
    names = [node.id if isinstance(node, ast.Name) else ast.unparse(node) for node in target.elts]
    if len(names) != 6 or names[4] != "masked_m" or names[5] not in ("_", "expected_m"):
        raise ForkError(
            f"{source.name}: {METHOD}: expected dispatch_output to give six values, masked_m and _ (or expected_m) last, "
            f"found {', '.join(names)}"
        )
    edits = _marker_edit(
        source, "The dispatcher's expected_m is handed on; the plugin stands down where it finds this."
    )
    if names[5] == "_":
        edits.append(_unpack_edit(source, statement, target))
    edits += _keyword_edit(source, function, CHAIN, "expected_m")
    return _checked(source, source.edited(edits))


def _unpack_edit(source: Source, statement: ast.Assign, target: ast.Tuple) -> Edit:
    last = target.elts[5]
    plain = Edit(source.start(last), source.end(last), b"expected_m")
    grown = len(source.line_of(source.start(statement))) + len("expected_m") - len("_")
    if statement.lineno != statement.end_lineno or grown <= _ENGINE_WIDTH:
        return plain
    indent = " " * statement.col_offset
    text = source.data[source.start(target) : source.start(last)].decode() + "expected_m"
    text += f" = (\n{indent}    dispatch_output\n{indent})"
    return Edit(source.start(statement), source.end(statement), text.encode())


def check_dispatch_output(source: Source) -> None:
    """The dispatcher's output ends with ``masked_m, expected_m``.

    Raises:
        ForkError: it does not.
    """
    classes = [s for s in source.tree.body if isinstance(s, ast.ClassDef) and s.name == DISPATCH_OUTPUT]
    if len(classes) != 1:
        raise ForkError(f"{source.name}: {DISPATCH_OUTPUT}: expected one class of that name, found {len(classes)}")
    fields = [s.target.id for s in classes[0].body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    if len(fields) != 6 or fields[4:] != ["masked_m", "expected_m"]:
        raise ForkError(
            f"{source.name}: {DISPATCH_OUTPUT}: expected six fields, masked_m and expected_m last, "
            f"found {', '.join(fields)}"
        )


def _checked(source: Source, data: bytes) -> bytes:
    """``data`` after a look at what was made: it must be valid on every Python that the engine runs on."""
    if data == source.data:
        return data
    try:
        ast.parse(data, filename=source.name, feature_version=ENGINE_PYTHON)
        compile(data, source.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ForkError(f"{source.name}: what would be written does not compile ({error})") from error
    return data
