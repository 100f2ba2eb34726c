"""Rows added to those of a gradient that their tokens name, in the tokens' order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_sorted(
    into,  # [tokens, features], float32 or float64
    ids,  # sorted
    order,  # of each, its place in rows
    rows,
    count,
    features,
    into_row,  # strides
    into_feature,
    rows_row,
    rows_feature,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program CHUNK places of the order and BLOCK features: it adds up each token's rows before they go to memory.

    A token's rows may go on in the next chunk, so that what goes to memory is added by atomics: one a token and chunk,
    where rows added one by one wait for each other as often as their token occurs.
    """
    first = tl.program_id(0).to(tl.int64) * CHUNK
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    column = column.to(tl.int64)
    total = tl.zeros([BLOCK], into.dtype.element_ty)
    for i in range(CHUNK):
        at = first + i
        token = tl.load(ids + at, mask=at < count, other=-1).to(tl.int64)
        following = tl.load(ids + at + 1, mask=at + 1 < count, other=-1).to(tl.int64)
        source = tl.load(order + at, mask=at < count, other=0)
        # Triton 3.9 interprets block & scalar wrongly.
        here = column < tl.where(at < count, features, 0)
        found = tl.load(rows + source * rows_row + column * rows_feature, mask=here, other=0.0)
        total += found.to(total.dtype)
        ends = (following != token) | (i == CHUNK - 1)
        last = column < tl.where((at < count) & ends, features, 0)
        # Relaxed: nobody reads the sum before the kernel has ended.
        tl.atomic_add(into + token * into_row + column * into_feature, total, mask=last & inside, sem="relaxed")
        total = tl.where(ends, 0.0, total)
