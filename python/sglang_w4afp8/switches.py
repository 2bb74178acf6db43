"""Every switch of the plugin: the one module that reads ``SGLANG_W4AFP8_*`` environment variables.

A switch with a value nobody can read is refused, never guessed: an A/B run with a misspelt patch name would otherwise
compare A with A. Only the standard library is imported, so that reading the switches cannot fail.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "SGLANG_W4AFP8_"

# What computes the experts of the low-latency path.
BACKENDS = ("auto", "cutlass", "triton", "reference")

_TRUE = ("1", "true", "yes")
_FALSE = ("0", "false", "no")


class SwitchError(ValueError):
    """A switch that cannot be read. The server must not start on a guess."""


def _boolean(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SwitchError(f"{name}: is {text!r}, must be one of {', '.join(_TRUE + _FALSE)}")


def _backend(name: str, text: str) -> str:
    value = text.strip().lower()
    if value in BACKENDS:
        return value
    raise SwitchError(f"{name}: is {text!r}, must be one of {', '.join(BACKENDS)}")


def _names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in names:
        raise SwitchError(
            f"{name}: is {text!r}, must be patch names separated by commas; "
            f"leave it unset for every patch, or set {PREFIX}DISABLE=1 for none"
        )
    return names


@dataclass(frozen=True)
class Switch:
    """One environment variable.

    Attributes:
        field: its name in :class:`Settings`; the variable is ``PREFIX`` and the field in upper case.
        values: what may be written, for the reader of the table.
        default: what an unset variable means, for the reader of the table.
        meaning: one sentence.
        parse: ``(variable name, text) -> value``; raises :class:`SwitchError`.
        unset: the value when the variable is not set.
    """

    field: str
    values: str
    default: str
    meaning: str
    parse: Callable[[str, str], Any]
    unset: Any

    @property
    def name(self) -> str:
        """The environment variable."""
        return PREFIX + self.field.upper()


_BOOLEAN_VALUES = "`1`, `true`, `yes`, `0`, `false`, `no`"

SWITCHES: tuple[Switch, ...] = (
    Switch(
        "disable",
        _BOOLEAN_VALUES,
        "`0`",
        "Leave the engine untouched. Every other switch is then ignored.",
        _boolean,
        False,
    ),
    Switch(
        "strict",
        _BOOLEAN_VALUES,
        "`0`",
        "Refuse to start the server unless every selected patch is live (or already in the engine's tree).",
        _boolean,
        False,
    ),
    Switch(
        "patches",
        "patch names separated by commas",
        "every patch",
        "Apply only these patches, for an A/B. A name that does not exist is refused.",
        _names,
        None,
    ),
    Switch(
        "allow_unknown_engine",
        _BOOLEAN_VALUES,
        "`0`",
        "Patch an engine version that this release does not know, provided that every signature matches.",
        _boolean,
        False,
    ),
    Switch(
        "measure",
        _BOOLEAN_VALUES,
        "`1`",
        "With `auto`: where no table knows a layer's sizes on this GPU, time both backends when weights are loaded, about two "
        "seconds a size, and take the faster. `0`: CUTLASS there, so that every start is the same.",
        _boolean,
        True,
    ),
    Switch(
        "backend",
        "`auto`, `cutlass`, `triton`, `reference`",
        "`auto`",
        "What computes the experts. `auto`: per layer, two Triton kernels on regrouped weights where they are faster over the "
        "rows that this server sends, by a table of this GPU or by a measurement at load, else CUTLASS. `cutlass`: the "
        "engine's GEMMs, on weights as they are loaded. `triton`: the two kernels wherever a layer is supported. "
        "`reference` computes in float32, slowly and without CUDA graphs, to compare outputs with.",
        _backend,
        "auto",
    ),
)


@dataclass(frozen=True)
class Settings:
    """The switches as read, one field a switch."""

    disable: bool = False
    strict: bool = False
    patches: tuple[str, ...] | None = None
    allow_unknown_engine: bool = False
    measure: bool = True
    backend: str = "auto"


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Read every switch.

    With ``DISABLE`` set nothing else is read: whoever wants the engine untouched must get it, whatever else is set.

    Raises:
        SwitchError: a value cannot be read.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for switch in SWITCHES:
        text = environ.get(switch.name)
        values[switch.field] = switch.unset if text is None else switch.parse(switch.name, text)
        if switch.field == "disable" and values["disable"]:
            return Settings(disable=True)
    return Settings(**values)


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that are no switch: most likely misspelt, hence without effect."""
    environ = os.environ if environ is None else environ
    known = {switch.name for switch in SWITCHES}
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def in_effect(environ: Mapping[str, str] | None = None) -> list[tuple[str, str, bool]]:
    """``(variable, value in effect, was it set)`` of every switch, unparsed, for a report."""
    environ = os.environ if environ is None else environ
    return [(s.name, environ.get(s.name, s.default.strip("`")), s.name in environ) for s in SWITCHES]


def markdown_table() -> str:
    """The table of switches that the README shows."""
    rows = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{s.name}` | {s.values} | {s.default} | {s.meaning} |" for s in SWITCHES]
    return "\n".join(rows) + "\n"
