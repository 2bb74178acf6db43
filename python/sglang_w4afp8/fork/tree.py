"""An engine tree: finding its files, planning every change before one is made, writing all or nothing, taking back.

What ``--revert`` needs is kept in ``.sglang_w4afp8_fork`` in the directory that was named: the files as they were, and
hashes of what was written. Git ignores it (it holds a ``.gitignore`` of its own): a fork commits the change, and its history
is the record.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sglang_w4afp8 import __version__, guard, plugin
from sglang_w4afp8.fork import edits, suites
from sglang_w4afp8.fork.source import ForkError, Source, same

RECORD_FOLDER = ".sglang_w4afp8_fork"
_MANIFEST = "manifest.json"
_ORIGINALS = "originals"
# Ending of what is written beside a file before it takes its place.
_STAGED = ".tmp"

_DISPATCHER = "sglang.srt.layers.moe.token_dispatcher.deepep"


@dataclass(frozen=True)
class EngineTree:
    """A checkout of the engine, or its package somewhere.

    Attributes:
        root: what the user named; everything written is below it, and paths are shown relative to it.
        package: the directory ``sglang`` in it.
        version: the engine's; None in a checkout that was never built.
        checkout: whether it has the engine's tests.
    """

    root: Path
    package: Path
    version: str | None
    checkout: bool

    def shown(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


@dataclass(frozen=True)
class Change:
    """One file of a plan. ``before`` is None where there is no such file."""

    path: Path
    before: bytes | None
    after: bytes

    @property
    def needed(self) -> bool:
        """Whether the file must be written: it is not what it would become, formatting and comments aside."""
        if self.before is None:
            return True
        return self.before != self.after and not _same_code(self.before, self.after)


@functools.lru_cache(maxsize=64)
def _same_code(first: bytes, second: bytes) -> bool:
    try:
        return same(ast.parse(first), ast.parse(second))
    except (SyntaxError, ValueError):
        return False


def _targets() -> dict[str, plugin.Target]:
    """The ledger's targets that go in-tree; every other one stays a matter of the plugin."""
    return {target.attribute: target for patch in plugin.LEDGER for target in patch.targets if target.in_tree}


def find(root: Path) -> EngineTree:
    """The engine in ``root``: a checkout, the package directory, or a directory that holds it (site-packages).

    Raises:
        ForkError: there is no engine.
    """
    root = root.resolve()
    package = _package(root)
    if package is None:
        raise ForkError(f"{root}: expected a checkout of sglang or its package, found no srt/layers in it")
    checkout = package == root / "python" / "sglang" and (root / "test").is_dir()
    return EngineTree(root, package, _version(package), checkout)


def _package(root: Path) -> Path | None:
    packages = (root / "python" / "sglang", root / "sglang", root)
    return next((package for package in packages if (package / "srt" / "layers").is_dir()), None)


def _version(package: Path) -> str | None:
    for name in ("_version.py", "version.py"):
        path = package / name
        if path.is_file():
            for statement in ast.parse(path.read_bytes()).body:
                names = [ast.unparse(target) for target in getattr(statement, "targets", ())]
                if "__version__" in names and isinstance(statement.value, ast.Constant):  # type: ignore[attr-defined]
                    return str(statement.value.value)  # type: ignore[attr-defined]
    installed = sorted(package.parent.glob("sglang-*.dist-info"))
    return installed[0].name.split("-")[1].removesuffix(".dist") if len(installed) == 1 else None


def _read(tree: EngineTree, module: str) -> tuple[Path, Source]:
    path = guard.module_file(module, [tree.package])
    if path is None:
        raise ForkError(f"{module}: expected this module in {tree.package}, found none")
    _refuse_links(tree, path)
    return path, Source(module, path.read_bytes())


def _refuse_links(tree: EngineTree, path: Path) -> None:
    """Refuse a path below the tree that a symbolic link leads somewhere else from: nothing outside of it is ever touched."""
    for part in (path, *path.parents):
        if part == tree.root:
            break
        if part.is_symlink():
            raise ForkError(f"{tree.shown(part)}: is a symbolic link; name the tree that it leads to")


def _check_version(tree: EngineTree, any_version: bool) -> None:
    if tree.version is None or any_version:
        return
    first, last = plugin.ENGINES
    if guard.release(tree.version) == (0, 0, 0):  # what a checkout without tags calls itself
        return
    if not guard.version_within(tree.version, first, last):
        raise ForkError(
            f"sglang {tree.version}: unknown to this release, which knows {first} - {last}; --any-version goes by the "
            "functions alone"
        )


