"""What ``python -m build`` makes: the wheel, installed into a clean environment without the engine, and the sdist."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import __version__

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[4]
PACKAGE = ROOT / "python" / "sglang_w4afp8"

# Run by the clean environment's interpreter: everything that an installation is asked for, as one JSON object.
LOOK = """
import importlib.metadata as md, importlib.resources as res, json, sglang_w4afp8
dist = md.distribution("sglang-w4afp8")
def walk(node, at=""):
    for child in node.iterdir():
        if child.name != "__pycache__":
            yield from walk(child, f"{at}{child.name}/") if child.is_dir() else [f"{at}{child.name}"]
print(json.dumps({
    "version": dist.version,
    "module_version": sglang_w4afp8.__version__,
    "module": sglang_w4afp8.__file__,
    "entry_points": sorted([p.group, p.name, p.value] for p in dist.entry_points),
    "requires": [r for r in dist.requires if "extra ==" not in r],
    "extras": sorted(dist.metadata.get_all("Provides-Extra")),
    "requires_python": dist.metadata["Requires-Python"],
    "license": dist.metadata["License-Expression"],
    "license_files": dist.metadata.get_all("License-File"),
    "license_text": dist.read_text("licenses/LICENSE"),
    "files": sorted(walk(res.files("sglang_w4afp8"))),
}))
"""


def clean_environment() -> dict[str, str]:
    """Without what could lead an interpreter to this checkout, or pip to an index."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}
    return inherited | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_files() -> list[str]:
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(PACKAGE).as_posix() for path in files)


@dataclass(frozen=True)
class Built:
    """What a build made, and of which package files."""

    wheel: Path
    sdist: Path
    sources: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Building the wheel goes through the sdist, as a release does."""
    out = tmp_path_factory.mktemp("dist")
    sources = source_files()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return Built(next(out.glob("*.whl")), next(out.glob("*.tar.gz")), sources)


@pytest.fixture(scope="module")
def clean_bin(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of a new virtual environment that holds the wheel and nothing else."""
    home = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", home / "venv", cwd=home)
    bin_dir = home / "venv" / "bin"
    run(bin_dir / "python", "-m", "pip", "install", "--no-index", "--no-deps", built.wheel, cwd=home)
    return bin_dir


@pytest.fixture(scope="module")
def installed(clean_bin: Path) -> dict[str, Any]:
    return json.loads(run(clean_bin / "python", "-c", LOOK, cwd=clean_bin.parent))


def test_the_environment_is_clean(clean_bin: Path, installed: dict[str, Any]) -> None:
    assert Path(installed["module"]).is_relative_to(clean_bin.parent)
    names = [
        entry["name"] for entry in json.loads(run(clean_bin / "pip", "list", "--format=json", cwd=clean_bin.parent))
    ]
    assert "sglang" not in names and "torch" not in names


def test_one_version_everywhere(built: Built, clean_bin: Path, installed: dict[str, Any]) -> None:
    assert built.wheel.name == f"sglang_w4afp8-{__version__}-py3-none-any.whl"
    assert built.sdist.name == f"sglang_w4afp8-{__version__}.tar.gz"
    assert (installed["version"], installed["module_version"]) == (__version__, __version__)


def test_the_entry_points_are_the_plugin_and_the_command(installed: dict[str, Any]) -> None:
    assert installed["entry_points"] == [
        ["console_scripts", "sglang-w4afp8", "sglang_w4afp8.cli:main"],
        ["sglang.srt.plugins", "w4afp8", "sglang_w4afp8.plugin:activate"],
    ]


def test_the_command_runs_without_the_engine(clean_bin: Path) -> None:
    assert run(clean_bin / "sglang-w4afp8", "--version", cwd=clean_bin.parent) == f"sglang-w4afp8 {__version__}\n"


def test_the_entry_point_imports_without_the_engine(clean_bin: Path) -> None:
    code = (
        "import importlib.metadata as md; (p,) = md.entry_points(group='sglang.srt.plugins'); print(p.load().__name__)"
    )
    assert run(clean_bin / "python", "-c", code, cwd=clean_bin.parent) == "activate\n"


def test_every_file_of_the_package_is_installed(built: Built, installed: dict[str, Any]) -> None:
    assert {"__init__.py", "plugin.py", "cli.py", "kernels/ops/moe/ep_moe_kernels.py"} <= set(built.sources)
    assert installed["files"] == built.sources


def test_a_data_file_is_installed(tmp_path: Path) -> None:
    """The tree may hold no tuned table yet, so one is put into a copy of what the build reads."""
    names = ["pyproject.toml", "README.md", "LICENSE", "python/sglang_w4afp8/__init__.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "python/sglang_w4afp8/configs").mkdir()
    (tmp_path / "python/sglang_w4afp8/configs/requant_some_gpu.json").write_text("{}")
    run(
        sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "out", tmp_path, cwd=tmp_path
    )
    with zipfile.ZipFile(next((tmp_path / "out").glob("*.whl"))) as wheel:
        assert "sglang_w4afp8/configs/requant_some_gpu.json" in wheel.namelist()


def test_the_metadata_asks_for_the_engine_only(installed: dict[str, Any]) -> None:
    assert installed["requires"] == ["sglang<0.6,>=0.5.12"]
    assert installed["extras"] == ["dev", "test"]
    assert installed["requires_python"] == ">=3.10"


def test_the_licence_is_named_and_included(installed: dict[str, Any]) -> None:
    assert (installed["license"], installed["license_files"]) == ("Apache-2.0", ["LICENSE"])
    assert installed["license_text"] == (ROOT / "LICENSE").read_text()
    assert "Apache License" in installed["license_text"] and "Version 2.0, January 2004" in installed["license_text"]


def test_the_sdist_holds_the_package_and_its_tests_and_nothing_of_the_developers(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt", "Makefile"} <= names
    assert {f"python/sglang_w4afp8/{name}" for name in built.sources} <= names
    links = set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text()))
    assert {"SECURITY.md", "docs"} <= links
    assert [link for link in links if not any(f"{name}/".startswith(f"{link}/") for name in names)] == []
    own_path = Path(__file__).relative_to(ROOT).as_posix()
    assert {own_path, "test/conftest.py", "test/run_suite.py", "scripts/setup_env.py"} <= names
    hidden = {name for name in names if any(part.startswith(".") for part in name.split("/"))}
    assert hidden == {".gitignore", ".pre-commit-config.yaml"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
