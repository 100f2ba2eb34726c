"""Rotary position embedding of queries and keys beside the ways in which models write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradscope.recipes.rope import rope

from .case import RecipeCase, Step

Shape = tuple[int, int, int, int]  # batch, heads, tokens, size
GPT2: Shape = (2, 12, 1024, 64)
GPT2_SHORT: Shape = (8, 12, 256, 64)
LLAMA: Shape = (1, 32, 512, 128)
TINY: Shape = (1, 12, 16, 64)


def _tables(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(tokens)[:, None] * rates
    return angles.cos(), angles.sin()


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


Rotation = Callable[[Tensor], Tensor]


def _halves(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotation:
    """Hugging Face's Llama: tables in the model's dtype."""
    cos, sin = (torch.cat((table, table), dim=-1).to(dtype) for table in (cos, sin))
    return lambda x: x * cos + _rotate_half(x) * sin


def _every_two(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotation:
    """Hugging Face's GPT-J."""
    cos, sin = (table.repeat_interleave(2, dim=-1).to(dtype) for table in (cos, sin))
    return lambda x: x * cos + _rotate_every_two(x) * sin


def _complex(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotation:
    """Llama's original code: freqs_cis are made once."""
    factor = torch.complex(cos, sin)

    def rotation(x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * factor
        return torch.view_as_real(turned).flatten(-2).to(dtype)

    return rotation


def _case(
    shape: Shape,
    baseline: str,
    write: Callable[[Tensor, Tensor, torch.dtype], Rotation],
    interleaved: bool,
    dtype: torch.dtype = torch.float32,
) -> RecipeCase:
    batch, heads, tokens, size = shape

    def make() -> tuple[Step, Step]:
        packed = torch.randn(batch, tokens, 3, heads, size).to(dtype)  # as a projection gives them
        q, k = (packed[:, :, i].transpose(1, 2).requires_grad_() for i in range(2))
        upstream = [torch.randn(batch, heads, tokens, size).to(dtype) for _ in range(2)]
        cos, sin = _tables(tokens, size)
        rotation = write(cos, sin, dtype)

        def by_hand() -> None:
            torch.autograd.grad((rotation(q), rotation(k)), (q, k), upstream)

        def recipe() -> None:
            torch.autograd.grad(rope((q, k), cos, sin, interleaved=interleaved), (q, k), upstream)

        return by_hand, recipe

    layout = "interleaved" if interleaved else "halves"
    kind = str(dtype).removeprefix("torch.")
    return RecipeCase("rope", f"B{batch} H{heads} T{tokens} d{size} {kind}, {layout}", baseline, make)


CASES = [
    *(
        case
        for shape in (GPT2, GPT2_SHORT, LLAMA)
        for dtype in (torch.float32, torch.bfloat16)
        for case in (
            _case(shape, "rotate_half with cat", _halves, False, dtype),
            _case(shape, "complex product", _complex, True, dtype),
        )
    ),
    _case(GPT2, "rotate_every_two with stack", _every_two, True),
    _case(TINY, "rotate_half with cat", _halves, False),
]
