"""Patched engine trees at work: their own copies of the suites pass, and the plugin leaves them alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from engine_process import engine_root, overlay, run_script, write
from sglang_w4afp8 import __version__, guard, plugin
from sglang_w4afp8.fork import tree
from sglang_w4afp8.fork.cli import main

register_cpu_ci(est_time=480, suite="base-a-test-cpu")

# One version of each kind: old place of the kernels, new place, legacy requant of another shape, re-tuned requant.
VERSIONS = ("0.5.12", "0.5.17", "0.5.18", "0.5.23")
# Of the other kernel suites a part: the code under test is the same in every tree, and the requant's whole suite runs in each.
PART = "column-major or hot_expert or problem_sizes or clamped or untouched or known_values or straight or special_bf16"

# What the plugin leaves to such a tree: the patches that are in it; and the steps inside one of them, which are not.
IN_TREE = ["requant", "expected_m", "silu"]
NOT_IN_TREE = ["problem_sizes", "gemm"]

# What the kernels' file takes from its engine when it is imported.
STUBS = {
    "sglang/__init__.py": "",
    "sglang/srt/utils/__init__.py": "def ceil_div(a, b):\n    return -(-a // b)\n\n\n"
    "def is_cuda():\n    return False\n\n\ndef is_musa():\n    return False\n",
    "sglang/srt/environ.py": "envs = None\n",
    # Whoever imports us from an engine tree fails.
    "sglang_w4afp8/__init__.py": "raise ImportError('an engine tree needs nothing of sglang_w4afp8')\n",
}


def run_tests(root: Path, *arguments: str | Path) -> int:
    """Run test files of a checkout against it, and return how many tests passed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(root), *map(str, arguments)],
        cwd=root,
        env={**environment, "PYTHONPATH": str(root / "python"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.parametrize("version", VERSIONS)
def test_geometry_and_interpreter_suites_pass_in_a_patched_tree(checkout, version):
    root = checkout(version)
    assert main([str(root)]) == 0
    for path in (root / "python/sglang").rglob("__init__.py"):
        path.write_text("")
    for name, text in STUBS.items():
        path = root / "python" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    registered = root / "test" / "registered"
    geometry = registered / "unit/layers/moe/test_w4afp8_requant_geometry.py"
    requant = registered / "kernels/ops/moe/test_fp8_per_token_to_per_tensor_quant.py"
    assert run_tests(root, geometry) > 100
    assert run_tests(root, *sorted((registered / "kernels/ops/moe").glob("test_*.py")), "-k", PART) > 20
    assert run_tests(root, requant) > 100


@pytest.fixture
def patched_engine(unpacked, tmp_path):
    """The installed engine with the in-tree patch over it."""
    import sglang.version

    root = unpacked(sglang.version.__version__)
    package = root / "sglang"
    written = {}
    for change in tree.apply(tree.find(root), tests=False):
        name = change.path.relative_to(package).as_posix()
        # The installed engine's own file is what is patched.
        assert (engine_root() / name).read_bytes() == change.before
        written[name] = change.after.decode()
    return overlay(tmp_path / "engine", written)


def test_the_installed_engine_runs_patched_without_this_package(patched_engine, tmp_path):
    # Without a driver sgl_kernel does not load, and the chain's module with it.
    stub = (
        "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n    return print\n"
    )
    files = {} if os.path.exists("/dev/nvidiactl") else {"sgl_kernel/__init__.py": stub}
    code = """
    import inspect, sys
    sys.modules["sglang_w4afp8"] = None
    import torch
    from sglang.srt.layers.moe import cutlass_w4a8_moe as chain
    from sglang.srt.layers.quantization import w4afp8 as method
    requant = chain.fp8_per_token_to_per_tensor_quant_triton
    x = (torch.arange(3 * 5 * 256) % 17 - 8).float().view(3, 5, 256).to(torch.float8_e4m3fn)
    scale, rows, output = torch.full((3, 5, 2), 2.0), torch.tensor([5, 0, 2], dtype=torch.int32), torch.zeros_like(x)
    requant(x=x, x_scale=scale, masked_m=rows, output_scale=torch.tensor([0.5]), output=output, expected_rows=3)
    live = (torch.arange(5)[None, :] < rows[:, None])[:, :, None]
    result = [
        requant.__module__,
        chain._SGLANG_W4AFP8_IN_TREE,
        method._SGLANG_W4AFP8_IN_TREE,
        inspect.signature(chain.cutlass_w4a8_moe_deepep_ll).parameters["expected_m"].default,
        torch.equal(output.float(), torch.where(live, x.float() * 4, 0)),
    ]
    """
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "SGLANG_PLUGINS": "none"}
    done = run_script(code, [patched_engine, write(tmp_path / "stub", files)], **environment)
    module = guard.check_target(plugin.LEDGER[0].targets[0], guard.engine_roots(), None).module
    assert done.result == [module, __version__, __version__, None, True]


def test_the_plugin_stands_down_with_one_line_on_the_installed_engine_patched(patched_engine):
    """The engine's loader over a tree whose four functions carry the in-tree patch."""
    code = """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    load_plugins()
    from sglang_w4afp8 import lifecycle
    hooks = [target for target in HookRegistry._hooks if "moe" in target or "w4afp8" in target]
    states = {status.name: status.state.value for status in lifecycle.report().patches}
    result = [[name for name, state in states.items() if state == wanted] for wanted in ("in tree", "not in the tree")]
    result.append(hooks)
    """
    patches = ",".join(IN_TREE + NOT_IN_TREE)
    done = run_script(code, [patched_engine], SGLANG_W4AFP8_PATCHES=patches, SGLANG_W4AFP8_STRICT="1")
    assert done.result == [IN_TREE, NOT_IN_TREE, []]
    (line,) = done.lines("standing down for")
    assert line.endswith(
        f"standing down for {', '.join(IN_TREE)}: already in tree, version {__version__}; "
        f"the tree does not carry {', '.join(NOT_IN_TREE)}"
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
