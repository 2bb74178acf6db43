"""The installed engine's ``W4AFp8MoEMethod.apply_deepep_ll`` with the plugin in it, on the CPU.

Every arm is a fresh process: the engine's own loader, Triton's interpreter, a payload laid out as DeepEP lays it out, and in
place of ``sgl_kernel``'s grouped GEMM a double that dequantises and reads its sizes as the compiled dispatch does. What comes
out is compared with a float64 reference of the layer that knows nothing of any of this.
"""

import sys
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from engine_process import EVERY_PATCH, SGL_KERNEL_DOUBLE, run_script, write

register_cpu_ci(est_time=120, suite="base-a-test-cpu")

LAYER = """
import hashlib, sys
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

import sglang.kernels.ops.moe.ep_moe_kernels as engine_kernels
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLDispatchOutput
from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config, W4AFp8MoEMethod
from sglang_w4afp8 import lifecycle
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as our_kernels
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import pack_int4
import sglang.srt.layers.moe.cutlass_w4a8_moe as engine_chain
from sgl_kernel import cutlass_w4a8_moe_mm, double

# The engine asks the GPU for its warp width, and imports the GEMM only beside one.
engine_kernels.requant_warp_size = lambda device: 32
engine_chain.cutlass_w4a8_moe_mm = cutlass_w4a8_moe_mm

E, M, K, N, TOPK = 3, PADDED, 512, 512, 2
ROWS, EXPECTED_M = [5, 0, 2], 3
generator = torch.Generator().manual_seed(0)

method = W4AFp8MoEMethod(W4AFp8Config())
layer = torch.nn.Module()
layer.quant_method = method
method.create_weights(layer, E, K, N, torch.bfloat16, weight_loader=lambda *args, **kwargs: None)
w13 = torch.randint(-8, 8, (E, 2 * N, K), generator=generator, dtype=torch.int8)
w2 = torch.randint(-8, 8, (E, K, N), generator=generator, dtype=torch.int8)
s13 = 2.0 ** torch.randint(-7, -4, (E, 2 * N, K // 128), generator=generator)
s2 = 2.0 ** torch.randint(-7, -4, (E, K, N // 128), generator=generator)
layer.w13_weight.data.copy_(pack_int4(w13))
layer.w2_weight.data.copy_(pack_int4(w2))
layer.w13_weight_scale_inv.data.copy_(s13)
layer.w2_weight_scale_inv.data.copy_(s2)
layer.w13_input_scale.data.fill_(0.5)
layer.w2_input_scale.data.fill_(0.125)
method.process_weights_after_loading(layer)

masked_m = torch.tensor(ROWS, dtype=torch.int32)
live = torch.arange(M)[None, :] < masked_m[:, None]
values = torch.randint(-8, 9, (E, M, K), generator=generator).float()
scales = 2.0 ** torch.randint(-2, 2, (E, M, K // 128), generator=generator)
x = values.to(torch.float8_e4m3fn)
# Padding is NaN in payload and scales: one read of it into a live row shows.
x.view(torch.uint8)[~live] = 0x7F
x_scale = scales.clone()
x_scale[~live] = float("nan")
x_scale = x_scale.transpose(1, 2).contiguous().transpose(1, 2)

seen = {"requant": [], "silu": []}
for name in seen:
    choose = getattr(our_kernels, f"_{name}_launch")
    def record(*args, name=name, choose=choose, **kwargs):
        seen[name].append(args[2])
        return choose(*args, **kwargs)
    setattr(our_kernels, f"_{name}_launch", record)

def dispatch(payload, payload_scale):
    topk = torch.zeros((4, TOPK), dtype=torch.int64)
    return DeepEPLLDispatchOutput(payload, payload_scale, topk, topk.float(), masked_m, EXPECTED_M)

def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

def live_digest(payload, payload_scale):
    # What the layer makes of another form of the same payload: the bytes of its live rows, or why it made none.
    try:
        return digest(method.apply_deepep_ll(layer, dispatch(payload, payload_scale))[live])
    except Exception as error:
        return f"{type(error).__name__}: {error}"

output = method.apply_deepep_ll(layer, dispatch(x, x_scale))
calls, double.calls = double.calls, []

# The same values without scales (BF16, exact here), and with their scales as packed exponents.
bf16 = (values.unflatten(2, (-1, 128)) * scales[:, :, :, None]).flatten(2).to(torch.bfloat16)
bf16[~live] = float("nan")
exponents = (scales.log2().to(torch.int32) + 127) << torch.tensor([0, 8, 16, 24])
packed = exponents.sum(2, keepdim=True, dtype=torch.int32)
packed[~live] = -1

forms = {}
if FORMS:
    forms = {
        "bf16": live_digest(bf16, None),
        "packed": live_digest(x, packed),
        "packed column-major": live_digest(x, packed.transpose(1, 2).contiguous().transpose(1, 2)),
        "fp8 without scales": live_digest(x, None),
    }
# Which forms another launch was chosen for is not what `seen` is about.
seen = {name: found[:1] for name, found in seen.items()}

# The layer in float64, straight from the values above.
error = norm = 0.0
for expert, rows in enumerate(ROWS):
    dequantized = (values[expert, :rows].double().unflatten(1, (-1, 128)) * scales[expert, :rows, :, None]).flatten(1)
    weight13 = (w13[expert].double().unflatten(1, (-1, 128)) * s13[expert][:, :, None].double()).flatten(1)
    weight2 = (w2[expert].double().unflatten(1, (-1, 128)) * s2[expert][:, :, None].double()).flatten(1)
    gate, up = (dequantized @ weight13.T).chunk(2, dim=1)
    expected = (gate * torch.sigmoid(gate) * up).clamp(-448 * 0.125, 448 * 0.125) @ weight2.T
    error += float((output[expert, :rows].double() - expected).square().sum())
    norm += float(expected.square().sum())

import types

def ours(value):
    return isinstance(value, types.FunctionType) and str(value.__module__).startswith("sglang_w4afp8.")

def hooked_by_us(value):
    cells = value.__closure__ or () if isinstance(value, types.FunctionType) else ()
    return any(ours(cell.cell_contents) for cell in cells if cell != types.CellType())

touched = set()
for module_name, module in list(sys.modules.items()):
    if not module_name.startswith("sglang."):
        continue
    for name, value in list(vars(module).items()):
        if hooked_by_us(value):
            touched.add(f"{module_name}.{name}")
        elif isinstance(value, type) and value.__module__ == module_name:
            members = [attribute for attribute, member in list(vars(value).items()) if hooked_by_us(member)]
            touched.update(f"{module_name}.{name}.{attribute}" for attribute in members)
# Where the code of every function of the engine stands: what we hooked stands in the engine's hook registry.
code = {}
for module_name, module in list(sys.modules.items()):
    if module_name.startswith("sglang."):
        owners = [v for v in list(vars(module).values()) if isinstance(v, type) and v.__module__ == module_name]
        for owner in (module, *owners):
            for name, value in list(vars(owner).items()):
                # Generated methods (dataclasses, say) and this script's stand-ins have no file.
                if isinstance(value, types.FunctionType) and value.__code__.co_filename != "<string>":
                    where = value.__code__
                    path = where.co_filename.rpartition("sglang/")[2]
                    code[f"{getattr(owner, '__qualname__', '')} {module_name} {name}"] = f"{path}:{where.co_firstlineno}"

# A dense layer of the same model, as the engine runs it for one that is not quantised.
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
dense = torch.nn.Module()
dense.weight = torch.nn.Parameter(w13[0].to(torch.bfloat16), requires_grad=False)
dense_output = UnquantizedLinearMethod().apply(dense, bf16[live])

result = {
    "error": (error / norm) ** 0.5,
    "digest": digest(output[live]),
    "forms": forms,
    "code": code,
    "dense": digest(dense_output),
    "seen": seen,
    "live": list(lifecycle.live_patches()),
    "gemms": [[call.n, call.k] for call in calls],
    "touched": sorted(touched),
}
"""

