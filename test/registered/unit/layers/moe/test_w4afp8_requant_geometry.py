"""Launch geometry of the W4AFP8 requant: properties of the rules, no GPU needed."""

import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels as kernels
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch, requant_launch_geometry

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

LEGACY_M_GRID = 32
EXPERTS = (1, 2, 8, 16, 31, 32, 64, 128, 256, 512)
ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 128, 1000, 100_000)
GROUPS = (1, 2, 3, 28, 40, 48, 56, 64)


def _geometry(rows, num_experts=64, num_groups=56, **kwargs):
    return requant_launch_geometry(num_groups, num_experts, expected_rows=rows, **kwargs)


@pytest.mark.parametrize("num_experts", EXPERTS)
def test_m_grid_never_above_the_legacy_launch(num_experts):
    assert max(_geometry(rows, num_experts)[1] for rows in ROWS) <= LEGACY_M_GRID


@pytest.mark.parametrize("num_experts", EXPERTS)
def test_m_grid_never_below_four(num_experts):
    assert min(_geometry(rows, num_experts)[1] for rows in ROWS) == 4


@pytest.mark.parametrize("num_experts", EXPERTS)
def test_m_grid_is_monotone_in_rows(num_experts):
    grids = [_geometry(rows, num_experts)[1] for rows in range(300)]
    assert grids == sorted(grids)
    assert grids[-1] == LEGACY_M_GRID


@pytest.mark.parametrize("rows", [4, 8, 16, 32])
def test_the_dispatchers_rounding_up_does_not_double_the_m_grid(rows):
    # The dispatcher reports (rows + E) // E of the total: one high at an exact average.
    assert _geometry(rows, num_experts=8)[1] == _geometry(rows + 1, num_experts=8)[1] == rows


@pytest.mark.parametrize("rows", [4, 8, 16, 32])
def test_row_estimate_rounds_down_to_a_power_of_two(rows):
    grids = {_geometry(r, num_experts=8)[1] for r in range(rows, 2 * rows)}
    assert grids == {rows}


@pytest.mark.parametrize("num_experts, m_grid", [(8, 32), (32, 32), (40, 16), (64, 16), (128, 8), (256, 4), (512, 4)])
def test_expert_limit_binds_below_saturation(num_experts, m_grid):
    assert _geometry(63, num_experts)[1] == m_grid


@pytest.mark.parametrize("num_experts", EXPERTS)
def test_expert_limit_is_lifted_from_sixty_four_rows(num_experts):
    assert _geometry(64, num_experts)[1] == LEGACY_M_GRID


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 100])
def test_cap_leaves_ordinary_variation_to_the_owner(rows):
    assert _geometry(rows)[2] == 2 * rows


def test_cap_of_a_zero_estimate_is_that_of_one_row():
    assert _geometry(0)[2] == _geometry(1)[2] == 2


@pytest.mark.parametrize("max_rows", [1, 3, 48, 512])
def test_cap_never_past_the_payload(max_rows):
    assert all(_geometry(rows, max_rows=max_rows)[2] <= max_rows for rows in ROWS)
    assert _geometry(100_000, max_rows=max_rows)[2] == max_rows


@pytest.mark.parametrize("num_experts", EXPERTS)
def test_unknown_row_count_keeps_the_legacy_m_grid_and_every_row_with_its_expert(num_experts):
    _, m_grid, row_cap = _geometry(None, num_experts, max_rows=640)
    assert (m_grid, row_cap) == (LEGACY_M_GRID, 640)


@pytest.mark.parametrize("num_experts, bytes_per_lane", [(1, 8), (8, 8), (31, 8), (32, 16), (64, 16), (256, 16)])
@pytest.mark.parametrize("group_size", [64, 128, 256, 512])
@pytest.mark.parametrize("warp_size", [32, 64])
def test_bytes_per_lane_are_constant(num_experts, bytes_per_lane, group_size, warp_size):
    g_block, _, _ = _geometry(8, num_experts, num_groups=512, group_size=group_size, warp_size=warp_size)
    assert g_block * group_size == bytes_per_lane * warp_size * 4


@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("num_experts", [8, 64])
def test_tile_is_a_power_of_two_and_never_wider_than_the_payload(num_groups, num_experts):
    for warp_size in (32, 64):
        g_block, _, _ = _geometry(8, num_experts, num_groups=num_groups, warp_size=warp_size)
        assert 1 <= g_block <= num_groups
        assert g_block & (g_block - 1) == 0


