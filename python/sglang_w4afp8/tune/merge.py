"""``sglang-w4afp8 tune merge``: one tuned file of several people's, with what each entry was measured with kept beside it.

Files must be of one kind, one GPU and one schedule of the kernels, and of one version of sglang-kernel where that decides what
was measured. Of two entries for the same sizes the one that was measured later is taken; where neither says when, the later
file on the command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.srt.layers.moe import w4a8_gemm

# Of a file's metadata, what an entry that does not say its own was measured with.
_PROVENANCE = ("created", "driver", "torch", "triton", "kernel_version", "package_version")
_MEASURED = "measured"


class MergeError(ValueError):
    """Files that cannot be one; the message names the file and says why."""


@dataclass(frozen=True)
class Kind:
    """What makes files of one kind.

    Attributes:
        parse: refuses data that serving could not use.
        same: metadata that must be equal.
        key: what names a shape; of two with the same key one is taken.
        parts: the list inside a shape whose members are taken one by one, and what names them; empty: shapes are whole.
    """

    parse: Callable[[Mapping[str, Any]], Any]
    same: tuple[str, ...]
    key: tuple[str, ...]
    parts: tuple[str, tuple[str, ...]] | None = None

    def entries(self, data: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]]:
        """(key, the entry, the shape around it) of everything that is taken or left as a whole."""
        found = []
        for shape in data["shapes"]:
            key = tuple(shape[name] for name in self.key)
            if self.parts is None:
                found.append((key, dict(shape), {}))
                continue
            field, names = self.parts
            around = {name: value for name, value in shape.items() if name != field}
            found += [((*key, *(part[name] for name in names)), dict(part), around) for part in shape[field]]
        return found

    def names(self) -> tuple[str, ...]:
        return self.key if self.parts is None else (*self.key, *self.parts[1])


KINDS: Mapping[str, Kind] = {
    grouped_gemm_table.KIND: Kind(grouped_gemm_table.parse, ("gpu", "schedule"), ("n", "k", "experts")),
    w4a8_gemm.TABLE_KIND: Kind(
        w4a8_gemm.GemmTileTable.parse, ("gpu", "kernel_version"), ("n", "k"), ("choices", ("experts", "rows"))
    ),
}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and data of a file, both whole.

    Raises:
        MergeError: it cannot be read, or it is no tuned file.
    """
    try:
        data = tuned_config.read_tuned(path, {})
        metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    except tuned_config.TunedConfigError as error:
        raise MergeError(f"{path}: {error}") from error
    if not isinstance(data.get("shapes"), list):
        raise MergeError(f"{path}: holds no shapes, must be a file of {' or '.join(KINDS)}")
    return metadata, dict(data)


def kind_of(path: Path, data: Mapping[str, Any]) -> Kind:
    """The kind whose files hold what this one does.

    Raises:
        MergeError: none, or the entries are malformed.
    """
    reasons = []
    for name, kind in KINDS.items():
        try:
            kind.parse(data)
        except Exception as error:  # a parser may trip over anything that a file holds
            reasons.append(f"{name}: {error}")
        else:
            return kind
    raise MergeError(f"{path}: is of no known kind ({'; '.join(reasons)})")


def merge(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Metadata and data of all files together, and a line for each entry that another one took the place of.

    Raises:
        MergeError: a file cannot be read, or cannot stand beside the first.
    """
    first_metadata, first_data = _read(paths[0])
    kind = kind_of(paths[0], first_data)
    taken: dict[tuple[Any, ...], tuple[Path, dict[str, Any], dict[str, Any]]] = {}
    lines = []
    for path in paths:
        metadata, data = _read(path)
        if kind_of(path, data) is not kind:
            raise MergeError(f"{path}: is of another kind than {paths[0]}")
        for name in kind.same:
            if metadata.get(name) != first_metadata.get(name):
                wanted = f"{first_metadata.get(name)!r} as in {paths[0]}"
                raise MergeError(f"{path}: {name} is {metadata.get(name)!r}, must be {wanted}")
        own = {name: str(metadata[name]) for name in _PROVENANCE if name in metadata}
        for key, plain, around in kind.entries(data):
            entry = {**plain, _MEASURED: plain.get(_MEASURED) or around.get(_MEASURED) or own}
            known = taken.get(key)
            if known is not None:
                newer = _date(entry) >= _date(known[1])
                kept, left = (path, known[0]) if newer else (known[0], path)
                if kept != left:
                    lines.append(f"{_told(kind, key)}: from {kept}, not {left}")
                if not newer:
                    continue
            taken[key] = path, entry, around
    shapes = _shapes(kind, taken)
    kind.parse({"shapes": shapes})
    return first_metadata, {"shapes": shapes}, lines


def _shapes(
    kind: Kind, taken: Mapping[tuple[Any, ...], tuple[Path, dict[str, Any], dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The shapes of a file from the entries that were taken.

    Raises:
        MergeError: parts of one shape do not fit together.
    """
    ordered = sorted(taken.items(), key=lambda item: item[0])
    if kind.parts is None:
        return [entry for _, (_, entry, _) in ordered]
    shapes: dict[tuple[Any, ...], tuple[Path, dict[str, Any]]] = {}
    field = kind.parts[0]
    for key, (path, entry, around) in ordered:
        around = {name: value for name, value in around.items() if name != _MEASURED}
        first, shape = shapes.setdefault(key[: len(kind.key)], (path, {**around, field: []}))
        if {name: value for name, value in shape.items() if name != field} != around:
            raise MergeError(f"{path}: {_told(kind, key)} was measured with other tiles than in {first}")
        shape[field].append(entry)
    return [shape for _, shape in shapes.values()]


def _date(entry: Mapping[str, Any]) -> str:
    """When an entry was measured, as YYYY-MM-DD; empty where it does not say."""
    return entry[_MEASURED].get("date") or entry[_MEASURED].get("created") or ""


def _told(kind: Kind, key: Sequence[Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(kind.names(), key, strict=True))


def main(argv: Sequence[str]) -> int:
    """Merge the files; returns 2 where they cannot be one, and then writes nothing."""
    parser = argparse.ArgumentParser(prog="sglang-w4afp8 tune merge", description=__doc__.partition("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="tuned files of one kind and GPU")
    parser.add_argument("--out", type=Path, required=True, help="the merged file; may be one of them")
    options = parser.parse_args(argv)
    try:
        metadata, data, lines = merge(options.files)
        tuned_config.write_tuned(options.out, metadata, data)
    except (MergeError, OSError) as error:
        print(f"tune merge: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(line)
    print(f"{options.out}: {len(data['shapes'])} shapes")
    return 0
