"""Adding rows to those of a gradient that their tokens name."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.on_device import on_device
from gradscope.kernels.support import why_no_triton

# Rows from which on they are sorted first on a GPU. Sorting takes some five launches; no GPU has measured this.
SORTED_FROM = 1024
CHUNK = 32  # sorted rows of a program
_BLOCK = 512  # features of a program, at most


def add_rows(into: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Add ``rows[i]`` to ``into[ids[i]]`` in place, and return ``into``.

    On a GPU ``index_add_`` adds by one atomic a number, and those of a frequent token wait for each other. Sorted, a
    token's rows are added up on the way; the order within a sum differs from run to run there as here.

    Args:
        into: [tokens, features], float32 or float64.
        ids: [n], int32 or int64, each below tokens.
        rows: [n, features].
    """
    if _sorts(into, ids):
        add_sorted(into, ids, rows)
        torch.autograd.graph.increment_version(into)
        return into
    return into.index_add_(0, ids, rows)


def _sorts(into: Tensor, ids: Tensor) -> bool:
    return (
        into.is_cuda
        and ids.numel() >= SORTED_FROM
        and not torch.are_deterministic_algorithms_enabled()
        and why_no_triton(into.device) is None
    )


def add_sorted(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """:func:`add_rows` by Triton."""
    import triton

    from gradscope.kernels.embedding.triton_kernels import add_sorted as kernel

    count, features = rows.shape
    if not rows.numel():
        return
    ordered, order = ids.sort()
    block = min(triton.next_power_of_2(features), _BLOCK)
    with on_device(into):
        kernel[(-(-count // CHUNK), -(-features // block))](
            into,
            ordered,
            order,
            rows,
            count,
            features,
            *into.stride(),
            *rows.stride(),
            CHUNK=CHUNK,
            BLOCK=block,
            num_warps=4,
        )
