"""The Triton backend of the expert layers: which layers get it, where their weights stand, and how every path is served.

``SGLANG_W4AFP8_BACKEND`` says what is wanted; ``auto`` is the default, ``cutlass`` leaves everything here unused.

A layer's weights have one layout at a time. CUTLASS reads rows of nibbles as the checkpoint has them, the Triton kernels read
contiguous tiles, and a second copy is out of the question, so a layer is served by one backend, chosen when its weights have
been processed. It is regrouped in place, one expert after another; what is needed beside the weights is a few times one
expert's matrix, and is gone afterwards.

* ``auto``: a layer that the measured table shows to be faster over all the row counts that this server's low-latency calls can
  have, and slower by more than 2% at none of them (:meth:`ShapeLaunches.triton_wins`). Where no table covers the sizes, the
  first layer of each is timed in both backends by the same rule (``measured_choice``), unless ``SGLANG_W4AFP8_MEASURE=0``.
* ``triton``: every layer that the kernels support. Low-latency calls are two launches, their tiles by the rows expected.

A layer that is left alone is as the engine loads it, and one line of the log says why: a warning where ``triton`` was asked
for. Strict mode is about patches, and never refuses for it.

Prefill on a regrouped layer (the engine's normal mode, or ``apply`` without DeepEP) keeps the engine's steps, and its grouped
GEMM is answered by a plain product over the same tiles: :func:`route_engine_gemm` looks at the weight that the engine hands
over. With 64 experts of DeepSeek-V3 that product takes less time than CUTLASS in every case measured, 16 to 1024 rows per
expert (``benchmark/results/h200/two_kernels_prefill.json``), so ``auto`` asks only for the low-latency calls. Rejected:
restoring a layer into scratch memory and calling CUTLASS there. It reads and writes every weight once more in each layer and
prefill step (1.4 GB each way with 64 experts of DeepSeek-V3) and holds as much memory for good (5.6 GB with 256). Not built:
kernels on the engine's own layout, which would let a call choose, and whose tiles are not one piece of memory each.

What ``auto`` cannot do is therefore to be as fast as both backends at every row count where each wins at some: there it is
CUTLASS, and gives up what Triton would gain at the others.

Loading into a regrouped layer would mix two layouts. An engine that announces a reload (``restore_weights_before_loading``,
0.5.21 on) gets its layout back first and a regrouped layer afterwards; any other load through a weight's loader is refused,
and so are a copy into its memory (``load_format="direct"`` of ``update_weights_from_tensor``) and a ``state_dict``, which
would be saved. Nothing sees a weight loader of the user's own that writes into the memory itself. Where the engine writes
weights after it has processed them, or computes on copies of them, every layer stays with CUTLASS
(:func:`_why_layout_must_stay`). Reloading a W4AFP8 checkpoint as a whole fails in every supported engine by itself: its
processing replaces the scales' parameters by others without a loader. Experts that load balancing moves between ranks are
whole and keep their layout, so the ranks must have chosen the same: they are asked, and none is regrouped where they differ.
With ``auto`` they are asked in any case: a rank that waits for slower ones gains nothing by being fast itself.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from sglang_w4afp8 import engine_state, lifecycle, switches, tuned_config
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as kernels
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table as table
from sglang_w4afp8.kernels.ops.moe import w4a8_grouped_gemm as two
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import TileLayout
from sglang_w4afp8.srt.layers.moe import dispatch_cap, measured_choice

logger = logging.getLogger(__name__)

_GROUP_SIZE = two.GROUP_SIZE
# What N and K must be a multiple of: a scale group, and two tiles of the rule.
_MULTIPLE = 128
_HOPPER = (9, 0)
# (weight, its scales, whether it holds gate and up rows), as the engine names them.
_WEIGHTS = (("w13_weight", "w13_weight_scale_inv", True), ("w2_weight", "w2_weight_scale_inv", False))
# Attributes on the engine's parameters: the layout of a weight and its scales, its loader while loads are refused, and that a
# scale has been through the engine's processing, which must not happen twice. On a layer: the hook that refuses to save. On
# the engine's copy into parameters: that it is ours.
_LAYOUT, _LOADER, _PROCESSED, _SAVING = "_w4afp8_layout", "_w4afp8_loader", "_w4afp8_processed", "_w4afp8_saving"
_REFUSES = "_w4afp8_refuses"
# The engine's own mark on a module whose weights must not be saved or sent: why.
_EXPORT = "_weight_export_error"
_RESTORE = "restore_weights_before_loading"
_ENGINE_GEMM = "cutlass_w4a8_moe_mm"
# The formats that load a checkpoint and process it afterwards. Others copy processed weights (sharded_state, presharded,
# remote), read another process's memory (remote_instance), or are not known here.
_LOAD_FORMATS = frozenset(
    (
        *("auto", "pt", "safetensors", "npcache", "dummy", "mistral", "layered"),
        *("fastsafetensors", "instanttensor", "runai_streamer"),
    )
)
# The engine's copy into the memory of parameters, and where its versions have it.
_DIRECT_LOAD = "_model_load_weights_direct"
_DIRECT_LOAD_HOMES = (
    "sglang.srt.model_executor.model_runner_components.weight_updater",  # 0.5.16 on
    "sglang.srt.model_executor.model_runner",
)


@functools.cache
def backend() -> str:
    """``cutlass``, ``triton``, ``auto`` or ``reference``, as the switch said when it was first asked for."""
    return switches.read().backend


def layout_of(weight: torch.Tensor) -> TileLayout | None:
    """The layout of a weight that has been regrouped; None where it is as the engine loads it."""
    return getattr(weight, _LAYOUT, None)


def is_regrouped(layer: Any) -> bool:
    """Whether a layer's weights are in the Triton kernels' layout."""
    return layout_of(layer.w13_weight) is not None


def _engine() -> ModuleType:
    # Importing it needs sgl_kernel, hence a GPU driver: at call time, never at import.
    from sglang.srt.layers.moe import cutlass_w4a8_moe

    return cutlass_w4a8_moe


# ---- which layers


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None where there is no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _gpu_name(device: torch.device) -> str | None:
    return tuned_config.gpu_name(device.index) if device.type == "cuda" else None


def _sizes(layer: Any) -> tuple[int, int, int]:
    """Intermediate size N, hidden size K and local experts of a layer."""
    experts, hidden, packed = layer.w2_weight.shape
    return 2 * packed, hidden, experts


def why_unsupported(method: Any, layer: Any) -> str | None:
    """Why the Triton kernels cannot serve a layer, whatever is wanted; None when they can."""
    n, k, _ = _sizes(layer)
    for name, size in (("N", n), ("K", k)):
        if size % _MULTIPLE:
            return f"{name} is {size}, no multiple of {_MULTIPLE}"
    group_size = method.quant_config.group_size
    if group_size != _GROUP_SIZE:
        return f"the group size is {group_size}, not {_GROUP_SIZE}"
    found = capability(layer.w2_weight.device)
    if found != _HOPPER:
        return (
            f"the weights are on {f'a GPU of capability {found[0]}.{found[1]}' if found else 'no GPU'}, not on Hopper"
        )
    if not hasattr(_engine(), _ENGINE_GEMM):
        return f"the engine's chain calls no {_ENGINE_GEMM}, so its prefill could not be served"
    return None


def _why_no_low_latency() -> str | None:
    """Why no low-latency call will come; None when one may, or nobody has published what the server does."""
    other = engine_state.setting("moe_a2a_backend")
    if other not in (None, "deepep"):
        return f"nothing goes through DeepEP here (--moe-a2a-backend {other})"
    if engine_state.setting("deepep_mode") == "normal":
        return "DeepEP runs in normal mode only"
    return None


def _why_layout_must_stay() -> str | None:
    """Why the engine would meet regrouped weights unaware of it; None when it would not, or nothing is published."""
    # Older engines publish no format of the draft model's own while they load it.
    for name in ("load_format", "speculative_draft_load_format"):
        value = engine_state.setting(name)
        if value is not None and getattr(value, "value", value) not in _LOAD_FORMATS:
            return (
                f"--{name.replace('_', '-')} {getattr(value, 'value', value)} may write weights after their processing"
            )
    for name in ("cpu_offload_gb", "offload_group_size"):
        value = engine_state.setting(name)
        if value is not None and value > 0:
            # The copies are plain tensors, which do not say how they are laid out.
            return f"--{name.replace('_', '-')} {value} computes on copies of the weights"
    return None


def largest_expected_m(layer: Any) -> int | None:
    """The dispatcher's estimate at the most tokens that this server dispatches; None where that is not known.

    ``expected_m = (tokens * ranks * topk + E) // E`` with the model's E experts, as the dispatcher computes it.
    """
    load = dispatch_cap.server_load()
    if load is None:
        return None
    requests = load.running_requests if load.graph_requests is None else load.graph_requests
    if requests is None:
        return None
    tokens = load.tokens_per_rank(requests * load.tokens_per_request)
    if load.prefill_tokens is not None:
        tokens = max(tokens, load.tokens_per_rank(load.prefill_tokens))
    tokens = min(tokens, engine_state.dispatch_tokens_cap())
    return (tokens * layer.moe_ep_size * layer.top_k + layer.num_experts) // layer.num_experts


@functools.cache
def _may_measure() -> bool:
    return switches.read().measure


@dataclass(frozen=True)
class Choice:
    """What one rank would do with a layer.

    Attributes:
        block_ns: ``block_n`` of both GEMMs where the layer is to be regrouped; None where it is not, or nothing says it yet.
        reason: why it is not; empty otherwise.
        source: what says so, for the log: a table's entry, a measurement, the rule.
        largest_expected_m: what a measurement has to cover; 0 where none is wanted.
    """

    block_ns: tuple[int, int] | None
    reason: str = ""
    source: str = ""
    largest_expected_m: int = 0

    @property
    def measure(self) -> bool:
        """Whether only a measurement can say it."""
        return self.block_ns is None and not self.reason


def _stays(reason: str) -> Choice:
    return Choice(None, reason)


def rule_block_ns(device: torch.device, n: int, k: int, experts: int) -> tuple[int, int]:
    """The layout without a table, by the multiprocessors of the weights' GPU."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else table.SM_COUNT
    return table.rule_block_ns(n, k, experts, count)


