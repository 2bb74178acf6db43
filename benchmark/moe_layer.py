#!/usr/bin/env python3
"""The whole low-latency chain of one W4AFP8 layer, ours against the engine's functions, outputs compared.

    python3 benchmark/moe_layer.py --out benchmark/results/h200/moe_layer.json
    python3 benchmark/moe_layer.py --kernel-library .../common_ops.abi3.so --kernel-version 0.4.5 --out out.json

Each arm is one captured CUDA graph of the chain's launches: problem sizes, requant, grouped GEMM, SiLU-and-multiply, grouped
GEMM. ``engine`` calls the installed sglang's own functions in the order and with the arguments of its chain; ``ours`` is this
package's chain with every patch live. Both write into buffers of their own and the live rows of the outputs are compared
before anything is timed: bit for bit where the engine's GEMM is right, by relative error otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.expert_layer import Layer, chains, load_kernel, make_every_patch_live
from sglang_w4afp8.bench.measure import Results, run_metadata
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import relative_error
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.timing import interleaved_medians

HIDDEN, INNER = 7168, 2048
EXPERTS = (8, 32, 64, 128, 256)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUTINGS = ("random", "skew16")
# Both are settings people run: 512 is a multiple of what the engine's GEMM needs, 384 is not.
PADDED = 2048
PADDED_WHERE_THE_ENGINE_IS_WRONG = 384


def compare(providers: dict[str, Callable[[], torch.Tensor]], cell: streaming.Cell) -> dict[str, Any]:
    """Whether the live rows agree bit for bit, and their relative difference."""
    if "engine" not in providers:
        return {"bit_equal": None, "rel_difference": None}
    counts = cell.row_counts().tolist()
    ours, engine = providers["ours"](), providers["engine"]()
    live_ours = torch.cat([ours[expert, :rows] for expert, rows in enumerate(counts)])
    live_engine = torch.cat([engine[expert, :rows] for expert, rows in enumerate(counts)])
    bit_equal = torch.equal(live_ours.view(torch.int16), live_engine.view(torch.int16))
    return {"bit_equal": bit_equal, "rel_difference": relative_error(live_ours.float(), live_engine.float())}


def plan(experts: Sequence[int], rows: Sequence[int]) -> list[streaming.Cell]:
    cells = list(streaming.grid(experts, rows, ROUTINGS, PADDED))
    cells = [cell for cell in cells if int(cell.routing == "random") or cell.rows * streaming.SKEW <= PADDED]
    wrong = streaming.grid([e for e in experts if e >= 64], [r for r in rows if r in (8, 32)], ("random",))
    return cells + [
        streaming.Cell(cell.experts, PADDED_WHERE_THE_ENGINE_IS_WRONG, cell.rows, cell.routing) for cell in wrong
    ]


def run(options: argparse.Namespace, kernel: Callable[..., Any], version: str) -> bool:
    """Measure every cell that the file does not hold yet; False when an output differs where it must not."""
    results = Results(options.out, run_metadata(sglang_kernel=version))
    layer = Layer(max(options.experts), PADDED, HIDDEN, INNER, "cuda")
    right = True
    for cell in tqdm(plan(options.experts, options.rows), unit="cell", desc="moe_layer", disable=None):
        key = dataclasses.asdict(cell)
        if results.holds(key):
            continue
        providers = chains(layer, cell, kernel)
        compared = compare(providers, cell)
        engine_is_right = w4a8_gemm.engine_gemm_is_right(cell.padded)
        right &= not (engine_is_right and compared["bit_equal"] is False)
        medians = interleaved_medians(providers, options.repeats)
        entry = {**key, "expected_m": cell.expected_m(), "engine_is_right": engine_is_right, **compared}
        results.add({**entry, **{f"{name}_us": round(us, 2) for name, us in medians.items()}})
    return right


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
        print("moe_layer: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    kernel, version = load_kernel(options.kernel_library, options.kernel_version)
    make_every_patch_live(kernel)
    if not run(options, kernel, version):
        print("moe_layer: outputs differ where the engine is right", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
