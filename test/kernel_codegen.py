#!/usr/bin/env python3
"""Compile the streaming kernels for real targets, without a GPU, and look at the memory accesses in the assembly.

    python test/kernel_codegen.py                                       # every geometry that production launches
    python test/kernel_codegen.py --target cuda:90 --json findings.json
    PYTHONPATH=/somewhere/triton-3.6 python test/kernel_codegen.py      # with another Triton
    python test/kernel_codegen.py --machine-code machine_code.json      # what this Triton makes of the shipped table

The gain of both kernels hangs on what the compiler makes of their addressing: payload moved in the widest accesses that the
tile allows, and one scalar scale a group, not one an element. That is lost silently (a mask that is not whole, a stride
whose divisibility is unknown, a layout that another Triton version picks), and seen only in the assembly.

Every kernel is compiled with the arguments of a real call: the public function runs on meta tensors of serving size, and what
it would launch is compiled with the specialisation that Triton derives from those arguments (integers that are 1, integers
and pointers that are multiples of 16, on AMD tensors within 2 GB).

``--machine-code`` judges nothing: two of its files say which launches two Tritons make the same code of.

Needs Triton, torch and this package; no engine, no pytest. Exit status: 0, 1 where a check fails, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    # Before Triton is imported: a kernel is interpreted or compiled from its decoration on.
    if os.environ.pop("TRITON_INTERPRET", "0") not in ("", "0"):
        print("kernel_codegen: TRITON_INTERPRET is ignored, the compiler is what is looked at", file=sys.stderr)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.bench.measure import run_metadata, write_json
from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels, launch_table
from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch

TARGETS = {
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx950": GPUTarget("hip", "gfx950", 64),
}
REQUANT, SILU = "requant", "silu"
KERNELS = {REQUANT: "_fp8_per_token_quant_to_per_tensor_quant_kernel", SILU: "_silu_and_mul_masked_quant_kernel"}
GROUP = 128
# What the requant reads: fp8 with float32 scales, fp8 with packed UE8M0 scales, or bfloat16 without scales.
FP8, UE8M0, BF16 = "fp8", "ue8m0", "bf16"
# Hidden and intermediate sizes of DeepSeek-V3 and of Kimi- and GLM-class models; 512 rows a rank over 4 ranks.
HIDDEN, INNER = (7168, 3584), (2048, 1536)
EXPERTS = (8, 32, 64, 128, 256)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PADDED = 2048

_TRITON_TYPES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class Geometry:
    """One launch of production: the call's sizes and the launch parameters, or None for the rule's."""

    kernel: str
    columns: int  # K of the requant, N of SiLU
    experts: int
    launch: MaskedRowsLaunch
    problem_sizes: bool = False  # the chain's requant also writes the GEMMs' tables
    payload: str = FP8  # of the requant; SiLU reads bfloat16

    @property
    def compiled_as(self) -> tuple[Any, ...]:
        """What makes another kernel of it, apart from the number of experts, whose sums touch no payload."""
        width = self.columns // GROUP if self.kernel == REQUANT else self.columns
        launch = self.launch
        tile = launch.col_block, launch.row_block, launch.num_warps, launch.speculative_rows > 0
        return (self.kernel, self.payload, *tile, width % launch.col_block != 0, self.problem_sizes)

    def __str__(self) -> str:
        launch = self.launch
        return (
            f"{self.kernel} {self.columns} E{self.experts} tile {launch.row_block}x{launch.col_block} warps {launch.num_warps}"
            f"{' speculative' if launch.speculative_rows else ''}{' tables' if self.problem_sizes else ''}"
            f"{'' if self.payload == FP8 else ' ' + self.payload}"
        )


def rule_geometries(warp_size: int) -> Iterator[Geometry]:
    """What the launch rules choose where there is no table, for every size above."""
    warp_size_of = ep_moe_kernels.requant_warp_size
    ep_moe_kernels.requant_warp_size = lambda device: warp_size
    ep_moe_kernels.set_launch_lookup(None)
    device = torch.device("meta")
    try:
        for experts in EXPERTS:
            for expected_rows in (None, *(rows + 1 for rows in ROWS)):
                for hidden, payload in itertools.product(HIDDEN, (FP8, UE8M0, BF16)):
                    groups, payload_bytes = hidden // GROUP, 2 if payload == BF16 else 1
                    launch = ep_moe_kernels._requant_launch(
                        groups, experts, expected_rows, PADDED, device, payload_bytes=payload_bytes
                    )
                    for problem_sizes in (False, True):
                        yield Geometry(REQUANT, hidden, experts, launch, problem_sizes, payload)
                for inner in INNER:
                    launch = ep_moe_kernels._silu_launch(inner, experts, expected_rows, PADDED, device)
                    yield Geometry(SILU, inner, experts, launch)
    finally:
        ep_moe_kernels.requant_warp_size = warp_size_of
        ep_moe_kernels.set_launch_lookup(launch_table.lookup)


def table_geometries(
    directory: Path = tuned_config.SHIPPED_DIRECTORY, problem_sizes: bool = True
) -> Iterator[tuple[Geometry, int]]:
    """Every launch of every table in ``directory``, and the mean rows per expert that it was measured at.

    Args:
        problem_sizes: the requant as the chain calls it, which also writes the GEMMs' tables; ``bench requant`` does not.
    """
    for path in sorted(directory.glob(f"{launch_table.KIND}_*.json")):
        for kernel, by_columns in launch_table.parse(tuned_config.read_tuned(path, {})).items():
            for columns, by_experts in by_columns.items():
                for experts, entries in by_experts.items():
                    for entry in entries:
                        launch = entry.launch(entry.expected_m)
                        width = columns * GROUP if kernel == REQUANT else columns
                        geometry = Geometry(kernel, width, experts, launch, problem_sizes and kernel == REQUANT)
                        # The dispatcher's estimate is one more than the mean.
                        yield geometry, entry.expected_m - 1


def unusual_geometries() -> Iterator[Geometry]:
    """Calls whose integers Triton turns into constants (1), or at the ends of what is allowed: they must compile at all."""
    for problem_sizes in (False, True):
        yield Geometry(REQUANT, 7168, 64, MaskedRowsLaunch(16, 4, 1), problem_sizes)
        yield Geometry(REQUANT, 7168, 1, MaskedRowsLaunch(16, 4, 1, speculative_rows=1), problem_sizes)
        yield Geometry(REQUANT, 128, 3, MaskedRowsLaunch(1, 1, 1, 8, num_warps=8), problem_sizes)
        yield Geometry(REQUANT, 7168, 2047, MaskedRowsLaunch(16, 4, 1), problem_sizes)
    for payload in (UE8M0, BF16):
        yield Geometry(REQUANT, 128, 1, MaskedRowsLaunch(1, 4, 1, 2, speculative_rows=1), True, payload)
        yield Geometry(REQUANT, 896, 3, MaskedRowsLaunch(4, 4, 1), True, payload)
    yield Geometry(SILU, 2048, 1, MaskedRowsLaunch(1024, 4, 1, speculative_rows=1))
    yield Geometry(SILU, 1, 1, MaskedRowsLaunch(1, 1, 1, num_warps=1, speculative_rows=1))
    yield Geometry(SILU, 77, 3, MaskedRowsLaunch(64, 1, 1, 16, speculative_rows=5))
    yield Geometry(SILU, 2048, 2047, MaskedRowsLaunch(1024, 4, 2))


def distinct(geometries: Iterable[Geometry]) -> list[Geometry]:
    """One geometry for each kernel that would be compiled."""
    found: dict[tuple[Any, ...], Geometry] = {}
    for geometry in geometries:
        found.setdefault(geometry.compiled_as, geometry)
    return list(found.values())


class _Recorder:
    """Stands in for a kernel: keeps the arguments of its launch."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> _Recorder:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named = arguments, named


