"""The set-up behind ``make demo`` and ``make test``: what it pins, when it works, when it says no. Installs nothing."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
from packaging.requirements import Requirement
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import guard, plugin

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[4]
MAKE_VARIABLES = ("PYTHON", "ENGINE", "VENV")


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``scripts/setup_env.py`` on a copy of its inputs, with enough disk. Starting a process fails until faked."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs = []
    for path in module.INPUTS:
        copy = tmp_path / "checkout" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        inputs.append(copy)
    monkeypatch.setattr(module, "INPUTS", tuple(inputs))
    monkeypatch.setattr(module, "CONSTRAINTS", inputs[0])
    set_free_gb(monkeypatch, module, 100)
    fake_processes(monkeypatch, module, lambda command: pytest.fail(f"started {command}"))
    return module


def set_free_gb(monkeypatch: pytest.MonkeyPatch, module: ModuleType, gigabytes: float) -> None:
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, int(gigabytes * 1e9))
    )


def fake_processes(monkeypatch: pytest.MonkeyPatch, module: ModuleType, run: Callable[[list[str]], int]) -> None:
    def fake(command: list[object], **_: object) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        status = run(words)
        return subprocess.CompletedProcess(words, status, stdout=f"{tuple(sys.version_info[:2])}\n")

    monkeypatch.setattr(module.subprocess, "run", fake)


class Installer:
    """Stands in for ``python -m venv`` and pip, and remembers what was asked for."""

    def __init__(self, pip_status: int = 0) -> None:
        self.pip_status = pip_status
        self.pip_commands: list[list[str]] = []
        self.cleared: list[Path] = []

    def __call__(self, command: list[str]) -> int:
        if "venv" in command:
            venv = Path(os.path.abspath(command[-1]))  # which is what the real one writes into its files
            shutil.rmtree(venv, ignore_errors=True)
            venv.mkdir(parents=True)
            (venv / "pyvenv.cfg").write_text(f"command = {sys.executable} -m venv --clear {venv}\n")
            self.cleared.append(venv)
        elif "pip" in command:
            self.pip_commands.append(command)
            return self.pip_status
        return 0


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_tool_is_pinned_and_every_pin_is_used() -> None:
    extras = project()["optional-dependencies"]
    wanted = {Requirement(line).name for line in [*project()["dependencies"], *extras["test"], *extras["dev"]]}
    assert set(constraints()) == wanted - {"sglang-w4afp8"}


def test_pins_satisfy_the_metadata() -> None:
    pins, extras = constraints(), project()["optional-dependencies"]
    for line in [*project()["dependencies"], *extras["test"], *extras["dev"]]:
        requirement = Requirement(line)
        if requirement.name != "sglang-w4afp8":
            assert pins[requirement.name] in requirement.specifier


def test_pre_commit_runs_the_same_ruff() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"ruff-pre-commit\n    rev: v(\S+)", config) == [constraints()["ruff"]]


def test_another_engine_replaces_its_pin_and_no_other(setup_env: ModuleType) -> None:
    assert setup_env.pinned_engine() == constraints()["sglang"]
    lines = setup_env.constraints_for("0.5.99").splitlines()
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert [(old, new) for old, new in zip(pinned, lines, strict=True) if old != new] == [
        (f"sglang=={constraints()['sglang']}", "sglang==0.5.99")
    ]


def test_the_first_run_installs_with_the_constraints_and_the_second_does_nothing(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installer, venv = Installer(), tmp_path / "venv"
    fake_processes(monkeypatch, setup_env, installer)
    assert setup_env.main(["--venv", str(venv), "--engine", "0.5.99"]) == 0
    assert "about 4 minutes and 10.5 GB" in capsys.readouterr().out
    (pip,) = installer.pip_commands
    assert pip[1:] == ["-m", "pip", "install", "--constraint", f"{venv}/constraints.txt", "--editable", f"{ROOT}[test]"]
    assert "sglang==0.5.99\n" in (venv / "constraints.txt").read_text()

    fake_processes(monkeypatch, setup_env, lambda command: pytest.fail(f"started {command}"))
    assert setup_env.main(["--venv", str(venv), "--engine", "0.5.99"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("index", range(3), ids=["constraints", "pyproject", "version"])
def test_a_changed_input_updates_the_environment_in_place(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    installer, venv = Installer(), tmp_path / "venv"
    fake_processes(monkeypatch, setup_env, installer)
    assert setup_env.main(["--venv", str(venv)]) == 0
    with setup_env.INPUTS[index].open("a") as file:
        file.write("# changed\n")
    assert setup_env.main(["--venv", str(venv)]) == 0
    assert (len(installer.pip_commands), len(installer.cleared)) == (2, 1)


def test_a_failed_installation_is_not_taken_for_a_finished_one(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = tmp_path / "venv"
    fake_processes(monkeypatch, setup_env, Installer(pip_status=7))
    assert setup_env.main(["--venv", str(venv)]) == 1
    said = capsys.readouterr().err
    assert "pip exited with status 7" in said and "the network or the disk, run the same command to go on" in said
    assert "If pip found no version that fits, running it again does not help" in said
    assert f"(ENGINE={constraints()['sglang']} is the pinned one)" in said
    installer = Installer()
    fake_processes(monkeypatch, setup_env, installer)
    assert setup_env.main(["--venv", str(venv)]) == 0
    assert (len(installer.pip_commands), installer.cleared) == (1, [])


def test_a_path_through_a_parent_is_the_environment_that_it_leads_to(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the workflow's VENV, beside the checkout, is written."""
    installer, venv = Installer(), tmp_path / "checkout" / ".." / "venv"
    fake_processes(monkeypatch, setup_env, installer)
    assert setup_env.main(["--venv", str(venv)]) == 0
    assert setup_env.main(["--venv", str(tmp_path / "venv")]) == 0
    assert (len(installer.pip_commands), installer.cleared) == (1, [tmp_path / "venv"])
    with setup_env.INPUTS[0].open("a") as file:
        file.write("# changed\n")
    assert setup_env.main(["--venv", str(venv)]) == 0
    assert (len(installer.pip_commands), installer.cleared) == (2, [tmp_path / "venv"])


