"""What an engine's source says of its decode CUDA graphs, read by syntax tree; nothing of it is imported.

Every decode graph is captured with a count of the batch's real tokens that stands in device memory. DeepEP's path of the model
hands it to the top-k, which gives no expert to the tokens past it. Up to 0.5.20 the count is part of every graph and is written
before a replay only with more than one expert-parallel rank. With one it stays what the graph captured last has left, that
of the smallest batch: only so many tokens of any batch reach a routed expert. From 0.5.21 such a server's graphs have no count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

COUNT = "num_token_non_padded"
_SWITCH = f"enable_{COUNT}"
# Where graphs are captured, from 0.5.14 on and before.
_RUNNERS = ("srt/model_executor/runner/decode_cuda_graph_runner.py", "srt/model_executor/cuda_graph_runner.py")
_BATCH = "srt/model_executor/forward_batch_info.py"
_MODEL = "srt/models/deepseek_v2.py"
_MODEL_PATH = "forward_deepep"
FILES = (*_RUNNERS, _BATCH, _MODEL)


def _parse(package: Path, *names: str) -> tuple[str, ast.Module]:
    for name in names:
        if (package / name).is_file():
            return name, ast.parse((package / name).read_text(encoding="utf-8"))
    raise LookupError(f"there is no {' or '.join(names)}")


def _arguments(tree: ast.AST, name: str) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Every call that is given an argument of this name, and its value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from ((node, keyword.value) for keyword in node.keywords if keyword.arg == name)


def _is_switch(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _SWITCH


def _functions(tree: ast.Module, name: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]


def _check_switch(package: Path) -> None:
    """Raise ``LookupError`` unless the engine's switch for the count is on with more than one expert-parallel rank only."""
    functions = _functions(_parse(package, _BATCH)[1], _SWITCH)
    returned = [ast.unparse(node.value) for f in functions for node in ast.walk(f) if isinstance(node, ast.Return)]
    if len(returned) != 1 or not returned[0].endswith((".moe_ep_size > 1", "expert_parallel_world_size() > 1")):
        raise LookupError(f"{_BATCH}: {_SWITCH} returns {returned}, must be whether there are several ranks")


def drops_tokens_with_one_rank(package: Path) -> bool:
    """Whether decode graphs of several sizes route only some tokens with DeepEP and one expert-parallel rank.

    Args:
        package: the engine's package directory.

    Raises:
        LookupError: the source is written otherwise than any that was read, so that nobody knows.
    """
    runner, tree = _parse(package, *_RUNNERS)
    counts = [
        value
        for call, value in _arguments(tree, COUNT)
        if isinstance(call.func, ast.Name) and call.func.id == "ForwardBatch"
    ]
    if len(counts) != 1:
        raise LookupError(f"{runner}: {len(counts)} batches are captured with {COUNT}, must be one")
    (count,) = counts
    if isinstance(count, ast.IfExp) and _is_switch(count.test) and ast.unparse(count.orelse) == "None":
        return False
    if ast.unparse(count) != f"buffers.{COUNT}":
        raise LookupError(f"{runner}: batches are captured with {COUNT}={ast.unparse(count)}, which is not known")
    # Given whatever the ranks. Then it matters whether a replay writes it, which this argument says (0.5.12: with a suffix).
    refills = [value for name in (_SWITCH, f"{_SWITCH}_flag") for _, value in _arguments(tree, name)]
    if len(refills) != 1 or not _is_switch(refills[0]):
        raise LookupError(f"{runner}: what writes {COUNT} before a replay is not found")
    _check_switch(package)
    model, tree = _parse(package, _MODEL)
    paths = _functions(tree, _MODEL_PATH)
    if not paths:
        raise LookupError(f"{model}: there is no {_MODEL_PATH}")
    return any(True for path in paths for _ in _arguments(path, COUNT))
