"""The drift guard and the ledger that it reads, on trees made here and on the installed engine's source."""

import ast
import functools
import inspect
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import guard
from sglang_w4afp8.plugin import ENGINES, LEDGER, Home, Target

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HOME = "sglang.ops.moe"
MOVED = Target("f", (Home("sglang.new", "0.5.16", "0.5.23"), Home("sglang.old", "0.5.12", "0.5.15")), ("x",), "o:f")


def _target(attribute="quantise", signatures=("x, output, rows=None", "x, output"), in_tree=False):
    return Target(attribute, (Home(HOME, "0.5.12", "0.5.23"),), signatures, "ours:quantise", in_tree=in_tree)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _check(tmp_path, source, target=None):
    root = _write(tmp_path / "sglang", {"ops/moe.py": source})
    return guard.check_target(target or _target(), [root], "0.5.20")


@pytest.mark.parametrize(
    "source",
    [
        "def quantise(x, output): ...",
        "def quantise(x: int, output: 'Tensor', rows: int | None = 7) -> None: ...",
        "import os\nif os.name:\n    def quantise(x, output): ...\n",
        "try:\n    import sgl_kernel\nexcept ImportError:\n    def quantise(x, output): ...\n",
    ],
    ids=["plain", "annotated, other default", "in if", "in except"],
)
def test_known_signature_passes(tmp_path, source):
    check = _check(tmp_path, source)
    assert (check.module, check.problem, check.in_tree) == (HOME, None, None)


CODE = "def quantise(x, output):\n    return x + 1\n"


def _digest(source):
    return guard.code_digest(ast.parse(source).body[0])


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ("def quantise(x,output):\n  # why\n  return (x\n    + 1)\n", True),
        ("def quantise(x: int, output: 'Tensor') -> None:\n    'What it does.'\n    return x + 1\n", True),
        ("def quantise(x, output):\n    return x + 2\n", False),
        ("def quantise(x, output):\n    return 1 + x\n", False),
        ("def quantise(x, output):\n    log()\n    return x + 1\n", False),
        ("def quantise(x, output):\n    return x + True\n", False),
        ("def quantise(x, output=None):\n    return x + 1\n", False),
    ],
    ids=["formatting", "annotations and docstring", "constant", "order", "statement", "type", "default"],
)
def test_digest_is_of_what_a_function_does(source, same):
    assert (_digest(source) == _digest(CODE)) is same


@pytest.mark.parametrize(
    ("version", "whose"),
    [
        ("0.5.20", None),
        ("0.5.20+vendor", None),
        ("0.5.19", "sglang 0.5.19"),
        ("0.5.18.dev3", "sglang 0.5.18 or 0.5.18.post1"),
        ("0.5.16", None),  # nobody has read that one: any that is known will do
    ],
)
def test_code_is_held_against_the_release_that_the_engine_calls_itself_after(monkeypatch, version, whose):
    known = {_digest(CODE): ["0.5.20"], "0" * 16: ["0.5.19", "0.5.18"], "1" * 16: ["0.5.18.post1"]}
    monkeypatch.setattr(guard, "known_code", lambda: {"quantise": known})
    changed = guard._code_change(ast.parse(CODE).body[0], HOME, _target(), version)
    assert changed == (whose and f"{HOME}.quantise: its code is not that of {whose}")
    other = ast.parse(CODE.replace("1", "2")).body[0]
    assert "its code is not that of" in guard._code_change(other, HOME, _target(), version)


def test_a_changed_body_is_told_and_is_no_problem(tmp_path, monkeypatch):
    known = {"quantise": {_digest(CODE): ["0.5.20"], "0" * 16: ["0.5.19"]}}
    monkeypatch.setattr(guard, "known_code", lambda: known)
    assert _check(tmp_path, CODE) == guard.TargetCheck(HOME)
    check = _check(tmp_path, CODE.replace("1", "2"))
    assert check == guard.TargetCheck(HOME, changed=f"{HOME}.quantise: its code is not that of sglang 0.5.20")


