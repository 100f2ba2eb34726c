"""Every AccumulateGrad and every gradient sum goes to its own layer, whatever other steps did. Counts, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.tables import RunData

X = torch.ones(2, 4)
STEPS = 4


def measured(model: nn.Module, sums: dict[str, int] | None = None) -> tuple[RunData, Counter[str], Counter[str]]:
    """The report of a loop, and how many gradients each layer's parameters were given in the measured steps.

    Args:
        sums: gradient sums that the model says it caused, by layer; it adds to it in each step.
    """
    each: list[tuple[Counter[str], Counter[str]]] = []
    owner: dict[int, str] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            owner.setdefault(id(parameter), path)  # a tied one is its first holder's
    with gradscope.profiling(model, steps=STEPS, warmup=1, memory=False) as prof:
        while True:
            profiled = bool(torch.autograd.profiler._is_profiler_enabled)
            model.zero_grad(set_to_none=True)
            if sums is not None:
                sums.clear()
            model(X).sum().backward()
            if profiled:
                found = Counter(owner[id(p)] for p in model.parameters() if p.grad is not None)
                each.append((found, Counter(sums or {})))
            if prof.step():
                break
    given, added = Counter[str](), Counter[str]()
    for one, other in each[1 : 1 + STEPS]:
        given += one
        added += other
    return prof.report.data, given, added


def calls(data: RunData, phase: str, name: str) -> Counter[str]:
    """Calls of an operation over all measured steps, by layer."""
    found = Counter[str]()
    for op in data.ops:
        if op.phase == phase and op.name == name:
            found[op.layer if op.layer is not None else "(outside)"] += round(op.calls * STEPS)
    return found


class Experts(nn.Module):
    """A mixture of experts: ``top`` of them, others in each step, in another order."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=number % 2 == 0) for number in range(7))
        self.top, self.seen = top, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x)
        chosen = [(self.seen * 3 + number * 2) % 7 for number in range(self.top)]
        out: Tensor = sum(self.experts[number](x) for number in chosen)  # type: ignore[assignment]
        return out


class Dropped(nn.Module):
    """Stochastic depth with a residual: the value that is added up is of whichever layer ran before."""

    def __init__(self, sums: dict[str, int]) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.sums, self.seen = sums, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x, last = self.stem(x), "stem"
        for number, block in enumerate(self.blocks):
            if (self.seen >> number) & 1:
                self.sums[last] = self.sums.get(last, 0) + 1
                x, last = torch.add(block(x), x), ""
        return x


class Alternating(nn.Module):
    """The same layers in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4, bias=False), "c": nn.LayerNorm(4)})
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for name in ("abc", "cab", "bca")[self.seen % 3]:
            x = self.layers[name](x)
        return x


class Shared(nn.Module):
    """Tied weights whose last user changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for layer in (self.a, self.b, self.c) if self.seen % 2 else (self.c, self.b, self.a):
            x = layer(x)
        return x


class Mixed(nn.Module):
    """One node gives gradients to the parameters of several layers, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen % 2:
            return x @ torch.cat([part.weight for part in self.parts], 1)  # type: ignore[misc]
        x = x[None]
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Again(nn.Module):
    """Checkpoints, other blocks in each step."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.reentrant, self.seen = reentrant, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x)
        for number in (self.seen % 3, (self.seen * 2) % 3):
            x = checkpoint(self.blocks[number], x, use_reentrant=self.reentrant)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one expert": lambda: Experts(1),
    "two experts": lambda: Experts(2),
    "layers dropped": lambda: Dropped({}),
    "another order": Alternating,
    "tied": Shared,
    "parameters of several layers": Mixed,
    "checkpoint": lambda: Again(reentrant=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_accumulation_belongs_to_the_parameter(name: str) -> None:
    model = MODELS[name]()
    data, given, _ = measured(model)
    found = calls(data, "accumulate", "AccumulateGrad")
    assert found == given


def test_accumulation_inside_of_reentrant_checkpoints() -> None:
    """Its nested passes write weight, bias, and the gradient of the detached input, at each use."""
    data, given, _ = measured(Again(reentrant=True))
    found = calls(data, "accumulate", "AccumulateGrad")
    uses = {row.path: round(row.calls * STEPS) for row in data.layers}
    assert found["stem"] == given["stem"] and set(found) == set(given)
    assert all(found[path] == 3 * uses[path] for path in found if path != "stem")


def test_a_sum_belongs_to_the_layer_whose_value_has_several_users() -> None:
    sums: dict[str, int] = {}
    data, _, added = measured(Dropped(sums), sums)
    found = calls(data, "gradient_sum", "aten::add") + calls(data, "gradient_sum", "aten::add_")
    assert found == added


def test_flops_are_those_of_a_call_times_the_calls() -> None:
    """Of experts that the survey did not run they are not known."""
    data, _, _ = measured(Experts(2))
    experts = [row for row in data.layers if row.path.startswith("experts.")]
    assert len({row.calls for row in experts}) > 1
    for row in experts:
        assert row.flops is None or row.flops == round(192 * row.calls)
    assert 2 <= sum(row.flops is not None for row in experts if row.calls) < 7


def test_no_mark_stays_on_a_parameter() -> None:
    model = Mixed()
    measured(model)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())  # type: ignore[attr-defined]


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
