"""Measured launches without a GPU: what a file must hold, which launch a shape gets, and that a bad file costs a warning."""

import dataclasses
import json
import logging
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci

import sglang_w4afp8.kernels.ops.moe  # noqa: F401
from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels, launch_table
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch
from sglang_w4afp8.kernels.ops.moe.launch_table import MeasuredLaunch

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

GPU = "NVIDIA H200"
FILE = "streaming_nvidia_h200.json"
DEVICE = torch.device("cuda", 0)
SHIPPED = sorted(tuned_config.SHIPPED_DIRECTORY.glob(f"{launch_table.KIND}_*.json"))
METADATA = {
    "gpu": GPU,
    "schedule": launch_table.SCHEDULE,
    "triton": "3.8.0",
    "package_version": "0.1.0",
    "kernel_version": "none",
}
FIELDS = (
    "expected_m",
    "col_block",
    "m_grid",
    "cap_slack",
    "row_block",
    "num_warps",
    "overflow_experts",
    "speculative_slack",
)
COUNTS = FIELDS[:-1]


def entry(expected_m=2, **changes):
    values = dict(zip(FIELDS, (expected_m, 16, 8, 2, 1, 4, 8, 0), strict=True))
    return {**values, "overflow_first": False, **changes}


def one(**changes):
    return {"requant": {"56": {"64": [entry(**changes)]}}}


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch, tmp_path):
    """A machine with one H200 whose tuned files are under tmp_path, and nothing remembered."""
    monkeypatch.setattr(tuned_config, "user_directory", lambda: tmp_path / "user")
    monkeypatch.setattr(tuned_config, "SHIPPED_DIRECTORY", tmp_path / "shipped")
    forget()
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: GPU)
    monkeypatch.setattr(ep_moe_kernels, "requant_warp_size", lambda device: 32)
    yield
    monkeypatch.undo()
    forget()


def forget():
    tuned_config.clear_cache()
    launch_table._table.cache_clear()
    ep_moe_kernels.set_launch_lookup(launch_table.lookup)


def write(directory, data, **metadata):
    tuned_config.write_tuned(directory / FILE, {**METADATA, **metadata}, data)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- the file


def test_parsing_keeps_every_value_and_sorts_by_expected_m():
    data = {"silu": {"2048": {"64": [entry(9, m_grid=4), entry(2, row_block=4)]}}}
    launches = launch_table.parse(data)["silu"][2048][64]
    assert launches == (MeasuredLaunch(2, 16, 8, 2, 4, 4, 8, 0), MeasuredLaunch(9, 16, 4, 2, 1, 4, 8, 0))


def test_what_tuning_writes_is_what_is_parsed():
    launches = {
        ("requant", 56, 64): [MeasuredLaunch(9, 16, 8, 2, 1, 4, 8, 0), MeasuredLaunch(2, 8, 4, 4, 2, 2, 16, 1)],
        ("silu", 2048, 256): [MeasuredLaunch(2, 1024, 4, 2, 1, 4, 32, 4)],
    }
    data = json.loads(json.dumps(launch_table.to_data(launches)))
    table = launch_table.parse(data)
    assert table["requant"][56][64] == tuple(reversed(launches["requant", 56, 64]))
    assert table["silu"][2048][256] == tuple(launches["silu", 2048, 256])


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [-1, 1.0, "8", True, None, [8]], ids=repr)
def test_a_value_that_is_no_count_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: is .*must be "):
        launch_table.parse(one(**{field: value}))


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), "8", True, None, [8]], ids=repr)
def test_a_slack_that_is_no_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^speculative_slack: is .*must be a number from 0 to "):
        launch_table.parse(one(speculative_slack=value))


@pytest.mark.parametrize("value", [0, 1, "true", None], ids=repr)
def test_a_flag_that_is_neither_true_nor_false_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^overflow_first: is .*must be true or false"):
        launch_table.parse(one(overflow_first=value))


def test_half_of_the_mean_may_be_read_unseen():
    launch = MeasuredLaunch(65, 16, 8, 2, 1, 4, 8, 0.5, True).launch(65)
    assert (launch.speculative_rows, launch.overflow_first) == (32, True)
    assert MeasuredLaunch(2, 16, 8, 2, 1, 4, 8, 0.5).launch(2).speculative_rows == 1


