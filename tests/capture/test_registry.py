"""Paths of modules that come and go while a run is measured: replaced, copied, owned by what is never called."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.capture.modules import CallRecorder
from gradscope.capture.naming import name_called
from gradscope.capture.registry import NOBODYS, ModuleRegistry

X = torch.ones(2, 4)


def measured(step: Callable[[int], Any], model: nn.Module | None = None, steps: int = 3) -> Any:
    """Layers by path of a loop that calls ``step`` with the number of the step."""
    with gradscope.profiling(model, steps=steps, warmup=1, memory=False) as prof:
        for number in range(100):
            step(number)
            if prof.step():
                break
    return {row.path: row for row in prof.report.data.layers}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@pytest.mark.parametrize("kind", [nn.Linear, nn.Bilinear], ids=["same class", "other class"])
def test_a_layer_that_is_replaced_keeps_its_row(kind: Any) -> None:
    model = Net()

    def step(number: int) -> None:
        model.head = nn.Linear(4, 2) if kind is nn.Linear or number % 2 else nn.Sequential(nn.Linear(4, 2))  # type: ignore[assignment]
        model(X).sum().backward()

    layers = measured(step, model)
    assert layers["head"].calls == 1
    assert layers["head"].backward_total_ns > 0 and layers["head"].forward_total_ns > 0
    assert layers[""].calls == 1


def test_a_layer_inside_a_list_is_replaced_and_another_is_added() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))

    def step(number: int) -> None:
        model[1][0] = nn.Linear(4, 4)
        if number == 6:  # the second of three measured ones
            model.append(nn.Tanh())
        model(X).sum().backward()

    layers = measured(step, model)
    assert layers["1.0"].calls == 1 and layers["1.0"].backward_self_ns > 0
    assert layers["2"].calls == pytest.approx(2 / 3)


def test_a_model_that_is_built_again_in_each_step_is_one_tree() -> None:
    def step(_: int) -> None:
        Net()(X).sum().backward()

    layers = measured(step)
    assert {path: row.calls for path, row in layers.items()} == {"": 1, "body": 1, "head": 1}


def test_short_lived_copies_count_for_their_original() -> None:
    """As MAML makes them."""
    model = Net()

    def step(_: int) -> None:
        for _ in range(2):
            copy.deepcopy(model)(X).sum().backward()
        model(X).sum().backward()

    layers = measured(step)
    assert {path: row.calls for path, row in layers.items()} == {"": 3, "body": 3, "head": 3}


def test_replicas_count_for_their_original() -> None:
    """As DataParallel makes them, which needs several devices."""
    model = Net()

    def replica() -> nn.Module:
        made: Any = model._replicate_for_data_parallel()
        for name, child in model._modules.items():
            inner = child._replicate_for_data_parallel()  # type: ignore[union-attr]
            for key, parameter in child._parameters.items():  # type: ignore[union-attr]
                setattr(inner, key, parameter.clone())  # type: ignore[union-attr]
            made._modules[name] = inner
        return made  # type: ignore[no-any-return]

    def step(_: int) -> None:
        sum(replica()(X).sum() for _ in range(2)).backward()  # type: ignore[union-attr]
        model(X).sum().backward()

    layers = measured(step, model)
    assert {path: row.calls for path, row in layers.items()} == {"": 3, "body": 3, "head": 3}


def test_replicas_in_threads_count_for_their_original() -> None:
    """DataParallel calls each in a thread, where no call of what holds the original is open."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            replicas: list[Any] = [self.module._replicate_for_data_parallel() for _ in range(2)]  # type: ignore[no-untyped-call]
            with ThreadPoolExecutor(2) as pool:
                return torch.cat(list(pool.map(lambda made: made(x), replicas)))

    model = nn.Sequential(nn.Linear(4, 4), Parallel())
    layers = measured(lambda _: model(X).sum().backward(), model)
    assert set(layers) == {"", "0", "1", "1.module"}
    assert layers["1.module"].calls == 2 and layers["1.module"].backward_self_ns > 0


@pytest.mark.parametrize("given", [True, False])
def test_a_replaced_part_of_a_model_that_is_never_called(given: bool) -> None:
    """It is of the shape of another part, of which it is no copy."""
    parts = nn.ModuleDict({"kept": Net(), "other": Net()})

    def step(_: int) -> None:
        parts["other"] = Net()
        parts["other"].body.weight = parts["kept"].body.weight
        sum(parts["other"](X).sum() for _ in range(2)).backward()  # type: ignore[union-attr]
        parts["kept"](X).sum().backward()

    layers = measured(step, parts if given else None)
    names = ("", "kept", "kept.body", "kept.head", "other", "other.body", "other.head")
    assert {path: row.calls for path, row in layers.items()} == dict(zip(names, (0, 1, 1, 1, 2, 2, 2), strict=True))


def test_a_replaced_part_has_lines_and_bytes_too() -> None:
    """Other phases than the timed one see other modules at its place."""
    parts = nn.ModuleDict({"kept": Net(), "other": Net()})
    with gradscope.profiling(parts, steps=3, warmup=1) as prof:
        while not prof.step():
            parts["other"] = Net()
            parts["other"](parts["kept"](X) @ torch.ones(2, 4)).square().sum().backward()
    data = prof.report.data
    assert not [note for note in data.notes if "did not run the same operations" in note]
    saved = {row.path: row.saved_bytes for row in data.layers}
    assert saved["other.head"] == saved["kept.head"] > 0


