"""The plugin inside an engine, every test in fresh processes.

Two kinds of engine: the one that is installed, as it is or with single files replaced; and small trees of the test's
own making with the real plugin loader, for layouts and versions that are not installed. Where there is no GPU driver,
``sgl_kernel`` is a stand-in.
"""

import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from engine_process import (
    CHAIN,
    CHAIN_FILE,
    EVERY_PATCH,
    GEMM,
    METHOD_FILE,
    NEW_KERNELS,
    NEW_MODULE,
    OLD_MODULE,
    REQUANT,
    engine_root,
    overlay,
    run_command,
    run_script,
    sgl_kernel_with,
    write,
)
from sglang_w4afp8 import guard

register_cpu_ci(est_time=150, suite="base-a-test-cpu")

# What a server loses with the chain, and what needs no more than the method's file.
OF_THE_CHAIN = {"expected_m", "problem_sizes", "gemm", "two_kernels", "bf16_dispatch"}
OF_THE_METHOD = {"input_scales", "eplb_scales", "normal_fp8", "dispatch_cap"}


def with_states(others: str, **states: str) -> dict[str, str]:
    """The state of every patch: those given, the others alike."""
    return {name: states.get(name, others) for name in EVERY_PATCH}


def all_in(state: str, names: set[str]) -> dict[str, str]:
    return dict.fromkeys(names, state)


# Loads the plugins as a server does. `ours(path)` says whether calling an engine name reaches our function.
LOAD = """
import importlib, pkgutil, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
{before}
load_plugins()
from sglang_w4afp8 import lifecycle, plugin

def ours(path):
    module, _, attribute = path.rpartition(".")
    function = pkgutil.resolve_name(path)
    return any(
        plugin.calls(function, pkgutil.resolve_name(target.replacement))
        for patch in plugin.LEDGER for target in patch.targets if target.attribute.endswith(attribute)
    )

def states():
    return {{status.name: status.state.value for status in lifecycle.report().patches}}

def reasons():
    return {{status.name: status.reason for status in lifecycle.report().patches if status.reason}}

REQUANT = {requant!r}
CHAIN = "sglang.srt.layers.moe.cutlass_w4a8_moe.cutlass_w4a8_moe_deepep_ll"
METHOD = "sglang.srt.layers.quantization.w4afp8.W4AFp8MoEMethod.apply_deepep_ll"
"""
OURS = "[ours(REQUANT), ours(CHAIN), ours(METHOD)]"


def _load(after: str, before: str = "", kernels: str = NEW_MODULE) -> str:
    return LOAD.format(before=before, requant=f"{kernels}.fp8_per_token_to_per_tensor_quant_triton") + after


# --- the installed engine ---


