"""Entry point of the plugin (group ``sglang.srt.plugins``, name ``w4afp8``) and the ledger of its patches.

The engine's loader logs and swallows an ordinary exception, both of importing this module and of :func:`activate`, and
then serves unpatched. So the top level here imports the standard library only, and ``activate`` turns whatever must
stop the server into ``SystemExit``, which passes the loader.

Order of events in a process: the loader runs ``activate`` of every plugin, then applies all hooks. ``activate`` checks
and registers; what is live is known only after hooks are applied, so it also hangs :class:`_Verification` on that call.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_w4afp8.guard import TargetCheck
    from sglang_w4afp8.lifecycle import ActivationReport, PatchStatus
    from sglang_w4afp8.switches import Settings

# The engine versions that were read, inclusive, by release numbers: 0.5.15.post1 counts as 0.5.15.
ENGINES = ("0.5.12", "0.5.23")


@dataclass(frozen=True)
class Home:
    """An engine module that a target lives in, and the engine versions (inclusive) in which it does."""

    module: str
    first: str
    last: str


@dataclass(frozen=True)
class Target:
    """One engine function that a patch stands in for.

    Attributes:
        attribute: ``function`` or ``Class.method`` inside the module. Host code only: a hook on a jitted object would
            break it.
        homes: where it lives, newest first.
        signatures: the argument lists it is known with; default values do not matter, their presence does.
        replacement: ``module:function`` of ours, which accepts every call that the signatures allow.
        in_tree: whether ``sglang-w4afp8 fork`` writes it into an engine's own tree; ours then stands down where it did.
        kind: "replace", or "around": ours then takes the engine's function as its first argument and calls it.
    """

    attribute: str
    homes: tuple[Home, ...]
    signatures: tuple[str, ...]
    replacement: str
    kind: str = "replace"
    in_tree: bool = False


@dataclass(frozen=True)
class Patch:
    """One entry of the ledger.

    Attributes:
        name: what ``SGLANG_W4AFP8_PATCHES`` picks and ``lifecycle.is_live`` answers for.
        targets: what it replaces or wraps, all or nothing; empty for a step inside another patch's function.
        what, why: what it does to the engine and the fault or cost that it removes.
        upstream: pull request of the engine with the same aim, or None.
        removable: when this entry can go.
        requires: patches without which this one does nothing.
        engines: first and last engine version that need it.
        look: ``module:function`` of ours, called at activation when all that it needs is active, for what no target
            shows. Returns why the patch must stand down and what is particular about it here, each empty if nothing.
    """

    name: str
    targets: tuple[Target, ...]
    what: str
    why: str
    upstream: str | None
    removable: str
    requires: tuple[str, ...] = ()
    engines: tuple[str, str] = ENGINES
    look: str = ""


_TRITON_KERNELS = (
    Home("sglang.kernels.ops.moe.ep_moe_kernels", "0.5.16", "0.5.23"),
    Home("sglang.srt.layers.moe.ep_moe.kernels", "0.5.12", "0.5.15"),
)
_OUR_KERNELS = "sglang_w4afp8.kernels.ops.moe.ep_moe_kernels"
_METHOD = (Home("sglang.srt.layers.quantization.w4afp8", *ENGINES),)
_OUR_METHOD = "sglang_w4afp8.srt.layers.quantization.w4afp8"
_CHAIN_ARGUMENTS = (
    "a_states, a_scales, w1_q, w2_q, w1_scale, w2_scale, topk_ids_, masked_m, a_strides1, b_strides1, c_strides1, "
    "a_strides2, b_strides2, c_strides2, s_strides13, s_strides2, expert_offsets, problem_sizes1, problem_sizes2, "
    "a1_scale=None, a2_scale=None"
)

LEDGER: tuple[Patch, ...] = (
    Patch(
        name="requant",
        targets=(
            Target(
                attribute="fp8_per_token_to_per_tensor_quant_triton",
                homes=_TRITON_KERNELS,
                signatures=(
                    "x, x_scale, masked_m, output_scale, output, expected_rows=None",  # 0.5.19 - 0.5.23
                    "x, x_scale, masked_m, output_scale, output",  # 0.5.12 - 0.5.18
                ),
                replacement=f"{_OUR_KERNELS}:fp8_per_token_to_per_tensor_quant_triton",
                in_tree=True,
            ),
        ),
        what="Replaces the kernel that turns DeepEP's per-group fp8 payload into per-tensor fp8.",
        why="Up to 0.5.18 it launches 32 programs per expert whatever the rows (up to 0.5.17 it also refuses K that is "
        "not a multiple of 1024); from 0.5.19 it still pays for its overflow phase in every program. It reads packed "
        "UE8M0 scales (int32) as if they were numbers.",
        upstream="https://github.com/sgl-project/sglang/pull/35760",
        removable="when the oldest supported engine's kernel is as fast in benchmark/results/h200/requant.json",
    ),
    Patch(
        name="expected_m",
        targets=(
            Target(
                attribute="W4AFp8MoEMethod.apply_deepep_ll",
                homes=_METHOD,
                signatures=("self, layer, dispatch_output",),
                replacement=f"{_OUR_METHOD}:apply_deepep_ll",
                in_tree=True,
            ),
            Target(
                attribute="cutlass_w4a8_moe_deepep_ll",
                homes=(Home("sglang.srt.layers.moe.cutlass_w4a8_moe", *ENGINES),),
                signatures=(
                    f"{_CHAIN_ARGUMENTS}, expected_m=None",  # 0.5.19 - 0.5.23
                    _CHAIN_ARGUMENTS,  # 0.5.12 - 0.5.18
                ),
                replacement="sglang_w4afp8.srt.layers.moe.cutlass_w4a8_moe:cutlass_w4a8_moe_deepep_ll",
                in_tree=True,
            ),
        ),
        what="Replaces the low-latency chain and its caller, so that the dispatcher's row estimate reaches every step.",
        why="Up to 0.5.18 the engine drops expected_m on the way; none passes it to the SiLU kernel and the GEMMs.",
        upstream="https://github.com/sgl-project/sglang/pull/35760",
        removable="when every supported engine passes expected_m to all of its low-latency steps",
    ),
    Patch(
        name="silu",
        targets=(
            Target(
                attribute="silu_and_mul_masked_post_per_tensor_quant_fwd",
                homes=_TRITON_KERNELS,
                signatures=("input, output, masked_m, scale",),
                replacement=f"{_OUR_KERNELS}:silu_and_mul_masked_post_per_tensor_quant_fwd",
                in_tree=True,
            ),
        ),
        what="Replaces the masked SiLU-and-multiply kernel that quantises the second GEMM's input.",
        why="It launches 32 programs per expert and column block whatever the rows, reads only the first of per-expert "
        "scales, and addresses a buffer past 2^31 elements wrongly.",
        upstream=None,
        removable="when the oldest supported engine launches by live rows and addresses in 64 bits",
    ),
    Patch(
        name="problem_sizes",
        targets=(),
        what="Lets our requant's launch write the problem-size tables of both grouped GEMMs.",
        why="The engine starts a kernel of its own in every layer, only to write two small tables.",
        upstream=None,
        removable="with the patches it needs",
        requires=("requant", "expected_m"),
    ),
    Patch(
        name="gemm",
        targets=(),
        what="Hands the grouped GEMMs 2-D views and a tile bucket chosen by expected_m. A kernel that takes the expected "
        "rows itself is given them; for one with other arguments than are known this stands down.",
        why="The compiled dispatch reads its sizes from 3-D tensors, so no tuned branch is reached, and where M is not "
        "a multiple of 512 it picks a tile whose scale layout is not the weights': wrong results.",
        upstream=None,
        removable="when the oldest supported sglang-kernel derives m, n and k from the problem, not from a.size()",
        requires=("expected_m",),
        look="sglang_w4afp8.srt.layers.moe.w4a8_gemm:look_at_engine_kernel",
    ),
    Patch(
        name="input_scales",
        targets=(
            Target(
                attribute="W4AFp8MoEMethod.process_weights_after_loading",
                homes=_METHOD,
                signatures=("self, layer",),
                replacement=f"{_OUR_METHOD}:process_weights_after_loading",
                kind="around",
            ),
        ),
        what="Looks at a layer's two input scales when its weights are processed, and refuses one that cannot be divided "
        "by.",
        why="A scale that is zero, negative, NaN, infinite or denormal is accepted, and every decoded token is NaN, zero "
        "or saturated.",
        upstream=None,
        removable="when every supported engine checks the scales that it loads",
    ),
    Patch(
        name="eplb_scales",
        targets=(),
        what="With --enable-eplb, gives a layer's input scales the largest value of any rank when weights are processed.",
        why="Each rank takes the largest scale of its own experts; an expert that load balancing moves brings its weights "
        "and not its scale, and saturates.",
        upstream=None,
        removable="when every supported engine shares input scales over the ranks, or moves them with their experts",
        requires=("input_scales",),
    ),
    Patch(
        name="two_kernels",
        targets=(),
        what="Where a measured table shows it to be faster, regroups a layer's weights in place when they are processed; its "
        "low-latency calls are then two Triton kernels, and its prefill's grouped GEMMs are answered from the same weights. "
        "SGLANG_W4AFP8_BACKEND=cutlass turns it off, triton takes every supported layer.",
        why="The chain writes and reads back a requantised payload and a bf16 product, rounds the activation twice, and its "
        "GEMMs stream weights well below the speed of a copy where rows are few.",
        upstream=None,
        removable="when every supported engine has a W4A8 grouped GEMM that takes DeepEP's payload as it is",
        requires=("expected_m", "input_scales"),
    ),
    Patch(
        name="bf16_dispatch",
        targets=(),
        what="Serves a BF16 low-latency payload: our requant quantises it straight to per-tensor fp8.",
        why="The engine fails at graph capture (--deepep-dispatcher-output-dtype bf16, or a DeepEP build that sends BF16).",
        upstream=None,
        removable="when every supported engine decodes from a BF16 dispatch",
        requires=("expected_m",),
    ),
    Patch(
        name="normal_fp8",
        targets=(
            Target(
                attribute="W4AFp8MoEMethod.apply_deepep_normal",
                homes=_METHOD,
                signatures=("self, layer, dispatch_output",),
                replacement=f"{_OUR_METHOD}:apply_deepep_normal",
                kind="around",
            ),
        ),
        what="Turns an fp8 payload of the normal (prefill) dispatch into BF16, scales applied, before the engine's path.",
        why="Up to 0.5.17 the engine drops the scales, computes on raw codes, and a rank without tokens hands fp8 to a "
        "BF16-only combine; from 0.5.18 it refuses the payload.",
        upstream=None,
        removable="when every supported engine applies the scales of a normal dispatch",
    ),
    Patch(
        name="dispatch_cap",
        targets=(
            Target(
                attribute="W4AFp8MoEMethod.create_weights",
                homes=_METHOD,
                signatures=(
                    "self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, "
                    "**extra_weight_attrs",
                ),
                replacement=f"{_OUR_METHOD}:create_weights",
                kind="around",
            ),
        ),
        what="Compares SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK with what the server is going to dispatch, and says "
        "which number to raise to what. Also warns where the engine's decode CUDA graphs drop tokens.",
        why="More tokens than the cap fail deep inside DeepEP, after minutes of loading or in the middle of serving; draft "
        "tokens multiply them. Up to 0.5.20, with one expert-parallel rank, decode graphs of several sizes give routed experts "
        "to the first tokens of a batch only, in silence.",
        upstream=None,
        removable="when every supported engine compares the two at start-up, and none is older than 0.5.21",
    ),
)


class _Refusal(Exception):
    """The server must not start, in strict mode or not."""


def activate() -> None:
    """Check the engine, register the hooks of every selected patch, and have the outcome verified.

    Calling it again changes nothing. Without strict mode a fault of ours leaves the engine as it is and says so.

    Raises:
        SystemExit: a switch cannot be read, or strict mode is on and a selected patch cannot be live.
    """
    strict = True  # until the switches are read: if even that fails, nobody knows what was asked for
    try:
        from sglang_w4afp8 import lifecycle, switches

        if lifecycle.report() is not None:
            return
        try:
            settings = switches.read()
        except switches.SwitchError as error:
            raise _Refusal(str(error)) from error
        strict = settings.strict
        _activate(settings)
    except _Refusal as refusal:
        raise SystemExit(f"sglang-w4afp8: refusing to start: {refusal}") from refusal
    except Exception as error:
        if strict:
            raise SystemExit(f"sglang-w4afp8: refusing to start: activation failed: {essence(error)}") from error
        _stand_down_on_own_fault(error)


def _stand_down_on_own_fault(error: Exception) -> None:
    logging.getLogger("sglang_w4afp8").error(
        "sglang-w4afp8: activation failed, the engine runs unpatched: %s", essence(error), exc_info=error
    )
    try:
        from sglang_w4afp8 import __version__, lifecycle

        lifecycle.record(lifecycle.ActivationReport(__version__, error=essence(error)))
    except Exception:  # the fault may be in lifecycle itself; it has been logged
        return


def essence(error: BaseException) -> str:
    """One line for an exception whose text may be a page, as that of sgl_kernel without a driver is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    detail = next((line.lstrip("- ") for line in lines[1:] if re.match(r"- \w+(Error|Exception): ", line)), None)
    text = f"{type(error).__name__}: {lines[0]}" + (f" ({detail})" if detail else "")
    return text if len(text) <= 300 else text[:297] + "..."


