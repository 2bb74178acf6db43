"""The README cannot drift: its generated parts are up to date, and figures come out of results files as declared."""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[4]
META = {"gpu": "NVIDIA X", "driver": "1", "torch": "2", "triton": "3", "sglang": "0.5.23", "command": "python b.py"}


@pytest.fixture(scope="module")
def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_readme", ROOT / "scripts" / "render_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write(folder: Path, cells: list[dict[str, Any]], meta: Mapping[str, str | None] = META) -> Path:
    (folder / "x.json").write_text(json.dumps({"meta": dict(meta), "cells": cells}))
    return folder


def cell(k: int, rows: int, ours_us: float | None, engine_us: float | None) -> dict[str, Any]:
    return {"k": k, "rows": rows, "ours_us": ours_us, "engine_us": engine_us}


def table(renderer: ModuleType, **changes: Any) -> Any:
    columns = (
        renderer.count(),
        renderer.ratio("mean", "engine_us", "ours_us", renderer.geometric_mean),
        renderer.ratio("lowest", "engine_us", "ours_us", min),
    )
    declared: dict[str, Any] = {"title": "T", "file": "x.json", "note": "N.", "group_by": ("k",), "columns": columns}
    return renderer.ResultTable(**declared | changes)


def test_readme_is_up_to_date(renderer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = renderer.main(["--check"])
    captured = capsys.readouterr()
    assert status == 0, captured.err + captured.out


def test_readme_names_the_engines_that_the_ledger_knows(renderer: ModuleType) -> None:
    first, last = renderer.plugin.ENGINES
    assert f"| sglang | {first} to {last}. " in (ROOT / "README.md").read_text()


def test_check_writes_nothing_and_shows_what_is_out_of_date(
    renderer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    stale = (ROOT / "README.md").read_text().replace("`SGLANG_W4AFP8_STRICT` |", "`SGLANG_W4AFP8_OLD` |")
    readme.write_text(stale)
    monkeypatch.setattr(renderer, "README", readme)
    assert renderer.main(["--check"]) == 1
    assert readme.read_text() == stale
    assert "\n-| `SGLANG_W4AFP8_OLD` |" in (printed := capsys.readouterr().out)
    assert "\n+| `SGLANG_W4AFP8_STRICT` |" in printed
    assert renderer.main([]) == 0
    assert readme.read_text() == (ROOT / "README.md").read_text()


def test_a_results_table_groups_reduces_and_names_its_source(renderer: ModuleType, tmp_path: Path) -> None:
    cells = [cell(512, 1, 2.0, 8.0), cell(128, 1, 1.0, 3.0), cell(512, 2, 4.0, 4.0)]
    assert renderer.result_table(table(renderer, total="all"), write(tmp_path, cells)) == (
        "### T\n\nN.\n\n"
        "| k | cells | mean | lowest |\n"
        "| ---: | ---: | ---: | ---: |\n"
        "| 128 | 1 | 3.00 | 3.00 |\n"
        "| 512 | 2 | 2.00 | 1.00 |\n"
        "| all | 3 | 2.29 | 1.00 |\n"
        "\ngpu NVIDIA X; driver 1; torch 2; triton 3; sglang 0.5.23. "
        "`python b.py` wrote [x.json](benchmark/results/x.json).\n"
    )


def test_what_a_reader_must_know_of_a_run_stands_beside_its_source(renderer: ModuleType, tmp_path: Path) -> None:
    results = write(tmp_path, [cell(512, 1, 2.0, 8.0)])
    plain = renderer.result_table(table(renderer), results)
    content = json.loads((results / "x.json").read_text())
    content["meta"]["remark"] = "Of an older launch."
    (results / "x.json").write_text(json.dumps(content))
    assert renderer.result_table(table(renderer), results) == plain.rstrip("\n") + " Of an older launch.\n"


def test_where_keeps_only_the_cells_asked_for(renderer: ModuleType, tmp_path: Path) -> None:
    declared = table(
        renderer, where={"rows": (1,)}, group_by=("rows", "k"), columns=(renderer.one("ours", "ours_us", digits=1),)
    )
    text = renderer.result_table(declared, write(tmp_path, [cell(512, 1, 2.04, 8.0), cell(512, 2, 4.0, 4.0)]))
    assert "| rows | k | ours |\n| ---: | ---: | ---: |\n| 1 | 512 | 2.0 |\n\n" in text


def test_cells_without_a_measurement_make_no_row(renderer: ModuleType, tmp_path: Path) -> None:
    parts = [{"k": 1, "share_of_step": {"chain": 0.7176}}, {"k": 2, "share_of_step": None}]
    columns = (renderer._part_of_step("experts", "chain"),)
    declared = table(renderer, columns=columns, measured="share_of_step")
    text = renderer.result_table(declared, write(tmp_path, parts))
    assert "| k | experts |\n| ---: | ---: |\n| 1 | 71.8 |\n\n" in text
    with pytest.raises(renderer.RenderError, match="no cell"):
        renderer.result_table(declared, write(tmp_path, parts[1:]))


def test_an_absent_provider_is_not_averaged_away(renderer: ModuleType, tmp_path: Path) -> None:
    text = renderer.result_table(table(renderer), write(tmp_path, [cell(512, 1, 2.0, None), cell(512, 2, 4.0, 4.0)]))
    assert "| 512 | 2 | n/a | n/a |\n" in text


def test_columns_fold_a_row_of_cells(renderer: ModuleType, tmp_path: Path) -> None:
    cells = [
        {"k": 1, "us": 2.0, "error": 0.1, "equal": True, "failed": [3, 4], "other": None},
        {"k": 1, "us": 8.0, "error": 0.3, "equal": None, "failed": [], "other": 1.0},
    ]
    columns = (
        renderer.mean("us", "us"),
        renderer.mean("other", "other"),
        renderer.most("error", "error"),
        renderer.share("equal", "equal"),
        renderer.entries("failed", "failed"),
    )
    text = renderer.result_table(table(renderer, columns=columns), write(tmp_path, cells))
    assert "| 1 | 4.00 | n/a | 0.3000 | 1 of 2 | 2 |\n" in text


def test_bf16_is_compared_per_byte(renderer: ModuleType) -> None:
    # 3 bytes an element in 3 us, against 2 bytes and its share of a scale in 2 us.
    assert renderer._bf16_per_byte([{"ours_us": 3.0, "fp8_us": 2.0}]) == "0.98"


def equality_cells() -> list[dict[str, Any]]:
    """What the comparison of tokens makes of servers that all decode the same."""
    sys.path.insert(0, str(ROOT / "benchmark" / "e2e"))
    try:
        import equality
    finally:
        sys.path.remove(str(ROOT / "benchmark" / "e2e"))
    tokens = dict.fromkeys((equality.SINGLE, equality.BATCH, equality.REPEAT), [[1, 2], [3, 4]])
    arms = (("engine", "cutlass"), ("cutlass", "cutlass"), ("triton", "triton"), ("reference", "reference"))
    runs = [
        equality.Outputs(arm, rows, [], tokens, [[1.0, 1.0]] * 2, backend)
        for rows in (512, 128)
        for arm, backend in arms
        if (arm, rows) != ("reference", 128)
    ]
    cells, faults = equality.judge(runs[0], runs[1:], 0.0, 0.1)
    assert not faults
    return cells


def benchmark_cells() -> dict[str, list[dict[str, Any]]]:
    """Cells with the fields that each benchmark writes, over its usual grid, ours twice as fast as the engine."""
    from sglang_w4afp8.bench import streaming

    sys.path.insert(0, str(ROOT / "benchmark"))
    try:
        import fuzz_device
        import moe_layer
        import shapes
        import two_kernels
    finally:
        sys.path.remove(str(ROOT / "benchmark"))
    us = {"ours_us": 2.0, "engine_us": 4.0, "legacy_us": 8.0, "copy_us": 1.0}
    step = {
        "requant": 0.02,
        "silu": 0.03,
        "problem_sizes": 0.0,
        "gemm": 0.45,
        "deepep": 0.1,
        "other": 0.4,
        "chain": 0.5,
    }
    grid = [dataclasses.asdict(c) for c in streaming.grid(streaming.EXPERTS, streaming.ROWS, streaming.ROUTINGS)]
    bf16 = {**us, "engine_us": None, "fp8_us": 1.5, "copy_fp8_us": 0.75}
    chain = [
        {**dataclasses.asdict(c), **us, "engine_is_right": c.padded % 512 == 0, "bit_equal": c.padded % 512 == 0}
        for c in moe_layer.plan(moe_layer.EXPERTS, moe_layer.ROWS)
    ]
    return {
        "requant": [{"k": k, **c, **us} for k in (7168, 3584) for c in grid],
        "bf16": [{"k": 7168, **c, **bf16} for c in grid if c["experts"] in (8, 64, 256)],
        "silu": [{"n": n, **c, **us} for n in (2048, 1536) for c in grid],
        "streaming": [{"k": 7168, "n": 2048, **c, **us, "legacy_us": None} for c in grid],
        "moe_layer": chain,
        "shapes": [
            {
                **c,
                "model": model,
                "n": 2048,
                "k": 6144,
                "experts": experts,
                **{f"{arm}_us": 3.0 for arm in ("engine", "cutlass", "triton", "auto", "table", "floor")},
            }
            for model, counts in shapes.SERVED.items()
            for experts in counts
            for c in grid
            if c["experts"] == 64
        ],
        "two_kernels": [
            {**c, "hidden": 7168, **us, "cutlass_us": 3.0, "triton_us": 2.0, "floor_us": 1.0, "weight_stream_tb_s": 3.5}
            for c in grid
            if c["experts"] in (64, 256)
        ],
        "two_kernels_accuracy": [
            {
                "case": case,
                "rows": rows,
                **{
                    f"{arm}_{kind}": 0.03
                    for arm in ("engine", "cutlass", "triton")
                    for kind in ("rel_err", "worst_row")
                },
                "not_above": True,
            }
            for case in two_kernels.ACCURACY
            for rows in two_kernels.ACCURACY_ROWS
        ],
        "two_kernels_prefill": [
            {"experts": 64, "rows": rows, "gemm": gemm, "cutlass_us": 300.0, "rule_us": 290.0, "best_us": 280.0}
            for rows in two_kernels.PREFILL_ROWS
            for gemm in two_kernels.GEMMS
        ],
        "e2e_decode": [
            {
                "model": model,
                "engine": "0.5.21",
                "routing": "uniform",
                "concurrency": requests,
                "arm": arm,
                "tokens_per_s": 110.0,
                "baseline_tokens_per_s": 100.0,
                "gain_pct": 10.0,
                "interval": [9.0, 11.0],
                "interval_method": "t over starts",
                "baseline": "engine",
                "blocks": 2,
                "saved_us_per_moe_layer": 40.0,
                "saved_ms_58_layers": 2.32,
                "share_of_step": step if requests == 32 else None,
            }
            for model in ("deepseek-v3-5l-256e", "deepseek-v3-5l-64e")
            for requests in (8, 32, 128, 256)
            for arm in ("engine", "plugin")
        ],
        "e2e_equality": equality_cells(),
        "fuzz": [{**dataclasses.asdict(c), "cases": 300, "different": []} for c in fuzz_device.plan(1, 40)],
    }


def several_gpus_cells(decode: list[dict]) -> dict[str, list[dict]]:
    """Cells as the runs with expert parallelism write them, by results file."""
    deployed = [
        {**cell, "model": "deepseek-v3-43l-256e", "concurrency": requests, "arm": arm, "padded_rows": rows}
        for cell in decode[:1]
        for requests, rows in ((16, 512), (64, 512), (256, 512), (1024, 1024))
        for arm in ("engine", "cutlass", "triton")
    ]
    layer = [
        {"padded_rows": rows, "arm": arm, "outputs": 8, "equal": 8, "largest_error": 0.0012}
        for rows in (256, 512)
        for arm in ("engine", "cutlass", "triton")
    ]
    return {"h200x4/e2e_decode.json": deployed, "h200x2/e2e_decode.json": deployed, "h200x2/e2e_layer.json": layer}


def test_every_benchmark_has_readable_tables(renderer: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "h200"
    results.mkdir()
    (results / "gemm_tiles.json").write_text((ROOT / "benchmark" / "results" / "h200" / "gemm_tiles.json").read_text())
    for kind, cells in benchmark_cells().items():
        (results / f"{kind}.json").write_text(json.dumps({"meta": META, "cells": cells}))
    for name, cells in several_gpus_cells(benchmark_cells()["e2e_decode"]).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"meta": META, "cells": cells}))
    shown = {declared.file for declared in renderer.RESULT_TABLES}
    assert shown == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")}
    for declared in renderer.RESULT_TABLES:
        text = renderer.result_table(declared, tmp_path)
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        assert 4 < len(rows) <= 20, f"{declared.title}: {len(rows)} lines"
        assert "n/a" not in text, declared.title
    assert "| 64 | 8 | 8.00 | 4.00 | 2.00 | 1.00 | 2.00 | 0.50 |" in renderer.results_section(tmp_path)


