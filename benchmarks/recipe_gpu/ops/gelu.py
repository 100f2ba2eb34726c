"""GELU by tanh, alone and of a sum with a bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.recipes.gelu import bias_gelu, gelu
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise, upstream
from recipe_gpu.shapes import Model


def by_hand(x: Tensor) -> Tensor:
    """GELU as GPT-2's code has it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def by_torch(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def by_recipe(x: Tensor) -> Tensor:
    return gelu(x, "tanh")


def bias_by_hand(x: Tensor, bias: Tensor) -> Tensor:
    return by_hand(x + bias)


def bias_by_torch(x: Tensor, bias: Tensor) -> Tensor:
    return by_torch(x + bias)


def bias_by_recipe(x: Tensor, bias: Tensor) -> Tensor:
    return bias_gelu(x, bias, "tanh")


def problems(model: Model) -> list[Problem]:
    rows, features = model.rows, model.hidden

    def make(device: str, dtype: torch.dtype) -> Inputs:
        return Inputs((noise(device, dtype, rows, features),), (upstream(device, dtype, rows, features),))

    def make_with_bias(device: str, dtype: torch.dtype) -> Inputs:
        x, bias = noise(device, dtype, rows, features), noise(device, dtype, features)
        return Inputs((x, bias), (upstream(device, dtype, rows, features),))

    alone = (
        Way("by hand", Kind.EAGER, by_hand),
        Way("F.gelu", Kind.EAGER, by_torch),
        Way("recipe", Kind.RECIPE, by_recipe),
        Way("compile by hand", Kind.COMPILE, by_hand),
    )
    with_bias = (
        Way("by hand", Kind.EAGER, bias_by_hand),
        Way("F.gelu(x + bias)", Kind.EAGER, bias_by_torch),
        Way("recipe", Kind.RECIPE, bias_by_recipe),
        Way("compile by hand", Kind.COMPILE, bias_by_hand),
    )
    shape = f"{model.name} N{rows} C{features}"
    # Forward reads x and writes y; backward reads x and dy and writes dx. The bias is read twice, its gradient written.
    large = 5 * 2 * rows * features
    return [
        Problem("gelu", f"{shape} alone", make, alone, bytes=large),
        Problem("gelu", f"{shape} bias", make_with_bias, with_bias, bytes=large + 3 * 2 * features),
    ]
