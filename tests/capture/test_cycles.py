"""Where a training step of several optimizers ends."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice, pairwise

import pytest

from gradscope.capture.training import CycleFinder


def cut(order: str, built: str | None = None) -> str:
    """The order with a bar behind each end of a step.

    Args:
        built: the optimizers that exist from the start; None: those of the order.
    """
    seen: set[str] = set()
    finder = CycleFinder(lambda: bool(set(order if built is None else built) - seen))
    found = ""
    for name in order:
        seen.add(name)
        found += name + "|" * finder.advance(ord(name))
    return found


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("cccgcccgcccgcccg", "cccgcccg|cccg|cccg|"),
        ("gcccgcccgcccgccc", "gcccgccc|gccc|gccc|"),
        ("cgcccccgcccccgcccc", "cgcccccgcccc|cgcccc|"),
        ("ababab", "abab|ab|"),
        ("aabaabaab", "aabaab|aab|"),
        ("abcabcabc", "abcabc|abc|"),
        ("aaaa", "aa|a|a|"),
    ],
)
def test_a_step_is_a_whole_cycle(order: str, steps: str) -> None:
    assert cut(order) == steps


def test_pretraining_of_one_is_no_part_of_the_cycle() -> None:
    steps = cut("c" * 20 + "cg" * 6).split("|")[-4:-1]
    assert [sorted(step) for step in steps] == [["c", "g"]] * 3


def test_an_optimizer_that_has_not_stepped_is_waited_for() -> None:
    """Five critic steps look like a cycle of one until the generator steps."""
    assert cut("cccccgcccccgcccccg") == "cccccgcccccg|cccccg|"


def test_it_is_not_waited_for_ever() -> None:
    assert cut("a" * 14, built="ab") == "a" * 12 + "|a|a|"


def test_an_optimizer_that_is_dropped_ends_no_step_any_more() -> None:
    assert cut("ababaaaa") == "abab|aa|a|a|"


def test_a_cycle_that_changes_is_found_again() -> None:
    steps = cut("ababab" + "aab" * 6).split("|")[-3:-1]
    assert [sorted(step) for step in steps] == [["a", "a", "b"]] * 2


def test_one_that_is_built_late_is_found_all_the_same() -> None:
    steps = cut("cccg" * 6, built="c").split("|")[-3:-1]
    assert [sorted(step) for step in steps] == [["c", "c", "c", "g"]] * 2


@pytest.mark.parametrize("period", [3, 5])
def test_every_step_after_the_first_holds_the_same(period: int) -> None:
    order = "".join(islice(cycle("c" * period + "g"), 60))
    steps = cut(order).split("|")[1:-1]
    assert len(steps) > 5 and set(steps) == {"c" * period + "g"}


def test_no_order_at_all_falls_back_to_rounds_and_says_so() -> None:
    finder = CycleFinder(lambda: False)
    order = [(number * number) % 7 % 2 + (number % 5 == 0) for number in range(300)]
    ends = [place for place, number in enumerate(order) if finder.advance(number)]
    assert finder.irregular and len(ends) > 5
    # What ends the first round ends all that follow: nothing else is looked for any more.
    assert len({order[place] for place in ends[4:]}) == 1


def told(order: str) -> tuple[CycleFinder, str]:
    """A finder that was told of a whole order, and the optimizers at which it ended steps."""
    finder = CycleFinder(lambda: False)
    return finder, "".join(name for name in order if finder.advance(ord(name)))


def without_repeats(length: int) -> str:
    """Three letters in an order in which nothing comes twice in a row (A. Thue, 1906)."""
    ones = [bin(number).count("1") % 2 for number in range(length + 1)]
    return "".join("abc"[after - before] for before, after in pairwise(ones))


def test_the_rarest_ends_a_round() -> None:
    order = without_repeats(300)
    (often, most), (_, next_to_it), (_, least) = Counter(order[:256]).most_common()
    assert most > next_to_it >= least
    finder, ends = told(order)
    assert finder.irregular and len(ends) > 5
    # One of the rarer ones; the first end is where the search was given up.
    assert len(set(ends[1:])) == 1 and often not in ends[1:]


def test_an_order_that_changes_once_is_no_irregular_one() -> None:
    finder, _ = told("ababab" + "aab" * 6)
    assert not finder.irregular and finder.counts() == {ord("a"): 2, ord("b"): 1}


def test_a_round_holds_those_of_the_cycle_before() -> None:
    """What broke it the last time was a step of one of them alone."""
    finder, _ = told("ab" * 3 + "aab" * 5 + "aaab" * 6)
    assert finder.irregular and set(finder.counts()) == {ord("a"), ord("b")}


@pytest.mark.parametrize("order", ["ab" * 3 + "aab" * 5 + "aaab" * 6, "ab" * 3 + "aaab" * 3 + "ab" * 6])
def test_where_an_order_is_given_up_no_step_is_cut_in_two(order: str) -> None:
    """What ends a round does so from the first on, and nothing else: not what only broke the order."""
    finder, given_up = CycleFinder(lambda: False), 0
    for name in order:
        ended = finder.advance(ord(name))
        assert not finder.irregular or ended is (name == "b")
        given_up += finder.irregular
    assert given_up > 10


def test_one_that_stepped_long_ago_is_not_waited_for() -> None:
    """A warm-up that steps once takes no part in the steps that follow."""
    assert cut("w" + "a" * 70) == "w" + "a" * 64 + "|a" * 6 + "|"


@pytest.mark.parametrize(("order", "cycles"), [("aaaa", 4), ("abababababab", 6), ("gcccgcccgccc", 3)])
def test_every_cycle_is_an_end_or_passed_over(order: str, cycles: int) -> None:
    seen: set[str] = set()
    finder = CycleFinder(lambda: bool(set(order) - seen))
    ends = [seen.add(name) or finder.advance(ord(name)) for name in order]
    assert finder.passed_over + sum(ends) == cycles


def test_an_order_that_does_not_come_back_is_told() -> None:
    """Optimizers that train in stages, of other lengths: none of their steps ends a training step."""
    finder = CycleFinder(lambda: False)
    finder.advance(ord("z"))
    assert not any(finder.advance(ord(name)) for name in "aaaaabbbbbbbccc")
    assert finder.unordered == (4, 16)
