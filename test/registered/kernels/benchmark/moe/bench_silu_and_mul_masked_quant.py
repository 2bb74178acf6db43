"""Benchmark of SiLU-and-multiply: tuned, legacy geometry, the installed engine's own kernel, copy floor; over a skew axis.

    python bench_silu_and_mul_masked_quant.py --out results    # all shapes; minutes
    python bench_silu_and_mul_masked_quant.py --ci             # the short set; under a minute

- tuned: our kernel as it is served, given the estimate that the dispatcher reports for the total.
- legacy-geometry: our kernel with the engine's launch parameters (256 columns over 4 warps, 32 programs an expert whatever
  its rows, no cap). It isolates the launch geometry; it is not the engine's kernel, whose addressing differs too.
- engine: the installed engine's own kernel; N/A where there is no engine.
- copy floor: a Triton copy that moves as many bytes.

Skew gives one expert that many times the mean load and keeps the total. Bytes are compared before a cell is timed; a cell
whose bytes differ has no figures, and the exit status is 1.
"""

import sys

from sglang.test.ci.ci_register import register_cuda_ci

from sglang_w4afp8.bench import streaming
from sglang_w4afp8.bench.registered import Benchmark, Shape, main
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import silu_and_mul_masked_post_per_tensor_quant_fwd

register_cuda_ci(est_time=60, suite="base-b-kernel-benchmark")

BENCHMARK = Benchmark(
    name="silu_skew",
    title="SiLU, multiply and quantization between the grouped GEMMs",
    column_name="n",
    make_buffers=streaming.SiluBuffers,
    make_providers=streaming.silu_providers,
    function=silu_and_mul_masked_post_per_tensor_quant_fwd,
    legacy=streaming.silu_legacy_launch,
    full=(
        Shape(2048, 32, 2048, (1, 8, 32, 128)),
        Shape(2048, 64, 2048, (1, 8, 32, 128)),
        Shape(2048, 256, 512, (1, 8, 32)),
        Shape(1536, 56, 256, (1, 8, 32)),
    ),
    ci=(Shape(1536, 56, 256, (4, 32), (1, 16)), Shape(2048, 64, 1024, (1, 8, 64), (1, 16))),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
