"""Head and loss of GPT-2 at 2048 tokens.

Gradients are cleared first, as a training loop does: they are there before a step and after it, 161 MB on either side,
so that what is compared is what the loss needs beyond them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes.linear_cross_entropy import linear_cross_entropy
from recipe_cases.case import RecipeCase, Step

ROWS, FEATURES, CLASSES = 2048, 768, 50257
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight), target)


def _torchs_chunks(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = functional.linear_cross_entropy(x, weight, target, options=torch.nn.LinearCrossEntropyOptions())
    return loss


def _make(baseline: Loss, ignored: float = 0.0) -> tuple[Step, Step]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(ROWS, FEATURES, device=device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(CLASSES, FEATURES, device=device)).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (ROWS,), device=device)
    target[torch.rand(ROWS, device=device) < ignored] = -100

    def step_of(loss: Loss) -> Step:
        def step() -> None:
            x.grad = weight.grad = None
            loss(x, weight, target).backward()

        return step

    return step_of(baseline), step_of(linear_cross_entropy)


CASES = [
    RecipeCase(
        "linear_cross_entropy",
        "N2048 C768 V50257",
        "F.linear and F.cross_entropy",
        lambda: _make(_eager),
        faster=1.0,
        leaner=8.0,
    ),
    RecipeCase(
        "linear_cross_entropy",
        "N2048 C768 V50257, 85 % ignored",
        "F.linear and F.cross_entropy",
        lambda: _make(_eager, 0.85),
    ),
]
if hasattr(functional, "linear_cross_entropy"):
    CASES.append(
        RecipeCase(
            "linear_cross_entropy",
            "N2048 C768 V50257",
            "F.linear_cross_entropy, in chunks",
            lambda: _make(_torchs_chunks),
            faster=2.5,
        )
    )