def plan(method: Any, layer: Any, wanted: str) -> Choice:
    """What is to become of a layer as far as this rank can tell without measuring."""
    reason = why_unsupported(method, layer) or _why_no_low_latency() or _why_layout_must_stay()
    if reason is not None:
        return _stays(reason)
    if engine_state.setting("enable_eplb") and engine_state.setting("is_ep_joiner"):
        return _stays("this rank joins others that serve already, and load balancing moves experts between them")
    n, k, experts = _sizes(layer)
    device = layer.w2_weight.device
    gpu = _gpu_name(device)
    if wanted == "triton":
        shape = table.shape_launches(gpu, n, k, experts)
        if shape is None:
            lifecycle.say_once(logger, logging.WARNING, f"no table has launches at N {n}, K {k}: they go by the rule")
            return Choice(rule_block_ns(device, n, k, experts), source="the rule")
        return Choice(shape.block_ns, source=table.entry_told(gpu, n, k, experts))
    try:
        largest = largest_expected_m(layer)
    except Exception as error:  # an engine that says these things otherwise must start all the same
        return _stays(f"the rows that this server sends are not known ({error!r})")
    if largest is None:
        return _stays("the rows that this server sends are not known")
    choice = by_table(gpu, n, k, experts, largest)
    if choice.measure and engine_state.setting("is_ep_joiner"):
        return _stays("this rank joins others that serve already, so nothing is measured")
    return choice