def test_installed_engine_is_patched_and_says_so_once(sgl_kernel_stub):
    """A spawned scheduler, in short: plugins first, logging after, then the first call."""
    done = run_script(
        _load(
            f"""
from types import SimpleNamespace
import sglang.srt.plugins as loader
from sglang.srt.utils import configure_logger

first = {{"ours": {OURS}, "imported_name": ours(chain_module.__name__ + ".fp8_per_token_to_per_tensor_quant_triton")}}
bound = chain_module.cutlass_w4a8_moe_deepep_ll
loader._plugins_loaded = False
load_plugins()
plugin.activate()
HookRegistry.apply_hooks()
configure_logger(SimpleNamespace(log_level="info"), prefix=" TP0")
lifecycle.log_first_call(x=(8, 16, 128), expected_m=3)
lifecycle.log_first_call(x=(8, 16, 128), expected_m=3)
mine = [t for t, found in HookRegistry._hooks.items() if any(s and s.plugin_name == "w4afp8" for *_, s in found)]
result = {{
    **first,
    "live": list(lifecycle.live_patches()),
    "mine": sorted(target.rpartition(".")[2] for target in mine),
    "registered": sorted({{len(HookRegistry._hooks[target]) for target in mine}}),
    "same": bound is chain_module.cutlass_w4a8_moe_deepep_ll,
    "apply_hooks": type(HookRegistry.__dict__["apply_hooks"]).__name__,
    "cuda_initialised_by_us": torch.cuda.is_initialized() and not cuda_before,
}}
""",
            before="""
import torch
import sglang.srt.layers.moe.cutlass_w4a8_moe as chain_module
cuda_before = torch.cuda.is_initialized()
""",
        ),
        [sgl_kernel_stub],
    )
    assert done.result == {
        "ours": [True, True, True],
        "imported_name": True,
        "live": EVERY_PATCH,
        "mine": [
            "apply_deepep_ll",
            "apply_deepep_normal",
            "create_weights",
            "cutlass_w4a8_moe_deepep_ll",
            "fp8_per_token_to_per_tensor_quant_triton",
            "process_weights_after_loading",
            "silu_and_mul_masked_post_per_tensor_quant_fwd",
        ],
        "registered": [1],
        "same": True,
        "apply_hooks": "classmethod",
        "cuda_initialised_by_us": False,
    }
    (line,) = done.lines("sglang-w4afp8 0.")
    assert "on sglang 0.5." in line and line.endswith(f"active: {', '.join(EVERY_PATCH)}")
    (call,) = done.lines("first low-latency call")
    assert " TP0] sglang-w4afp8: first low-latency call: x=[8, 16, 128], expected_m=3, patches=requant," in call


def test_installed_engine_without_sgl_kernel_loses_the_chain_only(sgl_kernel_broken):
    done = run_script(_load("result = [states(), reasons(), ours(REQUANT), ours(METHOD)]"), [sgl_kernel_broken])
    states, reasons, requant, method = done.result
    assert states == with_states("active", **all_in("standing down", OF_THE_CHAIN))
    assert (requant, method) == (True, False)
    assert reasons["expected_m"] == (
        "sglang.srt.layers.moe.cutlass_w4a8_moe cannot be imported: ImportError: [sgl_kernel] CRITICAL: Could not load "
        "any common_ops library! (ImportError: libcuda.so.1: cannot open shared object file)"
    )
    assert reasons["gemm"] == "needs expected_m, which is standing down"
    assert len(done.lines("expected_m stands down")) == 1


def test_disable_leaves_the_installed_engine_untouched(sgl_kernel_stub):
    code = _load(
        f"""
imported = sorted(m for m in sys.modules if m.startswith("sglang_w4afp8.kernels"))
hooks = [target for target in HookRegistry._hooks if "w4a" in target or "moe" in target]
result = [imported, hooks, {OURS}, lifecycle.report().disabled]
""",
        before="import sglang.srt.layers.moe.cutlass_w4a8_moe",
    )
    done = run_script(code, [sgl_kernel_stub], SGLANG_W4AFP8_DISABLE="1", SGLANG_W4AFP8_STRICT="1")
    assert done.result == [[], [], [False, False, False], True]
    (line,) = done.lines("sglang-w4afp8 0.")
    assert line.endswith("disabled by SGLANG_W4AFP8_DISABLE, the engine is untouched")


def test_strict_server_refuses_to_start(tmp_path, sgl_kernel_stub):
    """The engine's own launcher, with the requant's argument renamed: the loader must not swallow the refusal."""
    source = (engine_root() / NEW_KERNELS).read_text()
    head, name, tail = source.partition("def fp8_per_token_to_per_tensor_quant_triton(")
    changed = head + name + tail.replace("output_scale: torch.Tensor", "out_scale: torch.Tensor", 1)
    engine = overlay(tmp_path / "engine", {NEW_KERNELS: changed})
    launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(tmp_path / "no-such-model")]
    done = run_command(launch, [engine, sgl_kernel_stub], SGLANG_W4AFP8_STRICT="1")
    assert done.status == 1
    assert done.stderr.rstrip().splitlines()[-1] == (
        "sglang-w4afp8: refusing to start: not every selected patch is live: requant: "
        f"{NEW_MODULE}.fp8_per_token_to_per_tensor_quant_triton: expected ({REQUANT.replace('None', '...')}) or "
        "(x, x_scale, masked_m, output_scale, output), found (x, x_scale, masked_m, out_scale, output, "
        "expected_rows=...); problem_sizes: needs requant, which is standing down"
    )


