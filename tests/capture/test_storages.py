"""What is told of a tensor's memory, whatever it is; nothing that its class does reaches the user's program."""

from __future__ import annotations

import asyncio
import gc
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gradscope.capture.storages import GraphReader, StorageReader, sizes_of, tensors_in
from tests.memory.measuring import in_a_loop, memory_of
from tests.process_group import alone

D = torch.eye(6)


def told(tensor: Tensor) -> list[int]:
    reader = StorageReader()
    found = [note.bytes for note in reader.storages(tensor)]
    assert not reader.notes()
    return found


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def _functional() -> Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(D)


def _jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.strided)


KINDS: dict[str, tuple[Callable[[], Tensor], list[int]]] = {
    "plain": (lambda: torch.zeros(5), [20]),
    "parameter": (lambda: nn.Parameter(torch.zeros(5)), [20]),
    "coo": (lambda: D.to_sparse(), [96, 24]),
    "csr": (lambda: D.to_sparse_csr(), [56, 96, 24]),
    "csc": (lambda: D.to_sparse_csc(), [56, 96, 24]),
    "bsr": (lambda: D.to_sparse_bsr((2, 2)), [32, 48, 48]),
    "bsc": (lambda: D.to_sparse_bsc((2, 2)), [32, 48, 48]),
    "quantized": (lambda: torch.quantize_per_tensor(D, 0.1, 0, torch.qint8), [36]),
    "jagged": (_jagged, [72, 24]),
    "nested": (_nested, [72]),
    "conjugated": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), [24]),
    "MKLDNN": (lambda: D.to_mkldnn(), []),
    "meta": (lambda: torch.empty(3, device="meta"), []),
    "fake": (_fake, []),
    "lazy": (lambda: nn.LazyLinear(3).weight, []),
    "functional": (_functional, []),
    "functionalized": (lambda: torch._to_functional_tensor(D), []),
}


@pytest.mark.filterwarnings("ignore")  # of prototypes, and of torch's plans for them
@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str) -> None:
    make, expected = KINDS[kind]
    tensor = make()
    assert told(tensor) == expected
    sizes_of(tensor)


def test_batched() -> None:
    found = []

    def look(row: Tensor) -> Tensor:
        found.append(told(row))
        return row

    torch.vmap(look)(D)
    assert found == [[]]


def test_distributed() -> None:
    with alone():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.zeros(7), mesh, [Replicate()])
        assert isinstance(tensor, DTensor) and told(tensor) == [28]


# --------------------------------------------------------------------------------------------------------------------
# Classes that raise
# --------------------------------------------------------------------------------------------------------------------


class Wrapper(Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls) -> Any:
        return Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(f"never {func}")


class Flat(Wrapper):
    def __tensor_flatten__(self) -> Any:
        raise LookupError("no parts\nand a second line")


class Missing(Wrapper):
    def __tensor_flatten__(self) -> Any:
        return ["absent"], None


class Loop(Wrapper):
    @property
    def again(self) -> Tensor:
        return Loop()

    def __tensor_flatten__(self) -> Any:
        return ["again"], None


class Speaks(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(f"never {func}")


class Hides(Wrapper):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (Flat, "the memory of 1 tensor of class Flat is unknown: LookupError: no parts"),
        (
            Missing,
            "the memory of 1 tensor of class Missing is unknown: AttributeError: 'Missing' object has no attribute "
            "'absent'",
        ),
    ],
)
def test_a_class_whose_parts_cannot_be_read(kind: type[Tensor], note: str) -> None:
    tensor, reader = kind(), StorageReader()
    for _ in range(2):
        assert reader.storages(tensor) == []
    assert reader.notes() == [note]


@pytest.mark.parametrize("kind", [Loop, Hides, Wrapper])
def test_a_class_that_tells_nothing(kind: type[Tensor]) -> None:
    assert told(kind()) == []


def test_a_class_of_its_own_functions_has_its_storage() -> None:
    assert told(torch.zeros(5).as_subclass(Speaks)) == [20]


def test_modes_of_the_user_see_nothing() -> None:
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    tensor = D.to_sparse()
    with Seeing():
        assert told(tensor) == [96, 24]


# --------------------------------------------------------------------------------------------------------------------
# Containers
# --------------------------------------------------------------------------------------------------------------------


class Proxy:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class Closed(UserDict[str, Any]):
    def values(self) -> Any:
        raise OSError("closed")


@dataclass
class Lazy:
    x: Tensor

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name) if name != "x" else ValueError(name)


