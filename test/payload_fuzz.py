"""The property that both fuzzing lanes check: the requant over every payload format, against float64.

The reference here shares nothing with ``reference.py``: plain float64 arithmetic on the values that the payload was made of,
before they were packed. Every value is chosen so that each step is exact (the interpreter casts to fp8 with a rounding of its
own), so the comparison is for equality. Sizes are small, as the interpreter runs one program after the other.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st

from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import MaskedRowsLaunch, fp8_per_token_to_per_tensor_quant_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = 128
SENTINEL = 0x5A
FP8 = torch.float8_e4m3fn
FORMATS = ("float32 row", "float32 column", "float32 gaps", "packed row", "packed column", "bf16")


@dataclass(frozen=True)
class Payload:
    """One call of the requant.

    Attributes:
        form: how payload and scales are stored.
        padded: rows of one expert's block.
        counts: ``masked_m``; may lie outside of the block.
        groups: scale groups of a row.
        output_exponent: the per-tensor scale is 2 to this power.
        launch: launch parameters, or None for the rule's.
        expected_rows: the estimate that the rule goes by.
        tables: the launch also writes the problem sizes.
        seed: of the values.
    """

    form: str
    padded: int
    counts: tuple[int, ...]
    groups: int
    output_exponent: int
    launch: MaskedRowsLaunch | None
    expected_rows: int | None
    tables: bool
    seed: int


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    """Payloads of all formats, with the counts and the launches that a server never chooses among them."""
    padded = draw(st.integers(1, 9))
    count = st.one_of(st.integers(0, padded), st.sampled_from([0, padded, -1, -(2**31), padded + 1, 2**31 - 1]))
    launch = st.builds(
        MaskedRowsLaunch,
        col_block=st.sampled_from([1, 2, 4, 8]),
        m_grid=st.integers(1, 2),
        row_cap=st.integers(0, 10),
        row_block=st.sampled_from([1, 2, 4, 8]),
        num_warps=st.sampled_from([1, 4]) if DEVICE == "cuda" else st.just(1),
        overflow_experts=st.integers(1, 2),
        speculative_rows=st.sampled_from([0, 1, 3, 99]),
        overflow_first=st.booleans(),
    )
    return Payload(
        form=draw(st.sampled_from(FORMATS)),
        padded=padded,
        counts=tuple(draw(st.lists(count, min_size=1, max_size=3))),
        groups=draw(st.integers(1, 5)),
        output_exponent=draw(st.integers(-12, 12)),
        # The rule launches four programs an expert and more, most of them for nothing.
        launch=draw(st.one_of(launch, launch, launch, launch, launch, st.none())),
        expected_rows=draw(st.one_of(st.none(), st.integers(0, 12))),
        tables=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def _packed(exponents: torch.Tensor) -> torch.Tensor:
    """Bytes, four a word, the lowest group lowest; those that stand for no group are NaN."""
    groups = exponents.shape[-1]
    words = torch.zeros((*exponents.shape[:-1], -(-groups // 4)), dtype=torch.int64)
    for index in range(words.shape[-1] * 4):
        byte = exponents[..., index] if index < groups else torch.full(exponents.shape[:-1], 255)
        words[..., index // 4] += byte.long() << (8 * (index % 4))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _column_major(scale: torch.Tensor) -> torch.Tensor:
    return scale.transpose(1, 2).contiguous().transpose(1, 2)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A copy for certain: a tensor of one element counts as contiguous whatever its strides.
    return torch.cat([tensor.reshape(-1)]).view(torch.uint8)


def print_seed(request: pytest.FixtureRequest, seed: int) -> None:
    """Past pytest's capture: a seed that only shows where a test fails does not show where it hangs."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nrequant fuzz: seed {seed}")


def check(payload: Payload) -> None:
    """Run the kernel and compare every byte of output, tables and inputs.

    Raises:
        AssertionError: one differs.
    """
    experts, padded, groups = len(payload.counts), payload.padded, payload.groups
    generator = torch.Generator().manual_seed(payload.seed)
    digits = torch.randint(-8, 9, (experts, padded, groups, GROUP), generator=generator)
    # The result is a digit times 2^shift: within 2^-6 and 8 * 2^5, where fp8 holds four bits exactly.
    shifts = torch.randint(-6, 6, (experts, padded, groups), generator=generator)
    exponents = shifts + payload.output_exponent
    wanted = (digits.double() * torch.pow(2.0, shifts.double())[..., None]).flatten(2)
    rows = torch.tensor([min(max(count, 0), padded) for count in payload.counts])
    live = torch.arange(padded)[None, :] < rows[:, None]

    if payload.form == "bf16":
        x = (digits.double() * torch.pow(2.0, exponents.double())[..., None]).flatten(2).to(torch.bfloat16)
        x[~live] = float("nan")
        scale = None
    else:
        x = digits.float().flatten(2).to(FP8)
        x.view(torch.uint8)[~live] = 0x7F
        form, layout = payload.form.split()
        if form == "packed":
            bytes_ = exponents + 127
            bytes_[~live] = 255
            scale = _packed(bytes_)
        else:
            scale = torch.pow(2.0, exponents.float())
            scale[~live] = float("nan")
        if layout == "column":
            scale = _column_major(scale)
        elif layout == "gaps":
            wide = torch.full((experts, padded + 1, 2 * groups + 1), float("nan"))
            wide[:, :padded, : 2 * groups : 2] = scale
            scale = wide[:, :padded, : 2 * groups : 2]
    x = x.to(DEVICE)
    if scale is not None and DEVICE != "cpu":
        # A plain copy would not keep strides with gaps.
        there = torch.empty_strided(scale.shape, scale.stride(), dtype=scale.dtype, device=DEVICE)
        scale = there.copy_(scale)
    masked_m = torch.tensor(payload.counts, dtype=torch.int32, device=DEVICE)
    output_scale = torch.tensor([2.0**payload.output_exponent], device=DEVICE)
    output = torch.full(x.shape, SENTINEL, dtype=torch.uint8, device=DEVICE).view(FP8)
    tables = torch.full((2, experts, 3), -1, dtype=torch.int32, device=DEVICE)
    named = {"problem_sizes1": tables[0], "problem_sizes2": tables[1], "intermediate_size": 96}
    inputs = [tensor for tensor in (x, scale, masked_m, output_scale) if tensor is not None]
    before = [tensor.clone() for tensor in inputs]

    fp8_per_token_to_per_tensor_quant_triton(
        x,
        scale,
        masked_m,
        output_scale,
        output,
        payload.expected_rows,
        launch=payload.launch,
        **(named if payload.tables else {}),
    )

    found = output.cpu()
    assert torch.equal(found[live].double(), wanted[live])
    assert (found.view(torch.uint8)[~live] == SENTINEL).all()
    hidden = groups * GROUP
    sizes = [[[192, int(r), hidden] for r in rows], [[hidden, int(r), 96] for r in rows]]
    assert tables.tolist() == (sizes if payload.tables else [[[-1] * 3] * experts] * 2)
    for now, then in zip(inputs, before, strict=True):
        assert torch.equal(_bytes(now), _bytes(then))
