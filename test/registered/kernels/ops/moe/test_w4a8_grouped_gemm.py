"""The grouped GEMM with the real kernel, against the float reference and against the engine's call.

Needs a Hopper GPU and `sgl_kernel.cutlass_w4a8_moe_mm`: the installed package, or an op library of sglang-kernel named
by SGLANG_W4AFP8_TEST_KERNEL_LIBRARY. Without them the same cases run, at small sizes, with the CPU double of the
dispatch.
"""

import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

from compiled_gemm import real_kernel
from sglang_w4afp8.kernels.ops.moe import compiled_tiles
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import (
    CompiledDispatchDouble,
    relative_error,
    w4a8_grouped_gemm_reference,
)
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.srt.layers.moe.w4a8_gemm import AS_SHIPPED, TileChoice, buckets_from_limits, w4a8_grouped_gemm
from sglang_w4afp8.tune.gemm_tiles import GemmProblem, probe_buckets

register_cuda_ci(est_time=90, suite="base-b-kernel-unit")
register_cpu_ci(est_time=20, suite="base-b-kernel-unit")

PADDED = (64, 128, 256, 384, 512, 640, 1024, 2048)
SHAPES = ((4096, 7168), (7168, 2048), (4096, 3584), (3584, 1536), (4096, 6144), (6144, 2048))
SMALL_SHAPES = ((32, 1024), (16, 512))
# bf16 rounding of the result is 0.0017; a wrong K tile gives 0.61.
MAX_RELATIVE_ERROR = 0.003
TOPK = 8


KERNEL, MISSING = real_kernel()
REAL = KERNEL is not None
DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
real_only = pytest.mark.skipif(not REAL, reason=f"needs the compiled kernel: {MISSING}")


@pytest.fixture(scope="module")
def kernel():
    return KERNEL if REAL else CompiledDispatchDouble()