# fp8 rounds the input of the second GEMM to 4 significant bits (2^-4 at most, uniformly spread) and bf16 its output.
TOLERANCE = 0.04


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stub"), {"sgl_kernel/__init__.py": SGL_KERNEL_DOUBLE})


def run_layer(stub: Path, padded: int = 512, forms: bool = False, **environ: str) -> dict:
    script = LAYER.replace("PADDED", str(padded)).replace("FORMS", str(forms))
    return run_script(script, [stub], TRITON_INTERPRET="1", **environ).result


@pytest.fixture(scope="module")
def ours(stub: Path) -> dict:
    return run_layer(stub, forms=True)


@pytest.fixture(scope="module")
def engine(stub: Path) -> dict:
    return run_layer(stub, forms=True, SGLANG_W4AFP8_DISABLE="1")


def test_the_layer_is_right_and_every_patch_is_live(ours):
    assert ours["live"] == EVERY_PATCH
    assert ours["error"] < TOLERANCE


def test_the_dispatchers_estimate_reaches_every_launch(ours):
    assert ours["seen"] == {"requant": [3], "silu": [3]}


def test_the_grouped_gemm_reads_the_real_sizes_with_ours_and_padded_rows_with_the_engines(ours, engine):
    assert ours["gemms"] == [[1024, 512], [512, 512]]
    assert engine["gemms"] == [[512, 512], [512, 512]]