def test_doctor_on_the_installed_engine(sgl_kernel_stub):
    doctor = [sys.executable, "-m", "sglang_w4afp8.cli", "doctor"]
    done = run_command(doctor, [sgl_kernel_stub], SGLANG_W4AFP8_PATCHES="requant,silu")
    assert done.status == 0, done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    for row in (["requant", "active"], ["silu", "active"], ["expected_m", "not", "selected"]):
        assert row in rows
    assert ["SGLANG_W4AFP8_PATCHES", "requant,silu", "set"] in rows
    assert {"sglang", "torch", "triton", "sgl_kernel", "deep_ep", "GPU"} <= {row[0] for row in rows if len(row) > 1}


# --- trees of the test's own making ---


def test_entry_point_is_found():
    code = """
    from importlib.metadata import entry_points
    (point,) = [p for p in entry_points(group="sglang.srt.plugins") if p.name == "w4afp8"]
    result = [point.value, point.load().__name__]
    """
    assert run_script(code).result == ["sglang_w4afp8.plugin:activate", "activate"]


def test_old_layout_is_patched(fake_engine):
    fake_engine.version = "0.5.15.post1"
    fake_engine.old_layout()
    done = fake_engine.run(_load(f"result = [{OURS}, list(lifecycle.live_patches())]", kernels=OLD_MODULE))
    assert done.result == [[True, True, True], EVERY_PATCH]


def test_doctor_says_when_the_engine_skips_the_plugin(fake_engine):
    doctor = [sys.executable, "-m", "sglang_w4afp8.cli", "doctor"]
    done = run_command(doctor, [fake_engine.build()], SGLANG_PLUGINS="other")
    assert done.status == 1
    assert done.stdout.splitlines()[-1] == "WRONG: SGLANG_PLUGINS=other excludes this plugin: add w4afp8 or unset it"


def test_doctor_fails_on_a_patch_that_stands_down(fake_engine):
    fake_engine.version = "0.5.24"
    doctor = [sys.executable, "-m", "sglang_w4afp8.cli", "doctor"]
    done = run_command(doctor, [fake_engine.build()], SGLANG_PLUGINS="w4afp8", SGLANG_W4AFP8_STRICT="1")
    assert done.status == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG: ")]
    assert [line.split()[1] for line in wrong] == EVERY_PATCH
    assert "a server in this environment does not start: sglang-w4afp8: refusing to start: " in done.stdout


def test_selection_by_name(fake_engine):
    done = fake_engine.run(_load(f"result = [{OURS}, states()]"), SGLANG_W4AFP8_PATCHES="silu,requant")
    assert done.result == [
        [True, False, False],
        {name: "active" if name in ("requant", "silu") else "not selected" for name in EVERY_PATCH},
    ]
    others = [name for name in EVERY_PATCH if name not in ("requant", "silu")]
    assert len(done.lines(f"active: requant, silu; not selected: {', '.join(others)}")) == 1
    assert not done.lines("stands down")


@pytest.mark.parametrize(
    ("switch", "value", "reason"),
    [
        ("PATCHES", "requent", "SGLANG_W4AFP8_PATCHES: no patch is named requent; there are requant, expected_m, silu"),
        ("PATCHES", "gemm,requant", "SGLANG_W4AFP8_PATCHES: gemm does nothing without expected_m: add it"),
        ("STRICT", "maybe", "SGLANG_W4AFP8_STRICT: is 'maybe', must be one of 1, true, yes, 0, false, no"),
    ],
)
def test_switch_that_cannot_be_followed_refuses_even_without_strict(fake_engine, switch, value, reason):
    done = fake_engine.run(_load("result = None"), **{f"SGLANG_W4AFP8_{switch}": value})
    assert done.status == 1
    assert f"sglang-w4afp8: refusing to start: {reason}" in done.stderr


