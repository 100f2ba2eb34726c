"""Masks as attention's arguments: exact for rows in which all is hidden, and for masks one after the other."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.recipes import attention, attention_mask

_T, _SIZE = 6, 4
_KNOWN = vars(sys.modules["gradscope.recipes.kept"])["_known"]

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


@pytest.mark.parametrize("cast", [False, True])
def test_a_number_that_bfloat16_does_not_hold_hides_no_more_than_it_did(cast):
    """As the least of float32, added to scores: a row of it weighs all equally; one of infinities sees nothing."""
    fill = torch.tensor([torch.finfo(torch.float32).min, -torch.inf]).view(2, 1, 1, 1)
    q, k, v = _operands(torch.float32 if cast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = attention(q, k, v, scale=0.5, **attention_mask(fill.expand(2, 1, 1, _T), hides="added"))
    assert (out[0] - v[0].mean(-2, keepdim=True)).abs().max() < 0.02 and not out[1].any()


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("rows", [1, _T])
@pytest.mark.parametrize("order", ["causal first", "causal last", "causal by name"])
def test_an_added_mask_that_hides_all_that_a_causal_one_leaves(order, rows, fill):
    """As padding on the left does: such a row weighs what it sees by the scores, though others see more."""
    causal = {"mask": _CAUSAL, "hides": "zero"}
    pad = torch.zeros(2, 1, rows, _T).masked_fill(_PADDED == 0, fill)
    said = attention_mask(pad, after="causal" if order == "causal by name" else causal)
    if order == "causal last":
        said = attention_mask(**causal, after={"mask": pad})
    # By name nothing tells how many queries there are: the plain operations, which float32 loses scores in by hand too.
    q, k, v = operands = _operands(torch.float64 if order == "causal by name" else torch.float32)
    _check(
        _gradients(attention(q, k, v, scale=0.5, **said), operands),
        _by_hand(lambda s: s.masked_fill(_CAUSAL == 0, -torch.inf) + pad),
    )


def test_minus_infinity_over_a_finite_fill():
    q, k, v = operands = _operands()
    before = {"mask": _PADDED, "hides": "zero", "finite": True}
    said = attention_mask(_CAUSAL, hides="zero", after=before, query=q)
    _check(
        _gradients(attention(key=k, value=v, scale=0.5, **said), operands),
        _by_hand(lambda s: s.masked_fill(_PADDED == 0, -1e9).masked_fill(_CAUSAL == 0, -torch.inf)),
    )


@pytest.mark.parametrize("pad", [torch.tensor([0.0, 0, -1e9]), torch.tensor([-torch.inf, 0, 0])], ids=["right", "left"])
def test_where_every_row_sees_more_it_stays_causal(pad):
    """So that blocks behind the causal mask are not computed."""
    assert attention_mask(pad, after={"mask": torch.ones(3, 3).tril(), "hides": "zero"})["is_causal"]


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


def test_a_finite_fill_over_a_bias_and_minus_infinity():
    bias = torch.linspace(-2, 2, _T * _T).view(_T, _T)
    q, k, v = operands = _operands()
    before = {"mask": _CAUSAL, "hides": "zero", "after": {"mask": bias}}
    said = attention_mask(_PADDED, hides="zero", finite=True, after=before, query=q)
    _check(
        _gradients(attention(key=k, value=v, scale=0.5, **said), operands),
        _by_hand(lambda s: (s + bias).masked_fill(_CAUSAL == 0, -torch.inf).masked_fill(_PADDED == 0, -1e9)),
    )


@pytest.mark.parametrize("first", [{"mask": _STRICT, "hides": "zero"}, {"mask": 3 * _STRICT}], ids=["hides", "added"])
@pytest.mark.parametrize("hides", ["", "zero"])
def test_masks_without_a_finite_fill_one_after_the_other(first, hides):
    """No mask takes what the one before said away."""
    mask = torch.ones(_T, _T).triu(-2)
    q, k, v = operands = _operands()
    one, other = (
        (lambda s, m=given["mask"]: s.masked_fill(m == 0, -torch.inf))
        if given.get("hides")
        else (lambda s, m=given["mask"]: s + m)
        for given in (first, {"mask": mask, "hides": hides})
    )
    said = attention_mask(mask, hides=hides, after=first)
    found = _gradients(attention(q, k, v, scale=0.5, **said), operands)
    q, k, v = truth = _operands(torch.float64)
    weights = other(one(q @ k.mT / 2))
    _check(found, _gradients(torch.ops.aten._safe_softmax.default(weights, -1) @ v, truth))


def test_boolean_masks_one_after_the_other():
    """Each hides what it hides, with a number written over both too."""
    one, other, last = _STRICT > 0, torch.ones(_T, _T).triu(-2) > 0, _PADDED > 0
    assert torch.equal(attention_mask(other, after={"mask": one})["attn_mask"], one & other)
    q, k, v = operands = _operands()
    before = {"mask": _CAUSAL > 0, "after": {"mask": other}}
    said = attention_mask(last, hides="zero", finite=True, after=before, query=q)
    _check(
        _gradients(attention(key=k, value=v, scale=0.5, **said), operands),
        _by_hand(lambda s: s.masked_fill(~(other & (_CAUSAL > 0)), -torch.inf).masked_fill(~last, -1e9)),
    )


def test_a_row_of_minus_infinity_is_no_row_of_lost_scores():
    """All blocks can do it; only what float64 loses the scores behind needs held weights."""
    mask = torch.zeros(_T, _T).masked_fill(_STRICT == 0, -torch.inf)
    assert "backend" not in attention_mask(mask)
    assert attention_mask(mask.clamp(min=-1e30))["backend"] == "math"


def test_a_mask_for_every_query_and_key_is_not_causal():
    """Of one row and one column it would be, were there one query; but it stands for as many as there are."""
    for mask, said in ((torch.ones(1, 1), {"hides": "zero"}), (torch.zeros(1, 1), {}), (torch.ones(1, 1) > 0, {})):
        assert set(attention_mask(mask, **said)) == {"attn_mask"}


def test_numbers_too_large_for_any_score_leave_none_where_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(sys.modules["gradscope.recipes.attention_mask"], "_may_look", lambda mask: False)
    mask = torch.zeros(_T, _T).masked_fill(_STRICT == 0, -1e30)
    q, k, v = (each.detach() for each in _operands())
    found = attention(q, k, v, scale=0.5, **attention_mask(mask))
    _check([found], [(q.double() @ k.double().mT / 2 + mask).softmax(-1) @ v.double()])


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


@pytest.mark.parametrize("through", ["itself", "a view", "its base"])
def test_what_changes_in_place_is_looked_at_again(through):
    """Kept verdicts are of one content: each change, there and back, gives the answer of a new tensor."""
    held = torch.ones(1, _T, _T).tril() if through == "its base" else torch.ones(_T, _T).tril()
    mask = held[0] if through == "its base" else held
    changed = {"itself": mask, "a view": mask[:3], "its base": held[0]}[through]
    for _ in range(2):
        assert attention_mask(mask, hides="zero") == {"is_causal": True}
        changed[0, _T - 1] = 1.0
        assert torch.equal(attention_mask(mask, hides="zero")["attn_mask"], mask != 0)
        changed[0, _T - 1] = 0.0


def test_what_gets_other_data_is_looked_at_again():
    """``data`` that is set keeps the version; memory that is given out again keeps the address."""
    mask = torch.ones(_T, _T).tril()
    for _ in range(3):
        assert attention_mask(mask, hides="zero") == {"is_causal": True}
        mask.data = torch.ones(_T, _T)
        assert torch.equal(attention_mask(mask, hides="zero")["attn_mask"], mask != 0)
        mask.data = torch.ones(_T, _T).tril()


def test_a_verdict_is_not_another_tensors_at_the_same_address(monkeypatch):
    """An address is given out again; what was known of it belongs to the tensor that lay there before."""
    causal, seen = torch.ones(_T, _T).tril(), torch.ones(_T, _T)
    assert attention_mask(causal, hides="zero") == {"is_causal": True}
    monkeypatch.setitem(_KNOWN, id(seen), _KNOWN[id(causal)])
    assert torch.equal(attention_mask(seen, hides="zero")["attn_mask"], seen != 0)
    assert attention_mask(causal, hides="zero") == {"is_causal": True}


def test_what_is_known_goes_with_the_tensor():
    before = dict(_KNOWN)
    mask = torch.ones(_T, _T).tril()
    attention_mask(mask, hides="zero")
    assert len(_KNOWN) == len(before) + 1
    del mask
    assert before == _KNOWN


def test_each_view_of_a_buffer_has_its_own_verdict():
    """Places, shapes, strides and what hides are told apart."""
    buffer = torch.zeros(2 * _T, 2 * _T)
    buffer[:_T, :_T] = torch.ones(_T, _T).tril()
    views = [
        buffer[:_T, :_T],
        buffer[_T:, :_T],
        buffer[: _T - 1, : _T - 1],
        buffer[:_T, :_T].T,
        buffer[1 : _T + 1, 1 : _T + 1],
    ]
    for _ in range(2):
        for view in views:
            expected = torch.equal(view != 0, torch.ones_like(view).tril() != 0)
            assert ("is_causal" in attention_mask(view, hides="zero")) is expected
            assert ("is_causal" in attention_mask(view, hides="nonzero")) is False
    assert "is_causal" in attention_mask(1 - buffer[:_T, :_T], hides="nonzero")


def added_triangle(number: float) -> Tensor:
    return torch.full((6, 6), number).triu(1)


@pytest.mark.parametrize("number", [-1.0, -100.0])
def test_a_number_that_weakens_does_not_hide(number: float) -> None:
    assert set(attention_mask(added_triangle(number))) == {"attn_mask"}


@pytest.mark.parametrize("after", [None, {"mask": torch.zeros(6, 6)}], ids=["alone", "after another"])
def test_a_mask_that_wants_a_gradient_stays_a_mask(after: Any) -> None:
    mask = added_triangle(-torch.inf).requires_grad_()
    said = attention_mask(mask, after=after)
    assert set(said) == {"attn_mask"} and said["attn_mask"].requires_grad


def test_a_finite_number_behind_another_mask_is_no_causal_one() -> None:
    """Together they may hide all: what is left is then decided by the numbers. Alone it is one, and may be first."""
    mask = added_triangle(-1e30)
    for _ in range(2):
        assert attention_mask(mask) == {"is_causal": True}
        assert "is_causal" not in attention_mask(mask, after={"mask": torch.full((6, 6), -1e30)})


def test_a_mask_that_counts_no_versions() -> None:
    with torch.inference_mode():
        mask = added_triangle(-torch.inf)
    assert set(attention_mask(mask)) == {"attn_mask"}


@pytest.mark.parametrize("number", [0.0, 0, False, 0.5])
@pytest.mark.parametrize("after", [None, "causal"])
def test_a_number_that_is_added_to_all_scores_says_nothing(number, after):
    operands = _operands()
    given = attention_mask(number, hides="added", after=after)
    hidden = torch.ones(_T, _T).triu(1) == 1 if after else torch.zeros(_T, _T) == 1
    truth = _by_hand(lambda scores: scores.masked_fill(hidden, -torch.inf) + number)
    _check(_gradients(attention(*operands, **given), operands), truth)


@pytest.mark.parametrize(
    ("number", "hides"),
    [*((math.inf, hides) for hides in ("", "zero", "added")), *((0.0, hides) for hides in ("", "zero", "nonzero"))],
)
def test_a_number_in_place_of_a_mask_is_refused(number, hides):
    with pytest.raises(ValueError, match="a finite number where hides is 'added'"):
        attention_mask(number, hides=hides)


@pytest.mark.parametrize("after", [None, {"mask": 2.0, "hides": "added"}])
def test_beside_sinks_a_number_says_something(after):
    """It is added to the scores and not to the sinks: they would weigh too much without it."""
    assert attention_mask(0.0, hides="added", sinks=True) == {}
    with pytest.raises(ValueError, match="sinks"):
        attention_mask(2.0 if after is None else torch.zeros(3, 3), hides="added", after=after, sinks=True)


def test_no_even_weights_beside_sinks():
    """Of a row in which a number hides all, the sinks have the weight: nothing is taken off, and finite is refused."""
    bias = torch.full((3, 3), -1e9)
    assert attention_mask(bias, hides="added", sinks=True)["attn_mask"] is bias
    with pytest.raises(ValueError, match="finite"):
        attention_mask(bias, hides="zero", finite=True, sinks=True)
