"""SwiGLU of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.recipes.swiglu import swiglu
from recipe_gpu import liger
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise, upstream
from recipe_gpu.shapes import Model


def by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def by_torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def by_recipe(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(gate, up)


def problems(model: Model) -> list[Problem]:
    rows, features = model.rows, model.hidden

    def make(device: str, dtype: torch.dtype) -> Inputs:
        operands = noise(device, dtype, rows, features), noise(device, dtype, rows, features)
        return Inputs(operands, (upstream(device, dtype, rows, features),))

    ways = (
        Way("by hand", Kind.EAGER, by_hand),
        Way("F.silu(gate) * up", Kind.EAGER, by_torch),
        *liger.ways("liger_swiglu", lambda function: function),
        Way("recipe", Kind.RECIPE, by_recipe),
        Way("compile by hand", Kind.COMPILE, by_hand),
    )
    # Forward reads two and writes one; backward reads three and writes two.
    return [Problem("swiglu", f"{model.name} N{rows} C{features}", make, ways, bytes=8 * 2 * rows * features)]
