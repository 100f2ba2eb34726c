"""The registry of modules: what it holds, who owns what, and whose copy a module is."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.capture.compiling import left_alone, parts_left_alone
from gradscope.capture.modules import CallRecorder
from gradscope.capture.naming import name_called
from gradscope.capture.registry import NOBODYS, ModuleRegistry

from .nets import Net, X


def test_no_module_is_kept_alive() -> None:
    registry = ModuleRegistry()
    model: Any = Net()
    with CallRecorder(registry=registry).recording():
        model(X)
        replaced = weakref.ref(model.head)
        model.head = nn.Linear(4, 2)
        model(X)
        gc.collect()
        assert replaced() is None
    whole = weakref.ref(model)
    del model
    gc.collect()
    assert whole() is None and registry.alive() == []


def test_a_run_whose_model_is_gone_has_its_names_still() -> None:
    registry = ModuleRegistry()
    recorder = CallRecorder(registry=registry)
    model: Any = Net()
    with recorder.recording():
        model(X)
    del model
    gc.collect()
    names = name_called(registry, list(recorder.roots), {})
    assert [(info.path, info.class_name, info.parent, info.parameters) for info in names.infos] == [
        ("", "Net", None, 0),
        ("body", "Linear", "", 20),
        ("head", "Linear", "", 10),
    ]
    assert names.rows == (0, 1, 2)


def test_what_nobody_holds_is_nobodys() -> None:
    registry = ModuleRegistry()
    model = Net()
    model.register_forward_pre_hook(lambda module, args: nn.ReLU()(args[0]))
    labels = []
    with CallRecorder(registry=registry).recording():
        model.body.register_forward_hook(lambda *_: labels.append(registry.get(nn.Identity())))
        model(X)
        loose = nn.Tanh()
        model.body.register_forward_hook(lambda _m, _a, out: loose(out))
        model(X)
        assert registry.get(loose) == NOBODYS


def test_what_was_nobodys_is_a_root_once_it_is_called_by_itself() -> None:
    registry, model, loose = ModuleRegistry(), Net(), nn.Linear(4, 4)
    handle = model.body.register_forward_hook(lambda _m, _a, out: loose(out))
    recorder = CallRecorder(registry=registry)
    with recorder.recording():
        model(X)
        handle.remove()
        assert registry.get(loose) == NOBODYS
        loose(X)
        label = registry.get(loose)
    assert label is not None and label != NOBODYS
    assert registry.places[label].path == "" and label in recorder.roots


def test_a_parameter_that_was_replaced_has_no_owner_any_more() -> None:
    registry, model = ModuleRegistry(), Net()
    with CallRecorder(registry=registry).recording():
        model(X)
    old = model.head.weight
    assert [registry.places[label].path for label in registry.owners_of(old)] == ["head"]
    model.head.weight = nn.Parameter(torch.ones(2, 4))
    assert registry.owners_of(old) == ()
    assert [registry.places[label].path for label in registry.owners_of(model.head.weight)] == ["head"]
    assert registry.owners_of(torch.ones(1)) == ()


class Holder(nn.Module):
    """Never called itself."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_the_outermost_owner_names_what_it_holds() -> None:
    registry, net = ModuleRegistry(), Net()
    inner = Holder(net=net)
    outer = Holder(wrapped=inner)
    with CallRecorder(registry=registry).recording():
        net(X)
    registry.find_owners()
    owners = [place for place in registry.places if place.is_owner]
    assert [place.module() for place in owners] == [outer]
    root = registry.get(net)
    assert root is not None and registry.places[root].inside == (registry.get(outer), "wrapped.net")


def test_of_two_owners_the_one_that_holds_more_counts() -> None:
    registry, first, second = ModuleRegistry(), Net(), Net()
    less, more = Holder(only=first), Holder(first=first, second=second)
    with CallRecorder(registry=registry).recording():
        first(X)
        second(X)
    registry.find_owners()
    found = [
        registry.places[label].inside for label in (registry.get(first), registry.get(second)) if label is not None
    ]
    assert found == [(registry.get(more), "first"), (registry.get(more), "second")]
    assert registry.get(less) is not None


def test_an_owner_is_there_at_every_look() -> None:
    """A wrapper that is made anew is alone each time, once the garbage collector has taken the one before."""
    registry, net, other = ModuleRegistry(), Net(), Net()
    stays, brief = Holder(net=net), Holder(other=other)
    with CallRecorder(registry=registry).recording():
        net(X)
        other(X)
    first, second = registry.places[registry.label(net, [])], registry.places[registry.label(other, [])]
    registry.find_owners()
    assert first.inside == (registry.get(stays), "net") and second.inside == (registry.get(brief), "other")

    def owners() -> list[nn.Module | None]:
        return [place.module() for place in registry.places if place.is_owner]

    brief = Holder(other=other)
    registry.find_owners()
    assert owners() == [stays] and second.inside is None
    assert first.inside == (registry.get(stays), "net")
    stays.net = None  # type: ignore[assignment]
    registry.find_owners()
    stays.net = net
    registry.find_owners()
    assert owners() == [] and first.inside is None


