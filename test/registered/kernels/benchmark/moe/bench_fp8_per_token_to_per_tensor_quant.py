"""Benchmark of the requant: tuned, legacy geometry, the installed engine's own kernel, copy floor; over a skew axis.

    python bench_fp8_per_token_to_per_tensor_quant.py --out results    # all shapes; minutes
    python bench_fp8_per_token_to_per_tensor_quant.py --ci             # the short set; under a minute

- tuned: our kernel as it is served, given the estimate that the dispatcher reports for the total.
- legacy-geometry: our kernel with the launch parameters of the engine before 0.5.19 (1024 elements over 8 warps, 32
  programs an expert, no cap). It isolates the launch geometry; it is not the legacy kernel, whose addressing differed too.
- engine: the installed engine's own kernel; N/A where there is no engine.
- copy floor: a Triton copy that moves as many bytes.

Skew gives one expert that many times the mean load and keeps the total. Bytes are compared before a cell is timed; a cell
whose bytes differ has no figures, and the exit status is 1.
"""

import sys

from sglang.test.ci.ci_register import register_cuda_ci

from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.registered import Benchmark, Shape, main
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import fp8_per_token_to_per_tensor_quant_triton

register_cuda_ci(est_time=60, suite="base-b-kernel-benchmark")

BENCHMARK = Benchmark(
    name="requant_skew",
    title="Requant of DeepEP's fp8 rows to one scale",
    column_name="k",
    make_buffers=streaming.RequantBuffers,
    make_providers=streaming.requant_providers,
    function=fp8_per_token_to_per_tensor_quant_triton,
    legacy=streaming.legacy_launch,
    full=(
        Shape(7168, 32, 2048, (1, 8, 32, 128)),
        Shape(7168, 64, 2048, (1, 8, 32, 128)),
        Shape(7168, 256, 512, (1, 8, 32)),
        Shape(3584, 56, 256, (1, 8, 32)),
    ),
    ci=(Shape(3584, 56, 256, (4, 32), (1, 16)), Shape(7168, 64, 1024, (1, 8, 64), (1, 16))),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
