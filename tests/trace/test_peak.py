"""The most that a piece of work holds: within its own time, above its own start."""

from __future__ import annotations

import random

import pytest
import torch

from gradscope.trace.memory import _most, peaks_bytes


def test_what_happens_before_and_after_does_not_count() -> None:
    changes = [(1, 100), (10, 7), (15, 5), (19, -7), (20, 50), (25, -100)]
    assert _most(changes, 10, 20) == 12  # the first moment counts, the end no more
    assert _most(changes, 11, 20) == 5
    assert _most(changes, 10, 21) == 55
    assert _most(changes, 2, 9) == 0


def test_what_was_there_before_may_be_released() -> None:
    """A rise is above the start, however low the total went in between."""
    assert _most([(1, 100), (10, -100), (11, 30), (12, 80)], 5, 20) == 10
    assert _most([(1, 100), (10, -100)], 5, 20) == 0


@pytest.mark.parametrize("seed", range(20))
def test_as_a_sum_at_every_moment(seed: int) -> None:
    rng = random.Random(seed)
    changes = sorted((rng.randint(0, 100), rng.randint(-20, 30)) for _ in range(60))
    start, end = sorted(rng.sample(range(101), 2))
    inside = [change for when, change in changes if start <= when < end]
    assert _most(changes, start, end) == max(sum(inside[:count]) for count in range(len(inside) + 1))


def test_each_work_is_counted_by_itself() -> None:
    """Of works that differ twofold, and of one that keeps what it made; whatever the others did."""
    kept: list[torch.Tensor] = []
    works = [
        lambda: torch.zeros(1 << 20),
        lambda: torch.zeros(1 << 20) + torch.zeros(1 << 20),
        lambda: kept.append(torch.zeros(1 << 18)),
        lambda: torch.zeros(1 << 20),
    ]
    assert peaks_bytes(works, torch.device("cpu")) == [4 << 20, 12 << 20, 1 << 20, 4 << 20]
    assert len(kept) == 2, "each ran twice"
    assert peaks_bytes(works, torch.device("cpu"), settled=True) == [4 << 20, 12 << 20, 1 << 20, 4 << 20]
    assert len(kept) == 3
