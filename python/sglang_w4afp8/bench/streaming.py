"""Cells and providers of the streaming kernels: the requant of fp8 and of BF16, SiLU-and-multiply, and a layer's steps.

Every provider of a cell works on the same row counts in the same run. ``engine`` is the installed engine's own function,
given the dispatcher's estimate where it takes one; ``copy`` is a Triton copy that moves as many bytes as the step must.
Before a cell is timed, our bytes are compared with the engine's over the whole buffer, padding included.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as ours
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch
from sglang_w4afp8.timing import interleaved_medians

GROUP = 128
SENTINEL = 0x5A
SKEW = 16
EXPERTS = (8, 32, 64, 128, 256)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROUTINGS = ("even", "random", "skew16")
# Holds the hot expert of the largest skewed cell.
PADDED = 2048
# A cell is timed on this many sets of buffers, so that its figure does not hang on where in memory one of them lies.
PLACEMENTS = 3


class MismatchError(RuntimeError):
    """Two providers that must agree wrote different bytes; nothing is timed then."""


@dataclass(frozen=True)
class Cell:
    """One measured point: local experts, padded rows, live rows per expert (mean), and how they are spread."""

    experts: int
    padded: int
    rows: int
    routing: str

    def row_counts(self) -> torch.Tensor:
        """Int32 ``[E]`` live rows. ``even``: all alike; ``random``: every row to a random expert; ``skewN``: one hot
        expert with N times the mean, the others share what is left, the total unchanged."""
        total = self.experts * self.rows
        if self.routing == "even":
            counts = torch.full((self.experts,), self.rows)
        elif self.routing == "random":
            generator = torch.Generator().manual_seed(self.experts * 1009 + self.rows)
            owners = torch.randint(0, self.experts, (total,), generator=generator)
            counts = torch.bincount(owners, minlength=self.experts)
        elif self.routing.startswith("skew"):
            hot = min(int(self.routing[4:]) * self.rows, total, self.padded)
            others = max(1, self.experts - 1)
            counts = torch.full((self.experts,), (total - hot) // others)
            counts[: (total - hot) % others] += 1
            # The hot expert in the middle of the grid, not at an end that starts first or last.
            middle = self.experts // 2
            counts[-1] = counts[middle]
            counts[middle] = hot
        else:
            raise ValueError(f"routing: is {self.routing!r}, must be even, random or skew<factor>")
        if int(counts.max()) > self.padded:
            raise ValueError(f"padded: is {self.padded}, must hold the largest expert's {int(counts.max())} rows")
        return counts.to(torch.int32)

    def expected_m(self) -> int:
        """What the dispatcher reports for this total: it adds one expert's worth before dividing."""
        return (int(self.row_counts().sum()) + self.experts) // self.experts


def grid(experts: Sequence[int], rows: Sequence[int], routings: Sequence[str], padded: int = PADDED) -> Iterator[Cell]:
    for num_experts in experts:
        for count in rows:
            for routing in routings:
                yield Cell(num_experts, padded, count, routing)


@triton.jit
def _copy_kernel(source_ptr, target_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=offsets < size), mask=offsets < size)


# Tiles of the copy that were fastest for small and for large sizes; the floor is the faster one in each cell.
_COPY_TILES = ((2048, 4), (4096, 8))


# Providers of one name before this sign are variants of one thing, of which the fastest counts.
_VARIANT = ":"


