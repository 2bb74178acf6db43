"""The end-to-end tools against a fake server: what is proved, refused and left behind, and the statistics."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import dataclasses
import gzip
import itertools
import json
import lzma
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=240, suite="base-a-test-cpu")

REPO = Path(__file__).resolve().parents[4]
RESULTS = REPO / "benchmark" / "results" / "h200"
E2E = REPO / "benchmark" / "e2e"
FAKE = Path(__file__).with_name("fake_server.py")
sys.path[:0] = [str(E2E), str(REPO / "scripts")]

import decode_ab  # noqa: E402
import equality  # noqa: E402
import expert_layer  # noqa: E402
import soak  # noqa: E402
from harness import cli, client, engine_source, evidence, paired, report  # noqa: E402
from harness.arms import Arm, parse_arm  # noqa: E402
from harness.cli import Journal, Model, add_server_arguments, launch_options  # noqa: E402
from harness.server import LaunchOptions  # noqa: E402

import model_memory  # noqa: E402
import render_readme  # noqa: E402
import run_h200_e2e  # noqa: E402
from sglang_w4afp8 import lifecycle, plugin  # noqa: E402

EVERY = tuple(patch.name for patch in plugin.LEDGER)
ENGINE, PLUGIN = Arm("engine", ()), Arm("plugin", None)
MODEL = {"num_hidden_layers": 5, "n_routed_experts": 64, "first_k_dense_replace": 1, "vocab_size": 1000}


# What is asked of a server


def test_an_arm_is_its_environment_and_nothing_of_the_callers():
    inherited = {"PATH": "/bin", "SGLANG_W4AFP8_PATCHES": "silu", "SGLANG_W4AFP8_DISABLE": "1", "SGLANG_OTHER": "x"}
    kept = {"PATH": "/bin", "SGLANG_OTHER": "x"}
    assert parse_arm("engine").environ(inherited) == {**kept, "SGLANG_W4AFP8_DISABLE": "1"}
    assert parse_arm("plugin").environ(inherited) == {**kept, "SGLANG_W4AFP8_STRICT": "1"}
    assert parse_arm("requant, expected_m").environ(inherited) == {
        **kept,
        "SGLANG_W4AFP8_STRICT": "1",
        "SGLANG_W4AFP8_PATCHES": "requant,expected_m",
    }


def test_a_misspelt_patch_is_no_arm():
    with pytest.raises(ValueError, match=r"^arm: 'requant,sliu' names 'sliu', must be"):
        parse_arm("requant,sliu")


@pytest.mark.parametrize(
    "ranks, largest, tokens, rows",
    [
        *[(1, 256, 512, 512), (2, 256, 256, 512), (4, 256, 128, 512), (4, 1024, 256, 1024), (8, 1024, 128, 1024)],
        # What would fit into 640 and 768 rows, where the engine is wrong.
        *[(1, 600, 1024, 1024), (2, 600, 512, 1024), (2, 1024, 512, 1024)],
    ],
)
def test_padded_rows_hold_the_batch_and_are_a_multiple_of_512(ranks, largest, tokens, rows):
    options = LaunchOptions("model", (16, largest), tp=ranks, ep=ranks)
    assert (options.rank_tokens, options.padded_rows) == (tokens, rows)
    environ = options.environ(ENGINE)
    assert environ["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] == str(tokens)
    flags = options.flags(1)
    assert flags[flags.index("--chunked-prefill-size") + 1] == str(rows)


def test_dummy_weights_are_served_with_uniform_routing(monkeypatch):
    """Their router sends every token to the same experts: the engine's own switch spreads them."""
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    switches = {"uniform": "SGLANG_SIMULATE_UNIFORM_EXPERTS", "round-robin": "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"}
    for switch in switches.values():
        monkeypatch.setenv(switch, "1")  # the caller's does not count
    for words, routing in (
        (["--load-format", "dummy"], "uniform"),
        ([], "model"),
        (["--load-format", "dummy", "--routing", "model"], "model"),
        (["--routing", "uniform"], "uniform"),
        (["--load-format", "dummy", "--routing", "round-robin"], "round-robin"),
    ):
        options = launch_options(parser.parse_args(["--model-path", "m", *words]), [8])
        assert options.routing == routing
        environ = options.environ(ENGINE)
        assert [name for name, switch in switches.items() if environ.get(switch)] == [routing] * (routing != "model")
    environment = pytest.importorskip("sglang.srt.environ", reason="needs the engine's environment variables")
    assert all(hasattr(environment.envs, switch) for switch in switches.values())


def test_an_engine_without_the_routings_switch_is_refused(monkeypatch, tmp_path):
    """It would ignore the variable, and the results would name a routing that nobody had."""
    (tmp_path / "srt").mkdir()
    variables = tmp_path / "srt" / "environ.py"
    variables.write_text("class Envs:\n    SGLANG_SIMULATE_UNIFORM_EXPERTS = EnvBool(False)\n")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: found)
    cli.check_routing("uniform")
    cli.check_routing("model")
    with pytest.raises(
        ValueError, match="^routing: is 'round-robin', must be 'model': sglang .* has no SGLANG_SIMULATE_ROUND"
    ):
        cli.check_routing("round-robin")


# As the four files are written in 0.5.18, but for what plays no part; and what becomes of the graphs' batches from 0.5.21 on.
GIVEN = "buffers.num_token_non_padded"
GIVEN_TO_SEVERAL = f"({GIVEN} if enable_num_token_non_padded() else None)"
REFILLED = "enable_num_token_non_padded()"
SEVERAL = "get_parallel().moe_ep_size > 1"
PASSED_ON = "num_token_non_padded=forward_batch.num_token_non_padded"
NEW_RUNNER = "srt/model_executor/runner/decode_cuda_graph_runner.py"


def _engine_source(
    folder, *, given=GIVEN, refilled=REFILLED, switch=SEVERAL, passed_on=PASSED_ON, runner=NEW_RUNNER, flag=""
):
    """An engine's package with only what `engine_source` reads of it."""
    sources = {
        runner: "class Runner:\n    def capture(self):\n"
        f"        build(enable_num_token_non_padded{flag}={refilled})\n"
        "        local = compute(global_num_token_non_padded=buffers.num_token_non_padded)\n"
        f"        batch = ForwardBatch(batch_size=bs, num_token_non_padded={given})\n"
        "        self.two_batches.replay(num_token_non_padded=len(batch.input_ids))\n",
        "srt/model_executor/forward_batch_info.py": f"def enable_num_token_non_padded():\n    return {switch}\n",
        "srt/models/deepseek_v2.py": "class MoE:\n    def forward_normal(self):\n        self.topk(num_token_non_padded=1)\n"
        f"    def forward_deepep(self, x, forward_batch):\n        self.topk(x, {passed_on})\n",
    }
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    "change, drops",
    [
        ({}, True),
        # As before 0.5.14.
        ({"runner": "srt/model_executor/cuda_graph_runner.py", "flag": "_flag"}, True),
        ({"switch": "get_moe_expert_parallel_world_size() > 1"}, True),
        ({"given": GIVEN_TO_SEVERAL}, False),
        ({"passed_on": ""}, False),
    ],
)
def test_graphs_that_drop_tokens_are_recognised(tmp_path, change, drops):
    assert engine_source.drops_tokens_with_one_rank(_engine_source(tmp_path, **change)) is drops


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"given": "count"},
            "^srt/.*runner.py: batches are captured with num_token_non_padded=count, which is not known",
        ),
        ({"given": f"{GIVEN} if several() else None"}, "which is not known"),
        ({"refilled": "several"}, "^srt/.*runner.py: what writes num_token_non_padded before a replay is not found"),
        ({"switch": "True"}, r"forward_batch_info.py: enable_num_token_non_padded returns \['True'\], must be whether"),
        ({"switch": f"{SEVERAL} or gathers()"}, "must be whether there are several ranks"),
        ({"runner": "srt/graphs.py"}, "^there is no srt/model_executor/runner/decode_cuda_graph_runner.py or "),
    ],
)
def test_an_engine_that_is_written_otherwise_is_not_taken_for_a_right_one(tmp_path, change, message):
    with pytest.raises(LookupError, match=message):
        engine_source.drops_tokens_with_one_rank(_engine_source(tmp_path, **change))


def test_the_installed_engine_routes_every_token():
    assert cli.graphs_fault(LaunchOptions("model", (8, 32))) == ""
    installed = cli._engine()
    assert installed is not None and not engine_source.drops_tokens_with_one_rank(installed)


def _faulty_engine(monkeypatch, tmp_path, **change):
    package = _engine_source(tmp_path / "engine", **change)
    (package / "srt" / "environ.py").write_text("SGLANG_SIMULATE_UNIFORM_EXPERTS = 1\n")
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(package / "x.py")))
    monkeypatch.setattr(report, "version", lambda name: "0.5.18")


@pytest.mark.parametrize(
    "words, sizes, message",
    [
        (
            ["--concurrency", "32", "8"],
            (8, 32),
            "^concurrency: is 8, 32, must be one number: with one expert-parallel rank ",
        ),
        (["--concurrency", "32"], (32,), ""),
        (["--concurrency", "8", "32", "--tp", "2", "--ep", "2"], (8, 32), ""),
        (["--concurrency", "8", "32", "--server-args=--cuda-graph-bs-decode 32 --log-level info"], (32,), ""),
        (["--concurrency", "8", "32", "--server-args=--disable-cuda-graph"], (), ""),
        (["--concurrency", "8", "32", "--server-args=--cuda-graph-backend-decode=disabled"], (), ""),
        (
            ["--concurrency", "8", "--server-args=--cuda-graph-bs-decode 4 8"],
            (4, 8),
            "^concurrency: is 4, 8, must be one",
        ),
        (["--concurrency", "8", "32", "--launch-command", "other"], (8, 32), ""),
    ],
)
def test_an_engine_that_drops_tokens_is_refused_several_graphs(monkeypatch, tmp_path, words, sizes, message):
    """It would compute nothing for most tokens, and the speed of that would be reported."""
    _faulty_engine(monkeypatch, tmp_path)
    args = decode_ab._parser().parse_args(["--model-path", "m", *words])
    if not message:
        assert launch_options(args, args.concurrency).graph_sizes == sizes
        return
    with pytest.raises(ValueError, match=message) as refusal:
        launch_options(args, args.concurrency)
    assert "sglang 0.5.18 routes only the first" in str(refusal.value)
    assert f'--server-args="--cuda-graph-bs-decode {sizes[-1]}"' in str(refusal.value)


def test_an_engine_that_cannot_be_read_is_refused_several_graphs_too(monkeypatch, tmp_path):
    _faulty_engine(monkeypatch, tmp_path, given="count")
    args = decode_ab._parser().parse_args(["--model-path", "m", "--concurrency", "8", "32"])
    with pytest.raises(
        ValueError, match="^concurrency: .*: whether sglang 0.5.18 routes every token .* cannot be read"
    ):
        launch_options(args, args.concurrency)


@pytest.mark.parametrize("faulty", [True, False])
def test_where_no_speed_is_measured_one_graph_serves_such_an_engine(monkeypatch, tmp_path, capsys, faulty):
    _faulty_engine(monkeypatch, tmp_path, given=GIVEN if faulty else GIVEN_TO_SEVERAL)
    args = soak._parser().parse_args(["--model-path", "m"])
    options = launch_options(args, soak.levels(100), may_pad=True)
    flags = options.flags(1)
    first = flags.index("--cuda-graph-bs-decode") + 1
    captured = flags[first : flags.index("--max-running-requests")]
    assert captured == (["100"] if faulty else ["1", "2", "4", "8", "16", "32", "64", "100"])
    assert ("one CUDA graph of 100 for every batch" in capsys.readouterr().err) == faulty


def test_the_engine_knows_every_flag():
    """The installed engine's own parser reads the command line of one GPU and of expert parallel runs."""
    server_args = pytest.importorskip("sglang.srt.server_args", reason="needs the engine's argument parser")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    for options in (
        LaunchOptions("model", (8, 256), load_format="dummy", max_total_tokens=1000),
        LaunchOptions("model", (16, 1024), tp=8, ep=8, dp=8, skip_tokenizer=False),
    ):
        args = parser.parse_args(options.flags(30000))
        assert args.max_running_requests == max(options.concurrencies)
        assert (args.quantization, args.moe_a2a_backend, args.deepep_mode) == ("w4afp8", "deepep", "low_latency")
        assert args.cuda_graph_bs_decode == [c // options.dp for c in options.concurrencies]
        assert (args.tp_size, args.ep_size, args.dp_size) == (options.tp, options.ep, options.dp)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tp": 0}, "^tp: is 0"),
        ({"tp": 4, "dp": 3}, "^dp: is 3, must divide tp"),
        ({"concurrencies": ()}, "^concurrencies:"),
        ({"tp": 4}, r"^ep: is 1, must be tp \(4\)"),
        # As DeepEP's default would have it with 1024 requests on four GPUs.
        (
            {"tp": 4, "ep": 4, "concurrencies": (16, 1024), "dispatch_tokens": 128},
            "^dispatch_tokens: is 128, must be at least 256: 1024 requests at once over 4 ranks$",
        ),
        (
            {"concurrencies": (2048,)},
            "^dispatch_tokens: is 2048, must be at most 1024: 2048 requests at once over 1 ranks",
        ),
    ],
)
def test_options_that_cannot_be_served_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LaunchOptions("model", (8,)), **change)


