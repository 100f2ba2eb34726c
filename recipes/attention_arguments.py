"""Attention's arguments: what is wrong with them, and all of them in one form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.kernels.attention.options import default_scale
from gradscope.kernels.check import (
    dtype_text,
    refuse,
    require_dtype,
    require_range,
    require_same_device,
    shape_text,
)
from gradscope.kernels.support import autocasts

NAME = "attention"


class Arguments(NamedTuple):
    """Checked, under autocast cast, and of four dimensions."""

    q: Tensor  # [batch, heads, queries, size]
    k: Tensor  # [batch, kv heads, keys, size]
    v: Tensor  # [batch, kv heads, keys, value size]
    bias: Tensor | None  # boolean or floating; each side of [batch, heads, queries, keys], or 1
    alibi: Tensor | None  # float32 or float64, contiguous, [heads] or [batch, heads]
    shape: tuple[int, ...]  # of the result
    dropout_p: float
    is_causal: bool
    scale: float
    softcap: float | None
    left: int | None
    right: int | None
    sinks: Tensor | None  # [heads]

    @property
    def grouped(self) -> bool:
        """Check that several query heads read one key head."""
        return self.q.shape[1] != self.k.shape[1]

    @property
    def wants_bias_grad(self) -> bool:
        """Check that the bias gets a gradient."""
        return self.bias is not None and self.bias.requires_grad and torch.is_grad_enabled()

    def extras(self) -> str | None:
        """What torch's SDPA has no argument for, in words that follow "not support"."""
        limited = self.left is not None or self.right is not None
        if self.softcap is None and self.alibi is None and self.sinks is None and not limited:
            return None
        given = {
            "soft-cap": self.softcap is not None,
            "ALiBi": self.alibi is not None,
            "window": limited,
            "sinks": self.sinks is not None,
        }
        return " or ".join(name for name, is_given in given.items() if is_given)


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    window: tuple[int | None, int | None] | None,
    sinks: Tensor | None = None,
) -> Arguments:
    """One form of what a user gave.

    Raises:
        ValueError: something does not fit.
    """
    require_same_device(NAME, ("query", query), key=key, value=value)
    if autocasts(query.device.type):
        query, key, value = (_under_autocast(x) for x in (query, key, value))
    _check_tensors(query, key, value)
    left, right = _checked_window(window)
    require_range(NAME, "dropout_p", dropout_p, 0.0, 1.0)
    if softcap is not None:
        require_range(NAME, "softcap", softcap, 0.0, float("inf"), open_low=True, open_high=True)
    batch = _broadcast_batch(query, key, value)
    q, k, v = _with_heads(_four(query, batch), _four(key, batch), _four(value, batch), enable_gqa)
    heads = (q.shape[1],) if max(query.dim(), key.dim(), value.dim()) > 2 else ()
    bias = None
    if attn_mask is not None:
        bias = _four_of_mask(attn_mask, query, batch, (q.shape[1], q.shape[2], k.shape[2]))
    return Arguments(
        q,
        k,
        v,
        bias,
        None if alibi_slopes is None else _checked_slopes(alibi_slopes, query, batch, q.shape[1]),
        (*batch, *heads, q.shape[2], v.shape[3]),
        float(dropout_p),
        is_causal,
        default_scale(q.shape[3]) if scale is None else float(scale),
        softcap,
        left,
        right,
        None if sinks is None else _checked_sinks(sinks, query, q.shape[1]),
    )


def _under_autocast(tensor: Tensor) -> Tensor:
    """Cast q, k and v as autocast does for SDPA: float64 stays, the rest becomes the lower precision."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.is_nested:
            refuse(NAME, name, "a nested tensor", "a dense one")
        require_dtype(NAME, name, tensor)
        if tensor.dim() < 2:
            refuse(NAME, name, shape_text(tensor), "(..., heads, length, size)")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            refuse(NAME, name, f"of dtype {dtype_text(tensor.dtype)}", f"{dtype_text(query.dtype)}, as query is")
    if key.shape[-1] != query.shape[-1]:
        refuse(NAME, "key", shape_text(key), f"size {query.shape[-1]} at the end, as query has")
    if value.shape[-2] != key.shape[-2]:
        refuse(NAME, "value", shape_text(value), f"length {key.shape[-2]}, as key has")


def _broadcast_batch(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The batch shape, before the heads, that q, k and v broadcast to."""
    batch = query.shape[:-3]
    if batch == key.shape[:-3] and batch == value.shape[:-3]:
        return batch  # torch.broadcast_shapes takes as long as a small attention
    for name, tensor in (("key", key), ("value", value)):
        try:
            batch = torch.broadcast_shapes(batch, tensor.shape[:-3])
        except RuntimeError:
            refuse(NAME, name, shape_text(tensor), f"a batch that broadcasts with query {shape_text(query)}")
    return torch.Size(batch)


