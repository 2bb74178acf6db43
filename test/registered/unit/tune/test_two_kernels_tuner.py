"""The search of the two kernels' launches without a GPU: candidates, choice, table, and a run that is broken off."""

import math
import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import measure
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GroupedGemmLaunch
from sglang_w4afp8.tune import two_kernels as tuner
from sglang_w4afp8.tune.two_kernels import Size

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

SHAPE = {"hidden": 7168, "inner": 2048, "experts": 64, "padded": 1024}
META = {key: f"this {key}" for key in (*measure.SET_UP, "date")} | {"gpu": "NVIDIA H200"}


def name(block_n, block_m=16, stages=4):
    return tuner.launch_name(GroupedGemmLaunch(block_n, block_m, 1, 4, stages))


def searched(expected_m, routing, gate_up, down=None):
    return {
        **SHAPE,
        "rows": expected_m - 1,
        "routing": routing,
        "expected_m": expected_m,
        "gate_up": gate_up,
        "down": down or {name(64): 1.0},
    }


def test_a_launch_is_read_from_its_name():
    for launch in tuner.candidates(8, True):
        assert tuner.launch_of(tuner.launch_name(launch)) == launch


def test_every_candidate_could_stand_in_a_table():
    for rows in tuner.ROWS:
        for gate_up in (True, False):
            narrow, every = tuner.candidates(rows, gate_up), tuner.candidates(rows, gate_up, wide=True)
            assert narrow and set(narrow) < set(every)
            assert {launch.block_n for launch in narrow} == {64, 128}
            for launch in every:
                hints = grouped_gemm_table._hints(launch)
                parts = 2 if gate_up else 1
                assert grouped_gemm_table._parse_launch(hints, launch.block_n, 2048, 7168, parts) == launch


def test_a_launch_that_is_left_out_is_said(monkeypatch, capsys):
    monkeypatch.setattr(tuner.torch.cuda, "synchronize", lambda: None)

    def broken():
        raise RuntimeError("Unsupported function referenced")

    def sound():
        pass

    assert tuner.launchable("down", {"a": broken, "b": sound}) == {"b": sound}
    assert "down: left out a: RuntimeError: Unsupported function referenced" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no candidate of down can be launched: Unsupported function"):
        tuner.launchable("down", {"a": broken})


def test_one_block_n_for_all_rows_and_the_best_launch_over_all_routings_at_each():
    cells = [
        # 128 is best at 2 expected rows and bad at 17, so 64 is better over both.
        searched(2, "random", {name(64): 10.0, name(64, stages=3): 11.0, name(128): 9.0}),
        searched(2, "skew16", {name(64): 14.0, name(64, stages=3): 10.0, name(128): 9.0}),
        searched(17, "random", {name(64): 12.0, name(64, 32): 11.0, name(128): 20.0}),
        # What could not be launched in one routing is no candidate.
        searched(17, "skew16", {name(64): 12.0, name(128): 20.0}),
    ]
    block_n, launches = tuner.choose_launches(cells)["gate_up"]
    assert block_n == 64
    assert launches == {2: GroupedGemmLaunch(64, 16, 1, 4, 3), 17: GroupedGemmLaunch(64, 16, 1, 4, 4)}


def test_a_table_holds_times_only_of_the_launches_that_it_holds(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "NVIDIA H200")
    cells = [searched(m, routing, {name(64): 1.0}) for m in (2, 17) for routing in ("even", "random")]
    launch = dict(GroupedGemmLaunch(64, 16, 1, 4, 4).__dict__)
    measured = [
        {**SHAPE, "expected_m": 2, "gate_up": launch, "down": launch, "triton_us": triton, "cutlass_us": 8.0}
        for triton in (2.0, 8.0)
    ]
    measured.append({**measured[0], "expected_m": 17, "gate_up": {**launch, "num_stages": 3}})
    table = tuner.make_table(cells, measured)
    (launches,) = table.values()
    assert [(pair.expected_m, pair.triton_us, pair.cutlass_us) for pair in launches.pairs] == [
        (2, 8.0, 8.0),
        (17, None, None),
    ]
    path = tmp_path / tuned_config.file_name(grouped_gemm_table.KIND, "NVIDIA H200")
    for part in ({(1536, 3584, 8): launches}, table):
        assert tuner.write_table(path, part, "0.4.5") == path
    match = {"gpu": "NVIDIA H200", "schedule": grouped_gemm_table.SCHEDULE}
    assert grouped_gemm_table.parse(tuned_config.read_tuned(path, match)) == {(1536, 3584, 8): launches, **table}


def test_launches_that_do_not_divide_a_size_are_no_candidates_of_it():
    launches = [GroupedGemmLaunch(64, 8, 2), GroupedGemmLaunch(128, 8, 1), GroupedGemmLaunch(256, 8, 1)]
    assert tuner.fitting(launches, True, Size(768, 2048, 128)) == launches
    assert tuner.fitting(launches, True, Size(192, 2048, 128)) == launches[:1]
    # 640 values are five scale groups.
    assert tuner.fitting(launches, False, Size(640, 2176, 128)) == [launches[1]]


