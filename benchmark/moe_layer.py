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
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from gemm_tiles import load_kernel
from sglang_w4afp8 import lifecycle
from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.measure import Results, interleaved_medians, run_metadata
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import relative_error
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.srt.layers.moe.cutlass_w4a8_moe import cutlass_w4a8_moe_deepep_ll

PATCHES = ("requant", "expected_m", "silu", "problem_sizes", "gemm")
GROUP = 128
HIDDEN, INNER, TOPK = 7168, 2048, 8
EXPERTS = (8, 32, 64, 128, 256)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUTINGS = ("random", "skew16")
# Both are settings people run: 512 is a multiple of what the engine's GEMM needs, 384 is not.
PADDED = 2048
PADDED_WHERE_THE_ENGINE_IS_WRONG = 384


def make_every_patch_live(kernel: Callable[..., Any]) -> None:
    """Our chain outside a server: every step ours, and ``sgl_kernel`` answered by the kernel that was loaded."""
    statuses = tuple(lifecycle.PatchStatus(name, lifecycle.State.ACTIVE) for name in PATCHES)
    lifecycle.record(lifecycle.ActivationReport("benchmark", verified=True, patches=statuses))
    if "sgl_kernel" not in sys.modules:
        stand_in = types.ModuleType("sgl_kernel")

        def cutlass_w4a8_moe_mm(
            d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides,
            chunk_size=GROUP, topk=TOPK,
        ):  # fmt: skip
            kernel(
                d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides,
                chunk_size, topk,
            )  # fmt: skip

        stand_in.cutlass_w4a8_moe_mm = cutlass_w4a8_moe_mm
        sys.modules["sgl_kernel"] = stand_in


# Stride tables of the first and the second grouped GEMM, in the order of the kernel's arguments: a, b, d, scales.
GEMM_STRIDES = (
    ("a_strides1", "b_strides1", "c_strides1", "s_strides13"),
    ("a_strides2", "b_strides2", "c_strides2", "s_strides2"),
)


class Layer:
    """Weights of one layer and a payload, at the largest size of a run; cells are slices."""

    def __init__(self, max_experts: int, padded: int, hidden: int, inner: int, device: str) -> None:
        self.hidden, self.inner, self.device = hidden, inner, torch.device(device)
        generator = torch.Generator(device).manual_seed(0)

        def int4(*shape: int) -> torch.Tensor:
            return torch.randint(-128, 128, shape, dtype=torch.int8, device=device, generator=generator)

        def scales(n: int, k: int) -> torch.Tensor:
            values = torch.rand((max_experts, k // (4 * GROUP), n * 4), device=device, generator=generator)
            return (values * 0.002 + 0.001).to(torch.bfloat16)

        self.w1, self.w2 = int4(max_experts, 2 * inner, hidden // 2), int4(max_experts, hidden, inner // 2)
        self.w1_scale, self.w2_scale = scales(2 * inner, hidden), scales(hidden, inner)
        self.payload = streaming.RequantBuffers(max_experts, padded, hidden, device)
        # The largest payload value is 448 * 0.11, and what the first GEMM makes of it stays below 448 * 5: nothing
        # saturates, as in a calibrated checkpoint.
        self.a1_scale = torch.tensor([0.11], device=device)
        self.a2_scale = torch.tensor([5.0], device=device)
        self.topk_ids = torch.zeros((1, TOPK), dtype=torch.int64, device=device)

    def strides(self, experts: int) -> dict[str, torch.Tensor]:
        def full(value: int) -> torch.Tensor:
            return torch.full((experts, 3), value, dtype=torch.int64, device=self.device)

        return {
            "a_strides1": full(self.hidden),
            "b_strides1": full(self.hidden),
            "c_strides1": full(2 * self.inner),
            "a_strides2": full(self.inner),
            "b_strides2": full(self.inner),
            "c_strides2": full(self.hidden),
            "s_strides13": full(2 * self.inner),
            "s_strides2": full(self.hidden),
        }


def chains(layer: Layer, cell: streaming.Cell, kernel: Callable[..., Any]) -> dict[str, Callable[[], torch.Tensor]]:
    """``ours`` and ``engine`` over the same payload; each returns its bf16 ``[E, M, K]``."""
    experts, expected_m = cell.experts, cell.expected_m()
    x, x_scale, masked_m, _, _ = layer.payload.arguments(cell)
    x, x_scale = x[:, : cell.padded].contiguous(), x_scale[:, : cell.padded]
    x_scale = x_scale.transpose(1, 2).contiguous().transpose(1, 2)
    strides = layer.strides(experts)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=layer.device)
    tables = torch.zeros((2, experts, 3), dtype=torch.int32, device=layer.device)
    weights = (layer.w1[:experts], layer.w2[:experts], layer.w1_scale[:experts], layer.w2_scale[:experts])
    shape = (experts, cell.padded)

    def ours() -> torch.Tensor:
        return cutlass_w4a8_moe_deepep_ll(
            x,
            x_scale,
            *weights,
            layer.topk_ids,
            masked_m,
            **strides,
            expert_offsets=offsets,
            problem_sizes1=tables[0],
            problem_sizes2=tables[1],
            a1_scale=layer.a1_scale,
            a2_scale=layer.a2_scale,
            expected_m=expected_m,
        )

    providers: dict[str, Callable[[], torch.Tensor]] = {"ours": ours}
    requant = streaming.engine_function("fp8_per_token_to_per_tensor_quant_triton")
    if requant is None:
        return providers
    silu = streaming.engine_function("silu_and_mul_masked_post_per_tensor_quant_fwd")
    sizes = streaming.engine_function("deepep_ll_get_cutlass_w4a8_moe_mm_data")
    hint = {"expected_rows": expected_m} if "expected_rows" in inspect.signature(requant).parameters else {}
    w1, w2, w1_scale, w2_scale = weights

    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((*shape, columns), dtype=dtype, device=layer.device)

    def engine() -> torch.Tensor:
        sizes1, sizes2 = sizes(masked_m, tables[0], tables[1], experts, layer.inner, layer.hidden)
        gateup_input = empty(layer.hidden, torch.float8_e4m3fn)
        requant(x, x_scale, masked_m, layer.a1_scale, gateup_input, **hint)
        c1, c2 = empty(2 * layer.inner, torch.bfloat16), empty(layer.hidden, torch.bfloat16)
        first, second = ([strides[name] for name in names] for names in GEMM_STRIDES)
        kernel(c1, gateup_input, w1, layer.a1_scale, w1_scale, offsets[:-1], sizes1, *first, GROUP, TOPK)
        down_input = empty(layer.inner, torch.float8_e4m3fn)
        silu(c1, down_input, masked_m, layer.a2_scale)
        kernel(c2, down_input, w2, layer.a2_scale, w2_scale, offsets[:-1], sizes2, *second, GROUP, TOPK)
        return c2

    providers["engine"] = engine
    return providers


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
