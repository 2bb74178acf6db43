#!/usr/bin/env python3
"""Write a DeepSeek-V3-architecture W4AFP8 checkpoint with random weights, of any size.

Two modes:

- ``--config-only``: ``config.json`` alone, for ``--load-format dummy``.
- default: ``config.json`` and sharded safetensors in the engine's W4AFP8 format, so that the outputs of two servers can
  be compared token by token.

Tensor names and layouts are the ones that the engine's DeepSeek loader maps (its ``make_expert_params_mapping`` and
``make_expert_input_scale_params_mapping``), N outputs and K inputs of a linear layer:

======================================================  =========  ==========================  ==================
tensor                                                  dtype      shape                       meaning
======================================================  =========  ==========================  ==================
``...mlp.experts.E.{gate,up,down}_proj.weight``          int8       ``[N, K / 2]``              two int4 a byte
``...mlp.experts.E.{gate,up,down}_proj.weight_scale_inv``  fp32       ``[N, K / 128]``            group scales
``...mlp.experts.E.{w1,w2,w3}.input_scale``              bf16       ``[1]``                     activation scale
every other linear layer, ``.weight``                   fp8 e4m3   ``[N, K]``
every other linear layer, ``.weight_scale_inv``         fp32       ``[ceil(N/128), ceil(K/128)]``  block scales
norms, embeddings, LM head, router                      bf16
``...mlp.gate.e_score_correction_bias``                 fp32       ``[experts]``
======================================================  =========  ==========================  ==================

Every tensor is drawn so that its layer keeps unit variance (``_Init`` says how), so the residual stream stays in range
whatever the depth, and the logits are diverse: greedy tokens then depend on every layer.

The bytes depend on the seed, the tensor's name and its size alone, not on the number of threads or shards.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

GROUP_SIZE = 128  # int4 scale groups and fp8 scale blocks: what the engine's W4AFP8 kernels are compiled for
SUMMARY_FILE = "synthetic_checkpoint.json"
DTYPE_BYTES = {"int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}

# Random numbers are drawn in blocks of so many elements, each from its own seed: blocks can be filled by any thread.
_BLOCK_ELEMENTS = 1 << 23
# Room for the file system's own records beside the tensors.
_DISK_MARGIN_BYTES = 64 << 20


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of the model. Defaults are DeepSeek-V3's, but for the number of layers."""

    layers: int = 5
    dense_layers: int = 1
    experts: int = 256
    experts_per_token: int = 8
    shared_experts: int = 1
    expert_groups: int = 8
    expert_groups_per_token: int = 4
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    attention_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int = 129280
    max_position_embeddings: int = 163840

    def __post_init__(self) -> None:
        """Raise ``ValueError``, naming the field, for sizes that the engine's model or kernels cannot hold."""
        for name, value in asdict(self).items():
            least = 0 if name in ("dense_layers", "shared_experts") else 1
            if value < least:
                raise ValueError(f"{name} is {value}, must be at least {least}")
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers is {self.dense_layers}, must be at most layers ({self.layers})")
        for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank"):
            if getattr(self, name) % GROUP_SIZE:
                raise ValueError(f"{name} is {getattr(self, name)}, must be a multiple of {GROUP_SIZE}")
        if self.experts % self.expert_groups:
            raise ValueError(f"expert_groups is {self.expert_groups}, must divide experts ({self.experts})")
        if self.expert_groups_per_token > self.expert_groups:
            raise ValueError(
                f"expert_groups_per_token is {self.expert_groups_per_token}, "
                f"must be at most expert_groups ({self.expert_groups})"
            )
        reachable = self.expert_groups_per_token * (self.experts // self.expert_groups)
        if self.experts_per_token > reachable:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, must be at most {reachable}: the experts in the "
                f"{self.expert_groups_per_token} groups that a token may use"
            )

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts: all but the leading dense ones."""
        return self.layers - self.dense_layers

    def config(self) -> dict[str, Any]:
        """``config.json``: DeepSeek-V3's, with these sizes."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "ep_size": 1,
            "first_k_dense_replace": self.dense_layers,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "kv_lora_rank": self.kv_lora_rank,
            "max_position_embeddings": self.max_position_embeddings,
            "moe_intermediate_size": self.moe_intermediate_size,
            "moe_layer_freq": 1,
            "n_group": self.expert_groups,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared_experts,
            "norm_topk_prob": True,
            "num_attention_heads": self.attention_heads,
            "num_experts_per_tok": self.experts_per_token,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.attention_heads,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": self.q_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "quantization_config": {
                "quant_method": "w4afp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [GROUP_SIZE, GROUP_SIZE],
            },
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": self.expert_groups_per_token,
            "topk_method": "noaux_tc",
            "use_cache": True,
            "v_head_dim": self.v_head_dim,
            "vocab_size": self.vocab_size,
        }


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint: what it is called, its layout, and how its bytes are drawn."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fill: Callable[[np.ndarray, np.random.Generator], None]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