def _four(tensor: Tensor, batch: torch.Size) -> Tensor:
    """[batch, heads, length, size]."""
    if tensor.dim() == 4 and len(batch) == 1 and tensor.shape[0] == batch[0]:
        return tensor
    own = tensor[None] if tensor.dim() == 2 else tensor
    if own.shape[:-3] != batch:
        own = own.expand(*batch, *own.shape[-3:])
    return own.reshape(batch.numel(), *own.shape[-3:]) if own.dim() != 4 else own


def _with_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that fit: those of k and v are the same, and divide those of q."""
    if enable_gqa:
        if k.shape[1] != v.shape[1]:
            refuse(NAME, "value", f"of {v.shape[1]} heads", f"{k.shape[1]}, as key has")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            refuse(NAME, "query", f"of {q.shape[1]} heads", f"a multiple of key's {k.shape[1]}")
        return q, k, v
    heads = q.shape[1]
    if heads == k.shape[1] and heads == v.shape[1]:
        return q, k, v
    for name, tensor in (("key", k), ("value", v)):
        if tensor.shape[1] != heads and 1 not in (tensor.shape[1], heads):
            expected = f"{heads}, as query has, or a divisor of them with enable_gqa=True"
            refuse(NAME, name, f"of {tensor.shape[1]} heads", expected)
        heads = tensor.shape[1] if heads == 1 else heads
    q = q if q.shape[1] == heads else q.expand(-1, heads, -1, -1)
    if k.shape[1] != v.shape[1]:
        k, v = (x.expand(-1, heads, -1, -1) for x in (k, v))
    return q, k, v


def _four_of_mask(mask: Tensor, query: Tensor, batch: torch.Size, sides: tuple[int, int, int]) -> Tensor:
    """[batch or 1, heads or 1, queries or 1, keys or 1]."""
    if mask.dtype in (torch.float16, torch.bfloat16) and mask.dtype != query.dtype != torch.float64:
        # Autocast would give it the queries' dtype, in which a mask of the smallest bfloat16 is minus infinity.
        mask = mask.float() if query.dtype == torch.float32 or autocasts(query.device.type) else mask
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        refuse(NAME, "attn_mask", f"of dtype {dtype_text(mask.dtype)}", f"bool, float32 or {dtype_text(query.dtype)}")
    require_same_device(NAME, ("query", query), attn_mask=mask)
    if query.dtype == torch.float64 and mask.is_floating_point():
        mask = mask.double()  # the CPU kernel of torch 2.13 reads a float32 mask as float64
    full = (*batch, *sides)
    # Not "in (1, want)": under torch.compile that is false of equal sizes where one is not fixed. So in all recipes.
    fits = mask.dim() <= len(full) and all(
        own == 1 or own == want for own, want in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        refuse(NAME, "attn_mask", shape_text(mask), f"a shape that broadcasts to {full}")
    if mask.dim() <= 3:
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if mask.dim() == 4 and len(batch) == 1:
        return mask
    return mask.expand(*batch, *mask.shape[-3:]).reshape(batch.numel(), *mask.shape[-3:])


def _checked_slopes(slopes: Tensor, query: Tensor, batch: torch.Size, heads: int) -> Tensor:
    require_dtype(NAME, "alibi_slopes", slopes)
    require_same_device(NAME, ("query", query), alibi_slopes=slopes)
    if slopes.requires_grad:
        refuse(
            NAME,
            "alibi_slopes",
            "a tensor that requires a gradient",
            ("one that does not: no gradient is computed for it"),
        )
    if tuple(slopes.shape) not in ((heads,), (*batch, heads)):
        refuse(NAME, "alibi_slopes", shape_text(slopes), f"({heads},) or {(*batch, heads)}")
    wide = slopes if slopes.dtype == torch.float64 else slopes.float()
    return (wide if wide.dim() == 1 else wide.reshape(-1, heads)).contiguous()


def _checked_sinks(sinks: Tensor, query: Tensor, heads: int) -> Tensor:
    require_dtype(NAME, "sinks", sinks)
    require_same_device(NAME, ("query", query), sinks=sinks)
    if tuple(sinks.shape) != (heads,):
        refuse(NAME, "sinks", shape_text(sinks), f"({heads},), one for each head of the query")
    return sinks


def _checked_window(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    fits = len(window) == 2 and all(side is None or (isinstance(side, int) and side >= 0) for side in window)
    if not fits:
        refuse(NAME, "window", repr(window), "(left, right), each an int of at least 0, or None for no limit")
    return window
