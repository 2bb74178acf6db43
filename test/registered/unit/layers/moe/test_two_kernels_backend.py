"""``SGLANG_W4AFP8_BACKEND`` on the CPU: the installed engine's expert layer with its weights regrouped, and without.

Every arm is a fresh process with the engine's own loader, Triton's interpreter and doubles for what needs a GPU: the compiled
grouped GEMM, which reads the engine's layout only, and the small kernels around it in prefill. Every value of the layer is
representable at every step, so results are compared with a float64 reference at zero tolerance.
"""

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from engine_process import SGL_KERNEL_DOUBLE, Process, run_script, write

register_cpu_ci(est_time=150, suite="base-a-test-cpu")

LAYER = """
import logging
import sys
from types import SimpleNamespace

import torch

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from sglang.srt.plugins import load_plugins

load_plugins()

import sglang.srt.layers.moe.cutlass_w4a8_moe as engine_chain
from sgl_kernel import cutlass_w4a8_moe_mm, double
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLDispatchOutput, DeepEPNormalDispatchOutput
from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config, W4AFp8MoEMethod
from sglang_w4afp8 import engine_state, tuned_config
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import interleave_scales, pack_int4
from sglang_w4afp8.srt.layers.moe import two_kernels

two_kernels.capability = lambda device: (9, 0)
# The engine imports it only beside a GPU.
engine_chain.cutlass_w4a8_moe_mm = cutlass_w4a8_moe_mm
settings = {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency"}
engine_state.setting = settings.get

E, M, TOPK = 3, 512, 2
ROWS, EXPECTED_M = [5, 0, 18], 9
A1_SCALE, A2_SCALE = 0.5, 4.0

def values_of(K, N, seed=0):
    # Gate is 32 everywhere, whose SiLU is 32 in float32; up is one product, and so is every output.
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.zeros((E, 2 * N, K), dtype=torch.int8)
    w13[:, :N, 0] = 4
    picked = torch.stack([torch.randperm(K - 1, generator=generator)[:N] + 1 for _ in range(E)])
    w2 = torch.zeros((E, K, N), dtype=torch.int8)
    column = torch.randint(0, N, (E, K), generator=generator)
    for expert in range(E):
        w13[expert, N + torch.arange(N), picked[expert]] = -2
        w2[expert, torch.arange(K), column[expert]] = torch.randint(-8, 8, (K,), generator=generator, dtype=torch.int8)
    s13 = 2.0 ** torch.randint(-1, 2, (E, 2 * N, K // 128), generator=generator)
    s13[:, :N, 0] = 1.0
    s2 = 2.0 ** torch.randint(-7, -4, (E, K, N // 128), generator=generator)
    return w13, s13, w2, s2

loads = []

def loader(param, loaded_weight, *args, **kwargs):
    loads.append(param)
    param.data.copy_(loaded_weight)

def new_layer(K=512, N=128, values=None, group_size=128):
    config = W4AFp8Config()
    config.group_size = group_size
    layer = torch.nn.Module()
    layer.layer_id, layer.quant_method = 7, W4AFp8MoEMethod(config)
    layer.moe_ep_size, layer.top_k, layer.num_experts = 1, TOPK, E
    layer.quant_method.create_weights(layer, E, K, N, torch.bfloat16, weight_loader=loader)
    if values is not None:
        w13, s13, w2, s2 = values
        layer.w13_weight.weight_loader(layer.w13_weight, pack_int4(w13))
        layer.w2_weight.weight_loader(layer.w2_weight, pack_int4(w2))
        layer.w13_weight_scale_inv.data.copy_(s13)
        layer.w2_weight_scale_inv.data.copy_(s2)
    layer.w13_input_scale.data.fill_(A1_SCALE)
    layer.w2_input_scale.data.fill_(A2_SCALE)
    return layer

def process(layer):
    layer.quant_method.process_weights_after_loading(layer)
    return layer

NAMES = ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv")

def memory(layer):
    return [getattr(layer, name).detach().clone() for name in NAMES]

def engines_memory(values):
    w13, s13, w2, s2 = values
    return [pack_int4(w13), pack_int4(w2), *(interleave_scales(s).to(torch.bfloat16) for s in (s13, s2))]

def same(first, second):
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]

def dense(weight, scales):
    return (weight.double().unflatten(-1, (-1, 128)) * scales.double()[..., None]).flatten(-2)

def reference(values, rows, expert):
    w13, s13, w2, s2 = values
    gate, up = (rows.double() @ dense(w13[expert], s13[expert]).T).chunk(2, dim=1)
    assert not len(rows) or (gate == 32).all()
    return (gate * up) @ dense(w2[expert], s2[expert]).T

def outcome(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"

result = {}
"""