def _check_targets(tree: EngineTree) -> None:
    """Everything in the ledger's targets that differs, in one message."""
    checks = [guard.check_target(target, [tree.package], tree.version) for target in _targets().values()]
    problems = [check.problem for check in checks if check.problem]
    if problems:
        raise ForkError("; ".join(problems))


def _kernels_module(tree: EngineTree) -> str:
    module = guard.check_target(_targets()[edits.REQUANT], [tree.package], tree.version).module
    assert module is not None
    return module


def engine_modules() -> tuple[str, ...]:
    """Every module of any supported engine that the fork reads."""
    return (*dict.fromkeys(home.module for target in _targets().values() for home in target.homes), _DISPATCHER)


def plan(
    tree: EngineTree,
    tests: bool = True,
    any_version: bool = False,
    originals: Mapping[Path, bytes | None] | None = None,
) -> list[Change]:
    """What every file of the tree becomes, needed or not. Nothing is written.

    Args:
        tree: the engine.
        tests: in a checkout, the registered tests too.
        any_version: go by the functions alone, whatever the engine's version.
        originals: bytes to start from instead of those on disk; ``Change.before`` stays what is on disk.

    Raises:
        ForkError: the tree is not as this release knows it; the message names what differs.
    """
    _check_version(tree, any_version)
    _check_targets(tree)
    kernels_module = _kernels_module(tree)
    edits.check_dispatch_output(_read(tree, _DISPATCHER)[1])
    ours = edits.our_kernels()
    writers: dict[str, Callable[[Source], bytes]] = {
        kernels_module: lambda source: edits.kernels_file(source, ours),
        _module_of(edits.CHAIN): edits.chain_file,
        _module_of(edits.METHOD): edits.method_file,
    }
    changes = []
    for module, write in writers.items():
        path, source = _read(tree, module)
        base = (originals or {}).get(path)
        changes.append(Change(path, source.data, write(source if base is None else Source(module, base))))
    if tests and tree.checkout:
        changes += _test_changes(tree, kernels_module)
    return changes


def _module_of(attribute: str) -> str:
    return _targets()[attribute].homes[0].module


def _test_changes(tree: EngineTree, kernels_module: str) -> list[Change]:
    found = suites.suites()
    runner = tree.root / suites.RUNNER
    if not found or not runner.is_file():
        return []
    lanes = suites.lanes_of(runner.read_bytes())
    changes = []
    for suite in found:
        path = tree.root / "test" / "registered" / suite.path
        _refuse_links(tree, path)
        before = path.read_bytes() if path.is_file() else None
        changes.append(Change(path, before, suites.suite_file(suite, kernels_module, lanes)))
    return changes


def _written_paths(tree: EngineTree) -> list[Path]:
    """Every file of the engine that a run may write, as far as the tree has them."""
    modules = {home.module for target in _targets().values() for home in target.homes}
    found = [guard.module_file(module, [tree.package]) for module in sorted(modules)]
    paths = [path for path in found if path is not None]
    if tree.checkout:
        paths += [tree.root / "test" / "registered" / suite.path for suite in suites.suites()]
    for path in paths:
        _refuse_links(tree, path)
    return paths


def in_tree_versions(tree: EngineTree) -> dict[str, str | None]:
    """Engine file -> the version of ours that it says it carries."""
    modules = (_kernels_module(tree), _module_of(edits.CHAIN), _module_of(edits.METHOD))
    sources = [_read(tree, module) for module in modules]
    return {tree.shown(path): guard.in_tree_version(source.tree) for path, source in sources}


# --- what was replaced ---


@dataclass(frozen=True)
class Entry:
    """What the record knows of one file.

    Attributes:
        before: hash of the file before our first change; None where there was none.
        after: hash of what we wrote, or were about to write when a run was killed.
        previous: hash of what an earlier run of ours had left there, while it is being replaced; None otherwise.
    """

    before: str | None
    after: str
    previous: str | None = None

    def ours(self, digest: str | None) -> bool:
        """Whether we wrote the file that has this hash."""
        return digest is not None and digest in (self.after, self.previous)


