"""SwiGLU beside ``F.silu(gate) * up``, and GeGLU beside ``F.gelu(gate) * up``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes.swiglu import geglu, swiglu

from .case import RecipeCase, Step

ROWS, FEATURES = 2048, 2048


def _step(function: Callable[..., Tensor], upstream: Tensor, *leaves: Tensor) -> Step:
    def step() -> None:
        torch.autograd.grad(function(*leaves), leaves, upstream)

    return step


def _apart() -> tuple[Step, Step]:
    gate, up = (torch.randn(ROWS, FEATURES, requires_grad=True) for _ in range(2))
    upstream = torch.randn(ROWS, FEATURES)
    eager = _step(lambda gate, up: functional.silu(gate) * up, upstream, gate, up)
    return eager, _step(swiglu, upstream, gate, up)


def _by_gelu() -> tuple[Step, Step]:
    gate, up = (torch.randn(ROWS, FEATURES, requires_grad=True) for _ in range(2))
    upstream = torch.randn(ROWS, FEATURES)
    return _step(lambda gate, up: functional.gelu(gate) * up, upstream, gate, up), _step(geglu, upstream, gate, up)


def _packed() -> tuple[Step, Step]:
    packed, upstream = torch.randn(ROWS, 2 * FEATURES, requires_grad=True), torch.randn(ROWS, FEATURES)

    def by_hand(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return _step(by_hand, upstream, packed), _step(swiglu, upstream, packed)


CASES = [
    RecipeCase("swiglu", f"N{ROWS} C{FEATURES}", "F.silu(gate) * up", _apart),
    RecipeCase("swiglu", f"N{ROWS} C{FEATURES} geglu", "F.gelu(gate) * up", _by_gelu),
    RecipeCase("swiglu", f"N{ROWS} C{FEATURES} packed", "chunk, then F.silu(gate) * up", _packed),
]
