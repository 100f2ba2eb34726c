"""What ``crossover.py`` measures: torch's composition and a recipe's own code for the CPU, small to large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradscope import recipes

Step = Callable[[], object]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One recipe at one size."""

    recipe: str  # the function
    sizes: str  # "B8 H6 T256 d64"
    make: Callable[[], tuple[Step, Step, Step]]  # torch's, ours, and what "auto" takes; forward and backward once
    explain: Callable[[], Any]  # what "auto" takes, and why
    own: tuple[str, ...] = ("cpu", "held", "rows")  # backends that are ours


def _step(function: Callable[..., Any], leaves: tuple[Tensor, ...], upstream: Any) -> Step:
    return lambda: torch.autograd.grad(function(*leaves), leaves, upstream)


def _cell(
    recipe: str,
    sizes: str,
    given: Callable[[], tuple[tuple[Tensor, ...], Any]],
    torchs: Callable[..., Any],
    ours: Callable[..., Any],
    explain: Callable[..., Any],
    own: str = "cpu",
) -> Cell:
    """A cell of functions of leaves; ``ours`` and ``explain`` take a backend beside them.

    Args:
        given: makes the leaves and the upstream gradients.
    """

    def make() -> tuple[Step, Step, Step]:
        torch.manual_seed(0)
        leaves, upstream = given()
        return (
            _step(torchs, leaves, upstream),
            _step(lambda *leaves: ours(*leaves, backend=own), leaves, upstream),
            _step(lambda *leaves: ours(*leaves, backend="auto"), leaves, upstream),
        )

    return Cell(recipe, sizes, make, lambda: explain(*given()[0]))


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _attention(batch: int, heads: int, tokens: int, size: int) -> Cell:
    shape = (batch, heads, tokens, size)

    def ours(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        return recipes.attention(q, k, v, None, 0.1, True, backend=backend)

    return _cell(
        "attention",
        f"B{batch} H{heads} T{tokens} d{size} dropout",
        lambda: (tuple(_leaf(*shape) for _ in range(3)), torch.randn(shape)),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, None, 0.1, True),
        ours,
        lambda q, k, v: recipes.attention.explain(q, k, v, None, 0.1, True),
    )


def _biased(batch: int, heads: int, tokens: int, size: int, dropout: float = 0.0, per_head: bool = False) -> Cell:
    """With a bias that gets a gradient, of all heads or of each."""
    shape, of_bias = (batch, heads, tokens, size), (heads, tokens, tokens) if per_head else (tokens, tokens)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, backend: str) -> Tensor:
        return recipes.attention(q, k, v, bias, dropout, backend=backend)

    return _cell(
        "attention",
        f"B{batch} H{heads} T{tokens} d{size} learnt bias{' of each head' if per_head else ''}"
        + (" dropout" if dropout else ""),
        lambda: ((*(_leaf(*shape) for _ in range(3)), _leaf(*of_bias)), torch.randn(shape)),
        lambda q, k, v, bias: functional.scaled_dot_product_attention(q, k, v, bias, dropout),
        ours,
        lambda q, k, v, bias: recipes.attention.explain(q, k, v, bias, dropout),
    )


def _hidden(batch: int, heads: int, tokens: int, size: int, how: str) -> Cell:
    """With what torch's attention takes as a mask, or not at all: ours is told of it."""
    shape, wide = (batch, heads, tokens, size), 2 * size if how == "wide values" else size
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)
    seen = (column <= row) & (row - column <= 64) if how == "window" else column < tokens - tokens // 8
    options: dict[str, Any] = {
        "mask and dropout": {"attn_mask": seen, "dropout_p": 0.1},
        "mask and causal": {"attn_mask": seen, "is_causal": True},
        "window": {"window": (64, 0)},
        "soft-cap": {"softcap": 30.0, "is_causal": True},
        "ALiBi": {"alibi_slopes": torch.tensor([2.0 ** -(8 * (h + 1) / heads) for h in range(heads)])},
        "wide values": {"is_causal": True},
    }[how]
    bias = -options["alibi_slopes"][:, None, None] * (row - column).abs() if how == "ALiBi" else None

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if how == "soft-cap":
            scores = 30 * torch.tanh(q @ k.transpose(-2, -1) * (size**-0.5 / 30))
            return scores.masked_fill(column > row, -torch.inf).softmax(-1) @ v
        if how == "wide values":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = seen & (column <= row) if how == "mask and causal" else seen if bias is None else bias
        return functional.scaled_dot_product_attention(q, k, v, mask, options.get("dropout_p", 0.0))

    return _cell(
        "attention",
        f"B{batch} H{heads} T{tokens} d{size} {how}",
        lambda: ((_leaf(*shape), _leaf(*shape), _leaf(*shape[:3], wide)), torch.randn(*shape[:3], wide)),
        torchs,
        lambda q, k, v, backend: recipes.attention(q, k, v, **options, backend=backend),
        lambda q, k, v: recipes.attention.explain(q, k, v, **options),
    )