class Record:
    """The files as they were before the first change, inside the tree."""

    def __init__(self, tree: EngineTree) -> None:
        self.tree = tree
        self.folder = tree.root / RECORD_FOLDER
        manifest = self.folder / _MANIFEST
        for path in (manifest, self.folder / _ORIGINALS, self.folder / ".gitignore"):
            _refuse_links(tree, path)
        self.entries: dict[str, Entry] = {}
        if manifest.is_file():
            try:
                data = json.loads(manifest.read_text())
                self.entries = {name: Entry(**entry) for name, entry in data["files"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ForkError(f"{tree.shown(manifest)}: cannot be read ({error})") from error
        for name in self.entries:
            parts = PurePosixPath(name).parts
            # A manifest is a file like any other, and somebody else may have written it.
            if (
                not parts
                or PurePosixPath(name).is_absolute()
                or ".." in parts
                or PurePosixPath(name).as_posix() != name
            ):
                raise ForkError(f"{tree.shown(manifest)}: names {name!r}, must be the path of a file below the tree")
            for path in (tree.root / name, self.folder / _ORIGINALS / name):
                _refuse_links(tree, path)

    def original(self, name: str) -> bytes | None:
        """The recorded bytes of a file; None where there was none.

        Raises:
            ForkError: they are not those that were recorded.
        """
        entry = self.entries[name]
        if entry.before is None:
            return None
        path = self.folder / _ORIGINALS / name
        data = path.read_bytes() if path.is_file() else b""
        if _hash(data) != entry.before:
            raise ForkError(f"{self.tree.shown(path)}: is not what was recorded")
        return data

    def written(self, entries: Mapping[str, tuple[bytes | None, bytes]]) -> dict[Path, bytes | None]:
        """Files of a record that holds ``entries``: name -> (before, after).

        The manifest comes last. Until :meth:`settle` it also says what of ours stood in a file's place.
        """
        files: dict[Path, bytes | None] = {self.folder / ".gitignore": b"*\n"}
        recorded: dict[str, Entry] = {}
        for name, (before, after) in entries.items():
            known, current = self.entries.get(name), _current(self.tree.root / name)
            digest = None if current is None else _hash(current)
            replaced = digest if known is not None and known.ours(digest) and digest != _hash(after) else None
            recorded[name] = Entry(None if before is None else _hash(before), _hash(after), replaced)
            if before is not None:
                files[self.folder / _ORIGINALS / name] = before
        files[self.folder / _MANIFEST] = _manifest(recorded)
        return files

    def settle(self) -> None:
        """Say that every file is what was to be written; nothing where the manifest says so already."""
        if any(entry.previous is not None for entry in self.entries.values()):
            settled = {name: Entry(entry.before, entry.after) for name, entry in self.entries.items()}
            _write_all({self.folder / _MANIFEST: _manifest(settled)})


def _manifest(entries: Mapping[str, Entry]) -> bytes:
    files = {
        name: {field: value for field, value in vars(entry).items() if field != "previous" or value is not None}
        for name, entry in sorted(entries.items())
    }
    return f"{json.dumps({'version': __version__, 'files': files}, indent=1)}\n".encode()


def _refuse_record_elsewhere(tree: EngineTree) -> None:
    """Refuse where the same package was patched under another TREE, as ``site-packages`` and ``site-packages/sglang``.

    That record has the engine's own files, and may have tests outside of the tree named now.
    """
    for root in (tree.package, *tree.package.parents[:2]):
        folder = root / RECORD_FOLDER
        if root != tree.root and _package(root) == tree.package and (folder / _MANIFEST).is_file():
            raise ForkError(f"{tree.root}: the record of what was replaced is {folder}: run this with {root} as TREE")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _current(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _recorded_originals(tree: EngineTree, record: Record) -> tuple[dict[Path, bytes | None], list[str]]:
    """Originals of the files that are as the record left them, and the names of those changed since."""
    originals: dict[Path, bytes | None] = {}
    changed = []
    for name, entry in record.entries.items():
        current = _current(tree.root / name)
        digest = None if current is None else _hash(current)
        if entry.ours(digest):
            originals[tree.root / name] = record.original(name)
        elif digest != entry.before:
            changed.append(name)
    return originals, changed


# --- applying and taking back ---


def apply(tree: EngineTree, tests: bool = True, any_version: bool = False) -> list[Change]:
    """Write the change, all files or none, and return the changes made (none where the tree has it already).

    Raises:
        ForkError: the tree is not as known, or a file that must be written was changed since we last wrote it, or the
            record was made under another name of the tree.
        OSError: a file cannot be written; those written before it are as they were.
    """
    record = Record(tree)
    _discard_leftovers(tree, record)
    originals, changed = _recorded_originals(tree, record)
    # First as the files are: what somebody changed since may carry the change all the same.
    changes = [change for change in plan(tree, tests, any_version) if change.needed]
    if not changes:
        record.settle()
        return []
    if not record.entries:
        _refuse_record_elsewhere(tree)
    if changed:
        raise ForkError(
            f"{', '.join(changed)}: changed since it was written, so --revert could not restore what was there before. "
            f"Delete {RECORD_FOLDER} to go on from the files as they are"
        )
    if originals:
        changes = [change for change in plan(tree, tests, any_version, originals) if change.needed]
    entries: dict[str, tuple[bytes | None, bytes]] = {}
    for name in record.entries:
        path = tree.root / name
        if path in originals:
            entries[name] = (originals[path], path.read_bytes())
    for change in changes:
        name = tree.shown(change.path)
        before = originals.get(change.path, change.before)
        entries[name] = (before, change.after)
    # The record first: whatever happens after it, the originals are on disk, and the next run knows every state between.
    _write_all({**record.written(entries), **{change.path: change.after for change in changes}})
    Record(tree).settle()
    return changes


def revert(tree: EngineTree) -> list[Path]:
    """Put every recorded file back, byte for byte, and return those that were.

    Raises:
        ForkError: there is no record here, or a file was changed since; nothing was touched.
    """
    record = Record(tree)
    _discard_leftovers(tree, record)
    if not record.entries:
        _refuse_record_elsewhere(tree)
        carried = [name for name, version in in_tree_versions(tree).items() if version is not None]
        raise ForkError(
            f"{tree.root}: no record of what was replaced ({RECORD_FOLDER} is missing; it is never committed)"
            + (
                f", and {', '.join(carried)} carry the change: use git"
                if carried
                else ", and nothing carries the change"
            )
        )
    originals, changed = _recorded_originals(tree, record)
    if changed:
        raise ForkError(f"{', '.join(changed)}: changed since it was written, nothing reverted; use git")
    _write_all(originals)
    for path, data in originals.items():
        if data is None:
            _prune(path.parent, tree.root)
    # The manifest last: without it the rest of the record says nothing.
    shutil.rmtree(record.folder / _ORIGINALS, ignore_errors=True)
    shutil.rmtree(record.folder)
    return list(originals)


def _discard_leftovers(tree: EngineTree, record: Record) -> None:
    """Remove what a run that was killed had staged beside its targets, the record's own included."""
    names = {*record.entries, *(tree.shown(path) for path in _written_paths(tree))}
    targets = [tree.root / name for name in names]
    targets += [
        record.folder / _MANIFEST,
        record.folder / ".gitignore",
        *(record.folder / _ORIGINALS / name for name in names),
    ]
    for target in targets:
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*{_STAGED}"):
            _discard(leftover)


def _prune(folder: Path, root: Path) -> None:
    """Remove directories that became empty; those of an earlier file may be gone."""
    while folder != root and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _write_all(files: Mapping[Path, bytes | None]) -> None:
    """Write or (None) delete every file, or leave all as they were.

    Everything is first written beside its target, so that only renames are left to fail.
    """
    staged: dict[Path, Path | None] = {}
    before: dict[Path, bytes | None] = {}
    made: list[Path] = []
    try:
        for path, data in files.items():
            made += [folder for folder in reversed((path.parent, *path.parent.parents)) if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            staged[path] = None if data is None else _staged(path, data)
        for path, temporary in staged.items():
            before[path] = _current(path)
            _put(path, temporary)
    except BaseException:
        # What is raised is the cause. Nothing here may hide it, but for a file that cannot be put back.
        try:
            for path, data in before.items():
                if _current(path) != data:
                    _put(path, None if data is None else _staged(path, data))
        finally:
            for temporary in staged.values():
                if temporary is not None:
                    _discard(temporary)
            for folder in reversed(made):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise


def _staged(path: Path, data: bytes) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_STAGED, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if path.exists():
            shutil.copymode(path, temporary)
        else:
            temporary.chmod(0o644)  # mkstemp's own mode is for secrets
    except BaseException:
        _discard(temporary)
        raise
    return temporary


def _discard(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def _put(path: Path, temporary: Path | None) -> None:
    if temporary is None:
        path.unlink(missing_ok=True)
    else:
        os.replace(temporary, path)
