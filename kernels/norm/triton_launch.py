"""Launches the Triton kernels; each is one node of a compiled graph."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.kernels.dropout.counter import threshold
from gradscope.kernels.on_device import on_device
from gradscope.kernels.opaque import opaque

LARGEST = 16384  # features: a row that a program's registers hold
# Of all programs in backward, 31 on each of 132 multiprocessors: a program waits for its row before it asks for the
# next, and each keeps a sum of its rows.
WARPS = 4096
LANES = 256  # numbers of a warp: 16 bytes of bfloat16 a thread
ENOUGH = 1024  # numbers of a program that holds several rows
MOST_ROWS = 16


def _side_by_side(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


class Cut(NamedTuple):
    """How rows are cut into a program's tensors, whose sides are powers of two."""

    rows: int
    first: int  # features of the first piece of a row
    second: int  # and of the second; 0 for none

    def warps(self) -> int:
        """Eight numbers a thread of the first piece, and no more than 16 warps: a power of two, as triton asks."""
        return min(max(self.rows * self.first // LANES, 1), 16)


def cut_of(rows: int, columns: int) -> Cut:
    """Several rows where features are few; at most a quarter of what is computed is padding."""
    first = 1 << (columns.bit_length() - 1)
    second = 1 << (columns - first - 1).bit_length() if columns > first else 0
    if second == first:
        first, second = 2 * first, 0
    several = max(1, min(MOST_ROWS, ENOUGH // (first + second)))
    return Cut(min(1 << (several.bit_length() - 1), 1 << (rows - 1).bit_length()), first, second)


def _fake_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    p: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = x.new_empty(x.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), row if centred else row.new_empty(0), torch.empty_like(row)


@opaque("add_norm", _fake_forward)
def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    p: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised rows, the stream ``residual + dropout(x)``, and each row's mean (if centred) and factor.

    Args:
        x, residual: [rows, features], neither of them 0; of float32, float16 or bfloat16.
        weight, bias: [features].
        seed: a scalar int64 tensor; None without dropout.
        eps: added to the variance, or to the mean square.
        p: share that is dropped.
        centred: layer normalisation; else RMS normalisation.
    """
    from gradscope.kernels.norm.triton_kernels import forward as kernel

    rows, columns = x.shape
    output, stream = x.new_empty(x.shape), x.new_empty(x.shape)
    factors = x.new_empty(rows, dtype=torch.float32)
    means = x.new_empty(rows if centred else 0, dtype=torch.float32)
    x, residual = _side_by_side(x), _side_by_side(residual)
    cut = cut_of(rows, columns)
    with on_device(x):
        kernel[(-(-rows // cut.rows),)](
            x,
            residual,
            x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(),
            factors if seed is None else seed,
            output,
            stream,
            means,
            factors,
            rows,
            columns,
            x.stride(0),
            residual.stride(0),
            eps,
            threshold(p),
            1 / (1 - p),
            CENTRED=centred,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_DROPOUT=seed is not None,
            ROWS=cut.rows,
            FIRST=cut.first,
            SECOND=cut.second,
            num_warps=cut.warps(),
        )
    return output, stream, means, factors


def _fake_backward(
    upstream: Tensor,
    passed: Tensor | None,
    stream: Tensor,
    weight: Tensor | None,
    seed: Tensor | None,
    means: Tensor,
    factors: Tensor,
    p: float,
    centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = stream.shape[1]
    sums = factors.new_empty(columns)
    return (
        stream.new_empty(stream.shape),
        stream.new_empty(0 if seed is None else stream.shape),
        factors.new_empty(0) if weight is None else sums,
        torch.empty_like(sums) if biased else factors.new_empty(0),
    )


@opaque("add_norm_backward", _fake_backward)
def backward(
    upstream: Tensor,
    passed: Tensor | None,
    stream: Tensor,
    weight: Tensor | None,
    seed: Tensor | None,
    means: Tensor,
    factors: Tensor,
    p: float,
    centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the stream (and so of the residual), of ``x`` (nothing without dropout), of weight and bias.

    Args:
        upstream: of the normalised rows.
        passed: of the stream from its other uses; None for nothing.
        The others are forward's, and what it returned. The last two gradients are in float32, added in a fixed order.
    """
    from gradscope.kernels.norm.triton_kernels import backward as kernel

    rows, columns = stream.shape
    upstream = _side_by_side(upstream)
    passed = None if passed is None else _side_by_side(passed)
    found = stream.new_empty(stream.shape)
    of_x = stream.new_empty(0 if seed is None else stream.shape)
    cut = cut_of(rows, columns)
    per_group = -(-rows // max(1, WARPS // cut.warps()))
    per_group += -per_group % cut.rows
    groups = -(-rows // per_group)
    of_weight = factors.new_empty((groups, columns)) if weight is not None else factors.new_empty(0)
    of_bias = factors.new_empty((groups, columns)) if biased else factors.new_empty(0)
    with on_device(stream):
        kernel[(groups,)](
            upstream,
            upstream if passed is None else passed,
            stream,
            stream if weight is None else weight.contiguous(),
            factors if seed is None else seed,
            means,
            factors,
            found,
            of_x,
            of_weight,
            of_bias,
            rows,
            columns,
            upstream.stride(0),
            0 if passed is None else passed.stride(0),
            per_group,
            threshold(p),
            1 / (1 - p),
            CENTRED=centred,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=biased,
            HAS_DROPOUT=seed is not None,
            HAS_PASSED=passed is not None,
            ROWS=cut.rows,
            FIRST=cut.first,
            SECOND=cut.second,
            num_warps=cut.warps(),
        )
    summed = (of_weight.sum(0) if weight is not None else of_weight, of_bias.sum(0) if biased else of_bias)
    return found, of_x, *summed
