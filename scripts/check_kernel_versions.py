#!/usr/bin/env python3
"""Read from every sglang-kernel wheel that a supported engine pins which grouped-GEMM tile its compiled code takes for which
sizes, and compare it with what the package knows (`compiled_tiles.json`). Needs no GPU.

    python scripts/check_kernel_versions.py              # check
    python scripts/check_kernel_versions.py --write      # check, and write the file anew
    python scripts/check_kernel_versions.py --versions 0.4.10 0.4.11    # these only

Versions whose code takes the same tiles for all sizes share one entry: a table that was measured with one of them holds for
the others. Wheels are fetched through pip (370 MB each); of each only the library that is read is kept.

Exit status: 0 all well; 1 a version's tiles are not those of the file; 2 a wheel cannot be fetched or read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]

import cached_wheels  # noqa: E402
from emulated_gemm import Branch, CompiledGemm, UnreadableError  # noqa: E402
from sglang_w4afp8.kernels.ops.moe import compiled_tiles  # noqa: E402

FILE = compiled_tiles.FILE
ENGINES = ROOT / "docs" / "engine_versions.json"
# The code looks for one GPU by a word of its name; any other name stands for the rest.
GPU_WORDS = ("", "H200")
# Where branches of their own are looked for: widths of the experts' GEMMs of known models, whole and cut over ranks.
WIDTHS = (256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
# What stands for the rest: widths that no branch names, with a K that suits the interleaved scales and one that does not.
GENERIC = {512: (640, 2560), 128: (640, 640)}


def pinned_versions() -> list[str]:
    """Of sglang-kernel, oldest engine first."""
    return list(dict.fromkeys(entry["sglang_kernel"] for entry in json.loads(ENGINES.read_text(encoding="utf-8"))))


def _named(branch: Branch) -> dict[str, Any]:
    return {"limits": list(branch.limits), "tiles": [compiled_tiles.tile_label(name) for name in branch.kernels]}


def dispatch_of(library: Path) -> dict[str, Any]:
    """What the file says of one library, its versions left out."""
    gemm = CompiledGemm(library)
    generic = {str(multiple): _named(gemm.branch(n, k, "")) for multiple, (n, k) in GENERIC.items()}
    branches = []
    for word, n, k in itertools.product(GPU_WORDS, WIDTHS, WIDTHS):
        found = _named(gemm.branch(n, k, f"NVIDIA {word}"))
        known = next((b for b in branches if (b["gpu"], b["n"], b["k"]) == ("", n, k)), None)
        rest = {key: known[key] for key in ("limits", "tiles")} if known else generic["512" if k % 512 == 0 else "128"]
        if found != rest:
            branches.append({"gpu": word, "n": n, "k": k, **found})
    tiles = sorted({compiled_tiles.tile_label(name) for name in gemm.tiles()})
    return {"tiles": tiles, "generic": generic, "branches": branches}


def dispatches(libraries: dict[str, Path]) -> list[dict[str, Any]]:
    """The file's entries: versions of the same code together, in the order in which they are given."""
    found: list[dict[str, Any]] = []
    for version, library in libraries.items():
        dispatch = dispatch_of(library)
        same = next((e for e in found if {k: v for k, v in e.items() if k != "versions"} == dispatch), None)
        if same is None:
            found.append({"versions": [version], **dispatch})
        else:
            same["versions"].append(version)
    return found


def differences(known: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[str]:
    """What the file says wrongly of the versions that were read."""
    lines = []
    for entry in found:
        wanted = {key: value for key, value in entry.items() if key != "versions"}
        for version in entry["versions"]:
            holding = [e for e in known if version in e["versions"]]
            if not holding:
                lines.append(f"sglang-kernel {version}: not in {FILE.name}")
            elif any(holding[0][key] != value for key, value in wanted.items()):
                keys = ", ".join(key for key, value in wanted.items() if holding[0][key] != value)
                lines.append(f"sglang-kernel {version}: {keys} are not those of {FILE.name}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} anew")
    parser.add_argument("--versions", nargs="+", help="of sglang-kernel (default: all that supported engines pin)")
    options = parser.parse_args(argv)
    if options.write and options.versions:
        parser.error("--write: writes all versions, so it must stand without --versions")
    try:
        found = dispatches(cached_wheels.kernel_libraries(options.versions or pinned_versions()))
    except (cached_wheels.FetchError, UnreadableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.write:
        FILE.write_text(json.dumps({"dispatches": found}, indent=1) + "\n", encoding="utf-8")
        print(f"{FILE}: {sum(len(entry['versions']) for entry in found)} versions, {len(found)} sets of tiles")
        return 0
    known = json.loads(FILE.read_text(encoding="utf-8"))["dispatches"] if FILE.is_file() else []
    wrong = differences(known, found)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