def test_the_soak_is_summed_up_in_a_row(renderer: ModuleType, tmp_path: Path) -> None:
    assert renderer.soak_section(tmp_path) == "### Under changing load\n\nNot measured yet.\n"
    (tmp_path / "h200").mkdir()
    path = tmp_path / "h200" / "e2e_soak.json"
    summary = {
        "arm": "auto",
        "backend": "triton",
        "minutes": 15.214,
        "sound": True,
        "sent": 110,
        "finished": 100,
        "failed": 0,
        "aborted": 6,
        "hung_up": 4,
        "levels": [1, 2, 256],
        "longest_input": 1024,
        "log_errors": [],
        "gpu_memory_growth_mib": 0.0,
    }
    path.write_text(json.dumps({"meta": META, "summary": summary, "cells": []}))
    text = renderer.soak_section(tmp_path)
    assert "arm `auto` (experts by triton)" in text and "1 to 256 at once" in text
    assert "| 15.2 | 110 | 100 | 10 | 0 | 0 | 0 | yes |\n" in text
    assert "wrote [h200/e2e_soak.json](benchmark/results/h200/e2e_soak.json)." in text
    path.write_text(json.dumps({"meta": META | {"remark": "Why."}, "summary": summary | {"sound": False}, "cells": []}))
    assert "| no |\n" in renderer.soak_section(tmp_path) and renderer.soak_section(tmp_path).endswith(" Why.\n")
    path.write_text(json.dumps({"meta": META | {"gpu": None}, "summary": summary, "cells": []}))
    with pytest.raises(renderer.RenderError, match=r"e2e_soak.json: meta lacks gpu$"):
        renderer.soak_section(tmp_path)


