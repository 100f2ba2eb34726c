"""Parts of a tensor along one dimension, and the tensor again from gradients of its parts.

The check whether gradients already lie beside each other is that of xformers' ``unbind`` (facebookresearch/xformers,
xformers/ops/unbind.py); torch's own SplitBackward always concatenates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split_heads(merged: Tensor, heads: int) -> Tensor:
    """[batch, heads, tokens, size], a view of [batch, tokens, heads · size]."""
    return merged.unflatten(2, (heads, merged.shape[2] // heads)).transpose(1, 2)


def merge_heads(split: Tensor) -> Tensor:
    """[batch, tokens, heads · size] of [batch, heads, tokens, size]; a view where its strides allow one."""
    return split.transpose(1, 2).flatten(2)


def qkv_views(packed: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [batch, heads, tokens, size], k and v [batch, kv heads, tokens, size]: views of their packed projection.

    Args:
        packed: [batch, tokens, (heads + 2 · kv heads) · size].
    """
    by_head = split_heads(packed, heads + 2 * kv_heads)
    q, k, v = by_head.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def whole_of(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    """The tensor whose parts along ``dim`` these are, as a view; None where they do not lie beside each other."""
    if torch.compiler.is_compiling() or not parts:
        return None
    first = parts[0]
    if first is None or type(first) is not Tensor:
        return None
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    length = 0
    for part in parts:
        if type(part) is not Tensor or part.dtype != first.dtype or part.device != first.device:
            return None
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != end:
            return None
        if part.stride() != first.stride():
            return None
        length += part.shape[dim]
        end += part.shape[dim] * part.stride(dim)
    shape = list(first.shape)
    shape[dim] = length
    return first.as_strided(shape, first.stride(), first.storage_offset())


def fill_parts(parts: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Write each gradient into its part of a buffer, each byte once; zeros for a part that nobody used."""
    for part, gradient in zip(parts, gradients, strict=True):
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient)
