"""Loss and gradient by either path; one node of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy import cpu
from gradscope.kernels.cross_entropy.targets import require_classes
from gradscope.kernels.cross_entropy.terms import Terms, accumulate_dtype
from gradscope.kernels.opaque import opaque

Losses = Callable[[Tensor, Tensor, Terms, Tensor | None, Tensor | None], Tensor]


def losses_by(backend: str) -> Losses:
    """:func:`gradscope.kernels.cross_entropy.cpu.losses`, or its namesake that launches the Triton kernel."""
    if backend != "triton":
        return cpu.losses
    from gradscope.kernels.cross_entropy import triton_launch

    return triton_launch.losses


def _fake(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    wanted: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    loss = target.new_empty(target.shape, dtype=accumulate_dtype(logits.dtype))
    return loss, torch.empty_like(logits) if wanted else logits.new_empty(0)


@opaque("cross_entropy", _fake)
def losses_and_gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    wanted: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Loss of each row, and where it is wanted the gradient of ``Σ scale · loss``.

    Args:
        logits: [batch, classes, positions].
        target: [batch, positions].
        weight, ignore_index, label_smoothing, z_loss, softcap: see terms.py.
        scale: a scalar tensor, or [batch, positions]; None for 1.
        wanted: whether a gradient is.
        backend: "cpu" or "triton".

    Returns:
        [batch, positions] in float32 or float64, and [batch, classes, positions] in the logits' dtype, or nothing.

    Raises:
        ValueError: on the CPU, a target that is neither a class nor ignored.
    """
    terms = Terms(weight, ignore_index, label_smoothing, z_loss, softcap)
    gradient = torch.empty_like(logits) if wanted else None
    require_classes("cross_entropy", target, logits.shape[1], ignore_index)
    loss = losses_by(backend)(logits, target, terms, scale, gradient)
    return loss, logits.new_empty(0) if gradient is None else gradient
