"""The proof: right replacements pass, wrong ones do not, and the truth is the user's own code in float64."""

from __future__ import annotations

import dataclasses
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradscope.patching.plan import Plan, plan
from gradscope.patching.prove.proof import Errors, compare, prove
from gradscope.patching.prove.unit import GRADIENT, InDouble, Unit, WithoutDropout, captured
from gradscope.patching.sites import Site
from gradscope.patching.swap import Swap, swaps
from tests.patching import small

BATCH = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()


def planned(model: nn.Module) -> tuple[Plan, Swap, Unit]:
    found = plan(model, BATCH, recipes=["attention"])
    assert [site.reasons for site in found.sites] == [[]]
    (swap,) = swaps(found.supported, found.files)
    units = captured({"": model}, lambda: model(BATCH))
    return found, swap, units[""]


def with_text(site: Site, old: str, new: str) -> Site:
    """The site with a fault in what is written."""
    assert site.edit is not None
    parts = tuple(dataclasses.replace(part, text=part.text.replace(old, new)) for part in site.edit.replacements)
    assert parts != site.edit.replacements, f"{old!r} stands nowhere in {[part.text for part in parts]}"
    return dataclasses.replace(site, edit=dataclasses.replace(site.edit, replacements=parts))


def test_a_right_replacement_passes() -> None:
    found, swap, unit = planned(small.Causal())
    (errors,) = prove(swap, unit, found.files).values()
    assert isinstance(errors, Errors) and errors.within
    assert {"output", f"{GRADIENT}input.0.0", f"{GRADIENT}qkv.weight"} <= {each.name for each in errors.distances}
    assert 0 < errors.largest() <= 2 * errors.largest(original=True) + torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('hides="zero"', 'hides="nonzero"'),  # the other triangle
        ("**attention_mask", "**(lambda *a, **k: {})"),  # no mask
        ("scale=1.0 / math.sqrt(k.size(-1))", "scale=1.0 / math.sqrt(k.size(-2))"),
        ("scale=1.0", "scale=1.0001"),
        (" q,\n", " k,\n"),
        (" v,\n", " k,\n"),
        (" k,\n", " k.detach(),\n"),  # the output is right, a gradient is missing
        (" v,\n", " v.bfloat16().float(),\n"),
        (" v,\n", " undefined,\n"),
    ],
)
def test_a_wrong_one_does_not(old: str, new: str) -> None:
    model = small.Causal()
    found, swap, unit = planned(model)
    wrong = with_text(swap.sites[0], old, new)
    (verdict,) = prove(Swap(model, [wrong], found.files), unit, found.files).values()
    assert isinstance(verdict, str)
    assert "is off by" in verdict or "raises an error" in verdict or "only one version" in verdict, verdict
    assert "forward" not in vars(model)


def test_a_result_that_nobody_sees_cannot_be_proved() -> None:
    model = small.Unused()
    found = plan(model, BATCH, recipes=["attention"])
    (swap,) = swaps(found.supported, found.files)
    (unit,) = captured({"": model}, lambda: model(BATCH)).values()
    (verdict,) = prove(swap, unit, found.files).values()
    assert verdict == "an error injected into the recipe's result was not detected, so the verification is inconclusive"


class OneUnseen(small.Causal):
    """Two attentions, of which ``unseen`` goes nowhere."""

    unseen = 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        one = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v
        two = ((v @ k.transpose(-2, -1)) * 0.5).softmax(-1) @ q
        return ((self.unseen != 0) * one + (self.unseen != 1) * two).squeeze(1)


@pytest.mark.parametrize("unseen", [0, 1])
def test_each_site_is_seen_by_a_fault_of_its_own(unseen: int) -> None:
    model = OneUnseen()
    model.unseen = unseen
    found = plan(model, BATCH, recipes=["attention"])
    (swap,) = swaps(found.supported, found.files)
    (unit,) = captured({"": model}, lambda: model(BATCH)).values()
    verdicts = [prove(swap, unit, found.files)[site] for site in swap.sites]
    assert isinstance(verdicts[1 - unseen], Errors)
    assert (
        verdicts[unseen]
        == "an error injected into the recipe's result was not detected, so the verification is inconclusive"
    )


class OnlyItsGradient(small.Causal):
    """The output does not depend on the attention's result, its gradient does."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        y = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v
        return (q + (y * y - (y * y).detach())).squeeze(1)


class BehindANorm(small.Causal):
    """A factor of the whole result would not be seen behind the norm."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        y = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v
        return functional.layer_norm(y, y.shape[-1:], eps=0.0).squeeze(1)


