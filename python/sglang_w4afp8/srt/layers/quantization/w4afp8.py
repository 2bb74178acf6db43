"""``W4AFp8MoEMethod.apply_deepep_ll`` with the dispatcher's row estimate passed on.

Stands in for the engine's method of the same name; engines before 0.5.19 drop ``expected_m`` here.
"""

from typing import Any

import torch


def apply_deepep_ll(self: Any, layer: Any, dispatch_output: Any) -> torch.Tensor:
    """Run one layer's experts over a DeepEP low-latency dispatch.

    Args:
        self: the engine's ``W4AFp8MoEMethod``.
        layer: the engine's expert layer, weights processed.
        dispatch_output: the engine's ``DeepEPLLDispatchOutput``.

    Returns:
        bfloat16 ``[E, M, K]`` for DeepEP's combine.

    Raises:
        RuntimeError: the dispatcher sent no scales (BF16 dispatch), which this path cannot serve.
    """
    hidden_states, hidden_scales, topk_ids, _, masked_m, expected_m = dispatch_output
    if hidden_scales is None:
        raise RuntimeError(
            "dispatch_output.hidden_states_scale: is None, must be float32 [E, M, K / 128]: W4AFP8 low-latency decoding needs "
            "an fp8 dispatch; the dispatcher sent " + str(hidden_states.dtype)
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
