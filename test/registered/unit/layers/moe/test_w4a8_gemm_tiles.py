"""The grouped GEMM without a GPU: the float reference, the size rule of the compiled dispatch, and the choice of a
tile.

The kernel is a double that reads its sizes as the compiled code does: the engine's call fails against the reference
where the real one does, the wrapper's passes.
"""

import json
import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe import compiled_tiles
from sglang_w4afp8.kernels.ops.moe.compiled_tiles import Branch, Tile
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import (
    CompiledDispatchDouble,
    deinterleave_scales,
    dequantize_weight,
    interleave_scales,
    pack_int4,
    relative_error,
    unpack_int4,
    w4a8_grouped_gemm_reference,
)
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.srt.layers.moe.w4a8_gemm import (
    AS_SHIPPED,
    GemmTileTable,
    SplitChoice,
    TileBucket,
    TileChoice,
    buckets_from_limits,
    choose_by_rule,
    choose_tile,
    engine_gemm_takes_expected_rows,
    expert_row_offsets,
    split_name,
    w4a8_grouped_gemm,
    warn_if_engine_gemm_is_wrong,
)
from sglang_w4afp8.tune import gemm_tiles as tuning
from sglang_w4afp8.tune.sizes import MODELS

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

RESULTS = Path(__file__).parents[5] / "benchmark" / "results" / "h200" / "gemm_tiles.json"
SENTINEL = 77.0
SHAPES = ((4096, 7168), (7168, 2048), (4096, 3584), (3584, 1536), (4096, 6144), (6144, 2048))
PADDED = (64, 128, 256, 384, 512, 640, 1024, 2048)


@pytest.fixture(autouse=True)
def fresh_state():
    w4a8_gemm.clear_cache()
    yield
    w4a8_gemm.clear_cache()


# ---- reference


def test_the_even_value_is_in_the_low_nibble_and_nibbles_are_twos_complement():
    values = torch.tensor([[1, 2, -1, -8, 7, 0, -5, 3]], dtype=torch.int8)
    packed = pack_int4(values)
    assert packed.view(torch.uint8).tolist() == [[0x21, 0x8F, 0x07, 0x3B]]
    assert unpack_int4(packed).tolist() == values.tolist()


def test_every_byte_survives_unpacking_and_packing():
    every_byte = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(4, 64)
    values = unpack_int4(every_byte)
    assert values.min() == -8
    assert values.max() == 7
    assert pack_int4(values).equal(every_byte)


def test_packing_refuses_an_odd_width_and_unpacking_another_dtype():
    with pytest.raises(ValueError, match="^values: last size is 3, must be even"):
        pack_int4(torch.zeros(2, 3, dtype=torch.int8))
    with pytest.raises(TypeError, match="^packed: dtype is torch.uint8, must be torch.int8"):
        unpack_int4(torch.zeros(2, 4, dtype=torch.uint8))


def test_scales_are_interleaved_by_four():
    # Expert 0, rows n0 and n1, groups 0..7: row 0 of the result holds groups 0-3 of n0, then of n1.
    scales = torch.arange(16.0).view(1, 2, 8)
    assert interleave_scales(scales).tolist() == [
        [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
    ]


def test_scales_whose_groups_are_no_multiple_of_four_are_interleaved_by_one():
    scales = torch.arange(6.0).view(1, 2, 3)
    assert interleave_scales(scales).tolist() == [[[0, 3], [1, 4], [2, 5]]]


@pytest.mark.parametrize("groups", [1, 2, 4, 5, 8, 12, 56])
def test_interleaving_can_be_undone(groups):
    scales = torch.rand(3, 6, groups)
    assert deinterleave_scales(interleave_scales(scales), 6).equal(scales)


def test_deinterleaving_refuses_a_width_that_does_not_belong_to_n():
    with pytest.raises(ValueError, match="^interleaved: last size is 12, must be n or 4"):
        deinterleave_scales(torch.zeros(1, 2, 12), 6)


def test_a_weight_is_its_int4_value_times_the_scale_of_its_group():
    values = torch.zeros(2, 256, dtype=torch.int8)
    values[0, 0], values[0, 127], values[0, 128], values[1, 255] = 3, -8, 5, 7
    weight = dequantize_weight(pack_int4(values), torch.tensor([[0.5, 2.0], [1.0, 0.25]]))
    expected = torch.zeros(2, 256)
    expected[0, 0], expected[0, 127], expected[0, 128], expected[1, 255] = 1.5, -4.0, 10.0, 1.75
    assert weight.equal(expected)


class Problem:
    """A grouped GEMM whose every intermediate and result is exact in bf16, so that comparisons need no tolerance.

    Each activation row has one value of +-1 in each group of 128, weight scales are 0.5, 1 or 2: results are sums of a
    few multiples of 0.5 no larger than 16.
    """

    def __init__(self, n, k, padded, rows, seed=0):
        generator = torch.Generator().manual_seed(seed)
        experts, groups = len(rows), k // 128
        self.n, self.k, self.rows = n, k, rows
        self.masked_m = torch.tensor(rows, dtype=torch.int32)
        place = torch.randint(0, 128, (experts, padded, groups, 1), generator=generator)
        sign = torch.randint(0, 2, (experts, padded, groups, 1), generator=generator) * 2.0 - 1.0
        dense = torch.zeros(experts, padded, groups, 128).scatter_(3, place, sign)
        self.a = dense.view(experts, padded, k).to(torch.float8_e4m3fn)
        for expert, count in enumerate(rows):
            self.a[expert, count:] = float("nan")
        self.w_q = pack_int4(torch.randint(-8, 8, (experts, n, k), dtype=torch.int8, generator=generator))
        scales = 2.0 ** torch.randint(-1, 2, (experts, n, groups), generator=generator)
        self.w_scale = interleave_scales(scales).to(torch.bfloat16)
        self.a_scale = torch.tensor([0.5])
        self.out = torch.full((experts, padded, n), SENTINEL, dtype=torch.bfloat16)
        # The engine never writes these.
        self.engine_offsets = torch.full((experts + 1,), -(2**31), dtype=torch.int32)
        self.problem_sizes = torch.tensor([[n, count, k] for count in rows], dtype=torch.int32)
        self.k_strides = torch.full((experts, 3), k, dtype=torch.int64)
        self.n_strides = torch.full((experts, 3), n, dtype=torch.int64)

    @property
    def strides(self):
        return self.k_strides, self.k_strides, self.n_strides, self.n_strides

    @property
    def operands(self):
        return self.out, self.a, self.w_q, self.a_scale, self.w_scale

    def expected(self):
        reference = w4a8_grouped_gemm_reference(self.a, self.w_q, self.a_scale, self.w_scale, self.masked_m)
        for expert, count in enumerate(self.rows):
            reference[expert, count:] = SENTINEL
        return reference.to(torch.bfloat16)

    def live_error(self):
        live = torch.arange(self.a.shape[1])[None] < self.masked_m[:, None]
        return relative_error(self.out[live], self.expected()[live].float())

    def run_as_the_engine(self, kernel, topk=8):
        kernel(*self.operands, self.engine_offsets[:-1], self.problem_sizes, *self.strides, 128, topk)

    def run(self, kernel, expected_m=3, topk=8, **kwargs):
        tables = (self.engine_offsets, self.problem_sizes, *self.strides)
        w4a8_grouped_gemm(*self.operands, *tables, expected_m=expected_m, topk=topk, kernel=kernel, **kwargs)


def test_the_reference_is_the_sum_over_groups():
    problem = Problem(n=4, k=512, padded=64, rows=[2, 0, 3])
    got = w4a8_grouped_gemm_reference(
        problem.a, problem.w_q, problem.a_scale, problem.w_scale, problem.masked_m, torch.float64
    )
    scales = deinterleave_scales(problem.w_scale, 4).double()
    for expert, count in enumerate(problem.rows):
        for row in range(count):
            x = problem.a[expert, row].double().view(4, 128)
            w = unpack_int4(problem.w_q[expert]).double().view(4, 4, 128)
            by_group = (w * x[None]).sum(-1)
            assert got[expert, row].equal(0.5 * (by_group * scales[expert]).sum(-1))
        assert got[expert, count:].eq(0).all()


def test_a_missed_row_gives_no_small_error():
    assert math.isnan(relative_error(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0])))
    assert relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])) == pytest.approx(1 / math.sqrt(2))


