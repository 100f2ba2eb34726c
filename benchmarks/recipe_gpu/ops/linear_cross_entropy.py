"""Head and loss in one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.recipes.linear_cross_entropy import linear_cross_entropy
from recipe_gpu import liger
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise
from recipe_gpu.shapes import Model


def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def eager_upcast(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss as Hugging Face's models have it, upcast."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def by_recipe(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, target)


def problems(model: Model) -> list[Problem]:
    rows, width, classes = model.rows, model.width, model.vocabulary

    def make(device: str, dtype: torch.dtype) -> Inputs:
        weight = (noise(device, dtype, classes, width, grad=False) * 0.02).requires_grad_()
        target = torch.randint(0, classes, (rows,), device=device)
        return Inputs((noise(device, dtype, rows, width), weight, target), (torch.ones((), device=device),))

    ways = (
        # Liger in chunks of its own size is the slower the less memory it takes: the goal is eager's time.
        Way("F.linear, F.cross_entropy", Kind.EAGER, eager, goal=False),
        Way("the same in float32", Kind.EAGER, eager_upcast, goal=False),
        *liger.ways("liger_fused_linear_cross_entropy", lambda function: function),
        Way("recipe", Kind.RECIPE, by_recipe),
        Way("compile the first", Kind.COMPILE, eager),
    )
    return [
        Problem(
            "linear_cross_entropy",
            f"{model.name} N{rows} C{width} V{classes}",
            make,
            ways,
            flop=3 * 2 * rows * width * classes,  # logits, and the gradients of input and weight
            slower_at_most=1.08,
            leaner_at_least=4.0,
        )
    ]