LOW_LATENCY = """
values = values_of(512, 128)
layer = process(new_layer(values=values))
generator = torch.Generator().manual_seed(1)
masked_m = torch.tensor(ROWS, dtype=torch.int32)
live = torch.arange(M)[None, :] < masked_m[:, None]
activations = torch.randint(-8, 9, (E, M, 512), generator=generator).float()
activations[:, :, 0] = 8.0
exponents = torch.randint(-2, 1, (E, M, 4), generator=generator)
exponents[:, :, 0] = 0
scales = 2.0**exponents
x = activations.to(torch.float8_e4m3fn)
# Padding is NaN in payload and scales: one read of it into a live row shows.
x.view(torch.uint8)[~live] = 0x7F
x_scale = scales.masked_fill(~live[..., None], float("nan")).transpose(1, 2).contiguous().transpose(1, 2)
packed = sum((127 + exponents[:, :, byte]) << (8 * byte) for byte in range(4)).to(torch.int32)[:, :, None]
dequantized = (activations.unflatten(2, (-1, 128)) * scales[:, :, :, None]).flatten(2)

def run(payload, payload_scale, expected_m=EXPECTED_M):
    topk = torch.zeros((4, TOPK), dtype=torch.int64)
    dispatch = DeepEPLLDispatchOutput(payload, payload_scale, topk, topk.float(), masked_m, expected_m)
    output = layer.quant_method.apply_deepep_ll(layer, dispatch)
    return [
        torch.equal(output[expert, :rows].double(), reference(values, dequantized[expert, :rows], expert))
        for expert, rows in enumerate(ROWS)
    ]

result["regrouped"] = two_kernels.is_regrouped(layer)
result["fp8"] = run(x, x_scale)
result["gemms"] = len(double.calls)
result["no estimate"] = run(x, x_scale, None)
result["many rows expected"] = run(x, x_scale, 300)
if two_kernels.is_regrouped(layer):
    result["bf16"] = run(dequantized.to(torch.bfloat16), None)
    result["packed"] = run(x, packed)
"""

LIFE = """
try:  # before weights are loaded, as in a server
    import sglang.srt.model_executor.model_runner_components.weight_updater as updater
except ImportError:  # before 0.5.16
    import sglang.srt.model_executor.model_runner as updater

values = values_of(512, 128)
expected = engines_memory(values)
layer = process(new_layer(values=values))
pointers = [getattr(layer, name).data_ptr() for name in NAMES]
once = memory(layer)
result["regrouped"] = [two_kernels.is_regrouped(layer), *same(once, expected)]
process(layer)
result["again"] = same(memory(layer), once)

other = values_of(512, 128, seed=5)
result["load"] = outcome(layer.w13_weight.weight_loader, layer.w13_weight, pack_int4(other[0]))
result["after the refusal"] = same(memory(layer), once)

two_kernels.restore_layer(layer)
result["restored"] = [two_kernels.is_regrouped(layer), *same(memory(layer), expected)]
two_kernels.restore_layer(layer)
result["restored again"] = same(memory(layer), expected)
process(layer)
result["regrouped anew"] = same(memory(layer), once)

# A reload as the engine announces it, of the int4 values: its scales' parameters have no loader any more.
restore = getattr(layer.quant_method, "restore_weights_before_loading", None)
result["announced"] = restore is not None
if restore is not None:
    restore(layer)
    layer.w13_weight.weight_loader(layer.w13_weight, pack_int4(other[0]))
    layer.w2_weight.weight_loader(layer.w2_weight, pack_int4(other[2]))
    process(layer)
    fresh = process(new_layer(values=(other[0], values[1], other[2], values[3])))
    result["reloaded"] = same(memory(layer), memory(fresh))
    result["refused again"] = outcome(layer.w2_weight.weight_loader, layer.w2_weight, pack_int4(other[2]))
# What writes into the memory of parameters, or saves it, knows no layout.
model = torch.nn.Module()
model.experts, model.norm = layer, torch.nn.Linear(2, 2)
held, new_norm = memory(layer), torch.ones(2, 2)
for name in NAMES:
    tensors = [("norm.weight", new_norm), (f"experts.{name}", getattr(layer, name).detach().clone().zero_())]
    result[f"direct {name}"] = outcome(updater._model_load_weights_direct, model, iter(tensors))
result["direct changed"] = [torch.equal(model.norm.weight, new_norm), *same(memory(layer), held)]
result["direct, others"] = outcome(updater._model_load_weights_direct, model, [("norm.weight", new_norm)])
result["direct, others changed"] = torch.equal(model.norm.weight, new_norm)
result["save"] = outcome(model.state_dict)
result["export"] = getattr(layer, "_weight_export_error", None)
result["in place"] = pointers == [getattr(layer, name).data_ptr() for name in NAMES]
result["scales have a loader"] = [hasattr(getattr(layer, name), "weight_loader") for name in NAMES[2:]]
# Dummy weights are any bytes, and every byte is two values.
dummy = new_layer()
for name in NAMES[:2]:
    getattr(dummy, name).data.random_(-128, 128)
before = [getattr(dummy, name).detach().clone() for name in NAMES[:2]]
process(dummy)
two_kernels.restore_layer(dummy)
result["save in the engine's layout"] = outcome(dummy.state_dict)
result["export in the engine's layout"] = getattr(dummy, "_weight_export_error", None)
bare = torch.nn.Module()
bare.experts = dummy
zeros = [("experts.w13_weight", torch.zeros_like(dummy.w13_weight))]
dummy.w13_weight.data.copy_(before[0])
result["direct in the engine's layout"] = outcome(updater._model_load_weights_direct, bare, zeros)
result["direct in the engine's layout changed"] = not dummy.w13_weight.any()
dummy.w13_weight.data.copy_(before[0])
result["dummy"] = [torch.equal(getattr(dummy, name), was) for name, was in zip(NAMES, before)]
"""

