"""Two Tritons in turns, without a GPU: which shapes are taken, what a run adds, and what is refused."""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8.bench import streaming
from sglang_w4afp8.kernels.ops.moe.launch_table import MeasuredLaunch

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU; the real one is used elsewhere")

_SPEC = importlib.util.spec_from_file_location(
    "toolchains", Path(__file__).resolve().parents[4] / "benchmark" / "toolchains.py"
)
toolchains = importlib.util.module_from_spec(_SPEC)
sys.modules["toolchains"] = toolchains
_SPEC.loader.exec_module(toolchains)

TAGS = ("old", "new")
META = {"gpu": "a", "driver": "1", "torch": "2", "sglang": "0.5.23", "sglang_kernel": None, "sglang_w4afp8": "0.1.0"}


def save(directory, kernel, tag, times):
    """A results file: {(size, experts, rows): (ours, engine)}, each under two routings."""
    size = toolchains.KINDS[kernel].size
    cells = [
        {size: s, "experts": e, "rows": r, "routing": routing, "ours_us": ours, "engine_us": engine, "copy_us": 1.0}
        for (s, e, r), (ours, engine) in times.items()
        for routing in ("even", "random")
    ]
    (directory / f"{kernel}_{tag}.json").write_text(json.dumps({"meta": {}, "cells": cells}))


@pytest.fixture
def whole_runs(tmp_path):
    save(tmp_path, "requant", "old", {(256, 2, 1): (2.0, 4.0), (256, 2, 2): (2.0, 4.0), (256, 4, 1): (2.0, 4.0)})
    # The second is slower only as the engine's is; the third loses beside it without being slower itself.
    save(tmp_path, "requant", "new", {(256, 2, 1): (2.2, 4.0), (256, 2, 2): (2.2, 4.4), (256, 4, 1): (2.0, 3.8)})
    save(tmp_path, "silu", "old", {(128, 2, 1): (2.0, 4.0)})
    save(tmp_path, "silu", "new", {(128, 2, 1): (2.05, 4.0)})
    return tmp_path


def test_shapes_that_lost_beside_the_engine_are_taken(whole_runs):
    assert toolchains.shapes_that_lost(whole_runs, "requant", TAGS) == [(256, 2, 1), (256, 4, 1)]
    assert toolchains.shapes_that_lost(whole_runs, "silu", TAGS) == []
    with pytest.raises(SystemExit, match=r"requant_other.json: does not exist"):
        toolchains.shapes_that_lost(whole_runs, "requant", ("old", "other"))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(streaming, "PADDED", 40)
    for name, buffers in (("requant", streaming.RequantBuffers), ("silu", streaming.SiluBuffers)):
        monkeypatch.setattr(buffers.__init__, "__defaults__", ("cpu",))
        assert toolchains.KINDS[name].make is buffers
    monkeypatch.setattr(streaming._engine_kernels(), "requant_warp_size", lambda device: 32, raising=False)
    monkeypatch.setattr(
        streaming, "interleaved_medians", lambda providers, repeats: {name: float(len(name)) for name in providers}
    )


@pytest.mark.parametrize("kernel, size", [("requant", 256), ("silu", 128)])
@pytest.mark.parametrize("tune", [False, True])
def test_a_run_measures_every_routing(tiny, monkeypatch, kernel, size, tune):
    tuned = MeasuredLaunch(2, 1 if kernel == "requant" else 64, 1, 2, 2, 4, 1, 0)
    asked = []

    def tune_cell(*arguments):
        asked.append((arguments[0], *arguments[2:5]))
        return tuned, 1.0

    monkeypatch.setattr(toolchains.tune_streaming, "tune_cell", tune_cell)
    cells = toolchains.measure(kernel, [(size, 2, 1), (size, 4, 2)], 3, tune)
    assert [(cell["experts"], cell["rows"], cell["routing"]) for cell in cells] == [
        (experts, rows, routing) for experts, rows in ((2, 1), (4, 2)) for routing in streaming.ROUTINGS
    ]
    columns = {"requant": 2, "silu": 128}[kernel]
    assert asked == ([(kernel, columns, 2, 1), (kernel, columns, 4, 2)] if tune else [])
    for cell in cells:
        assert (cell["kernel"], cell["size"]) == (kernel, size)
        assert (cell["ours_us"], cell["engine_us"]) == (4.0, 6.0)
        assert (cell.get("tuned_us"), "tuned" in cell) == ((5.0, True) if tune else (None, False))
        assert "legacy_us" not in cell


def test_without_the_engine_nothing_is_measured(tiny, monkeypatch):
    monkeypatch.setattr(streaming, "engine_function", lambda name: None)
    with pytest.raises(SystemExit, match="the engine's kernels cannot be imported"):
        toolchains.measure("silu", [(128, 2, 1)], 3, False)


def test_runs_are_counted_per_triton(tmp_path):
    out = tmp_path / "toolchains.json"
    for triton, command in (("3.6", "a"), ("3.8", "a"), ("3.6", "a"), ("3.8", "b")):
        toolchains.add_run(out, {**META, "triton": triton, "command": command}, [{"triton": triton, "rows": 1}])
    document = json.loads(out.read_text())
    assert document["meta"] == {**META, "triton": "3.6; 3.8", "command": "a; b"}
    assert [(cell["triton"], cell["run"]) for cell in document["cells"]] == [
        *(("3.6", 1), ("3.8", 1)),
        *(("3.6", 2), ("3.8", 2)),
    ]


@pytest.mark.parametrize("key", ["gpu", "driver", "torch", "sglang"])
def test_runs_of_two_machines_are_not_set_beside_each_other(tmp_path, key):
    out = tmp_path / "toolchains.json"
    toolchains.add_run(out, {**META, "triton": "3.6", "command": "a"}, [])
    before = out.read_text()
    with pytest.raises(SystemExit, match=f"another set-up \\({key} "):
        toolchains.add_run(out, {**META, "triton": "3.8", "command": "a", key: "other"}, [])
    assert out.read_text() == before


def test_without_a_gpu_it_says_so(whole_runs, capsys):
    arguments = ["--out", str(whole_runs / "out.json"), "--results", str(whole_runs), "--tags", *TAGS]
    assert toolchains.main(arguments) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert not (whole_runs / "out.json").exists()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
