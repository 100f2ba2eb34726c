"""Modules that are called in other ways than torch's have rows of their own; their classes are left as they were."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.capture import byhand
from gradscope.capture.modules import CallRecorder
from gradscope.tables import LayerRow, RunData
from gradscope.trampoline import is_told_of
from tests.structures import calls
from tests.structures.kit import Built
from tests.truth.burning import Meter


def profiled(built: Built, **options: Any) -> RunData:
    with gradscope.profiling(built.model, steps=1, warmup=1, memory=False, **options) as prof:
        for _ in range(50):
            built.step()
            if prof.step():
                break
    data: RunData = prof.report.data
    return data


def rows(data: RunData) -> dict[str, LayerRow]:
    return {row.path: row for row in data.layers}


def test_root_whose_forward_is_called_by_hand() -> None:
    data = profiled(calls.forward_called_by_hand(Meter(scale=0)))
    layers = rows(data)
    assert layers[""].class_name == data.workload.model == "Root"
    assert (layers[""].calls, layers["first"].calls, layers["first.2"].calls, layers["own"].calls) == (1, 1, 1, 1)
    assert layers["first"].parent == "" and layers[""].backward_self_ns > 0
    assert "calls.py:" in (layers[""].source or "")
    assert data.ledger.unattributed_ns == 0


def test_layers_that_train_themselves() -> None:
    data = profiled(calls.layers_that_train_themselves(Meter(scale=0)))
    layers = rows(data)
    assert (layers["layers.0"].calls, layers["layers.1"].calls) == (2, 2)
    assert layers["layers.0"].class_name == "ForwardOnly" and layers["layers.0.burn"].calls == 2
    for path in ("layers.0", "layers.1"):
        assert layers[path].forward_self_ns > 0 and layers[path].backward_self_ns > 0 and layers[path].accumulate_ns > 0
    own = {line.text: line.layer for line in data.lines}
    line = next(text for text in own if "nn.functional.linear(x, self.weight" in text)
    assert own[line] in {"layers.0", "layers.1"}


def test_call_of_the_classs_own() -> None:
    data = profiled(calls.call_overridden(Meter(scale=0)))
    layers = rows(data)
    assert data.workload.model == "OwnStack"
    assert [layers[path].calls for path in ("", "dense.0", "dense.1", "dense.0.burn")] == [1, 1, 1, 1]
    products = {(row.layer, row.calls) for row in data.ops if row.name == "MmBackward0"}
    assert products == {("dense.0", 1), ("dense.1", 1)}


def test_call_that_goes_on_to_torchs_is_one_call() -> None:
    layers = rows(profiled(calls.call_that_goes_on_to_torchs(Meter(scale=0))))
    assert [layers[path].calls for path in ("", "inner", "source", "inner.2")] == [1, 1, 1, 1]


class Both(nn.Linear):
    """Goes on to torch's call, and is never called but by hand in the step that looks."""

    def __call__(self, x: Tensor, by_hand: bool = False) -> Any:
        return self.forward(x) if by_hand else super().__call__(x)


def test_class_that_is_called_in_both_ways() -> None:
    one, other = Both(4, 5), Both(5, 3)
    model, steps = nn.ModuleList([one, other]), iter(range(50))

    def step() -> None:
        by_hand = next(steps) % 2 == 0
        other(one(torch.ones(2, 4), by_hand), by_hand).sum().backward()

    layers = rows(profiled(Built(model, step)))
    assert (layers["0"].calls, layers["1"].calls) == (1, 1)


