"""Our low-latency chain under CUDA graphs, ``torch.compile`` and two streams at once.

Graphs, the compiler and streams are the device's, and need the compiled grouped GEMM: the installed ``sgl_kernel``, or an op
library of sglang-kernel named by SGLANG_W4AFP8_TEST_KERNEL_LIBRARY. What makes them safe is looked at everywhere: no two
calls share memory that a launch writes, and the layer's own scratch is not written at all.
"""

import os
import random
import sys
from dataclasses import dataclass

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

from compiled_gemm import real_kernel
from sglang_w4afp8 import lifecycle, plugin
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import CompiledDispatchDouble
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.srt.layers.moe.cutlass_w4a8_moe import cutlass_w4a8_moe_deepep_ll
from sglang_w4afp8.tune.gemm_tiles import GemmProblem

register_cuda_ci(est_time=90, suite="base-b-kernel-unit")
register_cpu_ci(est_time=15, suite="base-b-kernel-unit")

TOPK = 2


KERNEL, MISSING = real_kernel()
REAL = KERNEL is not None
DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
real_only = pytest.mark.skipif(not REAL, reason=f"needs the compiled kernel: {MISSING}")
pytestmark = pytest.mark.skipif(torch.cuda.is_available() and not REAL, reason=f"needs the compiled kernel: {MISSING}")
EXPERTS, PADDED, HIDDEN, INNER = (8, 384, 7168, 2048) if REAL else (3, 12, 512, 512)
SCRATCH = 0x5A5A5A5A


@pytest.fixture(autouse=True)
def every_patch_live(monkeypatch):
    kernel = KERNEL if REAL else CompiledDispatchDouble()
    monkeypatch.setattr(w4a8_gemm, "_engine_kernel", lambda: kernel)
    statuses = tuple(lifecycle.PatchStatus(patch.name, lifecycle.State.ACTIVE) for patch in plugin.LEDGER)
    before = lifecycle.report()
    lifecycle.record(lifecycle.ActivationReport("test", verified=True, patches=statuses))
    w4a8_gemm.clear_cache()
    yield
    w4a8_gemm.clear_cache()
    lifecycle.record(before or lifecycle.ActivationReport("test"))


class Layer:
    """Weights of one layer, and the scratch that the engine gives it."""

    def __init__(self, seed: int) -> None:
        self.up, self.down = (
            GemmProblem(n, k, EXPERTS, EXPERTS, DEVICE, seed=seed + offset)
            for offset, (n, k) in enumerate(((2 * INNER, HIDDEN), (HIDDEN, INNER)))
        )
        self.expert_offsets = torch.full((EXPERTS + 1,), SCRATCH, dtype=torch.int32, device=DEVICE)
        self.problem_sizes = torch.full((2, EXPERTS, 3), SCRATCH, dtype=torch.int32, device=DEVICE)
        self.topk_ids = torch.zeros((4, TOPK), dtype=torch.int64, device=DEVICE)

    def __call__(self, payload: "Payload", expected_m: int | None) -> torch.Tensor:
        hidden, twice_inner = self.up.strides(EXPERTS)
        inner, hidden_out = self.down.strides(EXPERTS)
        return cutlass_w4a8_moe_deepep_ll(
            payload.x,
            payload.x_scale,
            self.up.w_q,
            self.down.w_q,
            self.up.w_scale,
            self.down.w_scale,
            self.topk_ids,
            payload.masked_m,
            hidden,
            hidden,
            twice_inner,
            inner,
            inner,
            hidden_out,
            twice_inner,
            hidden_out,
            self.expert_offsets,
            *self.problem_sizes,
            self.up.a_scale,
            self.down.a_scale,
            expected_m=expected_m,
        )

    def scratch_is_untouched(self) -> bool:
        return bool((self.expert_offsets == SCRATCH).all() and (self.problem_sizes == SCRATCH).all())


