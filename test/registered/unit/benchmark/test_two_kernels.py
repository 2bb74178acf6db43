"""The two-kernel benchmark without a device: what it chooses from a search, what it goes on with, and what it makes wrong."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import measure, streaming
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import (
    deinterleave_scales,
    dequantize_weight,
    interleave_scales,
)

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

_FOLDER = Path(__file__).resolve().parents[4] / "benchmark"
sys.path.insert(0, str(_FOLDER))
_SPEC = importlib.util.spec_from_file_location("two_kernels", _FOLDER / "two_kernels.py")
bench = importlib.util.module_from_spec(_SPEC)
sys.modules["two_kernels"] = bench
_SPEC.loader.exec_module(bench)

META = {key: f"this {key}" for key in measure.SET_UP}


def test_a_run_of_the_shipped_table_measures_what_servers_launch(monkeypatch, tmp_path):
    """Every planned cell, with the launches of the nearest estimate that was tuned, and nothing is searched."""
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(bench, "stream_bandwidth", lambda device: 4e6)
    options = SimpleNamespace(
        experts=[64, 256], rows=[1, 100], hidden=7168, inner=2048, repeats=3, out=tmp_path / "o.json"
    )
    measured = []

    def measure_cell(layer, regrouped, cell, kernel, launches, repeats, bandwidth):
        measured.append((cell.experts, cell.expected_m(), launches))
        return dict(zip(bench.GEMMS, (dict(launch.__dict__) for launch in launches), strict=True))

    monkeypatch.setattr(bench, "measure_cell", measure_cell)
    table = bench.shipped_table(options)
    bench.run_measurement(options, META, None, None, None, table)
    assert {(experts, estimate) for experts, estimate, _ in measured} == {(e, m) for e in (64, 256) for m in (2, 101)}
    for experts, estimate, launches in measured:
        shape = table[2048, 7168, experts]
        assert launches == grouped_gemm_table.launches("NVIDIA H200", 2048, 7168, experts, shape.block_ns, estimate)
    bench.run_measurement(options, META, None, None, None, table)
    assert len(measured) == len(bench.plan(options.experts, options.rows, bench.moe_layer.PADDED))  # none again
    with pytest.raises(SystemExit, match="no tuned file has launches at N 2048, K 640 on this GPU"):
        bench.shipped_table(SimpleNamespace(experts=[64], hidden=640, inner=2048))


@pytest.mark.parametrize("flags", [["--wide"], ["--search", "s.json"], ["--table", "folder"]])
def test_the_shipped_table_is_not_measured_while_searching(monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["two_kernels.py", "--out", "o.json", "--shipped", *flags])
    with pytest.raises(SystemExit) as stopped:
        bench.main()
    assert stopped.value.code == 2 and "shipped: searches nothing" in capsys.readouterr().err


@pytest.mark.parametrize("rows", bench.PREFILL_ROWS)
def test_what_prefill_takes_is_timed_first_and_once(rows):
    for block_n in grouped_gemm_table.RULE_BLOCK_NS:
        launches = bench.prefill_launches(block_n, rows)
        assert launches[0] == grouped_gemm_table.rule(block_n, rows)
        assert len(set(launches)) == len(launches) > 4
        assert all(launch.block_n == block_n for launch in launches)


def test_a_run_goes_on_with_its_own_file(tmp_path):
    path = tmp_path / "out.json"
    assert bench.read_done(path, META) == {}
    content = {"meta": META, "cells": [{"rows": 1}]}
    path.write_text(json.dumps(content))
    assert bench.read_done(path, META) == content
    assert bench.read_done(path, {**META, "command": "another"}) == content


def test_what_else_is_measured_stands_beside():
    assert bench.beside(Path("results/two_kernels.json"), "accuracy") == Path("results/two_kernels_accuracy.json")


@pytest.mark.parametrize("key", measure.SET_UP)
def test_a_file_of_another_set_up_is_refused(tmp_path, key):
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"meta": {**META, key: "another"}, "cells": []}))
    with pytest.raises(SystemExit, match=rf"was measured with another set-up \({key} another, not this {key}\)"):
        bench.read_done(path, META)


def small_layer():
    """A layer on the CPU with whatever the accuracy cases look at."""
    experts, padded, hidden, inner = 2, 16, 512, 512
    generator = torch.Generator().manual_seed(0)
    payload = streaming.RequantBuffers(experts, padded, hidden, "cpu")

    def scales(n, k):
        return interleave_scales(torch.rand((experts, n, k // 128), generator=generator) + 0.5).to(torch.bfloat16)

    return SimpleNamespace(
        payload=payload,
        device=torch.device("cpu"),
        hidden=hidden,
        inner=inner,
        w1=torch.randint(-128, 128, (experts, 2 * inner, hidden // 2), dtype=torch.int8, generator=generator),
        w2=torch.randint(-128, 128, (experts, hidden, inner // 2), dtype=torch.int8, generator=generator),
        w1_scale=scales(2 * inner, hidden),
        w2_scale=scales(hidden, inner),
        a1_scale=torch.ones(1),
        a2_scale=torch.ones(1),
    )


CELL = streaming.Cell(2, 16, 4, "even")


def test_calibration_makes_the_largest_value_the_largest_code():
    layer = small_layer()
    bench.calibrate(layer, CELL)
    x, x_scale, _, _, _ = layer.payload.arguments(CELL)
    values = (x.double().unflatten(2, (-1, 128)) * x_scale[..., None]).flatten(2)
    assert float(values.abs().max() / layer.a1_scale) == pytest.approx(448, rel=1e-5)
    dense = dequantize_weight(layer.w1, deinterleave_scales(layer.w1_scale, layer.w1.size(1)), torch.float64)
    gate, up = (values[:, :4] @ dense.transpose(1, 2)).chunk(2, dim=2)
    peak = (gate * torch.sigmoid(gate) * up).abs().max()
    assert float(peak / layer.a2_scale) == pytest.approx(448, rel=1e-4)


@pytest.mark.parametrize("case", bench.ACCURACY)
def test_every_accuracy_case_is_a_finite_layer_with_a_reference(case):
    layer = small_layer()
    spoil, first, second = bench.ACCURACY[case]
    before = [t.clone() for t in (layer.payload.scales, layer.w1_scale)]
    spoil(layer, torch.Generator().manual_seed(0))
    unchanged = [torch.equal(*pair) for pair in zip(before, (layer.payload.scales, layer.w1_scale), strict=True)]
    assert (unchanged == [True, True]) == (spoil is bench._nothing)
    assert (first, second) != (1, 1) or spoil is not bench._nothing or case == "random"
    bench.calibrate(layer, CELL)
    x, x_scale, _, _, _ = layer.payload.arguments(CELL)
    expected = bench.reference_rows(layer, CELL, x, x_scale)
    assert set(expected) == {0, 1}
    output = torch.zeros((2, 16, 512), dtype=torch.float64)
    for expert, rows in expected.items():
        assert rows.dtype == torch.float64 and rows.isfinite().all() and rows.abs().max() > 0
        output[expert, : len(rows)] = rows
    assert bench.error_of(output, expected) == bench.worst_row_error(output, expected) == 0
    output[1, 2] = 0
    assert bench.worst_row_error(output, expected) == 1
    assert 0 < bench.error_of(output, expected) < 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
