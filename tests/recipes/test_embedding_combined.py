"""An embedding's rows among hooks on its weight, and in passes that fail."""

from __future__ import annotations

import gc
import importlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscope.recipes import embedding

IDS = torch.tensor([[0, 3, 3], [1, 0, 5]])
TOKENS, FEATURES = 7, 13


def weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(TOKENS, FEATURES))


@pytest.mark.parametrize("before", [False, True], ids=["no gradient yet", "a gradient"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_hook_behind_the_accumulation_runs_once_and_sees_the_rows(before: bool, tied: bool) -> None:
    """As that of an optimizer whose steps are taken in the pass."""

    def seen(call: Any) -> list[Tensor]:
        w, found = weight(), list[Tensor]()
        if before:
            w.grad = torch.ones_like(w)
        w.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone()))  # type: ignore[union-attr]
        x = call(IDS, w)
        (functional.linear(x, w) if tied else x).square().sum().backward()
        return found

    ours, theirs = seen(embedding), seen(functional.embedding)
    assert len(ours) == len(theirs) == 1
    torch.testing.assert_close(ours, theirs)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        raise ArithmeticError("in the pass")


def rows_alive() -> int:
    gc.collect()
    return sum(type(each) is Tensor and tuple(each.shape) == (IDS.numel(), FEATURES) for each in gc.get_objects())


def test_a_pass_that_fails_leaves_no_rows() -> None:
    """Neither in memory nor in the next gradient."""
    w = weight()
    held = w * 1  # the node that the rows wait for is not of one graph alone
    failing = Failing.apply(w)  # its backward runs behind the embedding's
    loss = embedding(IDS, w).square().sum() + failing.sum()
    before = rows_alive()
    with pytest.raises(ArithmeticError):
        loss.backward()
    del loss, failing
    assert rows_alive() == before
    assert held.grad_fn is not None
    w.grad = None
    embedding(IDS, w).square().sum().backward()
    expected = weight()
    functional.embedding(IDS, expected).square().sum().backward()
    torch.testing.assert_close(w.grad, expected.grad)


def test_once_a_second_thread_is_seen_rows_are_not_added_beside_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node itself locks the gradient."""
    module = importlib.import_module("gradscope.recipes.embedding")
    add, threads = module.add_rows_before, list[int]()

    def noted(*args: Any) -> None:
        threads.append(threading.get_ident())
        add(*args)

    monkeypatch.setattr(module, "add_rows_before", noted)
    w = weight()
    held = w * 1  # the same node for all

    def run() -> None:
        embedding(IDS, w).square().sum().backward()

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    run()
    assert threads == [threading.get_ident()] and held.requires_grad
    expected = weight()
    (3 * functional.embedding(IDS, expected).square().sum()).backward()
    torch.testing.assert_close(w.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_not_added_row_by_row(dtype: torch.dtype) -> None:
    ids, w = torch.zeros(4096, dtype=torch.int64), nn.Parameter(torch.zeros(TOKENS, FEATURES, dtype=dtype))
    assert embedding.explain(ids, w).backend == "torch"
