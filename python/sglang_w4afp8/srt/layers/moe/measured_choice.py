"""Which backend serves a size that no table knows: both are timed on a layer's own weights when they have been loaded.

Once per (N, K, local experts) and process, on the first layer of that size: our CUTLASS chain on the weights as the engine has
them, then the two kernels on the same weights, regrouped in place. Both run as serving runs them, through the chain and inside
CUDA graphs, over a payload laid out as DeepEP's, at row counts up to the most that this server can send. Timing ends after
``TIME_LIMIT_S``; kernels are compiled before, which a start that finds them in Triton's cache does not pay for.

All ranks that share a layer's experts measure at the same time, and what counts is the slowest of them. If one cannot measure,
all keep CUTLASS. Nothing stays behind: the payload and the graphs are freed, and the weights of the loser are put back byte for
byte. No generator of the engine's is drawn from.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_w4afp8 import timing
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table as table

# Of timing one size, both backends together.
TIME_LIMIT_S = 2.0
# Timed turns of a call; two more warm up.
REPEATS = 5
# What the two kernels must gain over all row counts together. Two starts of one server differ by less than this.
LEAST_GAIN = 1.01
# Mean rows that are measured lie this factor apart.
_STEP = 4
# One expert with this many times the mean, as in the committed tables.
_SKEW = 16
# Share of the GPU's free memory that a measurement may take.
_MEMORY_SHARE = 0.5
_GROUP = 128

Run = Callable[[], Any]


@dataclass(frozen=True)
class Point:
    """One call that is timed: the dispatcher's estimate, and how many rows each expert has.

    Attributes:
        expected_m: the estimate.
        routing: ``random`` or ``skew``, for the log.
        counts: live rows by expert.
    """

    expected_m: int
    routing: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Measurement:
    """What one size took; microseconds by point, inf where the time ran out before it.

    Attributes:
        points: what was planned.
        cutlass_us, triton_us: of each point.
        seconds: timing, both backends together.
        preparing: compiling and regrouping.
        failure: why this rank could not measure; empty when it did.
    """

    points: tuple[Point, ...]
    cutlass_us: tuple[float, ...] = ()
    triton_us: tuple[float, ...] = ()
    seconds: float = 0.0
    preparing: float = 0.0
    failure: str = ""

    def rows(self) -> list[tuple[int, float, float]]:
        """(expected_m, CUTLASS, two kernels) of every estimate that was measured, of the routing where Triton does worst."""
        worst: dict[int, tuple[float, float]] = {}
        for point, cutlass, triton in zip(self.points, self.cutlass_us, self.triton_us, strict=True):
            if math.isinf(cutlass) or math.isinf(triton):
                continue
            known = worst.get(point.expected_m)
            if known is None or triton / cutlass > known[1] / known[0]:
                worst[point.expected_m] = cutlass, triton
        return [(expected_m, *us) for expected_m, us in sorted(worst.items())]

    @property
    def triton_wins(self) -> bool:
        """By the rule that tables are read with: faster over all row counts, and slower by more than ``LOSS`` at none; and by
        more than two starts differ. The most rows that the server sends must be among what was measured."""
        measured = [] if self.failure else self.rows()
        if not measured or measured[-1][0] < max(point.expected_m for point in self.points):
            return False
        gain = math.exp(sum(math.log(cutlass / triton) for _, cutlass, triton in measured) / len(measured))
        return gain >= LEAST_GAIN and all(triton <= table.LOSS * cutlass for _, cutlass, triton in measured)

    def told(self) -> str:
        """What the log says of it."""
        if self.failure:
            return f"not measured: {self.failure}"
        measured = self.rows()
        times = "; ".join(f"{m} expected rows {cutlass:.0f} and {triton:.0f}" for m, cutlass, triton in measured)
        return (
            f"measured in {self.seconds:.1f} s (compiling and regrouping {self.preparing:.1f} s): us of CUTLASS and of the two "
            f"kernels at {times or 'no row count: the time ran out'}"
        )


def mean_rows(largest_expected_m: int) -> list[int]:
    """Mean rows to measure: from 1 up to the most that the server sends, a factor apart; the estimate is one above the mean."""
    largest = max(1, largest_expected_m - 1)
    rows = []
    while not rows or rows[-1] * _STEP < largest:
        rows.append(rows[-1] * _STEP if rows else 1)
    return [*rows, largest] if rows[-1] < largest else rows


def plan(largest_expected_m: int, num_experts: int, padded_rows: int) -> tuple[Point, ...]:
    """Points in the order in which they are measured: the ends first, which a decision needs most."""
    rows = mean_rows(largest_expected_m)
    ordered = list(dict.fromkeys((rows[0], rows[-1], *rows)))
    points = []
    for mean in ordered:
        generator = torch.Generator().manual_seed(mean)
        owners = torch.randint(0, num_experts, (num_experts * mean,), generator=generator)
        counts = torch.bincount(owners, minlength=num_experts).clamp(max=padded_rows)
        points.append(Point(mean + 1, "random", tuple(counts.tolist())))
        total, hot = num_experts * mean, _SKEW * mean
        if num_experts > 1 and hot <= min(total, padded_rows):
            share, rest = divmod(total - hot, num_experts - 1)
            cold = [min(padded_rows, share + (index < rest)) for index in range(num_experts - 1)]
            points.append(Point(mean + 1, "skew", (*cold[: num_experts // 2], hot, *cold[num_experts // 2 :])))
    return tuple(points)


@dataclass(frozen=True)
class Sizes:
    """Of one layer: intermediate size N, hidden size K, local experts, and the rows of each expert's buffer."""

    n: int
    k: int
    experts: int
    padded_rows: int

    def bytes(self) -> int:
        """Of memory that a call of the CUTLASS chain, the larger of the two, holds beside the weights."""
        of_row = self.k + 4 * self.k // _GROUP + self.k + 2 * (2 * self.n) + self.n + 2 * self.k
        return self.experts * self.padded_rows * of_row


