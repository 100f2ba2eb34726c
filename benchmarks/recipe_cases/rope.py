"""Rotary position embedding of queries and keys beside the ways in which models write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradscope.recipes.rope import rope

from .case import Case, Step

BATCH, HEADS, TOKENS, SIZE = 2, 12, 1024, 64


def _tables() -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(TOKENS)[:, None] * rates
    return angles.cos(), angles.sin()


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _by_hand(interleaved: bool) -> Callable[[Tensor], Tensor]:
    if interleaved:
        cos, sin = (table.repeat_interleave(2, dim=-1) for table in _tables())
        return lambda x: x * cos + _rotate_every_two(x) * sin
    cos, sin = (torch.cat((table, table), dim=-1) for table in _tables())
    return lambda x: x * cos + _rotate_half(x) * sin


def _complex(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(*_tables())
    return torch.view_as_real(turned).flatten(-2)


def _make(baseline: Callable[[Tensor], Tensor], interleaved: bool) -> Callable[[], tuple[Step, Step]]:
    def make() -> tuple[Step, Step]:
        packed = torch.randn(BATCH, TOKENS, 3, HEADS, SIZE)  # as a projection gives them
        q, k = (packed[:, :, i].transpose(1, 2).requires_grad_() for i in range(2))
        upstream = [torch.randn(BATCH, HEADS, TOKENS, SIZE) for _ in range(2)]
        cos, sin = _tables()

        def by_hand() -> None:
            torch.autograd.grad((baseline(q), baseline(k)), (q, k), upstream)

        def recipe() -> None:
            torch.autograd.grad(rope((q, k), cos, sin, interleaved=interleaved), (q, k), upstream)

        return by_hand, recipe

    return make


CASES = [
    Case("rope", "B2 H12 T1024 d64, halves", "rotate_half with cat", _make(_by_hand(False), False)),
    Case("rope", "B2 H12 T1024 d64, interleaved", "rotate_every_two with stack", _make(_by_hand(True), True)),
    Case("rope", "B2 H12 T1024 d64, interleaved", "complex product", _make(_complex, True)),
]