def select(settings: Settings) -> tuple[str, ...]:
    """Names of the patches that the switches select, in ledger order.

    Raises:
        _Refusal: a name that is not in the ledger, or a patch picked without one that it needs.
    """
    from sglang_w4afp8 import switches

    if settings.patches is None:
        return tuple(patch.name for patch in LEDGER)
    variable = f"{switches.PREFIX}PATCHES"
    known = [patch.name for patch in LEDGER]
    wrong = [name for name in settings.patches if name not in known]
    if wrong:
        raise _Refusal(f"{variable}: no patch is named {', '.join(wrong)}; there are {', '.join(known)}")
    for patch in LEDGER:
        missing = [name for name in patch.requires if name not in settings.patches]
        if patch.name in settings.patches and missing:
            raise _Refusal(f"{variable}: {patch.name} does nothing without {', '.join(missing)}: add it")
    return tuple(name for name in known if name in settings.patches)


@dataclass(frozen=True)
class _Binding:
    """A target found in the running engine, and what we put in its place."""

    target: str  # the dotted path that the engine's registry takes
    original: Callable[..., Any]
    hook: Callable[..., Any]
    kind: str = "replace"


def _activate(settings: Settings) -> None:
    from sglang_w4afp8 import __version__, lifecycle, switches

    report = lifecycle.ActivationReport(__version__, strict=settings.strict)
    if settings.disable:
        lifecycle.record(replace(report, disabled=True))
        lifecycle.announce(
            logging.INFO, f"sglang-w4afp8 {__version__}: disabled by {switches.PREFIX}DISABLE, the engine is untouched"
        )
        return
    misspelt = switches.unknown()
    if misspelt:
        text = f"{', '.join(misspelt)}: no such switch, there are {', '.join(s.name for s in switches.SWITCHES)}"
        if settings.strict:
            raise _Refusal(text)
        lifecycle.announce(logging.WARNING, f"sglang-w4afp8: ignored: {text}")

    report = replace(report, engine_version=_engine_version())
    statuses, bindings = _plan(select(settings), settings, report.engine_version)
    report = replace(report, patches=tuple(statuses[patch.name] for patch in LEDGER))
    lifecycle.record(report)
    _refuse_if_strict(report)
    verification = _Verification(_registry(), report, bindings)
    try:
        for found in bindings.values():
            _register(verification.registry, found)
        verification.hang_on()
    except Exception:
        verification.withdraw(list(bindings))
        raise