# ---- the compiled dispatch's rule


@pytest.mark.parametrize("padded", PADDED)
def test_the_engines_call_is_wrong_unless_the_padded_rows_are_a_multiple_of_512(padded):
    problem = Problem(n=16, k=1024, padded=padded, rows=[3, 1, 5])
    problem.run_as_the_engine(CompiledDispatchDouble())
    if padded % 512 == 0:
        assert problem.out.equal(problem.expected())
    else:
        assert problem.live_error() > 0.3


@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("k", [512, 640, 1024])
def test_ours_is_right_with_every_buffer_size(padded, k):
    problem = Problem(n=16, k=k, padded=padded, rows=[3, 0, 7, 1])
    problem.run(CompiledDispatchDouble())
    assert problem.out.equal(problem.expected())


def test_the_dispatch_reads_the_sizes_of_the_engines_tensors_wrongly_and_of_ours_rightly():
    double = CompiledDispatchDouble()
    problem = Problem(n=16, k=1024, padded=256, rows=[1, 1])
    problem.run_as_the_engine(double, topk=8)
    problem.run(double)
    engine, ours = double.calls
    assert (engine.dims, engine.m, engine.n, engine.k, engine.k_tile) == (3, 0, 256, 256, 128)
    assert (ours.dims, ours.n, ours.k, ours.k_tile) == (2, 16, 1024, 512)


def test_uneven_rows_empty_experts_and_padding():
    problem = Problem(n=16, k=512, padded=64, rows=[64, 0, 1, 17, 0, 2, 33, 5])
    problem.run(CompiledDispatchDouble())
    assert problem.out.equal(problem.expected())


def test_no_live_row_at_all_writes_nothing():
    problem = Problem(n=16, k=512, padded=64, rows=[0, 0])
    problem.run(CompiledDispatchDouble())
    assert problem.out.eq(SENTINEL).all()


@pytest.mark.parametrize("expected_m", [None, 0, 1, 2, 9, 100, 10**9])
def test_any_estimate_gives_the_same_result(expected_m):
    problem = Problem(n=16, k=512, padded=128, rows=[5, 0, 128])
    problem.run(CompiledDispatchDouble(), expected_m=expected_m)
    assert problem.out.equal(problem.expected())


@pytest.mark.parametrize("name", ["m1-4", "m5-32", "m33-256", AS_SHIPPED])
def test_every_candidate_gives_the_same_result(name):
    double = CompiledDispatchDouble(limits={(16, 512): (4, 32, 256), None: (32,)})
    problem = Problem(n=16, k=512, padded=512, rows=[4, 0, 9])
    topk = 8 if name == AS_SHIPPED else TileBucket(*map(int, name[1:].split("-"))).topk_for(3 * 512)
    problem.run(double, choice=TileChoice(name, topk, 0))
    assert problem.out.equal(problem.expected())
    assert double.calls[0].dims == (3 if name == AS_SHIPPED else 2)


@pytest.mark.parametrize("few, many", [("m1-4", "m33-256"), (AS_SHIPPED, "m5-32")])
def test_a_split_gives_every_expert_its_tile(few, many):
    double = CompiledDispatchDouble(limits={(16, 512): (4, 32, 256), None: (32,)})
    problem = Problem(n=16, k=512, padded=512, rows=[4, 0, 9, 17, 16])

    def tile(name):
        topk = 8 if name == AS_SHIPPED else TileBucket(*map(int, name[1:].split("-"))).topk_for(5 * 512)
        return TileChoice(name, topk, 0)

    seen = []

    def kernel(d, a, b, a_scales, b_scales, offsets, problem_sizes, *rest):
        seen.append(problem_sizes[:, 1].tolist())
        double(d, a, b, a_scales, b_scales, offsets, problem_sizes, *rest)

    problem.run(kernel, choice=SplitChoice(tile(few), 9, tile(many)))
    assert problem.out.equal(problem.expected())
    assert seen == [[4, 0, 9, 0, 0], [0, 0, 0, 17, 16]]
    assert [call.dims for call in double.calls] == [3 if few == AS_SHIPPED else 2, 2]
    assert double.calls[0].bucket != double.calls[1].bucket or few == AS_SHIPPED