@pytest.fixture(scope="module", params=SHAPES if REAL else SMALL_SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def problem(request):
    n, k = request.param
    yield GemmProblem(n, k, 8, 8 * 2048, DEVICE, seed=3)
    w4a8_gemm.clear_cache()
    if REAL:
        torch.cuda.empty_cache()


def _rows(experts, padded):
    """All different, with an empty expert, a single row, and a full buffer (capped to keep the reference quick)."""
    rows = [1, 0, 17, 64, 5, min(padded, 300), 33, 2]
    return [min(count, padded) for count in rows[:experts]]


def _run(problem, kernel, padded, rows, choice, expected_m=9, out_value=float("nan")):
    """`choice` None is the engine's call, "rule" the wrapper's own choice. Returns the whole output buffer."""
    experts = len(rows)
    a, out = problem.buffers(experts, padded)
    out.fill_(out_value)
    k_strides, n_strides = problem.strides(experts)
    # Nobody writes the engine's offsets: whatever they hold must not matter.
    offsets = torch.full((experts + 1,), 2**30, dtype=torch.int32, device=DEVICE)
    operands = (out, a, problem.w_q[:experts], problem.a_scale, problem.w_scale[:experts])
    strides = (k_strides, k_strides, n_strides, n_strides)
    sizes = problem.problem_sizes(rows)
    if choice is None:
        kernel(*operands, offsets[:-1], sizes, *strides, 128, TOPK)
    else:
        extra = {} if choice == "rule" else {"choice": choice}
        w4a8_grouped_gemm(*operands, offsets, sizes, *strides, expected_m=expected_m, topk=TOPK, kernel=kernel, **extra)
    return out.clone()


def _live(rows, padded):
    return torch.arange(padded, device=DEVICE)[None] < torch.tensor(rows, device=DEVICE)[:, None]


def _expected(problem, padded, rows):
    experts = len(rows)
    a, _ = problem.buffers(experts, padded)
    masked_m = torch.tensor(rows)
    return w4a8_grouped_gemm_reference(a, problem.w_q[:experts], problem.a_scale, problem.w_scale[:experts], masked_m)


@pytest.mark.parametrize("padded", PADDED)
def test_right_with_every_buffer_size_and_equal_to_the_engine_where_that_is_right(problem, kernel, padded):
    rows = _rows(8, padded)
    live = _live(rows, padded)
    expected = _expected(problem, padded, rows)[live]
    ours = _run(problem, kernel, padded, rows, "rule")
    assert relative_error(ours[live], expected) < MAX_RELATIVE_ERROR
    engine = _run(problem, kernel, padded, rows, None)
    if w4a8_gemm.engine_gemm_is_right(padded, problem.k):
        assert engine[live].equal(ours[live])
    else:
        assert relative_error(engine[live], expected) > 0.1


@pytest.mark.parametrize("padded", [384, 512])
def test_padding_rows_are_left_as_they_are(problem, kernel, padded):
    rows = _rows(8, padded)
    out = _run(problem, kernel, padded, rows, "rule", out_value=77.0)
    assert out[~_live(rows, padded)].eq(77.0).all()


@pytest.mark.parametrize("padded", [128, 512, 2048])
def test_every_bucket_gives_the_same_bytes(problem, kernel, padded):
    # Versions differ in some limits, never in these sizes' being right; the newest one's limits reach a tile each.
    limits = compiled_tiles.branch("0.4.10", "NVIDIA H200", problem.n, problem.k).limits
    rows = _rows(8, padded)
    live = _live(rows, padded)
    rule = _run(problem, kernel, padded, rows, "rule")[live]
    assert relative_error(rule, _expected(problem, padded, rows)[live]) < MAX_RELATIVE_ERROR
    reached = 0
    for bucket in buckets_from_limits(limits):
        topk = bucket.topk_for(8 * padded)
        if topk is not None:
            reached += 1
            choice = TileChoice(bucket.name, topk, 8 * padded // topk)
            assert _run(problem, kernel, padded, rows, choice)[live].equal(rule), bucket.name
    assert reached >= 2
    if w4a8_gemm.engine_gemm_is_right(padded, problem.k):
        assert _run(problem, kernel, padded, rows, TileChoice(AS_SHIPPED, TOPK, 1))[live].equal(rule)


@pytest.mark.parametrize("expected_m", [None, 1, 2, 17, 65, 129, 100_000])
def test_any_estimate_gives_the_same_bytes(problem, kernel, expected_m):
    rows = _rows(8, 384)
    live = _live(rows, 384)
    first = _run(problem, kernel, 384, rows, "rule")[live]
    assert _run(problem, kernel, 384, rows, "rule", expected_m=expected_m)[live].equal(first)


@pytest.mark.parametrize("rows", [[0] * 8, [0, 0, 0, 5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 64]])
def test_empty_experts(problem, kernel, rows):
    out = _run(problem, kernel, 384, rows, "rule", out_value=77.0)
    live = _live(rows, 384)
    assert out[~live].eq(77.0).all()
    if any(rows):
        assert relative_error(out[live], _expected(problem, 384, rows)[live]) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("experts", [1, 3])
def test_few_experts(problem, kernel, experts):
    rows = [40, 0, 7][:experts]
    live = _live(rows, 128)
    out = _run(problem, kernel, 128, rows, "rule")
    assert relative_error(out[live], _expected(problem, 128, rows)[live]) < MAX_RELATIVE_ERROR


@real_only
def test_a_captured_call_follows_the_live_rows_of_each_replay(problem, kernel):
    padded, rows = 384, _rows(8, 384)
    first = _run(problem, kernel, padded, rows, "rule")
    a, out = problem.buffers(8, padded)
    k_strides, n_strides = problem.strides(8)
    sizes = problem.problem_sizes(rows)
    offsets = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w4a8_grouped_gemm(
            out, a, problem.w_q, problem.a_scale, problem.w_scale, offsets, sizes,
            k_strides, k_strides, n_strides, n_strides, expected_m=9, topk=TOPK, kernel=kernel,
        )  # fmt: skip
    graph.replay()
    live = _live(rows, padded)
    assert out[live].equal(first[live])
    others = list(reversed(rows))
    sizes.copy_(problem.problem_sizes(others))
    graph.replay()
    replayed = out.clone()
    live = _live(others, padded)
    assert replayed[live].equal(_run(problem, kernel, padded, others, "rule")[live])


@real_only
def test_a_first_call_under_capture_is_right_at_every_replay(problem, kernel):
    padded, rows = 256, _rows(8, 256)
    expected = _run(problem, kernel, padded, rows, "rule")
    w4a8_gemm.clear_cache()
    a, out = problem.buffers(8, padded)
    k_strides, n_strides = problem.strides(8)
    sizes = problem.problem_sizes(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w4a8_grouped_gemm(
            out, a, problem.w_q, problem.a_scale, problem.w_scale, torch.zeros(9, dtype=torch.int32, device=DEVICE),
            sizes, k_strides, k_strides, n_strides, n_strides, expected_m=9, topk=TOPK, kernel=kernel,
        )  # fmt: skip
    # Whatever the allocator hands out next must not hurt the captured offsets.
    junk = [torch.full((1 << 12,), 7, dtype=torch.int32, device=DEVICE) for _ in range(64)]
    live = _live(rows, padded)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        assert out[live].equal(expected[live])
    del junk


@real_only
@pytest.mark.parametrize("shape", [*SHAPES, (512, 6144), (6144, 256)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_the_probe_finds_what_was_read_in_the_binary(kernel, shape):
    """Limits and tiles of the running kernel, from the profiler's names, against those read from the wheels without a GPU."""
    buckets, method, _ = probe_buckets(kernel, *shape, DEVICE)
    if method != "kernel names":
        pytest.skip("no tracing on this machine")
    found = compiled_tiles.Branch(
        tuple(bucket.high for bucket in buckets[:-1]), tuple(bucket.kernel for bucket in buckets)
    )
    version = w4a8_gemm.kernel_version()
    versions = [version] if version in compiled_tiles.known_versions() else compiled_tiles.known_versions()
    known = {compiled_tiles.branch(name, torch.cuda.get_device_name(), *shape) for name in versions}
    assert found in known, (found, known)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
