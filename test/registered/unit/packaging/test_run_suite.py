"""The lane runner, on small trees made here: what it selects, what it refuses, and that its exit status is right.

Each test runs ``run_suite.py`` as a command, with the markers parsed by the installed engine.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

TEST_DIR = Path(__file__).resolve().parents[3]
MAIN = '\nif __name__ == "__main__":\n    import sys, pytest\n    sys.exit(pytest.main([__file__, "-v"]))\n'


class Tree:
    """A repository with this project's runner, conftest and pytest settings, and lanes of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "test" / "registered").mkdir(parents=True)
        for name in ("run_suite.py", "conftest.py"):
            shutil.copy(TEST_DIR / name, root / "test" / name)
        shutil.copy(TEST_DIR.parent / "pyproject.toml", root)

    def add(self, name: str, markers: str, body: str, main: str = MAIN) -> None:
        path = self.root / "test" / "registered" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Stand-ins for the engine's markers: the parser reads their names only, and the engine takes seconds to import.
        names = "import sys\n\ndef register_cpu_ci(*a, **k): ...\ndef register_cuda_ci(*a, **k): ...\n"
        path.write_text(f"{names}{markers}\n{body}\n{main}")

    def run(self, *arguments: str, python_flags: tuple[str, ...] = (), **environment: str) -> tuple[int, str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_", "CUDA_"))}
        command = [sys.executable, *python_flags, str(self.root / "test" / "run_suite.py"), *arguments]
        done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def summary(stdout: str) -> str:
    """pytest's closing line without its rule and its duration: ``1 failed, 2 passed``."""
    return stdout.rstrip().splitlines()[-1].strip("= ").split(" in ")[0]


def test_runs_only_the_lane_asked_for(tree: Tree) -> None:
    tree.add("a/test_same_name.py", 'register_cpu_ci(est_time=1, suite="one")', "def test_a(): pass")
    tree.add("b/test_same_name.py", 'register_cpu_ci(est_time=1, suite="two")', "def test_b(): assert False")
    tree.add("b/test_cuda.py", 'register_cuda_ci(est_time=1, suite="one")', "def test_c(): assert False")
    status, stdout, _ = tree.run("--hw", "cpu", "--suite", "one")
    assert (status, summary(stdout)) == (0, "1 passed")


def test_without_a_suite_every_lane_of_the_hardware_runs_and_a_failure_is_the_exit_status(tree: Tree) -> None:
    tree.add("a/test_same_name.py", 'register_cpu_ci(est_time=1, suite="one")', "def test_a(): pass")
    tree.add("b/test_same_name.py", 'register_cpu_ci(est_time=1, suite="two")', "def test_b(): assert False")
    status, stdout, _ = tree.run("--hw", "cpu")
    assert (status, summary(stdout)) == (1, "1 failed, 1 passed")


def test_a_file_in_two_lanes_runs_once(tree: Tree) -> None:
    markers = 'register_cpu_ci(est_time=1, suite="one")\nregister_cpu_ci(est_time=1, suite="two")'
    tree.add("test_both.py", markers, "def test_a(): pass")
    status, stdout, _ = tree.run("--hw", "cpu")
    assert (status, summary(stdout)) == (0, "1 passed")


def test_stage_and_runner_make_a_lane_name(tree: Tree) -> None:
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, stage="base-a", runner_config="cpu")', "def test_a(): pass")
    status, stdout, _ = tree.run("--hw", "cpu", "--suite", "base-a-test-cpu")
    assert (status, summary(stdout)) == (0, "1 passed")


@pytest.mark.parametrize("name", ["test_forgotten.py", "deep/down/bench_forgotten.py"])
def test_an_unregistered_file_is_an_error_that_names_it(tree: Tree, name: str) -> None:
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="one")', "def test_a(): pass")
    tree.add(name, "", "def test_b(): pass")
    status, stdout, stderr = tree.run("--hw", "cpu", "--suite", "one")
    assert (status, stdout) == (2, "")
    assert "No CI registry found" in stderr and name in stderr


def test_a_file_that_runs_nothing_as_a_script_is_an_error_that_names_it(tree: Tree) -> None:
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="one")', "def test_a(): pass", main="")
    status, stdout, stderr = tree.run("--hw", "cpu")
    assert (status, stdout) == (2, "")
    assert "test_a.py" in stderr and "__main__" in stderr


def test_arguments_that_are_not_literals_are_an_error(tree: Tree) -> None:
    tree.add("test_a.py", 'LANE = "one"\nregister_cpu_ci(est_time=1, suite=LANE)', "def test_a(): pass")
    status, _, stderr = tree.run("--hw", "cpu")
    assert status == 2 and "suite=False" in stderr and "test_a.py" in stderr


def test_an_unknown_lane_is_an_error_that_lists_the_known_ones(tree: Tree) -> None:
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="one")', "def test_a(): pass")
    tree.add("test_b.py", 'register_cpu_ci(est_time=1, suite="two")', "def test_b(): pass")
    status, stdout, stderr = tree.run("--hw", "cpu", "--suite", "three")
    assert (status, stdout) == (2, "")
    assert stderr == "error: no lane 'three' for --hw cpu; known: one, two\n"


def test_a_disabled_file_is_reported_with_its_reason_and_not_run(tree: Tree) -> None:
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="one")', "def test_a(): pass")
    tree.add("test_b.py", 'register_cpu_ci(est_time=1, suite="one", disabled="too slow")', "def test_b(): assert False")
    status, stdout, _ = tree.run("--hw", "cpu", "--suite", "one")
    assert (status, summary(stdout)) == (0, "1 passed")
    assert "skipped test/registered/test_b.py (one): too slow\n" in stdout


