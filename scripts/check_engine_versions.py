#!/usr/bin/env python3
"""Check every supported engine version against the ledger and the fork patcher, from its wheel, importing nothing of it.

    python scripts/check_engine_versions.py             # check, and compare with docs/engine_versions.json
    python scripts/check_engine_versions.py --write     # check, and write docs/engine_versions.json
    python scripts/check_engine_versions.py --versions 0.5.23 0.5.24    # these only; here a new one beside the last known

Per version: every target of the plugin's ledger is where the ledger says, with a signature that it knows; the in-tree
patch applies, is valid on the engine's oldest Python, is found by the plugin, changes nothing when applied again, and
reverts to the same bytes; its decode CUDA graphs are as `decode_graphs` of the plugin says. A version newer than the plugin
knows is compared with what it knows of the newest, and said to be new. Wheels are fetched through pip, once.

Exit status: 0 all well; 1 a version drifts (the first is named, with what differs) or the report is out of date; 2 a wheel
cannot be fetched.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts"), str(ROOT / "benchmark" / "e2e")]

from harness import engine_source  # noqa: E402

import cached_wheels  # noqa: E402
from sglang_w4afp8 import guard, plugin  # noqa: E402
from sglang_w4afp8.fork import edits, source, tree  # noqa: E402
from sglang_w4afp8.srt.layers.moe import decode_graphs  # noqa: E402

REPORT = ROOT / "docs" / "engine_versions.json"
# What the guard compares an engine's functions with.
CODE = ROOT / "python" / "sglang_w4afp8" / "engine_code.json"

# Oldest first.
ENGINE_VERSIONS = (
    "0.5.12",
    "0.5.12.post1",
    "0.5.13",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
# The Triton that each torch release brings; the engine's wheel names torch only.
TRITON_OF_TORCH = {"2.11": "3.6.0", "2.13": "3.7.1", "2.14": "3.8.0"}

# What the tests of a patched tree need besides the modules that the ledger and the fork name.
_ALSO = ("sglang._version", "sglang.version", "sglang.test.ci.ci_register")


@dataclass
class VersionReport:
    """What one engine version is, and what differs.

    Attributes:
        version, python, torch, triton, sglang_kernel: of its wheel; triton by `TRITON_OF_TORCH`.
        modules: ledger target -> the module that it lives in.
        threads_expected_m: the engine itself hands expected_m to its requant.
        drops_tokens: with one expert-parallel rank its decode CUDA graphs of several sizes do (`harness.engine_source`).
        changed: ledger targets whose code, helpers included, is not that of the version before.
        problems: what the plugin would stand down for, or knows wrongly.
        fork_problems: what the in-tree patch stumbles over.
        digests: ledger target -> digest of its code (`guard.code_digest`); kept in a file of its own.
    """

    version: str
    python: str
    torch: str
    triton: str
    sglang_kernel: str
    modules: dict[str, str] = field(default_factory=dict)
    threads_expected_m: bool = False
    drops_tokens: bool = False
    changed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fork_problems: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def is_new(self) -> bool:
        """Whether the version is past those of the ledger."""
        found, last = guard.release(self.version), guard.release(plugin.ENGINES[1])
        return found is not None and last is not None and found > last

    @property
    def known_as(self) -> str:
        """The version whose homes in the ledger hold: a new one is expected to be like the newest that is known."""
        return plugin.ENGINES[1] if self.is_new else self.version


def targets() -> list[plugin.Target]:
    return [target for patch in plugin.LEDGER for target in patch.targets]


def _wanted_files() -> set[str]:
    """Names in a wheel that any check reads."""
    modules = {home.module for target in targets() for home in target.homes} | {*tree.engine_modules(), *_ALSO}
    wanted = {f"{guard.ENGINE_PACKAGE}/{name}" for name in engine_source.FILES}
    for module in modules:
        parts = module.split(".")
        wanted |= {f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py"}
        wanted |= {f"{'/'.join(parts[:depth])}/__init__.py" for depth in range(2, len(parts))}
    return wanted


def unpack(wheel: Path, folder: Path) -> Path:
    """Write the files of a wheel that any check reads below ``folder``; returns the package directory."""
    wanted = _wanted_files()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name in wanted])
    return folder / "sglang"


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()


def _field(metadata: str, pattern: str) -> str:
    match = re.search(pattern, metadata, re.MULTILINE)
    return match.group(1) if match else ""


def _code(file: source.Source, attribute: str) -> list[str]:
    """A target and every definition of its module that it reaches, as comparable text."""
    wanted = set(source.used(source.one_function(file, attribute)))
    statements = [statement for statement in file.tree.body if source.defined(statement)]
    while True:
        more = {n for s in statements if source.defined(s) & wanted for n in source.used(s)} - wanted
        if not more:
            break
        wanted |= more
    reached = [ast.dump(s) for s in statements if source.defined(s) & wanted]
    return [ast.dump(source.one_function(file, attribute)), *reached]


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def check_fork(package: Path, any_version: bool = False) -> list[str]:
    """Apply the in-tree patch to a package, look at what was made, and take it back; what went wrong, if anything.

    Args:
        package: the directory ``sglang`` of an unpacked wheel; it is as it was afterwards.
        any_version: apply it whatever the engine's version.
    """
    root = package.parent
    before = _snapshot(root)
    problems = []
    try:
        engine = tree.find(root)
        for change in tree.apply(engine, tests=False, any_version=any_version):
            ast.parse(change.after, feature_version=edits.ENGINE_PYTHON)
        unseen = [
            target.attribute
            for target in targets()
            if target.in_tree and guard.check_target(target, [package], engine.version).in_tree is None
        ]
        if unseen:
            problems.append(f"the plugin does not see the in-tree patch of {', '.join(unseen)}")
        patched = _snapshot(root)
        if tree.apply(engine, tests=False, any_version=any_version) or _snapshot(root) != patched:
            problems.append("applying it again changed files")
        tree.revert(engine)
        if (after := _snapshot(root)) != before:
            differing = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
            problems.append(f"reverting left {', '.join(differing)} changed")
    except source.ForkError as error:
        problems.append(str(error))
    return problems


def check_package(package: Path, report: VersionReport) -> dict[str, list[str]]:
    """Fill in what a version's files say; returns the code of every target, for comparison with the next version."""
    codes: dict[str, list[str]] = {}
    for target in targets():
        check = guard.check_target(target, [package], report.known_as)
        home = next((h for h in target.homes if guard.version_within(report.known_as, h.first, h.last)), None)
        if check.problem:
            report.problems.append(check.problem)
            continue
        assert check.module is not None
        report.modules[target.attribute] = check.module
        if home is None or home.module != check.module:
            expected = home.module if home else "none"
            report.problems.append(f"{target.attribute}: expected it in {expected}, found it in {check.module}")
        path = guard.module_file(check.module, [package])
        assert path is not None
        file = source.Source(check.module, path.read_bytes())
        codes[target.attribute] = _code(file, target.attribute)
        report.digests[target.attribute] = guard.code_digest(source.one_function(file, target.attribute))
        if target.attribute == edits.CHAIN:
            call = source.one_call(file, source.one_function(file, edits.CHAIN), edits.REQUANT)
            report.threads_expected_m = any(keyword.arg == "expected_rows" for keyword in call.keywords)
    check_graphs(package, report)
    report.fork_problems = check_fork(package, any_version=report.is_new)
    return codes


