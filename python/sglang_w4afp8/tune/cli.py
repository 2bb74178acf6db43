"""``sglang-w4afp8 tune``: measure launches and GEMM tiles on this GPU and write the files that serving uses.

    sglang-w4afp8 tune two-kernels --model /models/GLM-5.3-W4AFP8 --ep 8
    sglang-w4afp8 tune all --model glm-5 --ep 8 16
    sglang-w4afp8 tune merge MINE.json THEIRS.json --out MERGED.json

What was measured is kept after every cell, and a second run goes on where the first stopped. Servers started afterwards use
the files by themselves; ``--out`` is for files that are to be sent or shipped.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench import streaming, sweep
from sglang_w4afp8.bench.expert_layer import make_every_patch_live
from sglang_w4afp8.bench.measure import run_metadata
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table, launch_table
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.tune import gemm_tiles, merge, sizes, two_kernels
from sglang_w4afp8.tune import streaming as tune_streaming

KINDS = ("streaming", "gemm", "two-kernels")
ALL = "all"
MERGE = "merge"
# Ranks that public deployments spread experts over, where --model is given without --ep.
RANKS = (8, 16)


def _kind(text: str) -> str:
    if text not in (*KINDS, ALL):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be {', '.join(KINDS)} or {ALL}, or {MERGE} with files")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a positive integer")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a positive number of seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-w4afp8 tune",
        description=__doc__.partition("\n\n")[0],
        epilog=f"sglang-w4afp8 tune {MERGE} FILE [FILE ...] --out FILE makes one file of several people's.",
    )
    # A type and not `choices`: argparse checks the default of an empty list against those as one value.
    parser.add_argument(
        "kinds", nargs="*", type=_kind, default=[ALL], help=f"{', '.join(KINDS)} or {ALL} (default: {ALL})"
    )
    parser.add_argument("--out", type=Path, help=f"folder of the files (default: {_user_directory()})")
    parser.add_argument(
        "--model",
        action="append",
        help=f"sizes of a model: its config.json, the folder of its checkpoint, or one of {', '.join(sizes.MODELS)}; may be "
        "repeated",
    )
    parser.add_argument(
        "--ep",
        type=_positive,
        nargs="+",
        default=list(RANKS),
        help="ranks that a model's experts are spread over (default: %(default)s)",
    )
    parser.add_argument(
        "--size",
        type=_positive,
        nargs=3,
        action="append",
        metavar=("N", "K", "E"),
        help="sizes of a layer by numbers: intermediate size, hidden size, experts on a rank; may be repeated",
    )
    parser.add_argument("--hidden", type=_positive, nargs="*", help="streaming: K of the requant")
    parser.add_argument("--inner", type=_positive, nargs="*", help="streaming: N of SiLU-and-multiply")
    parser.add_argument(
        "--gemm",
        type=_positive,
        nargs=2,
        action="append",
        metavar=("N", "K"),
        help="gemm: sizes of a grouped GEMM, may be repeated (default: those of the layers)",
    )
    parser.add_argument("--experts", type=_positive, nargs="+", help="streaming and gemm: local experts")
    parser.add_argument("--rows", type=_positive, nargs="+", help="mean live rows per expert")
    parser.add_argument("--wide", action="store_true", help="two-kernels: search every launch that fits")
    parser.add_argument(
        "--time-limit", type=_seconds, default=float("inf"), metavar="SECONDS", help="start nothing after this"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what the files hold")
    return parser


def _user_directory() -> str:
    try:
        return str(tuned_config.user_directory())
    except RuntimeError:
        return "none, as this user has no home: must be given"


def layer_sizes(options: argparse.Namespace) -> list[two_kernels.Size]:
    """The layers that were asked for, each once; DeepSeek-V3's without any.

    Raises:
        SizesError: a model's sizes cannot be told, or its experts do not divide.
    """
    found = [two_kernels.Size(*size) for size in options.size or ()]
    for name in options.model or ([] if found else ["deepseek-v3"]):
        model = sizes.of(name)
        if model.group_size != two_kernels.two.GROUP_SIZE:
            raise sizes.SizesError(
                f"model: {name} has weight scales of {model.group_size} values, must be {two_kernels.two.GROUP_SIZE}"
            )
        for ranks in options.ep:
            try:
                found.append(two_kernels.Size(model.inner, model.hidden, model.experts_on_a_rank(ranks)))
            except ValueError as error:
                raise sizes.SizesError(f"{error} (model {name})") from error
    return list(dict.fromkeys(found))


def _tune_streaming(options: argparse.Namespace, layers: Sequence[two_kernels.Size], folder: Path) -> Path:
    path = folder / tuned_config.file_name(launch_table.KIND, tuned_config.gpu_name() or "")
    by_model = bool(options.model or options.size)
    hidden = options.hidden if options.hidden is not None else None
    inner = options.inner if options.inner is not None else None
    if hidden is None:
        hidden = sorted({size.k for size in layers}) if by_model else list(sweep.HIDDEN)
    if inner is None:
        inner = sorted({size.n for size in layers}) if by_model else list(sweep.INNER)
    experts = options.experts or (sorted({size.experts for size in layers}) if by_model else list(streaming.EXPERTS))
    tune_streaming.tune(path, hidden, inner, experts, options.rows or list(streaming.ROWS), keep=not options.fresh)
    tuned_config.clear_cache()
    launch_table.clear_cache()
    return path


def _tune_gemm(options: argparse.Namespace, layers: Sequence[two_kernels.Size], folder: Path) -> Path:
    by_model = bool(options.model or options.size)
    shapes = [tuple(shape) for shape in options.gemm or ()]
    shapes = shapes or list(dict.fromkeys(pair for size in layers for pair in gemm_tiles.gemm_shapes(size.n, size.k)))
    experts = options.experts or (sorted({size.experts for size in layers}) if by_model else list(streaming.EXPERTS))
    rows = options.rows or list(gemm_tiles.ROWS)
    cells = gemm_tiles.plan_cells(shapes, experts, rows)
    with tqdm(
        total=len(gemm_tiles.CHOOSING_STAGES) * len(cells), unit="pass", desc="tune gemm", disable=None
    ) as progress:
        return gemm_tiles.tune_gemm(
            shapes,
            experts,
            rows=rows,
            directory=folder,
            time_limit_s=options.time_limit,
            keep=not options.fresh,
            done=lambda cell, stage: progress.update(),
        )


def _tune_two_kernels(options: argparse.Namespace, layers: Sequence[two_kernels.Size], folder: Path) -> Path:
    from sgl_kernel import cutlass_w4a8_moe_mm as kernel

    version = w4a8_gemm.kernel_version()
    if version is None:
        raise RuntimeError("sglang-kernel: its version is not known, must be installed as a package")
    make_every_patch_live(kernel)
    path = folder / tuned_config.file_name(grouped_gemm_table.KIND, tuned_config.gpu_name() or "")
    compiler = two_kernels.Compiler()
    try:
        whole = two_kernels.tune(
            path,
            layers,
            kernel,
            version,
            run_metadata(sglang_kernel=version),
            rows=options.rows or two_kernels.ROWS,
            wide=options.wide,
            keep=not options.fresh,
            time_limit_s=options.time_limit,
            compiler=compiler,
        )
    finally:
        compiler.close()
    if not whole:
        print("tune: two-kernels: the time limit came first; the same command goes on", file=sys.stderr)
    tuned_config.clear_cache()
    grouped_gemm_table.clear_cache()
    return path


_TUNERS: dict[str, Callable[[argparse.Namespace, Sequence[two_kernels.Size], Path], Path]] = {
    "streaming": _tune_streaming,
    # Before the two kernels: these are judged beside the tiles that serving would choose.
    "gemm": _tune_gemm,
    "two-kernels": _tune_two_kernels,
}


def main(argv: Sequence[str]) -> int:
    """Tune what was asked for; returns 2 without a GPU or for sizes that cannot be told, 1 when a kind cannot be tuned here."""
    if argv and argv[0] == MERGE:
        return merge.main(argv[1:])
    options = _parser().parse_args(argv)
    kinds = [kind for kind in KINDS if kind in options.kinds or ALL in options.kinds]
    try:
        layers = layer_sizes(options)
        folder = options.out or tuned_config.user_directory()
    except (sizes.SizesError, RuntimeError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    if tuned_config.gpu_name() is None or not torch.cuda.is_available():
        print("tune: no GPU here; nothing can be measured", file=sys.stderr)
        return 2
    status = 0
    for kind in kinds:
        try:
            path: Any = _TUNERS[kind](options, layers, folder)
        except (ImportError, RuntimeError, tuned_config.TunedConfigError) as error:
            print(f"tune: {kind}: {error}", file=sys.stderr)
            status = 1
        else:
            print(path)
    return status
