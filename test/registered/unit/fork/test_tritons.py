"""Every kernel compiled by every Triton that another supported engine brings, its assembly looked at."""

import importlib.metadata
import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=230, suite="base-a-test-cpu")

TRITONS = ("3.6.0", "3.7.1", "3.8.0")
# The environment's own is the matter of test_codegen.py, which compiles with it and knows more about it.
OTHERS = tuple(version for version in TRITONS if version != importlib.metadata.version("triton"))


@pytest.fixture(scope="module")
def tritons() -> ModuleType:
    import check_tritons

    return check_tritons


def test_the_list_is_what_the_engines_bring(checker):
    assert sorted({entry["triton"] for entry in json.loads(checker.REPORT.read_text())}) == list(TRITONS)
    assert sorted(set(checker.TRITON_OF_TORCH.values())) == list(TRITONS)


@pytest.mark.parametrize("version", OTHERS)
def test_memory_accesses_are_as_wide_as_the_tiles_allow(tritons, version, tmp_path):
    (directory,) = tritons.directories([version]).values()
    found = tmp_path / "findings.json"
    done = tritons.run(version, directory, ["--json", str(found)])
    assert done.returncode == 0, done.stdout
    content = json.loads(found.read_text())
    assert content["triton"] == version
    assert {finding["target"] for finding in content["findings"]} == {"cuda:90", "cuda:100", "hip:gfx950"}
    assert [finding for finding in content["findings"] if finding["faults"]] == []


@pytest.mark.parametrize("version", OTHERS)
def test_products_of_the_gemms_run_without_waiting_for_one_another(tritons, version, tmp_path):
    """Whether the kernels tell the assembler that all lanes walk alike changes no instruction of theirs."""
    (directory,) = tritons.directories([version]).values()

    def found(*words: str) -> dict[str, dict]:
        findings = tmp_path / "findings.json"
        done = tritons.run(version, directory, ["--json", str(findings), *words], tritons.GEMM_CODEGEN)
        assert done.returncode == 0, done.stdout
        return json.loads(findings.read_text())

    content = found()
    assert content["triton"] == version
    assert sum(products > 0 for products, _ in content["runs"].values()) > 20
    assert found("--untold", str(tmp_path))["digests"] == content["digests"]


def test_a_triton_that_makes_other_code_is_named(tritons, monkeypatch, tmp_path, capsys):
    script = tmp_path / "codegen.py"
    script.write_text(
        textwrap.dedent("""
        import sys, triton
        print("compiled by", triton.__version__, sys.argv[1:])
        sys.exit(triton.__version__ == "9.1")
        """)
    )
    places: dict[str, Path] = {}
    for version in ("9.0", "9.1"):
        (tmp_path / version / "triton").mkdir(parents=True)
        (tmp_path / version / "triton" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        places[version] = tmp_path / version
    monkeypatch.setattr(tritons, "directories", lambda versions: {version: places[version] for version in versions})
    monkeypatch.setattr(tritons.run, "__defaults__", ((), script))
    assert tritons.main(["--triton", "9.0", "9.1", "--", "--target", "cuda:90"]) == 1
    captured = capsys.readouterr()
    assert "compiled by 9.0 ['--target', 'cuda:90']" in captured.out
    assert captured.err == "error: other code than expected with triton 9.1\n"
    # Without arguments of their own both scripts run, and either one's verdict counts.
    second = tmp_path / "gemm.py"
    second.write_text(
        "import sys, triton; print('second by', triton.__version__); sys.exit(triton.__version__ == '9.0')\n"
    )
    monkeypatch.setattr(tritons, "GEMM_CODEGEN", second)
    assert tritons.main(["--triton", "9.0", "9.1"]) == 1
    captured = capsys.readouterr()
    assert [f"{which} by 9.{minor}" in captured.out for which in ("compiled", "second") for minor in (0, 1)] == [
        True
    ] * 4
    assert captured.err == "error: other code than expected with triton 9.0, 9.1\n"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
