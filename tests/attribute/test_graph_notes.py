"""What is noted of graphs as they are compiled and run, and who is told of it."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gradscope.attribute.compiled.blocks import Moved
from gradscope.attribute.compiled.read import _Known
from gradscope.compat import GraphWatch
from gradscope.compat.inductor import DEBUG, notes
from gradscope.tables import CalledFrom, CompiledGraph, GraphNote, NodeNote
from tests.attribute.test_compiled import A, B, fused
from tests.attribute.test_inductor_notes import in_modules, parameters

LINE = ("train.py", 7, "step")


def watch(*nodes: NodeNote) -> GraphWatch:
    made = GraphWatch()
    made.add(GraphNote((), {f"n{k}": each for k, each in enumerate(nodes)}))
    return made


def without_line(path: str = "") -> NodeNote:
    return replace(in_modules(path), frames=())


def test_no_call_is_noted_of_a_run_in_backward() -> None:
    """A checkpoint runs its graph again there: the frame is that of ``loss.backward()``."""
    found = watch(without_line())
    found.frame = lambda: LINE

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            found.run(0, [])
            return grad

    Again.apply(torch.ones(1, requires_grad=True)).backward()
    assert [ran.called_from for ran in found.runs] == [None]


def test_a_call_is_noted_of_graphs_with_some_nodes_of_modules_that_are_from_no_line() -> None:
    found = watch(in_modules("a"), without_line("a"))
    found.frame = lambda: LINE
    found.run(0, [])
    assert found.runs[0].called_from == LINE


def test_a_parameter_that_several_layers_held_is_the_firsts() -> None:
    found = watch()
    (weight,) = parameters(1)
    found.owners_of = lambda _: (0, 1, 2)
    found.run(0, [weight])
    assert found.layers((0,), {}, (5, -1, 4)) == (4,)


def test_a_parameter_that_nothing_held_when_the_graph_ran_first_is_asked_about_again() -> None:
    found = watch()
    (weight,) = parameters(1)
    found.run(0, [weight, 3])
    found.owners_of = lambda _: (0,)
    found.run(0, [weight, 5])  # other sizes: another run
    assert found.layers((0,), {}, (5,)) == (5,)


def test_a_module_that_gets_its_label_once_the_graph_is_compiled_is_known() -> None:
    module, found = nn.Linear(1, 1), GraphWatch()
    node = replace(in_modules("a"), modules=(CalledFrom(id(module), "a", "Linear"),))
    found.add(GraphNote((), {"p": node}))
    assert found.labels[0] == {}
    found.label_of = lambda _: 3
    found.run(0, [])
    assert found.labels[0] == {id(module): 3}


def test_a_module_that_has_the_id_of_one_that_is_gone_is_another() -> None:
    module, gone, found = nn.Linear(1, 1), nn.Linear(1, 1), GraphWatch()
    found._living = {id(module): weakref.ref(gone)}
    del gone
    assert found._modules({id(module)})[id(module)]() is module


def test_sizes_that_are_fixed_are_noted_as_a_run_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's are all numbers that it is given: without these its operations would not be told."""
    monkeypatch.setitem(sys.modules, DEBUG, SimpleNamespace(_inductor_triton_kernel_to_post_grad_node_info={}))
    made = torch.fx.Graph()
    made.placeholder("s").meta["val"] = 3
    made.placeholder("x").meta["val"] = torch.empty(2, device="meta")
    made.output(())
    assert notes.noted(SimpleNamespace(graph=made, named_modules=lambda: ()), 1, {}).sizes == (3,)


def test_of_several_that_read_an_input_one_of_which_nobody_tells_the_order_is_not_the_first() -> None:
    made = CompiledGraph(
        (),
        {
            "x": fused(-1),
            "p": fused(A, "x", sequence=-1),
            "q": fused(B, "x", sequence=4),
            "r": fused(A, "x", sequence=5),
        },
        inputs=("x",),
    )
    assert [each and each[0] for each in _Known.of(made, Moved(None)).readers] == [B]
