"""Normalisation beside torch's, alone and after dropout and the addition to a residual."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes.norm import add_layer_norm, add_rms_norm, rms_norm

from .case import RecipeCase, Step

ROWS, FEATURES, EPS, SHARE = 4096, 768, 1e-5, 0.1


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _step(
    function: Callable[..., Tensor | tuple[Tensor, Tensor]], leaves: list[Tensor], upstream: list[Tensor]
) -> Step:
    def step() -> None:
        torch.autograd.grad(function(*leaves), leaves, upstream)

    return step


def _tensors(inputs: int, vectors: int) -> list[Tensor]:
    sizes = [(ROWS, FEATURES)] * inputs + [(FEATURES,)] * vectors
    return [torch.randn(size, requires_grad=True) for size in sizes]


def _alone(baseline: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], tuple[Step, Step]]:
    def make() -> tuple[Step, Step]:
        leaves, upstream = _tensors(1, 1), [torch.randn(ROWS, FEATURES)]
        recipe = _step(lambda x, weight: rms_norm(x, (FEATURES,), weight, EPS), leaves, upstream)
        return _step(baseline, leaves, upstream), recipe

    return make


def _torchs(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (FEATURES,), weight, EPS)


def _added_rms() -> tuple[Step, Step]:
    leaves, upstream = _tensors(2, 1), [torch.randn(ROWS, FEATURES) for _ in range(2)]

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stream = residual + functional.dropout(x, SHARE)
        return _torchs(stream, weight), stream

    recipe = _step(lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS, SHARE), leaves, upstream)
    return _step(eager, leaves, upstream), recipe


def _added_layer() -> tuple[Step, Step]:
    leaves, upstream = _tensors(2, 2), [torch.randn(ROWS, FEATURES) for _ in range(2)]

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        stream = residual + functional.dropout(x, SHARE)
        return functional.layer_norm(stream, (FEATURES,), weight, bias, EPS), stream

    recipe = _step(
        lambda x, residual, weight, bias: add_layer_norm(x, residual, weight, bias, EPS, SHARE), leaves, upstream
    )
    return _step(eager, leaves, upstream), recipe


_SHAPE = f"N{ROWS} C{FEATURES}"

CASES = [
    RecipeCase("norm", f"{_SHAPE} RMS", "F.rms_norm", _alone(_torchs)),
    RecipeCase("norm", f"{_SHAPE} RMS", "RMS norm by hand", _alone(by_hand)),
    RecipeCase("norm", f"{_SHAPE} p{SHARE} add RMS", "F.dropout, +, F.rms_norm", _added_rms),
    RecipeCase("norm", f"{_SHAPE} p{SHARE} add layer", "F.dropout, +, F.layer_norm", _added_layer),
]
