"""What is measured when weights are loaded, and what follows from it, without a GPU: rows, memory, decision, log."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8.srt.layers.moe import measured_choice as choice
from sglang_w4afp8.srt.layers.moe.measured_choice import Measurement, Point, Sizes

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

GIB = 2**30


@pytest.mark.parametrize(
    "largest, rows",
    [(1, [1]), (2, [1]), (3, [1, 2]), (5, [1, 4]), (9, [1, 4, 8]), (33, [1, 4, 16, 32]), (257, [1, 4, 16, 64, 256])],
)
def test_rows_go_from_one_to_the_most_that_the_server_sends(largest, rows):
    assert choice.mean_rows(largest) == rows


@given(largest=st.integers(1, 600), experts=st.integers(1, 300), padded=st.sampled_from([128, 512, 1024]))
def test_points_stay_inside_the_buffers_and_the_ends_come_first(largest, experts, padded):
    points = choice.plan(largest, experts, padded)
    assert points[0].expected_m == 2 and points[0].routing == "random"
    estimates = list(dict.fromkeys(point.expected_m for point in points))
    assert sorted(estimates) == [rows + 1 for rows in choice.mean_rows(largest)]
    if len(estimates) > 1:
        assert estimates[1] == max(estimates) == max(2, largest)
    for point in points:
        assert len(point.counts) == experts and max(point.counts) <= padded and min(point.counts) >= 0
        mean = point.expected_m - 1
        assert sum(point.counts) <= experts * mean
        if max(point.counts) < padded:
            assert sum(point.counts) == experts * mean
        if point.routing == "skew":
            assert max(point.counts) >= min(16 * mean, padded)


def test_points_are_the_same_on_every_rank():
    assert choice.plan(33, 32, 1024) == choice.plan(33, 32, 1024)


def test_a_server_of_eight_ranks_needs_a_gibibyte_and_gets_less_where_that_is_not_free():
    sizes = Sizes(2048, 7168, 32, 1024)
    assert 1.1 * GIB < sizes.bytes() < 1.3 * GIB
    assert choice.fit(sizes, 70, 3 * GIB) == sizes
    assert choice.fit(sizes, 70, 1 * GIB) == Sizes(2048, 7168, 32, 128)
    with pytest.raises(
        choice.CannotMeasureError, match=r"^it takes 0\.1 GiB of GPU memory, more than 50% of the 0\.1 GiB"
    ):
        choice.fit(sizes, 70, GIB // 8)


def measurement(*rows, failure=""):
    """(expected_m, CUTLASS, two kernels) a point."""
    points = tuple(Point(m, "random", (1,)) for m, _, _ in rows)
    cutlass, triton = (tuple(float(row[i]) for row in rows) for i in (1, 2))
    return Measurement(points, cutlass, triton, 1.25, 3.5, failure)


@pytest.mark.parametrize(
    "rows, wins",
    [
        ([(2, 10, 8), (33, 10, 9)], True),
        ([(2, 10, 8), (33, 10, 10.2)], True),  # slower by 2% at one
        ([(2, 10, 8), (33, 10, 10.3)], False),
        ([(2, 10, 9.95), (33, 10, 9.95)], False),  # faster by less than two starts differ
        ([(2, 10, 8), (33, math.inf, math.inf)], False),  # the most rows were not reached
        ([(2, 10, 8), (5, math.inf, 9), (33, 10, 9)], True),  # one between them was not
        ([(2, 10, 8), (33, 10, math.inf)], False),
        ([(2, 10, 8), (2, 10, 11), (33, 10, 5)], False),  # the routing that is worst counts
        ([(2, math.inf, math.inf)], False),
    ],
)
def test_the_two_kernels_must_win_over_all_rows_and_lose_little_at_any(rows, wins):
    assert measurement(*rows).triton_wins is wins


def test_a_failure_is_never_a_win():
    assert not measurement((2, 10, 8), failure="no memory").triton_wins
    assert not Measurement((Point(2, "random", (1,)),), failure="no memory").triton_wins


def test_the_log_says_how_long_and_what():
    told = measurement((2, 210.4, 150.2), (33, 300, math.inf)).told()
    assert told.startswith("measured in 1.2 s (compiling and regrouping 3.5 s): us of CUTLASS and of the two kernels")
    assert told.endswith(" at 2 expected rows 210 and 150")
    assert Measurement((), failure="no memory").told() == "not measured: no memory"


class FakeGroup(SimpleNamespace):
    world_size = 2
    cpu_group = None


def test_the_slowest_rank_counts_and_a_failure_is_everybodys(monkeypatch):
    mine = measurement((2, 10, 8), (33, 10, 9))
    theirs = [12.0, 9.0, 7.0, 11.0, 0.0]

    def all_reduce(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        tensor.copy_(torch.maximum(tensor, torch.tensor(theirs, dtype=tensor.dtype)))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert choice.joint(mine, FakeGroup()).rows() == [(2, 12.0, 8.0), (33, 10.0, 11.0)]
    theirs[-1] = 1.0
    joint = choice.joint(mine, FakeGroup())
    assert joint.failure == "another rank could not measure" and not joint.triton_wins
    failed = Measurement(mine.points, failure="no memory")
    theirs[-1] = 0.0
    assert choice.joint(failed, FakeGroup()).failure == "no memory"
    assert choice.joint(mine, None) is mine


def test_no_point_begins_after_the_limit_but_the_first(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(choice.time, "monotonic", lambda: clock[0])

    def medians(providers, repeats):
        clock[0] += 0.6
        providers["call"]()
        return {"call": 5.0}

    monkeypatch.setattr(choice.timing, "interleaved_medians", medians)
    payload = SimpleNamespace(at=lambda point: None)
    points = choice.plan(257, 8, 1024)
    seen = []
    times = choice.time_points(points, payload, seen.append, deadline=1.0)
    assert times[:2] == [5.0, 5.0] and set(times[2:]) == {math.inf}
    assert seen == [points[0].expected_m, points[1].expected_m]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