def _registry() -> Any:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry


def _engine_version() -> str:
    from sglang.version import __version__

    return __version__


def _refuse_if_strict(report: ActivationReport) -> None:
    if report.strict and report.failures:
        reasons = "; ".join(f"{status.name}: {status.reason}" for status in report.failures)
        raise _Refusal(f"not every selected patch is live: {reasons}")


def _plan(
    selected: tuple[str, ...], settings: Settings, version: str
) -> tuple[dict[str, PatchStatus], dict[str, list[_Binding]]]:
    """Decide every patch before anything is registered. ACTIVE means: will be, if the engine applies its hooks."""
    from sglang_w4afp8 import guard, lifecycle, switches

    State, Status = lifecycle.State, lifecycle.PatchStatus
    known = guard.version_within(version, *ENGINES)
    checks = guard.check_tree(LEDGER, guard.engine_roots(), version)
    blocked = ""
    if not known:
        blocked = f"sglang {version} is unknown to this release, which knows {ENGINES[0]} - {ENGINES[1]}"
        drifted = [check.problem for name in selected for check in checks[name] if check.problem]
        if not settings.allow_unknown_engine:
            blocked += f"; {switches.PREFIX}ALLOW_UNKNOWN_ENGINE=1 patches it where every signature matches"
        elif drifted:
            blocked += f", and not every signature matches: {'; '.join(drifted)}"
        else:
            blocked = ""

    statuses: dict[str, PatchStatus] = {}
    bindings: dict[str, list[_Binding]] = {}
    for patch in LEDGER:
        problems = [check.problem for check in checks[patch.name] if check.problem]
        in_tree = [check.in_tree for check in checks[patch.name] if check.in_tree]
        half = _half_in_tree(patch, checks[patch.name])
        if patch.name not in selected:
            statuses[patch.name] = Status(patch.name, State.NOT_SELECTED)
        elif half:
            statuses[patch.name] = Status(patch.name, State.STANDING_DOWN, half)
        elif in_tree:
            statuses[patch.name] = Status(patch.name, State.IN_TREE, f"already in tree, version {in_tree[0]}")
        elif blocked:
            statuses[patch.name] = Status(patch.name, State.STANDING_DOWN, blocked)
        elif known and not guard.version_within(version, *patch.engines):
            reason = f"only sglang {patch.engines[0]} - {patch.engines[1]} needs it"
            statuses[patch.name] = Status(patch.name, State.NOT_NEEDED, reason)
        elif problems:
            statuses[patch.name] = Status(patch.name, State.STANDING_DOWN, "; ".join(problems))
        else:
            statuses[patch.name], bindings[patch.name] = _resolve(patch, [check.module for check in checks[patch.name]])
            changed = "; ".join(check.changed for check in checks[patch.name] if check.changed)
            if changed and statuses[patch.name].state is State.ACTIVE:
                statuses[patch.name] = _on_changed_code(statuses[patch.name], changed, settings)
    statuses = _follow_requirements(_look(_follow_requirements(statuses)))
    _announce_plan(statuses, blocked)
    return statuses, {name: found for name, found in bindings.items() if statuses[name].state is State.ACTIVE}


