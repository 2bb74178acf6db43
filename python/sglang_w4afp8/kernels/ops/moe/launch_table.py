"""Measured launches of the streaming kernels: the file format, its look-up, and how they reach the kernels.

A file holds, per kernel ("requant", "silu"), columns (scale groups of a row, or N) and local experts, a list of launches by
``expected_m``. A shape between the measured ones takes the nearest columns and experts on a logarithmic scale, and the
launch of the largest measured ``expected_m`` that is not above its own. Geometry cannot change bytes, so a poor match costs
time only.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch

KIND = "streaming"
# Raised whenever the kernels' schedule changes, so that launches tuned for another schedule are not used.
SCHEDULE = "3"
_KERNELS = ("requant", "silu")
# Bounds of what compiles and launches everywhere: threads of a block, programs along the grid's last two axes (which the
# experts share), elements of one Triton tensor. Beyond them a launch would fail in the server, so the file is refused.
_NUM_WARPS_MAX = 16
_PROGRAMS_MAX = 32_768
_TILE_ELEMENTS_MAX = 2**20
_SLACK_MAX = 1024


@dataclass(frozen=True)
class MeasuredLaunch:
    """A launch as measured, with its cap as a multiple of the expected rows, because a table holds for every M.

    Attributes:
        expected_m: the dispatcher's estimate it was measured at.
        cap_slack: rows that stay with their expert, in multiples of ``expected_m``.
        speculative_slack: rows that may be loaded unseen, in multiples of the mean behind ``expected_m`` (one less); 0.5
            is half of it.
        others: as in :class:`MaskedRowsLaunch`.
    """

    expected_m: int
    col_block: int
    m_grid: int
    cap_slack: int
    row_block: int
    num_warps: int
    overflow_experts: int
    speculative_slack: float
    overflow_first: bool = False

    def launch(self, expected_rows: int, max_rows: int | None = None) -> MaskedRowsLaunch:
        """The launch at an estimate; its cap at most ``max_rows``, where they are known."""
        row_cap = self.cap_slack * max(1, expected_rows)
        return MaskedRowsLaunch(
            self.col_block,
            self.m_grid,
            row_cap if max_rows is None else min(max_rows, row_cap),
            self.row_block,
            self.num_warps,
            self.overflow_experts,
            math.ceil(self.speculative_slack * max(1, expected_rows - 1)),
            self.overflow_first,
        )


# kernel -> columns -> experts -> launches in rising expected_m
Table = Mapping[str, Mapping[int, Mapping[int, tuple[MeasuredLaunch, ...]]]]


def integer_field(
    entry: Mapping[str, Any], field: str, least: int = 1, most: int = 2**20, power_of_two: bool = False
) -> int:
    """An integer of a file's entry; ValueError that begins with the field's name where it is none or out of bounds."""
    value = entry[field]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{field}: is {value!r}, must be an integer from {least} to {most}")
    if power_of_two and value & (value - 1):
        raise ValueError(f"{field}: is {value}, must be a power of two")
    return value


def _slack(entry: Mapping[str, Any], field: str) -> float:
    value = entry[field]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _SLACK_MAX:
        raise ValueError(f"{field}: is {value!r}, must be a number from 0 to {_SLACK_MAX}")
    return value


def flag_field(entry: Mapping[str, Any], field: str) -> bool:
    value = entry[field]
    if not isinstance(value, bool):
        raise ValueError(f"{field}: is {value!r}, must be true or false")
    return value


def _parse_launch(entry: Mapping[str, Any], elements_of_column: int) -> MeasuredLaunch:
    launch = MeasuredLaunch(
        expected_m=integer_field(entry, "expected_m"),
        col_block=integer_field(entry, "col_block", power_of_two=True),
        m_grid=integer_field(entry, "m_grid", most=_PROGRAMS_MAX),
        cap_slack=integer_field(entry, "cap_slack", most=_SLACK_MAX),
        row_block=integer_field(entry, "row_block", power_of_two=True),
        num_warps=integer_field(entry, "num_warps", most=_NUM_WARPS_MAX, power_of_two=True),
        overflow_experts=integer_field(entry, "overflow_experts", most=_PROGRAMS_MAX),
        speculative_slack=_slack(entry, "speculative_slack"),
        overflow_first=flag_field(entry, "overflow_first"),
    )
    tile = launch.row_block * launch.col_block * elements_of_column
    if tile > _TILE_ELEMENTS_MAX:
        raise ValueError(
            f"col_block: with row_block makes a tile of {tile} elements, must be at most {_TILE_ELEMENTS_MAX}"
        )
    return launch


def _count(text: str, what: str) -> int:
    """A key of the file that is a number; a look-up takes its logarithm."""
    if int(text) < 1:
        raise ValueError(f"{what}: is {text}, must be at least 1")
    return int(text)


def parse(data: Mapping[str, Any]) -> Table:
    """The table of a file's ``data``; any malformed entry refuses the whole file (ValueError, KeyError, TypeError)."""
    unknown = set(data) - set(_KERNELS)
    if unknown:
        raise ValueError(f"unknown kernels {sorted(unknown)}, known are {list(_KERNELS)}")
    table: dict[str, dict[int, dict[int, tuple[MeasuredLaunch, ...]]]] = {}
    for kernel, by_columns in data.items():
        for columns, by_experts in by_columns.items():
            for experts, entries in by_experts.items():
                # A column of the requant is a scale group.
                width = 128 if kernel == "requant" else 1
                launches = sorted(
                    (_parse_launch(entry, width) for entry in entries), key=lambda entry: entry.expected_m
                )
                if not launches:
                    raise ValueError(f"{kernel} {columns} {experts}: no launches")
                of_columns = table.setdefault(kernel, {}).setdefault(_count(columns, "columns"), {})
                of_columns[_count(experts, "experts")] = tuple(launches)
    return table


