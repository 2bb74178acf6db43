"""What the measuring code promises without a GPU: the cells' row counts, resuming, refusals, and the tuner's choice.

Timing is replaced by a clock of the test's own; the kernels run under the interpreter.
"""

import dataclasses
import functools
import json
import math
import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import timing, tuned_config
from sglang_w4afp8.bench import measure, streaming, sweep
from sglang_w4afp8.kernels.ops.moe import launch_table
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.tune import cli as tune
from sglang_w4afp8.tune import gemm_tiles
from sglang_w4afp8.tune import streaming as tune_streaming

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU; the real one is used elsewhere")


@pytest.mark.parametrize("experts, rows", [(8, 1), (8, 128), (64, 1), (64, 32), (256, 8)])
@pytest.mark.parametrize("routing", streaming.ROUTINGS)
def test_every_routing_keeps_the_total(experts, rows, routing):
    counts = streaming.Cell(experts, 2048, rows, routing).row_counts()
    assert counts.dtype == torch.int32 and len(counts) == experts
    assert int(counts.sum()) == experts * rows
    assert int(counts.min()) >= 0


def test_routings_are_what_they_say():
    assert streaming.Cell(4, 64, 5, "even").row_counts().tolist() == [5, 5, 5, 5]
    skewed = streaming.Cell(32, 64, 2, "skew16").row_counts().tolist()
    assert skewed[16] == 32
    assert sorted(skewed)[:-1] == [1] * 30 + [2]
    spread = streaming.Cell(64, 2048, 8, "random").row_counts()
    assert len(set(spread.tolist())) > 4
    assert torch.equal(spread, streaming.Cell(64, 2048, 8, "random").row_counts())


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_the_estimate_is_the_dispatchers(rows):
    # (rows + E) // E of the total: one above an exact mean.
    assert streaming.Cell(64, 2048, rows, "even").expected_m() == rows + 1


@pytest.mark.parametrize("cell", [streaming.Cell(4, 4, 5, "even"), streaming.Cell(4, 64, 5, "sideways")])
def test_a_cell_that_cannot_be_is_refused(cell):
    with pytest.raises(ValueError, match="^(padded|routing): "):
        cell.row_counts()


def test_the_engines_own_kernel_is_not_ours(monkeypatch):
    name = "silu_and_mul_masked_post_per_tensor_quant_fwd"
    assert streaming.engine_function(name).__module__ == "sglang.kernels.ops.moe.ep_moe_kernels"
    engine = streaming._engine_kernels()
    monkeypatch.setattr(engine, name, streaming.ours.silu_and_mul_masked_post_per_tensor_quant_fwd)
    with pytest.raises(RuntimeError, match=f"^{name}: the plugin is active"):
        streaming.engine_function(name)


def test_different_bytes_are_never_timed():
    output = torch.zeros(4, dtype=torch.float8_e4m3fn)

    def write(value):
        return lambda: output.view(torch.uint8)[:2].fill_(value)

    streaming.check_same_bytes("same", write(3), write(3), output)
    with pytest.raises(streaming.MismatchError, match="^other: "):
        streaming.check_same_bytes("other", write(3), write(4), output)
    with pytest.raises(streaming.MismatchError, match="^padding: "):
        streaming.check_same_bytes("padding", lambda: output.view(torch.uint8).fill_(3), write(3), output)


class Clock:
    """Stands in for graph capture: a provider's time is what the test says of it, in turns."""

    def __init__(self, monkeypatch, price):
        self.turns = []
        self.price = price
        for module in (timing, tune_streaming):
            monkeypatch.setattr(module, "capture", self.capture)
            monkeypatch.setattr(module, "replay_us", lambda graph, launches: graph.replay() / launches)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def capture(self, run, launches):
        clock = self

        class Graph:
            def replay(self):
                clock.turns.append(run)
                return clock.price(run) * launches

        run()
        return Graph()