def _half_in_tree(patch: Patch, checks: list[TargetCheck]) -> str:
    """Why a patch is neither in the tree nor ours to apply, as after a merge that took the engine's side of one file."""
    carried = [check for check in checks if check.in_tree]
    lacking = [
        str(check.module or check.problem)
        for target, check in zip(patch.targets, checks, strict=True)
        if target.in_tree and not check.in_tree
    ]
    if not carried or not lacking:
        return ""
    return (
        f"half in tree: version {carried[0].in_tree} in {', '.join(str(check.module) for check in carried)}, but not in "
        f"{', '.join(lacking)}; run `sglang-w4afp8 fork TREE`"
    )


def _resolve(patch: Patch, modules: list[str | None]) -> tuple[PatchStatus, list[_Binding]]:
    """Import a checked patch's engine modules and our own functions."""
    from sglang_w4afp8 import lifecycle

    def stand_down(reason: str, needs_driver: bool = False) -> tuple[PatchStatus, list[_Binding]]:
        return lifecycle.PatchStatus(patch.name, lifecycle.State.STANDING_DOWN, reason, needs_driver), []

    bindings: list[_Binding] = []
    for target, module_name in zip(patch.targets, modules, strict=True):
        assert module_name is not None
        try:
            owner: Any = importlib.import_module(module_name)
        except Exception as error:
            needs_driver = any(name in str(error) for name in ("sgl_kernel", "libcuda"))
            return stand_down(f"{module_name} cannot be imported: {essence(error)}", needs_driver)
        *classes, name = target.attribute.split(".")
        for class_name in classes:
            owner = getattr(owner, class_name, None)
        original = getattr(owner, name, None)
        path = f"{module_name}.{target.attribute}"
        if not isinstance(original, types.FunctionType):
            return stand_down(f"{path}: expected a plain function, found {type(original).__name__} after import")
        if path in _registry()._patched:
            return stand_down(f"{path}: the engine has already applied its hooks, so ours would never be")
        try:
            hook = _our_function(target.replacement)
        except Exception as error:
            return stand_down(f"our own {target.replacement} cannot be imported: {essence(error)}")
        bindings.append(_Binding(path, original, hook, target.kind))
    return lifecycle.PatchStatus(patch.name, lifecycle.State.ACTIVE), bindings


