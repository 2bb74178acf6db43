"""Reports and the registered benchmarks without a GPU: figures from known cells, red checks, absent providers, files."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8.bench import registered, report, streaming
from sglang_w4afp8.bench.registered import ENGINE, RED, SELF, Benchmark, Shape
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[4]
BENCHMARKS = ROOT / "test" / "registered" / "kernels" / "benchmark" / "moe"
META = {
    "gpu": "NVIDIA H200",
    "driver": "570.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "sglang": None,
    "sglang_w4afp8": "0.1.0",
    "command": "bench.py --ci",
}
OURS, LEGACY, ENGINE_PROVIDER, COPY = report.PROVIDERS


def load(path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def cell(**changes):
    values = {"k": 7168, "experts": 64, "padded": 2048, "rows": 8, "routing": "even"}
    times = {"ours_us": 2.0, "legacy_us": 5.0, "engine_us": 3.0, "copy_us": 1.6}
    return {**values, **times, **changes}


# ---- what a cell moves, and how it is written


@pytest.mark.parametrize(
    ("shape", "moved"),
    [
        # 512 live rows; payload in and out, a float32 scale for 128 elements.
        ({"k": 7168}, 512 * (2 * 7168 + 56 * 4)),
        # Two bf16 in, one fp8 out.
        ({"k": None, "n": 2048}, 512 * 2048 * 5),
        ({"k": 7168, "n": 2048}, 512 * (2 * 7168 + 56 * 4) + 512 * 2048 * 5),
    ],
)
def test_the_bytes_of_a_cell_follow_from_its_shape(shape, moved):
    assert report.bytes_of(cell(**shape)) == moved


@pytest.mark.parametrize("routing", ["even", "random", "skew16", "skew1"])
def test_every_routing_moves_the_same_rows(routing):
    assert int(streaming.Cell(64, 2048, 8, routing).row_counts().sum()) == 64 * 8


def test_rates_are_decimal_terabytes_a_second():
    assert report.terabytes_per_second(cell(), OURS) == pytest.approx(512 * 14560 / 2.0e-6 / 1e12)
    assert report.terabytes_per_second(cell(engine_us=None), ENGINE_PROVIDER) is None
    assert report.terabytes_per_second({"k": 128, "experts": 1, "rows": 1}, OURS) is None


def test_the_machine_line_names_every_version_and_what_is_absent():
    assert report.machine_line(META) == (
        "NVIDIA H200, driver 570.1, torch 2.11.0, triton 3.6.0, sglang N/A, sglang_w4afp8 0.1.0"
    )


def test_the_csv_holds_the_machine_line_the_cells_and_the_rates(tmp_path):
    path = tmp_path / "deep" / "cells.csv"
    report.write_csv(path, META, [cell(), cell(rows=1, engine_us=None)])
    first, *rest = path.read_text(encoding="utf-8").splitlines()
    assert first == f"# {report.machine_line(META)}; bench.py --ci"
    rows = list(csv.DictReader(rest))
    assert [row["engine_us"] for row in rows] == ["3.0", "N/A"]
    assert rows[0]["ours_tb_s"] == "3.7274"
    assert rows[1]["engine_tb_s"] == "N/A"


def test_tables_are_aligned():
    assert report.text_table([["a", "bcd"], ["10", "2"]]) == " a  bcd\n--  ---\n10    2"


def test_geometric_mean():
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_charts_are_pictures_and_absent_providers_are_no_error(tmp_path):
    panels = [[("a", [cell(rows=rows, engine_us=None) for rows in (8, 1)])], [("b", [cell()]), ("c", [])]]
    assert report.chart(tmp_path / "chart.png", "title", META, panels, report.RATE_OVER_ROWS)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_chart_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not report.chart(tmp_path / "chart.png", "title", META, [[("a", [cell()])]], report.RATE_OVER_ROWS)
    assert list(tmp_path.iterdir()) == []


# ---- the registered benchmarks


class Buffers:
    """A payload of the CPU, for kernels that are stand-ins."""

    def __init__(self, experts, padded, columns):
        self.output = torch.zeros((experts, padded, columns), dtype=torch.uint8)

    def arguments(self, cell):
        return (self.output[: cell.experts], cell.row_counts())


def fill(output, rows, expected_m, *, launch=None):
    """Our kernel: live rows become 7 under any launch, except where the test wants otherwise."""
    for expert, count in enumerate(rows.tolist()):
        output[expert, :count] = 7
    return output


def make_benchmark(engine=True, function=fill, engine_writes=7):
    def make_providers(buffers, cell):
        arguments = buffers.arguments(cell)
        providers = {"ours": lambda: function(*arguments, cell.expected_m())}
        if engine:

            def run_engine():
                fill(*arguments, cell.expected_m())
                arguments[0][0, : arguments[1][0]] = engine_writes

            providers["engine"] = run_engine
            streaming.check_same_bytes(f"stand-in {cell}", providers["ours"], run_engine, arguments[0])
        return providers

    return Benchmark(
        name="demo",
        title="Stand-in",
        column_name="k",
        make_buffers=Buffers,
        make_providers=make_providers,
        function=function,
        legacy=lambda padded: MaskedRowsLaunch(8, 32, padded, num_warps=8),
        full=(),
        ci=(),
    )


SHAPES = (Shape(128, 4, 16, (2, 4), (1, 2)),)


def measured(seen=None):
    def measure(providers):
        if seen is not None:
            seen.append(sorted(providers))
        times = {"ours_us": 2.0, "legacy_us": 5.0, "engine_us": 3.0 if "engine" in providers else None, "copy_us": 1.6}
        for run in providers.values():
            run()
        return times

    return measure


def test_every_cell_is_checked_and_timed_with_its_providers():
    seen = []
    cells = registered.run_cells(make_benchmark(), SHAPES, measured(seen))
    assert [(c["rows"], c["skew"], c["routing"], c["check"]) for c in cells] == [
        (2, 1, "skew1", ENGINE),
        (2, 2, "skew2", ENGINE),
        (4, 1, "skew1", ENGINE),
        (4, 2, "skew2", ENGINE),
    ]
    assert seen == [["engine", "legacy", "ours"]] * 4
    # us of tuned, legacy, engine and copy; TB/s; engine/tuned, legacy/tuned, tuned/copy; what was compared.
    row = registered.table(cells).splitlines()[2].split()
    assert row[:6] == ["K", "128", "4", "16", "2", "1"]
    assert row[6:] == ["2.00", "5.00", "3.00", "1.60", "0.00", "1.50x", "2.50x", "1.25x", "engine"]


def test_an_absent_engine_is_not_available_and_the_rest_is_timed():
    cells = registered.run_cells(make_benchmark(engine=False), SHAPES, measured())
    assert {c["check"] for c in cells} == {SELF}
    assert {c["engine_us"] for c in cells} == {None}
    row = registered.table(cells).splitlines()[2]
    assert row.count("N/A") == 2 and "2.50x" in row and "1.25x" in row


def broken_by_geometry(output, rows, expected_m, *, launch=None):
    fill(output, rows, expected_m)
    if launch is not None:
        output[0, 0] = 9
    return output


@pytest.mark.parametrize(
    "benchmark",
    [make_benchmark(engine_writes=8), make_benchmark(engine=False, function=broken_by_geometry)],
    ids=["engine differs", "geometry differs"],
)
def test_a_red_check_has_no_figures_and_no_ratio(benchmark, capsys):
    seen = []
    cells = registered.run_cells(benchmark, SHAPES, measured(seen))
    assert seen == []
    assert {c["check"] for c in cells} == {RED}
    assert {c[provider.column] for c in cells for provider in report.PROVIDERS} == {None}
    text = registered.table(cells)
    assert "x " not in text.replace("experts", "") and text.count("RED") == len(cells)
    assert "our bytes differ" in capsys.readouterr().err


def test_no_ratio_is_printed_of_a_red_cell_even_with_figures():
    red = {**cell(), "skew": 1, "check": RED}
    assert "1.50x" not in registered.table([red])
    assert "1.50x" in registered.table([{**red, "check": ENGINE}])


def test_a_run_writes_results_csv_and_picture(tmp_path):
    benchmark = make_benchmark()
    cells = registered.run_cells(benchmark, SHAPES, measured())
    paths = registered.write(benchmark, tmp_path / "out", META, cells)
    assert [path.name for path in paths] == ["demo.json", "demo.csv", "demo.png"]
    content = json.loads(paths[0].read_text(encoding="utf-8"))
    assert content["meta"] == META and content["cells"] == cells
    assert paths[1].read_text(encoding="utf-8").count("\n") == 2 + len(cells)
    assert paths[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("red", [False, True])
def test_the_exit_status_tells_a_red_check(red, monkeypatch, capsys, tmp_path):
    benchmark = make_benchmark(engine_writes=8 if red else 7)
    object.__setattr__(benchmark, "ci", SHAPES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(streaming, "measure_cell", lambda providers, repeats: measured()(providers))
    monkeypatch.setattr(registered, "run_metadata", lambda **extra: META)
    assert registered.main(benchmark, "Words.\n\nMore.", ["--ci", "--out", str(tmp_path)]) == int(red)
    output = capsys.readouterr().out
    assert report.machine_line(META) in output
    assert str(tmp_path / "demo.csv") in output


@pytest.mark.parametrize(
    ("file", "column"),
    [("bench_fp8_per_token_to_per_tensor_quant.py", "k"), ("bench_silu_and_mul_masked_quant.py", "n")],
)
def test_registered_benchmarks(file, column, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = load(BENCHMARKS / file)
    benchmark = module.BENCHMARK
    assert benchmark.column_name == column
    assert "isolates the launch geometry" in " ".join(module.__doc__.split())
    for shape in (*benchmark.full, *benchmark.ci):
        for rows in shape.rows:
            for skew in shape.skews:
                counts = streaming.Cell(shape.experts, shape.padded, rows, f"skew{skew}").row_counts()
                assert int(counts.max()) <= shape.padded
                assert int(counts.sum()) == shape.experts * rows
        launch = benchmark.legacy(shape.padded)
        assert (launch.m_grid, launch.row_cap) == (32, shape.padded)
    if column == "k":
        (asked,) = [shape for shape in benchmark.ci if (shape.columns, shape.experts, shape.padded) == (3584, 56, 256)]
        assert 32 in asked.rows and 16 in asked.skews
    assert registered.main(benchmark, module.__doc__, ["--ci"]) == 2
    assert "no GPU" in capsys.readouterr().err


# ---- the roofline


@pytest.fixture
def roofline():
    return load(ROOT / "benchmark" / "roofline.py")


def write_results(folder, kind, shapes):
    cells = [
        cell(
            **{"k": None, **shape},
            experts=experts,
            rows=rows,
            routing=routing,
            engine_us=3.0 * rows,
            ours_us=2.0 * rows,
        )
        for shape in shapes
        for experts in (8, 64)
        for rows in (1, 128)
        for routing in ("even", "skew16")
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"{kind}.json").write_text(json.dumps({"meta": META, "cells": cells}), encoding="utf-8")


def test_roofline_draws_every_shape_and_prints_the_ratios(roofline, tmp_path, capsys):
    write_results(tmp_path, "requant", [{"k": 7168}, {"k": 3584}])
    write_results(tmp_path, "streaming", [{"k": 7168, "n": 2048}])
    assert roofline.main(["--results", str(tmp_path), "--out", str(tmp_path / "charts")]) == 0
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == [
        "requant_k3584.png",
        "requant_k7168.png",
        "streaming_k7168_n2048.png",
    ]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # Shape, experts, cells; mean and worst of engine/ours; the same at few rows; ours/copy at few rows and beyond L2.
    assert ["K", "7168", "8", "4", "1.50", "1.50", "1.50", "1.25", "N/A"] in lines
    # 64 experts of 128 rows are 119 MB: 256 us against a copy of 1.6.
    assert ["K", "7168", "64", "4", "1.50", "1.50", "1.50", "1.25", "160.00"] in lines
    assert ["K", "3584", "64", "4", "1.50", "1.50", "1.50", "1.25", "N/A"] in lines


def test_roofline_without_an_engine_says_so(roofline, tmp_path):
    cells = [cell(engine_us=None), cell(engine_us=None, rows=1)]
    text = roofline.summary("requant", {"meta": META, "cells": cells})
    assert text.splitlines()[3].split() == ["K", "7168", "64", "2", "N/A", "N/A", "N/A", "1.25", "N/A"]


def test_roofline_without_results_says_so(roofline, tmp_path, capsys):
    assert roofline.main(["--results", str(tmp_path)]) == 2
    assert "requant.json" in capsys.readouterr().err
    (tmp_path / "silu.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="silu.json: must have meta and cells"):
        roofline.main(["--results", str(tmp_path)])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
