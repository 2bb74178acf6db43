"""The low-latency expert layer in float32 with plain torch operations: what the other backends are compared with.

``SGLANG_W4AFP8_BACKEND=reference`` serves with it. It rounds where the format does and nowhere else: weights and payload are
what they are, the payload with its own scales, so that the static input scale of the first GEMM plays no part; the input of the
second is fp8 in its static scale; the result is bfloat16. It reads row counts on the host and unpacks weights in every call, so
it is slow and cannot be captured in a CUDA graph: start the server with ``--disable-cuda-graph``, compare outputs, and never
serve users with it. Prefill in DeepEP's normal mode is not covered.
"""

from __future__ import annotations

import torch

from sglang_w4afp8.kernels.ops.moe.w4a8_reference import GROUP_SIZE, deinterleave_scales, dequantize_weight

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def _rows(states: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """An expert's rows in float32."""
    if scales is None:
        return states.float()
    return (states.float().unflatten(1, (-1, GROUP_SIZE)) * scales[..., None]).flatten(1)


def _weight(w_q: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """One expert's weight ``[N, K]`` in float32."""
    return dequantize_weight(w_q, deinterleave_scales(w_scale[None], w_q.size(0))[0])


def moe_deepep_ll(
    a_states: torch.Tensor,
    a_scales: torch.Tensor | None,
    w1_q: torch.Tensor,
    w2_q: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    masked_m: torch.Tensor,
    a2_scale: torch.Tensor,
) -> torch.Tensor:
    """A low-latency layer in float32, rounded where the format is; arguments and result as of the chain that calls it, weights
    as the engine loads them.

    Raises:
        RuntimeError: a CUDA graph is being captured.
        ValueError: ``a_scales`` are packed; the message begins with the argument's name.
    """
    if a_states.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "SGLANG_W4AFP8_BACKEND=reference reads row counts on the host: start the server with --disable-cuda-graph"
        )
    if a_scales is not None and a_scales.dtype != torch.float32:
        raise ValueError(f"a_scales: dtype is {a_scales.dtype}, must be torch.float32 with the reference backend")
    output = torch.zeros(a_states.shape, dtype=torch.bfloat16, device=a_states.device)
    # TF32 would round what this is there to leave alone.
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for expert, count in enumerate(masked_m.clamp(0, a_states.size(1)).tolist()):
            if count:
                rows = _rows(a_states[expert, :count], None if a_scales is None else a_scales[expert, :count])
                gate, up = (rows @ _weight(w1_q[expert], w1_scale[expert]).T).chunk(2, dim=1)
                inner = (torch.nn.functional.silu(gate) * up / a2_scale).clamp(-_FP8_MAX, _FP8_MAX)
                inner = inner.to(torch.float8_e4m3fn).float() * a2_scale
                output[expert, :count] = (inner @ _weight(w2_q[expert], w2_scale[expert]).T).bfloat16()
    finally:
        torch.set_float32_matmul_precision(precision)
    return output
