"""Accesses of the compiled kernels, without a GPU: as wide as the tile allows, and one scale a group.

The compiler runs in processes of its own (here kernels are interpreted); ``test/kernel_codegen.py`` says what is compiled
and judged. Deliberate faults prove that the checks can fail.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from sglang.test.ci.ci_register import register_cpu_ci

import kernel_codegen
from kernel_codegen import REQUANT, SILU, TARGETS, Geometry, accesses, faults, specialised
from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch

register_cpu_ci(est_time=155, suite="base-a-test-cpu")

SCRIPT = Path(kernel_codegen.__file__)


def call(path, *arguments, **variables):
    """What one run of the script wrote to ``path``, and its exit status."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert path.is_file(), done.stderr[-2000:]
    return json.loads(path.read_text(encoding="utf-8")), done.returncode


def run(tmp_path, *arguments):
    """Findings of one run of the script, and its exit status."""
    path = tmp_path / "findings.json"
    content, status = call(path, "--json", str(path), "--scratch", str(tmp_path), *arguments)
    return content["findings"], status


@pytest.mark.parametrize("target", TARGETS)
def test_every_production_geometry_moves_wide_words_and_one_scale_a_group(target, tmp_path):
    findings, status = run(tmp_path, "--target", target)
    assert {finding["geometry"]: finding["faults"] for finding in findings if finding["faults"]} == {}
    assert status == 0
    kernels = [finding["geometry"].split()[0] for finding in findings]
    assert kernels.count(REQUANT) >= 4 and kernels.count(SILU) >= 2
    # What the rules tile for from 32 experts up: 16 bytes a lane, whatever the warp's width.
    tile = f"tile 1x{16 * TARGETS[target].warp_size // 32} warps 4"
    (widest,) = [finding for finding in findings if finding["geometry"].endswith(f"{tile} tables")]
    assert (widest["load_bytes"]["16"], widest["store_bytes"]["16"]) == (2, 2)


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100"])
def test_scales_addressed_by_element_are_caught(target, tmp_path):
    findings, status = run(tmp_path, "--target", target, "--broken", "element-wise-scales")
    assert status == 0
    assert len(findings) >= 4
    for finding in findings:
        # The payload is as wide as before; only the gather tells.
        (fault,) = finding["faults"]
        assert "scalar loads" in fault


def test_a_word_that_unseen_rows_wait_for_is_caught(tmp_path):
    findings, status = run(tmp_path, "--target", "cuda:90", "--broken", "early-counts")
    assert status == 0
    assert [finding["faults"] for finding in findings] == [["1 words waited for before the payload is loaded"]]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["unaligned-pointers", "odd-width"])
def test_narrow_accesses_are_caught(target, kind, tmp_path):
    findings, status = run(tmp_path, "--target", target, "--broken", kind)
    assert status == 0
    assert findings
    for finding in findings:
        assert any("payload loads are of" in fault or "less than a word" in fault for fault in finding["faults"])
        assert any("stores" in fault for fault in finding["faults"]) or target.startswith("hip")


@pytest.mark.parametrize("target", TARGETS)
def test_calls_at_the_ends_of_what_is_allowed_compile(target, tmp_path):
    # One expert, a cap of one row, one column: integers that are 1 are constants to the compiler, not to the interpreter.
    findings, status = run(tmp_path, "--target", target, "--unusual")
    assert status == 0
    assert len(findings) == len(list(kernel_codegen.unusual_geometries()))


LAUNCH = {"col_block": 4, "m_grid": 2, "row_block": 2, "num_warps": 4, "overflow_experts": 4, "overflow_first": True}


def written_machine_code(tmp_path, name, *entries):
    """What ``--machine-code`` writes of a table of one shape, its kernels compiled afresh."""
    folder = tmp_path / name
    folder.mkdir()
    metadata = dict.fromkeys(tuned_config.REQUIRED_METADATA, "any")
    launches = [LAUNCH | {"cap_slack": 2, "speculative_slack": 1} | entry for entry in entries]
    data = {"requant": {"28": {"8": launches}}}
    tuned_config.write_tuned(folder / "streaming_any.json", metadata, data)
    path = folder / "machine_code.json"
    arguments = "--machine-code", str(path), "--tables", str(folder)
    content, status = call(path, *arguments, TRITON_CACHE_DIR=str(folder / "cache"))
    assert status == 0
    return content


