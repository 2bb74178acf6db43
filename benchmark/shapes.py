#!/usr/bin/env python3
"""Every size that people serve: the engine's whole layer, both of our back ends, what `auto` picks without any table, and with.

    python3 benchmark/shapes.py --out benchmark/results/h200/shapes.json
    python3 benchmark/shapes.py --kernel-library .../common_ops.abi3.so --kernel-version 0.4.10 --out out.json

A cell is one size (model, experts on a rank), mean rows per expert and routing. All arms run in turns in one process, as CUDA
graphs over the same payload and weights; each is compared with a float64 reference over sampled rows first.

* ``engine_us``: the installed engine's own functions. ``engine_rel_err`` says whether they are right.
* ``cutlass_us``, ``triton_us``: our CUTLASS chain and the two kernels, tiles and launches by the rules alone.
* ``auto_us``: the one of these that a server without any table takes, by the measurement that it makes when weights are loaded
  (``measured_choice``, on this layer's weights). A server that sends up to 32 rows an expert decides for cells up to 32, one
  that sends up to 256 for the others.
* ``cutlass_table_us``, ``triton_table_us``, ``table_us``: the same with the tables that this package ships or this user has.
* ``floor_us``: reading the live experts' weights and scales at the speed of a plain stream over memory.

``sizes`` of the file holds the decisions: what was measured at load, how long it took, and what the table says.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import expert_layer, streaming
from sglang_w4afp8.bench.expert_layer import Layer, LayerRuns, Regrouped, error_of, load_kernel, reference_rows
from sglang_w4afp8.bench.measure import refuse_other_set_up, run_metadata, write_json
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table as table
from sglang_w4afp8.srt.layers.moe import measured_choice, two_kernels, w4a8_gemm
from sglang_w4afp8.srt.layers.moe.cutlass_w4a8_moe import cutlass_w4a8_moe_deepep_ll
from sglang_w4afp8.timing import interleaved_medians
from sglang_w4afp8.tune.gemm_tiles import stream_bandwidth, weight_bytes
from sglang_w4afp8.tune.sizes import MODELS
from sglang_w4afp8.tune.two_kernels import PADDED, ROWS, plan

# Experts on a rank by model, the most served first (README of the models' names: `tune/sizes.py`).
SERVED: Mapping[str, tuple[int, ...]] = {
    "glm-5": (32, 16, 18, 36, 64, 256),
    "kimi-k2": (48, 24, 12),
    "deepseek-v3": (8, 64, 32, 16, 4, 256),
    "glm-4": (20,),
    "qwen3-235b": (16,),
    "qwen3-30b": (128,),
    "kimi-k3": (56,),
}
# Mean rows up to which a server sends, for the decisions: the first that holds a cell's rows decides for it.
LOADS = (32, 256)
REPEATS = 7

Result = dict[str, Any]


@contextlib.contextmanager
def no_tile_table() -> Iterator[None]:
    """CUTLASS tiles by the rule, as with a kernel version or GPU that no table is for."""
    installed = w4a8_gemm.installed_table
    w4a8_gemm.installed_table = lambda: None
    w4a8_gemm._cached_choice.cache_clear()
    try:
        yield
    finally:
        w4a8_gemm.installed_table = installed
        w4a8_gemm._cached_choice.cache_clear()


def by_rule(run: Callable[[], Any]) -> Callable[[], Any]:
    def ruled() -> Any:
        with no_tile_table():
            return run()

    return ruled


def rule_pair(n: int, k: int, experts: int, expected_m: int) -> tuple[Any, Any]:
    """Launches of both kernels without a table."""
    rows = table.mean_rows(expected_m)
    first, second = two_kernels.rule_block_ns(torch.device("cuda"), n, k, experts)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    return table.rule_launches(n, k, experts, (first, second), rows, sm_count)


def engine_layer(layer: Layer, experts: int) -> SimpleNamespace:
    """The first experts of a bench layer as the engine's layer holds them; the memory is the bench layer's own."""

    def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(tensor[:experts], requires_grad=False)

    return SimpleNamespace(
        w13_weight=parameter(layer.w1),
        w2_weight=parameter(layer.w2),
        w13_weight_scale_inv=parameter(layer.w1_scale),
        w2_weight_scale_inv=parameter(layer.w2_scale),
    )


def decide(layer: Layer, experts: int, largest_rows: int) -> measured_choice.Measurement:
    """What a server without any table measures when this layer's weights are loaded."""
    held = engine_layer(layer, experts)
    n, k, device = layer.inner, layer.hidden, torch.device("cuda", torch.cuda.current_device())
    scratch = {
        "expert_offsets": torch.zeros(experts + 1, dtype=torch.int32, device=device),
        "problem_sizes1": torch.zeros((experts, 3), dtype=torch.int32, device=device),
        "problem_sizes2": torch.zeros((experts, 3), dtype=torch.int32, device=device),
    }

    def call(payload: measured_choice.Payload, expected_m: int) -> torch.Tensor:
        return cutlass_w4a8_moe_deepep_ll(
            payload.x,
            payload.x_scale,
            held.w13_weight,
            held.w2_weight,
            held.w13_weight_scale_inv,
            held.w2_weight_scale_inv,
            layer.topk_ids,
            payload.masked_m,
            **layer.strides(experts),
            **scratch,
            a1_scale=layer.a1_scale,
            a2_scale=layer.a2_scale,
            expected_m=expected_m,
        )

    block_ns = two_kernels.rule_block_ns(device, n, k, experts)
    table_of = table.table_of
    table.table_of = lambda gpu: None
    table.launches.cache_clear()
    try:
        with no_tile_table():
            return measured_choice.measure(
                measured_choice.Sizes(n, k, experts, PADDED),
                largest_rows + 1,
                device,
                call,
                functools.partial(two_kernels._regroup, held, block_ns),
                functools.partial(two_kernels.restore_layer, held),
            )
    finally:
        table.table_of = table_of
        table.launches.cache_clear()


