"""Truth: graphs out of the ordinary: double backward, several backward calls, threads, compiled parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .burning import OUTSIDE, Burning, Meter, Source, burn
from .proof import Expected, close, in_a_loop, in_model_mode, measure, prove, rows, summed

X = torch.ones(4, 8)


def chain(meter: Meter) -> nn.Sequential:
    model = nn.Sequential(Source(1, 2), nn.Linear(8, 8), Burning(2, 3))
    meter.adopt(model)
    return model


def test_double_backward(meter: Meter) -> None:
    """Gradient penalty: nodes made during backward belong to the layer whose node was being evaluated."""
    model = nn.Sequential(nn.Linear(8, 8), Burning(1, 2), nn.Tanh(), Burning(1, 3))
    meter.adopt(model)

    def step() -> None:
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.square().sum() + model(x).sum()).backward()

    prove(meter, in_a_loop(model, step))
    # The first forward's backward, its double backward, the first forward's nodes again (Tanh makes the penalty
    # depend on them), and the second forward's backward. Layer 3 lies after Tanh: the penalty does not reach it.
    assert meter.counts()["backward", "1"] == 4 * 3 and meter.counts()["backward", "3"] == 2 * 3


def test_several_backward_calls_with_a_kept_graph(meter: Meter) -> None:
    model = chain(meter)

    def step() -> None:
        out = model(X).sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        out.backward()

    prove(meter, in_a_loop(model, step))
    assert meter.counts()["backward", "2"] == 9 and meter.counts()["forward", "2"] == 3


def test_two_losses_over_a_shared_trunk(meter: Meter) -> None:
    trunk, first, second = nn.Sequential(nn.Linear(8, 8), Burning(1, 2)), Burning(1, 3), Burning(1, 1)
    model = nn.ModuleDict({"trunk": trunk, "first": first, "second": second})
    meter.adopt(model)

    def step() -> None:
        hidden = trunk(X)
        first(hidden).sum().backward(retain_graph=True)
        second(hidden).sum().backward()

    prove(meter, in_a_loop(model, step))


def test_one_backward_of_several_losses(meter: Meter) -> None:
    first, second = chain(meter), Burning(1, 4)
    model = nn.ModuleDict({"first": first, "second": second})
    meter.adopt(model)

    def step() -> None:
        hidden = first(X)
        losses = [hidden.sum(), second(hidden).mean()]
        torch.autograd.backward(losses, inputs=list(first.parameters()))

    prove(meter, in_a_loop(model, step))


def test_functional_transforms(meter: Meter) -> None:
    """``functional_call`` and ``func.grad`` run the same modules on other tensors."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    batch = torch.ones(512, 512)

    def loss(values: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(model, values, batch).square().mean()
        return out

    def step() -> None:
        with meter.burn("outer", "step"):
            torch.func.grad(loss)(parameters)

    report = measure(meter, in_a_loop(model, step))
    layers, ledger = rows(report), report.data.ledger
    assert ledger.unattributed_ns < 0.005 * ledger.backward_ns
    assert layers["0"].backward_self_ns > 0.1 * ledger.backward_ns
    assert layers["2"].backward_self_ns > 0.3 * ledger.backward_ns


def test_gradient_accumulation(meter: Meter) -> None:
    # Every layer burns, one of them for no time at all: a Linear called three times takes what the tolerance allows.
    model = nn.Sequential(Source(1, 2), Source(0, 0), Burning(2, 3))
    meter.adopt(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            (model(X).sum() / 3).backward()
        optimizer.step()

    report = prove(meter, in_a_loop(model, step))
    assert rows(report)["2"].calls == 3
    assert report.data.step.optimizer_ns > 0


def test_autograd_grad_instead_of_backward(meter: Meter) -> None:
    model = chain(meter)

    def step() -> None:
        torch.autograd.grad(model(X).sum(), list(model.parameters()))

    prove(meter, in_a_loop(model, step))


def test_functional_work_in_the_users_loop(meter: Meter) -> None:
    model = chain(meter)

    def step() -> None:
        out = burn(meter, OUTSIDE, model(X), forward_ms=1, backward_ms=4)
        out.sum().backward()

    prove(meter, in_a_loop(model, step))


class Parallel(nn.Module):
    """As DataParallel: the branches run forward in threads of their own, backward in the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Source(1, 1)
        self.branches = nn.ModuleList([nn.Sequential(Burning(2, 1 + k), nn.Linear(8, 8)) for k in range(3)])
        self.join = Burning(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        results: list[Tensor | None] = [None] * len(self.branches)
        grad = torch.is_grad_enabled()

        def work(index: int) -> None:
            with torch.set_grad_enabled(grad):
                results[index] = self.branches[index](x)

        # One after the other and then all at once: thread identities are reused, and ranges overlap.
        first = threading.Thread(target=work, args=(0,))
        first.start()
        first.join()
        rest = [threading.Thread(target=work, args=(index,)) for index in (1, 2)]
        for thread in rest:
            thread.start()
        for thread in rest:
            thread.join()
        out: Tensor = self.join(torch.stack([result for result in results if result is not None]).sum(0))
        return out


def test_threads_in_forward(meter: Meter) -> None:
    model = Parallel()
    meter.adopt(model)

    def expected(meter: Meter, steps: int) -> Expected:
        # Forward in other threads runs at the same time as the main thread waits: its layers' forward is not compared.
        return Expected({}, skip=frozenset({"forward_self_ns"}))

    layers = rows(prove(meter, in_model_mode(model, X, summed), expected))
    assert layers["branches.2.0"].calls == 1


def test_backward_in_a_thread(meter: Meter) -> None:
    """A backward that another Python thread calls is measured, or the report says that it was not; never misplaced."""
    model = chain(meter)

    def step() -> None:
        loss = model(X).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        model(X).sum().backward()

    report = measure(meter, in_a_loop(model, step))
    truth = meter.totals_ns("backward")["2"] / report.data.workload.steps
    got = rows(report)["2"].backward_self_ns
    assert close(got, truth) or (close(got, truth / 2) and any("thread" in note for note in report.data.notes))


@pytest.fixture
def dynamo() -> Any:
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield dynamo
    dynamo.reset()
    dynamo.utils.counters.clear()


class PartlyCompiled(nn.Module):
    def __init__(self, backend: str, whole: Callable[[nn.Module], Any] | None = None) -> None:
        super().__init__()
        self.source = Source(1, 1)
        inner = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
        self.compiled = torch.compile(inner, backend=backend)
        self.tail = Burning(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.compiled(self.source(x)))
        return out


# torch's own compiler uses what torch itself deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_submodule(meter: Meter, dynamo: Any, backend: str) -> None:
    model = PartlyCompiled(backend)
    meter.adopt(model)
    batch = torch.ones(512, 512)
    model(batch).sum().backward()
    before = dict(dynamo.utils.counters["stats"])

    inside = frozenset({"compiled", "compiled.0", "compiled.1", "compiled.2"})

    def expected(meter: Meter, steps: int) -> Expected:
        return Expected({}, unknown=inside)

    report = prove(meter, in_model_mode(model, batch, summed), expected)
    assert not dynamo.utils.counters["graph_break"], "gradscope's hooks broke a graph"
    assert dict(dynamo.utils.counters["stats"]) == before, "gradscope made torch compile again"
    inner = [row for row in report.data.layers if row.path in inside]
    got = sum(row.backward_self_ns + row.accumulate_ns + row.gradient_sum_ns for row in inner)
    truth = meter.gaps_ns("tail", "source") / report.data.workload.steps
    assert truth > 1e6 and got == pytest.approx(truth, rel=0.1, abs=0.4e6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_what_another_model_compiled_does_not_matter(meter: Meter, dynamo: Any) -> None:
    """Only a compiled model costs the report its lines and FLOPs, not one that the process compiled before."""
    torch.compile(nn.Linear(8, 8), backend="eager")(X)
    model = chain(meter)
    report = prove(meter, in_model_mode(model, X, summed, lines=True))
    assert report.data.lines and not any("compile" in note for note in report.data.notes), report.data.notes
