"""Ways measured in turns, and what a sign test tells of them; by a clock that is set."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from gradscope.patching.prove import choice as turns
from gradscope.patching.prove.choice import FEWEST_ROUNDS, MOST_ROUNDS, Side, Times, Told, Way, measured, told

CPU = torch.device("cpu")


class Clock:
    """A clock that stands still but for the work, and a count of peaks asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 1_000, list[str]()
        self.peaks = iter(range(100, 200))
        for name in ("perf_counter_ns", "process_time_ns"):
            monkeypatch.setattr(turns.time, name, lambda: self.now)
        monkeypatch.setattr(turns.time, "perf_counter", lambda: self.now / 1e9)
        monkeypatch.setattr(turns, "peaks_bytes", self._peaks)
        monkeypatch.setattr(turns, "SHORTEST_NS", 0)

    def _peaks(self, works: Any, device: Any, *, settled: bool) -> list[int]:
        found = []
        for work in works:
            work()
            found.append(next(self.peaks))
        self.log.append(f"{len(works)} peaks, settled {settled}")
        return found

    def way(self, name: str, *times: int) -> Way:
        """Work that takes these times, the last again and again."""
        left = list(times)

        def work() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Way(functools.partial(self.log.append, f"to {name}"), work)


def test_a_side_is_the_median_and_the_distance_of_the_quartiles() -> None:
    assert Times([10, 20, 30, 40, 1000], [0] * 5).side(7) == Side(30, 20, 7)
    assert Times([8], [0]).side(7) == Side(8, 0, 7)


def test_all_ways_take_turns_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times, peaks = measured([clock.way("old", 0, 9), clock.way("new", 0, 5)], CPU, pairs=[(0, 1)], settled=True)
    there, back = ["to old", "old", "to new", "new"], ["to new", "new", "to old", "old"]
    assert clock.log == [*there, "2 peaks, settled True", *there, *back, *there, *back, *there, *back]
    assert ([each.wall_ns for each in times], peaks) == ([[9] * 6, [5] * 6], [100, 101])


def test_what_switching_takes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def switch() -> None:
        clock.now += 1_000_000

    (times,), _ = measured([Way(switch, clock.way("only", 0, 7).work)], CPU)
    assert times.wall_ns == times.busy_ns == [7] * FEWEST_ROUNDS


def test_a_short_step_fills_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the mean of many: what the system takes in between is noise of several times a short step's length."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(turns, "SHORTEST_NS", 1000)
    times, _ = measured([clock.way("old", 0, 100, 190, 10), clock.way("new", 0, 1000)], CPU, pairs=[(0, 1)])
    assert times[1].wall_ns == times[1].busy_ns == [1000] * len(times[1].wall_ns)  # as long as a turn: once
    assert times[0].wall_ns[:2] == times[0].busy_ns[:2] == [1000 // 73, 10]  # 100, 190 and 71 times 10; 100 times 10
    assert clock.log.count("old") == 1 + 73 + 100 * (len(times[0].wall_ns) - 1)


def test_a_step_that_waits_is_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processor time comes to a turn's after minutes only."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(turns, "SHORTEST_NS", 1000)
    monkeypatch.setattr(turns.time, "process_time_ns", lambda: 7)
    monkeypatch.setattr(turns, "_LONGEST_NS", 5000)
    times, _ = measured([clock.way("only", 0, 900)], CPU)
    assert times[0].wall_ns == [900] * FEWEST_ROUNDS and clock.log.count("only") == 1 + 6 * FEWEST_ROUNDS


@pytest.mark.parametrize(
    ("new", "rounds"),
    [
        ((0, 90), FEWEST_ROUNDS),  # as clear as can be
        ((0, 100, 90, 90, 90, 90, 90, 90, 90), 9),  # one of six was not faster: eight of nine are
        ((0, *[90, 110] * 20), 9),  # nothing to be seen, and nothing to come
        ((0, 90, 110, 90, 90, 110, *[90] * 9), 14),  # seven of nine are too few: twelve of fourteen
    ],
)
def test_rounds_go_on_until_the_pairs_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, new: tuple[int, ...], rounds: int
) -> None:
    clock = Clock(monkeypatch)
    times, _ = measured([clock.way("old", 0, 100), clock.way("new", *new)], CPU, pairs=[(0, 1)])
    assert {len(each.wall_ns) for each in times} == {rounds}


def test_rounds_end_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    second = 1_000_000_000
    slow = clock.way("new", 0, *[3 * second, 3 * second, 5 * second] * 9)
    times, _ = measured([clock.way("old", 0, 4 * second), slow], CPU, pairs=[(0, 1)], seconds=40.0)
    assert len(times[0].wall_ns) == 6


