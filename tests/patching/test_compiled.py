"""What runs under torch.compile is left alone, with the text that it runs, and nothing of ours is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradscope
from gradscope.patching.advice import what_to_do
from gradscope.patching.patches import Patches
from gradscope.patching.prove.unit import Unit
from tests.patching import small

X = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(5))
REASON = "it runs under torch.compile"
OURS = str(Path(gradscope.__file__).parent)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = small.Causal(32), small.Causal(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Backend:
    """Runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


class Head(nn.Module):
    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.head = torch.compile(nn.Linear(8, 50), backend=backend)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        return functional.cross_entropy(logits, y)


@pytest.fixture(name="backend")
def backend_fixture() -> Backend:
    torch.compiler.reset()
    return Backend()


def wrapped(net: Net, backend: Backend) -> None:
    net.two = torch.compile(net.two, backend=backend)


def in_place(net: Net, backend: Backend) -> None:
    net.two.compile(backend=backend)


def method(net: Net, backend: Backend) -> None:
    net.two.forward = torch.compile(net.two.forward, backend=backend)


def called_otherwise(net: Net, backend: Backend) -> None:
    """The model holds the module itself, and what was compiled of it in a list."""
    held = [torch.compile(net.two, backend=backend)]
    net.forward = lambda x: held[0](net.one(x))


@pytest.mark.parametrize("compiled", [wrapped, in_place, method, called_otherwise])
def test_a_compiled_part(compiled: Callable[[Net, Backend], None], backend: Backend) -> None:
    net = Net()
    compiled(net, backend)
    found = Patches(gradscope.plan(net, X, recipes=["attention"]))
    assert [(site.path, site.reasons) for site in found.sites] == [("one", []), ("two", [REASON])]
    assert [site.path for site in found.kept] == ["one"] and found.in_source == [] and found.diff == ""
    assert backend.graphs == []
    assert what_to_do(REASON) == "run the fix without torch.compile, then compile the model"


def test_a_compiled_model(backend: Backend) -> None:
    found = gradscope.plan(torch.compile(Net(), backend=backend), X, recipes=["attention"])
    assert [(site.path, site.reasons) for site in found.sites] == [("one", [REASON]), ("two", [REASON])]
    assert backend.graphs == []


def test_what_torch_keeps_from_dynamo_is_not_compiled(backend: Backend) -> None:
    """Checkpointing is called by a wrapper of Dynamo's too."""
    net = Net()
    net.forward = lambda x: net.two(torch.utils.checkpoint.checkpoint(net.one, x, use_reentrant=False))
    torch.compile(lambda x: x + 1, backend=backend)(X)
    found = gradscope.plan(net, X, recipes=["attention"])
    assert [(site.path, site.reasons) for site in found.sites] == [("one", []), ("two", [])]


def test_a_pattern_of_torchs_own_code(backend: Backend) -> None:
    """Of a compiled head no frame is the user's."""
    batch = torch.randn(6, 8), torch.randint(50, (6,))
    found = gradscope.plan(Head(backend), batch, recipes=["linear_cross_entropy"])
    assert [site.reasons for site in found.sites] == [[REASON]]


def test_a_step_is_proved_without_compiling(backend: Backend) -> None:
    net = Net()
    wrapped(net, backend)
    unit, plain = (Unit("", each, each, (X,), {}) for each in (net, Net()))
    plain.module.load_state_dict({name.replace("_orig_mod.", ""): held for name, held in net.state_dict().items()})
    for mine, other in zip(unit.references, plain.references, strict=True):
        assert {name.replace("_orig_mod.", "") for name in mine} == set(other)
        for name, held in mine.items():
            assert torch.equal(held, other[name.replace("_orig_mod.", "")])
    assert backend.graphs == []


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, of the input that it traces
def test_the_measured_step_is_compiled_as_alone(backend: Backend) -> None:
    """Only the user's own code is, and with it the part that is compiled runs as it does in training."""
    net = Net()
    wrapped(net, backend)
    found = gradscope.patch(net, X, recipes=["attention"])
    assert [result.status for result in found.verified.results][1:] == ["refused"]
    assert backend.graphs
    assert not [node for graph in backend.graphs for node in graph.graph.nodes if OURS in (node.stack_trace or "")]
