"""The synthetic checkpoint: the engine loads all of it, its numbers stay in range, and nothing half done is left."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

REPO = Path(__file__).resolve().parents[4]
SCRIPT = REPO / "scripts" / "make_synthetic_checkpoint.py"


def _load_script():
    spec = importlib.util.spec_from_file_location("make_synthetic_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


msc = _load_script()

TINY = {
    "layers": 2,
    "dense_layers": 1,
    "experts": 8,
    "experts_per_token": 2,
    "expert_groups": 4,
    "expert_groups_per_token": 2,
    "hidden_size": 512,
    "intermediate_size": 384,
    "moe_intermediate_size": 256,
    "attention_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "vocab_size": 1024,
}
TINY_FLAGS = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        merged.update(load_file(file))
    return merged


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "tiny"
    msc.write_checkpoint(out, msc.ModelSpec(**TINY), shard_bytes=1 << 20, workers=2)
    return out


def test_engine_loads_every_tensor(tiny):
    """The installed engine's model class and loader take all of it: no parameter missed, no name unknown."""
    pytest.importorskip("sglang.srt.models.deepseek_v2", reason="needs the engine's models")
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_load.py")), str(tiny)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert run.returncode == 0 and len(lines) == 1, run.stderr[-3000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["mismatched"] == []
    assert [line for line in result["log"] if "not found" in line] == []
    # embed, norm, head; 12 a layer for attention and norms; dense MLP 4; router 2, experts 6, shared experts 4.
    assert result["parameters"] == 3 + 2 * 12 + 4 + 12
    assert result["scales_exact"] is True
    assert result["input_scales"] == [[2.0**-6], [2.0**-4]]


def test_names_shapes_dtypes(tiny):
    """The W4AFP8 format, spelled out: what real checkpoints of this format hold."""
    tensors = _tensors(tiny)
    layout = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    moe = "model.layers.1.mlp"
    expected = {
        "model.embed_tokens.weight": ((1024, 512), "bfloat16"),
        "lm_head.weight": ((1024, 512), "bfloat16"),
        "model.norm.weight": ((512,), "bfloat16"),
        "model.layers.0.input_layernorm.weight": ((512,), "bfloat16"),
        "model.layers.0.post_attention_layernorm.weight": ((512,), "bfloat16"),
        "model.layers.0.self_attn.q_a_proj.weight": ((256, 512), "float8_e4m3fn"),
        "model.layers.0.self_attn.q_a_proj.weight_scale_inv": ((2, 4), "float32"),
        "model.layers.0.self_attn.q_a_layernorm.weight": ((256,), "bfloat16"),
        "model.layers.0.self_attn.q_b_proj.weight": ((768, 256), "float8_e4m3fn"),
        "model.layers.0.self_attn.q_b_proj.weight_scale_inv": ((6, 2), "float32"),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ((192, 512), "float8_e4m3fn"),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": ((2, 4), "float32"),
        "model.layers.0.self_attn.kv_a_layernorm.weight": ((128,), "bfloat16"),
        "model.layers.0.self_attn.kv_b_proj.weight": ((1024, 128), "float8_e4m3fn"),
        "model.layers.0.self_attn.kv_b_proj.weight_scale_inv": ((8, 1), "float32"),
        "model.layers.0.self_attn.o_proj.weight": ((512, 512), "float8_e4m3fn"),
        "model.layers.0.self_attn.o_proj.weight_scale_inv": ((4, 4), "float32"),
        "model.layers.0.mlp.gate_proj.weight": ((384, 512), "float8_e4m3fn"),
        "model.layers.0.mlp.gate_proj.weight_scale_inv": ((3, 4), "float32"),
        "model.layers.0.mlp.down_proj.weight": ((512, 384), "float8_e4m3fn"),
        "model.layers.0.mlp.down_proj.weight_scale_inv": ((4, 3), "float32"),
        f"{moe}.gate.weight": ((8, 512), "bfloat16"),
        f"{moe}.gate.e_score_correction_bias": ((8,), "float32"),
        f"{moe}.shared_experts.up_proj.weight": ((256, 512), "float8_e4m3fn"),
        f"{moe}.shared_experts.up_proj.weight_scale_inv": ((2, 4), "float32"),
        f"{moe}.experts.7.gate_proj.weight": ((256, 256), "int8"),
        f"{moe}.experts.7.gate_proj.weight_scale_inv": ((256, 4), "float32"),
        f"{moe}.experts.7.up_proj.weight": ((256, 256), "int8"),
        f"{moe}.experts.7.up_proj.weight_scale_inv": ((256, 4), "float32"),
        f"{moe}.experts.7.down_proj.weight": ((512, 128), "int8"),
        f"{moe}.experts.7.down_proj.weight_scale_inv": ((512, 2), "float32"),
        f"{moe}.experts.7.w1.input_scale": ((1,), "bfloat16"),
        f"{moe}.experts.7.w2.input_scale": ((1,), "bfloat16"),
        f"{moe}.experts.7.w3.input_scale": ((1,), "bfloat16"),
    }
    assert {name: layout.get(name) for name in expected} == expected
    # 3 global; 14 of attention and norms a layer; dense MLP 6; router 2, shared 6, 9 an expert.
    assert len(layout) == 3 + 2 * 14 + 6 + 2 + 6 + 9 * 8


