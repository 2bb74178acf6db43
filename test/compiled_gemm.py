"""The compiled grouped GEMM that device tests run against."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

# A library of sglang-kernel (common_ops), where the package itself cannot be installed.
LIBRARY = "SGLANG_W4AFP8_TEST_KERNEL_LIBRARY"


def real_kernel() -> tuple[Callable[..., Any] | None, str | None]:
    """The compiled kernel, or why there is none."""
    if not torch.cuda.is_available():
        return None, "no GPU"
    if torch.cuda.get_device_capability()[0] != 9:
        return None, "the grouped GEMM is compiled for Hopper only"
    if os.environ.get(LIBRARY):
        torch.ops.load_library(os.environ[LIBRARY])
        return torch.ops.sgl_kernel.cutlass_w4a8_moe_mm.default, None
    try:
        from sgl_kernel import cutlass_w4a8_moe_mm
    except ImportError as error:
        return None, f"sgl_kernel cannot be imported ({error}) and {LIBRARY} is not set"
    return cutlass_w4a8_moe_mm, None