def check_graphs(package: Path, report: VersionReport) -> None:
    """Note what a version's decode graphs do, and where that is not what the plugin says of it."""
    try:
        report.drops_tokens = engine_source.drops_tokens_with_one_rank(package)
    except LookupError as error:
        report.problems.append(f"decode graphs: whether they drop tokens cannot be read: {error}")
        return
    if decode_graphs.is_affected(report.version) != report.drops_tokens:
        found, (first, last) = "drop" if report.drops_tokens else "keep", decode_graphs.AFFECTED_ENGINES
        report.problems.append(
            f"decode graphs: they {found} tokens with one rank, decode_graphs says {first} - {last} drop"
        )


def check_versions(versions: Sequence[str], cache: Path | None = None) -> list[VersionReport]:
    """One report per version, in the order given.

    Raises:
        cached_wheels.FetchError: a wheel cannot be fetched.
    """
    reports = []
    previous: dict[str, list[str]] = {}
    for version, wheel in cached_wheels.engine_wheels(versions, cache).items():
        metadata = _metadata(wheel)
        torch = _field(metadata, r"^Requires-Dist: torch==([\w.]+)")
        report = VersionReport(
            version=version,
            python=_field(metadata, r"^Requires-Python: (\S+)"),
            torch=torch,
            triton=TRITON_OF_TORCH.get(".".join(torch.split(".")[:2]), ""),
            sglang_kernel=_field(metadata, r"^Requires-Dist: sglang-kernel==([\w.]+)"),
        )
        if not report.triton:
            report.problems.append(f"torch {torch or '(none named)'}: add the Triton that it brings to TRITON_OF_TORCH")
        with tempfile.TemporaryDirectory() as folder:
            codes = check_package(unpack(wheel, Path(folder)), report)
        if previous:
            report.changed = [name for name in codes if codes[name] != previous.get(name)]
        previous = codes
        reports.append(report)
    return reports


