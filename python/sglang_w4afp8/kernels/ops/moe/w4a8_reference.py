"""Plain float reference of the W4A8 grouped GEMM, and a CPU double of the compiled dispatch.

The reference is what every test and benchmark of the grouped GEMM compares with. For expert `e` with `rows[e]` live
rows

    out[e, r, n] = a_scale * sum_g w_scale[e, n, g] * sum_{k in group g} a[e, r, k] * w[e, n, k]

Weights are int4 pairs in one byte, low nibble first (the even `k`), two's complement. Weight scales cover 128 values of
`k` and are stored interleaved by four (`interleave_scales`), because the kernel's K tile of 512 reads four of them as
one 64-bit word. When the number of groups is no multiple of four the engine interleaves by one.

`CompiledDispatchDouble` stands for `sgl_kernel.cutlass_w4a8_moe_mm` where there is no GPU: it takes the same arguments,
reads the sizes as the compiled dispatch does (`m = a.size(0) / topk`, `n = d.size(1)`, `k = a.size(1)`) and makes the
same mistake when they are wrong: the scales of a K tile of 512 read as if by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from sglang_w4afp8.kernels.ops.moe import compiled_tiles
from sglang_w4afp8.kernels.ops.moe.compiled_tiles import Tile

GROUP_SIZE = 128
# Four scales of 128 make the kernel's K tile of 512.
SCALE_INTERLEAVE = 4


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Pack int4 values in -8..7 (int8, `[..., K]`) into bytes (int8, `[..., K/2]`), even `k` in the low nibble."""
    if values.shape[-1] % 2:
        raise ValueError(f"values: last size is {values.shape[-1]}, must be even")
    low, high = values[..., 0::2], values[..., 1::2]
    return ((low & 0xF) | ((high & 0xF) << 4)).to(torch.int8)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_int4`: bytes (int8, `[..., K/2]`) to int4 values in -8..7 (int8, `[..., K]`)."""
    if packed.dtype != torch.int8:
        raise TypeError(f"packed: dtype is {packed.dtype}, must be torch.int8")
    # The nibble's sign bit is worth -8: (x ^ 8) - 8 extends it without a left shift that int8 could overflow.
    low = ((packed & 0xF) ^ 8) - 8
    high = (((packed >> 4) & 0xF) ^ 8) - 8
    return torch.stack((low, high), dim=-1).flatten(-2)


def scale_interleave(num_groups: int) -> int:
    """Scales per interleaved word: 4, or 1 where the number of groups is no multiple of four."""
    return SCALE_INTERLEAVE if num_groups % SCALE_INTERLEAVE == 0 else 1


def interleave_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales `[E, N, K/128]` in the kernel's order `[E, K/512, N*4]` (or `[E, K/128, N]`, see `scale_interleave`)."""
    width = scale_interleave(scales.shape[2])
    return scales.unflatten(2, (-1, width)).transpose(1, 2).flatten(2).contiguous()


def deinterleave_scales(interleaved: torch.Tensor, n: int) -> torch.Tensor:
    """Inverse of `interleave_scales`: `[E, K/512, N*4]` to `[E, N, K/128]`."""
    width, rest = divmod(interleaved.shape[2], n)
    if rest or width not in (1, SCALE_INTERLEAVE):
        raise ValueError(f"interleaved: last size is {interleaved.shape[2]}, must be n or 4*n with n = {n}")
    return interleaved.unflatten(2, (n, width)).transpose(1, 2).flatten(2).contiguous()


def dequantize_weight(w_q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights `[..., N, K]` in `dtype` from bytes `[..., N, K/2]` and scales `[..., N, K/128]` (not interleaved)."""
    values = unpack_int4(w_q).to(dtype).unflatten(-1, (-1, GROUP_SIZE))
    return (values * scales.to(dtype).unsqueeze(-1)).flatten(-2)


def w4a8_grouped_gemm_reference(
    a: torch.Tensor,
    w_q: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    masked_m: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Float W4A8 grouped GEMM.

    Args:
        a: activations, fp8 e4m3 `[E, M, K]`.
        w_q: weights, int8 `[E, N, K/2]`, two int4 a byte.
        a_scale: the tensor's one activation scale, fp32 `[1]`.
        w_scale: weight scales in the kernel's order, `[E, K/512, N*4]`.
        masked_m: live rows per expert, int `[E]`.
        dtype: of the arithmetic and of the result.

    Returns:
        `[E, M, N]` in `dtype`, zero past each expert's live rows.
    """
    num_experts, padded_rows, _ = a.shape
    n = w_q.shape[1]
    out = torch.zeros(num_experts, padded_rows, n, dtype=dtype, device=a.device)
    scales = deinterleave_scales(w_scale, n)
    for expert, rows in enumerate(masked_m.tolist()):
        if rows:
            weight = dequantize_weight(w_q[expert], scales[expert], dtype)
            out[expert, :rows] = (a[expert, :rows].to(dtype) @ weight.T) * a_scale.to(dtype)
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """`|out - expected| / |expected|` in the Frobenius norm; NaN in `out` gives NaN, never a pass."""
    difference = (out.to(expected.dtype) - expected).norm()
    return float(difference / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))


@dataclass
class DispatchRecord:
    """What the double saw in one call: the sizes as the compiled code reads them, and the tile they lead to."""

    m: int
    n: int
    k: int
    dims: int
    bucket: int
    k_tile: int


@dataclass
class CompiledDispatchDouble:
    """CPU stand-in for `sgl_kernel.cutlass_w4a8_moe_mm` with the size rule of the compiled dispatch.

    The result is right exactly where the real kernel's is.

    Attributes:
        version, gpu: which sglang-kernel it stands for, and on which GPU (`compiled_tiles`).
        limits: instead of that version's, for small sizes: the upper `m` of every bucket but the last by (n, k); None is
            every other shape.
        calls: every launch.
    """

    version: str = "0.4.10"
    gpu: str = "NVIDIA H200"
    limits: dict[tuple[int, int] | None, tuple[int, ...]] | None = None
    calls: list[DispatchRecord] = field(default_factory=list)

    def __call__(
        self,
        d: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scales: torch.Tensor,
        b_scales: torch.Tensor,
        experts_offsets: torch.Tensor,
        problem_sizes: torch.Tensor,
        a_strides: torch.Tensor,
        b_strides: torch.Tensor,
        d_strides: torch.Tensor,
        s_strides: torch.Tensor,
        chunk_size: int = GROUP_SIZE,
        topk: int = 8,
    ) -> None:
        self._check(d, a, b, a_scales, b_scales, experts_offsets, problem_sizes)
        # A signed 64-bit division kept in an unsigned 32-bit variable.
        m = math.trunc(Fraction(a.size(0), topk)) & 0xFFFFFFFF
        n, k = d.size(1), a.size(1)
        bucket, k_tile = self._bucket_and_k_tile(m, n, k)
        self.calls.append(DispatchRecord(m=m, n=n, k=k, dims=a.dim(), bucket=bucket, k_tile=k_tile))

        # The pointer kernel knows both ranks: 3-D reads the padded rows and ignores the offsets, 2-D trusts the
        # offsets.
        padded_starts = range(0, b.size(0) * a.size(1), a.size(1))
        row_starts = list(padded_starts) if a.dim() == 3 else experts_offsets.tolist()
        true_k, true_n = a.size(-1), d.size(-1)
        flat_a, flat_d = a.reshape(-1, true_k), d.view(-1, true_n)
        for expert, (size_n, rows, size_k) in enumerate(problem_sizes.tolist()):
            if rows == 0:
                continue
            scales = self._scales_as_read(b_scales[expert], size_n, size_k, k_tile)
            weight = dequantize_weight(b[expert], scales)
            start = row_starts[expert]
            product = flat_a[start : start + rows].float() @ weight.T * a_scales
            flat_d[start : start + rows] = product.to(d.dtype)

    def _bucket_and_k_tile(self, m: int, n: int, k: int) -> tuple[int, int]:
        if self.limits is not None:
            tuned = self.limits.get((n, k))
            k_tile = 512 if tuned is not None or k % 512 == 0 else GROUP_SIZE
            return sum(m > limit for limit in (tuned if tuned is not None else self.limits[None])), k_tile
        branch = compiled_tiles.branch(self.version, self.gpu, n, k)
        if branch is None:
            raise ValueError(
                f"version: is {self.version!r}, must be one of {', '.join(compiled_tiles.known_versions())}"
            )
        tile = Tile.of(branch.tile_at(m))
        assert tile is not None, "every tile of a version that was read has a label"
        return sum(m > limit for limit in branch.limits), tile.k

    @staticmethod
    def _scales_as_read(scales: torch.Tensor, n: int, k: int, k_tile: int) -> torch.Tensor:
        """The scales `[N, K/128]` of one expert as a K tile of `k_tile` takes them from memory."""
        groups = k // GROUP_SIZE
        if k_tile == 512:
            if groups % SCALE_INTERLEAVE:
                raise RuntimeError(f"K tile of 512 on k = {k}: reads past the scales")
            return scales.reshape(-1, n, SCALE_INTERLEAVE).transpose(0, 1).reshape(n, groups)
        return scales.reshape(groups, n).T

    @staticmethod
    def _check(
        d: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scales: torch.Tensor,
        b_scales: torch.Tensor,
        experts_offsets: torch.Tensor,
        problem_sizes: torch.Tensor,
    ) -> None:
        num_experts = experts_offsets.size(0)
        checks = (
            (a.dtype == torch.float8_e4m3fn, "a must be fp8 e4m3"),
            (b.dtype == torch.int8, "b must be int8"),
            (a_scales.dtype == torch.float32 and a_scales.dim() == 1, "a_scales must be fp32 and 1-D"),
            (b_scales.dtype == torch.bfloat16, "b_scales must be bf16"),
            (experts_offsets.dtype == torch.int32, "experts_offsets must be int32"),
            (problem_sizes.dtype == torch.int32, "problem_sizes must be int32"),
            (tuple(problem_sizes.shape) == (num_experts, 3), "problem_sizes must be [E, 3]"),
            (b.size(0) == num_experts, "b must hold one matrix an expert"),
            (a.dim() == d.dim(), "a and d must have the same rank"),
            (a.is_contiguous() and d.is_contiguous(), "a and d must be contiguous"),
        )
        for passed, message in checks:
            if not passed:
                raise RuntimeError(message)
