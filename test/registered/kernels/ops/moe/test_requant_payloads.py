"""The requant over every payload and scale format that a dispatcher sends, and over values and sizes at the edges.

On a GPU the suite runs on the device; without one, under Triton's interpreter, with inputs that are representable at every
step. The interpreter neither saturates nor keeps NaN when it casts to fp8, so what concerns those runs on the device only.
"""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

from sglang_w4afp8.kernels.ops.moe.ep_moe_kernels import (
    MaskedRowsLaunch,
    fp8_per_token_to_per_tensor_quant_triton,
    requant_launch_geometry,
    silu_and_mul_masked_post_per_tensor_quant_fwd,
)
from sglang_w4afp8.kernels.ops.moe.reference import (
    fp8_per_token_to_per_tensor_quant_reference,
    live_mask,
    problem_sizes_reference,
    silu_and_mul_masked_post_per_tensor_quant_reference,
    ue8m0_to_float32,
)

register_cuda_ci(est_time=40, suite="base-b-kernel-unit")
register_cpu_ci(est_time=45, suite="base-b-kernel-unit")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = 128
SENTINEL = 0x5A
NAN_BYTE = 0x7F
FP8 = torch.float8_e4m3fn
ON_DEVICE_ONLY = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter neither saturates nor keeps NaN in fp8")


def poisoned(*shape):
    return torch.full(shape, SENTINEL, dtype=torch.uint8, device=DEVICE).view(FP8)