def _our_function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _on_changed_code(status: PatchStatus, changed: str, settings: Settings) -> PatchStatus:
    """Signatures are those that we know, and what the functions do is not: said by name, and under STRICT not patched."""
    from sglang_w4afp8 import lifecycle, switches

    if settings.strict:
        return replace(status, state=lifecycle.State.STANDING_DOWN, reason=changed)
    text = f"{status.name} is applied to other code than it was read for: {changed}"
    lifecycle.announce(logging.WARNING, f"sglang-w4afp8: {text}; {switches.PREFIX}STRICT=1 refuses to start with it")
    return replace(status, note="in place of code that is not the published one")


def _look(statuses: dict[str, PatchStatus]) -> dict[str, PatchStatus]:
    """What the patches themselves find, of those that are going to be active."""
    from sglang_w4afp8.lifecycle import State

    result = dict(statuses)
    for patch in LEDGER:
        status = result[patch.name]
        if not patch.look or status.state is not State.ACTIVE:
            continue
        try:
            problem, note = _our_function(patch.look)()
        except Exception as error:
            problem, note = f"our own {patch.look} failed: {essence(error)}", ""
        state = State.STANDING_DOWN if problem else status.state
        notes = "; ".join(filter(None, (status.note, note)))
        result[patch.name] = replace(status, state=state, reason=problem, note="" if problem else notes)
    return result