def test_misspelt_switch_warns_and_strict_refuses(fake_engine):
    environ = {"SGLANG_W4AFP8_PATCH": "requant"}
    done = fake_engine.run(_load("result = list(lifecycle.live_patches())"), **environ)
    assert done.result == EVERY_PATCH
    assert len(done.lines("ignored: SGLANG_W4AFP8_PATCH: no such switch, there are SGLANG_W4AFP8_DISABLE, ")) == 1
    fake_engine.folder = fake_engine.folder / "again"
    done = fake_engine.run("result = 1\n" + _load(""), SGLANG_W4AFP8_STRICT="1", **environ)
    assert done.status == 1 and "refusing to start: SGLANG_W4AFP8_PATCH: no such switch" in done.stderr


def test_moved_target_stands_down_alone(fake_engine):
    """The whole patch of which one target is gone: its other target keeps the engine's function."""
    fake_engine.files[METHOD_FILE] = fake_engine.files[METHOD_FILE].replace("apply_deepep_ll", "apply_low_latency")
    done = fake_engine.run(_load("result = [states(), ours(REQUANT), ours(CHAIN), sorted(HookRegistry._hooks)]"))
    states, requant, chain, hooks = done.result
    assert {name for name, state in states.items() if state == "active"} == {"requant", "silu"} | OF_THE_METHOD
    assert (requant, chain) == (True, False)
    assert not [target for target in hooks if "cutlass_w4a8" in target]
    (line,) = done.lines("expected_m stands down:")
    assert "W4AFp8MoEMethod.apply_deepep_ll: expected a function of that name, found none in the file" in line
    assert len(done.lines("active: requant, silu, ", "; standing down: expected_m (")) == 1


def test_resigned_target_stands_down_and_strict_refuses(fake_engine):
    fake_engine.files[CHAIN_FILE] = fake_engine.files[CHAIN_FILE].replace(CHAIN, f"{CHAIN}, stream=None")
    done = fake_engine.run(_load(f"result = {OURS}"))
    assert done.result == [True, False, False]
    (line,) = done.lines("expected_m stands down:")
    assert (
        "expected (a_states, " in line and "found (a_states, " in line and line.endswith("expected_m=..., stream=...)")
    )
    fake_engine.folder = fake_engine.folder / "again"
    done = fake_engine.run("result = 1\n" + _load(""), SGLANG_W4AFP8_STRICT="yes")
    assert done.status == 1 and "refusing to start: not every selected patch is live: expected_m: " in done.stderr


def _loads_sgl_kernel(fake_engine):
    """As the real chain does where there is a GPU."""
    fake_engine.files[CHAIN_FILE] = f"from sgl_kernel import cutlass_w4a8_moe_mm\n{fake_engine.files[CHAIN_FILE]}"


def test_function_with_other_code_is_patched_with_a_warning_and_strict_refuses(fake_engine):
    """A vendor's build: names and arguments of the release that it calls itself after, other code in the functions."""
    fake_engine.published = False
    fake_engine.version = "0.5.23+vendor"
    doctor = [sys.executable, "-m", "sglang_w4afp8.cli", "doctor"]
    done = fake_engine.run(_load("result = list(lifecycle.live_patches())"))
    assert done.result == EVERY_PATCH
    (line,) = done.lines("silu is applied to other code than it was read for: ")
    assert (
        f"{NEW_MODULE}.silu_and_mul_masked_post_per_tensor_quant_fwd: its code is not that of sglang 0.5.23; "
        "SGLANG_W4AFP8_STRICT=1 refuses to start with it"
    ) in line
    done = run_command(doctor, [fake_engine.folder], SGLANG_PLUGINS="w4afp8")
    assert "silu active in place of code that is not the published one" in " ".join(done.stdout.split())
    fake_engine.folder = fake_engine.folder / "again"
    done = fake_engine.run("result = 1\n" + _load(""), SGLANG_W4AFP8_STRICT="1")
    assert done.status == 1
    assert f"requant: {NEW_MODULE}.fp8_per_token_to_per_tensor_quant_triton: its code is not that of" in done.stderr


