"""Every recipe under torch.func's transforms and in forward mode gives what torch's code gives there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from .everywhere import Case
from .everywhere_checks import (
    EACH,
    TORCHS_WARNINGS,
    as_torch,
    numbers,
    scalar_of,
    split_off,
    total,
)

pytestmark = TORCHS_WARNINGS


@EACH
def test_func_grad(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        scalar, inputs = scalar_of(case, function)
        return torch.func.grad(scalar, argnums=numbers(case))(*inputs)

    as_torch(run, case, holding=True)


@EACH
def test_func_second_derivative(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        scalar, inputs = scalar_of(case, function)
        slope = torch.func.grad(scalar)
        return torch.func.grad(lambda *given: (slope(*given) ** 2).sum())(*inputs)

    as_torch(run, case, holding=True)


@EACH
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_func_vmap(case: Case, randomness: str) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, case.tensors())
        stacked = tuple(torch.stack((each, 2 * each, -each)) for each in inputs)
        mapped = torch.func.vmap(lambda *given: function(*given, *constants), randomness=randomness)
        return mapped(*stacked)

    as_torch(run, case, holding=True)


@EACH
def test_func_gradients_of_each_sample(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        scalar, inputs = scalar_of(case, function)
        stacked = tuple(torch.stack((each, 2 * each)) for each in inputs)
        return torch.func.vmap(torch.func.grad(scalar, argnums=numbers(case)), randomness="different")(*stacked)

    as_torch(run, case, holding=True)


@EACH
def test_func_jvp(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, case.tensors())
        tangents = tuple(map(torch.cos, inputs))
        return tuple(torch.func.jvp(lambda *given: total(function(*given, *constants)), inputs, tangents))

    as_torch(run, case, holding=True)


@EACH
def test_func_vjp_and_jacobians(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        scalar, inputs = scalar_of(case, function)
        return torch.func.jacrev(scalar)(*inputs), torch.func.jacfwd(scalar, randomness="same")(*inputs)

    as_torch(run, case, holding=True)


@EACH
def test_forward_mode(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, case.tensors())
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(each, each.cos()) for each in inputs]
            return tuple(forward_ad.unpack_dual(total(function(*duals, *constants))))

    as_torch(run, case, holding=True)
