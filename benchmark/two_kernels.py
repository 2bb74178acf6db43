#!/usr/bin/env python3
"""A layer in two Triton launches against our CUTLASS chain and the engine's functions; candidates of both kernels searched.

    python3 benchmark/two_kernels.py --out benchmark/results/h200/two_kernels.json
    python3 benchmark/two_kernels.py --kernel-library .../common_ops.abi3.so --kernel-version 0.4.5 --out out.json
    python3 benchmark/two_kernels.py --out out.json --table python/sglang_w4afp8/configs   # and write the tuned table
    python3 benchmark/two_kernels.py --out out.json --shipped                              # what servers launch, no search
    python3 benchmark/two_kernels.py --out out.json --accuracy                             # errors, not times
    python3 benchmark/two_kernels.py --out out.json --prefill                              # what regrouped weights cost prefill

Three steps, each of which goes on where an interrupted run stopped:

1. Per cell every candidate launch of each kernel is timed in turns; the medians are kept beside the results (``.search.json``).
2. Per shape one ``block_n`` a kernel is chosen, since it is the layout that a server's weights get whatever its rows, and per
   row count the launch that is best over all routings.
3. Per cell the layer with those launches is timed as one graph beside the whole chains.

The floor is the time to read the live experts' weights and scales at the speed of a plain stream over memory, measured in the
same run. The layer's result is compared with a float64 reference over sampled rows, and so are the chains'.

``--shipped`` leaves the search out and times the launches of the tuned table as a server takes them: with another Triton than
the one that tuned it, say.

``--accuracy`` compares the errors of the three over payloads, weights and static scales of several kinds, some of them made to
hurt, and keeps them in a file beside (``two_kernels_accuracy.json``).

``--prefill`` times the plain product that answers for the engine's grouped GEMM on regrouped weights in normal mode, against
the compiled kernel on weights as they were loaded (``two_kernels_prefill.json``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import moe_layer
from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import expert_layer, streaming
from sglang_w4afp8.bench.expert_layer import (
    Layer,
    LayerRuns,
    Regrouped,
    error_of,
    load_kernel,
    reference_rows,
    worst_row_error,
)
from sglang_w4afp8.bench.measure import refuse_other_set_up, run_metadata, write_json
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.kernels.ops.moe import w4a8_grouped_gemm as two
from sglang_w4afp8.kernels.ops.moe.grouped_gemm_table import ShapeLaunches
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GroupedGemmLaunch
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import deinterleave_scales, dequantize_weight, relative_error
from sglang_w4afp8.timing import interleaved_medians
from sglang_w4afp8.tune.gemm_tiles import stream_bandwidth, weight_bytes
from sglang_w4afp8.tune.two_kernels import (
    GEMMS,
    key_of,
    launch_name,
    launch_of,
    launchable,
    make_table,
    matching,
    plan,
    search_cell,
    write_table,
)

EXPERTS = (64, 256, 32, 128, 8)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Result = dict[str, Any]


# ---- the measurement


def measure_cell(
    layer: Layer,
    regrouped: Regrouped,
    cell: streaming.Cell,
    kernel: Callable[..., Any],
    launches: tuple[GroupedGemmLaunch, GroupedGemmLaunch],
    repeats: int,
    bandwidth: float,
) -> Result:
    runs = LayerRuns(layer, regrouped, cell)
    triton_layer = runs.whole(*launches)
    expected = reference_rows(layer, cell, runs.x, runs.x_scale)
    chains = expert_layer.chains(layer, cell, kernel)
    providers = {"triton": triton_layer, **chains}
    errors = {f"{name}_rel_err": error_of(run(), expected) for name, run in providers.items()}
    parts = {"gate_up": runs.gate_up(launches[0]), "down": runs.down(launches[1])}
    medians = interleaved_medians({**providers, **parts}, repeats)
    live = int((runs.masked_m > 0).sum())
    read = weight_bytes(2 * layer.inner, layer.hidden, live) + weight_bytes(layer.hidden, layer.inner, live)
    return {
        "expected_m": cell.expected_m(),
        "engine_us": round(medians["engine"], 2) if "engine" in medians else None,
        "cutlass_us": round(medians["ours"], 2),
        "triton_us": round(medians["triton"], 2),
        "gate_up_us": round(medians["gate_up"], 2),
        "down_us": round(medians["down"], 2),
        "floor_us": round(read / bandwidth, 2),
        "weight_stream_tb_s": round(read / medians["triton"] / 1e6, 3),
        "copy_tb_s": round(bandwidth / 1e6, 3),
        **{name.replace("ours", "cutlass"): round(value, 5) for name, value in errors.items()},
        **{name: dict(launch.__dict__) for name, launch in zip(GEMMS, launches, strict=True)},
    }


# ---- accuracy


def _powers(shape: Sequence[int], low: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return 2.0 ** torch.randint(low, 1, tuple(shape), device=device, generator=generator)


def _wide_groups(layer: Layer, generator: torch.Generator) -> None:
    layer.payload.scales.mul_(_powers(layer.payload.scales.shape, -12, layer.device, generator))


def _hot_row(layer: Layer, generator: torch.Generator) -> None:
    # Scales are stored [E, K / 128, rows].
    layer.payload.scales[:, :, 0] *= 256


def _hot_group(layer: Layer, generator: torch.Generator) -> None:
    layer.payload.scales[:, 0] *= 256


def _wide_weights(layer: Layer, generator: torch.Generator) -> None:
    for scales in (layer.w1_scale, layer.w2_scale):
        scales.mul_(_powers(scales.shape, -8, layer.device, generator))


def _nothing(layer: Layer, generator: torch.Generator) -> None:
    pass


# Name -> what is done to the layer, and by which factors its two calibrated input scales are then wrong.
ACCURACY: dict[str, tuple[Callable[[Layer, torch.Generator], None], float, float]] = {
    "random": (_nothing, 1.0, 1.0),
    "activation groups over 2^12": (_wide_groups, 1.0, 1.0),
    "one row 256 times the others": (_hot_row, 1.0, 1.0),
    "one group 256 times the others": (_hot_group, 1.0, 1.0),
    "weight groups over 2^8": (_wide_weights, 1.0, 1.0),
    "both groups wide": (lambda layer, generator: (_wide_groups(layer, generator), _wide_weights(layer, generator)), 1, 1),
    "first input scale 4 times too small": (_nothing, 0.25, 1.0),
    "first input scale 64 times too large": (_nothing, 64.0, 1.0),
    "second input scale 4 times too small": (_nothing, 1.0, 0.25),
    "second input scale 64 times too large": (_nothing, 1.0, 64.0),
}  # fmt: skip
ACCURACY_EXPERTS, ACCURACY_PADDED, ACCURACY_ROWS = 8, 512, (1, 8, 64)


def calibrate(layer: Layer, cell: streaming.Cell) -> None:
    """Static input scales as a calibration over this payload gives them: the largest value is e4m3's largest."""
    x, x_scale, _, _, _ = layer.payload.arguments(cell)
    largest = (x.float().abs().unflatten(2, (-1, 128)).amax(3) * x_scale).amax()
    layer.a1_scale.fill_(float(largest) / 448)
    peak = 0.0
    for expert, count in enumerate(cell.row_counts().tolist()):
        if count:
            rows = (x[expert, :count].float().unflatten(1, (-1, 128)) * x_scale[expert, :count, :, None]).flatten(1)
            scales = deinterleave_scales(layer.w1_scale[expert : expert + 1], layer.w1.size(1))[0]
            gate, up = (rows @ dequantize_weight(layer.w1[expert], scales).T).chunk(2, dim=1)
            peak = max(peak, float((torch.nn.functional.silu(gate) * up).abs().max()))
    layer.a2_scale.fill_(peak / 448)