def by_table(gpu: str | None, n: int, k: int, experts: int, largest_expected_m: int) -> Choice:
    """What `auto` does with a size that nothing else speaks against: by the table where it covers the rows, else to be
    measured, if that is not switched off."""
    shape = table.shape_launches(gpu, n, k, experts)
    if shape is not None and shape.covers(largest_expected_m):
        told = table.entry_told(gpu, n, k, experts)
        if shape.triton_wins(largest_expected_m):
            return Choice(shape.block_ns, source=told)
        return _stays(
            f"{told} does not show Triton ahead up to {largest_expected_m} expected rows (N {n}, K {k}, {experts} experts)"
        )
    if not _may_measure():
        return _stays(
            f"no table compares the backends at N {n}, K {k}, {experts} experts up to {largest_expected_m} expected rows"
        )
    return Choice(None, largest_expected_m=largest_expected_m)


# ---- ranks


_DIFFERENT = "ranks chose differently, and they share the experts"


def _group(layer: Any) -> Any | None:
    """The engine's group of the ranks that share a layer's experts; None where nobody else does, or waits for this rank."""
    if getattr(layer, "moe_ep_size", 1) == 1 and not engine_state.setting("enable_eplb"):
        return None
    if engine_state.setting("is_ep_joiner"):
        return None
    group = engine_state.expert_group()
    return group if group.world_size > 1 else None