def test_a_table_may_name_a_split():
    buckets = [{"low": 1, "high": 4}, {"low": 5, "high": 32}, {"low": 33, "high": None}]
    split = split_name("m5-32", 16, "m33+")
    shape = {"n": 16, "k": 512, "buckets": buckets}

    def table(*order):
        return GemmTileTable.parse({"shapes": [{**shape, "choices": [{"experts": 64, "rows": 16, "order": order}]}]})

    choice = choose_tile(16, 512, 64, 512, 17, 8, table(split, "m33+"))
    assert isinstance(choice, SplitChoice) and choice.name == split and choice.rows == 16
    assert (choice.few.name, choice.many.name) == ("m5-32", "m33+")
    assert 5 <= choice.few.m <= 32 and choice.many.m >= 33
    # One of its tiles cannot be reached, or is wrong with this buffer: the next in order.
    shipped = split_name(AS_SHIPPED, 16, "m33+")
    assert choose_tile(16, 512, 64, 512, 17, 8, table(shipped, "m33+")).name == shipped
    assert choose_tile(16, 512, 64, 384, 17, 8, table(shipped, "m33+")).name == "m33+"
    assert choose_tile(16, 512, 1, 16, 17, 8, table(split, "m1-4")).name == "m1-4"
    for wrong in ("m5-32|16|m99+", "m5-32|0|m33+", "m5-32|x|m33+", "m33+|16|m33+", "m5-32|16", "m5-32|16|m33+|4"):
        with pytest.raises(ValueError):
            table(wrong)


def test_what_the_kernel_is_given():
    seen = {}

    def kernel(d, a, b, a_scales, b_scales, offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides, *rest):
        seen.update(locals())

    problem = Problem(n=16, k=1024, padded=640, rows=[3, 0, 7])
    problem.run(kernel, choice=TileChoice("m33-256", 19, 101))
    assert seen["a"].shape == (1920, 1024)
    assert seen["d"].shape == (1920, 16)
    assert seen["a"].data_ptr() == problem.a.data_ptr()
    assert seen["d"].data_ptr() == problem.out.data_ptr()
    assert seen["offsets"].dtype == torch.int32
    assert seen["offsets"].tolist() == [0, 640, 1280]
    assert seen["rest"] == (128, 19)
    assert seen["b"] is problem.w_q
    assert seen["a_scales"] is problem.a_scale
    assert seen["b_scales"] is problem.w_scale
    assert seen["problem_sizes"] is problem.problem_sizes
    assert seen["a_strides"] is problem.k_strides
    assert seen["b_strides"] is problem.k_strides
    assert seen["d_strides"] is problem.n_strides
    assert seen["s_strides"] is problem.n_strides


def test_operands_that_do_not_belong_together_are_refused():
    problem = Problem(n=16, k=512, padded=64, rows=[1, 1])
    good = problem.out
    problem.out = good.transpose(1, 2)
    with pytest.raises(ValueError, match=r"^out: shape \(2, 16, 64\)"):
        problem.run(CompiledDispatchDouble())
    problem.out = good[:, :, :8].contiguous()
    with pytest.raises(ValueError, match=r"^w_q: shape \(2, 16, 256\)"):
        problem.run(CompiledDispatchDouble())


# ---- buckets and their topk

GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
# Both GEMMs of every model in the survey, whole and cut over eight ranks.
SERVED = sorted(
    {
        pair
        for m in MODELS.values()
        for n in (m.inner, m.inner // 8)
        for pair in tuning.gemm_shapes(n, m.hidden)
        if n % 128 == 0
    }
)
BRANCHES = sorted(
    {
        compiled_tiles.branch(version, gpu, *shape)
        for version in compiled_tiles.known_versions()
        for gpu in GPUS
        for shape in SERVED
    },
    key=repr,
)
EVERY_LIMITS = sorted({branch.limits for branch in BRANCHES} | {(4, 32, 64, 256, 1024, 4096)})


def test_names_of_buckets():
    assert [bucket.name for bucket in buckets_from_limits((4, 32))] == ["m1-4", "m5-32", "m33+"]


@pytest.mark.parametrize("limits", EVERY_LIMITS)
@pytest.mark.parametrize("padded", [64, 128, 192, 256, 384, 512, 640, 1024, 2048, 4096])
def test_topk_lands_in_its_bucket_for_every_number_of_experts(limits, padded):
    for experts in range(1, 513):
        total = experts * padded
        for bucket in buckets_from_limits(limits):
            topk = bucket.topk_for(total)
            if topk is None:
                # Only buckets above the whole buffer, or ones narrower than the step of integer division there.
                assert bucket.low > total or bucket.high < 2 * bucket.low
                assert not any(bucket.low <= total // t <= (bucket.high or total) for t in range(1, 65))
            else:
                assert topk >= 1
                assert bucket.low <= total // topk <= (bucket.high or total)


@given(total=st.integers(1, 3000), low=st.integers(1, 400), width=st.integers(0, 400))
def test_topk_is_found_whenever_there_is_one(total, low, width):
    bucket = TileBucket(low, low + width)
    possible = [t for t in range(1, total + 1) if low <= total // t <= low + width]
    assert bucket.topk_for(total) == (possible[0] if possible else None)


def tile_of(choice, branch):
    """The compiled tile that a choice gets: of the branch, or of the generic one that the engine's call takes."""
    label = compiled_tiles.branch("0.4.10", None, 512, 512).tiles[0] if choice.as_shipped else branch.tile_at(choice.m)
    return Tile.of(label)


@pytest.mark.parametrize("rows", [1, 8, 11, 12, 16, 32, 64, 128, 256, 100_000])
@pytest.mark.parametrize("branch", BRANCHES, ids=lambda branch: "-".join(map(str, branch.limits)))
def test_the_rule_takes_a_tile_of_the_rows_that_suit_wherever_the_version_has_one(branch, rows):
    """For every version, GPU and shape that is served, every number of experts and every buffer."""
    k = 7168 if any("x512_" in tile for tile in branch.tiles) else 640
    wanted = 16 if rows <= 11 else 32 if rows <= (90 if k > 2048 else 45) else 64
    for experts in (1, 4, 8, 12, 16, 18, 20, 24, 32, 36, 48, 64, 128, 256):
        for padded in (64, 128, 384, 512, 1024):
            choice = choose_by_rule(4096, k, experts, padded, rows, 8, branch)
            reachable = [
                Tile.of(bucket.kernel)
                for bucket in buckets_from_limits(branch.limits, branch.tiles)
                if bucket.topk_for(experts * padded) is not None
            ]
            if w4a8_gemm.engine_gemm_is_right(padded, k) and k % 512 == 0:
                reachable.append(Tile.of("co_128x16x512_c1x1x1_s5"))
            suiting = {tile.rows for tile in reachable if tile.columns >= w4a8_gemm.MIN_TILE_COLUMNS}
            if wanted in suiting:
                assert tile_of(choice, branch).rows == wanted, (experts, padded, choice)
            if not choice.as_shipped:
                assert choice.m == experts * padded // choice.topk


def test_the_rule_for_short_k_leaves_the_tile_of_32_rows_earlier():
    branch = compiled_tiles.branch("0.4.10", "NVIDIA H200", 7168, 2048)
    taken = [tile_of(choose_by_rule(7168, 2048, 64, 512, rows, 8, branch), branch).rows for rows in (12, 45, 46, 90)]
    assert taken == [32, 32, 64, 64]


def test_the_rule_keeps_the_engines_call_only_where_it_is_right_and_no_cluster_shares_the_loads():
    def name(n, k, padded, rows, version="0.4.10", gpu="NVIDIA H200"):
        return choose_tile(n, k, 64, padded, rows + 1, 8, branch=compiled_tiles.branch(version, gpu, n, k)).name

    assert name(7168, 2048, 512, 8) == AS_SHIPPED
    assert name(7168, 2048, 1024, 1) == AS_SHIPPED
    assert name(7168, 2048, 384, 8) == "rule:m9-512"  # no tile of 16 rows without the engine's call
    assert name(7168, 2048, 512, 16) == "rule:m9-512"
    assert name(4096, 7168, 512, 8) == "rule:m5-32"
    # GLM's sizes have branches of their own from 0.4.9 on, on the H200 alone.
    assert name(4096, 6144, 512, 8) == "rule:m1-256"
    assert name(4096, 6144, 512, 32) == "rule:m257-1024"
    assert name(4096, 6144, 512, 8, "0.4.7") == name(4096, 6144, 512, 8, "0.4.10", GPUS[1]) == "rule:m1-32"
    assert name(4096, 6144, 512, 32, "0.4.7") == "rule:m33-1024"


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_a_version_that_nobody_has_read_gets_the_engines_own_call_wherever_it_is_right(rows):
    assert choose_by_rule(4096, 7168, 64, 512, rows, 8, None).as_shipped
    choice = choose_by_rule(4096, 7168, 64, 384, rows, 8, None)
    assert not choice.as_shipped and choice.m >= 1


def test_a_table_of_another_version_serves_only_the_shapes_whose_tiles_are_the_same(monkeypatch, tmp_path, caplog):
    entry = {**TABLE["shapes"][0], "choices": [{"experts": 8, "rows": 1, "order": ["m33+"]}]}
    glm, deepseek = ({**entry, "n": n, "k": k} for n, k in ((4096, 6144), (4096, 7168)))
    monkeypatch.setattr(tuned_config, "user_directory", lambda: tmp_path)
    monkeypatch.setattr(tuned_config, "SHIPPED_DIRECTORY", tmp_path)
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "NVIDIA H200")
    metadata = {"gpu": "NVIDIA H200", "triton": "3.6.0", "package_version": "0.1.0", "kernel_version": "0.4.7"}
    path = tmp_path / tuned_config.file_name(w4a8_gemm.TABLE_KIND, "NVIDIA H200", "0.4.7")
    tuned_config.write_tuned(path, metadata, {"shapes": [glm, deepseek]})

    def shapes(version):
        tuned_config._cache.clear()
        w4a8_gemm.clear_cache()
        monkeypatch.setattr(w4a8_gemm, "kernel_version", lambda: version)
        table = w4a8_gemm.installed_table()
        return set(table.shapes) if table else set()

    both = {(4096, 6144), (4096, 7168)}
    assert {version: shapes(version) for version in compiled_tiles.known_versions()} == {
        **dict.fromkeys(("0.4.2.post2", "0.4.3", "0.4.4", "0.4.5", "0.4.6.post1", "0.4.7"), both),
        **dict.fromkeys(("0.4.9", "0.4.10"), {(4096, 7168)}),
    }
    with caplog.at_level(logging.INFO):
        assert shapes("0.4.9") == {(4096, 7168)}
        assert shapes("0.5.0") == set()
    assert "measured with sglang-kernel 0.4.7 for 4096x7168, which chooses the same tiles" in caplog.text
    assert "sglang-kernel 0.5.0 is not among those whose tiles are known" in caplog.text


def test_the_nearest_version_comes_first_and_the_newer_of_two_as_near():
    assert w4a8_gemm.versions_by_nearness("0.4.5")[:4] == ["0.4.5", "0.4.6.post1", "0.4.4", "0.4.7"]
    assert w4a8_gemm.versions_by_nearness("0.4.10")[:3] == ["0.4.10", "0.4.9", "0.4.7"]
    assert w4a8_gemm.versions_by_nearness("9.9.9") == ["9.9.9"]


def test_the_estimate_is_one_above_the_mean():
    assert w4a8_gemm.expected_rows_per_expert(17) == 16
    assert w4a8_gemm.expected_rows_per_expert(1) == 1
    assert w4a8_gemm.expected_rows_per_expert(None) == w4a8_gemm.ROWS_WITHOUT_ESTIMATE


# ---- table

TABLE = {
    "shapes": [
        {
            "n": 16,
            "k": 512,
            "buckets": [{"low": 1, "high": 4}, {"low": 5, "high": 32}, {"low": 33, "high": None, "kernel": "big"}],
            "choices": [
                {"experts": 8, "rows": 1, "order": ["m1-4", "m5-32"]},
                {"experts": 8, "rows": 16, "order": ["as_shipped", "m5-32"]},
                {"experts": 8, "rows": 32, "order": ["m33+", "m5-32"]},
                {"experts": 64, "rows": 1, "order": ["m5-32"]},
            ],
        }
    ]
}


@pytest.mark.parametrize(
    ("experts", "padded", "rows", "name"),
    [
        (8, 512, 1, "m1-4"),
        (8, 512, 3, "m1-4"),
        (8, 512, 4, AS_SHIPPED),
        (8, 512, 16, AS_SHIPPED),
        (8, 384, 16, "m5-32"),
        (8, 512, 22, AS_SHIPPED),
        (8, 512, 23, "m33+"),
        (8, 512, 4096, "m33+"),
        (22, 512, 4096, "m33+"),
        (23, 512, 4096, "m5-32"),
        (256, 512, 16, "m5-32"),
    ],
)
def test_the_table_is_read_at_the_nearest_measured_experts_and_rows(experts, padded, rows, name):
    table = GemmTileTable.parse(TABLE)
    assert choose_tile(16, 512, experts, padded, rows + 1, 8, table).name == name


def test_a_bucket_that_cannot_be_reached_gives_way_to_the_next_best():
    table = GemmTileTable.parse(TABLE)
    assert choose_tile(16, 512, 1, 32, 33, 8, table).name == "m5-32"


def test_a_shape_that_the_table_lacks_is_chosen_by_the_rule():
    branch = Branch((32,), ("co_128x16x512_c1x1x1_s5", "co_128x32x512_c1x1x1_s4"))
    by_rule = choose_by_rule(32, 512, 8, 512, 16, 8, branch)
    assert choose_tile(32, 512, 8, 512, 17, 8, GemmTileTable.parse(TABLE), branch) == by_rule
    assert by_rule.name == "rule:m33+"


@given(st.integers(1, 512), st.sampled_from(PADDED), st.integers(0, 5000))
def test_the_dispatch_takes_the_bucket_that_was_chosen(experts, padded, expected_m):
    limits = (4, 32, 256, 1024, 4096)
    buckets = buckets_from_limits(limits)
    orders = {(64, 2**i): tuple(b.name for b in (*buckets[i % 6 :], *buckets[: i % 6])) for i in range(9)}
    table = GemmTileTable({(4096, 7168): w4a8_gemm.ShapeTable(buckets, orders)})
    choice = choose_tile(4096, 7168, experts, padded, expected_m, 8, table)
    assert buckets[sum(experts * padded // choice.topk > limit for limit in limits)].name == choice.name


def test_the_16_row_tile_of_the_engines_call_is_kept_with_any_number_of_experts():
    for experts in (1, 8, 256, 257, 384, 512):
        choice = choose_tile(7168, 2048, experts, 512, 2, topk=8)
        assert choice.as_shipped
        assert choice.topk >= 8
        assert experts // choice.topk <= 32


@pytest.mark.parametrize(
    "change",
    [
        lambda shape: shape.pop("buckets"),
        lambda shape: shape.pop("choices"),
        lambda shape: shape.update(buckets=[]),
        lambda shape: shape.update(choices=[]),
        lambda shape: shape.update(n="wide"),
        lambda shape: shape["choices"][0].update(order=["m9-99"]),
        lambda shape: shape["choices"][0].update(order=[]),
        lambda shape: shape["buckets"][0].pop("low"),
    ],
)
def test_a_malformed_table_is_refused(change):
    data = json.loads(json.dumps(TABLE))
    change(data["shapes"][0])
    with pytest.raises((KeyError, TypeError, ValueError)):
        GemmTileTable.parse(data)


def test_the_installed_table_serves_where_gpu_and_kernel_match(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tuned_config, "user_directory", lambda: tmp_path)
    monkeypatch.setattr(tuned_config, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(w4a8_gemm, "kernel_version", lambda: "9.9.9")
    tuned_config._cache.clear()
    metadata = {"gpu": "NVIDIA H200", "triton": "3", "package_version": "0", "kernel_version": "9.9.9"}
    tuned_config.write_tuned(tuning.table_path(tmp_path, "NVIDIA H200", "9.9.9"), metadata, TABLE)
    double = CompiledDispatchDouble(limits={(16, 512): (4, 32), None: (32,)})
    problem = Problem(n=16, k=512, padded=128, rows=[1] * 8)
    with caplog.at_level(logging.INFO):
        problem.run(double, expected_m=2)
        problem.run(double, expected_m=33)
    assert [call.bucket for call in double.calls] == [0, 2]
    assert sum("gemm_tiles_nvidia_h200_9.9.9.json" in record.getMessage() for record in caplog.records) == 1
    tuned_config._cache.clear()


@pytest.mark.parametrize("version, level", [("0.4.10", logging.INFO), ("9.9.9", logging.WARNING)])
def test_without_a_table_one_line_names_the_rule(monkeypatch, caplog, tmp_path, version, level):
    """A warning where nobody has read what the version's tiles are: the engine's own are then all that is sure."""
    monkeypatch.setattr(tuned_config, "user_directory", lambda: tmp_path)
    monkeypatch.setattr(tuned_config, "gpu_name", lambda index=None: "NVIDIA H300")
    monkeypatch.setattr(w4a8_gemm, "kernel_version", lambda: version)
    tuned_config._cache.clear()
    problem = Problem(n=16, k=512, padded=128, rows=[1, 2])
    with caplog.at_level(logging.INFO):
        for expected_m in (1, 2, 50):
            problem.run(CompiledDispatchDouble(), expected_m=expected_m)
    lines = [record for record in caplog.records if "NVIDIA H300" in record.getMessage()]
    assert [record.levelno for record in lines] == [level]
    assert "by the rule" in lines[0].getMessage() and version in lines[0].getMessage()
    assert problem.out.equal(problem.expected())


def test_shipped_tables_parse_and_are_for_the_deepseek_gemms():
    for path in tuned_config.SHIPPED_DIRECTORY.glob(f"{w4a8_gemm.TABLE_KIND}_*.json"):
        table = GemmTileTable.parse(tuned_config.read_tuned(path, {}))
        assert set(tuning.DEEPSEEK_SHAPES) <= set(table.shapes)


# ---- offsets


def test_offsets_are_made_once_per_experts_rows_and_device():
    cpu = torch.device("cpu")
    first = expert_row_offsets(4, 384, cpu)
    assert first.tolist() == [0, 384, 768, 1152]
    assert expert_row_offsets(4, 384, cpu) is first
    assert expert_row_offsets(4, 512, cpu) is not first
    assert expert_row_offsets(1, 2**31 - 1, cpu).tolist() == [0]


def test_offsets_first_needed_under_capture_are_not_shared(monkeypatch, caplog):
    cpu = torch.device("cpu")
    monkeypatch.setattr(w4a8_gemm, "_is_capturing", lambda device: True)
    first, second = expert_row_offsets(4, 384, cpu), expert_row_offsets(4, 384, cpu)
    assert first is not second
    assert first.tolist() == second.tolist() == [0, 384, 768, 1152]
    assert len(caplog.records) == 1
    monkeypatch.setattr(w4a8_gemm, "_is_capturing", lambda device: False)
    kept = expert_row_offsets(4, 384, cpu)
    assert kept is not first
    monkeypatch.setattr(w4a8_gemm, "_is_capturing", lambda device: True)
    assert expert_row_offsets(4, 384, cpu) is kept


def test_prepare_makes_what_a_captured_call_needs(monkeypatch):
    cpu = torch.device("cpu")
    w4a8_gemm.prepare(8, 512, cpu)
    monkeypatch.setattr(torch, "arange", None)
    assert expert_row_offsets(8, 512, cpu)[-1] == 7 * 512


def test_offsets_past_int32_are_refused():
    with pytest.raises(ValueError, match=r"^num_experts: 512 x 4194304 rows, must be below 2\*\*31"):
        expert_row_offsets(512, 1 << 22, torch.device("cpu"))


# ---- the engine's signature


def _signature_of_today(
    d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides,
    chunk_size=128, topk=8,
):  # fmt: skip
    raise AssertionError("must not be called")


def test_todays_signature_is_taken():
    assert engine_gemm_takes_expected_rows(_signature_of_today) == w4a8_gemm.EngineGemmSignature()
    assert engine_gemm_takes_expected_rows(CompiledDispatchDouble()) == w4a8_gemm.EngineGemmSignature()


@pytest.mark.parametrize("name", w4a8_gemm.EXPECTED_ROWS_PARAMETERS)
def test_a_kernel_that_takes_the_expected_rows_is_given_them(name, monkeypatch):
    double = CompiledDispatchDouble()
    seen = []
    body = f"def kernel({_KERNEL_ARGUMENTS}, chunk_size=128, topk=8, {name}=None):\n    record({name})\n"
    body += f"    double({_KERNEL_ARGUMENTS}, chunk_size, topk)\n"
    scope = {"double": double, "record": seen.append}
    exec(body, scope)
    signature = engine_gemm_takes_expected_rows(scope["kernel"])
    assert signature == w4a8_gemm.EngineGemmSignature(expected_rows_parameter=name)
    monkeypatch.setattr(w4a8_gemm, "_engine_kernel", lambda: scope["kernel"])
    problem = Problem(n=16, k=512, padded=128, rows=[2, 9])
    problem.run(None, expected_m=6)
    problem.run(None, choice=TileChoice("m33-256", 4, 64))
    # The engine's estimate where nothing was measured, else the m of the measured bucket.
    assert seen == [6, 64]
    assert problem.out.equal(problem.expected())


_KERNEL_ARGUMENTS = (
    "d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides"
)


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("chunk_size=128, topk=8, tile_hint=None", "takes unknown tile_hint"),
        ("masked_m, chunk_size=128, topk=8", "takes unknown masked_m"),
        ("chunk_size=128", "takes no topk"),
    ],
)
def test_an_unknown_signature_makes_the_patch_stand_down_with_the_reason(tail, reason):
    scope = {}
    exec(f"def kernel({_KERNEL_ARGUMENTS}, {tail}): pass", scope)
    assert reason in engine_gemm_takes_expected_rows(scope["kernel"]).stand_down_reason


def test_standing_down_means_the_engines_own_call_and_one_warning(monkeypatch, caplog):
    scope = {"calls": []}
    exec(f"def kernel({_KERNEL_ARGUMENTS}, chunk_size, topk, hint=None):\n    calls.append((a.dim(), topk))\n", scope)
    monkeypatch.setattr(w4a8_gemm, "_engine_kernel", lambda: scope["kernel"])
    problem = Problem(n=16, k=512, padded=512, rows=[2])
    problem.run(None, topk=6)
    problem.run(None, topk=6)
    assert scope["calls"] == [(3, 6), (3, 6)]
    assert sum("takes unknown hint" in record.getMessage() for record in caplog.records) == 1


def test_a_kernel_without_a_readable_signature_makes_the_patch_stand_down():
    assert "cannot be read" in engine_gemm_takes_expected_rows(type).stand_down_reason


# ---- the patch is off


def test_the_log_warns_once_where_the_engines_result_is_wrong(caplog):
    assert not warn_if_engine_gemm_is_wrong(512)
    assert not warn_if_engine_gemm_is_wrong(2048)
    assert caplog.records == []
    assert warn_if_engine_gemm_is_wrong(256)
    assert warn_if_engine_gemm_is_wrong(256)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "256 padded rows" in record.getMessage()


def test_where_the_scales_are_interleaved_by_one_it_is_the_other_way_round():
    assert warn_if_engine_gemm_is_wrong(512, k=640)
    assert not warn_if_engine_gemm_is_wrong(256, k=640)
    for padded in (256, 512):
        problem = Problem(n=16, k=640, padded=padded, rows=[2, 1])
        if w4a8_gemm.engine_gemm_is_right(padded, 640):
            problem.run_as_the_engine(CompiledDispatchDouble())
            assert problem.out.equal(problem.expected())
        else:
            with pytest.raises(RuntimeError, match="reads past the scales"):
                problem.run_as_the_engine(CompiledDispatchDouble())


# ---- tuning


@pytest.mark.parametrize("routing", ["even", "random", "skew16", "skew4"])
@pytest.mark.parametrize(("experts", "padded", "rows"), [(8, 512, 4), (64, 512, 16), (256, 1024, 1), (2, 512, 3)])
def test_routings_keep_the_total(routing, experts, padded, rows):
    counts = tuning.routed_rows(experts, padded, rows, routing)
    assert len(counts) == experts
    assert sum(counts) == experts * rows
    assert min(counts) >= 0
    if routing.startswith("skew"):
        hot = counts[experts // 2]
        assert hot == min(int(routing[4:]) * rows, experts * rows)
        assert all(count <= hot for count in counts)


def test_a_hot_expert_never_leaves_its_buffer():
    assert max(tuning.routed_rows(64, 512, 128, "skew16")) == 512


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match="^routing: is 'uniform', must be even, random or skewS"):
        tuning.routed_rows(8, 512, 4, "uniform")


def test_the_fastest_tile_comes_first():
    us = {"engine": 100.0, "a": 90.0, "b": 70.0, "c": 80.0}
    assert tuning.rank_tiles({"random": us}) == ["b", "c", "a"]


def test_among_tiles_that_are_close_the_one_that_bears_skew_comes_first():
    random = {"engine": 100.0, "small": 70.0, "large": 71.0, "slow": 90.0}
    skew = {"engine": 200.0, "small": 150.0, "large": 110.0, "slow": 100.0}
    assert tuning.rank_tiles({"random": random, "skew16": skew}) == ["large", "small", "slow"]


def test_a_tile_that_loses_to_the_engine_under_skew_comes_after_one_that_does_not():
    random = {"engine": 100.0, "small": 98.0, "same": 99.0}
    skew = {"engine": 200.0, "small": 230.0, "same": 200.0}
    assert tuning.rank_tiles({"random": random, "skew16": skew}) == ["same", "small"]


def test_not_losing_to_the_engine_counts_more_than_the_last_percents():
    random = {"engine": 100.0, "fast": 90.0, "same": 100.0, "bad": 95.0}
    skew = {"engine": 200.0, "fast": 230.0, "same": 201.0, "bad": 240.0}
    assert tuning.rank_tiles({"random": random, "skew16": skew}) == ["same", "fast", "bad"]


def test_a_wrong_engine_is_no_yardstick():
    random = {"engine": 10.0, "a": 70.0, "b": 71.5}
    assert tuning.rank_tiles({"random": random}, engine_is_right=False) == ["a", "b"]


def test_what_loses_to_the_engine_in_either_pass_is_ranked_behind():
    random = {"engine": 138.0, "one": 100.5, "split": 100.0}
    skew = {"engine": 100.0, "one": 100.9, "split": 98.0}
    assert tuning.rank_tiles({"random": random, "skew16": skew}) == ["split", "one"]
    second = {"skew16": {"engine": 100.0, "one": 101.0, "split": 102.5}}
    assert tuning.rank_tiles({"random": random, "skew16": skew}, confirmed=second) == ["one", "split"]
    cells = [
        (tuning.Cell(16, 512, 64, 512, 16, routing), [{"us": us, "rel_err": dict.fromkeys(us, 0.0)} for us in passes])
        for routing, passes in (("random", [random]), ("skew16", [skew, second["skew16"]]))
    ]
    choices = tuning.build_table(cells, {(16, 512): ()})["shapes"][0]["choices"]
    assert choices == [{"experts": 64, "rows": 16, "order": ["one", "split"]}]


DEMANGLED = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple<"
    "int, int, int>>, cutlass::gemm::collective::CollectiveMmaArrayMixedInput<cutlass::gemm::"
    "MainloopSm90ArrayTmaGmmaWarpSpecializedMixedInput<5, cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> >, cutlass::"
    "gemm::KernelPtrArrayTmaWarpSpecializedCooperative>, cute::tuple<cute::C<128>, cute::C<16>, cute::C<512> >, "
    "cute::tuple<cutlass::integer_subbyte<4, true>, cutlass::Array<"
)
_MANGLED_START = (
    "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5tupleIJiiiEEEEENS1_10"
    "collective28CollectiveMmaArrayMixedInputINS1_49MainloopSm90ArrayTmaGmmaWarpSpecializedMixedInput"
)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (DEMANGLED, "co_128x16x512_c2x1x1_s5"),
        (
            # The third size of the tile is a reference to its first.
            f"{_MANGLED_START}ILi12ENS6_IJNS5_1CILi1EEESD_SD_EEENS1_40KernelPtrArrayTmaWarpSpecializedPingpongEEENS6_IJ"
            "NSC_ILi128EEENSC_ILi64EEESH_EEENS6_IJNS_15integer_subbyte",
            "pp_128x64x128_c1x1x1_s12",
        ),
        (
            # A cluster of two: the tile's references count on from there.
            f"{_MANGLED_START}ILi4ENS6_IJNS5_1CILi2EEENSC_ILi1EEESE_EEENS1_43KernelPtrArrayTmaWarpSpecialized"
            "CooperativeEEENS6_IJNSC_ILi128EEENSC_ILi32EEENSC_ILi512EEEEEENS6_IJNS_15integer_subbyte",
            "co_128x32x512_c2x1x1_s4",
        ),
    ],
)
def test_tiles_are_named_from_kernel_names(name, label):
    assert tuning.tile_label(name) == label