def test_the_engine_is_itself_when_the_plugin_is_disabled(engine):
    assert engine["live"] == []
    assert engine["touched"] == []
    assert engine["seen"] == {"requant": [], "silu": []}
    assert engine["error"] < TOLERANCE


def test_bytes_equal_the_engines_where_it_is_right(ours, engine):
    assert ours["digest"] == engine["digest"]


@pytest.mark.parametrize("patches", ["requant", "requant,expected_m", "requant,expected_m,problem_sizes"])
def test_each_step_can_be_ours_alone(stub, engine, patches):
    arm = run_layer(stub, SGLANG_W4AFP8_PATCHES=patches)
    assert arm["live"] == patches.split(",")
    assert arm["seen"] == {"requant": [3], "silu": []}
    assert arm["digest"] == engine["digest"]


def test_bf16_dispatch_needs_no_other_step_of_ours(stub, engine):
    arm = run_layer(stub, forms=True, SGLANG_W4AFP8_PATCHES="expected_m,bf16_dispatch")
    assert arm["forms"]["bf16"] == arm["digest"] == engine["digest"]


def test_bf16_dispatch_is_refused_by_name_where_its_patch_is_off(stub):
    arm = run_layer(stub, forms=True, SGLANG_W4AFP8_PATCHES="expected_m")
    assert arm["forms"]["bf16"] == (
        "RuntimeError: dispatch_output.hidden_states_scale: is None, must be the scales of the payload, which is "
        "torch.bfloat16: without them only a BF16 payload can be served, by the patch bf16_dispatch"
    )


def test_padded_rows_that_are_no_multiple_of_512_are_right_with_ours_only(stub):
    assert run_layer(stub, padded=128)["error"] < TOLERANCE
    assert run_layer(stub, padded=128, SGLANG_W4AFP8_DISABLE="1")["error"] > 0.1


def test_nothing_but_the_ledgers_targets_is_touched(ours):
    kernels = ("fp8_per_token_to_per_tensor_quant_triton", "silu_and_mul_masked_post_per_tensor_quant_fwd")
    modules = ("sglang.kernels.ops.moe.ep_moe_kernels", "sglang.srt.layers.moe.cutlass_w4a8_moe")
    assert ours["touched"] == sorted(
        [f"{module}.{name}" for module in modules for name in kernels]
        + ["sglang.srt.layers.moe.cutlass_w4a8_moe.cutlass_w4a8_moe_deepep_ll"]
        + [f"sglang.srt.layers.quantization.w4afp8.W4AFp8MoEMethod.{name}" for name in METHODS]
    )


METHODS = ("apply_deepep_ll", "apply_deepep_normal", "create_weights", "process_weights_after_loading")


def test_every_other_function_of_the_engine_is_the_engines_own_code(ours, engine):
    common = ours["code"].keys() & engine["code"].keys()
    # Linear, fp8, wna16 and unquantised layers are among them.
    for name in ("Fp8LinearMethod", "UnquantizedLinearMethod", "Fp8MoEMethod", "MoeWNA16Method"):
        assert any(key.startswith(f"{name} ") for key in common)
    changed = {key.rpartition(" ")[2] for key in common if ours["code"][key] != engine["code"][key]}
    assert changed == {
        *METHODS,
        "fp8_per_token_to_per_tensor_quant_triton",
        "silu_and_mul_masked_post_per_tensor_quant_fwd",
        "cutlass_w4a8_moe_deepep_ll",
    }


def test_a_dense_layer_beside_it_is_bit_for_bit_the_engines(ours, engine):
    assert ours["dense"] == engine["dense"]


@pytest.mark.parametrize("form", ["bf16", "packed", "packed column-major"])
def test_every_form_of_a_payload_gives_the_same_bytes_where_the_engine_serves_none(ours, engine, form):
    assert ours["forms"][form] == ours["digest"]
    assert engine["forms"][form] != engine["digest"]


def test_an_fp8_payload_without_scales_is_refused_by_name(ours):
    assert ours["forms"]["fp8 without scales"].startswith(
        "RuntimeError: dispatch_output.hidden_states_scale: is None, must be the scales of the payload, which is "
        "torch.float8_e4m3fn"
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
