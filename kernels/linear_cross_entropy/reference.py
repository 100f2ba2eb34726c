"""Linear layer and loss as plain operations, for tests: differentiable by autograd, all logits held."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from gradscope.kernels.cross_entropy.reference import cross_entropy_reference
from gradscope.kernels.cross_entropy.terms import Terms


def linear_cross_entropy_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, terms: Terms, reduction: str
) -> Tensor:
    """Loss of ``input`` [rows, features] and ``target`` [rows]; a scalar, or [rows] with ``reduction="none"``."""
    return cross_entropy_reference(functional.linear(input, linear_weight, linear_bias), target, terms, reduction)