def _follow_requirements(statuses: dict[str, PatchStatus]) -> dict[str, PatchStatus]:
    """A patch that needs another is no more than that one is."""
    from sglang_w4afp8.lifecycle import State

    result = dict(statuses)
    for patch in LEDGER:  # the ledger lists a patch after those that it needs
        for needed in (result[name] for name in patch.requires):
            if result[patch.name].state is State.ACTIVE and needed.state is not State.ACTIVE:
                # The tree's own code runs in its place, and that has no such step.
                state = State.NOT_IN_TREE if needed.state is State.IN_TREE else needed.state
                reason = f"needs {needed.name}, which is {needed.state.value}"
                result[patch.name] = replace(needed, name=patch.name, state=state, reason=reason)
    return result


def _announce_plan(statuses: dict[str, PatchStatus], blocked: str) -> None:
    """One warning per patch that stands down, one for all where the engine is unknown. What is in tree is no fault."""
    from sglang_w4afp8 import lifecycle

    in_tree = [status for status in statuses.values() if status.state is lifecycle.State.IN_TREE]
    if in_tree:
        text = f"standing down for {', '.join(status.name for status in in_tree)}: {in_tree[0].reason}"
        missing = [status.name for status in statuses.values() if status.state is lifecycle.State.NOT_IN_TREE]
        if missing:
            text += f"; the tree does not carry {', '.join(missing)}"
        lifecycle.announce(logging.INFO, f"sglang-w4afp8: {text}")
    for status in statuses.values():
        if status.failed and not blocked:
            lifecycle.announce(logging.WARNING, f"sglang-w4afp8: {status.name} stands down: {status.reason}")
    if blocked and any(status.failed for status in statuses.values()):
        lifecycle.announce(logging.WARNING, f"sglang-w4afp8: EVERY PATCH STANDS DOWN: {blocked}")


def _register(registry: Any, bindings: list[_Binding]) -> None:
    from sglang.srt.plugins.hook_registry import HookType

    for binding in bindings:
        registry.register(binding.target, binding.hook, HookType(binding.kind))


def _withdraw(registry: Any, bindings: list[_Binding]) -> None:
    """Take our hooks back; where the engine has applied them, restore the original so that it can apply the others."""
    from sglang.srt.plugins import hook_registry

    for binding in bindings:
        hooks = registry._hooks.get(binding.target, [])
        hooks[:] = [entry for entry in hooks if entry[1] is not binding.hook]
        if not hooks:
            registry._hooks.pop(binding.target, None)
        if binding.target in registry._patched:
            # Another plugin may have replaced the class since, so its owner is looked up anew. Every wrapper of the
            # engine keeps what it wraps in __wrapped__.
            owner_path, _, name = binding.target.rpartition(".")
            owner = pkgutil.resolve_name(owner_path)
            current = original = getattr(owner, name)
            while original is not binding.original and hasattr(original, "__wrapped__"):
                original = original.__wrapped__
            setattr(owner, name, original)
            hook_registry._propagate_patch(current, original, owner)
            registry._patched.discard(binding.target)


def calls(function: Any, wanted: Callable[..., Any]) -> bool:
    """Whether calling ``function`` can reach ``wanted`` through the engine's hook wrappers.

    What a wrapper can call is in its closure. ``__wrapped__`` is no proof: a REPLACE hook keeps the function that it
    shadows there, and another plugin's later REPLACE would make ours look live.
    """
    seen: set[int] = set()
    queue = [function]
    while queue:
        current = queue.pop()
        if current is wanted:
            return True
        if id(current) in seen:
            continue
        seen.add(id(current))
        for cell in getattr(current, "__closure__", None) or ():
            try:
                queue.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
    return False


