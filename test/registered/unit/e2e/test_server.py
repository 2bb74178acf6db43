"""A server of the end-to-end tools: none of its processes is left, whatever happens, and no other one is taken for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

REPO = Path(__file__).resolve().parents[4]
FAKE = Path(__file__).with_name("fake_server.py")
sys.path[:0] = [str(REPO / "benchmark" / "e2e"), str(REPO / "scripts")]

from harness import server as harness  # noqa: E402
from harness.arms import ENGINE, Arm  # noqa: E402
from harness.server import LaunchOptions, Server, ServerError  # noqa: E402

import run_h200_e2e  # noqa: E402

# A launcher and a child in its process group, which both ignore SIGTERM and whose pids are written down.
STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
role = "launcher" if os.fork() else "child"
path = pathlib.Path(sys.argv[1]) / role
path.with_suffix(".partial").write_text(str(os.getpid()))
path.with_suffix(".partial").rename(path)
time.sleep(120)
"""
# A driver with one such server.
DRIVER = """
import pathlib, sys, time
from harness import server
from harness.arms import Arm
folder = pathlib.Path(sys.argv[1])
server._TERM_SECONDS = 6.0
server.install_cleanup()
options = server.LaunchOptions("m", (8,), command=(sys.executable, "-c", sys.argv[2], str(folder)))
with server.Server(Arm("engine", ()), options, folder / "log").start():
    time.sleep(120)
"""


def _wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Pair:
    """The two processes of ``STUBBORN``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = (sys.executable, "-c", STUBBORN, str(folder))

    @property
    def pids(self) -> list[int]:
        return [
            int((self.folder / role).read_text()) for role in ("launcher", "child") if (self.folder / role).exists()
        ]

    def wait(self) -> None:
        _wait_for(lambda: len(self.pids) == 2)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for pid in made.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _server(folder: Path, *command: str, port: int = 0) -> Server:
    options = LaunchOptions("m", (8,), command=command)
    return Server(Arm(ENGINE, ()), options, folder / "server.log", port=port)


def test_children_of_a_launcher_that_was_killed_are_stopped(pair, monkeypatch):
    """The kernel kills the largest process first; its children are the group's, and nobody else's."""
    monkeypatch.setattr(harness, "_TERM_SECONDS", 0.5)
    with _server(pair.folder, *pair.command).start() as server:
        pair.wait()
        os.kill(server.process.pid, signal.SIGKILL)
        _wait_for(lambda: server.process.poll() is not None)
        assert [process.pid for process in server.tree()] == pair.pids[1:]
    assert [pid for pid in pair.pids if _alive(pid)] == []
    assert harness._live == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_no_server(pair, signum):
    """It comes while the first one's stop waits for processes that ignore SIGTERM."""
    environ = {**os.environ, "PYTHONPATH": str(REPO / "benchmark" / "e2e")}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(pair.folder), STUBBORN], env=environ)
    try:
        pair.wait()
        driver.send_signal(signal.SIGINT)
        time.sleep(0.7)
        assert driver.poll() is None
        driver.send_signal(signum)
        assert driver.wait(timeout=60) == 128 + signum
    finally:
        driver.kill()
    assert [pid for pid in pair.pids if _alive(pid)] == []


def test_a_signal_during_a_stop_is_not_lost(pair, monkeypatch):
    """Between two starts it must end the driver, as it does at any other moment."""
    monkeypatch.setattr(harness, "_TERM_SECONDS", 0.5)
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        server = _server(pair.folder, *pair.command).start()
        pair.wait()
        end = server._end
        monkeypatch.setattr(server, "_end", lambda: (signal.raise_signal(signal.SIGTERM), seen.append(0), end()))
        server.stop()
        assert seen == [0, signal.SIGTERM]
        server.stop()
        assert signal.getsignal(signal.SIGTERM)(0, None) is None and seen[-1] == 0  # ours again
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [pid for pid in pair.pids if _alive(pid)] == []