def accuracy_cell(case: str, rows: int, hidden: int, inner: int, kernel: Callable[..., Any]) -> Result:
    """Errors of the engine's chain, ours and the two kernels against float64 on a layer of one kind."""
    layer = Layer(ACCURACY_EXPERTS, ACCURACY_PADDED, hidden, inner, "cuda")
    spoil, first, second = ACCURACY[case]
    spoil(layer, torch.Generator("cuda").manual_seed(rows))
    cell = streaming.Cell(ACCURACY_EXPERTS, ACCURACY_PADDED, rows, "random")
    calibrate(layer, cell)
    # Off by a factor from here on: what a checkpoint calibrated on other text has.
    layer.a1_scale.mul_(first)
    layer.a2_scale.mul_(second)
    runs = LayerRuns(layer, Regrouped(layer), cell)
    expected = reference_rows(layer, cell, runs.x, runs.x_scale)
    first, second = grouped_gemm_table.RULE_BLOCK_NS
    launches = (grouped_gemm_table.rule(first, rows, gate_up=True), grouped_gemm_table.rule(second, rows))
    providers = {"triton": runs.whole(*launches), **expert_layer.chains(layer, cell, kernel)}
    errors: Result = {}
    for name, run in providers.items():
        output = run()
        name = name.replace("ours", "cutlass")
        errors[f"{name}_rel_err"] = round(error_of(output, expected), 6)
        errors[f"{name}_worst_row"] = round(worst_row_error(output, expected), 6)
    against = "engine" if "engine" in providers else "cutlass"
    # The layer's error is judged. A single row whose values are small beside the static second scale keeps few bits in any
    # chain, and which chain keeps more there is chance: it is shown.
    return {**errors, "not_above": errors["triton_rel_err"] <= errors[f"{against}_rel_err"]}


