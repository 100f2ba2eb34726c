"""Reading a step of many operations takes as many looks as it has operations, and no recursion. Counts, no clock."""

from __future__ import annotations

import cProfile
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradscope.patching.match.graph import constant, made_from, makers, remade, uncast
from gradscope.patching.match.matchers import MATCHERS
from gradscope.patching.match.products import leads_to_product
from gradscope.recording.graph import Recording, Value
from gradscope.recording.naming import name_calls
from gradscope.recording.record import record

X = torch.ones(2, 4)


def elementwise(operations: int) -> Tensor:
    h = X.clone().requires_grad_()
    for _ in range(operations // 2):
        h = torch.tanh(h * 0.999)
    return h


def gates(operations: int) -> Tensor:
    h = c = X.clone().requires_grad_()
    for _ in range(operations // 5):
        gate = torch.sigmoid(h)
        c = gate * c + gate
        h = gate * torch.tanh(c)
    return h


def normalised(operations: int) -> Tensor:
    h = X.clone().requires_grad_()
    for _ in range(operations // 4):
        h = h / torch.sqrt((h * h).mean(-1, keepdim=True))
    return h


def casts(operations: int) -> Tensor:
    h = X.clone().requires_grad_()
    for _ in range(operations // 4):
        h = torch.sigmoid(h.double().float().contiguous())
    return h


def shared(operations: int) -> Tensor:
    """One tensor that all operations read."""
    weight, h = X.clone().requires_grad_(), X
    for _ in range(operations // 2):
        h = torch.tanh(h * weight)
    return h


def views(operations: int) -> Tensor:
    """Views of one memory, all alive."""
    h, parts = torch.ones(operations // 2, 4), []
    whole = X[0].clone().requires_grad_()
    for row in range(operations // 2):
        parts.append(h[row])
        whole = whole + parts[-1]
    return whole


def numbers(operations: int) -> Tensor:
    """A factor that is computed in each round."""
    h, rate = X.clone().requires_grad_(), torch.tensor(1.0)
    for _ in range(operations // 3):
        rate = rate * 0.999
        h = torch.tanh(h * rate)
    return h


CHAINS = [elementwise, gates, normalised, casts, shared, views, numbers]


def read(recording: Recording) -> None:
    for matcher in MATCHERS.values():
        list(matcher(recording))
    name_calls(recording, lambda module: None, {}, str)


def looks(chain: Callable[[int], Tensor], operations: int) -> int:
    """Python calls that recording and reading a chain take."""
    profiler = cProfile.Profile()
    profiler.enable()
    recording, _ = record(lambda: chain(operations))
    read(recording)
    profiler.disable()
    return sum(entry.callcount for entry in profiler.getstats())


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
def test_twice_as_many_operations_take_twice_as_many_looks(chain: Callable[[int], Tensor]) -> None:
    looks(chain, 100)  # what is imported or known from then on
    few, many = looks(chain, 600), looks(chain, 1_200)
    assert many <= 2.2 * few


def test_twenty_thousand_operations() -> None:
    """Once 28,000,000 looks at 4,000 operations; recording takes 80 an operation, what is in vain is tried 40 times."""
    assert looks(elementwise, 20_000) <= 600 * 20_000


def test_no_recursion() -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        number = torch.tensor(1.0)
        for _ in range(5_000):
            number = number * 0.999
        return elementwise(5_000), number, casts(5_000)

    recording, made = record(run)
    tensor, number, cast = (next(v for v in reversed(recording.values) if v.tensor() is each) for each in made)
    assert len(makers(tensor)) == 5_001
    assert len(made_from(tensor)) == 1
    assert constant(number) == pytest.approx(0.999**5_000, rel=1e-2)
    assert uncast(cast) is cast


def test_what_is_gone_far_back_is_no_number() -> None:
    def run() -> list[Tensor]:
        number, kept = torch.tensor(1.0), []
        for _ in range(3):
            for _ in range(5_000):
                number = number * 1.0
            kept.append(number)
        return kept

    recording, kept = record(run)
    values = [next(v for v in reversed(recording.values) if v.tensor() is each) for each in kept]
    kept.clear()
    assert remade(values[0]) is None
    assert [constant(value) for value in values] == [None, None, None]


def test_ways_that_meet_again_are_gone_once() -> None:
    """Sixty tensors, each the sum of the one before with itself: 2**60 ways."""

    def run() -> Tensor:
        h = X.clone()
        for _ in range(60):
            h = h + h * 0.5
        return h

    recording, made = record(run)
    value: Value = next(v for v in reversed(recording.values) if v.tensor() is made)
    assert not leads_to_product(value)
    assert len(makers(value)) == 121
    assert remade(value) is not None
