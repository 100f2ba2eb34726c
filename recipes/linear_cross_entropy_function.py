"""The autograd Function of :mod:`gradscope.recipes.linear_cross_entropy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy.terms import Terms, accumulate_dtype, late_factor, mean_factors
from gradscope.kernels.linear_cross_entropy.launch import losses_and_gradients
from gradscope.kernels.once import first_derivative_only, token
from gradscope.kernels.retained import needed_again
from gradscope.kernels.scaling.launch import scale_in_place


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Settings of the loss: the Function's arguments that are no tensors."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logits_dtype: torch.dtype  # of torch's logits: autocast's, or the input's
    wanted: tuple[bool, bool, bool]  # gradients of input, linear_weight, linear_bias
    logits_wanted: bool
    memory_budget: int | None
    backend: str


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of inputs [rows, features] and targets [rows], the logits, empty where not wanted, and a token.

    A mean or a sum gives each row the same upstream gradient: forward computes the gradients, and backward scales them.
    With ``reduction="none"`` each row has its own, by which the weight's gradient cannot be scaled afterwards: backward
    computes the logits again, and the gradients with the right one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None,
        weight: Tensor | None,
        settings: LossSettings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # no zeros in the size of the logits
        ctx.settings = settings
        rows = settings.reduction == "none"
        scale = None
        if settings.reduction == "mean":
            terms = Terms(weight, settings.ignore_index, z_loss=settings.z_loss)
            weight, scale = mean_factors(target, terms, accumulate_dtype(settings.logits_dtype))
        # What a loss scaler saves from underflow must not have been rounded to float16 before: the mean waits.
        late = torch.float16 in (settings.logits_dtype, input.dtype, linear_weight.dtype)
        wanted = (False, False, False) if rows else settings.wanted
        early = None if late else scale
        loss, *gradients, logits = _run(
            input, linear_weight, target, linear_bias, weight, early, settings, wanted, settings.logits_wanted, late
        )
        ctx.mark_non_differentiable(logits)
        link = token(input)
        if rows:
            ctx.save_for_backward(input, linear_weight, target, linear_bias, weight, link)
            return loss, logits, link
        later = late_factor(scale) if late and scale is not None else None
        ctx.save_for_backward(*gradients, later, link)
        ctx.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (input, linear_weight, linear_bias))
        total = loss.sum()
        return total if scale is None else total * scale, logits, link

    @staticmethod
    @first_derivative_only(
        "linear_cross_entropy", 'backend="torch" supports second derivatives, but not z_loss and softcap'
    )
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        settings: LossSettings = ctx.settings
        if upstream is None:
            return None, None, None, None, None, None
        if settings.reduction == "none":
            x, linear_weight, target, linear_bias, weight, _ = ctx.saved_tensors
            found = _run(
                x, linear_weight, target, linear_bias, weight, upstream, settings, settings.wanted, False, False
            )
            gradients: list[Tensor | None] = list(found[1:4])
        else:
            *left, late, _ = ctx.saved_tensors
            gradients = [
                _scaled(gradient, upstream, late, dtype, settings.backend) if wanted else None
                for gradient, dtype, wanted in zip(left, ctx.dtypes, settings.wanted, strict=True)
            ]
        of_input, of_weight, of_bias = (
            gradient if wanted else None for gradient, wanted in zip(gradients, settings.wanted, strict=True)
        )
        return of_input, of_weight, None, of_bias, None, None


def _scaled(gradient: Tensor, upstream: Tensor, late: Tensor | None, dtype: torch.dtype, backend: str) -> Tensor:
    if not needed_again():
        return scale_in_place(gradient, upstream, late, backend=backend).to(dtype)
    by = upstream if late is None else upstream * late
    # With dimensions: a scalar tensor would be rounded to the gradient's dtype first.
    return (gradient * by.reshape((1,) * gradient.dim())).to(dtype)


def _run(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    settings: LossSettings,
    wanted: tuple[bool, bool, bool],
    logits_wanted: bool,
    sums_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return losses_and_gradients(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        scale,
        settings.ignore_index,
        settings.label_smoothing,
        settings.z_loss,
        settings.softcap,
        *wanted,
        logits_wanted,
        settings.logits_dtype,
        sums_wanted,
        settings.memory_budget,
        settings.backend,
    )
