"""Masks as attention's arguments: exact for rows in which all is hidden, and for masks one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradscope.recipes import attention, attention_mask

_T, _SIZE = 6, 4

# A few roundings to float32 of sums over a handful of numbers of size 1.
_TOLERANCE = 4e-6


def _operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, _T, _SIZE, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


def _gradients(out: Tensor, operands: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), operands)]


def _by_hand(mask: Callable[[Tensor], Tensor]) -> list[Tensor]:
    q, k, v = operands = _operands(torch.float64)
    return _gradients(mask(q @ k.mT / 2).softmax(-1) @ v, operands)


def _check(found: list[Tensor], truth: list[Tensor]) -> None:
    for one, other in zip(found, truth, strict=True):
        assert (one - other).abs().max() <= _TOLERANCE


_STRICT = torch.ones(_T, _T).tril(-1)  # the first query sees nothing
_CAUSAL = torch.ones(_T, _T).tril()
_PADDED = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]]).view(2, 1, 1, _T)  # with causal, a query sees nothing


@pytest.mark.parametrize("mask", [_STRICT, _CAUSAL, _PADDED], ids=["strict", "causal", "padded"])
def test_a_query_that_sees_no_key_weighs_all_equally(mask):
    q, k, v = operands = _operands()
    said = attention_mask(mask, hides="zero", finite=True, query=q)
    _check(
        _gradients(attention(key=k, value=v, scale=0.5, **said), operands),
        _by_hand(lambda s: s.masked_fill(mask == 0, -1e9)),
    )


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_an_added_mask_that_hides_a_whole_row(fill):
    mask = torch.zeros(_T, _T).masked_fill(_STRICT == 0, fill)
    q, k, v = operands = _operands()
    _check(_gradients(attention(q, k, v, scale=0.5, **attention_mask(mask)), operands), _by_hand(lambda s: s + mask))


def test_finite_masks_one_after_the_other():
    q, k, v = operands = _operands()
    before = {"mask": _CAUSAL, "hides": "zero", "finite": True}
    said = attention_mask(_PADDED, hides="zero", finite=True, after=before, query=q)
    _check(
        _gradients(attention(key=k, value=v, scale=0.5, **said), operands),
        _by_hand(lambda s: s.masked_fill(_CAUSAL == 0, -1e9).masked_fill(_PADDED == 0, -1e9)),
    )


def test_a_finite_fill_over_minus_infinity():
    q, k, v = operands = _operands()
    before = {"mask": _CAUSAL, "hides": "zero"}
    said = attention_mask(_PADDED, hides="zero", finite=True, after=before, query=q)
    _check(
        _gradients(attention(key=k, value=v, scale=0.5, **said), operands),
        _by_hand(lambda s: s.masked_fill(_CAUSAL == 0, -torch.inf).masked_fill(_PADDED == 0, -1e9)),
    )


def test_a_bias_under_a_causal_mask_keeps_the_fast_path():
    bias = torch.randn(3, _T, _T)
    said = attention_mask(_CAUSAL, hides="zero", after={"mask": bias})
    assert said["is_causal"] is True
    assert torch.equal(said["attn_mask"], bias)


def test_after_what_is_causal():
    seen = torch.ones(2, 1, 1, _T, dtype=torch.bool)
    assert attention_mask(seen, hides="zero", after="causal")["is_causal"] is True
    with pytest.raises(ValueError, match="after"):
        attention_mask(seen, hides="zero", after="before")
    with pytest.raises(ValueError, match="after"):
        attention_mask(seen, hides="zero", finite=True, after="causal")