def decisions(layer: Layer, experts: int) -> Result:
    """By the rows that a server sends: what it takes without a table, and by the table."""
    shape = table.shape_launches(tuned_config.gpu_name(), layer.inner, layer.hidden, experts)
    found: Result = {
        "block_ns": list(two_kernels.rule_block_ns(torch.device("cuda"), layer.inner, layer.hidden, experts))
    }
    for rows in LOADS:
        started = time.monotonic()
        measurement = decide(layer, experts, rows)
        found[str(rows)] = {
            "auto": "triton" if measurement.triton_wins else "cutlass",
            "table": None if shape is None else "triton" if shape.triton_wins(rows + 1) else "cutlass",
            "told": measurement.told(),
            "measured": [[m, round(cutlass, 2), round(triton, 2)] for m, cutlass, triton in measurement.rows()],
            "seconds": round(measurement.seconds, 2),
            "preparing": round(measurement.preparing, 2),
            "in_all": round(time.monotonic() - started, 2),
        }
    return found


def measure_cell(
    layer: Layer,
    regrouped: Regrouped,
    cell: streaming.Cell,
    kernel: Callable[..., Any],
    decided: Mapping[str, Any],
    bandwidth: float,
) -> Result:
    n, k, expected_m = layer.inner, layer.hidden, cell.expected_m()
    runs = LayerRuns(layer, regrouped, cell)
    chains = expert_layer.chains(layer, cell, kernel)
    shape = table.shape_launches(tuned_config.gpu_name(), n, k, cell.experts)
    pair = shape.at(expected_m) if shape is not None else None
    providers: dict[str, Callable[[], Any]] = {
        "triton": runs.whole(*rule_pair(n, k, cell.experts, expected_m)),
        "cutlass": by_rule(chains["ours"]),
        "cutlass_table": chains["ours"],
    }
    if "engine" in chains:
        providers["engine"] = chains["engine"]
    if pair is not None:
        providers["triton_table"] = runs.whole(pair.gate_up, pair.down)
    expected = reference_rows(layer, cell, runs.x, runs.x_scale)
    errors = {name: error_of(run(), expected) for name, run in providers.items()}
    us = interleaved_medians(providers, REPEATS)
    load = str(next(rows for rows in LOADS if cell.rows <= rows))
    auto, by_table = decided[load]["auto"], decided[load]["table"]
    live = int((runs.masked_m > 0).sum())
    read = weight_bytes(2 * n, k, live) + weight_bytes(k, n, live)

    def rounded(name: str) -> float | None:
        return round(us[name], 2) if name in us else None

    return {
        "expected_m": expected_m,
        "engine_us": rounded("engine"),
        "cutlass_us": rounded("cutlass"),
        "triton_us": rounded("triton"),
        "auto_us": rounded(auto),
        "table_us": rounded(f"{by_table or auto}_table"),
        "cutlass_table_us": rounded("cutlass_table"),
        "triton_table_us": rounded("triton_table"),
        "floor_us": round(read / bandwidth, 2),
        "auto": auto,
        "table": by_table,
        **{f"{name}_rel_err": round(error, 5) for name, error in errors.items()},
    }