class CannotMeasureError(Exception):
    """Why a size cannot be measured here."""


def refuse_unless_possible(device: torch.device) -> None:
    """Refuse where nothing can be timed.

    Raises:
        CannotMeasureError: there is no GPU, or a CUDA graph is being captured: what is timed would be recorded.
    """
    if device.type != "cuda":
        raise CannotMeasureError("the weights are on no GPU")
    if torch.cuda.is_current_stream_capturing():
        raise CannotMeasureError("a CUDA graph is being captured")


def free_memory(device: torch.device) -> int:
    """Bytes of GPU memory that nobody holds."""
    return torch.cuda.mem_get_info(device)[0]


def fit(sizes: Sizes, largest_rows: int, free: int) -> Sizes:
    """The sizes with as many padded rows as fit into free memory: the server's own, else what the points need.

    Raises:
        CannotMeasureError: not even these fit.
    """
    for padded in (sizes.padded_rows, min(sizes.padded_rows, -(-largest_rows // _GROUP) * _GROUP)):
        smaller = Sizes(sizes.n, sizes.k, sizes.experts, padded)
        if smaller.bytes() <= _MEMORY_SHARE * free:
            return smaller
    raise CannotMeasureError(
        f"it takes {smaller.bytes() / 2**30:.1f} GiB of GPU memory, more than {_MEMORY_SHARE:.0%} of the "
        f"{free / 2**30:.1f} GiB that are free"
    )


class Payload:
    """Activations as DeepEP hands them over: fp8 ``[E, M, K]``, float32 scales ``[E, M, K / 128]`` column-major, counts."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (sizes.experts, sizes.padded_rows, sizes.k)
        self.x = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        # One expert's rows for all: what is read is as much, and a float copy of all of them would be four times the payload.
        rows = torch.randn(shape[1:], device=device, generator=generator).mul_(8).to(torch.float8_e4m3fn)
        self.x.view(torch.uint8).copy_(rows.view(torch.uint8).expand(shape))
        scales = torch.empty((sizes.experts, sizes.k // _GROUP, sizes.padded_rows), device=device)
        self.x_scale = scales.uniform_(0.01, 0.02, generator=generator).transpose(1, 2)
        self.masked_m = torch.zeros(sizes.experts, dtype=torch.int32, device=device)

    def at(self, point: Point) -> None:
        """Set the row counts. Not inside a graph: a graph reads what is there when it is replayed."""
        self.masked_m.copy_(torch.tensor(point.counts, dtype=torch.int32))


def time_points(points: Sequence[Point], payload: Payload, call: Callable[[int], Any], deadline: float) -> list[float]:
    """Median microseconds of a call at every point; inf for those that begin after the deadline (``time.monotonic``)."""
    found = []
    for point in points:
        if found and time.monotonic() > deadline:
            found.append(math.inf)
            continue
        payload.at(point)
        run = functools.partial(call, point.expected_m)
        found.append(timing.interleaved_medians({"call": run}, REPEATS)["call"])
    return found


def measure(
    sizes: Sizes,
    largest_expected_m: int,
    device: torch.device,
    call: Callable[[Payload, int], Any],
    to_triton: Callable[[], None],
    to_cutlass: Callable[[], None],
) -> Measurement:
    """Time both backends; the layer is as the engine has it before and after, whatever happens between.

    Args:
        sizes: of the layer, with the rows of the server's own buffers.
        largest_expected_m: the dispatcher's estimate at the most that this server sends.
        device: of the weights.
        call: one low-latency call over a payload at an estimate, by whichever backend the weights are laid out for.
        to_triton, to_cutlass: regroup the weights, and put them back.
    """
    points = plan(largest_expected_m, sizes.experts, sizes.padded_rows)
    try:
        refuse_unless_possible(device)
        largest_rows = max(max(point.counts) for point in points)
        payload = Payload(fit(sizes, largest_rows, free_memory(device)), device)
        return _measure(points, payload, functools.partial(call, payload), to_triton, to_cutlass)
    except CannotMeasureError as error:
        return Measurement(points, failure=str(error))
    except Exception as error:  # a measurement that fails must not stop a server that can serve without it
        return Measurement(points, failure=f"{type(error).__name__}: {error}")
    finally:
        to_cutlass()
        payload = None
        torch.cuda.empty_cache()


def _measure(
    points: tuple[Point, ...],
    payload: Payload,
    call: Callable[[int], Any],
    to_triton: Callable[[], None],
    to_cutlass: Callable[[], None],
) -> Measurement:
    by_backend: list[tuple[float, ...]] = []
    timed = prepared = 0.0
    for prepare in (None, to_triton):
        started = time.monotonic()
        if prepare is not None:
            prepare()
        for point in points:  # compiles, outside of what the limit is about
            payload.at(point)
            call(point.expected_m)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ready = time.monotonic()
        by_backend.append(tuple(time_points(points, payload, call, ready + TIME_LIMIT_S / 2)))
        timed += time.monotonic() - ready
        prepared += ready - started
    return Measurement(points, *by_backend, timed, prepared)


def joint(measurement: Measurement, group: Any | None) -> Measurement:
    """What all ranks of a group measured: the slowest of them at every point, and a failure of any is everybody's.

    Every rank of the group must come here, whatever became of its own measurement.

    Args:
        measurement: this rank's.
        group: the engine's group (``GroupCoordinator``) of the ranks that share the experts; None with one rank.
    """
    if group is None or group.world_size == 1:
        return measurement
    count = len(measurement.points)
    times = torch.full((2 * count + 1,), math.inf, dtype=torch.float64)
    times[-1] = float(bool(measurement.failure))
    if not measurement.failure:
        times[: 2 * count] = torch.tensor((*measurement.cutlass_us, *measurement.triton_us), dtype=torch.float64)
    torch.distributed.all_reduce(times, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    *us, failed = times.tolist()
    failure = measurement.failure or ("another rank could not measure" if failed else "")
    return Measurement(
        measurement.points, tuple(us[:count]), tuple(us[count:]), measurement.seconds, measurement.preparing, failure
    )
