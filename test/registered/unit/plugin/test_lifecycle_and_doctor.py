"""The log lines that prove life, the state that the chain reads, doctor's verdicts and the console command."""

import dataclasses
import importlib.metadata
import json
import logging
import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from engine_process import run_command, run_script
from sglang_w4afp8 import __version__, cli, doctor, lifecycle
from sglang_w4afp8.doctor import Probe
from sglang_w4afp8.lifecycle import ActivationReport, PatchStatus, State

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

NO_DRIVER = PatchStatus("expected_m", State.STANDING_DOWN, "cannot be imported: libcuda", needs_driver=True)
DRIFTED = PatchStatus("requant", State.STANDING_DOWN, "expected (x), found (y)")
ACTIVE = PatchStatus("silu", State.ACTIVE)
NOTED = PatchStatus("gemm", State.ACTIVE, note="passes something on")
IN_TREE = PatchStatus("requant", State.IN_TREE, "already in tree, version 0.1.0")


@pytest.fixture
def fresh_state(monkeypatch):
    monkeypatch.setattr(lifecycle, "_report", None)
    monkeypatch.setattr(lifecycle, "_live", frozenset())
    monkeypatch.setattr(lifecycle, "_first_call_logged", False)


def _report(*patches, verified=True, **more):
    return ActivationReport("0.1.0", "0.5.23", verified=verified, patches=patches, **more)


@pytest.mark.usefixtures("fresh_state")
def test_only_a_verified_active_patch_is_live():
    assert lifecycle.report() is None and lifecycle.live_patches() == ()
    lifecycle.record(_report(ACTIVE, DRIFTED, verified=False))
    assert not lifecycle.is_live("silu")
    lifecycle.record(_report(IN_TREE, ACTIVE, NO_DRIVER))
    assert [lifecycle.is_live(name) for name in ("silu", "requant", "expected_m", "nonsense")] == [
        True,
        False,
        False,
        False,
    ]
    assert lifecycle.live_patches() == ("silu",)


def test_activation_line_names_versions_and_every_patch():
    line = _report(DRIFTED, ACTIVE, PatchStatus("gemm", State.NOT_SELECTED)).line()
    assert line.startswith("sglang-w4afp8 0.1.0 on sglang 0.5.23 (pid ")
    assert line.endswith("active: silu; not selected: gemm; standing down: requant (expected (x), found (y))")
    assert "active: none; in tree: requant (already" in _report(IN_TREE).line()
    assert _report(ACTIVE, NOTED).line().endswith("active: silu, gemm (passes something on)")


@pytest.mark.usefixtures("fresh_state")
def test_first_call_is_logged_once(caplog):
    lifecycle.record(_report(ACTIVE))
    with caplog.at_level(logging.INFO, logger="sglang_w4afp8"):
        lifecycle.log_first_call(x=(64, 512, 7168), expected_m=9)
        lifecycle.log_first_call(x=(1, 1, 1), expected_m=1)
    assert [record.getMessage() for record in caplog.records] == [
        "sglang-w4afp8: first low-latency call: x=[64, 512, 7168], expected_m=9, patches=silu"
    ]


@pytest.mark.parametrize(
    "setup",
    [
        "",
        "logging.basicConfig()",
        "logging.basicConfig(level='INFO', format='[date] %(message)s')",
        "logging.getLogger('sglang_w4afp8').disabled = True",
    ],
    ids=["no handler", "root at WARNING", "root at INFO", "disabled by a dictConfig"],
)
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_announcement_is_seen_exactly_once_whatever_the_state_of_logging(setup, level):
    done = run_script(f"""
        import logging
        from sglang_w4afp8 import lifecycle
        {setup}
        lifecycle.announce({level}, "the line")
        logging.basicConfig(level="INFO", force=True)
        result = logging.getLogger("sglang_w4afp8").handlers
    """)
    assert len(done.lines("the line")) == 1, done.stderr
    assert done.result == []  # no handler of ours stays: later lines are the engine's to format


@pytest.mark.parametrize(
    ("report", "has_gpu", "expected"),
    [
        (_report(ACTIVE), True, []),
        (_report(ACTIVE, IN_TREE), True, []),
        (_report(PatchStatus("gemm", State.NOT_SELECTED), ACTIVE), True, []),
        (_report(DRIFTED, ACTIVE), False, ["requant stands down: expected (x), found (y)"]),
        (_report(NO_DRIVER, ACTIVE), False, []),
        (_report(NO_DRIVER, ACTIVE), True, ["expected_m stands down: cannot be imported: libcuda"]),
        (_report(error="KeyError: 1"), True, ["activation failed: KeyError: 1"]),
        (
            _report(ACTIVE, verified=False),
            True,
            ["the engine did not apply its hooks after the plugin had registered its own"],
        ),
        (ActivationReport("0.1.0", disabled=True), True, []),
    ],
)
def test_doctor_verdict(report, has_gpu, expected):
    assert doctor.problems(Probe(report), has_gpu, {}) == expected


