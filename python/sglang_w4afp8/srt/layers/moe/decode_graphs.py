"""Whether the engine's decode CUDA graphs route every token, and one warning at start-up where they do not.

Every decode graph is captured with a count of the batch's real tokens that stands in device memory, and the top-k gives no
expert to the tokens past it. Up to 0.5.20 the engine writes it before a replay only with more than one expert-parallel rank.
With one it stays what the graph captured last has left, that of the smallest batch, so only so many tokens of any batch reach a
routed expert. From 0.5.21 on the graphs of such a server have no count. With two-batch overlap the halves have counts of
their own, which are written.
"""

from __future__ import annotations

import logging

from sglang_w4afp8 import engine_state, guard, lifecycle
from sglang_w4afp8.srt.layers.moe import dispatch_cap

logger = logging.getLogger(__name__)

# First and last; scripts/check_engine_versions.py reads in every wheel whether it is so.
AFFECTED_ENGINES = ("0.5.12", "0.5.20")
_FIRST_RIGHT_ENGINE = "0.5.21"
# The last engines that know the sizes of the graphs by one name for decode and prefill.
_OLD_FLAG_ENGINES = ("0.5.12", "0.5.13")


def is_affected(version: str) -> bool:
    """Whether this engine's decode graphs of several sizes drop tokens with one expert-parallel rank."""
    return guard.version_within(version, *AFFECTED_ENGINES)


def captured(sizes: list[int] | None, running_requests: int | None) -> list[int] | None:
    """The batches that the engine captures out of those that it was told, ascending; None where it was not told.

    It captures none above the requests that may run, but one of as many.
    """
    if not sizes or running_requests is None:
        return sorted(set(sizes)) if sizes else None
    return sorted({min(size, running_requests) for size in sizes})


def warning(version: str, sizes: list[int] | None, tokens_per_request: int = 1) -> str:
    """What to tell whoever runs such a server."""
    first = f"the first {sizes[0] * tokens_per_request} tokens" if sizes else "the first tokens"
    flag = "--cuda-graph-bs" if guard.version_within(version, *_OLD_FLAG_ENGINES) else "--cuda-graph-bs-decode"
    return (
        f"sglang {version} with one expert-parallel rank gives WRONG RESULTS in decode CUDA graphs of several sizes: only "
        f"{first} of a batch, as many as the smallest graph has, get routed experts. This is the engine's own fault, with this "
        f"plugin and without. Capture one size ({flag} {sizes[-1] if sizes else 'N'}; smaller batches are padded to it), turn "
        f"decode graphs off (--disable-cuda-graph), or use sglang {_FIRST_RIGHT_ENGINE} or newer"
    )


_checked = False


def check() -> None:
    """Warn once per process where this server is going to drop tokens."""
    global _checked
    if _checked:
        return
    _checked = True
    report = lifecycle.report()
    version = report.engine_version if report else ""
    if not is_affected(version):
        return
    try:
        load, graphs = dispatch_cap.server_load(), dispatch_cap.decode_graphs()
        if load is None or load.two_batches or graphs is None or engine_state.expert_group().world_size > 1:
            return
        sizes = captured(graphs.sizes, load.running_requests)
    except Exception as error:  # an engine that says these things otherwise must start all the same
        logger.warning(
            "sglang-w4afp8: whether decode CUDA graphs of sglang %s drop tokens is not known: %r", version, error
        )
        return
    if sizes is None or len(sizes) > 1:
        logger.warning("sglang-w4afp8: %s", warning(version, sizes, load.tokens_per_request))
