"""Attention's forward: a program a block of queries, which goes over the keys with a running maximum and sum.

The method is FlashAttention-2's (T. Dao, "FlashAttention-2: faster attention with better parallelism and work
partitioning", 2023), over M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018. Blocks of
keys that a causal mask or a window leaves out are not visited, and those that it leaves whole are not masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.attention.triton_scores.triton_kernels import (
    at_head,
    band,
    kept,
    load_rows,
    logsumexp_of,
    part_of,
    positions,
    scores,
    slope_of,
    store_rows,
    weights_below,
)


@triton.jit
def forward(
    q,
    k,
    v,
    bias,
    alibi,  # [batch, heads, 1, 1], float32
    seed,
    out,
    logsumexp,  # [batch, heads, queries], float32, contiguous
    terms,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,  # of products in float32
    OPERAND: tl.constexpr,  # dtype of the products' operands
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    program = tl.program_id(0)
    blocks = tl.cdiv(terms.queries, BLOCK_M)
    # The last rows of a causal mask see most keys: they begin first, so that none of them is left over at the end.
    start = (blocks - 1 - program % blocks) * BLOCK_M
    head = program // blocks
    b = head // terms.heads
    h = head % terms.heads
    k_head = at_head(k, b, h // terms.group)
    v_head = at_head(v, b, h // terms.group)
    slope = slope_of(alibi, b, h, FORM)

    rows = positions(start, BLOCK_M, FORM)
    query = load_rows(at_head(q, b, h), q, rows, terms.queries, FORM.size, BLOCK_D)
    query = (query.to(tl.float32) * terms.factor).to(OPERAND)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    first, full, rest, end = band(start, terms.left, terms.right, terms.keys, FORM.left, FORM.right, BLOCK_M, BLOCK_N)
    for part in tl.static_range(3):
        if FORM.left or part > 0:
            low, high = part_of(part, first, full, rest, end)
            for column in range(low, high, BLOCK_N):
                columns = positions(column, BLOCK_N, FORM)
                key = load_rows(k_head, k, columns, terms.keys, FORM.size, BLOCK_D, part != 1).to(OPERAND)
                raw = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                s, _ = scores(raw, rows[:, None], columns[None, :], b, h, bias, slope, terms, FORM, part != 1)
                new = tl.maximum(highest, tl.max(s, 1))
                shift = tl.where(new == -float("inf"), 0.0, new)  # -inf less -inf is NaN
                p = weights_below(s, shift[:, None], terms, FORM)
                decay = weights_below(highest, shift, terms, FORM)
                total = total * decay + tl.sum(p, 1)
                if FORM.dropout:
                    p = tl.where(kept(seed, head, start, column, terms.threshold, BLOCK_M, BLOCK_N), p, 0.0)
                value = load_rows(v_head, v, columns, terms.keys, FORM.value_size, BLOCK_V, part != 1).to(OPERAND)
                result = tl.dot(p.to(OPERAND), value, result * decay[:, None], input_precision=PRECISION)
                highest = new

    nothing = total == 0.0  # such a row saw no key
    total = tl.where(nothing, 1.0, total)
    store_rows(
        at_head(out, b, h),
        out,
        result * (terms.keep_scale / total)[:, None],
        rows,
        terms.queries,
        FORM.value_size,
        BLOCK_V,
    )
    found = tl.where(nothing, -float("inf"), logsumexp_of(highest, total, terms, FORM))
    tl.store(logsumexp + head.to(tl.int64) * terms.queries + rows, found, mask=rows < terms.queries)