def test_unknown_kernel_names_still_tell_tiles_apart():
    assert tuning.tile_label("one") == tuning.tile_label("one") != tuning.tile_label("two")


def _names_of_the_double(double):
    def names(calls, device):
        del double.calls[:]
        for call in calls:
            call()
        return [f"{c.n} {c.k} {c.bucket}" if (c.n, c.k) in double.limits else f"{c.bucket}" for c in double.calls]

    return names


@pytest.mark.parametrize("limits", [(4, 32, 256), (8, 512), (7, 100, 999), ()])
def test_the_probe_finds_the_limits(limits, monkeypatch):
    monkeypatch.setattr(tuning, "LARGEST_M", 1024)
    double = CompiledDispatchDouble(limits={(16, 512): limits, None: (32,)})
    buckets, method, engine_tile = tuning.probe_buckets(
        double, 16, 512, torch.device("cpu"), _names_of_the_double(double)
    )
    assert tuple(bucket.high for bucket in buckets[:-1]) == limits
    assert buckets[-1].high is None
    assert method == "kernel names"
    assert engine_tile == tuning.tile_label("0")


def test_one_candidate_a_compiled_tile_and_the_engines_call_where_it_is_another():
    buckets = buckets_from_limits((4, 32, 256), ["a", "b", "a", "c"])
    assert list(tuning.candidate_tiles(buckets, "d", 64, 512, 512)) == ["m1-4", "m5-32", "m257+", AS_SHIPPED]
    assert list(tuning.candidate_tiles(buckets, "b", 64, 512, 512)) == ["m1-4", "m5-32", "m257+"]
    assert list(tuning.candidate_tiles(buckets, "d", 64, 384, 512)) == ["m1-4", "m5-32", "m257+"]
    assert list(tuning.candidate_tiles(buckets, "b", 1, 64, 512)) == ["m1-4", "m5-32"]


