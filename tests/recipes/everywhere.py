"""Every public recipe on small inputs, with the torch code that it stands for; and the places where torch code runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from gradscope import recipes


@dataclass(frozen=True)
class Case:
    """A recipe on small inputs.

    ``run`` and ``plain`` take tensors that may require a gradient, of ``shapes``, then constants.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    constants: tuple[Tensor, ...] = ()
    ragged: tuple[int, ...] | None = None  # which dimension of each of the shapes may be ragged; -1 for none
    random: bool = False  # two runs from one seed may drop other elements

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        drawn = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in self.shapes)
        return *drawn, *(each.to(dtype) if each.is_floating_point() else each for each in self.constants)


HEADS = (2, 4, 6, 4)
LOGITS = (6, 5)
TARGET = torch.tensor([0, 4, -100, 2, 1, 3])
IDS = torch.tensor([[0, 3, 1], [4, 3, 3]])
ANGLES = torch.linspace(0, 1, 12, dtype=torch.float64).view(6, 2)
TABLES = (ANGLES.cos(), ANGLES.sin())
MASK = torch.ones(6, 6, dtype=torch.bool).tril(1)
CLASSES = torch.tensor([0.5, 1.0, 2.0, 1.5, 1.0], dtype=torch.float64)


def sdpa(*args: Any, **options: Any) -> Tensor:
    if isinstance(args[0], DTensor) and options.get("is_causal"):  # torch's own mixes its mask with other tensors
        q, k, v = args
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v
    return functional.scaled_dot_product_attention(*args, **options)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = 5.0 * (scores / 5.0).tanh()
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def packed(qkv: Tensor, **options: Any) -> Tensor:
    q, k, v = (heads_of(part, 2) for part in qkv.chunk(3, -1))
    return sdpa(q, k, v, **options).transpose(1, 2).flatten(2)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def rich_loss(logits: Tensor, target: Tensor) -> Tensor:
    logits = 3.0 * (logits / 3.0).tanh()
    counts = target != -100
    normalizer = 0.01 * logits.logsumexp(1).square()
    return functional.cross_entropy(logits, target) + torch.where(counts, normalizer, 0.0).sum() / counts.sum()


