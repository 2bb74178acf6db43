#!/usr/bin/env python3
"""Compile the two Triton grouped GEMMs for Hopper, without a GPU, and count what their speed hangs on.

    python test/gemm_codegen.py
    python test/gemm_codegen.py --json findings.json
    PYTHONPATH=/somewhere/triton-3.6 python test/gemm_codegen.py      # with another Triton

A small launch of each kernel and form of the weights is looked at as PTX: copies of the bulk engine, matrix products, byte
permutes. Launches of the shipped table, but for those of two scale groups a step, are looked at as machine code: the assembler
lets the products of a group run without waiting for one another only while it can see that no lane of a warp group takes
another way. Else each product begins a run of its own, which is seen nowhere but there (what it costs:
``benchmark/results/h200/two_kernels_shipped_triton38_one_by_one.json``).

Needs the engine beside Triton, torch and this package. Exit status: 0, 1 where products of a shipped launch run one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    # Before Triton is imported: a kernel is interpreted or compiled from its decoration on.
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

# As in a server: it replaces host helpers of Triton, which kernels then cannot refer to.
import sglang.srt.utils.common  # noqa: F401
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_codegen import broken_module, code_digest, machine_code_of
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.kernels.ops.moe import w4a8_grouped_gemm as two
from sglang_w4afp8.kernels.ops.moe.w4a8_grouped_gemm import GroupedGemmLaunch

GPU = "NVIDIA H200"
INNER, HIDDEN = 2048, 7168
PADDED = 512
_TYPES = {
    "x_ptr": "*fp8e4nv",
    "x_scale_ptr": "*fp32",
    "weight_scale_ptr": "*bf16",
    "masked_m_ptr": "*i32",
    "output_scale_ptr": "*fp32",
}
_STRIDES = {"X_SCALE_STRIDE0": PADDED * HIDDEN // 128, "X_SCALE_STRIDE1": 1, "X_SCALE_STRIDE2": PADDED}
# Sizes, and type of the output.
KERNELS: dict[str, tuple[dict[str, float], str]] = {
    "gate_up": ({"N": INNER, "K": HIDDEN, **_STRIDES, "FP8_MAX": 448.0}, "*fp8e4nv"),
    "down": ({"N": HIDDEN, "K": INNER}, "*bf16"),
}
# Without it the assembler is not told that all lanes of a warp walk alike.
_UNTOLD = ((r"_first_lanes\((tl\..*), EXPERT_BLOCK, PTX\)", r"\1"),)


def compiled(name: str, launch: GroupedGemmLaunch, experts: int = 64, module: ModuleType = two) -> Any:
    """Triton's compilation of one launch for sm_90."""
    kernel, (sizes, output) = getattr(module, f"_{name}_kernel"), KERNELS[name]
    types = {**_TYPES, "output_ptr": output, "weights": f"tensordesc<i8[{launch.block_n},64]>"}
    constants = {"EXPERTS": experts, "EXPERT_BLOCK": triton.next_power_of_2(experts), "M": PADDED, **sizes, "PTX": True}
    constants |= {"BLOCK_N": launch.block_n, "BLOCK_M": launch.block_m, "GROUPS_PER_STEP": launch.groups_per_step}
    constants |= {"STAGES": launch.num_stages, "LOOK_UP": launch.look_up}
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a.endswith("_ptr")}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "maxnreg": launch.max_registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(made: Any) -> tuple[int, ...]:
    """Registers and bytes of stack a thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", machine_code_of(made))
    assert found is not None
    return tuple(map(int, found.groups()))


def products_and_runs(code: str) -> tuple[int, int]:
    """Matrix products in machine code, and how often a warp group begins a run of them."""
    return len(re.findall(r"\bQGMMA\.", code)), len(re.findall(r"\bWARPGROUP\.ARRIVE\b", code))


def one_by_one(runs: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The launches whose products do not share runs. A launch without warp-group products has none."""
    return {name: counts for name, counts in runs.items() if 2 * counts[1] > counts[0]}


def shipped_code(only: Sequence[int] = (), module: ModuleType = two) -> dict[str, str]:
    """The machine code of every launch of the table, or of some numbers of experts, by kernel, experts and launch."""
    found: dict[str, str] = {}
    for (n, k, experts), shape in (grouped_gemm_table.table_of(GPU) or {}).items():
        if (n, k) != (INNER, HIDDEN) or (only and experts not in only):
            continue
        for name, launch in ((name, getattr(pair, name)) for pair in shape.pairs for name in KERNELS):
            key = f"{name}, {experts} experts, {launch}"
            # With two groups a step Triton 3.8 makes runs of one product of 8 rows without being divergent, at no loss that
            # was measured (32 experts).
            if launch.groups_per_step == 1 and key not in found:
                found[key] = machine_code_of(compiled(name, launch, experts, module))
    return found


def instructions(name: str, look_up: bool) -> dict[str, int]:
    """Counts of a small launch's PTX."""
    made = compiled(name, GroupedGemmLaunch(64, 16, 1, 4, 4, look_up))
    ptx = made.asm["ptx"]
    return {
        "bulk": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        # A register operand is a list in braces before the descriptor.
        "products": len(re.findall(r"wgmma\.mma_async\S*m64n16k32\S*e4m3\.e4m3\s*\{[^}]*\},\s*\{", ptx)),
        "other_products": len(re.findall(r"\bmma\.sync", ptx)),
        "permutes": len(re.findall(r"prmt\.b32", ptx)),
        "masks": len(re.findall(r"0x0F0F0F0F", ptx)),
        "shared": made.metadata.shared,
    }


def small_launches() -> dict[str, Any]:
    """What is counted of launches outside the table."""
    forms = {"offset": False, "look-up": True}
    capped = grouped_gemm_table.rule(128, 16, gate_up=True)
    return {
        **{f"{name} {form}": instructions(name, look_up) for name in KERNELS for form, look_up in forms.items()},
        "capped": {
            experts: [capped.max_registers, *resources(compiled("gate_up", capped, experts))] for experts in (64, 256)
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Compile the two Triton grouped GEMMs for Hopper and look at the code."
    )
    parser.add_argument("--json", type=Path, help="everything that was counted")
    parser.add_argument("--experts", type=int, nargs="+", default=[], help="of the shipped launches only these")
    parser.add_argument(
        "--untold",
        type=Path,
        metavar="FOLDER",
        help="shipped launches of a copy, made here, that says nothing of its lanes",
    )
    options = parser.parse_args(argv)
    module = broken_module("untold", _UNTOLD, options.untold, two) if options.untold else two
    code = shipped_code(options.experts, module)
    runs = {name: products_and_runs(listing) for name, listing in code.items()}
    if options.json is not None:
        found = {"triton": triton.__version__, "runs": runs, "digests": {n: code_digest(c) for n, c in code.items()}}
        found |= {} if options.untold else small_launches()
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    serial = one_by_one(runs)
    for name, (products, begun) in serial.items():
        print(f"{name}: {products} matrix products in {begun} runs: one by one")
    print(f"triton {triton.__version__}: {len(runs)} shipped GEMM launches, {len(serial)} of them one by one")
    return int(bool(serial))


if __name__ == "__main__":
    sys.exit(main())
