"""Methods of ``W4AFp8MoEMethod``: the low-latency caller with the dispatcher's row estimate passed on, and checks around.

Stands in for, or around, the engine's methods of the same names; engines before 0.5.19 drop ``expected_m`` in the first.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from sglang_w4afp8 import engine_state, lifecycle
from sglang_w4afp8.kernels.ops.moe.reference import ue8m0_to_float32
from sglang_w4afp8.srt.layers.moe import decode_graphs, dispatch_cap, two_kernels

logger = logging.getLogger(__name__)

_GROUP_SIZE = 128
_INPUT_SCALES = ("w13_input_scale", "w2_input_scale")
# Below it a float32 is denormal, and its reciprocal overflows or loses digits.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def apply_deepep_ll(self: Any, layer: Any, dispatch_output: Any) -> torch.Tensor:
    """Run one layer's experts over a DeepEP low-latency dispatch.

    Args:
        self: the engine's ``W4AFp8MoEMethod``.
        layer: the engine's expert layer, weights processed.
        dispatch_output: the engine's ``DeepEPLLDispatchOutput``.

    Returns:
        bfloat16 ``[E, M, K]`` for DeepEP's combine.

    Raises:
        RuntimeError: the dispatcher sent no scales, and the payload is not BF16 or serving that is switched off.
    """
    hidden_states, hidden_scales, topk_ids, _, masked_m, expected_m = dispatch_output
    if hidden_scales is None and not (lifecycle.is_live("bf16_dispatch") and hidden_states.dtype == torch.bfloat16):
        raise RuntimeError(
            "dispatch_output.hidden_states_scale: is None, must be the scales of the payload, which is "
            f"{hidden_states.dtype}: without them only a BF16 payload can be served, by the patch bf16_dispatch"
        )
    # Through the engine's name, so that every other hook on it is in effect.
    from sglang.srt.layers.moe.cutlass_w4a8_moe import cutlass_w4a8_moe_deepep_ll

    method = layer.quant_method
    return cutlass_w4a8_moe_deepep_ll(
        hidden_states,
        hidden_scales,
        layer.w13_weight,
        layer.w2_weight,
        layer.w13_weight_scale_inv,
        layer.w2_weight_scale_inv,
        topk_ids,
        masked_m,
        method.a_strides1,
        method.b_strides1,
        method.c_strides1,
        method.a_strides2,
        method.b_strides2,
        method.c_strides2,
        method.s_strides13,
        method.s_strides2,
        method.expert_offsets,
        method.problem_sizes1,
        method.problem_sizes2,
        layer.w13_input_scale,
        layer.w2_input_scale,
        # A launch hint for the kernels below: any value is correct.
        expected_m=expected_m,
    )


def _layer_name(layer: Any) -> str:
    return f"layer {getattr(layer, 'layer_id', '(no number)')}"


def _scale_problem(layer: Any, name: str, value: float) -> str | None:
    """Why a static input scale cannot be served; None when it can."""
    if math.isfinite(value) and value >= _SMALLEST_SCALE:
        return None
    return (
        f"{name}: the largest of {_layer_name(layer)} is {value}, must be positive, finite and at least "
        f"{_SMALLEST_SCALE:.4g}: activations are divided by it. The checkpoint's scales are wrong or were not loaded"
    )


def process_weights_after_loading(original: Callable[..., Any], self: Any, layer: Any) -> Any:
    """The engine's processing, then a look at the two input scales that it made of the experts', and the layout.

    Only what it made is looked at: it takes the largest of the experts', so one of them may be anything below. With
    expert load balancing on, the scales are then made the same on every rank.

    With the Triton backend the weights are regrouped last. A layer that has been, and was given its layout back for a load
    since, has had its scales interleaved already: the engine's processing would do it again.

    Raises:
        ValueError: a scale cannot be divided by; the message begins with its name and names the layer.
    """
    backend = two_kernels.backend() if lifecycle.is_live("two_kernels") else "cutlass"
    result = None if two_kernels.is_processed(layer) else original(self, layer)
    scales = torch.cat([getattr(layer, name).detach().float().reshape(1) for name in _INPUT_SCALES])
    pairs = zip(_INPUT_SCALES, scales.tolist(), strict=True)
    problems = [problem for name, value in pairs if (problem := _scale_problem(layer, name, value))]
    if lifecycle.is_live("eplb_scales") and engine_state.setting("enable_eplb"):
        _share_scales(layer, scales, problems)
    if problems:
        raise ValueError("; ".join(problems))
    _check_activation(self, layer)
    if backend in ("triton", "auto"):
        two_kernels.regroup_layer(self, layer, backend)
    return result


# What a model may ask of its experts' activation, and what of it is computed: silu(gate) * up, whatever the model asks.
_ACTIVATION = {
    "activation": ("silu", None),
    "is_gated": (True, None),
    **dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit"), (None,)),
}


def _check_activation(method: Any, layer: Any) -> None:
    """Warn where a model's experts have another activation than the one that W4AFP8 experts are computed with.

    The engine serves such a model all the same, and so do we: both compute ``silu(gate) * up``.
    """
    config = getattr(method, "moe_runner_config", None) or getattr(layer, "moe_runner_config", None)
    asked = {name: getattr(config, name, None) for name in _ACTIVATION}
    other = [f"{name}={value!r}" for name, value in asked.items() if value not in _ACTIVATION[name]]
    if other:
        lifecycle.say_once(
            logger,
            logging.WARNING,
            f"the model's experts have {', '.join(other)}, and W4AFP8 experts are computed as silu(gate) * up: WRONG RESULTS. "
            "This is the engine's own fault, with this plugin and without. Serve this model with another quantization",
        )


def _share_scales(layer: Any, scales: torch.Tensor, problems: list[str]) -> None:
    """Give every rank of the layer's experts the largest scales of any of them.

    An expert that load balancing moves to another rank brings its weights, not its input scale, and saturates where the
    scale there is smaller. The largest serves every expert wherever it is.

    A rank with a fault takes part, because the others wait for it, and all of them then refuse.
    """
    group = engine_state.expert_group()
    if group.world_size == 1:
        return
    if engine_state.setting("is_ep_joiner"):  # the others serve already and would not answer
        lifecycle.say_once(
            logger,
            logging.WARNING,
            "this rank joins others that serve already, so that its experts' input scales are not shared with theirs: an "
            "expert that load balancing moves here may saturate; start all ranks anew to share them",
        )
        return
    faulty = scales.new_tensor([float(bool(problems))])
    shared = torch.cat([torch.zeros_like(scales) if problems else scales, faulty])
    ranks = group.cpu_group if shared.device.type == "cpu" else group.device_group
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX, group=ranks)
    *values, anywhere = shared.tolist()
    if anywhere and not problems:
        problems.append(f"{' and '.join(_INPUT_SCALES)}: {_layer_name(layer)} has a faulty one on another rank")
    for name, value in zip(_INPUT_SCALES, values, strict=True):
        getattr(layer, name).data.fill_(value)


def apply_deepep_normal(original: Callable[..., Any], self: Any, layer: Any, dispatch_output: Any) -> torch.Tensor:
    """The engine's normal (prefill) path, which computes on BF16, with an fp8 payload turned into BF16 first.

    Args:
        original: the engine's method.
        self: the engine's ``W4AFp8MoEMethod``.
        layer: the engine's expert layer, weights processed.
        dispatch_output: the engine's ``DeepEPNormalDispatchOutput``. Its payload ``[T, K]`` is BF16, or fp8 with scales
            beside it or in a tuple with it: float32 ``[T, K / 128]``, or int32 ``[T, ceil(K / 512)]`` (packed UE8M0).

    Returns:
        bfloat16 ``[T, K]`` for DeepEP's combine, which takes nothing else, no tokens included.

    Raises:
        RuntimeError: an fp8 payload without scales.
    """
    # Not every dispatcher that comes this way has scales.
    payload, scales = dispatch_output.hidden_states, getattr(dispatch_output, "hidden_states_scale", None)
    if isinstance(payload, tuple):
        payload, scales = payload
    if payload.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        if scales is None:
            raise RuntimeError(
                f"dispatch_output.hidden_states_scale: is None, must be the scales of the payload, which is {payload.dtype}"
            )
        dispatch_output = dispatch_output._replace(hidden_states=_dequantize(payload, scales), hidden_states_scale=None)
    return original(self, layer, dispatch_output)


def _dequantize(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp8 ``[T, K]`` and its group scales as BF16: one product in float32, rounded once.

    Raises:
        ValueError, TypeError: the scales do not belong to the payload; the message begins with ``hidden_states_scale``.
    """
    tokens, hidden = payload.shape
    num_groups = hidden // _GROUP_SIZE
    packed = scales.dtype == torch.int32
    if not packed and scales.dtype != torch.float32:
        raise TypeError(
            f"hidden_states_scale: dtype is {scales.dtype}, must be torch.float32, or torch.int32 for packed UE8M0"
        )
    expected = (tokens, -(-num_groups // 4) if packed else num_groups)
    if tuple(scales.shape) != expected or hidden % _GROUP_SIZE:
        raise ValueError(
            f"hidden_states_scale: shape is {list(scales.shape)}, must be {list(expected)} for a payload {[tokens, hidden]}"
        )
    if packed:
        scales = ue8m0_to_float32(scales, num_groups)
    output = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=payload.device)
    # fp8 to BF16 is exact, and half of what a float32 copy of a long prefill would take.
    values = payload.to(torch.bfloat16).view(tokens, num_groups, _GROUP_SIZE)
    torch.mul(values, scales[:, :, None], out=output.view(tokens, num_groups, _GROUP_SIZE))
    return output


def create_weights(
    original: Callable[..., Any],
    self: Any,
    layer: Any,
    num_experts: int,
    hidden_size: int,
    intermediate_size_per_partition: int,
    params_dtype: torch.dtype,
    **extra_weight_attrs: Any,
) -> Any:
    """The engine's method, after a look at the dispatcher's cap and the decode graphs: here W4AFP8 is certain first.

    Raises:
        ValueError: a CUDA graph that the engine is going to capture cannot pass through the dispatcher.
    """
    dispatch_cap.check()
    decode_graphs.check()
    return original(
        self,
        layer,
        num_experts,
        hidden_size,
        intermediate_size_per_partition,
        params_dtype,
        **extra_weight_attrs,
    )
