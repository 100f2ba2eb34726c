"""Loss and gradients a chunk of rows at a time.

A chunk's logits are computed, overwritten by their gradient, and used up by the products that give the gradients of
input, weight and bias, all in forward: the method of github.com/pytorch/pytorch/issues/124480 and of Liger Kernel
(P. Hsu et al., 2024), here with the weight's gradient summed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy.launch import losses_by
from gradscope.kernels.cross_entropy.terms import Terms, accumulate_dtype
from gradscope.kernels.linear_cross_entropy.products import add_product, product

_ALIGNED = 64  # elements
_LINE = 16  # elements, for the CPU
_COLUMNS = 1024  # of logits that the CPU computes at once; 256 to 1024 are equally fast


@dataclass(frozen=True, slots=True)
class LossAndGradients:
    """Results; None where they were not asked for."""

    loss: Tensor  # [rows], in accumulate_dtype of the logits
    input: Tensor | None  # the gradients, each of its tensor's shape
    linear_weight: Tensor | None
    linear_bias: Tensor | None
    logits: Tensor | None  # [rows, classes]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The gradients, and logits, to compute beside the loss."""

    input: bool  # gradients
    linear_weight: bool
    linear_bias: bool
    logits: torch.dtype | None  # the logits themselves, in this dtype

    @property
    def gradients(self) -> bool:
        """Check that a gradient is wanted: the input's, the weight's or the bias's."""
        return self.input or self.linear_weight or self.linear_bias


def counted(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    terms: Terms,
    scale: Tensor | None,
    wanted: Wanted,
    rows: int,
    backend: str,
) -> LossAndGradients:
    """Run :func:`chunked` without the rows whose target is ignored.

    For the CPU: elsewhere their number would have to be waited for.
    """
    counts = target != terms.ignore_index
    if wanted.logits is not None or counts.all():
        return chunked(input, linear_weight, target, linear_bias, terms, scale, wanted, rows, backend)
    kept = counts.nonzero()[:, 0]
    scale = scale[kept] if scale is not None and scale.dim() else scale
    part = chunked(input[kept], linear_weight, target[kept], linear_bias, terms, scale, wanted, rows, backend)
    loss = part.loss.new_zeros(target.shape).index_copy_(0, kept, part.loss)
    found = None if part.input is None else part.input.new_zeros(input.shape).index_copy_(0, kept, part.input)
    return LossAndGradients(loss, found, part.linear_weight, part.linear_bias, None)


def chunked(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    terms: Terms,
    scale: Tensor | None,
    wanted: Wanted,
    rows: int,
    backend: str,
) -> LossAndGradients:
    """Loss of each row, and the gradients of ``Σ scale · loss`` that are wanted.

    Args:
        input: [rows, features], of the dtype in which all products are taken.
        linear_weight: [classes, features], of the same.
        target: [rows]; each is a class or ignored.
        linear_bias: [classes], of the same dtype, or None.
        scale: a scalar tensor, or [rows]; None for 1.
        rows: of a chunk.
        backend: of the cross-entropy, "cpu" or "triton".

    Returns:
        The input's gradient in its dtype; those of weight and bias as they were summed, in float32 or float64.
    """
    total, classes, dtype = input.shape[0], linear_weight.shape[0], input.dtype
    sums = accumulate_dtype(dtype)
    losses = losses_by(backend)
    loss = torch.empty(total, dtype=sums, device=input.device)
    logits = None
    if wanted.logits is not None:
        logits = torch.empty((total, classes), dtype=wanted.logits, device=input.device)
    d_input = torch.empty(input.shape, dtype=dtype, device=input.device) if wanted.input else None
    make = torch.empty if total else torch.zeros  # the first chunk writes it
    d_weight = make(linear_weight.shape, dtype=sums, device=input.device) if wanted.linear_weight else None
    d_bias = torch.zeros(classes, dtype=sums, device=input.device) if wanted.linear_bias else None
    # Rows of an odd vocabulary would begin at odd addresses, for which cuBLAS has slow kernels alone.
    stride = classes if input.device.type == "cpu" else -(-classes // _ALIGNED) * _ALIGNED
    buffer = torch.empty((min(rows, total), stride), dtype=dtype, device=input.device)[:, :classes]
    for start in range(0, total, rows):
        part = slice(start, min(start + rows, total))
        x, held = input[part], buffer[: part.stop - start]
        _logits(x, linear_weight, linear_bias, held)
        if logits is not None:
            logits[part] = held if terms.softcap is None else torch.tanh(held / terms.softcap) * terms.softcap
        by = scale[part, None] if scale is not None and scale.dim() else scale
        slope = held if wanted.gradients else None
        loss[part] = losses(
            held[:, :, None], target[part, None], terms, by, None if slope is None else slope[:, :, None]
        )[:, 0]
        if slope is None:
            continue
        if d_input is not None:
            torch.mm(slope, linear_weight, out=d_input[part])
        if d_weight is not None:
            (add_product if start else product)(slope.t(), x, d_weight)
        if d_bias is not None:
            d_bias += slope.sum(0, dtype=sums)
    return LossAndGradients(loss, d_input, d_weight, d_bias, logits)


def _logits(x: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, into: Tensor) -> None:
    """``into = x @ linear_weight.T + linear_bias``.

    Where rows of logits begin at odd addresses, MKL takes 1.4 times as long for all columns at once as for some.
    """
    classes = linear_weight.shape[0]
    apart = x.device.type == "cpu" and classes % _LINE != 0
    for start in range(0, classes, _COLUMNS if apart else classes):
        part = slice(start, start + _COLUMNS if apart else classes)
        if linear_bias is None:
            torch.mm(x, linear_weight[part].t(), out=into[:, part])
        else:
            torch.addmm(linear_bias[part], x, linear_weight[part].t(), out=into[:, part])
