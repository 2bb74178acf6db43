"""Measured launches of the two Triton grouped GEMMs: the file format, its look-up, and the rule where no file fits.

A file holds shapes: (N, K, local experts) with the tiles' ``block_n`` of both GEMMs, which is the layout that the weights get
when they are loaded and therefore one for all row counts, and a list of launches by ``expected_m``. Each entry also says what
the layer took with them and what our CUTLASS chain took in the same run, which is what ``auto`` decides by.

A layer takes the entry of its N and K with the nearest experts, no farther than a factor of ``EXPERTS_BOUND``, and in it the
launch of the nearest ``expected_m``, both on a logarithmic scale (a tie goes to the larger). Launches other than ``block_n``
change speed only, never bytes.

Without an entry the rule serves: :func:`rule_block_ns` and :func:`rule`, computed from the sizes and the GPU.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe.launch_table import flag_field, integer_field
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GROUP_SIZE, GroupedGemmLaunch

KIND = "two_kernels"
# Raised whenever the kernels or the weights' layout change, so that what was tuned for another one is not used.
SCHEDULE = "3"
# How many times more or fewer experts an entry may be for: 36 and 48 take that of 32, 18 and 12 that of 16.
EXPERTS_BOUND = 1.5
# What `auto` may lose at any row count to win at the others: the limit that the backend is held to.
LOSS = 1.02
# The rows of a call without an estimate: from there on a larger tile costs less than a smaller one would.
ROWS_WITHOUT_ESTIMATE = 8
# Of one block on Hopper, in bytes: what a launch's stages need beyond it cannot be launched.
_SHARED_MEMORY = 227 * 1024
# Registers of a thread that accumulators may take before they spill.
_ACCUMULATORS_MAX = 128


@dataclass(frozen=True)
class MeasuredPair:
    """Both GEMMs' launches at one ``expected_m``.

    Attributes:
        expected_m: the dispatcher's estimate it was measured at.
        gate_up, down: the launches.
        triton_us, cutlass_us: the layer with them and with our CUTLASS chain, under the routing where Triton does worst
            (no server knows its routing beforehand); None where it was not compared.
    """

    expected_m: int
    gate_up: GroupedGemmLaunch
    down: GroupedGemmLaunch
    triton_us: float | None = None
    cutlass_us: float | None = None


@dataclass(frozen=True)
class ShapeLaunches:
    """The launches of one (N, K, experts), in rising ``expected_m``; all of them have the same two ``block_n``.

    Attributes:
        pairs: by ``expected_m``.
        measured: what it was measured with: driver, versions, date; empty where the file does not say.
    """

    pairs: tuple[MeasuredPair, ...]
    measured: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def block_ns(self) -> tuple[int, int]:
        """``block_n`` of the first and of the second GEMM: the layout of the weights."""
        return self.pairs[0].gate_up.block_n, self.pairs[0].down.block_n

    def at(self, expected_m: int) -> MeasuredPair:
        """The launches for an estimate."""
        by_rows = {pair.expected_m: pair for pair in self.pairs}
        return by_rows[_nearest(list(by_rows), expected_m)]

    def covers(self, largest_expected_m: int) -> bool:
        """Whether what was measured says anything of a layer whose estimates go up to this one.

        Twice the largest measured count is still nearer to it than to the next one that would have been measured.
        """
        return largest_expected_m <= 2 * self.pairs[-1].expected_m and any(
            pair.triton_us is not None and pair.cutlass_us is not None for pair in self.pairs
        )

    def triton_wins(self, largest_expected_m: int) -> bool:
        """Whether a layer whose estimates go up to this one is to be regrouped.

        The layout is one for all row counts, so a layer is served by one backend at all of them. It is regrouped only where
        that is faster over the measured counts together, and at none of them slower than CUTLASS by more than ``LOSS``.
        Between two measured counts either may be what a call is like, so the next one above counts too.
        """
        if not self.covers(largest_expected_m):
            return False
        above = next((i for i, pair in enumerate(self.pairs) if pair.expected_m >= largest_expected_m), len(self.pairs))
        within = self.pairs[: above + 1]
        compared = [(pair.triton_us, pair.cutlass_us) for pair in within]
        if any(triton is None or cutlass is None for triton, cutlass in compared):
            return False
        gain = sum(math.log(cutlass / triton) for triton, cutlass in compared)
        return gain > 0 and all(triton <= LOSS * cutlass for triton, cutlass in compared)


# (N, K, experts) -> launches; N is the layer's intermediate size and K its hidden size
Table = Mapping[tuple[int, int, int], ShapeLaunches]


def _nearest(measured: Sequence[int], wanted: int) -> int:
    return min(measured, key=lambda value: (abs(math.log(value / max(1, wanted))), -value))


def _parse_launch(entry: Mapping[str, Any], block_n: int, columns: int, width: int, parts: int) -> GroupedGemmLaunch:
    launch = GroupedGemmLaunch(
        block_n=block_n,
        block_m=integer_field(entry, "block_m", least=8, most=256, power_of_two=True),
        groups_per_step=integer_field(entry, "groups_per_step", most=8, power_of_two=True),
        num_warps=integer_field(entry, "num_warps", most=16, power_of_two=True),
        num_stages=integer_field(entry, "num_stages", most=8),
        look_up=flag_field(entry, "look_up"),
        max_registers=integer_field(entry, "max_registers", least=32, most=255) if "max_registers" in entry else None,
    )
    if columns % block_n:
        raise ValueError(f"block_n: is {block_n}, must divide {columns}")
    if (width // GROUP_SIZE) % launch.groups_per_step:
        raise ValueError(f"groups_per_step: is {launch.groups_per_step}, must divide {width // GROUP_SIZE} groups")
    stage = launch.groups_per_step * (parts * block_n * GROUP_SIZE // 2 + launch.block_m * GROUP_SIZE)
    if launch.num_stages * stage > _SHARED_MEMORY:
        raise ValueError(
            f"num_stages: is {launch.num_stages} of {stage} bytes, must fit into {_SHARED_MEMORY} bytes of shared memory"
        )
    accumulators = parts * block_n * launch.block_m // (32 * launch.num_warps)
    if accumulators > _ACCUMULATORS_MAX:
        raise ValueError(
            f"block_m: with block_n makes {accumulators} accumulators a thread, must be at most {_ACCUMULATORS_MAX}"
        )
    return launch


def _microseconds(entry: Mapping[str, Any], field: str) -> float | None:
    value = entry.get(field)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{field}: is {value!r}, must be a positive number or absent")
    return float(value)


def _parse_provenance(entry: Any) -> dict[str, str]:
    if not isinstance(entry, Mapping) or not all(isinstance(text, str) for pair in entry.items() for text in pair):
        raise ValueError(f"measured: is {entry!r}, must be names of versions and their texts")
    return dict(entry)


def parse(data: Mapping[str, Any]) -> Table:
    """The table of a file's ``data``; any malformed entry refuses the whole file (ValueError, KeyError, TypeError)."""
    table: dict[tuple[int, int, int], ShapeLaunches] = {}
    for shape in data["shapes"]:
        n, k, experts = (integer_field(shape, field) for field in ("n", "k", "experts"))
        first, second = (
            integer_field(shape, field, least=16, most=256, power_of_two=True)
            for field in ("gate_up_block_n", "down_block_n")
        )
        pairs = [
            MeasuredPair(
                integer_field(entry, "expected_m"),
                _parse_launch(entry["gate_up"], first, n, k, parts=2),
                _parse_launch(entry["down"], second, k, n, parts=1),
                _microseconds(entry, "triton_us"),
                _microseconds(entry, "cutlass_us"),
            )
            for entry in shape["launches"]
        ]
        if not pairs:
            raise ValueError(f"launches: n {n}, k {k}, experts {experts} has none")
        if len({pair.expected_m for pair in pairs}) != len(pairs) or (n, k, experts) in table:
            raise ValueError(f"launches: n {n}, k {k}, experts {experts} stands there twice")
        table[n, k, experts] = ShapeLaunches(
            tuple(sorted(pairs, key=lambda pair: pair.expected_m)), _parse_provenance(shape.get("measured", {}))
        )
    if not table:
        raise ValueError("shapes: none")
    return table