class Again(nn.Module):
    """Calls its own forward by hand, twice deep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        out: Tensor = self.forward(self.inner(x), depth - 1) if depth else x
        return out


def test_method_that_calls_itself_is_one_call() -> None:
    model = Again()
    layers = rows(profiled(Built(model, lambda: model.forward(torch.ones(2, 4)).sum().backward())))
    assert (layers[""].calls, layers["inner"].calls) == (1, 2)


def test_module_that_calls_itself_as_torch_does_is_called_so_often() -> None:
    class Deep(Again):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            out: Tensor = self(self.inner(x), depth - 1) if depth else x
            return out

    model = Deep()
    layers = rows(profiled(Built(model, lambda: model(torch.ones(2, 4)).sum().backward())))
    assert (layers[""].calls, layers["inner"].calls) == (3, 2)


def test_error_goes_its_way() -> None:
    class Fails(Again):
        seen = 0

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            Fails.seen += 1
            if Fails.seen == 6:
                raise KeyError("a mistake of the model")
            return self.inner(x)  # type: ignore[no-any-return]

    model = Fails()

    def step() -> None:
        try:
            model.forward(torch.ones(2, 4)).sum().backward()
        except KeyError:
            model.inner(torch.ones(2, 4)).sum().backward()

    with gradscope.profiling(model, steps=3, warmup=1, memory=False) as prof:
        while True:
            step()
            if prof.step():
                break
    assert "forward" in vars(Fails) and not is_told_of(Fails.forward)
    layers = rows(prof.report.data)
    # The call that failed is one, and is over: those that follow are not inside of it.
    assert Fails.seen > 6 and (layers[""].calls, layers["inner"].calls) == (1, 1)


def test_classes_are_as_before() -> None:
    """Also where a class only inherits what is told of, and while it is, copies and pickles work."""
    linear, code, before = (
        nn.Linear.forward,
        nn.Linear.forward.__code__,
        (dict(vars(calls.ForwardOnly)), dict(vars(calls.OwnDense))),
    )

    class Inheriting(nn.Linear):
        pass

    model = Inheriting(4, 4)
    seen: list[bool] = []

    def step() -> None:
        model.forward(torch.ones(2, 4)).sum().backward()
        seen.append(is_told_of(Inheriting.forward))
        assert "forward" not in vars(Inheriting) and nn.Linear.forward is linear
        assert copy.deepcopy(model).forward is not None and b"weight" in pickle.dumps(model.state_dict())

    layers = rows(profiled(Built(model, step)))
    assert layers[""].calls == 1 and any(seen) and not seen[0]
    assert nn.Linear.forward.__code__ is code
    profiled(calls.layers_that_train_themselves(Meter(scale=0)))
    profiled(calls.call_overridden(Meter(scale=0)))
    assert (dict(vars(calls.ForwardOnly)), dict(vars(calls.OwnDense))) == before


def test_wrapper_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was put around ours meanwhile."""

    class Own(Again):
        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    model = Own()
    wrapped: list[Any] = []

    def step() -> None:
        if not wrapped and is_told_of(Own.forward):
            inner = Own.forward
            Own.forward = lambda self, x: inner(self, x) * 2  # type: ignore[method-assign, assignment]
            wrapped.append(Own.forward)
        model.forward(torch.ones(2, 4)).sum().backward()

    profiled(Built(model, step))
    assert Own.forward is wrapped[0]
    assert torch.equal(model.forward(torch.ones(2, 4)), 2 * model.inner(torch.ones(2, 4)))


def test_programs_that_call_as_usual_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []
    original = byhand.watching
    monkeypatch.setattr(
        "gradscope.capture.modules.watching", lambda found, *rest: kinds.extend(found) or original(found, *rest)
    )
    from tests.structures import layers

    profiled(layers.plain(Meter(scale=0)))
    assert kinds == []


def no_hook_told(_: nn.Module) -> bool:
    return False


def test_models_that_took_no_part_are_not_touched() -> None:
    """A model that is only held: for a later stage, or as a teacher that was never asked."""
    used, held = Again(), Both(4, 5)
    leaves = [id(parameter) for parameter in used.parameters()]
    assert byhand.classes_to_watch([used, used.inner, held], leaves, no_hook_told) == {Again, nn.Linear}
    assert byhand.classes_to_watch([used, used.inner, held], [], lambda module: module is used.inner) == {Again}
    assert byhand.classes_to_watch([held], leaves, no_hook_told) == set()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_scripted_modules_are_left_alone() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    model = Again()
    model.inner = scripted
    leaves = [id(parameter) for parameter in scripted.parameters()]
    assert byhand.classes_to_watch([model, scripted], leaves, lambda module: module is scripted) == {Again}
    assert byhand.classes_to_watch([scripted], leaves, no_hook_told) == set()


def test_a_class_and_one_that_inherits_from_it_have_one_method() -> None:
    class Inheriting(Again):
        pass

    original, told = Again.forward, []
    with byhand.watching([Again, Inheriting], lambda module, _: told.append(module) is not None, lambda _: None):
        assert Inheriting.forward is Again.forward is original and is_told_of(original)
        one, other = Again(), Inheriting()
        one.forward(torch.ones(2, 4), 0), other.forward(torch.ones(2, 4), 0)
    assert told == [one, other] and not is_told_of(original)


def test_wrapper_that_outlives_its_time_tells_nothing() -> None:
    told: list[Any] = []

    def enter(module: nn.Module, _: Any) -> bool:
        told.append(module)
        return True

    model = Again()
    with byhand.watching({Again}, enter, told.append):
        kept = model.forward
        kept(torch.ones(2, 4), 0)
    assert told == [model, model]
    kept(torch.ones(2, 4), 0)
    assert told == [model, model]


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        for _ in range(20):
            x = torch.sin(x)
        return self.head(x)


