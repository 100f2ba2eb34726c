"""The unit of a sum with a bias; backward makes the bias's gradient while it has the rows at hand."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share(x, TANH: tl.constexpr):
    # What x is multiplied by: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), or Φ(x).
    if TANH:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2√(2/π)
        e = tl.exp(-tl.abs(z))  # cannot overflow
        return tl.where(z < 0, e, 1.0) / (1.0 + e)
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # √(1/2)


@triton.jit
def slope(x, TANH: tl.constexpr):
    if TANH:
        part = share(x, TANH)
        x = tl.where(tl.abs(x) < 100.0, x, 0.0)  # beyond, the share is 0 or 1 to the last bit; its square may overflow
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        e = tl.exp(-tl.abs(z))
        # e / (1 + e)² is part (1 - part) where that cancels.
        return part + x * e / ((1.0 + e) * (1.0 + e)) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return share(x, TANH) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1/√(2π)


@triton.jit
def forward(
    x,
    bias,
    output,
    rows,
    columns,
    x_row,  # stride; that of the output is its number of columns
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    pre = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32) + shift[None, :]
    found = pre * share(pre, TANH)
    tl.store(output + row[:, None] * columns + column[None, :], found.to(output.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    upstream,
    x,
    bias,
    gradient,
    sums,  # [groups, columns], float32
    rows,
    columns,
    upstream_row,  # strides
    x_row,
    per_group,  # rows that one program walks
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < columns
    shift = tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    # Rows lie in different warps: they are added up once, behind the loop, for each time all warps would wait.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, per_group, ROWS):
        row = group * per_group + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & known[None, :]
        pre = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        given = tl.load(upstream + row[:, None] * upstream_row + column[None, :], mask=inside, other=0.0)
        found = tl.where(inside, given.to(tl.float32) * slope(pre + shift[None, :], TANH), 0.0)
        total += found
        tl.store(gradient + row[:, None] * columns + column[None, :], found.to(gradient.dtype.element_ty), mask=inside)
    tl.store(sums + group * columns + column, tl.sum(total, axis=0), mask=known)
