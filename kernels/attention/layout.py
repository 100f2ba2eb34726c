"""How results lie in memory."""

from __future__ import annotations

from torch import Tensor


def empty_as(like: Tensor, heads: int, length: int, size: int) -> Tensor:
    """[batch, heads, length, size] with heads next to each other in memory, or lengths, as ``like`` has them.

    So merging the heads of what came from one projection copies nothing.
    """
    batch = like.shape[0]
    if like.stride(1) < like.stride(2):
        return like.new_empty(batch, length, heads, size).transpose(1, 2)
    return like.new_empty(batch, heads, length, size)