def test_machine_code_of_a_table_tells_equal_kernels_from_others(tmp_path):
    # The cap is no constant of the kernel, the tile is.
    content = written_machine_code(
        tmp_path, "three", {"expected_m": 2}, {"expected_m": 3, "cap_slack": 4}, {"expected_m": 9, "col_block": 8}
    )
    assert content["meta"]["triton"] == triton.__version__
    assert content["meta"]["target"] == "cuda:90"
    cells = content["cells"]
    assert [(cell["kernel"], cell["columns"], cell["experts"], cell["rows"]) for cell in cells] == [
        (kind, 3584, 8, rows) for rows in (1, 2, 8) for kind in (REQUANT, "bf16", "layer")
    ]
    for one, capped, wider in (cells[0::3], cells[1::3], cells[2::3]):
        assert one | {"rows": 2} == capped
        assert one["digest"] != wider["digest"]
    assert len({cell["digest"] for cell in cells[:3]}) == 3
    for cell in cells:
        assert len(cell["digest"]) == 64
        assert 10 < cell["before_payload"] < cell["instructions"] < 2000
        assert 16 <= cell["registers"] <= 255
        assert 0 <= cell["barriers"] < 20
    assert written_machine_code(tmp_path, "one", {"expected_m": 2})["cells"] == cells[:3]


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000e220000000800 */
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;       /* 0x0000000000007b1d */
                                                                       /* 0x000fec0000010000 */
        /*0020*/              @!P0 LDG.E.128 R8, desc[UR12][R4.64] ;   /* 0x0000000c04088981 */
                                                                       /* 0x000ea2000c1e1d00 */
        /*0030*/                   BRA 0x30;                           /* 0xfffffffc00fc7947 */
                                                                       /* 0x000fc0000383ffff */
        /*0040*/                   NOP;                                /* 0x0000000000007918 */
                                                                       /* 0x000fc00000000000 */
 Function kernel:
  REG:31 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_machine_code_is_counted_and_its_digest_holds_the_stalls():
    found = kernel_codegen.machine_code(SASS, 16)
    assert (found.instructions, found.before_payload, found.registers, found.barriers) == (4, 2, 31, 1)
    moved = kernel_codegen.machine_code(SASS.replace("/*0020*/", "/*0a20*/"), 16)
    stalled = kernel_codegen.machine_code(SASS.replace("0x000fec0000010000", "0x000fe40000010000"), 16)
    assert found == moved
    assert found.digest != stalled.digest
    with pytest.raises(LookupError, match="no load of 8 bytes"):
        kernel_codegen.machine_code(SASS, 8)


def test_an_integer_that_triton_may_not_look_at_stays_an_argument():
    def parameter(name, **more):
        return SimpleNamespace(name=name, is_constexpr=False, do_not_specialize=False, **more)

    rows = parameter("rows")
    rows.do_not_specialize = True
    parameters = [parameter("experts"), rows, parameter("columns"), parameter("scales")]
    arguments = {"experts": 1, "rows": 1, "columns": 32, "scales": None}
    signature, constants, attributes = specialised(parameters, arguments, TARGETS["cuda:90"])
    assert signature == {"experts": "constexpr", "rows": "i32", "columns": "i32", "scales": "constexpr"}
    assert constants == {"experts": 1, "scales": None}
    assert attributes == {(2,): [["tt.divisibility", 16]]}
    *_, attributes = specialised([rows], {"rows": 32}, TARGETS["cuda:90"])
    assert attributes == {}


def test_ptx_is_counted_by_bytes_a_lane():
    found = accesses(
        """
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        @%p1 ld.global.L1::evict_first.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
        ld.global.nc.v2.b64 { %rd4, %rd5 }, [ %rd1 ];
        ld.global.b32 { %r5 }, [ %rd2 + 0 ];
        ld.global.f32 %f1, [%rd2];
        ld.volatile.global.u8 %rs1, [%rd2];
        ld.param.b64 %rd1, [kernel_param_0];
        ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r9 ];
        @%p2 st.global.v4.b32 [ %rd3 + 0 ], { %r1, %r2, %r3, %r4 };
        @%p2 st.global.b8 [ %rd3 + 0 ], { %rs1 };
        """,
        "cuda",
    )
    assert found.loads == {16: 2, 8: 1, 4: 2, 1: 1}
    assert found.stores == {16: 1, 1: 1}


