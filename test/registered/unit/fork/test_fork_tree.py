"""``sglang-w4afp8 fork`` on real engine trees: what it writes, refuses and takes back, and how it answers."""

import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import __version__, guard, plugin
from sglang_w4afp8.fork import edits, suites, tree
from sglang_w4afp8.fork.cli import main
from sglang_w4afp8.fork.source import ForkError, Source

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[4]
OLD, NEW = "0.5.12", "0.5.23"
KERNELS = {OLD: "sglang/srt/layers/moe/ep_moe/kernels.py", NEW: "sglang/kernels/ops/moe/ep_moe_kernels.py"}
CHAIN = "sglang/srt/layers/moe/cutlass_w4a8_moe.py"
METHOD = "sglang/srt/layers/quantization/w4afp8.py"
DISPATCHER = "sglang/srt/layers/moe/token_dispatcher/deepep.py"


def snapshot(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def definitions(path: Path) -> dict[str, str]:
    """Functions and classes of a file, by name, as comparable text."""
    body = ast.parse(path.read_bytes()).body
    return {s.name: ast.dump(s) for s in body if isinstance(s, ast.FunctionDef | ast.ClassDef)}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old, text.count(old))
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("version", [OLD, NEW])
def test_kernels_are_ours_and_every_other_function_is_as_it_was(unpacked, version):
    root = unpacked(version)
    before = definitions(root / KERNELS[version])
    assert main([str(root)]) == 0
    after, ours = definitions(root / KERNELS[version]), definitions(edits.KERNELS)
    assert {name: after[name] for name in ours} == ours
    gone = set(before) - set(after)
    assert gone == {"_silu_and_mul_post_per_tensor_quant_kernel"}
    kept = set(after) - set(ours)
    assert kept == set(before) - gone - set(ours) and len(kept) > 30
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


@pytest.mark.parametrize("version", [OLD, NEW])
def test_what_is_written_imports_nothing_of_ours_and_is_valid_on_the_engines_python(unpacked, version):
    root = unpacked(version)
    assert main([str(root)]) == 0
    for name in (KERNELS[version], CHAIN, METHOD):
        syntax = ast.parse((root / name).read_bytes(), feature_version=(3, 10))
        modules = [alias.name for node in ast.walk(syntax) if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module or "" for node in ast.walk(syntax) if isinstance(node, ast.ImportFrom)]
        assert not [module for module in modules if module.startswith("sglang_w4afp8")]
        assert guard.in_tree_version(syntax) == __version__


def test_imports_go_where_the_engines_sorter_puts_them_and_unused_ones_go_away(unpacked):
    heads = {}
    for version in (OLD, NEW):
        root = unpacked(version)
        assert main([str(root)]) == 0
        text = (root / KERNELS[version]).read_text()
        heads[version] = [line for line in text.split("import torch\n", 1)[0].splitlines() if line]
    assert heads[OLD][:2] == ["import functools", "import logging"]
    assert heads[OLD][2] == "from collections.abc import Callable"
    assert heads[OLD][3].startswith("from dataclasses import dataclass") and len(heads[OLD]) == 4
    assert heads[NEW] == [*heads[OLD], "from typing import Optional, Tuple"]


class Call:
    """Stands in for every function that the chain calls, and remembers the keyword that matters."""

    def __init__(self) -> None:
        self.expected_rows = []

    def __call__(self, *arguments, **keywords):
        self.expected_rows.append(keywords.get("expected_rows", "not passed"))
        return arguments[1:3]