def to_data(launches: Mapping[tuple[str, int, int], list[MeasuredLaunch]]) -> dict[str, Any]:
    """``data`` of a file from launches keyed by (kernel, columns, experts); the inverse of :func:`parse`."""
    data: dict[str, Any] = {}
    for (kernel, columns, experts), entries in sorted(launches.items()):
        ordered = sorted(entries, key=lambda entry: entry.expected_m)
        data.setdefault(kernel, {}).setdefault(str(columns), {})[str(experts)] = [asdict(entry) for entry in ordered]
    return data


def _nearest(measured: Mapping[int, Any], wanted: int) -> int:
    return min(measured, key=lambda value: (abs(math.log(value / max(1, wanted))), value))


def choose(table: Table, kernel: str, num_experts: int, columns: int, expected_rows: int) -> MaskedRowsLaunch | None:
    """The measured launch for a shape, or None when the table has nothing for this kernel."""
    by_columns = table.get(kernel)
    if not by_columns:
        return None
    by_experts = by_columns[_nearest(by_columns, columns)]
    launches = by_experts[_nearest(by_experts, num_experts)]
    below = [entry for entry in launches if entry.expected_m <= expected_rows]
    return (below[-1] if below else launches[0]).launch(expected_rows)


@functools.cache
def _table(gpu: str) -> Table | None:
    return tuned_config.load_tuned(
        KIND, (gpu,), {"gpu": gpu, "schedule": SCHEDULE}, parse, fallback="the launch geometry's rules"
    )


def lookup(
    kernel: str, num_experts: int, columns: int, expected_rows: int, device: torch.device
) -> MaskedRowsLaunch | None:
    """What the kernels ask before they apply their rules; None without a GPU or a usable file."""
    if device.type != "cuda":
        return None
    gpu = tuned_config.gpu_name(device.index)
    table = _table(gpu) if gpu else None
    return choose(table, kernel, num_experts, columns, expected_rows) if table else None


def clear_cache() -> None:
    """Forget the loaded table and every launch chosen from it, after tuning in the same process."""
    _table.cache_clear()
    ep_moe_kernels.set_launch_lookup(lookup)
