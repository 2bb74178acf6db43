"""Measured launches of the Triton grouped GEMMs without a GPU: the file, its look-up, the rule, and when Triton is ahead."""

import json
import logging
import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table as table
from sglang_w4afp8.kernels.ops.moe.grouped_gemm_table import MeasuredPair, ShapeLaunches
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GroupedGemmLaunch

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

GPU = "NVIDIA H200"
FILE = "two_kernels_nvidia_h200.json"
METADATA = {
    "gpu": GPU,
    "schedule": table.SCHEDULE,
    "triton": "3.6.0",
    "package_version": "0.1.0",
    "kernel_version": "0.4.5",
}
N, K = 2048, 7168
SHIPPED = sorted(tuned_config.SHIPPED_DIRECTORY.glob(f"{table.KIND}_*.json"))


def hints(**changes):
    return {"block_m": 16, "groups_per_step": 1, "num_warps": 4, "num_stages": 4, "look_up": False, **changes}


def entry(expected_m=2, gate_up=None, down=None, **times):
    return {"expected_m": expected_m, "gate_up": gate_up or hints(), "down": down or hints(), **times}


def shape(*launches, n=N, k=K, experts=64, first=64, second=128):
    names = {"n": n, "k": k, "experts": experts, "gate_up_block_n": first, "down_block_n": second}
    return {**names, "launches": list(launches) or [entry()]}


def one(*launches, **names):
    return {"shapes": [shape(*launches, **names)]}


def pair(expected_m, block_m=16, first=64, second=128, triton=None, cutlass=None):
    launches = (GroupedGemmLaunch(block_n, block_m, 1, 4, 4) for block_n in (first, second))
    return MeasuredPair(expected_m, *launches, triton, cutlass)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned_config, "user_directory", lambda: tmp_path / "user")
    monkeypatch.setattr(tuned_config, "SHIPPED_DIRECTORY", tmp_path / "shipped")
    tuned_config.clear_cache()
    table.clear_cache()
    yield
    tuned_config.clear_cache()
    table.clear_cache()


def write(directory, data, **metadata):
    tuned_config.write_tuned(directory / FILE, {**METADATA, **metadata}, data)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- the file


def test_parsing_keeps_every_value_and_sorts_by_expected_m():
    data = one(
        entry(9, gate_up=hints(block_m=32, num_stages=3), triton_us=400.5, cutlass_us=530),
        entry(2, down=hints(groups_per_step=2, num_warps=8)),
    )
    (launches,) = table.parse(data).values()
    assert launches.pairs == (
        MeasuredPair(2, GroupedGemmLaunch(64, 16, 1, 4, 4), GroupedGemmLaunch(128, 16, 2, 8, 4)),
        MeasuredPair(9, GroupedGemmLaunch(64, 32, 1, 4, 3), GroupedGemmLaunch(128, 16, 1, 4, 4), 400.5, 530.0),
    )
    assert launches.block_ns == (64, 128)


def test_what_is_written_is_what_is_parsed():
    measured = {
        (N, K, 64): ShapeLaunches((pair(2, triton=1.5, cutlass=2.0), pair(9, block_m=32))),
        (N, 6144, 8): ShapeLaunches((pair(3, first=32, second=64),)),
    }
    assert table.parse(json.loads(json.dumps(table.to_data(measured)))) == measured


@pytest.mark.parametrize("field", ["block_m", "groups_per_step", "num_warps", "num_stages"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "8", True, None, 2**12], ids=repr)
@pytest.mark.parametrize("gemm", ["gate_up", "down"])
def test_a_launch_that_is_none_is_refused_by_name(gemm, field, value):
    with pytest.raises(ValueError, match=rf"^{field}: is .*must be "):
        table.parse(one(entry(**{gemm: hints(**{field: value})})))


