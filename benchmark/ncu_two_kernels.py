#!/usr/bin/env python3
"""What limits the two Triton grouped GEMMs, from the hardware's counters: bytes, issue slots, occupancy, stalls.

    python3 benchmark/ncu_two_kernels.py --out benchmark/results/h200/two_kernels_ncu.json

Runs itself under Nsight Compute (``ncu``, which must be on the PATH) and keeps the counters of one launch of each kernel at
every row count, with the launches that a server would take: from the tuned table, or by the rule without one. Clocks are left
alone, so durations are those of a single cold launch under the profiler: use them to read the other counters, never to compare.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import moe_layer
from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.expert_layer import Layer, LayerRuns, Regrouped
from sglang_w4afp8.bench.measure import run_metadata, write_json
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "WarpStateStats",
    "SchedulerStats",
)
BYTES_READ = "dram__bytes_read.sum"
# Names as Nsight Compute prints them; one that a version does not have is left out.
METRICS = (
    "Duration",
    BYTES_READ,
    "DRAM Throughput",
    "L2 Hit Rate",
    "L1/TEX Hit Rate",
    "Compute (SM) Throughput",
    "Issue Slots Busy",
    "No Eligible",
    "Executed Ipc Active",
    "Warp Cycles Per Issued Instruction",
    "Registers Per Thread",
    "Block Limit Registers",
    "Block Limit Shared Mem",
    "Theoretical Occupancy",
    "Achieved Occupancy",
    "Grid Size",
)  # fmt: skip
ROWS, ROUTINGS = (1, 8, 32, 128), ("even", "skew16")
Result = dict[str, Any]


def launch_all(experts: int, rows: Sequence[int]) -> None:
    """The profiled process: both kernels of every cell once, between the profiler's start and stop."""
    layer = Layer(experts, moe_layer.PADDED, moe_layer.HIDDEN, moe_layer.INNER, "cuda")
    regrouped = Regrouped(layer)
    gpu = tuned_config.gpu_name()
    shape = grouped_gemm_table.shape_launches(gpu, layer.inner, layer.hidden, experts)
    block_ns = shape.block_ns if shape else grouped_gemm_table.RULE_BLOCK_NS
    for count in rows:
        for routing in ROUTINGS:
            cell = streaming.Cell(experts, moe_layer.PADDED, count, routing)
            runs = LayerRuns(layer, regrouped, cell)
            pair = grouped_gemm_table.launches(gpu, layer.inner, layer.hidden, experts, block_ns, cell.expected_m())
            layer_run = runs.whole(*pair)
            layer_run()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            layer_run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def read_counters(text: str) -> list[Result]:
    """One entry a profiled kernel, in order of launch, from ncu's CSV (which may follow other output)."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ValueError(f"ncu: printed no table: {text[-2000:]}")
    kernels: dict[str, Result] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        entry = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0], "counters": {}})
        if row["Metric Name"] in METRICS:
            entry["counters"][row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return list(kernels.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        print("ncu_two_kernels: needs a GPU and ncu on the PATH", file=sys.stderr)
        return 2
    if options.profiled:
        launch_all(options.experts, options.rows)
        return 0
    ncu = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "details"]
    for section in SECTIONS:
        ncu += ["--section", section]
    ncu += ["--metrics", BYTES_READ, "--kernel-name", "regex:^_(gate_up|down)_kernel$"]
    words = [sys.executable, __file__, "--profiled", "--out", str(options.out), "--experts", str(options.experts)]
    done = subprocess.run(
        [*ncu, *words, "--rows", *map(str, options.rows)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        return 1
    found = read_counters(done.stdout)
    cells = [(rows, routing) for rows in options.rows for routing in ROUTINGS for _ in range(2)]
    if len(found) != len(cells):
        print(f"ncu_two_kernels: {len(found)} kernels profiled, must be {len(cells)}", file=sys.stderr)
        return 1
    kept = [
        {"experts": options.experts, "rows": rows, "routing": routing, **entry}
        for (rows, routing), entry in zip(cells, found, strict=True)
    ]
    write_json(options.out, {"meta": run_metadata(), "cells": kept})
    return 0


if __name__ == "__main__":
    sys.exit(main())