def _hints(launch: GroupedGemmLaunch) -> dict[str, int | bool]:
    return {name: value for name, value in launch.__dict__.items() if name != "block_n" and value is not None}


def to_data(table: Table) -> dict[str, Any]:
    """``data`` of a file; the inverse of :func:`parse`."""
    shapes = []
    for (n, k, experts), launches in sorted(table.items()):
        first, second = launches.block_ns
        entries = [
            {
                "expected_m": pair.expected_m,
                "gate_up": _hints(pair.gate_up),
                "down": _hints(pair.down),
                **({"triton_us": pair.triton_us} if pair.triton_us is not None else {}),
                **({"cutlass_us": pair.cutlass_us} if pair.cutlass_us is not None else {}),
            }
            for pair in launches.pairs
        ]
        shape = {"n": n, "k": k, "experts": experts, "gate_up_block_n": first, "down_block_n": second}
        provenance = {"measured": dict(launches.measured)} if launches.measured else {}
        shapes.append({**shape, **provenance, "launches": entries})
    return {"shapes": shapes}


def rule(block_n: int, rows: int, gate_up: bool = False) -> GroupedGemmLaunch:
    """Without a table: a step over the rows is one tile up to 64 rows, as long as a thread can hold its accumulators, and the
    look-up where matrix products count more than instructions. Depth and warps are those that were best on an H200 with 64
    experts and up to 32 rows (``benchmark/results/h200/two_kernels_wide.search.json``)."""
    # A second step reads the weights again, so the smallest tile is for rows that hardly ever exceed it.
    block_m = 8 if rows <= 4 else 16 if rows <= 16 else 32 if rows <= 32 else 64
    threads, parts = 4 * 32, 2 if gate_up else 1
    block_m = min(block_m, _RULE_ACCUMULATORS * threads // (block_n * parts))
    # Three programs on a multiprocessor instead of two, which the first GEMM's smallest tiles can have without spilling.
    max_registers = 168 if gate_up and block_m <= 16 else None
    return GroupedGemmLaunch(block_n, block_m, 1, 4, 3, look_up=block_m >= 64, max_registers=max_registers)


# Most accumulators a thread: a first GEMM with twice as many took more than three times as long (the search file above).
_RULE_ACCUMULATORS = 64
# The layout without a table, where 128 columns leave programs enough.
RULE_BLOCK_NS = (128, 128)
# Multiprocessors of an H100 or H200.
SM_COUNT = 132


def rule_block_ns(n: int, k: int, experts: int, sm_count: int = SM_COUNT) -> tuple[int, int]:
    """``block_n`` of both GEMMs without a table: the layout that a size's weights get."""
    return RULE_BLOCK_NS


def rule_launches(
    n: int, k: int, experts: int, block_ns: tuple[int, int], rows: int, sm_count: int = SM_COUNT
) -> tuple[GroupedGemmLaunch, GroupedGemmLaunch]:
    """Launches of both GEMMs without a table."""
    return rule(block_ns[0], rows, gate_up=True), rule(block_ns[1], rows)


@functools.cache
def table_of(gpu: str) -> Table | None:
    """The tuned table of a GPU, by its name; None without a usable one. The log is told once of a file that is refused.

    Most GPUs have none. Whoever asked for a layer says what follows from that: CUTLASS, or launches by the rule.
    """
    return tuned_config.load_tuned(
        KIND,
        (gpu,),
        {"gpu": gpu, "schedule": SCHEDULE},
        parse,
        fallback="no table for the Triton grouped GEMMs",
        absent=logging.DEBUG,
    )


def shape_launches(gpu: str | None, n: int, k: int, experts: int) -> ShapeLaunches | None:
    """The measured launches of a layer's shape, those of the nearest number of experts within ``EXPERTS_BOUND``; None where
    there are none."""
    measured = nearest_experts(gpu, n, k, experts)
    return table_of(gpu)[n, k, measured] if measured is not None else None


def nearest_experts(gpu: str | None, n: int, k: int, experts: int) -> int | None:
    """The number of experts of the entry that serves a layer; None where there is none."""
    table = table_of(gpu) if gpu else None
    measured = [
        key[2] for key in table or () if key[:2] == (n, k) and max(key[2] / experts, experts / key[2]) <= EXPERTS_BOUND
    ]
    return _nearest(measured, experts) if measured else None


def entry_told(gpu: str | None, n: int, k: int, experts: int) -> str:
    """The entry that serves a layer, for people: of how many experts, and what it was measured with where it says so."""
    shape = shape_launches(gpu, n, k, experts)
    if shape is None:
        return "no entry of the table"
    about = shape.measured
    with_what = [f"{about[name]}" for name in ("date",) if name in about]
    with_what += [f"{word} {about[name]}" for name, word in _TOLD.items() if name in about]
    return f"the table's entry of {nearest_experts(gpu, n, k, experts)} experts" + (
        f" ({', '.join(with_what)})" if with_what else ""
    )


_TOLD = {"triton": "Triton", "sglang_kernel": "sglang-kernel"}


def mean_rows(expected_m: int | None) -> int:
    """Rows of an expert on average, at least 1: the dispatcher's estimate is one above it."""
    return ROWS_WITHOUT_ESTIMATE if expected_m is None else max(1, expected_m - 1)


@functools.lru_cache(maxsize=4096)
def launches(
    gpu: str | None, n: int, k: int, experts: int, block_ns: tuple[int, int], expected_m: int | None
) -> tuple[GroupedGemmLaunch, GroupedGemmLaunch]:
    """Launches of both GEMMs for weights that have this layout, from the table or by the rule."""
    shape = shape_launches(gpu, n, k, experts)
    # A table that was written after the weights were regrouped may want another layout.
    if shape is not None and shape.block_ns == block_ns:
        pair = shape.at(ROWS_WITHOUT_ESTIMATE if expected_m is None else expected_m)
        return pair.gate_up, pair.down
    return rule_launches(n, k, experts, block_ns, mean_rows(expected_m), SM_COUNT)


def clear_cache() -> None:
    """Forget the loaded table and every launch chosen from it (for tests, and after tuning in the same process)."""
    table_of.cache_clear()
    launches.cache_clear()
