"""A Python file as bytes and syntax tree: where a statement stands, and edits that leave every other byte alone."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sglang_w4afp8 import guard

_BLANK_LINES = re.compile(rb"(?:[ \t]*\r?\n)*")


class ForkError(Exception):
    """The tree cannot be changed as asked, and nothing was; the message names what differs."""


@dataclass(frozen=True)
class Edit:
    """Bytes ``start`` to ``end`` of a file become ``text``."""

    start: int
    end: int
    text: bytes


class Source:
    """One Python file.

    Args:
        name: what messages call it.
        data: its bytes.

    Attributes:
        tree: its syntax tree.
        lines: its lines with their ends.

    Raises:
        ForkError: it does not parse.
    """

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.data = data
        try:
            self.tree = ast.parse(data, filename=name)
        except (SyntaxError, ValueError) as error:
            raise ForkError(f"{name}: cannot be parsed ({error})") from error
        if b"\r" in data.replace(b"\r\n", b""):
            raise ForkError(f"{name}: has carriage returns that end no line")
        # Not bytes.splitlines, which also cuts at form feeds; the parser does not.
        *whole, rest = data.split(b"\n")
        self.lines = [line + b"\n" for line in whole] + [rest]
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    @property
    def newline(self) -> bytes:
        return b"\r\n" if b"\r\n" in self.data else b"\n"

    def at(self, line: int, column: int = 0) -> int:
        """Byte offset of a syntax tree's position (lines from 1, columns in bytes)."""
        return self._starts[line - 1] + column

    def start(self, node: ast.expr | ast.stmt | ast.arg) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.arg) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.end_lineno, node.end_col_offset)

    def line_of(self, offset: int) -> bytes:
        """The whole line that a byte stands in, without its end."""
        first = self.data.rfind(b"\n", 0, offset) + 1
        return self.data[first:].split(b"\n", 1)[0].rstrip(b"\r")

    def span(self, statement: ast.stmt) -> tuple[int, int]:
        """A top-level statement with its decorators, the comment block that touches it, and the end of its last line."""
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        while first > 1 and self.lines[first - 2].startswith(b"#"):
            first -= 1
        assert statement.end_lineno is not None
        return self.at(first), self.at(statement.end_lineno + 1)

    def removal(self, statement: ast.stmt) -> Edit:
        """Take a top-level statement out, with the blank lines that follow it."""
        start, end = self.span(statement)
        blank = _BLANK_LINES.match(self.data, end)
        return Edit(start, blank.end() if blank else end, b"")

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """The file's bytes with edits made; they must not overlap. Text is given with plain line ends."""
        parts: list[bytes] = []
        at = 0
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
            assert edit.start >= at, f"{self.name}: overlapping edits"
            parts += [self.data[at : edit.start], edit.text.replace(b"\n", self.newline)]
            at = edit.end
        return b"".join([*parts, self.data[at:]])

    @functools.cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Import statements at the top level."""
        return [statement for statement in self.tree.body if isinstance(statement, ast.Import | ast.ImportFrom)]


def defined(statement: ast.stmt) -> set[str]:
    """Names that a statement binds in its own scope (imports aside)."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


# A statement is asked many times while the definitions that only a removed one uses are found.
@functools.lru_cache(maxsize=4096)
def used(node: ast.AST) -> frozenset[str]:
    """Names that a piece of code mentions, its own locals included."""
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            names.add(child.id)
        elif isinstance(child, ast.Global):
            names.update(child.names)
    return frozenset(names)


def bound_imports(statement: ast.stmt) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """``(name, (module, attribute))`` that an import binds; the attribute is None for a module."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield (alias.asname or alias.name, (alias.name, None))
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield (alias.asname or alias.name, ("." * statement.level + (statement.module or ""), alias.name))


def same(one: ast.AST, other: ast.AST) -> bool:
    """Whether two pieces of code are the same but for formatting and comments."""
    return ast.dump(one) == ast.dump(other)


def one_function(source: Source, attribute: str) -> ast.FunctionDef:
    """The one plain definition of ``name`` or ``Class.name``.

    Raises:
        ForkError: there is none, or more than one.
    """
    found = guard.find_functions(source.tree, attribute)
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef):
        raise ForkError(f"{source.name}: {attribute}: expected one plain definition, found {len(found)}")
    return found[0]


def one_call(source: Source, function: ast.FunctionDef, name: str) -> ast.Call:
    """The one call of ``name`` inside a function.

    Raises:
        ForkError: there is none, or more than one.
    """
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    if len(calls) != 1:
        raise ForkError(f"{source.name}: {function.name}: expected one call of {name}, found {len(calls)}")
    return calls[0]


def _appended(source: Source, last: int, end: int, column: int, multi_line: bool, text: str) -> Edit:
    """One more item of a comma-separated list whose last item ends at ``last`` and which closes before ``end``."""
    between = source.data[last:end]
    if between.lstrip().startswith(b","):
        last += between.index(b",") + 1
        lead, tail = (f"\n{' ' * column}", ",") if multi_line else (" ", "")
        return Edit(last, last, f"{lead}{text}{tail}".encode())
    return Edit(last, last, f", {text}".encode())


def add_parameter(source: Source, function: ast.FunctionDef, text: str) -> Edit:
    """One more parameter with a default, after the last one.

    Raises:
        ForkError: the function takes ``*``, keyword-only or ``**`` arguments, behind which it cannot go.
    """
    arguments = function.args
    if arguments.vararg or arguments.kwonlyargs or arguments.kwarg or not arguments.args:
        raise ForkError(
            f"{source.name}: {function.name}: expected plain arguments, found {guard.signature_of(function)}"
        )
    last_argument = arguments.args[-1]
    last = max(source.end(last_argument), *(source.end(default) for default in arguments.defaults), 0)
    own_line = last_argument.lineno != function.lineno
    return _appended(source, last, source.start(function.body[0]), last_argument.col_offset, own_line, text)


def add_keyword(source: Source, call: ast.Call, text: str) -> Edit:
    """One more keyword argument, after the last argument of a call."""
    items: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
    last = max(items, key=source.end)
    line = source.line_of(source.start(last))
    column = len(line) - len(line.lstrip())
    return _appended(source, source.end(last), source.end(call), column, last.lineno != call.lineno, text)