def test_gemm_that_takes_the_expected_rows_is_said_to_get_them(fake_engine, tmp_path):
    _loads_sgl_kernel(fake_engine)
    kernel = sgl_kernel_with(tmp_path / "kernel", f"{GEMM}, expected_m=None")
    done = fake_engine.run(_load("result = list(lifecycle.live_patches())"), [kernel], SGLANG_W4AFP8_STRICT="1")
    assert done.result == EVERY_PATCH
    assert len(done.lines("active: requant, ", ", gemm (passes the expected rows on as expected_m), input_scales")) == 1
    doctor = [sys.executable, "-m", "sglang_w4afp8.cli", "doctor"]
    done = run_command(doctor, [fake_engine.folder, kernel], SGLANG_PLUGINS="w4afp8")
    assert done.status == 0, done.stdout
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "gemm active passes the expected rows on as expected_m" in rows


def test_gemm_with_arguments_that_nobody_knows_stands_down_alone(fake_engine, tmp_path):
    _loads_sgl_kernel(fake_engine)
    kernel = sgl_kernel_with(tmp_path / "kernel", f"{GEMM}, tile=None")
    done = fake_engine.run(_load("result = [states(), reasons()]"), [kernel])
    reason = "cutlass_w4a8_moe_mm takes unknown tile"
    assert done.result == [with_states("active", gemm="standing down"), {"gemm": reason}]
    assert len(done.lines(f"gemm stands down: {reason}")) == 1
    assert len(done.lines("active: requant, ", f"; standing down: gemm ({reason})")) == 1
    doctor = [sys.executable, "-m", "sglang_w4afp8.cli", "doctor"]
    done = run_command(doctor, [fake_engine.folder, kernel], SGLANG_PLUGINS="w4afp8", SGLANG_W4AFP8_STRICT="1")
    assert done.status == 1
    assert f"WRONG: gemm stands down: {reason}" in done.stdout.splitlines()
    assert "refusing to start: not every selected patch is live: gemm: " in done.stdout


def test_what_the_engine_did_not_load_is_not_loaded_for_a_look(fake_engine, sgl_kernel_broken):
    code = "import torch\nresult = [states()['gemm'], 'sgl_kernel' in sys.modules, torch.cuda.is_initialized()]"
    done = fake_engine.run(_load(code), [sgl_kernel_broken])
    assert done.result == ["active", False, False]


def test_fault_of_ours_in_a_look_stands_that_patch_down(fake_engine):
    before = """
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
def broken():
    raise KeyError("look")
w4a8_gemm.look_at_engine_kernel = broken
"""
    done = fake_engine.run(_load("result = [states(), reasons()['gemm']]", before))
    states, reason = done.result
    assert states == with_states("active", gemm="standing down")
    assert reason.endswith("w4a8_gemm:look_at_engine_kernel failed: KeyError: 'look'")


def test_unknown_engine_is_left_alone_unless_allowed(fake_engine):
    fake_engine.version = "0.5.24"
    code = _load(f"result = [{OURS}, states(), sorted(HookRegistry._hooks)]")
    done = fake_engine.run(code)
    assert done.result == [[False, False, False], dict.fromkeys(EVERY_PATCH, "standing down"), []]
    (line,) = done.lines("EVERY PATCH STANDS DOWN")
    assert "sglang 0.5.24 is unknown to this release, which knows 0.5.12 - 0.5.23" in line
    assert "SGLANG_W4AFP8_ALLOW_UNKNOWN_ENGINE=1" in line
    assert not done.lines("requant stands down")

    folder = fake_engine.folder
    fake_engine.folder = folder / "allowed"
    allowed = fake_engine.run(code, SGLANG_W4AFP8_ALLOW_UNKNOWN_ENGINE="1", SGLANG_W4AFP8_STRICT="1")
    assert allowed.result[1] == dict.fromkeys(EVERY_PATCH, "active")

    fake_engine.folder = folder / "drifted"
    fake_engine.files[NEW_KERNELS] = fake_engine.files[NEW_KERNELS].replace("output_scale", "scale")
    done = fake_engine.run(code, SGLANG_W4AFP8_ALLOW_UNKNOWN_ENGINE="1")
    assert done.result == [[False, False, False], dict.fromkeys(EVERY_PATCH, "standing down"), []]
    assert len(done.lines("EVERY PATCH STANDS DOWN", "not every signature matches", "masked_m, scale, output")) == 1


