"""The hooks around the installed engine's ``W4AFp8MoEMethod``, on the CPU: making, loading and prefilling a layer.

The engine's own loader and its own class run in fresh processes. What the engine does by itself is asked of the method under
our hook (``__wrapped__``), so each fault is seen without us and gone with us in one process.
"""

import sys
import threading
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from engine_process import run_script, write

register_cpu_ci(est_time=45, suite="base-a-test-cpu")

SGL_KERNEL = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return print
"""

LAYER = """
import torch
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config, W4AFp8MoEMethod
from sglang_w4afp8 import engine_state

E, K, N = 3, 512, 256
method = W4AFp8MoEMethod(W4AFp8Config())

def new_layer(number=7):
    layer = torch.nn.Module()
    layer.layer_id, layer.quant_method = number, method
    method.create_weights(layer, E, K, N, torch.bfloat16, weight_loader=lambda *args, **kwargs: None)
    return layer

def outcome(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"

def ours(name):
    return lambda *args: getattr(method, name)(*args)

def engines(name):
    return lambda *args: getattr(W4AFp8MoEMethod, name).__wrapped__(method, *args)

result = {}
"""

SCALES = """
CASES = {
    "zero": 0.0, "negative": -0.5, "nan": float("nan"), "infinite": float("inf"), "denormal": 2.0**-127,
    "smallest": 2.0**-126, "usual": 0.0371,
}
for arm, process in (("ours", ours), ("engine", engines)):
    process = process("process_weights_after_loading")
    for name in ("w13_input_scale", "w2_input_scale"):
        for case, value in CASES.items():
            layer = new_layer()
            getattr(layer, name).data.fill_(value)
            result[f"{arm} {name} {case}"] = outcome(process, layer)
layer = new_layer()
# One expert's scale may be anything below the largest: dummy weights are random, and an expert may have seen no token.
layer.w2_input_scale.data.copy_(torch.tensor([-1.0, 0.25, 0.0]))
for load in ("first load", "second load"):
    result[load] = [outcome(ours("process_weights_after_loading"), layer), layer.w2_input_scale.tolist()]
"""

ACTIVATION = """
import logging
from sglang_w4afp8.srt.layers.quantization import w4afp8

said = logging.Handler()
warned = []
said.emit = lambda record: warned.append(record.getMessage())
logging.getLogger(w4afp8.__name__).addHandler(said)
plain = dict(activation="silu", is_gated=True, gemm1_alpha=None, gemm1_clamp_limit=None, routed_scaling_factor=2.5)
result["activation"] = {}
for case, asked in {"plain": {}, "clamped": {"swiglu_limit": 7.0}, "situ": {"activation": "situ", "gemm1_alpha": 1.7}}.items():
    method.moe_runner_config = SimpleNamespace(**(plain | asked))
    for _ in range(2):
        layer = new_layer()
        result[f"activation {case}"] = outcome(ours("process_weights_after_loading"), layer)
    result["activation"][case] = list(warned)
    warned.clear()
del method.moe_runner_config
"""

NORMAL = """
import sglang.srt.layers.moe.cutlass_w4a8_moe as chain
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPNormalDispatchOutput

received = []
def record(hidden_states, *args, **kwargs):
    received.append(hidden_states)
    return hidden_states
chain.cutlass_w4a8_moe_deepep_normal = record

layer = new_layer()
method.process_weights_after_loading(layer)
T, GROUPS = 5, K // 128
generator = torch.Generator().manual_seed(3)
values = torch.randint(-8, 9, (T, K), generator=generator).float()
exponents = torch.randint(-3, 4, (T, GROUPS), generator=generator)
scales = 2.0**exponents
packed = sum((127 + exponents[:, byte]) << (8 * byte) for byte in range(4)).to(torch.int32)[:, None]
wanted = (values.unflatten(1, (-1, 128)) * scales[:, :, None]).flatten(1)
x = values.to(torch.float8_e4m3fn)

def output(hidden_states, hidden_scales):
    topk = torch.zeros((len(x), 2), dtype=torch.int64)
    return DeepEPNormalDispatchOutput(hidden_states, hidden_scales, topk, topk.float(), [T, 0, 0])

CASES = {
    "beside": output(x, scales),
    "column-major": output(x, scales.t().contiguous().t()),
    "in a tuple": output((x, scales), None),
    "packed": output(x, packed),
    "bf16": output(wanted.to(torch.bfloat16), None),
    "no tokens": output(x[:0], scales[:0]),
    "no scales": output(x, None),
    "wrong scales": output(x, scales[:, :2]),
    "half scales": output(x, scales.half()),
}
for arm, apply in (("ours", ours), ("engine", engines)):
    for case, dispatch in CASES.items():
        received.clear()
        returned = []
        found = outcome(lambda: returned.append(apply("apply_deepep_normal")(layer, dispatch)))
        right = [t.dtype == torch.bfloat16 and torch.equal(t.float(), wanted[: len(t)]) for t in received + returned]
        result[f"normal {arm} {case}"] = [found, len(received), right]
"""

# Published as a server does where this engine has the means; else the settings are handed in.
CAP = """
from sglang_w4afp8.srt.layers.moe import dispatch_cap

def made(**arguments):
    dispatch_cap._checked = False
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
    from sglang.srt.runtime_context import get_context
    graphs = CudaGraphConfig(decode=PhaseConfig(backend="full", max_bs=64, bs=[1, 8, 64]))
    with get_context().override_server_args(cuda_graph_config=graphs, **arguments):
        return [outcome(new_layer), outcome(new_layer)]

try:
    from sglang.srt.runtime_context import RuntimeContext
    publishes = hasattr(RuntimeContext, "override_server_args")
except ImportError:
    publishes = False
if publishes:
    deepep = {"moe_a2a_backend": "deepep", "deepep_mode": "auto"}
    result["cap fits"] = made(**deepep)
    result["cap draft"] = made(**deepep, speculative_num_draft_tokens=4)
    result["cap other backend"] = made(speculative_num_draft_tokens=4)

    import logging
    from sglang_w4afp8.srt.layers.moe import decode_graphs

    said = logging.Handler()
    said.emit = lambda record: result["graphs"].append(record.getMessage())
    logging.getLogger(decode_graphs.__name__).addHandler(said)
    result["graphs"] = []
    decode_graphs._checked = False
    decode_graphs.is_affected = lambda version: True  # as if this engine had the fault
    engine_state.expert_group = lambda: SimpleNamespace(world_size=1)
    made(**deepep)
else:
    result["cap fits"] = None
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stub"), {"sgl_kernel/__init__.py": SGL_KERNEL})


@pytest.fixture(scope="module")
def found(stub: Path) -> dict:
    return run_script(LAYER + SCALES + ACTIVATION + NORMAL + CAP, [stub]).result


# --- the activation ---


def test_a_model_with_another_activation_is_served_and_said_once_to_be_wrong(found):
    said = found["activation"]
    assert [found[f"activation {case}"] for case in said] == ["accepted"] * 3
    assert said["plain"] == []
    ((clamped,), (situ,)) = said["clamped"], said["situ"]
    assert "have swiglu_limit=7.0, and" in clamped and "WRONG RESULTS" in clamped
    assert "have activation='situ', gemm1_alpha=1.7, and" in situ


# --- input scales ---

UNUSABLE = [
    ("zero", "0.0"),
    ("negative", "-0.5"),
    ("nan", "nan"),
    ("infinite", "inf"),
    ("denormal", "5.877471754111438e-39"),
]


@pytest.mark.parametrize("name", ["w13_input_scale", "w2_input_scale"])
@pytest.mark.parametrize("case, value", UNUSABLE)
def test_a_scale_that_cannot_be_divided_by_is_refused_at_load(found, name, case, value):
    assert found[f"engine {name} {case}"] == "accepted"
    assert found[f"ours {name} {case}"] == (
        f"ValueError: {name}: the largest of layer 7 is {value}, must be positive, finite and at least 1.175e-38: "
        "activations are divided by it. The checkpoint's scales are wrong or were not loaded"
    )


@pytest.mark.parametrize("name", ["w13_input_scale", "w2_input_scale"])
def test_a_usable_scale_is_what_the_engine_makes_of_it(found, name):
    assert found[f"ours {name} smallest"] == found[f"ours {name} usual"] == "accepted"
    assert found["first load"] == found["second load"] == ["accepted", [0.25]]


# --- input scales over ranks ---

RANK = """
import torch.distributed as dist
from sglang.srt.distributed import parallel_state

rank = RANK
dist.init_process_group("gloo", init_method="file://STORE", rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
parallel_state.get_moe_ep_group = lambda: group
settings = {"enable_eplb": False}
engine_state.setting = settings.get

def loaded(process, w13, w2):
    layer = new_layer(11)
    layer.w13_input_scale.data.copy_(torch.tensor(w13)[:, None].expand(E, 2))
    layer.w2_input_scale.data.copy_(torch.tensor(w2))
    found = outcome(process, layer)
    return [found, layer.w13_input_scale.tolist(), layer.w2_input_scale.tolist()]

SCALES = ([0.25, 0.5, 0.125], [1.0, 2.0, 0.5]), ([0.25, 0.0625, 0.25], [4.0, 1.0, 8.0])
w13, w2 = SCALES[rank]
process = ours("process_weights_after_loading")
result["off"] = loaded(process, w13, w2)
result["engine"] = loaded(engines("process_weights_after_loading"), w13, w2)
settings["enable_eplb"] = True
result["on"] = loaded(process, w13, w2)
# Rank 1 alone is at fault; rank 0 must neither wait for ever nor serve.
result["faulty"] = loaded(process, w13, [float("nan")] * E if rank else w2)
result["after"] = loaded(process, w13, w2)
settings["is_ep_joiner"] = True
# Alone: a rank that joins has nobody to wait for.
result["joins"] = loaded(process, w13, w2) if rank else None
settings["is_ep_joiner"] = False
group.world_size = 1
result["one rank"] = loaded(process, w13, w2)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(stub: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    store = tmp_path_factory.mktemp("store") / "store"
    results: list[dict] = [{}, {}]

    def run(rank: int) -> None:
        code = LAYER + RANK.replace("RANK", str(rank)).replace("STORE", str(store))
        results[rank] = run_script(code, [stub]).result

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


OWN = [["accepted", [0.5], [2.0]], ["accepted", [0.25], [8.0]]]


def test_with_load_balancing_every_rank_has_the_largest_scale(ranks):
    assert [rank["on"] for rank in ranks] == [["accepted", [0.5], [8.0]]] * 2
    assert [rank["after"] for rank in ranks] == [["accepted", [0.5], [8.0]]] * 2


def test_a_rank_that_joins_others_waits_for_none_and_keeps_its_own_scale(ranks):
    assert ranks[1]["joins"] == OWN[1]


def test_the_engine_leaves_each_rank_its_own_scale_and_so_do_we_without_load_balancing(ranks):
    assert [rank["engine"] for rank in ranks] == OWN
    assert [rank["off"] for rank in ranks] == OWN
    assert [rank["one rank"] for rank in ranks] == OWN


def test_one_ranks_faulty_scale_stops_every_rank(ranks):
    here, there = (rank["faulty"][0] for rank in ranks)
    assert here == "ValueError: w13_input_scale and w2_input_scale: layer 11 has a faulty one on another rank"
    assert there.startswith("ValueError: w2_input_scale: the largest of layer 11 is nan, must be positive")


# --- normal (prefill) dispatch ---


@pytest.mark.parametrize("case", ["beside", "column-major", "in a tuple", "packed"])
def test_an_fp8_prefill_payload_reaches_the_engine_as_bf16_with_its_scales_applied(found, case):
    assert found[f"normal ours {case}"] == ["accepted", 1, [True, True]]
    # Up to 0.5.17 it computes on the raw codes, later it refuses.
    outcome, calls, right = found[f"normal engine {case}"]
    assert "RuntimeError" in outcome or right == [False, False]


def test_a_rank_without_tokens_returns_bf16(found):
    assert found["normal ours no tokens"] == ["accepted", 0, [True]]
    outcome, _, right = found["normal engine no tokens"]
    assert "RuntimeError" in outcome or right == [False]


def test_a_bf16_prefill_payload_is_the_engines(found):
    assert found["normal ours bf16"] == found["normal engine bf16"] == ["accepted", 1, [True, True]]


@pytest.mark.parametrize(
    "case, message",
    [
        ("no scales", "RuntimeError: dispatch_output.hidden_states_scale: is None, must be the scales of the payload"),
        ("wrong scales", "ValueError: hidden_states_scale: shape is [5, 2], must be [5, 4] for a payload [5, 512]"),
        (
            "half scales",
            "TypeError: hidden_states_scale: dtype is torch.float16, must be torch.float32, or torch.int32",
        ),
    ],
)
def test_prefill_scales_that_do_not_belong_are_refused_by_name(found, case, message):
    outcome, calls, _ = found[f"normal ours {case}"]
    assert outcome.startswith(message)
    assert calls == 0


# --- the dispatcher's cap ---


def test_the_cap_is_checked_when_the_first_layer_is_made(found):
    if found["cap fits"] is None:
        pytest.skip("this engine has no means to publish arguments for a test")
    assert found["cap fits"] == found["cap other backend"] == ["accepted", "accepted"]
    refused, again = found["cap draft"]
    assert refused == (
        "ValueError: SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK: is 128, must be at least 256: CUDA graphs are captured "
        "for up to 64 requests with 4 tokens each; set SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256, or capture up to "
        "32 requests"
    )
    assert again == "accepted"  # said once per process


def test_graphs_that_drop_tokens_are_said_when_the_first_layer_is_made(found):
    if found["cap fits"] is None:
        pytest.skip("this engine has no means to publish arguments for a test")
    (warning,) = found["graphs"]
    assert "with one expert-parallel rank gives WRONG RESULTS" in warning and "only the first 1 tokens" in warning


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
