"""Attention's backward: one kernel for dk and dv, one for dq; none adds by atomics.

The method is FlashAttention-2's (T. Dao, 2023, algorithm 2): probabilities are made again from the logsumexp, and the
row sum of p · dp is that of the output times its gradient. With ds = p · (dp - delta), by the chain rule
dq = scale · ds k, dk = scale · dsᵀ q, dv = pᵀ do. dq has a kernel of its own, at the price of two products
that are made twice, so that every sum has one order: the same result at each run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.attention.triton_scores.triton_kernels import (
    at_head,
    band,
    kept,
    load_logsumexp,
    load_rows,
    part_of,
    positions,
    scores,
    slope_of,
    store_rows,
    weights,
)


@triton.jit
def deltas(
    out,
    grad_out,
    delta,  # [batch, heads, queries], float32, contiguous
    heads,
    queries,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    program = tl.program_id(0)
    blocks = tl.cdiv(queries, BLOCK_M)
    rows = (program % blocks * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    head = program // blocks
    o = load_rows(at_head(out, head // heads, head % heads), out, rows, queries, SIZE, BLOCK_V)
    do = load_rows(at_head(grad_out, head // heads, head % heads), grad_out, rows, queries, SIZE, BLOCK_V)
    found = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * queries + rows, found, mask=rows < queries)


@triton.jit
def keys_and_values(
    q,
    k,
    v,
    bias,
    alibi,
    seed,
    grad_out,
    logsumexp,
    delta,
    dk,
    dv,
    terms,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program a block of keys, which goes over the queries of every head that shares them. Tiles are [keys, queries]:
    so the products with q and do need no transposed probabilities.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(terms.keys, BLOCK_N)
    start = program % blocks * BLOCK_N
    key_heads = terms.heads // terms.group
    b = program // blocks // key_heads
    key_head = program // blocks % key_heads

    columns = positions(start, BLOCK_N, FORM)
    # Keys carry the factor here: they are read once, queries at every turn.
    key = load_rows(at_head(k, b, key_head), k, columns, terms.keys, FORM.size, BLOCK_D)
    key = (key.to(tl.float32) * terms.factor).to(OPERAND)
    value = load_rows(at_head(v, b, key_head), v, columns, terms.keys, FORM.value_size, BLOCK_V).to(OPERAND)
    key_slope = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_slope = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    first, full, rest, end = band(
        start, terms.right, terms.left, terms.queries, FORM.right, FORM.left, BLOCK_N, BLOCK_M
    )
    for member in range(terms.group):
        h = key_head * terms.group + member
        head = b * terms.heads + h
        q_head = at_head(q, b, h)
        do_head = at_head(grad_out, b, h)
        of_rows = head.to(tl.int64) * terms.queries
        slope = slope_of(alibi, b, h, FORM)
        for part in tl.static_range(3):
            if FORM.right or part > 0:
                low, high = part_of(part, first, full, rest, end)
                for row in range(low, high, BLOCK_M):
                    rows = positions(row, BLOCK_M, FORM)
                    there = rows < terms.queries
                    query = load_rows(q_head, q, rows, terms.queries, FORM.size, BLOCK_D, part != 1).to(OPERAND)
                    raw = tl.dot(key, tl.trans(query), input_precision=PRECISION)
                    s, bend = scores(raw, rows[None, :], columns[:, None], b, h, bias, slope, terms, FORM, part != 1)
                    lse = load_logsumexp(logsumexp + of_rows + rows, there, FORM)
                    p = weights(s, lse[None, :], terms, FORM)
                    do = load_rows(do_head, grad_out, rows, terms.queries, FORM.value_size, BLOCK_V, part != 1)
                    do = do.to(OPERAND)
                    dp = tl.dot(value, tl.trans(do), input_precision=PRECISION)
                    dropped = p
                    if FORM.dropout:
                        mask = tl.trans(kept(seed, head, row, start, terms.threshold, BLOCK_M, BLOCK_N))
                        dropped = tl.where(mask, p, 0.0)
                        dp = tl.where(mask, dp * terms.keep_scale, 0.0)
                    value_slope = tl.dot(dropped.to(OPERAND), do, value_slope, input_precision=PRECISION)
                    less = tl.load(delta + of_rows + rows, mask=there, other=0.0)
                    ds = p * (dp - less[None, :]) * bend
                    key_slope = tl.dot(ds.to(OPERAND), query, key_slope, input_precision=PRECISION)

    store_rows(at_head(dk, b, key_head), dk, key_slope * terms.scale, columns, terms.keys, FORM.size, BLOCK_D)
    store_rows(
        at_head(dv, b, key_head), dv, value_slope * terms.keep_scale, columns, terms.keys, FORM.value_size, BLOCK_V
    )


@triton.jit
def gradient_tile(
    query,  # times terms.factor
    do,
    key,
    value,
    lse,  # in the units of the scores
    less,  # delta
    row,
    column,
    b,
    h,
    bias,
    seed,
    slope,
    terms,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradient of a tile of scores, before and after the soft-cap."""
    rows = positions(row, BLOCK_M, FORM)[:, None]
    columns = positions(column, BLOCK_N, FORM)[None, :]
    raw = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    s, bend = scores(raw, rows, columns, b, h, bias, slope, terms, FORM, MASKED)
    p = weights(s, lse[:, None], terms, FORM)
    dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
    if FORM.dropout:
        mask = kept(seed, b * terms.heads + h, row, column, terms.threshold, BLOCK_M, BLOCK_N)
        dp = tl.where(mask, dp * terms.keep_scale, 0.0)
    after = p * (dp - less[:, None])
    return after * bend, after


