"""Programs that trace, export or script their model between steps."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.jit import trace_module as by_a_name_of_the_programs
from torch.nn import functional as F

import gradscope
from gradscope.capture.modes import run_operation

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x)) / sqrt(x.size(0) + 0.0)


class ByRest(nn.Module):
    """Takes more than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        return self.part.forward(x)


class ByCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.part(x)
        return result


class ByHand(ByCall):
    def forward(self, x: Tensor) -> Tensor:
        return self.part.forward(x)


def exported(model: Any, x: Tensor) -> Any:
    return torch.export.export(model, (x,), strict=True).module()(x)


def exported_loosely(model: Any, x: Tensor) -> Any:
    return torch.export.export(model, (x,)).module()(x)


def traced(model: Any, x: Tensor) -> Any:
    found = torch.jit.trace(model, (x,))
    assert "aten::relu" in str(found.inlined_graph)
    return found(x)


def traced_methods(model: Any, x: Tensor) -> Any:
    return torch.jit.trace_module(model, {"forward": (x,)})(x)


def traced_by_a_name_of_the_programs(model: Any, x: Tensor) -> Any:
    return by_a_name_of_the_programs(model, {"forward": (x,)})(x)


def scripted(model: Any, x: Tensor) -> Any:
    return torch.jit.script(model)(x)


def made_symbolic(model: Any, x: Tensor) -> Any:
    """Torch.fx leaves alone what it finds among the globals of the model's forward: ``sqrt`` here."""
    return torch.fx.symbolic_trace(model)(x)


@pytest.mark.parametrize("kind", [ByCall, ByHand])
@pytest.mark.parametrize(
    "trace",
    [
        exported,
        exported_loosely,
        traced,
        traced_methods,
        traced_by_a_name_of_the_programs,
        scripted,
        made_symbolic,
    ],
)
def test_a_program_may_trace_its_model_in_each_step(trace: Callable[[Any, Tensor], Any], kind: type[ByCall]) -> None:
    model, x = kind(), torch.ones(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradscope.profiling(model, steps=3, warmup=1) as prof:
        while True:
            loss = model.forward(x) if kind is ByHand else model(x)
            loss.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.allclose(trace(model, x), model(x))
            if prof.step():
                break
    assert not any("gradscope failed" in note for note in prof.report.data.notes)


def test_torch_fx_traces_a_model_that_takes_more_arguments() -> None:
    model, x = ByRest(), torch.ones(4, 4)
    with gradscope.profiling(model, steps=3, warmup=1) as prof:
        while True:
            model.forward(x).sum().backward()
            assert torch.allclose(made_symbolic(model, x), model.forward(x))
            if prof.step():
                break


def test_a_program_may_trace_a_model_before_it_calls_it() -> None:
    """The tracer would record what gradscope asks of the parameters of a module that it sees for the first time."""
    model, x = ByCall(), torch.ones(4, 4)
    with gradscope.profiling(model, steps=3, warmup=1) as prof:
        while True:
            traced(model, x)
            model(x).sum().backward()
            if prof.step():
                break


def test_a_graph_that_is_traced_is_the_same_in_each_step() -> None:
    """Names of values, and lines of operations: what ``torch.onnx`` and tensorboard begin with."""
    model, x = ByCall(), torch.ones(4, 4)

    def graph() -> str:
        return str(torch.jit._get_trace_graph(model, (x,))[0])  # type: ignore[no-untyped-call]

    alone = graph()
    with gradscope.profiling(model, steps=3, warmup=1) as prof:
        while True:
            model(x).sum().backward()
            assert graph() == alone
            if prof.step():
                break


def test_a_number_that_stands_for_a_tensor_is_taken_for_one() -> None:
    """Torch hands constants of what ``torch.jit`` has traced to modes in that way."""
    view = torch.ops.aten.view.default
    assert torch.equal(run_operation(view, (2.0, [1]), None), torch.tensor([2.0], dtype=torch.float64))
    assert run_operation(view, (True, [1]), {}).dtype is torch.bool
    with pytest.raises(RuntimeError, match="shape"):
        run_operation(view, (torch.ones(3), [2]), {})
    with pytest.raises(RuntimeError):
        run_operation(torch.ops.aten.full.default, ([-1], 2.0), {})
