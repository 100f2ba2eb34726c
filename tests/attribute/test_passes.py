"""Every AccumulateGrad and every gradient sum goes to its own layer, whatever other steps did. Counts, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.tables import OWN

from .counted_passes import MISFIT, STEPS, WALKING, X, calls, measured, passes_of, sums_of


class Weight(nn.Module):
    """Is not called: others take its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class ExpertsByHand(nn.Module):
    """Each step uses the weights of another expert, by the same operations and calls."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.head = nn.Linear(4, 2)
        self.experts = nn.ModuleList(Weight() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        chosen: Any = self.experts[(0, 1, 1, 2, 0, 2, 1)[self.steps % 7]]
        out: Tensor = self.head(nn.functional.linear(x, chosen.weight))
        return out


def test_weights_of_modules_that_are_not_called() -> None:
    data, given, _ = measured(ExpertsByHand())
    found = calls(data, "accumulate", "AccumulateGrad")
    assert {path: found[path] for path in given if path != "head"} == {
        path: count for path, count in given.items() if path != "head"
    }
    assert len(given) > 2


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
    assert sums_of(data) == added


class Scaled(nn.Module):
    """Multiplies one value by two constants, which are handed no gradient."""

    def __init__(self, sums: dict[str, int]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        self.sums["a"] = 1
        out: Tensor = self.b(X * a + X * a)
        return out


def test_what_is_handed_no_gradient_has_no_sum() -> None:
    sums: dict[str, int] = {}
    data, _, added = measured(Scaled(sums), sums)
    assert sums_of(data) == added == {"a": STEPS}


class Halved(nn.Module):
    """One value has three users, one of them a node that is handed two gradients, one for each of its outputs."""

    def __init__(self, sums: dict[str, int]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(6, 4), nn.Linear(6, 4)
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        one, other = a.chunk(2, 1)
        self.sums["a"] = 2
        return torch.add(self.b(torch.cat([one, a], 1)), self.c(torch.cat([other, a], 1)))


def test_gradients_of_two_outputs_of_a_node_are_no_sum() -> None:
    sums: dict[str, int] = {}
    data, _, added = measured(Halved(sums), sums)
    assert sums_of(data) == added == {"a": 2 * STEPS}


class Tied(nn.Module):
    """The last layer has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x)).relu())
        return out


@pytest.mark.parametrize("noted", [True, False])
def test_a_tied_weight_is_its_first_holders(noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the sum of its two gradients, also where no pass of the timed steps is noted: then the survey tells."""
    if not noted:
        monkeypatch.setattr("gradscope.capture.passes._MOST_NODES", 0)
    data, given, _ = measured(Tied())
    assert calls(data, "accumulate", "AccumulateGrad") == given
    assert sums_of(data) == {"a": STEPS}


class Rewired(nn.Module):
    """The same calls and numbers in each step; which value is used a second time differs."""

    def __init__(self, sums: dict[str, int]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.sums, self.seen = sums, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        a = self.a(x)
        b = self.b(a)
        self.sums["a" if self.seen % 2 else "b"] = 1
        return torch.add(self.c(b), a if self.seen % 2 else b)


def test_a_sum_in_steps_that_are_wired_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WALKING, 1000.0)
    sums: dict[str, int] = {}
    data, _, added = measured(Rewired(sums), sums)
    assert sums_of(data) == added == {"a": STEPS // 2, "b": STEPS // 2}
    assert not any(MISFIT in note for note in data.notes)


def test_a_sum_where_walking_each_graph_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that delivered the second gradient has it: b for a's value, c for b's. A note tells."""
    monkeypatch.setattr(WALKING, 0.0)
    sums: dict[str, int] = {}
    data, given, _ = measured(Rewired(sums), sums)
    assert sums_of(data) in ({"a": STEPS // 2, "c": STEPS // 2}, {"b": STEPS})
    assert calls(data, "accumulate", "AccumulateGrad") == given
    assert [note.partition(" made ")[0] for note in data.notes if MISFIT in note] == [f"{STEPS // 2} backward passes"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("walking", [0.0, 1000.0])
def test_steps_that_differ_in_their_calls_are_no_misfits(
    name: str, walking: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WALKING, walking)
    data, given, _ = measured(MODELS[name]())
    assert calls(data, "accumulate", "AccumulateGrad") == given
    assert not any(MISFIT in note for note in data.notes)


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


def test_noting_a_pass_is_gradscopes_own() -> None:
    """Each has a row of its own in the trace, also one inside of another: what it takes is no layer's, nor engine's."""
    data, _, _ = measured(Again(reentrant=True))
    (own,) = [op for op in data.ops if op.name == OWN]
    assert (own.layer, own.phase, own.calls) == (None, "other", 3 + 1)  # and one where the step ends
    assert not any(op.name.startswith("gradscope:") for op in data.ops)  # marks are its own, too


def test_graphs_are_noted_up_to_so_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that never does the same twice must not fill the memory; the passes that follow are told otherwise."""
    monkeypatch.setattr("gradscope.capture.passes._MOST_NODES", 1)
    model = Alternating()
    passes, data = passes_of(lambda _: model(X).sum().backward())
    assert len(passes.graphs) == 1 and {note.graph for note in passes.passes} == {0, -1}
    assert sum(calls(data, "accumulate", "AccumulateGrad").values()) == 5 * STEPS