@pytest.mark.parametrize(
    "ranks, groups, counts, graphs, running, tokens",
    [
        (4, 1, (16, 64, 256, 1024), [16, 64, 256, 1024], 1024, 256),
        (4, 4, (16, 64, 256, 1024), [4, 16, 64, 256], 1024, 256),
        # What the engine would drop or leave over: a batch that the ranks of an attention group cannot share evenly.
        (2, 1, (1, 64), [2, 64], 64, 32),
        (8, 2, (1, 7, 30), [4, 16], 30, 4),
        (4, 4, (1, 30), [1, 8], 32, 8),
    ],
)
def test_batches_are_shared_out_with_and_without_attention_data_parallelism(
    ranks, groups, counts, graphs, running, tokens
):
    options = LaunchOptions("model", counts, tp=ranks, ep=ranks, dp=groups)
    flags = options.flags(1)
    first = flags.index("--cuda-graph-bs-decode") + 1
    last = flags.index("--max-running-requests")
    assert (flags[first:last], flags[last + 1]) == ([str(size) for size in graphs], str(running))
    assert options.decoded_tokens == tokens
    # A group's part of a prefill chunk, over its ranks, is what one of them may dispatch.
    chunk = int(flags[flags.index("--chunked-prefill-size") + 1])
    assert chunk // groups // options.attention_ranks == options.rank_tokens


def test_the_engine_captures_batches_that_its_attention_ranks_can_share():
    """Read in the engine's source: the rule that `graph_size` follows, and that DeepEP makes ep what tp is."""
    import sglang

    root = Path(next(iter(sglang.__path__))) / "srt"
    runner = (root / "model_executor" / "runner" / "base_cuda_graph_runner.py").read_text()
    assert "if bs * alignment_width % mul_base == 0" in runner
    assert "_A2A_EP_SPANNING_BACKENDS" in (root / "arg_groups" / "overrides.py").read_text()


# What a server really ran


def _activation(active: tuple[str, ...], down: tuple[str, ...] = ()) -> str:
    """A line as the plugin writes it."""
    states = lifecycle.State
    state = {**dict.fromkeys(EVERY, states.NOT_SELECTED), **dict.fromkeys(active, states.ACTIVE)}
    statuses = [
        lifecycle.PatchStatus(name, states.STANDING_DOWN, "no such function")
        if name in down
        else lifecycle.PatchStatus(name, state[name])
        for name in EVERY
    ]
    return "[2026-01-01 00:00:00] " + lifecycle.ActivationReport("1.2", "0.5.99", patches=tuple(statuses)).line()


def _first_call(caplog, monkeypatch, live: tuple[str, ...]) -> str:
    """A line as the plugin writes it."""
    monkeypatch.setattr(lifecycle, "_first_call_logged", False)
    monkeypatch.setattr(lifecycle, "live_patches", lambda: live)
    with caplog.at_level("INFO", logger="sglang_w4afp8"):
        lifecycle.log_first_call(x=(4, 128, 256), expected_m=3)
    return f"[2026-01-01 00:00:00 TP0] {caplog.messages[-1]}"


def test_the_plugins_own_lines_are_read(caplog, monkeypatch):
    text = "\n".join(
        [
            "[2026] Available plugins for group sglang.srt.plugins:",
            _activation(("requant", "silu"), down=("gemm",)),
            _activation(()),
            _first_call(caplog, monkeypatch, ("requant", "silu")),
        ]
    )
    seen = evidence.read_log(text)
    assert seen.activations == (("requant", "silu"), ())
    assert seen.standing_down == ("standing down: gemm (no such function)",)
    assert seen.first_calls == (("requant", "silu"),)
    assert (seen.disabled, seen.other) == (0, ())
    assert seen.engines == ("0.5.99", "0.5.99")