@pytest.mark.parametrize("field", COUNTS)
def test_zero_is_refused_by_name(field):
    with pytest.raises(ValueError, match=rf"^{field}: is 0, must be "):
        launch_table.parse(one(**{field: 0}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_warps", 64),
        ("m_grid", 100_000),
        ("overflow_experts", 100_000),
        ("cap_slack", 2**40),
        ("speculative_slack", 2**40),
        ("expected_m", 2**40),
        ("col_block", 2**14),
        ("row_block", 2**21),
    ],
)
def test_what_no_gpu_launches_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: .*must be "):
        launch_table.parse(one(**{field: value}))


@pytest.mark.parametrize("count", ["0", "-8"])
@pytest.mark.parametrize("what", ["columns", "experts"])
def test_a_size_below_one_is_refused_by_name(what, count):
    by_experts = {count if what == "experts" else "64": [entry()]}
    with pytest.raises(ValueError, match=rf"^{what}: is {count}, must be at least 1"):
        launch_table.parse({"requant": {count if what == "columns" else "56": by_experts}})


@pytest.mark.parametrize("field", ["col_block", "row_block", "num_warps"])
def test_tiles_are_powers_of_two(field):
    with pytest.raises(ValueError, match=rf"^{field}: is 12, must be a power of two"):
        launch_table.parse(one(**{field: 12}))


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_value_is_refused_by_name(field):
    data = one()
    del data["requant"]["56"]["64"][0][field]
    with pytest.raises((KeyError, ValueError), match=field):
        launch_table.parse(data)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"requant": one()["requant"], "gemm": {}}, "gemm"),
        ({"requant": {"56": {"64": []}}}, "requant 56 64"),
        ({"requant": {"wide": {"64": [entry()]}}}, "wide"),
        ({"requant": {"56": {"many": [entry()]}}}, "many"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(data, names):
    with pytest.raises(ValueError, match=names):
        launch_table.parse(data)


# ---- which launch a shape gets


def choose(data, num_experts, columns, expected_rows, kernel="requant"):
    return launch_table.choose(launch_table.parse(data), kernel, num_experts, columns, expected_rows)


@pytest.mark.parametrize(
    ("expected_rows", "m_grid"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (9, 3), (10_000, 3)]
)
def test_the_largest_measured_estimate_that_is_not_above(expected_rows, m_grid):
    data = {"requant": {"56": {"64": [entry(9, m_grid=3), entry(2, m_grid=1), entry(4, m_grid=2)]}}}
    assert choose(data, 64, 56, expected_rows).m_grid == m_grid


@pytest.mark.parametrize(
    ("experts", "m_grid"), [(1, 8), (8, 8), (22, 8), (23, 64), (64, 64), (127, 64), (129, 256), (4096, 256)]
)
def test_experts_are_nearest_on_a_logarithmic_scale(experts, m_grid):
    # Between 8 and 64 the border is their geometric mean, 22.6; between 64 and 256 it is 128.
    data = {"requant": {"56": {str(count): [entry(m_grid=count)] for count in (256, 8, 64)}}}
    assert choose(data, experts, 56, 2).m_grid == m_grid


@pytest.mark.parametrize(("columns", "m_grid"), [(1, 28), (28, 28), (39, 28), (40, 56), (56, 56), (900, 56)])
def test_columns_are_nearest_on_a_logarithmic_scale(columns, m_grid):
    data = {"requant": {str(count): {"64": [entry(m_grid=count)]} for count in (28, 56)}}
    assert choose(data, 64, columns, 2).m_grid == m_grid


def test_a_kernel_that_was_not_measured_has_no_launch():
    assert choose(one(), 64, 2048, 2, kernel="silu") is None
    assert launch_table.choose(launch_table.parse({}), "requant", 64, 56, 2) is None


@pytest.mark.parametrize(("expected_rows", "row_cap", "speculative"), [(0, 3, 4), (1, 3, 4), (2, 6, 4), (9, 27, 32)])
def test_cap_and_speculation_follow_the_estimate(expected_rows, row_cap, speculative):
    # The dispatcher's estimate is one above the mean, which is what may be loaded unseen.
    launch = choose(one(cap_slack=3, speculative_slack=4), 64, 56, expected_rows)
    assert (launch.row_cap, launch.speculative_rows) == (row_cap, speculative)


def test_no_speculation_stays_none():
    assert choose(one(speculative_slack=0), 64, 56, 100).speculative_rows == 0


@given(
    experts=st.lists(st.integers(1, 1024), min_size=1, max_size=4, unique=True),
    wanted=st.integers(0, 5000),
    columns=st.integers(1, 100_000),
    expected_rows=st.integers(0, 100_000),
)
def test_a_measured_kernel_always_has_a_launch(experts, wanted, columns, expected_rows):
    data = {"requant": {"56": {str(count): [entry(2, m_grid=count), entry(9, m_grid=count)] for count in experts}}}
    launch = choose(data, wanted, columns, expected_rows)
    distance = {count: abs(math.log(count / max(1, wanted))) for count in experts}
    assert distance[launch.m_grid] == pytest.approx(min(distance.values()))


# ---- the way to the kernels


def requant_launch(expected_rows=5, max_rows=512, device=DEVICE):
    return ep_moe_kernels._requant_launch(56, 64, expected_rows, max_rows, device)


def silu_launch(expected_rows=5, max_rows=512, device=DEVICE):
    return ep_moe_kernels._silu_launch(2048, 64, expected_rows, max_rows, device)


RULE = MaskedRowsLaunch(16, 4, 10, num_warps=4, overflow_experts=9, speculative_rows=4)
BOTH = {
    "requant": {"56": {"64": [entry(2, m_grid=5)]}},
    "silu": {"2048": {"64": [entry(2, m_grid=7, col_block=512)]}},
}


def test_importing_the_kernels_package_installs_the_look_up():
    assert ep_moe_kernels._launch_lookup is launch_table.lookup


def test_a_fitting_file_reaches_both_kernels_without_a_warning(tmp_path, caplog):
    write(tmp_path / "shipped", BOTH)
    assert requant_launch() == MaskedRowsLaunch(16, 5, 10, 1, 4, 8, 0)
    assert silu_launch() == MaskedRowsLaunch(512, 7, 10, 1, 4, 8, 0)
    assert warnings(caplog) == []


def test_the_users_file_comes_before_the_shipped_one(tmp_path):
    write(tmp_path / "shipped", BOTH)
    write(tmp_path / "user", one(m_grid=6))
    assert requant_launch().m_grid == 6


@pytest.mark.parametrize(("max_rows", "row_cap"), [(512, 10), (10, 10), (9, 9), (1, 1)])
def test_the_cap_stays_inside_the_payload(tmp_path, max_rows, row_cap):
    write(tmp_path / "shipped", BOTH)
    assert requant_launch(max_rows=max_rows) == MaskedRowsLaunch(16, 5, row_cap, 1, 4, 8, 0)
    assert silu_launch(max_rows=max_rows).row_cap == row_cap


def test_without_an_estimate_the_rule_decides(tmp_path):
    write(tmp_path / "shipped", BOTH)
    launch = requant_launch(expected_rows=None)
    assert (launch.m_grid, launch.row_cap) == (32, 512)


def test_a_kernel_without_measured_launches_keeps_its_rule(tmp_path):
    write(tmp_path / "shipped", one(m_grid=6))
    assert requant_launch().m_grid == 6
    assert silu_launch() == dataclasses.replace(RULE, col_block=1024)


def test_one_choice_for_the_whole_process_even_when_the_file_changes(tmp_path):
    # What a captured graph holds and what an eager call chooses must not come apart.
    write(tmp_path / "shipped", BOTH)
    first = requant_launch()
    write(tmp_path / "shipped", one(m_grid=9))
    assert requant_launch() is first
    assert requant_launch(expected_rows=6).m_grid == first.m_grid


def test_the_cpu_and_an_unknown_gpu_ask_no_file(tmp_path, caplog, monkeypatch):
    write(tmp_path / "shipped", BOTH)
    assert requant_launch(device=torch.device("cpu")) == RULE
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: None)
    assert launch_table.lookup("requant", 64, 56, 5, DEVICE) is None
    assert warnings(caplog) == []


