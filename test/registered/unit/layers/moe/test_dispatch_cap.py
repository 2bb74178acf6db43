"""The start-up check of DeepEP's cap: arithmetic, and what it reads of the server's arguments. No engine process."""

import sys
from types import SimpleNamespace

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import engine_state
from sglang_w4afp8.srt.layers.moe import dispatch_cap
from sglang_w4afp8.srt.layers.moe.dispatch_cap import Load, problems

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CAP = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


def test_what_fits_is_not_mentioned():
    assert problems(Load(128, 128, 128), 128) == ([], [])
    assert problems(Load(None, None, None), 1) == ([], [])
    assert problems(Load(64, 64, None, tokens_per_request=4, attention_ranks=2), 128) == ([], [])


def test_one_token_too_many_is():
    certain, possible = problems(Load(129, 129, None), 128)
    assert certain == [
        f"{CAP}: is 128, must be at least 129: CUDA graphs are captured for up to 129 requests; set {CAP}=129, or capture up "
        "to 128 requests"
    ]
    assert possible == []


def test_draft_tokens_multiply_and_attention_ranks_divide():
    certain, _ = problems(Load(100, None, None, tokens_per_request=5, attention_ranks=3), 128)
    assert certain == [
        f"{CAP}: is 128, must be at least 167: CUDA graphs are captured for up to 100 requests with 5 tokens each over 3 "
        f"attention ranks; set {CAP}=167, or capture up to 76 requests"
    ]
    assert problems(Load(76, None, None, tokens_per_request=5, attention_ranks=3), 128) == ([], [])
    assert problems(Load(77, None, None, tokens_per_request=5, attention_ranks=3), 128)[0]
    assert problems(Load(100, None, None, tokens_per_request=5, attention_ranks=3), 167) == ([], [])


def test_two_batches_halve_what_is_sent_at_once():
    assert problems(Load(256, 256, None, two_batches=True), 128) == ([], [])
    assert len(problems(Load(257, 257, None, two_batches=True), 128)[0]) == 1


def test_more_running_requests_than_graphs_may_fail_only_under_load():
    certain, possible = problems(Load(64, 512, None), 128)
    assert certain == []
    assert possible == [
        f"{CAP}: is 128, must be at least 512: up to 512 requests may run; set {CAP}=512, or let up to 128 run at once"
    ]


def test_prefill_through_the_low_latency_path():
    _, possible = problems(Load(64, None, 8192), 128)
    assert possible == [
        f"{CAP}: is 128, must be at least 8192: --deepep-mode low_latency prefills up to 8192 tokens at once; DeepEP takes "
        "1024 at most: set --chunked-prefill-size 128, or --deepep-mode auto"
    ]


GRAPHS = SimpleNamespace(decode=SimpleNamespace(backend="full", max_bs=256, bs=[1, 64]))
SERVER = {"moe_a2a_backend": "deepep", "deepep_mode": "auto", "cuda_graph_config": GRAPHS, "chunked_prefill_size": 8192}


@pytest.mark.parametrize(
    "arguments, load",
    [
        ({}, Load(64, None, None)),
        ({"deepep_mode": "low_latency"}, Load(64, None, 8192)),
        ({"deepep_mode": "low_latency", "disaggregation_mode": "decode"}, Load(64, None, None)),
        ({"deepep_mode": "normal"}, None),
        ({"disaggregation_mode": "prefill"}, None),
        ({"moe_a2a_backend": "none"}, None),
        ({"moe_a2a_backend": None}, None),
        ({"max_running_requests": 96}, Load(48, 48, None)),
        ({"max_running_requests": 1}, Load(1, 1, None)),
        (
            {"speculative_num_draft_tokens": 4, "enable_two_batch_overlap": True},
            Load(64, None, None, 4, two_batches=True),
        ),
        ({"disable_cuda_graph": True}, Load(None, None, None)),
        (
            {"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="disabled", max_bs=9, bs=[9]))},
            Load(None, None, None),
        ),
        # As engines before 0.5.14 say it.
        ({"cuda_graph_config": None, "cuda_graph_bs": [1, 2, 160]}, Load(160, None, None)),
        ({"cuda_graph_config": None, "cuda_graph_max_bs": 80}, Load(80, None, None)),
    ],
)
def test_what_is_read_of_a_server(monkeypatch, arguments, load):
    monkeypatch.setattr(engine_state, "setting", {**SERVER, **arguments}.get)
    monkeypatch.setattr(engine_state, "attention_ranks", lambda: (1, 2))
    assert dispatch_cap.server_load() == load


def test_once_per_process_and_a_warning_where_nothing_is_certain(monkeypatch, caplog):
    monkeypatch.setattr(dispatch_cap, "_checked", False)
    monkeypatch.setattr(engine_state, "setting", {**SERVER, "max_running_requests": 400}.get)
    monkeypatch.setattr(engine_state, "attention_ranks", lambda: (1, 1))
    monkeypatch.setattr(engine_state, "dispatch_tokens_cap", lambda: 128)
    dispatch_cap.check()
    dispatch_cap.check()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "must be at least 400: up to 400 requests may run" in caplog.text


def test_an_engine_that_says_it_otherwise_starts_all_the_same(monkeypatch, caplog):
    def unavailable():
        raise RuntimeError("derived parallel width is not available")

    monkeypatch.setattr(dispatch_cap, "_checked", False)
    monkeypatch.setattr(engine_state, "setting", SERVER.get)
    monkeypatch.setattr(engine_state, "attention_ranks", unavailable)
    dispatch_cap.check()
    assert f"{CAP} is not compared with what the server dispatches: RuntimeError('derived" in caplog.text


def _engine(monkeypatch, **modules):
    def load(name):
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    monkeypatch.setattr(engine_state.importlib, "import_module", load)


def test_settings_of_the_three_kinds_of_engine(monkeypatch):
    arguments = SimpleNamespace(enable_eplb=True, max_running_requests=7, disable_cuda_graph=True)

    def unset():
        raise ValueError("Global server args is not set yet!")

    # 0.5.12: the arguments, or nothing yet.
    old = SimpleNamespace(get_global_server_args=lambda: arguments)
    _engine(monkeypatch, **{"sglang.srt.server_args": old})
    assert engine_state.setting("enable_eplb") is True
    assert engine_state.setting("no such setting") is None
    _engine(monkeypatch, **{"sglang.srt.server_args": SimpleNamespace(get_global_server_args=unset)})
    assert engine_state.setting("enable_eplb") is None
    # 0.5.15: the same through the context.
    _engine(monkeypatch, **{"sglang.srt.runtime_context": SimpleNamespace(get_server_args=lambda: arguments)})
    assert engine_state.setting("max_running_requests") == 7
    # 0.5.17 on: the values in effect, which differ from those that were given.
    context = SimpleNamespace(
        get_server_args=lambda: arguments,
        get_exec=lambda: SimpleNamespace(moe=SimpleNamespace(enable_eplb=False)),
        get_schedule=unset,
    )
    _engine(monkeypatch, **{"sglang.srt.runtime_context": context})
    assert engine_state.setting("enable_eplb") is False
    assert engine_state.setting("max_running_requests") == 7
    assert engine_state.setting("disable_cuda_graph") is True


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