def test_providers_take_turns_and_the_median_counts(monkeypatch):
    def fast():
        pass

    def slow():
        pass

    prices = {fast: [2.0] * 100, slow: [9.0, 9.0, 3.0, 50.0, 4.0, 5.0, 6.0] + [5.0] * 100}
    clock = Clock(monkeypatch, lambda run: prices[run].pop(0))
    medians = timing.interleaved_medians({"fast": fast, "slow": slow}, repeats=5, launches=3)
    # The first two turns warm up; 3, 50, 4, 5, 6 are left.
    assert medians == {"fast": 2.0, "slow": 5.0}
    turns = list(zip(clock.turns[::2], clock.turns[1::2], strict=True))
    assert len(turns) == 7 and set(turns) == {(fast, slow), (slow, fast)}


@pytest.mark.parametrize("us, launches", [(0.5, 40), (2.0, 40), (10.0, 15), (1000.0, 4)])
def test_short_calls_share_a_graph(us, launches):
    assert timing.launches_for(us) == launches


@pytest.fixture
def tiny(monkeypatch):
    """Sweeps at sizes that the interpreter can run, on CPU tensors."""
    monkeypatch.setattr(streaming, "PADDED", 40)
    monkeypatch.setattr(sweep, "HIDDEN", (256,))
    monkeypatch.setattr(sweep, "INNER", (128,))
    for buffers in (streaming.RequantBuffers, streaming.Bf16Buffers, streaming.SiluBuffers):
        monkeypatch.setattr(buffers.__init__, "__defaults__", ("cpu",))
    # The engine asks the GPU for its warp width, and there is none.
    monkeypatch.setattr(streaming._engine_kernels(), "requant_warp_size", lambda device: 32, raising=False)
    monkeypatch.setattr(streaming, "interleaved_medians", lambda providers, repeats: dict.fromkeys(providers, 2.0))


@pytest.mark.parametrize("kind, size", [("requant", "k"), ("bf16", "k"), ("silu", "n"), ("layer", "n")])
def test_a_sweep_is_written_and_resumed(tiny, tmp_path, monkeypatch, kind, size):
    out = tmp_path / "out.json"
    cells = sweep.run(kind, out, [2], [1, 2], 40, 1)
    assert len(cells) == 2 * len(streaming.ROUTINGS)
    assert cells == json.loads(out.read_text())["cells"]
    assert {"experts", "padded", "rows", "routing", "expected_m", "ours_us", "engine_us", "copy_us", size} <= set(
        cells[0]
    )
    out.write_text(json.dumps({**json.loads(out.read_text()), "cells": cells[:-1]}))
    monkeypatch.setattr(streaming, "interleaved_medians", lambda providers, repeats: dict.fromkeys(providers, 7.0))
    resumed = sweep.run(kind, out, [2], [1, 2], 40, 1)
    assert [cell["ours_us"] for cell in resumed] == [2.0] * (len(cells) - 1) + [7.0]


@pytest.mark.parametrize("kind", ["requant", "silu"])
def test_our_kernel_is_timed_with_the_engines_geometry_too(tiny, tmp_path, kind):
    (cell, *_) = sweep.run(kind, tmp_path / "out.json", [2], [1], 40, 1)
    assert cell["legacy_us"] == 2.0


def test_the_legacy_geometry_of_silu_is_the_engines():
    # The engine starts (N / 256, 32, E) programs and knows no cap and no overflow.
    launch = streaming.silu_legacy_launch(2048)
    assert (launch.col_block, launch.m_grid, launch.row_cap, launch.row_block) == (256, 32, 2048, 1)
    assert "isolates the launch geometry" in " ".join(streaming.silu_legacy_launch.__doc__.split())


SET_UP = {
    "gpu": "NVIDIA H200",
    "driver": "1",
    "torch": "2",
    "triton": "3",
    "sglang": None,
    "sglang_kernel": "0.4.5",
    "sglang_w4afp8": "0.1.0",
}


def test_results_of_another_set_up_are_not_mixed(tiny, tmp_path):
    out = tmp_path / "out.json"
    sweep.run("silu", out, [2], [1], 40, 1)
    content = json.loads(out.read_text())
    content["meta"]["triton"] = "0.0"
    out.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"out.json: was measured with another set-up \(triton 0.0, not "):
        sweep.run("silu", out, [2], [1], 40, 1)
    assert json.loads(out.read_text()) == content