def test_what_to_expect_adds_the_kernels_of_a_layer(renderer: ModuleType, tmp_path: Path) -> None:
    assert renderer.expectations_section(tmp_path) == "Not measured yet.\n"
    (tmp_path / "h200").mkdir()
    point = {"experts": 64, "rows": 16, "routing": "random", "ours_us": 100.0}
    gemm = [
        {**point, "n": n, "k": k, "padded": padded, "engine_us": 250.0, "kernel_version": version}
        for version in ("0.4.9", "0.4.10")
        for n, k, padded in ((4096, 7168, 512), (7168, 2048, 512), (4096, 7168, 384), (4096, 3584, 512))
    ]
    for name, cells in (("streaming", [{**point, "engine_us": 110.0}]), ("gemm_tiles", gemm)):
        (tmp_path / "h200" / f"{name}.json").write_text(json.dumps({"meta": META, "cells": cells}))
    (row,) = [line for line in renderer.expectations_section(tmp_path).splitlines() if line.startswith("| 6")]
    # 10 us of the streaming steps and 150 of either GEMM; 310 us x 58 layers.
    assert row == "| 64 | 16 | 10 | 300 | 310 | 18.0 |  |  |"
    shape = {"hidden": 7168, "inner": 2048, "experts": 64, "rows": 16, "engine_us": 700.0}
    two = [{**shape, "routing": routing, "triton_us": us} for routing, us in (("random", 300.0), ("even", 1.0))]
    (tmp_path / "h200" / "two_kernels.json").write_text(json.dumps({"meta": META, "cells": two}))
    (row,) = [line for line in renderer.expectations_section(tmp_path).splitlines() if line.startswith("| 6")]
    assert row == "| 64 | 16 | 10 | 300 | 310 | 18.0 | 400 | 23.2 |"


