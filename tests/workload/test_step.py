"""One training step of a workload: batches, the call, the loss, the device."""

from __future__ import annotations

import itertools
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from gradscope.errors import UsageError, WorkloadError
from gradscope.workload import Batches, Workload, call_model, resolve_device, scalar_loss
from gradscope.workload.step import to_device

META = torch.device("meta")  # a second device that every machine has
Pair = namedtuple("Pair", "x y")


def message(function: Callable[[], Any]) -> str:
    with pytest.raises(WorkloadError) as raised:
        function()
    assert 1 <= len(str(raised.value).splitlines()) <= 3
    return str(raised.value)


def parameter(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


# --------------------------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [torch.ones(2), (torch.ones(2), 1), {"x": torch.ones(2)}, UserDict(x=1)])
def test_one_batch_is_repeated(batch: Any) -> None:
    batches = Batches(batch, torch.device("cpu"))
    assert all(item is batch for item in itertools.islice(batches, 5))


def test_iterator_is_drawn_one_a_step() -> None:
    drawn: list[int] = []

    def make() -> Any:
        for number in range(10):
            drawn.append(number)
            yield torch.tensor(number)

    batches = Batches(make())
    assert drawn == []
    assert [int(item) for item in itertools.islice(batches, 3)] == [0, 1, 2]
    assert drawn == [0, 1, 2]


def test_iterator_that_ends_early() -> None:
    batches = Batches(iter([torch.ones(2)] * 3), needed=14)
    for _ in range(3):
        next(batches)
    assert message(lambda: next(batches)) == (
        "the batch iterator ended after 3 batches, but this run needs 14.\n"
        "Give a DataLoader (it restarts), one fixed batch, or fewer --steps and --warmup."
    )


def test_iterator_that_ends_after_one_of_an_unknown_number() -> None:
    batches = Batches(iter([(1,)]))
    next(batches)
    assert message(lambda: next(batches)).startswith("the batch iterator ended after 1 batch.\n")


def test_loader_starts_again() -> None:
    loader = DataLoader(TensorDataset(torch.arange(3), torch.arange(3)), batch_size=1)
    batches = Batches(loader, needed=8)
    assert [int(item[0]) for item in itertools.islice(batches, 8)] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_nothing_to_iterate() -> None:
    assert message(lambda: next(Batches(iter([])))) == ("the batch iterator, a list_iterator, returned no batch.")
    assert message(lambda: next(Batches(DataLoader([])))) == "the batch iterator, a DataLoader, returned no batch."


def test_loader_that_is_empty_the_second_time() -> None:
    class Once:
        def __init__(self) -> None:
            self.items = [(1,), (2,)]

        def __iter__(self) -> Any:
            items, self.items = self.items, []
            return iter(items)

    batches = Batches(Once(), needed=3)
    assert [next(batches), next(batches)] == [(1,), (2,)]
    assert message(lambda: next(batches)).startswith("the batch iterator ended after 2 batches, but this run needs 3.")


def test_item_that_is_no_batch() -> None:
    batches = Batches(iter([torch.ones(1), "abc"]))
    next(batches)
    assert message(lambda: next(batches)) == (
        "item 2 of the batch iterator is a str.\n"
        "A batch is a tensor, a tuple (positional), a dict (keyword), or an iterator of these."
    )


def test_users_error_in_the_iterator_goes_out() -> None:
    def make() -> Any:
        yield torch.ones(1)
        raise OSError("disk")

    batches = Batches(make())
    next(batches)
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_batches_are_moved() -> None:
    assert next(Batches(iter([(torch.ones(2), 3)]), META))[0].device == META
    repeated = Batches({"x": torch.ones(2)}, META)
    assert next(repeated)["x"].device == META
    assert next(repeated) is next(repeated)  # moved once


def test_everything_nested_is_moved_and_the_rest_kept() -> None:
    value = {"a": [torch.ones(1), (torch.ones(2), "text")], "b": Pair(torch.ones(3), None), "c": 4}
    moved = to_device(value, META)
    assert moved["a"][0].device == META
    assert moved["a"][1][0].device == META
    assert moved["a"][1][1] == "text"
    assert type(moved["b"]) is Pair
    assert moved["b"].x.device == META
    assert moved["c"] == 4


def test_what_is_there_already_is_the_same_object() -> None:
    value = {"a": [torch.ones(1)], "b": Pair(torch.ones(3), None)}
    assert to_device(value, torch.device("cpu")) is value
    assert to_device(value, None) is value


def test_things_with_a_to_of_their_own() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert to_device(packed, META).data.device == META


def test_a_leaf_stays_a_leaf() -> None:
    moved = to_device(parameter(2), META)
    assert moved.is_leaf
    assert moved.requires_grad


# --------------------------------------------------------------------------------------------------------------------
# The call
# --------------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def forward(self, x: Any, y: Any = None, *, scale: Any = 1) -> Any:
        return x, y, scale


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((1, 2), (1, 2, 1)),
        ([1, 2], (1, 2, 1)),
        (Pair(1, 2), (1, 2, 1)),
        ({"x": 1, "scale": 3}, (1, None, 3)),
        (UserDict(x=1), (1, None, 1)),
    ],
)
def test_call(batch: Any, expected: Any) -> None:
    assert call_model(Net(), batch) == expected


