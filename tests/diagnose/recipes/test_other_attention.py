"""Attention as others write it, where no recipe fits: found all the same, and left alone where scores are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.diagnose.case import Case
from tests.diagnose import twins_recipes as twins
from tests.diagnose.run_case import case_of, findings_of, in_case, of_rule, timed_by_operations

BY_HAND, MATH = "attention-by-hand", "attention-math-kernel"


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


class ByBmm(nn.Module):
    """Attention over the points of an image, as diffusion models have it."""

    def __init__(self, again: Callable[[Tensor], Tensor] | None = None, bias: int = 0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(16, 16, 1) for _ in range(3))
        self.again = again
        self.bias = nn.Parameter(torch.zeros(bias, bias)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q = self.q(x).reshape(b, c, h * w).permute(0, 2, 1)
        k = self.k(x).reshape(b, c, h * w)
        scores = torch.bmm(q, k) * c**-0.5
        if self.bias is not None:
            scores = scores + self.bias
        weights = F.softmax(scores, dim=2)
        y = torch.bmm(self.v(x).reshape(b, c, h * w), weights.permute(0, 2, 1))
        return y if self.again is None else y + self.again(weights)


def test_attention_in_a_layout_of_its_own_is_found_without_a_recipe() -> None:
    case = timed_by_operations(case_of(ByBmm(), torch.randn(1, 16, 24, 24)))
    (found,) = in_case(case, BY_HAND)
    assert case.lines[str(found.line)].text == "weights = F.softmax(scores, dim=2)"
    assert found.recipe is None and "scaled_dot_product_attention" in found.code
    assert found.evidence.startswith("scores of shape 1x576x576 on 3 lines, ")
    assert (found.predicted_saving_ns or 0) > 0 and (found.predicted_saving_bytes or 0) >= 576 * 576 * 4
    assert not of_rule(BY_HAND, findings_of(ByBmm(), torch.randn(1, 16, 8, 8)))  # few are done at once sooner


def test_masks_of_attention_without_a_recipe_are_left_to_it() -> None:
    class Dropped(ByBmm):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part(x).flatten(2) for part in (self.q, self.k, self.v))
            weights = F.softmax(torch.bmm(q.transpose(1, 2), k), dim=-1)
            return torch.bmm(v, F.dropout(weights, 0.1).transpose(1, 2))

    found = findings_of(Dropped(), torch.randn(1, 16, 24, 24))
    assert of_rule(BY_HAND, found) and not of_rule("saved-dropout", found)


def test_weights_that_others_read_need_their_scores() -> None:
    assert not of_rule(BY_HAND, findings_of(ByBmm(lambda weights: weights.mean()), torch.randn(1, 16, 24, 24)))


def test_a_bias_with_a_gradient_is_no_case_for_every_kernel() -> None:
    assert not of_rule(BY_HAND, findings_of(ByBmm(bias=576), torch.randn(1, 16, 24, 24)))


def test_a_library_with_a_switch_is_told_of_by_its_switch() -> None:
    case = case_of(twins.ByHand(), torch.randn(2, 512, 64))
    reason = "attn_weights is returned on line 72; load the model with attn_implementation='sdpa'"
    places = [replace(each, supported=False, reasons=(reason,)) for each in case.facts.places]
    (found,) = in_case(Case(case.run, replace(case.facts, places=places)), BY_HAND)
    assert 'attn_implementation="sdpa"' in found.code and found.recipe is None
    places = [replace(each, supported=False, reasons=("weights is returned on line 72",)) for each in places]
    (found,) = in_case(Case(case.run, replace(case.facts, places=places)), BY_HAND)
    assert found.evidence.endswith("; no recipe can replace it: weights is returned on line 72")


def test_the_advice_hands_on_the_mask_that_is_there() -> None:
    case = case_of(twins.ByHand(), torch.randn(2, 512, 64))
    places = [replace(each, supported=False, reasons=("weights is returned on line 72",)) for each in case.facts.places]
    (found,) = in_case(Case(case.run, replace(case.facts, places=places)), BY_HAND)
    assert "attn_mask=mask" in found.code
    (found,) = of_rule(BY_HAND, findings_of(ByBmm(), torch.randn(1, 16, 24, 24)))
    assert "attn_mask" not in found.code


class Kept(nn.Module):
    """Attention whose weights stay on the module: no recipe can be put in."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.parts, self.drop = nn.Linear(64, 192), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], 4, 16).transpose(1, 2) for part in self.parts(x).split(64, dim=-1))
        self.weights = F.softmax(q @ k.transpose(-2, -1) * 0.25, dim=-1)
        return torch.as_tensor((self.drop(self.weights) @ v).transpose(1, 2).reshape(x.shape))