def _call(module: ModuleType, geometry: Geometry) -> None:
    """The public function on meta tensors of serving size: its checks and its choice of arguments, and no memory."""
    experts, columns, launch = geometry.experts, geometry.columns, geometry.launch

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    masked_m = empty(experts, dtype=torch.int32)
    if geometry.kernel == REQUANT:
        x = empty(experts, PADDED, columns, dtype=torch.bfloat16 if geometry.payload == BF16 else torch.float8_e4m3fn)
        x_scale = None
        if geometry.payload == FP8:
            x_scale = empty(experts, columns // GROUP, PADDED).transpose(1, 2)
        elif geometry.payload == UE8M0:
            x_scale = empty(experts, -(-columns // GROUP // 4), PADDED, dtype=torch.int32).transpose(1, 2)
        tables = {}
        if geometry.problem_sizes:
            tables = {name: empty(experts, 3, dtype=torch.int32) for name in ("problem_sizes1", "problem_sizes2")}
            tables["intermediate_size"] = INNER[0]
        module.fp8_per_token_to_per_tensor_quant_triton(
            x, x_scale, masked_m, empty(1), torch.empty_like(x, dtype=torch.float8_e4m3fn), launch=launch, **tables
        )
    else:
        gate_up = empty(experts, PADDED, 2 * columns, dtype=torch.bfloat16)
        output = empty(experts, PADDED, columns, dtype=torch.float8_e4m3fn)
        module.silu_and_mul_masked_post_per_tensor_quant_fwd(gate_up, output, masked_m, empty(1), launch=launch)


def _launch_arguments(
    module: ModuleType, geometry: Geometry, target: GPUTarget
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel, its arguments by name, and its compile options, as the public function launches it on ``target``."""
    name = KERNELS[geometry.kernel]
    kernel, recorder = getattr(module, name), _Recorder()
    # Meta tensors belong to no backend: the target says what the device would have.
    has_ptx = module.has_ptx
    setattr(module, name, recorder)
    module.has_ptx = lambda device: target.backend == "cuda"
    try:
        _call(module, geometry)
    finally:
        setattr(module, name, kernel)
        module.has_ptx = has_ptx
    arguments = dict(zip(kernel.arg_names, recorder.arguments, strict=False))
    options = {key: value for key, value in recorder.named.items() if key not in kernel.arg_names}
    arguments |= {key: value for key, value in recorder.named.items() if key in kernel.arg_names}
    assert set(arguments) == set(kernel.arg_names), f"{name}: no value for {set(kernel.arg_names) - set(arguments)}"
    return kernel, arguments, options


def _specialise(value: Any, target: GPUTarget, aligned: bool) -> tuple[str, list[list[Any]]]:
    """Triton's type and attributes of a run-time argument."""
    if isinstance(value, torch.Tensor):
        attributes: list[list[Any]] = [["tt.divisibility", 16]] if aligned else []
        if target.backend == "hip" and value.untyped_storage().nbytes() < 2**31:
            attributes.append(["tt.pointer_range", 32])
        return "*" + _TRITON_TYPES[value.dtype], attributes
    if isinstance(value, float):
        return "fp32", []
    assert isinstance(value, int), f"no Triton type for {value!r}"
    wide = not -(2**31) <= value < 2**31
    return "i64" if wide else "i32", [["tt.divisibility", 16]] if value % 16 == 0 else []


def specialised(
    parameters: Iterable[Any], arguments: Mapping[str, Any], target: GPUTarget, aligned: bool = True
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Signature, constants and attributes that Triton derives from a launch's arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(parameters):
        value = arguments[parameter.name]
        # Triton makes a constant of every argument that is None, and of a 1 that the kernel lets it look at.
        looked_at = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (looked_at and isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name], found = _specialise(value, target, aligned)
        if found and looked_at:
            attributes[(index,)] = found
    return signature, constants, attributes


def compile_geometry(
    geometry: Geometry, target: GPUTarget, module: ModuleType = ep_moe_kernels, aligned: bool = True
) -> Any:
    """Triton's compilation of one geometry."""
    kernel, arguments, options = _launch_arguments(module, geometry, target)
    signature, constants, attributes = specialised(kernel.params, arguments, target, aligned)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def assembly_of(compiled: Any, target: GPUTarget) -> str:
    """PTX, or AMD's assembly."""
    return compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def machine_code_of(compiled: Any) -> str:
    """SASS, and the kernel's resources, by the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return _output_of(triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name)


# One instruction: its name, and its first two operands where they are registers (the first is what it writes, mostly).
_SASS = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(?:\s+(U?R\d+)\b)?(?:,\s*(U?R\d+)\b)?")


def _loads(name: str, width: int) -> bool:
    """Whether an instruction loads ``width`` bytes, more than a word, of global memory."""
    return re.match(rf"LDG\.E.*\b{width * 8}\b", name) is not None


def words_waited_for(sass: str, load_width: int) -> int:
    """Loaded words that an sm_90 kernel waits for before its first payload load: those moved to uniform registers.

    A block of rows loaded unseen is worth its bytes only while its loads wait for nothing. An assembler that finds a word alike
    in all lanes (an expert's count) moves it to a uniform register as soon as it can, and that move waits for the word.
    """
    waited, written_by = 0, {}
    for name, first, second in _SASS.findall(sass):
        if _loads(name, load_width):
            return waited
        waited += name == "R2UR" and written_by.get(second, "").startswith("LDG")
        written_by[first] = name
    raise LookupError(f"no load of {load_width} bytes in the machine code")


@dataclass
class Accesses:
    """Accesses of global memory by bytes a lane, loads and stores; a wave's common (scalar) loads are left out."""

    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)


_PTX = re.compile(r"\b(ld|st)\.(?:[a-z_]+\.)*?global((?:\.[\w:]+)*)\s")
_AMD = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def accesses(assembly: str, backend: str) -> Accesses:
    """Count the accesses of one kernel's assembly."""
    found = Accesses()
    if backend == "cuda":
        for kind, qualifiers in _PTX.findall(assembly):
            bits = int(re.search(r"\.[bufs](\d+)\b", qualifiers)[1])
            vector = re.search(r"\.v(\d)\b", qualifiers)
            (found.loads if kind == "ld" else found.stores)[bits // 8 * (int(vector[1]) if vector else 1)] += 1
    else:
        for kind, width in _AMD.findall(assembly):
            narrow = 2 if "short" in width or "16" in width else 1
            (found.loads if kind == "load" else found.stores)[_AMD_BYTES.get(width, narrow)] += 1
    return found


@dataclass(frozen=True)
class Finding:
    """What one compilation gave, and what is wrong with it (nothing, mostly)."""

    target: str
    geometry: str
    load_bytes: dict[int, int]
    store_bytes: dict[int, int]
    faults: list[str]


def faults(geometry: Geometry, target: GPUTarget, seen: Accesses) -> list[str]:
    """Where the accesses are narrower or more than the tile allows.

    A lane's share of the tile says how wide its accesses can be, 16 bytes at most; below 8 bytes there is nothing to see. Each
    of the code paths (the expert's own rows, shared rows, and rows loaded unseen where that is on) moves its tile once.
    """
    launch = geometry.launch
    lanes = launch.num_warps * target.warp_size
    tile = launch.row_block * launch.col_block * (GROUP if geometry.kernel == REQUANT else 1)
    elements = max(1, tile // lanes)
    paths = 3 if launch.speculative_rows else 2
    element_bytes = 2 if geometry.kernel == SILU or geometry.payload == BF16 else 1
    load_width, store_width = min(16, element_bytes * elements), min(16, elements)
    vectors = paths * max(1, element_bytes * elements // 16)
    if geometry.kernel == SILU:
        # Gate and up.
        vectors, scales = 2 * vectors, 0
    else:
        # One scale a vector, which lies in one group.
        scales = 0 if geometry.payload == BF16 else vectors
    # Each path loads the scale of its output, and those of phase 1 a count.
    scalar_limit = scales + 2 * paths - 1
    # Phase 2 reads all experts' counts, in one access where a lane has several.
    counts = max(1, triton.next_power_of_2(geometry.experts) // lanes)
    scalar_limit += counts
    loads, stores = seen.loads.copy(), seen.stores
    if 1 < counts <= 4 and loads[4 * counts]:
        loads[4 * counts] -= 1

    found = []
    narrow = sum(count for width, count in loads.items() if width < 4)
    if narrow:
        found.append(f"{narrow} loads of less than a word")
    if load_width > 4:
        wide = sorted(width for width, count in loads.items() if width > 4 and count)
        if wide != [load_width]:
            found.append(f"payload loads are of {wide or 'single words'}, must be of {load_width} bytes")
        elif loads[load_width] < vectors:
            found.append(f"{loads[load_width]} payload loads, must be at least {vectors}")
        if loads[4] + narrow > scalar_limit:
            found.append(
                f"{loads[4] + narrow} scalar loads, must be at most {scalar_limit}: a scale a group, not an element"
            )
    if store_width >= 4:
        narrow = sum(count for width, count in stores.items() if width < 4)
        if narrow:
            found.append(f"{narrow} stores of less than a word")
        if stores[store_width] < paths:
            found.append(f"{stores[store_width]} payload stores of {store_width} bytes, must be at least {paths}")
    return found


def examine(
    geometries: Iterable[Geometry], target_name: str, module: ModuleType = ep_moe_kernels, aligned: bool = True
) -> list[Finding]:
    """Compile and judge geometries for one target."""
    target = TARGETS[target_name]
    findings = []
    for geometry in geometries:
        compiled = compile_geometry(geometry, target, module, aligned)
        seen = accesses(assembly_of(compiled, target), target.backend)
        found = faults(geometry, target, seen)
        widest = max(seen.loads, default=0)
        if target_name == "cuda:90" and geometry.launch.speculative_rows and widest > 4:
            waited = words_waited_for(machine_code_of(compiled), widest)
            if waited:
                found.append(f"{waited} words waited for before the payload is loaded")
        loads, stores = (dict(sorted(counts.items())) for counts in (seen.loads, seen.stores))
        findings.append(Finding(target_name, str(geometry), loads, stores, found))
    return findings


# ---- broken on purpose: a check that cannot fail says nothing

# The addressing of the legacy kernel: a scale is loaded for every element of its group.
_ELEMENT_WISE_SCALES = (
    (r"(\n +scale_ptrs = )(.*)\n", r"\1(\2)[:, :, None] + tl.zeros_like(offsets)\n"),
    (r"mask=scale_mask", "mask=load_mask"),
    (r"mask=g_mask\[None, :\]", "mask=g_mask[None, :, None]"),
    (r"scale\.to\(tl\.float32\)\[:, :, None\]", "scale.to(tl.float32)"),
)


# The count in the block before that of the payload's loads, where both ways of phase 1 need it.
_EARLY_COUNTS = (
    (r"( +)if unseen:\n", r"\1count = tl.load(masked_m_ptr + pid_e)\n\g<0>"),
    (r"(first_row,\n +)0,(\n +limit,)", r"\1count,\2"),
    (r" +count = tl.load\(masked_m_ptr \+ expert\)\n", ""),
    (r"_tied\((tl\.load\(.*\)), count\)", r"\1"),
    (r"count, (\w+) = tl\.load\(masked_m_ptr \+ pid_e\), ", r"\1 = "),
)


def broken_module(
    name: str, changes: Sequence[tuple[str, str]], directory: Path, original: ModuleType = ep_moe_kernels
) -> ModuleType:
    """A changed copy of a module of kernels, as a module of its own."""
    source = Path(original.__file__).read_text(encoding="utf-8")
    for pattern, replacement in changes:
        source, changed = re.subn(pattern, replacement, source)
        if not changed:
            raise LookupError(f"the kernels have no {pattern!r} any more: break them in another way")
    path = directory / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def broken(kind: str, directory: Path, target_name: str) -> list[Finding]:
    """Findings of one deliberate fault; every one of them must have faults.

    Kinds: ``element-wise-scales`` (NVIDIA only: on AMD, LLVM merges loads of one address, so that there the assembly is
    as good); ``early-counts`` (sm_90 only); ``unaligned-pointers``; ``odd-width`` (SiLU of 2047 columns).
    """
    rules = distinct(rule_geometries(TARGETS[target_name].warp_size))
    requant = [geometry for geometry in rules if geometry.kernel == REQUANT and geometry.payload == FP8]
    if kind == "element-wise-scales":
        return examine(requant, target_name, broken_module("element_wise_scales", _ELEMENT_WISE_SCALES, directory))
    if kind == "early-counts":
        launch = MaskedRowsLaunch(8, 4, 8, row_block=2, num_warps=2, speculative_rows=4)
        return examine(
            [Geometry(REQUANT, 7168, 64, launch, problem_sizes=True)],
            target_name,
            broken_module("early_counts", _EARLY_COUNTS, directory),
        )
    if kind == "unaligned-pointers":
        return examine(requant[:2], target_name, aligned=False)
    if kind == "odd-width":
        return examine([Geometry(SILU, 2047, 64, MaskedRowsLaunch(1024, 4, 4, num_warps=4))], target_name)
    raise ValueError(f"kind: is {kind!r}, must be one of {', '.join(BROKEN)}")


BROKEN = ("element-wise-scales", "early-counts", "unaligned-pointers", "odd-width")


def production(target_name: str) -> list[Geometry]:
    """Every geometry that production launches: the rules' for the target's warp width, and those of every shipped table."""
    measured = (geometry for geometry, _ in table_geometries())
    return distinct([*rule_geometries(TARGETS[target_name].warp_size), *measured])


def compile_unusual(target_name: str) -> list[Finding]:
    """Compile the unusual calls; one that does not compile raises. Nothing is said of their accesses."""
    target = TARGETS[target_name]
    found = []
    for geometry in unusual_geometries():
        seen = accesses(assembly_of(compile_geometry(geometry, target), target), target.backend)
        found.append(Finding(target_name, str(geometry), dict(seen.loads), dict(seen.stores), []))
    return found


# ---- what two Tritons make of the same launches

MACHINE_CODE_TARGET = "cuda:90"


@dataclass(frozen=True)
class MachineCode:
    """What the assembler made of one kernel for sm_90.

    Attributes:
        digest: SHA-256 of the instructions and their encodings, which hold the stalls too, without their addresses: equal
            digests are equal code.
        instructions, before_payload: all (less the padding), and those listed before the first load of the payload.
        registers: of a thread.
        barriers: instructions that wait for the block's other warps.
    """

    digest: str
    instructions: int
    before_payload: int
    registers: int
    barriers: int


# An instruction's text, and the two words of its encoding; its address is left out.
_ENCODED = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;\s*/\* (0x[0-9a-f]{16}) \*/\s+/\* (0x[0-9a-f]{16}) \*/")


def code_digest(listing: str) -> str:
    """`MachineCode.digest` of one kernel's SASS."""
    return hashlib.sha256("\n".join(map(" ".join, _ENCODED.findall(listing))).encode()).hexdigest()


def machine_code(listing: str, load_width: int) -> MachineCode:
    """Digest and counts of one kernel's SASS and resources.

    Raises:
        LookupError: it holds no load of ``load_width`` bytes.
    """
    names = [name for name, *_ in _SASS.findall(listing)]
    encoded = len(_ENCODED.findall(listing))
    assert encoded == len(names), f"{len(names)} instructions, {encoded} of them with their encoding"
    before = next((index for index, name in enumerate(names) if _loads(name, load_width)), None)
    if before is None:
        raise LookupError(f"no load of {load_width} bytes in the machine code")
    return MachineCode(
        code_digest(listing),
        sum(name != "NOP" for name in names),
        before,
        int(re.search(r"\bREG:(\d+)", listing)[1]),
        sum(name.startswith("BAR.SYNC") for name in names),
    )


def bench_geometries(directory: Path = tuned_config.SHIPPED_DIRECTORY) -> Iterator[tuple[str, Geometry, int]]:
    """Every launch of the tables in ``directory`` as the kinds of ``bench`` call it, and its mean rows per expert.

    ``layer`` is the requant that also writes the GEMMs' tables; its SiLU is that of ``silu``.
    """
    for geometry, rows in table_geometries(directory, problem_sizes=False):
        yield geometry.kernel, geometry, rows
        if geometry.kernel == REQUANT:
            # A wider payload keeps the bytes of a lane.
            halved = replace(geometry.launch, col_block=max(1, geometry.launch.col_block // 2))
            yield "bf16", replace(geometry, launch=halved, payload=BF16), rows
            yield "layer", replace(geometry, problem_sizes=True), rows


def table_machine_code(directory: Path = tuned_config.SHIPPED_DIRECTORY) -> list[dict[str, Any]]:
    """The machine code of :func:`bench_geometries`; ``kernel`` is the kind."""
    target = TARGETS[MACHINE_CODE_TARGET]
    cells, known = [], {}
    for kind, geometry, rows in bench_geometries(directory):
        # Many launches share a kernel: Triton's cache compiles it once, and it is disassembled once.
        compiled = compile_geometry(geometry, target)
        if compiled.metadata.hash not in known:
            width = max(accesses(assembly_of(compiled, target), target.backend).loads)
            known[compiled.metadata.hash] = asdict(machine_code(machine_code_of(compiled), width))
        shape = {"kernel": kind, "columns": geometry.columns, "experts": geometry.experts, "rows": rows}
        cells.append(shape | known[compiled.metadata.hash])
    return cells


def write_machine_code(path: Path, directory: Path = tuned_config.SHIPPED_DIRECTORY) -> int:
    """Write :func:`table_machine_code` as a results file; exit status."""
    cells = table_machine_code(directory)
    run = run_metadata()
    meta = {key: run[key] for key in ("command", "date", "triton", "sglang_w4afp8")}
    meta["ptxas"] = re.search(r"\bV(\d[\d.]*)", _output_of(triton.knobs.nvidia.ptxas.path, "--version"))[1]
    meta |= {"target": MACHINE_CODE_TARGET, "remark": "Compiled, not run."}
    write_json(path, {"meta": meta, "cells": cells})
    kernels = len({cell["digest"] for cell in cells})
    print(f"triton {triton.__version__}: {len(cells)} launches, {kernels} kernels")
    return 0 if cells else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--broken", choices=BROKEN, help="compile with this fault instead; exit 0 when it is caught everywhere"
    )
    other.add_argument("--unusual", action="store_true", help="compile calls at the ends of what is allowed instead")
    other.add_argument(
        "--machine-code",
        type=Path,
        metavar="FILE",
        help=f"instead write what the assembler makes of every launch of the shipped tables, for {MACHINE_CODE_TARGET} only",
    )
    parser.add_argument(
        "--tables", type=Path, default=tuned_config.SHIPPED_DIRECTORY, help="folder of other tables for --machine-code"
    )
    parser.add_argument("--scratch", type=Path, default=Path("."), help="folder of the broken copy")
    parser.add_argument("--json", type=Path, help="write the findings here")
    options = parser.parse_args(argv)
    if options.machine_code:
        if options.target or options.json:
            parser.error(
                f"--machine-code: is for {MACHINE_CODE_TARGET} and writes its own file, without --target and --json"
            )
        return write_machine_code(options.machine_code, options.tables)
    findings: list[Finding] = []
    for name in options.target or TARGETS:
        if options.unusual:
            findings += compile_unusual(name)
        elif options.broken:
            findings += broken(options.broken, options.scratch, name)
        else:
            findings += examine(production(name), name)
    for finding in findings:
        print(
            f"{finding.target:10} {finding.geometry:58} loads {_text(finding.load_bytes)}  stores {_text(finding.store_bytes)}"
            f"  {'; '.join(finding.faults) or 'ok'}"
        )
    if options.json:
        content = {"triton": triton.__version__, "findings": [asdict(finding) for finding in findings]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    wrong = [finding for finding in findings if bool(finding.faults) != bool(options.broken)]
    outcome = "not caught" if options.broken else "wrong"
    print(f"triton {triton.__version__}: {len(findings)} compilations, {len(wrong)} {outcome}")
    return 1 if wrong or not findings else 0


def _text(counts: Mapping[int, int]) -> str:
    return " ".join(f"{count}x{width}B" for width, count in counts.items()) or "none"


if __name__ == "__main__":
    sys.exit(main())
