"""``sglang-w4afp8 demo``: one real requant through the patched engine, every byte checked.

With a GPU and ``deep_ep``: a real low-latency dispatch (one process, one rank), the engine's function as a server would
call it, bytes against the reference, time against the engine's own kernel and a copy of the same bytes. Without a GPU:
the same patched function under Triton's interpreter on a payload laid out as DeepEP lays it out. The first line says
which.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GROUP = 128
SENTINEL = 0x5A
_BAR = 40


@dataclass(frozen=True)
class Payload:
    """What a dispatch hands over; shapes as in the kernel's public function, plus where it came from."""

    source: str
    x: torch.Tensor
    x_scale: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int


def _has_gpu() -> bool:
    # Before Triton is imported, since its interpreter is chosen at import.
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _skewed_experts(tokens: int, topk: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    """Int64 ``[tokens, topk]``: distinct experts a token, some far more popular than others."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    popularity = 1.0 / torch.arange(1, num_experts + 1) ** 0.8
    popularity = popularity[torch.randperm(num_experts, generator=generator)]
    return torch.multinomial(popularity.expand(tokens, -1), topk, generator=generator)


def _expected_m(tokens: int, topk: int, num_experts: int, ranks: int = 1) -> int:
    """The estimate as the engine's dispatcher makes it."""
    return (tokens * ranks * topk + num_experts) // num_experts


def laid_out_payload(tokens: int, topk: int, num_experts: int, padded: int, hidden: int) -> Payload:
    """A payload in DeepEP's layout, made without it: exactly representable values, column-major scales."""
    import torch

    generator = torch.Generator().manual_seed(1)
    experts = _skewed_experts(tokens, topk, num_experts)
    values = torch.randint(-8, 9, (tokens, hidden), generator=generator).float()
    scales = 2.0 ** torch.randint(-2, 3, (tokens, hidden // GROUP), generator=generator)
    x = torch.zeros((num_experts, padded, hidden), dtype=torch.float8_e4m3fn)
    columns = torch.zeros((num_experts, hidden // GROUP, padded))
    masked_m = torch.zeros(num_experts, dtype=torch.int32)
    for token in range(tokens):
        for expert in experts[token].tolist():
            row = int(masked_m[expert])
            x[expert, row] = values[token].to(x.dtype)
            columns[expert, :, row] = scales[token]
            masked_m[expert] += 1
    return Payload(
        "laid out as DeepEP does", x, columns.transpose(1, 2), masked_m, _expected_m(tokens, topk, num_experts)
    )


def dispatched_payload(tokens: int, topk: int, num_experts: int, padded: int, hidden: int) -> Payload:
    """A payload from a real DeepEP low-latency dispatch to this one rank."""
    import socket

    # The engine does the same before it makes the buffer: two work requests a token, and one to spare.
    os.environ.setdefault("NVSHMEM_QP_DEPTH", str(max(1024, 2 * (padded + 1))))
    import deep_ep
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    group = dist.new_group([0])
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(padded, hidden, 1, num_experts)
    buffer = deep_ep.Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=num_experts)
    tokens_in = torch.randn((tokens, hidden), dtype=torch.bfloat16, device="cuda")
    experts = _skewed_experts(tokens, topk, num_experts).cuda()
    (x, x_scale), masked_m, _handle, _event, _hook = buffer.low_latency_dispatch(
        tokens_in, experts, padded, num_experts, use_fp8=True, async_finish=False, return_recv_hook=False
    )
    torch.cuda.synchronize()
    # DeepEP reuses its buffer for the next dispatch; what is timed below must not change under it.
    scales = x_scale.transpose(1, 2).clone().transpose(1, 2)
    payload = Payload(
        f"DeepEP {getattr(deep_ep, '__version__', '')}".strip() + " low-latency dispatch",
        x.clone(),
        scales,
        masked_m.clone(),
        _expected_m(tokens, topk, num_experts),
    )
    routed = torch.bincount(experts.flatten(), minlength=num_experts)
    if payload.masked_m.tolist() != routed.tolist():
        raise RuntimeError("masked_m: the dispatch's row counts are not those of the routing")
    return payload


def _patched_requant() -> Callable[..., Any]:
    """The engine's function after the engine's own loader has run; exits when it is not ours."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_w4afp8 import lifecycle

    if not lifecycle.is_live("requant"):
        report = lifecycle.report()
        raise SystemExit(
            "demo: the engine's requant is not ours: " + (report.line() if report else "the plugin was not loaded")
        )
    try:
        from sglang.kernels.ops.moe import ep_moe_kernels as engine
    except ModuleNotFoundError:
        from sglang.srt.layers.moe.ep_moe import kernels as engine
    return engine.fp8_per_token_to_per_tensor_quant_triton


def _poisoned(x: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.full(x.shape, SENTINEL, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn)


def check_bytes(requant: Callable[..., Any], payload: Payload) -> tuple[int, int]:
    """Run the patched function into a poisoned output and compare every byte; returns (live, padding) bytes.

    Raises:
        SystemExit: a byte differs; the message says where the first one is.
    """
    import torch

    from sglang_w4afp8.kernels.ops.moe.reference import fp8_per_token_to_per_tensor_quant_reference

    # A power of two: its reciprocal is exact on every device.
    output_scale = torch.tensor([0.125], device=payload.x.device)
    output, expected = _poisoned(payload.x), _poisoned(payload.x)
    requant(payload.x, payload.x_scale, payload.masked_m, output_scale, output, expected_rows=payload.expected_m)
    fp8_per_token_to_per_tensor_quant_reference(payload.x, payload.x_scale, payload.masked_m, output_scale, expected)
    different = (output.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
    if len(different):
        expert, row, column = different[0].tolist()
        raise SystemExit(
            f"demo: {len(different)} bytes differ from the reference, "
            f"first at expert {expert} row {row} column {column}"
        )
    live = int(payload.masked_m.sum()) * payload.x.size(2)
    return live, output.numel() - live


def _programs(launch: Any, num_groups: int, rows: torch.Tensor, slices: int) -> tuple[int, int]:
    """Programs that a launch starts and those that find a row to write."""
    tiles = -(-num_groups // launch.col_block)
    own = rows.clamp(max=launch.row_cap)
    blocks = -(-own // launch.row_block)
    overflow = int((-(-(rows - launch.row_cap).clamp(min=0) // launch.row_block)).sum())
    working = int(blocks.clamp(max=launch.m_grid).sum()) + min(overflow, slices * launch.m_grid)
    return tiles * launch.m_grid * (len(rows) + slices), tiles * working


def print_geometry(num_groups: int, device: torch.device) -> None:
    """Programs launched and programs with work, ours beside the legacy launch, for a few decode batches."""
    import torch

    from sglang_w4afp8.bench.streaming import Cell, legacy_launch
    from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as kernels

    print(f"\nLaunch geometry, {num_groups} scale groups a row, random routing (programs launched / with work):")
    print(f"{'experts':>8} {'rows each':>10} {'legacy':>20} {'ours':>20}")
    for experts, rows in ((32, 8), (64, 1), (64, 8), (256, 1), (256, 8)):
        cell = Cell(experts, 2048, rows, "random")
        counts = cell.row_counts()
        ours = kernels._requant_launch(num_groups, experts, cell.expected_m(), cell.padded, torch.device(device))
        legacy = legacy_launch(cell.padded)
        columns = [_programs(legacy, num_groups, counts, 0), _programs(ours, num_groups, counts, ours.overflow_experts)]
        print(f"{experts:>8} {rows:>10} " + " ".join(f"{launched:>9} /{working:>9}" for launched, working in columns))


def print_times(requant: Callable[..., Any], payload: Payload) -> None:
    """Ours, the engine's own kernel and a copy of the same bytes, side by side in one run."""
    import torch

    from sglang_w4afp8.bench.streaming import copy_providers, requant_bytes
    from sglang_w4afp8.timing import interleaved_medians

    engine = inspect.unwrap(requant)
    output_scale = torch.tensor([0.125], device=payload.x.device)
    output = torch.empty_like(payload.x)
    arguments = (payload.x, payload.x_scale, payload.masked_m, output_scale, output)
    hint = {"expected_rows": payload.expected_m} if "expected_rows" in inspect.signature(engine).parameters else {}
    providers: dict[str, Callable[[], Any]] = {
        "ours": lambda: requant(*arguments, expected_rows=payload.expected_m),
        "engine": lambda: engine(*arguments, **hint),
    }
    if payload.x.size(2) % 1024 and not hint:
        # The legacy kernel refuses other hidden sizes.
        del providers["engine"]
    moved = requant_bytes(int(payload.masked_m.sum()), payload.x.size(2))
    copies = copy_providers(moved, payload.x.device)
    medians = interleaved_medians({**providers, **copies})
    times = {name: medians[name] for name in providers}
    times["copy of the same bytes"] = min(medians[name] for name in copies)
    widest = max(times.values())
    print("\nTime of one call (CUDA-graph replay, median, us):")
    for name, us in times.items():
        print(f"  {name:<24}{us:8.2f}  {'#' * max(1, round(_BAR * us / widest))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-w4afp8 demo", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, help="tokens of the dispatch (default: 128 on a GPU, 24 without)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns 0 when every byte was right."""
    options = _parser().parse_args(argv)
    on_gpu = _has_gpu()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    with_deep_ep = on_gpu and importlib.util.find_spec("deep_ep") is not None
    if with_deep_ep:
        print("demo: real DeepEP low-latency dispatch, one process and one rank, on this GPU")
    elif on_gpu:
        print("demo: deep_ep is not installed: a payload laid out like DeepEP's, on this GPU")
    else:
        print(
            "demo: no GPU here: the patched engine function under Triton's interpreter, on a payload laid out like DeepEP's"
        )

    requant = _patched_requant()
    import torch

    if on_gpu:
        tokens, topk, experts, padded, hidden = options.tokens or 128, 8, 64, 512, 7168
    else:
        tokens, topk, experts, padded, hidden = options.tokens or 24, 4, 16, 32, 1024
    if tokens > padded:
        raise SystemExit(f"demo: --tokens is {tokens}, must be at most {padded}, the padded rows of one expert")
    make = dispatched_payload if with_deep_ep else laid_out_payload
    payload = make(tokens, topk, experts, padded, hidden)
    if on_gpu and not with_deep_ep:
        payload = Payload(
            payload.source,
            payload.x.cuda(),
            payload.x_scale.cuda(),
            payload.masked_m.cuda(),
            payload.expected_m,
        )
    print(
        f"payload: {payload.source}; x {list(payload.x.shape)}, scale strides {payload.x_scale.stride()}, "
        f"{tokens} tokens to {topk} experts each, rows per expert {int(payload.masked_m.min())} - "
        f"{int(payload.masked_m.max())}, expected_m {payload.expected_m}"
    )
    live, padding = check_bytes(requant, payload)
    print(f"bytes: {live} live bytes equal the reference, {padding} padding bytes untouched")
    print_geometry(payload.x.size(2) // GROUP if on_gpu else 56, payload.x.device)
    if on_gpu:
        print_times(requant, payload)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
