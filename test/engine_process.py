"""Fresh processes for tests of the plugin, and engines of a test's own making to run them against."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_RESULT = "RESULT "
# What a test's script may assign to `result` is printed, and comes back as Process.result.
_EPILOGUE = f"\nimport json as _json\nprint({_RESULT!r} + _json.dumps(result))\n"

# The argument lists of the published engines, written out here so that the ledger is not compared with itself.
REQUANT_OLD = "x, x_scale, masked_m, output_scale, output"
REQUANT = f"{REQUANT_OLD}, expected_rows=None"
SILU = "input, output, masked_m, scale"
CHAIN_OLD = (
    "a_states, a_scales, w1_q, w2_q, w1_scale, w2_scale, topk_ids_, masked_m, a_strides1, b_strides1, c_strides1, "
    "a_strides2, b_strides2, c_strides2, s_strides13, s_strides2, expert_offsets, problem_sizes1, problem_sizes2, "
    "a1_scale=None, a2_scale=None"
)
CHAIN = f"{CHAIN_OLD}, expected_m=None"
APPLY = "self, layer, dispatch_output"
CREATE = "self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs"
# The arguments of sglang-kernel 0.4.10's grouped GEMM.
GEMM = (
    "d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides, "
    "chunk_size=128, topk=8"
)

NEW_KERNELS = "kernels/ops/moe/ep_moe_kernels.py"
OLD_KERNELS = "srt/layers/moe/ep_moe/kernels.py"
NEW_MODULE = "sglang.kernels.ops.moe.ep_moe_kernels"
OLD_MODULE = "sglang.srt.layers.moe.ep_moe.kernels"
CHAIN_FILE = "srt/layers/moe/cutlass_w4a8_moe.py"
METHOD_FILE = "srt/layers/quantization/w4afp8.py"


@dataclass(frozen=True)
class Process:
    """How a fresh process ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def result(self) -> Any:
        """What the script assigned to ``result``."""
        lines = [line for line in self.stdout.splitlines() if line.startswith(_RESULT)]
        assert lines, f"exit status {self.status}, no result\n{self.stdout}\n{self.stderr}"
        return json.loads(lines[-1].removeprefix(_RESULT))

    def lines(self, *parts: str) -> list[str]:
        """Lines of stderr that hold every part."""
        return [line for line in self.stderr.splitlines() if all(part in line for part in parts)]


def run_command(command: Sequence[str], path: Sequence[Path] = (), **environ: str) -> Process:
    """Run a command with ``path`` in front of PYTHONPATH and no switch set but those given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "PYTEST_"))}
    python_path = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [*command],
        env={**inherited, "PYTHONPATH": os.pathsep.join(python_path), **environ},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    return Process(done.returncode, done.stdout, done.stderr)


def run_script(code: str, path: Sequence[Path] = (), **environ: str) -> Process:
    """Run Python code in a fresh process; it assigns what it found to ``result``."""
    return run_command([sys.executable, "-c", textwrap.dedent(code) + _EPILOGUE], path, **environ)


def engine_root() -> Path:
    """The installed engine's package directory."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files below a directory."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def sgl_kernel_with(folder: Path, gemm: str = GEMM) -> Path:
    """A directory with an ``sgl_kernel`` whose grouped GEMM takes ``gemm``, and that has any other name too."""
    code = (
        f"def cutlass_w4a8_moe_mm({gemm}):\n    raise AssertionError('never launched')\n"
        "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n    return print\n"
    )
    return write(folder, {"sgl_kernel/__init__.py": code})


