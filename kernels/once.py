"""Refuses second derivatives, by whatever way they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

G = TypeVar("G", bound=tuple[Tensor | None, ...])


def first_derivative_only(recipe: str, instead: str) -> Callable[[Callable[..., G]], Callable[..., G]]:
    """Make differentiating the gradients of an autograd Function's backward raise ``RuntimeError``.

    ``torch.autograd.function.once_differentiable`` leaves two ways on which a second derivative is silently without its
    term. Where the upstream gradient needs no gradient it hands out constants. Where it does, the node that raises has
    no edge to the Function's inputs, so that ``torch.autograd.grad`` with ``inputs`` does not come by. Here it has: the
    Function must save, by ``save_for_backward``, each input that may require a gradient, or any output; one that has
    no other reason to saves a :func:`token`.

    As there, ``create_graph=True`` alone is no error: other gradients of that pass may be what is differentiated.

    Args:
        recipe: the function's name, which the message begins with.
        instead: what has a second derivative; ends the message.
    """
    message = f"{recipe}: second derivatives are not supported (the backward is once_differentiable); {instead}"

    def decorate(backward: Callable[..., G]) -> Callable[..., G]:
        @functools.wraps(backward)
        def refusing(ctx: Any, *upstream: Tensor | None) -> G:
            if torch.compiler.is_compiling():  # a compiled graph refuses create_graph itself
                return backward(ctx, *upstream)
            if not torch.is_grad_enabled():
                return backward(ctx, *upstream)
            unpacked = _Unpacked(ctx)
            with torch.no_grad():
                found = backward(unpacked, *upstream)
            origins = [tensor for tensor in (*upstream, *unpacked.saved_tensors) if tensor is not None]
            # Detached, for a gradient may be the upstream one itself, whose requires_grad is not ours.
            refused = (
                None if item is None else _Refused.apply(message, item.detach().requires_grad_(), *origins)  # type: ignore[no-untyped-call]
                for item in found
            )
            return tuple(refused)  # type: ignore[return-value]

        return refusing

    return decorate


def token(like: Tensor) -> Tensor:
    """An output without elements, to be saved and returned beside the others, for :func:`first_derivative_only`.

    Saving another output would forbid users to write to it in place, as in ``loss /= steps``.
    """
    return like.new_empty(0)


class _Refused(torch.autograd.Function):
    """A gradient, as if it were computed from ``origins``."""

    @staticmethod
    def forward(ctx: Any, message: str, gradient: Tensor, *origins: Tensor) -> Tensor:
        ctx.message = message
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(ctx.message)


class _Unpacked:
    """The context of an autograd Function whose saved tensors are unpacked once: checkpointing forbids twice."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors: tuple[Tensor | None, ...] = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
