"""Which tile the compiled GEMM takes: read from the wheel of every sglang-kernel that an engine pins, without a GPU."""

import copy
import importlib
import json
import sys
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8.kernels.ops.moe import compiled_tiles
from sglang_w4afp8.kernels.ops.moe.compiled_tiles import Branch, Tile

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

SCRIPTS = Path(__file__).resolve().parents[4] / "scripts"
OLD = ["0.4.2.post2", "0.4.3", "0.4.4", "0.4.5", "0.4.6.post1", "0.4.7"]
NEW = ["0.4.9", "0.4.10"]


@pytest.fixture(scope="module")
def checker():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("check_kernel_versions")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def libraries(checker):
    return checker.cached_wheels.kernel_libraries(checker.pinned_versions())


def test_every_pinned_version_takes_the_tiles_that_the_package_knows(checker, libraries):
    found = checker.dispatches(libraries)
    assert json.loads(compiled_tiles.FILE.read_text(encoding="utf-8")) == {"dispatches": found}
    assert checker.differences(found, found) == []


def test_the_pinned_versions_are_those_that_are_known(checker):
    assert checker.pinned_versions() == compiled_tiles.known_versions() == [*OLD, *NEW]


def test_what_is_known_of_the_tiles():
    """Written out here, so that the reader is not compared with itself."""
    first = Branch(
        (4, 32, 256, 1024, 4096),
        (
            "pp_64x32x512_c2x1x1_s6",
            "co_128x16x512_c2x1x1_s5",
            "co_128x16x512_c1x1x1_s5",
            "co_128x32x512_c2x1x1_s4",
            "co_128x64x512_c2x1x1_s3",
            "co_128x64x512_c1x1x1_s3",
        ),
    )
    generic = Branch((32, 1024), ("co_128x16x512_c1x1x1_s5", "co_128x32x512_c1x1x1_s4", "co_128x64x512_c1x1x1_s3"))
    glm = Branch((256, 1024), ("co_128x16x512_c2x1x1_s5", "co_128x32x512_c1x1x1_s4", "co_128x64x512_c1x1x1_s3"))
    for version in (*OLD, *NEW):
        for gpu in ("NVIDIA H200", "NVIDIA H20"):
            assert compiled_tiles.branch(version, gpu, 4096, 7168) == first
            assert compiled_tiles.branch(version, gpu, 3072, 4096) == generic
    for shape in ((4096, 6144), (6144, 2048)):
        assert {compiled_tiles.branch(version, "NVIDIA H200", *shape) for version in NEW} == {glm}
        others = {compiled_tiles.branch(version, "NVIDIA H200", *shape) for version in OLD}
        # Only on a GPU that is called by that very word.
        others |= {
            compiled_tiles.branch(version, gpu, *shape) for version in NEW for gpu in ("NVIDIA H20", "H200X", None)
        }
        assert others == {generic}
    assert compiled_tiles.branch("0.4.8", "NVIDIA H200", 4096, 7168) is None
    assert compiled_tiles.same_tiles("0.4.9") == NEW and compiled_tiles.same_tiles("0.4.8") == []


def test_the_tile_of_an_m_is_that_of_its_bucket():
    branch = compiled_tiles.branch("0.4.10", "NVIDIA H200", 4096, 7168)
    assert [Tile.of(branch.tile_at(m)).rows for m in (1, 4, 5, 256, 257, 1024, 1025, 10**6)] == [
        32, 32, 16, 16, 32, 32, 64, 64,
    ]  # fmt: skip
    assert Tile.of("co_256x64x128_c2x1x1_s7") == Tile(256, 64, 128, 2)
    assert Tile.of("kernel_0123456789") is None


def test_the_reader_sees_every_step_and_the_profiler_named_the_same(libraries):
    """Against tables measured on a GPU, whose buckets and tiles the profiler found."""
    from emulated_gemm import CompiledGemm

    for version in ("0.4.5", "0.4.7"):
        gemm = CompiledGemm(libraries[version])
        table = json.loads(
            (SCRIPTS.parent / f"python/sglang_w4afp8/configs/gemm_tiles_nvidia_h200_{version}.json").read_text()
        )
        for shape in table["data"]["shapes"]:
            read = gemm.branch(shape["n"], shape["k"], "NVIDIA H200")
            assert [bucket["high"] for bucket in shape["buckets"]] == [*read.limits, None]
            assert [bucket["kernel"] for bucket in shape["buckets"]] == list(
                map(compiled_tiles.tile_label, read.kernels)
            )


def test_a_version_whose_tiles_differ_is_named(checker):
    known = json.loads(compiled_tiles.FILE.read_text(encoding="utf-8"))["dispatches"]
    found = copy.deepcopy(known)
    found[1]["branches"][0]["limits"][0] += 1
    assert checker.differences(known, found) == [
        f"sglang-kernel {version}: branches are not those of compiled_tiles.json" for version in NEW
    ]
    assert checker.differences(known[:1], known[1:]) == [
        f"sglang-kernel {version}: not in compiled_tiles.json" for version in NEW
    ]


def test_what_is_no_such_library_is_refused(tmp_path, libraries):
    from emulated_gemm import CompiledGemm, UnreadableError

    spoiled = bytearray(libraries["0.4.10"].read_bytes())
    for place in range(len(spoiled)):
        place = spoiled.find(b"_ZN7cutlass13device_kernel", place)
        if place < 0:
            break
        spoiled[place] = ord("X")
    path = tmp_path / "library.so"
    path.write_bytes(spoiled)
    with pytest.raises(UnreadableError):
        CompiledGemm(path).branch(4096, 7168, "NVIDIA H200")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
