"""What a server really ran: the plugin's log lines, the engine's own speed lines, and kernel names in a profile."""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.arms import Arm

# The lines of sglang_w4afp8.lifecycle and sglang_w4afp8.plugin; a test makes them there and reads them here.
_ACTIVATION = re.compile(r"sglang-w4afp8 \S+ on sglang (?P<engine>\S+) \(pid (?P<pid>\d+)\): active: (?P<states>.*)$")
_FIRST_CALL = re.compile(r"sglang-w4afp8: first low-latency call: (?P<call>.*)\bpatches=(?P<patches>\S+)")
_BACKEND = re.compile(r"\bbackend=(\w+)")
_DISABLED = re.compile(r"sglang-w4afp8 \S+: disabled by ")
_OURS = re.compile(r"sglang-w4afp8")


@dataclass(frozen=True)
class LogEvidence:
    """The plugin's lines in a server's log.

    Attributes:
        activations: per process that activated, the patches that it says are active.
        standing_down: texts of patches that were wanted and are not live.
        first_calls: per process that made a low-latency call, the patches that were live then.
        disabled: processes that said that the plugin is switched off.
        other: further lines of the plugin.
        backends: what computed the experts of each of the first calls, where the line says it.
        engines: per process that activated, the engine's version.
    """

    activations: tuple[tuple[str, ...], ...] = ()
    standing_down: tuple[str, ...] = ()
    first_calls: tuple[tuple[str, ...], ...] = ()
    disabled: int = 0
    other: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()


def _names(text: str) -> tuple[str, ...]:
    return () if text.strip() == "none" else tuple(name.strip() for name in text.split(","))


def read_log(text: str) -> LogEvidence:
    """Find the plugin's lines."""
    activations, down, first_calls, other, disabled = [], [], [], [], 0
    backends: list[str] = []
    engines: list[str] = []
    for line in text.splitlines():
        if match := _ACTIVATION.search(line):
            active, *states = match["states"].split("; ")
            activations.append(_names(active))
            engines.append(match["engine"])
            down += [state for state in states if state.startswith("standing down")]
        elif match := _FIRST_CALL.search(line):
            first_calls.append(_names(match["patches"]))
            backends += _BACKEND.findall(match["call"])
        elif _DISABLED.search(line):
            disabled += 1
        elif _OURS.search(line):
            other.append(line.strip())
    return LogEvidence(
        tuple(activations),
        tuple(down),
        tuple(first_calls),
        disabled,
        tuple(other),
        tuple(backends),
        tuple(engines),
    )


def check_log(arm: Arm, seen: LogEvidence, ranks: int = 1, engine: str | None = None) -> list[str]:
    """What in the log contradicts the arm; empty when nothing does. Every one of the ranks must have said what it runs.

    ``engine`` is the version that the results will name; None: none is named. The engine alone does not say its own.
    """
    if arm.is_engine:
        live = [f"activation line with {', '.join(names)}" for names in seen.activations if names]
        return [*live, *(f"first low-latency call with {', '.join(names)}" for names in seen.first_calls)]
    problems = [*seen.standing_down]
    for other in dict.fromkeys(seen.engines):
        if engine not in (None, other):
            problems.append(
                f"activation line on sglang {other}, must be on {engine}, which this tool runs beside and the results name: "
                "run it in the server's environment"
            )
    if seen.disabled:
        problems.append(f"{seen.disabled} processes say that the plugin is disabled")
    for what, lines in (("activation", seen.activations), ("first low-latency call", seen.first_calls)):
        if not lines:
            hint = (
                ": is it installed in the server's environment?" if what == "activation" and not seen.disabled else ""
            )
            problems.append(f"no {what} line of the plugin{hint}")
        elif len(lines) < ranks:
            problems.append(f"{what} line of {len(lines)} processes, must be of all {ranks} ranks")
        for names in dict.fromkeys(lines):
            if arm.patches is not None and set(names) != set(arm.patches):
                problems.append(f"{what} line with {', '.join(names) or 'none'}, must be {', '.join(arm.patches)}")
            elif not names:
                problems.append(f"{what} line without an active patch")
    if len({frozenset(names) for names in (*seen.activations, *seen.first_calls)}) > 1:
        problems.append("processes disagree on the active patches")
    for backend in dict.fromkeys(seen.backends):
        if arm.computes is not None and backend != arm.computes:
            problems.append(f"first low-latency call by {backend}, must be by {arm.computes}")
    if arm.computes is None and len(set(seen.backends)) > 1:
        problems.append("processes disagree on what computes the experts")
    return problems


