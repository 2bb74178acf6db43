"""200 random calls of the requant over every payload format, against float64; the same ones every time."""

import sys

import pytest
from hypothesis import given, seed, settings
from sglang.test.ci.ci_register import register_cpu_ci

import payload_fuzz

# On a GPU every call would be compiled anew: benchmark/fuzz_device.py is the fuzzer there.
register_cpu_ci(est_time=40, suite="base-b-kernel-unit")

SEED = 20


@pytest.fixture(scope="module", autouse=True)
def seed_in_the_log(request):
    payload_fuzz.print_seed(request, SEED)


@seed(SEED)
@settings(max_examples=200, derandomize=False, database=None, deadline=None, print_blob=True)
@given(payload_fuzz.payloads())
def test_200_random_calls(payload):
    payload_fuzz.check(payload)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