RAY_ACTOR = "srt/ray/scheduler_actor.py"


def test_schedulers_that_load_no_plugins_are_said_to_run_unpatched_and_strict_refuses(fake_engine):
    on_ray = "import sys\nsys.argv = ['launch_server', '--use-ray']\n"
    code = on_ray + _load(f"result = {OURS}")
    folder = fake_engine.folder
    fake_engine.folder = folder / "no plugins"
    fake_engine.files[RAY_ACTOR] = "class SchedulerActor: ...\n"
    (line,) = fake_engine.run(code).lines("THE SCHEDULERS WILL RUN UNPATCHED", "--use-ray", "fork")
    assert line.endswith(f"; missing there: {', '.join(EVERY_PATCH)}")
    fake_engine.folder = folder / "strict"
    refused = fake_engine.run(code, SGLANG_W4AFP8_STRICT="1")
    assert refused.status == 1 and refused.lines("refusing to start: THE SCHEDULERS WILL RUN UNPATCHED")
    fake_engine.folder = folder / "without Ray"
    assert fake_engine.run(_load(f"result = {OURS}"), SGLANG_W4AFP8_STRICT="1").result == [True, True, True]
    fake_engine.folder = folder / "mended"
    fake_engine.files[RAY_ACTOR] = "from sglang.srt.plugins import load_plugins\nload_plugins()\n"
    assert fake_engine.run(code, SGLANG_W4AFP8_STRICT="1").result == [True, True, True]


def test_the_installed_engine_loads_no_plugins_in_its_ray_actors():
    roots = guard.engine_roots()
    assert guard.why_schedulers_load_no_plugins(roots, ["launch_server"], ["sglang.srt.ray.engine"])
    assert guard.why_schedulers_load_no_plugins(roots, ["launch_server", "--use-ray"], [])
    assert guard.why_schedulers_load_no_plugins(roots, ["launch_server"], []) is None


def test_the_installed_engine_loads_no_plugins_where_it_measures_a_batch_without_a_server():
    found = [
        guard.module_file(f"sglang.{name}", guard.engine_roots()) for name in ("benchmark.one_batch", "bench_one_batch")
    ]
    assert (sources := [path.read_text() for path in found if path])
    assert not [source for source in sources if "load_plugins" in source]


def test_fork_that_carries_a_patch_keeps_its_own_and_strict_agrees(fake_engine):
    for name in (CHAIN_FILE, METHOD_FILE):
        fake_engine.files[name] += "_SGLANG_W4AFP8_IN_TREE = '0.9.1'\n"
    done = fake_engine.run(_load(f"result = [{OURS}, states()]"), SGLANG_W4AFP8_STRICT="1")
    ours, states = done.result
    assert ours == [True, False, False]
    steps = OF_THE_CHAIN - {"expected_m"}
    assert states == with_states("active", expected_m="in tree", **all_in("not in the tree", steps))
    (line,) = done.lines("standing down for")
    assert line.endswith(
        "standing down for expected_m: already in tree, version 0.9.1; "
        "the tree does not carry problem_sizes, gemm, two_kernels, bf16_dispatch"
    )


