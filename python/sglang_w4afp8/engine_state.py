"""What the running engine was configured with, over the three ways in which its versions say it.

Nothing of the engine is imported before it is asked for. A value that nobody has published (a script that builds a layer by
hand) is None.
"""

from __future__ import annotations

import importlib
from typing import Any

# Namespaces of the settings that are read here, in engines that keep the values in effect by namespace (0.5.17 on).
_NAMESPACES = {
    "chunked_prefill_size": "schedule",
    "cpu_offload_gb": "exec.offload",
    "cuda_graph_config": "exec.graph",
    "deepep_mode": "exec.moe",
    "disaggregation_mode": "disagg",
    "enable_eplb": "exec.moe",
    "enable_two_batch_overlap": "exec.overlap",
    "is_ep_joiner": "exec.moe",
    "load_format": "model",
    "max_running_requests": "schedule",
    "moe_a2a_backend": "exec.moe",
    "offload_group_size": "exec.offload",
    "speculative_draft_load_format": "spec",
    "speculative_num_draft_tokens": "spec",
}


def setting(name: str) -> Any:
    """The value in effect of a server argument; None where the engine has none of that name, or none is published."""
    value = _by_namespace(name)
    return value if value is not None else getattr(_server_args(), name, None)


def _runtime_context() -> Any:
    try:
        return importlib.import_module("sglang.srt.runtime_context")
    except ImportError:  # before 0.5.14
        return None


def _by_namespace(name: str) -> Any:
    top, *below = _NAMESPACES.get(name, "").split(".")
    value = getattr(_runtime_context(), f"get_{top}", None)
    if not top or value is None:
        return None
    try:
        value = value()
    except ValueError:  # not published
        return None
    for part in (*below, name):
        value = getattr(value, part, None)
    return value


def _server_args() -> Any:
    """The server's arguments as they were given; None before there are any."""
    get = getattr(_runtime_context(), "get_server_args", None)
    if get is None:  # before 0.5.15
        get = importlib.import_module("sglang.srt.server_args").get_global_server_args
    try:
        return get()
    except (AssertionError, ValueError):
        return None


def attention_ranks() -> tuple[int, int]:
    """Ranks that share one request's tokens (attention tensor parallelism), and groups that share the requests."""
    parallel = getattr(_runtime_context(), "get_parallel", None)
    if parallel is not None:
        return parallel().attn_tp_size, parallel().attn_dp_size
    attention = importlib.import_module("sglang.srt.layers.dp_attention")
    return attention.get_attention_tp_size(), attention.get_attention_dp_size()


def dispatch_tokens_cap() -> int:
    """Tokens of one rank that DeepEP's low-latency buffers hold."""
    return importlib.import_module("sglang.srt.environ").envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()


def expert_group() -> Any:
    """The engine's group of the ranks that share a layer's experts (a ``GroupCoordinator``)."""
    return importlib.import_module("sglang.srt.distributed.parallel_state").get_moe_ep_group()
