"""The Triton kernel: a program a row, which it reads twice; the second time from the cache.

A row of an odd number of classes begins at any address. What of it lies in whole units of 16 bytes is read and written
in such units; its edges, less than a unit at either end, are one small block more.

The normaliser is found in one pass (M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018);
the second writes the gradient, over the logits where the caller says so, as llm.c does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.logarithm.triton_kernels import log

LOG2E = tl.constexpr(1.4426950216293335)  # log2(e) in float32
LOG2E_REST = tl.constexpr(1.92596298909109e-08)  # what it lacks


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    """exp; where EXACT to the last bits, which the rounding of x · log2(e) otherwise costs far below 0."""
    if not EXACT:
        return tl.exp(x)
    x = tl.where(x < -150.0, -150.0, x)  # 0 in float32, and not infinite: that would make the rest NaN
    power = x * LOG2E
    rest = tl.fma(x, LOG2E, -power) + x * LOG2E_REST
    found = tl.exp2(power)
    return found + found * (rest * 0.6931471805599453)


@triton.jit
def _capped(x, cap):
    # tanh through exp, for the interpreter has no other; of -|x|, so that it cannot overflow.
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    t = (1.0 - e) / (1.0 + e)
    return cap * tl.where(x < 0, -t, t)


@triton.jit
def _cap_slope(x, cap):
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    return 4.0 * e / ((1.0 + e) * (1.0 + e))  # 1 - tanh(x / cap)², which cancels where tanh is near 1


@triton.jit
def _added(
    pointer,
    c,
    stride,
    inside,
    weight,
    softcap,
    highest,
    total,
    weighted,
    HAS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):
    """Highest logit, sum of exponentials and weighted sum, with the logits of classes ``c`` taken in."""
    x = tl.load(pointer + c * stride, mask=inside, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        x = _capped(x, softcap)
    if HAS_SMOOTHING:
        w = 1.0
        if HAS_WEIGHT:
            w = tl.load(weight + c, mask=inside, other=0.0)
        weighted += tl.sum(tl.where(inside, x * w, 0.0), axis=0)
    x = tl.where(inside, x, -float("inf"))
    new = tl.maximum(highest, tl.max(x, axis=0))
    shift = tl.where(new == -float("inf"), 0.0, new)
    exact: tl.constexpr = pointer.dtype.element_ty == tl.float32
    total = total * tl.exp(highest - shift) + tl.sum(_exp(x - shift, exact), axis=0)
    return new, total, weighted


@triton.jit
def _write_slopes(
    pointer,
    gradient,
    c,
    stride,
    gradient_stride,
    inside,
    y,
    weight,
    softcap,
    highest,
    share,
    at_target,
    smooth,
    factor,
    HAS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):
    """The gradient of classes ``c``; ``y`` is the target, ``share`` what exp(x - highest) is multiplied by."""
    raw = tl.load(pointer + c * stride, mask=inside, other=0.0).to(tl.float32)
    x = raw
    if HAS_SOFTCAP:
        x = _capped(raw, softcap)
    exact: tl.constexpr = pointer.dtype.element_ty == tl.float32
    slope = tl.where(c == y, at_target, _exp(x - highest, exact) * share)
    if HAS_SMOOTHING:
        w = 1.0
        if HAS_WEIGHT:
            w = tl.load(weight + c, mask=inside, other=0.0)
        slope -= smooth * w
    if HAS_SOFTCAP:
        slope *= _cap_slope(raw, softcap)
    slope *= factor
    tl.store(gradient + c * gradient_stride, slope.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def losses(
    logits,
    target,
    weight,  # of each class, float32
    weight_sum,  # a scalar in memory, float32
    scale,  # float32; strides of 0 for a scalar
    loss,
    gradient,
    classes,
    positions,
    logits_batch,  # strides
    logits_class,
    logits_position,
    target_batch,
    target_position,
    gradient_batch,
    gradient_class,
    gradient_position,
    scale_batch,
    scale_position,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # elements in 16 bytes, where a row is one piece of memory; else 1
):
    # In 64 bits: rows times classes pass 2^31 at GPT-2's vocabulary and 42,700 rows.
    row = tl.program_id(0).to(tl.int64)
    batch = row // positions
    position = row % positions
    logits += batch * logits_batch + position * logits_position
    gradient += batch * gradient_batch + position * gradient_position
    y = tl.load(target + batch * target_batch + position * target_position)
    lead = 0  # classes before the first whole unit
    run = classes  # classes in whole units
    if LANES > 1:
        # Both tensors begin at a multiple of 16 bytes and have the same strides.
        lead = (LANES - (batch * logits_batch + position * logits_position) % LANES) % LANES
        lead = tl.minimum(lead.to(tl.int32), classes)
        run = (classes - lead) // LANES * LANES
        columns = tl.arange(0, BLOCK)
    else:
        columns = tl.arange(0, BLOCK).to(tl.int64)  # times a stride
    edge = tl.arange(0, 2 * LANES)
    edges = tl.where(edge < LANES, edge, lead + run + edge - LANES)
    at_edge = tl.where(edge < LANES, edge < lead, edges < classes)
    body = logits + lead
    body_gradient = gradient + lead
    if LANES > 1:
        body = tl.multiple_of(body, 16)
        body_gradient = tl.multiple_of(body_gradient, 16)
    if y == ignore_index:
        tl.store(loss + row, 0.0)
        if WANTED:
            element = gradient.dtype.element_ty
            for start in range(0, run, BLOCK):
                c = start + columns
                zeros = tl.zeros([BLOCK], tl.float32)
                tl.store(body_gradient + c * gradient_class, zeros.to(element), mask=c < run)
            if LANES > 1:
                tl.store(gradient + edges, tl.zeros([2 * LANES], tl.float32).to(element), mask=at_edge)
        return

    highest = -float("inf")
    total = 0.0
    weighted = 0.0  # Σ w_c x_c
    if LANES > 1:
        highest, total, weighted = _added(
            logits,
            edges,
            1,
            at_edge,
            weight,
            softcap,
            highest,
            total,
            weighted,
            HAS_WEIGHT,
            HAS_SOFTCAP,
            HAS_SMOOTHING,
        )
    for start in range(0, run, BLOCK):
        c = start + columns
        highest, total, weighted = _added(
            body,
            c,
            logits_class,
            c < run,
            weight + lead,
            softcap,
            highest,
            total,
            weighted,
            HAS_WEIGHT,
            HAS_SOFTCAP,
            HAS_SMOOTHING,
        )
    log_total = log(total)
    lse = highest + log_total

    x_y = tl.load(logits + y * logits_class).to(tl.float32)
    # The gradient may lie over the logits: no warp may write it before all have read the target's logit.
    tl.debug_barrier()
    if HAS_SOFTCAP:
        x_y = _capped(x_y, softcap)
    own = 1.0 - smoothing
    mass = classes * 1.0  # W
    if HAS_WEIGHT:
        own = own * tl.load(weight + y)
        mass = tl.load(weight_sum)
    smooth = smoothing / classes
    log_p = (x_y - highest) - log_total  # more exact than x_y - lse, which rounds by the size of lse
    found = z_loss * lse * lse - own * log_p
    if HAS_SMOOTHING:
        found += smooth * (mass * lse - weighted)
    tl.store(loss + row, found)

    if WANTED:
        factor = 1.0
        if HAS_SCALE:
            factor = tl.load(scale + batch * scale_batch + position * scale_position)
        others = smooth * mass + 2.0 * z_loss * lse
        p = _exp(x_y - highest, logits.dtype.element_ty == tl.float32) / total
        # p - 1 cancels where the model is sure of itself: a series near 0.
        near = log_p * (1.0 + log_p * (0.5 + log_p * (1.0 / 6.0 + log_p / 24.0)))
        less_one = tl.where(log_p > -0.02, near, p - 1.0)
        share = (own + others) / total
        at_target = own * less_one + others * p
        if LANES > 1:
            _write_slopes(
                logits,
                gradient,
                edges,
                1,
                1,
                at_edge,
                y,
                weight,
                softcap,
                highest,
                share,
                at_target,
                smooth,
                factor,
                HAS_WEIGHT,
                HAS_SOFTCAP,
                HAS_SMOOTHING,
            )
        for start in range(0, run, BLOCK):
            c = start + columns
            _write_slopes(
                body,
                body_gradient,
                c,
                logits_class,
                gradient_class,
                c < run,
                y - lead,
                weight + lead,
                softcap,
                highest,
                share,
                at_target,
                smooth,
                factor,
                HAS_WEIGHT,
                HAS_SOFTCAP,
                HAS_SMOOTHING,
            )