def test_config_holds_the_sizes(tmp_path):
    out = tmp_path / "model"
    assert msc.main([str(out), "--config-only", "--layers", "5", "--experts", "64"]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "synthetic_checkpoint.json"]
    config = json.loads((out / "config.json").read_text())
    picked = {key: config[key] for key in ("architectures", "num_hidden_layers", "n_routed_experts", "hidden_size")}
    assert picked == {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 5,
        "n_routed_experts": 64,
        "hidden_size": 7168,
    }
    assert (config["first_k_dense_replace"], config["num_experts_per_tok"], config["n_group"]) == (1, 8, 8)
    assert config["quantization_config"] == {
        "quant_method": "w4afp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }


def test_full_size_is_what_deepseek_v3_weighs():
    """One expert of DeepSeek-V3: 3 x 7168 x 2048 / 2 bytes of int4, and 3 x 7168 x 2048 / 128 fp32 scales."""
    names = {t.name: t.nbytes for t in msc.tensor_specs(msc.ModelSpec(layers=2, dense_layers=1))}
    expert = sum(size for name, size in names.items() if ".experts.255." in name)
    assert expert == 3 * 7168 * 2048 // 2 + 3 * 7168 * 2048 // 128 * 4 + 3 * 2


def test_int4_mean_is_zero_and_minus_eight_is_kept():
    """Over all 256 bytes: code 0xF becomes 7, every other code stays."""
    every_byte = np.arange(256, dtype=np.uint8)
    fake = SimpleNamespace(integers=lambda low, high, size, dtype: every_byte.view(np.uint64).copy())
    out = np.empty(256, dtype=np.int8)
    msc._Init.int4(out, fake)

    def code(nibble: int) -> int:
        return 0x7 if nibble == 0xF else nibble

    assert out.view(np.uint8).tolist() == [code(b >> 4) << 4 | code(b & 0xF) for b in range(256)]
    signed = [code(n) - 16 if code(n) > 7 else code(n) for n in range(16)]
    assert sum(signed) == 0 and min(signed) == -8 and max(signed) == 7
    assert np.mean(np.square(signed)) == msc._INT4_RMS**2 == pytest.approx(24.5)


def test_bytes_depend_on_seed_and_name_alone(tmp_path, tiny):
    spec = msc.ModelSpec(**TINY)
    msc.write_checkpoint(tmp_path / "one", spec, shard_bytes=1 << 30, workers=1)
    msc.write_checkpoint(tmp_path / "other", spec, seed=1, workers=1)
    several, one, other = _tensors(tiny), _tensors(tmp_path / "one"), _tensors(tmp_path / "other")
    assert several.keys() == one.keys()
    assert all(torch.equal(several[name].view(torch.uint8), one[name].view(torch.uint8)) for name in one)
    constant = [name for name in one if torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))]
    assert constant and all(name.endswith("input_scale") for name in constant)
    gate, up = (one[f"model.layers.1.mlp.experts.0.{n}_proj.weight"] for n in ("gate", "up"))
    assert not torch.equal(gate, up)


