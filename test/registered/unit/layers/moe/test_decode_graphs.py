"""The start-up look at the engine's decode graphs: which engines, which servers, and what is said. No engine process."""

import sys
from types import SimpleNamespace

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import engine_state, lifecycle
from sglang_w4afp8.srt.layers.moe import decode_graphs

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def graphs(sizes, backend="full"):
    return SimpleNamespace(decode=SimpleNamespace(backend=backend, max_bs=max(sizes, default=64), bs=sizes))


SERVER = {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency", "cuda_graph_config": graphs([8, 32, 256])}


@pytest.fixture
def said(monkeypatch, caplog):
    """What is logged for a server of an engine version; layers are made three times."""

    def ask(version="0.5.18", ranks=1, **arguments):
        monkeypatch.setattr(decode_graphs, "_checked", False)
        monkeypatch.setattr(
            lifecycle, "report", lambda: lifecycle.ActivationReport("1.0", version) if version else None
        )
        monkeypatch.setattr(engine_state, "setting", {**SERVER, **arguments}.get)
        monkeypatch.setattr(engine_state, "attention_ranks", lambda: (1, ranks))
        monkeypatch.setattr(engine_state, "expert_group", lambda: SimpleNamespace(world_size=ranks))
        caplog.clear()
        for _ in range(3):
            decode_graphs.check()
        assert {record.levelname for record in caplog.records} <= {"WARNING"}
        return [record.getMessage() for record in caplog.records]

    return ask


def test_one_warning_a_process_says_what_is_wrong_whose_fault_it_is_and_what_helps(said):
    assert said() == [
        "sglang-w4afp8: sglang 0.5.18 with one expert-parallel rank gives WRONG RESULTS in decode CUDA graphs of several "
        "sizes: only the first 8 tokens of a batch, as many as the smallest graph has, get routed experts. This is the "
        "engine's own fault, with this plugin and without. Capture one size (--cuda-graph-bs-decode 256; smaller batches are "
        "padded to it), turn decode graphs off (--disable-cuda-graph), or use sglang 0.5.21 or newer"
    ]


@pytest.mark.parametrize(
    "version, warned",
    [
        ("0.5.12", 1),
        ("0.5.15.post1", 1),
        ("0.5.20", 1),
        ("0.5.21", 0),
        ("0.5.23", 0),
        ("0.5.11", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_only_engines_with_the_fault_are_warned_of(said, version, warned):
    assert len(said(version)) == warned


@pytest.mark.parametrize(
    "arguments",
    [
        {"ranks": 2},
        {"cuda_graph_config": graphs([256])},
        {"max_running_requests": 8},  # nothing larger is captured
        {"cuda_graph_config": graphs([8, 32], backend="disabled")},
        {"disable_cuda_graph": True},
        {"moe_a2a_backend": "none"},
        {"deepep_mode": "normal"},
        {"deepep_mode": "auto", "disaggregation_mode": "prefill"},
        {"enable_two_batch_overlap": True},  # its halves have counts of their own
        {"cuda_graph_config": None, "cuda_graph_bs": [64]},
    ],
)
def test_servers_that_route_every_token_are_not_warned_of(said, arguments):
    assert said(**arguments) == []


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"deepep_mode": "auto"}, "only the first 8 tokens of a batch"),
        # Only as many requests as may run are captured.
        ({"max_running_requests": 100}, "Capture one size (--cuda-graph-bs-decode 100;"),
        ({"speculative_num_draft_tokens": 4}, "only the first 32 tokens of a batch"),
        # As engines before 0.5.14 say it, and call the flag.
        (
            {"version": "0.5.13", "cuda_graph_config": None, "cuda_graph_bs": [64, 1, 2]},
            "only the first 1 tokens of a batch",
        ),
        ({"version": "0.5.13", "cuda_graph_config": None, "cuda_graph_bs": [2, 64]}, "(--cuda-graph-bs 64;"),
        ({"version": "0.5.12", "cuda_graph_config": None, "cuda_graph_max_bs": 80}, "only the first tokens of a batch"),
        ({"cuda_graph_config": graphs([])}, "Capture one size (--cuda-graph-bs-decode N;"),
    ],
)
def test_the_warning_is_of_this_server(said, arguments, text):
    (message,) = said(**arguments)
    assert text in message


def test_an_engine_that_says_it_otherwise_starts_all_the_same(said, monkeypatch):
    def unavailable():
        raise AssertionError("expert model parallel group is not initialized")

    monkeypatch.setattr(decode_graphs.dispatch_cap, "server_load", unavailable)
    (message,) = said()
    assert "whether decode CUDA graphs of sglang 0.5.18 drop tokens is not known: AssertionError('expert" in message


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
