"""What is noted of backward passes while they run. Counts, no clock."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.capture import graphs, passes
from gradscope.capture.modules import CallRecorder
from gradscope.capture.passes import PassRecorder

X = torch.ones(2, 4)


def marks(module: nn.Module) -> list[int]:
    """How many hooks each parameter has."""
    return [len(each._post_accumulate_grad_hooks or ()) for each in module.parameters()]  # type: ignore[attr-defined]


def at_most(monkeypatch: pytest.MonkeyPatch, nodes: int) -> list[int]:
    """Let so many nodes of a graph be looked at; the list grows by how many were, at each walk."""
    found: list[int] = []
    walked = graphs.walked

    def counted(starts: Any) -> tuple[list[Any], bool]:
        order, whole = walked(starts, nodes)
        found.append(len(order))
        return order, whole

    monkeypatch.setattr(passes, "walked", counted)
    return found


def noted(*steps: Callable[[PassRecorder], object], spare_ns: int = 10**12) -> PassRecorder:
    """A recorder that was told of these steps."""
    calls = CallRecorder()
    recorder = PassRecorder(calls)
    recorder.spare_ns = spare_ns
    with calls.recording():
        for step in steps:
            recorder.begin_step()
            step(recorder)
    recorder.forget()
    return recorder


def once(recorder: PassRecorder, root: Tensor) -> None:
    with recorder.around(root):
        pass


def test_a_graph_that_is_too_deep_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, model = at_most(monkeypatch, 3), nn.Linear(4, 4)
    recorder = noted(*[lambda recorder: once(recorder, model(X).sum())] * 4)
    assert looks == [3] and [note.graph for note in recorder.passes] == [-1] * 4


def test_what_was_looked_at_in_vain_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a program that builds another deep graph in each step is walked for ever."""
    monkeypatch.setattr(passes, "_MOST_NODES", 5)
    looks, model = at_most(monkeypatch, 3), nn.Linear(4, 4)

    def step(times: int) -> Callable[[PassRecorder], None]:
        def run(recorder: PassRecorder) -> None:
            for _ in range(times - 1):
                model(X)
            once(recorder, model(X).sum())

        return run

    noted(*(step(times) for times in range(1, 6)))
    assert looks == [3, 3]


def test_of_a_pass_in_one_that_is_not_known_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran in front of it is told by the graph of the one before."""
    at_most(monkeypatch, 6)

    def step(recorder: PassRecorder) -> None:
        deep = X.clone().requires_grad_().exp().exp().exp().exp().exp().exp().sum()
        with recorder.around(deep), recorder.inside(nn.Linear(4, 4)(X).sum()):
            pass

    assert [note.graph for note in noted(step, step).passes] == [-1] * 4


def test_passes_inside_of_one_that_drew_more_in_between_are_not_alike() -> None:
    """A checkpoint of functions calls no module: how far its numbers are behind those of the pass around it tells."""
    ways: list[Callable[[Tensor], Tensor]] = [torch.exp, lambda x: x.sin().exp()]

    def step(number: int) -> Callable[[PassRecorder], None]:
        def run(recorder: PassRecorder) -> None:
            outer, inner = (X.clone().requires_grad_() for _ in range(2))
            with recorder.around(outer.mul(2)), recorder.inside(ways[number](inner)):
                pass

        return run

    recorder = noted(*(step(number) for number in (0, 1, 0, 1)), spare_ns=0)
    inner = [recorder.graphs[note.graph].names for note in recorder.passes if note.nested]
    assert inner == [("ExpBackward0", "AccumulateGrad"), ("ExpBackward0", "SinBackward0", "AccumulateGrad")] * 2


def test_a_parameter_in_the_place_of_one_that_is_gone_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python gives ids again."""
    at_most(monkeypatch, 3)
    model, calls = nn.Linear(4, 4), CallRecorder()
    recorder = PassRecorder(calls)
    recorder._marked[id(model.weight)] = weakref.ref(torch.ones(1))
    with calls.recording():
        once(recorder, model(X).sum())
    assert marks(model) == [1, 1]
    recorder.forget()
    assert marks(model) == [0, 0]


def test_a_parameter_that_moves_to_another_layer_is_that_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has the owners of its own time."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)

    def moved(recorder: PassRecorder) -> None:
        other.weight = model.weight
        model.weight = nn.Parameter(torch.ones(4, 4))
        registry = recorder._calls.registry
        monkeypatch.setattr(registry, "owners_of", lambda held: (1,) if held is other.weight else (0,))
        once(recorder, other(X).sum())

    recorder = noted(lambda recorder: once(recorder, model(X).sum()), moved)
    first, second = (
        {recorder.owners[node.parameter] for node in graph.nodes if node.parameter >= 0} for graph in recorder.graphs
    )
    assert first == {(0,)} and (1,) in second


class Holding(nn.Module):
    """Calls one of its layers, and may take the weight of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        x = self.called(x)
        return x @ self.idle.weight * scale if scale else x


def test_a_leaf_of_no_layer_marks_nobodys_parameters() -> None:
    """Only weights of modules that are not called let all such modules mark theirs, once each."""
    model, calls = Holding(), CallRecorder()
    recorder = PassRecorder(calls)
    with calls.recording():
        once(recorder, model(X.clone().requires_grad_(), 0.0).sum())
        assert marks(model.idle) == [0, 0]
        for times in range(1, 4):
            root = model(X, 1.0)
            for _ in range(times):
                root = root.exp()
            once(recorder, root.sum())
    assert len(recorder.graphs) == 4 and marks(model.idle) == [1, 1]
    recorder.forget()
    assert marks(model) == [0] * 4