def _agreed(choice: Choice, group: Any | None) -> Choice:
    """What all ranks do with a layer: the same, or CUTLASS; if one has to measure, all do.

    Every rank takes part, whatever it has chosen, because the others wait for it.
    """
    if group is None:
        return choice
    mine = torch.tensor(
        [bool(choice.reason), choice.measure, choice.largest_expected_m, *(choice.block_ns or (0, 0))],
        dtype=torch.int64,
    )
    both = torch.cat([mine, -mine])
    torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    stays, measures, largest, *_ = both[:5].tolist()
    if choice.reason:
        return choice
    if stays:
        return _stays("another rank keeps CUTLASS, and they share the experts")
    if measures:
        return Choice(None, largest_expected_m=largest)
    return choice if torch.equal(both[3:5], -both[8:10]) else _stays(_DIFFERENT)


_measurements: dict[tuple[Any, ...], measured_choice.Measurement] = {}


def _measured(method: Any, layer: Any, choice: Choice, group: Any | None) -> Choice:
    """The choice by measuring, once per sizes and process; every rank that shares the experts takes part."""
    n, k, experts = _sizes(layer)
    device = layer.w2_weight.device
    block_ns = rule_block_ns(device, n, k, experts)
    key = (n, k, experts, device, choice.largest_expected_m)
    if key not in _measurements:
        padded_rows = engine_state.dispatch_tokens_cap() * layer.moe_ep_size
        with lifecycle.not_serving():
            mine = measured_choice.measure(
                measured_choice.Sizes(n, k, experts, padded_rows),
                choice.largest_expected_m,
                device,
                functools.partial(_low_latency_call, method, layer),
                functools.partial(_regroup, layer, block_ns),
                functools.partial(restore_layer, layer),
            )
        _measurements[key] = measured_choice.joint(mine, group)
        text = f"N {n}, K {k}, {experts} experts: {_measurements[key].told()}"
        level = logging.WARNING if _measurements[key].failure else logging.INFO
        lifecycle.say_once(logger, level, text)
    measurement = _measurements[key]
    if measurement.triton_wins:
        return Choice(block_ns, source="measured at load, tiles by the rule")
    why = measurement.failure or "the two kernels were not faster"
    return _stays(f"measured at load at N {n}, K {k}, {experts} experts: {why}")


def _low_latency_call(method: Any, layer: Any, payload: measured_choice.Payload, expected_m: int) -> torch.Tensor:
    """One call of the chain as the engine's caller makes it, by whichever backend the weights are laid out for."""
    strides = {
        name: getattr(method, name)
        for which in ("1", "2")
        for name in (
            f"a_strides{which}",
            f"b_strides{which}",
            f"c_strides{which}",
            f"s_strides{which.replace('1', '13')}",
        )
    }
    return _engine().cutlass_w4a8_moe_deepep_ll(
        payload.x,
        payload.x_scale,
        layer.w13_weight,
        layer.w2_weight,
        layer.w13_weight_scale_inv,
        layer.w2_weight_scale_inv,
        torch.zeros((1, layer.top_k), dtype=torch.int64, device=payload.x.device),
        payload.masked_m,
        **strides,
        expert_offsets=method.expert_offsets,
        problem_sizes1=method.problem_sizes1,
        problem_sizes2=method.problem_sizes2,
        a1_scale=layer.w13_input_scale,
        a2_scale=layer.w2_input_scale,
        expected_m=expected_m,
    )


# ---- the weights


def is_processed(layer: Any) -> bool:
    """Whether the engine's processing has made the layer's scales, and nobody has loaded others since.

    A second run of it would interleave them once more. Only layers that were regrouped are marked.
    """
    return all(getattr(getattr(layer, scale), _PROCESSED, False) for _, scale, _ in _WEIGHTS)


def _regroup(layer: Any, block_ns: tuple[int, int]) -> None:
    """Bring a layer's weights and scales into the kernels' layout, in place, and mark them."""
    for (weight_name, scale_name, gate_up), block_n in zip(_WEIGHTS, block_ns, strict=True):
        weight, scale = getattr(layer, weight_name), getattr(layer, scale_name)
        two.regroup_weights(weight.data, scale.data, block_n, gate_up=gate_up)
        setattr(weight, _LAYOUT, TileLayout(block_n, gate_up))
        setattr(scale, _LAYOUT, TileLayout(block_n, gate_up))


