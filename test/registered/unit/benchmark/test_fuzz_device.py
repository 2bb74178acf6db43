"""The device fuzzer without a device: what it plans, that its reference is the reference, and that it can fail."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8.kernels.ops.moe.reference import (
    fp8_per_token_to_per_tensor_quant_reference,
    problem_sizes_reference,
    silu_and_mul_masked_post_per_tensor_quant_reference,
)

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

_SPEC = importlib.util.spec_from_file_location(
    "fuzz_device", Path(__file__).resolve().parents[4] / "benchmark" / "fuzz_device.py"
)
fuzz = importlib.util.module_from_spec(_SPEC)
sys.modules["fuzz_device"] = fuzz
_SPEC.loader.exec_module(fuzz)

CPU = torch.device("cpu")


def small(count, seed=3):
    """Planned configurations that the CPU gets through."""
    planned = [config for config in fuzz.plan(seed, 400) if config.experts * config.padded * config.columns < 40_000]
    assert len(planned) >= count
    return planned[:count]


def by_the_plain_reference(case, launch):
    """What a right kernel leaves in the case's buffers."""
    config, inverse = case.config, case.output_scale.reciprocal()
    if config.kernel == fuzz.SILU:
        silu_and_mul_masked_post_per_tensor_quant_reference(case.x, case.output, case.masked_m, case.output_scale)
        return inverse
    fp8_per_token_to_per_tensor_quant_reference(
        case.x, case.x_scale, case.masked_m, case.output_scale, case.output, inverse
    )
    if config.tables:
        rows = case.masked_m.clamp(0, config.padded)
        for table, wanted in zip(case.tables, problem_sizes_reference(rows, 96, config.columns), strict=True):
            table.copy_(wanted)
    return inverse


def test_the_plan_has_every_format_and_stays_within_what_is_compiled_once():
    configs = fuzz.plan(1, 40)
    assert configs == fuzz.plan(1, 40) != fuzz.plan(2, 40)
    requants = [config for config in configs if config.kernel == fuzz.REQUANT]
    assert {config.payload for config in requants} == set(fuzz.FORMATS)
    assert len(requants) == 30
    for config in configs:
        assert config.experts * config.padded * config.columns <= fuzz.ELEMENTS_MAX
        # Hints of one configuration never make the compiler specialise anew: one, a multiple of 16, or neither.
        launches = [fuzz.launch_of(config, random.Random(number)) for number in range(200)]
        for value in ("row_cap", "speculative_rows"):
            kinds = {(getattr(launch, value) == 1, getattr(launch, value) % 16 == 0) for launch in launches}
            assert len(kinds) == 1
        assert len({launch.speculative_rows > 0 for launch in launches}) == 1


def test_its_reference_is_the_plain_one_for_every_format():
    configs = small(40)
    assert {config.payload for config in configs} == {*fuzz.FORMATS, "fp16", "fp32"}
    cells = fuzz.fuzz(5, configs, 400, 1000, CPU, by_the_plain_reference)
    assert [cell["different"] for cell in cells] == [[]] * len(configs)
    assert sum(cell["cases"] for cell in cells) == 400


def _flip_a_live_bit(case, launch):
    inverse = by_the_plain_reference(case, launch)
    rows = case.masked_m.clamp(0, case.config.padded)
    if rows.any():
        expert = int(rows.argmax())
        case.output.view(torch.uint8)[expert, int(rows[expert]) - 1, -1] ^= 1
    return inverse


def _touch_padding(case, launch):
    inverse = by_the_plain_reference(case, launch)
    case.output.view(torch.uint8)[0, -1, 0] += 1 if int(case.masked_m[0]) < case.config.padded else 0
    return inverse


def _wrong_table(case, launch):
    inverse = by_the_plain_reference(case, launch)
    case.tables[1, -1, 1] += 1
    return inverse


@pytest.mark.parametrize("fault", [_flip_a_live_bit, _touch_padding, _wrong_table])
def test_a_fault_of_the_kernel_is_found_and_its_case_named(fault):
    configs = small(6)
    cells = fuzz.fuzz(5, configs, 60, 1000, CPU, fault)
    different = [(cell["config"], number) for cell in cells for number in cell["different"]]
    assert len(different) >= 20
    # The same case is found again from its name alone.
    index, number = different[0]
    assert fuzz.run_config(5, index, configs[index], number, 1, CPU, fault) == [number]
    assert fuzz.run_config(5, index, configs[index], number, 1, CPU, by_the_plain_reference) == []


def test_cases_of_what_was_not_started_in_time_are_made_up_for():
    times = iter(range(100))
    cells = fuzz.fuzz(5, small(8), 80, 2, CPU, by_the_plain_reference, clock=lambda: next(times))
    assert len(cells) == 3
    assert sum(cell["cases"] for cell in cells) == 80
    assert all(cell["cases"] >= 26 for cell in cells)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