def test_a_tensor_is_one_argument() -> None:
    batch = torch.ones(2, 2)
    assert call_model(Net(), batch)[0] is batch


def test_batch_that_does_not_fit() -> None:
    assert message(lambda: call_model(Net(), (1, 2, 3))) == (
        "Net.forward cannot be called as model(*batch) with a tuple of 3: too many positional arguments.\n"
        "Data that only the loss needs, such as targets, belongs in the loss function, not in the batch."
    )
    assert message(lambda: call_model(Net(), {"x": 1, "z": 2})) == (
        "Net.forward cannot be called as model(**batch) with a dict of 2: got an unexpected keyword argument 'z'.\n"
        "Data that only the loss needs, such as targets, belongs in the loss function, not in the batch."
    )


def test_type_error_of_the_model_itself_goes_out() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + "text"

    with pytest.raises(TypeError, match="unsupported operand"):
        call_model(Wrong(), torch.ones(1))


# --------------------------------------------------------------------------------------------------------------------
# The loss
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    loss: Any = None
    logits: Any = None


def test_given_loss() -> None:
    output, batch = parameter(3), (1, 2)
    seen: list[Any] = []

    def loss(*args: Any) -> Tensor:
        seen.append(args)
        return output.sum()

    value, kind = scalar_loss(output, batch, loss)
    assert (value.item(), kind) == (3.0, "given")
    assert seen == [(output, batch)]


def test_given_loss_of_shape_one() -> None:
    assert scalar_loss(None, None, lambda o, b: parameter(1))[1] == "given"


NAMED_OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the output": lambda loss, other: loss,
    "of shape one": lambda loss, other: loss.reshape(1),
    "an attribute": lambda loss, other: Output(loss, other),
    "a key": lambda loss, other: OrderedDict(logits=other, loss=loss, auxiliary=other.sum()),
    "the one scalar of a tuple": lambda loss, other: (other, loss),
    "the one scalar of a dict": lambda loss, other: {"logits": other, "cost": loss},
    "the one scalar with a gradient": lambda loss, other: (other, loss, loss.detach()),
    "inside a list": lambda loss, other: [other, [loss]],
}


@pytest.mark.parametrize("make", NAMED_OUTPUTS.values(), ids=NAMED_OUTPUTS)
def test_loss_in_the_output(make: Callable[[Tensor, Tensor], Any]) -> None:
    value, kind = scalar_loss(make(parameter() * 7, parameter(3)), None, None)
    assert (value.item(), kind) == (7.0, "output")


class Keeps(nn.Module):
    """It returns its scores, and keeps scalars of them in attributes."""

    def __init__(self, *kept: str, inside: bool = False) -> None:
        super().__init__()
        self.layer, self.kept, self.inner = nn.Linear(3, 2), kept, nn.Identity()
        self.holder = self.inner if inside else self

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        made = {"router": hidden.mean()}
        scores = torch.as_tensor(hidden * 2)
        made |= {"last_loss": scores.square().sum(), "other": scores.sum(), "number": scores.sum().detach()}
        for name in self.kept:
            setattr(self.holder, name, made[name])
        return scores


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "kept, kind",
    [
        (("last_loss",), "output"),
        (("last_loss", "router", "number"), "output"),
        (("last_loss", "other"), "mean of outputs"),  # either may be it
        (("router",), "mean of outputs"),  # a part of a loss
        ((), "mean of outputs"),
    ],
)
def test_loss_that_the_model_keeps(kept: tuple[str, ...], kind: str, inside: bool) -> None:
    model, x = Keeps(*kept, inside=inside), torch.ones(1, 3)
    output = model(x)
    value, found = scalar_loss(output, x, None, model)
    assert found == kind
    if found == "output":
        assert value is model.holder.last_loss
        model.kept = ()  # in evaluation, say: what is kept is of the call before
        assert scalar_loss(model(x), x, None, model)[1] == "mean of outputs"


