"""A number that a proof relied on may be another one later: the patched model does as the original in every case."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradscope.patching.edit import guard_writer
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from tests.patching import numbers_models
from tests.patching.corpus.entry import Entry
from tests.patching.exactness import TOLERANCE, call, difference, results
from tests.patching.numbers_models import (
    KINDS,
    LENGTH,
    WIDTH,
    ByTanh,
    Exact,
    NormInAHelper,
    NormIsHandedNumbers,
    Numbers,
    RMSNorm,
    Swish,
)
from tests.patching.numbers_models_more import MORE
from tests.patching.test_corpus_attention import _ENTRIES as ATTENTIONS
from tests.patching.test_corpus_others import POSITIVES

_ALL = (*KINDS, *MORE)
_CHANGES = [(kind, name, value) for kind in _ALL for name, value in kind.changes.items()]


def batch() -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH)


@pytest.mark.parametrize(("kind", "name", "value"), _CHANGES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_another_number_later(kind: type[Numbers], name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind()
    original = copy.deepcopy(model)
    patches = Patches(plan(model, batch()))
    patches.apply()
    assert patches.table.supported.any(), patches.table.reasons.tolist()
    later = batch()
    assert difference(results(original.eval(), later), results(model.eval(), later)) <= TOLERANCE
    if name.startswith("global "):
        monkeypatch.setattr(numbers_models, name.removeprefix("global "), value)
    for each in (model, original):
        if hasattr(each, name):
            setattr(each, name, value)
    changed = results(original, later)
    assert difference(changed, results(model, later)) <= TOLERANCE
    patches.revert()
    assert difference(changed, results(model, later)) == 0


_LEARNT = [
    (kind, name)
    for kind in (RMSNorm, NormInAHelper, NormIsHandedNumbers, Exact, ByTanh, Swish)
    for name in kind.changes
    if name != "global SLOPE" and name != "size"
]


@pytest.mark.parametrize("form", ["parameter", "changed", "for each feature", "tensor"])
@pytest.mark.parametrize(("kind", "name"), _LEARNT, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_number_becomes_a_tensor_later(kind: type[Numbers], name: str, form: str) -> None:
    """A parameter that equals the number has a gradient; one for each feature is no condition."""
    model = kind().double()
    original = copy.deepcopy(model)
    patches = Patches(plan(model, batch().double()))
    patches.apply()
    assert patches.table.supported.any(), patches.table.reasons.tolist()
    value = torch.tensor(getattr(model, name), dtype=torch.float64)
    value = {"changed": value + 0.3, "for each feature": value.repeat(WIDTH)}.get(form, value)
    for each in (model, original):
        delattr(each, name)
        setattr(each, name, value.clone() if form == "tensor" else nn.Parameter(value.clone()))
    later = batch().double()
    assert difference(results(original, later), results(model, later)) <= TOLERANCE
    patches.revert()


@pytest.mark.parametrize("kind", _ALL, ids=lambda kind: kind.__name__)
def test_the_new_code_runs_while_the_numbers_hold(kind: type[Numbers]) -> None:
    """Each condition that was written holds for the recorded numbers: the old code behind it is not run."""
    model = kind().eval()
    patches = Patches(plan(model, batch()))
    patches.apply()
    assert _recipes_run(model)
    patches.revert()
    assert not _recipes_run(model)


# The new code reads these itself: a schedule of dropout is no reason to go back to the old.
_READ = [
    *((numbers_models.Attention, name) for name in ("share", "scale", "training")),
    *((numbers_models.Loss, name) for name in ("ignored", "smoothing", "how")),
    (RMSNorm, "eps"),
]


@pytest.mark.parametrize(("kind", "name"), _READ, ids=lambda each: getattr(each, "__name__", str(each)))
def test_the_new_code_runs_on_with_numbers_that_it_reads(kind: type[Numbers], name: str) -> None:
    model = kind()
    patches = Patches(plan(model, batch()))
    patches.apply()
    setattr(model, name, kind.changes.get(name, False))
    assert _recipes_run(model)
    assert f"{name} ==" not in patches.diff and f"{name} is" not in patches.diff


def _recipes_run(model: nn.Module) -> bool:
    files: set[str] = set()
    given = batch()
    before = sys.getprofile()
    sys.setprofile(lambda frame, _event, _argument: files.add(frame.f_code.co_filename))
    try:
        model(given)
    finally:
        sys.setprofile(before)
    return any(Path(each).parent.name == "recipes" for each in files)


def _floats(model: nn.Module) -> Iterator[tuple[str, str, float]]:
    for path, module in model.named_modules():
        if not type(module).__module__.startswith("torch."):
            for name, value in vars(module).items():
                if isinstance(value, float):
                    yield path, name, value


@pytest.mark.parametrize("entry", [*ATTENTIONS, *POSITIVES], ids=lambda entry: entry.name)
def test_every_float_of_the_corpus(entry: Entry) -> None:
    torch.manual_seed(7)
    model, given = entry.build()
    model.eval()
    found = list(_floats(model))
    if not found:
        return
    original = copy.deepcopy(model)
    Patches(plan(model, given, entry.loss)).apply()
    for path, name, value in found:
        for each in (model, original):
            setattr(each.get_submodule(path), name, value * 1.25 + 0.125)
        torch.manual_seed(7)
        expected = _values(call(original, given))
        torch.manual_seed(7)
        for one, other in zip(expected, _values(call(model, given)), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
        for each in (model, original):
            setattr(each.get_submodule(path), name, value)


def _values(output: Any) -> list[torch.Tensor]:
    from gradscope.capture.storages import tensors_in

    return [each.detach() for each in tensors_in(output) if each.is_floating_point()]


@pytest.mark.parametrize("value", [[16], (16,), torch.Size([16]), [1, 2.5], "mean", -2, True])
def test_a_condition_holds_for_the_value_it_was_written_for(value: Any) -> None:
    """A list is equal to no tuple."""
    text = guard_writer._test(ast.parse("held").body[0].value, "held", value, multiplies=False)  # type: ignore[attr-defined]
    assert eval(text, {"held": value})
    assert not eval(text, {"held": None})


@pytest.mark.parametrize("value", [True, False])
def test_a_tensor_is_no_truth_value(value: bool) -> None:
    """It may want a gradient."""
    text = guard_writer._test(ast.parse("held").body[0].value, "held", value, multiplies=False)  # type: ignore[attr-defined]
    assert not eval(text, {"held": torch.tensor(float(value))})