UNSUPPORTED = """
def left(layer):
    return not two_kernels.is_regrouped(process(layer))

result["left"] = {
    "N": left(new_layer(512, 192)),
    "K": left(new_layer(576, 128)),
    "group": left(new_layer(512, 128, group_size=64)),
    "twice": left(new_layer(512, 192)),
}
two_kernels.capability = lambda device: (10, 0)
result["left"]["gpu"] = left(new_layer())
two_kernels.capability = lambda device: None
result["left"]["no gpu"] = left(new_layer())
two_kernels.capability = lambda device: (9, 0)
settings["moe_a2a_backend"] = "none"
result["left"]["other backend"] = left(new_layer())
settings["moe_a2a_backend"] = "deepep"
settings["deepep_mode"] = "normal"
result["left"]["normal"] = left(new_layer())
settings["deepep_mode"] = "auto"
for name, value in (
    ("load_format", "sharded_state"),
    ("speculative_draft_load_format", "remote"),
    ("cpu_offload_gb", 2),
    ("offload_group_size", 4),
):
    settings[name] = value
    result["left"][name] = left(new_layer())
    del settings[name]
settings.update(load_format="safetensors", speculative_draft_load_format=None, cpu_offload_gb=0, offload_group_size=-1)
result["supported"] = not left(new_layer())
del engine_chain.cutlass_w4a8_moe_mm
result["left"]["no gemm"] = left(new_layer())
"""

# An engine that has its copy into parameters under another name.
RENAMED = """
import sglang.srt.model_executor.model_runner as runner
for home in (updater, runner):
    vars(home).pop("_model_load_weights_direct", None)
result["regrouped"] = [two_kernels.is_regrouped(process(new_layer())) for _ in range(2)]
"""

# What `auto` decides by: a table, and what the server is going to send.
AUTO = """
import pathlib, tempfile
from sglang_w4afp8.srt.layers.moe import dispatch_cap

tuned_config.user_directory = lambda: pathlib.Path(FOLDER)
tuned_config.gpu_name = lambda index=None: "NVIDIA H200"
two_kernels._gpu_name = lambda device: "NVIDIA H200"
engine_state.dispatch_tokens_cap = lambda: 512

def write_table(*times, block_n=64):
    hints = {"block_m": 16, "groups_per_step": 1, "num_warps": 4, "num_stages": 3, "look_up": False}
    launches = [
        {"expected_m": m, "gate_up": hints, "down": hints, "triton_us": triton, "cutlass_us": cutlass}
        for m, triton, cutlass in times
    ]
    shape = {"n": 128, "k": 512, "experts": 4, "gate_up_block_n": 32, "down_block_n": block_n, "launches": launches}
    metadata = {"gpu": "NVIDIA H200", "schedule": grouped_gemm_table.SCHEDULE, "triton": "", "package_version": "",
                "kernel_version": ""}
    path = pathlib.Path(FOLDER) / "two_kernels_nvidia_h200.json"
    tuned_config.write_tuned(path, metadata, {"shapes": [shape]})
    tuned_config._cache.clear()
    grouped_gemm_table.clear_cache()

def regrouped(requests=None, layer=None):
    load = dispatch_cap.Load(requests, None, None) if requests else None
    dispatch_cap.server_load = lambda: load
    layer = process(new_layer() if layer is None else layer)
    return two_kernels.layout_of(layer.w13_weight) and [
        two_kernels.layout_of(weight).block_n for weight in (layer.w13_weight, layer.w2_weight)
    ]

result["no table"] = regrouped(4)
write_table((2, 1.0, 2.0), (9, 1.0, 1.5), (17, 1.03, 1.0))
# Up to 12 requests of two experts each over three experts are 9 expected rows, up to 24 are 17.
result["wins"] = regrouped(12)
result["loses at some"] = regrouped(24)
result["nobody knows"] = regrouped()
settings["deepep_mode"] = "auto"
result["normal prefill"] = regrouped(12)
result["other shape"] = regrouped(12, new_layer(1024, 128))
result["beyond the table"] = regrouped(120)
write_table((2, 1.0, 2.0), (9, 1.0, 1.5), (17, 1.02, 1.0))
result["within the limit"] = regrouped(24)
write_table((2, 1.01, 1.0), (9, 1.0, 1.0))
result["gains nothing"] = regrouped(12)
"""

