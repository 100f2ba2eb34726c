"""Passes that are asked for some gradients, begin elsewhere or are alike, and what is noted of them. No clock."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import gradscope
from gradscope.capture.modules import CallRecorder
from gradscope.capture.passes import PassRecorder

from .counted_passes import STEPS, X, calls, passes_of, sums_of


def test_gradients_for_what_is_not_run_are_nobodys_and_no_error() -> None:
    """A pass that is asked for some gradients runs no node that leads to none of them, whoever may hand it some."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(_: int) -> None:
        h, u = a(X), b(X)
        torch.autograd.backward((u * h).sum() + (u.exp() * h).sum(), inputs=[b.weight])

    _, data = passes_of(step)
    assert calls(data, "accumulate", "AccumulateGrad") == sums_of(data) == {"Linear#2": STEPS}


def test_steps_that_are_alike_are_walked_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prof: Any
    with gradscope.profiling(model, steps=STEPS, warmup=1, memory=False) as prof:
        while True:
            model(X).sum().backward()
            if prof.step():
                break
    passes = prof._session.capture.timed.passes
    assert len(passes.graphs) == 1 and len(passes.passes) == STEPS + 1


def test_what_walking_may_take_is_counted_in_each_step_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is left for one of a step's two passes, which are known from the first step on."""
    clock = itertools.count(step=10)  # a walk takes 10
    monkeypatch.setattr("gradscope.capture.passes.time", SimpleNamespace(perf_counter_ns=lambda: next(clock)))
    model, calls = nn.Linear(4, 4), CallRecorder()
    recorder = PassRecorder(calls)
    recorder.spare_ns = 15
    with calls.recording():
        for _ in range(3):
            recorder.begin_step()
            for _ in range(2):
                with recorder.around(model(X).sum()):
                    pass
    assert [note.own for note in recorder.passes] == [True, True, True, False, True, False]


class Asked(nn.Sequential):
    """Three layers; each step asks for the gradients of one of them, in one of two ways."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def parameters_of(self, step: int) -> list[nn.Parameter]:
        layer = self[step % 3]
        return [layer.weight] if step % 2 else [layer.weight, layer.bias]


def test_a_pass_that_is_asked_for_some_gradients_alone() -> None:
    model, each = Asked(), list[Counter[str]]()
    with gradscope.profiling(model, steps=STEPS, warmup=1, memory=False) as prof:
        for step in range(100):
            profiled = bool(torch.autograd.profiler._is_profiler_enabled)
            asked = model.parameters_of(step)
            torch.autograd.backward(model(X).sum(), inputs=asked)
            if profiled:
                each.append(Counter({str(step % 3): len(asked)}))
            if prof.step():
                break
    given = sum(each[1 : 1 + STEPS], Counter[str]())
    assert calls(prof.report.data, "accumulate", "AccumulateGrad") == given


def test_a_pass_from_an_edge_of_the_graph() -> None:
    """torch.autograd.graph.GradientEdge stands for the tensor, which may be gone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with gradscope.profiling(model, steps=STEPS, warmup=1, memory=False) as prof:
        while True:
            torch.autograd.backward(get_gradient_edge(model(X).sum()))
            if prof.step():
                break
    passes = prof._session.capture.timed.passes  # type: ignore[union-attr]
    assert [graph.names[0] for graph in passes.graphs] == ["SumBackward0"]
    assert calls(prof.report.data, "accumulate", "AccumulateGrad") == {"0": 2 * STEPS, "1": 2 * STEPS}


class Keeps(torch.autograd.Function):
    """Keeps a tensor under the name that an AccumulateGrad has for its parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = torch.ones(3)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_a_function_that_keeps_a_variable_is_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    passes, data = passes_of(lambda _: Keeps.apply(model(X)).sum().backward())
    kinds = {
        name: node.parameter >= 0 for name, node in zip(passes.graphs[0].names, passes.graphs[0].nodes, strict=True)
    }
    assert kinds["KeepsBackward"] is False and kinds["AccumulateGrad"] is True
    assert calls(data, "accumulate", "AccumulateGrad") == {"0": 2 * STEPS, "1": 2 * STEPS}


def test_passes_from_other_values_are_walked_by_themselves() -> None:
    """The same modules were called and drew the same numbers: what a pass starts from differs."""
    stem, heads = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def step(number: int) -> None:
        h = stem(X)
        losses = [head(h).sum() for head in heads]
        torch.autograd.backward(losses if number % 2 else losses[1:])

    passes, _ = passes_of(step)
    assert len(passes.graphs) == 2
    assert sorted(graph.names.count("AccumulateGrad") for graph in passes.graphs) == [4, 6]


class Joined(nn.Module):
    """Multiplies by the weights of two layers at once, and calls neither."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([part.weight for part in self.parts], 1)  # type: ignore[misc]


def test_parameters_of_two_layers_behind_one_node_are_marked() -> None:
    """In which order the engine serves them is its own."""
    model, marked = Joined(), set[tuple[bool, ...]]()

    def step(_: int) -> None:
        model(X).sum().backward()
        marked.add(tuple(bool(each._post_accumulate_grad_hooks) for each in model.parameters()))  # type: ignore[attr-defined]

    passes_of(step)
    assert marked == {(False, False), (True, True)}