def copy_providers(moved_bytes: int, device: torch.device, name: str = "copy") -> dict[str, Callable[[], None]]:
    """Contiguous copies that read and write ``moved_bytes`` together; their minimum is the floor."""
    size = max(1, moved_bytes // 2)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run(block: int, warps: int) -> None:
        _copy_kernel[(triton.cdiv(size, block),)](source, target, size, BLOCK=block, num_warps=warps)

    return {f"{name}{_VARIANT}{block}": functools.partial(run, block, warps) for block, warps in _COPY_TILES}


def legacy_launch(max_rows: int) -> MaskedRowsLaunch:
    """Launch parameters of the engine's kernel before 0.5.19: 1024 elements over 8 warps, 32 programs an expert, no cap.

    Run with our kernel it isolates the launch geometry; it is not that kernel, whose addressing also differed.
    """
    return MaskedRowsLaunch(1024 // GROUP, 32, max_rows, num_warps=8)


def silu_legacy_launch(max_rows: int) -> MaskedRowsLaunch:
    """Launch parameters of the engine's SiLU kernel, all versions up to 0.5.23, from 4 experts up: grid (N/256, 32, E).

    Run with our kernel it isolates the launch geometry; it is not the engine's kernel, whose addressing differs too.
    """
    return MaskedRowsLaunch(256, 32, max_rows, num_warps=4)


def _engine_kernels() -> Any:
    try:
        from sglang.kernels.ops.moe import ep_moe_kernels
    except ModuleNotFoundError:
        from sglang.srt.layers.moe.ep_moe import kernels as ep_moe_kernels
    return ep_moe_kernels


def engine_function(name: str) -> Callable[..., Any] | None:
    """The installed engine's own function, never ours: None when the engine is absent.

    Raises:
        RuntimeError: the name is bound to our function, so a comparison would time ours against itself.
    """
    try:
        function = getattr(_engine_kernels(), name)
    except ImportError:
        return None
    bottom = inspect.unwrap(function)
    if function is not bottom or bottom.__module__.startswith("sglang_w4afp8"):
        raise RuntimeError(f"{name}: the plugin is active in this process; the engine's own kernel cannot be timed")
    return function


def _poison(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).fill_(SENTINEL)


def check_same_bytes(
    what: str, run_ours: Callable[[], Any], run_engine: Callable[[], Any], output: torch.Tensor
) -> None:
    """Run both into the same poisoned buffer and compare it whole."""
    _poison(output)
    run_engine()
    expected = output.clone()
    _poison(output)
    run_ours()
    if not torch.equal(output.view(torch.uint8), expected.view(torch.uint8)):
        raise MismatchError(f"{what}: our bytes differ from those they are compared with")


class RequantBuffers:
    """The largest payload of a sweep, sliced per cell; scales column-major like DeepEP's."""

    def __init__(self, max_experts: int, padded: int, hidden: int, device: str = "cuda") -> None:
        codes = torch.randint(0, 256, (max_experts, padded, hidden), dtype=torch.uint8, device=device)
        # Codes 0x7F and 0xFF are NaN, whose payload bits no kernel promises to keep.
        self.x = codes.masked_fill_((codes & 0x7F) == 0x7F, 0x7E).view(torch.float8_e4m3fn)
        self.scales = torch.rand((max_experts, hidden // GROUP, padded), device=device).mul_(0.1).add_(0.01)
        self.output = torch.empty_like(self.x)
        self.output_scale = torch.tensor([0.07], device=device)
        self.tables = torch.empty((2, max_experts, 3), dtype=torch.int32, device=device)

    def arguments(self, cell: Cell) -> tuple[torch.Tensor, ...]:
        experts = cell.experts
        masked_m = cell.row_counts().to(self.x.device)
        scales = self.scales[:experts].transpose(1, 2)
        return self.x[:experts], scales, masked_m, self.output_scale, self.output[:experts]


def requant_bytes(total_rows: int, hidden: int) -> int:
    """Bytes that the requant must move: payload in and out, one float32 scale a group."""
    return total_rows * (2 * hidden + hidden // GROUP * 4)


def engine_requant(arguments: Sequence[torch.Tensor], expected_m: int) -> Callable[[], Any] | None:
    """A call of the installed engine's own requant, with the estimate where it takes one; None when it is absent."""
    engine = engine_function("fp8_per_token_to_per_tensor_quant_triton")
    if engine is None:
        return None
    hint = {"expected_rows": expected_m} if "expected_rows" in inspect.signature(engine).parameters else {}
    return lambda: engine(*arguments, **hint)


def engine_silu(arguments: Sequence[torch.Tensor], expected_m: int) -> Callable[[], Any] | None:
    """A call of the installed engine's own SiLU-and-multiply, which takes no estimate; None when it is absent."""
    engine = engine_function("silu_and_mul_masked_post_per_tensor_quant_fwd")
    return None if engine is None else lambda: engine(*arguments)


def requant_providers(buffers: RequantBuffers, cell: Cell) -> dict[str, Callable[[], Any]]:
    arguments = buffers.arguments(cell)
    expected_m = cell.expected_m()
    requant = ours.fp8_per_token_to_per_tensor_quant_triton
    providers: dict[str, Callable[[], Any]] = {"ours": lambda: requant(*arguments, expected_m)}
    engine = engine_requant(arguments, expected_m)
    if engine is not None:
        providers["engine"] = engine
        check_same_bytes(f"requant {cell}", providers["ours"], providers["engine"], arguments[-1])
    providers["legacy"] = lambda: requant(*arguments, launch=legacy_launch(cell.padded))
    moved = requant_bytes(int(arguments[2].sum()), buffers.x.size(2))
    return {**providers, **copy_providers(moved, buffers.x.device)}


class Bf16Buffers:
    """A BF16 payload of the same size beside the fp8 one of :class:`RequantBuffers`; both write the same output."""

    def __init__(self, max_experts: int, padded: int, hidden: int, device: str = "cuda") -> None:
        self.fp8 = RequantBuffers(max_experts, padded, hidden, device)
        self.x = torch.randn((max_experts, padded, hidden), device=device, dtype=torch.bfloat16)

    def arguments(self, cell: Cell) -> tuple[torch.Tensor | None, ...]:
        _, _, masked_m, output_scale, output = self.fp8.arguments(cell)
        return self.x[: cell.experts], None, masked_m, output_scale, output


def bf16_bytes(total_rows: int, hidden: int) -> int:
    """Bytes that the requant of a BF16 payload must move: two in and one out an element."""
    return total_rows * 3 * hidden


def bf16_providers(buffers: Bf16Buffers, cell: Cell) -> dict[str, Callable[[], Any]]:
    """The BF16 path beside the fp8 one (``fp8``) on the same rows, and a copy of what each must move.

    No engine has such a path; the bytes are compared under two launch geometries.
    """
    arguments, fp8_arguments = buffers.arguments(cell), buffers.fp8.arguments(cell)
    expected_m = cell.expected_m()
    requant = ours.fp8_per_token_to_per_tensor_quant_triton
    providers: dict[str, Callable[[], Any]] = {
        "ours": lambda: requant(*arguments, expected_m),
        "fp8": lambda: requant(*fp8_arguments, expected_m),
    }
    check_same_bytes(
        f"bf16 {cell}",
        providers["ours"],
        lambda: requant(*arguments, launch=legacy_launch(cell.padded)),
        buffers.fp8.output[: cell.experts],
    )
    total, hidden = cell.experts * cell.rows, buffers.x.size(2)
    return {
        **providers,
        **copy_providers(bf16_bytes(total, hidden), buffers.x.device),
        **copy_providers(requant_bytes(total, hidden), buffers.x.device, "copy_fp8"),
    }


class SiluBuffers:
    """The largest gate-and-up block of a sweep, sliced per cell."""

    def __init__(self, max_experts: int, padded: int, inner_dim: int, device: str = "cuda") -> None:
        self.gate_up = torch.randn((max_experts, padded, 2 * inner_dim), device=device, dtype=torch.bfloat16)
        self.output = torch.empty((max_experts, padded, inner_dim), device=device, dtype=torch.float8_e4m3fn)
        self.scale = torch.tensor([0.013], device=device)

    def arguments(self, cell: Cell) -> tuple[torch.Tensor, ...]:
        masked_m = cell.row_counts().to(self.scale.device)
        return self.gate_up[: cell.experts], self.output[: cell.experts], masked_m, self.scale


def silu_bytes(total_rows: int, inner_dim: int) -> int:
    """Bytes that SiLU-and-multiply must move: two bf16 values in and one fp8 value out a column."""
    return total_rows * inner_dim * 5


def silu_providers(buffers: SiluBuffers, cell: Cell) -> dict[str, Callable[[], Any]]:
    arguments = buffers.arguments(cell)
    expected_m = cell.expected_m()
    silu = ours.silu_and_mul_masked_post_per_tensor_quant_fwd
    providers: dict[str, Callable[[], Any]] = {"ours": lambda: silu(*arguments, expected_m)}
    engine = engine_silu(arguments, expected_m)
    if engine is not None:
        providers["engine"] = engine
        check_same_bytes(f"silu {cell}", providers["ours"], providers["engine"], arguments[1])
    providers["legacy"] = lambda: silu(*arguments, launch=silu_legacy_launch(cell.padded))
    moved = silu_bytes(int(arguments[2].sum()), buffers.output.size(2))
    return {**providers, **copy_providers(moved, buffers.scale.device)}


def layer_providers(requant: RequantBuffers, silu: SiluBuffers, cell: Cell) -> dict[str, Callable[[], Any]]:
    """The streaming steps of one layer in their order: problem sizes, requant, SiLU; one graph holds them all."""
    requant_arguments, silu_arguments = requant.arguments(cell), silu.arguments(cell)
    masked_m = requant_arguments[2]
    expected_m, experts = cell.expected_m(), cell.experts
    inner_dim, hidden = silu.output.size(2), requant.x.size(2)
    sizes1, sizes2 = requant.tables[0][:experts], requant.tables[1][:experts]

    def run_ours() -> None:
        ours.fp8_per_token_to_per_tensor_quant_triton(
            *requant_arguments,
            expected_m,
            problem_sizes1=sizes1,
            problem_sizes2=sizes2,
            intermediate_size=inner_dim,
        )
        ours.silu_and_mul_masked_post_per_tensor_quant_fwd(*silu_arguments, expected_m)

    providers: dict[str, Callable[[], Any]] = {"ours": run_ours}
    engine_requant = engine_function("fp8_per_token_to_per_tensor_quant_triton")
    if engine_requant is not None:
        engine_silu = engine_function("silu_and_mul_masked_post_per_tensor_quant_fwd")
        engine_sizes = engine_function("deepep_ll_get_cutlass_w4a8_moe_mm_data")
        hint = {"expected_rows": expected_m} if "expected_rows" in inspect.signature(engine_requant).parameters else {}

        def run_engine() -> None:
            engine_sizes(masked_m, sizes1, sizes2, experts, inner_dim, hidden)
            engine_requant(*requant_arguments, **hint)
            engine_silu(*silu_arguments)

        providers["engine"] = run_engine
        for written in (requant.tables, requant_arguments[-1], silu_arguments[1]):
            check_same_bytes(f"layer {cell}", run_ours, run_engine, written)
    total = int(masked_m.sum())
    moved = requant_bytes(total, hidden) + silu_bytes(total, inner_dim)
    return {**providers, **copy_providers(moved, requant.x.device)}


def over_placements(timed: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """One cell's times at several places in memory as one: geometric means; a provider that is absent stays so."""
    merged: dict[str, float | None] = {}
    for name in timed[0]:
        times = [times[name] for times in timed]
        merged[name] = None if None in times else round(geometric_mean(times), 3)
    return merged


def measure_cell(providers: Mapping[str, Callable[[], Any]], repeats: int = 15) -> dict[str, float | None]:
    """``<provider>_us`` of one cell; of variants (the copies) the fastest. An absent engine is None."""
    variants: dict[str, list[float]] = {}
    for name, us in interleaved_medians(providers, repeats).items():
        variants.setdefault(name.partition(_VARIANT)[0], []).append(us)
    timed: dict[str, float | None] = {f"{name}_us": round(min(times), 3) for name, times in variants.items()}
    timed.setdefault("engine_us", None)
    return timed
