"""Finding the one of several equal layers that stands out: by ratios in each step, against the others' own scatter."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscope.tables import siblings
from gradscope.tables.siblings import outside_ratio, typical_excess_ns, typical_ratio

MS = 1_000_000


def _others(steps: int = 5, count: int = 4) -> list[list[int]]:
    """Equal layers that scatter by 2 %."""
    draw = random.Random(0)
    return [[round(MS * draw.uniform(0.99, 1.01)) for _ in range(steps)] for _ in range(count)]


def test_a_layer_that_is_slower_in_each_step() -> None:
    ratio = outside_ratio([2 * MS] * 5, _others(), 1.3)
    assert ratio == pytest.approx(2.0, rel=0.02)
    assert typical_excess_ns([2 * MS] * 5, _others()) == pytest.approx(MS, rel=0.02)
    assert outside_ratio([MS // 2] * 5, _others(), 1.3) == pytest.approx(0.5, rel=0.02)


def test_a_layer_that_takes_no_time_stands_out() -> None:
    """As a frozen block does in backward; not where it took some in two steps of five."""
    assert outside_ratio([0] * 5, _others(), 1.3) == 0
    assert outside_ratio([0, 0, MS, 0, MS], _others(), 1.3) is None


@pytest.mark.parametrize("slow", [133 * MS, 10_000 * MS])
@pytest.mark.parametrize("steps", [2, 3, 5, 8])
def test_one_interrupted_step_is_nothing(slow: int, steps: int) -> None:
    """A row x133 its siblings was one step of five."""
    for at in range(steps):
        odd = [slow if step == at else MS for step in range(steps)]
        others = _others(steps)
        assert outside_ratio(odd, others, 1.3) is None
        assert (typical_excess_ns(odd, others) or 0) < 0.05 * MS


def test_an_interruption_of_another_does_not_hide_it() -> None:
    others = _others()
    others[1][3] = 50 * MS
    assert outside_ratio([2 * MS] * 5, others, 1.3) == pytest.approx(2.0, rel=0.02)


def test_a_slow_step_of_all_says_nothing() -> None:
    """The ratios are of one step."""
    others = [[MS, MS, 40 * MS, MS, MS] for _ in range(4)]
    assert typical_ratio([MS, MS, 40 * MS, MS, MS], others) == 1.0
    assert outside_ratio([MS, MS, 40 * MS, MS, MS], others, 1.3) is None


def test_layers_that_differ_anyway_have_no_odd_one() -> None:
    """Stages of another size each: 1, 2, 3 and 5."""
    others = [[size * MS] * 5 for size in (1, 2, 3)]
    assert outside_ratio([5 * MS] * 5, others, 1.3) is None


def test_little_is_known_of_two_or_of_nothing() -> None:
    assert outside_ratio([5 * MS] * 5, _others(count=1), 1.3) is None
    assert outside_ratio([], _others(), 1.3) is None
    assert outside_ratio([MS] * 5, [[0] * 5, [0] * 5], 1.3) is None
    assert typical_excess_ns([], _others()) is None


@pytest.mark.parametrize(("size", "found"), [(0.5, None), (0.3, 0.3)])
def test_a_faster_layer_is_held_against_the_fastest_of_the_others(size: float, found: float | None) -> None:
    """Others from 0.85 to 1.15: a layer of half their size is within three times that, one of a third is not."""
    others = [[round(each * MS)] * 5 for each in (0.85, 1.0, 1.0, 1.15)]
    assert outside_ratio([round(size * MS)] * 5, others, 1.3) == found


def test_others_of_which_one_takes_no_time_show_no_scatter() -> None:
    """Of two, one frozen: the usual is half of the other, which makes any layer twice as slow."""
    assert outside_ratio([MS] * 5, [[MS] * 5, [0] * 5], 1.3) is None


@pytest.mark.parametrize(
    ("steps", "ratio"), [([2, 3], 2.0), ([0.5, 0.8], 0.8), ([0.5, 3], 1.0), ([3, 0.5], 1.0), ([1.5], 1.5)]
)
def test_of_few_steps_the_most_ordinary_counts(steps: list[float], ratio: float) -> None:
    assert typical_ratio([round(each * MS) for each in steps], [[MS] * 2] * 3) == ratio


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=7))
def test_the_scatter_is_that_of_each_against_the_others(layers: list[list[int]]) -> None:
    """Layers of unequal numbers of steps too; by the median of the rest, counted anew for each."""
    expected = [
        found
        for index, each in enumerate(layers)
        if (found := typical_ratio(each, [*layers[:index], *layers[index + 1 :]])) is not None
    ]
    assert siblings._scatter(layers) == pytest.approx(expected)
