"""RMS and layer normalisation, alone and after dropout and the addition to a residual."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.recipes.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from recipe_gpu import liger
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise, upstream
from recipe_gpu.shapes import Model

EPS = 1e-5
SHARE = 0.1  # that dropout drops


def rms_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """RMS normalisation as Llama's code has it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def layer_by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return weight * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) + bias


def rms_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def layer_by_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def rms_by_recipe(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, EPS)


def layer_by_recipe(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], weight, bias, EPS)


def added(normalise: Callable[..., Tensor], share: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Dropout, addition and a normalisation as three operations."""

    def run(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        stream = residual + (F.dropout(x, share) if share else x)
        return normalise(stream, *parameters), stream

    return run


def added_rms_by_recipe(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, weight, EPS)


def added_layer_by_recipe(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return add_layer_norm(x, residual, weight, bias, EPS, SHARE)


def problems(model: Model) -> list[Problem]:
    return [_alone(model, False), _alone(model, True), _added(model, False), _added(model, True)]


def _parameters(device: str, dtype: torch.dtype, width: int, centred: bool) -> list[Tensor]:
    return [noise(device, dtype, width) for _ in range(2 if centred else 1)]


def _ways(
    hand: Callable[..., object], torchs: Callable[..., object], ligers: tuple[Way, ...], recipe: Callable[..., object]
) -> tuple[Way, ...]:
    return (
        Way("by hand", Kind.EAGER, hand),
        Way("torch's", Kind.EAGER, torchs),
        *ligers,
        Way("recipe", Kind.RECIPE, recipe),
        Way("compile by hand", Kind.COMPILE, hand),
    )


def _alone(model: Model, centred: bool) -> Problem:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        x = noise(device, dtype, model.rows, model.width)
        given = upstream(device, dtype, model.rows, model.width)
        return Inputs((x, *_parameters(device, dtype, model.width, centred)), (given,))

    if centred:
        ligers = liger.ways("liger_layer_norm", lambda function: lambda x, weight, bias: function(x, weight, bias, EPS))
        ways = _ways(layer_by_hand, layer_by_torch, ligers, layer_by_recipe)
    else:
        ligers = liger.ways("liger_rms_norm", lambda function: lambda x, weight: function(x, weight, EPS))
        ways = _ways(rms_by_hand, rms_by_torch, ligers, rms_by_recipe)
    # Forward reads x and writes y; backward reads x and dy and writes dx. Parameters are too small to count.
    name = f"{model.name} N{model.rows} C{model.width} {'layer' if centred else 'RMS'}"
    return Problem("norm", name, make, ways, bytes=5 * 2 * model.rows * model.width)


def _added(model: Model, centred: bool) -> Problem:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        operands = [noise(device, dtype, model.rows, model.width) for _ in range(2)]
        given = tuple(upstream(device, dtype, model.rows, model.width) for _ in range(2))
        return Inputs((*operands, *_parameters(device, dtype, model.width, centred)), given)

    name = f"{model.name} N{model.rows} C{model.width} residual + "
    if centred:
        ways = _ways(added(layer_by_hand, SHARE), added(layer_by_torch, SHARE), (), added_layer_by_recipe)
        # Reads x and the residual, writes the stream and y; backward reads the stream, dy and the stream's gradient,
        # and writes two gradients, for they differ by the mask.
        size, name = 9, f"{name}dropout, layer"
    else:
        ligers = liger.ways(
            "liger_fused_add_rms_norm",
            lambda function: lambda x, residual, weight: function(x, residual, weight, EPS),
        )
        ways = _ways(added(rms_by_hand, 0.0), added(rms_by_torch, 0.0), ligers, added_rms_by_recipe)
        size, name = 8, f"{name}x, RMS"  # without a mask both gradients are one tensor
    return Problem("norm", name, make, ways, bytes=size * 2 * model.rows * model.width, random=centred)
