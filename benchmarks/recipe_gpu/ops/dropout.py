"""Dropout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.recipes.dropout import dropout
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise, upstream
from recipe_gpu.shapes import Model

SHARE = 0.1


def by_hand(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) >= SHARE) / (1 - SHARE)


def by_torch(x: Tensor) -> Tensor:
    return F.dropout(x, SHARE)


def by_recipe(x: Tensor) -> Tensor:
    return dropout(x, SHARE)


def problems(model: Model) -> list[Problem]:
    rows, width = model.rows, model.width

    def make(device: str, dtype: torch.dtype) -> Inputs:
        return Inputs((noise(device, dtype, rows, width),), (upstream(device, dtype, rows, width),))

    ways = (
        Way("by hand", Kind.EAGER, by_hand),
        Way("F.dropout", Kind.EAGER, by_torch),
        Way("recipe", Kind.RECIPE, by_recipe),
        Way("compile F.dropout", Kind.COMPILE, by_torch),
    )
    # Both passes read one and write one.
    name = f"{model.name} N{rows} C{width} p{SHARE}"
    return [Problem("dropout", name, make, ways, bytes=4 * 2 * rows * width, random=True)]