def test_the_line_of_a_disabled_plugin_is_read():
    """Written by the plugin itself, in a process that it is disabled in."""
    code = "from sglang_w4afp8 import plugin; plugin.activate()"
    environ = {**os.environ, "PYTHONPATH": str(REPO / "python"), "SGLANG_W4AFP8_DISABLE": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    seen = evidence.read_log(run.stdout + run.stderr)
    assert (seen.disabled, seen.activations, seen.first_calls) == (1, (), ())
    assert evidence.check_log(ENGINE, seen) == []
    assert evidence.check_log(PLUGIN, seen) == [
        "1 processes say that the plugin is disabled",
        "no activation line of the plugin",
        "no first low-latency call line of the plugin",
    ]


@pytest.mark.parametrize(
    "arm, activations, first_calls, problems",
    [
        (ENGINE, (), (), []),
        (ENGINE, (("silu",),), (), ["activation line with silu"]),
        (ENGINE, (), (("silu",),), ["first low-latency call with silu"]),
        (PLUGIN, (("silu",), ("silu",)), (("silu",),), []),
        (PLUGIN, (("silu",),), (), ["no first low-latency call line of the plugin"]),
        (PLUGIN, (("silu",),), (("gemm",),), ["processes disagree on the active patches"]),
        (
            PLUGIN,
            ((),),
            ((),),
            ["activation line without an active patch", "first low-latency call line without an active patch"],
        ),
        (Arm("silu", ("silu",)), (("silu",),), (("silu",),), []),
        (
            Arm("silu", ("silu",)),
            (("silu", "gemm"),),
            (("silu", "gemm"),),
            [
                "activation line with silu, gemm, must be silu",
                "first low-latency call line with silu, gemm, must be silu",
            ],
        ),
    ],
)
def test_a_log_that_contradicts_the_arm_is_seen(arm, activations, first_calls, problems):
    seen = evidence.LogEvidence(activations=activations, first_calls=first_calls)
    assert evidence.check_log(arm, seen) == problems


def test_another_engine_than_the_results_would_name_is_seen():
    seen = evidence.LogEvidence(activations=(("silu",),) * 2, first_calls=(("silu",),), engines=("0.5.99", "0.5.99"))
    assert evidence.check_log(PLUGIN, seen) == evidence.check_log(PLUGIN, seen, engine="0.5.99") == []
    (problem,) = evidence.check_log(PLUGIN, seen, engine="0.5.23")
    assert problem.startswith("activation line on sglang 0.5.99, must be on 0.5.23, which")


@pytest.mark.parametrize("tool", ["decode_ab", "equality"])
def test_a_server_of_another_engine_gives_no_figures(bench, tool):
    """As of a --launch-command in another environment."""
    words = ("--blocks", 1, "--rounds", 1, "--concurrency", 2) if tool == "decode_ab" else ("--prompts", 2)
    done = bench.run(tool, *words, "--output-len", 40, FAKE_ENGINE="0.5.99")
    message = f"on sglang 0.5.99, must be on {report.version('sglang')}"
    assert (done.returncode, message in done.stderr) == (4, True), done.stderr
    assert not (bench.root / "out.json").exists()
    bench.assert_nothing_runs()


@pytest.mark.parametrize(
    "activations, first_calls, problem",
    [
        (5, 4, None),
        (5, 3, "first low-latency call line of 3 processes, must be of all 4 ranks"),
        (3, 4, "activation line of 3 processes, must be of all 4 ranks"),
        (5, 0, "no first low-latency call line of the plugin"),
    ],
)
def test_every_rank_must_have_said_what_it_runs(activations, first_calls, problem):
    seen = evidence.LogEvidence(activations=(("silu",),) * activations, first_calls=(("silu",),) * first_calls)
    assert evidence.check_log(PLUGIN, seen, ranks=4) == ([problem] if problem else [])
    assert evidence.check_log(ENGINE, evidence.LogEvidence(), ranks=4) == []


REQUANT = "_fp8_per_token_quant_to_per_tensor_quant_kernel"
ENGINE_KERNELS = [REQUANT, "_silu_and_mul_post_per_tensor_quant_kernel", "compute_problem_sizes_w4a8_kernel"]
OUR_KERNELS = [REQUANT, "_silu_and_mul_masked_quant_kernel"]


TRITON = parse_arm("triton")


def test_the_triton_arm_is_the_plugin_with_its_backend():
    assert (TRITON.patches, TRITON.backend) == (None, "triton")
    environ = TRITON.environ({"SGLANG_W4AFP8_BACKEND": "auto", "PATH": "x"})
    assert environ == {"PATH": "x", "SGLANG_W4AFP8_STRICT": "1", "SGLANG_W4AFP8_BACKEND": "triton"}
    assert "SGLANG_W4AFP8_BACKEND" not in PLUGIN.environ({"SGLANG_W4AFP8_BACKEND": "auto"})
    assert parse_arm("cutlass").environ({})["SGLANG_W4AFP8_BACKEND"] == "cutlass"


def test_what_must_compute_the_experts_follows_from_the_plugins_default_and_the_patches():
    """By default the plugin may choose; without the patch of the two kernels there is nothing to choose from."""
    computes = {text: parse_arm(text).computes for text in ("plugin", "auto", "cutlass", "triton", "reference")}
    assert computes == {
        "plugin": None,
        "auto": None,
        "cutlass": "cutlass",
        "triton": "triton",
        "reference": "reference",
    }
    assert [parse_arm(text).computes for text in ("engine", "requant,expected_m")] == ["cutlass", "cutlass"]
    assert parse_arm("expected_m,input_scales,two_kernels").computes is None


@pytest.mark.parametrize(
    "arm, backends, problems",
    [
        (TRITON, ("triton", "triton"), []),
        (TRITON, ("triton", "cutlass"), ["first low-latency call by cutlass, must be by triton"]),
        (PLUGIN, ("cutlass",), []),
        (PLUGIN, ("triton", "triton"), []),
        (PLUGIN, ("triton", "cutlass"), ["processes disagree on what computes the experts"]),
        (Arm("silu", ("silu",)), ("triton",), ["first low-latency call by triton, must be by cutlass"]),
        (parse_arm("auto"), ("cutlass",), []),
        (parse_arm("auto"), ("cutlass", "triton"), ["processes disagree on what computes the experts"]),
        (parse_arm("cutlass"), ("triton",), ["first low-latency call by triton, must be by cutlass"]),
    ],
)
def test_a_backend_that_is_not_the_arms_is_seen(arm, backends, problems):
    call = "sglang-w4afp8: first low-latency call: num_experts=8, expected_m=3, backend={}, patches=silu\n"
    seen = evidence.read_log("".join(call.format(backend) for backend in backends))
    assert (seen.backends, seen.first_calls) == (backends, (("silu",),) * len(backends))
    assert evidence.check_log(arm, dataclasses.replace(seen, activations=(("silu",),))) == problems


@pytest.mark.parametrize(
    "kernels, problems",
    [
        (["_gate_up_kernel", "_down_kernel", "_rows_kernel"], 0),
        (["_gate_up_kernel"], 1),
        (["_gate_up_kernel", "_down_kernel", "cutlass::MixedInput", "compute_problem_sizes_w4a8_kernel"], 2),
    ],
)
def test_kernel_names_that_contradict_the_triton_backend_are_seen(kernels, problems):
    assert len(evidence.check_kernels(EVERY, kernels, "triton")) == problems


@pytest.mark.parametrize(
    "live, kernels, problems",
    [
        ((), ENGINE_KERNELS, 0),
        (EVERY, OUR_KERNELS, 0),
        (("requant",), ENGINE_KERNELS, 0),
        (("silu",), [*OUR_KERNELS, "compute_problem_sizes_w4a8_kernel"], 0),
        ((), OUR_KERNELS, 3),  # the engine's two are missing, ours is there
        (EVERY, ENGINE_KERNELS, 3),  # ours is missing, the engine's two are there
        (EVERY, OUR_KERNELS[1:], 1),  # the path did not run
    ],
)
def test_kernel_names_that_contradict_the_patches_are_seen(live, kernels, problems):
    assert len(evidence.check_kernels(live, kernels)) == problems


def test_the_kernels_are_called_so():
    """Ours in our source, the engine's in the engine's: a renamed kernel must not turn the proof into a blank."""
    ours = (REPO / "python/sglang_w4afp8/kernels/ops/moe/ep_moe_kernels.py").read_text()
    import sglang

    engine = (Path(next(iter(sglang.__path__))) / "kernels/ops/moe/ep_moe_kernels.py").read_text()
    for mark in evidence.MARKS:
        assert mark.ours is None or f"def {mark.ours}(" in ours
        assert mark.engine is None or f"def {mark.engine}(" in engine
    assert f"def {evidence.PATH_KERNEL}(" in ours and f"def {evidence.PATH_KERNEL}(" in engine


def test_the_two_kernels_are_called_so():
    ours = (REPO / "python/sglang_w4afp8/kernels/ops/moe/w4a8_grouped_gemm.py").read_text()
    assert all(f"def {kernel}(" in ours for kernel in (*evidence.TRITON_KERNELS, "_rows_kernel"))


def test_kernel_time_is_told_by_layer(tmp_path):
    """Two requant launches are two layers. CPU events and metadata are no kernels."""
    kernels = [(REQUANT, 10), (REQUANT, 20), ("void deep_ep::x", 40), ("cutlass::MixedInput", 60), ("nvjet_gemm", 8)]
    events: list[dict[str, Any]] = [{"cat": "kernel", "name": name, "dur": dur, "ts": 0} for name, dur in kernels]
    events += [{"cat": "cpu_op", "name": "aten::mm", "dur": 1000, "ts": 0}, {"name": "process_name", "ph": "M"}]
    path = tmp_path / "1-TP-0.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    profile = evidence.read_profile(path)
    assert profile.counts == {REQUANT: 2, "void deep_ep::x": 1, "cutlass::MixedInput": 1, "nvjet_gemm": 1}
    spent = profile.per_layer_us()
    assert (spent["requant"], spent["gemm"], spent["deepep"], spent["other"]) == (15.0, 30.0, 20.0, 4.0)
    assert (spent["silu"], spent["chain"]) == (0.0, 45.0)
    assert profile.top(2) == [("cutlass::MixedInput", 1, 60.0), ("void deep_ep::x", 1, 40.0)]


def test_time_by_layer_is_the_mean_over_ranks():
    ranks = []
    for requant, gemm in ((10.0, 60.0), (30.0, 20.0)):
        profile = evidence.Profile()
        profile.counts.update({REQUANT: 2, "cutlass::MixedInput": 4})
        profile.total_us.update({REQUANT: requant, "cutlass::MixedInput": gemm})
        ranks.append(profile)
    merged = evidence.Profile.of_ranks(ranks)
    assert merged.counts == {REQUANT: 4, "cutlass::MixedInput": 8}
    assert (merged.per_layer_us()["requant"], merged.per_layer_us()["gemm"]) == (10.0, 20.0)
    assert ranks[0].counts[REQUANT] == 2


def test_half_a_trace_is_no_profile(tmp_path):
    path = tmp_path / "x.trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(ValueError, match="not a whole trace"):
        evidence.read_profile(path)


def test_the_engines_own_rate_leaves_out_prefill_and_other_batches():
    def line(running: int, rate: float) -> str:
        return f"[x TP0] Decode batch, #running-req: {running}, #token: 9, gen throughput (token/s): {rate:.2f}, #q: 0"

    log = [
        line(8, 1),
        "[x] Prefill batch, #new-seq: 8",
        line(8, 50),
        line(8, 100),
        line(8, 104),
        line(7, 3),
        line(8, 102),
    ]
    assert evidence.engine_decode_rate("\n".join(log), 8) == 102.0
    assert evidence.engine_decode_rate("\n".join(log), 4) is None


def test_prompts_that_were_prefilled_in_a_graph_are_found_in_the_log():
    def line(prompts: int, tokens: int, graph: bool) -> str:
        return (
            f"[x] Prefill batch, #new-seq: {prompts}, #new-token: {tokens}, #cached-token: 0, token usage: 0.00, "
            f"#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: {graph}, input throughput (token/s): 2.59"
        )

    warm_up, singles = [line(1, 3, False), line(1, 64, True)], [line(1, 64, True), line(1, 63, False)]
    log = "\n".join([*warm_up, singles[0], "[x] Decode batch, cuda graph: True", singles[1], line(2, 127, True)])
    assert evidence.graph_prefills(log, [64, 63]) == [True, False]
    assert evidence.graph_prefills(log, [64, 62]) is None
    assert evidence.graph_prefills(log.replace("cuda graph", "graphs"), [64, 63]) is None  # another engine's words


def test_fault_lines_are_found_and_cancellations_are_none():
    log = """
    [1 TP0] Decode batch, #running-req: 8, #token: 9, gen throughput (token/s): 1.00, #queue-req: 0
    [2 TP0] Scheduler hit an exception: Traceback (most recent call last):
    [3] [http_server] Client disconnected: Request is disconnected from the client side (type 1).
    [4] [http_server] Error: bad request
    [5] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.
    torch.AcceleratorError: CUDA error: an illegal memory access
    [6] sglang-w4afp8: first low-latency call: x=[4, 128, 256], expected_m=3, patches=requant
    """
    found = [line.split()[0] for line in evidence.error_lines(log)]
    assert found == ["[2", "[4]", "[5]", "torch.AcceleratorError:"]


# Numbers


def _progress(*observed: tuple[float, int]) -> client.Progress:
    return client.Progress(observed=list(observed))


def test_decode_rate_of_a_known_batch():
    """10 ms a token from 1.0 s on; the second request's prefill ends at 2.0 s, its second chunk comes at 2.08 s."""
    first = _progress((1.0, 1), (1.08, 9), (2.0, 17), (2.08, 25), (2.88, 105), (3.0, 117))
    second = _progress((2.0, 1), (2.08, 9), (2.88, 89), (4.0, 201))
    rate = client.decode_rate([first, second])
    assert rate.window_s == pytest.approx(3.0 - 2.08)
    assert rate.tokens_per_s == pytest.approx(200.0)
    assert rate.tpot_ms == pytest.approx(10.0)


def test_decode_rate_wants_a_window():
    with pytest.raises(client.RequestError, match="longer outputs"):
        client.decode_rate([_progress((1.0, 1), (1.1, 9)), _progress((2.0, 1), (2.1, 9))])


def _samples(base: list[list[float]], other: list[list[float]]) -> list[paired.Sample]:
    return [
        paired.Sample(arm, block, r, rate, 1000.0 / rate)
        for arm, blocks in (("engine", base), ("plugin", other))
        for block, rounds in enumerate(blocks)
        for r, rate in enumerate(rounds)
    ]


def test_a_constant_gain_is_found_exactly():
    result = paired.compare(
        _samples([[100.0, 100.0], [100.0, 100.0]], [[110.0, 110.0], [110.0, 110.0]]), "engine", "plugin"
    )
    assert result.gain_pct == pytest.approx(10.0)
    assert (result.low_pct, result.high_pct) == (pytest.approx(10.0), pytest.approx(10.0))
    assert result.saved_ms == pytest.approx(1000 / 100 - 1000 / 110)
    assert (result.noise_pct, result.verdict, result.pairs, result.blocks) == (0.0, "faster", 4, 2)


def test_drift_that_both_arms_share_is_no_difference_in_gain():
    """The machine slows down by a fifth between the blocks: the pairs still say 10%, but noise forbids a verdict."""
    result = paired.compare(_samples([[100.0], [80.0]], [[110.0], [88.0]]), "engine", "plugin")
    assert result.gain_pct == pytest.approx(10.0)
    assert result.low_pct == pytest.approx(10.0)
    assert result.noise_pct == pytest.approx(25.0)
    assert result.verdict == "no difference shown"


@pytest.mark.parametrize(
    "base, other, verdict",
    [
        ([[100, 101], [101, 100]], [[105, 106], [106, 105]], "faster"),
        ([[100, 101], [101, 100]], [[95, 96], [96, 95]], "slower"),
        ([[100, 104], [103, 99]], [[101, 103], [102, 100]], "no difference shown"),
        ([[100, 100], [100, 100]], [[104, 104], [99, 99]], "no difference shown"),  # blocks disagree
        ([[100, 100]], [[110, 110]], "one block: no verdict"),  # one start says nothing about starts
        ([[100, 100], [104, 104]], [[103, 103], [107, 107]], "no difference shown"),  # below what starts differ by
    ],
)
def test_noise_is_never_a_win(base, other, verdict):
    assert paired.compare(_samples(base, other), "engine", "plugin").verdict == verdict


def test_rounds_that_one_arm_lacks_are_left_out():
    result = paired.compare(_samples([[100.0, 50.0], [100.0]], [[110.0], [110.0, 500.0]]), "engine", "plugin")
    assert (result.pairs, result.gain_pct) == (2, pytest.approx(10.0))
    with pytest.raises(ValueError, match="share no block"):
        paired.compare(_samples([[100.0]], []), "engine", "plugin")


def test_the_interval_over_starts_is_students():
    """Medians 0.1 and 0.3: 0.2 and 12.706 standard errors of 0.1 on either side; of a third start 4.303."""
    assert paired.t_interval([[0.1, 0.1, 9.0], [0.3, 0.3, -9.0]]) == pytest.approx(
        (0.2 - 1.2706, 0.2 + 1.2706), abs=1e-4
    )
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert paired.t_interval([[0.1], [0.2], [0.3]]) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-4)


def test_the_rounds_of_one_start_are_resampled():
    rounds = [0.0, 1.0, 2.0]
    assert paired.bootstrap_interval(rounds) == paired.bootstrap_interval(rounds) == (0.0, 2.0)
    assert paired.bootstrap_interval([0.1, 0.1]) == (0.1, 0.1)


def test_what_an_interval_is_of_is_said():
    two, one = _samples([[100, 101], [101, 100]], [[105, 106], [106, 105]]), _samples([[100, 101]], [[105, 106]])
    found = [paired.compare(two, "engine", "plugin"), paired.compare(two, "engine", "plugin", one_start=True)]
    found.append(paired.compare(one, "engine", "plugin"))
    assert [(result.interval_method, result.verdict) for result in found] == [
        ("t over starts", "faster"),
        ("t over blocks of one start", "one start: no verdict"),
        ("rounds of one start", "one block: no verdict"),
    ]


@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("of_starts, of_rounds", [(0.01, 0.005), (0.005, 0.01)])
def test_an_arm_is_not_faster_than_itself(blocks, of_starts, of_rounds):
    """A/A: starts that differ by a percent or a half, rounds likewise, three a start as by default."""
    rng = random.Random(blocks)

    def arm() -> list[list[float]]:
        starts = [rng.gauss(0.0, of_starts) for _ in range(blocks)]
        return [[100.0 * math.exp(start + rng.gauss(0.0, of_rounds)) for _ in range(3)] for start in starts]

    found = [paired.compare(_samples(arm(), arm()), "engine", "plugin") for _ in range(1000)]
    assert sum(result.verdict != "no difference shown" for result in found) <= 80
    assert sum(result.low_pct <= 0.0 <= result.high_pct for result in found) >= 900


def test_without_scipy_several_starts_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(decode_ab, "install_cleanup", lambda: None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ValueError, match="^blocks: is 2, must be 1 without scipy"):
        paired.compare(_samples([[100.0], [101.0]], [[110.0], [111.0]]), "engine", "plugin")
    assert paired.compare(_samples([[100.0]], [[110.0]]), "engine", "plugin").gain_pct == pytest.approx(10.0)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(SystemExit, match="2"):
        decode_ab.main(["--model-path", str(tmp_path), "--work", str(tmp_path / "work"), "--launch-command", "false"])
    assert "blocks: is 2, must be 1 without scipy" in capsys.readouterr().err and not (tmp_path / "work").exists()


