"""The switches: what may be written, what is refused, and that no other module reads them."""

import ast
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

import sglang_w4afp8
from sglang_w4afp8 import switches
from sglang_w4afp8.switches import Settings, SwitchError

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def test_nothing_set_means_every_patch_and_no_strictness():
    assert switches.read({}) == Settings(
        disable=False, strict=False, patches=None, allow_unknown_engine=False, backend="auto"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES", True), (" 1 ", True), ("0", False), ("False", False), ("no", False)],
)
def test_boolean(text, value):
    assert switches.read({"SGLANG_W4AFP8_STRICT": text}).strict is value
    assert switches.read({"SGLANG_W4AFP8_ALLOW_UNKNOWN_ENGINE": text}).allow_unknown_engine is value


@pytest.mark.parametrize("text", ["", "on", "2", "ture"])
@pytest.mark.parametrize("name", ["DISABLE", "STRICT", "ALLOW_UNKNOWN_ENGINE"])
def test_boolean_that_cannot_be_read_is_refused(name, text):
    with pytest.raises(
        SwitchError, match=f"^SGLANG_W4AFP8_{name}: is '{text}', must be one of 1, true, yes, 0, false, no$"
    ):
        switches.read({f"SGLANG_W4AFP8_{name}": text})


def test_patch_names():
    assert switches.read({"SGLANG_W4AFP8_PATCHES": "silu, requant,silu"}).patches == ("silu", "requant")


@pytest.mark.parametrize("text", ["", " ", "requant,", ",", "requant,,silu"])
def test_empty_patch_name_is_refused(text):
    with pytest.raises(SwitchError, match="^SGLANG_W4AFP8_PATCHES: is .*DISABLE=1 for none$"):
        switches.read({"SGLANG_W4AFP8_PATCHES": text})


@pytest.mark.parametrize(
    ("text", "value"), [("cutlass", "cutlass"), ("triton", "triton"), ("auto", "auto"), (" Triton ", "triton")]
)
def test_backend(text, value):
    assert switches.read({"SGLANG_W4AFP8_BACKEND": text}).backend == value


@pytest.mark.parametrize("text", ["", "1", "trition", "cutlass,triton"])
def test_backend_that_does_not_exist_is_refused(text):
    with pytest.raises(
        SwitchError, match=f"^SGLANG_W4AFP8_BACKEND: is '{text}', must be one of auto, cutlass, triton, reference$"
    ):
        switches.read({"SGLANG_W4AFP8_BACKEND": text})


def test_disable_wins_over_everything_else():
    environ = {"SGLANG_W4AFP8_DISABLE": "1", "SGLANG_W4AFP8_STRICT": "nonsense", "SGLANG_W4AFP8_PATCHES": ","}
    assert switches.read(environ) == Settings(disable=True)


def test_misspelt_variable_is_found():
    environ = {"SGLANG_W4AFP8_PATCH": "requant", "SGLANG_W4AFP8_STRICT": "1", "SGLANG_PLUGINS": "w4afp8"}
    assert switches.unknown(environ) == ["SGLANG_W4AFP8_PATCH"]


def test_table_and_settings_hold_the_same_switches():
    assert [switch.field for switch in switches.SWITCHES] == [f.name for f in fields(Settings)]
    defaults = {switch.field: switch.unset for switch in switches.SWITCHES}
    assert Settings(**defaults) == Settings()
    rows = switches.markdown_table().splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == [switch.name for switch in switches.SWITCHES]
    assert {row.count("|") for row in rows} == {5}


def test_report_tells_set_from_default():
    shown = switches.in_effect({"SGLANG_W4AFP8_PATCHES": "silu"})
    assert ("SGLANG_W4AFP8_PATCHES", "silu", True) in shown
    assert ("SGLANG_W4AFP8_STRICT", "0", False) in shown
    assert ("SGLANG_W4AFP8_BACKEND", "auto", False) in shown


def test_no_other_module_reads_a_switch():
    package = Path(sglang_w4afp8.__file__).parent
    readers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            arguments = (
                node.args if isinstance(node, ast.Call) else [node.slice] if isinstance(node, ast.Subscript) else []
            )
            texts = [a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if any(re.fullmatch(r"SGLANG_W4AFP8_\w*", text) for text in texts):
                readers.add(path.relative_to(package).as_posix())
    assert readers <= {"switches.py"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
