"""``sglang-w4afp8 tune``: measure launches on this GPU and write the files that serving uses.

Every file is written after every cell and a second run goes on where the first stopped. Servers started afterwards use
the files by themselves; ``--out`` is for files that are to be sent or shipped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import streaming, sweep, tune_streaming
from sglang_w4afp8.kernels.ops.moe import launch_table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-w4afp8 tune", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, help=f"folder of the files (default: {tuned_config.user_directory()})")
    parser.add_argument("--hidden", type=int, nargs="*", default=list(sweep.HIDDEN), help="K of the requant")
    parser.add_argument("--inner", type=int, nargs="*", default=[sweep.INNER[0]], help="N of SiLU-and-multiply")
    parser.add_argument("--experts", type=int, nargs="+", default=list(streaming.EXPERTS), help="local experts")
    parser.add_argument("--rows", type=int, nargs="+", default=list(streaming.ROWS), help="mean live rows per expert")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file already holds")
    return parser


def main(argv: Sequence[str]) -> int:
    """Tune the streaming kernels; returns 2 without a GPU."""
    options = _parser().parse_args(argv)
    gpu = tuned_config.gpu_name()
    if gpu is None or not torch.cuda.is_available():
        print("tune: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    folder = options.out or tuned_config.user_directory()
    path = folder / tuned_config.file_name(launch_table.KIND, gpu)
    tune_streaming.tune(path, options.hidden, options.inner, options.experts, options.rows, keep=not options.fresh)
    print(path)
    return 0
