"""Reads of tensors in a loop of the user's: each is seen with its line, in modules, between them and in hooks."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules.loop import host_sync
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from tests.diagnose.run_case import loop_case

LOG = logging.Logger("a training script")
LOG.addHandler(logging.StreamHandler(io.StringIO()))


class Small(nn.Module):
    """One layer; ``look`` is given its result."""

    def __init__(self, look: Callable[[Tensor], object] = bool) -> None:
        super().__init__()
        self.linear, self.look = nn.Linear(8, 8), look

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.look(y.detach().mean())
        return y.tanh()


def _quiet(_value: object) -> None:
    """Do nothing."""


def _case(look: Callable[[Tensor], object] = _quiet, model: nn.Module | None = None, memory: bool = False) -> Case:
    model = Small(_quiet) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        look(loss.detach())

    return loop_case(step, model, memory=memory)


def _moved(tensor: Value) -> Value:
    return replace(tensor, device=torch.device("cuda"))


def _on_gpu(case: Case) -> list[Finding]:
    """As the rule would see it had the model run on a GPU."""
    calls: list[Node] = []
    for each in case.facts.calls:
        stays = each.op in ("cpu", "to", "numpy", "__array__")
        inputs = tuple(map(_moved, each.inputs))
        outputs = each.outputs if stays else tuple(map(_moved, each.outputs))
        calls.append(replace(each, inputs=inputs, outputs=outputs))
    run = replace(case.run, environment={**case.run.environment, "device": "cuda"})
    facts: StepFacts = replace(case.facts, calls=tuple(calls))
    return list(host_sync.find(Case(run, facts)))


def _if(x: Tensor) -> None:
    if x > 5:
        raise AssertionError


def _print(x: Tensor) -> None:
    print(x, file=io.StringIO())


LOOKS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "float": float,
    "int": int,
    "bool": bool,
    "if": _if,
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x.view(1)[x.view(1) > 0],
    "print": _print,
    "str": str,
    "f-string": lambda x: f"{x:.3f}",
    "f-string of all": lambda x: f"{x}",
    "percent": lambda x: "%.3f" % x,  # noqa: UP031
    "log a number": lambda x: LOG.warning("%.3f", x),
    "log a tensor": lambda x: LOG.warning("%s", x),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_each_read_in_the_loop_is_seen_with_its_line(look: Callable[[Tensor], object]) -> None:
    (found,) = _on_gpu(_case(look))
    assert found.line is not None
    assert Path(found.line.rpartition(":")[0]).name == Path(__file__).name
    assert found.severity == "info"
    assert found.layers == ()


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_each_read_in_a_module_is_seen_with_its_layer(look: Callable[[Tensor], object]) -> None:
    (found,) = _on_gpu(_case(model=Small(look)))
    assert found.severity == "warning"
    assert found.layers == ("",)
    assert found.line is not None
    assert Path(found.line.rpartition(":")[0]).name == Path(__file__).name


def test_on_a_cpu_none_of_these_is_told_of() -> None:
    for look in LOOKS.values():
        assert list(host_sync.find(_case(look))) == []


def test_a_step_that_reads_nothing_has_no_finding() -> None:
    assert _on_gpu(_case(lambda x: (x.shape, x.dim(), x.requires_grad, len(x.view(1)), repr(x.shape)))) == []


def test_reads_in_hooks_of_forward_and_of_backward() -> None:
    norms: list[float] = []
    model = Small(_quiet)
    model.linear.register_forward_hook(lambda module, args, output: norms.append(output.sum().item()))
    model.linear.weight.register_hook(lambda gradient: norms.append(gradient.norm().item()))  # type: ignore[no-untyped-call]
    found = _on_gpu(_case(model=model))
    assert [each.layers for each in found] == [("linear",), ()]
    assert len({each.line for each in found}) == 2


def test_reads_in_a_forward_that_is_run_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small(float)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    (found,) = _on_gpu(_case(model=Checkpointed()))
    assert "float() 2 times" in found.evidence