def test_two_toolchains_are_compared_shape_by_shape(renderer: ModuleType, tmp_path: Path) -> None:
    assert renderer.toolchains_section(tmp_path) == "Not measured yet.\n"
    (tmp_path / "h200").mkdir()

    def save(name: str, triton: str, times: dict[int, float], engine: float | None) -> None:
        cells = [
            {
                "n": 2048,
                "experts": 64,
                "rows": rows,
                "routing": routing,
                "ours_us": us,
                "engine_us": engine,
                "copy_us": 1.0,
            }
            for rows, us in times.items()
            for routing in ("even", "random")
        ]
        content = {"meta": META | {"triton": triton}, "cells": cells}
        (tmp_path / "h200" / f"{name}.json").write_text(json.dumps(content))

    save("silu_triton36", "1.0", {1: 2.0, 2: 2.0, 4: 2.0, 8: 2.0}, 4.0)
    # The shape that one of the runs lacks is left out.
    save("silu_triton38", "2.0", {1: 2.0, 2: 3.0, 4: 1.6}, 5.0)
    section = renderer.toolchains_section(tmp_path)
    assert section.startswith("Time with Triton 2.0 divided by time with Triton 1.0.")
    assert section.splitlines()[-1] == "| SiLU | 3 | 1.063 | 1.250 | 1.000 | 1 (n 2048 E 64 rows 2: 1.20) |"
    for suffix, triton in (("_triton36", "1.0"), ("_triton38", "3.0")):
        save(f"silu{suffix}", triton, {1: 2.0}, None)
    assert renderer.toolchains_section(tmp_path).splitlines()[-1] == "| SiLU | 1 | 1.000 |  | 1.000 | 0 |"
    other = (tmp_path / "h200" / "silu_triton36.json").read_text().replace('"n"', '"k"')
    for suffix in ("_triton36", "_triton38"):
        (tmp_path / "h200" / f"requant{suffix}.json").write_text(other)
    with pytest.raises(renderer.RenderError, match="files of two toolchains are of several"):
        renderer.toolchains_section(tmp_path)


