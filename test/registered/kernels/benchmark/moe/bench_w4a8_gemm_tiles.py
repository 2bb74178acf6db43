"""Benchmark of the grouped GEMM's tiles: as shipped, chosen, best possible, weight-read floor.

    python bench_w4a8_gemm_tiles.py            # both DeepSeek-V3 GEMMs, every number of experts; minutes
    python bench_w4a8_gemm_tiles.py --ci       # 64 experts, three row counts; under half a minute

The work is that of `benchmark/gemm_tiles.py`, which also writes the committed results; here they go to a temporary
folder, or to `--output`. Where the kernel is absent its providers are N/A, and only the script itself is run, with the
CPU double.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cuda_ci(est_time=45, suite="base-b-kernel-benchmark")
register_cpu_ci(est_time=15, suite="base-b-kernel-benchmark")

SCRIPT = Path(__file__).resolve().parents[5] / "benchmark" / "gemm_tiles.py"
# Tests of the real kernel take the library from the same variable.
LIBRARY = "SGLANG_W4AFP8_TEST_KERNEL_LIBRARY"
CI_SET = ["--experts", "64", "--rows", "8", "32", "128", "--time-limit-s", "60"]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gemm_tiles", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel_arguments() -> list[str] | None:
    """How the script finds the compiled kernel, or None where there is none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    if os.environ.get(LIBRARY):
        return ["--kernel-library", os.environ[LIBRARY], "--kernel-version", "unknown"]
    try:
        import sgl_kernel  # noqa: F401
    except ImportError:
        return None
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ci", action="store_true", help="the short set")
    parser.add_argument("--output", type=Path, help="results file; the chart goes beside it")
    options = parser.parse_args()
    script, found = load_script(), kernel_arguments()
    with tempfile.TemporaryDirectory() as folder:
        output = ["--output", str(options.output or Path(folder) / "gemm_tiles.json"), "--chart"]
        if found is None:
            print("as shipped, chosen, best, floor: N/A (no Hopper GPU with sgl_kernel); the double stands in")
            return script.main(["--dry-run-cpu", "--repeats", "1", *output])
        return script.main([*found, *(CI_SET if options.ci else []), *output])


if __name__ == "__main__":
    sys.exit(main())
