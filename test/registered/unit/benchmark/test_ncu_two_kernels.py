"""The reader of Nsight Compute's table, without a GPU."""

import sys
from pathlib import Path

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmark"))

import ncu_two_kernels as bench  # noqa: E402

TABLE = """==PROF== Connected to process 1
warming up
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","_gate_up_kernel(x)","Occupancy","Achieved Occupancy","%","17.01"
"0","1","_gate_up_kernel(x)","Command line profiler metrics","dram__bytes_read.sum","byte","969,634,048"
"0","1","_gate_up_kernel(x)","Occupancy","Nobody Asked","%","1"
"1","1","_down_kernel(x)","LaunchStats","Grid Size","","3,584"
"""


def test_one_entry_a_kernel_with_the_counters_that_are_asked_for():
    assert bench.read_counters(TABLE) == [
        {
            "kernel": "_gate_up_kernel",
            "counters": {"Achieved Occupancy": "17.01 %", "dram__bytes_read.sum": "969,634,048 byte"},
        },
        {"kernel": "_down_kernel", "counters": {"Grid Size": "3,584"}},
    ]


def test_output_without_a_table_is_refused():
    with pytest.raises(ValueError, match=r"^ncu: printed no table: ==ERROR=="):
        bench.read_counters("==ERROR== no permission")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