@pytest.mark.parametrize(
    ("source", "expected", "found"),
    [
        ("def quantise(x, out): ...", "(x, output, rows=...) or (x, output)", "found (x, out)"),
        ("def quantise(output, x): ...", "(x, output)", "found (output, x)"),
        ("def quantise(x, output, rows): ...", "(x, output, rows=...)", "found (x, output, rows)"),
        ("def quantise(x, output=None): ...", "(x, output)", "found (x, output=...)"),
        ("def quantise(x, output, *, rows=None): ...", "(x, output, rows=...)", "found (x, output, *, rows=...)"),
        ("def quantise(x, /, output): ...", "(x, output)", "found (x, /, output)"),
        ("def quantise(x, output, **more): ...", "(x, output)", "found (x, output, **more)"),
        ("def other(x, output): ...", "a function of that name", "found none"),
        ("def outer():\n    def quantise(x, output): ...", "a function of that name", "found none"),
        ("from elsewhere import quantise", "a function of that name", "found none"),
        ("@triton.jit\ndef quantise(x, output): ...", "a plain function", "found one with @triton.jit"),
        ("async def quantise(x, output): ...", "a plain function", "found one with async"),
        ("def quantise(x, output): ...\n" * 2, "one definition", "found 2 (lines 1, 2)"),
        ("def quantise(x, output:", "", "cannot be read"),
    ],
)
def test_drift_says_what_was_expected_and_found(tmp_path, source, expected, found):
    problem = _check(tmp_path, source).problem
    assert problem is not None and problem.startswith(HOME)
    assert expected in problem and found in problem


def test_method_is_looked_up_in_its_class(tmp_path):
    target = _target("Method.apply", ("self, layer",))
    source = "class Other:\n    def apply(self, layer, more): ...\nclass Method:\n    def apply(self, layer): ...\n"
    assert _check(tmp_path, source, target).problem is None
    problem = _check(tmp_path, source.replace("class Method", "class Renamed"), target).problem
    assert problem == f"{HOME}.Method.apply: expected a function of that name, found none in the file"


def test_missing_module_names_every_place_that_was_expected(tmp_path):
    check = guard.check_target(MOVED, [_write(tmp_path / "sglang", {"else.py": ""})], "0.5.12")
    assert check.module is None
    assert check.problem == "f: expected it in sglang.old or sglang.new, found no such module"


@pytest.mark.parametrize(
    ("version", "module"), [("0.5.15.post1", "sglang.old"), ("0.5.16", "sglang.new"), (None, "sglang.new")]
)
def test_the_version_picks_the_module_where_both_exist(tmp_path, version, module):
    root = _write(tmp_path / "sglang", {"new.py": "def f(x): ...", "old.py": "def f(x): ..."})
    assert guard.check_target(MOVED, [root], version).module == module


def test_development_version_may_have_the_layout_before_it(tmp_path):
    root = _write(tmp_path / "sglang", {"old.py": "def f(x): ..."})
    assert guard.check_target(MOVED, [root], "0.5.16.dev3+g1234567") == guard.TargetCheck("sglang.old")


@pytest.mark.parametrize("line", ["{} = '1.2.3'", "{}: str = '1.2.3'"])
def test_in_tree_marker_is_read_and_wins_over_drift(tmp_path, line):
    source = line.format(guard.IN_TREE_MARKER) + "\ndef quantise(anything): ..."
    assert _check(tmp_path, source, _target(in_tree=True)) == guard.TargetCheck(HOME, in_tree="1.2.3")


def test_what_no_fork_carries_is_checked_in_a_marked_module_too(tmp_path):
    marker = f"{guard.IN_TREE_MARKER} = '1.2.3'\n"
    assert _check(tmp_path / "same", marker + "def quantise(x, output): ...") == guard.TargetCheck(HOME)
    check = _check(tmp_path / "other", marker + "def quantise(anything): ...")
    assert check.in_tree is None and "found (anything)" in check.problem


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.5.11", False),
        ("0.5.12rc0", True),
        ("0.5.12", True),
        ("0.5.12.post1", True),
        ("0.5.15.post1", True),
        ("0.5.23", True),
        ("0.5.23.post3", True),
        ("0.5.23.dev7+g0a1b2c3", True),
        ("0.5.23+local.build", True),
        ("0.5.24.dev1", False),
        ("0.5.24", False),
        ("0.5.100", False),
        ("0.6", False),
        ("0.5", False),
        ("0.0.0.dev0", False),
        ("from source", False),
    ],
)
def test_engine_range_goes_by_release_numbers(version, inside):
    assert guard.version_within(version, *ENGINES) is inside


