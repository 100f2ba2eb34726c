"""Cross-entropy over logits that are there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.recipes.cross_entropy import cross_entropy
from recipe_gpu import liger
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise
from recipe_gpu.shapes import Model


def by_hand(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy as textbooks have it, with the upcast that models add."""
    return -logits.float().log_softmax(-1).gather(1, target[:, None]).mean()


def by_torch(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def by_recipe(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target)


def problems(model: Model) -> list[Problem]:
    rows, classes = model.rows, model.vocabulary

    def make(device: str, dtype: torch.dtype) -> Inputs:
        target = torch.randint(0, classes, (rows,), device=device)
        return Inputs((noise(device, dtype, rows, classes), target), (torch.ones((), device=device),))

    ways = (
        Way("by hand", Kind.EAGER, by_hand),
        Way("F.cross_entropy", Kind.EAGER, by_torch),
        *liger.ways("liger_cross_entropy", lambda function: function),
        Way("recipe", Kind.RECIPE, by_recipe),
        Way("compile by hand", Kind.COMPILE, by_hand),
    )
    return [
        Problem(
            "cross_entropy",
            f"{model.name} N{rows} V{classes}",
            make,
            ways,
            bytes=2 * 2 * rows * classes,
            share_goal=0.8,
            faster_than=(Kind.LIGER, Kind.COMPILE),
        )
    ]