@dataclass
class Payload:
    """Buffers of one dispatch; ``fill`` writes another dispatch into them."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    masked_m: torch.Tensor

    @staticmethod
    def empty(bf16: bool = False) -> "Payload":
        x = torch.zeros((EXPERTS, PADDED, HIDDEN), dtype=torch.bfloat16 if bf16 else torch.float8_e4m3fn, device=DEVICE)
        scale = torch.zeros((EXPERTS, HIDDEN // 128, PADDED), device=DEVICE).transpose(1, 2)
        return Payload(x, None if bf16 else scale, torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE))

    def fill(self, seed: int, mean: int) -> "Payload":
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.x.copy_(torch.randint(-8, 9, self.x.shape, device=DEVICE, generator=generator))
        if self.x_scale is not None:
            shape = self.x_scale.shape
            self.x_scale.copy_(torch.exp2(torch.randint(-4, 1, shape, device=DEVICE, generator=generator).float()))
        rows = torch.randint(0, 2 * mean + 1, (EXPERTS,), device=DEVICE, generator=generator)
        self.masked_m.copy_(rows.clamp(max=PADDED))
        return self

    def live(self, output: torch.Tensor) -> torch.Tensor:
        """Bytes of the live rows."""
        rows = torch.arange(PADDED, device=DEVICE)[None, :] < self.masked_m[:, None]
        return output[rows].contiguous().view(torch.uint8).clone()


def test_two_calls_share_no_memory_that_a_launch_writes(monkeypatch):
    written: list[dict[str, torch.Tensor]] = []
    for name in ("fp8_per_token_to_per_tensor_quant_triton", "silu_and_mul_masked_post_per_tensor_quant_fwd"):
        function = getattr(ep_moe_kernels, name)

        def recorded(*args, function=function, name=name, **named):
            tables = {f"{name} {key}": value for key, value in named.items() if key.startswith("problem_sizes")}
            output = args[4] if name.startswith("fp8") else args[1]
            written.append({**tables, f"{name} output": output})
            return function(*args, **named)

        monkeypatch.setattr(ep_moe_kernels, name, recorded)
    layer, payload = Layer(1), Payload.empty().fill(1, 2)
    outputs = [layer(payload, 2), layer(payload, 2)]
    # Everything is still alive: what is in `written` and in `outputs` may not overlap.
    tensors = [tensor for call in written for tensor in call.values()] + outputs
    assert len(tensors) == 2 * (3 + 1) + 2
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert layer.scratch_is_untouched()
    assert torch.equal(payload.live(outputs[0]), payload.live(outputs[1]))


def test_the_expert_offsets_that_calls_share_are_only_read():
    layer, payload = Layer(1), Payload.empty().fill(1, 2)
    layer(payload, 2)
    shared = w4a8_gemm.expert_row_offsets(EXPERTS, PADDED, payload.x.device)
    version = shared._version
    for seed in range(3):
        layer(payload.fill(seed, 3), 3)
    assert w4a8_gemm.expert_row_offsets(EXPERTS, PADDED, payload.x.device) is shared
    assert shared._version == version
    assert shared.tolist() == [expert * PADDED for expert in range(EXPERTS)]


@real_only
@pytest.mark.parametrize("bf16", [False, True], ids=["fp8", "bf16"])
def test_graphs_of_several_batch_sizes_in_one_pool_replay_in_any_order(bf16):
    layers, payload = [Layer(1), Layer(11)], Payload.empty(bf16)
    means = (1, 4, 16, 100)
    pool = torch.cuda.graph_pool_handle()
    graphs, outputs = {}, {}
    for mean in means:
        payload.fill(mean, mean)
        for layer in layers:
            layer(payload, mean + 1)
    torch.cuda.synchronize()
    # Largest first, as the engine captures: each smaller graph then lives in the memory of the larger ones.
    for mean in reversed(means):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs[mean] = [layer(payload, mean + 1) for layer in layers]
        graphs[mean] = graph
    choose = random.Random(5)
    for turn in range(40):
        mean = choose.choice(means)
        # Also rows that the graph's estimate does not foresee.
        payload.fill(1000 + turn, choose.choice(means))
        graphs[mean].replay()
        replayed = [payload.live(output) for output in outputs[mean]]
        for layer, found in zip(layers, replayed, strict=True):
            assert torch.equal(found, payload.live(layer(payload, mean + 1)))
    assert all(layer.scratch_is_untouched() for layer in layers)


@real_only
def test_torch_compile_around_the_layer():
    layer, payload = Layer(1), Payload.empty()

    def block(x, x_scale, masked_m, residual):
        output = layer(Payload(x, x_scale, masked_m), 5)
        return torch.nn.functional.rms_norm(output + residual, (HIDDEN,))

    compiled = torch.compile(block)
    residual = torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    for seed in range(3):
        payload.fill(seed, 4)
        arguments = payload.x, payload.x_scale, payload.masked_m
        found = payload.live(compiled(*arguments, residual)).view(torch.bfloat16).float()
        wanted = payload.live(block(*arguments, residual)).view(torch.bfloat16).float()
        # The norm is fused by the compiler and may round once less; the layer below it is not touched by that.
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)
        plain = torch.compile(lambda *tensors: layer(Payload(*tensors), 5))
        assert torch.equal(payload.live(plain(*arguments)), payload.live(layer(payload, 5)))


@real_only
@pytest.mark.parametrize("same_layer", [False, True], ids=["two layers", "one layer"])
def test_two_streams_at_once(same_layer):
    first = Layer(1)
    second = first if same_layer else Layer(11)
    payloads = [Payload.empty(), Payload.empty()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(12):
        means = (1 + turn, 40 - 3 * turn)
        for payload, mean in zip(payloads, means, strict=True):
            payload.fill(10 * turn + mean, mean)
        serial = [
            payload.live(layer(payload, mean))
            for layer, payload, mean in zip((first, second), payloads, means, strict=True)
        ]
        torch.cuda.synchronize()
        outputs = [[], []]
        for _ in range(6):
            for index, (layer, stream) in enumerate(zip((first, second), streams, strict=True)):
                with torch.cuda.stream(stream):
                    outputs[index].append(layer(payloads[index], means[index]))
        torch.cuda.synchronize()
        for index in range(2):
            for output in outputs[index]:
                assert torch.equal(payloads[index].live(output), serial[index])
    assert first.scratch_is_untouched() and second.scratch_is_untouched()


@real_only
def test_two_streams_inside_one_graph():
    """Two-batch overlap as it is captured: both chains in one graph, forked and joined."""
    layer, payloads = Layer(1), [Payload.empty().fill(1, 3), Payload.empty().fill(2, 30)]
    serial = [payload.live(layer(payload, 9)) for payload in payloads]
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        here = layer(payloads[0], 9)
        with torch.cuda.stream(side):
            there = layer(payloads[1], 9)
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(20):
        here.fill_(float("nan"))
        there.fill_(float("nan"))
        graph.replay()
        assert torch.equal(payloads[0].live(here), serial[0])
        assert torch.equal(payloads[1].live(there), serial[1])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
