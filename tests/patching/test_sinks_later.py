"""A patched attention with sinks is given other batches, lengths, masks, sinks and dtypes than it was planned with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.patches import Patches
from tests.patching.corpus import attention_sinks
from tests.patching.corpus.attention_base import HEADS, WIDTH
from tests.patching.exactness import call, squares

KINDS = ["GptOss", "InOneLine", "IndexedSinks", "SinksOfFourDimensions", "MadeSinks", "Shifted"]


def planned(model: nn.Module, batch: Any) -> nn.Module:
    """A copy of ``model`` that is patched for ``batch``."""
    made = copy.deepcopy(model)
    patches = Patches(gradscope.plan(made, batch, squares, recipes=["attention"]))
    patches.apply()
    assert patches.kept, patches.table.reasons.tolist()
    return made


def assert_same(model: nn.Module, patched: nn.Module, *batch: Tensor, weights: bool = False) -> None:
    """Outputs and all gradients; those of the weights too where they are read."""
    found = []
    for each in (model, patched):
        given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in batch]
        torch.manual_seed(1)
        out = call(each, tuple(given))
        outs = (out if isinstance(out, tuple) else (out,))[: 1 + weights]
        loss = sum((one * torch.linspace(-1.0, 2.0, one.numel()).view_as(one).to(one)).sum() for one in outs)
        leaves = [*each.parameters(), *(x for x in given if x.requires_grad)]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
        found.append((*(one.detach() + 0 for one in outs), *grads))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            # float64, sums in another order; one model rounds its scores to float32
            close = {"rtol": 1e-10, "atol": 1e-12}
            loose = {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(other, one, **loose if type(model) is attention_sinks.InOneLine else close)


def tokens(batch: int = 2, length: int = 20) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model without dropout, and one like it that is patched."""
    torch.manual_seed(0)
    model = getattr(attention_sinks, request.param)().double()
    model.dropout = model.drop.p = 0.0
    return model, planned(model, tokens())


@pytest.mark.parametrize(("batch", "length"), [(1, 20), (5, 20), (2, 1), (2, 47), (1, 2)])
def test_other_batches_and_lengths(pair: tuple[nn.Module, nn.Module], batch: int, length: int) -> None:
    assert_same(*pair, tokens(batch, length))


@pytest.mark.parametrize("value", [-60.0, 0.0, 60.0])
def test_other_sinks(pair: tuple[nn.Module, nn.Module], value: float) -> None:
    """Far below the scores they take nothing, far above them all."""
    for each in pair:
        if hasattr(each, "sinks"):
            each.sinks.data = torch.full_like(each.sinks.data, value)
    assert_same(*pair, tokens())


def test_sinks_that_were_replaced_or_take_no_gradient(pair: tuple[nn.Module, nn.Module]) -> None:
    if not hasattr(pair[0], "sinks"):
        return
    for each in pair:
        each.sinks = nn.Parameter(each.sinks.detach().flip(-1) + 1.0, requires_grad=False)
    x = tokens()
    outs = [call(each, x) for each in pair]
    torch.testing.assert_close(*(out[0] if isinstance(out, tuple) else out for out in outs))


def test_another_dtype(pair: tuple[nn.Module, nn.Module]) -> None:
    model, patched = (each.float() for each in pair)
    x = tokens().float()
    outs = [call(each, x) for each in (model, patched)]
    torch.testing.assert_close(*(out[0] if isinstance(out, tuple) else out for out in outs))


@pytest.mark.parametrize("train", [True, False])
def test_dropout_of_the_moment(pair: tuple[nn.Module, nn.Module], train: bool) -> None:
    """Where all weights are dropped nothing is left; in evaluation none is."""
    for each in pair:
        each.train(train)
        each.dropout = each.drop.p = 1.0  # type: ignore[union-attr, assignment]
    assert_same(*pair, tokens())


def test_a_mask_that_was_none_or_is_none() -> None:
    torch.manual_seed(0)
    model = attention_sinks.GptOss(dropout=0.0).double()
    causal = torch.full((20, 20), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    padding = torch.zeros(2, 1, 1, 20, dtype=torch.float64)
    padding[1, ..., 13:] = torch.finfo(torch.float64).min
    hidden = causal.clone()
    hidden[..., :3, :] = -torch.inf  # rows whose weight is all the sink's
    for first in (None, causal, padding):
        patched = planned(model, {"x": tokens(), "mask": first} if first is not None else tokens())
        for later in (causal, padding, causal + padding, hidden, torch.randn(1, HEADS, 20, 20).double()):
            out = [model(x := tokens(), later)[0], patched(x, later)[0]]
            torch.testing.assert_close(*out)
            assert_same(model, patched, tokens(), later)
        assert_same(model, patched, tokens())


@pytest.mark.parametrize(
    ("kind", "deep"),
    [
        *(("GptOss", deep) for deep in (-200.0, -1e4, -1e9, torch.finfo(torch.float32).min)),
        *(("Filled", deep) for deep in (-1e4, -1e9, torch.finfo(torch.float32).min)),
    ],
)
def test_rows_in_which_all_is_hidden_by_a_number(kind: str, deep: float) -> None:
    """As those of a padded sample's first tokens: their weight is all the sink's, whatever hides the keys."""
    torch.manual_seed(0)
    model = getattr(attention_sinks, kind)(dropout=0.0).double()
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    later = (hidden | (torch.arange(20) < 5)) & (torch.arange(20) < 19)  # the last key is seen, where it is not ahead

    def mask(places: Tensor) -> Tensor:
        return places if kind == "Filled" else torch.zeros(20, 20).double().masked_fill(places, deep)[None, None]

    model.fill = deep
    patched = planned(model, (tokens(), mask(hidden)))
    assert_same(model, patched, tokens(), later if kind == "Filled" else mask(later))
    assert_same(model, patched, tokens(), mask(torch.ones_like(hidden)))


def test_the_weights_that_are_returned() -> None:
    torch.manual_seed(0)
    model = attention_sinks.GptOss(dropout=0.0).double()
    patched = planned(model, tokens())
    assert_same(model, patched, tokens(3, 11), weights=True)
    weights = patched(tokens())[1]
    assert bool((weights.sum(-1) < 1).all())


def test_a_model_without_sinks_is_refused_for_the_old_code() -> None:
    """Sinks of another number than the heads raise, as by hand."""
    torch.manual_seed(0)
    model = attention_sinks.InOneLine(dropout=0.0).double()
    patched = planned(model, tokens())
    for each in (model, patched):
        each.sinks = nn.Parameter(torch.zeros(HEADS + 1, dtype=torch.float64))
        with pytest.raises((RuntimeError, ValueError)):
            each(tokens())