def wanted(models: Sequence[str], experts: Sequence[int] | None) -> list[tuple[str, int]]:
    return [(model, count) for model in models for count in SERVED[model] if not experts or count in experts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results file; a second run goes on with it")
    parser.add_argument("--kernel-library", type=Path, help="common_ops library instead of the installed sgl_kernel")
    parser.add_argument("--kernel-version", help="version of sglang-kernel, with --kernel-library")
    parser.add_argument("--models", nargs="+", default=list(SERVED), choices=list(SERVED))
    parser.add_argument("--experts", type=int, nargs="+", help="only these numbers of experts on a rank")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="mean live rows per expert")
    parser.add_argument("--time-limit-s", type=float, default=float("inf"), help="no cell starts after this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("shapes: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.time_limit_s
    kernel, version = load_kernel(options.kernel_library, options.kernel_version)
    expert_layer.make_every_patch_live(kernel)
    meta = run_metadata(sglang_kernel=version)
    content: Result = {"meta": meta, "sizes": {}, "cells": []}
    if options.out.is_file():
        content = json.loads(options.out.read_text(encoding="utf-8"))
        refuse_other_set_up(options.out, content["meta"], meta)
    bandwidth = stream_bandwidth(torch.device("cuda"))
    names = {"kernel_version": version, "triton": meta["triton"]}
    sizes = wanted(options.models, options.experts)
    planned = {(model, count): plan([count], options.rows) for model, count in sizes}
    with tqdm(total=sum(map(len, planned.values())), unit="cell", desc="shapes", disable=None) as progress:
        for (model, count), cells in planned.items():
            sizes_of = MODELS[model]
            layer = Layer(count, PADDED, sizes_of.hidden, sizes_of.inner, "cuda")
            regrouped = Regrouped(layer)
            decided = content["sizes"].get(f"{model}/{count}")
            if decided is None:
                decided = content["sizes"][f"{model}/{count}"] = decisions(layer, count)
                tqdm.write(f"{model}, {count} experts: " + "; ".join(decided[str(rows)]["told"] for rows in LOADS))
            for cell in cells:
                key = {
                    "model": model,
                    "n": sizes_of.inner,
                    "k": sizes_of.hidden,
                    **dataclasses.asdict(cell),
                    **names,
                }
                if not any(all(entry.get(name) == value for name, value in key.items()) for entry in content["cells"]):
                    if time.monotonic() > deadline:
                        print("shapes: the time limit came first; the same command goes on", file=sys.stderr)
                        return 3
                    content["cells"].append({**key, **measure_cell(layer, regrouped, cell, kernel, decided, bandwidth)})
                    write_json(options.out, content)
                progress.update()
            del layer, regrouped
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
