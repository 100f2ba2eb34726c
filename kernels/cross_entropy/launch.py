"""Loss and gradient by either path; one node of a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy import cpu
from gradscope.kernels.cross_entropy.terms import Terms, accumulate_dtype
from gradscope.kernels.opaque import opaque


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
        scale: a scalar tensor; None for 1.
        wanted: whether a gradient is.
        backend: "cpu" or "triton".

    Returns:
        [batch, positions] in float32 or float64, and [batch, classes, positions] in the logits' dtype, or nothing.

    Raises:
        ValueError: on the CPU, a target that is neither a class nor ignored.
    """
    terms = Terms(weight, ignore_index, label_smoothing, z_loss, softcap)
    gradient = torch.empty_like(logits) if wanted else None
    _require_classes(target, logits.shape[1], ignore_index)
    if backend == "triton":
        from gradscope.kernels.cross_entropy.triton_launch import losses
    else:
        losses = cpu.losses
    loss = losses(logits, target, terms, scale, gradient)
    return loss, logits.new_empty(0) if gradient is None else gradient


def _require_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    if not target.numel():
        return
    known = (target >= 0) & (target < classes) | (target == ignore_index)
    if target.device.type != "cpu":  # no wait for the device: it stops itself
        torch._assert_async(known.all())
        return
    if not known.all():
        wrong = int(target[~known][0])
        raise ValueError(
            f"cross_entropy: target holds {wrong}; expected a class in [0, {classes}) or ignore_index={ignore_index}"
        )