@dataclass(frozen=True)
class KernelMark:
    """How a patch shows in a profile: a kernel of ours, and the engine's kernel that must then be gone."""

    patch: str
    ours: str | None
    engine: str


# The requant is no mark: both sides have a kernel of that name. `gemm` picks tiles of the engine's own kernel.
MARKS = (
    KernelMark("silu", "_silu_and_mul_masked_quant_kernel", "_silu_and_mul_post_per_tensor_quant_kernel"),
    KernelMark("problem_sizes", None, "compute_problem_sizes_w4a8_kernel"),
)
# Must show in every profile: otherwise the path that is compared did not run at all.
PATH_KERNEL = "_fp8_per_token_quant_to_per_tensor_quant_kernel"

# With the Triton backend these two are the whole path, and nothing of the chain may run, in prefill neither.
TRITON_KERNELS = ("_gate_up_kernel", "_down_kernel")
_COMPILED_GEMM = "MixedInput"

# First match wins. The grouped GEMM is CUTLASS's mixed-input collective, used by nothing else on this path.
STEP_GROUPS: Mapping[str, re.Pattern[str]] = {
    "requant": re.compile(PATH_KERNEL),
    "silu": re.compile("_silu_and_mul_post_per_tensor_quant_kernel|_silu_and_mul_masked_quant_kernel"),
    "problem_sizes": re.compile("compute_problem_sizes_w4a8_kernel"),
    "gemm": re.compile(
        f"{_COMPILED_GEMM}|int4_fp8_get_group_gemm_starts|_w4a8_.*gemm|w4a8_.*_kernel|^_(gate_up|down|rows)_kernel$"
    ),
    "deepep": re.compile("deep_ep|internode_ll|low_latency"),
}
# The five launches of the chain that the plugin works on; the rest of the layer is DeepEP, router and shared experts.
CHAIN = ("requant", "silu", "problem_sizes", "gemm")


@dataclass
class Profile:
    """Kernels of a short profile: how often each ran, and for how long in all (us)."""

    counts: Counter[str] = field(default_factory=Counter)
    total_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @classmethod
    def of_ranks(cls, profiles: Sequence[Profile]) -> Profile:
        """The profiles of all ranks as one: kernels and times add up, so that times by layer are means over ranks."""
        merged = cls()
        for profile in profiles:
            merged.counts.update(profile.counts)
            for name, total in profile.total_us.items():
                merged.total_us[name] += total
        return merged

    def per_layer_us(self) -> dict[str, float]:
        """Microseconds per expert layer: each group of `STEP_GROUPS`, all ``other`` kernels, and the ``chain``.

        Every expert layer launches the requant once, or the first of the two kernels, so they count layers; kernels outside
        of expert layers are spread over them. A profile slows steps down, hence no wall times: kernel durations are what it
        leaves alone.
        """
        first = (PATH_KERNEL, TRITON_KERNELS[0])
        layers = sum(count for name, count in self.counts.items() if any(kernel in name for kernel in first))
        spent = dict.fromkeys([*STEP_GROUPS, "other"], 0.0)
        for name, total in self.total_us.items():
            group = next((group for group, pattern in STEP_GROUPS.items() if pattern.search(name)), "other")
            spent[group] += total / max(1, layers)
        return {**spent, "chain": sum(spent[group] for group in CHAIN)}

    def top(self, count: int = 25) -> list[tuple[str, int, float]]:
        """The longest-running kernels: name, launches, total microseconds."""
        ranked = sorted(self.total_us.items(), key=lambda item: -item[1])
        return [(name[:160], self.counts[name], round(total, 1)) for name, total in ranked[:count]]