def first_drift(reports: Sequence[VersionReport]) -> str | None:
    """The first version that drifts and what differs, in words; None when none does."""
    for report in reports:
        # The fork refuses what the plugin stands down for, in the same words.
        what = report.problems or [f"in-tree patch: {problem}" for problem in report.fork_problems]
        if what:
            return f"sglang {report.version} is the first that drifts: {'; '.join(what)}"
    return None


def to_data(reports: Sequence[VersionReport]) -> list[dict[str, Any]]:
    return [{name: value for name, value in asdict(report).items() if name != "digests"} for report in reports]


def code_data(reports: Sequence[VersionReport]) -> dict[str, dict[str, list[str]]]:
    """Attribute -> digest -> versions, as the guard reads it."""
    data: dict[str, dict[str, list[str]]] = {}
    for report in reports:
        for attribute, digest in report.digests.items():
            data.setdefault(attribute, {}).setdefault(digest, []).append(report.version)
    return data


def _print(reports: Sequence[VersionReport]) -> None:
    for report in reports:
        state = "DRIFTS" if report.problems else "ok"
        fork = "DRIFTS" if report.fork_problems else "ok"
        new = "  not in plugin.ENGINES yet" if report.is_new else ""
        changed = f"  new code: {', '.join(report.changed)}" if report.changed else ""
        print(
            f"sglang {report.version:<13} plugin {state:<7} in-tree {fork:<7} triton {report.triton:<6}{new}{changed}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--versions", nargs="+", metavar="VERSION", help="only these, compared with no report")
    what.add_argument("--write", action="store_true", help=f"write {REPORT.relative_to(ROOT)}, of every version")
    parser.add_argument("--cache", type=Path, help="where wheels are kept (default: the user's cache directory)")
    options = parser.parse_args(argv)
    try:
        reports = check_versions(options.versions or ENGINE_VERSIONS, options.cache)
    except cached_wheels.FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print(reports)
    drift = first_drift(reports)
    if drift:
        print(f"error: {drift}", file=sys.stderr)
        return 1
    if options.versions:
        return 0
    text = json.dumps(to_data(reports), indent=1) + "\n"
    files = {REPORT: text, CODE: json.dumps(code_data(reports), indent=1) + "\n"}
    for path, wanted in files.items():
        if options.write:
            path.write_text(wanted)
        elif not path.is_file() or path.read_text() != wanted:
            print(f"error: {path.relative_to(ROOT)} is out of date: run this with --write", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
