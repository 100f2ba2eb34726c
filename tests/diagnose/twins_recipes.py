"""Models where a recipe belongs, and the same without the need."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope import recipes
from tests.diagnose.run_case import Twin


class Attention(nn.Module):
    """Of projections of their own; ``forward`` of those below gives them to ``attend``."""

    def __init__(self, width: int = 64, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))


class Causal(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class ByHand(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        weights = F.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        y = weights @ v
        return y.transpose(1, 2).flatten(2)


class Masked(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


class Window(Attention):
    """A mask that is not causal only."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-16)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


class LearntBias(Attention):
    """A mask that gets a gradient."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return y.transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """The heads of one projection."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q = q.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).contiguous().view(batch, tokens, width)


class PackedByRecipe(Packed):
    def forward(self, x: Tensor) -> Tensor:
        return recipes.packed_attention(self.c_attn(x), self.heads, is_causal=True)


class Language(nn.Module):
    """Embedding, a layer, and a head over the vocabulary."""

    def __init__(self, words: int, width: int = 64, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class LanguageByRecipe(Language):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(tokens).flatten(0, 1)
        return recipes.linear_cross_entropy(hidden, self.head.weight, tokens.flatten())


class LanguageWithAccuracy(Language):
    """Somebody else reads the logits too."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.hidden(tokens)).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens.flatten())
        return loss, logits.argmax(1)


class Unit(nn.Module):
    """Something of its own after a layer."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layer = nn.Linear(16, width)
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))


class RmsByHand(Unit):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LayerNormByHand(Unit):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class RmsByTorch(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(self.layer(x), self.weight.shape, self.weight, 1e-6)


class LayerNormByTorch(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(self.layer(x), self.weight.shape, self.weight, self.bias)


class GeluByHand(Unit):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GeluByTorch(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x), approximate="tanh")


class BiasGelu(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.layer.weight) + self.bias)


class Gated(Unit):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.layer(x).chunk(2, dim=-1)
        return F.silu(gate) * up


class GatedByRecipe(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return recipes.swiglu(self.layer(x))


class Rotary(nn.Module):
    """Turns the heads of one projection."""

    def __init__(self, heads: int = 8, size: int = 64, tokens: int = 512) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.layer = nn.Linear(16, heads * size)
        angles = torch.arange(tokens)[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).unflatten(2, (self.heads, self.size)).transpose(1, 2)
        turned = torch.cat((-q[..., self.size // 2 :], q[..., : self.size // 2]), dim=-1)
        return q * self.cos + turned * self.sin


class RotaryByRecipe(Rotary):
    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).unflatten(2, (self.heads, self.size)).transpose(1, 2)
        return recipes.rope(q, self.cos, self.sin)


def _run(model: nn.Module, *shape: int) -> dict[str, Any]:
    return {"model": model, "batch": torch.randn(*shape)}


def _words(model: Language) -> dict[str, Any]:
    return {"model": model, "batch": torch.randint(model.embedding.num_embeddings, (8, 128))}


Make = Callable[[], nn.Module]


def _pair(name: str, rule: str, bad: Make, good: Make, *shape: int) -> Twin:
    return Twin(name, rule, lambda: _run(bad(), *shape), lambda: _run(good(), *shape))


def _languages(name: str, rule: str, bad: Callable[[], Language], good: Callable[[], Language]) -> Twin:
    return Twin(name, rule, lambda: _words(bad()), lambda: _words(good()))


def _two(make: Make) -> Make:
    return lambda: nn.Sequential(make(), make())


_BY_HAND = "attention-by-hand"
_MASK = "attention-explicit-mask"
_MATH = "attention-math-kernel"
_LOGITS = "logits-materialised"
_TIED = "tied-embedding"
_NORM = "norm-by-hand"
_UNIT = "activation-by-hand"

TWINS: list[Twin] = [
    _pair("attention by hand", _BY_HAND, ByHand, Causal, 2, 512, 64),
    _pair("two layers of attention by hand", _BY_HAND, _two(ByHand), _two(Causal), 1, 512, 64),
    _pair("causal mask as a tensor", _MASK, Masked, Causal, 1, 1024, 64),
    _pair("causal mask beside a window", _MASK, Masked, Window, 2, 768, 64),
    _pair("dropout in torch's attention on a CPU", _MATH, lambda: Causal(dropout=0.1), Causal, 2, 512, 64),
    _pair("learnt bias in torch's attention", _MATH, lambda: LearntBias(512), Window, 8, 512, 64),
    Twin(
        "dropout of many scores and of few",
        _MATH,
        lambda: _run(Causal(dropout=0.2), 2, 512, 64),
        lambda: _run(Causal(dropout=0.2), 2, 32, 64),
    ),
    _languages("logits of a large vocabulary", _LOGITS, lambda: Language(20_000), lambda: Language(500)),
    _languages(
        "logits of a head that could be fused", _LOGITS, lambda: Language(30_000), lambda: LanguageByRecipe(30_000)
    ),
    _languages(
        "logits that are read too", _LOGITS, lambda: LanguageWithAccuracy(20_000), lambda: LanguageWithAccuracy(200)
    ),
    _pair("RMS norm by hand", _NORM, RmsByHand, LayerNormByTorch, 4096, 16),
    _pair("torch's RMS norm on a CPU", _NORM, RmsByTorch, LayerNormByTorch, 4096, 16),
    _pair("layer norm by hand", _NORM, LayerNormByHand, LayerNormByTorch, 4096, 16),
    _pair("GELU by hand", _UNIT, GeluByHand, GeluByTorch, 4096, 16),
    _pair("bias and GELU", _UNIT, BiasGelu, GeluByTorch, 4096, 16),
    _pair("SwiGLU of two halves", _UNIT, lambda: Gated(2048), lambda: GatedByRecipe(2048), 4096, 16),
    _pair("rotary positions by hand", "rope-by-hand", Rotary, RotaryByRecipe, 8, 512, 16),
    _languages("tied embedding", _TIED, lambda: Language(30_000, tied=True), lambda: LanguageByRecipe(30_000)),
    _languages(
        "tied embedding of many words", _TIED, lambda: Language(25_024, tied=True), lambda: Language(300, tied=True)
    ),
    _pair("heads of one projection, copied", "heads-copied", Packed, PackedByRecipe, 4, 512, 256),
]