# ---- prefill


# Mean rows an expert gets of one prefill chunk in the engine's normal mode.
PREFILL_ROWS = (16, 64, 256, 1024)
PREFILL_EXPERTS = 64


def prefill_launches(block_n: int, rows: int) -> list[GroupedGemmLaunch]:
    """Launches worth timing for plain products over many rows: first what a server takes."""
    found = [grouped_gemm_table.rule(block_n, rows)]
    for block_m, warps, stages in itertools.product((32, 64, 128), (4, 8), (3, 4)):
        if block_n * block_m // (warps * 32) <= 128:
            found.append(GroupedGemmLaunch(block_n, block_m, 1, warps, stages, look_up=block_m >= 64))
    return list(dict.fromkeys(found))


def prefill_cell(
    layer: Layer, regrouped: Regrouped, gate_up: bool, rows: int, kernel: Callable[..., Any], repeats: int
) -> Result:
    """One GEMM over rows that stand one expert after another: the engine's compiled kernel and ours, outputs compared."""
    experts, device = PREFILL_EXPERTS, layer.device
    counts = streaming.Cell(experts, 1 << 20, rows, "random").row_counts().to(device=device, dtype=torch.int32)
    total = int(counts.sum())
    n, k = (2 * layer.inner, layer.hidden) if gate_up else (layer.hidden, layer.inner)
    x = torch.randn((total, k), device=device).mul_(8).to(torch.float8_e4m3fn)
    first_rows = counts.cumsum(0, dtype=torch.int32) - counts
    sizes = torch.stack((torch.full_like(counts, n), counts, torch.full_like(counts, k)), dim=1).contiguous()
    tables = layer.strides(experts)
    strides = [tables[name] for name in expert_layer.GEMM_STRIDES[0 if gate_up else 1]]
    weights = (layer.w1, layer.w1_scale) if gate_up else (layer.w2, layer.w2_scale)
    w_q, w_scale = (tensor[:experts] for tensor in weights)
    theirs, ours = (torch.empty((total, n), dtype=torch.bfloat16, device=device) for _ in range(2))
    block_n = grouped_gemm_table.RULE_BLOCK_NS[0 if gate_up else 1]
    tiles, tile_scales = regrouped.get(gate_up, block_n, experts)
    scale, layout = layer.a1_scale, two.TileLayout(block_n, gate_up)

    def triton_gemm(launch: GroupedGemmLaunch) -> Callable[[], None]:
        return lambda: two.w4a8_rows(x, scale, tiles, tile_scales, first_rows, sizes[:, 1], ours, launch, layout)

    rule, *others = prefill_launches(block_n, rows)
    what = f"prefill of {rows} rows"
    providers = launchable(what, {launch_name(launch): triton_gemm(launch) for launch in (rule, *others)})
    arguments = (x, w_q, scale, w_scale, first_rows, sizes, *strides, two.GROUP_SIZE, expert_layer.TOPK)
    providers["cutlass"] = lambda: kernel(theirs, *arguments)
    providers["cutlass"]()
    triton_gemm(rule)()
    error = relative_error(ours.float(), theirs.float())
    medians = interleaved_medians(providers, repeats)
    cutlass = medians.pop("cutlass")
    best = min(medians, key=lambda name: medians[name])
    return {
        "live_rows": total,
        "cutlass_us": round(cutlass, 2),
        "rule_us": round(medians[launch_name(rule)], 2),
        "best_us": round(medians[best], 2),
        "rule": dict(rule.__dict__),
        "best": dict(launch_of(best).__dict__),
        "rel_difference": round(error, 5),
    }


