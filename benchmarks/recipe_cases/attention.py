"""Attention by hand and by SDPA beside the recipe; and whole steps of the two models of the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradscope.recipes.attention import attention
from recipe_cases.case import RecipeCase, Step

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # query, key, value, dropout


def by_hand(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """Attention as nanoGPT and makemore write it; the mask is made once a length, as their buffer is."""
    scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.shape[-1]))
    scores = scores.masked_fill(_mask(query.shape[-2], query.device) == 0, float("-inf"))
    weights = F.dropout(F.softmax(scores, dim=-1), dropout_p)
    return weights @ value


def by_sdpa(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)


def by_recipe(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    return attention(query, key, value, dropout_p=dropout_p, is_causal=True)


_masks: dict[tuple[int, torch.device], Tensor] = {}


def _mask(length: int, device: torch.device) -> Tensor:
    if (length, device) not in _masks:
        _masks[length, device] = torch.ones(length, length, device=device).tril()
    return _masks[length, device]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def alone(
    attend: Attend, batch: int, heads: int, length: int, size: int, dropout_p: float
) -> Callable[[], tuple[Step, Step]]:
    """Causal attention beside the recipe's, forward and backward."""

    def make() -> tuple[Step, Step]:
        shape = (batch, heads, length, size)
        tensors = [torch.randn(shape, device=_device(), requires_grad=True) for _ in range(3)]
        upstream = torch.randn(shape, device=_device())

        def step_of(chosen: Attend) -> Step:
            def step() -> None:
                torch.autograd.grad(chosen(*tensors, dropout_p), tensors, upstream)

            return step

        return step_of(attend), step_of(by_recipe)

    return make


class Block(nn.Module):
    """A pre-norm block of GPT-2, as both models have it, with attention as given."""

    def __init__(self, width: int, heads: int, dropout_p: float, attend: Attend) -> None:
        super().__init__()
        self.heads, self.dropout_p, self.attend = heads, dropout_p, attend
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        )
        seen = self.attend(query, key, value, self.dropout_p).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.c_proj(seen), self.dropout_p)
        return x + F.dropout(self.mlp(self.ln_2(x)), self.dropout_p)


def of_a_model(
    layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int, dropout_p: float
) -> Callable[[], tuple[Step, Step]]:
    """A training step of a decoder, with attention by hand and by the recipe."""

    def make() -> tuple[Step, Step]:
        tokens = torch.randint(vocabulary, (batch, length + 1), device=_device())

        def step_of(attend: Attend) -> Step:
            torch.manual_seed(0)
            embedding, position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            body = nn.Sequential(*(Block(width, heads, dropout_p, attend) for _ in range(layers)))
            head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
            model = nn.ModuleList([embedding, position, body, head]).to(_device())

            def step() -> None:
                x = embedding(tokens[:, :-1]) + position.weight
                loss = F.cross_entropy(head(body(x)).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                model.zero_grad()

            return step

        return step_of(by_hand), step_of(by_recipe)

    return make


CASES = [
    RecipeCase("attention", "B1 H12 T1024 d64 causal", "by hand", alone(by_hand, 1, 12, 1024, 64, 0.0), faster=3.0),
    RecipeCase("attention", "B1 H12 T4096 d64 causal", "by hand", alone(by_hand, 1, 12, 4096, 64, 0.0), leaner=10.0),
    RecipeCase(
        "attention", "B1 H12 T1024 d64 causal, dropout 0.1", "by hand", alone(by_hand, 1, 12, 1024, 64, 0.1), faster=2.0
    ),
    RecipeCase(
        "attention", "B1 H12 T1024 d64 causal, dropout 0.1", "SDPA", alone(by_sdpa, 1, 12, 1024, 64, 0.1), faster=2.0
    ),
    RecipeCase("attention", "B1 H12 T1024 d64 causal", "SDPA", alone(by_sdpa, 1, 12, 1024, 64, 0.0)),
    RecipeCase(
        "attention",
        "a step of makemore's transformer (4 layers, 64 wide, T16, B32)",
        "attention by hand",
        of_a_model(4, 64, 4, 27, 32, 16, 0.0),
        faster=1.16,
    ),
    RecipeCase(
        "attention",
        "a step of nanoGPT's GPT-2 (768 wide, 12 heads, T1024, B1), 6 of its 12 layers",
        "attention by hand",
        of_a_model(6, 768, 12, 50304, 1, 1024, 0.0),
        faster=1.156,
    ),
    RecipeCase(
        "attention",
        "a step of nanoGPT's character model (6 layers, 384 wide, 6 heads, T256, B12, dropout 0.2)",
        "attention by hand",
        of_a_model(6, 384, 6, 65, 12, 256, 0.2),
    ),
]
