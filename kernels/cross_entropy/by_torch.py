"""The loss by torch's own function, with the terms that it has not got."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.support import autocasts


def _computed_in(logits: Tensor) -> torch.dtype:
    """The dtype of torch's cross-entropy, which it asks of the weights: under autocast float32."""
    casts = logits.dtype != torch.float64 and autocasts(logits.device.type)
    return torch.float32 if casts else logits.dtype


def by_torch(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute :func:`gradscope.recipes.cross_entropy` by torch's, with all derivatives, of any tensor that it takes."""
    if target.dtype is torch.uint8:  # torch takes them of rows alone, without weights or smoothing
        target = target.long()
    if weight is not None:
        weight = weight.to(_computed_in(logits))
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    loss = functional.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if not z_loss:
        return loss
    normalizer = z_loss * logits.logsumexp(min(1, logits.dim() - 1)).square()
    counted: Tensor | int = normalizer.numel()
    if not target.is_floating_point():
        counts = target != ignore_index
        normalizer, counted = normalizer.where(counts, 0.0), counts.sum()
    if reduction == "none":
        return loss + normalizer
    total = normalizer.sum()
    return loss + (total / counted if reduction == "mean" else total)