def _to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 to the 16 bits of its bf16, round to nearest even (finite values only)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _normal_quantiles(count: int) -> np.ndarray:
    """``count`` equally likely values of a standard normal: a table that turns random integers into normal samples."""
    normal = NormalDist()
    # Mirrored halves: exactly symmetric, so the mean is zero.
    upper = np.array([normal.inv_cdf(0.5 + (i + 0.5) / count) for i in range(count // 2)])
    values = np.concatenate([-upper[::-1], upper])
    return (values / np.sqrt(np.mean(values**2))).astype(np.float32)


class _Init:
    """Fillers, and the gains that keep activations in range.

    Inputs of every linear layer have unit RMS (an RMSNorm with weight one stands before it), so weights of standard
    deviation ``gain / sqrt(K)`` give outputs of RMS ``gain``.
    """

    # Query gain 3: attention scores of standard deviation 3 and more pick a few keys instead of averaging all of them,
    # so that the next token depends on the whole context and not on the last token alone.
    QUERY_GAIN = 3.0
    # silu(gate) * up of unit normals has RMS 0.6; 1 / 0.6 makes an expert's output RMS one.
    DOWN_GAIN = 1.0 / 0.6
    # Wider than unit logits: the two best of 129280 unit normals are about 0.2 apart, and rounding noise scales with
    # the hidden state, not with the head.
    HEAD_GAIN = 1.5

    # Static activation scales, powers of two so that they are exact in bf16. Unit-RMS rows reach about 5, silu(gate) *
    # up about 20: both stay below the largest fp8 value, 448 * scale.
    W13_INPUT_SCALE = 2.0**-6
    W2_INPUT_SCALE = 2.0**-4

    _tables: dict[str, np.ndarray] = {}
    _lock = threading.Lock()

    @classmethod
    def table(cls, name: str) -> np.ndarray:
        with cls._lock:
            if name not in cls._tables:
                cls._tables[name] = _fp8_table() if name == "fp8" else _to_bf16_bits(_normal_quantiles(1 << 16))
            return cls._tables[name]

    @staticmethod
    def int4(out: np.ndarray, rng: np.random.Generator) -> None:
        """Packed int4, two a byte, zero mean.

        Uniform nibbles have the mean -0.5, an offset common to all output channels that grows from layer to layer.
        Turning the code 0xF (-1) into 0x7 (7) makes the mean exactly zero and keeps -8, the code that unpacking
        gets wrong first. RMS: sqrt(24.5).
        """
        words = rng.integers(0, 1 << 64, size=-(-out.size // 8), dtype=np.uint64)
        top = words & np.uint64(0x8888888888888888)
        for shift in (1, 2, 3):
            top &= words << np.uint64(shift)
        words ^= top
        out[:] = words.view(np.uint8)[: out.size].view(np.int8)

    @staticmethod
    def scales(std: float) -> Callable[[np.ndarray, np.random.Generator], None]:
        """Positive scales, uniform in [0.5, 1.5] times a centre, of RMS ``std``, each exact in bf16.

        They differ a lot from group to group, so that a kernel that reads a neighbour's scale gives other tokens.
        """
        centre = std / math.sqrt(1.0 + 1.0 / 12.0)

        def fill(out: np.ndarray, rng: np.random.Generator) -> None:
            values = (0.5 + rng.random(out.size, dtype=np.float32)) * np.float32(centre)
            out[:] = (_to_bf16_bits(values).astype(np.uint32) << 16).view(np.float32)

        return fill

    @classmethod
    def fp8(cls, out: np.ndarray, rng: np.random.Generator) -> None:
        """Normal fp8 codes of RMS ``_FP8_TABLE_RMS``: 256 equally likely values up to 448, fp8's full range."""
        out[:] = cls.table("fp8")[rng.integers(0, 256, size=out.size, dtype=np.uint8)]

    @classmethod
    def normal(cls, std: float) -> Callable[[np.ndarray, np.random.Generator], None]:
        """Normal bf16 values of the standard deviation that is the power of two nearest to ``std``.

        A power of two moves the exponent only, so that the table of 65536 values stays exact in bf16.
        """
        exponent = np.uint16((round(math.log2(std)) << 7) & 0xFFFF)

        def fill(out: np.ndarray, rng: np.random.Generator) -> None:
            out[:] = cls.table("bf16")[rng.integers(0, 1 << 16, size=out.size, dtype=np.uint16)] + exponent

        return fill

    @staticmethod
    def near_one(out: np.ndarray, rng: np.random.Generator) -> None:
        """Norm weights in [0.75, 1.25]."""
        out[:] = _to_bf16_bits(0.75 + 0.5 * rng.random(out.size, dtype=np.float32))

    @staticmethod
    def small(out: np.ndarray, rng: np.random.Generator) -> None:
        """Router bias within 0.01: it breaks ties and leaves the load even."""
        out[:] = (rng.random(out.size, dtype=np.float32) - np.float32(0.5)) * np.float32(0.02)

    @staticmethod
    def constant(value: float) -> Callable[[np.ndarray, np.random.Generator], None]:
        def fill(out: np.ndarray, rng: np.random.Generator) -> None:
            out[:] = _to_bf16_bits(np.full(out.size, value, dtype=np.float32))

        return fill


_INT4_RMS = math.sqrt(24.5)
_FP8_MAX = 448.0
# Largest of 256 normal quantiles after normalising: 448 stands for it, so one standard deviation is 448 / this.
_FP8_TABLE_RMS = _FP8_MAX / float(_normal_quantiles(256)[-1])


def _fp8_table() -> np.ndarray:
    import torch

    values = torch.from_numpy(_normal_quantiles(256) * np.float32(_FP8_TABLE_RMS))
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _fp8_linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Iterator[TensorSpec]:
    """An fp8 block-scaled linear layer ``[outputs, inputs]`` whose output has RMS ``gain`` for unit-RMS inputs."""
    blocks = (-(-outputs // GROUP_SIZE), -(-inputs // GROUP_SIZE))
    yield TensorSpec(f"{name}.weight", (outputs, inputs), "float8_e4m3fn", _Init.fp8)
    std = gain / math.sqrt(inputs) / _FP8_TABLE_RMS
    yield TensorSpec(f"{name}.weight_scale_inv", blocks, "float32", _Init.scales(std))


def _int4_linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Iterator[TensorSpec]:
    """An expert's int4 group-scaled linear layer, likewise."""
    yield TensorSpec(f"{name}.weight", (outputs, inputs // 2), "int8", _Init.int4)
    std = gain / math.sqrt(inputs) / _INT4_RMS
    yield TensorSpec(f"{name}.weight_scale_inv", (outputs, inputs // GROUP_SIZE), "float32", _Init.scales(std))


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[TensorSpec]:
    yield from _fp8_linear(f"{prefix}.gate_proj", intermediate, hidden)
    yield from _fp8_linear(f"{prefix}.up_proj", intermediate, hidden)
    yield from _fp8_linear(f"{prefix}.down_proj", hidden, intermediate, _Init.DOWN_GAIN)


def _attention(prefix: str, spec: ModelSpec) -> Iterator[TensorSpec]:
    heads, nope, rope, v = spec.attention_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    yield from _fp8_linear(f"{prefix}.q_a_proj", spec.q_lora_rank, spec.hidden_size)
    yield TensorSpec(f"{prefix}.q_a_layernorm.weight", (spec.q_lora_rank,), "bfloat16", _Init.near_one)
    yield from _fp8_linear(f"{prefix}.q_b_proj", heads * (nope + rope), spec.q_lora_rank, _Init.QUERY_GAIN)
    yield from _fp8_linear(f"{prefix}.kv_a_proj_with_mqa", spec.kv_lora_rank + rope, spec.hidden_size)
    yield TensorSpec(f"{prefix}.kv_a_layernorm.weight", (spec.kv_lora_rank,), "bfloat16", _Init.near_one)
    yield from _fp8_linear(f"{prefix}.kv_b_proj", heads * (nope + v), spec.kv_lora_rank)
    yield from _fp8_linear(f"{prefix}.o_proj", spec.hidden_size, heads * v)


def _moe(prefix: str, spec: ModelSpec) -> Iterator[TensorSpec]:
    hidden, inter = spec.hidden_size, spec.moe_intermediate_size
    router_std = 1.0 / math.sqrt(hidden)
    yield TensorSpec(f"{prefix}.gate.weight", (spec.experts, hidden), "bfloat16", _Init.normal(router_std))
    yield TensorSpec(f"{prefix}.gate.e_score_correction_bias", (spec.experts,), "float32", _Init.small)
    if spec.shared_experts:
        yield from _mlp(f"{prefix}.shared_experts", hidden, inter * spec.shared_experts)
    for expert in range(spec.experts):
        base = f"{prefix}.experts.{expert}"
        yield from _int4_linear(f"{base}.gate_proj", inter, hidden)
        yield from _int4_linear(f"{base}.up_proj", inter, hidden)
        yield from _int4_linear(f"{base}.down_proj", hidden, inter, _Init.DOWN_GAIN)
        # The loader wants w1 and w3 equal, and takes the largest over all experts.
        for shard, scale in (
            ("w1", _Init.W13_INPUT_SCALE),
            ("w2", _Init.W2_INPUT_SCALE),
            ("w3", _Init.W13_INPUT_SCALE),
        ):
            yield TensorSpec(f"{base}.{shard}.input_scale", (1,), "bfloat16", _Init.constant(scale))


def tensor_specs(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint, in the order in which the files hold them."""
    hidden = spec.hidden_size
    yield TensorSpec("model.embed_tokens.weight", (spec.vocab_size, hidden), "bfloat16", _Init.normal(1.0))
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        yield TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,), "bfloat16", _Init.near_one)
        yield from _attention(f"{prefix}.self_attn", spec)
        yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,), "bfloat16", _Init.near_one)
        if layer < spec.dense_layers:
            yield from _mlp(f"{prefix}.mlp", hidden, spec.intermediate_size)
        else:
            yield from _moe(f"{prefix}.mlp", spec)
    yield TensorSpec("model.norm.weight", (hidden,), "bfloat16", _Init.near_one)
    head_std = _Init.HEAD_GAIN / math.sqrt(hidden)
    yield TensorSpec("lm_head.weight", (spec.vocab_size, hidden), "bfloat16", _Init.normal(head_std))


@dataclass
class Shard:
    """One safetensors file."""

    file: str
    tensors: list[TensorSpec] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_shards(tensors: Sequence[TensorSpec], shard_bytes: int) -> list[Shard]:
    """Tensors in order, a new file whenever the next one would make it larger than ``shard_bytes``."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    count = len(groups)
    return [Shard(f"model-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


_STORAGE = {"int8": np.int8, "float8_e4m3fn": np.uint8, "bfloat16": np.uint16, "float32": np.float32}


def tensor_values(tensor: TensorSpec, seed: int) -> np.ndarray:
    """The tensor's values as flat storage (bf16 and fp8 as their bits), drawn from the seed and the tensor's name."""
    out = np.empty(tensor.elements, dtype=_STORAGE[tensor.dtype])
    name_seed = zlib.crc32(tensor.name.encode())
    for block, start in enumerate(range(0, out.size, _BLOCK_ELEMENTS)):
        rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, name_seed, block])))
        tensor.fill(out[start : start + _BLOCK_ELEMENTS], rng)
    return out


def _write_shard(shard: Shard, directory: Path, seed: int, stop: threading.Event, done: Callable[[int], None]) -> None:
    import torch
    from safetensors.torch import save_file

    torch_dtypes = {name: getattr(torch, name) for name in DTYPE_BYTES}
    tensors = {}
    for tensor in shard.tensors:
        if stop.is_set():
            return
        # bf16 bits travel as int16: torch has no arithmetic on uint16, and view() needs a signed twin.
        storage = tensor_values(tensor, seed)
        if storage.dtype == np.uint16:
            storage = storage.view(np.int16)
        tensors[tensor.name] = torch.from_numpy(storage).view(torch_dtypes[tensor.dtype]).reshape(tensor.shape)
        done(tensor.nbytes)
    path = directory / shard.file
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes files that only their owner can read


def _check_destination(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(
            errno.EEXIST, "output exists and is not an empty directory; nothing is overwritten", str(out)
        )


def _check_disk(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed + _DISK_MARGIN_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"checkpoint needs {needed / 2**30:.2f} GiB, only {free / 2**30:.2f} GiB are free",
            str(parent),
        )


def write_checkpoint(
    out: Path,
    spec: ModelSpec,
    *,
    seed: int = 0,
    config_only: bool = False,
    shard_bytes: int = 2 << 30,
    workers: int = 4,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, Any]:
    """Write the checkpoint to ``out`` and return its summary (also kept there as ``synthetic_checkpoint.json``).

    The files go to a temporary directory beside ``out`` that is renamed at the end: ``out`` is whole or absent.

    Raises:
        FileExistsError: ``out`` exists and is not an empty directory.
        OSError: with ``errno.ENOSPC`` before anything is written, if the disk is too small.
    """
    out = out.resolve()  # a directory cannot be renamed to a link, not even to one of an empty directory
    _check_destination(out)
    tensors = [] if config_only else list(tensor_specs(spec))
    shards = plan_shards(tensors, shard_bytes) if tensors else []
    total = sum(shard.nbytes for shard in shards)
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(out.parent, total)

    summary = {
        "seed": seed,
        "config_only": config_only,
        "bytes": total,
        "tensors": len(tensors),
        "files": len(shards),
        "spec": asdict(spec),
    }
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    stop = threading.Event()
    try:
        (partial / "config.json").write_text(json.dumps(spec.config(), indent=2) + "\n")
        (partial / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
        if shards:
            weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
            with ThreadPoolExecutor(max_workers=workers) as pool:
                futures = [pool.submit(_write_shard, shard, partial, seed, stop, progress) for shard in shards]
                try:
                    for future in as_completed(futures):
                        future.result()
                except BaseException:
                    # Without this the pool would first write all that is queued.
                    stop.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        # mkdtemp makes a private directory; a checkpoint may be served by another user.
        partial.chmod(0o755)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return summary


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a positive integer")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    defaults = ModelSpec()
    parser = argparse.ArgumentParser(description="Write a synthetic DeepSeek-V3-architecture W4AFP8 checkpoint.")
    parser.add_argument("out", type=Path, help="directory to create; must not exist, or be empty")
    parser.add_argument("--config-only", action="store_true", help="config.json alone, for --load-format dummy")
    sizes = parser.add_argument_group("sizes (defaults are DeepSeek-V3's, but for --layers)")
    for name, value in asdict(defaults).items():
        sizes.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, metavar="N", help=f"default {value}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gib", type=float, default=2.0, help="largest file, default 2 GiB")
    parser.add_argument(
        "--workers", type=_workers, default=min(8, os.cpu_count() or 1), help="threads; each holds one file in memory"
    )
    parser.add_argument("--dry-run", action="store_true", help="say how large it would be and stop")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _raise_on_sigterm(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit codes: 0 written, 2 refused (sizes, existing output, disk)."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _raise_on_sigterm)  # so that a killed run removes its partial directory
    try:
        spec = ModelSpec(**{name: getattr(args, name) for name in asdict(ModelSpec())})
        total = 0 if args.config_only else sum(tensor.nbytes for tensor in tensor_specs(spec))
        if args.dry_run:
            print(f"{args.out}: {total / 2**30:.2f} GiB, {spec.moe_layers} of {spec.layers} layers with experts")
            return 0
        from tqdm import tqdm

        with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=args.quiet or not total) as bar:
            summary = write_checkpoint(
                args.out,
                spec,
                seed=args.seed,
                config_only=args.config_only,
                shard_bytes=int(args.shard_gib * 2**30),
                workers=args.workers,
                progress=bar.update,
            )
    except (ValueError, OSError) as error:
        print(f"make_synthetic_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {summary['bytes'] / 2**30:.2f} GiB, {summary['tensors']} tensors, {summary['files']} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