@pytest.mark.parametrize("kind", [OnlyItsGradient, BehindANorm])
def test_a_fault_is_seen_where_it_shows_least(kind: type[small.Causal]) -> None:
    found, swap, unit = planned(kind())
    (verdict,) = prove(swap, unit, found.files).values()
    assert isinstance(verdict, Errors), verdict


def test_one_wrong_site_of_two_is_told_from_the_other() -> None:
    model = small.Twice()
    found = plan(model, BATCH, recipes=["attention"])
    (swap,) = swaps(found.supported, found.files)
    first, second = swap.sites
    wrong = with_text(second, "scale=", "scale=2.0 * ")
    (unit,) = captured({"": model}, lambda: model(BATCH)).values()
    verdicts = prove(Swap(model, [first, wrong], found.files), unit, found.files)
    assert isinstance(verdicts[first], Errors) and isinstance(verdicts[wrong], str)


class NamesFloat32(nn.Module):
    """Casts to float32 in three ways, makes constants, and holds a function of its own in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("offset", torch.linspace(0.0, 1.0, 8))
        inner = nn.Linear(8, 8)
        self.inner = inner
        self.function = lambda x: inner(x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).to(torch.float32) + torch.ones(8, dtype=torch.float32) / 3
        y = self.function(y.float()).type_as(x) + self.offset
        return torch.softmax(y, -1, dtype=torch.float32) * (1 / 3)


def test_float64_reaches_every_corner() -> None:
    torch.manual_seed(0)
    model, x = NamesFloat32(), torch.randn(3, 8)
    with InDouble([*model.parameters(), *model.buffers(), x]) as mode:
        out = model(x)
        weight = mode.double_of(model.linear.weight)
    first = functional.linear(x.double(), model.linear.weight.double(), model.linear.bias.double())
    first = first + torch.ones(8, dtype=torch.float64) / 3
    second = functional.linear(first, model.inner.weight.double(), model.inner.bias.double()) + model.offset.double()
    torch.testing.assert_close(out, torch.softmax(second, -1) * (1 / 3), rtol=1e-15, atol=1e-15)
    assert weight.dtype is torch.float64 and weight.requires_grad and model.linear.weight.grad is None


def test_float64_that_is_entered_in_itself_lasts_until_it_is_left() -> None:
    """Inside it each backward pass enters it again."""
    default, mode = torch.get_default_dtype(), InDouble(())
    with mode:
        with mode:
            pass
        assert torch.get_default_dtype() is torch.float64
        assert torch.rand(2, requires_grad=True).requires_grad and not torch.rand(2).requires_grad
    assert torch.get_default_dtype() is default


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: functional.dropout(x, 0.5, True),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: functional.dropout1d(x, 0.5, True),
        lambda x: functional.alpha_dropout(x, 0.5, True),
        nn.Dropout(0.5),
    ],
)
def test_without_dropout(drop: Any) -> None:
    x = torch.randn(2, 4, 8)
    with WithoutDropout():
        assert torch.equal(drop(x), x)


def test_sdpa_without_dropout() -> None:
    q = torch.randn(1, 2, 5, 8)
    want = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    with WithoutDropout():
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q, None, 0.9, True), want)
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q, dropout_p=0.9, is_causal=True), want)


def outcome(**values: Tensor) -> dict[str, Tensor]:
    return {name.replace("grad_", GRADIENT): value for name, value in values.items()}


def test_the_limit_is_twice_the_originals_error() -> None:
    truth = torch.ones(100, dtype=torch.float64)
    original = torch.full((100,), 1.0 + 1e-5)
    eps = torch.finfo(torch.float32).eps
    for factor, holds in ((1.9, True), (2.1, False)):
        new = torch.full((100,), 1.0 + factor * 1e-5)
        errors = compare(outcome(grad_x=new), outcome(grad_x=original), outcome(grad_x=truth))
        assert errors.within is holds
        assert errors.worst is not None and errors.worst.limit == pytest.approx(2e-5 + eps, rel=1e-2)


def test_a_gradient_that_is_zero_may_be_rounding() -> None:
    big, zero = torch.randn(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    original = outcome(grad_w=big.float(), grad_b=torch.zeros(100))
    for size, holds in ((1e-9, True), (1e-6, False)):
        new = outcome(grad_w=big.float(), grad_b=torch.full((100,), size))
        assert compare(new, original, outcome(grad_w=big, grad_b=zero)).within is holds


def test_what_is_missing_or_of_another_kind() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match="b exists in only one version"):
        compare({"a": x}, {"a": x, "b": x}, {"a": x})
    with pytest.raises(ValueError, match=r"a is \(3,\) bfloat16 instead of \(3,\) float32"):
        compare({"a": x.bfloat16()}, {"a": x}, {"a": x})
    assert not compare({"a": torch.tensor([math.nan, 1, 1])}, {"a": x}, {"a": x}).within


class MadeInForward(nn.Module):
    """Makes layers in each call, draws into one, and writes into tensors that it makes without a type."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        norm = nn.LayerNorm(8, elementwise_affine=True).to(x.device)
        scale = nn.Linear(8, 8)
        nn.init.normal_(scale.bias, 1.0, 0.1)
        mask = torch.zeros(8)
        mask[::2] = 3.0
        noise = torch.randn_like(x) + torch.rand(8) + torch.empty(8).uniform_() + torch.normal(torch.zeros(8), 1.0)
        noise = noise + torch.rand_like(x, dtype=torch.float32)
        return torch.as_tensor(scale(norm(self.inner(x))) * mask + noise)


