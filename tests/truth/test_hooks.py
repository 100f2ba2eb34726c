"""Truth: what the user's backward hooks cost is in a column of their own, at their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

from .burning import Burning, Meter, Source
from .models import Checkpointed
from .proof import Expected, in_a_loop, in_model_mode, measure, prove, prove_each_place, rows, summed

X = torch.ones(4, 8)


class Burner:
    """A hook of any kind that burns a set time at ``owner``."""

    def __init__(self, meter: Meter, owner: str, ms: float) -> None:
        self.meter, self.owner, self.ms = meter, owner, ms

    def __call__(self, *_: Any) -> None:
        with self.meter.burn("hook", self.owner, self.ms):
            pass


class Net(nn.Module):
    """A source without an input that needs a gradient, then burning layers, one inside of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.first = Source(1, 2), Burning(1, 3)
        self.inner = nn.Sequential(Burning(1, 1), Burning(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.first(self.source(x)))
        return out


def net(meter: Meter) -> Net:
    model = Net()
    meter.adopt(model)
    return model


def test_full_backward_hooks_of_modules(meter: Meter) -> None:
    """Behind a layer, on a container and on one whose input needs no gradient; and before them."""
    model = net(meter)
    for path, ms in (("first", 4), ("inner", 3), ("inner.1", 2), ("source", 5)):
        model.get_submodule(path).register_full_backward_hook(Burner(meter, path, ms))
    for path, ms in (("first", 2), ("inner.0", 3), ("inner", 1)):
        model.get_submodule(path).register_full_backward_pre_hook(Burner(meter, path, ms))
    with pytest.warns(UserWarning, match="no inputs require gradients"):  # the source's, every time
        report = prove(meter, in_model_mode(model, X, summed))
    assert report.data.ledger.hook_ns == sum(row.hook_ns for row in report.data.layers)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the source's input needs no gradient
def test_hooks_on_the_root_and_on_all_modules(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)  # torch never resets it
    model = net(meter)
    model.register_full_backward_pre_hook(Burner(meter, "", 3))
    paths = {id(module): path for path, module in model.named_modules()}

    def everywhere(module: nn.Module, *_: Any) -> None:
        if id(module) in paths:  # the proof runs a layer of its own, to see what an operation takes
            with meter.burn("hook", paths[id(module)], 1):
                pass

    handle = register_module_full_backward_hook(everywhere)
    try:
        prove(meter, in_model_mode(model, X, summed))
    finally:
        handle.remove()


class Watched(nn.Module):
    """Registers hooks on what its layers make, in every forward."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.source, self.first = Source(1, 2), Burning(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.source(x)
        x.register_hook(Burner(self.meter, "source", 4))
        out: Tensor = self.first(x)
        out.register_hook(Burner(self.meter, "first", 2))
        out.register_hook(Burner(self.meter, "first", 1))
        return out


def test_hooks_on_tensors(meter: Meter) -> None:
    model = Watched(meter)
    meter.adopt(model)
    prove(meter, in_model_mode(model, X, summed))


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_on_several_tensors(meter: Meter, mode: Any) -> None:
    """It is called where the last of them has its gradient, or the first."""
    model = net(meter)
    burner = Burner(meter, "source" if mode == "all" else "first", 4)

    def step() -> None:
        first = model.source(X)
        second = model.first(first)
        torch.autograd.graph.register_multi_grad_hook((first, second), lambda gradients: burner(gradients), mode=mode)
        model.inner(second).sum().backward()

    prove(meter, in_a_loop(model, step))


@pytest.mark.parametrize("late", [False, True], ids=["from before the run", "in every step"])
def test_hooks_on_parameters(meter: Meter, late: bool) -> None:
    """On the gradient, and behind its accumulation: where a step registers them and where they were always there."""
    model = nn.Sequential(Source(1, 2), Burning(1, 1), Source(1, 2))
    meter.adopt(model)

    def register() -> list[Any]:
        return [
            model[0].anchor.register_hook(Burner(meter, "0", 3)),
            model[0].anchor.register_post_accumulate_grad_hook(Burner(meter, "0", 2)),
            model[2].anchor.register_post_accumulate_grad_hook(Burner(meter, "2", 4)),
        ]

    def step() -> None:
        handles = register() if late else []
        model(X).sum().backward()
        for handle in handles:
            handle.remove()

    always = [] if late else register()
    prove(meter, in_a_loop(model, step))
    for handle in always:
        handle.remove()
    assert not model[0].anchor._backward_hooks and not model[2].anchor._post_accumulate_grad_hooks


@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_below_a_checkpoint(meter: Meter, note_repeat: Callable[[], None], reentrant: bool) -> None:
    def attempt() -> None:
        model = Checkpointed(reentrant)
        meter.adopt(model)
        model.block[2].register_full_backward_hook(Burner(meter, "block.2", 3))  # type: ignore[index]
        model.tail.register_full_backward_pre_hook(Burner(meter, "tail", 2))
        bearers = Expected({}, checkpoints={"": 1, "block": 1})
        layers = rows(prove(meter, in_model_mode(model, X, summed), lambda meter, steps: bearers))
        assert layers[""].backward_total_ns >= layers["block.2"].hook_ns + layers["tail"].hook_ns

    prove_each_place(meter, attempt, note_repeat)


def test_what_hooks_take_is_of_no_line_that_they_are_not_on(meter: Meter) -> None:
    """A hook on a tensor runs inside the node that made it, whose line has nothing to do with it."""
    model = Watched(meter)
    meter.adopt(model)
    data = measure(meter, in_a_loop(model, lambda: model(X).sum().backward(), lines=True)).data
    backward = sum(meter.totals_ns("backward").values()) / data.workload.steps
    on_lines = sum(line.backward_ns for line in data.lines)
    hooks = sum(meter.totals_ns("hook").values()) / data.workload.steps
    assert backward * 0.97 < on_lines < backward + hooks / 2, (backward, hooks, data.lines)