@dataclass
class FakeEngine:
    """A tree named ``sglang`` with the installed engine's real plugin loader and small functions as targets.

    Attributes:
        version: what the engine says of itself.
        files: target files by their path in the package; those of 0.5.23 unless changed.
        published: the guard takes the targets' code, whatever it is, for that of the published engine.
    """

    folder: Path
    version: str = "0.5.23"
    files: dict[str, str] = field(default_factory=dict)
    published: bool = True

    def __post_init__(self) -> None:
        self.files = {
            NEW_KERNELS: (
                f"def fp8_per_token_to_per_tensor_quant_triton({REQUANT}):\n    return 'engine requant'\n"
                f"def silu_and_mul_masked_post_per_tensor_quant_fwd({SILU}):\n    return 'engine silu'\n"
            ),
            CHAIN_FILE: (
                f"from {NEW_MODULE} import fp8_per_token_to_per_tensor_quant_triton\n"
                f"def cutlass_w4a8_moe_deepep_ll({CHAIN}):\n    return 'engine chain'\n"
            ),
            METHOD_FILE: (
                f"class W4AFp8MoEMethod:\n    def apply_deepep_ll({APPLY}):\n        return 'engine method'\n"
                f"    def apply_deepep_normal({APPLY}):\n        return 'engine normal'\n"
                f"    def create_weights({CREATE}):\n        return 'engine create'\n"
                "    def process_weights_after_loading(self, layer):\n        return 'engine process'\n"
            ),
            **self.files,
        }

    def old_layout(self) -> None:
        """The tree of 0.5.12 - 0.5.15: kernels elsewhere, no row estimate."""
        kernels = self.files.pop(NEW_KERNELS).replace(REQUANT, REQUANT_OLD)
        chain = self.files[CHAIN_FILE].replace(CHAIN, CHAIN_OLD)
        self.files[OLD_KERNELS] = kernels
        self.files[CHAIN_FILE] = chain.replace(NEW_MODULE, OLD_MODULE)

    def build(self) -> Path:
        """Write the tree and return the directory to put on PYTHONPATH."""
        package = self.folder / "sglang"
        write(package, {"__init__.py": "", "version.py": f"__version__ = {self.version!r}\n", **self.files})
        for real in ("srt/plugins", "srt/environ.py"):
            (package / real).symlink_to(engine_root() / real)
        if self.published:
            write(self.folder, {"sitecustomize.py": "from sglang_w4afp8 import guard\nguard.known_code = dict\n"})
        return self.folder

    def run(self, code: str, path: Sequence[Path] = (), **environ: str) -> Process:
        """Run code against the tree, with no other plugin of this environment loaded."""
        return run_script(code, [self.build(), *path], **{"SGLANG_PLUGINS": "w4afp8", **environ})


def overlay(folder: Path, changed: dict[str, str]) -> Path:
    """The installed engine with some files replaced: a tree of links to it, put in front of it on PYTHONPATH."""

    def link(real: Path, here: Path, changes: dict[tuple[str, ...], str]) -> None:
        here.mkdir(parents=True)
        first = {parts[0] for parts in changes}
        for entry in real.iterdir():
            if entry.name not in first and entry.name != "__pycache__":
                (here / entry.name).symlink_to(entry)
        for name in first:
            below = {parts[1:]: text for parts, text in changes.items() if parts[0] == name}
            if () in below:
                (here / name).write_text(below[()])
            else:
                link(real / name, here / name, below)

    link(engine_root(), folder / "sglang", {tuple(name.split("/")): text for name, text in changed.items()})
    return folder


# What a server has live where nothing is switched off, in the ledger's order.
EVERY_PATCH = [
    "requant",
    "expected_m",
    "silu",
    "problem_sizes",
    "gemm",
    "input_scales",
    "eplb_scales",
    "two_kernels",
    "bf16_dispatch",
    "normal_fp8",
    "dispatch_cap",
]

# An `sgl_kernel` of which only the grouped GEMM does something: as the compiled one does, in the library's Python signature,
# which our wrapper inspects.
SGL_KERNEL_DOUBLE = """
from sglang_w4afp8.kernels.ops.moe.w4a8_reference import CompiledDispatchDouble

double = CompiledDispatchDouble()

def cutlass_w4a8_moe_mm(d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides,
                        s_strides, chunk_size=128, topk=8):
    double(d, a, b, a_scales, b_scales, experts_offsets, problem_sizes, a_strides, b_strides, d_strides, s_strides,
           chunk_size, topk)

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return print
"""