@pytest.mark.parametrize("key", SET_UP)
def test_every_version_is_part_of_the_set_up(tmp_path, key):
    path = tmp_path / "out.json"
    measure.Results(path, SET_UP).add({"rows": 1})
    # The command and the date are not: a second run goes on with the cells of the first.
    assert measure.Results(path, {**SET_UP, "command": "again", "date": "later"}).cells == [{"rows": 1}]
    with pytest.raises(SystemExit, match=f"another set-up \\({key} "):
        measure.Results(path, {**SET_UP, key: "other"})


def test_results_hold_the_cells_that_agree_in_every_value(tmp_path):
    results = measure.Results(tmp_path / "deep" / "out.json", SET_UP)
    assert not results.holds({"rows": 1})
    results.add({"rows": 1, "experts": 8, "ours_us": 2.0})
    results.add({"rows": 2, "experts": 8, "ours_us": 3.0})
    again = measure.Results(results.path, SET_UP)
    assert again.cells == results.cells
    assert again.holds({"rows": 2, "experts": 8})
    assert not again.holds({"rows": 2, "experts": 64}) and not again.holds({"rows": 1, "k": 7168})


def test_bf16_is_timed_beside_fp8_on_the_same_rows(tiny, tmp_path, monkeypatch):
    seen = []

    def medians(providers, repeats):
        seen.append(sorted(providers))
        return {name: {"ours": 6.0, "fp8": 4.0}.get(name, 3.0 + len(name)) for name in providers}

    monkeypatch.setattr(streaming, "interleaved_medians", medians)
    cells = sweep.run("bf16", tmp_path / "bf16.json", [2], [1], 40, 1)
    assert seen[0] == ["copy:2048", "copy:4096", "copy_fp8:2048", "copy_fp8:4096", "fp8", "ours"]
    figures = {"ours_us": 6.0, "fp8_us": 4.0, "copy_us": 12.0, "copy_fp8_us": 16.0, "engine_us": None}
    assert [{name: cell[name] for name in figures} for cell in cells] == [figures] * len(streaming.ROUTINGS)


def test_a_bf16_payload_moves_three_bytes_an_element():
    assert streaming.bf16_bytes(10, 256) == 10 * 256 * 3


def test_the_summary_compares_bf16_with_fp8_per_byte():
    cell = {"k": 7168, "experts": 1, "rows": 1, "ours_us": 3.0, "copy_us": 1.5, "fp8_us": 2.0, "copy_fp8_us": 1.6}
    lines = sweep.summarize([cell]).splitlines()
    assert [line.partition(", worst")[0] for line in lines] == [
        "copy/ours: geometric mean 0.500",
        "copy/ours of fp8: geometric mean 0.800",
        # 3 bytes an element in 3 us, against 2 bytes and its share of a scale in 2 us.
        "bytes a second, ours over ours of fp8: geometric mean 0.985",
    ]


def test_bf16_is_measured_at_fewer_experts_unless_told(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep, "run", lambda kind, out, experts, *rest: asked.append((kind, out.name, tuple(experts))))
    monkeypatch.setattr(sweep, "summarize", lambda cells: "")
    for words in (["bf16"], ["bf16", "--experts", "32"], ["silu"]):
        assert sweep.main(words) == 0
    assert asked == [
        ("bf16", "bf16.json", (8, 64, 256)),
        ("bf16", "bf16.json", (32,)),
        ("silu", "silu.json", streaming.EXPERTS),
    ]


def test_untuned_launches_come_from_the_rules_into_a_file_of_their_own(monkeypatch, capsys):
    looked_up = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep, "set_launch_lookup", looked_up.append)
    written = []
    monkeypatch.setattr(sweep, "run", lambda kind, out, *rest: written.append((out.name, list(looked_up))))
    monkeypatch.setattr(sweep, "summarize", lambda cells: "")
    for words in (["layer"], ["layer", "--untuned"]):
        assert sweep.main(words) == 0
    assert written == [("streaming.json", []), ("streaming_untuned.json", [None])]


