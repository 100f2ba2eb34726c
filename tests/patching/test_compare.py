"""How far outputs and gradients are from the truth, and from what they are compared with."""

from __future__ import annotations

import pytest
import torch

from gradscope.patching.prove.proof import compare
from gradscope.patching.prove.unit import GRADIENT

TRUE = torch.tensor([3.0, 4.0], dtype=torch.float64)


def test_a_distance_is_relative_to_the_truths_size() -> None:
    found = compare({"y": TRUE.float() + 0.5}, {"y": TRUE.float() + 0.25}, {"y": TRUE}).distances[0]
    assert found.new == pytest.approx(0.5 * 2**0.5 / 5)
    assert found.original == pytest.approx(0.25 * 2**0.5 / 5)
    assert found.limit == pytest.approx(2 * found.original + torch.finfo(torch.float32).eps)
    assert found.within


def test_what_is_nearly_nothing_is_measured_by_the_largest_of_its_like() -> None:
    """A gradient of 0 may be off by a tenth of another gradient's rounding; an output's size says nothing of it."""
    zero = torch.zeros(2, dtype=torch.float64)
    truth = {GRADIENT + "large": 100 * TRUE, GRADIENT + "zero": zero, "y": 1e6 * TRUE}
    exact = {name: value.float() for name, value in truth.items()}
    off = {**exact, GRADIENT + "zero": torch.full((2,), 1e-6)}
    found = {each.name: each for each in compare(off, exact, truth).distances}
    # The root mean square of 300 and 400, a tenth of it, over two numbers.
    assert found[GRADIENT + "zero"].new == pytest.approx(1e-6 * 2**0.5 / (0.1 * 500 / 2**0.5 * 2**0.5))
    assert found[GRADIENT + "zero"].within
    assert not compare({**exact, GRADIENT + "zero": torch.full((2,), 1e-4)}, exact, truth).within


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["new", "original"])
def test_a_number_that_is_finite_on_one_side_only_is_wrong(value: float, where: str) -> None:
    bad = torch.tensor([3.0, value])
    new, original = (bad, TRUE.float()) if where == "new" else (TRUE.float(), bad)
    errors = compare({"y": new}, {"y": original}, {"y": TRUE})
    assert not errors.within and errors.distances[0].new == float("inf")


def test_the_largest_distance_is_a_gradients_where_there_is_one() -> None:
    truth = {"y": TRUE, GRADIENT + "x": TRUE}
    exact = {name: value.float() for name, value in truth.items()}
    off = {"y": exact["y"] + 1, GRADIENT + "x": exact[GRADIENT + "x"] + 0.5}
    errors = compare(off, exact, truth)
    assert errors.largest() == pytest.approx(0.5 * 2**0.5 / 5)
    assert errors.worst is not None and errors.worst.name == "y"
    assert compare({"y": off["y"]}, {"y": exact["y"]}, truth).largest() == pytest.approx(2**0.5 / 5)
    assert compare(off, exact, truth).largest(original=True) == 0.0


@pytest.mark.parametrize("new", [float("-inf"), float("nan")])
def test_another_number_that_is_not_finite_is_wrong(new: float) -> None:
    good, bad = torch.tensor([3.0, float("inf")]), torch.tensor([3.0, new])
    assert compare({"y": good.clone()}, {"y": good}, {"y": good.double()}).within
    assert compare({"y": bad.clone()}, {"y": bad}, {"y": bad.double()}).within
    assert not compare({"y": bad}, {"y": good}, {"y": good.double()}).within


def test_the_worst_is_the_one_that_is_over_its_limit() -> None:
    """Which is told, and by which the whole is judged: another may be further off, as the original is."""
    truth = {"far": TRUE, "y": TRUE}
    original = {"far": TRUE.float() + 1, "y": TRUE.float()}
    errors = compare({"far": original["far"].clone(), "y": TRUE.float() + 1e-3}, original, truth)
    assert not errors.within
    assert errors.worst is not None and errors.worst.name == "y" and not errors.worst.within


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({}, "y exists in only one version"),
        ({"y": TRUE.float(), "z": TRUE}, "z exists in only one version"),
        ({"y": TRUE}, r"y is \(2,\) float64 instead of \(2,\) float32"),
        ({"y": TRUE.float()[None]}, r"y is \(1, 2\) float32 instead of \(2,\) float32"),
    ],
)
def test_what_is_not_alike_is_refused(new: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(new, {"y": TRUE.float()}, {"y": TRUE})