def test_a_lane_with_every_file_disabled_says_that_nothing_ran(tree: Tree) -> None:
    tree.add("test_b.py", 'register_cpu_ci(est_time=1, suite="one", disabled="too slow")', "def test_b(): assert False")
    status, stdout, _ = tree.run("--hw", "cpu", "--suite", "one")
    assert (status, summary(stdout)) == (0, "nothing to run: every file of the lane is disabled")


def test_nightly_files_run_only_when_asked_for(tree: Tree) -> None:
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="one")', "def test_a(): pass")
    tree.add("test_b.py", 'register_cpu_ci(est_time=1, suite="long", nightly=True)', "def test_b(): pass")
    assert summary(tree.run("--hw", "cpu")[1]) == "1 passed"
    assert summary(tree.run("--hw", "cpu", "--nightly")[1]) == "2 passed"
    status, _, stderr = tree.run("--hw", "cpu", "--suite", "long")
    assert status == 2 and "add --nightly" in stderr


def test_arguments_after_the_dashes_go_to_pytest(tree: Tree) -> None:
    body = "def test_keep(): pass\ndef test_drop(): assert False"
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="one")', body)
    status, stdout, _ = tree.run("--hw", "cpu", "--", "-k", "keep")
    assert (status, summary(stdout)) == (0, "1 passed, 1 deselected")


def test_the_cpu_lanes_are_interpreted_and_see_no_gpu(tree: Tree) -> None:
    body = "import os\ndef test_a(): assert [os.environ[k] for k in ('TRITON_INTERPRET', 'CUDA_VISIBLE_DEVICES')] == %s"
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="unset")', body % ["1", ""])
    tree.add("test_b.py", 'register_cpu_ci(est_time=1, suite="kept")', body % ["0", ""])
    assert summary(tree.run("--hw", "cpu", "--suite", "unset", CUDA_VISIBLE_DEVICES="0")[1]) == "1 passed"
    assert summary(tree.run("--hw", "cpu", "--suite", "kept", TRITON_INTERPRET="0")[1]) == "1 passed"


def test_the_cuda_lanes_refuse_to_run_without_a_gpu(tree: Tree) -> None:
    tree.add("test_a.py", 'register_cuda_ci(est_time=1, suite="one")', "def test_a(): pass")
    status, stdout, stderr = tree.run("--hw", "cuda", CUDA_VISIBLE_DEVICES="")
    assert (status, stdout) == (2, "")
    assert stderr.startswith("error: --hw cuda needs a GPU, and torch ")


def test_a_benchmark_is_run_as_a_script_with_its_short_set(tree: Tree) -> None:
    body = "def main():\n    print('arguments:', sys.argv[1:])"
    main = 'if __name__ == "__main__":\n    main()'
    tree.add("bench_a.py", 'register_cpu_ci(est_time=1, suite="bench")', body, main)
    status, stdout, _ = tree.run("--hw", "cpu", "--suite", "bench")
    assert (status, summary(stdout)) == (0, "1 passed")
    assert "arguments: ['--ci']" in stdout


def test_a_benchmark_that_exits_non_zero_fails_the_lane(tree: Tree) -> None:
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="bench")', "def test_a(): pass")
    main = 'if __name__ == "__main__":\n    print("bytes differ")\n    sys.exit(3)'
    tree.add("bench_a.py", 'register_cpu_ci(est_time=1, suite="bench")', "", main)
    status, stdout, _ = tree.run("--hw", "cpu", "--suite", "bench")
    assert (status, summary(stdout)) == (1, "1 failed, 1 passed")
    assert "bench_a.py --ci exited with status 3" in stdout and "bytes differ" in stdout


def test_list_shows_every_lane_with_its_files(tree: Tree) -> None:
    tree.add("a/test_a.py", 'register_cpu_ci(est_time=2, suite="one")', "")
    tree.add("b/test_b.py", 'register_cuda_ci(est_time=3, suite="two", nightly=True)', "")
    tree.add("b/test_c.py", 'register_cuda_ci(est_time=4, suite="two", disabled="no driver")', "")
    status, stdout, _ = tree.run("--list")
    assert (status, stdout.splitlines()) == (
        0,
        [
            "--hw cpu --suite one  (1 files, about 2 s)",
            "    test/registered/a/test_a.py",
            "--hw cuda --suite two  (2 files, about 3 s)",
            "    test/registered/b/test_b.py (nightly)",
            "    test/registered/b/test_c.py (disabled: no driver)",
        ],
    )


def test_without_the_engine_the_error_says_what_to_install(tree: Tree) -> None:
    tree.add("test_a.py", 'register_cpu_ci(est_time=1, suite="one")', "def test_a(): pass")
    status, _, stderr = tree.run("--hw", "cpu", python_flags=("-S", "-E"))
    assert status == 2 and "install the engine" in stderr


def test_the_hardware_must_be_named(tree: Tree) -> None:
    status, _, stderr = tree.run("--suite", "one")
    assert status == 2 and "--hw is required" in stderr


def test_no_two_modules_that_are_imported_by_their_bare_name_share_one() -> None:
    """Tests put these folders on the path together, and the first one found would hide the other."""
    folders = [TEST_DIR.parent / name for name in ("test", "scripts", "benchmark", "benchmark/e2e")]
    names = [path.stem for folder in folders for path in folder.glob("*.py")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