# What `auto` does where no table knows the sizes: both backends are timed, here by a clock that the test sets.
MEASURED = """
import pathlib, tempfile
from sglang_w4afp8.srt.layers.moe import dispatch_cap, measured_choice

tuned_config.user_directory = lambda: pathlib.Path(FOLDER)
engine_state.dispatch_tokens_cap = lambda: 512
dispatch_cap.server_load = lambda: dispatch_cap.Load(REQUESTS, None, None)
measured_choice.refuse_unless_possible = lambda device: None
measured_choice.TIME_LIMIT_S = 1e9  # the interpreter is slow
free = [1 << 40]
measured_choice.free_memory = lambda device: free[0]
# Microseconds of CUTLASS and of the two kernels; the call is made once, and must leave numbers.
price = {"cutlass": 2.0, "triton": 1.0}
timed = []

def medians(providers, repeats):
    output = providers["call"]()
    assert output.dtype == torch.bfloat16 and output.shape[0] == E
    which = "triton" if two_kernels.is_regrouped(measuring[0]) else "cutlass"
    rows = providers["call"].args[-1]
    timed.append((which, rows))
    value = price[which]
    return {"call": value(rows) if callable(value) else value}

measured_choice.timing.interleaved_medians = medians
measuring = [None]

def auto(K=512, N=128, values=None, load=None):
    if load is not None:
        dispatch_cap.server_load = lambda: dispatch_cap.Load(load, None, None)
    layer = new_layer(K, N, values)
    measuring[0] = layer
    return process(layer)

def anew():
    two_kernels._measurements.clear()
    timed.clear()
"""

MEASURED_LIFE = """
values = values_of(512, 128)
expected = engines_memory(values)
torch.manual_seed(5)
state = torch.get_rng_state()
layer = auto(values=values)
result["wins"] = two_kernels.is_regrouped(layer)
result["random numbers"] = torch.equal(state, torch.get_rng_state())
result["timed"] = sorted(set(timed))
result["first"] = timed[0][0]
count = len(timed)
result["second layer"] = [two_kernels.is_regrouped(auto(values=values)), len(timed) - count]
result["other size"] = [two_kernels.is_regrouped(auto(1024, 128)), len(timed) > count]

anew()
price["triton"] = 1.995
loser = auto(values=values)
result["gains too little"] = [two_kernels.is_regrouped(loser), *same(memory(loser), expected)]
anew()
price["triton"] = lambda rows: 1.0 if rows < 9 else 2.1
loser = auto(values=values)
result["loses at many rows"] = [two_kernels.is_regrouped(loser), *same(memory(loser), expected)]
anew()
clock = [0.0]
measured_choice.TIME_LIMIT_S = 2.0
measured_choice.time.monotonic = lambda: clock[0]

def slow(rows):
    clock[0] += 10.0
    return 1.0

price.update(cutlass=slow, triton=slow)
loser = auto(values=values)
result["out of time"] = [two_kernels.is_regrouped(loser), len(timed), *same(memory(loser), expected)]
import time
measured_choice.time.monotonic = time.perf_counter
anew()
price.update(cutlass=2.0, triton=1.0)
free[0] = 1 << 20
result["no memory"] = [two_kernels.is_regrouped(auto(values=values)), len(timed)]
anew()
free[0] = 1 << 40

def broken(providers, repeats):
    if two_kernels.is_regrouped(measuring[0]):
        raise RuntimeError("CUDA out of memory")
    return {"call": 2.0}

measured_choice.timing.interleaved_medians = broken
loser = auto(values=values)
result["fails in between"] = [two_kernels.is_regrouped(loser), *same(memory(loser), expected)]
"""

# Two ranks that share the experts, each with a clock of its own.
MEASURED_RANK = """
import torch.distributed as dist
from sglang.srt.distributed import parallel_state

rank = RANK
dist.init_process_group("gloo", init_method="file://STORE", rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD, device_group=dist.group.WORLD)
parallel_state.get_moe_ep_group = lambda: group
plain_layer = new_layer

def new_layer(*arguments):
    layer = plain_layer(*arguments)
    layer.moe_ep_size, layer.num_experts = 2, 2 * E
    return layer

def regrouped():
    anew()
    return two_kernels.is_regrouped(auto())

result["both win"] = regrouped()
# The slowest rank counts: here that is the other one of each arm.
price["triton"] = 1.0 if rank else 1.9
result["one wins by much"] = regrouped()
price["triton"] = 1.0 if rank else 2.5
result["one loses"] = regrouped()
price["triton"] = 1.0
free[0] = 1 << (20 if rank else 40)
result["one cannot measure"] = regrouped()
free[0] = 1 << 40
two_kernels.capability = lambda device: (10, 0) if rank else (9, 0)
result["one is another GPU"] = regrouped()
two_kernels.capability = lambda device: (9, 0)
# What one knows from a table both measure.
if rank:
    shape = grouped_gemm_table.ShapeLaunches((grouped_gemm_table.MeasuredPair(
        64, grouped_gemm_table.rule(64, 1, True), grouped_gemm_table.rule(64, 1), 1.0, 2.0),))
    grouped_gemm_table.shape_launches = lambda *sizes: shape
result["one has a table"] = [regrouped(), bool(timed)]
settings["is_ep_joiner"] = True
result["joins"] = regrouped() if not rank else None
dist.destroy_process_group()
"""