def times(wall: list[int], busy: list[int] | None = None) -> Times:
    return Times(wall, wall if busy is None else busy)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([990] * 6, Told.LESS),
        ([1010] * 6, Told.MORE),
        ([995] * 6, Told.NOTHING),  # half a percent is not looked for
        ([990] * 5, Told.NOTHING),  # five heads of a coin are no wonder where it is thrown again and again
        ([990] * 5 + [1010], Told.NOTHING),
        ([990] * 8 + [1010], Told.LESS),
        ([990] * 5 + [1000] * 3, Told.NOTHING),  # rounds that are alike are no heads
        ([500] * 2 + [1010] * 3, Told.NOTHING),  # two large differences are two
    ],
)
def test_a_difference_is_told_by_how_often_it_is_seen(after: list[int], expected: Told) -> None:
    assert told(times([1000] * len(after)), times(after)) is expected


@pytest.mark.parametrize(
    ("wall", "busy", "expected"),
    [
        ([900, 1100, 950, 900, 1300, 950], [800] * 6, Told.LESS),  # the machine is busy: the work is less
        ([1100, 900, 1050, 1100, 700, 1050], [800] * 6, Told.NOTHING),  # but it takes longer
        ([1100, 900, 1050, 1100, 700, 1050], [1200] * 6, Told.MORE),
        ([900, 1100, 950, 900, 1300, 950], [1200] * 6, Told.NOTHING),  # more work in less time
        ([900] * 6, [1800] * 6, Told.LESS),  # more threads for less time
    ],
)
def test_processor_time_is_asked_where_wall_time_says_nothing(wall: list[int], busy: list[int], expected: Told) -> None:
    assert told(times([1000] * 6), times(wall, busy)) is expected


def test_what_is_alike_is_seldom_told_apart() -> None:
    """By a machine whose rounds scatter by a fifth; a gain of a tenth is found in most runs of 25 rounds."""
    draw = random.Random(0)

    def runs(gain: float) -> list[Told]:
        found = []
        for _ in range(400):
            rounds = [1_000_000 * draw.uniform(0.9, 1.1) for _ in range(MOST_ROUNDS)]
            after = [(1 - gain) * each * draw.uniform(0.9, 1.1) for each in rounds]
            found.append(told(times([int(each) for each in rounds]), times([int(each) for each in after])))
        return found

    alike, better = runs(0.0), runs(0.1)
    assert alike.count(Told.NOTHING) >= 370  # 2 % on each side, once more by chance
    assert better.count(Told.LESS) >= 380 and Told.MORE not in better


@pytest.mark.parametrize("same_clock", [True, False])
def test_looking_again_and_again_fools_in_one_of_twenty(same_clock: bool) -> None:
    """Of ways that are alike, by both clocks and at every number of rounds at which it is asked."""
    draw = random.Random(1)
    found: list[Told] = []
    for _ in range(2000):
        apart = [[draw.choice((990, 1010)) for _ in range(MOST_ROUNDS)] for _ in range(2)]
        for rounds in turns._LOOKS:
            wall, busy = apart[0][:rounds], apart[0 if same_clock else 1][:rounds]
            seen = told(times([1000] * rounds), times(wall, busy))
            if seen is not Told.NOTHING:
                break
        found.append(seen)
    for side in (Told.LESS, Told.MORE):
        assert found.count(side) <= 0.06 * len(found) + 3 * (0.06 * len(found)) ** 0.5  # three deviations of a count


def test_rounds_go_on_until_the_size_of_the_whole_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of six tell that there is a gain, of five or of fifty."""
    scattered = (0, 95, 50, 95, 60, 90, 55)

    def rounds(new: tuple[int, ...], **wanted: Any) -> int:
        clock = Clock(monkeypatch)
        found, _ = measured([clock.way("old", 0, 100), clock.way("new", *new)], CPU, **wanted)
        return len(found[0].wall_ns)

    assert rounds((*scattered, 75), pairs=[(0, 1)]) == FEWEST_ROUNDS
    assert rounds((*scattered, 75), sized=(0, 1)) == 14  # eight more that agree
    assert rounds((*scattered, *scattered[1:] * 4), sized=(0, 1)) == MOST_ROUNDS
    assert rounds((0, 70, 71, 72, 73, 74, 75), sized=(0, 1)) == FEWEST_ROUNDS


def test_what_a_device_has_to_do_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the clock starts, for what came before; and before it stops."""
    clock, queued = Clock(monkeypatch), [0]

    def wait(device: torch.device) -> None:
        clock.now += queued[0]
        queued[0] = 0

    def queue(ns: int) -> None:
        queued[0] += ns

    monkeypatch.setattr(turns, "_wait", wait)
    way = Way(lambda: queue(1_000_000), lambda: queue(7))
    (found,), _ = measured([way], torch.device("cuda"))
    assert found.wall_ns == [7] * FEWEST_ROUNDS


def test_on_a_device_the_hosts_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(turns.time, "process_time_ns", lambda: 7 * clock.now)
    monkeypatch.setattr(turns, "_wait", lambda device: None)
    (found,), _ = measured([clock.way("only", 0, 7)], torch.device("cuda"))
    assert found.busy_ns == found.wall_ns
