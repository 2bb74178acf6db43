"""The W4AFP8 low-latency expert chain: requant, grouped GEMM, SiLU-and-multiply, grouped GEMM.

Stands in for the function of the same name in the engine's file of the same path. Every step is ours or the engine's
according to which patches are live, so an A/B can switch one step at a time; what is not ours is looked up in the engine's
module at call time.

A layer whose weights have been regrouped for the Triton backend takes two launches instead of all that (`two_kernels`), and the
reference backend float32 operations of torch (`reference_experts`).
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from sglang_w4afp8 import lifecycle
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as kernels
from sglang_w4afp8.srt.layers.moe import reference_experts, two_kernels, w4a8_gemm

_GROUP_SIZE = 128


def _engine() -> ModuleType:
    # Importing it needs sgl_kernel, hence a GPU driver: at call time, never at import.
    from sglang.srt.layers.moe import cutlass_w4a8_moe

    return cutlass_w4a8_moe


@functools.cache
def _takes_argument(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def _check_weights(
    a_states: torch.Tensor, w1_q: torch.Tensor, w2_q: torch.Tensor, w1_scale: torch.Tensor, w2_scale: torch.Tensor
) -> None:
    """Shapes that the grouped GEMM would otherwise read past. Host metadata only."""
    num_experts, _, hidden = a_states.shape
    for name, weight in (("w1_q", w1_q), ("w2_q", w2_q)):
        if weight.dtype != torch.int8:
            raise TypeError(f"{name}: dtype is {weight.dtype}, must be torch.int8 (two int4 values a byte)")
        if weight.size(0) != num_experts:
            raise ValueError(f"{name}: holds {weight.size(0)} experts, must be {num_experts} like a_states")
    if w1_q.size(2) * 2 != hidden:
        raise ValueError(f"w1_q: packs {w1_q.size(2) * 2} input columns, must be {hidden}, the hidden size of a_states")
    if w2_q.size(1) != hidden:
        raise ValueError(f"w2_q: has {w2_q.size(1)} output rows, must be {hidden}, the hidden size of a_states")
    if w1_q.size(1) != 4 * w2_q.size(2):
        raise ValueError(f"w1_q: has {w1_q.size(1)} output rows, must be {4 * w2_q.size(2)}: gate and up for w2_q")
    for name, scale in (("w1_scale", w1_scale), ("w2_scale", w2_scale)):
        if scale.size(0) != num_experts:
            raise ValueError(f"{name}: holds {scale.size(0)} experts, must be {num_experts} like a_states")


def _requant(
    a_states: torch.Tensor,
    a_scales: torch.Tensor | None,
    masked_m: torch.Tensor,
    a1_scale: torch.Tensor,
    problem_sizes: tuple[torch.Tensor, torch.Tensor],
    intermediate_size: int,
    expected_m: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Problem-size tables and the payload in per-tensor fp8: one launch when both steps are ours."""
    gateup_input = torch.empty(a_states.shape, dtype=torch.float8_e4m3fn, device=a_states.device)
    if lifecycle.is_live("problem_sizes"):
        # Tables of our own, as two chains may be in flight on two streams.
        tables = torch.empty((2, a_states.size(0), 3), dtype=torch.int32, device=a_states.device)
        kernels.fp8_per_token_to_per_tensor_quant_triton(
            a_states,
            a_scales,
            masked_m,
            a1_scale,
            gateup_input,
            expected_m,
            problem_sizes1=tables[0],
            problem_sizes2=tables[1],
            intermediate_size=intermediate_size,
        )
        return gateup_input, tables[0], tables[1]

    engine = _engine()
    sizes1, sizes2 = engine.deepep_ll_get_cutlass_w4a8_moe_mm_data(
        masked_m, *problem_sizes, a_states.size(0), intermediate_size, a_states.size(2)
    )
    if a_scales is None or lifecycle.is_live("requant"):
        # The engine's kernel knows no payload without scales.
        kernels.fp8_per_token_to_per_tensor_quant_triton(
            a_states, a_scales, masked_m, a1_scale, gateup_input, expected_m
        )
    else:
        requant = engine.fp8_per_token_to_per_tensor_quant_triton
        hint = {"expected_rows": expected_m} if _takes_argument(requant, "expected_rows") else {}
        requant(x=a_states, x_scale=a_scales, masked_m=masked_m, output_scale=a1_scale, output=gateup_input, **hint)
    return gateup_input, sizes1, sizes2


def _silu_and_mul(
    gate_up: torch.Tensor, output: torch.Tensor, masked_m: torch.Tensor, scale: torch.Tensor, expected_m: int | None
) -> None:
    if lifecycle.is_live("silu"):
        kernels.silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale, expected_m)
    else:
        _engine().silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, scale)


def _grouped_gemm(
    output: torch.Tensor,
    a: torch.Tensor,
    w_q: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    problem_sizes: torch.Tensor,
    strides: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    topk: int,
    expected_m: int | None,
) -> None:
    """One masked grouped GEMM; ``strides`` are those of (a, b, c, scales) per expert."""
    a_strides, b_strides, c_strides, s_strides = strides
    if lifecycle.is_live("gemm"):
        w4a8_gemm.w4a8_grouped_gemm(
            output,
            a,
            w_q,
            a_scale,
            w_scale,
            expert_offsets,
            problem_sizes,
            a_strides,
            b_strides,
            c_strides,
            s_strides,
            expected_m=expected_m,
            topk=topk,
        )
        return
    w4a8_gemm.warn_if_engine_gemm_is_wrong(a.size(1))
    _engine().cutlass_w4a8_moe_mm(
        output,
        a,
        w_q,
        a_scale,
        w_scale,
        expert_offsets[:-1],
        problem_sizes,
        a_strides,
        b_strides,
        c_strides,
        s_strides,
        _GROUP_SIZE,
        topk,
    )


