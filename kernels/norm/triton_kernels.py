"""Dropout, addition to the residual and normalisation: a program takes some rows, which it holds in registers.

A row lies in a FIRST and a SECOND piece of features, powers of two as Triton's tensors must be: together at most 4/3 of
the row, where one power of two is up to twice as long.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.dropout.triton_kernels import is_dropped


@triton.jit
def added(
    x,
    residual,
    seed,
    stream,
    row,
    column,
    inside,
    columns,
    x_row,
    residual_row,
    limit,
    scale,
    HAS_DROPOUT: tl.constexpr,
):
    """Write a piece of residual + dropout(x); returns what backward will read of it, in float32."""
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        value = tl.where(is_dropped(row * columns + column, tl.load(seed), limit), 0.0, value * scale)
    value += tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(stream.dtype.element_ty)
    tl.store(stream + row * columns + column, rounded, mask=inside)
    return rounded.to(tl.float32)


@triton.jit
def write_scaled(
    h, weight, bias, output, row, column, inside, columns, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Write a piece of normalised rows times the weight, plus the bias."""
    there = column < columns
    if HAS_WEIGHT:
        h *= tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        h += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    tl.store(output + row * columns + column, h.to(output.dtype.element_ty), mask=inside)


@triton.jit
def forward(
    x,
    residual,
    weight,
    bias,
    seed,
    output,
    stream,  # residual + dropout(x)
    means,
    factors,  # 1 / √(variance + ε)
    rows,
    columns,
    x_row,  # strides; those of the results are their number of columns
    residual_row,
    eps,
    limit,
    scale,
    CENTRED: tl.constexpr,  # layer normalisation
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,  # 0: one piece is all
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    there = row < rows
    length = tl.where(there, columns, 0)  # Triton 3.9 interprets block & scalar wrongly
    column = tl.arange(0, FIRST)[None, :]
    inside = column < length
    h = added(x, residual, seed, stream, row, column, inside, columns, x_row, residual_row, limit, scale, HAS_DROPOUT)
    if SECOND:
        behind = FIRST + tl.arange(0, SECOND)[None, :]
        inside_2 = behind < length
        g = added(
            x, residual, seed, stream, row, behind, inside_2, columns, x_row, residual_row, limit, scale, HAS_DROPOUT
        )
    if CENTRED:
        total = tl.sum(h, 1, keep_dims=True)
        if SECOND:
            total += tl.sum(g, 1, keep_dims=True)
        mean = total / columns
        h = tl.where(inside, h - mean, 0.0)
        if SECOND:
            g = tl.where(inside_2, g - mean, 0.0)
        tl.store(means + row, mean, mask=there)
    squares = tl.sum(h * h, 1, keep_dims=True)
    if SECOND:
        squares += tl.sum(g * g, 1, keep_dims=True)
    factor = 1.0 / tl.sqrt(squares / columns + eps)
    tl.store(factors + row, factor, mask=there)
    write_scaled(h * factor, weight, bias, output, row, column, inside, columns, HAS_WEIGHT, HAS_BIAS)
    if SECOND:
        write_scaled(g * factor, weight, bias, output, row, behind, inside_2, columns, HAS_WEIGHT, HAS_BIAS)


@triton.jit
def loaded(
    upstream,
    stream,
    weight,
    row,
    column,
    inside,
    columns,
    upstream_row,
    mean,
    factor,
    HAS_WEIGHT: tl.constexpr,
):
    """A piece of the gradient of normalised rows, of that times the weight, and of the normalised rows."""
    d = tl.load(upstream + row * upstream_row + column, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(stream + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    normal = tl.where(inside, (h - mean) * factor, 0.0)
    weighted = d
    if HAS_WEIGHT:
        weighted = d * tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    return d, weighted, normal


@triton.jit
def write_slope(
    slope,
    passed,
    seed,
    stream_gradient,
    x_gradient,
    row,
    column,
    inside,
    columns,
    passed_row,
    limit,
    scale,
    HAS_DROPOUT: tl.constexpr,
    HAS_PASSED: tl.constexpr,
):
    """Write a piece of the gradients of the stream and of x."""
    if HAS_PASSED:
        slope += tl.load(passed + row * passed_row + column, mask=inside, other=0.0).to(tl.float32)
    element = stream_gradient.dtype.element_ty
    tl.store(stream_gradient + row * columns + column, slope.to(element), mask=inside)
    if HAS_DROPOUT:
        kept = tl.where(is_dropped(row * columns + column, tl.load(seed), limit), 0.0, slope * scale)
        tl.store(x_gradient + row * columns + column, kept.to(element), mask=inside)


@triton.jit
def backward(
    upstream,  # of the normalised rows
    passed,  # of the stream
    stream,
    weight,
    seed,
    means,
    factors,
    stream_gradient,
    x_gradient,
    weight_sums,  # [groups, columns], float32
    bias_sums,
    rows,
    columns,
    upstream_row,  # strides
    passed_row,
    per_group,  # rows that one program walks; a multiple of ROWS
    limit,
    scale,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, FIRST)[None, :]
    of_weight = tl.zeros([ROWS, FIRST], tl.float32)
    of_bias = tl.zeros([ROWS, FIRST], tl.float32)
    if SECOND:
        behind = FIRST + tl.arange(0, SECOND)[None, :]
        of_weight_2 = tl.zeros([ROWS, SECOND], tl.float32)
        of_bias_2 = tl.zeros([ROWS, SECOND], tl.float32)
    for i in range(0, per_group, ROWS):
        row = group * per_group + i + tl.arange(0, ROWS).to(tl.int64)[:, None]
        there = row < rows
        length = tl.where(there, columns, 0)  # Triton 3.9 interprets block & scalar wrongly
        inside = column < length
        factor = tl.load(factors + row, mask=there, other=0.0)
        mean = tl.zeros([ROWS, 1], tl.float32)
        if CENTRED:
            mean = tl.load(means + row, mask=there, other=0.0)
        d, weighted, normal = loaded(
            upstream, stream, weight, row, column, inside, columns, upstream_row, mean, factor, HAS_WEIGHT
        )
        of_weight += d * normal
        of_bias += d
        along = tl.sum(weighted * normal, 1, keep_dims=True)
        across = tl.sum(weighted, 1, keep_dims=True)
        if SECOND:
            inside_2 = behind < length
            d_2, weighted_2, normal_2 = loaded(
                upstream, stream, weight, row, behind, inside_2, columns, upstream_row, mean, factor, HAS_WEIGHT
            )
            of_weight_2 += d_2 * normal_2
            of_bias_2 += d_2
            along += tl.sum(weighted_2 * normal_2, 1, keep_dims=True)
            across += tl.sum(weighted_2, 1, keep_dims=True)
        along /= columns
        across = across / columns if CENTRED else mean
        write_slope(
            (weighted - normal * along - across) * factor,
            passed,
            seed,
            stream_gradient,
            x_gradient,
            row,
            column,
            inside,
            columns,
            passed_row,
            limit,
            scale,
            HAS_DROPOUT,
            HAS_PASSED,
        )
        if SECOND:
            write_slope(
                (weighted_2 - normal_2 * along - across) * factor,
                passed,
                seed,
                stream_gradient,
                x_gradient,
                row,
                behind,
                inside_2,
                columns,
                passed_row,
                limit,
                scale,
                HAS_DROPOUT,
                HAS_PASSED,
            )
    at = group * columns + tl.arange(0, FIRST)
    if HAS_WEIGHT:
        tl.store(weight_sums + at, tl.sum(of_weight, 0), mask=tl.arange(0, FIRST) < columns)
    if HAS_BIAS:
        tl.store(bias_sums + at, tl.sum(of_bias, 0), mask=tl.arange(0, FIRST) < columns)
    if SECOND:
        after = FIRST + tl.arange(0, SECOND)
        if HAS_WEIGHT:
            tl.store(weight_sums + group * columns + after, tl.sum(of_weight_2, 0), mask=after < columns)
        if HAS_BIAS:
            tl.store(bias_sums + group * columns + after, tl.sum(of_bias_2, 0), mask=after < columns)