def test_amd_assembly_is_counted_by_bytes_a_lane():
    found = accesses(
        """
        s_load_dwordx4 s[0:3], s[4:5], 0x0
        global_load_dwordx4 v[0:3], v[4:5], off
        buffer_load_dwordx2 v[0:1], v4, s[8:11], 0 offen
        global_load_dword v0, v1, s[2:3]
        global_load_ubyte v0, v1, s[2:3]
        buffer_load_ushort v0, v1, s[8:11], 0 offen
        global_load_short_d16_hi v0, v1, s[2:3]
        ds_read_b128 v[0:3], v4
        global_store_dwordx3 v0, v[1:3], s[2:3]
        buffer_store_byte v0, v1, s[8:11], 0 offen
        """,
        "hip",
    )
    assert found.loads == {16: 1, 8: 1, 4: 1, 2: 2, 1: 1}
    assert found.stores == {12: 1, 1: 1}


def test_a_word_waited_for_is_one_that_was_loaded():
    lines = [
        "/*0010*/ S2R R2, SR_TID.X ;",
        "/*0020*/ LDG.E R6, desc[UR12][R6.64] ;",
        "/*0030*/ R2UR UR4, R2 ;",
        "/*0040*/ {} ;",
        "/*0050*/ @P0 LDG.E.128 R8, desc[UR12][R4.64] ;",
        "/*0060*/ R2UR UR5, R6 ;",
    ]
    assert kernel_codegen.words_waited_for("\n".join(lines).format("NOP"), 16) == 0
    assert kernel_codegen.words_waited_for("\n".join(lines).format("@!P1 R2UR UR6, R6"), 16) == 1
    with pytest.raises(LookupError, match="no load of 8 bytes"):
        kernel_codegen.words_waited_for("\n".join(lines), 8)


def _seen(loads, stores):
    found = kernel_codegen.Accesses()
    found.loads.update(loads)
    found.stores.update(stores)
    return found


# 2 KB over 128 lanes: one access of 16 bytes a lane in each of the two paths.
WIDE = Geometry(REQUANT, 7168, 64, MaskedRowsLaunch(16, 4, 4, num_warps=4))


@pytest.mark.parametrize(
    ("loads", "stores", "words"),
    [
        ({16: 2, 4: 5}, {16: 2}, []),
        ({16: 2, 4: 5}, {16: 2, 4: 6}, []),
        ({16: 2, 4: 35}, {16: 2}, ["35 scalar loads"]),
        ({8: 4, 4: 5}, {16: 2}, ["payload loads are of [8], must be of 16"]),
        ({16: 1, 8: 2, 4: 5}, {16: 2}, ["payload loads are of [8, 16], must be of 16"]),
        ({16: 1, 4: 5}, {16: 2}, ["1 payload loads, must be at least 2"]),
        ({4: 5}, {16: 2}, ["single words"]),
        ({16: 2, 4: 6, 1: 1}, {16: 2}, ["1 loads of less than a word", "7 scalar loads"]),
        ({16: 2, 4: 5}, {8: 4}, ["0 payload stores of 16 bytes"]),
        ({16: 2, 4: 5}, {16: 2, 1: 3}, ["3 stores of less than a word"]),
    ],
)
def test_what_is_a_fault(loads, stores, words):
    found = faults(WIDE, TARGETS["cuda:90"], _seen(loads, stores))
    assert len(found) == len(words)
    assert all(word in fault for word, fault in zip(words, found, strict=True))


def test_counts_of_many_experts_may_come_in_one_wide_load():
    launch = MaskedRowsLaunch(16, 4, 4, num_warps=4)
    seen = _seen({16: 2, 8: 1, 4: 4}, {16: 2})
    assert faults(Geometry(REQUANT, 7168, 256, launch), TARGETS["cuda:90"], seen) == []
    assert len(faults(Geometry(REQUANT, 7168, 64, launch), TARGETS["cuda:90"], seen)) == 1


def test_a_bfloat16_payload_has_no_scales_and_stores_half_its_width():
    geometry = Geometry(REQUANT, 7168, 64, MaskedRowsLaunch(8, 4, 4, num_warps=4), payload=kernel_codegen.BF16)
    assert faults(geometry, TARGETS["cuda:90"], _seen({16: 2, 4: 3}, {8: 2})) == []
    assert len(faults(geometry, TARGETS["cuda:90"], _seen({16: 2, 4: 5}, {8: 2}))) == 1
    assert len(faults(geometry, TARGETS["cuda:90"], _seen({8: 4, 4: 3}, {8: 2}))) == 1


def test_a_wave_of_64_lanes_halves_the_width():
    launch = MaskedRowsLaunch(1024, 4, 4, num_warps=4)
    assert faults(Geometry(SILU, 2048, 64, launch), TARGETS["cuda:90"], _seen({16: 4, 4: 4}, {8: 2})) == []
    assert faults(Geometry(SILU, 2048, 64, launch), TARGETS["hip:gfx950"], _seen({8: 4, 4: 4}, {4: 2})) == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
