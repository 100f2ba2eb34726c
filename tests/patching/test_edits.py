"""What an edit keeps: conditions, side effects, names, and what may be another next time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.patching.edited_models import (
    ConditionBoundInside,
    ConditionChangedInside,
    Counts,
    DimensionByArgument,
    DroppedInTraining,
    FloorDivision,
    HelperWithCondition,
    Loop,
    MaskBySetting,
    MaskChosen,
    MaskCutInBranch,
    MaskUnderCondition,
    Named,
    OfAnObject,
    Offset,
    OwnDropout,
    PartInAList,
    PartWithoutGradient,
    ScaleByStep,
    ScaledAfterBias,
    SizesOfScores,
    SoftmaxModule,
    Ticks,
    WeightsOnRequest,
    Window,
    WindowLiteral,
    x,
)
from tests.patching.exactness import TOLERANCE, check_exact, difference, patched, reasons, results

LENGTH = 6


# ----------------------------------------------------------------------------------------------------------------------
# What may be another next time
# ----------------------------------------------------------------------------------------------------------------------


def _narrow(model):
    model.window = 2


def _not_causal(model):
    model.causal = False


def _far(model):
    model.step = 2


_NEXT_TIME = [
    (Window, _narrow, None),
    (Window, lambda model: None, x(40)),
    (WindowLiteral, lambda model: None, x(16)),
    (Offset, _far, None),
    (MaskBySetting, _not_causal, None),
    (MaskUnderCondition, _not_causal, None),
    (MaskChosen, _not_causal, None),
    (ScaleByStep, _far, None),
    (ConditionChangedInside, _far, None),
    (OwnDropout, lambda model: None, None),
]


@pytest.mark.parametrize(("kind", "change", "later"), _NEXT_TIME, ids=lambda each: getattr(each, "__name__", ""))
def test_exact_or_refused_also_next_time(kind, change, later):
    model, original = kind(), kind()
    patches = patched(model, x())
    for each in (model, original):
        change(each)
        each.train()
    original.step = model.step
    later = x() if later is None else later
    assert difference(results(original, later), results(model, later)) <= TOLERANCE
    patches.revert()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ConditionBoundInside, "the condition cannot be evaluated earlier"),
        (HelperWithCondition, "masked may behave differently in another call"),
        (OwnDropout, "is not a torch module"),
    ],
)
def test_refused_with_a_reason(kind, reason):
    found = reasons(kind(), x())
    assert any(reason in each for each in found), found


def test_another_argument_next_time():
    """The number that was relied on is asked for at each call."""
    model = DimensionByArgument()
    original = copy.deepcopy(model)
    patches = patched(model, x())
    assert "if dim == -1:" in patches.diff
    for each in (model, original):
        each.eval()
    for dim in (-1, -2, -1):
        given = x()
        torch.testing.assert_close(model(given, dim=dim), original(given, dim=dim))
    patches.revert()


# ----------------------------------------------------------------------------------------------------------------------
# What else is called
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Ticks, "also calls tick"),
        (ScaledAfterBias, "a mask is added before the scores are scaled"),
        (PartWithoutGradient, "gradients are disabled for part of the pattern"),
    ],
)
def test_more_than_the_pattern_is_refused(kind, reason):
    found = reasons(kind(), x())
    assert any(reason in each for each in found), found


def test_code_that_the_edit_cannot_reach_is_named():
    """A part that the model does not register, and a method of an object that is no module."""
    found = reasons(PartInAList(), x())
    assert any("forward belongs to Attending, which is not part of the model" in each for each in found), found
    found = reasons(OfAnObject(), x())
    words = "attend is called neither by its own name nor as an attribute of the module"
    assert any(words in each for each in found), found


def test_floor_division_is_no_scale():
    assert reasons(FloorDivision(), x()) == []


def test_a_hook_that_makes_no_tensor_is_kept():
    model = SoftmaxModule()
    model.softmax.register_forward_hook(lambda module, args, output: None)
    assert any("hook" in each for each in reasons(model, x()))


def test_statements_between_stay():
    model = Counts()
    patched(model, x())
    model.step, model.seen = 0, []
    model(x())
    assert model.step == 1
    assert model.seen == [LENGTH]


# ----------------------------------------------------------------------------------------------------------------------
# Names
# ----------------------------------------------------------------------------------------------------------------------


def test_a_name_of_the_file_is_left_to_it():
    patches = check_exact(Named(), x())
    assert "from gradscope.recipes import attention as gradscope_attention" in patches.diff
    assert "gradscope_attention(q, k, v, scale=scale)" in patches.diff


@pytest.mark.parametrize("kind", [Loop, WeightsOnRequest, DroppedInTraining, SizesOfScores])
def test_patched_exactly(kind):
    check_exact(kind(), x())
    check_exact(kind(), x(), nn.Module.eval)
    check_exact(kind(), x(), later=x(9, batch=1))


def test_what_was_not_asked_for_in_the_recorded_step_is_still_there():
    model, original = WeightsOnRequest(), WeightsOnRequest()
    patched(model, x())
    for new, old in zip(model(x(), output_attentions=True), original(x(), output_attentions=True), strict=True):
        assert torch.equal(new, old)


def test_weights_asked_for_are_given_beside_the_output():
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = WeightsOnRequest()

        def forward(self, x):
            return self.attn(x, output_attentions=True)[0]

    patches = check_exact(Always(), x())
    assert [site.function for site in patches.sites if site.supported] == ["attention_with_weights"]


def test_a_statement_in_a_branch_stays_in_it():
    mask = torch.full((16, 16), float("-inf")).triu(1)
    patches = check_exact(MaskCutInBranch(), (x(), mask))
    added = [line for line in patches.diff.splitlines() if line.startswith("+")]
    assert (
        added[1:8]
        == [
            "+        if mask is not None:",
            "+            cut = mask[",
            "+                : x.size(1),",
            "+                : x.size(1),",
            "+            ]",
            '+            y = attention(q, k, v, scale=1.0 / (2), **attention_mask(cut, hides="added"))',
            "+        else:",
        ]
        or '**attention_mask(cut, hides="added")' in patches.diff
    )
    check_exact(MaskCutInBranch(), (x(), mask), later=(x(),))


def test_the_form_of_the_scores_is_asked_of_the_operands():
    diff = check_exact(SizesOfScores(), x()).diff
    assert "+        nd, ns = q.size(2), k.size(2)" in diff
    assert "+        return self.merged(\n" not in diff