# What a server does that nobody has told anything: two layers, by the table of this GPU or without one.
DEFAULT = """
two_kernels.capability = lambda device: CAPABILITY
two_kernels._gpu_name = lambda device: GPU_NAME
result["first layer"] = two_kernels.is_regrouped(process(new_layer()))
"""

NORMAL = """
values = values_of(512, 128)
T = 7
layer = process(new_layer(values=values))
plain = new_layer(values=values)
plain.w13_weight.data = pack_int4(values[0])
route = engine_chain.cutlass_w4a8_moe_mm
result["routed"] = [route is not cutlass_w4a8_moe_mm, two_kernels.is_regrouped(layer)]

def mm_data(topk_ids, expert_offsets, sizes1, sizes2, a_map, c_map, experts, n, k, **kwargs):
    counts = torch.bincount(topk_ids.flatten(), minlength=experts + 1)[:experts]
    expert_offsets.copy_(torch.cat([torch.zeros(1), counts.cumsum(0)]))
    for sizes, size_n, size_k in ((sizes1, 2 * n, k), (sizes2, k, n)):
        sizes.copy_(torch.stack([torch.full_like(counts, size_n), counts, torch.full_like(counts, size_k)], dim=1))

def quantize(x, output, scale, is_static):
    output.copy_((x.float() / scale).to(torch.float8_e4m3fn))

def silu_and_mul(x, output):
    gate, up = x.float().chunk(2, dim=1)
    output.copy_(gate * torch.sigmoid(gate) * up)

class PostReorder:
    # The interpreter computes on the codes of bf16 where a kernel multiplies in it, as the engine's does.
    def __getitem__(self, grid):
        def add_up(down, output, src2dst, topk_ids, topk_weights, *sizes, **constants):
            for token in range(len(output)):
                places = src2dst.view(topk_ids.shape)[token]
                chosen = places >= 0
                rows = down[places[chosen]].double() * topk_weights[token][chosen].double()[:, None]
                output[token] = rows.sum(0).to(output.dtype)
        return add_up

engine_chain.deepep_post_reorder_triton_kernel = PostReorder()
engine_chain.get_cutlass_w4a8_moe_mm_data = mm_data
engine_chain.per_tensor_quant_fp8 = engine_chain.sgl_per_tensor_quant_fp8 = quantize
engine_chain.silu_and_mul = silu_and_mul

generator = torch.Generator().manual_seed(2)
x = torch.randint(-4, 5, (T, 512), generator=generator).to(torch.bfloat16)
x[:, 0] = 8.0
# No token goes to expert 1, and one of each row's choices is on another rank.
topk = torch.tensor([[0, 2], [2, -1], [2, 0], [-1, 0], [2, -1], [0, 2], [2, 0]])
weights = torch.full((T, 2), 0.5)
weights[:, 1] = 1.0
output = layer.quant_method.apply_deepep_normal(layer, DeepEPNormalDispatchOutput(x, None, topk, weights, [4, 0, 6]))
expected = torch.zeros((T, 512), dtype=torch.float64)
for token in range(T):
    for choice, expert in enumerate(topk[token].tolist()):
        if expert >= 0:
            expected[token] += weights[token, choice].double() * reference(values, x[token : token + 1], expert)[0]
result["normal"] = torch.equal(output, expected.to(torch.bfloat16))
result["normal gemms"] = len(double.calls)

# Both GEMMs by themselves, as any path of the engine calls them: the same values from either layout.
offsets = torch.tensor([0, 4, 4], dtype=torch.int32)
for name, scale_name, weight_name, n, k in (
    ("first", "w13_weight_scale_inv", "w13_weight", 256, 512), ("second", "w2_weight_scale_inv", "w2_weight", 512, 128)
):
    a = torch.randint(-8, 9, (10, k), generator=generator).to(torch.float8_e4m3fn)
    sizes = torch.tensor([[n, 4, k], [n, 0, k], [n, 6, k]], dtype=torch.int32)
    strides = [torch.zeros((E, 3), dtype=torch.int64)] * 4
    from sglang_w4afp8.kernels.ops.moe.w4a8_reference import w4a8_grouped_gemm_reference
    scales = dict(zip(NAMES, engines_memory(values)))
    from_tiles, from_engine = (torch.full((10, n), -7.0, dtype=torch.bfloat16) for _ in range(2))
    a_scale = torch.tensor([0.25])
    route(from_tiles, a, getattr(layer, weight_name), a_scale, getattr(layer, scale_name), offsets, sizes, *strides, 128, 2)
    calls = len(double.calls)
    route(from_engine, a, scales[weight_name], a_scale, scales[scale_name], offsets, sizes, *strides, 128, 2)
    result[name] = [torch.equal(from_tiles, from_engine), len(double.calls) - calls, bool((from_tiles != -7.0).any())]
result["padded"] = outcome(
    route, from_tiles[None], a[None], layer.w2_weight, a_scale, layer.w2_weight_scale_inv, offsets, sizes, *strides, 128, 2
)
"""

