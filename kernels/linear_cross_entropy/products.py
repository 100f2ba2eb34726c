"""Matrix products of float16 and bfloat16 whose sums stay in float32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, into: Tensor) -> None:
    """``into = a @ b``; ``into`` is of the factors' dtype, or float32."""
    if into.dtype == a.dtype:
        torch.mm(a, b, out=into)
    elif _sums_in_float32(a.dtype, a.device.type):
        torch.mm(a, b, out_dtype=into.dtype, out=into)
    else:
        into.copy_(torch.mm(a, b))


def add_product(a: Tensor, b: Tensor, into: Tensor) -> None:
    """``into += a @ b``; ``into`` is of the factors' dtype, or float32."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    elif _sums_in_float32(a.dtype, a.device.type):
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into.add_(torch.mm(a, b))


@functools.cache
def _sums_in_float32(dtype: torch.dtype, device_type: str) -> bool:
    """Check that torch has matmuls of ``dtype`` that add to a float32 matrix: on CUDA, but not in each version.

    Asked of empty matrices, which launch nothing.
    """
    none = torch.empty((0, 0), dtype=dtype, device=device_type)
    into = torch.empty((0, 0), dtype=torch.float32, device=device_type)
    try:
        torch.addmm(into, none, none, out_dtype=torch.float32, out=into)
    except (RuntimeError, TypeError):
        return False
    return True