def test_splits_are_candidates_near_a_tiles_edge_and_with_many_experts():
    kernels = ["pp_64x32x512_c2", "co_128x16x512_c2", "co_128x32x512_c2", "co_128x64x512_c2", "co_128x64x512_c1"]
    buckets = buckets_from_limits((4, 32, 1024, 4096), kernels)

    def splits(experts, rows, engine_tile="co_128x32x512_c2"):
        return [name for name in tuning.candidate_tiles(buckets, engine_tile, experts, 512, 512, rows) if "|" in name]

    assert splits(64, 16) == ["m5-32|16|m33-1024", "m33-1024|32|m1025-4096", "m33-1024|32|m4097+"]
    assert splits(64, 8) == ["m5-32|16|m33-1024"]
    assert splits(64, 64) == ["m33-1024|32|m1025-4096", "m33-1024|32|m4097+"]
    assert splits(64, 4) == splits(64, 128) == splits(32, 16) == splits(64, None) == []
    # The engine's own call where its tile is no bucket's.
    assert splits(64, 8, "co_128x16x512_c1") == ["m5-32|16|m33-1024", f"{AS_SHIPPED}|16|m33-1024"]


def test_the_sweep_measures_checks_chooses_and_resumes(monkeypatch):
    monkeypatch.setattr(tuning, "LARGEST_M", 1024)
    double = CompiledDispatchDouble(limits={(16, 512): (4, 32), None: (32,)})
    cells = tuning.plan_cells([(16, 512)], [2, 4], rows=(1, 4), padded_rows={2: 512, 4: 512})
    cells += tuning.plan_cells([(16, 512)], [2], rows=(4,), routings=("random",), padded_rows={2: 384})
    run, done = {}, []
    arguments = (run, cells, double, torch.device("cpu"))
    options = {"repeats": 1, "names": _names_of_the_double(double)}
    assert not tuning.run_sweep(*arguments, deadline=float("-inf"), **options)
    assert tuning.run_sweep(*arguments, done=lambda cell, stage: done.append((cell.key, stage)), **options)
    assert [stage for _, stage in done] == ["sweep"] * 9 + ["confirm"] * 9 + ["verify"] * 9
    for entry in run["cells"].values():
        cell = tuning.Cell(**entry["cell"])
        for name, error in entry["verify"]["rel_err"].items():
            wrong = name == "engine" and cell.padded == 384
            assert error > 0.3 if wrong else error < tuning.MAX_RELATIVE_ERROR
    table = GemmTileTable.parse(tuning.table_data(run))
    assert set(table.shapes[16, 512].orders) == {(e, r) for e in (2, 4) for r in (1, 4)}
    assert [b.high for b in table.shapes[16, 512].buckets] == [4, 32, None]
    del done[:]
    assert tuning.run_sweep(*arguments, done=lambda cell, stage: done.append(cell), **options)
    assert done == []