RANK = """
import torch.distributed as dist
from sglang.srt.distributed import parallel_state

rank = RANK
dist.init_process_group("gloo", init_method="file://STORE", rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD, device_group=dist.group.WORLD)
parallel_state.get_moe_ep_group = lambda: group
settings["enable_eplb"] = True

def regrouped():
    return two_kernels.is_regrouped(process(new_layer()))

result["same"] = regrouped()
if rank:
    grouped_gemm_table.RULE_BLOCK_NS = (64, 128)
result["other tiles"] = regrouped()
if rank:
    two_kernels.capability = lambda device: (10, 0)
result["other GPU"] = regrouped()
settings["is_ep_joiner"] = True
# Alone: a rank that joins has nobody to wait for.
result["joins"] = regrouped() if rank else None
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stub"), {"sgl_kernel/__init__.py": SGL_KERNEL_DOUBLE})


def run(stub: Path, code: str, backend: str | None = "triton", **environ: str) -> Process:
    """The layer's script with a backend; None leaves it to the default."""
    asked = {"SGLANG_W4AFP8_BACKEND": backend} if backend else {}
    return run_script(LAYER + code, [stub], TRITON_INTERPRET="1", **asked, **environ)


# --- low-latency calls ---


@pytest.fixture(scope="module")
def low_latency(stub: Path) -> Process:
    return run(stub, LOW_LATENCY)


def test_a_regrouped_layer_is_exact_and_calls_no_compiled_gemm(low_latency):
    assert low_latency.result["regrouped"] is True
    assert low_latency.result["fp8"] == [True] * 3
    assert low_latency.result["gemms"] == 0


@pytest.mark.parametrize("case", ["no estimate", "many rows expected"])
def test_any_estimate_gives_the_same_values(low_latency, case):
    assert low_latency.result[case] == [True] * 3


@pytest.mark.parametrize("form", ["bf16", "packed"])
def test_every_form_of_a_payload_is_served(low_latency, form):
    assert low_latency.result[form] == [True] * 3


def test_the_log_says_once_what_serves_the_experts(low_latency):
    (line,) = low_latency.lines("experts served")
    assert line.endswith(
        "sglang-w4afp8: experts served by the Triton grouped GEMMs, tiles of 128 and 128 columns (the rule)"
    )
    (call,) = low_latency.lines("first low-latency call")
    assert "backend=triton" in call


@pytest.mark.parametrize("backend", ["cutlass", "auto"])
def test_the_same_layer_stays_with_cutlass_if_asked_and_where_no_table_says_otherwise(stub, backend):
    done = run(stub, LOW_LATENCY, backend)
    assert done.result["regrouped"] is False
    assert done.result["gemms"] == 2
    assert done.result["fp8"] == [True] * 3
    reason = "the rows that this server sends are not known"
    assert len(done.lines(f"experts stay with CUTLASS: {reason}")) == (backend == "auto")


@pytest.mark.parametrize(
    "capability, gpu, reason",
    [
        ((10, 0), "NVIDIA B200", r"the weights are on a GPU of capability 10\.0, not on Hopper"),
        ((9, 0), "NVIDIA H100 80GB HBM3", r"the rows that this server sends are not known \(.+\)"),
    ],
    ids=["unsupported", "nothing published"],
)
def test_by_default_such_a_server_starts_on_the_cutlass_chain_and_says_why_in_one_line(stub, capability, gpu, reason):
    """In strict mode too: which backend serves a layer is no patch that could be missing."""
    code = DEFAULT.replace("CAPABILITY", str(capability)).replace("GPU_NAME", repr(gpu)) + LOW_LATENCY
    done = run(stub, code, None, SGLANG_W4AFP8_STRICT="1")
    assert done.status == 0
    assert (done.result["first layer"], done.result["regrouped"], done.result["gemms"]) == (False, False, 2)
    assert done.result["fp8"] == [True] * 3
    (line,) = done.lines("experts ")
    assert re.fullmatch(rf"INFO:.*sglang-w4afp8: experts stay with CUTLASS: {reason}", line)
    assert done.lines("two_kernels_") == []  # nor a word about a file that most GPUs do not have
    (call,) = done.lines("first low-latency call")
    assert "backend=cutlass" in call


def test_with_no_patch_for_the_two_kernels_the_default_leaves_everything_as_it_is(stub, tmp_path):
    """A layer that the table would give to Triton: nothing is asked, and nothing is said."""
    script = AUTO.partition('result["no table"]')[0].replace("FOLDER", repr(str(tmp_path)))
    script += 'write_table((2, 1.0, 2.0), (9, 1.0, 1.5))\nresult["wins"] = regrouped(12)\n'
    assert run(stub, script, None).result == {"wins": [32, 64]}
    done = run(
        stub, script, None, SGLANG_W4AFP8_PATCHES="requant,expected_m,silu,input_scales", SGLANG_W4AFP8_STRICT="1"
    )
    assert (done.status, done.result) == (0, {"wins": None})
    assert done.lines("experts ") == []


def test_the_reference_backend_is_exact_and_calls_no_kernel(stub):
    done = run(stub, LOW_LATENCY, "reference")
    assert done.result["regrouped"] is False
    assert done.result["gemms"] == 0
    assert done.result["fp8"] == [True] * 3
    (call,) = done.lines("first low-latency call")
    assert "backend=reference" in call


