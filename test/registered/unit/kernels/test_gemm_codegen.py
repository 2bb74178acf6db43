"""What the two Triton grouped GEMMs compile to on Hopper, without a GPU: what their speed hangs on.

Weights must come by the bulk copy engine, the products must be warp-group matrix instructions with the unpacked weights in
registers, and unpacking offset codes must take no byte permutes. The compiler runs in a process of its own, because kernels
are interpreted here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = """
import json, re, subprocess, sys, tempfile
import sglang.srt.utils.common  # as in a server: it replaces host helpers of Triton, which kernels then cannot refer to
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table, w4a8_grouped_gemm as two

M, TYPES = 512, dict(
    x_ptr="*fp8e4nv", x_scale_ptr="*fp32", weight_scale_ptr="*bf16", masked_m_ptr="*i32", output_scale_ptr="*fp32",
)
CASES = {
    "gate_up": (two._gate_up_kernel, dict(N=2048, K=7168, X_SCALE_STRIDE0=M * 56, X_SCALE_STRIDE1=1, X_SCALE_STRIDE2=M,
                                          FP8_MAX=448.0), "*fp8e4nv"),
    "down": (two._down_kernel, dict(N=7168, K=2048), "*bf16"),
}

def compiled(name, launch, experts=64):
    kernel, sizes, output = CASES[name]
    types = {**TYPES, "output_ptr": output, "weights": f"tensordesc<i8[{launch.block_n},64]>"}
    constants = dict(EXPERTS=experts, EXPERT_BLOCK=experts, M=M, **sizes, BLOCK_N=launch.block_n, BLOCK_M=launch.block_m)
    constants |= dict(GROUPS_PER_STEP=launch.groups_per_step, STAGES=launch.num_stages, LOOK_UP=launch.look_up, PTX=True)
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a.endswith("_ptr")}
    source = ASTSource(kernel, signature, constants, attributes)
    options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.max_registers)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

# Registers and bytes of stack a thread, as the assembler says.
def resources(made):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(value) for value in re.search(r"REG:(\\d+) STACK:(\\d+)", said.stdout + said.stderr).groups()]

found = {}
for name in CASES:
    for look_up in (False, True):
        made = compiled(name, two.GroupedGemmLaunch(64, 16, 1, 4, 4, look_up))
        ptx, shared = made.asm["ptx"], made.metadata.shared
        found[f"{name} {'look-up' if look_up else 'offset'}"] = {
            "bulk": len(re.findall(r"cp\\.async\\.bulk\\.tensor", ptx)),
            # A register operand is a list in braces before the descriptor.
            "products": len(re.findall(r"wgmma\\.mma_async\\S*m64n16k32\\S*e4m3\\.e4m3\\s*\\{[^}]*\\},\\s*\\{", ptx)),
            "other_products": len(re.findall(r"\\bmma\\.sync", ptx)),
            "permutes": len(re.findall(r"prmt\\.b32", ptx)),
            "masks": len(re.findall(r"0x0F0F0F0F", ptx)),
            "shared": shared,
        }
rule = grouped_gemm_table.rule(128, 16, gate_up=True)

# Instructions of every launch of the shipped table: matrix products, and how often a warp group begins a run of them.
def products_and_runs(made):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [len(re.findall(r"\\bQGMMA\\.", code)), len(re.findall(r"WARPGROUP\\.ARRIVE", code))]

found["runs"] = {}
for (n, k, experts), shape in grouped_gemm_table.table_of("NVIDIA H200").items():
    for pair in shape.pairs:
        for name, launch in (("gate_up", pair.gate_up), ("down", pair.down)):
            key = f"{name}, {experts} experts, {launch}"
            # With two groups a step products stand alone without being divergent, at no loss (32 experts, measured).
            if (n, k) == (2048, 7168) and launch.groups_per_step == 1 and key not in found["runs"]:
                found["runs"][key] = products_and_runs(compiled(name, launch, experts))
found["capped"] = {experts: [rule.max_registers, *resources(compiled("gate_up", rule, experts))] for experts in (64, 256)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), environment.get("PYTHONPATH", "")])
    # A file, because the compiler reads the source of what it compiles; nothing of it is cached for other runs.
    script = tmp_path_factory.mktemp("codegen") / "compile.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment["TRITON_CACHE_DIR"] = str(script.parent / "cache")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


# Two halves of a group in two steps of 32 values each; the first GEMM has gate and up tiles, the offset one tile more.
PRODUCTS = {"gate_up offset": 12, "gate_up look-up": 8, "down offset": 8, "down look-up": 4}


@pytest.mark.parametrize("case", PRODUCTS)
def test_weights_come_in_bulk_and_meet_the_matrix_units_in_registers(found, case):
    seen = found[case]
    assert seen["bulk"] >= (2 if case.startswith("gate_up") else 1)
    assert seen["products"] >= PRODUCTS[case] and seen["products"] % PRODUCTS[case] == 0
    assert seen["other_products"] == 0
    # Four blocks of four warps fit on one processor.
    assert 4 * seen["shared"] <= 227 * 1024


@pytest.mark.parametrize("gemm", ["gate_up", "down"])
def test_offset_codes_are_unpacked_without_permutes(found, gemm):
    offset, look_up = found[f"{gemm} offset"], found[f"{gemm} look-up"]
    # Two masks a word of four bytes; 64 x 64 bytes over 128 lanes are 8 words a lane.
    assert offset["masks"] >= 16
    # Bf16 scales are taken apart with a few; a look-up takes eight a word.
    assert offset["permutes"] <= 8 < 64 <= look_up["permutes"]


@pytest.mark.parametrize("experts", ["64", "256"])
def test_the_first_kernels_small_tiles_leave_room_for_three_programs_without_spilling(found, experts):
    cap, registers, stack = found["capped"][experts]
    assert 3 * 128 * cap <= 65536 and registers <= cap
    assert stack == 0


def test_products_of_a_group_run_without_waiting_for_one_another(found):
    # One by one, every product begins a run of its own: what the assembler does where it takes the loop for divergent.
    assert sum(products > 0 for products, _ in found["runs"].values()) > 20
    assert not {name: (products, runs) for name, (products, runs) in found["runs"].items() if 2 * runs > products}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
