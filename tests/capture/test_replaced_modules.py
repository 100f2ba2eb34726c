"""Paths of modules that come and go in a measured loop: replaced, copied, owned by what is never called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope

from .nets import Net, X


def measured(step: Callable[[int], Any], model: nn.Module | None = None, steps: int = 3) -> Any:
    """Layers by path of a loop that calls ``step`` with the number of the step."""
    with gradscope.profiling(model, steps=steps, warmup=1, memory=False) as prof:
        for number in range(100):
            step(number)
            if prof.step():
                break
    return {row.path: row for row in prof.report.data.layers}


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
