"""Dropout on the CPU, a chunk at a time: its mask is computed, used and overwritten in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.dropout.counter import CHUNK, Bits, threshold


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """``x / (1 - p)`` where the hash of the element's index keeps it, else 0.

    Args:
        x: any shape and strides, of a floating dtype.
        seed: a scalar int64 tensor.
        p: share that is dropped, in [0, 1).

    Returns:
        Contiguous, of the shape and dtype of ``x``.
    """
    found = torch.empty(x.shape, dtype=x.dtype)
    flat, into = x.reshape(-1), found.view(-1)
    count = flat.numel()
    bits, limit, scale = Bits(int(seed), min(CHUNK, count)), threshold(p), 1 / (1 - p)
    for start in range(0, count, CHUNK):
        end = min(start + CHUNK, count)
        dropped = bits.below(limit, start, end - start)
        torch.mul(flat[start:end], scale, out=into[start:end]).masked_fill_(dropped, 0)
    return found