def test_arms_alternate():
    assert [paired.arm_order(["a", "b", "c"], block) for block in range(3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_what_a_layer_saves(tmp_path):
    """1.1 ms a step saved by 4 MoE layers is 275 us a layer, and 15.95 ms in DeepSeek-V3's 58."""
    taken = {"concurrency": 8, "round": 0, "engine_tokens_per_s": None}
    starts = [
        decode_ab.Start(
            arm, block, [{**taken, "tokens_per_s": 8 / t * 1e3, "tpot_ms": t}], list(live), [], "log", 1.0, {}, [], {}
        )
        for block in range(2)
        for arm, t, live in (("engine", 3.1, ()), ("plugin", 2.0, EVERY))
    ]  # fmt: skip
    plan = decode_ab.Plan((8,), 1, 16, 64, 8, 4, 1000)
    cells = decode_ab.cells_of(
        starts, [ENGINE, PLUGIN], Model("m", 5, 4, 64, 1000), LaunchOptions("m", (8,)), plan, "0.5.21"
    )
    assert [cell["arm"] for cell in cells] == ["engine", "plugin"]
    assert cells[0]["gain_pct"] is None and cells[0]["verdict"] == "baseline"
    assert cells[1]["saved_us_per_moe_layer"] == pytest.approx(275.0)
    assert cells[1]["saved_ms_58_layers"] == pytest.approx(15.95)
    assert cells[1]["gain_pct"] == pytest.approx(55.0)
    assert cells[1]["baseline_tokens_per_s"] == cells[0]["tokens_per_s"]
    assert cells[1]["patches"] == ",".join(EVERY)
    conditions = ("baseline", "input_len", "output_len", "client")
    assert [tuple(cell[name] for name in conditions) for cell in cells] == [("engine", 16, 64, "stream")] * 2


# The driver, against the fake server


@dataclasses.dataclass
class Bench:
    """A directory with a model, a journal of the fake server, and a fake nvidia-smi."""

    root: Path

    @property
    def journal(self) -> list[dict[str, Any]]:
        path = self.root / "journal"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def environ(self, **fake: str) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_W4AFP8", "FAKE_"))}
        path = os.pathsep.join([str(self.root / "bin"), inherited["PATH"]])
        return {**inherited, "PATH": path, "FAKE_JOURNAL": str(self.root / "journal"), **fake}

    def command(self, tool: str, *words: object) -> list[str]:
        flags = ["--model-path", self.root / "model", "--load-format", "dummy", "--work", self.root / "work"]
        flags += ["--launch-command", f"{sys.executable} {FAKE}", "--out", self.root / "out.json"]
        return [sys.executable, str(E2E / f"{tool}.py"), *map(str, flags), *map(str, words)]

    def run(self, tool: str, *words: object, **fake: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(tool, *words), env=self.environ(**fake), capture_output=True, text=True, timeout=120
        )

    def ab(self, *words: object, **fake: str) -> subprocess.CompletedProcess[str]:
        short = ["--concurrency", 2, 3, "--rounds", 2, "--input-len", 4, "--output-len", 40]
        return self.run("decode_ab", *short, *words, **fake)

    def results(self) -> dict[str, Any]:
        return json.loads((self.root / "out.json").read_text())

    def assert_nothing_runs(self) -> None:
        pids = [pid for line in self.journal for pid in line["pids"]]
        assert pids and [pid for pid in pids if _alive(pid)] == []


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for(what: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        '#!/bin/sh\ncase "$1" in\n*memory.used*) cat "$(dirname "$0")/memory" ;;\n*uuid*) echo GPU-1 ;;\n'
        "*) echo Fake GPU, 1.2.3 ;;\nesac\n"
    )
    smi.chmod(0o755)
    (smi.parent / "memory").write_text("1000\n")
    made = Bench(tmp_path)
    yield made
    for line in made.journal:  # whatever a failed test left
        for pid in line["pids"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_only_the_gpus_that_servers_may_use_are_asked_about(bench, monkeypatch):
    smi = bench.root / "bin" / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "$@"\n')
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert report.nvidia_smi("uuid") == [["--query-gpu=uuid --format=csv", "noheader", "nounits"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert report.nvidia_smi("uuid") == [["--query-gpu=uuid --format=csv", "noheader", "nounits --id=1"]]


def test_ab_measures_proves_and_reports(bench):
    done = bench.ab()
    assert done.returncode == 0, done.stderr
    assert [line["arm"] for line in bench.journal] == ["engine", "plugin", "plugin", "engine"]
    bench.assert_nothing_runs()

    # The same flags for both, but for the port; the arms differ in the plugin's switches alone.
    flags = [[f for i, f in enumerate(line["flags"]) if line["flags"][i - 1] != "--port"] for line in bench.journal]
    assert all(other == flags[0] for other in flags)
    switches = [{k: v for k, v in line["env"].items() if "W4AFP8" in k} for line in bench.journal]
    assert switches[:2] == [{"SGLANG_W4AFP8_DISABLE": "1"}, {"SGLANG_W4AFP8_STRICT": "1"}]

    data = bench.results()
    assert (data["meta"]["gpu"], data["meta"]["driver"]) == ("Fake GPU", "1.2.3")
    # What the README's renderer asks of every results file.
    assert set(render_readme.META_KEYS) <= set(data["meta"])
    # Servers of another engine, routing or load in the same file keep their own lines.
    of = f"sglang {data['cells'][0]['engine']}, {data['cells'][0]['routing']} routing, 2, 3 requests"
    assert set(data["meta"]["servers"]) == {f"model, engine, {of}", f"model, plugin, {of}"}
    assert str(bench.root) not in json.dumps(data)
    cells = {(cell["arm"], cell["concurrency"]): cell for cell in data["cells"]}
    assert set(cells) == {("engine", 2), ("engine", 3), ("plugin", 2), ("plugin", 3)}
    for cell in cells.values():
        assert (cell["model"], cell["layers"], cell["moe_layers"], cell["experts"]) == ("model", 5, 4, 64)
        assert (cell["repeats"], cell["blocks"], cell["padded_rows"], cell["routing"]) == (4, 2, 512, "uniform")
        assert math.isclose(cell["tokens_per_s"], cell["concurrency"] / cell["tpot_ms"] * 1e3, rel_tol=0.2)
        assert cell["engine_log_tokens_per_s"] > 0
    assert (cells["engine", 2]["patches"], cells["plugin", 2]["patches"]) == ("", ",".join(EVERY))
    assert len(cells["plugin", 2]["interval"]) == 2 and cells["plugin", 2]["interval_method"] == "t over starts"
    assert cells["engine", 2]["interval_method"] is None
    # The fake trace is of one layer: four kernels of the chain of 5 us each without the plugin, the two kernels with it.
    for arm, backend, chain_us in (("engine", "cutlass", 20.0), ("plugin", "triton", 10.0)):
        cell = cells[arm, 3]
        assert cell["backend"] == backend
        assert cell["us_per_moe_layer"]["chain"] == chain_us and cells[arm, 2]["us_per_moe_layer"] is None
        assert cell["share_of_step"]["chain"] == pytest.approx(4 * chain_us / (cell["tpot_ms"] * 1e3), abs=1e-4)

    lines = (bench.root / "out.csv").read_text().splitlines()
    assert lines[0].startswith("# gpu Fake GPU, driver 1.2.3, torch ")
    rows = list(csv.DictReader(lines[1:]))
    assert [row["arm"] for row in rows] == [cell["arm"] for cell in data["cells"]]
    assert [path.read_bytes()[:8] for path in bench.root.glob("out_*.png")] == [b"\x89PNG\r\n\x1a\n"]
    assert "tokens/s" in done.stdout and "proved: live patches " + ", ".join(EVERY) in done.stderr
    logs = sorted(path.name for path in (bench.root / "work").glob("decode-*/*.log"))
    assert logs == ["block0-engine.log", "block0-plugin.log", "block1-engine.log", "block1-plugin.log"]


@pytest.mark.parametrize(
    "lie, arms, message",
    [
        ("silent", ("engine", "plugin"), "no activation line of the plugin"),
        ("live", ("engine", "plugin"), "engine was not what it says"),
        ("kernels", ("engine", "plugin"), "profile lacks _gate_up_kernel: the Triton backend did not run"),
        ("kernels", ("engine", "cutlass"), "silu is live, but the profile lacks _silu_and_mul_masked_quant_kernel"),
        ("fewer", ("engine", "requant,expected_m"), "activation line with requant, must be requant, expected_m"),
    ],
)
def test_an_arm_that_lies_gives_no_figures(bench, lie, arms, message):
    done = bench.ab("--blocks", 1, "--rounds", 1, "--arms", *arms, FAKE_LIE=lie)
    assert (done.returncode, message in done.stderr) == (4, True), done.stderr
    assert not (bench.root / "out.json").exists()
    assert list((bench.root / "work").glob("decode-*/*.log"))
    bench.assert_nothing_runs()


def test_a_list_of_patches_is_an_arm(bench):
    done = bench.ab("--blocks", 1, "--rounds", 1, "--arms", "engine", "plugin", "requant,expected_m,silu")
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in bench.results()["cells"] if cell["concurrency"] == 2]
    assert {cell["arm"]: cell["patches"] for cell in cells} == {
        "engine": "",
        "plugin": ",".join(EVERY),
        "requant,expected_m,silu": "requant,expected_m,silu",
    }
    assert {cell["verdict"] for cell in cells} == {"baseline", "one block: no verdict"}


@pytest.mark.parametrize("crash, message", [("start", "exited with status 3"), ("3", "")])
def test_a_server_that_dies_fails_the_run(bench, crash, message):
    done = bench.ab(FAKE_CRASH=crash)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    assert not (bench.root / "out.json").exists()
    log = next((bench.root / "work").glob("decode-*/block0-engine.log")).read_text()
    assert ("no such model" if crash == "start" else "CUDA error") in log
    if crash != "start":
        bench.assert_nothing_runs()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_servers_are_stopped_on_a_signal(bench, signum):
    """Also a server and a child that ignore SIGTERM."""
    stubborn = {"FAKE_STUBBORN": "1"} if signum == signal.SIGINT else {}
    driver = subprocess.Popen(
        bench.command("decode_ab", "--concurrency", 2, "--output-len", 4000),
        env=bench.environ(**stubborn),
        stderr=subprocess.DEVNULL,
        # Below nohup it is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        _wait_for(lambda: bench.journal and "Decode batch" in _log(bench))
        driver.send_signal(signum)
        assert driver.wait(timeout=60) != 0
    finally:
        driver.kill()
    bench.assert_nothing_runs()


def test_the_server_does_not_outlive_a_driver_that_is_killed(bench):
    driver = subprocess.Popen(
        bench.command("decode_ab", "--concurrency", 2, "--output-len", 4000),
        env=bench.environ(),
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(lambda: bench.journal and "Decode batch" in _log(bench))
    finally:
        driver.kill()
        driver.wait()
    _wait_for(lambda: not _alive(bench.journal[0]["pids"][0]))


def _log(bench: Bench) -> str:
    return "".join(path.read_text() for path in (bench.root / "work").glob("*/*.log"))


def test_a_run_goes_on_where_the_time_ran_out(bench):
    """The first call has time for one start; the second makes the other three, and no start twice."""
    first = bench.ab("--time-limit", 3.5, "--rounds", 3)
    assert first.returncode == 3, first.stderr
    begun = len(bench.journal)
    assert 1 <= begun < 4
    second = bench.ab("--rounds", 3)
    assert second.returncode == 0, second.stderr
    assert [line["arm"] for line in bench.journal] == ["engine", "plugin", "plugin", "engine"]
    assert second.stderr.count("is kept from the last run") == begun


def test_runs_that_differ_in_anything_share_nothing(tmp_path):
    one, other = (Journal(tmp_path, "decode", {"plan": {"rounds": rounds}}) for rounds in (3, 2))
    one.save("block0-engine", {"ready_s": 1.5})
    assert one.load("block0-engine") == {"ready_s": 1.5} and one.load("block0-plugin") is None
    assert other.load("block0-engine") is None
    assert Journal(tmp_path, "decode", {"plan": {"rounds": 3}}).load("block0-engine") == {"ready_s": 1.5}


@pytest.mark.parametrize(
    "tool, words",
    [("decode_ab", ()), ("decode_ab", ("--mode", "resident")), ("equality", ("--prompts", 2))],
)
def test_a_server_that_starts_for_longer_than_the_time_is_no_failure(bench, tool, words):
    done = bench.run(tool, "--time-limit", 3, *words, FAKE_UNREADY="1000")
    assert done.returncode == 3, done.stderr
    assert "engine: not ready in the " in done.stderr and "s that were left of --time-limit" in done.stderr
    assert ("--mode resident keeps nothing" in done.stderr) == ("resident" in words)
    bench.assert_nothing_runs()


@pytest.mark.parametrize(
    "limit, ready, fake, message",
    [
        (600, 3, {"FAKE_UNREADY": "1000"}, "engine: not ready after 3 s"),
        (40, 600, {"FAKE_CRASH": "start"}, "the server exited with status 3"),
    ],
)
def test_a_server_that_fails_is_a_failure_whatever_the_time(bench, limit, ready, fake, message):
    done = bench.ab("--time-limit", limit, "--ready-timeout", ready, **fake)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr


def test_a_run_is_of_its_checkpoint_versions_and_environment(monkeypatch, tmp_path):
    """At the same path another checkpoint may stand, of the same sizes; the server inherits the engine's switches."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    weights = tmp_path / "model-00001.safetensors"
    weights.write_bytes(b"1234")
    (tmp_path / "synthetic_checkpoint.json").write_text('{"seed": 0}')

    def of() -> str:
        environ = LaunchOptions(str(tmp_path), (8,)).environ(ENGINE)
        return json.dumps(
            [cli.fingerprint(Model.read(tmp_path, "m"), tmp_path), cli.conditions(environ)], sort_keys=True
        )

    gpu = {"uuid": "GPU-1", "driver_version": "1"}
    monkeypatch.setattr(report, "nvidia_smi", lambda *fields: [[gpu[field] for field in fields]])
    seen = [of()]
    for name in ("SGLANG_W4AFP8_BACKEND", "SGLANG_SIMULATE_UNIFORM_EXPERTS", "HOME"):  # not inherited, or no matter
        monkeypatch.setenv(name, "1")
    os.utime(weights, ns=(1, 1))  # made anew from its seed
    assert of() == seen[0]
    for field in gpu:
        gpu[field] = "2"
        seen.append(of())
    (tmp_path / "synthetic_checkpoint.json").write_text('{"seed": 1}')
    seen.append(of())
    (tmp_path / "synthetic_checkpoint.json").unlink()
    seen.append(of())
    os.utime(weights, ns=(2, 2))
    seen.append(of())
    weights.write_bytes(b"12345")
    os.utime(weights, ns=(2, 2))
    seen.append(of())
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "hidden_size": 7168}))
    seen.append(of())
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    seen.append(of())
    monkeypatch.setenv("SGLANG_DEEPEP_BF16_DISPATCH", "1")
    seen.append(of())
    for package in ("sglang", "sglang-kernel", "torch", "triton"):
        version = report.version
        monkeypatch.setattr(report, "version", lambda name, p=package, v=version: "9" if name == p else v(name))
        seen.append(of())
    assert len(set(seen)) == len(seen) == 14


def test_a_model_is_named_after_its_folder_however_it_is_given(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.chdir(tmp_path)
    assert Model.read(Path("."), None).name == Model.read(tmp_path, None).name == tmp_path.name


@pytest.mark.parametrize("tool", ["decode_ab", "equality", "expert_layer"])
def test_another_switch_of_the_engine_is_another_run(bench, monkeypatch, tool):
    """Everything but the model and the environment is as before, and nothing is taken over."""
    kept: list[str] = []
    monkeypatch.setattr(cli.Journal, "load", lambda journal, name: kept.append(journal.directory.name) or _stop())
    monkeypatch.setattr(report, "nvidia_smi", lambda *fields: [["GPU", "1"]] * 2)
    module = {"decode_ab": decode_ab, "equality": equality, "expert_layer": expert_layer}[tool]
    monkeypatch.setattr(module, "install_cleanup", lambda: None)
    words = _layer_words(bench.root) if tool == "expert_layer" else bench.command(tool)[2:]
    monkeypatch.setattr(sys, "argv", [tool])
    for switch, seed in (("0", 0), ("0", 0), ("1", 0), ("1", 1)):
        monkeypatch.setenv("SGLANG_DEEPEP_BF16_DISPATCH", switch)
        (bench.root / "model" / "synthetic_checkpoint.json").write_text(json.dumps({"seed": seed}))
        with pytest.raises(KeyboardInterrupt):
            module.main(words)
    assert kept[0] == kept[1] != kept[2]
    assert (kept[2] == kept[3]) == (tool == "expert_layer")  # which has no checkpoint


def _stop() -> None:
    raise KeyboardInterrupt


def test_resident_servers_run_side_by_side(bench):
    done = bench.ab("--mode", "resident")
    assert done.returncode == 0, done.stderr
    assert [line["arm"] for line in bench.journal] == ["engine", "plugin"]
    flags = bench.journal[0]["flags"]
    assert flags[flags.index("--mem-fraction-static") + 1] == "0.35" and "--max-total-tokens" in flags
    cells = bench.results()["cells"]
    assert {cell["blocks"] for cell in cells} == {2}
    # Both blocks are of the same start.
    assert {(cell["interval_method"], cell["verdict"]) for cell in cells if cell["arm"] == "plugin"} == {
        ("t over blocks of one start", "one start: no verdict")
    }
    order = [line.split("] ")[1].split(":")[0] for line in done.stderr.splitlines() if " 2 requests: " in line]
    assert order == ["engine", "plugin", "plugin", "engine", "plugin", "engine", "engine", "plugin"]
    bench.assert_nothing_runs()


_BENCH_SERVING = """
import argparse, json, urllib.request
p = argparse.ArgumentParser()
for name in ("backend", "base-url", "tokenizer", "dataset-name", "output-file"):
    p.add_argument("--" + name)
for name in ("random-input-len", "random-output-len", "num-prompts", "max-concurrency", "seed"):
    p.add_argument("--" + name, type=int)
p.add_argument("--random-range-ratio", type=float)
p.add_argument("--disable-tqdm", action="store_true")
a = p.parse_args()
assert a.num_prompts == 2 * a.max_concurrency and (a.backend, a.dataset_name) == ("sglang", "random-ids")
body = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}).encode()
urllib.request.urlopen(urllib.request.Request(a.base_url + "/generate", body)).read()
result = {"completed": a.num_prompts, "output_throughput": 100.0 * a.max_concurrency, "duration": 1.0}
open(a.output_file, "a").write(json.dumps({**result, "median_tpot_ms": TPOT}) + "\\n")
"""


@pytest.mark.parametrize("tpot, status", [(10.0, 0), (0.0, 1)])
def test_the_engines_tool_measures_where_there_is_a_tokenizer(bench, tpot, status):
    """A tool that saw no text, hence no time per token, is a failure and no figure."""
    tool = bench.root / "bench_serving.py"
    tool.write_text(_BENCH_SERVING.replace("TPOT", str(tpot)))
    words = ["--client", "bench_serving", "--with-tokenizer", "--bench-serving-command", f"{sys.executable} {tool}"]
    done = bench.ab("--blocks", 1, "--rounds", 1, *words)
    assert done.returncode == status, done.stderr
    if status == 0:
        cells = bench.results()["cells"]
        assert [(c["concurrency"], c["tokens_per_s"], c["tpot_ms"]) for c in cells] == [
            (2, 200.0, 10.0),
            (2, 200.0, 10.0),
            (3, 300.0, 10.0),
            (3, 300.0, 10.0),
        ]
        assert "--skip-tokenizer-init" not in bench.journal[0]["flags"]


def test_bench_serving_has_the_flags_and_results_that_are_used():
    """Read in the engine's source: importing it needs a tokenizer's stack."""
    import sglang

    source = (Path(next(iter(sglang.__path__))) / "benchmark" / "serving.py").read_text()
    flags = ["backend", "base-url", "tokenizer", "dataset-name", "random-input-len", "random-output-len", "seed"]
    flags += ["random-range-ratio", "num-prompts", "max-concurrency", "output-file", "disable-tqdm"]
    assert [flag for flag in flags if f'"--{flag}"' not in source] == []
    results = ("completed", "output_throughput", "median_tpot_ms", "duration")
    assert [name for name in results if f'"{name}":' not in source] == []


def test_the_shortest_output_is_measured_under_a_name_with_a_slash(bench):
    done = bench.ab("--blocks", 1, "--rounds", 1, "--model-name", "org/model", "--output-len", 17)
    assert done.returncode == 0, done.stderr
    assert {cell["model"] for cell in bench.results()["cells"]} == {"org/model"}
    name = f"org--model_{report.version('sglang')}_uniform_4-to-17"
    assert [path.name for path in bench.root.glob("*.png")] == [f"out_{name}.png"]
    assert [path.name for path in (bench.root / "work").glob("samples*")] == [f"samples-{name}-2-3-engine-plugin.json"]


def test_files_of_other_runs_have_other_names():
    cell = {"model": "v3", "engine": "0.5.21", "routing": "uniform", "tp": 1, "ep": 1, "dp": 1, "baseline": "engine"}
    cell |= {"padded_rows": 512, "input_len": 128, "output_len": 256, "client": "stream"}
    changes = [{}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}, {"tp": 4, "ep": 4, "dp": 4}, {"baseline": "silu,gemm"}]
    changes += [{"padded_rows": 1024}, {"input_len": 6}, {"output_len": 64}, {"client": "bench_serving"}]
    names = [decode_ab.series_name({**cell, **change}) for change in changes]
    assert names[:2] == ["v3_0.5.21_uniform", "v3_0.5.21_uniform_tp2-ep2-dp1"]
    assert names[4] == "v3_0.5.21_uniform_over-silu+gemm" and len(set(names)) == len(names)
    several = ([ENGINE, PLUGIN], [ENGINE, TRITON], [Arm("engine", ()), Arm(",".join(EVERY), EVERY)])
    of_arms = [decode_ab.samples_name(cell, arms, (8, 32)) for arms in several]
    assert of_arms[0] == "samples-v3_0.5.21_uniform-8-32-engine-plugin"
    assert len(set(of_arms)) == 3 and max(map(len, of_arms)) < 100


@pytest.mark.parametrize("folder", ["h200", "h200x2"])
def test_committed_pictures_are_named_so(folder):
    """A run that is merged into them draws over them instead of beside them."""
    cells = json.loads((RESULTS.parent / folder / "e2e_decode.json").read_text())["cells"]
    names = {f"e2e_decode_{decode_ab.series_name(cell)}.png" for cell in cells}
    assert {path.name for path in (RESULTS.parent / folder).glob("e2e_decode_*.png")} <= names


def test_results_of_several_models_share_a_file(bench):
    assert bench.ab("--blocks", 1, "--rounds", 1).returncode == 0
    first = bench.results()
    report.write_json(bench.root / "out.json", {**first, "meta": {**first["meta"], "remark": "With another driver."}})
    assert bench.ab("--blocks", 1, "--rounds", 1, "--model-name", "other", "--concurrency", 2).returncode == 0
    assert bench.ab("--blocks", 2, "--rounds", 1, "--concurrency", 2).returncode == 0  # replaces its cells
    data = bench.results()
    found = sorted((c["model"], c["concurrency"], c["arm"], c["blocks"]) for c in data["cells"])
    assert found == [
        ("model", 2, "engine", 2),
        ("model", 2, "plugin", 2),
        ("model", 3, "engine", 1),
        ("model", 3, "plugin", 1),
        ("other", 2, "engine", 1),
        ("other", 2, "plugin", 1),
    ]
    assert data["meta"]["command"].count("decode_ab.py") == 3
    assert data["meta"]["remark"] == "With another driver."


def test_gains_over_another_baseline_or_under_other_conditions_replace_nothing(bench):
    short = ("--blocks", 1, "--rounds", 1, "--concurrency", 2)
    for words in (
        ("--arms", "engine", "triton"),
        ("--arms", "cutlass", "triton"),
        ("--arms", "engine", "triton", "--input-len", 6),
        ("--arms", "engine", "triton", "--dispatch-tokens", 1024),
    ):
        done = bench.ab(*short, *words)
        assert done.returncode == 0, done.stderr
    cells = bench.results()["cells"]
    assert {
        (c["baseline"], c["arm"], c["input_len"], c["padded_rows"]): (c["output_len"], c["client"]) for c in cells
    } == {
        (baseline, arm, length, rows): (40, "stream")
        for baseline, length, rows in (("engine", 4, 512), ("cutlass", 4, 512), ("engine", 6, 512), ("engine", 4, 1024))
        for arm in (baseline, "triton")
    }
    # The gain over cutlass is none over the engine: the README's table, whose columns say so, refuses it.
    table = next(table for table in render_readme.RESULT_TABLES if table.title == "Decoding on the real server")
    meta, path = bench.results()["meta"], bench.root / table.file
    alike = [cell for cell in cells if (cell["input_len"], cell["padded_rows"]) == (4, 512)]
    report.write_json(path, {"meta": meta, "cells": [cell for cell in alike if cell["baseline"] == "engine"]})
    assert "| triton |" in render_readme.result_table(table, bench.root)
    report.write_json(path, {"meta": meta, "cells": alike})
    with pytest.raises(render_readme.RenderError, match="has baseline 'cutlass', must be 'engine'"):
        render_readme.result_table(table, bench.root)


def test_the_picture_names_what_the_gain_is_over(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    labels: list[str] = []
    monkeypatch.setattr(Axes, "set_ylabel", lambda axes, text: labels.append(text))
    cell = {"arm": "triton", "concurrency": 8, "gain_pct": 1.0, "gain_low_pct": 0.0, "gain_high_pct": 2.0}
    report.draw_gains(tmp_path / "x.png", "title", "cutlass", [cell])
    assert labels == ["decode tokens/s over cutlass, %"]


def test_results_that_do_not_say_their_baseline_are_not_added_to(bench):
    old = {"meta": {"gpu": "Fake GPU"}, "cells": [dict.fromkeys(decode_ab.KEY, 1)]}
    del old["cells"][0]["baseline"], old["cells"][0]["client"]
    (bench.root / "out.json").write_text(json.dumps(old))
    done = bench.ab()
    assert done.returncode == 2 and "out.json has cells without baseline, client, must" in done.stderr
    assert "--out" in done.stderr.splitlines()[-1] and bench.journal == []


def test_results_of_another_gpu_are_not_mixed_in(bench):
    (bench.root / "out.json").write_text(json.dumps({"meta": {"gpu": "Other GPU"}, "cells": []}))
    done = bench.ab()
    assert done.returncode == 2 and "has gpu 'Other GPU', must be this machine's, 'Fake GPU'" in done.stderr
    assert bench.journal == []


@pytest.mark.parametrize(
    "words, message",
    [
        (("--arms", "engine"), "must be two or more"),
        (("--out", "results.csv"), "out: is results.csv, must be the JSON's path"),
        (("--arms", "engine", "sliu"), "names 'sliu'"),
        (("--model-path", "/nowhere"), "has no config.json"),
        (("--client", "bench_serving"), "must be 'stream' without --with-tokenizer"),
        *(
            ((f"--{name}=0",), f"argument --{name}: is '0', must be a positive integer")
            for name in (
                "rounds",
                "blocks",
                "profile-steps",
                "concurrency",
                "profile-at",
                "input-len",
                "output-len",
                "tp",
            )
        ),
        (("--profile-at", 32), "profile-at: is 32, must be one that --concurrency has: 2, 3"),
        (("--output-len", 16), "output-len: is 16, must be at least 17 to be measured"),
    ],
)
def test_wrong_arguments_start_nothing(bench, words, message):
    done = bench.ab(*words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert bench.journal == []


# Several ranks


def _gpus(bench: Bench, count: int) -> None:
    smi = bench.root / "bin" / "nvidia-smi"
    lines = "; ".join(f"echo GPU-{i}" for i in range(count))
    memory = "; ".join(["echo 143771"] * count)
    smi.write_text(
        smi.read_text()
        .replace("echo GPU-1", lines)
        .replace("case", f'case "$1" in\n*memory.total*) {memory} ;;\nesac\ncase', 1)
    )


@pytest.mark.parametrize(
    "lie, status, message",
    [
        ("", 0, ""),
        ("rank", 4, "silu is live, but the profile lacks _silu_and_mul_masked_quant_kernel"),
        ("one rank", 4, "first low-latency call line of 1 processes, must be of all 2 ranks"),
    ],
)
def test_every_rank_is_proved(bench, lie, status, message):
    _gpus(bench, 2)
    words = ("--arms", "engine", "cutlass", "--tp", 2, "--ep", 2, "--blocks", 1, "--rounds", 1, "--concurrency", 2)
    done = bench.ab(*words, FAKE_LIE=lie)
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    assert (bench.root / "out.json").exists() == (status == 0)
    if status == 0:
        assert {(cell["tp"], cell["ep"], cell["padded_rows"]) for cell in bench.results()["cells"]} == {(2, 2, 512)}
        # Three kernels each: both ranks' are counted.
        (path,) = (bench.root / "work").glob("decode-*/block0-cutlass.json")
        assert json.loads(path.read_text())["kernels"][REQUANT] == 2
    bench.assert_nothing_runs()


@pytest.mark.parametrize(
    "tool, words, message",
    [
        ("decode_ab", ("--tp", 2, "--ep", 2), "tp: is 2, must be at most 1, the GPUs that a server may use here"),
        ("equality", ("--tp", 2, "--ep", 2), "tp: is 2, must be at most 1"),
        ("soak", ("--tp", 2, "--ep", 2), "tp: is 2, must be at most 1"),
        ("decode_ab", ("--tp", 3, "--ep", 3), "ep: is 3, must divide the model's experts (64)"),
        ("decode_ab", ("--tp", 2), "ep: is 1, must be tp (2)"),
        (
            "decode_ab",
            ("--dispatch-tokens", 128),
            "dispatch_tokens: is 128, must be at least 256: 256 requests at once",
        ),
        ("equality", ("--prompts", 1500), "dispatch_tokens: is 1536, must be at most 1024"),
    ],
)
def test_what_would_hang_on_some_rank_starts_nothing(bench, tool, words, message):
    done = bench.run(tool, *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert bench.journal == []


def test_two_ranks_compare_their_tokens_with_right_and_wrong_rows(bench):
    """128 tokens a rank, DeepEP's default, are 256 padded rows with two ranks."""
    _gpus(bench, 2)
    words = ("--tp", 2, "--ep", 2, "--prompts", 4, "--output-len", 8, "--arms", "cutlass", "triton", "reference")
    done = bench.run("equality", *words, FAKE_WRONG_TOKENS="rows")
    assert done.returncode == 0, done.stderr
    tokens = [line["env"]["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] for line in bench.journal]
    assert tokens == ["256"] * 4 + ["128"] * 3
    cells = [cell for cell in bench.results()["cells"] if cell["pass"] == "one at a time"]
    equal = {(cell["arm"], cell["padded_rows"], cell["against"]): cell["equal"] for cell in cells}
    assert equal["engine", 256, "engine"] == equal["engine", 256, "reference"] == 0
    assert (
        equal["engine", 512, "reference"] == equal["cutlass", 256, "engine"] == equal["triton", 256, "reference"] == 4
    )


# Equality


def test_equal_tokens_are_said_to_be_equal(bench):
    done = bench.run("equality", "--prompts", 6, "--input-len", 8, "--output-len", 12)
    assert done.returncode == 0, done.stderr
    rows, backend = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SGLANG_W4AFP8_BACKEND"
    assert [(line["arm"], line["env"].get(backend), line["env"][rows]) for line in bench.journal] == [
        ("engine", None, "512"),
        ("plugin", None, "512"),
        ("plugin", "reference", "512"),
        ("engine", None, "128"),
        ("plugin", None, "128"),
    ]
    # One command line for all: nothing but DeepEP's buffers and the arm may differ.
    flags = [[f for i, f in enumerate(line["flags"]) if line["flags"][i - 1] != "--port"] for line in bench.journal]
    assert flags.pop(2) == [*flags[0], "--disable-cuda-graph"]
    assert all(other == flags[0] for other in flags) and flags[0][flags[0].index("--chunked-prefill-size") + 1] == "128"
    data = bench.results()
    assert {cell["equal"] for cell in data["cells"]} == {6}
    # The plugin has chosen Triton here, so it is judged against the reference.
    judged = [(cell["arm"], cell["against"], cell["padded_rows"]) for cell in data["cells"] if cell["judged"]]
    assert judged == [("plugin", "reference", 512), ("plugin", "reference", 128)]
    assert data["meta"]["distinct_tokens"] > 60


def test_where_the_engines_gemms_compute_every_pass_is_judged_against_the_engine(bench):
    done = bench.run("equality", "--prompts", 6, "--input-len", 8, "--output-len", 12, "--arms", "cutlass")
    assert done.returncode == 0, done.stderr
    assert [line["env"].get("SGLANG_W4AFP8_BACKEND") for line in bench.journal] == [None, "cutlass"] * 2
    cells = bench.results()["cells"]
    assert [cell["equal"] for cell in cells] == [6] * 12
    assert [cell["arm"] for cell in cells if cell["judged"]] == ["cutlass"] * 6
    bench.assert_nothing_runs()


def test_other_tokens_are_a_failure(bench):
    words = ("--prompts", 4, "--output-len", 8, "--arms", "cutlass")
    done = bench.run("equality", *words, FAKE_WRONG_TOKENS="plugin")
    assert done.returncode == 5, done.stderr
    assert "cutlass with 512 padded rows, one at a time: 4 of 4 prompts differ" in done.stderr


def test_the_engines_wrong_rows_are_shown_and_not_held_against_it(bench):
    done = bench.run("equality", "--prompts", 4, "--output-len", 8, FAKE_WRONG_TOKENS="rows")
    assert done.returncode == 0, done.stderr
    equal = {(c["arm"], c["padded_rows"], c["pass"]): c["equal"] for c in bench.results()["cells"]}
    assert equal["engine", 128, "one at a time"] == 0
    assert equal["plugin", 128, "one at a time"] == equal["plugin", 512, "all at once"] == 4


def test_a_server_that_lies_compares_nothing(bench):
    done = bench.run("equality", "--prompts", 2, FAKE_LIE="silent")
    assert done.returncode == 4 and not (bench.root / "out.json").exists()


def test_the_triton_backend_is_judged_against_float_expert_layers(bench):
    words = ("--prompts", 4, "--output-len", 8, "--arms", "cutlass", "triton", "reference")
    done = bench.run("equality", *words)
    assert done.returncode == 0, done.stderr
    servers = [(line["arm"], line["env"].get("SGLANG_W4AFP8_BACKEND")) for line in bench.journal]
    assert servers[:4] == [("engine", None), ("plugin", "cutlass"), ("plugin", "triton"), ("plugin", "reference")]
    assert servers[4:] == [("engine", None), ("plugin", "cutlass"), ("plugin", "triton")]
    assert ["--disable-cuda-graph" in line["flags"] for line in bench.journal] == [False] * 3 + [True] + [False] * 3
    judged = {(cell["arm"], cell["against"]) for cell in bench.results()["cells"] if cell["judged"]}
    assert judged == {("cutlass", "engine"), ("triton", "reference")}


@pytest.mark.parametrize("arm, status", [("triton", 2), ("auto", 5), ("plugin", 5)])
def test_the_triton_backend_is_never_unjudged(bench, arm, status):
    """Named, it is refused before a server starts; chosen by the plugin, it is a fault of the comparison."""
    done = bench.run("equality", "--prompts", 2, "--output-len", 4, "--arms", arm)
    assert done.returncode == status, done.stderr
    assert bool(bench.journal) == (status == 5) and "'reference'" in done.stderr


def test_other_tokens_than_the_float_reference_are_a_failure_of_the_triton_backend_alone(bench):
    words = ("--prompts", 4, "--output-len", 8, "--arms", "cutlass", "triton", "reference")
    done = bench.run("equality", *words, FAKE_WRONG_TOKENS="triton")
    assert done.returncode == 5, done.stderr
    faults = bench.results()["meta"]["faults"]
    assert [fault.partition(":")[0] for fault in faults] == [f"triton with {rows} padded rows" for rows in (512, 128)]
    assert all(
        "4 of 4 prompts differ from the float reference where it is decided, by up to 1.000" in f for f in faults
    )


def test_prompts_that_only_the_float_reference_prefilled_eagerly_are_not_compared_with_it(bench):
    """Prompts have 64 to 61 tokens; the graph's rounding changes what follows the longer two on every other server."""
    words = ("--prompts", 4, "--output-len", 8, "--input-len", 64, "--arms", "cutlass", "triton", "reference")
    done = bench.run("equality", *words, FAKE_WRONG_TOKENS="graph", FAKE_GRAPH_TOKENS="63")
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in bench.results()["cells"] if cell["pass"] == "one at a time"]
    found = {(c["arm"], c["padded_rows"], c["against"]): (c["equal"], c["prompts"]) for c in cells}
    assert found["cutlass", 128, "engine"] == (4, 4)
    assert {found[arm, rows, "reference"] for arm in ("engine", "triton") for rows in (512, 128)} == {(2, 2)}


@pytest.mark.parametrize(
    "mine, prompts, fault",
    [
        ([True, False], 1, None),
        ([True, True], 0, "auto with 512 padded rows: not judged, no prompt was prefilled as by the float reference"),
        (None, 2, "auto with 512 padded rows: 1 of 2 prompts differ from the float reference"),  # the log does not say
    ],
)
def test_only_prompts_prefilled_alike_are_compared_with_the_float_reference(mine, prompts, fault):
    def outputs(arm: str, backend: str, first: int, graphs: list[bool] | None) -> equality.Outputs:
        tokens = dict.fromkeys((equality.SINGLE, equality.BATCH, equality.REPEAT), [[1, first], [1, 2]])
        return equality.Outputs(arm, 512, [], tokens, [[1.0, 1.0]] * 2, backend, graphs)

    exact, engine = outputs("reference", "reference", 2, [False, False]), outputs("engine", "cutlass", 2, None)
    cells, faults = equality.judge(engine, [outputs("auto", "triton", 3, mine), exact], 0.0, 0.1)
    (cell,) = [cell for cell in cells if (cell["arm"], cell["against"]) == ("auto", "reference")]
    assert cell["prompts"] == prompts
    assert [f.partition(" where")[0] for f in faults] == ([fault] if fault else [])


def test_the_committed_comparison_is_what_the_servers_tokens_say():
    """Recorded on the real server; with the prompts that were not prefilled alike, Triton would be at fault there."""
    results = json.loads((RESULTS / "e2e_equality.json").read_text())
    recorded = json.loads(lzma.decompress((RESULTS / "e2e_equality_outputs.json.xz").read_bytes()))
    outputs = [equality.Outputs(**server) for server in recorded]
    ties = results["meta"]["near_tie"], results["meta"]["float_tie"]
    assert equality.judge(outputs[0], outputs[1:], *ties) == (results["cells"], results["meta"]["faults"])
    unaware = [dataclasses.replace(server, graph_prefills=None) for server in outputs]
    _, faults = equality.judge(unaware[0], unaware[1:], *ties)
    assert len(faults) == 4 and all("2 of 64 prompts differ from the float reference" in fault for fault in faults)


def test_only_first_differences_count_and_near_ties_are_apart():
    reference = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    other = [[1, 2, 3, 4], [1, 9, 9, 9], [1, 2, 9, 4]]
    gaps = [[1.0] * 4, [1.0, 0.01, 1.0, 1.0], [1.0] * 4]
    found = equality.compare_tokens(reference, other, gaps, near_tie=0.05)
    assert (found.equal, found.near_ties, found.different) == (1, 1, 1)
    assert found.matching_tokens == pytest.approx((4 + 1 + 2) / 12)
    assert equality.compare_tokens(reference, other, gaps, near_tie=0.0).different == 2


def test_gaps_are_compared_as_long_as_tokens_are_the_same():
    reference, other = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]]
    gaps, others_gaps = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [[1.0, 1.3, 1.0], [0.6, 9.0, 9.0]]
    found = equality.compare_tokens(reference, other, gaps, 0.0, others_gaps)
    assert found.gap_rms == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 4))
    assert equality.compare_tokens(reference, other, gaps, 0.0).gap_rms is None
    assert equality.compare_tokens([[1]], [[2]], [[1.0]], 0.0, [[1.0]]).gap_rms is None  # nothing to compare


def test_a_triton_arm_further_from_the_float_reference_than_the_engine_is_a_fault():
    def outputs(arm: str, backend: str, gap: float) -> equality.Outputs:
        tokens = dict.fromkeys((equality.SINGLE, equality.BATCH, equality.REPEAT), [[1, 2]])
        return equality.Outputs(arm, 512, [], tokens, [[1.0, gap]], backend)

    exact, engine = outputs("reference", "reference", 1.0), outputs("engine", "cutlass", 1.2)
    cells, faults = equality.judge(engine, [outputs("auto", "triton", 1.1), exact], 0.0)
    assert faults == []
    (cell,) = [cell for cell in cells if (cell["arm"], cell["against"]) == ("auto", "reference")]
    assert cell["gap_rms"] == pytest.approx(0.1 / math.sqrt(2), abs=1e-4)
    _, faults = equality.judge(engine, [outputs("auto", "triton", 1.3), exact], 0.0)
    assert faults == ["auto with 512 padded rows: gaps are 0.2121 from the float reference's, the engine's 0.1414"]


def test_batches_are_judged_only_where_the_reference_repeats_itself():
    def outputs(arm: str, batch: list[int], repeat: list[int]) -> equality.Outputs:
        tokens = {"one at a time": [[1, 2]], "all at once": [batch], "all at once again": [repeat]}
        return equality.Outputs(arm, 512, [], tokens, [[1.0, 1.0]])

    other = outputs("plugin", [1, 3], [1, 3])
    cells, faults = equality.judge(outputs("engine", [1, 2], [1, 4]), [other], 0.0)
    assert faults == [] and [cell["judged"] for cell in cells if cell["arm"] == "plugin"] == [True, False, False]
    _, faults = equality.judge(outputs("engine", [1, 2], [1, 2]), [other], 0.0)
    assert len(faults) == 2


# One layer over several ranks


def _ranks_found(
    rows: int, *errors: float, live: tuple[str, ...] = EVERY, regrouped: bool = False
) -> list[dict[str, Any]]:
    return [
        {
            "live": live,
            "regrouped": regrouped,
            str(rows): [{"error": e, "right": e == 0.0}, {"error": 0.0, "right": True}],
        }
        for e in errors
    ]


@pytest.mark.parametrize(
    "arm, found, problems",
    [
        (ENGINE, _ranks_found(512, 0.0, 0.0, live=()), []),
        (ENGINE, _ranks_found(512, 0.0, live=("silu",)), ["rank 0: live patches are silu"]),
        (PLUGIN, _ranks_found(512, 0.0), []),
        (PLUGIN, _ranks_found(512, 0.0, live=()), ["rank 0: live patches are none"]),
        (
            Arm("silu", ("silu",)),
            _ranks_found(512, 0.0, live=("silu", "gemm")),
            ["rank 0: live patches are silu, gemm"],
        ),
        (TRITON, _ranks_found(512, 0.0, regrouped=True), []),
        (TRITON, _ranks_found(512, 0.0), ["rank 0: weights are not regrouped"]),
        (PLUGIN, _ranks_found(512, 0.0, regrouped=True), ["rank 0: weights are regrouped"]),
    ],
)
def test_ranks_that_contradict_their_arm_are_seen(arm, found, problems):
    assert expert_layer.contradictions(arm, found) == problems


@pytest.mark.parametrize(
    "arm, tokens, errors, right, judged",
    [
        (PLUGIN, 128, (0.0, 0.001), True, True),
        (PLUGIN, 128, (0.0, 0.01), False, True),
        (PLUGIN, 256, (math.nan, 0.0), False, True),
        (ENGINE, 128, (0.9, 0.0), False, False),
        (ENGINE, 256, (0.9, 0.0), False, True),
    ],
)
def test_an_output_that_is_wrong_on_one_rank_is_wrong(arm, tokens, errors, right, judged):
    cell = expert_layer.cell_of(arm, 2, tokens, _ranks_found(2 * tokens, *errors))
    assert (cell["right"], cell["judged"], cell["padded_rows"], cell["outputs"]) == (right, judged, 2 * tokens, 4)
    assert cell["largest_error"] == pytest.approx(max(errors), nan_ok=True)


def _layer_words(folder):
    return ["--ranks", "2", "--out", str(folder / "out.json"), "--work", str(folder / "work")]


def test_a_layer_goes_on_after_its_last_finished_arm(monkeypatch, tmp_path):
    asked = []

    def found(words, environ, timeout_s):
        backend = environ.get("SGLANG_W4AFP8_BACKEND", "engine")
        asked.append((words[words.index("--dispatch-tokens") + 1], backend))
        if len(asked) == 3:
            raise expert_layer.RanksError("no device")
        rows = 2 * int(asked[-1][0])
        return _ranks_found(rows, 0.0, live=() if backend == "engine" else EVERY, regrouped=backend == "triton")

    monkeypatch.setattr(expert_layer, "run_ranks", found)
    monkeypatch.setattr(expert_layer, "install_cleanup", lambda: None)
    monkeypatch.setattr(report, "nvidia_smi", lambda *fields: [["GPU", "1"]] * 2)
    assert expert_layer.main(_layer_words(tmp_path)) == 1
    assert not (tmp_path / "out.json").exists()
    assert expert_layer.main(_layer_words(tmp_path)) == 0
    backends = ("engine", "cutlass", "triton")
    first = [("128", backend) for backend in backends]
    assert asked == [*first, first[2], *[("256", backend) for backend in backends]]
    assert len(json.loads((tmp_path / "out.json").read_text())["cells"]) == 6
    # Of other GPUs nothing is taken over.
    monkeypatch.setattr(report, "nvidia_smi", lambda *fields: [["GPU", "2"]] * 2)
    assert expert_layer.main(_layer_words(tmp_path)) == 0
    assert len(asked) == 13


def test_the_first_start_counts_only_while_it_is_the_only_one(monkeypatch):
    """It compiles what the others find ready."""
    now = [0.0]
    monkeypatch.setattr(cli, "time", argparse.Namespace(monotonic=lambda: now[0]))
    clock = cli.Clock(100.0)
    assert clock.fits("start")
    clock.spent("start", 60.0)
    now[0] = 50.0
    assert not clock.fits("start") and clock.fits("block")
    clock.spent("start", 20.0)
    clock.spent("start", 30.0)
    clock.spent("start", 25.0)
    now[0] = 70.0
    assert clock.fits("start")
    now[0] = 71.0
    assert not clock.fits("start")


@pytest.mark.parametrize("wrong, status", [("engine 256", 0), ("engine 512", 5), ("triton 256", 5), ("", 0)])
def test_the_layers_exit_status_says_whether_it_is_right(monkeypatch, tmp_path, wrong, status):
    def found(words, environ, timeout_s):
        rows = 2 * int(words[words.index("--dispatch-tokens") + 1])
        backend = environ.get("SGLANG_W4AFP8_BACKEND", "engine")
        error = 0.9 if wrong == f"{backend} {rows}" else 0.0
        return _ranks_found(rows, 0.0, error, live=() if backend == "engine" else EVERY, regrouped=backend == "triton")

    monkeypatch.setattr(expert_layer, "run_ranks", found)
    monkeypatch.setattr(expert_layer, "install_cleanup", lambda: None)
    monkeypatch.setattr(report, "nvidia_smi", lambda *fields: [["GPU", "1"]] * 2)
    assert expert_layer.main(_layer_words(tmp_path)) == status
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [(cell["arm"], cell["padded_rows"]) for cell in cells] == [
        (arm, rows) for rows in (256, 512) for arm in ("engine", "cutlass", "triton")
    ]


def test_ranks_that_fail_or_hang_are_said_and_gone(monkeypatch, tmp_path):
    script = tmp_path / "ranks.py"
    monkeypatch.setattr(expert_layer, "_RANKS", script)
    script.write_text("print('no device'); raise SystemExit(3)")
    with pytest.raises(expert_layer.RanksError, match="exit status 3\nno device"):
        expert_layer.run_ranks([], os.environ, 60.0)
    pid = tmp_path / "pid"
    script.write_text(
        "import subprocess, sys, time\nrank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid)!r}, 'w').write(str(rank.pid))\nprint('RESULT []', flush=True)\ntime.sleep(60)"
    )
    with pytest.raises(expert_layer.RanksError, match="not done after 3 s"):
        expert_layer.run_ranks([], os.environ, 3.0)
    _wait_for(lambda: not _alive(int(pid.read_text())))


# Soak


def _soak(bench: Bench, *words: object, **fake: str) -> subprocess.CompletedProcess[str]:
    short = ["--minutes", 0.1, "--hold", 0.5, "--concurrency", 8, "--longest-input", 32, "--longest-output", 40]
    return bench.run("soak", *short, *words, **fake)


def test_soak_visits_every_level_and_counts_every_request(bench):
    smi = bench.root / "bin" / "nvidia-smi"
    shown = '"pids": \\[\\([0-9]*\\).*'
    apps = f"""sed 's/.*{shown}/\\1, 700, GPU-1/' "$FAKE_JOURNAL"; echo 1, 9000, GPU-1"""
    more = f'case "$1" in\n*compute-apps*) {apps} ;;\n*index,uuid*) echo 0, GPU-1 ;;'
    smi.write_text(smi.read_text().replace('case "$1" in', more, 1))
    done = _soak(bench)
    summary = bench.results()["summary"]
    # Six seconds hold too few memory samples for a verdict on it: said so, and nothing else.
    assert summary["faults"] == ["GPU memory was not measured, or too few times"], done.stderr
    assert done.returncode == 6 and summary["complete"] and not summary["sound"]
    assert summary["most_at_once"] == 8 and summary["levels"] == [1, 2, 4, 8]
    assert summary["sent"] == summary["finished"] + summary["aborted"] + summary["hung_up"]
    assert min(summary["aborted"], summary["hung_up"]) > 0
    assert summary["patches"] == list(EVERY) and summary["log_errors"] == []
    # Not the other process's 9000.
    assert (summary["gpu_memory_of"], summary["gpu_memory_mib"]) == ("the server's processes", [700.0, 700.0])
    bench.assert_nothing_runs()


@pytest.mark.parametrize(
    "fake, status, message",
    [
        ({"FAKE_FAIL_EVERY": "20"}, 6, "requests failed, first: soak-"),
        ({"FAKE_LOG_ERROR": "ERROR: scheduler hit an exception"}, 6, "1 log lines report a fault"),
        ({"FAKE_LIE": "silent"}, 4, "plugin was not what it says: no activation line of the plugin"),
        ({"FAKE_ENGINE": "0.5.99"}, 4, "plugin was not what it says: activation line on sglang 0.5.99, must be on"),
    ],
)
def test_soak_sees_what_goes_wrong(bench, fake, status, message):
    done = _soak(bench, **fake)
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    summary = bench.results()["summary"]
    assert summary["complete"] and not summary["sound"]
    assert [fault for fault in summary["faults"] if message in fault]


@pytest.mark.parametrize(
    "option, value",
    [("minutes", "0"), ("minutes", "nan"), ("hold", "-1"), ("hold", "inf"), ("concurrency", "0")]
    + [("longest-input", "0"), ("longest-output", "x")],
)
def test_soak_refuses_what_it_cannot_do_before_a_server_starts(capsys, option, value):
    with pytest.raises(SystemExit, match="2"):
        soak.main(["--model-path", "none", f"--{option}={value}"])
    assert f"argument --{option}: is {value!r}, must be a positive" in capsys.readouterr().err


def test_starts_beside_other_arms_are_not_paired(bench):
    """They were not interleaved with these."""
    words = ("--blocks", 1, "--rounds", 1)
    for arms, begun in ((("engine", "cutlass"), 2), (("engine", "cutlass"), 2), (("engine", "triton"), 4)):
        assert bench.ab(*words, "--arms", *arms).returncode == 0
        assert len(bench.journal) == begun


def test_soak_fails_with_its_server(bench):
    done = _soak(bench, FAKE_CRASH="30")
    summary = bench.results()["summary"]
    assert done.returncode == 1 and summary["complete"] is False
    assert summary["faults"][0].startswith("the run failed: ")
    bench.assert_nothing_runs()


def test_soak_load_is_drawn_from_the_seed_and_covers_all_lengths():
    drawn = [soak.Requests(3, 1000, 1024, 256) for _ in range(2)]
    first, second = ([source.draw() for _ in range(600)] for source in drawn)
    assert first == second
    assert {len(r.prompt) for r in first} >= {1, 2, 3} and max(len(r.prompt) for r in first) > 900
    assert {r.cancel for r in first} == {None, "abort", "hang up"}
    assert all(1 <= r.output_len <= 256 and r.cancel_after < r.output_len for r in first)


def test_soak_cancels_one_request_at_a_time():
    """The engine aborts by prefix, so no identifier may begin another."""
    source = soak.Requests(3, 1000, 4, 4)
    names = sorted(source.draw().rid for _ in range(1200))
    assert not any(longer.startswith(shorter) for shorter, longer in itertools.pairwise(names))


def test_an_idle_connection_is_given_up_before_the_engine_closes_it():
    from sglang.srt.environ import envs

    async def keep_alive() -> float:
        async with client.session() as http:
            return http.connector._keepalive_timeout

    assert asyncio.run(keep_alive()) == client.KEEP_ALIVE_S <= envs.SGLANG_TIMEOUT_KEEP_ALIVE.get() - 2


def test_soak_schedule_goes_down_first_and_then_visits_every_level_in_each_round():
    schedule = soak.Schedule(256, 10.0, seed=1)
    seen = [schedule.at(10.0 * i) for i in range(27)]
    assert seen[:9] == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert sorted(seen[9:18]) == sorted(seen[18:]) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert schedule.round_s == 90.0
    assert soak.levels(100) == [1, 2, 4, 8, 16, 32, 64, 100]


# The script of a GPU session


def _session(bench: Bench, *words: object, **fake: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(REPO / "scripts" / "run_h200_e2e.py"), *map(str, words)]
    flags = ["--work", bench.root / "w", "--out", bench.root / "results", "--least", 1]
    flags += ["--launch-command", f"{sys.executable} {FAKE}", "--merge-into", bench.root / "none.json"]
    return subprocess.run(
        [*script, *map(str, flags)], env=bench.environ(**fake), capture_output=True, text=True, timeout=170
    )


def test_session_runs_stages_once_and_collects(bench):
    words = ["config", "ab-64", "--concurrency", 2, "--rounds", 1, "--layers", 4]
    done = _session(bench, *words)
    assert done.returncode == 0, done.stderr
    assert len(bench.journal) == 4
    names = sorted(path.name for path in (bench.root / "results").iterdir())
    picture = f"e2e_decode_deepseek-v3-4l-64e_{report.version('sglang')}_uniform.png"
    assert names == ["e2e_decode.csv", "e2e_decode.json", picture, "e2e_logs.tar.gz"]
    cell = json.loads((bench.root / "results" / "e2e_decode.json").read_text())["cells"][0]
    assert (cell["model"], cell["moe_layers"], cell["experts"]) == ("deepseek-v3-4l-64e", 3, 64)
    again = _session(bench, *words)
    assert again.returncode == 0 and len(bench.journal) == 4 and "already done" in again.stderr


def test_session_soak_outlives_the_call_that_began_it(bench):
    words = ["soak", "--concurrency", 4, "--minutes", 0.2, "--seconds", 20]
    first = _session(bench, *words)
    assert first.returncode == 3 and "not finished; run it again" in first.stderr, first.stderr
    assert _alive(bench.journal[0]["pids"][0])
    second = _session(bench, *words[:-1], 90)
    # Too short for a verdict on memory, hence not sound; but it ended, and it was one run.
    assert second.returncode == 6, second.stderr
    assert len(bench.journal) == 1
    assert json.loads((bench.root / "results" / "e2e_soak.json").read_text())["summary"]["complete"] is True
    bench.assert_nothing_runs()


def _preset_calls(monkeypatch, tmp_path, *words: object) -> list[tuple[str, list[str]]]:
    """The tools that a preset runs, and their words, without a GPU or a server."""
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        run_h200_e2e.Run, "tool", lambda run, script, *w: calls.append((script.name, [*map(str, w)])) or 0
    )
    monkeypatch.setattr(run_h200_e2e.Run, "check", lambda run: calls.append(("check", [])) or 0)
    monkeypatch.setattr(report, "nvidia_smi", lambda *fields: [["143771"]] * 8)
    flags = ["--work", tmp_path / "work", "--out", tmp_path / "out"]
    assert run_h200_e2e.main([*map(str, words), *map(str, flags)]) == 0
    return calls