def regroup_layer(method: Any, layer: Any, wanted: str) -> bool:
    """Regroup a layer whose weights the engine has processed, if the backend is to serve it; says once why where not.

    Does nothing to a layer that is regrouped already. Returns whether the layer is regrouped.
    """
    if is_regrouped(layer):
        return True
    group = _group(layer) if wanted == "auto" or engine_state.setting("enable_eplb") else None
    choice = _agreed(plan(method, layer, wanted), group)
    if choice.measure:
        choice = _measured(method, layer, choice, group)
    if choice.block_ns is None:
        # Whoever asked for Triton must see that it is not what runs.
        lifecycle.say_once(
            logger,
            logging.WARNING if wanted == "triton" else logging.INFO,
            f"experts stay with CUTLASS: {choice.reason}",
        )
        return False
    route_engine_gemm(_engine())
    refuse_direct_loads()
    _regroup(layer, choice.block_ns)
    for weight_name, scale_name, _ in _WEIGHTS:
        weight, scale = getattr(layer, weight_name), getattr(layer, scale_name)
        setattr(scale, _PROCESSED, True)
        loader = getattr(weight, "weight_loader", None)
        if loader is not None:
            setattr(weight, _LOADER, loader)
            weight.weight_loader = functools.partial(_refuse_to_load, weight_name)
    if not hasattr(layer, _SAVING):
        setattr(layer, _SAVING, layer.register_state_dict_pre_hook(_refuse_to_save))
    setattr(layer, _EXPORT, _no_saving("w13_weight"))
    if hasattr(type(method), _RESTORE):
        # The engine calls it on the method's object before it loads into a model that serves.
        setattr(method, _RESTORE, functools.partial(_restore_for_reload, getattr(type(method), _RESTORE), method))
    lifecycle.say_once(
        logger,
        logging.INFO,
        f"experts served by the Triton grouped GEMMs, tiles of {choice.block_ns[0]} and {choice.block_ns[1]} columns "
        f"({choice.source})",
    )
    return True


def restore_layer(layer: Any) -> None:
    """Give a regrouped layer the engine's layout back, byte for byte; nothing where it is not regrouped."""
    for weight_name, scale_name, _ in _WEIGHTS:
        weight, scale = getattr(layer, weight_name), getattr(layer, scale_name)
        layout = layout_of(weight)
        if layout is None:
            continue
        two.restore_weights(weight.data, scale.data, layout.block_n, gate_up=layout.gate_up)
        delattr(weight, _LAYOUT)
        delattr(scale, _LAYOUT)
        if hasattr(weight, _LOADER):
            weight.weight_loader = getattr(weight, _LOADER)
            delattr(weight, _LOADER)
    if hasattr(layer, _EXPORT):
        delattr(layer, _EXPORT)