@pytest.mark.parametrize(
    "value, expected", [(-3, 1), (0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (1023, 512), (1024, 1024)]
)
def test_floor_pow2(value, expected):
    assert kernels._floor_pow2(value) == expected


@pytest.mark.parametrize("warp_size", [32, 64])
def test_warp_size_is_read_from_the_device_once(monkeypatch, warp_size):
    reads = []

    def properties(device):
        reads.append(device)
        return SimpleNamespace(warp_size=warp_size)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    kernels.requant_warp_size.cache_clear()
    device = torch.device("cuda", 0)
    assert [kernels.requant_warp_size(device) for _ in range(3)] == [warp_size] * 3
    assert reads == [device]
    kernels.requant_warp_size.cache_clear()


@pytest.mark.parametrize("num_experts, slices", [(1, 2), (8, 2), (16, 2), (64, 8), (128, 16), (512, 16)])
def test_overflow_slices_follow_the_experts(num_experts, slices):
    assert kernels._overflow_experts(num_experts, 1, 4) == slices


def test_overflow_slices_suffice_for_a_hot_expert():
    # 16 times the mean, 2 of them below the cap: no program of phase 2 has more than about two rows.
    for rows in (1, 2, 4, 8, 16, 32, 64):
        _, m_grid, row_cap = kernels.requant_launch_geometry(56, 8, expected_rows=rows)
        programs = kernels._overflow_experts(8, rows, m_grid) * m_grid
        assert (16 * rows - row_cap) / programs <= 2
    # Without an estimate there is no cap, and nothing to share.
    assert kernels._overflow_experts(64, None, 32) == 1


@pytest.mark.parametrize("expected, rows", [(None, 0), (0, 1), (1, 1), (2, 1), (5, 4), (9, 8), (10, 0), (129, 0)])
def test_few_rows_are_loaded_before_they_are_known(expected, rows):
    assert kernels._speculative_rows(expected) == rows


@pytest.fixture
def lookup():
    yield kernels.set_launch_lookup
    kernels.set_launch_lookup(None)


def test_a_measured_launch_is_used_and_its_cap_stays_inside_the_payload(lookup):
    asked = []

    def measured(kernel, num_experts, columns, expected_rows, device):
        asked.append((kernel, num_experts, columns, expected_rows))
        return MaskedRowsLaunch(2, 1, 4096, row_block=8, num_warps=1, overflow_experts=3, speculative_rows=4)

    lookup(measured)
    cpu = torch.device("cpu")
    expected = MaskedRowsLaunch(2, 1, 512, row_block=8, num_warps=1, overflow_experts=3, speculative_rows=4)
    assert kernels._requant_launch(56, 64, 9, 512, cpu) == expected
    assert kernels._silu_launch(2048, 64, 9, 512, cpu) == expected
    # Asked once per shape: a replayed or repeated call costs no look-up.
    assert kernels._requant_launch(56, 64, 9, 512, cpu) == expected
    assert asked == [("requant", 64, 56, 9), ("silu", 64, 2048, 9)]


@pytest.mark.parametrize("expected_rows, slices, speculative", [(None, 1, 0), (9, 8, 8), (33, 15, 0)])
def test_the_rules_apply_where_no_measurement_does(lookup, expected_rows, slices, speculative):
    lookup(lambda *shape: None)
    launch = kernels._requant_launch(56, 64, expected_rows, 512, torch.device("cpu"))
    assert (launch.col_block, launch.m_grid, launch.row_cap) == requant_launch_geometry(
        56, 64, expected_rows=expected_rows, max_rows=512
    )
    rest = launch.row_block, launch.num_warps, launch.overflow_experts, launch.speculative_rows, launch.overflow_first
    assert rest == (1, 4, slices, speculative, False)


def test_removing_the_lookup_forgets_its_choices(lookup):
    cpu = torch.device("cpu")
    lookup(lambda *shape: MaskedRowsLaunch(1, 1, 1))
    assert kernels._requant_launch(56, 64, 9, 512, cpu).m_grid == 1
    lookup(None)
    assert kernels._requant_launch(56, 64, 9, 512, cpu).m_grid == 8


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
