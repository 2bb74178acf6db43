"""Sweep of the grouped GEMM's tiles on one GPU: probe, measure, choose, verify; results, tuned table and chart.

    python3 benchmark/gemm_tiles.py --output benchmark/results/h200/gemm_tiles.json
    python3 benchmark/gemm_tiles.py --kernel-library .../common_ops.abi3.so --kernel-version 0.4.5 --output out.json
    python3 benchmark/gemm_tiles.py --merge a.json b.json --output benchmark/results/h200/gemm_tiles.json
    python3 benchmark/gemm_tiles.py --dry-run-cpu --output /tmp/dry.json

Providers of a cell: `engine` (the 3-D call of sglang's low-latency chain), every compiled tile, and `chosen` (what
serving would pick from the table that this run measured). The floor is the time to read the live experts' weights and
scales at the speed of the fastest plain stream over memory, measured in the same run. Errors are relative to a float
reference over sampled rows.

Resumable: cells that the output file already holds are not measured again. No speed-up is given where the engine is
wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from sglang_w4afp8 import tuned_config  # noqa: E402
from sglang_w4afp8.bench.expert_layer import load_kernel  # noqa: E402
from sglang_w4afp8.bench.measure import refuse_other_set_up, run_metadata  # noqa: E402
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import CompiledDispatchDouble  # noqa: E402
from sglang_w4afp8.srt.layers.moe import w4a8_gemm  # noqa: E402
from sglang_w4afp8.tune import gemm_tiles as tuning  # noqa: E402
from sglang_w4afp8.tune import sizes  # noqa: E402

MODELS = {name: tuning.gemm_shapes(model.inner, model.hidden) for name, model in sizes.MODELS.items()}
# The most important first: a run that meets its time limit has them.
EXPERTS = (64, 256, 32, 128, 8)
# Buffers where the engine's call is wrong: (experts, padded rows), measured at a few rows for the error and our time.
ENGINE_WRONG = ((64, 384), (128, 256), (256, 128))
ENGINE_WRONG_ROWS = (8, 32)
# A killed run loses no more than this.
SAVE_EVERY_S = 3.0


def plan(models: Sequence[str], experts: Sequence[int], rows: Sequence[int], routings: Sequence[str]) -> list[list]:
    """Cells, one list a model; a model's cells share the GPU's memory."""
    groups = []
    for model in models:
        cells = tuning.plan_cells(MODELS[model], experts, rows, routings)
        for num_experts, padded in ENGINE_WRONG:
            if num_experts in experts:
                wrong_rows = [r for r in ENGINE_WRONG_ROWS if r in rows and 2 * r <= padded]
                cells += tuning.plan_cells(
                    MODELS[model], (num_experts,), wrong_rows, ("random",), {num_experts: padded}
                )
        groups.append(cells)
    return groups


# ---- results


def result_rows(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """One flat row a verified cell and kernel version.

    The choice is that of the table as it is made now; where that differs from the one that was verified (the ranking
    changed since), its time is that of the same tile under its own name.
    """
    rows = []
    for version, run in runs.items():
        table = w4a8_gemm.GemmTileTable.parse(tuning.table_data(run))
        bandwidth = run.get("stream_bytes_per_us")
        for entry in run["cells"].values():
            cell = tuning.Cell(**entry["cell"])
            measured = entry.get("verify")
            if measured is None:
                continue
            chosen = _choice(cell, table).name
            us, errors = (_by_tile(entry, quantity) for quantity in ("us", "rel_err"))
            us.setdefault(chosen, entry["sweep"]["us"][chosen])
            errors.setdefault(chosen, entry["sweep"]["rel_err"][chosen])
            best = min((name for name in us if name != "engine"), key=us.__getitem__)
            # Every weight byte is read at least once, so what the floor counts is what any tile must do.
            weights = tuning.weight_bytes(cell.n, cell.k, measured["live_experts"])
            both_right = max(errors["engine"], errors[chosen]) < tuning.MAX_RELATIVE_ERROR
            rows.append(
                {
                    **entry["cell"],
                    "expected_m": cell.expected_m,
                    "kernel_version": version,
                    "engine_us": us["engine"],
                    "ours_us": us[chosen],
                    "best_us": us[best],
                    "floor_us": round(weights / bandwidth, 2) if bandwidth else None,
                    "engine_rel_err": errors["engine"],
                    "ours_rel_err": errors[chosen],
                    "speedup": round(us["engine"] / us[chosen], 3) if both_right else None,
                    "chosen": chosen,
                    "best": best,
                    **rule_columns(run, entry),
                    "max_rows": measured["max_rows"],
                    "spread": max(measured["spread"].values()),
                }
            )
    return rows


def _by_tile(entry: dict[str, Any], quantity: str) -> dict[str, float]:
    """A quantity of the verify stage by the names of tiles: what was run as `chosen` under its tile's name."""
    return {entry["chosen"] if name == "chosen" else name: x for name, x in entry["verify"][quantity].items()}


