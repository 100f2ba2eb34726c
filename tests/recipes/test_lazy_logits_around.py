"""Lazy logits among autocast, checkpoints, optimizers and profilers."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.recipes import lazy_linear
from gradscope.recipes.lazy_tensor import LazyTensor, is_computed
from tests.process_group import alone

from .accuracy import assert_as_accurate
from .lazy_models import CLASSES, WIDTH, Model, assert_same_gradients, gradients, models, pair


def test_a_tied_weight_gets_both_gradients() -> None:
    ours, theirs = models()
    for model in (ours, theirs):
        logits, loss = model(*pair())
        loss.backward()
        assert not isinstance(logits, LazyTensor) or not is_computed(logits)
    assert_same_gradients(ours, theirs)


class Doubled(torch.autograd.Function):
    """Somebody else's: its input's graph is followed below Python."""

    @staticmethod
    def forward(ctx, z):
        return 2 * z.detach()

    @staticmethod
    def backward(ctx, upstream):
        return 2 * upstream


def test_a_tied_weight_behind_a_function_gets_each_gradient_once() -> None:
    ours, theirs = models()
    for model in (ours, theirs):
        logits, loss = model(*pair())
        (Doubled.apply(logits.transpose(0, 1)).logsumexp(-1).sum() + loss).backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("where", ["inside", "outside", "outside, float", "float first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(dtype: torch.dtype, where: str, autocast: bool) -> None:
    """The dtypes are torch's; the error against float64 is at most twice torch's own."""

    def run(model: Model, cast: bool) -> list[Tensor]:
        with torch.autocast("cpu", dtype=dtype) if cast else contextlib.nullcontext():
            logits, loss = model(*pair()) if where == "inside" else model(pair()[0])
            if where == "float first":
                loss = F.cross_entropy(logits.float().transpose(1, 2), pair()[1])
        if where.startswith("outside"):
            given = logits.float() if where.endswith("float") else logits
            loss = F.cross_entropy(given[:, 1:].flatten(0, 1), pair()[1][:, 1:].flatten())
        dtypes.append(logits.dtype)
        assert not isinstance(logits, LazyTensor) or cast is None or not is_computed(logits)
        model.zero_grad()
        loss.backward()
        return [loss.detach(), *gradients(model)]

    dtypes: list[torch.dtype] = []
    ours, theirs = models(torch.float32 if autocast else dtype)
    truth = models(torch.float64)[1]
    truth.load_state_dict(theirs.state_dict())
    found = [run(model, autocast) for model in (ours, theirs)]
    assert dtypes == [dtype, dtype]
    if where.endswith("float") or where == "float first":
        truth.float = None  # type: ignore[assignment]
    exact = run(truth, False) if where in {"inside", "outside"} else None
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        assert one.dtype == other.dtype
        if index == 0:  # one number, whose errors may cancel
            torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=0.0)
        elif exact is not None:
            assert_as_accurate(one, other, exact[index])
        else:
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.01)  # a few roundings of logits in half precision


def test_without_gradients_the_logits_are_there_at_once() -> None:
    """As an average of the weights is put in for an evaluation, and the logits are read when it is out again."""
    ours, theirs = models()
    with torch.no_grad():
        logits, loss = ours(*pair())
        expected, expected_loss = theirs(*pair())
        for model in (ours, theirs):
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
    assert type(logits) is Tensor
    torch.testing.assert_close((logits, loss), (expected, expected_loss))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("loss_inside", [True, False])
def test_checkpointed(reentrant: bool, loss_inside: bool) -> None:
    ours, theirs = models()
    for model in (ours, theirs):
        x = model.wte(pair()[0])

        def last(x: Tensor, model: Model = model) -> Tensor:
            logits = lazy_linear(model.head, x) if model.lazy else model.head(x)
            return F.cross_entropy(logits.flatten(0, 1), pair()[1].flatten()) if loss_inside else logits

        result = checkpoint(last, x, use_reentrant=reentrant)
        loss = result if loss_inside else F.cross_entropy(result.flatten(0, 1), pair()[1].flatten())
        model.zero_grad()
        (loss + model.fc.weight.sum() + model.fc.bias.sum()).backward()
    assert_same_gradients(ours, theirs)


def test_a_second_backward() -> None:
    model = models()[0]
    loss = model(*pair())[1]
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    for one, two in zip(once, gradients(model), strict=True):
        torch.testing.assert_close(2 * one, two)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_of_the_loss_is_refused() -> None:
    model = models()[0]
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    loss = F.cross_entropy(lazy_linear(model.head, x).flatten(0, 1), torch.zeros(6, dtype=torch.long))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        gradient.sum().backward()


STALE = "the head's weight or input was modified in place before it"


@pytest.mark.parametrize("operand", ["weight", "bias", "input"])
@pytest.mark.parametrize("row", [0, -1])
def test_logits_are_not_made_up_of_what_was_changed_since(operand: str, row: int) -> None:
    """Also where writing counts no version, and of one row alone."""
    head, x = nn.Linear(WIDTH, CLASSES), torch.randn(2, 3, WIDTH)
    logits = lazy_linear(head, x)
    changed = {"weight": head.weight, "bias": head.bias, "input": x}[operand]
    changed.data[row] -= 0.125
    with pytest.raises(RuntimeError, match=STALE):
        logits.argmax(-1)
    with pytest.raises(RuntimeError, match=STALE):
        F.cross_entropy(lazy_read(head, x, changed), torch.zeros(6, dtype=torch.long))


def lazy_read(head: nn.Linear, x: Tensor, changed: Tensor) -> Tensor:
    logits = lazy_linear(head, x)
    changed.data.mul_(0.5)
    return logits.flatten(0, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_logits_are_read_after_an_optimizers_step(fused: bool) -> None:
    """As an accuracy in the loop: they are those of before."""
    ours, theirs = models()
    found = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        logits, loss = model(*pair()) if fused else model(pair()[0])
        turned = logits.transpose(1, 2)
        (loss if fused else model.fc.weight.square().sum()).backward()
        optimizer.step()
        found.append((logits.softmax(-1).detach(), turned.argmax(1), logits.requires_grad))
    torch.testing.assert_close(*found)


def test_nobody_watches_optimizers_once_the_logits_are_gone() -> None:
    before = len(_global_optimizer_pre_hooks)
    model = models()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    logits, loss = model(*pair())
    weight = weakref.ref(logits._lazy.source)  # type: ignore[attr-defined]
    loss.backward()
    optimizer.step()
    del logits, loss
    gc.collect()
    assert weight() is None
    assert len(_global_optimizer_pre_hooks) == before


ASKS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "retain_grad": lambda logits, loss: logits.retain_grad(),
    "register_hook": lambda logits, loss: logits.register_hook(print),
    "grad": lambda logits, loss: torch.autograd.grad(loss, logits),
    "backward": lambda logits, loss: loss.backward(inputs=[logits]),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_gradient_that_no_loss_gave_them_is_refused(name: str) -> None:
    logits, loss = models()[0](*pair())
    with pytest.raises(RuntimeError, match=f"lazy_linear: {name} needs the gradient of the logits, but the loss"):
        ASKS[name](logits, loss)


def test_a_gradient_asked_for_before_the_loss_is_given() -> None:
    ours, theirs = models()
    found = []
    for model in (ours, theirs):
        logits, _ = model(pair()[0])
        logits.retain_grad()
        F.cross_entropy(logits.flatten(0, 1), pair()[1].flatten()).backward()
        found.append(logits.grad)
    assert torch.equal(*found)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_distributed(settings: dict[str, bool]) -> None:
    """DDP finds what the outputs need in their graph; two of its settings hand them through a Function of its own."""
    ours, theirs = models()
    with alone():
        wrapped = nn.parallel.DistributedDataParallel(ours, **settings)
        logits, loss = wrapped(*pair())
        (loss + F.cross_entropy(logits.transpose(1, 2), pair()[1])).backward()
    (2 * theirs(*pair())[1]).backward()
    assert_same_gradients(ours, theirs)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that was allocated at once."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def test_memory() -> None:
    """Only a chunk of the logits, 128 MiB, is held at once."""
    rows, vocabulary = 600, 100_000
    logits_bytes = 4 * rows * vocabulary
    weight = torch.zeros(vocabulary, 2, requires_grad=True)
    x, target = torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.long)

    def step() -> None:
        logits = lazy_linear(weight, x)
        F.cross_entropy(logits, target).backward()
        weight.grad = None

    assert peak_bytes(step) < 0.75 * logits_bytes
    assert peak_bytes(lambda: lazy_linear(weight, x).logsumexp(-1)) > logits_bytes


def test_profiled() -> None:
    """The report holds the whole step; the head's work is its caller's."""
    model = models()[0]
    report = gradscope.profile(model, pair(), lambda output, batch: output[1], steps=2, warmup=1)
    ledger = report.ledger.set_index("row")["ns"]
    assert ledger.sum() == report.layers["backward_self_ns"].sum() + ledger.drop("layers_ns").sum()
    rows = report.layers.set_index("path")
    assert rows.loc["", "backward_self_ns"] > 0
    assert rows.loc["fc", "backward_self_ns"] > 0