@pytest.mark.parametrize("command", [sweep.main, tune.main])
def test_without_a_gpu_nothing_is_measured(command, capsys):
    assert command(["requant"] if command is sweep.main else []) == 2
    assert "no GPU" in capsys.readouterr().err


def test_an_unknown_kind_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        tune.main(["gem"])
    assert "kinds: is 'gem', must be streaming, gemm, two-kernels or all" in capsys.readouterr().err


def test_the_tuner_keeps_the_fastest_and_resumes(tiny, tmp_path, monkeypatch):
    wanted = {"col_block": 1, "row_block": 2}
    measured = []

    def price(run):
        candidate = (run.__defaults__ or (None,))[-1]
        if candidate is None:
            return 5.0
        measured.append(candidate)
        return 1.0 if all(getattr(candidate, k) == v for k, v in wanted.items()) else 2.0 + candidate.m_grid / 100

    Clock(monkeypatch, price)
    monkeypatch.setattr(tune_streaming, "_REQUANT_TILES", dict.fromkeys((True, False), ((1, 2, 1), (2, 1, 1))))
    monkeypatch.setattr(tune_streaming, "_compile_ahead", lambda run, candidates: None)
    monkeypatch.setattr(tune_streaming, "_rule", lambda *args: launch_table.MeasuredLaunch(2, 2, 4, 2, 1, 4, 1, 0))
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "Test GPU")
    out = tmp_path / "streaming_test_gpu.json"
    tune_streaming.tune(out, [256], [], [2], [1])
    content = json.loads(out.read_text())
    (winner,) = content["data"]["requant"]["2"]["2"]
    assert (winner["col_block"], winner["row_block"], winner["expected_m"]) == (1, 2, 2)
    assert content["metadata"]["gpu"] == "Test GPU" and content["metadata"]["schedule"] == launch_table.SCHEDULE
    assert launch_table.parse(content["data"])
    seen = len(measured)
    tune_streaming.tune(out, [256], [], [2], [1])
    assert len(measured) == seen and json.loads(out.read_text()) == content
    # Measured again, the launch in the file is a finalist, although no stage proposes it; other cells of the file stay.
    incumbent = {**winner, "m_grid": 7}
    other = {**winner, "expected_m": 9}
    content["data"]["requant"]["2"]["2"] = [incumbent, other]
    out.write_text(json.dumps(content))
    wanted["m_grid"] = 7
    tune_streaming.tune(out, [256], [], [2], [1], keep=False)
    assert len(measured) > seen
    assert json.loads(out.read_text())["data"]["requant"]["2"]["2"] == [incumbent, other]


def test_a_malformed_file_is_not_tuned_over_unasked(tiny, tmp_path, monkeypatch):
    Clock(monkeypatch, lambda run: 1.0)
    monkeypatch.setattr(tune_streaming, "_REQUANT_TILES", dict.fromkeys((True, False), ((1, 2, 1), (2, 1, 1))))
    monkeypatch.setattr(tune_streaming, "_compile_ahead", lambda run, candidates: None)
    monkeypatch.setattr(tune_streaming, "_rule", lambda *args: launch_table.MeasuredLaunch(2, 2, 4, 2, 1, 4, 1, 0))
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "Test GPU")
    out = tmp_path / "streaming_test_gpu.json"
    out.write_text("{}")
    with pytest.raises(tuned_config.TunedConfigError, match="no metadata"):
        tune_streaming.tune(out, [256], [], [2], [1])
    assert out.read_text() == "{}"
    tune_streaming.tune(out, [256], [], [2], [1], keep=False)
    assert json.loads(out.read_text())["data"]["requant"]


def test_times_at_several_placements_are_one_geometric_mean():
    timed = [{"ours_us": 2.0, "engine_us": None, "copy_us": 1.0}, {"ours_us": 8.0, "engine_us": None, "copy_us": 1.0}]
    assert streaming.over_placements(timed) == {"ours_us": 4.0, "engine_us": None, "copy_us": 1.0}