@pytest.mark.parametrize(("carries", "lacks"), [(CHAIN_FILE, METHOD_FILE), (METHOD_FILE, CHAIN_FILE)])
def test_half_of_a_patch_in_tree_is_neither_kept_for_whole_nor_patched(fake_engine, carries, lacks):
    """As after a merge that took the engine's side of one file."""
    fake_engine.files[carries] += "_SGLANG_W4AFP8_IN_TREE = '0.9.1'\n"
    modules = [f"sglang.{name.removesuffix('.py').replace('/', '.')}" for name in (carries, lacks)]
    reason = f"half in tree: version 0.9.1 in {modules[0]}, but not in {modules[1]}; run `sglang-w4afp8 fork TREE`"
    done = fake_engine.run(_load(f"result = [{OURS}, states()]"))
    assert done.result == [[True, False, False], with_states("active", **all_in("standing down", OF_THE_CHAIN))]
    assert len(done.lines(f"expected_m stands down: {reason}")) == 1

    fake_engine.folder = fake_engine.folder / "strict"
    done = fake_engine.run(_load("result = None"), SGLANG_W4AFP8_STRICT="1")
    assert done.status == 1
    assert len(done.lines("refusing to start", f"expected_m: {reason}")) == 1


def _other_plugin(kind: str, target: str, hook: str) -> dict[str, str]:
    """A distribution with a plugin of its own; its name makes the loader run it after ours or before."""
    return {
        "other_plugin.py": (
            "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
            f"def hook(*args, **kwargs):\n    return {hook}\n"
            f"def activate():\n    HookRegistry.register({target!r}, hook, HookType.{kind})\n"
        ),
        "other_plugin-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n",
        "other_plugin-1.0.dist-info/entry_points.txt": "[sglang.srt.plugins]\nother = other_plugin:activate\n",
    }


CHAIN_TARGET = "sglang.srt.layers.moe.cutlass_w4a8_moe.cutlass_w4a8_moe_deepep_ll"


def test_around_hook_of_another_plugin_coexists(fake_engine, tmp_path):
    other = write(tmp_path / "other", _other_plugin("AROUND", CHAIN_TARGET, '["around", args[0].__code__.co_freevars]'))
    code = _load(
        "import sglang.srt.layers.moe.cutlass_w4a8_moe as m\n"
        f"result = [{OURS}, m.cutlass_w4a8_moe_deepep_ll(1), list(lifecycle.live_patches())]"
    )
    done = fake_engine.run(code, [other], SGLANG_PLUGINS="w4afp8,other", SGLANG_W4AFP8_STRICT="1")
    # The hook sees the engine's wrapper of ours as the original.
    assert done.result == [[True, True, True], ["around", ["hook"]], EVERY_PATCH]


def test_replacement_by_a_later_plugin_is_seen_and_the_whole_patch_given_back(fake_engine):
    """Theirs wins on one target of the patch: its other target must not stay ours, or it would call theirs."""
    before = f"""
from sglang_w4afp8 import plugin
load = plugin.activate
def activate_then_other():
    load()
    HookRegistry.register({CHAIN_TARGET!r}, lambda *a, **k: "theirs", HookType.REPLACE)
    HookRegistry.register({CHAIN_TARGET!r}, lambda original, *a, **k: ["around", original(*a, **k)], HookType.AROUND)
plugin.activate = activate_then_other
"""
    code = _load(
        "from sglang.srt.layers.quantization.w4afp8 import W4AFp8MoEMethod\n"
        "import sglang.srt.layers.moe.cutlass_w4a8_moe as m\n"
        f"result = [{OURS}, states(), reasons()['expected_m'], m.cutlass_w4a8_moe_deepep_ll(),"
        " W4AFp8MoEMethod().apply_deepep_ll(1, 2), W4AFp8MoEMethod.apply_deepep_ll.__closure__ is None]",
        before,
    )
    done = fake_engine.run(code)
    ours, states, reason, chain, method, bare = done.result
    assert ours == [True, False, False]
    assert states == with_states("active", **all_in("standing down", OF_THE_CHAIN))
    assert reason == f"{CHAIN_TARGET}: another plugin's hook shadows ours"
    assert (chain, method, bare) == (["around", "theirs"], "engine method", True)
    assert len(done.lines("expected_m stands down:")) == 1

    fake_engine.folder = fake_engine.folder / "again"
    done = fake_engine.run("result = 1\n" + _load("", before), SGLANG_W4AFP8_STRICT="1")
    assert done.status == 1 and "another plugin's hook shadows ours" in done.stderr


