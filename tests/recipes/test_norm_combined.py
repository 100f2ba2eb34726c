"""Normalisations of mixed dtypes, under autocast and at the limits of their ways: numbers, dtypes and choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.norm.cpu import SUMMED
from gradscope.recipes.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

from .test_norm import EPS

BFLOAT16 = torch.bfloat16


def test_the_upstream_gradient_is_not_written() -> None:
    """Neither where there is no weight that it would be multiplied with."""
    for weight in (None, torch.ones(6)):
        x, upstream = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
        before = upstream.clone()
        rms_norm(x, (6,), weight, backend="cpu").backward(upstream)
        assert torch.equal(upstream, before)


@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
@pytest.mark.parametrize("dtypes", [(BFLOAT16, torch.float32), (torch.float32, BFLOAT16)], ids=str)
def test_each_gets_its_gradient_in_its_own_precision(function: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    def run(wide: torch.dtype | None, backend: str) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(4, 6).to(dtype).to(wide or dtype).requires_grad_() for dtype in dtypes]
        normal, stream = function(*leaves, torch.ones(6, dtype=wide or torch.float32), eps=1e-5, backend=backend)
        upstream = torch.linspace(-1, 1, 24, dtype=normal.dtype).view(4, 6)
        return [normal, stream, *torch.autograd.grad((normal, stream), leaves, (upstream, upstream))]

    found, truth = run(None, "cpu"), run(torch.float64, "torch")
    assert [each.dtype for each in found] == [torch.float32, torch.float32, *dtypes]
    for one, other in zip(found, truth, strict=True):
        tolerance = 1e-5 if one.dtype == torch.float32 else 8e-3
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_no_eps_is_that_of_the_sums_dtype() -> None:
    x, residual = torch.full((2, 6), 1e-5), torch.full((2, 6), 1e-5, dtype=torch.float64)
    found, _ = add_rms_norm(x, residual, backend="cpu")
    expected, _ = add_rms_norm(x, residual, backend="torch")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_a_learnt_eps_with_squares_beyond_float16(function: Any) -> None:
    x = (400 * torch.randn(4, 6)).half()
    found = function(x, (6,), eps=torch.tensor(1e-5, requires_grad=True))
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), function(x.float(), (6,), eps=1e-5), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
def test_autocast_chooses_the_dtype_as_for_torch(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6).to(dtype)
    with torch.autocast("cpu", dtype=BFLOAT16):
        assert rms_norm(x, (6,)).dtype == functional.rms_norm(x, (6,)).dtype
        assert rms_norm.explain(x, (6,)).backend == "torch"


def test_layer_norm_is_torchs_where_torchs_sums_are_exact() -> None:
    x, weight = torch.empty(SUMMED, 6), torch.empty(6)
    assert layer_norm.explain(x, (6,), weight, exact=True).backend == "torch"
    assert layer_norm.explain(torch.empty(SUMMED + 1, 6), (6,), weight, exact=True).backend == "cpu"
    many = torch.empty(SUMMED + 1, 6, dtype=torch.float64)
    assert layer_norm.explain(many, (6,), weight.double(), exact=True).backend == "torch"


@pytest.mark.measured_sizes
def test_dropout_that_drops_nothing_has_no_say() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.empty(1000, 500)
        cases = [(p, training) for p in (0.0, 0.1) for training in (True, False)]
        taken = {case: add_rms_norm.explain(x, x, None, None, *case).backend for case in cases}
    finally:
        torch.set_num_threads(before)
    assert taken == {(0.0, True): "cpu", (0.0, False): "cpu", (0.1, False): "cpu", (0.1, True): "torch"}


@pytest.mark.measured_sizes
@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
def test_a_small_residual_of_another_shape_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"residual is of shape \(1, 6\); expected \(3, 6\), as input"):
        function(torch.ones(3, 6), torch.ones(1, 6))


def _kept(made: Callable[[], object]) -> int:
    """The bytes that autograd keeps for backward, of each storage once."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = made()
    assert held is not None
    return sum(found.values())


@pytest.mark.parametrize("centred", [True, False])
def test_without_dropout_nothing_less_is_kept_than_of_a_norm_of_the_sum(centred: bool) -> None:
    """Why a sum without dropout is left to the norm's own recipe, or to torch, on a CPU."""
    x, residual, weight = (torch.randn(shape, requires_grad=True) for shape in ((64, 48), (64, 48), (48,)))

    def apart() -> object:
        total = x + residual
        normal = functional.layer_norm(total, (48,), weight) if centred else rms_norm(total, (48,), weight, EPS)
        return normal, total

    function = add_layer_norm if centred else add_rms_norm
    assert function.explain(x, residual, weight).backend == "cpu"
    assert _kept(apart) == _kept(lambda: function(x, residual, weight, eps=EPS))
