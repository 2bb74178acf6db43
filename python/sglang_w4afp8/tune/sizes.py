"""Which layers to tune: models by name, from a checkpoint's ``config.json``, or by numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelSizes:
    """What of a model decides its expert layers' sizes.

    Attributes:
        hidden: hidden size K.
        inner: intermediate size N of one expert.
        experts: routed experts.
        topk: experts of one token.
        group_size: values of one weight scale.
    """

    hidden: int
    inner: int
    experts: int
    topk: int = 8
    group_size: int = 128

    def experts_on_a_rank(self, ranks: int, redundant: int = 0) -> int:
        """Local experts with expert parallelism over ``ranks``.

        Raises:
            ValueError: the experts do not divide.
        """
        local, rest = divmod(self.experts + redundant, ranks)
        if ranks < 1 or rest or not local:
            raise ValueError(f"ep: is {ranks}, must divide the {self.experts + redundant} experts")
        return local


# From the models' published configurations. Kimi-K3's intermediate size is not published there yet: 2048 as Kimi-K2's.
MODELS: Mapping[str, ModelSizes] = {
    "deepseek-v3": ModelSizes(7168, 2048, 256),
    "glm-5": ModelSizes(6144, 2048, 256),
    "kimi-k2": ModelSizes(7168, 2048, 384),
    "kimi-k3": ModelSizes(3584, 2048, 448),
    "glm-4": ModelSizes(5120, 1536, 160),
    "qwen3-235b": ModelSizes(4096, 1536, 128),
    "qwen3-30b": ModelSizes(2048, 768, 128),
}
# What a config calls them, by family; the first that is there counts.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "inner": ("moe_intermediate_size", "expert_hidden_size", "intermediate_size"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "topk": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
}


class SizesError(ValueError):
    """A model whose sizes cannot be told; the message names the file and the field."""


def from_config(path: Path) -> ModelSizes:
    """Sizes of a model from its ``config.json``, or the folder that holds it.

    Raises:
        SizesError: there is no such file, it is no JSON object, or a field is missing or no positive integer.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SizesError(f"{file}: cannot be read as a model's configuration ({error})") from error
    if not isinstance(config, dict):
        raise SizesError(f"{file}: is no JSON object, must be a model's configuration")
    # Models of several modalities keep the language model's fields apart.
    text = config.get("text_config")
    fields = {**config, **(text if isinstance(text, dict) else {})}
    values = {name: _field(file, fields, name, known) for name, known in _NAMES.items()}
    return ModelSizes(**values, group_size=_group_size(fields))


def _field(file: Path, fields: Mapping[str, Any], name: str, known: tuple[str, ...]) -> int:
    found = next((key for key in known if fields.get(key) is not None), None)
    if found is None:
        raise SizesError(
            f"{file}: has none of {', '.join(known)}: not a mixture-of-experts model, or one that is not known"
        )
    value = fields[found]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SizesError(f"{file}: {found} is {value!r}, must be a positive integer")
    return value


def _group_size(fields: Mapping[str, Any]) -> int:
    """Of the weights' scales: W4AFP8 checkpoints have 128, others say it where they describe their quantization."""
    quantization = fields.get("quantization_config")
    if isinstance(quantization, dict):
        for group in (quantization.get("config_groups") or {}).values():
            size = ((group or {}).get("weights") or {}).get("group_size")
            if isinstance(size, int) and size > 0:
                return size
        size = quantization.get("group_size")
        if isinstance(size, int) and size > 0:
            return size
    return 128


def of(model: str) -> ModelSizes:
    """Sizes of a model by its name here or by a path to its configuration.

    Raises:
        SizesError: neither.
    """
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    if path.exists():
        return from_config(path)
    raise SizesError(f"model: is {model!r}, must be a config.json, a folder with one, or one of {', '.join(MODELS)}")