def read_profile(path: Path) -> Profile:
    """Kernels of a torch-profiler trace (``.trace.json.gz``).

    Raises:
        ValueError: the file is not (yet) a whole trace.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as trace:
            events = json.load(trace)["traceEvents"]
    except (OSError, EOFError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a whole trace: {error}") from error
    profile = Profile()
    for event in events:
        if event.get("cat") == "kernel":
            profile.counts[event["name"]] += 1
            profile.total_us[event["name"]] += event["dur"]
    return profile


def computed_by(arm: Arm, seen: LogEvidence) -> str:
    """What computed the experts: what the arm demands, or what the log says where the plugin may choose."""
    return arm.computes or next(iter(seen.backends), "cutlass")


def check_kernels(live: Iterable[str], kernels: Iterable[str], backend: str = "cutlass") -> list[str]:
    """What the kernel names contradict, given the patches that are said to be live and what computes the experts."""
    live, names = set(live), list(kernels)

    def ran(kernel: str) -> bool:
        return any(kernel in name for name in names)

    if backend == "triton":
        gone = (_COMPILED_GEMM, *(mark.engine for mark in MARKS))
        return [
            *(
                f"profile lacks {kernel}: the Triton backend did not run"
                for kernel in TRITON_KERNELS
                if not ran(kernel)
            ),
            *(
                f"the Triton backend computes the experts, but the profile has {kernel}"
                for kernel in gone
                if ran(kernel)
            ),
        ]
    problems = [] if ran(PATH_KERNEL) else [f"profile lacks {PATH_KERNEL}: the low-latency path did not run"]
    for mark in MARKS:
        is_live = mark.patch in live
        state = f"{mark.patch} is {'' if is_live else 'not '}live"
        wanted, unwanted = (mark.ours, mark.engine) if is_live else (mark.engine, mark.ours)
        if wanted and not ran(wanted):
            problems.append(f"{state}, but the profile lacks {wanted}")
        if unwanted and ran(unwanted):
            problems.append(f"{state}, but the profile has {unwanted}")
    return problems


_DECODE = re.compile(r"Decode batch.*?#running-req: (?P<running>\d+),.*?gen throughput \(token/s\): (?P<rate>[0-9.]+)")


def engine_decode_rate(log: str, running: int) -> float | None:
    """Median of the scheduler's own decode throughput over its lines with ``running`` requests; None if none counts.

    A line covers the time since the one before it, so one that follows a prefill is left out.
    """
    rates, clean = [], False
    for line in log.splitlines():
        if "Prefill batch" in line:
            clean = False
        elif match := _DECODE.search(line):
            if clean and int(match["running"]) == running:
                rates.append(float(match["rate"]))
            clean = True
    return statistics.median(rates) if rates else None


_PREFILL = re.compile(
    r"Prefill batch, #new-seq: (?P<prompts>\d+), #new-token: (?P<tokens>\d+),.*?cuda graph: (?P<graph>True|False)"
)


def graph_prefills(log: str, lengths: Sequence[int]) -> list[bool] | None:
    """Whether each of these prompts, sent one after the other, was prefilled in a CUDA graph; None if the log does not say.

    Only prompts that fill half of a captured size or more are; the engine prefills others eagerly.
    """
    seen = [(int(m["prompts"]), int(m["tokens"]), m["graph"] == "True") for m in _PREFILL.finditer(log)]
    wanted = [(1, length) for length in lengths]
    for start in range(len(seen) - len(wanted) + 1):
        part = seen[start : start + len(wanted)]
        if [line[:2] for line in part] == wanted:
            return [graph for *_, graph in part]
    return None


# The engine's log lines do not show their level, so faults are known by their words. Only what a server logs once it
# serves is looked at: while starting, the engine says what it could not import.
_FAULT = re.compile(
    r"Traceback \(most recent call last\)|\b\w*(Error|Exception)\b|\b(error|exception|failed|failure|fatal|watchdog)\b|"
    r"out of memory|Segmentation fault|core dumped|\bNaN\b",
    re.IGNORECASE,
)
# Clients that hang up are no faults; the soak does it on purpose.
_EXPECTED = re.compile(r"disconnected", re.IGNORECASE)


def error_lines(log: str) -> list[str]:
    """Lines that report a fault, in the log of a server that has started."""
    return [line.strip() for line in log.splitlines() if _FAULT.search(line) and not _EXPECTED.search(line)]
