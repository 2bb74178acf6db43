#!/usr/bin/env python3
"""Fuzz both streaming kernels on the GPU: more than 10,000 random cases in one run, every byte equal to the reference.

    python benchmark/fuzz_device.py                       # writes benchmark/results/<gpu>/fuzz.json
    python benchmark/fuzz_device.py --seed 7 --cases 100000 --seconds 600
    python benchmark/fuzz_device.py --seed 7 --repeat 12:345   # one case of such a run again, with what differs

A configuration is what the compiler sees (kernel, payload format, sizes, tile); a case is what changes without compiling:
payload, scales, row counts and the launch's hints. Values are any that the formats have: every fp8 code, NaN, infinities,
zeros, denormal and huge scales; row counts are even, skewed, zero, full, or outside of the block. SiLU's gates are those at
which it is exact, as torch and the compiler round the exponential differently. The whole output is compared, padding included,
on the device and without waiting: a fault shows when the configuration is done.

Exit status: 0 when every case is equal, 1 when one is not (it is named, with how to repeat it), 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch  # noqa: E402
from sglang_w4afp8.kernels.ops.moe.reference import ue8m0_to_float32  # noqa: E402

REQUANT, SILU = "requant", "silu"
# How the payload and its scales lie: scales by row, by column (DeepEP's), or with gaps; packed exponents; none.
FORMATS = ("fp8 row", "fp8 column", "fp8 gaps", "ue8m0 row", "ue8m0 column", "bf16")
GROUP = 128
FP8 = torch.float8_e4m3fn
SENTINEL = 0x5A
# Keeps a case at some tens of microseconds a pass over it.
ELEMENTS_MAX = 1 << 22
EXPERTS = (1, 2, 3, 7, 8, 16, 33, 64, 128, 256, 512)
PADDED = (1, 2, 5, 16, 48, 64, 130, 512, 2048)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 28, 56)
INNER = (1, 16, 70, 128, 384, 1024, 1536, 2048)
# SiLU of these is exact in any rounding: zero, the gate itself, or a zero with its sign.
EXACT_GATES = (0.0, 32.0, 36.0, 64.0, 112.0, 1024.0, -104.0, -1024.0, float("nan"), float("inf"), -float("inf"))
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 448.0, 464.0, 465.0)


@dataclass(frozen=True)
class Config:
    """What is compiled once.

    ``row_cap`` and ``speculative`` are classes of the launch's integers that a compiler could tell apart ("one", "sixteens":
    multiples of 16, "any": neither): the kernels ask it not to, and the fuzzer does not rely on that.
    """

    kernel: str
    payload: str
    experts: int
    padded: int
    columns: int
    col_block: int
    row_block: int
    num_warps: int
    row_cap: str
    speculative: str
    overflow_first: bool = False
    tables: bool = False


def _pow2(choose: random.Random, highest: int) -> int:
    return 1 << choose.randrange(highest.bit_length())


def plan(seed: int, count: int) -> list[Config]:
    """``count`` configurations: three quarters of the requant with its formats in turn, one quarter of SiLU."""
    choose = random.Random(seed)
    configs: list[Config] = []
    while len(configs) < count:
        silu = len(configs) % 4 == 3
        requants = len(configs) - len(configs) // 4
        experts, padded = choose.choice(EXPERTS), choose.choice(PADDED)
        columns = choose.choice(INNER) if silu else choose.choice(GROUPS) * GROUP
        if experts * padded * columns > ELEMENTS_MAX:
            continue
        # A program's tile stays within what registers hold.
        row_block = choose.choice((1, 1, 2, 4, 8))
        widest = 2048 // row_block if silu else max(1, 32 // row_block)
        configs.append(
            Config(
                kernel=SILU if silu else REQUANT,
                payload=choose.choice(("bf16", "fp16", "fp32")) if silu else FORMATS[requants % len(FORMATS)],
                experts=experts,
                padded=padded,
                columns=columns,
                col_block=_pow2(choose, widest),
                row_block=row_block,
                num_warps=choose.choice((1, 2, 4, 8)),
                row_cap=choose.choice(("one", "sixteens", "any", "any")),
                speculative=choose.choice(("none", "none", "sixteens", "any")),
                overflow_first=choose.random() < 0.5,
                tables=not silu and choose.random() < 0.7,
            )
        )
    return configs


def _of_class(choose: random.Random, kind: str, highest: int) -> int:
    if kind == "none":
        return 0
    if kind == "one":
        return 1
    if kind == "sixteens":
        return 16 * choose.randint(1, max(1, highest // 16))
    value = choose.randint(2, max(3, highest))
    return value + 1 if value % 16 == 0 else value


def launch_of(config: Config, choose: random.Random) -> MaskedRowsLaunch:
    """The launch of one case: hints within the configuration's classes."""
    return MaskedRowsLaunch(
        col_block=config.col_block,
        m_grid=choose.choice((1, 2, 3, 4, 8, 16, 32)),
        row_cap=_of_class(choose, config.row_cap, config.padded + 8),
        row_block=config.row_block,
        num_warps=config.num_warps,
        overflow_experts=choose.choice((1, 2, 5, 16)),
        speculative_rows=_of_class(choose, config.speculative, 2 * config.padded),
        overflow_first=config.overflow_first,
    )