@pytest.mark.micro_runs
@pytest.mark.parametrize("saving, found", [(2_000_000, 1), (-50_000_000, 0), (0, 0)])
def test_without_a_recipe_too_one_kernel_is_run_alone(saving: int, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What gains nothing there is no advice, whatever passes over scores take."""
    from gradscope.patching import places as found_places
    from gradscope.patching.prove import predict

    monkeypatch.setattr(found_places, "PREDICTION_NS", 10**15)
    monkeypatch.setattr(predict, "measured", lambda *_: predict.Saving(saving, 0, 4_000_000))
    case = timed_by_operations(case_of(Kept(), torch.randn(2, 256, 64)))
    (place,) = [each for each in case.facts.places if each.recipe == "attention"]
    assert not place.supported and place.predicted_saving_ns == saving
    findings = in_case(case, BY_HAND)
    assert len(findings) == found
    for each in findings:
        assert 0 < (each.predicted_saving_ns or 0) < case.lines_ns({call.source or "" for call in case.facts.calls})


def test_dropout_on_a_cpu_is_no_case_for_torchs_own_kernel() -> None:
    case = timed_by_operations(case_of(Kept(p=0.1), torch.randn(2, 256, 64)))
    (found,) = in_case(case, BY_HAND)
    assert found.advice.startswith("Call attention from gradscope.recipes with query")
    reason = "weights is stored; load the model with attn_implementation='sdpa'"
    places = [replace(each, supported=False, reasons=(reason,)) for each in case.facts.places]
    assert not in_case(Case(case.run, replace(case.facts, places=places)), BY_HAND)


class Multi(nn.Module):
    """Torch's module for attention."""

    def __init__(self, dropout: float = 0.0, reads: bool = False, **given: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, dropout=dropout, batch_first=True)
        self.reads, self.given = reads, given

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, **self.given)
        return y + weights.mean() if self.reads else y


def test_weights_of_multihead_attention_that_nobody_reads() -> None:
    x = torch.randn(2, 256, 64)
    case = timed_by_operations(case_of(Multi(), x))
    (found,) = in_case(case, MATH)
    assert case.lines[str(found.line)].text == "y, weights = self.attention(x, x, x, **self.given)"
    assert found.layers == ("attention",)
    assert "it returns attention weights that nothing reads" in found.message and "need_weights=False" in found.advice
    assert "8 score matrices of shape 256x256 per call" in found.evidence
    assert (found.predicted_saving_ns or 0) > 0 and (found.predicted_saving_bytes or 0) > 2_000_000
    for model in (Multi(need_weights=False), Multi(reads=True)):
        assert not of_rule(MATH, findings_of(model, x))
    assert not of_rule(MATH, findings_of(Multi(), x[:1, :16]))


def test_dropout_of_multihead_attention_inside_torchs_own_layers() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    (found,) = of_rule(MATH, findings_of(encoder, torch.randn(2, 256, 64)))
    assert found.layers == ("layers.0.self_attn", "layers.1.self_attn")
    assert "has no dropout" in found.message and "2 calls" in found.evidence
    exec(found.code, {"model": encoder, "nn": nn})
    assert not of_rule(MATH, findings_of(encoder, torch.randn(2, 256, 64)))