def test_everything_that_a_search_times_is_compiled_ahead_once():
    size = Size(2048, 6144, 32)
    jobs = tuner.jobs_of(size, tuner.ROWS, 1024)
    assert len(set(jobs)) == len(jobs)
    for rows in tuner.ROWS:
        for gate_up in (True, False):
            for launch in tuner.fitting(tuner.candidates(rows, gate_up), gate_up, size):
                assert tuner.CompileJob(gate_up, size, 1024, launch) in jobs


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A tuner that measures what a test says; calls are counted, and one may be the last."""

    class Run:
        path = tmp_path / tuned_config.file_name(grouped_gemm_table.KIND, "NVIDIA H200")
        searched, measured, stop_at = 0, 0, math.inf

        def tune(self, sizes, meta=META, **options):
            return tuner.tune(self.path, sizes, None, "0.4.10", meta, rows=(1, 16), **options)

        def table(self):
            match = {"gpu": "NVIDIA H200", "schedule": grouped_gemm_table.SCHEDULE}
            return grouped_gemm_table.parse(tuned_config.read_tuned(self.path, match))

        def search_cell(self, layer, regrouped, cell, wide, compiler):
            if self.searched + self.measured >= self.stop_at:
                raise KeyboardInterrupt
            self.searched += 1
            found = {"expected_m": cell.expected_m()}
            for gemm in tuner.GEMMS:
                launches = tuner.candidates(cell.rows, gemm == "gate_up")
                found[gemm] = {
                    tuner.launch_name(launch): 1.0 if (launch.block_n, launch.block_m) == (64, 16) else 2.0
                    for launch in launches
                }
            return found

        def measure_layer(self, layer, regrouped, cell, kernel, launches):
            self.measured += 1
            return {
                "expected_m": cell.expected_m(),
                "triton_us": 10.0 + (cell.routing == "random"),
                "cutlass_us": 20.0,
                **{gemm: dict(launch.__dict__) for gemm, launch in zip(tuner.GEMMS, launches, strict=True)},
            }

    state = Run()
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name, value in {
        "Layer": lambda *sizes: None,
        "Regrouped": lambda layer: None,
        "search_cell": state.search_cell,
        "measure_layer": state.measure_layer,
    }.items():
        monkeypatch.setattr(tuner, name, value)
    return state


def test_a_run_writes_the_best_launches_the_worst_routing_and_what_it_was_measured_with(run):
    assert run.tune([Size(2048, 6144, 32)]) is True
    ((key, shape),) = run.table().items()
    assert key == (2048, 6144, 32) and shape.block_ns == (64, 64)
    assert [pair.expected_m for pair in shape.pairs] == [2, 17]
    assert all(pair.gate_up.block_m == pair.down.block_m == 16 for pair in shape.pairs)
    assert {(pair.triton_us, pair.cutlass_us) for pair in shape.pairs} == {(11.0, 20.0)}
    assert shape.measured["triton"] == "this triton" and shape.measured["sglang_kernel"] == "this sglang_kernel"
    assert shape.covers(17) and shape.triton_wins(17)


def test_a_broken_run_goes_on_and_other_sizes_of_the_file_stay(run):
    sizes = [Size(2048, 6144, 32), Size(2048, 6144, 16)]
    run.stop_at = 15  # in the middle of the second size
    with pytest.raises(KeyboardInterrupt):
        run.tune(sizes)
    assert set(run.table()) == {(2048, 6144, 32)}
    first = (run.searched, run.measured)
    run.stop_at = math.inf
    assert run.tune(sizes) is True
    assert set(run.table()) == {(2048, 6144, 32), (2048, 6144, 16)}
    cells = 2 * len(tuner.plan([32], (1, 16)))
    assert (run.searched, run.measured) == (cells, cells) and sum(first) == 15
    assert run.tune([Size(2048, 7168, 8)]) is True
    assert len(run.table()) == 3
    run.tune(sizes, keep=False)
    assert run.searched == cells + len(tuner.plan([8], (1, 16))) + cells


def test_a_time_limit_leaves_whole_sizes_only(run):
    assert run.tune([Size(2048, 6144, 32)], time_limit_s=-1) is False
    assert not run.path.exists()


@pytest.mark.parametrize("key", measure.SET_UP)
def test_measurements_of_another_set_up_are_refused_by_name(run, key):
    run.tune([Size(2048, 6144, 32)])
    with pytest.raises(SystemExit, match=rf"was measured with another set-up \({key} "):
        run.tune([Size(2048, 6144, 32)], meta={**META, key: "another"})


def test_a_layer_that_is_wrong_has_no_time(monkeypatch):
    """The check is that of `measure_layer` itself, on results that the test makes."""

    class Runs:
        def __init__(self, *arguments):
            pass

        x = x_scale = None

        def whole(self, *launches):
            return lambda: "triton"

    errors = {"triton": 0.03, "cutlass": 0.04}
    monkeypatch.setattr(tuner, "LayerRuns", Runs)
    monkeypatch.setattr(tuner, "chains", lambda *arguments: {"ours": lambda: "cutlass"})
    monkeypatch.setattr(tuner, "reference_rows", lambda *arguments: None)
    monkeypatch.setattr(tuner, "error_of", lambda output, expected: errors[output])
    monkeypatch.setattr(tuner, "interleaved_medians", lambda providers, repeats: {"triton": 1.0, "cutlass": 2.0})
    cell = tuner.streaming.Cell(8, 1024, 1, "even")
    launches = (GroupedGemmLaunch(), GroupedGemmLaunch())
    assert tuner.measure_layer(None, None, cell, None, launches)["triton_us"] == 1.0
    for wrong in (0.05, math.nan):
        errors["triton"] = wrong
        with pytest.raises(RuntimeError, match="^two-kernels: .*: error "):
            tuner.measure_layer(None, None, cell, None, launches)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
