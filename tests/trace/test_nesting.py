"""Nesting by sorting gives what a stack would, for every properly nested set of intervals."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gradscope.trace.tree import nest


def _by_stack(start: list[int], end: list[int], thread: list[int]) -> list[int]:
    parents, stack = [], []
    for row in range(len(start)):
        while stack and (thread[stack[-1]] != thread[row] or end[stack[-1]] < end[row] or end[stack[-1]] <= start[row]):
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(row)
    return parents


def _random_intervals(rng: random.Random, thread: int) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []

    def fill(first: int, last: int, depth: int) -> None:
        at = first
        while at < last and rng.random() < 0.9:
            begin = rng.randint(at, last)
            finish = rng.randint(begin, last)
            if finish > begin:
                found.append((thread, begin, finish))
                if depth < 6:
                    fill(begin, finish, depth + 1)
            at = finish + rng.randint(0, 2)

    fill(1_000, 1_000 + rng.randint(10, 400), 0)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_same_parents_as_a_stack(seed: int) -> None:
    rng = random.Random(seed)
    rows = sorted(set(_random_intervals(rng, 1) + _random_intervals(rng, 2)), key=lambda row: (row[0], row[1], -row[2]))
    thread, start, end = (list(column) for column in zip(*rows, strict=True))
    parent, depth, cut = nest(np.array(start), np.array(end), np.array(thread, np.int32))
    assert parent.tolist() == _by_stack(start, end, thread)
    assert cut.tolist() == end
    for row, above in enumerate(parent.tolist()):
        assert depth[row] == (0 if above < 0 else depth[above] + 1)


def test_an_empty_event_is_inside_what_starts_with_it() -> None:
    start, end = np.array([0, 5, 5, 5]), np.array([10, 9, 5, 6])
    order = np.lexsort((-end, start))
    parent, _, _ = nest(start[order], end[order], np.ones(4, np.int32))
    assert end[order].tolist() == [10, 9, 6, 5]
    assert parent.tolist() == [-1, 0, 1, 2]


def test_an_empty_event_between_two_is_inside_neither() -> None:
    parent, _, _ = nest(np.array([0, 4, 5]), np.array([4, 4, 9]), np.ones(3, np.int32))
    assert parent.tolist() == [-1, -1, -1]


def test_an_overlap_is_cut_to_the_parent() -> None:
    parent, _, end = nest(np.array([0, 5]), np.array([10, 15]), np.ones(2, np.int32))
    assert (parent.tolist(), end.tolist()) == ([-1, 0], [10, 10])


def test_nothing() -> None:
    empty = np.empty(0, np.int64)
    parent, depth, end = nest(empty, empty, np.empty(0, np.int32))
    assert (len(parent), len(depth), len(end)) == (0, 0, 0)
