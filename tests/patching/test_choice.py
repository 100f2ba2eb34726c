"""What is kept of several changes: those that the whole step gains by. The steps are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradscope.patching.prove import choice
from gradscope.patching.prove.choice import (
    FEWEST_ROUNDS,
    HUNGRIER,
    NO_GAIN,
    NOT_TOGETHER,
    SECONDS,
    SLOWER,
    Choice,
    Group,
    Times,
    Told,
    Way,
    choose,
)

MIB = 1 << 20
STEP = (100_000_000, 64 * MIB)


@dataclass(frozen=True)
class Change:
    """Stands for a place: what it adds to the step's time, and to its memory at each of two moments."""

    name: str
    ns: int
    early: float = 0  # MiB
    late: float = 0
    unless: str = ""  # saves time only while this one is not in

    @property
    def recipe(self) -> str:
        return self.name


class Machine:
    """Steps with some changes; the peak is the larger of two moments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, early: int = 64, late: int = 48) -> None:
        self.early, self.late, self.steps = early, late, 0
        self.asked: list[dict[str, Any]] = []  # of each measurement
        monkeypatch.setattr(choice, "measured", self._measured)
        monkeypatch.setattr(choice, "peaks_bytes", self._peaks)

    def way(self, groups: Sequence[Group]) -> Way:
        on: list[Any] = [change for group in groups for change in group]
        names = {change.name for change in on}
        ns = STEP[0] + sum(change.ns for change in on if change.unless not in names or not change.unless)
        peak = max(self.early + sum(change.early for change in on), self.late + sum(change.late for change in on))
        way = Way(lambda: None, lambda: None)
        vars(way)["ns"], vars(way)["peak"] = ns, lambda: peak * MIB
        return way

    def _measured(self, ways: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[list[Times], list[int]]:
        self.steps += len(ways)
        self.asked.append(kwargs)
        rounds = FEWEST_ROUNDS
        return [Times([way.ns] * rounds, [way.ns] * rounds) for way in ways], [way.peak() for way in ways]

    def _peaks(self, works: Sequence[Any], *args: Any, **kwargs: Any) -> list[int]:
        self.asked.append(kwargs)
        return [work() for work in works]

    def choose(self, *changes: Change) -> tuple[Choice, list[str]]:
        groups: Any = [(change,) for change in changes]
        found = choose(groups, self.way, torch.device("cpu"))
        return found, [group[0].recipe for group in found.kept]


def reasons(found: Choice) -> dict[str, str]:
    return {group[0].recipe: reason for group, reason in found.reasons.items()}


def test_savings_of_what_is_kept_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    found, kept = machine.choose(Change("a", -9_000_000, early=-9, late=-3), Change("b", -3_000_000, early=-1))
    assert kept == ["a", "b"] and found.gain is not None and found.gain.time is Told.LESS
    assert sum(saved.ns for saved in found.saved.values()) == found.gain.saved_ns == 12_000_000
    assert sum(saved.bytes for saved in found.saved.values()) == found.gain.saved_bytes == 10 * MIB
    assert machine.steps == 3  # each state once


def test_what_makes_the_step_slower_is_undone_and_the_rest_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    found, kept = machine.choose(Change("a", -9_000_000), Change("b", 4_000_000, early=-20, late=-20))
    assert kept == ["a"] and reasons(found) == {"b": SLOWER}
    assert found.gain is not None and found.gain.saved_ns == 9_000_000 and found.gain.saved_bytes == 0
    assert machine.steps == 5


def test_what_saves_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found, kept = Machine(monkeypatch).choose(Change("a", -9_000_000), Change("b", -100_000), Change("c", 0))
    assert kept == ["a"] and reasons(found) == {"b": NO_GAIN, "c": NO_GAIN}


def test_memory_alone_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, kept = Machine(monkeypatch).choose(Change("a", 0, early=-8))
    assert kept == ["a"] and found.gain is not None
    assert (found.gain.time, found.gain.saved_bytes) == (Told.NOTHING, 8 * MIB)


def test_memory_that_shows_behind_another_change_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first leans the moment that is not the peak yet: alone it shows nothing, without it the second does not."""
    found, kept = Machine(monkeypatch).choose(Change("late", 0, late=-30), Change("early", 0, early=-40))
    assert kept == ["late", "early"] and found.gain is not None
    assert found.gain.saved_bytes == 40 * MIB


