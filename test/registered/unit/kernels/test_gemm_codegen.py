"""What the two Triton grouped GEMMs compile to on Hopper, without a GPU: what their speed hangs on.

Weights must come by the bulk copy engine, the products must be warp-group matrix instructions with the unpacked weights in
registers, and unpacking offset codes must take no byte permutes. The compiler runs in a process of its own
(``test/gemm_codegen.py``), because kernels are interpreted here; ``test_tritons.py`` has the other Tritons do it.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=75, suite="base-a-test-cpu")

SCRIPT = Path(__file__).resolve().parents[3] / "gemm_codegen.py"


def look(folder, *words):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Nothing that is compiled is cached for other runs.
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codegen")
    done = look(folder, "--json", str(folder / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


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
    """The script says which shipped launches do, and fails; here, that it looked at all of them."""
    assert sum(products > 0 for products, _ in found["runs"].values()) > 20
    assert {name.split(", ")[1] for name in found["runs"]} == {f"{n} experts" for n in (8, 32, 64, 128, 256)}


def test_up_to_a_warp_of_experts_the_assembler_need_not_be_told(found, tmp_path):
    done = look(tmp_path, "--untold", str(tmp_path), "--experts", "8", "32", "--json", str(tmp_path / "untold.json"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    untold = json.loads((tmp_path / "untold.json").read_text())["digests"]
    assert untold == {name: digest for name, digest in found["digests"].items() if name in untold} and len(untold) > 8


@pytest.mark.skipif(
    not importlib.metadata.version("triton").startswith("3.8."), reason="other Tritons see it by themselves"
)
def test_a_walk_that_counts_as_divergent_is_seen(tmp_path):
    """The kernels without what tells the assembler that all lanes of a warp walk alike."""
    done = look(tmp_path, "--untold", str(tmp_path), "--experts", "64")
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert re.search(
        r"^gate_up, 64 experts, .*: (\d+) matrix products in \1 runs: one by one$", done.stdout, re.MULTILINE
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