def _holders(functions: list[Callable[..., Any]]) -> dict[int, list[str]]:
    """Modules that still hold one of the functions as a global, by the function's id."""
    wanted = {id(function) for function in functions}
    holders: dict[int, list[str]] = {}
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in wanted:
                    holders.setdefault(id(value), []).append(f"{module_name}.{name}")
    return holders


class _Verification:
    """Wraps ``HookRegistry.apply_hooks`` for one call, and looks at the bindings when it has run."""

    def __init__(self, registry: Any, report: ActivationReport, bindings: dict[str, list[_Binding]]) -> None:
        self.registry = registry
        self.report = report
        self.bindings = bindings
        self.apply_hooks = registry.__dict__["apply_hooks"]  # the classmethod object, to be put back as it was
        self.done = False

        self.hook = self.run  # one bound method, so that it can be recognised

    def hang_on(self) -> None:
        """Have :meth:`run` called in place of ``apply_hooks``, once."""
        self.registry.apply_hooks = self.hook

    def withdraw(self, names: list[str]) -> None:
        """Take the hooks of some patches back."""
        for name in names:
            _withdraw(self.registry, self.bindings[name])

    def run(self) -> None:
        """Apply all hooks as the engine does, then verify and log the one activation line."""
        # Another plugin may have wrapped the same method after us: then ours stays beneath it and only passes through.
        if self.registry.__dict__["apply_hooks"] is self.hook:
            self.registry.apply_hooks = self.apply_hooks
        apply_hooks = self.apply_hooks.__get__(None, self.registry)
        apply_hooks()
        if self.done:
            return
        self.done = True
        try:
            self._verify(apply_hooks)
        except _Refusal as refusal:
            raise SystemExit(f"sglang-w4afp8: refusing to start: {refusal}") from refusal
        except Exception as error:
            if self.report.strict:
                raise SystemExit(f"sglang-w4afp8: refusing to start: {essence(error)}") from error
            self.withdraw(list(self.bindings))
            apply_hooks()
            _stand_down_on_own_fault(error)

    def _verify(self, apply_hooks: Callable[[], None]) -> None:
        from sglang_w4afp8 import guard, lifecycle

        statuses = {status.name: status for status in self.report.patches}
        holders = _holders([binding.original for found in self.bindings.values() for binding in found])
        for name, found in self.bindings.items():
            problems = [problem for binding in found if (problem := self._problem(binding, holders))]
            if problems:
                self.withdraw([name])
                statuses[name] = lifecycle.PatchStatus(name, lifecycle.State.STANDING_DOWN, "; ".join(problems))
        followed = _follow_requirements(statuses)
        newly_down = {n: s for n, s in followed.items() if s.failed and not self._had_failed(n)}
        if newly_down:
            apply_hooks()  # the other plugins' hooks on the targets that we gave back
            _announce_plan(newly_down, "")
        report = replace(self.report, verified=True, patches=tuple(followed[patch.name] for patch in LEDGER))
        lifecycle.record(report)
        _refuse_if_strict(report)
        elsewhere = guard.why_schedulers_load_no_plugins(guard.engine_roots(), sys.argv, sys.modules)
        active = [status.name for status in report.patches if status.state is lifecycle.State.ACTIVE]
        if elsewhere and active:
            text = f"{elsewhere}; missing there: {', '.join(active)}"
            if report.strict:
                raise _Refusal(text)
            lifecycle.announce(logging.WARNING, f"sglang-w4afp8: {text}")
        lifecycle.announce(logging.INFO, report.line())

    def _had_failed(self, name: str) -> bool:
        return any(status.name == name for status in self.report.failures)

    @staticmethod
    def _problem(binding: _Binding, holders: dict[int, list[str]]) -> str | None:
        current = pkgutil.resolve_name(binding.target)
        if not calls(current, binding.hook):
            if current is binding.original:
                return f"{binding.target}: the engine did not apply our hook"
            return f"{binding.target}: another plugin's hook shadows ours"
        # The class of a method holds it as an attribute; only module globals are looked at.
        stale = holders.get(id(binding.original))
        return f"{binding.target}: still unpatched in {', '.join(stale)}" if stale else None
