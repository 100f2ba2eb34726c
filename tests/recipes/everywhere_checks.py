"""Comparing a recipe with the torch code that it stands for, in whatever runs torch code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradscope.recipes

from .everywhere import CASES, FORMS, Case, flat

TORCHS_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch's, where forward mode begins
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # torch's, under vmap
]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def close(found: Any, expected: Any) -> None:
    """To the rounding of float64, whatever the order of sums."""
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def outcome(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    torch.manual_seed(1)
    try:
        return run(), None
    except Exception as error:  # whatever it is: the recipe must not do better by being wrong
        return None, error


def as_torch(
    run: Callable[[Callable[..., Any]], Any],
    case: Case,
    check: Callable[[Any, Any], None] = close,
    *,
    holding: bool = False,
) -> None:
    """``run`` gives for the recipe what it gives for torch's code, or neither runs.

    With ``holding`` torch's attention is the one that holds all scores, which has every derivative.
    """
    with sdpa_kernel(SDPBackend.MATH) if holding else contextlib.nullcontext():
        expected, refusal = outcome(lambda: run(case.plain))
    found, error = outcome(lambda: run(case.run))
    if refusal is not None:
        assert error is not None, f"torch refuses this: {refusal}"
        return
    if error is not None:
        raise error
    check(found, expected)


def total(found: Any) -> Tensor:
    """A scalar in which every element of every result has another weight."""
    parts = [each for each in flat(found) if each.is_floating_point()]
    return sum((part * (1 + torch.arange(part.numel()).view(part.shape).to(part) % 7)).sum() for part in parts)  # type: ignore[return-value]


def split_off(case: Case, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(Those that may require gradients, the constants)."""
    return tensors[: len(case.shapes)], tensors[len(case.shapes) :]


def scalar_of(case: Case, function: Callable[..., Any]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A function of the differentiable inputs alone, and these."""
    inputs, constants = split_off(case, case.tensors())
    return lambda *given: total(function(*given, *constants)), inputs


def numbers(case: Case) -> tuple[int, ...]:
    return tuple(range(len(case.shapes)))


def same_form(found: Any, expected: Any) -> None:
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert (one.shape, one.dtype, one.device, type(one)) == (other.shape, other.dtype, other.device, type(other))


class Seen(TorchDispatchMode):
    """Looks on, as the counters of FLOPs do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Named(Tensor):
    """A subclass that changes nothing."""


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def of_a_mesh(mesh: Any, tensors: tuple[Tensor, ...], placement: Any) -> tuple[Tensor, ...]:
    """Constants are distributed too: torch mixes none with others."""
    return tuple(distribute_tensor(each, mesh, [placement]) for each in tensors)


FUNCTIONS = [name for name in gradscope.recipes.__all__ if name[0].islower()]
