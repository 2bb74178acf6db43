"""``sglang-w4afp8 tune``: measure launches and GEMM tiles on this GPU and write the files that serving uses.

What was measured is kept after every cell, and a second run goes on where the first stopped. Servers started afterwards use
the files by themselves; ``--out`` is for files that are to be sent or shipped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import streaming, sweep, tune_streaming
from sglang_w4afp8.kernels.ops.moe import launch_table
from sglang_w4afp8.srt.layers.moe import w4a8_gemm_tuning

KINDS = ("streaming", "gemm")


def _kind(text: str) -> str:
    if text not in KINDS:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be {' or '.join(KINDS)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-w4afp8 tune", description=__doc__.partition("\n\n")[0])
    # A type and not `choices`: argparse checks the default of an empty list against those as one value.
    parser.add_argument(
        "kinds", nargs="*", type=_kind, default=list(KINDS), help=f"{' or '.join(KINDS)} (default: all)"
    )
    parser.add_argument("--out", type=Path, help=f"folder of the files (default: {tuned_config.user_directory()})")
    parser.add_argument("--hidden", type=int, nargs="*", default=list(sweep.HIDDEN), help="K of the requant")
    parser.add_argument("--inner", type=int, nargs="*", default=list(sweep.INNER), help="N of SiLU-and-multiply")
    parser.add_argument(
        "--gemm",
        type=int,
        nargs=2,
        action="append",
        metavar=("N", "K"),
        help="sizes of a grouped GEMM, may be repeated (default: those of DeepSeek-V3)",
    )
    parser.add_argument("--experts", type=int, nargs="+", default=list(streaming.EXPERTS), help="local experts")
    parser.add_argument("--rows", type=int, nargs="+", default=list(streaming.ROWS), help="mean live rows per expert")
    parser.add_argument("--fresh", action="store_true", help="measure again what the files hold")
    return parser


def _tune_gemm(options: argparse.Namespace) -> Path:
    shapes = [tuple(shape) for shape in options.gemm or w4a8_gemm_tuning.DEEPSEEK_SHAPES]
    cells = w4a8_gemm_tuning.plan_cells(shapes, options.experts, options.rows)
    with tqdm(
        total=len(w4a8_gemm_tuning.CHOOSING_STAGES) * len(cells), unit="pass", desc="tune gemm", disable=None
    ) as progress:
        return w4a8_gemm_tuning.tune_gemm(
            shapes,
            options.experts,
            rows=options.rows,
            directory=options.out,
            keep=not options.fresh,
            done=lambda cell, stage: progress.update(),
        )


def main(argv: Sequence[str]) -> int:
    """Tune what was asked for; returns 2 without a GPU, 1 when a kind cannot be tuned here."""
    options = _parser().parse_args(argv)
    gpu = tuned_config.gpu_name()
    if gpu is None or not torch.cuda.is_available():
        print("tune: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    folder = options.out or tuned_config.user_directory()
    status = 0
    if "streaming" in options.kinds:
        path = folder / tuned_config.file_name(launch_table.KIND, gpu)
        tune_streaming.tune(path, options.hidden, options.inner, options.experts, options.rows, keep=not options.fresh)
        tuned_config.clear_cache()
        launch_table.clear_cache()
        print(path)
    if "gemm" in options.kinds:
        try:
            print(_tune_gemm(options))
        except (ImportError, RuntimeError) as error:
            print(f"tune: gemm: {error}", file=sys.stderr)
            status = 1
    return status