def test_a_little_more_at_each_of_many_places_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a percent each is noise; all of them are not, though every one makes the step faster."""
    changes = [Change(f"c{number}", -2_000_000, early=1) for number in range(6)]
    machine = Machine(monkeypatch, early=256)
    found, kept = machine.choose(*changes)
    assert found.gain is not None and -found.gain.saved_bytes <= 256 * MIB // 100
    assert 0 < len(kept) < 6 and set(reasons(found).values()) == {HUNGRIER}


def test_what_is_hungrier_may_stay_where_the_step_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found, kept = Machine(monkeypatch).choose(Change("a", 0, early=-20, late=-20), Change("b", -5_000_000, early=8))
    assert kept == ["a", "b"] and not found.reasons


def test_of_two_that_do_the_same_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found, kept = Machine(monkeypatch).choose(Change("a", -5_000_000), Change("b", -5_000_000, unless="a"))
    assert kept == ["a"] and reasons(found) == {"b": NO_GAIN}


@pytest.mark.parametrize(("whole", "early"), [(Told.NOTHING, 0), (Told.MORE, 0), (Told.MORE, -8)])
def test_a_whole_that_does_not_show_is_taken_apart(monkeypatch: pytest.MonkeyPatch, whole: Told, early: int) -> None:
    """Each seems to gain, and both together do not: the one that saves less goes. Memory does not pay for time."""
    machine = Machine(monkeypatch)
    real = choice.told

    def of_two(before: Times, after: Times) -> Told:
        found = real(before, after)
        return whole if before.wall_ns[0] - after.wall_ns[0] == 10_000_000 else found

    monkeypatch.setattr(choice, "told", of_two)
    found, kept = machine.choose(Change("a", -9_000_000), Change("b", -1_000_000, early=early))
    assert kept == ["a"] and reasons(found) == {"b": NOT_TOGETHER}
    assert found.gain is not None and found.gain.saved_ns == 9_000_000


def test_a_gain_that_showed_once_need_not_show_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    real = machine._measured

    def measured(ways: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[list[Times], list[int]]:
        times, peaks = real(ways)
        if len(ways) == 3:  # the second time, when c is out
            times[1] = times[0]
        return times, peaks

    monkeypatch.setattr(choice, "measured", measured)
    found, kept = machine.choose(Change("a", -3_000_000), Change("b", -9_000_000), Change("c", 3_000_000))
    assert kept == ["a", "b"] and reasons(found) == {"c": SLOWER}


def test_what_goes_for_its_time_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first the step is hungrier: that is gone with it, and the other is leaner."""
    found, kept = Machine(monkeypatch).choose(
        Change("a", 5_000_000, early=20), Change("b", -9_000_000, early=-2), Change("c", -9_000_000)
    )
    assert kept == ["b", "c"] and reasons(found) == {"a": SLOWER}


def test_room_for_another_is_no_gain_once_that_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no proof of its time in the second round is what made the step faster in the first, and no other."""
    found, kept = Machine(monkeypatch).choose(
        Change("late", 0, late=-30), Change("slow", 5_000_000, early=-40), Change("fast", -9_000_000)
    )
    assert kept == ["fast"] and reasons(found) == {"slow": SLOWER, "late": NO_GAIN}


def test_a_percent_is_of_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, late=0)
    found, kept = machine.choose(Change("a", 0, early=-60), Change("b", 0, early=-0.5))
    assert kept == ["a"] and reasons(found) == {"b": NO_GAIN}


def test_every_state_and_the_whole_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds go on until they are, as long as there is time: all measurements together have that of one."""
    now = iter(range(0, 1000, 4))
    monkeypatch.setattr(choice.time, "perf_counter", lambda: float(next(now)))
    machine = Machine(monkeypatch)
    found, _ = machine.choose(Change("a", -9_000_000), Change("b", 0), Change("c", 4_000_000), Change("d", 6_000_000))
    first, _, second = machine.asked
    assert list(first["pairs"]) == [(0, 1), (1, 2), (2, 3), (3, 4)] and list(second["pairs"]) == [(0, 1)]
    assert (first["sized"], second["sized"]) == ((0, 4), (0, 1)), "how much the whole gains is shown"
    assert all(each["settled"] for each in machine.asked), "a first step makes what the next ones use"
    assert (first["seconds"], second["seconds"]) == (SECONDS - 4, SECONDS - 8)
    assert found.before is not None and (found.before.wall_ns, found.before.peak_bytes) == STEP


def test_a_few_kilobytes_are_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, early=1, late=0)
    assert machine.choose(Change("a", 0, early=-16 / 1024))[1] == []  # 16 KiB, more than a percent
    assert machine.choose(Change("a", 0, early=-17 / 1024))[1] == ["a"]


def test_nothing_is_kept_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, kept = Machine(monkeypatch).choose()
    assert (kept, found.gain, found.saved) == ([], None, {})
    found, kept = Machine(monkeypatch).choose(Change("a", 1_000_000))
    assert (kept, found.gain) == ([], None) and reasons(found) == {"a": SLOWER}
    assert found.before is not None and found.before.wall_ns == STEP[0], "it was measured all the same"


def test_what_is_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    groups: Any = [(Change("a", -9_000_000),), (Change("b", 9_000_000),)]
    choose(groups, Machine(monkeypatch).way, torch.device("cpu"), said.append)
    assert said == ["measuring the step without and with a, b", "measuring the step without and with a"]
