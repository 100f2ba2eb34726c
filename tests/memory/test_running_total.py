"""The running total, the live set and the rises of layers, against a plain count over hand-made allocator events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gradscope.attribute.memory.blocks import NEVER, Blocks, build_blocks, events_of
from gradscope.attribute.memory.classify import Classified
from gradscope.attribute.memory.liveset import _released
from gradscope.attribute.memory.step import Running, alive_at, rise_of_layers, run_total
from gradscope.attribute.memory.timeline import flatten
from gradscope.tables import AllocationTable, Role, RowKind, Sighting
from tests.attribute.hand import Row, table_of


@dataclass
class Window:
    """Of a MemoryTrace, the measured step."""

    start_ns: int
    end_ns: int


def allocations(*events: tuple[int, int, int]) -> AllocationTable:
    """Events of (time, address, bytes)."""
    time, pointer, size = (np.array(part, np.int64) for part in zip(*events, strict=True))
    count = len(events)
    return AllocationTable(
        row=np.full(count, -1, np.int32),
        time_ns=time,
        pointer=pointer,
        bytes=size,
        device=("cpu",),
        device_of=np.zeros(count, np.int8),
        reserved=np.zeros(count, np.int64),
    )


def classified(blocks: Blocks, window: Window) -> Classified:
    """The blocks that were alive at some moment of the step."""
    first = int(np.searchsorted(blocks.events.time_ns, window.start_ns))
    last = int(np.searchsorted(blocks.events.time_ns, window.end_ns))
    alive = np.flatnonzero((blocks.born < last) & (blocks.died >= first))
    nothing: Any = np.zeros(len(alive), np.int64)
    return Classified(alive, [], nothing, nothing, [], [], nothing, nothing)


def random_events(seed: int) -> list[tuple[int, int, int]]:
    """Allocations and releases at addresses that are given out again, some released that were there before."""
    rng = np.random.default_rng(seed)
    live: dict[int, int] = {}
    events, time = [], 0
    for _ in range(80):
        time += int(rng.integers(1, 4))
        address = int(rng.integers(1, 12))
        if address in live:
            events.append((time, address, -live.pop(address)))
        else:
            live[address] = int(rng.integers(1, 100))
            events.append((time, address, live[address]))
    return events


@pytest.mark.parametrize("seed", range(40))
def test_the_total_is_that_of_a_plain_count_and_of_the_live_set(seed: int) -> None:
    events = random_events(seed)
    before = [Sighting(0, 100 + number, 1000 + number, Role.PARAMETER, -1) for number in range(3)]
    window = Window(events[20][0], events[60][0])
    blocks = build_blocks(allocations(*events), [(window.start_ns, 0)], 0, before, [])
    found = classified(blocks, window)
    running = run_total(window, blocks, found)  # type: ignore[arg-type]
    there = sum(sighting.bytes for sighting in before)
    counted = [there + sum(size for time, _, size in events if time < window.start_ns)]
    for _, _, size in events[20:60]:
        counted.append(counted[-1] + size)
    assert running.total.tolist() == counted
    assert running.time_ns.tolist() == [window.start_ns, *(event[0] for event in events[20:60])]
    assert running.peak == counted.index(max(counted))
    for entry, total in enumerate(counted):
        alive = alive_at(running, blocks, found, entry)
        assert blocks.bytes[found.block[alive]].sum() == total


def test_a_block_lives_from_its_own_event_to_the_one_before_its_release() -> None:
    blocks = build_blocks(allocations((10, 1, 5), (20, 2, 7), (30, 1, -5), (40, 2, -7)), [], 0, [], [])
    window = Window(0, 100)
    found = classified(blocks, window)
    running = run_total(window, blocks, found)  # type: ignore[arg-type]
    alive = [found.block[alive_at(running, blocks, found, entry)].tolist() for entry in range(5)]
    assert alive == [[], [0], [0, 1], [1], []]


def test_an_address_that_is_given_out_again_ends_what_lay_there() -> None:
    """The CPU's allocator does not report the release of what it gave out before the trace."""
    blocks = build_blocks(allocations((10, 1, 5), (20, 1, 9)), [], 0, [], [])
    assert (blocks.born.tolist(), blocks.died.tolist()) == ([0, 1], [1, NEVER])


def test_a_note_is_of_the_block_that_lay_there_at_its_moment() -> None:
    """A moment at the time of an event is before it."""
    events = allocations((10, 1, 5), (20, 1, -5), (30, 1, 9))
    sightings = [Sighting(mark, 1, 5, Role.OTHER, mark) for mark in (1, 2, 3, 4)]
    blocks = build_blocks(events, [(15, 1), (20, 2), (25, 3), (31, 4)], 0, sightings, [])
    assert [[seen.mark for seen in block] for block in blocks.seen] == [[1, 2], [4]]


def test_what_was_kept_is_released_once_its_last_node_is_through() -> None:
    never_saved = int(np.iinfo(np.int64).min)
    assert [_released(until, 100) for until in (never_saved, 99, 100, 101, NEVER)] == [False, True, False, False, False]


def test_each_device_has_events_of_its_own() -> None:
    both = replace(
        allocations((10, 1, 5), (20, 1, 7), (30, 1, -5), (40, 1, -7)),
        device=("cpu", "cuda:0"),
        device_of=np.array([0, 1, 0, 1], np.int8),
    )
    found = {device: events_of(both, device) for device in ("cpu", "cuda:0", "cuda:1")}
    assert {device: events.bytes.tolist() for device, events in found.items()} == {
        "cpu": [5, -5],
        "cuda:0": [7, -7],
        "cuda:1": [],
    }


class Assigned:
    """Rows of the first layer but the last; the last row is of no measured step."""

    def __init__(self, owner: list[int]) -> None:
        self.rows, self.steps = self, self
        self.owner = np.array(owner)
        self.of_row = np.array([0] * (len(owner) - 1) + [-1])


class Trace:
    def __init__(self, *rows: Row, owner: list[int]) -> None:
        self.table, self.assigned = table_of(*rows), Assigned(owner)


def test_a_layer_rises_above_what_was_there_when_it_began() -> None:
    """The largest rise of its calls and nodes; what an event at the very end does is still inside."""
    trace = Trace(
        Row(RowKind.CALL, 10, 30, "call"),
        Row(RowKind.CALL, 40, 50, "of another"),
        Row(RowKind.NODE, 60, 80, "node"),
        Row(RowKind.OP, 85, 95, "no call"),
        Row(RowKind.CALL, 100, 200, "not measured"),
        owner=[0, 1, 0, 0, 0],
    )
    time, total = [0, 10, 20, 30, 45, 61, 70, 90, 150], [5, 9, 20, 29, 24, 8, 30, 99, 999]
    rises = rise_of_layers(trace, Running(0, np.array(time), np.array(total)), 3)  # type: ignore[arg-type]
    # The call from 9 to 29, the node from 24 (before its first event) down to 8 and up to 30.
    assert rises.tolist() == [20, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_at_each_moment_the_innermost_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int, int]] = []

    def fill(low: int, high: int, depth: int) -> None:
        at = low
        while at < high and depth < 4:
            start = int(rng.integers(at, high))
            end = int(rng.integers(start + 1, high + 1))
            rows.append((start, end, len(rows)))
            fill(start, end, depth + 1)
            at = end + int(rng.integers(0, 5))

    fill(0, 60, 0)
    innermost = {moment: key for start, end, key in rows for moment in range(start, end)}
    found = {moment: key for start, end, key in flatten(iter(rows)) for moment in range(start, end)}
    assert found == innermost
