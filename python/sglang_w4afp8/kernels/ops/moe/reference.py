"""Plain torch references of the streaming kernels: slow, obvious, and what every test compares with."""

import torch


def _saturate(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast to fp8 as the hardware does: round to nearest even, saturate, one NaN (torch alone overflows to NaN)."""
    limit = torch.finfo(dtype).max
    return torch.where(values.isnan(), torch.nan, values.clamp(-limit, limit)).to(dtype)


def ue8m0_to_float32(words: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Scales ``[..., num_groups]`` of packed UE8M0 words, int32 ``[..., ceil(num_groups / 4)]``, as OCP MX defines E8M0.

    Four exponent bytes a word, the lowest group in the lowest byte: a byte b is ``2^(b - 127)``, 255 is NaN.
    """
    exponents = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
    exponents = exponents[..., :num_groups]
    # 2^-127 has no normal float32, so the power is taken where it has one.
    scales = torch.exp2(exponents.double() - 127).float()
    return torch.where(exponents == 255, torch.nan, scales)


def live_mask(masked_m: torch.Tensor, max_rows: int) -> torch.Tensor:
    """Bool ``[E, M]``: which rows of the padded blocks are live."""
    return torch.arange(max_rows, device=masked_m.device)[None, :] < masked_m[:, None]


def fp8_per_token_to_per_tensor_quant_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    masked_m: torch.Tensor,
    output_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale_inv: torch.Tensor | None = None,
) -> None:
    """``output = fp8((x * x_scale) * (1 / output_scale))`` on live rows; shapes as in the kernel's public function.

    ``output_scale_inv`` replaces ``1 / output_scale``: Triton's float32 division is not correctly rounded on a GPU, so a
    byte-exact comparison at scales that are no power of two passes the reciprocal that the device computed.
    """
    group_size = 128
    num_groups = x.size(2) // group_size
    inverse = output_scale.float().reciprocal() if output_scale_inv is None else output_scale_inv
    for expert in range(x.size(0)):
        rows = min(max(int(masked_m[expert]), 0), x.size(1))
        scaled = x[expert, :rows].float()
        if x_scale is not None:
            scale = x_scale[expert, :rows]
            scale = ue8m0_to_float32(scale, num_groups) if scale.dtype == torch.int32 else scale.float()
            scaled = scaled * scale.repeat_interleave(group_size, dim=1)
        output[expert, :rows] = _saturate(scaled * inverse, output.dtype)


def problem_sizes_reference(masked_m: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two int32 ``[E, 3]`` tables ``(2n, rows, k)`` and ``(k, rows, n)`` of the grouped GEMMs."""
    rows = masked_m.to(torch.int32)
    full = torch.full_like(rows, k), torch.full_like(rows, 2 * n), torch.full_like(rows, n)
    return torch.stack([full[1], rows, full[0]], dim=1), torch.stack([full[0], rows, full[2]], dim=1)


def silu_and_mul_masked_post_per_tensor_quant_reference(
    input: torch.Tensor,
    output: torch.Tensor,
    masked_m: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """``output = fp8(silu(gate) * up / scale)`` on live rows, with the kernel's order of roundings."""
    inner_dim = output.size(2)
    inverse = scale.float().reciprocal().expand(input.size(0)) if scale.numel() == 1 else scale.float().reciprocal()
    for expert in range(input.size(0)):
        rows = min(max(int(masked_m[expert]), 0), input.size(1))
        gate = input[expert, :rows, :inner_dim].float()
        up = input[expert, :rows, inner_dim:].float()
        silu = (gate / (1 + torch.exp(-gate))).to(input.dtype).float()
        output[expert, :rows] = _saturate((up * silu) * inverse[expert], output.dtype)
    return output