def added(x: Tensor, y: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    return functional.layer_norm(x + y, x.shape[-1:], *parameters), x + y


def added_rms(x: Tensor, y: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    return functional.rms_norm(x + y, x.shape[-1:], *parameters), x + y


def by_hand(x: Tensor, weight: Tensor, eps: Tensor, *, centred: bool) -> Tensor:
    """A norm of plain operations, whose eps may be learnt."""
    x = x - x.mean(-1, keepdim=True) if centred else x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps.square()) * weight


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
    return weights @ v, weights


def mask_of(scores: Tensor, mask: Tensor) -> Tensor:
    return recipes.attention(scores, scores, scores, **recipes.attention_mask(mask))


CASES = [
    Case("attention", (HEADS,) * 3, lambda *x: recipes.attention(*x, is_causal=True),
         lambda *x: sdpa(*x, is_causal=True)),
    Case("attention, plain", (HEADS,) * 3, recipes.attention, sdpa, ragged=(2, 2, 2)),
    Case("attention, bias", (*(HEADS,) * 3, (6, 6)), recipes.attention, sdpa),
    Case("attention, softcap", (HEADS,) * 3, lambda *x: recipes.attention(*x, is_causal=True, softcap=5.0), capped),
    Case("attention, dropout", (HEADS,) * 3, lambda *x: recipes.attention(*x, dropout_p=0.5),
         lambda *x: sdpa(*x, dropout_p=0.5), random=True),
    Case("attention_mask", (HEADS,), mask_of, lambda x, mask: sdpa(x, x, x, mask), (MASK,)),
    Case("attention_with_weights", (HEADS,) * 3, lambda *x: recipes.attention_with_weights(*x)[0], sdpa),
    Case("attention_with_weights, read", (HEADS,) * 3, recipes.attention_with_weights, with_weights),
    Case("packed_attention", ((2, 6, 24),), lambda x: recipes.packed_attention(x, 2, is_causal=True),
         lambda x: packed(x, is_causal=True)),
    Case("packed_attention, bias", ((2, 6, 24), (6, 6)), lambda x, bias: recipes.packed_attention(x, 2, bias),
         lambda x, bias: packed(x, attn_mask=bias)),
    Case("packed_attention, held", ((16, 20, 24),), lambda x: recipes.packed_attention(x, 2), packed, ragged=(1,)),
    Case("split", ((4, 6),), lambda x: recipes.split(x, 2, -1), lambda x: torch.split(x, 2, -1)),
    Case("chunk", ((2, 4, 6),), lambda x: recipes.chunk(x, 3, -1), lambda x: torch.chunk(x, 3, -1), ragged=(1,)),
    Case("split_qkv", ((2, 6, 24),), lambda x: recipes.split_qkv(x, 2),
         lambda x: tuple(heads_of(part, 2) for part in x.chunk(3, -1)), ragged=(1,)),
    Case("split_heads", ((2, 6, 8),), lambda x: recipes.split_heads(x, 2), lambda x: heads_of(x, 2), ragged=(1,)),
    Case("merge_heads", (HEADS,), recipes.merge_heads, lambda x: x.transpose(1, 2).flatten(2), ragged=(2,)),
    Case("linear_cross_entropy", ((6, 3), (5, 3)), lambda x, w, t: recipes.linear_cross_entropy(x, w, t),
         lambda x, w, t: functional.cross_entropy(x @ w.t(), t), (TARGET,)),
    Case("linear_cross_entropy, rich", ((6, 3), (5, 3)),
         lambda x, w, t: recipes.linear_cross_entropy(x, w, t, z_loss=0.01, softcap=3.0),
         lambda x, w, t: rich_loss(x @ w.t(), t), (TARGET,)),
    Case("linear_cross_entropy_and_logits", ((6, 3), (5, 3)),
         lambda x, w, t: recipes.linear_cross_entropy_and_logits(x, w, t, reduction="none"),
         lambda x, w, t: (functional.cross_entropy(x @ w.t(), t, reduction="none"), (x @ w.t()).detach()), (TARGET,)),
    Case("lazy_linear", ((6, 3), (5, 3)), lambda x, w, t: functional.cross_entropy(recipes.lazy_linear(w, x), t),
         lambda x, w, t: functional.cross_entropy(functional.linear(x, w), t), (TARGET,)),
    Case("lazy_linear, read", ((2, 6, 3), (5, 3)), lambda x, w: recipes.lazy_linear(w, x) * 1.0, functional.linear,
         ragged=(1, -1)),
    Case("cross_entropy", (LOGITS,), recipes.cross_entropy, functional.cross_entropy, (TARGET,)),
    Case("cross_entropy, weights", (LOGITS,), lambda x, t, w: recipes.cross_entropy(x, t, w, reduction="sum"),
         lambda x, t, w: functional.cross_entropy(x, t, w, reduction="sum"), (TARGET, CLASSES)),
    Case("cross_entropy, rich", (LOGITS,), lambda x, t: recipes.cross_entropy(x, t, z_loss=0.01, softcap=3.0),
         rich_loss, (TARGET,)),
    Case("gelu", ((2, 4, 5),), recipes.gelu, functional.gelu, ragged=(1,)),
    Case("bias_gelu", ((2, 4, 5), (5,)), recipes.bias_gelu, lambda x, b: functional.gelu(x + b), ragged=(1, -1)),
    Case("swiglu", ((2, 4, 6),) * 2, recipes.swiglu, lambda x, y: functional.silu(x) * y, ragged=(1, 1)),
    Case("geglu", ((2, 4, 6),) * 2, recipes.geglu, lambda x, y: functional.gelu(x) * y, ragged=(1, 1)),
    Case("swiglu, packed", ((2, 4, 6),), recipes.swiglu,
         gated, ragged=(1,)),
    Case("rms_norm", ((2, 4, 5), (5,)), lambda x, w: recipes.rms_norm(x, (5,), w),
         lambda x, w: functional.rms_norm(x, (5,), w), ragged=(1, -1)),
    Case("layer_norm", ((2, 600, 5), (5,), (5,)), lambda x, w, b: recipes.layer_norm(x, (5,), w, b, exact=True),
         lambda x, w, b: functional.layer_norm(x, (5,), w, b), ragged=(1, -1, -1)),
    Case("add_rms_norm", ((2, 4, 5), (2, 4, 5), (5,)), recipes.add_rms_norm, added_rms, ragged=(1, 1, -1)),
    Case("add_layer_norm", ((2, 4, 5), (2, 4, 5), (5,), (5,)), recipes.add_layer_norm, added, ragged=(1, 1, -1, -1)),
    Case("rms_norm, learnt eps", ((2, 4, 5), (5,), (5,)), lambda x, w, e: recipes.rms_norm(x, (5,), w, e.square()),
         lambda *x: by_hand(*x, centred=False)),
    Case("layer_norm, learnt eps", ((2, 4, 5), (5,), ()), lambda x, w, e: recipes.layer_norm(x, (5,), w, eps=e**2),
         lambda *x: by_hand(*x, centred=True)),
    Case("add_rms_norm, learnt eps", ((2, 4, 5), (2, 4, 5), (5,), ()),
         lambda x, y, w, e: recipes.add_rms_norm(x, y, w, e.square()),
         lambda x, y, *other: (by_hand(x + y, *other, centred=False), x + y)),
    Case("add_layer_norm, learnt eps", ((2, 4, 5), (2, 4, 5), (5,), ()),
         lambda x, y, w, e: recipes.add_layer_norm(x, y, w, eps=e.square()),
         lambda x, y, *other: (by_hand(x + y, *other, centred=True), x + y)),
    Case("dropout", ((4, 50),), recipes.dropout, functional.dropout, random=True),
    Case("rope", (HEADS,), recipes.rope, halves, TABLES),
    Case("rope, interleaved", (HEADS,), lambda *x: recipes.rope(*x, interleaved=True), pairs, TABLES),
    Case("rope, both", (HEADS, (2, 2, 6, 4)), lambda q, k, *t: recipes.rope((q, k), *t),
         lambda q, k, *t: (halves(q, *t), halves(k, *t)), TABLES),
    Case("embedding", ((5, 3),), lambda w, ids: recipes.embedding(ids, w),
         lambda w, ids: functional.embedding(ids, w), (IDS,)),
]  # fmt: skip


def flat(found: Any) -> tuple[Tensor, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


@dataclass(frozen=True)
class Form:
    """A recipe's module, and what it stands for as a function of its parameters and the same inputs."""

    make: Callable[[], nn.Module]
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    constants: tuple[Tensor, ...] = ()

    @property
    def name(self) -> str:
        return type(self.make()).__name__

    def module(self) -> nn.Module:
        torch.manual_seed(4)
        made = self.make()
        for parameter in made.parameters():
            nn.init.normal_(parameter)
        return made.double()

    def inputs(self) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return *(torch.randn(shape, dtype=torch.float64) for shape in self.shapes), *self.constants


def head_loss(p: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, *p.values()), target)


def self_attention(p: dict[str, Tensor], x: Tensor) -> Tensor:
    found = packed(functional.linear(x, p["c_attn.weight"], p["c_attn.bias"]), is_causal=True)
    return functional.linear(found, p["c_proj.weight"], p["c_proj.bias"])


ROTARY = recipes.RotaryEmbedding(4, 6).double()
FORMS = [
    Form(lambda: recipes.Attention(is_causal=True), lambda p, *x: sdpa(*x, is_causal=True), (HEADS,) * 3),
    Form(lambda: recipes.PackedSelfAttention(nn.Linear(8, 24), nn.Linear(8, 8), 2), self_attention, ((2, 6, 8),)),
    Form(recipes.CrossEntropyLoss, lambda p, *x: functional.cross_entropy(*x), (LOGITS,), (TARGET,)),
    Form(lambda: recipes.LinearCrossEntropyLoss(3, 5), head_loss, ((6, 3),), (TARGET,)),
    Form(lambda: recipes.LinearCrossEntropyHead(3, 5), head_loss, ((6, 3),), (TARGET,)),
    Form(recipes.GELU, lambda p, x: functional.gelu(x), ((4, 5),)),
    Form(lambda: recipes.BiasGELU(5), lambda p, x: functional.gelu(x + p["bias"]), ((4, 5),)),
    Form(recipes.GeGLU, lambda p, x, y: functional.gelu(x) * y, ((4, 5), (4, 5))),
    Form(recipes.SwiGLU, lambda p, x, y: functional.silu(x) * y, ((4, 5), (4, 5))),
    Form(lambda: recipes.AddRMSNorm(5), lambda p, x, y: added_rms(x, y, *p.values()), ((4, 5), (4, 5))),
    Form(lambda: recipes.AddLayerNorm(5), lambda p, x, y: added(x, y, *p.values()), ((4, 5), (4, 5))),
    Form(lambda: recipes.Dropout().eval(), lambda p, x: x, ((4, 5),)),
    Form(lambda: recipes.RotaryEmbedding(4, 6), lambda p, q, k: (halves(q, ROTARY.cos, ROTARY.sin),
         halves(k, ROTARY.cos, ROTARY.sin)), (HEADS, HEADS)),
    Form(lambda: recipes.Embedding(5, 3), lambda p, ids: functional.embedding(ids, *p.values()), (), (IDS,)),
]  # fmt: skip
