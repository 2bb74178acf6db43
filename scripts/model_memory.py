"""How much of a DeepSeek-V3-shaped model's memory one GPU of several holds, and how many layers fit.

An estimate, for choosing the depth of a synthetic model. Routed experts, dense layers, embedding and head are spread over all
ranks, attention over those that share a request's; shared experts, the router and the smaller projections stand on every rank,
as the engine lays them out behind DeepEP.
"""

from __future__ import annotations

from dataclasses import replace

from make_synthetic_checkpoint import ModelSpec, TensorSpec, tensor_specs

# Linear layers that attention splits by heads. The two that it does not are the small ones.
_BY_HEADS = (".q_b_proj.", ".kv_b_proj.", ".o_proj.")
# Of what may be used, a part for what nobody counted: padding of allocations, scales, the loader's copies.
_MARGIN = 0.95


def _ranks(tensor: TensorSpec, tp: int, dp: int) -> int:
    """Ranks that a tensor is spread over."""
    name = tensor.name
    if any(part in name for part in _BY_HEADS):
        return tp // dp
    if name.startswith(("model.embed_tokens.", "lm_head.")):
        return tp
    return tp if ".mlp." in name and ".shared_experts." not in name and ".mlp.gate." not in name else 1


def weight_bytes(spec: ModelSpec, tp: int, dp: int = 1) -> int:
    """Bytes of weights on one GPU; ``tp`` ranks hold the experts, groups of ``tp / dp`` share attention."""
    loaded = sum(-(-tensor.nbytes // _ranks(tensor, tp, dp)) for tensor in tensor_specs(spec))
    # Absorbed attention keeps the key-value up-projection a second time, in bf16.
    up = spec.attention_heads * (spec.qk_nope_head_dim + spec.v_head_dim) * spec.kv_lora_rank * 2
    return loaded + spec.layers * up // (tp // dp)


def cache_bytes(spec: ModelSpec, tokens: int, dp: int = 1) -> int:
    """Bytes of the bf16 latent cache of so many tokens on one GPU: whole on every rank of a data-parallel group."""
    return -(-tokens // dp) * spec.layers * (spec.kv_lora_rank + spec.qk_rope_head_dim) * 2


def layers_that_fit(spec: ModelSpec, gpu_bytes: int, mem_fraction: float, tokens: int, tp: int, dp: int = 1) -> int:
    """The most layers, at most ``spec.layers``, whose weights and cache fit into the server's static part of a GPU.

    Args:
        spec: the model, with as many layers as are wanted.
        gpu_bytes: memory of one GPU.
        mem_fraction: ``--mem-fraction-static``; DeepEP's buffers, activations and CUDA graphs have the rest.
        tokens: that the cache must hold at once.

    Raises:
        ValueError: not even one layer of experts fits.
    """
    room = gpu_bytes * mem_fraction * _MARGIN

    def needed(layers: int) -> int:
        cut = replace(spec, layers=layers)
        return weight_bytes(cut, tp, dp) + cache_bytes(cut, tokens, dp)

    # One more layer of experts costs the same every time.
    least = spec.dense_layers + 1
    first = needed(least)
    if first > room:
        raise ValueError(
            f"layers: one layer of {spec.experts} experts over {tp} GPUs needs {first} bytes of {room:.0f}"
        )
    each = needed(least + 1) - first
    return min(spec.layers, least + int((room - first) // each))
