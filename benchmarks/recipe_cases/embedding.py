"""A tied embedding beside torch's, whose gradient is as large as the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes.embedding import embedding

from .case import RecipeCase, Step

TOKENS, FEATURES, BATCH, LENGTH = 50257, 768, 2, 1024
HEAD_ROWS = 8  # few, so that the head's product does not hide the embedding

LookUp = Callable[[Tensor, Tensor], Tensor]


def _both(make: Callable[[LookUp], Step]) -> Callable[[], tuple[Step, Step]]:
    return lambda: (make(functional.embedding), make(embedding))


def _into_a_gradient(look_up: LookUp) -> Step:
    """The gradient that is added to was there before, and stays: of a head's own backward, or of earlier passes."""
    weight = torch.nn.Parameter(torch.randn(TOKENS, FEATURES))
    weight.grad = torch.randn(TOKENS, FEATURES)  # written to: memory that was never touched is slow at first
    ids, upstream = torch.randint(0, TOKENS, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH, FEATURES)
    return lambda: look_up(ids, weight).backward(upstream)


def _with_a_head(look_up: LookUp) -> Step:
    """The head's gradient arrives in the same backward."""
    weight = torch.nn.Parameter(torch.randn(TOKENS, FEATURES))
    ids, upstream = torch.randint(0, TOKENS, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH, FEATURES)
    ones = torch.ones(HEAD_ROWS, TOKENS)

    def step() -> None:
        hidden = look_up(ids, weight)
        logits = functional.linear(hidden[0, :HEAD_ROWS], weight)
        torch.autograd.backward([logits, hidden], [ones, upstream])
        weight.grad = None

    return step


_SHAPE = f"N{BATCH * LENGTH} C{FEATURES} V{TOKENS}"

CASES = [
    RecipeCase("embedding", f"{_SHAPE}, gradient exists", "F.embedding", _both(_into_a_gradient), faster=10.0),
    RecipeCase("embedding", f"{_SHAPE}, head of {HEAD_ROWS} rows", "F.embedding and the head", _both(_with_a_head)),
]