def _restore_for_reload(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    restore_layer(layer)
    return original(method, layer)


def _refuse_to_load(name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{name}: its layer is regrouped for the Triton backend, so nothing can be loaded into it; start the server with "
        f"{switches.PREFIX}BACKEND=cutlass to update expert weights in place"
    )


def _refuse_to_save(layer: Any, prefix: str, keep_vars: bool) -> None:
    if is_regrouped(layer):
        raise RuntimeError(_no_saving(f"{prefix}w13_weight"))


def _no_saving(name: str) -> str:
    return (
        f"{name}: its layer is regrouped for the Triton backend, so what is saved of it could not be loaded; start the server "
        f"with {switches.PREFIX}BACKEND=cutlass to save or send its weights"
    )


def refuse_direct_loads() -> None:
    """Have the engine's copy into the memory of parameters refuse regrouped ones before it writes any; done once per process.

    A server has imported it by the time that it loads weights; where it has it under another name, the log says so.
    """
    homes = [sys.modules[home] for home in _DIRECT_LOAD_HOMES if home in sys.modules]
    found = [home for home in homes if hasattr(home, _DIRECT_LOAD)]
    if homes and not found:
        lifecycle.say_once(
            logger,
            logging.WARNING,
            f"this engine has no {_DIRECT_LOAD}: direct weight updates of regrouped layers cannot be refused, do not use them",
        )
    for home in found:
        original = getattr(home, _DIRECT_LOAD)
        if not hasattr(original, _REFUSES):
            setattr(home, _DIRECT_LOAD, _refusing(original))


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _model_load_weights_direct(model: torch.nn.Module, named_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        named_tensors = list(named_tensors)
        parameters = dict(model.named_parameters())
        for name, _ in named_tensors:
            if name in parameters and layout_of(parameters[name]) is not None:
                _refuse_to_load(name)
        return original(model, named_tensors, *args, **kwargs)

    setattr(_model_load_weights_direct, _REFUSES, True)
    return _model_load_weights_direct


# ---- the calls


def moe_deepep_ll(
    a_states: torch.Tensor,
    a_scales: torch.Tensor | None,
    w1_q: torch.Tensor,
    w2_q: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    masked_m: torch.Tensor,
    a1_scale: torch.Tensor,
    a2_scale: torch.Tensor,
    expected_m: int | None,
) -> torch.Tensor:
    """A low-latency layer in two launches; arguments and result as of the chain that calls it, weights regrouped.

    A payload with float32 scales is read as it is, and ``a1_scale`` then plays no part. One without scales (BF16) or with
    packed ones is first quantised to per-tensor fp8 by our requant, at ``a1_scale``.
    """
    num_experts, padded_rows, hidden = a_states.shape
    intermediate_size = w2_q.size(2) * 2
    first, second = layout_of(w1_q), layout_of(w2_q)
    assert first is not None and second is not None
    gate_up, down = table.launches(
        _gpu_name(a_states.device),
        intermediate_size,
        hidden,
        num_experts,
        (first.block_n, second.block_n),
        expected_m,
    )
    rows = table.mean_rows(expected_m)
    groups = hidden // _GROUP_SIZE
    if a_scales is None or a_scales.dtype != torch.float32:
        payload = torch.empty(a_states.shape, dtype=torch.float8_e4m3fn, device=a_states.device)
        kernels.fp8_per_token_to_per_tensor_quant_triton(a_states, a_scales, masked_m, a1_scale, payload, expected_m)
        a_states, a_scales = payload, a1_scale.view(1, 1, 1).expand(num_experts, padded_rows, groups)
    inner = torch.empty(
        (num_experts, padded_rows, intermediate_size), device=a_states.device, dtype=torch.float8_e4m3fn
    )
    two.w4a8_gate_up(a_states, a_scales, w1_q, w1_scale, masked_m, a2_scale, inner, gate_up, rows)
    output = torch.empty((num_experts, padded_rows, hidden), device=a_states.device, dtype=torch.bfloat16)
    two.w4a8_down(inner, a2_scale, w2_q, w2_scale, masked_m, output, down, rows)
    return output


def _rows_gemm(
    layout: TileLayout,
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    experts_offsets: torch.Tensor,
    problem_sizes: torch.Tensor,
) -> None:
    """The engine's grouped GEMM over rows that stand one expert after another, from a regrouped weight.

    ``problem_sizes`` int32 ``[E, 3]`` holds (N, rows, K) an expert, as the engine writes it for its own kernel.
    """
    if a.dim() != 2:
        raise ValueError(f"a: shape is {list(a.shape)}, must be [rows, K]: padded rows go through our own chain")
    launch = table.rule(layout.block_n, -(-a.size(0) // b.size(0)))
    two.w4a8_rows(a, a_scales, b, b_scales, experts_offsets, problem_sizes[:, 1], d, launch, layout)


def route_engine_gemm(engine: ModuleType) -> None:
    """Have the engine's chain ask for every weight whether it is regrouped; done once per process, before the first one is."""
    original = getattr(engine, _ENGINE_GEMM)
    if hasattr(original, _LAYOUT):
        return

    @functools.wraps(original)
    def cutlass_w4a8_moe_mm(
        d: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scales: torch.Tensor,
        b_scales: torch.Tensor,
        experts_offsets: torch.Tensor,
        problem_sizes: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        layout = layout_of(b)
        if layout is None:
            return original(d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, *args, **kwargs)
        return _rows_gemm(layout, d, a, b, a_scales, b_scales, experts_offsets, problem_sizes)

    setattr(cutlass_w4a8_moe_mm, _LAYOUT, None)
    setattr(engine, _ENGINE_GEMM, cutlass_w4a8_moe_mm)