def test_apply_hooks_wrapped_by_another_plugin_is_verified_once(fake_engine):
    before = """
from sglang_w4afp8 import plugin
load = plugin.activate
calls = []
def activate_then_wrap():
    load()
    inner = HookRegistry.apply_hooks
    def outer():
        calls.append(len(HookRegistry._patched))
        inner()
    HookRegistry.apply_hooks = outer
plugin.activate = activate_then_wrap
"""
    code = "HookRegistry.apply_hooks()\nresult = [calls, list(lifecycle.live_patches())]"
    done = fake_engine.run(_load(code, before))
    assert done.result == [[0, 7], EVERY_PATCH]
    assert len(done.lines("sglang-w4afp8 0.", "active: ")) == 1


def test_stale_binding_is_not_called_live(fake_engine):
    """A second name in the target's own module: the engine rebinds names in other modules only."""
    fake_engine.files[NEW_KERNELS] += "requant_alias = fp8_per_token_to_per_tensor_quant_triton\n"
    done = fake_engine.run(_load(f"result = [{OURS}, reasons()['requant'], list(lifecycle.live_patches())]"))
    ours, reason, live = done.result
    assert ours == [False, True, True]
    assert reason.endswith(f"still unpatched in {NEW_MODULE}.requant_alias")
    assert live == [name for name in EVERY_PATCH if name not in ("requant", "problem_sizes")]


def test_hooks_applied_before_us_are_not_called_live(fake_engine):
    before = f"""
HookRegistry.register({CHAIN_TARGET!r}, lambda result, *a, **k: result, HookType.AFTER)
HookRegistry.apply_hooks()
"""
    done = fake_engine.run(_load(f"result = [{OURS}, reasons()['expected_m']]", before))
    ours, reason = done.result
    assert ours == [True, False, False]
    assert reason == f"{CHAIN_TARGET}: the engine has already applied its hooks, so ours would never be"


FAULTS = {
    "a module of ours": ("requant", "import sys; sys.modules['sglang_w4afp8.kernels.ops.moe.ep_moe_kernels'] = None"),
    "the guard": (
        None,
        "import sys, sglang_w4afp8\n"
        "sys.modules['sglang_w4afp8.guard'] = None\n"
        "vars(sglang_w4afp8).pop('guard', None)\n",  # the fake engine has loaded it already
    ),
    "registering": (
        None,
        "def broken(target, *a, **k):\n"
        "    HookRegistry._hooks[target].append((HookType.REPLACE, a[0], None))\n"
        "    if 'cutlass' in target:\n"
        "        raise RuntimeError('registry is full')\n"
        "HookRegistry.register = broken\n",
    ),
    "verifying": (None, "from sglang_w4afp8 import plugin\nplugin._holders = None\n"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_ours_leaves_the_engine_alone_and_strict_refuses(fake_engine, fault):
    patch, before = FAULTS[fault]
    code = f"""
for name in [n for n, module in sys.modules.items() if module is None and n.startswith("sglang_w4afp8.")]:
    del sys.modules[name]  # so that the question below can be asked
result = [{OURS}, list(lifecycle.live_patches()), lifecycle.report().error]
"""
    done = fake_engine.run(_load(code, before))
    ours, live, error = done.result
    assert ours == [False, False, False]
    assert live == []
    if patch:
        assert len(done.lines("requant stands down: our own ", "cannot be imported: ModuleNotFoundError")) == 1
    else:
        assert error
        assert len(done.lines("activation failed, the engine runs unpatched: " + error)) == 1
    fake_engine.folder = fake_engine.folder / "again"
    done = fake_engine.run("result = 1\n" + _load("", before), SGLANG_W4AFP8_STRICT="1")
    assert done.status == 1 and "sglang-w4afp8: refusing to start: " in done.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