def test_a_moved_environment_is_made_anew(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer = Installer()
    fake_processes(monkeypatch, setup_env, installer)
    assert setup_env.main(["--venv", str(tmp_path / "old")]) == 0
    (tmp_path / "old").rename(tmp_path / "new")
    assert setup_env.main(["--venv", str(tmp_path / "new")]) == 0
    assert installer.cleared == [tmp_path / "old", tmp_path / "new"]


def test_somebody_elses_directory_is_left_alone(
    setup_env: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").write_text("x")
    assert setup_env.main(["--venv", str(tmp_path / "venv")]) == 1
    assert "is in the way" in capsys.readouterr().err
    assert (tmp_path / "venv" / "thesis.tex").read_text() == "x"


def test_too_little_disk_is_said_before_anything_is_made(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_free_gb(monkeypatch, setup_env, 9.5)
    assert setup_env.main(["--venv", str(tmp_path / "not" / "there")]) == 1
    assert f"error: 9.5 GB free at {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "Makefile", "scripts/setup_env.py"])
def test_the_engine_of_the_examples_is_one_that_the_plugin_knows(name: str) -> None:
    engines = re.findall(r"(?:ENGINE=|--engine )(\d[\w.]*\w)", (ROOT / name).read_text())
    assert engines and all(guard.version_within(engine, *plugin.ENGINES) for engine in engines)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a fresh shell, although a ``make test`` with variables of its own may be around this test."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k not in MAKE_VARIABLES}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=inherited, capture_output=True, text=True, check=False)


def test_an_old_interpreter_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")  # what an older one answers to the version question
    old.chmod(0o755)
    done = make("env", f"PYTHON={old}")
    assert done.returncode != 0 and f"error: {old} is older than Python 3.11" in done.stderr


def test_a_missing_interpreter_is_refused_by_name() -> None:
    done = make("env", "PYTHON=python-that-is-not-there")
    assert done.returncode != 0 and "error: python-that-is-not-there not found" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "venv", "engine"),
    [
        ([], ".venv", "pinned"),
        (["ENGINE="], ".venv", "pinned"),
        (["ENGINE=0.5.99"], ".venv-0.5.99", "0.5.99"),
        (["ENGINE=0.5.99", "VENV=/elsewhere"], "/elsewhere", "0.5.99"),
    ],
)
def test_another_engine_gets_an_environment_of_its_own(arguments: list[str], venv: str, engine: str) -> None:
    engine = constraints()["sglang"] if engine == "pinned" else engine
    done = make("--dry-run", "env", *arguments)
    assert done.stdout.splitlines()[-1] == f'"python3" scripts/setup_env.py --venv "{venv}" --engine "{engine}"'


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