def test_a_session_leaves_an_interrupted_tool_time_to_stop_its_servers(tmp_path, monkeypatch):
    """A terminal interrupts both; a SIGTERM of ours on top would be the tool's second signal."""
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(99))\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(float(sys.argv[2]))\n    pathlib.Path(sys.argv[1]).unlink()\n"
    )
    session = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import pathlib, run_h200_e2e as m\n"
        "m._INTERRUPTED_S = 6.0\n"
        "words = ['check', '--work', sys.argv[1], '--out', sys.argv[1]]\n"
        "m.Run(m.parse_arguments(words)).tool(pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4])\n"
    )
    for seconds, stops in ((0.5, True), (50.0, False)):
        mark = tmp_path / f"mark{seconds}"
        words = [str(REPO / "scripts"), str(tmp_path / "w"), str(tool), str(mark), str(seconds)]
        driver = subprocess.Popen(
            [sys.executable, "-c", session, *words],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
            # A shell has what it runs in the background ignore SIGINT, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            _wait_for(mark.exists)
            os.killpg(driver.pid, signal.SIGINT)
            assert driver.wait(timeout=40) != 0
            assert mark.exists() is not stops  # one that does not end by itself is told to
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    assert run_h200_e2e._INTERRUPTED_S > 2 * harness._TERM_SECONDS


def test_a_hangup_that_is_ignored_stays_ignored():
    """``nohup`` starts a run that is to outlive its terminal."""
    code = (
        "import signal, sys; from harness import server\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == '1' else signal.SIG_DFL)\n"
        "server.install_cleanup(); signal.raise_signal(signal.SIGHUP); print('runs on')"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPO / "benchmark" / "e2e")}
    for ignored, status in (("1", 0), ("0", 128 + signal.SIGHUP)):
        done = subprocess.run([sys.executable, "-c", code, ignored], env=environ, capture_output=True, text=True)
        assert (done.returncode, "runs on" in done.stdout) == (status, status == 0), done.stderr


def test_the_log_of_an_earlier_start_is_kept(tmp_path):
    for text in ("first", "second", "third"):
        with _server(tmp_path, sys.executable, "-c", f"print({text!r})").start() as server:
            server.process.wait(timeout=60)
    logs = {path.name: path.read_text().strip() for path in tmp_path.glob("*.log")}
    assert logs == {"server.1.log": "first", "server.2.log": "second", "server.log": "third"}


STRANGER = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@contextlib.contextmanager
def _stranger(port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", STRANGER, str(port)], stderr=subprocess.DEVNULL)
    try:
        _wait_for(lambda: not harness._is_free(port))
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken_starts_nothing(tmp_path):
    port = harness.free_port()
    with _stranger(port) as stranger:
        server = _server(tmp_path, *SLEEP, port=port)
        with pytest.raises(ServerError, match=f"^engine: port {port} is taken by process {stranger.pid}$"):
            server.start()
        assert server.process is None and harness._live == []


def test_another_server_on_the_port_is_not_ready(tmp_path, monkeypatch):
    """It took the port after it had been found to be free."""
    port = harness.free_port()
    with _stranger(port) as stranger, monkeypatch.context() as patch:
        patch.setattr(harness, "_is_free", lambda port: True)
        with _server(tmp_path, *SLEEP, port=port).start() as server:
            served = f"^engine: port {port} is served by process {stranger.pid}, which this server did not start"
            with pytest.raises(ServerError, match=served):
                server.wait_ready(30.0)
    # The engine's own command serves itself; another one may have a server run elsewhere, but not since before it started.
    with _server(tmp_path, *SLEEP, port=port).start() as server, _stranger(port):
        with monkeypatch.context() as patch:
            patch.setattr(harness, "LAUNCH", SLEEP)
            with pytest.raises(ServerError, match="which this server did not start"):
                server.wait_ready(30.0)
        assert server.wait_ready(30.0) > 0.0


def test_a_server_that_serves_from_a_child_is_ready(tmp_path):
    """The engine listens in its launcher or in workers below it."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[sys.argv.index('--port') + 1]])"
    with _server(tmp_path, sys.executable, "-c", code, STRANGER).start() as server:
        assert server.port > 0 and server.wait_ready(30.0) > 0.0
        assert [process.pid for process in harness._listeners(server.port)] == [server.tree()[1].pid]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
