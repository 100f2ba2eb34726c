"""Refuses second derivatives, also where the upstream gradient needs none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


def first_derivative_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """For an autograd Function's backward: its gradients raise ``RuntimeError`` when they are differentiated.

    ``torch.autograd.function.once_differentiable`` looks at the upstream gradients alone. Where these need no gradient,
    as in ``autograd.grad(loss, x, create_graph=True)``, it hands out constants, and the second derivative is silently
    zero.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *upstream: Tensor | None) -> Gradients:
        if torch.compiler.is_compiling():  # a compiled graph refuses create_graph itself
            return backward(ctx, *upstream)
        with torch.no_grad():
            found = backward(ctx, *upstream)
        if not torch.is_grad_enabled():
            return found
        refuse = torch._C._functions.DelayedError("this gradient cannot be differentiated again", 1)
        return tuple(None if item is None else refuse(item.requires_grad_()) for item in found)

    return refusing
