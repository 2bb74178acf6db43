"""Whether DeepEP's low-latency buffers hold what the server is going to send through them, checked at start-up.

A rank dispatches one token a running request, times the draft length with speculative decoding, split over the ranks that
share its attention. More than ``SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK`` of them fail inside DeepEP.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_w4afp8 import engine_state

logger = logging.getLogger(__name__)

_VARIABLE = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
# The engine's dispatcher refuses a larger cap.
_LARGEST_CAP = 1024


@dataclass(frozen=True)
class Load:
    """What one rank sends through the dispatcher, as far as it is known before the weights are.

    Attributes:
        graph_requests: the largest batch that is captured as a CUDA graph; None without decode graphs.
        running_requests: requests that may run at once on this rank's data-parallel group; None when the engine chooses.
        prefill_tokens: tokens of one prefill chunk where prefill takes the low-latency path too; None where it does not.
        tokens_per_request: tokens of a request in one decode step: the draft length, or 1.
        attention_ranks: ranks that share one request's tokens.
        two_batches: a batch is dispatched in two halves (two-batch overlap).
    """

    graph_requests: int | None
    running_requests: int | None
    prefill_tokens: int | None
    tokens_per_request: int = 1
    attention_ranks: int = 1
    two_batches: bool = False

    def tokens_per_rank(self, tokens: int) -> int:
        """Tokens that one rank dispatches at once of a step with ``tokens``; the smaller half with two batches."""
        per_rank = -(-tokens // self.attention_ranks)
        return -(-per_rank // 2) if self.two_batches else per_rank


def problems(load: Load, cap: int) -> tuple[list[str], list[str]]:
    """What cannot work and what may fail under load, each as a sentence that says which number to change to what."""
    each = f" with {load.tokens_per_request} tokens each" if load.tokens_per_request > 1 else ""
    ranks = f" over {load.attention_ranks} attention ranks" if load.attention_ranks > 1 else ""
    # How much of a step one rank may get before it exceeds the cap.
    room = cap * load.attention_ranks * (2 if load.two_batches else 1)

    def sentence(needed: int, what: str, lower: str) -> str:
        raised = (
            f"set {_VARIABLE}={needed}, or " if needed <= _LARGEST_CAP else f"DeepEP takes {_LARGEST_CAP} at most: "
        )
        return f"{_VARIABLE}: is {cap}, must be at least {needed}: {what}; {raised}{lower}"

    certain, possible = [], []
    if load.graph_requests is not None:
        needed = load.tokens_per_rank(load.graph_requests * load.tokens_per_request)
        if needed > cap:
            what = f"CUDA graphs are captured for up to {load.graph_requests} requests{each}{ranks}"
            certain.append(sentence(needed, what, f"capture up to {room // load.tokens_per_request} requests"))
    if load.running_requests is not None and not certain:
        needed = load.tokens_per_rank(load.running_requests * load.tokens_per_request)
        if needed > cap:
            what = f"up to {load.running_requests} requests{each} may run{ranks}"
            possible.append(sentence(needed, what, f"let up to {room // load.tokens_per_request} run at once"))
    if load.prefill_tokens is not None:
        needed = load.tokens_per_rank(load.prefill_tokens)
        if needed > cap:
            what = f"--deepep-mode low_latency prefills up to {load.prefill_tokens} tokens at once{ranks}"
            possible.append(sentence(needed, what, f"set --chunked-prefill-size {room}, or --deepep-mode auto"))
    return certain, possible


@dataclass(frozen=True)
class DecodeGraphs:
    """What decode CUDA graphs the server was told to capture; None where it was not told.

    Attributes:
        sizes: batch sizes.
        largest: the largest of them.
    """

    sizes: list[int] | None
    largest: int | None


def decode_graphs() -> DecodeGraphs | None:
    """This process's decode graphs; None without any."""
    if engine_state.setting("disable_cuda_graph"):
        return None
    config = engine_state.setting("cuda_graph_config")
    if config is None:  # before 0.5.14
        sizes, largest = engine_state.setting("cuda_graph_bs"), engine_state.setting("cuda_graph_max_bs")
    else:
        if str(getattr(config.decode.backend, "value", config.decode.backend)) == "disabled":
            return None
        sizes, largest = config.decode.bs, config.decode.max_bs
    return DecodeGraphs(list(sizes), max(sizes)) if sizes else DecodeGraphs(None, largest)


def server_load() -> Load | None:
    """This process's server; None where nothing goes through DeepEP's low-latency dispatch, or nothing is published."""
    if engine_state.setting("moe_a2a_backend") != "deepep":
        return None
    mode = engine_state.setting("deepep_mode")
    disaggregation = engine_state.setting("disaggregation_mode")
    if mode == "normal" or (mode == "auto" and disaggregation == "prefill"):
        return None
    attention_ranks, attention_groups = engine_state.attention_ranks()
    running: int | None = engine_state.setting("max_running_requests")
    if running is not None:
        running = max(1, running // attention_groups)
    captured = decode_graphs()
    graphs = captured.largest if captured is not None else None
    if graphs is not None and running is not None:
        graphs = min(graphs, running)
    chunk = engine_state.setting("chunked_prefill_size")
    prefills = mode == "low_latency" and disaggregation != "decode" and chunk is not None and chunk > 0
    return Load(
        graph_requests=graphs,
        running_requests=running,
        prefill_tokens=chunk if prefills else None,
        tokens_per_request=engine_state.setting("speculative_num_draft_tokens") or 1,
        attention_ranks=attention_ranks,
        two_batches=bool(engine_state.setting("enable_two_batch_overlap")),
    )


_checked = False


def check() -> None:
    """Compare once per process: warn of what may fail under load, refuse what cannot work.

    Raises:
        ValueError: a CUDA graph that is going to be captured does not fit.
    """
    global _checked
    if _checked:
        return
    _checked = True
    try:
        load = server_load()
        if load is None:
            return
        certain, possible = problems(load, engine_state.dispatch_tokens_cap())
    except Exception as error:  # an engine that says these things otherwise must start all the same
        logger.warning("sglang-w4afp8: %s is not compared with what the server dispatches: %r", _VARIABLE, error)
        return
    for text in possible:
        logger.warning("sglang-w4afp8: %s", text)
    if certain:
        raise ValueError("; ".join(certain))