class Endless(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no end")


class Augmented(Mapping[str, Any]):
    """Makes what it holds when it is read, as datasets do."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, key: str) -> Tensor:
        return self.tensor + torch.rand(1)

    def __iter__(self) -> Iterator[str]:
        return iter("x")

    def __len__(self) -> int:
        return 1


@dataclass(slots=True)
class Slotted:
    x: Tensor
    empty: Any = None


class FromDataset(Mapping[str, Any]):
    """It knows where its items are from."""

    def __init__(self, tensor: Tensor) -> None:
        self._items, self.dataset = {"x": tensor}, [torch.ones(1) for _ in range(9)]

    def __getitem__(self, key: str) -> Tensor:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return 1


@dataclass
class WithMore:
    x: Tensor

    def __post_init__(self) -> None:
        self.dataset = [torch.ones(1)]


@dataclass
class Both(FromDataset):
    """Its fields are what holds its items."""

    _items: dict[str, Tensor]


class Odd:
    __dataclass_fields__ = 5


class Stopped(Mapping[str, Any]):
    """As pytest and asyncio end what they run."""

    def _stop(self, *_: Any) -> Any:
        raise asyncio.CancelledError

    __getitem__ = __iter__ = __len__ = _stop


class _Asks(type):
    """A class of classes that draws random numbers whatever they are asked."""

    def __getattribute__(cls, name: str) -> Any:
        torch.rand(1)
        raise KeyError(name)

    def __eq__(cls, other: object) -> bool:
        torch.rand(1)
        raise KeyError

    __hash__ = type.__hash__


class Asked(metaclass=_Asks):
    """Of no kind that is looked into."""


class _Kept(dict[str, Any]):
    def values(self) -> Any:
        raise KeyError


def test_containers_are_read_and_asked_nothing() -> None:
    """What they compute may raise, or draw random numbers that the program draws then no more."""
    one, slotted = torch.zeros(1), Slotted(torch.zeros(1))
    del slotted.empty
    before = torch.get_rng_state()
    kept = Augmented(one)
    kept.__dict__ = _Kept(tensor=one)
    containers = [
        FromDataset(one),
        Both({"x": one}),
        Odd(),
        WithMore(one),
        Asked(),
        kept,
        Proxy(),
        Stopped(),
        Closed(x=one),
        Lazy(one),
        Endless([one]),
        Augmented(one),
        Slotted(one),
        slotted,
    ]
    assert list(tensors_in([*containers, one])) == [*[one] * 9, slotted.x, one]
    assert torch.equal(torch.get_rng_state(), before)


# --------------------------------------------------------------------------------------------------------------------
# In a step
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.hostile_objects
@pytest.mark.parametrize("kind", [Flat, Missing, Loop, Hides, Wrapper, Speaks])
def test_a_step_goes_on_beside_tensors_that_raise(kind: type[Tensor]) -> None:
    gc.collect()  # what earlier tests left would be looked into as well
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    other = torch.zeros(5).as_subclass(kind) if kind is Speaks else kind()
    model.kept = [other]

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    data = in_a_loop(model, step)
    assert memory_of(data).peak_bytes > 0
    named = [note for note in data.notes if "is unknown" in note]
    assert len(named) == (kind in {Flat, Missing})


def test_meta_tensors_in_a_step() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    shape_only = nn.Linear(3, 2, device="meta")

    def step() -> None:
        model.zero_grad()
        shape_only(torch.empty(4, 3, device="meta")).sum()
        model(x).sum().backward()

    data = in_a_loop(model, step)
    assert memory_of(data).peak_bytes > 0 and not [note for note in data.notes if "could not" in note]


@dataclass
class _Given:
    x: object


class _Below(_Given):
    """Without a decorator of its own."""


def test_fields_are_those_of_the_classes_above_too() -> None:
    held = torch.ones(2)
    assert list(tensors_in(_Below(held))) == [held]


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_checkpoint_keeps_is_of_its_last_node_in_whatever_order_they_are_walked(order: int) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    y = checkpoint(lambda x: second(first(x).relu()), x, use_reentrant=False)
    nodes: list[Any] = []
    left = [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in nodes:
            nodes.append(node)
            left += [each for each, _ in node.next_functions]
    kept = [each.sequence for each in GraphReader().kept_by(nodes[::order]) if each.node == "checkpoint"]
    assert kept and set(kept) == {y.grad_fn._sequence_nr()}
