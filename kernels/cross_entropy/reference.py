"""The loss as plain operations, for tests: any dtype, differentiable by autograd, nothing saved."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy.terms import Terms


def cross_entropy_reference(logits: Tensor, target: Tensor, terms: Terms, reduction: str) -> Tensor:
    """Loss of ``logits`` [rows, classes] and ``target`` [rows]; a scalar, or [rows] with ``reduction="none"``."""
    x = logits if terms.softcap is None else terms.softcap * torch.tanh(logits / terms.softcap)
    classes = x.shape[1]
    lse = torch.logsumexp(x, dim=1)
    counts = target != terms.ignore_index
    known = torch.where(counts, target, 0)
    weight = torch.ones(classes, dtype=x.dtype, device=x.device) if terms.weight is None else terms.weight.to(x.dtype)
    surprise = lse[:, None] - x
    loss = (1 - terms.label_smoothing) * weight[known] * surprise.gather(1, known[:, None])[:, 0]
    if terms.label_smoothing:
        loss = loss + terms.label_smoothing / classes * (surprise * weight).sum(1)
    loss, normalizer = torch.where(counts, loss, 0), torch.where(counts, terms.z_loss * lse.square(), 0)
    if reduction == "none":
        return loss + normalizer
    if reduction == "sum":
        return (loss + normalizer).sum()
    return loss.sum() / (weight[known] * counts).sum() + normalizer.sum() / counts.sum()