def run_prefill(options: argparse.Namespace, meta: Mapping[str, Any], kernel: Callable[..., Any]) -> None:
    """Every prefill cell that the file does not hold yet."""
    path = beside(options.out, "prefill")
    done = read_done(path, meta).get("cells", [])
    layer = Layer(PREFILL_EXPERTS, 512, options.hidden, options.inner, "cuda")
    regrouped = Regrouped(layer)
    for rows, gemm in tqdm(list(itertools.product(PREFILL_ROWS, GEMMS)), unit="cell", desc="prefill", disable=None):
        key = {"hidden": options.hidden, "inner": options.inner, "experts": PREFILL_EXPERTS, "rows": rows, "gemm": gemm}
        if not matching(done, key):
            done.append({**key, **prefill_cell(layer, regrouped, gemm == "gate_up", rows, kernel, options.repeats)})
            write_json(path, {"meta": meta, "cells": done})


# ---- files


def beside(out: Path, what: str) -> Path:
    """The file of another thing that is measured here: ``two_kernels.json`` and ``two_kernels_accuracy.json``."""
    return out.with_stem(f"{out.stem}_{what}")


def read_done(path: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """What an interrupted run of the same set-up has left; a file of another set-up is not mixed with this run."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    refuse_other_set_up(path, content["meta"], meta)
    return content


def run_search(
    options: argparse.Namespace, meta: Mapping[str, Any], layer: Layer, regrouped: Regrouped
) -> list[Result]:
    """Candidates of every planned cell that the search file does not hold yet; everything that it then holds."""
    path = options.search or options.out.with_suffix(".search.json")
    done = read_done(path, meta).get("cells", [])
    for cell in tqdm(plan(options.experts, options.rows, moe_layer.PADDED), unit="cell", desc="search", disable=None):
        key = key_of(cell, options.hidden, options.inner)
        if not matching(done, key):
            done.append({**key, **search_cell(layer, regrouped, cell, options.wide)})
            write_json(path, {"meta": meta, "cells": done})
    return done


def shipped_table(options: argparse.Namespace) -> dict[tuple[int, int, int], ShapeLaunches]:
    """What a server on this GPU takes for the planned experts.

    Raises:
        SystemExit: the GPU's tuned file has no launches of these sizes.
    """
    table = {}
    for experts in options.experts:
        shape = grouped_gemm_table.shape_launches(tuned_config.gpu_name(), options.inner, options.hidden, experts)
        if shape is None:
            raise SystemExit(
                f"two_kernels: no tuned file has launches at N {options.inner}, K {options.hidden} on this GPU"
            )
        table[options.inner, options.hidden, experts] = shape
    return table


def run_measurement(
    options: argparse.Namespace,
    meta: Mapping[str, Any],
    layer: Layer,
    regrouped: Regrouped,
    kernel: Callable[..., Any],
    table: Mapping[tuple[int, int, int], ShapeLaunches],
) -> list[Result]:
    """The planned cells with the launches of a table; one measured with others before is done again."""
    done = read_done(options.out, meta).get("cells", [])
    bandwidth = stream_bandwidth(torch.device("cuda"))
    for cell in tqdm(
        plan(options.experts, options.rows, moe_layer.PADDED), unit="cell", desc="two_kernels", disable=None
    ):
        key = key_of(cell, options.hidden, options.inner)
        pair = table[options.inner, options.hidden, cell.experts].at(cell.expected_m())
        wanted = {**key, "gate_up": dict(pair.gate_up.__dict__), "down": dict(pair.down.__dict__)}
        if matching(done, wanted):
            continue
        done = [entry for entry in done if not matching([entry], key)]
        launches = (pair.gate_up, pair.down)
        done.append({**key, **measure_cell(layer, regrouped, cell, kernel, launches, options.repeats, bandwidth)})
        write_json(options.out, {"meta": meta, "cells": done})
    return done


def run_accuracy(options: argparse.Namespace, meta: Mapping[str, Any], kernel: Callable[..., Any]) -> bool:
    """Every case that the file does not hold yet; False where an error is above the engine's."""
    path = beside(options.out, "accuracy")
    done = read_done(path, meta).get("cells", [])
    for case, rows in tqdm(list(itertools.product(ACCURACY, ACCURACY_ROWS)), unit="case", disable=None):
        key = {"hidden": options.hidden, "inner": options.inner, "case": case, "rows": rows}
        if not matching(done, key):
            done.append({**key, **accuracy_cell(case, rows, options.hidden, options.inner, kernel)})
            write_json(path, {"meta": meta, "cells": done})
    above = [entry for entry in done if not entry["not_above"]]
    for entry in above:
        print(f"two_kernels: an error is above the engine's: {entry}", file=sys.stderr)
    return not above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results file; a second run goes on with it")
    parser.add_argument("--search", type=Path, help="the candidates' times (default: beside the results)")
    parser.add_argument(
        "--wide", action="store_true", help="search every launch that fits, not only those near the known best"
    )
    parser.add_argument(
        "--table", type=Path, metavar="FOLDER", help="write the tuned table for servers into this folder"
    )
    parser.add_argument(
        "--shipped", action="store_true", help="no search: time what the tuned table has a server launch"
    )
    parser.add_argument("--accuracy", action="store_true", help="errors against float64 instead of times")
    parser.add_argument(
        "--prefill", action="store_true", help="plain products over many rows against the engine's kernel"
    )
    parser.add_argument("--kernel-library", type=Path, help="common_ops library instead of the installed sgl_kernel")
    parser.add_argument("--kernel-version", help="version of sglang-kernel, with --kernel-library")
    parser.add_argument("--hidden", type=int, default=moe_layer.HIDDEN, help="hidden size K of the layer")
    parser.add_argument("--inner", type=int, default=moe_layer.INNER, help="intermediate size N of the layer")
    parser.add_argument("--experts", type=int, nargs="+", default=list(EXPERTS), help="local experts")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="mean live rows per expert")
    parser.add_argument("--repeats", type=int, default=9, help="timed turns of each arm")
    options = parser.parse_args()
    if options.shipped and (options.wide or options.search or options.table):
        parser.error("shipped: searches nothing, so it must stand without --wide, --search and --table")
    if not torch.cuda.is_available():
        print("two_kernels: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    kernel, version = load_kernel(options.kernel_library, options.kernel_version)
    expert_layer.make_every_patch_live(kernel)
    meta = run_metadata(sglang_kernel=version)
    if options.prefill:
        run_prefill(options, meta, kernel)
        return 0
    if options.accuracy:
        return 0 if run_accuracy(options, meta, kernel) else 1
    layer = Layer(max(options.experts), moe_layer.PADDED, options.hidden, options.inner, "cuda")
    regrouped = Regrouped(layer)
    if options.shipped:
        run_measurement(options, meta, layer, regrouped, kernel, shipped_table(options))
        return 0
    searched = run_search(options, meta, layer, regrouped)
    measured = run_measurement(options, meta, layer, regrouped, kernel, make_table(searched, ()))
    if options.table is not None:
        path = options.table / tuned_config.file_name(grouped_gemm_table.KIND, tuned_config.gpu_name() or "")
        print(write_table(path, make_table(searched, measured), version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
