"""GELU beside the ways in which models write it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes.gelu import bias_gelu, gelu

from .case import RecipeCase, Step

ROWS, FEATURES = 2048, 3072  # two sequences of GPT-2's block


def by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def by_hand_with_pow(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _step(function: Callable[..., Tensor], upstream: Tensor, *leaves: Tensor) -> Step:
    def step() -> None:
        torch.autograd.grad(function(*leaves), leaves, upstream)

    return step


def _alone(baseline: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Step, Step]]:
    def make() -> tuple[Step, Step]:
        x, upstream = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randn(ROWS, FEATURES)
        return _step(baseline, upstream, x), _step(lambda x: gelu(x, "tanh"), upstream, x)

    return make


def _with_bias() -> tuple[Step, Step]:
    x, bias = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randn(FEATURES, requires_grad=True)
    upstream = torch.randn(ROWS, FEATURES)
    eager = _step(lambda x, bias: functional.gelu(x + bias, approximate="tanh"), upstream, x, bias)
    return eager, _step(lambda x, bias: bias_gelu(x, bias, "tanh"), upstream, x, bias)


_SHAPE = f"N{ROWS} C{FEATURES}"

CASES = [
    RecipeCase("gelu", _SHAPE, "tanh GELU by hand, x**3", _alone(by_hand), faster=3.0),
    RecipeCase("gelu", _SHAPE, "tanh GELU by hand, torch.pow(x, 3.0)", _alone(by_hand_with_pow), faster=3.0),
    RecipeCase("gelu", f"{_SHAPE} with bias", "F.gelu(x + bias)", _with_bias),
]