def same_bytes(left, right):
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def integers(shape, seed=0):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def pack(exponents):
    """Exponent bytes ``[..., G]`` as int32 words ``[..., ceil(G / 4)]``; bytes that stand for no group are 255 (NaN)."""
    groups = exponents.shape[-1]
    padded = torch.full((*exponents.shape[:-1], -(-groups // 4) * 4), 255, dtype=torch.uint8)
    padded[..., :groups] = exponents.to(torch.uint8)
    return padded.view(torch.int32)


def run(x, x_scale, rows, output_scale=0.5, sizes=True, **kwargs):
    """The kernel and the reference into poisoned outputs; both must be equal byte for byte, and so must the tables."""
    masked_m = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    x = x.to(DEVICE)
    x_scale = None if x_scale is None else x_scale.to(DEVICE)
    scale = torch.tensor([output_scale], device=DEVICE)
    num_experts, padded, hidden = x.shape
    output, expected = poisoned(*x.shape), poisoned(*x.shape)
    tables = torch.full((2, num_experts, 3), -1, dtype=torch.int32, device=DEVICE)
    named = {"problem_sizes1": tables[0], "problem_sizes2": tables[1], "intermediate_size": 96} if sizes else {}
    fp8_per_token_to_per_tensor_quant_triton(x, x_scale, masked_m, scale, output, **named, **kwargs)
    fp8_per_token_to_per_tensor_quant_reference(x, x_scale, masked_m, scale, expected)
    assert same_bytes(output, expected)
    if sizes:
        wanted = problem_sizes_reference(masked_m.clamp(0, padded), 96, hidden)
        assert tables.tolist() == [table.tolist() for table in wanted]
    return output


LAUNCHES = [
    None,
    MaskedRowsLaunch(1, 3, 1, 4, 1, 2, 0),
    MaskedRowsLaunch(4, 1, 0, 2, 1, 1, 8),
    MaskedRowsLaunch(8, 2, 2, 1, 1, 3, 2),
]


# --- BF16 ---


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("expected_rows", [None, 2])
def test_a_bf16_payload_is_quantised_straight(launch, expected_rows):
    rows = [7, 0, 3, -2, 99]
    x = (integers((5, 7, 384)) / 4).to(torch.bfloat16)
    x[~live_mask(torch.tensor(rows), 7)] = float("nan")
    output = run(x, None, rows, output_scale=0.25, launch=launch, expected_rows=expected_rows)
    # And without the reference: x / 0.25.
    assert torch.equal(output[0].float().cpu(), x[0].float() * 4)
    assert (output[1].view(torch.uint8) == SENTINEL).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter rounds a tie away from zero")
def test_a_bf16_payload_is_rounded_once():
    # 1.0625 lies halfway between 1.0 and 1.125; one float32 product and one rounding to even give 1.0, whereas a payload
    # that had been through fp8 with its own scale need not.
    x = torch.tensor([1.0625, 1.1875, 17.0, -1.0625]).repeat(32).to(torch.bfloat16).reshape(1, 1, 128)
    output = run(x, None, [1], output_scale=1.0)
    assert output[0, 0, :4].float().tolist() == [1.0, 1.25, 16.0, -1.0]


@pytest.mark.parametrize("num_experts", [8, 64])
def test_bf16_tiles_have_the_bytes_a_lane_of_fp8_ones(num_experts):
    for expected_rows in (None, 1, 32):
        fp8 = requant_launch_geometry(56, num_experts, expected_rows=expected_rows)
        bf16 = requant_launch_geometry(56, num_experts, expected_rows=expected_rows, payload_bytes=2)
        assert (bf16[0] * 2, *bf16[1:]) == fp8


def test_bf16_addresses_past_two_to_the_thirty_one_elements():
    # Untouched pages cost nothing.
    padded, hidden = 2**23 + 3, 256
    x = torch.empty((2, padded, hidden), dtype=torch.bfloat16, device=DEVICE)
    output = torch.empty(x.shape, dtype=FP8, device=DEVICE)
    values = integers((2, hidden)).to(DEVICE)
    x[1, :2] = values.to(torch.bfloat16)
    output.view(torch.uint8)[:, :3] = SENTINEL
    masked_m = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    fp8_per_token_to_per_tensor_quant_triton(x, None, masked_m, torch.tensor([0.5], device=DEVICE), output, 1)
    assert torch.equal(output[1, :2].float(), values * 2)
    assert (output.view(torch.uint8)[0, :3] == SENTINEL).all() and (output.view(torch.uint8)[1, 2] == SENTINEL).all()


# --- packed UE8M0 ---


def packed_case(groups, column_major, seed=0):
    rows = [6, 0, 2]
    generator = torch.Generator().manual_seed(seed)
    x = integers((3, 6, groups * GROUP), seed).to(FP8)
    exponents = torch.randint(124, 131, (3, 6, groups), generator=generator)
    live = live_mask(torch.tensor(rows), 6)
    x.view(torch.uint8)[~live] = NAN_BYTE
    exponents[~live] = 255
    words = pack(exponents)
    if column_major:
        words = words.transpose(1, 2).contiguous().transpose(1, 2)
    return x, exponents, words, rows


@pytest.mark.parametrize("column_major", [True, False], ids=["column-major", "row-major"])
@pytest.mark.parametrize("groups", [1, 3, 4, 5, 8, 9])
def test_packed_scales(groups, column_major):
    x, exponents, words, rows = packed_case(groups, column_major)
    for launch in LAUNCHES:
        output = run(x, words, rows, launch=launch, expected_rows=2)
        plain = torch.exp2(exponents.float() - 127)
        plain[exponents == 255] = float("nan")
        # The same bytes as the same scales in float32, which knows nothing of words and bytes.
        assert same_bytes(output, run(x, plain, rows, launch=launch, expected_rows=2))


def test_the_lowest_byte_is_the_lowest_group():
    words = torch.tensor([[[0x81807F7E - (1 << 32)]]], dtype=torch.int32)
    x = torch.ones((1, 1, 512)).to(FP8)
    output = run(x, words, [1], output_scale=1.0)
    assert output[0, 0, ::GROUP].float().tolist() == [0.5, 1.0, 2.0, 4.0]
    assert ue8m0_to_float32(words, 4).flatten().tolist() == [0.5, 1.0, 2.0, 4.0]
    assert ue8m0_to_float32(words, 3).flatten().tolist() == [0.5, 1.0, 2.0]


def test_every_exponent_byte_is_what_ocp_mx_says():
    exponents = torch.arange(256).reshape(1, 1, 256)
    scales = ue8m0_to_float32(pack(exponents), 256).flatten()
    # 0 is 2^-127, a denormal float32 and not zero; the top bit of a word is no sign; 255 is NaN.
    assert scales[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert scales[255].isnan()
    # Through the kernel, each brought back to 1 by the per-tensor scale (whose own reciprocal must be a normal float32).
    ones = torch.ones((1, 1, GROUP)).to(FP8)
    for byte in (1, 2, 100, 127, 128, 200, 252, 253):
        output = run(ones, pack(torch.tensor([[[byte]]])), [1], output_scale=2.0 ** (byte - 127), sizes=False)
        assert output.float().unique().tolist() == [1.0]
    # 2^-127 times 256, divided by 2^-119.
    output = run((ones.float() * 256).to(FP8), pack(torch.tensor([[[0]]])), [1], output_scale=2.0**-119, sizes=False)
    assert output.float().unique().tolist() == [1.0]


@pytest.mark.parametrize("groups, words", [(4, 4), (4, 2), (5, 1), (5, 5)])
def test_words_that_do_not_fit_the_payload_are_refused_by_name(groups, words):
    x = torch.zeros((2, 3, groups * GROUP), device=DEVICE).to(FP8)
    scale = torch.zeros((2, 3, words), dtype=torch.int32, device=DEVICE)
    output = poisoned(*x.shape)
    masked_m = torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(TypeError, match=rf"^x_scale: shape is \[2, 3, {words}\], must be \[2, 3, {-(-groups // 4)}\]"):
        fp8_per_token_to_per_tensor_quant_triton(x, scale, masked_m, torch.ones(1, device=DEVICE), output)
    assert (output.view(torch.uint8) == SENTINEL).all()


@pytest.mark.parametrize(
    "dtype, scales, error, message",
    [
        (FP8, None, ValueError, "x_scale: is None, must be the scales"),
        (torch.float16, None, TypeError, "x: dtype is torch.float16, must be torch.bfloat16"),
        (torch.bfloat16, torch.float32, TypeError, "x: dtype is torch.bfloat16, must be one of"),
        (FP8, torch.float64, TypeError, "x_scale: dtype is torch.float64, must be torch.float32, or torch.int32"),
        (FP8, torch.uint8, TypeError, "x_scale: dtype is torch.uint8, must be torch.float32, or torch.int32"),
    ],
)
def test_a_payload_and_its_scales_must_belong_together(dtype, scales, error, message):
    x = torch.zeros((1, 2, GROUP), device=DEVICE).to(dtype)
    x_scale = None if scales is None else torch.ones((1, 2, 1), dtype=scales, device=DEVICE)
    masked_m = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(error, match=f"^{message}"):
        fp8_per_token_to_per_tensor_quant_triton(x, x_scale, masked_m, torch.ones(1, device=DEVICE), poisoned(*x.shape))


# --- sizes at the edges ---


@pytest.mark.parametrize("num_experts", [1, 512])
@pytest.mark.parametrize("load", ["none", "one expert", "one row each"])
def test_expert_counts_at_both_ends(num_experts, load):
    padded = 3
    rows = [0] * num_experts if load == "none" else [1] * num_experts
    if load == "one expert":
        rows = [0] * num_experts
        rows[-1] = padded
    x = integers((num_experts, padded, GROUP)).to(FP8)
    scale = torch.full((num_experts, padded, 1), 2.0)
    # One program an expert keeps the interpreter's time down; the overflow phase still sees all 512 of them.
    for launch in (MaskedRowsLaunch(1, 1, 1, 1, 1, 1, 0), MaskedRowsLaunch(1, 1, 0, 4, 1, 2, 0)):
        output = run(x, scale, rows, launch=launch)
        if load == "none":
            assert (output.view(torch.uint8) == SENTINEL).all()


@pytest.mark.parametrize("rows", [[0, 0], [1, 0], [16384, 3], [0, 16384]])
def test_blocks_of_16384_rows(rows):
    # Live rows are marked at the ends of the block; between them everything is zero.
    padded = 16384
    x = torch.zeros((2, padded, GROUP), dtype=torch.uint8).view(FP8)
    edges = [0, 1, 4095, 4096, padded - 2, padded - 1]
    x[:, edges] = integers((2, len(edges), GROUP)).to(FP8)
    scale = torch.full((2, padded, 1), 0.5)
    run(x, scale, rows, launch=MaskedRowsLaunch(1, 1, 64, 2048, 4, 1, 0))


def test_a_block_of_one_row():
    for rows in ([1, 0, 1], [0, 0, 0], [2, -1, 1]):
        run(integers((3, 1, 256)).to(FP8), torch.full((3, 1, 2), 0.25), rows, expected_rows=1)


# --- values at the edges, on the device ---

SPECIAL = [
    float("nan"),
    float("inf"),
    -float("inf"),
    1e30,
    -1e30,
    448.0,
    464.0,
    465.0,
    -480.0,
    0.0,
    -0.0,
    1e-30,
    2.0**-9,
]


def test_the_reference_saturates_and_has_one_nan():
    x = torch.tensor(SPECIAL + [-float("nan")]).repeat(10)[:GROUP].to(torch.bfloat16).reshape(1, 1, GROUP)
    output = torch.zeros((1, 1, GROUP), dtype=torch.uint8).view(FP8)
    fp8_per_token_to_per_tensor_quant_reference(
        x, None, torch.tensor([1], dtype=torch.int32), torch.tensor([1.0]), output
    )
    values = output.float().flatten()[: len(SPECIAL)].tolist()
    assert values[0] != values[0]
    assert values[1:] == [448.0, -448.0, 448.0, -448.0, 448.0, 448.0, 448.0, -448.0, 0.0, -0.0, 0.0, 2.0**-9]
    assert set(output.view(torch.uint8)[output.float().isnan()].tolist()) == {NAN_BYTE}


@ON_DEVICE_ONLY
@pytest.mark.parametrize("output_scale", [1.0, 0.0371, 1e30, 1e-30])
def test_special_bf16_values(output_scale):
    x = torch.tensor(SPECIAL).repeat(10)[:GROUP].to(torch.bfloat16).expand(2, 3, GROUP).contiguous()
    output = poisoned(2, 3, GROUP)
    masked_m = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    scale = torch.tensor([output_scale], device=DEVICE)
    fp8_per_token_to_per_tensor_quant_triton(x.to(DEVICE), None, masked_m, scale, output)
    wanted = (x[0, 0].double() / output_scale).clamp(-448, 448).float()
    found = output[0, 0].float().cpu()
    assert torch.equal(found.isnan(), wanted.isnan())
    exact = wanted.abs() == 448
    assert torch.equal(found[exact], wanted[exact])
    assert set(output.view(torch.uint8)[0][output[0].float().isnan()].tolist()) == {NAN_BYTE}


@ON_DEVICE_ONLY
@pytest.mark.parametrize("packed", [False, True], ids=["float32", "packed"])
def test_nan_and_infinity_in_payload_and_scales(packed):
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)  # every code, both NaNs and both 448s among them
    x = codes.reshape(1, 1, 2 * GROUP).expand(1, 6, 2 * GROUP).contiguous()
    if packed:
        bytes_ = torch.tensor([127, 255, 254, 0, 1, 140])
        scale = pack(bytes_[:, None].expand(6, 2)[None])
    else:
        values = torch.tensor([1.0, float("nan"), float("inf"), 0.0, -float("inf"), 3e38])
        scale = values[:, None].expand(6, 2)[None].contiguous()
    output = run(x, scale, [6], output_scale=1.0)
    assert output[0, 1].float().isnan().all()  # NaN scale
    assert output[0, :, [NAN_BYTE, 0xFF]].float().isnan().all()  # NaN payload
    assert output[0, 2, 0x7E].float() == 448 and output[0, 2, 0xFE].float() == -448


@ON_DEVICE_ONLY
def test_silu_keeps_nan_and_saturates():
    gate = torch.tensor([float("nan"), 50.0, 50.0, 1.0, -float("inf"), float("inf"), 2.0, 50.0])
    up = torch.tensor([1.0, float("nan"), 1e30, float("inf"), 1.0, 1.0, -float("inf"), -1e30])
    x = torch.cat([gate, up]).to(torch.bfloat16).reshape(1, 1, 16).to(DEVICE)
    output, expected = poisoned(1, 1, 8), poisoned(1, 1, 8)
    masked_m, scale = torch.ones(1, dtype=torch.int32, device=DEVICE), torch.ones(1, device=DEVICE)
    silu_and_mul_masked_post_per_tensor_quant_fwd(x, output, masked_m, scale)
    silu_and_mul_masked_post_per_tensor_quant_reference(x, expected, masked_m, scale)
    assert same_bytes(output, expected)
    assert output.float().flatten().isnan().tolist() == [True, True, False, False, True, False, False, False]
    assert output.float().flatten()[[2, 3, 5, 6, 7]].tolist() == [448, 448, 448, -448, -448]


@ON_DEVICE_ONLY
@pytest.mark.parametrize("kind", ["bf16", "packed"])
@pytest.mark.parametrize("num_experts, padded, hidden", [(8, 256, 7168), (64, 256, 3584), (256, 64, 7168), (3, 1, 128)])
def test_random_payloads_on_the_device(kind, num_experts, padded, hidden):
    generator = torch.Generator(DEVICE).manual_seed(num_experts)
    shape = num_experts, padded, hidden
    if kind == "bf16":
        x = torch.randn(shape, device=DEVICE, generator=generator, dtype=torch.bfloat16).mul_(40)
        scale = None
    else:
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)
        x = codes.view(FP8)
        words = -(-hidden // GROUP // 4)
        scale = torch.randint(112, 140, (num_experts, words, padded, 4), device=DEVICE, generator=generator)
        scale = scale.to(torch.uint8).view(torch.int32).squeeze(-1).transpose(1, 2)
    masked_m = torch.randint(0, padded + 1, (num_experts,), device=DEVICE, generator=generator, dtype=torch.int32)
    mean = max(1, int(masked_m.sum()) // num_experts)
    for expected_rows in (None, mean):
        # A power of two, whose reciprocal every division gets right.
        run(x, scale, masked_m.tolist(), output_scale=0.125, expected_rows=expected_rows)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