def _packed(batch: int, heads: int, tokens: int, size: int, dropout: float = 0.0, own: str = "cpu") -> Cell:
    width = heads * size

    def torchs(qkv: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (heads, size)).transpose(1, 2) for part in qkv.split(width, dim=2))
        y = functional.scaled_dot_product_attention(*parts, None, dropout, True)
        return y.transpose(1, 2).contiguous().flatten(2)

    return _cell(
        "packed_attention",
        f"B{batch} H{heads} T{tokens} d{size}" + (" dropout" if dropout else ""),
        lambda: ((_leaf(batch, tokens, 3 * width),), torch.randn(batch, tokens, width)),
        torchs,
        lambda qkv, backend: recipes.packed_attention(qkv, heads, None, dropout, True, backend=backend),
        lambda qkv: recipes.packed_attention.explain(qkv, heads, None, dropout, True),
        own,
    )


def _cross_entropy(rows: int, classes: int) -> Cell:
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    return _cell(
        "cross_entropy",
        f"N{rows} V{classes}",
        lambda: ((_leaf(rows, classes),), None),
        lambda x: functional.cross_entropy(x, target),
        lambda x, backend: recipes.cross_entropy(x, target, backend=backend),
        lambda x: recipes.cross_entropy.explain(x, target),
    )


def _head(rows: int, features: int, classes: int) -> Cell:
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    return _cell(
        "linear_cross_entropy",
        f"N{rows} C{features} V{classes}",
        lambda: ((_leaf(rows, features), torch.randn(classes, features).mul_(0.02).requires_grad_()), None),
        lambda x, weight: functional.cross_entropy(functional.linear(x, weight), target),
        lambda x, weight, backend: recipes.linear_cross_entropy(x, weight, target, backend=backend),
        lambda x, weight: recipes.linear_cross_entropy.explain(x, weight, target),
    )


def _norm(recipe: str, rows: int, features: int) -> Cell:
    function, plain = getattr(recipes, recipe), getattr(functional, recipe)
    parameters = 2 if recipe == "layer_norm" else 1

    def given() -> tuple[tuple[Tensor, ...], Tensor]:
        return (_leaf(rows, features), *(_leaf(features) for _ in range(parameters))), torch.randn(rows, features)

    return _cell(
        recipe,
        f"N{rows} C{features}",
        given,
        lambda x, *each: plain(x, (features,), *each),
        lambda x, *each, backend: function(x, (features,), *each, backend=backend),
        lambda x, *each: function.explain(x, (features,), *each),
    )


def _added(recipe: str, rows: int, features: int, p: float) -> Cell:
    function, plain = getattr(recipes, recipe), getattr(functional, recipe.removeprefix("add_"))
    parameters = 2 if recipe == "add_layer_norm" else 1

    def given() -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        leaves = (_leaf(rows, features), _leaf(rows, features), *(_leaf(features) for _ in range(parameters)))
        return leaves, (torch.randn(rows, features), torch.randn(rows, features))

    def torchs(x: Tensor, residual: Tensor, *each: Tensor) -> tuple[Tensor, Tensor]:
        stream = residual + (functional.dropout(x, p) if p else x)
        return plain(stream, (features,), *each), stream

    return _cell(
        recipe,
        f"N{rows} C{features}" + (" dropout" if p else ""),
        given,
        torchs,
        lambda *each, backend: function(*each, dropout_p=p, backend=backend),
        lambda *each: function.explain(*each, dropout_p=p),
    )


