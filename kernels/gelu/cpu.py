"""By torch's own operations, which are at the limit on a CPU; what is gained there is memory in backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def forward(x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """The unit of ``x + bias``, and that sum.

    Args:
        x: [..., features], of a floating dtype.
        bias: [features], of the same dtype or float32.
        approximate: "none" or "tanh".

    Returns:
        Two tensors of the shape and dtype of ``x``.
    """
    pre = (x + bias).to(x.dtype)
    return functional.gelu(pre, approximate=approximate), pre


def backward(upstream: Tensor, pre: Tensor, approximate: str, *, in_place: bool) -> Tensor:
    """Gradient of ``pre``; written over it where it may be."""
    if in_place:
        return torch.ops.aten.gelu_backward.grad_input(upstream, pre, approximate=approximate, grad_input=pre)
    return torch.ops.aten.gelu_backward(upstream, pre, approximate=approximate)