def test_module_file_follows_the_import_order(tmp_path):
    first = _write(tmp_path / "a/sglang", {"srt/only_a.py": "", "both/x.py": "", "reg/readme": ""})
    second = _write(
        tmp_path / "b/sglang", {"srt/only_b.py": "", "both/x.py": "", "reg/__init__.py": "", "reg/x.py": ""}
    )
    roots = [first, second]
    assert guard.module_file("sglang.srt.only_a", roots) == first / "srt/only_a.py"
    assert guard.module_file("sglang.srt.only_b", roots) == second / "srt/only_b.py"
    assert guard.module_file("sglang.both.x", roots) == first / "both/x.py"
    assert guard.module_file("sglang.reg", roots) == second / "reg/__init__.py"
    assert guard.module_file("sglang.reg.x", roots) == second / "reg/x.py"
    assert guard.module_file("sglang.reg.y", roots) is None
    with pytest.raises(ValueError, match="module: is 'torch.nn'"):
        guard.module_file("torch.nn", roots)


def test_the_installed_engine_has_every_target():
    checks = guard.check_tree(LEDGER, guard.engine_roots(), version("sglang"))
    assert {name: [c.problem for c in found if c.problem] for name, found in checks.items()} == {
        patch.name: [] for patch in LEDGER
    }


def test_ledger_names_are_unique_and_needs_come_first():
    names = [patch.name for patch in LEDGER]
    assert len(set(names)) == len(names)
    for index, patch in enumerate(LEDGER):
        assert set(patch.requires) <= set(names[:index])
        assert patch.targets or patch.requires


@pytest.mark.parametrize("patch", LEDGER, ids=lambda patch: patch.name)
def test_ledger_entry_is_complete(patch):
    assert patch.what.endswith(".") and patch.why.endswith(".") and patch.removable.startswith("w")
    assert patch.upstream is None or patch.upstream.startswith("https://github.com/sgl-project/sglang/pull/")
    for target in patch.targets:
        spans = sorted((Version(home.first), Version(home.last)) for home in target.homes)
        assert (str(spans[0][0]), str(spans[-1][1])) == ENGINES
        # Newest first: an engine of unknown version is tried in that order.
        assert [Version(home.first) for home in target.homes] == [first for first, _ in reversed(spans)]


@pytest.mark.parametrize(
    ("target", "signature"),
    [(target, text) for patch in LEDGER for target in patch.targets for text in target.signatures],
    ids=lambda value: getattr(value, "attribute", ""),
)
def test_ours_accepts_every_call_that_a_known_signature_allows(target, signature):
    module, _, name = target.replacement.partition(":")
    ours = inspect.signature(getattr(import_module(module), name))
    parameters = guard.parse_signature(signature).parameters
    if target.kind == "around":
        # The engine's function comes first, by position.
        ours = inspect.signature(functools.partial(getattr(import_module(module), name), None))
    more = {"anything": "anything"} if parameters[-1].kind == "**" else {}
    plain = [parameter for parameter in parameters if parameter.kind != "**"]
    names = [parameter.name for parameter in plain]
    bound = ours.bind(*names, **more)
    assert [bound.arguments[name] for name in names] == list(bound.args) == names
    assert bound.kwargs == more
    ours.bind(**{name: name for name in names}, **more)
    ours.bind(**{parameter.name: 0 for parameter in plain if not parameter.has_default})


def test_entry_point_module_imports_the_standard_library_only():
    path = import_module("sglang_w4afp8.plugin").__file__
    tree = ast.parse(Path(path).read_text())
    imported = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {alias.name for n in imported if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module for n in imported if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
