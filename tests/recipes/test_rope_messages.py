"""Rotary position embedding: bad input is named before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradscope.recipes.rope import rope

from .test_rope import tables

X = torch.zeros(2, 3, 7, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X[0], *tables(7, 4)), {}, r"rope: x is of shape \(3, 7, 8\); expected \[batch, heads, tokens, size\]"),
        ((X.long(), *tables(7, 4)), {}, "rope: x is of dtype int64; expected float32"),
        ((X, tables(7, 4)[0], tables(7, 3)[1]), {}, r"rope: sin is of shape \(7, 3\), float32; expected as cos"),
        ((X, *tables(7, 5)), {}, r"cos is of shape \(7, 5\); expected at most 4 pairs, for x of shape \(2, 3, 7, 8\)"),
        ((X, *tables(7, 4)), {"rotary": 3}, "rope: rotary is 3; expected an even number of features from 2 to 8"),
        ((X, *tables(7, 4)), {"rotary": 2}, r"cos is of shape \(7, 4\); expected 1 pairs in its last dimension"),
        ((X, *tables(7, 4)), {"offset": 1}, "rope: offset is 1; expected 0 to 0: 7 tokens, 7 positions"),
        (
            (X, *tables(6, 4)),
            {"offset": 2},
            r"rope: cos is of shape \(6, 4\); expected at least 7 positions, for x of shape \(2, 3, 7, 8\)",
        ),
        ((X, *tables(7, 4)), {"positions": torch.zeros(6).long()}, r"positions is of shape \(6,\), int64; expected"),
        ((X, *(t.expand(3, 7, 4) for t in tables(7, 4))), {}, r"cos is of shape \(3, 7, 4\); expected \[2 or 1, 7"),
        (((X, X[:, :, :5]), *tables(7, 4)), {}, r"x\[1\] is of shape \(2, 3, 5, 8\), float32; expected as x\[0\]"),
        ((X.to("meta"), *tables(7, 4)), {}, "rope: cos is on cpu; expected meta, where x is"),
        (((X.to("meta"), X.to("meta")), *tables(7, 4)), {}, "rope: cos is on cpu; expected meta, where x is"),
        (((X, X.to("meta")), *tables(7, 4)), {}, r"rope: x\[1\] is on meta; expected cpu, where x\[0\] is"),
        ((X, *tables(7, 4)), {"backend": "cuda"}, "backend is 'cuda'; expected 'auto' or 'triton' or 'cpu'"),
        (
            (X, tables(7, 4)[0].requires_grad_(), tables(7, 4)[1]),
            {"backend": "cpu"},
            "rope: backend='cpu' cannot run here: the tables require a gradient",
        ),
    ],
)
def test_bad_input_is_named(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope(*arguments, **options)


def test_an_x_a_dimension_short_is_named_under_vmap_too() -> None:
    cos, sin = tables(7, 4)
    with pytest.raises(ValueError, match=r"rope: x is of shape \(3, 7, 8\); expected \[batch, heads, tokens, size\]"):
        torch.func.vmap(lambda x: rope(x, cos, sin))(X)
