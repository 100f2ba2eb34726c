"""Attention's backward in one pass: scores and dp are made once a tile, and all three gradients come from them.

That is five products a tile, as in FlashAttention-2 (T. Dao, 2023, algorithm 2); the kernels of triton_backward/ have
seven. A program holds a block of keys, and so has a part of dq. Where the block holds all keys the part is the whole,
and is stored. Else the parts are added by atomics in float32, in another order at each run.

Tiles are [keys, queries]: so the probabilities need not be transposed for dv and dk. [queries, keys], where logsumexp
and delta are fewer numbers a thread, was compiled too, and spilled several times as much.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.attention.triton_scores.triton_kernels import (
    add_rows,
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
def all_gradients(
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
    dq,  # in float32 where it is added to
    terms,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    WHOLE: tl.constexpr,  # one block holds all keys
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program a block of keys, which goes over the queries of every head that shares them.

    Rows of dq that no key of the band sees are not visited, and those that several blocks see are added to: the caller
    makes them zero.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(terms.keys, BLOCK_N)
    start = program % blocks * BLOCK_N
    key_heads = terms.heads // terms.group
    b = program // blocks // key_heads
    key_head = program // blocks % key_heads

    columns = positions(start, BLOCK_N, FORM)
    key = load_rows(at_head(k, b, key_head), k, columns, terms.keys, FORM.size, BLOCK_D).to(OPERAND)
    value = load_rows(at_head(v, b, key_head), v, columns, terms.keys, FORM.value_size, BLOCK_V).to(OPERAND)
    key_slope = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_slope = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    first, full, rest, end = band(
        start, terms.right, terms.left, terms.queries, FORM.right, FORM.left, BLOCK_N, BLOCK_M
    )
    for member in range(terms.group):
        h = key_head * terms.group + member
        q_head = at_head(q, b, h)
        do_head = at_head(grad_out, b, h)
        dq_head = at_head(dq, b, h)
        head = b * terms.heads + h
        of_rows = head.to(tl.int64) * terms.queries
        slope = slope_of(alibi, b, h, FORM)
        for part in tl.static_range(3):
            if FORM.right or part > 0:
                low, high = part_of(part, first, full, rest, end)
                for row in range(low, high, BLOCK_M):
                    rows = positions(row, BLOCK_M, FORM)
                    there = rows < terms.queries
                    query = load_rows(q_head, q, rows, terms.queries, FORM.size, BLOCK_D, part != 1).to(OPERAND)
                    do = load_rows(do_head, grad_out, rows, terms.queries, FORM.value_size, BLOCK_V, part != 1)
                    do = do.to(OPERAND)
                    lse = load_logsumexp(logsumexp + of_rows + rows, there, FORM)
                    less = tl.load(delta + of_rows + rows, mask=there, other=0.0)
                    raw = tl.dot(key, tl.trans(query), input_precision=PRECISION) * terms.factor
                    s, bend = scores(raw, rows[None, :], columns[:, None], b, h, bias, slope, terms, FORM, part != 1)
                    p = weights(s, lse[None, :], terms, FORM)
                    dp = tl.dot(value, tl.trans(do), input_precision=PRECISION)
                    dropped = p
                    if FORM.dropout:
                        mask = tl.trans(kept(seed, head, row, start, terms.threshold, BLOCK_M, BLOCK_N))
                        dropped = tl.where(mask, p, 0.0)
                        dp = tl.where(mask, dp * terms.keep_scale, 0.0)
                    value_slope = tl.dot(dropped.to(OPERAND), do, value_slope, input_precision=PRECISION)
                    ds = (p * (dp - less[None, :]) * bend).to(OPERAND)
                    key_slope = tl.dot(ds, query, key_slope, input_precision=PRECISION)
                    if BLOCK_M < 64 and BLOCK_D >= 64:  # Hopper's products have 64 rows at least
                        query_slope = tl.trans(tl.dot(tl.trans(key), ds, input_precision=PRECISION))
                    else:
                        query_slope = tl.dot(tl.trans(ds), key, input_precision=PRECISION)
                    query_slope *= terms.scale
                    if WHOLE:
                        store_rows(dq_head, dq, query_slope, rows, terms.queries, FORM.size, BLOCK_D)
                    else:
                        add_rows(dq_head, dq, query_slope, rows, terms.queries, FORM.size, BLOCK_D)

    store_rows(at_head(dk, b, key_head), dk, key_slope * terms.scale, columns, terms.keys, FORM.size, BLOCK_D)
    store_rows(
        at_head(dv, b, key_head), dv, value_slope * terms.keep_scale, columns, terms.keys, FORM.value_size, BLOCK_V
    )
