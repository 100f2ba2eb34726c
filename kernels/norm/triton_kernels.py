"""Dropout, addition to the residual and normalisation of a row a program, which it holds in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.dropout.triton_kernels import is_dropped


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
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK).to(tl.int64)
    inside = column < columns
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        value = tl.where(is_dropped(row * columns + column, tl.load(seed), limit), 0.0, value * scale)
    value += tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(stream.dtype.element_ty)
    tl.store(stream + row * columns + column, rounded, mask=inside)
    h = rounded.to(tl.float32)  # what backward will read
    if CENTRED:
        mean = tl.sum(h, axis=0) / columns
        h = tl.where(inside, h - mean, 0.0)
        tl.store(means + row, mean)
    factor = 1.0 / tl.sqrt(tl.sum(h * h, axis=0) / columns + eps)
    tl.store(factors + row, factor)
    h = h * factor
    if HAS_WEIGHT:
        h *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        h += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * columns + column, h.to(output.dtype.element_ty), mask=inside)


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
    per_group,  # rows that one program walks
    limit,
    scale,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK).to(tl.int64)
    inside = column < columns
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    w = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHT:
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    for i in range(per_group):
        row = group * per_group + i
        here = column < tl.where(row < rows, columns, 0)  # Triton 3.9 interprets block & scalar wrongly
        d = tl.load(upstream + row * upstream_row + column, mask=here, other=0.0).to(tl.float32)
        h = tl.load(stream + row * columns + column, mask=here, other=0.0).to(tl.float32)
        factor = tl.load(factors + row, mask=row < rows, other=0.0)
        if CENTRED:
            h -= tl.load(means + row, mask=row < rows, other=0.0)
        normal = tl.where(here, h * factor, 0.0)
        of_weight += d * normal
        of_bias += d
        d *= w
        slope = d - normal * (tl.sum(d * normal, axis=0) / columns)
        if CENTRED:
            slope -= tl.sum(d, axis=0) / columns
        slope *= factor
        if HAS_PASSED:
            slope += tl.load(passed + row * passed_row + column, mask=here, other=0.0).to(tl.float32)
        element = stream_gradient.dtype.element_ty
        tl.store(stream_gradient + row * columns + column, slope.to(element), mask=here)
        if HAS_DROPOUT:
            kept = tl.where(is_dropped(row * columns + column, tl.load(seed), limit), 0.0, slope * scale)
            tl.store(x_gradient + row * columns + column, kept.to(element), mask=here)
    if HAS_WEIGHT:
        tl.store(weight_sums + group * columns + column, of_weight, mask=inside)
    if HAS_BIAS:
        tl.store(bias_sums + group * columns + column, of_bias, mask=inside)
