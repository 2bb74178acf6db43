"""Expert parallelism rehearsed on the CPU: real processes, gloo, tokens that travel, and one layer's experts spread over ranks.

What runs is the installed engine's own DeepEP dispatcher and ``W4AFp8MoEMethod`` with the plugin loaded, over a double of
DeepEP's buffer, Triton's interpreter and a double of the compiled grouped GEMM, which makes the real one's mistake. Outputs are
compared on every rank with a float64 reference of the whole layer at zero tolerance. ``benchmark/e2e/expert_layer_ranks.py``
is what runs, on GPUs with real DeepEP as well.
"""

import sys
from pathlib import Path

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from deepep_double import quantize
from engine_process import EVERY_PATCH, SGL_KERNEL_DOUBLE, run_command, write

register_cpu_ci(est_time=65, suite="base-a-test-cpu")

WORKER = Path(__file__).resolve().parents[4] / "benchmark" / "e2e" / "expert_layer_ranks.py"
# As the worker has them.
K, TOPK, LOCAL = 512, 2, 2
TOKENS = ([9, 4, 1, 6], [3, 0, 0, 5], [4, 6, 2, 2], [0, 0, 0, 0])
WRONG, RIGHT = "256", "512"  # padded rows: no multiple of 512, and one


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stub"), {"sgl_kernel/__init__.py": SGL_KERNEL_DOUBLE})


def run_ranks(stub: Path, ranks: int, **environ: str) -> list[dict]:
    """What every rank found, with ``WRONG`` and ``RIGHT`` padded rows."""
    caps = [str(int(rows) // ranks) for rows in (WRONG, RIGHT)]
    sizes = ["--hidden", K, "--intermediate", 512, "--local-experts", LOCAL]
    words = ["--rehearse", "--ranks", ranks, "--dispatch-tokens", *caps, *sizes]
    path = [stub, Path(__file__).resolve().parents[3]]
    command = [sys.executable, str(WORKER), *map(str, words)]
    return run_command(command, path, TRITON_INTERPRET="1", **environ).result


@pytest.fixture(scope="module")
def engine(stub: Path) -> list[dict]:
    return run_ranks(stub, 2, SGLANG_W4AFP8_DISABLE="1")


@pytest.fixture(scope="module")
def cutlass(stub: Path) -> list[dict]:
    return run_ranks(stub, 2)


@pytest.fixture(scope="module")
def triton(stub: Path) -> list[dict]:
    return run_ranks(stub, 4, SGLANG_W4AFP8_BACKEND="triton")


def test_the_arms_are_what_they_say_on_every_rank(engine, cutlass, triton):
    assert [rank["live"] for rank in engine] == [[]] * 2
    assert [rank["live"] for rank in (*cutlass, *triton)] == [EVERY_PATCH] * 6
    assert [rank["regrouped"] for rank in (*cutlass, *triton)] == [False] * 2 + [True] * 4
    # Two grouped GEMMs a step and row count; the two kernels call none.
    assert [rank["gemms"] for rank in (*engine, *cutlass, *triton)] == [16] * 4 + [0] * 4


def test_what_the_dispatcher_hands_over_is_laid_out_as_deepeps(cutlass, triton):
    for found in (cutlass, triton):
        ranks, experts = len(found), LOCAL * len(found)
        for rows in (WRONG, RIGHT):
            for index, tokens in enumerate(TOKENS):
                steps = [rank[rows][index] for rank in found]
                # A rank's estimate is of its own tokens.
                estimates = [(count * ranks * TOPK + experts) // experts for count in tokens[:ranks]]
                assert [step["expected_m"] for step in steps] == estimates
                assert {step["padded_rows"] for step in steps} == {int(rows)}
                assert [step["strides"] for step in steps] == [[int(rows) * K // 128, 1, int(rows)]] * ranks
                # The first half of a rank's tokens go to two experts, the others to one.
                sent = sum(count + count // 2 for count in tokens[:ranks])
                assert sum(sum(step["masked_m"]) for step in steps) == sent


def test_loads_are_uneven_and_some_experts_and_ranks_have_none(cutlass, triton):
    for found in (cutlass, triton):
        first, _, third, none = ([rank[WRONG][index]["masked_m"] for rank in found] for index in range(4))
        assert first[0][1] == 0 and len({count for rank in first for count in rank}) > 2
        assert sum(third[0]) > 0 and not any(sum(counts) for counts in third[1:])
        assert not any(sum(counts) for counts in none)
        assert 0 in TOKENS[1][: len(found)]


def test_the_plugin_is_right_on_every_rank_with_both_row_counts(cutlass, triton):
    for found in (cutlass, triton):
        assert [[step["right"] for step in rank[rows]] for rank in found for rows in (WRONG, RIGHT)] == (
            [[True] * 4] * 2 * len(found)
        )


def test_the_engine_alone_is_right_with_a_multiple_of_512_rows_only(engine):
    """As with two ranks and DeepEP's default of 128 tokens a rank."""
    assert [[step["right"] for step in rank[RIGHT]] for rank in engine] == [[True] * 4] * 2
    # All that a rank gets back is wrong; the rank without tokens has nothing that could be.
    errors = [[step["error"] for step in rank[WRONG]] for rank in engine]
    for index in range(3):
        for rank, count in enumerate(TOKENS[index][:2]):
            assert errors[rank][index] > 0.5 if count else errors[rank][index] == 0.0


def test_more_tokens_than_a_rank_may_dispatch_are_refused(cutlass, triton):
    assert [rank["too many"] for rank in cutlass] == ["x has 129 tokens, must be at most 128"] * 2
    assert [rank["too many"] for rank in triton] == ["x has 65 tokens, must be at most 64"] * 4


def test_with_load_balancing_four_ranks_share_a_scale_and_a_layout_and_stay_right(triton):
    """Rank 1 alone has the largest input scale, and rank 3 alone other tiles."""
    agreed = {"regrouped": True, "scale": 0.5, "right": [True, True]}
    assert [rank["eplb"]["all agree"] for rank in triton] == [agreed] * 4
    assert [rank["eplb"]["one disagrees"] for rank in triton] == [{**agreed, "regrouped": False}] * 4


def test_the_doubles_cast_is_deepeps():
    """A group's largest value becomes 448; what is then representable comes back exactly."""
    x = torch.tensor([[7.0, -3.5, 0.5] + [0.0] * 125 + [1.75] * 128], dtype=torch.bfloat16)
    payload, scales = quantize(x)
    assert scales.tolist() == [[7 / 448, 1.75 / 448]]
    assert payload[0, :3].tolist() == [448.0, -224.0, 32.0]
    assert torch.equal((payload.float().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1), x.float())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
