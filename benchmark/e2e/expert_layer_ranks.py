"""An expert-parallel W4AFP8 layer, a process a rank; ``expert_layer.py`` starts it once an arm.

    expert_layer_ranks.py --ranks N --dispatch-tokens CAP...

The engine's own dispatcher and method, with real DeepEP on a GPU a rank, or with ``--rehearse`` on the CPU: Triton's
interpreter and the test suite's doubles of DeepEP's buffer (over gloo) and of the compiled GEMM. Every rank holds a part of
the experts. For every CAP (tokens that a rank may dispatch; real DeepEP takes one, as its buffer lasts as long as the process)
the layer is served for some steps, and what comes back to a rank is compared with a float64 reference of the whole layer, all
experts, that knows nothing of ranks. Prints ``RESULT`` and JSON, a part a rank.

Every value is representable at every step, so that right means equal.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Ranks share few cores; and no thread of a pool may run when they are forked.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

import sglang.kernels.ops.moe.ep_moe_kernels as engine_kernels  # noqa: E402
import sglang.srt.layers.moe.cutlass_w4a8_moe as engine_chain  # noqa: E402
import sglang.srt.layers.moe.token_dispatcher.deepep as engine_deepep  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers.moe.utils import DeepEPMode  # noqa: E402
from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config, W4AFp8MoEMethod  # noqa: E402

from sglang_w4afp8 import engine_state, lifecycle  # noqa: E402
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table  # noqa: E402
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import pack_int4  # noqa: E402
from sglang_w4afp8.srt.layers.moe import two_kernels  # noqa: E402


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An expert-parallel W4AFP8 layer, a process a rank.")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--dispatch-tokens", type=int, nargs="+", required=True, metavar="CAP")
    # DeepSeek-V3's sizes, and as many experts as a reference in float64 is quickly done with.
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--local-experts", type=int, default=8)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with the doubles of the test suite")
    args = parser.parse_args()
    if len(args.dispatch_tokens) > 1 and not args.rehearse:
        parser.error(f"dispatch-tokens: are {args.dispatch_tokens}, must be one with real DeepEP")
    return args


ARGS = _arguments()
RANKS, CAPS = ARGS.ranks, ARGS.dispatch_tokens
RANK = -1  # of this process; the parent has none
DEVICE = torch.device("cpu")
# Local experts and sizes, with four scale groups or more each way; choices of a token.
E, K, N, TOPK = ARGS.local_experts, ARGS.hidden, ARGS.intermediate, 2
EXPERTS = E * RANKS
A1_SCALE, A2_SCALE = 0.5, 4.0
# Tokens of every rank, and the experts that they may choose: uneven loads with an empty expert; ranks without tokens; a rank
# whose experts get none; nothing at all.
STEPS = (
    (([9, 4, 1, 6] * RANKS)[:RANKS], [0, *range(2, EXPERTS)]),
    (([3, 0, 0, 5] * RANKS)[:RANKS], list(range(EXPERTS))),
    (([4, 6, 2, 2] * RANKS)[:RANKS], list(range(E))),
    ([0] * RANKS, [0]),
)


def weights() -> tuple[torch.Tensor, ...]:
    """Of the whole layer. Gate is 32 everywhere, whose SiLU is 32 in float32; up is one product, and so is every output."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.zeros((EXPERTS, 2 * N, K), dtype=torch.int8)
    w13[:, :N, 0] = 4
    w2 = torch.zeros((EXPERTS, K, N), dtype=torch.int8)
    for expert in range(EXPERTS):
        picked = torch.cat([torch.randperm(K - 1, generator=generator) + 1, torch.tensor([1])])[:N]
        w13[expert, N + torch.arange(N), picked] = -2
        column = torch.randint(0, N, (K,), generator=generator)
        w2[expert, torch.arange(K), column] = torch.randint(-8, 8, (K,), generator=generator, dtype=torch.int8)
    s13 = 2.0 ** torch.randint(-1, 2, (EXPERTS, 2 * N, K // 128), generator=generator)
    s13[:, :N, 0] = 2.0
    s2 = 2.0 ** torch.randint(-7, -4, (EXPERTS, K, N // 128), generator=generator)
    return tuple(part.to(DEVICE) for part in (w13, s13, w2, s2))


VALUES: tuple[torch.Tensor, ...] = ()


def new_layer(a1_scale: float = A1_SCALE) -> Any:
    """This rank's part of the layer, as the engine loads it."""
    layer = torch.nn.Module()
    layer.layer_id, layer.quant_method = 7, W4AFp8MoEMethod(W4AFp8Config())
    layer.moe_ep_size, layer.top_k, layer.num_experts = RANKS, TOPK, EXPERTS
    with DEVICE:
        layer.quant_method.create_weights(layer, E, K, N, torch.bfloat16, weight_loader=lambda *args, **kwargs: None)
    w13, s13, w2, s2 = (part[RANK * E : (RANK + 1) * E] for part in VALUES)
    layer.w13_weight.data.copy_(pack_int4(w13))
    layer.w2_weight.data.copy_(pack_int4(w2))
    layer.w13_weight_scale_inv.data.copy_(s13)
    layer.w2_weight_scale_inv.data.copy_(s2)
    layer.w13_input_scale.data.fill_(a1_scale)
    layer.w2_input_scale.data.fill_(A2_SCALE)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def step_of(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's tokens ``[T, K]``, their experts and weights ``[T, topk]``.

    The largest of every scale group is 7 times a power of two, so that DeepEP's scales are powers of two.
    """
    tokens, experts = STEPS[index]
    generator = torch.Generator().manual_seed(100 * index + RANK)
    count = tokens[RANK]
    values = torch.randint(-7, 8, (count, K // 128, 128), generator=generator).float()
    values[:, :, 1] = 7.0
    values[:, 0, 0] = 4.0
    exponents = torch.randint(-2, 1, (count, K // 128), generator=generator)
    exponents[:, 0] = 0
    x = (values * 2.0 ** exponents[..., None]).flatten(1).to(torch.bfloat16)
    picked = torch.argsort(torch.rand((count, len(experts)), generator=generator), dim=1)[:, :TOPK]
    ids = torch.nn.functional.pad(torch.tensor(experts)[picked], (0, TOPK - picked.size(1)), value=-1)
    ids[count // 2 :, 1] = -1  # half of the tokens have one expert only
    topk_weights = 2.0 ** torch.randint(-2, 1, (count, TOPK), generator=generator)
    return x.to(DEVICE), ids.to(DEVICE), topk_weights.to(DEVICE)


def reference(x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """The whole layer in float64 ``[T, K]``, token by token."""
    output = torch.zeros((len(x), K), dtype=torch.float64, device=DEVICE)
    w13, s13, w2, s2 = VALUES

    def dense(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (weight.double().unflatten(-1, (-1, 128)) * scales.double()[..., None]).flatten(-2)

    for token, choice in (ids >= 0).nonzero().tolist():
        expert = ids[token, choice]
        gate, up = (dense(w13[expert], s13[expert]) @ x[token].double()).chunk(2)
        assert (gate == 32).all()
        output[token] += topk_weights[token, choice].double() * (dense(w2[expert], s2[expert]) @ (gate * up))
    return output


def dispatcher_of(cap: int, group: dist.ProcessGroup) -> Any:
    """The engine's; a rehearsal's over the double."""
    with envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.override(cap):
        dispatcher = engine_deepep.DeepEPDispatcher(
            group=group,
            router_topk=TOPK,
            permute_fusion=True,
            num_experts=EXPERTS,
            num_local_experts=E,
            hidden_size=K,
            params_dtype=torch.bfloat16,
            deepep_mode=DeepEPMode.LOW_LATENCY,
            return_recv_hook=True,
        )
    if ARGS.rehearse:
        from deepep_double import LowLatencyBufferDouble

        buffer = LowLatencyBufferDouble(group)
        dispatcher._low_latency_dispatcher._get_buffer = lambda: buffer
    return dispatcher


def serve(layer: Any, cap: int, group: dist.ProcessGroup, steps: int = len(STEPS)) -> list[dict[str, Any]]:
    """The first steps through one layer."""
    dispatcher, found = dispatcher_of(cap, group), []
    for index in range(steps):
        x, ids, topk_weights = step_of(index)
        dispatched = dispatcher.dispatch(x, SimpleNamespace(topk_ids=ids, topk_weights=topk_weights))
        output = layer.quant_method.apply_deepep_ll(layer, dispatched)
        combined = dispatcher.combine(engine_deepep.DeepEPLLCombineInput(output, ids, topk_weights))
        expected = reference(x, ids, topk_weights)
        found.append(
            {
                "right": torch.equal(combined, expected.to(torch.bfloat16)),
                "error": float((combined.double() - expected).norm() / expected.norm()) if len(x) else 0.0,
                "expected_m": dispatched.expected_m,
                "masked_m": dispatched.masked_m.tolist(),
                "padded_rows": dispatched.hidden_states.size(1),
                "strides": list(dispatched.hidden_states_scale.stride()),
            }
        )
    return found


def with_load_balancing(cap: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Input scales that differ between ranks, and a layout that one rank chooses otherwise."""
    result: dict[str, Any] = {}
    for name in ("all agree", "one disagrees"):
        if name == "one disagrees" and RANK == RANKS - 1:
            grouped_gemm_table.RULE_BLOCK_NS = (64, 128)
        # Rank 1 has the largest.
        layer = new_layer(A1_SCALE if RANK == 1 else A1_SCALE / 2)
        right = [step["right"] for step in serve(layer, cap, group, steps=2)]
        scale = layer.w13_input_scale.item()
        result[name] = {"regrouped": two_kernels.is_regrouped(layer), "scale": scale, "right": right}
    return result


def _rehearse() -> Any:
    """What is asked of a GPU, and what the engine imports only beside one; the double of the compiled GEMM."""
    from sgl_kernel import cutlass_w4a8_moe_mm, double

    engine_kernels.requant_warp_size = lambda device: 32
    engine_chain.cutlass_w4a8_moe_mm = cutlass_w4a8_moe_mm
    engine_deepep.use_deepep = True
    two_kernels.capability = lambda device: (9, 0)
    return double


def _too_many(group: dist.ProcessGroup) -> str:
    """What is said of one token more than a rank may dispatch."""
    count = CAPS[0] + 1
    x, ids = torch.zeros((count, K), dtype=torch.bfloat16), torch.zeros((count, TOPK), dtype=torch.int64)
    try:
        dispatcher_of(CAPS[0], group)._low_latency_dispatcher._dispatch_core(x, ids, None)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def run_rank(rank: int, folder: Path) -> None:
    """One rank from beginning to end; what it found goes into a file."""
    global RANK, DEVICE, VALUES
    RANK = rank
    if not ARGS.rehearse:
        DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "gloo" if ARGS.rehearse else "nccl",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),  # where another rank has died
    )
    group, double = dist.group.WORLD, _rehearse() if ARGS.rehearse else None
    # What a server would have published.
    engine_deepep.get_deepep_output_dtype = lambda dispatcher: engine_deepep.DispatcherOutputDtype.FP8
    engine_deepep.get_is_extend_in_batch = lambda: False
    ranks = SimpleNamespace(world_size=RANKS, cpu_group=group, device_group=group)
    parallel_state.get_moe_ep_group = lambda: ranks
    settings = {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency"}
    engine_state.setting = settings.get

    VALUES = weights()
    layer = new_layer()
    result: dict[str, Any] = {"live": list(lifecycle.live_patches()), "regrouped": two_kernels.is_regrouped(layer)}
    for cap in CAPS:
        result[str(cap * RANKS)] = serve(layer, cap, group)
    if double is not None:
        result["gemms"] = len(double.calls)
        result["too many"] = _too_many(group)
        if result["regrouped"]:
            settings["enable_eplb"] = True
            result["eplb"] = with_load_balancing(CAPS[0], group)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    if not ARGS.rehearse:
        os._exit(0)  # DeepEP's destructor may wait for ranks that have gone
    dist.destroy_process_group()


def main() -> None:
    # The engine's import takes longer than all the rest, so a rehearsal forks after it; CUDA must not be forked.
    context = multiprocessing.get_context("fork" if ARGS.rehearse else "spawn")
    with tempfile.TemporaryDirectory() as name:
        ranks = [context.Process(target=run_rank, args=(rank, Path(name))) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"ranks ended with {[process.exitcode for process in ranks]}")
        found = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
