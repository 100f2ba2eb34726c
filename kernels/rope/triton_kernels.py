"""The Triton kernel: a program takes some tokens and some heads of a sample."""

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
    WIDE: tl.constexpr,  # offsets within a program's tokens need 64 bits
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,  # of a program: few, so that there are programs enough to keep memory busy
):
    # In 64 bits: an element's offset may pass 2^31.
    blocks = (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    start = (program % blocks) * BLOCK_TOKENS
    token = tl.arange(0, BLOCK_TOKENS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    both = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]  # features of interleaved pairs, as they lie in memory
    rest = tl.arange(0, BLOCK_REST)[None, :] + 2 * pairs
    if WIDE:
        token, pair, both, rest = token.to(tl.int64), pair.to(tl.int64), both.to(tl.int64), rest.to(tl.int64)
    there = token + start < tokens
    inside = there & (pair < pairs)
    of_both = there & (both < 2 * pairs)
    beyond = there & (rest < size)
    cos += batch * cos_batch + start * cos_token
    sin += batch * sin_batch + start * sin_token
    c = tl.load(cos + (token * cos_token + pair * cos_pair), mask=inside, other=0.0)
    s = tl.load(sin + (token * sin_token + pair * sin_pair), mask=inside, other=0.0) * SIGN
    head = tl.program_id(1) * HEADS
    source = x + batch * x_batch + start * x_token + head.to(tl.int64) * x_head
    target = out + batch * out_batch + start * out_token + head.to(tl.int64) * out_head
    kind = out.dtype.element_ty
    for _ in range(head, tl.minimum(head + HEADS, heads)):
        if INTERLEAVED:  # whole pairs at once: every second feature would be half of each access
            value = tl.load(source + (token * x_token + both * x_feature), mask=of_both, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(value, [BLOCK_TOKENS, BLOCK_PAIRS, 2]))
            turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [BLOCK_TOKENS, 2 * BLOCK_PAIRS])
            tl.store(target + (token * out_token + both * out_feature), turned.to(kind), mask=of_both)
        else:
            first = token * x_token + pair * x_feature
            a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(source + (first + pairs * x_feature), mask=inside, other=0.0).to(tl.float32)
            into = token * out_token + pair * out_feature
            tl.store(target + into, (a * c - b * s).to(kind), mask=inside)
            tl.store(target + (into + pairs * out_feature), (b * c + a * s).to(kind), mask=inside)
        if COPY_REST:
            kept = tl.load(source + (token * x_token + rest * x_feature), mask=beyond, other=0.0)
            tl.store(target + (token * out_token + rest * out_feature), kept, mask=beyond)
        source += x_head
        target += out_head