def test_index_names_the_file_of_every_tensor(tiny):
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    found = {}
    for file in tiny.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found.update(dict.fromkeys(handle.keys(), file.name))
    assert index["weight_map"] == found
    assert len(set(found.values())) > 1
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in _tensors(tiny).values())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 500}, "hidden_size is 500, must be a multiple of 128"),
        ({"moe_intermediate_size": 100}, "moe_intermediate_size is 100, must be a multiple of 128"),
        ({"experts": 10}, "expert_groups is 4, must divide experts"),
        ({"dense_layers": 3}, "dense_layers is 3, must be at most layers"),
        ({"experts_per_token": 5}, "experts_per_token is 5, must be at most 4"),
        ({"expert_groups_per_token": 5}, "expert_groups_per_token is 5, must be at most"),
        ({"layers": 0}, "layers is 0, must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_served_are_refused(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        msc.ModelSpec(**{**TINY, **change})


def test_nothing_is_overwritten(tmp_path, capsys):
    out = tmp_path / "model"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    assert msc.main([str(out), "--quiet", *TINY_FLAGS]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_link_to_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    assert msc.main([str(tmp_path / "link"), "--config-only", *TINY_FLAGS]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "model" / "config.json").is_file()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]
    # Full now: refused, through the link as well.
    assert msc.main([str(tmp_path / "link"), "--config-only", *TINY_FLAGS]) == 2


@pytest.mark.parametrize("workers", ["0", "-1", "many"])
def test_a_number_of_threads_that_is_none_is_refused_by_its_option(tmp_path, capsys, workers):
    with pytest.raises(SystemExit, match="2"):
        msc.main([str(tmp_path / "model"), f"--workers={workers}", *TINY_FLAGS])
    assert f"argument --workers: is '{workers}', must be a positive integer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_seen_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=70 << 20))
    with pytest.raises(OSError) as caught:
        msc.write_checkpoint(tmp_path / "model", msc.ModelSpec(**TINY))
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [RuntimeError("disk on fire"), KeyboardInterrupt()])
def test_nothing_half_done_is_left(tmp_path, monkeypatch, failure):
    import safetensors.torch

    real, calls = safetensors.torch.save_file, []

    def fail_on_second(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            raise failure
        real(tensors, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", fail_on_second)
    with pytest.raises(type(failure)):
        msc.write_checkpoint(tmp_path / "model", msc.ModelSpec(**TINY), shard_bytes=1 << 20, workers=1)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_removes_the_partial_directory(tmp_path):
    """Large enough to be interrupted: a gigabyte of embeddings."""
    out = tmp_path / "model"
    flags = [*TINY_FLAGS, "--vocab-size", str(1 << 19), "--shard-gib", "0.001", "--workers", "1", "--quiet"]
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(out), *flags])
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".model.partial-*/config.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert list(tmp_path.iterdir()) == []


def _reference_model(path: Path) -> torch.nn.Module:
    """transformers' own DeepSeek-V3 with the checkpoint's weights, dequantised here from the format's definition."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config")
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).float().eval()
    tensors = _tensors(path)

    def dequantise(name: str) -> torch.Tensor:
        weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
        if weight.dtype == torch.int8:  # low nibble first
            packed = weight.view(torch.uint8).int()
            nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(weight.shape[0], -1)
            return (nibbles - 16 * (nibbles > 7)).float() * scale.repeat_interleave(128, dim=1)
        blocks = scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        return weight.float() * blocks[: weight.shape[0], : weight.shape[1]]

    for name, target in [*model.named_parameters(), *model.named_buffers()]:
        if name in tensors:
            quantised = tensors[name].dtype == torch.float8_e4m3fn
            value = dequantise(name.removesuffix(".weight")) if quantised else tensors[name].float()
        elif ".experts." in name:
            prefix, fused = name.rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
            experts = range(config["n_routed_experts"])
            value = torch.stack([torch.cat([dequantise(f"{prefix}.{e}.{p}") for p in parts]) for e in experts])
        elif "inv_freq" in name:
            continue
        else:
            raise KeyError(name)
        assert target.shape == value.shape, name
        target.data.copy_(value)
    return model


def test_activations_stay_in_range_and_tokens_are_diverse(tmp_path):
    """Run by an independent implementation: no layer drifts, and greedy tokens do not fall into a loop."""
    pytest.importorskip("transformers.models.deepseek_v3", reason="needs transformers' DeepSeek-V3")
    spec = msc.ModelSpec(**{**TINY, "layers": 5, "experts": 16, "experts_per_token": 4, "vocab_size": 4096})
    msc.write_checkpoint(tmp_path / "model", spec)
    model = _reference_model(tmp_path / "model")
    rms: list[float] = []
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_hook(
                lambda m, inputs, out: rms.append(
                    (out[0] if isinstance(out, tuple) else out).pow(2).mean().sqrt().item()
                )
            )
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers[spec.dense_layers :]:
        layer.mlp.gate.register_forward_hook(lambda m, inputs, out: chosen.append(out[-1]))  # expert ids per token
    prompts = torch.randint(2, spec.vocab_size, (4, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(prompts).logits[:, -1]
    # What every attention and MLP block adds to the residual stream, whose embeddings have RMS one.
    assert len(rms) == 10 and min(rms) > 0.3 and max(rms) < 3.0, rms
    assert 1.0 < logits.std().item() < 3.0
    # Tokens spread over the experts, four each: every expert has some, none has all.
    counts = torch.stack([torch.bincount(ids.flatten(), minlength=spec.experts) for ids in chosen])
    assert counts.shape == (spec.moe_layers, 16) and counts.sum(dim=1).tolist() == [4 * 160] * spec.moe_layers
    assert counts.min().item() > 0 and counts.max().item() < 160
    with torch.no_grad():
        out = model.generate(prompts, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = out[:, 40:]
    assert min(len(set(row.tolist())) for row in tokens) > 24
    assert len(set(tokens.flatten().tolist())) > 100


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
