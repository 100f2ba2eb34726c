"""Denormal numbers in the products of a backward pass: where they are seen, and what the look at them leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.capture import denormals
from gradscope.capture.denormals import DenormalWatch, both_ways_ns, denormal_share
from gradscope.capture.environment import current_settings
from gradscope.capture.guard import Guard
from gradscope.capture.modes import dispatch_modes

SMALL, SIZE = 1e-40, 256


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.Size]]:
    """The forms whose parts were run alone: as on a processor that takes 32 times as long."""
    forms: list[tuple[torch.Size, torch.Size]] = []

    def run(first: Tensor, second: Tensor) -> tuple[int, int]:
        forms.append((first.shape, second.shape))
        return 32_000, 1_000

    monkeypatch.setattr(denormals, "both_ways_ns", run)
    return forms


@pytest.fixture
def flushed() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _backward(size: int = SIZE, gradient: float = SMALL, dtype: torch.dtype = torch.float32) -> DenormalWatch:
    """A product's backward pass, watched, with gradients of one number."""
    weight = torch.ones(size, size, dtype=dtype, requires_grad=True)
    result = torch.ones(size, size, dtype=dtype) @ weight
    watch = DenormalWatch()
    with watch.watching(Guard()):
        result.backward(torch.full_like(result, gradient))
    assert dispatch_modes() == []
    return watch


def test_gradients_that_are_denormal_are_seen(measured: list[Any]) -> None:
    (fact,) = _backward().facts()
    assert (fact["operand"], fact["share"], fact["calls"]) == ((SIZE, SIZE), 1.0, 1)
    assert fact["ns"] > 0 and (fact["kept_ns"], fact["flushed_ns"]) == (32_000, 1_000)


@pytest.mark.parametrize(
    "given",
    [{"gradient": 0.0}, {"gradient": 1e-37}, {"size": 128}, {"dtype": torch.float64}],
    ids=["zeros", "normal", "small", "float64"],
)
def test_what_costs_nothing_is_left_alone(given: dict[str, Any], measured: list[Any]) -> None:
    assert _backward(**given).facts() == [] == measured


@pytest.mark.usefixtures("flushed")
def test_flushed_numbers_are_none(measured: list[Any]) -> None:
    assert current_settings()["flush_denormal"] is True
    assert _backward().facts() == [] == measured


def test_one_form_is_run_alone_once(measured: list[Any]) -> None:
    weights = [torch.ones(SIZE, SIZE, requires_grad=True) for _ in range(3)]
    total = sum((torch.ones(SIZE, SIZE) @ weight for weight in weights), torch.zeros(SIZE, SIZE))
    watch = DenormalWatch()
    with watch.watching(Guard()):
        total.backward(torch.full_like(total, SMALL))
    (fact,) = watch.facts()
    assert fact["calls"] == 3 and len(measured) == 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1000, 2000), (37, 65, 129)])
def test_the_share_is_that_of_the_tensor(share: float, shape: tuple[int, ...]) -> None:
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share
    tensor = torch.where(chosen, -SMALL, 1.0)
    for each in (tensor, tensor.mT):
        assert denormal_share(each) == pytest.approx(share, abs=0.02)  # of 11,000 numbers and more: four deviations


def test_flushing_is_over_with_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = denormals._shortest_ns

    def run(first: Tensor, second: Tensor, flush: bool) -> int:
        taken = real(first, second, flush)
        assert current_settings()["flush_denormal"] is flush
        seen.append(flush)
        return taken

    monkeypatch.setattr(denormals, "_shortest_ns", run)
    kept, without = both_ways_ns(torch.full((4000, 500), SMALL), torch.ones(500, 600))
    assert kept > 0 and without > 0
    # In turns, as on a busy machine one may be disturbed; once where a pass is slow: its budget is used up.
    assert seen in [[False, True] * turns for turns in (1, 2, 3)]
    assert current_settings()["flush_denormal"] is False


@pytest.mark.parametrize("shapes", [((4000, 5000), (5000, 600)), ((64, 500, 400), (64, 400, 300))])
def test_a_part_is_run_alone(shapes: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many multiplications as a fraction of a second allows."""
    monkeypatch.setattr(
        denormals, "_shortest_ns", lambda first, second, flush: first.numel() * second.shape[-1] if flush else 1
    )
    _, multiplications = both_ways_ns(*(torch.ones(shape) for shape in shapes))
    assert denormals._PART / 2 < multiplications < 1.5 * denormals._PART  # whole rows, or whole matrices


@pytest.mark.parametrize(
    "shapes", [((12000, 2), (2, 12000)), ((1, 12000, 2), (1, 2, 12000)), ((40, 900, 2), (40, 2, 900))]
)
def test_what_is_run_alone_makes_little(shapes: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of few columns by few rows is far larger than they are."""
    made: list[int] = []

    def run(first: Tensor, second: Tensor, flush: bool) -> int:
        made.append(torch.matmul(first.to("meta"), second.to("meta")).numel())
        return 1

    monkeypatch.setattr(denormals, "_shortest_ns", run)
    both_ways_ns(*(torch.ones(shape) for shape in shapes))
    assert denormals._MOST_MADE / 4 < max(made) < 1.5 * denormals._MOST_MADE  # whole rows, or whole matrices


def test_the_users_modes_see_their_own_operations_alone(measured: list[Any]) -> None:
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    for watched in (False, True):
        names: list[str] = []
        weight = torch.ones(SIZE, SIZE, requires_grad=True)
        result = torch.ones(SIZE, SIZE) @ weight
        with Counting():
            if watched:
                with DenormalWatch().watching(Guard()):
                    result.backward(torch.full((SIZE, SIZE), SMALL))
            else:
                result.backward(torch.full((SIZE, SIZE), SMALL))
        seen.append(names)
    assert seen[0] == seen[1] and len(measured) == 1


def test_an_error_in_the_look_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = RuntimeError("planted")

    def fail(tensor: Tensor) -> float:
        raise planted

    monkeypatch.setattr(denormals, "denormal_share", fail)
    kept: list[BaseException] = []
    monkeypatch.setattr("gradscope.capture.guard.listeners", [kept.append])
    weight, guard = torch.ones(SIZE, SIZE, requires_grad=True), Guard()
    total = (torch.ones(SIZE, SIZE) @ weight).sum()
    with DenormalWatch().watching(guard):
        total.backward()
    assert kept == [planted] and list(guard.failed) == ["checking for denormal numbers"]
    assert weight.grad is not None and float(weight.grad[0, 0]) == SIZE
