"""Which compiled tile of the engine's grouped GEMM a call gets: by the version of sglang-kernel, the GPU, n, k and `m`.

What the compiled code chooses was read from every version's binary (`scripts/check_kernel_versions.py`) and is kept in
`compiled_tiles.json`. Versions that choose alike share an entry there, so a table measured with one of them holds for
the others. 0.4.9 and later have branches of their own that are taken only on a GPU whose name has the word H200.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
# Scales are interleaved by four where K allows it, and the generic branch has other tiles where it does not.
_GENERIC_MULTIPLE = 512

_BASE36 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MANGLED = re.compile(
    r"WarpSpecializedMixedInputILi(?P<stages>\d+)ENS\w_IJ(?P<cluster>.*?)EEENS\w_\d+Kernel\w+?EEENS\w_IJ(?P<tile>.*?)EEENS\w_IJ"
)
_PLAIN = re.compile(
    r"WarpSpecializedMixedInput<\s*(?:\(int\))?(?P<stages>\d+),\s*cute::tuple<(?P<cluster>[^K]*?)>\s*,"
    r"[^<]*?cute::tuple<(?P<tile>[^K]*?)>\s*>?\s*,\s*cute::tuple<"
)
_CONSTANT = re.compile(r"NS\w_1CILi(\d+)EE|NS(\w)_ILi(\d+)EE|S(\w)_")


def tile_label(kernel_name: str) -> str:
    """Short name of a compiled tile, `co_128x32x512_c2x1x1_s4` (schedule, tile, cluster, stages), from the kernel's
    name.

    Takes demangled names and mangled ones (common demanglers give up on this kernel). A name that is not recognised
    gives a
    digest: still exact for telling tiles apart.
    """
    schedule = next((short for word, short in (("Pingpong", "pp"), ("Cooperative", "co")) if word in kernel_name), None)
    sizes: tuple[str, list[int], list[int]] | None = None
    if found := _PLAIN.search(kernel_name):
        cluster, tile = (
            [int(x) for x in re.findall(r"<(?:\(int\))?(\d+)", found[part])] for part in ("cluster", "tile")
        )
        sizes = found["stages"], cluster, tile
    elif found := _MANGLED.search(kernel_name):
        sizes = _mangled_sizes(found)
    if schedule is None or sizes is None or len(sizes[1]) != 3 or len(sizes[2]) != 3:
        return "kernel_" + hashlib.sha1(kernel_name.encode()).hexdigest()[:10]
    stages, cluster, tile = sizes
    return f"{schedule}_{'x'.join(map(str, tile))}_c{'x'.join(map(str, cluster))}_s{stages}"


def _mangled_sizes(found: re.Match[str]) -> tuple[str, list[int], list[int]] | None:
    """Stages, cluster and tile of a mangled name: resolves the back-references (`SH_`) among its integral constants.

    Every constant that is new takes the next reference number, after the number of the template itself; the cluster's
    tuple, the schedule and the mainloop take one each before the tile.
    """
    template = re.search(r"NS(\w)_ILi", found["cluster"] + found["tile"])
    if template is None:
        return None
    next_reference = _BASE36.index(template[1]) + 1
    known: dict[int, int] = {}
    tuples: list[list[int]] = []
    for part in (found["cluster"], found["tile"]):
        values = []
        for first, _, later, back in _CONSTANT.findall(part + "E"):
            if back:
                value = known.get(_BASE36.index(back))
                if value is None:
                    return None
            else:
                value = int(first or later)
                known[next_reference] = value
                next_reference += 1
            values.append(value)
        next_reference += 3
        tuples.append(values)
    return found["stages"], tuples[0], tuples[1]


@dataclass(frozen=True)
class Tile:
    """What a tile's label says.

    Attributes:
        columns: of the output, which are rows of the weights.
        rows: of the activations.
        k: of one step along K.
        cluster: programs that share their loads.
    """

    columns: int
    rows: int
    k: int
    cluster: int

    @classmethod
    def of(cls, label: str) -> Tile | None:
        """From a label such as `co_128x32x512_c2x1x1_s4`; None where it is a digest."""
        found = re.fullmatch(r"(?:co|pp)_(\d+)x(\d+)x(\d+)_c(\d+)x\d+x\d+_s\d+", label)
        return cls(*(int(number) for number in found.groups())) if found else None


@dataclass(frozen=True)
class Branch:
    """The compiled choice for one (n, k): `limits` are the last `m` of every tile but the last."""

    limits: tuple[int, ...]
    tiles: tuple[str, ...]

    def tile_at(self, m: int) -> str:
        """Label of the tile that a call with this `m` gets."""
        return self.tiles[sum(m > limit for limit in self.limits)]


@cache
def _dispatches() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["dispatches"]


def known_versions() -> list[str]:
    """Every version of sglang-kernel that was read."""
    return [version for entry in _dispatches() for version in entry["versions"]]


def _dispatch(version: str | None) -> dict[str, Any] | None:
    return next((entry for entry in _dispatches() if version in entry["versions"]), None)


def same_tiles(version: str) -> list[str]:
    """Versions that choose the same tiles for all sizes, this one among them; none where this one was not read."""
    entry = _dispatch(version)
    return list(entry["versions"]) if entry else []


def branch(version: str | None, gpu: str | None, n: int, k: int) -> Branch | None:
    """The compiled choice for 2-D tensors of (n, k); None where the version was not read."""
    entry = _dispatch(version)
    if entry is None:
        return None
    words = (gpu or "").split(" ")
    own = [b for b in entry["branches"] if (b["n"], b["k"]) == (n, k) and (not b["gpu"] or b["gpu"] in words)]
    generic = entry["generic"]["512" if k % _GENERIC_MULTIPLE == 0 else "128"]
    found = max(own, key=lambda b: bool(b["gpu"]), default=generic)
    return Branch(tuple(found["limits"]), tuple(found["tiles"]))