def test_the_two_kernels_are_compared_with_every_toolchain(renderer: ModuleType, tmp_path: Path) -> None:
    assert renderer.two_kernel_toolchains_section(tmp_path) == "Not measured yet.\n"
    (tmp_path / "h200").mkdir()

    def save(suffix: str, triton: str, times: dict[int, tuple[float, float]]) -> None:
        cells = [
            {"hidden": 7168, "experts": 64, "rows": rows, "routing": routing, "triton_us": us, "cutlass_us": 600.0}
            for rows, by_routing in times.items()
            for routing, us in zip(("even", "random"), by_routing, strict=True)
        ]
        content = {"meta": META | {"triton": triton}, "cells": cells}
        (tmp_path / "h200" / f"two_kernels_shipped_{suffix}.json").write_text(json.dumps(content))

    save("triton36", "1.0", {1: (400.0, 400.0), 8: (500.0, 500.0), 16: (1.0, 1.0)})
    assert renderer.two_kernel_toolchains_section(tmp_path) == "Not measured yet.\n"
    # A row count that one of the runs lacks stays empty there, and is left out where only one has it.
    save("triton37", "1.5", {8: (500.0, 500.0)})
    save("triton38", "2.0", {1: (400.0, 625.0)})
    lines = renderer.two_kernel_toolchains_section(tmp_path).splitlines()
    assert lines[0].startswith("| experts | rows | 1.0, us | 1.5, us | 2.0, us | CUTLASS / two kernels, 1.0")
    assert lines[2:] == [
        "| 64 | 1 | 400 |  | 500 | 1.50 (1.50) |  | 1.20 (0.96) |",
        "| 64 | 8 | 500 | 500 |  | 1.20 (1.20) | 1.20 (1.20) |  |",
    ]
    save("triton38", "1.0", {1: (400.0, 500.0)})
    with pytest.raises(renderer.RenderError, match=r"the files of the two kernels are of Triton 1\.0, 1\.5, 1\.0"):
        renderer.two_kernel_toolchains_section(tmp_path)


