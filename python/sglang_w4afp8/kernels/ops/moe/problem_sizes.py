"""The problem sizes of a grouped GEMM, divided over two launches by the experts' live rows."""

import torch
import triton
import triton.language as tl

_NUM_WARPS = 4


@triton.jit
def _split_problem_sizes_kernel(sizes_ptr, output_ptr, limit, NUM_EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr):
    """One program: every expert's row of ``sizes`` into both halves of the output, its rows 0 in the half it is not in."""
    experts = tl.arange(0, EXPERT_BLOCK)
    mask = experts < NUM_EXPERTS
    rows = tl.load(sizes_ptr + experts * 3 + 1, mask=mask, other=0)
    few = rows <= limit
    for column in tl.static_range(3):
        values = tl.load(sizes_ptr + experts * 3 + column, mask=mask, other=0)
        tl.store(output_ptr + experts * 3 + column, tl.where(few, values, 0) if column == 1 else values, mask=mask)
        others = tl.where(few, 0, values) if column == 1 else values
        tl.store(output_ptr + (NUM_EXPERTS + experts) * 3 + column, others, mask=mask)


def split_problem_sizes(problem_sizes: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of experts with at most ``limit`` rows, and those of the others; an expert has no rows in the other.

    Args:
        problem_sizes: int32 ``[E, 3]``, contiguous: (N, live rows, K) an expert.
        limit: most rows of an expert in the first part.

    Returns:
        Two int32 ``[E, 3]`` tables, new on every call: a captured graph keeps its own.

    Raises:
        TypeError: ``problem_sizes`` is not int32.
        ValueError: ``problem_sizes`` is not contiguous ``[E, 3]``, or ``limit`` is below 1.
    """
    if problem_sizes.dtype != torch.int32:
        raise TypeError(f"problem_sizes: dtype is {problem_sizes.dtype}, must be torch.int32")
    if problem_sizes.dim() != 2 or problem_sizes.size(1) != 3 or not problem_sizes.is_contiguous():
        raise ValueError(f"problem_sizes: shape is {list(problem_sizes.shape)}, must be contiguous [num_experts, 3]")
    if limit < 1:
        raise ValueError(f"limit: is {limit}, must be at least 1")
    num_experts = problem_sizes.size(0)
    output = torch.empty((2, num_experts, 3), dtype=torch.int32, device=problem_sizes.device)
    if num_experts:
        _split_problem_sizes_kernel[(1,)](
            problem_sizes,
            output,
            limit,
            NUM_EXPERTS=num_experts,
            EXPERT_BLOCK=triton.next_power_of_2(num_experts),
            num_warps=_NUM_WARPS,
        )
    return output[0], output[1]
