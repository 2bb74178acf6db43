"""Problem sizes divided over two launches by the experts' live rows."""

import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

from sglang_w4afp8.kernels.ops.moe.problem_sizes import split_problem_sizes

register_cpu_ci(est_time=5, suite="base-b-kernel-unit")
register_cuda_ci(est_time=5, suite="base-b-kernel-unit")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sizes_of(rows):
    columns = (torch.full((len(rows),), 4096), torch.tensor(rows), torch.full((len(rows),), 7168))
    return torch.stack(columns, dim=1).to(DEVICE, torch.int32)


@pytest.mark.parametrize("limit", [1, 16, 2**31 - 1])
@pytest.mark.parametrize("rows", [[0, 1, 15, 16, 17, 2048], [3], [1] * 3, list(range(257))])
def test_every_expert_keeps_its_rows_in_one_part(rows, limit):
    sizes = sizes_of(rows)
    few, many = split_problem_sizes(sizes, limit)
    wanted = [sizes.clone(), sizes.clone()]
    wanted[0][sizes[:, 1] > limit, 1] = 0
    wanted[1][sizes[:, 1] <= limit, 1] = 0
    assert few.equal(wanted[0]) and many.equal(wanted[1])
    assert sizes.equal(sizes_of(rows))


def test_no_expert_gives_two_empty_tables():
    few, many = split_problem_sizes(torch.empty((0, 3), dtype=torch.int32, device=DEVICE), 16)
    assert few.shape == many.shape == (0, 3)


def test_arguments_that_do_not_fit_are_named():
    sizes = sizes_of([1, 2])
    with pytest.raises(TypeError, match="^problem_sizes: dtype is torch.int64"):
        split_problem_sizes(sizes.long(), 16)
    for wrong in (sizes[0], sizes[:, :2], sizes.T.contiguous().T):
        with pytest.raises(ValueError, match="^problem_sizes: shape is"):
            split_problem_sizes(wrong, 16)
    with pytest.raises(ValueError, match="^limit: is 0"):
        split_problem_sizes(sizes, 0)


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_a_captured_graph_follows_the_counts():
    sizes = sizes_of([3, 40])
    split_problem_sizes(sizes, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        few, many = split_problem_sizes(sizes, 16)
    for rows in ([3, 40], [40, 3], [16, 17]):
        sizes.copy_(sizes_of(rows))
        graph.replay()
        assert few[:, 1].tolist() == [row if row <= 16 else 0 for row in rows]
        assert many[:, 1].tolist() == [0 if row <= 16 else row for row in rows]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
