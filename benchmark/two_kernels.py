#!/usr/bin/env python3
"""A layer in two Triton launches against our CUTLASS chain and the engine's functions; candidates of both kernels searched.

    python3 benchmark/two_kernels.py --out benchmark/results/h200/two_kernels.json
    python3 benchmark/two_kernels.py --kernel-library .../common_ops.abi3.so --kernel-version 0.4.5 --out out.json

Per cell every candidate launch of each kernel is timed in turns, then the best two together as one graph beside the whole
chains. The floor is the time to read the live experts' weights and scales at the speed of a plain stream over memory. The
layer's result is compared with a float reference over sampled rows, and so is the CUTLASS chain's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import moe_layer
from gemm_tiles import load_kernel
from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.measure import interleaved_medians, run_metadata, write_json
from sglang_w4afp8.kernels.ops.moe import w4a8_grouped_gemm as two
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GroupedGemmLaunch
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import (
    deinterleave_scales,
    dequantize_weight,
    relative_error,
)
from sglang_w4afp8.srt.layers.moe.w4a8_gemm_tuning import stream_bandwidth, weight_bytes

EXPERTS = (64, 256, 32, 128, 8)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUTINGS = ("even", "random", "skew16")
SAMPLED_EXPERTS, SAMPLED_ROWS = 4, 8


def candidates(rows: int, gate_up: bool) -> list[GroupedGemmLaunch]:
    """Launches worth timing at a mean of ``rows``: a step over rows is one tile, or a hot expert's are a few."""
    blocks_m = [m for m in (16, 32, 64, 128) if m <= max(16, 4 * rows) and 4 * m >= min(rows, 64)]
    found = []
    for block_n, block_m, groups, warps, stages in itertools.product((64, 128), blocks_m, (1, 2), (4, 8), (3, 4, 5)):
        accumulators = block_n * block_m * (2 if gate_up else 1) // (warps * 32)
        # A warp group works on 64 rows of the weights; more accumulators than this a thread spill.
        if block_n < 16 * warps or accumulators > 128 or (groups == 2 and stages > 3):
            continue
        found.append(GroupedGemmLaunch(block_n, block_m, groups, warps, stages))
    return found


