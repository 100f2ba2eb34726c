"""Gradient of what was added to the scores: that of the scores, summed over the batches and heads that share it.

The tiles are FlashAttention-2's, made once more (T. Dao, 2023, algorithm 2): adding them up by atomics beside dq would
write batch · heads · queries · keys numbers, in another order at each run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.attention.triton_backward.triton_kernels import gradient_tile
from gradscope.kernels.attention.triton_scores.triton_kernels import (
    at_head,
    load_logsumexp,
    load_rows,
    positions,
    slope_of,
)


@triton.jit
def bias_gradient(
    q,
    k,
    v,
    bias,
    alibi,
    seed,
    grad_out,
    logsumexp,
    delta,
    into,  # Heads, float32: [own batches, own heads, queries or blocks of them, keys or blocks of them]
    own_heads,  # of the bias: 1, or all
    sharing_batches,  # of each element of the bias
    sharing_heads,
    terms,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    ONE_ROW: tl.constexpr,  # the bias is the same for all queries
    ONE_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program a tile of the bias, which goes over the batches and heads that share it."""
    program = tl.program_id(0)
    column_blocks = tl.cdiv(terms.keys, BLOCK_N)
    row_blocks = tl.cdiv(terms.queries, BLOCK_M)
    column_block = program % column_blocks
    row_block = program // column_blocks % row_blocks
    own_batch = program // column_blocks // row_blocks // own_heads
    own_head = program // column_blocks // row_blocks % own_heads
    row = row_block * BLOCK_M
    column = column_block * BLOCK_N
    rows = positions(row, BLOCK_M, FORM)
    columns = positions(column, BLOCK_N, FORM)
    there = rows < terms.queries
    found = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    turns = sharing_batches * sharing_heads
    if FORM.left:  # nothing where the whole tile lies outside the band
        turns = tl.where(column + BLOCK_N - 1 >= row - terms.left, turns, 0)
    if FORM.right:
        turns = tl.where(column <= row + BLOCK_M - 1 + terms.right, turns, 0)
    for turn in range(turns):
        b = own_batch + turn // sharing_heads
        h = own_head + turn % sharing_heads
        slope = slope_of(alibi, b, h, FORM)
        query = load_rows(at_head(q, b, h), q, rows, terms.queries, FORM.size, BLOCK_D)
        query = (query.to(tl.float32) * terms.factor).to(OPERAND)
        do = load_rows(at_head(grad_out, b, h), grad_out, rows, terms.queries, FORM.value_size, BLOCK_V).to(OPERAND)
        key_head = h // terms.group
        key = load_rows(at_head(k, b, key_head), k, columns, terms.keys, FORM.size, BLOCK_D).to(OPERAND)
        value = load_rows(at_head(v, b, key_head), v, columns, terms.keys, FORM.value_size, BLOCK_V).to(OPERAND)
        of_rows = (b * terms.heads + h).to(tl.int64) * terms.queries
        lse = load_logsumexp(logsumexp + of_rows + rows, there, FORM)
        less = tl.load(delta + of_rows + rows, mask=there, other=0.0)
        _, ds = gradient_tile(
            query,
            do,
            key,
            value,
            lse,
            less,
            row,
            column,
            b,
            h,
            bias,
            seed,
            slope,
            terms,
            FORM,
            PRECISION,
            True,
            BLOCK_M,
            BLOCK_N,
        )
        found += ds
    # In 64 bits: a part for each block of rows passes 2^31 elements from some 400,000 queries and keys on.
    to = at_head(into, own_batch, own_head)
    row_offset = rows.to(tl.int64) * into.row
    column_offset = columns.to(tl.int64) * into.column
    row_part = row_block.to(tl.int64) * into.row
    column_part = column_block.to(tl.int64) * into.column
    if ONE_ROW and ONE_COLUMN:
        tl.store(to + row_part + column_part, tl.sum(tl.sum(found, 1), 0))
    elif ONE_ROW:
        tl.store(to + row_part + column_offset, tl.sum(found, 0), mask=columns < terms.keys)
    elif ONE_COLUMN:
        tl.store(to + row_offset + column_part, tl.sum(found, 1), mask=there)
    else:
        at = to + row_offset[:, None] + column_offset[None, :]
        tl.store(at, found, mask=there[:, None] & (columns < terms.keys)[None, :])