def test_removing_the_look_up_forgets_its_choices(tmp_path):
    write(tmp_path / "shipped", BOTH)
    assert requant_launch().m_grid == 5
    ep_moe_kernels.set_launch_lookup(None)
    assert requant_launch() == RULE


def test_an_absent_file_gives_the_rule_and_one_warning(caplog):
    assert [requant_launch(), requant_launch(6).m_grid, silu_launch().m_grid] == [RULE, 4, 4]
    (warning,) = warnings(caplog)
    assert f"no tuned file {FILE}" in warning
    assert "the launch geometry's rules" in warning


def test_another_gpu_does_not_use_the_file(tmp_path, caplog, monkeypatch):
    write(tmp_path / "shipped", BOTH)
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "NVIDIA H20")
    assert requant_launch() == RULE
    assert "streaming_nvidia_h20.json" in warnings(caplog)[0]


MALFORMED = {
    "no JSON": ("{", "unreadable"),
    "another schema": (lambda content: content.update(schema=99), "schema is 99"),
    "another schedule": (lambda content: content["metadata"].update(schedule="0"), "measured with schedule '0'"),
    "no schedule": (lambda content: content["metadata"].pop("schedule"), "measured with schedule None"),
    "another GPU": (lambda content: content["metadata"].update(gpu="NVIDIA H20"), "measured with gpu 'NVIDIA H20'"),
    "metadata incomplete": (lambda content: content["metadata"].pop("triton"), "metadata lacks triton"),
    "no data": (lambda content: content.update(data=[]), "no data"),
    "unknown kernel": (lambda content: content["data"].update(gemm={}), "gemm"),
    "launches no list": (lambda content: content["data"]["requant"]["56"].update({"64": 3}), "TypeError"),
    "kernel no table": (lambda content: content["data"].update(requant=[1]), "AttributeError"),
    "a float": (lambda content: content["data"]["requant"]["56"]["64"][0].update(m_grid=4.0), "m_grid: is 4.0"),
    "not a power of two": (
        lambda content: content["data"]["silu"]["2048"]["64"][0].update(col_block=96),
        "col_block: is 96",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_an_unusable_file_gives_the_rule_and_one_warning_with_the_reason(tmp_path, caplog, case):
    spoil, reason = MALFORMED[case]
    write(tmp_path / "shipped", BOTH)
    path = tmp_path / "shipped" / FILE
    if callable(spoil):
        content = json.loads(path.read_text(encoding="utf-8"))
        spoil(content)
        spoil = json.dumps(content)
    path.write_text(spoil, encoding="utf-8")
    # One bad entry refuses the whole file: a half-used table would be neither measured nor the rule.
    assert [requant_launch(), requant_launch(6).m_grid, silu_launch().m_grid] == [RULE, 4, 4]
    (warning,) = warnings(caplog)
    assert reason in warning
    assert "the launch geometry's rules" in warning


def test_a_malformed_user_file_leaves_the_shipped_one_in_use(tmp_path, caplog):
    write(tmp_path / "shipped", BOTH)
    write(tmp_path / "user", one(num_warps=3))
    assert requant_launch().m_grid == 5
    (warning,) = warnings(caplog)
    assert "num_warps: is 3" in warning


# ---- the shipped files


def test_a_tuned_file_is_shipped():
    assert FILE in [path.name for path in SHIPPED]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_file_is_complete(path):
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    wanted = {*tuned_config.REQUIRED_METADATA, "torch", "schedule"}
    assert {key for key in wanted if isinstance(metadata.get(key), str) and metadata[key]} == wanted
    assert path.name == tuned_config.file_name(launch_table.KIND, metadata["gpu"])
    match = {"gpu": metadata["gpu"], "schedule": launch_table.SCHEDULE}
    table = launch_table.parse(tuned_config.read_tuned(path, match))
    assert set(table) == {"requant", "silu"}
    for kernel, by_columns in table.items():
        for columns, by_experts in by_columns.items():
            for experts, launches in by_experts.items():
                # An unpatched estimate of one row per expert is 2; without it small decode would take a far neighbour.
                assert launches[0].expected_m == 2, (kernel, columns, experts)
                estimates = [launch.expected_m for launch in launches]
                assert estimates == sorted(set(estimates)), (kernel, columns, experts)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_file_answers_for_the_models_it_was_made_for(path, tmp_path, caplog, monkeypatch):
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / path.name).write_bytes(path.read_bytes())
    gpu = json.loads(path.read_text(encoding="utf-8"))["metadata"]["gpu"]
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: gpu)
    for experts in (8, 32, 64, 128, 256):
        for expected_rows in (1, 2, 9, 129):
            for kernel, columns in (("requant", 56), ("requant", 28), ("silu", 2048), ("silu", 1536)):
                launch = launch_table.lookup(kernel, experts, columns, expected_rows, DEVICE)
                assert launch is not None and launch.row_cap >= expected_rows
    assert warnings(caplog) == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