def _choice(cell: tuning.Cell, table: w4a8_gemm.GemmTileTable | None) -> w4a8_gemm.Choice:
    sizes = (cell.n, cell.k, cell.experts, cell.padded, cell.expected_m, tuning.MODEL_TOPK)
    return w4a8_gemm.choose_tile(*sizes, table)


def rule_columns(run: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """What the default rule would pick, its us and its speed-up over the engine's call, all from the sweep stage.

    The time is that of the bucket that the rule's `m` falls in.
    """
    cell = tuning.Cell(**entry["cell"])
    choice = _choice(cell, None)
    us = entry["sweep"]["us"]
    if choice.as_shipped:
        time_us = us.get(w4a8_gemm.AS_SHIPPED, us["engine"])
    else:
        buckets = tuning.probed_buckets(run["probes"][f"{cell.n}x{cell.k}"])
        bucket = next(b for b in buckets if b.high is None or choice.m <= b.high)
        same = [b.name for b in buckets if b == bucket or (b.kernel is not None and b.kernel == bucket.kernel)]
        time_us = next((us[name] for name in same if name in us), None)
    engine_is_right = entry["sweep"]["rel_err"]["engine"] < tuning.MAX_RELATIVE_ERROR
    speedup = round(us["engine"] / time_us, 3) if time_us is not None and engine_is_right else None
    return {"rule": choice.name, "rule_us": time_us, "rule_speedup": speedup}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Both DeepSeek GEMMs together at 64 experts, the worst speed-up, and the largest gap to the best tile."""
    result: dict[str, Any] = {}
    for version in sorted({row["kernel_version"] for row in rows}):
        mine = [row for row in rows if row["kernel_version"] == version]
        right = [row for row in mine if row["speedup"] is not None]
        layers: dict[str, dict[str, float]] = {}
        for routing in tuning.ROUTINGS:
            for mean in tuning.ROWS:
                pair = [
                    row
                    for row in right
                    if (row["n"], row["k"]) in tuning.DEEPSEEK_SHAPES
                    and (row["experts"], row["rows"], row["routing"]) == (64, mean, routing)
                ]
                if len(pair) == 2:
                    ratio = sum(row["engine_us"] for row in pair) / sum(row["ours_us"] for row in pair)
                    layers.setdefault(routing, {})[str(mean)] = round(ratio, 3)
        gaps = [row["ours_us"] / row["best_us"] for row in mine if row["routing"] == "random"]
        rules = [row["rule_speedup"] for row in right if row["rule_speedup"] is not None]
        result[version] = {
            "speedup_two_gemms_e64": layers,
            "worst_speedup": min((row["speedup"] for row in right), default=None),
            "worst_rule_speedup": min(rules, default=None),
            "largest_gap_to_best_random": round(max(gaps), 3) if gaps else None,
            "largest_ours_rel_err": max((row["ours_rel_err"] for row in mine), default=None),
            "cells": len(mine),
        }
    return result


def joint_metadata(runs: dict[str, Any]) -> dict[str, str]:
    """Metadata of all runs as the results files of one run have it: values that differ stand side by side."""
    known = [run["metadata"] for run in runs.values()]
    keys = dict.fromkeys(key for meta in known for key in meta)
    joint = {key: "; ".join(dict.fromkeys(str(meta[key]) for meta in known if key in meta)) for key in keys}
    # The engine takes no part: its call is made on the compiled kernel itself.
    return {**joint, "sglang": "not used"}


def finish(document: dict[str, Any]) -> None:
    document["meta"] = joint_metadata(document["runs"])
    document["cells"] = result_rows(document["runs"])
    document["summary"] = summary(document["cells"])


def write_tables(document: dict[str, Any], directory: Path) -> list[Path]:
    """One tuned file a kernel version."""
    paths = []
    for version, run in document["runs"].items():
        path = tuning.table_path(directory, run["metadata"]["gpu"], version)
        kept = (*tuned_config.REQUIRED_METADATA, "torch", "driver", "command", "created")
        metadata = {key: run["metadata"][key] for key in kept}
        tuned_config.write_tuned(path, metadata, tuning.table_data(run))
        paths.append(path)
    return paths


def draw_chart(document: dict[str, Any], path: Path, experts: int = 64) -> None:
    """us over rows: as shipped, chosen, best possible, floor; one panel per GEMM, from the results alone (no GPU)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    rows = [r for r in document["cells"] if r["routing"] == "random" and r["speedup"]]
    measured = {r["experts"] for r in rows}
    experts = experts if experts in measured else max(measured, default=0)
    rows = [r for r in rows if r["experts"] == experts]
    panels = sorted({(r["kernel_version"], r["n"], r["k"]) for r in rows})
    if not panels:
        return
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(6.4 * columns, 4.4 * lines), squeeze=False)
    styles = (
        ("engine_us", "as shipped", "C3", "-", "o"),
        ("ours_us", "chosen", "C0", "-", "o"),
        ("best_us", "best possible", "C2", ":", "x"),
        ("floor_us", "weight-read floor", "0.5", "--", None),
    )
    for axis, (version, n, k) in zip(axes.flat, panels, strict=False):
        points = sorted(
            (r for r in rows if (r["kernel_version"], r["n"], r["k"]) == (version, n, k)), key=lambda r: r["rows"]
        )
        xs = [point["rows"] for point in points]
        for column, label, color, line, marker in styles:
            if any(point[column] is None for point in points):
                continue
            axis.plot(xs, [point[column] for point in points], line, color=color, marker=marker, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(FuncFormatter(lambda us, _: f"{us:g}"))
        axis.set_xticks(xs, [str(x) for x in xs])
        axis.set_title(f"n {n}, k {k}, {experts} experts (sglang-kernel {version})", fontsize=10)
        axis.set_xlabel("mean rows per expert, random routing")
        axis.set_ylabel("us per call")
        axis.grid(True, which="both", alpha=0.25)
        axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    gpu = next(iter(document["runs"].values()))["metadata"]["gpu"]
    figure.suptitle(f"W4A8 grouped GEMM on one {gpu}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def print_report(document: dict[str, Any]) -> None:
    for version, run in document["runs"].items():
        for shape, probe in run["probes"].items():
            tiles = ", ".join(f"{b.name} {b.kernel}" for b in tuning.probed_buckets(probe))
            print(f"{version} {shape} ({probe['method']}): {tiles}; engine's call: {probe['engine_tile']}")
    print(
        "kernel  n    k    E   M    rows routing  engine  ours    best    floor  x     err_eng  err_ours chosen / best"
    )
    for r in document["cells"]:
        speedup = "  -  " if r["speedup"] is None else f"{r['speedup']:5.2f}"
        print(
            f"{r['kernel_version']:6} {r['n']:4} {r['k']:4} {r['experts']:3} {r['padded']:4} {r['rows']:4} "
            f"{r['routing']:7} {r['engine_us']:7.0f} {r['ours_us']:7.0f} {r['best_us']:7.0f} {r['floor_us'] or 0:6.0f} "
            f"{speedup} {r['engine_rel_err']:.5f} {r['ours_rel_err']:.5f} {r['chosen']} / {r['best']}"
        )
    print(json.dumps(document["summary"], indent=1))


# ---- run


def save(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"runs": {}}


def dry_run_names(double: CompiledDispatchDouble) -> Callable[..., list[str]]:
    """Stands for the profiler: names a tile by the branch that the double took."""

    def names(calls: Sequence[Callable[[], None]], device: torch.device) -> list[str]:
        del double.calls[:]
        for call in calls:
            call()
        return [f"{c.n} {c.k} {c.bucket}" if (c.n, c.k) in double.limits else f"{c.bucket}" for c in double.calls]

    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernel-library", type=Path, help="op library of sglang-kernel (common_ops); else import it")
    parser.add_argument("--kernel-version", help="version of sglang-kernel, where the library does not say")
    parser.add_argument("--models", nargs="+", default=["deepseek-v3"], choices=list(MODELS))
    parser.add_argument("--experts", nargs="+", type=int, default=list(EXPERTS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(tuning.ROWS))
    parser.add_argument("--routings", nargs="+", default=list(tuning.ROUTINGS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit-s", type=float, default=float("inf"), help="no cell starts after this")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmark/results/h200/gemm_tiles.json")
    parser.add_argument("--resume-from", type=Path, help="start from the cells of this file")
    parser.add_argument("--table-dir", type=Path, help="also write the tuned files here")
    parser.add_argument("--merge", nargs="+", type=Path, help="join result files instead of measuring (no GPU)")
    parser.add_argument("--chart", action="store_true", help="also draw the chart beside the output")
    parser.add_argument("--dry-run-cpu", action="store_true", help="the CPU double at tiny sizes: checks this script")
    options = parser.parse_args(arguments)

    if options.merge:
        document: dict[str, Any] = {"runs": {}}
        for path in options.merge:
            for version, run in load(path)["runs"].items():
                kept = document["runs"].setdefault(version, run)
                refuse_other_set_up(path, run["metadata"], kept["metadata"])
                for part in ("probes", "cells"):
                    kept[part] = {**kept[part], **run[part]}
        complete = True
    else:
        document = load(options.resume_from or options.output)
        complete = measure(document, options)
    finish(document)
    save(document, options.output)
    if options.table_dir:
        print("tables:", *write_tables(document, options.table_dir))
    if options.chart:
        draw_chart(document, options.output.with_suffix(".png"))
    print_report(document)
    print("COMPLETE" if complete else "TIME LIMIT: run again to go on")
    wrong = [r for r in document["cells"] if not r["ours_rel_err"] < tuning.MAX_RELATIVE_ERROR]
    if wrong:
        print(f"WRONG RESULTS in {len(wrong)} cells", file=sys.stderr)
    return 1 if wrong else 0


def measure(document: dict[str, Any], options: argparse.Namespace) -> bool:
    from tqdm import tqdm

    started = saved = time.monotonic()
    names = tuning.kernel_names
    if options.dry_run_cpu:
        device = torch.device("cpu")
        shapes = ((256, 1024), (512, 512))
        limits = dict(zip(shapes, ((4, 32, 256, 1024, 4096), (8, 512, 4096)), strict=True))
        kernel = CompiledDispatchDouble(limits={**limits, None: (32, 1024)})
        version, gpu = "0.0.0", "NVIDIA H200 (double)"
        names = dry_run_names(kernel)
        tuning.LARGEST_M = 4096 * 2
        groups = [
            tuning.plan_cells(shapes, (2, 4), (1, 4, 16), options.routings, {2: 1024, 4: 512})
            + tuning.plan_cells(shapes, (4,), (4,), ("random",), {4: 384})
        ]
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        kernel, version = load_kernel(options.kernel_library, options.kernel_version)
        gpu = torch.cuda.get_device_name(device)
        groups = plan(options.models, options.experts, options.rows, options.routings)
    run = document["runs"].setdefault(version, {"probes": {}, "cells": {}})
    meta = {**run_metadata(), **tuning.table_metadata(gpu, version)}
    if "metadata" in run:
        refuse_other_set_up(options.resume_from or options.output, run["metadata"], meta)
    run["metadata"] = meta
    complete = True
    for cells in groups:
        missing = sum(sum(stage not in run["cells"].get(cell.key, {}) for stage in tuning.STAGES) for cell in cells)
        with tqdm(total=missing, unit="cell", mininterval=5, file=sys.stdout) as bar:

            def done(cell: tuning.Cell, stage: str, bar: tqdm = bar) -> None:
                nonlocal saved
                bar.set_postfix_str(f"{stage} {cell.key}", refresh=False)
                bar.update()
                if time.monotonic() - saved > SAVE_EVERY_S:
                    save(document, options.output)
                    saved = time.monotonic()

            deadline = started + options.time_limit_s
            try:
                finished = tuning.run_sweep(
                    run, cells, kernel, device, deadline=deadline, repeats=options.repeats, done=done, names=names
                )
            finally:
                save(document, options.output)
        complete &= finished
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return complete


if __name__ == "__main__":
    sys.exit(main())