def test_what_is_made_in_each_call_is_the_same_in_float64() -> None:
    model, x = MadeInForward(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    default = torch.get_default_dtype()
    original, truth = captured({"": model}, lambda: model(x))[""].references
    assert torch.get_default_dtype() is default
    assert original.keys() == truth.keys() and len(truth) == 3
    for name, value in truth.items():
        assert value.dtype is torch.float64
        torch.testing.assert_close(original[name].double(), value, rtol=1e-5, atol=1e-5)


def test_a_replacement_in_a_model_that_makes_layers_in_each_call_is_proved() -> None:
    model, x = small.GeluBetweenMadeLayers(), torch.randn(4, 8)
    found = plan(model, x, recipes=["gelu"])
    (swap,) = swaps(found.supported, found.files)
    (errors,) = prove(swap, captured({"": model}, lambda: model(x))[""], found.files).values()
    assert isinstance(errors, Errors) and errors.within


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_what_only_the_graph_of_a_stored_loss_keeps_is_not_read(loss: bool, also: bool, frozen: bool) -> None:
    model = small.StoresItsLoss(loss=loss, also=also)
    if frozen:  # what the collector does not list may refer to anything
        gc.freeze()
    try:
        (site,) = plan(model, torch.randn(4, 8), recipes=["gelu"]).sites
    finally:
        gc.unfreeze()
    assert site.supported is not (also or (loss and frozen))
    assert all("is returned or stored" in reason for reason in site.reasons)


class Checkpointed(nn.Module):
    """A part that drops a half, whose forward runs again in backward."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.checkpoints = nn.Linear(8, 8), nn.Linear(8, 8), checkpoints

    def part(self, x: Tensor) -> Tensor:
        return functional.dropout(self.one(x).float().tanh(), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(checkpoint(self.part, x, use_reentrant=False) if self.checkpoints else self.part(x))


def test_what_checkpointing_runs_again_is_proved_as_it_ran_first() -> None:
    """In backward too it is in float64 and drops nothing."""
    x, default = torch.randn(4, 8).requires_grad_(), torch.get_default_dtype()
    models = Checkpointed(checkpoints=True), Checkpointed(checkpoints=False)
    found, wanted = (Unit("", model, model, (x,), {}).references for model in models)
    for mine, other in zip(found, wanted, strict=True):
        assert {name: held.dtype for name, held in mine.items()} == {name: held.dtype for name, held in other.items()}
        assert all(torch.equal(held, other[name]) for name, held in mine.items())
    assert torch.get_default_dtype() is default


def test_of_a_float64_model_the_original_is_off_by_nothing_and_both_round() -> None:
    """Its reference is float64 too."""
    torch.manual_seed(0)
    terms = torch.rand(64, dtype=torch.float64)
    truth = {"output": terms.cumsum(0)}
    other = {"output": terms.flip(0).sum() - terms.flip(0).cumsum(0).flip(0) + terms}  # sums in another order
    assert not torch.equal(other["output"], truth["output"])
    assert compare(other, truth, truth).within
    assert not compare({"output": truth["output"] * (1 + 1e-13)}, truth, truth).within
