"""Splitting a packed projection and merging heads, without the attention between."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gradscope.recipes.heads import merge_heads, split_qkv
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise, upstream
from recipe_gpu.shapes import Model


def by_torch(model: Model, qkv: Tensor, inner: Tensor) -> tuple[Tensor, ...]:
    """Split heads as nanoGPT does."""
    sizes = [heads * model.size for heads in (model.heads, model.kv_heads, model.kv_heads)]
    parts = [part.view(*part.shape[:2], -1, model.size).transpose(1, 2) for part in qkv.split(sizes, dim=2)]
    merged = inner.transpose(1, 2).contiguous().view(model.batch, model.tokens, -1)
    return (merged, *parts)


def by_recipe(model: Model, qkv: Tensor, inner: Tensor) -> tuple[Tensor, ...]:
    return (merge_heads(inner), *split_qkv(qkv, model.heads, kv_heads=model.kv_heads))


def problems(model: Model) -> list[Problem]:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        """Attention's output and the gradients of its operands as products by hand give them."""
        shapes = [(model.batch, heads, model.tokens, model.size) for heads in (model.heads, model.kv_heads)]
        qkv = noise(device, dtype, model.batch, model.tokens, model.packed)
        inner = noise(device, dtype, *shapes[0])
        merged = upstream(device, dtype, model.batch, model.tokens, model.width)
        given = (upstream(device, dtype, *shape) for shape in (shapes[0], shapes[1], shapes[1]))
        return Inputs((qkv, inner), (merged, *given))

    ways = (
        Way("split, view, contiguous", Kind.EAGER, partial(by_torch, model)),
        Way("recipe", Kind.RECIPE, partial(by_recipe, model)),
        Way("compile the first", Kind.COMPILE, partial(by_torch, model)),
    )
    # Merging copies the output; backward writes the three gradients into one tensor. All else can be views.
    counted = 2 * 2 * model.rows * (model.width + model.packed)
    name = f"{model.name} B{model.batch} H{model.heads}/{model.kv_heads} T{model.tokens} d{model.size}"
    return [Problem("heads", name, make, ways, bytes=counted)]