def test_a_model_lies_in_no_other_though_it_is_the_users_model() -> None:
    registry, net = ModuleRegistry(), Net()
    registry.models = lambda: (net,)
    assert registry.places[registry.label(net, [])].inside is None


def test_a_replica_that_is_kept_stands_for_its_original_in_every_step() -> None:
    """A copy that is kept does not: what is called in the next step as well is a module of its own."""
    registry = ModuleRegistry()
    model = Holder(act=nn.Tanh(), linear=nn.Linear(4, 4))
    root = registry.label(model, [])
    replica, copied = model.act._replicate_for_data_parallel(), copy.deepcopy(model.linear)  # type: ignore[operator, union-attr]
    for step in range(2):
        registry.step = step
        assert registry.places[registry.label(replica, [model])].path == "act"
        label = registry.label(copied, [model])
        assert (registry.places[label].path == "linear") if step == 0 else (label == NOBODYS)
    assert registry.get(model) == root


def test_a_compiled_part_holds_the_parameters_that_it_held_before() -> None:
    registry, model = ModuleRegistry(), Holder(part=nn.Linear(4, 4))
    weight: Any = model.part.weight
    registry.label(model, [])
    label = registry.label(model.part, [model])  # type: ignore[arg-type]
    model.part = torch.compile(model.part, backend="eager")  # type: ignore[assignment, arg-type]
    assert registry.label(model.part, [model]) == label  # type: ignore[arg-type]
    assert registry.owners_of(weight) == (label,)


class Asking(nn.Module):
    """Calls a module that nobody holds between two layers that are alike."""

    def __init__(self, asked: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.asked = nn.Tanh(), asked
        self.called: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        self.called.append(self.asked(self))
        out: Tensor = self.second(self.called[-1](self.act(self.first(x))))
        return out


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        (lambda model: copy.deepcopy(model.first), None),  # or of the second: it is not guessed
        (lambda model: nn.Tanh(), None),
        (lambda model: model.act._replicate_for_data_parallel(), "act"),
    ],
    ids=["copy of one of two", "fresh module without parameters", "replica of one without parameters"],
)
def test_whose_copy_a_module_is_must_be_plain(asked: Any, path: str | None) -> None:
    registry, model = ModuleRegistry(), Asking(asked)
    with CallRecorder(registry=registry).recording():
        model(X)
        label = registry.get(model.called[0])
        assert label is not None and (None if label == NOBODYS else registry.places[label].path) == path


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(x))


class _Listed(nn.Module):
    """What torch.compile made of its blocks is in a plain list, and a checkpoint calls it again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.compiled = [torch.compile(block, backend="eager") for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.compiled:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_what_is_made_of_a_block_is_no_model_where_a_checkpoint_calls_it_again() -> None:
    registry, model = ModuleRegistry(), _Listed()
    recorder = CallRecorder(registry=registry)
    with recorder.recording(), torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            model(X).sum().backward()
    calls = [registry.places[label].path for label in recorder.table().label.tolist() if label != NOBODYS]
    assert recorder.roots.keys() == {registry.get(model)}
    assert calls.count("blocks.0") == calls.count("blocks.1") == 6  # each forward, and again in backward


def test_layers_of_torchs_own_are_left_alone_where_compile_was_called_on_them() -> None:
    registry = ModuleRegistry()
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), _Block(), nn.Linear(4, 4))
    for each in model[:2]:
        each.compile(backend="eager")
    with CallRecorder(registry=registry).recording(), torch.compiler.set_stance("force_eager"):
        model(X)
    before = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)  # which compiles them
    assert [registry.places[label].path for label in left_alone(registry)] == (["0"] if before else [])


class _Plain(nn.Linear):
    """A program's, without a ``forward`` of its own."""


def _with(module: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(module)
    return module


def _forward(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("module", "alone"),
    [
        (nn.Linear(4, 4), True),
        (_Plain(4, 4), True),
        (nn.TransformerEncoderLayer(4, 1), True),
        (nn.TransformerEncoderLayer(4, 1, activation=_forward), False),
        (_Block(), False),
        (nn.LSTM(4, 4), False),
        (_with(nn.Linear(4, 4), lambda each: each.register_forward_hook(print)), False),
        (_with(nn.Linear(4, 4), lambda each: setattr(each, "forward", _forward)), False),
    ],
    ids=["torch's", "a subclass", "a larger one", "an activation", "own", "recurrent", "a hook", "another forward"],
)
def test_what_of_torchs_own_is_left_alone(module: nn.Module, alone: bool) -> None:
    assert parts_left_alone(module) == []
    module.compile(backend="eager", disable=True)
    assert parts_left_alone(module) == []
    module.compile(backend="eager")
    assert parts_left_alone(module) == ([module] if alone else [])


def test_of_a_sequence_what_is_not_the_programs_is_left_alone() -> None:
    linear, block, shared = nn.Linear(4, 4), _Block(), nn.ReLU()
    module = nn.Sequential(linear, shared, nn.Sequential(block, shared))
    module.compile(backend="eager")
    assert parts_left_alone(module) == [shared, linear]