def _dropout(rows: int, features: int) -> Cell:
    return _cell(
        "dropout",
        f"N{rows} C{features}",
        lambda: ((_leaf(rows, features),), torch.randn(rows, features)),
        lambda x: functional.dropout(x, 0.1),
        lambda x, backend: recipes.dropout(x, 0.1, backend=backend),
        lambda x: recipes.dropout.explain(x, 0.1),
    )


def _swiglu(rows: int, features: int, packed: bool) -> Cell:
    def given() -> tuple[tuple[Tensor, ...], Tensor]:
        leaves = (_leaf(rows, 2 * features),) if packed else (_leaf(rows, features), _leaf(rows, features))
        return leaves, torch.randn(rows, features)

    def torchs(*each: Tensor) -> Tensor:
        gate, up = each[0].chunk(2, dim=-1) if packed else each
        return functional.silu(gate) * up

    return _cell(
        "swiglu",
        f"N{rows} C{features}" + (" packed" if packed else ""),
        given,
        torchs,
        recipes.swiglu,
        recipes.swiglu.explain,
    )


def _geglu(rows: int, features: int, approximate: str) -> Cell:
    def ours(gate: Tensor, up: Tensor, backend: str) -> Tensor:
        return recipes.geglu(gate, up, approximate, backend=backend)

    return _cell(
        "geglu",
        f"N{rows} C{features}" + (" tanh" if approximate == "tanh" else ""),
        lambda: ((_leaf(rows, features), _leaf(rows, features)), torch.randn(rows, features)),
        lambda gate, up: functional.gelu(gate, approximate=approximate) * up,
        ours,
        lambda gate, up: recipes.geglu.explain(gate, up, approximate),
    )


def _bias_gelu(rows: int, features: int) -> Cell:
    return _cell(
        "bias_gelu",
        f"N{rows} C{features}",
        lambda: ((_leaf(rows, features), _leaf(features)), torch.randn(rows, features)),
        lambda x, bias: functional.gelu(x + bias),
        recipes.bias_gelu,
        recipes.bias_gelu.explain,
    )


def _rope(batch: int, heads: int, tokens: int, size: int, interleaved: bool) -> Cell:
    """Beside ``rotate_half`` with its doubled tables, or the product of complex numbers, as models write them."""
    rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(tokens)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = (torch.cat((table, table), dim=-1) for table in (cos, sin))
    factor = torch.complex(cos, sin)

    def turned(x: Tensor) -> Tensor:
        if interleaved:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * factor).flatten(-2)
        half = size // 2
        return x * wide_cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * wide_sin

    def given() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        packed = torch.randn(batch, tokens, 3, heads, size)  # as a projection gives them
        upstream = tuple(torch.randn(batch, heads, tokens, size) for _ in range(2))
        return tuple(packed[:, :, i].transpose(1, 2).requires_grad_() for i in range(2)), upstream

    return _cell(
        "rope",
        f"B{batch} H{heads} T{tokens} d{size} {'interleaved' if interleaved else 'halves'}",
        given,
        lambda q, k: (turned(q), turned(k)),
        lambda q, k, backend: recipes.rope((q, k), cos, sin, interleaved=interleaved, backend=backend),
        lambda q, k: recipes.rope.explain((q, k), cos, sin, interleaved=interleaved),
    )