MEAN_OUTPUTS: dict[str, tuple[Callable[[], Any], float]] = {
    "one tensor": (lambda: torch.tensor([1.0, 3.0], requires_grad=True), 2.0),
    "several": (lambda: (parameter(4), parameter(2) * 3), 2.0),
    "among others": (lambda: {"ids": torch.arange(3), "logits": parameter(3) * 5, "mask": None}, 5.0),
    "two scalars": (lambda: (parameter() * 1, parameter() * 3), 2.0),
    "those with a gradient": (lambda: [parameter(3), torch.zeros(3)], 1.0),
    "a dataclass": (lambda: Output(None, parameter(3) * 4), 4.0),
    "complex": (lambda: torch.view_as_complex(parameter(3, 2) * 2), 2.0),
    "of two dtypes": (lambda: (parameter(3), (parameter(3) * 3).half()), 2.0),
    "one is empty": (lambda: (parameter(0), parameter(2)), 1.0),
}


@pytest.mark.parametrize(("make", "expected"), MEAN_OUTPUTS.values(), ids=MEAN_OUTPUTS)
def test_mean_of_outputs(make: Callable[[], Any], expected: float) -> None:
    value, kind = scalar_loss(make(), None, None)
    assert kind == "mean of outputs"
    assert value.item() == expected
    value.backward()  # type: ignore[no-untyped-call]


LOOK = "Look for torch.no_grad(), .detach(), .item() or parameters that are all frozen."
LOSSES = {
    "not a tensor": (
        lambda o, b: 0.5,
        "loss(output, batch) returned a float; it must return a scalar tensor that has a gradient.",
    ),
    "not a scalar": (
        lambda o, b: parameter(8, 10),
        "loss(output, batch) returned a float32 tensor of shape (8, 10) with requires_grad=True: a loss is a scalar.\n"
        "End it with .mean() or .sum().",
    ),
    "without a gradient": (
        lambda o, b: torch.ones(()),
        "the result of loss(output, batch) is a float32 tensor of shape () with requires_grad=False: there is no "
        f"backward pass to measure.\n{LOOK}",
    ),
}


@pytest.mark.parametrize(("loss", "expected"), LOSSES.values(), ids=LOSSES)
def test_loss_that_cannot_be_used(loss: Any, expected: str) -> None:
    assert message(lambda: scalar_loss(parameter(3), None, loss)) == expected


GIVE = "Give a loss: workload() may return (model, batch, loss) with loss(output, batch)."
OUTPUTS = {
    "None": (None, f"the model's output is None, with no floating-point tensor to compute a loss from.\n{GIVE}"),
    "integers": (
        torch.arange(3),
        "the model's output is an int64 tensor of shape (3,) with requires_grad=False, with no floating-point "
        f"tensor to compute a loss from.\n{GIVE}",
    ),
    "integers inside": (
        {"ids": torch.arange(3)},
        "the model's output is a dict of 1 that holds an int64 tensor of shape (3,) with requires_grad=False, with "
        f"no floating-point tensor to compute a loss from.\n{GIVE}",
    ),
    "no gradient": (
        torch.ones(3, 2),
        "the model's output is a float32 tensor of shape (3, 2) with requires_grad=False: there is no backward pass "
        f"to measure.\n{LOOK}",
    ),
    "no gradient inside": (
        (torch.ones(3), 1),
        "the model's output is a tuple of 2 that holds a float32 tensor of shape (3,) with requires_grad=False: there "
        f"is no backward pass to measure.\n{LOOK}",
    ),
    "a scalar without": (
        torch.ones(()),
        "the model's output is a float32 tensor of shape () with requires_grad=False: there is no backward pass to "
        f"measure.\n{LOOK}",
    ),
    "a named loss without": (
        Output(torch.ones(())),
        "the loss in the model's output is a float32 tensor of shape () with requires_grad=False: there is no "
        f"backward pass to measure.\n{LOOK}",
    ),
}


@pytest.mark.parametrize(("output", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_output_that_cannot_be_used(output: Any, expected: str) -> None:
    assert message(lambda: scalar_loss(output, None, None)) == expected


# --------------------------------------------------------------------------------------------------------------------
# The device
# --------------------------------------------------------------------------------------------------------------------


def test_auto_is_cuda_where_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    assert resolve_device("auto", nn.Linear(1, 1)) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("auto", nn.Linear(1, 1)) == torch.device("cuda")


def test_auto_is_where_the_model_was_put() -> None:
    assert resolve_device("auto", nn.Linear(1, 1, device="meta")) == META


def test_device_number_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError) as raised:
        resolve_device("cuda:2")
    assert str(raised.value) == "--device cuda:2: this machine has 2 CUDA device(s), from cuda:0."


def test_workload_shows_itself_in_a_line() -> None:
    assert repr(Workload(nn.Linear(1, 1), (1, 2), target="a.py")) == "<Workload a.py: batch a tuple of 2>"
    assert repr(Workload(nn.Linear(1, 1), {}, loss=max)) == "<Workload Linear: batch a dict of 0, loss given>"
