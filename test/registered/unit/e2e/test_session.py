"""The script of a GPU session (`run_h200_e2e.py`): what is done once, what runs again, and what of it is collected."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

REPO = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(REPO / "benchmark" / "e2e"), str(REPO / "scripts")]

import decode_ab  # noqa: E402
import equality  # noqa: E402
import soak  # noqa: E402
from harness import report  # noqa: E402

import run_h200_e2e  # noqa: E402
from sglang_w4afp8 import plugin  # noqa: E402

# Stands for soak.py and decode_ab.py: notes that it ran, leaves its words as its results, and ends when and as it is told to.
TOOL = """
import json, pathlib, sys, time
here = pathlib.Path(__file__).parent
with open(here / "ran", "a") as ran:
    ran.write(json.dumps(sys.argv) + "\\n")
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.write_text(json.dumps(sys.argv))
while (here / "held").exists():
    time.sleep(0.05)
sys.exit(int((here / "status").read_text()))
"""


class Session:
    """Calls of the script in one folder, with stand-ins for the tools."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for tool in ("soak.py", "decode_ab.py"):
            (root / tool).write_text(TOOL)
        self.ends(0)

    def ends(self, status: int) -> None:
        """How the tools end from now on; those that are held end now."""
        (self.root / "status").write_text(str(status))
        (self.root / "held").unlink(missing_ok=True)

    def holds(self) -> None:
        """The tools run on until `ends`."""
        (self.root / "held").touch()

    def waits_for_run(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.ran) < count:
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    def __call__(self, *words: object) -> int:
        flags = ["--work", self.root / "work", "--out", self.root / "out", "--least", 0]
        return run_h200_e2e.main([*map(str, words), *map(str, flags)])

    @property
    def ran(self) -> list[list[str]]:
        path = self.root / "ran"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def result(self, name: str) -> list[str]:
        """The words of the run whose results were collected."""
        return json.loads((self.root / "out" / name).read_text())


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr(run_h200_e2e, "E2E", tmp_path)
    monkeypatch.setattr(run_h200_e2e, "_MARGIN_S", 0.0)
    monkeypatch.setattr(run_h200_e2e.Run, "check", lambda run: 0)
    monkeypatch.setattr(run_h200_e2e.Run, "make", lambda run, experts, *, weights: 0)
    monkeypatch.setattr(report, "nvidia_smi", lambda *fields: [["143771"]] * 8)
    before = signal.getsignal(signal.SIGTERM)
    yield Session(tmp_path)
    signal.signal(signal.SIGTERM, before)
    for path in tmp_path.glob("work/soak*/pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


AB = ("ab-64", "--merge-into", "none.json")


@pytest.mark.parametrize(
    "more",
    [
        *[("--arms", "engine", "cutlass"), ("--blocks", 5), ("--rounds", 5), ("--concurrency", 16), ("--layers", 6)],
        *[("--dense-layers", 2), ("--mem-fraction", 0.6), ("--server-args=--attention-backend fa3",), ("--ranks", 2)],
    ],
)
def test_another_command_is_not_done(session, more):
    assert session(*AB) == 0
    first = session.ran
    assert session(*AB, "--seconds", 500, "--least", 2) == 0  # time is no part of it
    assert session.ran == first
    assert session(*AB, *more) == 0
    again = session.ran
    assert len(again) > len(first)
    for words in (AB, (*AB, *more)):
        assert session(*words) == 0 and session.ran == again


def test_another_engine_or_plugin_is_not_done(session, monkeypatch):
    assert session(*AB) == 0
    monkeypatch.setattr(run_h200_e2e, "_engine_version", lambda: "0.5.99")
    assert session(*AB) == 0 and len(session.ran) == 2
    # What `check` unpacks from a wheel is what the servers load, whatever is installed here.
    unpacked = session.root / "work" / "plugin_site" / "sglang_w4afp8"
    unpacked.mkdir(parents=True)
    for count, text in ((3, "a = 1\n"), (4, "a = 2\n"), (4, "a = 2\n")):
        (unpacked / "plugin.py").write_text(text)
        assert session(*AB) == 0 and len(session.ran) == count
    (unpacked / "plugin.py").unlink()
    for path in Path(plugin.__file__).parent.rglob("*"):
        if path.suffix in (".py", ".json"):
            copy = unpacked / path.relative_to(Path(plugin.__file__).parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    assert session(*AB) == 0 and len(session.ran) == 4  # the same plugin as the first one's


def test_runs_of_several_models_and_engines_share_the_file_that_they_continue(session, monkeypatch):
    outs = {}
    for key, words, engine in (
        ("one", AB, "0.5.18"),
        ("model", ("ab-256", *AB[1:]), "0.5.18"),
        ("engine", AB, "0.5.21"),
        ("ranks", (*AB, "--tp", 2, "--ep", 2), "0.5.21"),
        ("continued", ("ab-64", "--merge-into", session.root / "other.json"), "0.5.21"),
    ):
        monkeypatch.setattr(run_h200_e2e, "_engine_version", lambda engine=engine: engine)
        assert session(*words) == 0
        last = session.ran[-1]
        outs[key] = last[last.index("--out") + 1]
    assert outs["one"] == outs["model"] == outs["engine"]
    assert len(set(outs.values())) == 3


def test_results_go_on_from_the_file_that_is_named(session):
    named = session.root / "named.json"
    named.write_text("[1]")
    session.ends(1)
    (session.root / "decode_ab.py").write_text("raise SystemExit(1)")
    assert session("ab-64", "--merge-into", named) == 1
    assert session.result("e2e_decode.json") == [1]
    # Nobody measured anything that belongs there.
    (session.root / "out" / "e2e_decode.json").unlink()
    assert session("config", "--merge-into", named) == 0
    assert not (session.root / "out" / "e2e_decode.json").exists()


def test_the_soak_of_another_run_is_not_this_ones(session):
    assert session("soak", "--minutes", 1) == 0
    one = session.result("e2e_soak.json")
    assert session("soak", "--minutes", 1, "--ranks", 2) == 0
    two = session.result("e2e_soak.json")
    assert (one[one.index("--tp") + 1], two[two.index("--tp") + 1]) == ("1", "2")
    assert session("soak", "--minutes", 1) == 0 and session.result("e2e_soak.json") == one
    assert session.ran == [one, two]
    assert session("soak", "--minutes", 2) == 0 and len(session.ran) == 3


def test_a_soak_that_failed_runs_again(session):
    session.ends(6)
    assert session("soak") == 6
    session.ends(0)
    assert session("soak") == 0
    assert session("soak") == 0
    assert len(session.ran) == 2


def test_a_soak_that_was_killed_is_said_once_and_runs_again(session, capsys):
    session.holds()
    assert session("soak", "--seconds", 1) == 3
    session.waits_for_run(1)
    (path,) = session.root.glob("work/soak-*/pid")
    os.killpg(int(path.read_text()), signal.SIGKILL)
    assert session("soak") == 1 and "the soak was killed" in capsys.readouterr().err
    session.ends(0)
    assert session("soak") == 0 and len(session.ran) == 2


def test_a_soak_has_no_command_line_yet_right_after_its_start(session, monkeypatch):
    monkeypatch.setattr(run_h200_e2e.psutil.Process, "cmdline", lambda process: [])
    session.holds()
    assert session("soak", "--seconds", 1) == 3  # not 1, of one that was killed
    session.ends(0)


def test_a_soak_waits_for_the_one_of_another_command(session, capsys):
    """Both would want the same GPU memory."""
    session.holds()
    assert session("soak", "--seconds", 1) == 3
    session.waits_for_run(1)
    assert session("soak", "--minutes", 1, "--seconds", 1) == 3
    assert len(session.ran) == 1 and "waiting for a soak of another command" in capsys.readouterr().err
    session.ends(0)
    assert session("soak", "--minutes", 1) == 0 and len(session.ran) == 2
    assert session("soak") == 0 and len(session.ran) == 2


def test_the_end_of_every_log_is_archived(session, monkeypatch):
    monkeypatch.setattr(run_h200_e2e, "_LOG_BYTES", 1000)
    monkeypatch.setattr(run_h200_e2e, "_JSON_BYTES", 3000)
    runs = session.root / "work" / "models-of-mine"
    runs.mkdir(parents=True)
    whole = bytes(i % 251 for i in range(2500))
    for name, data in {"long.log": whole, "short.log": b"end", "part.json": whole, "huge.json": whole * 2}.items():
        (runs / name).write_bytes(data)
    for folder in ("models", "plugin_site"):
        (session.root / "work" / folder).mkdir()
        (session.root / "work" / folder / "config.json").write_text("{}")
    assert session("check") == 0
    with tarfile.open(session.root / "out" / "e2e_logs.tar.gz") as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}
    kept = {"long.log": whole[-1000:], "short.log": b"end", "part.json": whole}
    assert found == {f"models-of-mine/{name}": data for name, data in kept.items()}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_the_tools_write_by_default_is_not_committed(tmp_path):
    """At the root, where the README has them started; results that are to stay are under benchmark/results."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(REPO / ".gitignore", tmp_path)
    written = [f"e2e_{name}" for name in ("work/a.log", "decode.json", "decode.csv", "decode_m.png", "soak.json")]
    kept = [f"benchmark/results/h200/{name}" for name in written]
    found = subprocess.run(["git", "check-ignore", *written, *kept], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.split() == written
    defaults = [tool._parser().parse_args(["--model-path", "m"]) for tool in (decode_ab, equality, soak)]
    assert all(args.out.match("e2e_*.json") and str(args.work) == "e2e_work" for args in defaults)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
