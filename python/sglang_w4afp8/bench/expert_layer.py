"""One W4AFP8 expert layer as a bench object: weights, payload, and its chains as calls, for tuning and benchmarks.

``ours`` is this package's chain with every patch live, ``engine`` the installed sglang's own functions in the order and with
the arguments of its chain, ``LayerRuns`` the two Triton kernels. Each is a call that can be captured into a CUDA graph.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_w4afp8 import lifecycle
from sglang_w4afp8.bench import streaming
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.kernels.ops.moe import w4a8_grouped_gemm as two
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GroupedGemmLaunch
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import (
    deinterleave_scales,
    dequantize_weight,
    relative_error,
    scale_interleave,
)
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.srt.layers.moe.cutlass_w4a8_moe import cutlass_w4a8_moe_deepep_ll

PATCHES = ("requant", "expected_m", "silu", "problem_sizes", "gemm")
GROUP = 128
TOPK = 8
# Of the reference: how many experts and rows of each are looked at.
SAMPLED_EXPERTS, SAMPLED_ROWS = 4, 8


def load_kernel(library: Path | None, version: str | None) -> tuple[w4a8_gemm.Kernel, str]:
    """The grouped GEMM and its version: from a plain op library, or from the installed sgl_kernel."""
    if library is None:
        import sgl_kernel

        return sgl_kernel.cutlass_w4a8_moe_mm, version or w4a8_gemm.kernel_version() or sgl_kernel.__version__
    if version is None:
        raise SystemExit("--kernel-library needs --kernel-version")
    torch.ops.load_library(str(library))
    return torch.ops.sgl_kernel.cutlass_w4a8_moe_mm.default, version


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
            width = scale_interleave(k // GROUP)
            shape = (max_experts, k // (width * GROUP), n * width)
            values = torch.rand(shape, device=device, generator=generator)
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


class Regrouped:
    """One copy of a layer's weights for every ``block_n`` that candidates use."""

    def __init__(self, layer: Layer) -> None:
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


def reference_rows(layer: Layer, cell: streaming.Cell, x: torch.Tensor, x_scale: torch.Tensor) -> dict:
    """Float64 results of some live rows of some experts: expert -> ``[rows, hidden]``, nothing rounded on the way."""
    counts = cell.row_counts().tolist()
    live = [expert for expert, count in enumerate(counts) if count]
    chosen = live[:: max(1, len(live) // SAMPLED_EXPERTS)][:SAMPLED_EXPERTS]
    results = {}
    for expert in chosen:
        rows = min(counts[expert], SAMPLED_ROWS)
        activations = (x[expert, :rows].double().unflatten(1, (-1, 128)) * x_scale[expert, :rows, :, None]).flatten(1)
        weights = [
            dequantize_weight(
                w[expert : expert + 1], deinterleave_scales(s[expert : expert + 1], w.size(1)), torch.float64
            )[0]
            for w, s in ((layer.w1, layer.w1_scale), (layer.w2, layer.w2_scale))
        ]
        gate, up = (activations @ weights[0].T).chunk(2, dim=1)
        limit = 448 * float(layer.a2_scale)
        inner = (torch.nn.functional.silu(gate) * up).clamp(-limit, limit)
        results[expert] = inner @ weights[1].T
    return results


def error_of(output: torch.Tensor, expected: dict[int, torch.Tensor]) -> float:
    ours = torch.cat([output[expert, : len(rows)].double() for expert, rows in expected.items()])
    return relative_error(ours, torch.cat(list(expected.values())))


def worst_row_error(output: torch.Tensor, expected: dict[int, torch.Tensor]) -> float:
    """The largest relative error of any row: one that is small beside the others is lost in the error of all."""
    return max(
        relative_error(output[expert, row].double(), rows[row])
        for expert, rows in expected.items()
        for row in range(len(rows))
    )


class LayerRuns:
    """The layer's two kernels over one cell's payload, for any launch."""

    def __init__(self, layer: Layer, regrouped: Regrouped, cell: streaming.Cell) -> None:
        self.layer, self.regrouped, self.experts = layer, regrouped, cell.experts
        self.rows = grouped_gemm_table.mean_rows(cell.expected_m())
        x, x_scale, self.masked_m, _, _ = layer.payload.arguments(cell)
        self.x = x[:, : cell.padded].contiguous()
        self.x_scale = x_scale[:, : cell.padded].transpose(1, 2).contiguous().transpose(1, 2)
        shape = (cell.experts, cell.padded)
        self.inner = torch.empty((*shape, layer.inner), dtype=torch.float8_e4m3fn, device=x.device)
        self.output = torch.empty((*shape, layer.hidden), dtype=torch.bfloat16, device=x.device)

    def gate_up(self, launch: GroupedGemmLaunch) -> Callable[[], None]:
        weights = self.regrouped.get(True, launch.block_n, self.experts)
        arguments = (self.x, self.x_scale, *weights, self.masked_m, self.layer.a2_scale, self.inner, launch, self.rows)
        return lambda: two.w4a8_gate_up(*arguments)

    def down(self, launch: GroupedGemmLaunch) -> Callable[[], None]:
        weights = self.regrouped.get(False, launch.block_n, self.experts)
        arguments = (self.inner, self.layer.a2_scale, *weights, self.masked_m, self.output, launch, self.rows)
        return lambda: two.w4a8_down(*arguments)

    def whole(self, first: GroupedGemmLaunch, second: GroupedGemmLaunch) -> Callable[[], torch.Tensor]:
        gate_up, down = self.gate_up(first), self.down(second)

        def layer() -> torch.Tensor:
            gate_up()
            down()
            return self.output

        return layer