def test_module_that_a_step_calls_in_both_ways() -> None:
    """As a target network's values without gradients beside ``critic.forward(x)`` for the loss."""
    critic = Critic()

    def step() -> None:
        x = torch.randn(4, 8)
        with torch.no_grad():
            goal = critic(x)
        nn.functional.mse_loss(critic.forward(x.requires_grad_()), goal + 1).backward()

    data = profiled(Built(critic, step))
    layers = rows(data)
    assert (layers[""].calls, layers["head"].calls) == (2, 2)
    assert layers[""].class_name == "Critic" and layers["head"].parent == ""
    sines = {row.layer for row in data.ops if row.name == "SinBackward0"}
    assert sines == {""}


class Checkpointing(nn.Module):
    """As layers of transformers 5: the class's forward checkpoints its own, where no subclass has wrapped it again."""

    def __init_subclass__(cls) -> None:
        inner = cls.forward

        @functools.wraps(inner)
        def forward(self: nn.Module, x: Tensor) -> Any:
            if type(self).forward is forward:
                return checkpoint(inner, self, x, use_reentrant=False)
            return inner(self, x)

        cls.forward = forward  # type: ignore[method-assign]


class Layer(Checkpointing):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.runs = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Any:
        self.runs += 1
        return torch.sin(self.inner(x))


@pytest.mark.parametrize("by_hand", [False, True], ids=["called", "forward called"])
def test_a_forward_that_asks_who_it_is_checkpoints_in_every_step(by_hand: bool) -> None:
    model, runs = nn.Sequential(nn.Linear(8, 8), Layer()), []
    layer = model[1]

    def step() -> None:
        layer.runs = 0
        x = model[0](torch.randn(4, 8))
        (layer.forward(x) if by_hand else layer(x)).sum().backward()
        runs.append(layer.runs)

    data = profiled(Built(model, step))
    assert set(runs) == {2} and len(runs) > 4
    assert rows(data)["1.inner"].recompute_ns > 0


def test_a_layer_whose_parts_only_backward_calls_alone_is_left_as_it_is() -> None:
    """A checkpoint of ``forward`` calls the layer's parts once more, with no call of the layer around them."""
    model = nn.Sequential(nn.Linear(8, 8), Layer())
    seen = []

    def step() -> None:
        seen.append(is_told_of(Layer.forward))
        model(torch.randn(4, 8)).sum().backward()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            seen.append(is_told_of(Plain.forward))
            return checkpoint(self.made, x, use_reentrant=False)

        def made(self, x: Tensor) -> Any:
            return self.inner(x)

    model.append(Plain())
    profiled(Built(model, step))
    assert set(seen) == {False}


def test_a_forward_or_a_call_that_takes_no_self_is_left_alone() -> None:
    class Sine(nn.Module):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

    class Tanh(nn.Module):
        @classmethod
        def __call__(cls, x: Tensor) -> Tensor:
            return x.tanh()

    data = profiled(in_a_model_called_by_hand(Sine(), Tanh()))
    assert rows(data)[""].calls == 1 and rows(data)["own"].calls == 1


