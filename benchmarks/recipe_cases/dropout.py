"""Dropout by seed beside torch's."""

from __future__ import annotations

import torch
from torch.nn import functional

from gradscope.recipes.dropout import dropout

from .case import RecipeCase, Step

ROWS, FEATURES = 2048, 3072


def _make() -> tuple[Step, Step]:
    x, upstream = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randn(ROWS, FEATURES)
    return (
        lambda: _run(functional.dropout(x, 0.1), x, upstream),
        lambda: _run(dropout(x, 0.1), x, upstream),
    )


def _run(output: torch.Tensor, x: torch.Tensor, upstream: torch.Tensor) -> None:
    torch.autograd.grad(output, x, upstream)


CASES = [RecipeCase("dropout", f"N{ROWS} C{FEATURES} p0.1", "F.dropout", _make)]