class Listing(nn.Module):
    """Keeps modules in a plain list, where torch does not see them; ``top`` is of their class."""

    def __init__(self, hidden: list[nn.Module], top: nn.Module) -> None:
        super().__init__()
        self.hidden, self.top = hidden, top

    def forward(self, x: Tensor) -> Tensor:
        for each in self.hidden:
            x = each(x)
        out: Tensor = self.top(x)
        return out


@pytest.mark.parametrize("top", [lambda: nn.Linear(4, 2), lambda: nn.Linear(4, 4)], ids=["other size", "same size"])
def test_modules_in_a_plain_list_are_no_copies_of_another(top: Callable[[], nn.Module]) -> None:
    model = Listing([nn.Linear(4, 4) for _ in range(3)], top())
    layers = measured(lambda _: model(X).sum().backward(), model)
    assert {path: row.calls for path, row in layers.items()} == {"": 1, "top": 1}


def test_a_teacher_in_a_plain_list_is_not_its_student() -> None:
    student = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = Listing([copy.deepcopy(student)], student)
    layers = measured(lambda _: model(X).sum().backward(), model)
    assert {path: row.calls for path, row in layers.items()} == {"": 1, "top": 1, "top.0": 1, "top.1": 1}


def test_a_module_made_inside_of_a_call_is_no_copy_of_one_of_another_size() -> None:
    class Makes(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.Linear(4, 4, bias=False)(x))

    model = Makes()
    model.body = nn.Identity()  # type: ignore[assignment]
    layers = measured(lambda _: model(X).sum().backward(), model)
    assert {path: row.calls for path, row in layers.items()} == {"": 1, "body": 1, "head": 1}


def test_a_copy_made_inside_of_a_call_counts_for_its_original() -> None:
    class Copies(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(copy.deepcopy(self.body)(self.body(x)))
            return out

    model = Copies()
    model.head = nn.Bilinear(4, 4, 2)  # type: ignore[assignment]
    model.head.forward = lambda x: x  # type: ignore[method-assign]
    layers = measured(lambda _: model(X).sum().backward(), model)
    assert {path: row.calls for path, row in layers.items()} == {"": 1, "body": 2, "head": 1}


def test_copies_of_a_part_of_a_model_that_is_never_called() -> None:
    parts = nn.ModuleDict({"net": Net(), "tail": nn.Linear(2, 2)})

    def step(_: int) -> None:
        parts["tail"](copy.deepcopy(parts["net"])(X)).sum().backward()
        parts["net"](X).sum().backward()

    layers = measured(step, parts)
    assert {path: row.calls for path, row in layers.items()} == {
        "": 0,
        "net": 2,
        "net.body": 2,
        "net.head": 2,
        "tail": 1,
    }


def test_two_models_of_one_class_stay_two() -> None:
    first, second = Net(), Net()

    def step(_: int) -> None:
        (first(X) + second(X)).sum().backward()

    assert set(measured(step)) == {"Net", "Net.body", "Net.head", "Net#2", "Net#2.body", "Net#2.head"}


def test_a_copy_of_the_one_part_that_it_can_be_of() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.other = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.other(copy.deepcopy(self.part)(x))
            return out

    model = Copies()
    layers = measured(lambda _: model(X).sum().backward(), model)
    assert layers["part"].calls == 1 and layers["part.0"].calls == 1 and layers["part.0"].backward_self_ns > 0


class Lit(nn.Module):
    """Never called itself, as Lightning's modules are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Net(), nn.ModuleList([nn.Linear(2, 2)])

    def training_step(self, x: Tensor) -> Tensor:
        return self.decoder[0](self.encoder(x)).sum()  # type: ignore[no-any-return]


def test_parts_of_an_owner_that_is_never_called_are_named_from_it() -> None:
    model = Lit()
    layers = measured(lambda _: model.training_step(X).backward())
    assert set(layers) == {"", "encoder", "encoder.body", "encoder.head", "decoder", "decoder.0"}
    assert layers[""].class_name == "Lit" and layers[""].calls == 0
    assert layers["encoder.head"].backward_self_ns > 0


class Solver(nn.Module):
    """Made anew in each step around the model, whose parts it calls, and left to the garbage collector."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.run = self.solve  # a cycle

    def solve(self, x: Tensor) -> Tensor:
        return self.model.head(self.model.body(x))  # type: ignore[operator, no-any-return]


class Solved(Net):
    def forward(self, x: Tensor) -> Tensor:
        return Solver(self).run(x)


def test_a_wrapper_made_in_each_step_is_no_owner() -> None:
    model = Solved()
    layers = measured(lambda _: model(X).sum().backward())
    assert layers[""].class_name == "Solved" and set(layers) == {"", "body", "head"}


def test_a_given_part_is_the_root_whoever_owns_it() -> None:
    model = Lit()
    assert set(measured(lambda _: model.encoder(X).sum().backward(), model.encoder)) == {"", "body", "head"}


class Wrapper(nn.Module):
    """Holds a compiled part and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.compile(Net(), backend="eager")
        self.tail = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.part(x))
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the whole"])
def test_what_compile_wraps_has_no_name_of_its_own(whole: bool) -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    model: Any = torch.compile(Net(), backend="eager") if whole else Wrapper()
    layers = measured(lambda _: model(X).sum().backward(), model)
    expected = {"", "body", "head"} if whole else {"", "part", "part.body", "part.head", "tail"}
    assert set(layers) == expected
    assert layers["" if whole else "part"].class_name == "Net"
    dynamo.reset()
    dynamo.utils.counters.clear()


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