def test_a_metaclass_that_refuses_to_set_names_is_not_asked() -> None:
    class Frozen(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise TypeError(name)

        def __delattr__(cls, name: str) -> None:
            raise TypeError(name)

    class Sealed(nn.Module, metaclass=Frozen):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    class Inherits(Sealed):
        pass

    before = dict(vars(Sealed)), dict(vars(Inherits))
    data = profiled(in_a_model_called_by_hand(Sealed(), Inherits()))
    assert rows(data)[""].calls == 1 and rows(data)["own"].calls == 1
    assert (dict(vars(Sealed)), dict(vars(Inherits))) == before
    assert not any("gradscope failed" in note for note in data.notes)


def in_a_model_called_by_hand(*parts: Any) -> Built:
    """A training step that calls the model and its first part by their ``forward``, and all others as usual."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.parts = nn.Linear(4, 4), nn.ModuleList(parts)

        def forward(self, x: Tensor) -> Tensor:
            first, *others = self.parts
            x = first.forward(self.own.forward(x))
            for part in others:
                x = part(x)
            return x

    model, x = Model(), torch.rand(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model.forward(x).sum().backward()
        optimizer.step()

    return Built(model, step)


def everything(self: Any, a: Any, /, b: Any, c: Any = 3, *rest: Any, d: Any, e: Any = 5, **named: Any) -> Any:
    return a, b, c, rest, d, e, named


def only_rest(*call: Any, **_call: Any) -> Any:
    return call[1:], _call


def named_as_ours(self: Any, call: Any, _call: Any = 2, *, enter: Any = 3) -> Any:
    return call, _call, enter


def by_name(self: Any, *, function: Any, **kwargs: Any) -> Any:
    return function, kwargs


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (everything, (1, 2), {"d": 4}),
        (everything, (1, 2, 3, 4, 5), {"d": 6, "e": 7, "a": 8, "self": 9, "more": 10}),
        (everything, (1,), {"b": 2, "c": None, "d": 4}),
        (only_rest, (1, 2), {"self": 3, "call": 4}),
        (named_as_ours, (1,), {"enter": 4}),
        (named_as_ours, (), {"_call": 1, "call": 2}),
        (by_name, (), {"function": 1, "self_": 2}),
    ],
)
def test_what_may_be_asked_of_a_method_it_answers_while_it_is_watched(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A program filters a batch by the arguments of ``forward``: by ``inspect``, or by the code itself."""

    def asked(method: Any) -> list[Any]:
        code = method.__code__
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        return [
            inspect.getfullargspec(method),
            inspect.signature(method),
            inspect.signature(method, follow_wrapped=False),
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_varnames[:count]),
            (method.__defaults__, method.__kwdefaults__, method.__module__, method.__qualname__, method.__globals__),
        ]

    kind = type("Kind", (nn.Module,), {"forward": function})
    seen: list[nn.Module] = []
    before, alone = asked(kind.forward), kind().forward(*args, **kwargs)
    with byhand.watching([kind], lambda module, _: seen.append(module) is None, lambda _: None):
        module = kind()
        assert is_told_of(function) and kind.forward is function and asked(function) == before
        assert module.forward(*args, **kwargs) == alone and seen == [module]
    assert not is_told_of(function)


def test_what_a_method_counts_in_itself_stays() -> None:
    """Under its own name, or under one that the program has had for it since before it was watched."""

    class Counting(nn.Module):
        def forward(self) -> None:
            method: Any = Counting.forward
            method.calls = getattr(method, "calls", 0) + 1
            kept[0].seen += 1

    before: Any = Counting.forward
    kept = [before]
    before.seen = 0
    for _ in range(2):
        Counting().forward()
        with byhand.watching([Counting], lambda *_: False, lambda _: None):
            assert is_told_of(before)
            Counting().forward()
    assert (before.calls, before.seen) == (4, 4) and "__wrapped__" not in vars(before)


def test_defaults_that_the_program_sets_of_a_method_stay() -> None:
    class Scaled(nn.Module):
        def forward(self, x: float, scale: float = 1.0, *, by: float = 1.0) -> float:
            return x * scale * by

    function: Any = Scaled.forward
    with byhand.watching([Scaled], lambda *_: False, lambda _: None):
        assert is_told_of(function)
        function.__defaults__, function.__kwdefaults__ = (5.0,), {"by": 2.0}
        assert Scaled().forward(3.0) == 30.0
    assert not is_told_of(function) and Scaled().forward(3.0) == 30.0


@pytest.mark.parametrize("compiled", [False, True], ids=["by hand", "compiled"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_what_was_told_of_keeps_nothing_alive(compiled: bool) -> None:
    """Python's collector does not look into code: a cycle through it stays."""

    def run() -> list[weakref.ref[Any]]:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.part = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Any:
                return self.part.forward(x)

        model = Model()
        if compiled:
            model.compile(backend="eager")
        with gradscope.profiling(model, steps=1, warmup=1, memory=False) as prof:
            while not prof.step():
                (model(torch.ones(2, 4)) if compiled else model.forward(torch.ones(2, 4))).sum().backward()
        recorders = [each for each in gc.get_objects() if type(each) is CallRecorder]
        return [weakref.ref(model), *map(weakref.ref, recorders)]

    run()  # what torch loads now may keep its first user
    gc.collect()
    kept = [id(each) for each in gc.get_objects() if type(each) is CallRecorder]  # of other tests' reports
    left = run()
    if compiled:
        torch._dynamo.reset()
    for _ in range(2):  # with torch 2.14 what Dynamo has reset goes in the first, and what it held in the second
        gc.collect()
    assert not [each for each in left if each() is not None and id(each()) not in kept]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_while_compiled_modules_are_told_of_no_other_is_kept_and_an_error_ends_it() -> None:
    compiled, other = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled.compile(backend="eager")
    called: Any = compiled._compiled_call_impl
    gone = weakref.ref(other)
    with pytest.raises(KeyError), byhand.watching_compiled([compiled, other], lambda *_: False, lambda *_: None):
        assert is_told_of(called)
        del other
        gc.collect()
        assert gone() is None
        raise KeyError
    assert not is_told_of(called)