@triton.jit
def queries_alone(
    q,
    k,
    v,
    bias,
    alibi,
    seed,
    grad_out,
    logsumexp,
    delta,
    dq,
    terms,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program a block of queries, which goes over the keys."""
    program = tl.program_id(0)
    blocks = tl.cdiv(terms.queries, BLOCK_M)
    start = (blocks - 1 - program % blocks) * BLOCK_M
    head = program // blocks
    b = head // terms.heads
    h = head % terms.heads
    k_head = at_head(k, b, h // terms.group)
    v_head = at_head(v, b, h // terms.group)
    slope = slope_of(alibi, b, h, FORM)

    rows = positions(start, BLOCK_M, FORM)
    there = rows < terms.queries
    query = load_rows(at_head(q, b, h), q, rows, terms.queries, FORM.size, BLOCK_D)
    query = (query.to(tl.float32) * terms.factor).to(OPERAND)
    do = load_rows(at_head(grad_out, b, h), grad_out, rows, terms.queries, FORM.value_size, BLOCK_V).to(OPERAND)
    of_rows = head.to(tl.int64) * terms.queries
    lse = load_logsumexp(logsumexp + of_rows + rows, there, FORM)
    less = tl.load(delta + of_rows + rows, mask=there, other=0.0)
    query_slope = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first, full, rest, end = band(start, terms.left, terms.right, terms.keys, FORM.left, FORM.right, BLOCK_M, BLOCK_N)
    for part in tl.static_range(3):
        if FORM.left or part > 0:
            low, high = part_of(part, first, full, rest, end)
            for column in range(low, high, BLOCK_N):
                columns = positions(column, BLOCK_N, FORM)
                key = load_rows(k_head, k, columns, terms.keys, FORM.size, BLOCK_D, part != 1).to(OPERAND)
                value = load_rows(v_head, v, columns, terms.keys, FORM.value_size, BLOCK_V, part != 1).to(OPERAND)
                ds, _ = gradient_tile(
                    query,
                    do,
                    key,
                    value,
                    lse,
                    less,
                    start,
                    column,
                    b,
                    h,
                    bias,
                    seed,
                    slope,
                    terms,
                    FORM,
                    PRECISION,
                    part != 1,
                    BLOCK_M,
                    BLOCK_N,
                )
                query_slope = tl.dot(ds.to(OPERAND), key, query_slope, input_precision=PRECISION)
    store_rows(at_head(dq, b, h), dq, query_slope * terms.scale, rows, terms.queries, FORM.size, BLOCK_D)
