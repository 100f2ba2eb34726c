"""The embedding within autograd: who sees which gradient, and when."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gradscope.recipes.embedding import Embedding, embedding
from tests.process_group import alone

from .test_embedding import FEATURES, IDS, TOKENS, a_weight, assert_no_hooks, same, tied


class Operations(TorchDispatchMode):
    """Names of what runs, and the shape of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seen.append((func.overloadpacket.__name__, getattr(found, "shape", None)))
        return found


@pytest.mark.parametrize("use", ["tied", "existing"])
def test_no_gradient_of_the_vocabulary_is_made(use: str) -> None:
    weight = a_weight()
    if use == "existing":
        weight.grad = torch.zeros_like(weight)
        address = weight.grad.data_ptr()
        loss = embedding(IDS, weight).square().sum()
    else:
        loss = tied(embedding, IDS, weight)
    with Operations() as operations:
        loss.backward()
    whole = [name for name, shape in operations.seen if shape == weight.shape]
    assert whole == (["index_add_"] if use == "existing" else ["mm", "t", "t", "index_add_", "detach"])
    if use == "existing":
        assert weight.grad is not None and weight.grad.data_ptr() == address


@pytest.mark.parametrize("who", ["a hook", "a view", "a parameter before", "a parameter after", "storage"])
def test_a_gradient_that_somebody_else_has_is_not_written_to(who: str) -> None:
    """Edge cases 2 and 4: the tied gradient may be the very tensor that others were given."""
    weight, other = a_weight(), a_weight()
    kept: list[Any] = []
    if who.startswith("a parameter"):
        pair = weight + other if who.endswith("before") else other + weight
        (embedding(IDS, weight).sum() + pair.square().sum()).backward()
        assert other.grad is not None
        kept.append((other.grad, 2 * (weight + other).detach()))
    else:
        middle = weight.view(-1).view(TOKENS, FEATURES) if who == "a view" else weight.view_as(weight)

        def keep(gradient: Tensor) -> None:
            expected = gradient.clone()
            kept.append((gradient.untyped_storage() if who == "storage" else gradient, expected))

        middle.register_hook(keep)
        (embedding(IDS, weight).sum() + middle.square().sum()).backward()
    (found, expected), (counts,) = kept[0], torch.autograd.grad(functional.embedding(IDS, weight).sum(), weight)
    if who == "storage":
        found = torch.empty(0, dtype=torch.float64).set_(found).view(TOKENS, FEATURES)
    assert torch.equal(found, expected)
    torch.testing.assert_close(weight.grad, counts + expected)


def test_grad_gives_a_dense_gradient_and_touches_nothing() -> None:
    """torch.autograd.grad of the weight: tied or not, beside or without other inputs."""
    weight, factor = a_weight(), torch.randn(FEATURES, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.ones_like(weight)

    def loss(look_up: Callable[..., Tensor]) -> Tensor:
        return functional.linear(look_up(IDS, weight) * factor, weight).square().sum()

    for inputs in ((weight,), (weight, factor), (factor,)):
        found, expected = (torch.autograd.grad(loss(look_up), inputs) for look_up in (embedding, functional.embedding))
        assert all(gradient.layout == torch.strided for gradient in found)
        torch.testing.assert_close(found, expected)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert_no_hooks(weight)


def test_backward_into_chosen_inputs() -> None:
    """``backward(inputs=...)``: with the weight it accumulates, without it the weight is left alone."""
    weight, factor = a_weight(), torch.randn(FEATURES, dtype=torch.float64, requires_grad=True)
    (embedding(IDS, weight) * factor).sum().backward(inputs=[factor])
    assert weight.grad is None
    (embedding(IDS, weight) * factor).sum().backward(inputs=[weight])
    (expected,) = torch.autograd.grad((functional.embedding(IDS, weight) * factor).sum(), weight)
    torch.testing.assert_close(weight.grad, expected)


def test_a_retained_graph_and_accumulation_over_steps() -> None:
    """Edge case 3: the same graph again, and further steps, add up."""
    ours = a_weight()
    torchs = same(ours)
    for weight, look_up in ((ours, embedding), (torchs, functional.embedding)):
        loss = tied(look_up, IDS, weight)
        loss.backward(retain_graph=True)
        loss.backward()
        tied(look_up, IDS + 0, weight).backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_a_graph_of_the_gradient() -> None:
    ours = a_weight()
    torchs = same(ours)
    for weight, look_up in ((ours, embedding), (torchs, functional.embedding)):
        (first,) = torch.autograd.grad(tied(look_up, IDS, weight), weight, create_graph=True)
        first.square().sum().backward()
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_hooks_see_dense_gradients_in_their_order() -> None:
    """Tensor hooks, hooks of the accumulating node, and those after accumulation."""
    weight, seen = a_weight(), []
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(("after", w.grad.layout)))
    embedding(IDS, weight).sum().backward()
    assert seen == [("after", torch.strided)]
    seen.clear()
    hook = weight.register_hook(lambda gradient: seen.append(("tensor", gradient.layout)) or gradient * 3)
    weight.grad = None
    tied(embedding, IDS, weight).backward()
    assert seen == [("tensor", torch.strided), ("after", torch.strided)]
    (expected,) = torch.autograd.grad(tied(functional.embedding, IDS, weight), weight)
    torch.testing.assert_close(weight.grad, expected)
    hook.remove()


