"""``sglang-w4afp8 bench requant|bf16|silu|layer``: the sweeps behind the results files, on any GPU.

Writes one JSON per kind after every cell, so an interrupted run resumes where it stopped.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.measure import Results, run_metadata
from sglang_w4afp8.bench.report import geometric_mean
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import set_launch_lookup

# What is measured, and the results file of it.
KINDS = {"requant": "requant.json", "bf16": "bf16.json", "silu": "silu.json", "layer": "streaming.json"}
# Hidden sizes of DeepSeek-V3 and Kimi-class models; intermediate sizes of the former and of GLM-class ones.
HIDDEN = (7168, 3584)
INNER = (2048, 1536)
# Local experts where a kind is measured at fewer of them than usual.
FEWER_EXPERTS = {"bf16": (8, 64, 256)}


def _sweep(
    path: Path,
    shapes: Iterable[tuple[dict[str, int], Callable[[], Any]]],
    providers: Callable[[Any, streaming.Cell], Any],
    cells: Sequence[streaming.Cell],
    repeats: int,
    placements: int,
) -> list[dict[str, Any]]:
    results = Results(path, run_metadata(repeats=repeats, placements=placements))
    # The turns are shared out among the placements.
    turns = -(-repeats // placements)
    shapes = list(shapes)
    with tqdm(total=len(shapes) * len(cells), unit="cell", desc=path.stem, disable=None) as progress:
        for shape, make_buffers in shapes:
            buffers: list[Any] = []
            for cell in cells:
                key = {**shape, **dataclasses.asdict(cell)}
                if not results.holds(key):
                    if not buffers:
                        buffers = [make_buffers() for _ in range(placements)]
                    timed = [streaming.measure_cell(providers(place, cell), turns) for place in buffers]
                    results.add({**key, "expected_m": cell.expected_m(), **streaming.over_placements(timed)})
                progress.update()
    return results.cells


def _folded(label: str, ratios: Sequence[tuple[float, dict[str, Any]]]) -> str:
    mean = geometric_mean(ratio for ratio, _ in ratios)
    worst, cell = min(ratios, key=lambda entry: entry[0])
    return f"{label}: geometric mean {mean:.3f}, worst {worst:.3f} at {cell}"


def _per_byte(cell: dict[str, Any]) -> float:
    """Bytes a second of the BF16 path over those of the fp8 path in the same cell."""
    total = cell["experts"] * cell["rows"]
    rate = streaming.bf16_bytes(total, cell["k"]) / cell["ours_us"]
    return rate / (streaming.requant_bytes(total, cell["k"]) / cell["fp8_us"])


def summarize(cells: Sequence[dict[str, Any]]) -> str:
    """Geometric mean and worst cell of engine/ours and of copy/ours as text; of BF16 also against fp8, per byte."""
    compared = [cell for cell in cells if cell.get("engine_us")]
    beside = [cell for cell in cells if cell.get("fp8_us")]
    lines = (
        ("engine/ours", [(cell["engine_us"] / cell["ours_us"], cell) for cell in compared]),
        # A copy moves as many bytes, so this is the ratio of bytes a second too.
        ("copy/ours", [(cell["copy_us"] / cell["ours_us"], cell) for cell in cells]),
        ("copy/ours of fp8", [(cell["copy_fp8_us"] / cell["fp8_us"], cell) for cell in beside]),
        ("bytes a second, ours over ours of fp8", [(_per_byte(cell), cell) for cell in beside]),
    )
    return "\n".join(_folded(label, ratios) for label, ratios in lines if ratios)


def run(
    kind: str,
    out: Path,
    experts: Sequence[int],
    rows: Sequence[int],
    padded: int,
    repeats: int,
    placements: int = streaming.PLACEMENTS,
) -> list[dict[str, Any]]:
    """Measure one kind over its grid and write ``out``; returns the cells."""
    cells = list(streaming.grid(experts, rows, streaming.ROUTINGS, padded))
    largest = max(experts)
    if kind == "requant":
        shapes = [({"k": k}, lambda k=k: streaming.RequantBuffers(largest, padded, k)) for k in HIDDEN]
        return _sweep(out, shapes, streaming.requant_providers, cells, repeats, placements)
    if kind == "bf16":
        shapes = [({"k": HIDDEN[0]}, lambda: streaming.Bf16Buffers(largest, padded, HIDDEN[0]))]
        return _sweep(out, shapes, streaming.bf16_providers, cells, repeats, placements)
    if kind == "silu":
        shapes = [({"n": n}, lambda n=n: streaming.SiluBuffers(largest, padded, n)) for n in INNER]
        return _sweep(out, shapes, streaming.silu_providers, cells, repeats, placements)
    shapes = [
        (
            {"k": HIDDEN[0], "n": INNER[0]},
            lambda: (
                streaming.RequantBuffers(largest, padded, HIDDEN[0]),
                streaming.SiluBuffers(largest, padded, INNER[0]),
            ),
        )
    ]
    return _sweep(
        out, shapes, lambda buffers, cell: streaming.layer_providers(*buffers, cell), cells, repeats, placements
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-w4afp8 bench", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "kind",
        choices=list(KINDS),
        help="what to measure; `bf16` is the requant of a BF16 payload, `layer` a layer's streaming steps together",
    )
    parser.add_argument("--out", type=Path, help="results file (default: here, by its usual name)")
    parser.add_argument("--experts", type=int, nargs="+", help="local experts")
    parser.add_argument("--rows", type=int, nargs="+", default=list(streaming.ROWS), help="mean live rows per expert")
    parser.add_argument("--padded", type=int, default=streaming.PADDED, help="padded rows per expert")
    parser.add_argument("--repeats", type=int, default=41, help="timed turns of every provider")
    parser.add_argument(
        "--placements",
        type=int,
        default=streaming.PLACEMENTS,
        help="sets of buffers, each somewhere else in memory, that the turns are shared out among",
    )
    parser.add_argument(
        "--untuned",
        action="store_true",
        help="launches of the rules, as on a GPU without a tuned file (other file names)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure one kind; returns 2 without a GPU."""
    options = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("bench: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    out = options.out or Path(KINDS[options.kind])
    if options.untuned:
        set_launch_lookup(None)
        out = options.out or out.with_stem(f"{out.stem}_untuned")
    experts = options.experts or FEWER_EXPERTS.get(options.kind, streaming.EXPERTS)
    cells = run(options.kind, out, experts, options.rows, options.padded, options.repeats, options.placements)
    print(summarize(cells))
    return 0
