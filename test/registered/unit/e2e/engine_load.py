"""Load a checkpoint with the installed engine's own model class and loader, on a CPU, and compare every parameter.

Run as a process of its own: the engine publishes process-wide state. Prints one JSON line: ``engine`` (version),
``parameters`` (count), ``mismatched`` (names whose bytes are not the checkpoint's), ``log`` (what the loader complained
about), ``input_scales`` and ``scales_exact`` (after the engine's own post-processing of the first expert layer).
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _build(path: str) -> tuple[torch.nn.Module, object, object]:
    import sglang.srt.models.deepseek_v2 as deepseek_v2
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import DefaultModelLoader, _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=path,
        device="cpu",
        quantization="w4afp8",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_cuda_graph=True,
        dtype="bfloat16",
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{tempfile.mkdtemp()}/store",
    )
    initialize_model_parallel()
    initialize_dp_attention(server_args=server_args)

    model_config = ModelConfig.from_server_args(server_args)
    load_config = LoadConfig()
    quant_config = _get_quantization_config(model_config, load_config)
    # Rotary embeddings hold no parameters, and the engine's CPU version wants another project's kernels.
    deepseek_v2.get_rope_wrapper = lambda *args, **kwargs: torch.nn.Identity()
    with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        model = _initialize_model(model_config, load_config, quant_config)
    return model, DefaultModelLoader(load_config), model_config


def _expected(name: str, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the engine's parameter must hold, assembled from the checkpoint's tensors."""
    if name in tensors:
        return tensors[name]
    for fused, parts in (
        ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ):
        if f".{fused}." in name:
            return torch.cat([tensors[name.replace(fused, part)] for part in parts])
    prefix, leaf = name.rsplit(".", 1)
    shards, what = leaf.split("_", 1)
    experts = range(parameter.shape[0])
    if what == "input_scale":
        names = ("w1", "w3") if shards == "w13" else ("w2",)
        values = torch.stack([torch.cat([tensors[f"{prefix}.{e}.{n}.{what}"] for n in names]) for e in experts])
        return values.reshape(parameter.shape)
    names = ("gate_proj", "up_proj") if shards == "w13" else ("down_proj",)
    return torch.stack([torch.cat([tensors[f"{prefix}.{e}.{n}.{what}"] for n in names]) for e in experts])


def main(path: str) -> dict[str, object]:
    import sglang

    model, loader, model_config = _build(path)
    for name, parameter in model.named_parameters():
        # Input scales must start at one: the loader refuses a second value that differs from the first.
        if not name.endswith("input_scale"):
            parameter.data.view(torch.uint8).fill_(0x55)

    collect = _Collect()
    logging.getLogger("sglang").addHandler(collect)
    model.load_weights(loader._get_all_weights(model_config, model))

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors.update(load_file(file))
    mismatched = []
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        expected = _expected(name, parameter, tensors)
        same = (
            parameter.dtype == expected.dtype
            and parameter.shape == expected.shape
            and torch.equal(parameter.data.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        )
        if not same:
            mismatched.append(f"{name}: {tuple(parameter.shape)} {parameter.dtype}")

    experts = next(m for m in model.modules() if type(getattr(m, "quant_method", None)).__name__ == "W4AFp8MoEMethod")
    before = experts.w13_weight_scale_inv.data.clone()
    scales_exact = bool(torch.equal(before.to(torch.bfloat16).float(), before))
    experts.quant_method.process_weights_after_loading(experts)
    return {
        "engine": sglang.__version__,
        "parameters": len(parameters),
        "mismatched": mismatched,
        "log": collect.lines,
        "scales_exact": scales_exact,
        "input_scales": [experts.w13_input_scale.tolist(), experts.w2_input_scale.tolist()],
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1])))
