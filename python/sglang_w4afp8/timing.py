"""How everything here is timed: CUDA graphs, replayed in turns.

One provider's launches are captured into a CUDA graph, so that launch gaps of the host do not count. The graphs of all
providers are replayed in turns, and each provider's figure is the median of its turns: what drifts during a run drifts for
all of them alike. The order changes from turn to turn, so that nobody always finds the cache as the same other one left it.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Long enough for the clock's resolution, short enough that many providers take turns within one clock state.
_TARGET_REPLAY_US = 150.0
_LAUNCHES_MIN, _LAUNCHES_MAX = 4, 40


def capture(run: Callable[[], Any], launches: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``launches`` calls of ``run``, after one call that compiles and warms up."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, launches: int) -> float:
    """Microseconds of one launch in one replay of ``graph``."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / launches


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def launches_for(expected_us: float) -> int:
    """Launches a graph should hold so that one replay is long enough to time."""
    return max(_LAUNCHES_MIN, min(_LAUNCHES_MAX, round(_TARGET_REPLAY_US / max(expected_us, 0.1))))


def interleaved_medians(
    providers: Mapping[str, Callable[[], Any]], repeats: int = 15, launches: int | None = None
) -> dict[str, float]:
    """Median microseconds of one call of every provider, measured in turns.

    Args:
        providers: name to a call that launches on the current stream and allocates nothing that must outlive it.
        repeats: timed turns; two more warm up.
        launches: calls in one graph; by default chosen from the first provider's duration.
    """
    if launches is None:
        first = capture(next(iter(providers.values())), 4)
        first.replay()
        launches = launches_for(min(replay_us(first, 4) for _ in range(3)))
    graphs = {name: capture(run, launches) for name, run in providers.items()}
    times: dict[str, list[float]] = {name: [] for name in providers}
    order, shuffle = list(graphs.items()), random.Random(0).shuffle
    for turn in range(repeats + 2):
        shuffle(order)
        for name, graph in order:
            elapsed = replay_us(graph, launches)
            if turn >= 2:
                times[name].append(elapsed)
    return {name: _median(values) for name, values in times.items()}