def test_two_toolchains_in_turns_are_told_from_two_runs_of_one(renderer: ModuleType, tmp_path: Path) -> None:
    assert renderer.toolchain_turns_section(tmp_path) == "Not measured yet.\n"
    (tmp_path / "h200").mkdir()

    def save(name: str, cells: list[dict[str, object]]) -> None:
        (tmp_path / "h200" / f"{name}.json").write_text(json.dumps({"meta": META, "cells": cells}))

    def timed(us: float, **more: object) -> list[dict[str, object]]:
        shape = {"experts": 64, "rows": 1, "ours_us": us, "engine_us": 4.0}
        return [{**shape, "routing": routing, **more} for routing in ("even", "random")]

    for suffix, us, digest, registers in (("36", 2.0, "a", 40), ("38", 2.2, "b", 32)):
        save(f"silu_triton{suffix}", timed(us, n=2048))
        code = {"kernel": "silu", "experts": 64, "rows": 1, "instructions": 9, "registers": registers, "barriers": 5}
        save(f"machine_code_triton{suffix}", [{**code, "columns": 2048, "digest": digest}])
    runs = (("1.0", 1, 2.0), ("2.0", 1, 2.1), ("1.0", 2, 2.02), ("2.0", 2, 2.3))
    cells = [
        cell
        for triton, run, us in runs
        for cell in timed(us, kernel="silu", size=2048, triton=triton, run=run, tuned_us=2.07 if us == 2.3 else None)
    ]
    save("toolchains", cells)
    assert renderer.toolchain_turns_section(tmp_path).splitlines()[0].endswith("| tuned by 2.0 |")
    assert renderer.toolchain_turns_section(tmp_path).splitlines()[-1] == (
        "| SiLU, n 2048 E 64 rows 1 | 1.100 | 1.050, 1.139 | 1.095 | 40 to 32 registers | 1.025 |"
    )
    same = (tmp_path / "h200" / "machine_code_triton36.json").read_text()
    (tmp_path / "h200" / "machine_code_triton38.json").write_text(same)
    assert "| the same |" in renderer.toolchain_turns_section(tmp_path)
    save("toolchains", [cell for cell in cells if cell["triton"] == "1.0"])
    with pytest.raises(renderer.RenderError, match=r"toolchains.json: must be of two Tritons, is of 1\.0"):
        renderer.toolchain_turns_section(tmp_path)


def test_a_missing_file_reads_not_measured_yet(renderer: ModuleType, tmp_path: Path) -> None:
    assert renderer.result_table(table(renderer), tmp_path) == "### T\n\nNot measured yet.\n"


@pytest.mark.parametrize("key", META)
def test_a_figure_without_its_origin_is_refused(renderer: ModuleType, tmp_path: Path, key: str) -> None:
    for meta in ({name: value for name, value in META.items() if name != key}, META | {key: None}):
        with pytest.raises(renderer.RenderError, match=f"x.json: meta lacks {key}$"):
            renderer.result_table(table(renderer), write(tmp_path, [cell(1, 1, 1.0, 1.0)], meta))


def test_cells_that_do_not_fit_the_table_are_refused(renderer: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(renderer.RenderError, match="x.json: no field 'experts'"):
        renderer.result_table(table(renderer, group_by=("experts",)), write(tmp_path, [cell(1, 1, 1.0, 1.0)]))
    with pytest.raises(renderer.RenderError, match="x.json: no cell"):
        renderer.result_table(table(renderer, where={"k": (2,)}), write(tmp_path, [cell(1, 1, 1.0, 1.0)]))
    with pytest.raises(renderer.RenderError, match="a row has 2"):
        renderer.result_table(
            table(renderer, columns=(renderer.one("ours", "ours_us"),)),
            write(tmp_path, [cell(1, 1, 1.0, 1.0), cell(1, 2, 1.0, 1.0)]),
        )


@pytest.mark.parametrize("text", ["", "<!-- generated: a -->\n<!-- end: a -->\n" * 2], ids=["missing", "twice"])
def test_a_generated_part_must_stand_once(renderer: ModuleType, text: str) -> None:
    with pytest.raises(renderer.RenderError, match="generated: a"):
        renderer.render(text, {"a": lambda: "x\n"})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