def test_a_kernel_that_misses_rows_is_seen():
    def kernel(d, *rest):
        d.view(-1)[0] = 1.0

    problem = tuning.GemmProblem(16, 512, 2, 1024, torch.device("cpu"))
    measured = tuning.measure_cell(problem, tuning.Cell(16, 512, 2, 512, 4, "even"), kernel, {}, repeats=1)
    assert math.isnan(measured["rel_err"]["engine"])


def test_tuning_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(tuned_config, "gpu_name", lambda: None)
    with pytest.raises(RuntimeError, match="^tune: GPU None"):
        tuning.tune_gemm(tuning.DEEPSEEK_SHAPES, [64])


# ---- what was measured


@pytest.fixture(scope="module")
def document():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.mark.skipif(not RESULTS.is_file(), reason="benchmark/results/h200/gemm_tiles.json is not there")
class TestMeasured:
    """What the committed results must show; no time is measured here."""

    def test_every_result_of_ours_is_right(self, document):
        assert all(row["ours_rel_err"] < 0.003 for row in document["cells"])

    def test_the_engine_is_wrong_exactly_where_the_rule_says_so(self, document):
        for row in document["cells"]:
            assert (row["engine_rel_err"] < 0.003) == w4a8_gemm.engine_gemm_is_right(row["padded"], row["k"])

    def test_ours_is_never_slower_than_the_engine_by_more_than_two_percent(self, document):
        slower = [row for row in document["cells"] if row["speedup"] is not None and row["speedup"] < 0.98]
        assert slower == []

    def test_the_rule_alone_is_never_slower_than_the_engine_by_more_than_two_percent(self, document):
        right = [row for row in document["cells"] if row["rule_speedup"] is not None]
        assert right
        assert [row for row in right if row["rule_speedup"] < 0.98] == []

    def test_the_choice_is_within_three_percent_of_the_best_tile(self, document):
        random = [row for row in document["cells"] if row["routing"] == "random"]
        assert [row for row in random if row["ours_us"] > 1.03 * row["best_us"]] == []

    @pytest.mark.parametrize(("rows", "speedup"), [(16, 1.3), (32, 1.5), (64, 1.65), (128, 1.85)])
    def test_both_deepseek_gemms_together(self, document, rows, speedup):
        for version in document["summary"].values():
            assert version["speedup_two_gemms_e64"]["random"][str(rows)] >= speedup

    def test_shipped_tables_are_those_of_the_results(self, document):
        for version, run in document["runs"].items():
            path = tuning.table_path(tuned_config.SHIPPED_DIRECTORY, run["metadata"]["gpu"], version)
            assert tuned_config.read_tuned(path, {}) == tuning.table_data(run)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