TINY = [
    _attention(1, 2, 8, 4),
    _packed(1, 2, 8, 4),
    _packed(16, 4, 16, 4, own="held"),
    _cross_entropy(4, 8),
    _head(4, 8, 16),
    _norm("rms_norm", 4, 8),
    _norm("layer_norm", 1024, 8),  # below, it is torch's kernel in one call
    _added("add_layer_norm", 4, 8, 0.1),
    _added("add_rms_norm", 4, 8, 0.0),
    _dropout(4, 8),
    _swiglu(4, 8, True),
    _geglu(4, 8, "none"),
    _bias_gelu(4, 8),
    _rope(1, 2, 4, 8, False),
]
_HEADS = [
    (1, 2, 16, 16), (32, 4, 16, 16), (1, 4, 64, 32), (4, 4, 64, 32), (2, 4, 128, 64), (12, 6, 64, 64), (1, 4, 256, 64),
    (4, 4, 256, 64), (2, 12, 256, 64), (8, 6, 256, 64), (2, 6, 512, 64), (4, 12, 512, 64), (1, 12, 1024, 64),
    (1, 2, 1024, 64),
]  # fmt: skip
_OPTIONS = [(32, 4, 16, 16), (4, 4, 64, 32), (4, 4, 256, 64), (2, 8, 512, 32), (1, 12, 1024, 64)]
_PACKED = [(1, 4, 64, 32), (8, 6, 256, 64), (2, 12, 512, 64), (8, 12, 512, 64), (1, 12, 1024, 64), (2, 12, 1024, 64)]
_HELD = [(1, 2, 16, 16), (16, 4, 16, 16), (64, 4, 13, 16), (32, 4, 32, 16), (8, 4, 64, 32), (8, 8, 64, 32)]
_LOGITS = [
    (32, 65), (256, 65), (4096, 65), (16384, 65), (65536, 65), (64, 1000), (512, 1000), (4096, 1000), (256, 8000),
    (1024, 8000), (2048, 8000), (16, 50257), (64, 50257), (160, 50257), (512, 50257),
]  # fmt: skip
_LINEAR = [
    (32, 64, 65), (256, 128, 65), (4096, 128, 65), (256, 128, 1000), (2048, 256, 1000), (4096, 256, 1000),
    (256, 256, 8000), (2048, 256, 8000), (64, 768, 50257), (512, 768, 50257), (1024, 256, 50257),
]  # fmt: skip
_GATES = [(16, 64), (256, 256), (1024, 512), (1024, 2048), (2048, 2048)]
_ROWS = [(16, 64), (128, 64), (512, 128), (1024, 256), (2048, 256), (4096, 384), (4096, 768)]
CELLS = [
    *(_attention(*each) for each in _HEADS),
    *(_biased(*each, dropout, per_head) for dropout in (0.0, 0.1) for per_head in (False, True) for each in _OPTIONS),
    *(
        _hidden(*each, how)
        for how in ("mask and dropout", "mask and causal", "window", "soft-cap", "ALiBi", "wide values")
        for each in _OPTIONS
    ),
    *(_packed(*each) for each in _PACKED),
    *(_packed(*each, own="held") for each in _HELD),
    *(_packed(*each, 0.1) for each in [(1, 4, 64, 32), (8, 6, 256, 64), (1, 12, 1024, 64)]),
    *(_cross_entropy(*each) for each in _LOGITS),
    *(_head(*each) for each in _LINEAR),
    *(_norm("rms_norm", *each) for each in _ROWS),
    *(_norm("layer_norm", *each) for each in _ROWS[3:]),  # below, it is torch's kernel in one call
    *(_added("add_layer_norm", *each, p) for p in (0.0, 0.1) for each in [*_ROWS, (8192, 768)]),
    *(_added("add_rms_norm", *each, p) for p in (0.0, 0.1) for each in _ROWS),
    *(_dropout(*each) for each in [*_ROWS, (8192, 768), (8192, 3072)]),
    *(_swiglu(*each, packed) for packed in (False, True) for each in _GATES),
    *(_geglu(*each, approximate) for approximate in ("none", "tanh") for each in _GATES),
    *(_bias_gelu(*each) for each in [(16, 64), (256, 256), (1024, 1024), (1024, 2048), (2048, 3072)]),
    *(
        _rope(*each, interleaved)
        for interleaved in (False, True)
        for each in [(1, 4, 16, 16), (1, 12, 16, 64), (1, 12, 128, 64), (2, 12, 256, 64), (2, 12, 1024, 64)]
    ),
]  # fmt: skip
