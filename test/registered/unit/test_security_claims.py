"""What SECURITY.md and the README say the package never does, read off its source."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

import sglang_w4afp8

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PACKAGE = Path(sglang_w4afp8.__file__).parent
NETWORK = {
    "socket",
    "urllib",
    "http",
    "requests",
    "httpx",
    "aiohttp",
    "ftplib",
    "smtplib",
    "ssl",
    "socketserver",
    "xmlrpc",
}
UNSAFE_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "joblib"}
# Commands that a person runs; no server imports them.
COMMANDS = {"cli.py", "demo.py", "doctor.py", "bench", "fork", "tune"}


def modules(serving_only: bool) -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if not (serving_only and {name.parts[0], name.as_posix()} & COMMANDS):
            found[name.as_posix()] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of every module that is imported, at module level or inside a function."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def calls(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_the_scan_sees_imports_and_calls():
    tree = ast.parse("import urllib.request as r\ndef f():\n    from pickle import loads\n    torch.load(eval(x))\n")
    assert imported(tree) == {"urllib", "pickle"}
    assert list(calls(tree)) == ["torch.load", "eval"]
    serving = modules(serving_only=True)
    assert {"plugin.py", "srt/layers/moe/cutlass_w4a8_moe.py", "kernels/ops/moe/ep_moe_kernels.py"} <= set(serving)
    assert not any(name.startswith(("bench/", "fork/", "demo")) for name in serving)


def test_no_module_loads_pickled_data_or_evaluates_text():
    for name, tree in modules(serving_only=False).items():
        assert not imported(tree) & UNSAFE_DATA, name
        assert not {"eval", "exec", "torch.load", "builtins.eval", "builtins.exec"} & set(calls(tree)), name


def test_nothing_on_the_serving_path_has_network_or_processes():
    for name, tree in modules(serving_only=True).items():
        assert not imported(tree) & {*NETWORK, "subprocess", "multiprocessing"}, name
        assert not {"os.system", "os.popen", "os.fork"} & set(calls(tree)), name


def test_processes_are_those_that_security_md_names():
    """``bench/measure.py`` is where `bench` and `tune` get what a file says of its run."""
    found = modules(serving_only=False)
    users = {name for name, tree in found.items() if imported(tree) & {"subprocess"}}
    assert users == {"bench/measure.py", "doctor.py"}
    # Its own interpreters, which compile beside the one that measures.
    assert {name for name, tree in found.items() if "multiprocessing" in imported(tree)} == {"tune/two_kernels.py"}
    assert {name for name, tree in found.items() if "'nvidia-smi'" in ast.unparse(tree)} == users
    text = (Path(__file__).resolve().parents[3] / "SECURITY.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| processes |")]
    assert re.findall(r"`([\w-]+)`", row) == ["doctor", "nvidia-smi", "bench", "tune"]


def test_the_demo_alone_opens_a_socket_and_on_the_loopback_interface():
    users = [name for name, tree in modules(serving_only=False).items() if imported(tree) & NETWORK]
    assert users == ["demo.py"]
    bound = [
        ast.unparse(node.args[0])
        for node in ast.walk(modules(serving_only=False)["demo.py"])
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".bind")
    ]
    assert bound == ["('127.0.0.1', 0)"]


def test_nothing_on_the_serving_path_writes_a_file():
    writes = {"write_text", "write_bytes", "mkdir", "unlink", "rename", "rmdir", "touch", "write_tuned", "write_json"}
    serving = modules(serving_only=True)
    writers = {name for name, tree in serving.items() if writes & {call.rpartition(".")[2] for call in calls(tree)}}
    # It holds the writer that `tune` calls, beside the reader; the scan says that nobody else here calls it.
    assert writers == {"tuned_config.py"}
    commands = {Path(name).stem for name in COMMANDS}
    for name, tree in serving.items():
        names = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names}
        names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not {imported_name.rpartition(".")[2] for imported_name in names} & commands, name


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
