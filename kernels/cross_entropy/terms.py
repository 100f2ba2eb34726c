"""What the loss of one row is made of.

With logits ``x`` (after the soft-cap), ``lse = log Σ exp x``, ``p = exp(x - lse)``, class weights ``w``, their sum
``W``, smoothing ``ε`` and ``C`` classes, the loss of a row with target ``y`` is

    (1 - ε) w_y (lse - x_y)  +  ε/C Σ_c w_c (lse - x_c)  +  z lse²

as torch.nn.functional.cross_entropy defines the first two terms; the third keeps the normaliser near 1 (A. Chowdhery
et al., "PaLM", 2022, section 5). Its gradient is

    p_c ((1 - ε) w_y + ε/C W + 2 z lse)  -  (1 - ε) w_y [c = y]  -  ε/C w_c

times ``1 - (x_c / cap)²`` where the logits are capped: ``x = cap tanh(logits / cap)`` (Gemma 2, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of a cross-entropy, without its reduction."""

    weight: Tensor | None = None  # of each class
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums are taken: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def late_factor(scale: Tensor) -> Tensor:
    """The factor of :func:`mean_factors` for gradients that are there: for infinity 0, as they are 0 or NaN."""
    return torch.where(scale.isfinite(), scale, 0.0)


def mean_factors(target: Tensor, terms: Terms, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """Class weights and a factor, with which the sum of ``factor · loss`` is the mean.

    torch divides by the weights of the targets that count. The z-loss of a row has no weight: it is divided by the
    number of rows, and where there is one the weights carry the rest.

    Returns:
        [classes] or None, and a scalar on the target's device; without a target that counts the mean is NaN. Where
        all that count weigh 0, the weights are NaN: so are loss and gradient of these rows, and 0 those of the others.
    """
    counts = target != terms.ignore_index
    number = counts.sum().to(dtype)
    if terms.weight is None:
        return None, number.reciprocal()
    weight = terms.weight.to(dtype)
    known = target.clamp(0, len(weight) - 1)  # what is no class is refused later, by its name
    counted = weight[known].where(counts, 0.0)
    total = counted.sum()
    weight = weight.where(counted.any(), torch.nan)
    if not terms.z_loss:
        return weight, total.reciprocal()
    return weight * (number / total), number.reciprocal()
