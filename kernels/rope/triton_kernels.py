"""The Triton kernel: a program takes some tokens and some heads of a sample. Not yet run on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(
    x,
    cos,  # float32
    sin,
    out,
    heads,
    tokens,
    size,
    pairs,
    x_batch,  # strides
    x_head,
    x_token,
    x_feature,
    cos_batch,
    cos_token,
    cos_pair,
    sin_batch,
    sin_token,
    sin_pair,
    out_batch,
    out_head,
    out_token,
    out_feature,
    SIGN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPY_REST: tl.constexpr,  # of features that are not turned
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,  # of a program: few, so that there are programs enough to keep memory busy
):
    # In 64 bits: an element's offset may pass 2^31.
    blocks = (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    token = (program % blocks) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS).to(tl.int64)[None, :]
    inside = (token < tokens) & (pair < pairs)
    c = tl.load(cos + batch * cos_batch + token * cos_token + pair * cos_pair, mask=inside, other=0.0)
    s = tl.load(sin + batch * sin_batch + token * sin_token + pair * sin_pair, mask=inside, other=0.0) * SIGN
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = first + pairs
    rest = 2 * pairs + tl.arange(0, BLOCK_REST).to(tl.int64)[None, :]
    beyond = (token < tokens) & (rest < size)
    head = tl.program_id(1) * HEADS
    source = x + batch * x_batch + token * x_token + head.to(tl.int64) * x_head
    target = out + batch * out_batch + token * out_token + head.to(tl.int64) * out_head
    for _ in range(head, tl.minimum(head + HEADS, heads)):
        a = tl.load(source + first * x_feature, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + second * x_feature, mask=inside, other=0.0).to(tl.float32)
        kind = out.dtype.element_ty
        tl.store(target + first * out_feature, (a * c - b * s).to(kind), mask=inside)
        tl.store(target + second * out_feature, (b * c + a * s).to(kind), mask=inside)
        if COPY_REST:
            kept = tl.load(source + rest * x_feature, mask=beyond, other=0.0)
            tl.store(target + rest * out_feature, kept, mask=beyond)
        source += x_head
        target += out_head
