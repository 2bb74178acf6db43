"""Every supported engine version, from its wheel: the ledger finds its targets, the fork patcher applies and reverts."""

import json
import shutil
import sys
import zipfile

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import guard, plugin

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

KERNELS = "sglang/kernels/ops/moe/ep_moe_kernels.py"


@pytest.fixture(scope="module")
def reports(checker):
    return checker.check_versions(checker.ENGINE_VERSIONS)


def test_no_version_drifts_and_the_committed_report_is_what_was_found(checker, reports):
    assert checker.first_drift(reports) is None
    assert json.loads(checker.REPORT.read_text()) == checker.to_data(reports)
    assert json.loads(checker.CODE.read_text()) == checker.code_data(reports) == guard.known_code()


def test_the_list_and_the_ledger_name_the_same_engines(checker):
    versions = checker.ENGINE_VERSIONS
    assert (versions[0], versions[-1]) == plugin.ENGINES
    assert list(versions) == sorted(set(versions), key=lambda v: (guard.release(v), ".post" in v))
    assert all(guard.version_within(version, *plugin.ENGINES) for version in versions)


def test_what_is_known_of_the_engines(reports):
    """Written out here, so that the checker is not compared with itself."""
    found = {report.version: report for report in reports}
    requant = "fp8_per_token_to_per_tensor_quant_triton"
    old, new = "sglang.srt.layers.moe.ep_moe.kernels", "sglang.kernels.ops.moe.ep_moe_kernels"
    assert [found[v].modules[requant] for v in ("0.5.12", "0.5.15.post1", "0.5.16", "0.5.23")] == [old, old, new, new]
    assert [v for v in found if found[v].threads_expected_m] == ["0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"]
    assert [v for v in found if requant in found[v].changed] == ["0.5.18", "0.5.19"]
    graphs = "0.5.12 0.5.12.post1 0.5.13 0.5.13.post1 0.5.14 0.5.15 0.5.15.post1 0.5.16 0.5.17 0.5.18 0.5.19 0.5.20"
    assert [v for v in found if found[v].drops_tokens] == graphs.split()
    tritons = [found[v].triton for v in ("0.5.12", "0.5.17", "0.5.18", "0.5.21", "0.5.22", "0.5.23")]
    assert tritons == ["3.6.0", "3.6.0", "3.7.1", "3.7.1", "3.8.0", "3.8.0"]
    assert [v for v in found if found[v].python != ">=3.10"] == ["0.5.22", "0.5.23"]


def spoiled(checker, tmp_path, version, file, old, new):
    """What the checker finds in a copy of a wheel's tree with one piece of text replaced."""
    (wheel,) = checker.cached_wheels.engine_wheels([version]).values()
    package = checker.unpack(wheel, tmp_path / "spoiled")
    text = (package.parent / file).read_text()
    assert text.count(old) == 1
    (package.parent / file).write_text(text.replace(old, new))
    report = checker.VersionReport(version, ">=3.11", "2.14.1", "3.8.0", "0.4.10")
    checker.check_package(package, report)
    return report


def test_a_renamed_argument_is_caught_by_name(checker, reports, tmp_path):
    report = spoiled(
        checker,
        tmp_path,
        "0.5.23",
        KERNELS,
        "    output_scale: torch.Tensor,\n    output: torch.Tensor,\n    expected_rows",
        "    out_scale: torch.Tensor,\n    output: torch.Tensor,\n    expected_rows",
    )
    message = (
        "sglang.kernels.ops.moe.ep_moe_kernels.fp8_per_token_to_per_tensor_quant_triton: expected "
        "(x, x_scale, masked_m, output_scale, output, expected_rows=...) or "
        "(x, x_scale, masked_m, output_scale, output), "
        "found (x, x_scale, masked_m, out_scale, output, expected_rows=...)"
    )
    assert (report.problems, report.fork_problems) == ([message], [message])
    assert checker.first_drift([*reports[:-1], report]) == f"sglang 0.5.23 is the first that drifts: {message}"


def test_what_only_the_fork_stumbles_over_is_named_too(checker, tmp_path):
    file = "sglang/srt/layers/moe/token_dispatcher/deepep.py"
    report = spoiled(
        checker, tmp_path, "0.5.23", file, "    masked_m: torch.Tensor\n    expected_m: int\n", "    x: int\n"
    )
    assert report.problems == []
    assert checker.first_drift([report]).startswith(
        "sglang 0.5.23 is the first that drifts: in-tree patch: sglang.srt.layers.moe.token_dispatcher.deepep: "
        "DeepEPLLDispatchOutput: expected six fields"
    )


RUNNER = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"
GIVEN_TO_SEVERAL = """            num_token_non_padded=(
                buffers.num_token_non_padded if enable_num_token_non_padded() else None
            ),
"""
GIVEN = "            num_token_non_padded=buffers.num_token_non_padded,\n"


