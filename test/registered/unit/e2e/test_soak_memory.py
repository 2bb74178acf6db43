"""Memory in a soak: whose it is, on which GPU, and when it has grown."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

REPO = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(REPO / "benchmark" / "e2e")]

import soak  # noqa: E402
from harness.server import LaunchOptions  # noqa: E402

GPUS = "0, GPU-aa, 9000\n1, GPU-bb, 300\n2, GPU-cc, 20\n"


class Smi:
    """A fake nvidia-smi, and a server of processes 11 and 12."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = folder / "nvidia-smi"
        script.write_text(
            '#!/bin/sh\ncd "$(dirname "$0")"\ncase "$1" in\n*compute-apps*) cat apps ;;\n*memory.used*) cat gpus ;;\n'
            "*index,uuid*) cut -d, -f1,2 gpus ;;\nesac\n"
        )
        script.chmod(0o755)
        self.says("", GPUS)

    def says(self, apps: str, gpus: str) -> None:
        (self.folder / "apps").write_text(apps)
        (self.folder / "gpus").write_text(gpus)

    def memory(self, *, tp: int = 1, extra: tuple[str, ...] = ()) -> soak.GpuMemory:
        options = LaunchOptions("m", (8,), tp=tp, ep=tp, extra=extra)
        tree = [SimpleNamespace(pid=pid) for pid in (11, 12)]
        return soak.GpuMemory(SimpleNamespace(options=options, tree=lambda: tree))


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Smi(tmp_path)


def test_memory_is_that_of_the_servers_processes(smi):
    """A neighbour (process 99) comes and goes on the same GPU and on others."""
    memory = smi.memory(tp=2)
    smi.says("11, 500, GPU-aa\n11, 30, GPU-bb\n12, 600, GPU-bb\n99, 7000, GPU-aa\n", GPUS)
    assert memory.of is None
    assert memory.now() == {"0": 500.0, "1": 630.0}
    assert memory.of == soak.OWN_PROCESSES
    smi.says("11, 510, GPU-aa\n12, 600, GPU-bb\n99, 1, GPU-cc\n", GPUS)
    assert memory.now() == {"0": 510.0, "1": 600.0}
    # Never the whole GPUs from now on.
    smi.says("", GPUS)
    assert memory.now() is None and memory.of == soak.OWN_PROCESSES


@pytest.mark.parametrize(
    "apps", ["", "99, 8000, GPU-aa\n", "11, [N/A], GPU-aa\n12, [N/A], GPU-bb\n", "11, 500, GPU-aa\n"]
)
def test_whole_gpus_are_looked_at_where_the_servers_processes_are_not_seen(smi, apps):
    """No process, those of the host alone, no figures, or fewer GPUs than ranks, so that a number is ours by chance."""
    memory = smi.memory(tp=2)
    smi.says(apps, GPUS)
    assert memory.now() == {"0": 9000.0, "1": 300.0} and memory.of == soak.WHOLE_GPUS
    smi.says("11, 500, GPU-aa\n12, 600, GPU-bb\n", GPUS)
    assert memory.now() == {"0": 9000.0, "1": 300.0}


@pytest.mark.parametrize(
    "visible, tp, extra, seen",
    [
        (None, 1, (), {"0": 9000.0}),
        (None, 1, ("--base-gpu-id", "2"), {"2": 20.0}),
        (None, 2, ("--gpu-id-step", "2"), {"0": 9000.0, "2": 20.0}),
        ("2", 1, (), {"2": 20.0}),
        ("2,0", 1, (), {"2": 20.0}),
        ("GPU-bb, GPU-cc", 2, (), {"1": 300.0, "2": 20.0}),
        ("1", 2, (), None),
        ("", 1, (), None),
    ],
)
def test_the_servers_gpus_are_those_that_it_may_use(smi, monkeypatch, visible, tp, extra, seen):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert smi.memory(tp=tp, extra=extra).now() == seen


def _samples(*gpu: dict[str, float] | None) -> list[soak.MemorySample]:
    return [soak.MemorySample(float(at), mib, 1.0) for at, mib in enumerate(gpu)]


def test_growth_is_of_the_second_half_after_the_first_round():
    assert soak.growth([5, 7, 5, 6]) == -1.0
    assert soak.growth([5, 5, 5]) is None
    one = _samples(*({"0": mib} for mib in (1.0, 9.0, 5.0, 5.0, 6.0, 5.0)))
    assert soak.gpu_growth(one, 2.0) == {"0": 1.0}  # 9 came before the first round ended
    assert soak.gpu_growth(one, 3.0) is None
    assert soak.gpu_growth(_samples(*[None] * 4), 0.0) is None
    assert soak.gpu_growth([*one, *_samples(None)], 0.0) is None


def test_every_gpu_is_judged_alone():
    """One GPU's 100 MiB more are not made up for by another's 100 less, and two times 40 are no 80."""
    tally = soak.Tally(aborted=1, hung_up=1, most_at_once=8)
    moved = _samples(*({"0": mib, "1": 500.0 - mib} for mib in (100.0, 100.0, 200.0, 200.0)))
    grown = soak.gpu_growth(moved, 0.0)
    assert grown == {"0": 100.0, "1": -100.0}
    assert soak.faults(tally, [], grown, 64.0, 8) == ["memory of GPU 0 grew by 100 MiB, more than 64"]
    both = _samples(*({"0": mib, "1": mib} for mib in (100.0, 100.0, 140.0, 140.0)))
    assert soak.faults(tally, [], soak.gpu_growth(both, 0.0), 64.0, 8) == []
    # A process that had no memory there at first.
    late = _samples({"0": 1.0}, {"0": 1.0}, {"0": 1.0, "1": 400.0}, {"0": 1.0, "1": 400.0})
    assert soak.gpu_growth(late, 0.0) == {"0": 0.0, "1": 400.0}


def test_an_arm_that_is_not_what_it_says_is_a_fault():
    tally = soak.Tally(aborted=1, hung_up=1, most_at_once=8)
    assert soak.faults(tally, [], {"0": 0.0}, 64.0, 8) == []
    assert soak.faults(tally, [], {"0": 0.0}, 64.0, 8, ["not proved"]) == ["not proved"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
