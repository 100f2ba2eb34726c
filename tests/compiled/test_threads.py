"""A thread that compiles while another is measured whose modules are called in ways that no hook tells of."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.trampoline import is_told_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner.forward(x)
        return result


@pytest.fixture
def built() -> Any:
    """A model that is called by hand, and its optimizer."""
    model = nn.Sequential(Part(), Part())
    return model, torch.optim.SGD(model.parameters(), 0.1)


def calls_of_parts(built: Any, meanwhile: Any = lambda: None) -> tuple[int, ...]:
    """Measure steps that call each part by hand.

    Args:
        meanwhile: called between the first two steps in which calls of the class are told of.
    """
    model, optimizer = built
    own, waits = Part.forward, True
    with gradscope.profiling(model, steps=2, warmup=1, memory=False) as prof:
        for _ in range(50):
            x = torch.ones(2, 4)
            for part in model:
                x = part.forward(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if prof.step():
                break
            if waits and is_told_of(Part.forward):
                waits = False
                meanwhile()
    assert not waits and Part.forward is own and not is_told_of(own)
    assert not any("gradscope failed" in note for note in prof.report.data.notes)
    calls = {row.path: row.calls for row in prof.report.data.layers}
    return calls["0"], calls["1"]


def test_an_idle_thread_beside_what_was_compiled_before_costs_no_row(built: Any) -> None:
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    ends = Event()
    thread = Thread(target=ends.wait)
    thread.start()
    try:
        assert calls_of_parts(built) == (1, 1)
    finally:
        ends.set()
        thread.join()


def test_classes_are_as_they_were_where_another_thread_compiles_them(built: Any) -> None:
    """And it is not compiled again once the measurement has ended."""
    own, seen, graphs = Part.forward.__code__, [], 0

    def backend(graph: Any, _inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        seen.append(Part.forward.__code__)
        return graph.forward

    other = Part()
    compiled = torch.compile(lambda x: other.forward(x) + other(x), backend=backend, fullgraph=True)

    def compiles() -> None:
        thread = Thread(target=compiled, args=(torch.ones(2, 4),))
        thread.start()
        thread.join()
        assert Part.forward.__code__ is own

    calls_of_parts(built, compiles)
    compiled(torch.ones(2, 4))
    assert seen == [own] and graphs == 1