def test_every_placement_is_memory_of_its_own(tiny, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(streaming, "requant_providers", lambda buffers, cell: seen.append(buffers) or {})
    monkeypatch.setattr(
        streaming, "measure_cell", lambda providers, repeats: {"ours_us": float(repeats), "engine_us": None}
    )
    cells = sweep.run("requant", tmp_path / "out.json", [2], [1], 40, 8, placements=3)
    assert len({buffers.x.data_ptr() for buffers in seen}) == 3
    assert {cell["ours_us"] for cell in cells} == {3.0}  # eight turns, shared out


def test_the_rule_stays_where_nothing_beats_it_clearly(tiny, tmp_path, monkeypatch):
    rule = launch_table.MeasuredLaunch(2, 2, 4, 2, 1, 4, 1, 0)

    def price(run):
        candidate = (run.__defaults__ or (None,))[-1]
        # The engine's kernel is no candidate, and slower than all of them.
        return 2.0 if candidate is None else 1.005 if candidate == rule else 1.0

    Clock(monkeypatch, price)
    monkeypatch.setattr(tune_streaming, "_REQUANT_TILES", dict.fromkeys((True, False), ((1, 2, 1), (2, 1, 1))))
    monkeypatch.setattr(tune_streaming, "_compile_ahead", lambda run, candidates: None)
    monkeypatch.setattr(tune_streaming, "_rule", lambda *args: rule)
    winner, score = tune_streaming.tune_cell("requant", [streaming.RequantBuffers(2, 40, 256)] * 2, 2, 2, 1)
    assert winner == rule and math.isclose(score, 1.005)


def test_no_routing_pays_for_another():
    # The first is fastest twice and slow under skew, the second is near the best everywhere.
    first, second = tune_streaming._scores([(1.0, 1.0, 1.5), (1.05, 1.05, 1.0)])
    assert second < first


def test_a_launch_that_loses_to_the_engine_is_ranked_behind_one_that_does_not():
    times = [(1.0, 1.0, 1.2), (1.2, 1.2, 1.05)]
    first, second = tune_streaming._scores(times)
    assert first < second
    first, second = tune_streaming._scores(times, engine=(2.0, 2.0, 1.1))
    assert second < first


def test_gemm_tuning_goes_on_where_it_stopped(tmp_path, monkeypatch):
    swept = []

    class StoppedError(Exception):
        pass

    def run_sweep(run, cells, kernel, device, deadline, verify, done):
        for cell in cells:
            if cell.key not in run.setdefault("cells", {}):
                swept.append(cell.key)
                run["cells"][cell.key] = {"cell": dataclasses.asdict(cell)}
                done(cell, "sweep")
                if len(swept) == 3:
                    raise StoppedError

    def kernel(
        d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides,
        chunk_size, topk,
    ):  # fmt: skip
        raise AssertionError("never launched")

    module = type(sys)("sgl_kernel")
    module.cutlass_w4a8_moe_mm = kernel
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    monkeypatch.setattr(tuned_config, "gpu_name", functools.cache(lambda index=None: "Test GPU"))
    monkeypatch.setattr(w4a8_gemm, "kernel_version", lambda: "0.4.5")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gemm_tiles, "run_sweep", run_sweep)
    monkeypatch.setattr(gemm_tiles, "table_data", lambda run: {"cells": len(run["cells"])})
    arguments = {"rows": [1, 2], "directory": tmp_path}
    cells = gemm_tiles.plan_cells([(16, 512)], [8], [1, 2])
    assert len(cells) > 3
    with pytest.raises(StoppedError):
        gemm_tiles.tune_gemm([(16, 512)], [8], **arguments)
    assert not list(tmp_path.glob("*.json"))
    path = gemm_tiles.tune_gemm([(16, 512)], [8], **arguments)
    assert swept == [cell.key for cell in cells]
    assert json.loads(path.read_text())["data"] == {"cells": len(cells)}
    gemm_tiles.tune_gemm([(16, 512)], [8], keep=False, **arguments)
    assert len(swept) == 2 * len(cells)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
