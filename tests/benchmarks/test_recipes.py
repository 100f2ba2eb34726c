"""What benchmarks/recipes.py counts as a step's memory, against counts by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

ROWS, CLASSES = 64, 1000
KIB = 1 << 10


def module(path: Path) -> Any:
    """A file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def peak_bytes(request: pytest.FixtureRequest) -> Callable[[Callable[[], object], str], int]:
    return module(request.config.rootpath / "benchmarks" / "_peak.py").peak_bytes


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_what_lives_at_one_moment_counts(peak_bytes: Callable[..., int]) -> None:
    def step() -> None:
        first, second = block(100), block(200)
        del first
        third = block(50)
        del second, third
        block(240)

    assert peak_bytes(step, "cpu") == 300 * KIB


def test_memory_of_an_earlier_step_counts_until_it_is_released(peak_bytes: Callable[..., int]) -> None:
    """The profiler does not see the release of what was allocated before it started."""
    held: list[torch.Tensor] = []

    def first_released() -> None:
        held.clear()
        held.append(block(100))

    def first_allocated() -> None:
        held[:] = [block(100)]

    assert peak_bytes(first_released, "cpu") == 0
    assert peak_bytes(first_allocated, "cpu") == 100 * KIB


def test_cross_entropy_holds_three_times_the_logits(peak_bytes: Callable[..., int]) -> None:
    """Logarithmic softmax, its gradient, the gradient of the logits; and the sum of the rows' weights, 4 bytes."""
    logits = torch.randn(ROWS, CLASSES, requires_grad=True)
    target = torch.randint(CLASSES, (ROWS,))
    one = torch.ones(())

    def step() -> None:
        torch.autograd.grad(functional.cross_entropy(logits, target), logits, one)

    assert peak_bytes(step, "cpu") == 3 * 4 * ROWS * CLASSES + 4


def test_a_gradient_that_accumulates_is_there_when_the_step_begins(peak_bytes: Callable[..., int]) -> None:
    """The product, and a gradient that is added to the one that there is."""
    x = torch.zeros(KIB, requires_grad=True)
    one, two = torch.ones(2, KIB)

    def step() -> None:
        (x * two).backward(one)

    step()
    assert peak_bytes(step, "cpu") == 4 * KIB + 4 * KIB
