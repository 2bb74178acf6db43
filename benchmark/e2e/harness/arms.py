"""What is compared: the engine alone, the plugin, the plugin with a backend of its own, or a chosen list of its patches."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_PREFIX = "SGLANG_W4AFP8_"
ENGINE, PLUGIN, CUTLASS, TRITON, AUTO, REFERENCE = "engine", "plugin", "cutlass", "triton", "auto", "reference"
# Without it nothing but the engine's GEMMs computes the experts, whatever the backend's switch says.
_BACKEND_PATCH = "two_kernels"


@dataclass(frozen=True)
class Arm:
    """One side of the comparison.

    Attributes:
        name: as in the results: ``engine``, ``plugin``, a backend's name, or the patch names joined with commas.
        patches: the patches that must be live; empty for the engine alone, None for all that the plugin selects.
        backend: what ``SGLANG_W4AFP8_BACKEND`` asks for; None leaves it to the plugin's default.
        flags: server flags that the arm cannot do without.
    """

    name: str
    patches: tuple[str, ...] | None
    backend: str | None = None
    flags: tuple[str, ...] = ()

    @property
    def is_engine(self) -> bool:
        """Whether the plugin must leave the engine untouched."""
        return self.patches == ()

    @property
    def computes(self) -> str | None:
        """What must compute the experts; None where the plugin may choose."""
        if self.patches is not None and _BACKEND_PATCH not in self.patches:
            return CUTLASS
        backend = self.backend or default_backend()
        return None if backend == AUTO else backend

    @property
    def slug(self) -> str:
        """The name as a part of a file name."""
        return self.name.replace(",", "+")

    def environ(self, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """The server's environment. Switches of the caller do not leak into an arm."""
        base = os.environ if inherited is None else inherited
        environ = {key: value for key, value in base.items() if not key.startswith(_PREFIX)}
        if self.is_engine:
            return {**environ, f"{_PREFIX}DISABLE": "1"}
        environ[f"{_PREFIX}STRICT"] = "1"  # a patch that cannot be live stops the server instead of comparing A with A
        if self.patches is not None:
            environ[f"{_PREFIX}PATCHES"] = ",".join(self.patches)
        if self.backend is not None:
            environ[f"{_PREFIX}BACKEND"] = self.backend
        return environ


def _plugin() -> ModuleType:
    """The plugin's module, of the installed package or else of this checkout. It imports the standard library only."""
    try:
        from sglang_w4afp8 import plugin
    except ModuleNotFoundError:
        sys.path.append(str(Path(__file__).resolve().parents[3] / "python"))
        from sglang_w4afp8 import plugin
    return plugin


def default_backend() -> str:
    """What the plugin takes where nothing is asked for."""
    _plugin()
    from sglang_w4afp8 import switches

    return switches.Settings().backend


def known_patches() -> tuple[str, ...]:
    """Names in the plugin's ledger."""
    return tuple(patch.name for patch in _plugin().LEDGER)


def plugin_digest(root: Path | None = None) -> str:
    """A digest of the plugin's files: results of two states of it must not be mixed.

    Args:
        root: its package directory; None: that of the one that is imported here.
    """
    root = root or Path(str(_plugin().__file__)).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def parse_arm(text: str) -> Arm:
    """``engine``, ``plugin``, ``cutlass``, ``triton``, ``auto``, ``reference``, or patch names separated by commas.

    Raises:
        ValueError: a name that is not in the plugin's ledger.
    """
    if text == ENGINE:
        return Arm(ENGINE, ())
    if text == PLUGIN:
        return Arm(PLUGIN, None)
    if text in (CUTLASS, TRITON, AUTO):
        return Arm(text, None, backend=text)
    if text == REFERENCE:
        return Arm(REFERENCE, None, backend=REFERENCE, flags=("--disable-cuda-graph",))
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in known_patches()]
    if unknown:
        raise ValueError(
            f"arm: {text!r} names {', '.join(map(repr, unknown))}, must be {ENGINE!r}, {PLUGIN!r}, {CUTLASS!r}, {TRITON!r}, "
            f"{AUTO!r}, {REFERENCE!r} or names out of {', '.join(known_patches())}"
        )
    return Arm(",".join(names), names)