def test_a_hook_after_the_accumulating_node_runs_as_under_ddp() -> None:
    weight, seen = a_weight(), []
    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: seen.append(weight.grad.layout))  # type: ignore[union-attr]
    embedding(IDS, weight).sum().backward()
    assert seen == [torch.strided]


def test_under_distributed_data_parallel() -> None:
    """Buckets are filled from the accumulating node, tied weight and all."""
    with alone():
        module = Tied(Embedding(TOKENS, FEATURES))
        parallel = DistributedDataParallel(copy.deepcopy(module))
        for _ in range(2):
            module(IDS).backward()
            parallel(IDS).backward()
        torch.testing.assert_close(parallel.module.look_up.weight.grad, module.look_up.weight.grad)


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self, look_up: nn.Embedding) -> None:
        super().__init__()
        self.look_up = look_up

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.look_up(ids), self.look_up.weight).square().sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpoint(reentrant: bool) -> None:
    ours = a_weight()
    torchs = same(ours)
    scale = torch.ones(FEATURES, dtype=torch.float64, requires_grad=True)
    for weight, look_up in ((ours, embedding), (torchs, functional.embedding)):
        hidden = checkpoint(lambda s, w=weight, f=look_up: f(IDS, w) * s, scale, use_reentrant=reentrant)
        functional.linear(hidden, weight).square().sum().backward()
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_rows_wait_while_a_pass_within_theirs_reaches_the_weight() -> None:
    """Both use it: reentrant checkpointing runs the inner pass to its end before the outer goes on."""
    ours = a_weight()
    torchs = same(ours)
    for weight, look_up in ((ours, embedding), (torchs, functional.embedding)):

        def block(x: Tensor, w: Tensor = weight, f: Callable[..., Tensor] = look_up) -> Tensor:
            return (x + f(IDS.flip(0), w)).tanh() @ w.T @ w

        hidden = look_up(IDS, weight)
        for _ in range(2):
            hidden = checkpoint(block, hidden, use_reentrant=True) + look_up(IDS, weight)
        hidden.square().sum().backward()
    torch.testing.assert_close(ours.grad, torchs.grad)
    assert_no_hooks(ours)


@pytest.mark.parametrize("tied_too", [False, True])
def test_passes_of_several_threads(tied_too: bool) -> None:
    """No row is lost; whole numbers, so that the order of the additions changes nothing."""
    weight, threads, passes = torch.zeros(500, 8, dtype=torch.float64, requires_grad=True), 4, 20
    ids = torch.randint(500, (1000,))
    failed: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(passes):
                loss = embedding(ids, weight).sum()
                (loss + (2 * weight).sum() if tied_too else loss).backward()
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        running = [threading.Thread(target=train) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    once = torch.bincount(ids, minlength=500)[:, None] + 2.0 * tied_too
    assert not failed
    torch.testing.assert_close(weight.grad, (threads * passes * once).expand(500, 8).double())
    assert_no_hooks(weight)


def test_a_backward_that_fails_spoils_no_later_one() -> None:
    """It fails between the embedding's backward and the accumulation; that node lives on with another graph."""
    weight, hidden = a_weight(), torch.randn(3, FEATURES, dtype=torch.float64, requires_grad=True)
    other_graph = tied(embedding, IDS, weight)

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    first = functional.linear(hidden, weight)
    first.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        (first.sum() + embedding(IDS, weight).sum()).backward()
    assert weight.grad is None
    assert_no_hooks(weight)
    (expected,) = torch.autograd.grad(tied(functional.embedding, IDS, weight), weight)
    other_graph.backward()
    torch.testing.assert_close(weight.grad, expected)
    assert_no_hooks(weight)


def test_an_optimizer_takes_the_gradient() -> None:
    """Adam refuses sparse gradients: one that slipped through would show."""
    weight = a_weight()
    optimizer = torch.optim.Adam([weight])
    for _ in range(2):
        optimizer.zero_grad()
        embedding(IDS, weight).sum().backward()
        optimizer.step()


def test_a_sparse_gradient_that_is_there_stays_torchs() -> None:
    ours = a_weight()
    torchs = same(ours)
    for weight, look_up in ((ours, embedding), (torchs, functional.embedding)):
        look_up(IDS, weight, sparse=True).sum().backward()
        assert weight.grad is not None and weight.grad.is_sparse
        look_up(IDS, weight).sum().backward()
    assert ours.grad is not None and ours.grad.layout == torchs.grad.layout  # type: ignore[union-attr]
    torch.testing.assert_close(ours.grad, torchs.grad)
