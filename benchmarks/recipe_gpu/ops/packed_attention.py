"""From a packed projection to merged heads, beside SDPA with split."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gradscope.recipes.packed_attention import packed_attention
from recipe_gpu.ops import attention
from recipe_gpu.problem import Inputs, Kind, Problem, Way, noise, upstream
from recipe_gpu.shapes import Model


def _split(model: Model, qkv: Tensor) -> list[Tensor]:
    """Split q, k and v as nanoGPT does."""
    parts = qkv.split([heads * model.size for heads in (model.heads, model.kv_heads, model.kv_heads)], dim=2)
    return [part.view(*part.shape[:2], -1, model.size).transpose(1, 2) for part in parts]


def _merged(y: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous().view(y.shape[0], y.shape[2], -1)


def by_hand(model: Model, qkv: Tensor) -> Tensor:
    return _merged(attention.by_hand(attention.Options(), *_split(model, qkv)))


def by_sdpa(model: Model, name: str, qkv: Tensor) -> Tensor:
    return _merged(attention.by_sdpa(attention.Options(), attention.BACKENDS[name], *_split(model, qkv)))


def by_recipe(model: Model, backend: str, qkv: Tensor) -> Tensor:
    kv_heads = None if model.kv_heads == model.heads else model.kv_heads
    return packed_attention(qkv, model.heads, is_causal=True, kv_heads=kv_heads, backend=backend)


def problems(model: Model) -> list[Problem]:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        qkv = noise(device, dtype, model.batch, model.tokens, model.packed)
        return Inputs((qkv,), (upstream(device, dtype, model.batch, model.tokens, model.width),))

    ways = [Way("by hand", Kind.EAGER, partial(by_hand, model))]
    ways += [Way(f"{name}, split", Kind.SDPA, partial(by_sdpa, model, name)) for name in attention.BACKENDS]
    ways += [
        Way("recipe", Kind.RECIPE, partial(by_recipe, model, "auto")),
        Way("recipe by Triton", Kind.VARIANT, partial(by_recipe, model, "triton")),
        Way("compile by hand", Kind.COMPILE, partial(by_hand, model)),
    ]
    name = f"{model.name} B{model.batch} H{model.heads}/{model.kv_heads} T{model.tokens} d{model.size}"
    return [Problem("packed_attention", name, make, tuple(ways), flop=attention.flop(model), faster_than=(Kind.SDPA,))]
