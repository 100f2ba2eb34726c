"""Truth: what grows in every step is a leak, what a loop holds for its next steps is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.attribute.memory.liveset import Growth

from .measuring import in_a_loop, memory_of

# --------------------------------------------------------------------------------------------------------------------
# From counts
# --------------------------------------------------------------------------------------------------------------------


def growing(census: list[dict[int, int]], **left: list[int]) -> set[str]:
    return Growth(census).of(left)


def test_one_more_in_each_of_three_steps() -> None:
    assert growing([{8: 1}, {8: 2}, {8: 3}, {8: 4}], a=[8]) == {"a"}


def test_three_counts_tell_of_two_steps_only() -> None:
    assert growing([{8: 1}, {8: 2}, {8: 3}], a=[8]) == set()
    assert growing([], a=[8]) == set()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_step_that_leaves_none_more(at: int) -> None:
    counts = [step - (step >= at) for step in range(4)]
    assert growing([{8: count, 4: 0} for count in counts], a=[8]) == set()


def test_fewer_more_than_a_group_has() -> None:
    assert growing([{8: step} for step in range(4)], a=[8, 8]) == set()


def test_sizes_that_differ_from_step_to_step() -> None:
    sizes = [{100: 1}, {100: 1, 11: 1}, {100: 1, 11: 1, 12: 1}, {100: 1, 11: 1, 12: 1, 13: 1}]
    assert growing(sizes, a=[13]) == {"a"}
    assert growing([{100: 1, 10 + step: 1} for step in range(4)], a=[13]) == set()


def test_a_batch_of_another_size_each_step_beside_a_leak() -> None:
    counts = [{8: step, 10 + step: 1} for step in range(4)]
    assert growing(counts, leak=[8], batch=[13]) == {"leak"}


# --------------------------------------------------------------------------------------------------------------------
# From steps
# --------------------------------------------------------------------------------------------------------------------

Step = Callable[[], Any]


def training() -> Callable[[Tensor], Tensor]:
    model = nn.Linear(19, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        output: Tensor = model(x)
        output.square().mean().backward()
        optimizer.step()
        return output.detach()

    return train


def looks_ahead(by: int, *, varying: bool = False) -> Step:
    """Makes the batch of a later step after each, as an accelerated loader does."""
    train, sizes = training(), iter(range(30, 300))
    waiting = deque(torch.randn(63, 19) for _ in range(by))

    def step() -> None:
        waiting.append(torch.randn(next(sizes) if varying else 63, 19))
        train(waiting.popleft())

    return step


def keeps_outputs(most: int | None, *, varying: bool = False) -> Step:
    train, sizes = training(), iter(range(30, 300))
    kept: deque[Tensor] = deque((torch.zeros(21, 7) for _ in range(most or 0)), maxlen=most)
    return lambda: kept.append(train(torch.randn(next(sizes) if varying else 21, 19)))


@pytest.mark.parametrize(
    ("make", "leaks"),
    [
        (lambda: looks_ahead(1), False),
        (lambda: looks_ahead(2), False),
        (lambda: looks_ahead(2, varying=True), False),
        (lambda: keeps_outputs(3), False),
        (lambda: keeps_outputs(None), True),
        (lambda: keeps_outputs(None, varying=True), True),
    ],
    ids=["one ahead", "two ahead", "two of other sizes ahead", "three kept", "all kept", "all of other sizes kept"],
)
def test_steps(make: Callable[[], Step], leaks: bool) -> None:
    rows = memory_of(in_a_loop(None, make())).retained
    assert [row.count for row in rows if row.grows] == [1] * leaks
