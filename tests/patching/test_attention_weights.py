"""Attention that gives its weights to callers that drop them: the recipe gives them too, computed when read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope import recipes
from gradscope.patching.patches import Patches
from gradscope.patching.plan import Plan, plan
from gradscope.recipes.lazy_tensor import LazyTensor, is_computed
from gradscope.workload import Workload
from tests.patching.attention_weights_models import (
    FOUND,
    LIKE,
    TOKENS,
    WIDTH,
    AsScores,
    BeforeDropout,
    InFloat32,
    QueriesInFloat32,
    Returned,
    ReturnedAtOnce,
    Stored,
)

TOLERANCE = 1e-10  # float64, other sums of some ten numbers
# The old code's softmax is float32 in a float64 model too: 6e-8, summed.
ROUNDED = dict.fromkeys((InFloat32, QueriesInFloat32, AsScores), 1e-5)


def planned(kind: type[nn.Module]) -> tuple[Any, Plan]:
    torch.manual_seed(0)
    model = kind()
    return model, plan(Workload(model, torch.randn(2, TOKENS, WIDTH)), recipes=["attention"])


def step(model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    (y * torch.arange(WIDTH, dtype=y.dtype)).sum().backward()
    return [y.detach(), x.grad, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("weighed", [0.0, 3.0], ids=["dropped", "read"])
@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_found_and_exact_whether_they_are_read_or_not(kind: type[nn.Module], weighed: float) -> None:
    """Whoever called the model dropped the weights when it was planned; who reads them later has them."""
    model, found = planned(kind)
    assert [site.function for site in found.supported] == ["attention_with_weights"], found.sites[0].reasons
    plain = copy.deepcopy(model).double()
    model.double()
    patches = Patches(found)
    patches.apply()
    for each in (model, plain):
        each.weighed = weighed
    for x in (torch.randn(2, TOKENS, WIDTH), torch.randn(1, TOKENS, WIDTH)):
        for one, other in zip(step(model, x.double()), step(plain, x.double()), strict=True):
            limit = ROUNDED.get(kind, TOLERANCE)
            torch.testing.assert_close(one, other, rtol=limit, atol=limit)
    patches.revert()


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_nothing_is_computed_for_callers_that_drop_them(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = planned(kind)
    given: list[Tensor] = []
    attend = model.attend
    patches = Patches(found)
    patches.apply()
    attend = type(model).attend if "attend" not in vars(model) else model.attend
    monkeypatch.setattr(model, "attend", _noting(attend, model, given), raising=False)
    step(model, torch.randn(2, TOKENS, WIDTH))
    (weights,) = given
    assert isinstance(weights, LazyTensor) and not is_computed(weights)


def _noting(attend: Any, model: nn.Module, given: list[Tensor]) -> Any:
    bound = getattr(attend, "__self__", None) is not None

    def noting(*args: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = attend(*args) if bound else attend(model, *args)
        given.append(weights)
        return y, weights

    return noting


@pytest.mark.parametrize("kind", LIKE, ids=lambda kind: kind.__name__)
def test_lookalikes_are_left_alone(kind: type[nn.Module]) -> None:
    _, found = planned(kind)
    assert not found.supported
    assert found.sites[0].reasons


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("kind", [Returned, BeforeDropout, InFloat32, AsScores], ids=lambda kind: kind.__name__)
def test_what_is_dropped_is_dropped_in_the_weights(kind: type[nn.Module], rate: float) -> None:
    """The weights fit the result, where they are those after dropout; else they are the softmax, which sums to one."""
    model, found = planned(kind)
    model.double().dropout.p = rate
    q, k, v = (torch.randn(2, 3, TOKENS, 8, dtype=torch.float64) for _ in range(3))
    patches = Patches(found)
    patches.apply()
    q.requires_grad_()
    y, weights = model.attend(q, k, v)
    if kind is BeforeDropout:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, TOKENS, dtype=torch.float64))
    else:
        torch.testing.assert_close(weights @ v, y)
        assert bool((weights == 0).any()) is (rate > 0 or kind is Returned)  # which has a mask
    patches.revert()


@pytest.mark.parametrize("mode", ["bfloat16", "autocast", "no_grad", "eval"])
@pytest.mark.parametrize(
    "kind", [Returned, ReturnedAtOnce, InFloat32, QueriesInFloat32, AsScores, Stored], ids=lambda kind: kind.__name__
)
def test_dtype_and_graph_of_the_weights_are_the_old_ones(kind: type[nn.Module], mode: str) -> None:
    model, found = planned(kind)
    model.train(mode != "eval")
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    model.to(dtype)
    q, k, v = (torch.randn(2, 3, TOKENS, 8, dtype=dtype, requires_grad=True) * 1 for _ in range(3))  # no parameters

    def run() -> Tensor:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"),
            torch.set_grad_enabled(mode != "no_grad"),
        ):
            weights: Tensor = model.attend(q, k, v)[1]
            return weights

    old = run()
    patches = Patches(found)
    patches.apply()
    new = run()
    patches.revert()
    assert (new.dtype, new.shape, new.requires_grad) == (old.dtype, old.shape, old.requires_grad)
    rtol = 0.05 if mode in ("bfloat16", "autocast") else 1e-5  # scores of size 3 in bfloat16 are off by 1/128
    torch.testing.assert_close(new + 0, old + 0, rtol=rtol, atol=rtol / 10)


def test_the_text_of_a_name_and_of_a_return() -> None:
    texts = {kind: "\n".join(Patches(planned(kind)[1]).diff.splitlines()) for kind in (Returned, ReturnedAtOnce)}
    assert "+        y, weights = attention_with_weights(" in texts[Returned]
    assert "+        attended, p_attn = attention_with_weights(q, k, v, scale=self.scale)" in texts[ReturnedAtOnce]
    assert "+        return attended, p_attn" in texts[ReturnedAtOnce]
    assert recipes.attention_with_weights.__name__ == "attention_with_weights"
