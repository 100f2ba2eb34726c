"""A tied embedding, whose head's gradient arrives in the same backward.

In float32, as the weight is under autocast: in bfloat16 the recipe leaves it to torch. The head has few rows, so that
its products do not hide the embedding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.recipes.embedding import embedding
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise, upstream
from recipe_gpu.shapes import Model

HEAD_ROWS = 8


def tied(look_up: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Embeds all tokens, and multiplies some by the weight."""

    def run(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = look_up(ids, weight)
        return F.linear(hidden[:HEAD_ROWS], weight), hidden

    return run


def by_hand(ids: Tensor, weight: Tensor) -> Tensor:
    return weight[ids]


def frequent(model: Model, device: str) -> Tensor:
    """Tokens as often as words of a text: the k-th in proportion to 1/k (Zipf), the first of all some 8 %."""
    uniform = torch.rand(model.rows, device=device)
    return (model.vocabulary**uniform).long().clamp_(1, model.vocabulary) - 1


def problems(model: Model) -> list[Problem]:
    return [_problem(model, often) for often in (False, True)]


def _problem(model: Model, often: bool) -> Problem:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        ids = frequent(model, device) if often else torch.randint(0, model.vocabulary, (model.rows,), device=device)
        weight = noise(device, dtype, model.vocabulary, model.width)
        logits = min(HEAD_ROWS, model.rows), model.vocabulary
        return Inputs(
            (ids, weight), (upstream(device, dtype, *logits), upstream(device, dtype, model.rows, model.width))
        )

    ways = (
        Way("weight[ids]", Kind.EAGER, tied(by_hand)),
        Way("F.embedding", Kind.EAGER, tied(F.embedding)),
        Way("recipe", Kind.RECIPE, tied(embedding)),
        Way("compile F.embedding", Kind.COMPILE, tied(F.embedding)),
    )
    # The head reads the weight twice and writes its gradient. The embedding reads its rows and writes them; backward
    # reads their gradients, and reads and writes rows of the weight's.
    counted = 4 * (3 * model.vocabulary * model.width + 5 * model.rows * model.width)
    name = f"{model.name} N{model.rows} C{model.width} V{model.vocabulary} float32, tied"
    name += ", Zipf" if often else ""
    return Problem("embedding", name, make, ways, bytes=counted, dtype=torch.float32, accumulates=True)
