"""Gives a backward pass its gradient in the layout of the output.

torch keeps the plans of cuDNN's attention by the strides of q, k and v alone (aten/src/ATen/native/cudnn/MHA.cpp, up to
2.13 at least): a second call whose upstream gradient lies otherwise in memory is run with the first one's plan, and its
gradients are wrong without a word. Where every call passes it in one layout there is one plan. An H200 with torch 2.11
showed it: gradients of the right size that point elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_gradient_as_laid_out(out: Tensor) -> Tensor:
    """Return ``out``, whose gradient is copied into its own layout where it has another."""
    laid_out: Tensor = _LaidOut.apply(out)  # type: ignore[no-untyped-call]
    return laid_out


class _LaidOut(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        strides = inputs[0].stride()
        ctx.outer_to_inner = sorted(range(len(strides)), key=lambda axis: -strides[axis])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        order = ctx.outer_to_inner
        inverse = [order.index(axis) for axis in range(len(order))]
        return grad.permute(order).contiguous().permute(inverse)
