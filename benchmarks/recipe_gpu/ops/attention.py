"""Attention, causal and with a bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradscope.recipes.attention import attention
from recipe_gpu.problem import Inputs, Kind, Problem, Way, upstream
from recipe_gpu.shapes import GPT_2, Model

BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked."""

    dropout_p: float = 0.0
    softcap: float | None = None
    biased: bool = False  # [1, heads, length, length]
    learnt: bool = True  # the bias has a gradient
    causal: bool = True


def flop(model: Model, causal: bool = True) -> int:
    """FLOPs of forward and backward: two matmuls and five, of which a causal mask needs half."""
    return 7 * model.batch * model.heads * model.tokens**2 * model.size * (1 if causal else 2)


def by_hand(options: Options, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention as nanoGPT writes it."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in (key, value))
    scores = (query @ key.transpose(-2, -1)) * query.shape[-1] ** -0.5
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if bias is not None:
        scores = scores + bias
    if options.causal:
        scores = scores.masked_fill(_later(query), float("-inf"))
    return F.dropout(scores.softmax(-1), options.dropout_p) @ value


def by_sdpa(
    options: Options, backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> Tensor:
    """One of SDPA's backends; key and value are expanded for the one that shares no heads."""
    shares = query.shape[1] != key.shape[1]
    if shares and backend == SDPBackend.EFFICIENT_ATTENTION:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        shares = False
    if bias is not None and options.causal:  # SDPA takes no mask beside is_causal
        bias = bias.masked_fill(_later(query), float("-inf"))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            query, key, value, bias, options.dropout_p, is_causal=options.causal and bias is None, enable_gqa=shares
        )


def by_recipe(
    options: Options, backend: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> Tensor:
    return attention(
        query,
        key,
        value,
        bias,
        options.dropout_p,
        is_causal=options.causal,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=options.softcap,
        backend=backend,
    )


def _later(query: Tensor) -> Tensor:
    return torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).triu(1)


def _make(model: Model, options: Options) -> Callable[[str, torch.dtype], Inputs]:
    def make(device: str, dtype: torch.dtype) -> Inputs:
        """Query, key and value as a packed projection gives them."""
        sizes = [model.heads, model.kv_heads, model.kv_heads]
        packed = torch.randn(model.batch, model.tokens, sum(sizes), model.size, device=device, dtype=dtype)
        tensors = [part.transpose(1, 2).requires_grad_() for part in packed.split(sizes, dim=2)]
        if options.biased:
            shape = (1, model.heads, model.tokens, model.tokens)
            tensors.append(torch.randn(shape, device=device, dtype=dtype).requires_grad_(options.learnt))
        # As the projection behind it gives it: cuDNN's backward is planned for one (recipes/attention_layout.py).
        above = upstream(device, dtype, model.batch, model.tokens, model.heads, model.size).transpose(1, 2)
        return Inputs(tuple(tensors), (above,))

    return make


def _problem(model: Model, what: str, options: Options, backends: tuple[str, ...]) -> Problem:
    ways = [Way("by hand", Kind.EAGER, partial(by_hand, options))]
    ways += [Way(name, Kind.SDPA, partial(by_sdpa, options, BACKENDS[name])) for name in backends]
    ways += [
        Way("recipe", Kind.RECIPE, partial(by_recipe, options, "auto")),
        Way("recipe by Triton", Kind.VARIANT, partial(by_recipe, options, "triton")),
        Way("compile by hand", Kind.COMPILE, partial(by_hand, options)),
    ]
    name = f"{model.name} B{model.batch} H{model.heads}/{model.kv_heads} T{model.tokens} d{model.size}{what}"
    return Problem(
        "attention",
        name,
        _make(model, options),
        tuple(ways),
        flop=flop(model, options.causal),
        random=options.dropout_p > 0,
    )


def problems(model: Model) -> list[Problem]:
    found = [_problem(model, "", Options(), ("SDPA flash", "SDPA efficient", "SDPA cuDNN"))]
    if model.name != GPT_2.name:
        return [*found, _problem(model, " soft-cap 50", Options(softcap=50.0), ())]
    return [
        *found,
        _problem(model, " dropout 0.1", Options(dropout_p=0.1), ("SDPA flash", "SDPA efficient", "SDPA cuDNN")),
        _problem(model, " learnt bias", Options(biased=True), ("SDPA efficient",)),
        # Where "recipe by Triton" is the faster in these two, EFFICIENT_BEFORE_TRITON of the recipe is to stay False.
        _problem(model, " full, learnt bias", Options(biased=True, causal=False), ("SDPA efficient",)),
        _problem(model, " full, bias", Options(biased=True, learnt=False, causal=False), ("SDPA efficient",)),
    ]