@pytest.mark.parametrize(
    "version, old, new, problem",
    [
        (
            "0.5.18",
            GIVEN,
            GIVEN_TO_SEVERAL,
            "decode graphs: they keep tokens with one rank, decode_graphs says 0.5.12 - 0.5.20 drop",
        ),
        (
            "0.5.23",
            GIVEN_TO_SEVERAL,
            "",
            "decode graphs: whether they drop tokens cannot be read: srt/model_executor/runner/decode_cuda_graph_runner.py: 0 "
            "batches are captured with num_token_non_padded, must be one",
        ),
    ],
)
def test_decode_graphs_that_are_not_what_the_plugin_says_are_named(checker, tmp_path, version, old, new, problem):
    report = spoiled(checker, tmp_path, version, RUNNER, old, new)
    assert (report.problems, report.fork_problems) == ([problem], [])


def test_a_moved_module_is_named(checker, tmp_path):
    (wheel,) = checker.cached_wheels.engine_wheels(["0.5.23"]).values()
    package = checker.unpack(wheel, tmp_path / "moved")
    old = package / "srt/layers/moe/ep_moe/kernels.py"
    old.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(package.parent / KERNELS, old)
    report = checker.VersionReport("0.5.23", ">=3.11", "2.14.1", "3.8.0", "0.4.10")
    checker.check_package(package, report)
    assert report.problems == [
        f"{name}: expected it in sglang.kernels.ops.moe.ep_moe_kernels, found it in sglang.srt.layers.moe.ep_moe.kernels"
        for name in ("fp8_per_token_to_per_tensor_quant_triton", "silu_and_mul_masked_post_per_tensor_quant_fwd")
    ]


@pytest.fixture
def new_engine(checker, tmp_path):
    """Makes a cache of wheels that holds 0.5.23 as it is and, with a piece of its kernels' text replaced, as 0.5.24."""

    def make(old="", new=""):
        (wheel,) = checker.cached_wheels.engine_wheels(["0.5.23"]).values()
        root, folder = tmp_path / "new", tmp_path / "engine-wheels"
        checker.unpack(wheel, root)
        for file, before, after in (("sglang/_version.py", "'0.5.23'", "'0.5.24'"), (KERNELS, old, new)):
            text = (root / file).read_text()
            assert text.count(before) == 1 or not before
            (root / file).write_text(text.replace(before, after))
        folder.mkdir()
        (folder / wheel.name).symlink_to(wheel)
        with zipfile.ZipFile(folder / wheel.name.replace("0.5.23", "0.5.24"), "w") as archive:
            for path in root.rglob("*.py"):
                archive.write(path, path.relative_to(root))
            archive.writestr("sglang-0.5.24.dist-info/METADATA", checker._metadata(wheel))
        return tmp_path

    return make


def test_a_new_version_of_the_same_engine_is_said_to_be_new_and_does_not_drift(checker, new_engine, capsys):
    cache = new_engine()
    assert checker.main(["--versions", "0.5.23", "0.5.24", "--cache", str(cache)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "sglang 0.5.23        plugin ok      in-tree ok      triton 3.8.0 ",
        "sglang 0.5.24        plugin ok      in-tree ok      triton 3.8.0   not in plugin.ENGINES yet",
    ]
    assert said.err == ""


def test_what_drifts_in_a_new_version_is_all_that_is_named(checker, new_engine, capsys):
    cache = new_engine("    output: torch.Tensor,\n    expected_rows", "    out: torch.Tensor,\n    expected_rows")
    assert checker.main(["--versions", "0.5.24", "--cache", str(cache)]) == 1
    assert capsys.readouterr().err == (
        "error: sglang 0.5.24 is the first that drifts: "
        "sglang.kernels.ops.moe.ep_moe_kernels.fp8_per_token_to_per_tensor_quant_triton: expected "
        "(x, x_scale, masked_m, output_scale, output, expected_rows=...) or "
        "(x, x_scale, masked_m, output_scale, output), "
        "found (x, x_scale, masked_m, output_scale, out, expected_rows=...)\n"
    )


def test_some_versions_are_not_written(checker, capsys):
    with pytest.raises(SystemExit) as refused:
        checker.main(["--versions", "0.5.23", "--write"])
    assert refused.value.code == 2
    assert "--write: not allowed with argument --versions" in capsys.readouterr().err


def test_a_version_that_pip_does_not_know_is_named(checker, tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise checker.cached_wheels.FetchError(f"pip {arguments[1]}: no matching distribution")

    monkeypatch.setattr(checker.cached_wheels, "_pip", fail)
    assert checker.main(["--versions", "0.5.99", "--cache", str(tmp_path)]) == 2
    assert "error: pip sglang==0.5.99: no matching distribution" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith(".fetching")]


def test_a_torch_without_a_known_triton_is_named(checker, monkeypatch):
    monkeypatch.delitem(checker.TRITON_OF_TORCH, "2.14")
    (report,) = checker.check_versions(["0.5.23"])
    assert checker.first_drift([report]).endswith("torch 2.14.1: add the Triton that it brings to TRITON_OF_TORCH")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