def saturated(values: torch.Tensor) -> torch.Tensor:
    """fp8 of float32 as the hardware casts: nearest even, saturated, one NaN."""
    return torch.where(values.isnan(), torch.nan, values.clamp(-448.0, 448.0)).to(FP8)


def requant_values(x: torch.Tensor, x_scale: torch.Tensor | None, inverse: torch.Tensor) -> torch.Tensor:
    """The requant of every row at once, live or not."""
    values = x.float()
    if x_scale is not None:
        groups = x.shape[2] // GROUP
        scale = ue8m0_to_float32(x_scale, groups) if x_scale.dtype == torch.int32 else x_scale
        values = (values.unflatten(2, (groups, GROUP)) * scale[..., None]).flatten(2)
    return saturated(values * inverse)


def silu_values(gate_up: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """SiLU and multiply of every row at once; ``inverse`` is ``[E]``."""
    gate, up = gate_up.float().chunk(2, dim=2)
    silu = (gate / (1 + torch.exp(-gate))).to(gate_up.dtype).float()
    return saturated((up * silu) * inverse[:, None, None])


class Case:
    """The buffers of one configuration, filled anew for every case, and what both sides make of them."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        experts, padded, columns = config.experts, config.padded, config.columns
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(config.payload, FP8)
        width = 2 * columns if config.kernel == SILU else columns
        self.x = torch.empty((experts, padded, width), dtype=dtype, device=device)
        self.output = torch.empty((experts, padded, columns), dtype=FP8, device=device)
        self.masked_m = torch.empty(experts, dtype=torch.int32, device=device)
        self.scales = experts if config.kernel == SILU and columns % 2 == 0 else 1
        self.output_scale = torch.empty(self.scales, device=device)
        self.tables = torch.empty((2, experts, 3), dtype=torch.int32, device=device)
        self.x_scale = self._empty_scale()
        self.generator = torch.Generator(device)

    def _empty_scale(self) -> torch.Tensor | None:
        config = self.config
        if config.kernel == SILU or config.payload == "bf16":
            return None
        form, layout = config.payload.split()
        groups = config.columns // GROUP
        columns = -(-groups // 4) if form == "ue8m0" else groups
        dtype = torch.int32 if form == "ue8m0" else torch.float32
        shape = config.experts, config.padded, columns
        if layout == "row":
            return torch.empty(shape, dtype=dtype, device=self.device)
        if layout == "column":
            return torch.empty((shape[0], shape[2], shape[1]), dtype=dtype, device=self.device).transpose(1, 2)
        return torch.empty((shape[0], shape[1] + 1, 2 * shape[2] + 1), dtype=dtype, device=self.device)[:, :-1, ::2][
            :, :, : shape[2]
        ]

    def fill(self, seed: int) -> MaskedRowsLaunch:
        """Random contents and hints; a function of the seed alone."""
        choose = random.Random(seed)
        self.generator.manual_seed(seed)
        config, options = self.config, {"device": self.device, "generator": self.generator}
        if config.kernel == SILU:
            self._fill_gates(options)
        elif config.payload == "bf16":
            spread = 2.0 ** choose.randint(-20, 20)
            self.x.copy_(torch.randn(self.x.shape, **options).mul_(spread))
            self._sprinkle(self.x, choose)
        else:
            self.x.view(torch.uint8).copy_(torch.randint(0, 256, self.x.shape, dtype=torch.uint8, **options))
        if self.x_scale is not None:
            self._fill_scale(choose, options)
        self.masked_m.copy_(self._rows(choose, options))
        self.output_scale.copy_(torch.exp2(torch.rand(self.scales, **options) * 30 - 15))
        self.output.view(torch.uint8).fill_(SENTINEL)
        self.tables.fill_(-1)
        return launch_of(config, choose)

    def _fill_gates(self, options: dict[str, Any]) -> None:
        config = self.config
        gates = torch.tensor(EXACT_GATES, device=self.device)
        shape = config.experts, config.padded, config.columns
        self.x[:, :, : config.columns] = gates[torch.randint(0, len(EXACT_GATES), shape, **options)].to(self.x.dtype)
        self.x[:, :, config.columns :] = torch.randn(shape, **options).mul_(8).to(self.x.dtype)

    def _fill_scale(self, choose: random.Random, options: dict[str, Any]) -> None:
        assert self.x_scale is not None
        shape = self.x_scale.shape
        if self.x_scale.dtype == torch.int32:
            low, high = choose.choice(((0, 256), (112, 142), (120, 134)))
            exponents = torch.randint(low, high, (*shape, 4), **options).to(torch.uint8)
            self.x_scale.copy_(exponents.view(torch.int32).squeeze(-1))
        else:
            spread = choose.choice((4, 24, 250))
            self.x_scale.copy_(torch.exp2(torch.rand(shape, **options).sub_(0.5).mul_(spread)))
            self._sprinkle(self.x_scale, choose)

    @staticmethod
    def _sprinkle(tensor: torch.Tensor, choose: random.Random) -> None:
        """Values that random ones hardly meet, at a few places."""
        for value in choose.sample(SPECIAL, 3):
            tensor[tuple(choose.randrange(size) for size in tensor.shape)] = value

    def _rows(self, choose: random.Random, options: dict[str, Any]) -> torch.Tensor:
        config = self.config
        experts, padded = config.experts, config.padded
        kind = choose.choice(("any", "few", "none", "full", "hot", "outside"))
        if kind == "none":
            return torch.zeros(experts, device=self.device)
        if kind == "full":
            return torch.full((experts,), padded, device=self.device)
        low, high = {"few": (0, min(3, padded + 1)), "outside": (-3, padded + 6), "hot": (0, 2)}.get(
            kind, (0, padded + 1)
        )
        rows = torch.randint(low, high, (experts,), **options)
        if kind == "hot":
            rows[choose.randrange(experts)] = padded
        return rows

    def expected(self, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every byte of the output and of the tables, by the reference."""
        config = self.config
        if config.kernel == SILU:
            values = silu_values(self.x, inverse.expand(config.experts))
        else:
            values = requant_values(self.x, self.x_scale, inverse)
        rows = self.masked_m.clamp(0, config.padded)
        live = torch.arange(config.padded, device=self.device)[None, :] < rows[:, None]
        output = torch.where(live[:, :, None], values.view(torch.uint8), SENTINEL)
        tables = torch.full_like(self.tables, -1)
        if config.tables:
            tables[0] = torch.stack([torch.full_like(rows, 192), rows, torch.full_like(rows, config.columns)], dim=1)
            tables[1] = torch.stack([torch.full_like(rows, config.columns), rows, torch.full_like(rows, 96)], dim=1)
        return output, tables

    def differs(self, inverse: torch.Tensor) -> torch.Tensor:
        """Whether any byte is not the reference's, as a tensor on the device."""
        output, tables = self.expected(inverse)
        return (self.output.view(torch.uint8) != output).any() | (self.tables != tables).any()


def run_kernel(case: Case, launch: MaskedRowsLaunch) -> torch.Tensor:
    """Our kernel on the case's buffers; returns the reciprocal that the device computes of the scale."""
    from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as kernels

    if case.config.kernel == SILU:
        kernels.silu_and_mul_masked_post_per_tensor_quant_fwd(
            case.x, case.output, case.masked_m, case.output_scale, launch=launch
        )
    else:
        tables = {}
        if case.config.tables:
            tables = {"problem_sizes1": case.tables[0], "problem_sizes2": case.tables[1], "intermediate_size": 96}
        kernels.fp8_per_token_to_per_tensor_quant_triton(
            case.x, case.x_scale, case.masked_m, case.output_scale, case.output, launch=launch, **tables
        )
    inverse = torch.empty_like(case.output_scale)
    _reciprocal_kernel[(inverse.numel(),)](case.output_scale, inverse)
    return inverse


@triton.jit
def _reciprocal_kernel(value_ptr, inverse_ptr):
    """1 / value by Triton's division, which is not correctly rounded on a GPU."""
    index = tl.program_id(0)
    tl.store(inverse_ptr + index, 1.0 / tl.load(value_ptr + index))


Kernel = Callable[[Case, MaskedRowsLaunch], torch.Tensor]


def case_seed(seed: int, config: int, case: int) -> int:
    return (seed * 1_000_003 + config) * 1_000_003 + case


def run_config(
    seed: int, index: int, config: Config, first: int, count: int, device: torch.device, kernel: Kernel
) -> list[int]:
    """Run cases ``first`` to ``first + count`` of a configuration; the numbers of those that differ."""
    case = Case(config, device)
    found = torch.zeros(count, dtype=torch.bool, device=device)
    for number in range(count):
        launch = case.fill(case_seed(seed, index, first + number))
        found[number] = case.differs(kernel(case, launch))
    return [first + number for number in found.nonzero().flatten().tolist()]


def fuzz(
    seed: int,
    configs: Sequence[Config],
    cases: int,
    seconds: float,
    device: torch.device,
    kernel: Kernel = run_kernel,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """At least ``cases`` cases over as many configurations as start within ``seconds``; one cell a configuration."""
    begin = clock()
    share = -(-cases // len(configs))
    cells: list[dict[str, Any]] = []
    for index, config in enumerate(configs):
        if cells and clock() - begin > seconds:
            break
        failed = run_config(seed, index, config, 0, share, device, kernel)
        cells.append({"config": index, **asdict(config), "cases": share, "different": failed})
    # What was not started is made up for with what is compiled.
    missing = cases - sum(cell["cases"] for cell in cells)
    for turn in range(len(cells)):
        more = min(missing, -(-missing // (len(cells) - turn)))
        if more <= 0:
            break
        cell = cells[turn]
        cell["different"] += run_config(seed, turn, configs[turn], cell["cases"], more, device, kernel)
        cell["cases"] += more
        missing -= more
    return cells


def repeat(seed: int, configs: Sequence[Config], which: str, device: torch.device) -> int:
    """One case again, with what differs."""
    index, number = (int(part) for part in which.split(":"))
    case = Case(configs[index], device)
    launch = case.fill(case_seed(seed, index, number))
    inverse = run_kernel(case, launch)
    output, tables = case.expected(inverse)
    places = (case.output.view(torch.uint8) != output).nonzero()
    print(f"{configs[index]}\n{launch}\nrows {case.masked_m.tolist()}, scale {case.output_scale.tolist()}")
    print(f"{len(places)} bytes differ, tables {'differ' if (case.tables != tables).any() else 'are equal'}")
    for place in places[:16].tolist():
        found, wanted = case.output.view(torch.uint8)[tuple(place)].item(), output[tuple(place)].item()
        print(f"  [expert, row, column] {place}: {found:#04x}, must be {wanted:#04x}")
    return int(bool(len(places)) or bool((case.tables != tables).any()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1, help="of the configurations and all cases (default 1)")
    parser.add_argument("--cases", type=int, default=12_000, help="at least so many (default 12000)")
    parser.add_argument("--configs", type=int, default=40, help="at most so many compilations of each (default 40)")
    parser.add_argument("--seconds", type=float, default=60, help="start no configuration after this time (default 60)")
    parser.add_argument("--repeat", metavar="CONFIG:CASE", help="one case of the run with this seed again, in detail")
    parser.add_argument("--output", type=Path, help="results file (default benchmark/results/<gpu>/fuzz.json)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("fuzz_device: needs a GPU, and torch sees none", file=sys.stderr)
        return 2
    from sglang_w4afp8.bench.measure import run_metadata, write_json

    device = torch.device("cuda", torch.cuda.current_device())
    configs = plan(options.seed, options.configs)
    if options.repeat:
        return repeat(options.seed, configs, options.repeat, device)
    begin = time.monotonic()
    cells = fuzz(options.seed, configs, options.cases, options.seconds, device)
    seconds = round(time.monotonic() - begin, 1)
    cases, different = sum(cell["cases"] for cell in cells), sum(len(cell["different"]) for cell in cells)
    name = torch.cuda.get_device_name(device)
    folder = re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia ")).strip("_")
    path = options.output or ROOT / "benchmark" / "results" / folder / "fuzz.json"
    # The engine takes no part, whether it is installed or not.
    meta = run_metadata(sglang="not used", seed=options.seed, cases=cases, different=different, seconds=seconds)
    write_json(path, {"meta": meta, "cells": cells})
    print(f"{cases} cases over {len(cells)} configurations in {seconds} s: {different} differ from the reference")
    print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    for cell in cells:
        for number in cell["different"][:3]:
            print(
                f"  repeat with: --seed {options.seed} --configs {options.configs} --repeat {cell['config']}:{number}"
            )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
