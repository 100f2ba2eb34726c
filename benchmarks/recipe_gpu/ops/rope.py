"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.recipes.rope import rope
from recipe_gpu import liger
from recipe_gpu.problem import Inputs, Kind, Problem, Way, upstream
from recipe_gpu.shapes import Model


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def by_hand(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embeddings as Hugging Face's models have them: the tables doubled, of the activations' dtype."""
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def by_recipe(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rope((query, key), cos, sin)


def problems(model: Model) -> list[Problem]:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        """Query and key as projections give them, [batch, tokens, heads, size]."""
        tensors = [
            torch.randn(model.batch, model.tokens, heads, model.size, device=device, dtype=dtype)
            .transpose(1, 2)
            .requires_grad_()
            for heads in (model.heads, model.kv_heads)
        ]
        rates = 10000.0 ** (-torch.arange(0, model.size, 2, device=device) / model.size)
        angles = torch.arange(model.tokens, device=device)[:, None] * rates
        tables = [torch.cat((table, table), -1).to(dtype) for table in (angles.cos(), angles.sin())]
        given = [upstream(device, dtype, *tensor.shape) for tensor in tensors]
        return Inputs((*tensors, *tables), tuple(given))

    ways = (
        Way("by hand", Kind.EAGER, by_hand),
        *liger.ways("liger_rope", lambda function: function),
        Way("recipe", Kind.RECIPE, by_recipe),
        Way("compile by hand", Kind.COMPILE, by_hand),
    )
    heads = model.heads + model.kv_heads
    name = f"{model.name} B{model.batch} H{model.heads}/{model.kv_heads} T{model.tokens} d{model.size}"
    # Both passes read and write queries and keys; the tables are too small to count.
    return [Problem("rope", name, make, ways, bytes=4 * 2 * model.rows * heads * model.size)]
