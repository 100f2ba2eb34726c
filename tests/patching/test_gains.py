"""What counts as slower and hungrier, and how both ways are measured in turns; by a clock that is set."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from gradscope.patching import gains
from gradscope.patching.compare import compare
from gradscope.patching.gains import Gain, Side, compare_work, sides_of
from gradscope.patching.unit import GRADIENT

CPU = torch.device("cpu")
MIB = 1 << 20


class Clock:
    """A clock that stands still but for the work, and a count of peaks asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 1_000, []
        self.peaks = iter(range(100, 200))
        monkeypatch.setattr(gains.time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(gains, "peaks_bytes", self._peaks)

    def _peaks(self, works: Any, device: Any, *, settled: bool) -> list[int]:
        found = []
        for work in works:
            work()
            found.append(next(self.peaks))
        self.log.append(f"{len(works)} peaks, settled {settled}")
        return found

    def way(self, name: str, times: list[int]) -> Any:
        """Work that takes these times, the last again and again, and what is called before it."""
        left = list(times)

        def work() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work, functools.partial(self.log.append, f"to {name}")


def test_a_side_is_the_median_and_the_distance_of_the_quartiles(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    # The first of each is the run whose memory is measured.
    old, new = sides_of(
        [clock.way("old", [0, 10, 20, 30, 40, 1000]), clock.way("new", [0, 5, 5, 5, 5, 5])], CPU, 5, settled=False
    )
    assert (old, new) == (Side(30, 20, 100), Side(5, 0, 101))


def test_both_ways_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    sides_of([clock.way("old", [1]), clock.way("new", [1])], CPU, 2, settled=True)
    turn = ["to old", "old", "to new", "new"]
    assert clock.log == [*turn, "2 peaks, settled True", *turn, *turn]


def test_what_switching_takes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def switch() -> None:
        clock.now += 1_000_000

    work, _ = clock.way("only", [0, 7, 8, 9])
    assert sides_of([(work, switch)], CPU, 3, settled=True) == [Side(8, 1, 100)]


def test_a_peak_that_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    sides = sides_of([clock.way("old", [1]), clock.way("new", [1])], CPU, 1, settled=True, first_peak=7)
    assert [side.peak_bytes for side in sides] == [7, 100]
    assert clock.log[:3] == ["to new", "new", "1 peaks, settled True"]


def test_one_round_has_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sides_of([Clock(monkeypatch).way("only", [0, 7])], CPU, 1, settled=False) == [Side(7, 0, 100)]


def test_a_gain_is_of_the_first_way_over_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    (old, _), (new, _) = clock.way("old", [0, 50]), clock.way("new", [0, 30])
    switched: list[bool] = []
    gain = compare_work(old, new, switched.append, CPU, rounds=2)
    assert (gain.before.wall_ns, gain.after.wall_ns, gain.saved_ns, gain.saved_bytes) == (50, 30, 20, -1)
    assert switched == [False, True] * 3


def gain(before: tuple[int, int, int], after: tuple[int, int, int]) -> Gain:
    return Gain(Side(*before), Side(*after))


@pytest.mark.parametrize(
    ("after_ns", "spreads", "slower"),
    [
        (1_020, (0, 0), False),  # two percent are noise ...
        (1_021, (0, 0), True),
        (1_050, (50, 0), False),  # ... and so is what either way differs from itself
        (1_050, (0, 50), False),
        (1_051, (50, 50), True),
        (900, (0, 0), False),
    ],
)
def test_slower_is_beyond_the_noise_of_either(after_ns: int, spreads: tuple[int, int], slower: bool) -> None:
    assert gain((1_000, spreads[0], 0), (after_ns, spreads[1], 0)).slower is slower


@pytest.mark.parametrize(
    ("before", "more", "whole", "hungrier"),
    [
        (0, MIB, 0, False),
        (0, MIB + 1, 0, True),
        (100 * MIB, 2 * MIB, 0, False),  # two percent of the work's own peak ...
        (100 * MIB, 2 * MIB + 1, 0, True),
        (10 * MIB, 2 * MIB, 100 * MIB, False),  # ... or of the step's
        (10 * MIB, 2 * MIB + 1, 100 * MIB, True),
        (100 * MIB, -MIB, 0, False),
    ],
)
def test_hungrier_is_beyond_a_megabyte_and_the_noise(before: int, more: int, whole: int, hungrier: bool) -> None:
    assert gain((0, 0, before), (0, 0, before + more)).hungrier(whole) is hungrier


# --------------------------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({}, "y exists on one side only"),
        ({"y": TRUE.float(), "z": TRUE}, "z exists on one side only"),
        ({"y": TRUE}, r"y is \(2,\) float64, it was \(2,\) float32"),
        ({"y": TRUE.float()[None]}, r"y is \(1, 2\) float32, it was \(2,\) float32"),
    ],
)
def test_what_is_not_alike_is_refused(new: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(new, {"y": TRUE.float()}, {"y": TRUE})