class Regrouped:
    """One copy of a layer's weights for every ``block_n`` that candidates use."""

    def __init__(self, layer: moe_layer.Layer) -> None:
        self.layer = layer
        self.made: dict[tuple[bool, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, gate_up: bool, block_n: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (gate_up, block_n) not in self.made:
            source = (self.layer.w1, self.layer.w1_scale) if gate_up else (self.layer.w2, self.layer.w2_scale)
            w_q, w_scale = (tensor.clone() for tensor in source)
            two.regroup_weights(w_q, w_scale, block_n, gate_up=gate_up)
            self.made[gate_up, block_n] = w_q, w_scale
        w_q, w_scale = self.made[gate_up, block_n]
        return w_q[:experts], w_scale[:experts]


def reference_rows(layer: moe_layer.Layer, cell: streaming.Cell, x: torch.Tensor, x_scale: torch.Tensor) -> dict:
    """Float results of some live rows of some experts: (expert, rows) -> ``[rows, hidden]``, nothing rounded on the way."""
    counts = cell.row_counts().tolist()
    live = [expert for expert, count in enumerate(counts) if count]
    chosen = live[:: max(1, len(live) // SAMPLED_EXPERTS)][:SAMPLED_EXPERTS]
    results = {}
    for expert in chosen:
        rows = min(counts[expert], SAMPLED_ROWS)
        activations = (x[expert, :rows].float().unflatten(1, (-1, 128)) * x_scale[expert, :rows, :, None]).flatten(1)
        weights = [
            dequantize_weight(w[expert : expert + 1], deinterleave_scales(s[expert : expert + 1], w.size(1)))[0]
            for w, s in ((layer.w1, layer.w1_scale), (layer.w2, layer.w2_scale))
        ]
        gate, up = (activations @ weights[0].T).chunk(2, dim=1)
        limit = 448 * layer.a2_scale
        inner = (torch.nn.functional.silu(gate) * up).clamp(-limit, limit)
        results[expert] = inner @ weights[1].T
    return results


def error_of(output: torch.Tensor, expected: dict[int, torch.Tensor]) -> float:
    ours = torch.cat([output[expert, : len(rows)].float() for expert, rows in expected.items()])
    return relative_error(ours, torch.cat(list(expected.values())))


def measure(
    layer: moe_layer.Layer, regrouped: Regrouped, cell: streaming.Cell, kernel: Callable[..., Any], options: Any
) -> dict[str, Any]:
    experts = cell.experts
    x, x_scale, masked_m, _, _ = layer.payload.arguments(cell)
    x, x_scale = x[:, : cell.padded].contiguous(), x_scale[:, : cell.padded]
    x_scale = x_scale.transpose(1, 2).contiguous().transpose(1, 2)
    inner = torch.empty((experts, cell.padded, layer.inner), dtype=torch.float8_e4m3fn, device=x.device)
    output = torch.empty((experts, cell.padded, layer.hidden), dtype=torch.bfloat16, device=x.device)

    def gate_up(launch: GroupedGemmLaunch) -> Callable[[], None]:
        weights = regrouped.get(True, launch.block_n, experts)
        return lambda: two.w4a8_gate_up(x, x_scale, *weights, masked_m, layer.a2_scale, inner, launch)

    def down(launch: GroupedGemmLaunch) -> Callable[[], None]:
        weights = regrouped.get(False, launch.block_n, experts)
        return lambda: two.w4a8_down(inner, layer.a2_scale, *weights, masked_m, output, launch)

    best = []
    for make, is_gate_up in ((gate_up, True), (down, False)):
        launches = candidates(cell.rows, is_gate_up)
        medians = interleaved_medians({str(i): make(launch) for i, launch in enumerate(launches)}, 5)
        index = min(medians, key=lambda name: medians[name])
        best.append((launches[int(index)], medians[index]))
    first, second = gate_up(best[0][0]), down(best[1][0])

    def triton_layer() -> torch.Tensor:
        first()
        second()
        return output

    expected = reference_rows(layer, cell, x, x_scale)
    chains = moe_layer.chains(layer, cell, kernel)
    errors = {
        "triton_rel_err": error_of(triton_layer(), expected),
        **{f"{name}_rel_err": error_of(run(), expected) for name, run in chains.items()},
    }
    medians = interleaved_medians({"triton": triton_layer, **chains}, options.repeats)
    live = int((masked_m > 0).sum())
    read = weight_bytes(2 * layer.inner, layer.hidden, live) + weight_bytes(layer.hidden, layer.inner, live)
    return {
        "expected_m": cell.expected_m(),
        "engine_us": round(medians["engine"], 2) if "engine" in medians else None,
        "cutlass_us": round(medians["ours"], 2),
        "triton_us": round(medians["triton"], 2),
        "gate_up_us": round(best[0][1], 2),
        "down_us": round(best[1][1], 2),
        "floor_us": round(read / options.bandwidth, 2),
        "weight_stream_tb_s": round(read / medians["triton"] / 1e6, 3),
        **{name.replace("ours", "cutlass"): round(value, 5) for name, value in errors.items()},
        "gate_up": best[0][0].__dict__,
        "down": best[1][0].__dict__,
    }


def plan(experts: Sequence[int], rows: Sequence[int]) -> list[streaming.Cell]:
    padded = moe_layer.PADDED
    return [
        cell
        for cell in streaming.grid(experts, rows, ROUTINGS, padded)
        if not cell.routing.startswith("skew") or cell.rows * streaming.SKEW <= padded
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results file; a second run goes on with it")
    parser.add_argument("--kernel-library", type=Path, help="common_ops library instead of the installed sgl_kernel")
    parser.add_argument("--kernel-version", help="version of sglang-kernel, with --kernel-library")
    parser.add_argument("--experts", type=int, nargs="+", default=list(EXPERTS), help="local experts")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="mean live rows per expert")
    parser.add_argument("--repeats", type=int, default=9, help="timed turns of each arm")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("two_kernels: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    kernel, version = load_kernel(options.kernel_library, options.kernel_version)
    moe_layer.make_every_patch_live(kernel)
    options.bandwidth = stream_bandwidth(torch.device("cuda"))
    meta = run_metadata(sglang_kernel=version, stream_bytes_per_us=round(options.bandwidth))
    done = json.loads(options.out.read_text(encoding="utf-8"))["cells"] if options.out.is_file() else []
    layer = moe_layer.Layer(max(options.experts), moe_layer.PADDED, moe_layer.HIDDEN, moe_layer.INNER, "cuda")
    regrouped = Regrouped(layer)
    for cell in tqdm(plan(options.experts, options.rows), unit="cell", desc="two_kernels", disable=None):
        key = {"experts": cell.experts, "padded": cell.padded, "rows": cell.rows, "routing": cell.routing}
        if any(all(entry[name] == value for name, value in key.items()) for entry in done):
            continue
        done.append({**key, **measure(layer, regrouped, cell, kernel, options)})
        write_json(options.out, {"meta": meta, "cells": done})
    return 0


if __name__ == "__main__":
    sys.exit(main())