@pytest.mark.parametrize("version", [OLD, NEW])
def test_the_dispatchers_estimate_reaches_requant_and_silu(unpacked, version, monkeypatch):
    """The engine's own functions, as written, with everything that they call replaced."""
    root = unpacked(version)
    assert main([str(root)]) == 0
    requant, silu, other = Call(), Call(), Call()

    def function(path, attribute, namespace):
        (node,) = guard.find_functions(ast.parse((root / path).read_bytes()), attribute)
        module = ast.Module([ast.parse("from __future__ import annotations").body[0], node], [])
        exec(compile(module, path, "exec"), namespace)
        return namespace[node.name]

    chain = function(
        CHAIN,
        edits.CHAIN,
        {
            "torch": torch,
            edits.REQUANT: requant,
            edits.SILU: silu,
            "deepep_ll_get_cutlass_w4a8_moe_mm_data": other,
            "cutlass_w4a8_moe_mm": other,
        },
    )
    module = types.ModuleType("sglang.srt.layers.moe.cutlass_w4a8_moe")
    module.cutlass_w4a8_moe_deepep_ll = chain
    monkeypatch.setitem(sys.modules, module.__name__, module)
    method = function(METHOD, edits.METHOD, {"torch": torch})

    experts, hidden, inner = 2, 256, 128
    tables = torch.zeros(experts + 1, 3, dtype=torch.int32)
    names = [
        "a_strides1",
        "b_strides1",
        "c_strides1",
        "a_strides2",
        "b_strides2",
        "c_strides2",
        "s_strides13",
        "s_strides2",
    ]
    quant = types.SimpleNamespace(**dict.fromkeys(names, tables[:2]), expert_offsets=tables[:, 0])
    quant.problem_sizes1 = quant.problem_sizes2 = tables[:2]
    scale = torch.ones(1)
    layer = types.SimpleNamespace(
        quant_method=quant,
        w13_weight=torch.zeros(experts, 2 * inner, hidden // 2, dtype=torch.int8),
        w2_weight=torch.zeros(experts, hidden, inner // 2, dtype=torch.int8),
        w13_weight_scale_inv=torch.zeros(experts, 1, 1),
        w2_weight_scale_inv=torch.zeros(experts, 1, 1),
        w13_input_scale=scale,
        w2_input_scale=scale,
    )
    states = torch.zeros(experts, 4, hidden)
    dispatch = (states, torch.zeros(experts, 4, 2), torch.zeros(3, 8), None, torch.zeros(experts), 17)
    result = method(None, layer, dispatch)
    assert (requant.expected_rows, silu.expected_rows) == ([17], [17])
    assert (result.shape, result.dtype) == ((experts, 4, hidden), torch.bfloat16)


def test_statuses_and_idempotence(unpacked, capsys):
    root = unpacked(NEW)
    assert main([str(root), "--check"]) == 1
    assert main([str(root)]) == 0
    patched = snapshot(root)
    assert main([str(root), "--check"]) == 0
    assert main([str(root)]) == 0
    assert "nothing to do: patched and current" in capsys.readouterr().out
    assert snapshot(root) == patched
    assert main([str(root), "--diff"]) == 0
    assert capsys.readouterr().out == ""


def test_a_formatter_and_changes_elsewhere_leave_it_current(unpacked):
    root = unpacked(NEW)
    assert main([str(root)]) == 0
    path = root / KERNELS[NEW]
    body = path.read_text()
    path.write_text(f"{body}\n\ndef another(x):\n    return x\n".replace("# Counts are", "#  Counts are"))
    chain = root / CHAIN
    chain.write_text(ast.unparse(ast.parse(chain.read_text())))
    patched = snapshot(root)
    assert main([str(root), "--check"]) == 0
    assert main([str(root)]) == 0
    assert snapshot(root) == patched


@pytest.mark.parametrize("spoil", ["version", "kernel", "chain"])
def test_outdated_and_altered_parts_are_named(unpacked, spoil, capsys):
    root = unpacked(NEW)
    assert main([str(root)]) == 0
    name = {"version": METHOD, "kernel": KERNELS[NEW], "chain": CHAIN}[spoil]
    old, new = {
        "version": (f'IN_TREE = "{__version__}"', 'IN_TREE = "0.0.1"'),
        "kernel": ("_REQUANT_M_GRID_MAX = 32\n", "_REQUANT_M_GRID_MAX = 64\n"),
        "chain": ("masked_m, a2_scale, expected_rows=expected_m", "masked_m, a2_scale"),
    }[spoil]
    edit(root / name, old, new)
    assert main([str(root), "--check"]) == 2
    (line,) = capsys.readouterr().out.splitlines()[-1:]
    state = "carries 0.0.1" if spoil == "version" else "differs"
    assert line == f"{name}: {state}, would become {__version__}"


def test_a_clone_without_the_record_is_brought_up_to_date(unpacked):
    """Whoever clones a fork has what was committed, an older version of ours, and no record."""
    root = unpacked(NEW)
    assert main([str(root)]) == 0
    current = snapshot(root / "sglang")
    shutil.rmtree(root / tree.RECORD_FOLDER)
    for name in (KERNELS[NEW], CHAIN, METHOD):
        edit(root / name, f'_IN_TREE = "{__version__}"', '_IN_TREE = "0.0.1"')
    edit(root / KERNELS[NEW], "def _shape(", "def _older_helper():\n    return 1\n\n\ndef _shape(")
    committed = snapshot(root)
    assert main([str(root), "--check"]) == 2
    assert main([str(root)]) == 0
    assert snapshot(root / "sglang") == current
    assert main([str(root), "--revert"]) == 0
    assert snapshot(root) == committed


def test_an_older_version_that_was_written_here_is_replaced_and_reverts_to_the_engines_own(unpacked, monkeypatch):
    root = unpacked(OLD)
    before = snapshot(root)
    with monkeypatch.context() as patched:
        patched.setattr(edits, "__version__", "0.0.1")
        assert main([str(root)]) == 0
    assert set(tree.in_tree_versions(tree.find(root)).values()) == {"0.0.1"}
    assert main([str(root), "--check"]) == 2
    assert main([str(root)]) == 0
    assert set(tree.in_tree_versions(tree.find(root)).values()) == {__version__}
    assert main([str(root), "--revert"]) == 0
    assert snapshot(root) == before


def test_revert_is_byte_identical_and_leaves_nothing_behind(checkout):
    root = checkout(NEW)
    theirs = root / "test/registered/kernels/ops/moe/test_fp8_per_token_to_per_tensor_quant.py"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("# the engine's own test\n")
    (root / "python" / METHOD).chmod(0o755)
    before = snapshot(root)
    assert main([str(root)]) == 0
    assert theirs.read_text() != "# the engine's own test\n"
    assert (root / "python" / METHOD).stat().st_mode & 0o777 == 0o755
    assert main([str(root), "--revert"]) == 0
    assert snapshot(root) == before
    assert not (root / "test/registered/unit").exists()


def test_revert_removes_the_folders_that_it_made(checkout, capsys):
    """Several tests share one that the engine does not have."""
    root = checkout(NEW)
    before = sorted(root.rglob("*"))
    assert main([str(root)]) == 0
    assert len(list((root / "test/registered/kernels/ops/moe").iterdir())) > 1
    assert main([str(root), "--revert"]) == 0
    assert capsys.readouterr().err == ""
    assert sorted(root.rglob("*")) == before


def test_line_ends_are_kept(unpacked):
    root = unpacked(OLD)
    for name in (KERNELS[OLD], CHAIN, METHOD):
        path = root / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = snapshot(root)
    assert main([str(root)]) == 0
    for name in (KERNELS[OLD], CHAIN, METHOD):
        data = (root / name).read_bytes()
        assert b"\n" not in data.replace(b"\r\n", b"") and data != before[name]
    assert main([str(root), "--check"]) == 0
    assert main([str(root), "--revert"]) == 0
    assert snapshot(root) == before


def test_revert_refuses_what_was_changed_since_and_names_it(unpacked, capsys):
    root = unpacked(NEW)
    assert main([str(root)]) == 0
    with (root / CHAIN).open("a") as file:
        file.write("# mine\n")
    changed = snapshot(root)
    assert main([str(root), "--revert"]) == 2
    assert f"refused: {CHAIN}: changed since it was written, nothing reverted" in capsys.readouterr().err
    assert snapshot(root) == changed


def test_an_outdated_file_that_was_changed_since_is_not_written_over(unpacked, capsys):
    root = unpacked(NEW)
    assert main([str(root)]) == 0
    edit(root / CHAIN, "masked_m, a2_scale, expected_rows=expected_m", "masked_m, a2_scale")
    changed = snapshot(root)
    assert main([str(root)]) == 2
    assert f"refused: {CHAIN}: changed since it was written, so --revert could not" in capsys.readouterr().err
    assert snapshot(root) == changed
    shutil.rmtree(root / tree.RECORD_FOLDER)
    assert main([str(root)]) == 0
    assert main([str(root), "--check"]) == 0


def test_revert_without_a_record_points_at_git(unpacked, capsys):
    root = unpacked(NEW)
    assert main([str(root), "--revert"]) == 2
    assert "nothing carries the change" in capsys.readouterr().err
    assert main([str(root)]) == 0
    shutil.rmtree(root / tree.RECORD_FOLDER)
    assert main([str(root), "--revert"]) == 2
    assert "use git" in capsys.readouterr().err


def test_git_does_not_see_the_record(checkout):
    root = checkout(NEW)

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, env={"HOME": str(root)}
        ).stdout

    git("init", "-q")
    git("add", "-A")
    assert main([str(root)]) == 0
    shown = {line[3:] for line in git("status", "--porcelain").splitlines() if line[1] != " "}
    assert {f"python/{KERNELS[NEW]}", f"python/{CHAIN}", f"python/{METHOD}"} <= shown
    assert not [name for name in shown if name.startswith(tree.RECORD_FOLDER)]


@pytest.mark.parametrize("failing", [0, 1, 4])
def test_a_failed_write_leaves_everything_as_it_was(unpacked, monkeypatch, failing, capsys):
    root = unpacked(NEW)
    before = snapshot(root)
    replace, calls = tree.os.replace, []

    def failing_replace(source, target):
        calls.append(target)
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(tree.os, "replace", failing_replace)
    assert main([str(root)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert snapshot(root) == before
    assert not (root / tree.RECORD_FOLDER).exists()


def test_a_tree_that_cannot_be_written_to_is_refused_for_that_reason(unpacked, monkeypatch, capsys):
    root = unpacked(NEW)
    before = sorted(root.rglob("*"))

    def mkdir(path, *arguments, **keywords):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(tree.Path, "mkdir", mkdir)
    assert main([str(root)]) == 2
    assert f"Permission denied: '{root / tree.RECORD_FOLDER}'" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("failing", [0, 2, 7])
def test_a_full_disk_is_named_and_no_temporary_file_stays(unpacked, monkeypatch, failing, capsys):
    """Of the eight files that are staged, the first, one of the record, and the last of the package."""
    root = unpacked(NEW)
    before, files = snapshot(root), sorted(root.rglob("*"))
    fdopen, calls = tree.os.fdopen, []

    def full(handle, mode):
        calls.append(handle)
        if len(calls) <= failing:
            return fdopen(handle, mode)
        tree.os.close(handle)
        return open("/dev/full", mode)

    monkeypatch.setattr(tree.os, "fdopen", full)
    assert main([str(root)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert len(calls) == failing + 1
    assert sorted(root.rglob("*")) == files and snapshot(root) == before


def test_a_file_that_cannot_be_replaced_is_the_reason_given(unpacked, monkeypatch, capsys):
    """Putting the others back must not stumble over it."""
    root = unpacked(NEW)
    before, files = snapshot(root), sorted(root.rglob("*"))
    replace = tree.os.replace

    def immutable(source, target):
        if target == root / CHAIN:
            raise PermissionError(1, "Operation not permitted", str(target))
        replace(source, target)

    monkeypatch.setattr(tree.os, "replace", immutable)
    assert main([str(root)]) == 2
    assert f"Operation not permitted: '{root / CHAIN}'" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == files and snapshot(root) == before


# --- drift ---

DRIFTS = {
    "renamed argument": (
        KERNELS[NEW],
        "    output_scale: torch.Tensor,\n    output: torch.Tensor,\n    expected_rows",
        "    out_scale: torch.Tensor,\n    output: torch.Tensor,\n    expected_rows",
        "fp8_per_token_to_per_tensor_quant_triton: expected (x, x_scale, masked_m, output_scale, output, "
        "expected_rows=...) or (x, x_scale, masked_m, output_scale, output), "
        "found (x, x_scale, masked_m, out_scale, output, expected_rows=...)",
    ),
    "renamed function": (CHAIN, "def cutlass_w4a8_moe_deepep_ll(", "def cutlass_w4a8_moe_ll(", f"{edits.CHAIN}: expected"),
    "dispatch output": (DISPATCHER, "    masked_m: torch.Tensor\n    expected_m: int\n", "    masked_m: torch.Tensor\n", (
        "DeepEPLLDispatchOutput: expected six fields, masked_m and expected_m last, found hidden_states, "
        "hidden_states_scale, topk_ids, topk_weights, masked_m"
    )),
    "unpacking": (METHOD, "topk_ids, _, masked_m, expected_m = (", "topk_ids, _, expected_m, masked_m = (", (
        "expected dispatch_output to give six values, masked_m and _ (or expected_m) last, found hidden_states, "
        "hidden_scales, topk_ids, _, expected_m, masked_m"
    )),
    "second call": (CHAIN, "    return c2\n", "    silu_and_mul_masked_post_per_tensor_quant_fwd()\n    return c2\n", (
        f"{edits.CHAIN}: expected one call of {edits.SILU}, found 2"
    )),
    "another hint": (CHAIN, "expected_rows=expected_m", "expected_rows=m", "expected expected_rows=expected_m"),
    "another user of a helper": (
        KERNELS[NEW],
        "def deepep_ll_get_cutlass_w4a8_moe_mm_data(",
        "def other():\n    return _floor_pow2(3)\n\n\ndef deepep_ll_get_cutlass_w4a8_moe_mm_data(",
        "other: expected nothing but what is replaced to know _floor_pow2, which would become ours",
    ),
    "another meaning of a name": (
        KERNELS[NEW],
        "import logging\n",
        "import logging\nfrom typing import Callable\n",
        "Callable is Callable of typing, and ours is Callable of collections.abc",
    ),
    "syntax": (METHOD, "class W4AFp8Config", "clas W4AFp8Config", "sglang.srt.layers.quantization.w4afp8: cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("action", [[], ["--check"], ["--diff"]], ids=["apply", "check", "diff"])
def test_drift_is_refused_by_name_and_nothing_is_written(unpacked, drift, action, capsys):
    name, old, new, message = DRIFTS[drift]
    root = unpacked(NEW)
    edit(root / name, old, new)
    before = snapshot(root)
    assert main([str(root), *action]) == 2
    assert re.search(rf"^refused: .*{re.escape(message)}", capsys.readouterr().err)
    assert snapshot(root) == before


def test_every_difference_is_named_at_once(unpacked, capsys):
    root = unpacked(OLD)
    edit(root / CHAIN, "def cutlass_w4a8_moe_deepep_ll(", "def gone(")
    edit(root / METHOD, "def apply_deepep_ll(", "def gone(")
    assert main([str(root)]) == 2
    message = capsys.readouterr().err
    assert edits.CHAIN in message and edits.METHOD in message


def test_an_unknown_version_goes_by_its_functions_only_when_asked(unpacked, capsys):
    root = unpacked(NEW)
    version = root / "sglang/_version.py"
    version.write_text("__version__ = version = '0.6.1'\n")
    assert main([str(root)]) == 2
    assert "sglang 0.6.1: unknown to this release, which knows 0.5.12 - 0.5.23" in capsys.readouterr().err
    assert main([str(root), "--any-version"]) == 0
    assert main([str(root), "--check", "--any-version"]) == 0


def test_a_checkout_that_was_never_built_has_no_version_and_is_judged_by_its_functions(checkout):
    root = checkout(NEW)
    (root / "python/sglang/_version.py").unlink()
    assert tree.find(root).version is None
    assert main([str(root)]) == 0


def test_the_package_directory_itself_will_do(unpacked):
    root = unpacked(NEW) / "sglang"
    assert main([str(root)]) == 0
    assert (root / tree.RECORD_FOLDER / ".gitignore").read_text() == "*\n"
    assert main([str(root), "--revert"]) == 0


@pytest.mark.parametrize(
    ("patched", "named"),
    [
        ("", "python"),
        ("", "python/sglang"),
        ("python", "python/sglang"),
        ("python/sglang", "python"),
        ("python/sglang", ""),
    ],
)
def test_a_record_made_under_another_name_of_the_tree_is_pointed_at(checkout, patched, named, monkeypatch, capsys):
    root = checkout(NEW)
    before = snapshot(root)
    with monkeypatch.context() as context:
        context.setattr(edits, "__version__", "0.0.1")
        assert main([str(root / patched)]) == 0
    written = snapshot(root)
    for action in ([], ["--revert"]):
        assert main([str(root / named), *action]) == 2
        record = root / patched / tree.RECORD_FOLDER
        assert capsys.readouterr().err == (
            f"refused: {root / named}: the record of what was replaced is {record}: run this with {root / patched} as TREE\n"
        )
        assert snapshot(root) == written
    assert main([str(root / patched)]) == 0
    assert main([str(root / named), "--no-tests"]) == 0  # there is nothing to write
    assert main([str(root / patched), "--revert"]) == 0
    assert snapshot(root) == before


def test_a_record_of_another_tree_is_no_matter(unpacked):
    """An engine's package inside a directory that holds an engine of its own."""
    outer = unpacked(NEW)
    shutil.copytree(outer / "sglang", outer / "vendored" / "sglang")
    assert main([str(outer)]) == 0
    assert main([str(outer / "vendored")]) == 0
    assert main([str(outer / "vendored"), "--revert"]) == 0


def test_what_is_no_engine_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "expected a checkout of sglang or its package" in capsys.readouterr().err


def test_links_to_somebody_elses_files_are_not_followed(unpacked, tmp_path, capsys):
    root = unpacked(NEW)
    other = tmp_path / "other.py"
    shutil.move(root / CHAIN, other)
    (root / CHAIN).symlink_to(other)
    before = other.read_bytes()
    assert main([str(root)]) == 2
    assert f"refused: {CHAIN}: is a symbolic link" in capsys.readouterr().err
    assert other.read_bytes() == before


OUTSIDE = ["/ABSOLUTE", "../beside.py", "sglang/../../beside.py", "./sglang/x.py", "", "sglang//x.py"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("action", [[], ["--revert"]], ids=["apply", "revert"])
def test_a_record_that_names_files_outside_of_the_tree_touches_none(unpacked, tmp_path, name, action, capsys):
    """Absolute, through a parent directory, or no path at all; the record is a file like any other."""
    root = unpacked(NEW)
    assert main([str(root)]) == 0
    beside = tmp_path / "beside.py"
    beside.write_text("precious")
    name = name.replace("ABSOLUTE", str(beside).lstrip("/"))
    manifest = root / tree.RECORD_FOLDER / "manifest.json"
    data = json.loads(manifest.read_text())
    for before in (None, hashlib.sha256(b"x").hexdigest()):
        data["files"][name] = {"before": before, "after": hashlib.sha256(b"precious").hexdigest()}
        manifest.write_text(json.dumps(data))
        was = snapshot(tmp_path)
        assert main([str(root), *action]) == 2
        assert f"names {name!r}, must be the path of a file below the tree" in capsys.readouterr().err
        assert snapshot(tmp_path) == was


@pytest.mark.parametrize("action", [[], ["--revert"]], ids=["apply", "revert"])
@pytest.mark.parametrize("linked", ["record", "originals", "file", "folder"])
def test_links_that_lead_out_of_the_tree_are_followed_nowhere(unpacked, tmp_path, linked, action, capsys):
    root = unpacked(NEW)
    if linked != "record" or action:
        assert main([str(root)]) == 0
    outside = tmp_path / "outside"
    record = root / tree.RECORD_FOLDER
    path = {
        "record": record,
        "originals": record / "originals",
        "file": root / CHAIN,
        "folder": (root / CHAIN).parent,
    }[linked]
    if path.exists():
        path.rename(outside)
    else:
        outside.mkdir()
    path.symlink_to(outside)
    was = snapshot(outside) if outside.is_dir() else outside.read_bytes()
    assert main([str(root), *action]) == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert (snapshot(outside) if outside.is_dir() else outside.read_bytes()) == was


def test_registered_tests_behind_a_link_are_not_written(checkout, tmp_path, capsys):
    root = checkout(NEW)
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "test" / "registered").symlink_to(outside)
    assert main([str(root)]) == 2
    assert "test/registered: is a symbolic link" in capsys.readouterr().err
    assert not list(outside.iterdir())


# What changes a tree on disk. Python's own modules reach them by these names too.
_WRITES = ("open", "replace", "rename", "unlink", "rmdir", "mkdir", "write")


def killed_at(action: Callable[[], object], count: int) -> bool:
    """Run an action in a process that is killed just before its ``count``-th change on disk; whether it got that far."""
    child = os.fork()
    if child == 0:
        left = [count]

        def dying(function):
            def call(*arguments, **keywords):
                changes = function is not os.open or arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
                left[0] -= bool(changes)
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **keywords)

            return call

        for name in _WRITES:
            setattr(os, name, dying(getattr(os, name)))
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("undo", [True, False], ids=["undoes", "finishes"])
@pytest.mark.parametrize("start", ["engine", "older", "revert"])
def test_a_kill_at_any_write_leaves_a_tree_that_the_next_run_finishes_or_undoes(unpacked, monkeypatch, start, undo):
    """The first patch, an upgrade over an older one of ours, and taking it back: killed at each change on disk in turn."""
    root = unpacked(NEW)
    engine = snapshot(root)
    if start == "older":
        with monkeypatch.context() as older:
            older.setattr(edits, "__version__", "0.0.1")
            tree.apply(tree.find(root))
        begin = snapshot(root)
    found = tree.find(root)
    tree.apply(found)
    patched = snapshot(root)
    if start != "older":
        begin = engine if start == "engine" else patched

    def again():
        shutil.rmtree(root)
        for name, data in begin.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)

    # What a tree becomes hangs on its files alone, and takes most of the time.
    plan, plans = tree.plan, {}

    def remember(found, tests=True, any_version=False, originals=None):
        files = {name: data for name, data in snapshot(root).items() if name.startswith("sglang/")}
        state = (tuple(files.items()), tuple((originals or {}).items()))
        if state not in plans:
            plans[state] = plan(found, tests, any_version, originals)
        return plans[state]

    monkeypatch.setattr(tree, "plan", remember)
    again()
    # Here once, so that the processes that are killed need not.
    tree.revert(found) if start == "revert" else tree.apply(found)
    again()
    action = (lambda: tree.revert(found)) if start == "revert" else (lambda: tree.apply(found))
    for count in range(1, 500):
        if not killed_at(action, count):
            break
        if undo:
            try:
                tree.revert(found)
            except ForkError as error:
                # Nothing had been written yet, or all was taken back.
                assert "no record of what was replaced" in str(error) and "nothing carries the change" in str(error)
            left = {name: data for name, data in snapshot(root).items() if not name.startswith(tree.RECORD_FOLDER)}
            assert left == engine, count
        else:
            tree.apply(found)
            assert snapshot(root) == patched, count
            tree.revert(found)
            assert snapshot(root) == engine, count
        again()
    assert count > 10


def test_the_diff_is_what_is_written(checkout, capsys):
    root = checkout(OLD)
    shutil.copytree(root, applied := root.parent / "applied")
    assert main([str(root), "--diff"]) == 0
    diff = capsys.readouterr().out
    assert not (root / tree.RECORD_FOLDER).exists()
    subprocess.run(["git", "apply", "-p1"], input=diff, cwd=root, text=True, check=True)
    assert main([str(applied)]) == 0
    shutil.rmtree(applied / tree.RECORD_FOLDER)
    assert snapshot(root) == snapshot(applied)


def test_the_diff_of_a_file_in_another_encoding_has_its_bytes(checkout):
    root = checkout(NEW)
    theirs = root / "test/registered/kernels/ops/moe/test_fp8_per_token_to_per_tensor_quant.py"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9 \x0c\n")
    shutil.copytree(root, applied := root.parent / "applied")
    command = [sys.executable, "-m", "sglang_w4afp8.cli", "fork", root, "--diff"]
    # A terminal of another encoding: nothing is decoded.
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\n-# caf\xe9 \x0c\n" in done.stdout
    subprocess.run(["git", "apply", "-p1"], input=done.stdout, cwd=root, check=True)
    assert main([str(applied)]) == 0
    shutil.rmtree(applied / tree.RECORD_FOLDER)
    assert snapshot(root) == snapshot(applied)


@pytest.mark.parametrize("action", [["--diff"], ["--check"]], ids=["diff", "check"])
def test_a_reader_that_has_seen_enough_is_no_refusal(unpacked, action):
    """As of ``| head``: here its end of the pipe is closed before anything is written."""
    command = [sys.executable, "-m", "sglang_w4afp8.cli", "fork", unpacked(NEW), *action]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


# --- tests in a checkout ---


def test_tests_go_along_with_the_engines_imports_lanes_and_their_own_reference(checkout, monkeypatch):
    for version, module, lanes in (
        (OLD, "sglang.srt.layers.moe.ep_moe.kernels", ["stage-a-test-cpu", "stage-b-kernel-unit-1-gpu-large"]),
        (NEW, "sglang.kernels.ops.moe.ep_moe_kernels", ["base-a-test-cpu", "base-b-kernel-unit-test-1-gpu-large"]),
    ):
        root = checkout(version)
        assert main([str(root)]) == 0
        written = sorted((root / "test" / "registered").rglob("*.py"))
        names = {path.name for path in written}
        assert {"test_w4afp8_requant_geometry.py", "test_fp8_per_token_to_per_tensor_quant.py"} <= names
        for path in written:
            text = path.read_text()
            syntax = ast.parse(text)
            assert "import sglang_w4afp8" not in text and "from sglang_w4afp8" not in text
            modules = {node.module for node in ast.walk(syntax) if isinstance(node, ast.ImportFrom)}
            assert module in modules or module.rpartition(".")[0] in modules
            used = re.findall(r'suite="([^"]+)"', text)
            assert used and set(used) <= set(lanes)
        requant = next(path for path in written if "per_tensor_quant" in path.name)
        assert edits.REQUANT.replace("_triton", "_reference") in definitions(requant)
        # The engine's own parser takes them. Its dataclasses look their module up.
        parser = types.ModuleType("ci_register")
        monkeypatch.setitem(sys.modules, parser.__name__, parser)
        exec((root / "python/sglang/test/ci/ci_register.py").read_text(), parser.__dict__)
        registered = parser.collect_tests([str(path) for path in written], sanity_check=True)
        assert {entry.effective_suite for entry in registered} == set(lanes)


def test_a_checkout_with_other_lanes_is_refused_unless_tests_stay_out(checkout, capsys):
    root = checkout(NEW)
    (root / "test/run_suite.py").write_text("PER_COMMIT_SUITES = ['nightly']\n")
    before = snapshot(root)
    assert main([str(root)]) == 2
    assert "test/run_suite.py: expected the lane base-a-test-cpu or stage-a-test-cpu" in capsys.readouterr().err
    assert snapshot(root) == before
    assert main([str(root), "--no-tests"]) == 0
    assert not (root / "test" / "registered").exists()


def test_tests_that_were_left_out_are_missing_and_not_different(checkout, capsys):
    root = checkout(NEW)
    assert main([str(root), "--no-tests"]) == 0
    assert main([str(root), "--no-tests", "--check"]) == 0
    capsys.readouterr()
    assert main([str(root), "--check"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(suites.suites())
    assert all(re.fullmatch(rf"test/\S+\.py: missing, would become {re.escape(__version__)}", line) for line in lines)


def test_only_tests_that_an_engine_can_run_go_along():
    found = suites.suites()
    assert {suite.path.rpartition("/")[0] for suite in found} == set(suites.FOLDERS)
    for suite in found:
        assert "hypothesis" not in suite.source.data.decode() and "launch_table" not in suite.source.data.decode()


def test_a_test_that_needs_more_of_ours_stays_behind_and_the_rest_of_its_file_goes(tmp_path, monkeypatch):
    folder = tmp_path / "kernels/ops/moe"
    folder.mkdir(parents=True)
    head = (
        "import mmap\n"
        "import os\n"
        "from sglang_w4afp8.bench import streaming\n"
        "from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import requant_launch_geometry\n\n\n"
    )
    helper = "def helper():\n    return streaming.run(mmap.PAGESIZE)\n\n\n"
    needs_more = "# Against the engine.\ndef test_needs_more():\n    assert helper() == os.sep\n\n\n"
    tests = "".join(f"def test_{i}():\n    assert requant_launch_geometry and os\n\n\n" for i in range(3))
    (folder / "test_most.py").write_text(head + helper + needs_more + tests)
    (folder / "test_half.py").write_text(head + helper + needs_more + tests[: tests.index("def test_1")])
    monkeypatch.setattr(suites, "REGISTERED", tmp_path)
    (suite,) = suites.suites()
    assert suite.path == "kernels/ops/moe/test_most.py"
    kept = head.replace("import mmap\n", "").replace("from sglang_w4afp8.bench import streaming\n", "")
    assert suite.source.data.decode() == kept + tests


# --- the ledger and our own modules ---


def test_what_goes_in_tree_is_what_the_fork_knows_to_write():
    in_tree = {target.attribute for patch in plugin.LEDGER for target in patch.targets if target.in_tree}
    assert in_tree == {edits.REQUANT, edits.SILU, edits.CHAIN, edits.METHOD}


def test_an_import_of_ours_cannot_go_in_tree():
    source = Source("k.py", b"from sglang_w4afp8 import switches\n\ndef f():\n    return switches.read()\n")
    with pytest.raises(ForkError, match="k.py: switches comes from sglang_w4afp8"):
        edits.OurKernels(source).imports  # noqa: B018


def test_script_and_command_are_one(unpacked):
    root = unpacked(NEW)
    for command in ([ROOT / "scripts/apply_to_fork.py"], ["-m", "sglang_w4afp8.cli", "fork"]):
        done = subprocess.run([sys.executable, *command, root, "--check"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, f"not patched: sglang {NEW} in {root}/sglang, which can be\n")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