# --- the weights' life ---


@pytest.fixture(scope="module")
def life(stub: Path) -> dict:
    return run(stub, LIFE).result


def test_weights_are_regrouped_in_place_and_restored_byte_for_byte(life):
    assert life["regrouped"] == [True, False, False, False, True]  # one group a row: nothing to interleave
    assert life["restored"] == [False, True, True, True, True]
    assert life["restored again"] == [True] * 4
    assert life["in place"] is True
    assert life["dummy"] == [True, True]


def test_processing_again_changes_nothing(life):
    assert life["again"] == life["regrouped anew"] == [True] * 4


def test_a_load_into_regrouped_weights_is_refused_and_changes_nothing(life):
    assert life["load"] == (
        "RuntimeError: w13_weight: its layer is regrouped for the Triton backend, so nothing can be loaded into it; start the "
        "server with SGLANG_W4AFP8_BACKEND=cutlass to update expert weights in place"
    )
    assert life["after the refusal"] == [True] * 4


def test_an_announced_reload_is_restored_before_and_regrouped_after(life):
    if not life["announced"]:
        pytest.skip("this engine announces no reload")
    assert life["reloaded"] == [True] * 4
    assert life["refused again"].startswith("RuntimeError: w2_weight: ")


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv"])
def test_a_copy_into_the_memory_of_a_regrouped_layer_is_refused_before_anything_is_written(life, name):
    assert life[f"direct {name}"].startswith(
        f"RuntimeError: experts.{name}: its layer is regrouped for the Triton backend"
    )
    assert life["direct changed"] == [False, True, True, True, True]
    assert (life["direct, others"], life["direct, others changed"]) == ("accepted", True)
    assert life["direct in the engine's layout"] == "accepted"
    assert life["direct in the engine's layout changed"] is True


def test_an_engine_whose_direct_load_cannot_be_found_is_named_once(stub):
    script = LIFE.partition("values = ")[0] + RENAMED
    done = run(stub, script)
    assert done.result["regrouped"] == [True, True]
    (line,) = done.lines("this engine has no _model_load_weights_direct")
    assert line.startswith("WARNING:") and "cannot be refused" in line


def test_a_regrouped_layer_is_not_saved(life):
    assert life["save"] == (
        "RuntimeError: experts.w13_weight: its layer is regrouped for the Triton backend, so what is saved of it could not be "
        "loaded; start the server with SGLANG_W4AFP8_BACKEND=cutlass to save or send its weights"
    )
    assert life["save"].endswith(life["export"])
    assert life["save in the engine's layout"] == "accepted" and life["export in the engine's layout"] is None


def test_the_engine_itself_cannot_load_a_layers_scales_again(life):
    assert life["scales have a loader"] == [False, False]


# --- which layers ---


def test_what_is_not_supported_stays_with_cutlass_and_is_said_once(stub):
    done = run(stub, UNSUPPORTED)
    assert set(done.result["left"].values()) == {True}
    assert done.result["supported"] is True
    reasons = {line.partition("CUTLASS: ")[2] for line in done.lines("experts stay with CUTLASS: ")}
    assert reasons == {
        "N is 192, no multiple of 128",
        "K is 576, no multiple of 128",
        "the group size is 64, not 128",
        "the weights are on a GPU of capability 10.0, not on Hopper",
        "the weights are on no GPU, not on Hopper",
        "nothing goes through DeepEP here (--moe-a2a-backend none)",
        "DeepEP runs in normal mode only",
        "--load-format sharded_state may write weights after their processing",
        "--speculative-draft-load-format remote may write weights after their processing",
        "--cpu-offload-gb 2 computes on copies of the weights",
        "--offload-group-size 4 computes on copies of the weights",
        "the engine's chain calls no cutlass_w4a8_moe_mm, so its prefill could not be served",
    }
    assert len(done.lines("experts stay with CUTLASS: ")) == len(reasons)
    assert all("WARNING" in line for line in done.lines("experts stay with CUTLASS: "))


@pytest.mark.parametrize("backend", ["auto", None])
def test_auto_and_the_default_regroup_what_the_table_shows_to_be_faster_at_the_servers_rows(stub, tmp_path, backend):
    found = run(stub, AUTO.replace("FOLDER", repr(str(tmp_path))), backend).result
    assert found == {
        "no table": None,
        "wins": [32, 64],
        "loses at some": None,
        "nobody knows": None,
        "normal prefill": [32, 64],
        "other shape": None,
        "beyond the table": None,
        "within the limit": [32, 64],
        "gains nothing": None,
    }


# --- measured at load ---


def measured(stub, tmp_path, code, requests=24, **environ):
    script = MEASURED.replace("FOLDER", repr(str(tmp_path))).replace("REQUESTS", str(requests))
    return run(stub, script + code, "auto", **environ)


@pytest.fixture(scope="module")
def at_load(stub: Path, tmp_path_factory: pytest.TempPathFactory) -> Process:
    return measured(stub, tmp_path_factory.mktemp("home"), MEASURED_LIFE)