def _backend(w1_q: torch.Tensor) -> str:
    """What computes a layer: ``triton``, ``reference`` or ``cutlass``."""
    if two_kernels.layout_of(w1_q) is not None:
        return "triton"
    asked = lifecycle.is_live("two_kernels") and two_kernels.backend() == "reference"
    return "reference" if asked else "cutlass"


# torch.compile calls it as it is: tiles are chosen by host code, and there is nothing to fuse between compiled kernels.
@torch.compiler.disable
def cutlass_w4a8_moe_deepep_ll(
    a_states: torch.Tensor,
    a_scales: torch.Tensor | None,
    w1_q: torch.Tensor,
    w2_q: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_ids_: torch.Tensor,
    masked_m: torch.Tensor,
    a_strides1: torch.Tensor,
    b_strides1: torch.Tensor,
    c_strides1: torch.Tensor,
    a_strides2: torch.Tensor,
    b_strides2: torch.Tensor,
    c_strides2: torch.Tensor,
    s_strides13: torch.Tensor,
    s_strides2: torch.Tensor,
    expert_offsets: torch.Tensor,
    problem_sizes1: torch.Tensor,
    problem_sizes2: torch.Tensor,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    expected_m: int | None = None,
) -> torch.Tensor:
    """One W4AFP8 expert layer over a DeepEP low-latency payload. Names and order are the engine's.

    Args:
        a_states: fp8 e4m3 ``[E, M, K]``, DeepEP's payload; E local experts, M padded rows. Or bfloat16.
        a_scales: float32 ``[E, M, K / 128]``, its per-token-group scales, or int32 ``[E, M, ceil(K / 512)]`` (packed
            UE8M0). None with a bfloat16 payload, which is quantised as it is.
        w1_q, w2_q: int8 ``[E, 2N, K / 2]`` and ``[E, K, N / 2]``, two int4 values a byte, low nibble first.
        w1_scale, w2_scale: bfloat16 group scales, interleaved by four along K. Or weights and scales as the Triton backend
            regroups them, which the weights themselves tell.
        topk_ids_: ``[tokens, topk]``; only its width is used, as the engine's GEMM wants it.
        masked_m: int32 ``[E]``, live rows per expert.
        a_strides1 ... s_strides2: int64 ``[E, 3]`` stride tables of the grouped GEMMs.
        expert_offsets: int32 ``[E + 1]`` and problem_sizes1, problem_sizes2: int32 ``[E, 3]``, the layer's scratch.
        a1_scale, a2_scale: float32, one element: the static scales of the two GEMMs' inputs.
        expected_m: the dispatcher's mean of live rows per expert. Any value is correct: it only chooses launches.

    Returns:
        bfloat16 ``[E, M, K]``; rows at and above ``masked_m[e]`` are undefined.
    """
    if a_scales is None and not lifecycle.is_live("bf16_dispatch"):
        raise ValueError("a_scales: is None, must be the payload's per-token-group scales (patch bf16_dispatch is off)")
    for name, scale in (("a1_scale", a1_scale), ("a2_scale", a2_scale)):
        if scale is None:
            raise ValueError(f"{name}: is None, must be the layer's static input scale")
    _check_weights(a_states, w1_q, w2_q, w1_scale, w2_scale)
    num_experts, padded_rows, hidden = a_states.shape
    intermediate_size = w2_q.size(2) * 2
    topk = topk_ids_.size(1)
    a1_scale, a2_scale = a1_scale.float(), a2_scale.float()
    backend = _backend(w1_q)
    lifecycle.log_first_call(
        num_experts=num_experts,
        padded_rows=padded_rows,
        hidden=hidden,
        intermediate_size=intermediate_size,
        expected_m=expected_m,
        backend=backend,
    )

    if backend == "reference":
        return reference_experts.moe_deepep_ll(a_states, a_scales, w1_q, w2_q, w1_scale, w2_scale, masked_m, a2_scale)
    if backend == "triton":
        return two_kernels.moe_deepep_ll(
            a_states, a_scales, w1_q, w2_q, w1_scale, w2_scale, masked_m, a1_scale, a2_scale, expected_m
        )
    gateup_input, sizes1, sizes2 = _requant(
        a_states, a_scales, masked_m, a1_scale, (problem_sizes1, problem_sizes2), intermediate_size, expected_m
    )
    gate_up = torch.empty(
        (num_experts, padded_rows, 2 * intermediate_size), device=a_states.device, dtype=torch.bfloat16
    )
    _grouped_gemm(
        gate_up,
        gateup_input,
        w1_q,
        a1_scale,
        w1_scale,
        expert_offsets,
        sizes1,
        (a_strides1, b_strides1, c_strides1, s_strides13),
        topk,
        expected_m,
    )
    down_input = torch.empty(
        (num_experts, padded_rows, intermediate_size), device=a_states.device, dtype=torch.float8_e4m3fn
    )
    _silu_and_mul(gate_up, down_input, masked_m, a2_scale, expected_m)
    output = torch.empty((num_experts, padded_rows, hidden), device=a_states.device, dtype=torch.bfloat16)
    _grouped_gemm(
        output,
        down_input,
        w2_q,
        a2_scale,
        w2_scale,
        expert_offsets,
        sizes2,
        (a_strides2, b_strides2, c_strides2, s_strides2),
        topk,
        expected_m,
    )
    return output