def test_doctor_verdict_on_a_refused_start():
    refused = "sglang-w4afp8: refusing to start: because"
    assert doctor.problems(Probe(None, refused), True, {}) == [refused]
    assert doctor.problems(Probe(_report(), refused), True, {}) == [refused]
    # Strict mode on a machine that cannot serve anyhow: said, but no fault of the installation.
    assert doctor.problems(Probe(_report(NO_DRIVER), refused), False, {}) == []


def test_doctor_says_when_the_engine_excludes_the_plugin(monkeypatch):
    points = importlib.metadata.EntryPoints([importlib.metadata.EntryPoint("w4afp8", "x:y", "sglang.srt.plugins")])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    (problem,) = doctor.problems(Probe(None), True, {"SGLANG_PLUGINS": "other, more"})
    assert problem == "SGLANG_PLUGINS=other, more excludes this plugin: add w4afp8 or unset it"


@pytest.fixture
def h200(monkeypatch):
    """The GPU whose tables ship, with a kernel version that has been read."""
    from sglang_w4afp8 import tuned_config
    from sglang_w4afp8.srt.layers.moe import two_kernels, w4a8_gemm

    def forget():
        tuned_config._cache.clear()
        grouped_gemm_table.clear_cache()
        w4a8_gemm.clear_cache()
        two_kernels._may_measure.cache_clear()

    from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table

    forget()
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(w4a8_gemm, "kernel_version", lambda: "0.4.7")
    yield tuned_config
    forget()


def test_doctor_says_what_serves_a_models_experts_and_from_where(h200, tmp_path, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(
        '{"hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}'
    )
    first, experts, *tiles = doctor.expert_lines(str(config), 8, 128)
    assert (
        first == f"{config} over 8 ranks: N 2048, K 7168, 32 experts a rank, up to 128 tokens a rank (33 expected rows)"
    )
    assert experts.startswith("experts: the two kernels, by the table's entry of 32 experts")
    assert tiles == [
        "CUTLASS tiles of 4096 x 7168: by a measured table",
        "CUTLASS tiles of 7168 x 2048: by a measured table",
    ]
    # A size that no entry is near to.
    (_, experts, *tiles) = doctor.expert_lines("qwen3-30b", 1, 128)
    assert experts.startswith("experts: measured when weights are loaded, as no entry of a table covers this")
    assert tiles[0] == "CUTLASS tiles of 1536 x 2048: by the rule over the tiles of sglang-kernel 0.4.7"
    from sglang_w4afp8.srt.layers.moe import two_kernels

    two_kernels._may_measure.cache_clear()
    monkeypatch.setenv("SGLANG_W4AFP8_MEASURE", "0")
    assert doctor.expert_lines("qwen3-30b", 1, 128)[1].startswith("experts: CUTLASS, as no table compares the backends")
    monkeypatch.setenv("SGLANG_W4AFP8_BACKEND", "triton")
    assert doctor.expert_lines("qwen3-30b", 1, 128)[1] == "experts: triton, as SGLANG_W4AFP8_BACKEND says"


def test_doctor_refuses_a_model_by_name_before_it_looks_at_anything(capsys, tmp_path):
    assert doctor.main(["--model", "glm-5", "--ep", "7"]) == 2
    assert capsys.readouterr().err == "doctor: ep: is 7, must divide the 256 experts\n"
    assert doctor.main(["--model", str(tmp_path)]) == 2
    assert "config.json: cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["--model", "glm-5", "--ep", "0"])
    assert stopped.value.code == 2 and "is '0', must be a positive integer" in capsys.readouterr().err


def test_report_survives_the_way_from_the_probe_process():
    report = _report(DRIFTED, ACTIVE, NOTED, NO_DRIVER, strict=True)
    assert doctor._report_from(json.loads(json.dumps(dataclasses.asdict(report)))) == report


def test_command_hands_the_rest_of_the_line_to_its_module(monkeypatch):
    seen = []
    module = type(sys)("fake_command")
    module.main = lambda argv: seen.append(argv)
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("fake", "fake_command:main", "help"),))
    assert cli.main(["fake", "--rows", "8", "x", "--help"]) == 0
    assert seen == [["--rows", "8", "x", "--help"]]


def test_command_line_without_importing_torch():
    done = run_command([sys.executable, "-X", "importtime", "-m", "sglang_w4afp8.cli", "--version"])
    assert (done.status, done.stdout.strip()) == (0, f"sglang-w4afp8 {__version__}")
    assert not done.lines("| torch") and not done.lines("| sglang\n")
    assert run_command([sys.executable, "-m", "sglang_w4afp8.cli", "no-such"]).status == 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