REFUSED = {
    "no power of two": (one(entry(gate_up=hints(block_m=48))), "block_m: is 48, must be a power of two"),
    "tile does not divide N": (one(n=2080), "block_n: is 64, must divide 2080"),
    "groups": (one(entry(gate_up=hints(groups_per_step=4)), k=768), "groups_per_step: is 4, must divide 6 groups"),
    "shared memory": (one(entry(gate_up=hints(block_m=256, num_stages=8, num_warps=8))), "num_stages: is 8 of 40960"),
    "time": (one(entry(triton_us=-1)), "triton_us: is -1, must be a positive number or absent"),
    "not a time": (one(entry(cutlass_us="fast")), "cutlass_us: is 'fast'"),
    "no launches": ({"shapes": [{**shape(), "launches": []}]}, "launches: n 2048, k 7168, experts 64 has none"),
    "twice": (one(entry(2), entry(2)), "launches: .* stands there twice"),
    "no shapes": ({"shapes": []}, "shapes: none"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_launched_or_compared_is_refused(case):
    data, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{message}"):
        table.parse(data)


def test_accumulators_that_would_spill_are_refused():
    table.parse(one(entry(gate_up=hints(block_m=128, num_stages=2))))
    with pytest.raises(ValueError, match="^block_m: with block_n makes 256 accumulators a thread, must be at most 128"):
        table.parse(one(entry(gate_up=hints(block_m=128, num_stages=2)), first=128))


# ---- the look-up


def test_the_nearest_experts_and_rows_are_taken(tmp_path):
    few = shape(entry(2, gate_up=hints(num_stages=2)), experts=8)
    many = shape(entry(2, gate_up=hints(num_stages=3)), entry(17, gate_up=hints(num_stages=5)), experts=64)
    write(tmp_path / "user", {"shapes": [few, many]})

    def stages(experts, expected_m, n=N):
        return table.launches(GPU, n, K, experts, (64, 128), expected_m)[0].num_stages

    assert [stages(64, m) for m in (1, 2, 5, 6, 17, 500)] == [3, 3, 3, 5, 5, 5]
    assert [stages(experts, 2) for experts in (6, 8, 12, 43, 64, 96)] == [2, 2, 2, 3, 3, 3]
    # No entry serves a layer of more than half as many experts more, or a third fewer: there the rule does.
    for experts in (1, 5, 13, 16, 42, 97, 256):
        assert table.shape_launches(GPU, N, K, experts) is None
        assert table.launches(GPU, N, K, experts, (64, 128), 2) == (table.rule(64, 1, gate_up=True), table.rule(128, 1))
    assert table.shape_launches(GPU, 1024, K, 64) is None
    assert stages(64, 2, n=1024) == table.rule(64, 1).num_stages


def test_weights_of_another_layout_take_the_rule(tmp_path):
    write(tmp_path / "user", one(entry(2, gate_up=hints(num_stages=7))))
    assert table.launches(GPU, N, K, 64, (64, 128), 2)[0].num_stages == 7
    assert table.launches(GPU, N, K, 64, (64, 64), 2) == (table.rule(64, 1, gate_up=True), table.rule(64, 1))


@pytest.mark.parametrize(
    "expected_m, block_m", [(None, 16), (1, 8), (5, 8), (6, 16), (17, 16), (18, 32), (33, 32), (34, 64), (999, 64)]
)
def test_without_a_file_the_tile_follows_the_rows(expected_m, block_m):
    for launch in table.launches(None, N, K, 64, (64, 128), expected_m):
        assert launch.block_m == block_m
    # A launch of the rule is one that a table could hold.
    assert table.parse(one(entry(gate_up=table._hints(table.rule(64, block_m)), down=table._hints(table.rule(64, 1)))))


def test_a_gpu_without_a_file_costs_no_warning(tmp_path, caplog):
    assert table.shape_launches(GPU, N, K, 64) is None
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "spoil",
    [
        {"schedule": "0"},
        {"gpu": "NVIDIA H100"},
    ],
    ids=str,
)
def test_a_stale_file_costs_one_warning(tmp_path, caplog, spoil):
    write(tmp_path / "user", one(), **spoil)
    for expected_m in (2, 3, 4):
        assert table.launches(GPU, N, K, 64, (64, 64), expected_m)[0] == table.rule(64, expected_m - 1, gate_up=True)
    (warning,) = warnings(caplog)
    assert "measured with" in warning and warning.endswith("using no table for the Triton grouped GEMMs")


@pytest.mark.parametrize(
    "data", [{}, {"shapes": 3}, one(entry(gate_up=hints(num_warps=3)))], ids=["empty", "number", "warps"]
)
def test_a_malformed_file_costs_one_warning(tmp_path, caplog, data):
    write(tmp_path / "user", data)
    assert table.shape_launches(GPU, N, K, 64) is None
    assert table.shape_launches(GPU, N, K, 8) is None
    assert len(warnings(caplog)) == 1


# ---- when Triton is ahead


@pytest.mark.parametrize(
    "times, largest, ahead",
    [
        ([(2, 1.0, 1.2), (9, 1.0, 1.1)], 9, True),
        ([(2, 1.0, 1.2), (9, 1.0, 1.1), (65, 2.0, 1.0)], 9, True),  # it never sees more rows
        ([(2, 1.0, 1.2), (9, 1.0, 1.1), (65, 2.0, 1.0)], 17, False),  # nothing measured says on which side 17 is
        ([(2, 1.0, 1.2), (9, 1.0, 1.1), (65, 2.0, 1.0)], 40, False),  # served as 65 is
        ([(2, 1.0, 1.2), (9, 1.0, 1.1), (65, 1.0, 1.0)], 40, True),
        ([(2, 1.0, 1.2), (9, 1.0, 1.1), (65, 2.0, 1.0)], 65, False),
        ([(2, 1.0, 1.2), (9, 1.02, 1.0)], 9, True),
        ([(2, 1.0, 1.2), (9, 1.03, 1.0)], 9, False),
        ([(2, 1.0, 1.01), (9, 1.02, 1.0)], 9, False),  # within the limit everywhere, and slower over all
        ([(2, 1.0, 1.2), (9, 1.0, None)], 9, False),
        ([(2, 1.0, 1.2), (9, None, 1.0)], 9, False),
        ([(2, 1.0, 1.2), (9, 1.0, 1.1)], 18, True),
        ([(2, 1.0, 1.2), (9, 1.0, 1.1)], 19, False),  # nobody has measured that many
        ([(9, 1.0, 1.2)], 2, True),  # the nearest there is
    ],
)
def test_triton_wins_only_over_all_rows_and_loses_little_at_any(times, largest, ahead):
    launches = ShapeLaunches(tuple(pair(m, triton=triton, cutlass=cutlass) for m, triton, cutlass in times))
    assert launches.triton_wins(largest) is ahead


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_file_can_be_used(path):
    content = json.loads(path.read_text())
    assert path.name == tuned_config.file_name(table.KIND, content["metadata"]["gpu"])
    assert content["metadata"]["schedule"] == table.SCHEDULE
    assert table.parse(content["data"])


def test_auto_leaves_few_experts_with_many_rows_to_cutlass_and_no_others_of_the_h200():
    (path,) = [path for path in SHIPPED if path.name == tuned_config.file_name(table.KIND, GPU)]
    shapes = table.parse(json.loads(path.read_text())["data"])
    won = {
        experts: [m for m in range(1, 259) if launches.triton_wins(m)] for (_, _, experts), launches in shapes.items()
    }
    assert won.pop(8) == list(range(1, 10))
    assert list(won.values()) == [list(range(1, 259))] * 4


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
