"""A block of one row a program; all in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.gelu.triton_kernels import share as gelu_share
from gradscope.kernels.gelu.triton_kernels import slope as gelu_slope


@triton.jit
def _logistic(x):
    e = tl.exp(-tl.abs(x))  # cannot overflow
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _share(x, SILU: tl.constexpr, TANH: tl.constexpr):
    # What x is multiplied by.
    if SILU:
        return _logistic(x)
    return gelu_share(x, TANH)


@triton.jit
def _slope(x, SILU: tl.constexpr, TANH: tl.constexpr):
    if SILU:
        s = _logistic(x)
        return s * (1.0 + x * (1.0 - s))
    return gelu_slope(x, TANH)


@triton.jit
def forward(
    gate,
    up,
    output,
    columns,
    gate_row,
    up_row,
    output_row,
    SILU: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    found = g * _share(g, SILU, TANH) * u
    tl.store(output + row * output_row + column, found.to(output.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    upstream,
    gate,
    up,
    gate_gradient,
    up_gradient,
    columns,
    upstream_row,  # strides
    gate_row,
    up_row,
    gate_gradient_row,
    up_gradient_row,
    SILU: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    d = tl.load(upstream + row * upstream_row + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    of_gate = d * u * _slope(g, SILU, TANH)
    of_up = d * g * _share(g, SILU, TANH)
    element = gate_gradient.dtype.element_ty
    tl.store(gate_gradient + row * gate_gradient_row + column, of_gate.to(element), mask=inside)
    tl.store(up_gradient + row * up_gradient_row + column, of_up.to(element), mask=inside)
