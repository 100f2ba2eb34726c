"""SwiGLU and GeGLU of two tensors. Not yet run on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.recipes.swiglu import geglu, swiglu
from recipe_gpu import liger
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise, upstream
from recipe_gpu.shapes import Model


def by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def by_torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def by_recipe(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(gate, up)


def gelu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)) * up


def gelu_by_torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def gelu_by_recipe(gate: Tensor, up: Tensor) -> Tensor:
    return geglu(gate, up)


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
    of_gelu = (
        Way("by hand", Kind.EAGER, gelu_by_hand),
        Way("F.gelu(gate) * up", Kind.EAGER, gelu_by_torch),
        Way("recipe", Kind.RECIPE, gelu_by_recipe),
        Way("compile by hand", Kind.COMPILE, gelu_by_hand),
    )
    name, moved = f"{model.name} N{rows} C{features}", 8 * 2 * rows * features
    return [
        Problem("swiglu", name, make, ways, bytes=moved),
        Problem("swiglu", f"{name} geglu", make, of_gelu, bytes=moved),
    ]
