"""What the tests of attention share: one run with all gradients, and torch's own samples."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.kernels.attention import reference
from gradscope.kernels.attention.options import Options, default_scale
from gradscope.recipes.attention import attention

NAMES = ("out", "dq", "dk", "dv", "dbias")


def run(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The result of fresh leaves, and their gradients for an upstream gradient that differs by element."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    out = function(*leaves)
    upstream = torch.linspace(-1.0, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


def by_reference(*tensors: Tensor, keep: Tensor | None = None, mask: Tensor | None = None, **settings: Any) -> Tensor:
    """The same by plain operations; a fourth tensor is an added bias."""
    q, k, v, *bias = tensors
    settings.setdefault("scale", default_scale(q.shape[3]))
    options = Options(kv_heads=k.shape[1], **settings)
    return reference.attention(q, k, v, bias[0] if bias else mask, options, keep)[0]


def ours(*tensors: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
    """The CPU path; a fourth tensor is an added bias."""
    q, k, v, *bias = tensors
    grouped = q.shape[1] != k.shape[1]
    return attention(q, k, v, bias[0] if bias else mask, enable_gqa=grouped, backend="cpu", **settings)


def assert_all_as_accurate(
    mine: tuple[Tensor, ...], torchs: tuple[Tensor, ...], truth: tuple[Tensor, ...], tensors: tuple[Tensor, ...]
) -> None:
    """Of the result and every gradient, the root of the mean square error is at most twice torch's.

    The mean and not the largest: with few elements torch's largest error is near 0 by luck. Allowed besides is rounding
    the result itself, and for gradients the float32 rounding of dp and delta, which nearly cancel (with one key they
    do, and torch's softmax is exact there): half a unit of their largest terms each, times the other side of the
    product.
    """
    q, k, v = (x.detach().double() for x in tensors[:3])
    upstream = torch.ones(mine[0].shape, dtype=torch.float64) * 2
    dp = upstream @ v.abs().repeat_interleave(q.shape[-3] // v.shape[-3], -3).transpose(-2, -1)
    cancelled = torch.finfo(torch.float32).eps * dp.max() * max(q.abs().max(), k.abs().max()) / q.shape[-1] ** 0.5
    for name, one, other, true in zip(NAMES, mine, torchs, truth, strict=False):
        assert one.dtype == other.dtype
        assert one.shape == other.shape == true.shape
        error, torchs_error = ((x.double() - true).square().mean().sqrt() for x in (one, other))
        rounding = torch.finfo(one.dtype).eps * true.square().mean().sqrt() + (cancelled if name != "out" else 0.0)
        assert error <= torch.maximum(2 * torchs_error, rounding), f"{name}: {error:.3g}, torch's {torchs_error:.3g}"


def qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    size: int,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query from a projection's layout, key and value in others."""
    q = torch.randn(batch, queries, heads, size, dtype=dtype).transpose(1, 2)
    k = torch.randn(batch, kv_heads, keys, size, dtype=dtype)
    v = torch.randn(keys, batch, kv_heads, value_size or size, dtype=dtype).permute(1, 2, 0, 3)
    return q, k, v


def samples(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """PyTorch's samples of scaled_dot_product_attention."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the import appends to it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # and warns of optional parts of torch's own tests
        from torch.testing._internal.common_methods_invocations import op_db
    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    return list(op.sample_inputs("cpu", dtype, requires_grad=True))