def _servers(words: list[str], model: Path) -> tuple[argparse.Namespace, LaunchOptions]:
    """What decode_ab.py makes of its words."""
    args = decode_ab._parser().parse_args([*words, "--model-name", "m"])
    return args, launch_options(args, args.concurrency)


def test_the_preset_of_four_ranks_asks_for_the_deployed_setting(monkeypatch, tmp_path):
    calls = _preset_calls(monkeypatch, tmp_path, "--ranks", 4)
    assert [name for name, _ in calls if name != "make_synthetic_checkpoint.py"] == [
        "check",
        "expert_layer.py",
        *["decode_ab.py"] * 2,
    ]
    made = next(words for name, words in calls if name == "make_synthetic_checkpoint.py")
    assert made[made.index("--experts") + 1] == "256" and "--config-only" in made
    layers = int(made[made.index("--layers") + 1])
    assert 5 < layers <= 61
    runs = [_servers(words, tmp_path) for name, words in calls if name == "decode_ab.py"]
    # 128 tokens a rank, 512 padded rows, as far as they hold the requests.
    assert [(args.concurrency, options.rank_tokens, options.padded_rows) for args, options in runs] == [
        ([16, 64, 256], 128, 512),
        ([1024], 256, 1024),
    ]
    for args, options in runs:
        assert args.arms == ["engine", "cutlass", "triton"] and (args.blocks, args.mode) == (3, "fresh")
        flags = " ".join(options.flags(30000))
        assert "--tp-size 4 --ep-size 4 --moe-a2a-backend deepep --deepep-mode low_latency" in flags
        assert "--enable-dp-attention" not in flags and "--load-format dummy" in flags
        assert options.routing == "uniform"
        for arm in map(parse_arm, args.arms):
            assert options.environ(arm)["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] == str(options.rank_tokens)


def test_the_preset_of_two_ranks_shows_the_wrong_rows_first(monkeypatch, tmp_path):
    calls = _preset_calls(monkeypatch, tmp_path, "--ranks", 2)
    names = [name for name, _ in calls]
    assert names.index("expert_layer.py") < names.index("equality.py") < names.index("decode_ab.py")
    layer = expert_layer._parser().parse_args(dict(calls)["expert_layer.py"])
    assert (layer.ranks, layer.arms) == (2, ["engine", "cutlass", "triton"])
    args = equality._parser().parse_args(dict(calls)["equality.py"])
    assert (args.arms, args.tp, args.ep) == (["cutlass", "triton", "reference"], 2, 2)
    assert launch_options(args, [1, args.prompts]).padded_rows == 512
    runs = [_servers(words, tmp_path) for name, words in calls if name == "decode_ab.py"]
    assert [(args.concurrency, options.padded_rows) for args, options in runs] == [([16, 64, 256], 512), ([1024], 1024)]


@pytest.mark.parametrize(
    "faulty, words, loads",
    [
        (True, (), [[8], [32], [128], [256]]),
        (True, ("--dispatch-tokens", 512), [[8], [32], [128], [256]]),
        (True, ("--server-args=--cuda-graph-bs-decode 256",), [[8, 32, 128, 256]]),
        (True, ("--launch-command", "other"), [[8, 32, 128, 256]]),
        (True, ("--tp", 2, "--ep", 2), [[8, 32, 128, 256]]),
        (False, (), [[8, 32, 128, 256]]),
    ],
)
def test_an_engine_that_drops_tokens_gets_servers_for_every_number_of_requests(
    monkeypatch, tmp_path, faulty, words, loads
):
    _faulty_engine(monkeypatch, tmp_path, given=GIVEN if faulty else GIVEN_TO_SEVERAL)
    calls = [words for name, words in _preset_calls(monkeypatch, tmp_path, "ab-64", *words) if name == "decode_ab.py"]
    runs = [_servers(call, tmp_path) for call in calls]  # as decode_ab.py would take them
    assert [args.concurrency for args, _ in runs] == loads
    assert len({args.out for args, _ in runs}) == 1
    assert {options.rank_tokens for _, options in runs} == {256 if "--tp" in words else 512}


def test_what_is_given_wins_over_a_preset(monkeypatch, tmp_path):
    words = ("ab-64", "--ranks", 4, "--dispatch-tokens", 256, "--layers", 5, "--concurrency", 64, 1024, "--dp", 4)
    calls = _preset_calls(monkeypatch, tmp_path, *words)
    (run,) = (_servers(words, tmp_path) for name, words in calls if name == "decode_ab.py")
    assert (run[0].concurrency, run[1].padded_rows, run[1].dp) == ([64, 1024], 1024, 4)
    assert "deepseek-v3-5l-64e" in dict(calls)["decode_ab.py"]
    assert run_h200_e2e.parse_arguments(["ab-64", "--work", "w", "--out", "o"]).concurrency == [8, 32, 128, 256]
    assert run_h200_e2e.PRESETS[4]["merge_into"].parts[-2:] == ("h200x4", "e2e_decode.json")


def test_a_preset_that_cannot_work_starts_nothing(bench):
    for words, message in (
        (["--ranks", 4, "--dispatch-tokens", 128], "dispatch_tokens: is 128, must be at least 256: 1024 requests"),
        (["--ranks", 4, "--experts", 3], "unrecognized arguments"),
        ([], "stages: are none, must be at least one without --ranks"),
    ):
        done = _session(bench, *words)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_the_layers_that_fit_leave_room_for_the_cache():
    spec = dataclasses.replace(run_h200_e2e._WHOLE_MODEL, vocab_size=1280)
    memory = 143771 << 20
    tokens = 1024 * 640
    fits = {ranks: model_memory.layers_that_fit(spec, memory, 0.7, tokens, ranks) for ranks in (1, 2, 4, 8)}
    assert fits[1] < fits[2] < fits[4] < fits[8] == 61
    for ranks, layers in fits.items():
        cut = dataclasses.replace(spec, layers=layers)
        used = model_memory.weight_bytes(cut, ranks) + model_memory.cache_bytes(cut, tokens)
        assert used <= 0.7 * memory
    # Experts are the bulk: 64 of them are 64 * 3 * 7168 * 2048 half bytes, and scales of 4 bytes for each 128 of them.
    one = model_memory.weight_bytes(dataclasses.replace(spec, layers=5), 4)
    two = model_memory.weight_bytes(dataclasses.replace(spec, layers=6), 4)
    experts = 64 * 3 * 7168 * 2048 * (1 / 2 + 4 / 128)
    assert experts < two - one < 1.15 * experts
    with pytest.raises(ValueError, match="^layers: one layer of 256 experts over 1 GPUs needs"):
        model_memory.layers_that_fit(spec, 8 << 30, 0.7, tokens, 1)


def test_session_refuses_an_unknown_stage(bench):
    done = _session(bench, "ab-many")
    assert done.returncode == 2 and "'ab-many', must be one of" in done.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