def test_without_a_table_both_backends_are_timed_once_a_size_and_the_faster_serves(at_load):
    found = at_load.result
    assert found["wins"] is True and found["first"] == "cutlass"
    # Up to 24 requests of two experts each over three experts are 17 expected rows.
    assert found["timed"] == [[which, rows] for which in ("cutlass", "triton") for rows in (2, 5, 17)]
    assert found["second layer"] == [True, 0]
    assert found["other size"] == [True, True]
    assert found["random numbers"] is True


@pytest.mark.parametrize("case", ["gains too little", "loses at many rows", "fails in between"])
def test_the_weights_of_a_loser_are_the_engines_byte_for_byte(at_load, case):
    assert at_load.result[case] == [False, True, True, True, True]


def test_time_and_memory_are_bounded_and_cutlass_serves_what_they_do_not_allow(at_load):
    regrouped, timed, *memory = at_load.result["out of time"]
    # One count a backend; the most rows that the server sends are not among them.
    assert (regrouped, timed, memory) == (False, 2, [True] * 4)
    assert at_load.result["no memory"] == [False, 0]


def test_the_log_says_what_was_measured_and_what_was_chosen(at_load):
    (won, *_) = at_load.lines("INFO:", "N 128, K 512, 3 experts: measured in ")
    assert "us of CUTLASS and of the two kernels at 2 expected rows 2 and 1; 5 expected rows 2 and 1; 17" in won
    assert at_load.lines("experts served by", "(measured at load, tiles by the rule)")
    for reason in ("it takes ", "RuntimeError: CUDA out of memory"):
        assert at_load.lines("WARNING:", f"3 experts: not measured: {reason}")
        assert at_load.lines("experts stay with CUTLASS: measured at load at N 128, K 512, 3 experts: " + reason)
    assert at_load.lines(
        "stay with CUTLASS: measured at load at N 128, K 512, 3 experts: the two kernels were not faster"
    )
    assert at_load.lines("first low-latency call") == []  # a measurement is none


def test_a_measured_layer_computes_the_same_values(stub, tmp_path):
    done = measured(stub, tmp_path, LOW_LATENCY.replace("process(new_layer(values=values))", "auto(values=values)"))
    assert done.result["regrouped"] is True
    assert done.result["fp8"] == done.result["no estimate"] == [True] * 3
    (call,) = done.lines("first low-latency call")
    assert "backend=triton" in call and "expected_m=9" in call


def test_a_switch_turns_measuring_off(stub, tmp_path):
    code = 'result["regrouped"] = two_kernels.is_regrouped(auto())\nresult["timed"] = timed\n'
    done = measured(stub, tmp_path, code, SGLANG_W4AFP8_MEASURE="0")
    assert done.result == {"regrouped": False, "timed": []}
    reason = "no table compares the backends at N 128, K 512, 3 experts up to 17 expected rows"
    assert done.lines(
        f"INFO:sglang_w4afp8.srt.layers.moe.two_kernels:sglang-w4afp8: experts stay with CUTLASS: {reason}"
    )


def test_without_a_gpu_or_inside_a_capture_nothing_is_timed(stub, tmp_path):
    code = (
        'import importlib\nimportlib.reload(measured_choice)\nresult["regrouped"] = two_kernels.is_regrouped(auto())\n'
    )
    done = measured(stub, tmp_path, code)
    assert done.result == {"regrouped": False}
    assert done.lines("WARNING:", "not measured: the weights are on no GPU")


def test_ranks_that_share_experts_choose_alike(stub, tmp_path):
    found = two_ranks(
        lambda rank: measured(
            stub, tmp_path, MEASURED_RANK.replace("RANK", str(rank)).replace("STORE", str(tmp_path / "store"))
        )
    )
    joins = [result.pop("joins") for result in found]
    assert (
        found[0]
        == found[1]
        == {
            "both win": True,
            "one wins by much": True,
            "one loses": False,
            "one cannot measure": False,
            "one is another GPU": False,
            "one has a table": [True, True],
        }
    )
    assert joins == [False, None]  # a rank that joins others that serve waits for nobody


# --- prefill ---


def test_prefill_on_a_regrouped_layer_is_right(stub):
    found = run(stub, NORMAL).result
    assert found["routed"] == [True, True]
    assert found["normal"] is True
    assert found["normal gemms"] == 0
    assert found["first"] == found["second"] == [True, 1, True]
    assert found["padded"].startswith("ValueError: a: shape is [1, 10, 128], must be [rows, K]")


# --- ranks ---


def two_ranks(one: Callable[[int], Process]) -> list[dict]:
    """What two processes found that ran side by side."""
    with ThreadPoolExecutor(2) as pool:
        return [done.result for done in pool.map(one, range(2))]


def test_with_load_balancing_ranks_regroup_alike_or_not_at_all(stub, tmp_path):
    def one(rank: int) -> Process:
        return run(stub, RANK.replace("RANK", str(rank)).replace("STORE", str(tmp_path / "store")))

    results = two_ranks(one)
    joins = [result.pop("joins") for result in results]
    assert results == [{"same": True, "other tiles": False, "other GPU": False}] * 2
    assert joins == [None, False]  # a rank that joins others that serve has nobody to agree with


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
