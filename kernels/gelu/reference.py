"""The unit as plain operations, for tests: any dtype, differentiable by autograd.

    exact: x Φ(x), with the normal distribution's Φ(x) = (1 + erf(x / √2)) / 2
    tanh:  x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))

D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units (GELUs)", 2016. The second is the approximation of GPT-2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gelu_reference(x: Tensor, approximate: str) -> Tensor:
    """The unit of ``x``, element by element."""
    if approximate == "none":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
