"""Finds the storages behind tensors: what a graph saves, and all that live in a process; keeps none alive.

The nodes' own attributes are read, no hooks are set: with hooks for saved tensors ``torch.func`` refuses to run, and a
user's own hooks would not be called. What hooks have packed is looked into where it holds tensors; what a checkpoint
keeps for its recompute counts as saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from gradscope.capture.graphs import most_nodes, walked
from gradscope.compat import SavedTensor, checkpoint_frame, held_by_checkpoint, saved_value
from gradscope.interrupts import IgnoringErrors, is_interruption
from gradscope.process import objects_of
from gradscope.tables import CHECKPOINT


class StorageNote(NamedTuple):
    """A storage as numbers: nothing of it stays alive."""

    pointer: int
    bytes: int
    device: str  # "cpu", "cuda:0"
    owned: bool  # allocated by torch, not lent by NumPy, a mapped file or another process


_LONGEST = 200  # characters of an error


class StorageReader:
    """Finds the storages behind tensors of any kind.

    A tensor is the user's object: it may be of a class that raises whatever it is asked. Then nothing is told of its
    memory, and :meth:`notes` says so.
    """

    def __init__(self) -> None:
        self._untold: dict[tuple[str, str], set[int]] = {}  # class and error -> ids of the tensors

    def notes(self) -> list[str]:
        """Which tensors could not be looked into, and why."""
        return [
            f"the memory of {len(found)} tensor{'s' * (len(found) > 1)} of class {kind} is unknown: {error}"
            for (kind, error), found in self._untold.items()
        ]

    def storages(self, tensor: torch.Tensor, depth: int = 4) -> list[StorageNote]:
        """Return the storages of ``tensor``: one, or those of its parts where it is sparse or a wrapper; maybe none."""
        try:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return self._found(tensor, depth)
        except Exception as error:  # a subclass's own code is behind it
            if is_interruption(error):
                raise
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST]
            self._untold.setdefault((type(tensor).__qualname__, why), set()).add(id(tensor))
            return []

    def _found(self, tensor: torch.Tensor, depth: int) -> list[StorageNote]:
        if depth == 0:
            return []
        parts = _parts(tensor)
        if parts is not None:
            return [note for part in parts for note in self.storages(part, depth - 1)]
        note = _note(tensor)
        return [] if note is None else [note]


def _note(tensor: torch.Tensor) -> StorageNote | None:
    """The storage of a tensor that has one."""
    try:
        storage = tensor.untyped_storage()
        where = storage.device
        if where.type == "meta":  # a fake tensor's too, which would warn when it is asked for its address
            return None
        pointer, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # functional, batched, lazy, MKLDNN: none that could be asked for
        return None
    if not pointer or not size:
        return None
    # Only of a CPU storage do these two say who allocated it.
    owned = where.type != "cpu" or (storage.resizable() and not storage.is_shared())
    return StorageNote(pointer, size, str(where), owned)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that hold the data of one that has no storage of its own; None for an ordinary one."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _parts_of_layout(tensor)
    flatten = getattr(kind, "__tensor_flatten__", None)
    if flatten is None:
        return _parts_of_layout(tensor)
    # Some name what is no tensor as well: a DTensor its mesh.
    inner = (getattr(tensor, name) for name in flatten(tensor)[0])
    return [part for part in inner if is_tensor(part) and part is not tensor]


def _parts_of_layout(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    layout = tensor.layout
    if layout is torch.strided:
        return None
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def is_tensor(value: object) -> bool:
    """Check that the value is a tensor by its type: ``isinstance`` would ask the object, which may compute or raise."""
    return issubclass(type(value), torch.Tensor)


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, as far as they lie in these.

    A mapping that makes its values when it is asked has none, but for those that it makes them of.
    """
    if is_tensor(value):
        yield value
    elif depth > 0:
        for item in _items(value):
            yield from tensors_in(item, depth - 1)


def _items(value: Any) -> list[Any]:
    """What a container holds, read by no code of its class's: that may compute, count, or draw random numbers."""
    kind = type(value)
    with IgnoringErrors():  # another thread may change it
        for base, items in _READS.items():
            if issubclass(kind, base):
                return list(items(value))
        bases = _BASES(kind)
        fields = [_VARS(each).get("__dataclass_fields__") for each in bases]
        names = frozenset(name for each in fields if type(each) is dict for name in each)
        is_mapping = any(each is Mapping for each in bases)  # its items are in a dict, or are tensors of its own
        if names or is_mapping:
            return [
                held
                for name, held in _attributes(value)
                if name in names or (is_mapping and issubclass(type(held), (dict, torch.Tensor)))
            ]
    return []


_READS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    **{kind: kind.__iter__ for kind in (list, tuple, set)},
}
# Of a class, without asking its own class, nor those that ``issubclass`` would ask.
_BASES, _VARS = vars(type)["__mro__"].__get__, vars(type)["__dict__"].__get__


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    """What an object's attributes are, but for what its class computes when it is asked."""
    for name, each in chain.from_iterable(_VARS(kind).items() for kind in _BASES(type(value))):
        if name == "__dict__" and type(each) is GetSetDescriptorType:
            yield from dict.items(each.__get__(value))
        elif type(each) is MemberDescriptorType:
            with suppress(AttributeError):  # nothing is in that slot
                yield name, each.__get__(value)


def sizes_text(tensors: Iterable[torch.Tensor], most: int = 3) -> str:
    """``4x256 int64``, or of several ``8x3x32x32 float32, 8 int64 and 2 more``; nothing for none."""
    texts = [" ".join(sizes_of(tensor)) for tensor in tensors]
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def sizes_of(tensor: torch.Tensor) -> tuple[str, str]:
    """Shape and dtype, as "8x3x32x32" and "float32"; of a subclass that raises, its name and "?"."""
    try:
        with torch._C.DisableTorchFunction():
            # A nested tensor has no shape to ask for.
            shape = "nested" if tensor.is_nested else "x".join(map(str, tensor.shape)) or "scalar"
            return shape, str(tensor.dtype).removeprefix("torch.")
    except Exception as error:
        if is_interruption(error):
            raise
        return type(tensor).__name__, "?"


def all_tensors() -> list[torch.Tensor]:
    """Every tensor that Python holds in this process."""
    return objects_of(torch.Tensor)


_RAW = "_raw_saved_"
_WHAT = {"_raw_saved_result": "output", "_raw_saved_tensors": "saved tensor"}


class KeptStorage(NamedTuple):
    """A tensor that a node keeps. Let go of it at once: it is alive only because something else holds it."""

    sequence: int  # of the node
    node: str  # "SoftmaxBackward0"
    what: str  # the node's own name for it
    tensor: torch.Tensor


class GraphReader:
    """Reads graphs; remembers which attributes each kind of node has."""

    def __init__(self) -> None:
        self._slots: dict[type, tuple[str, ...]] = {}

    def kept_by(self, nodes: Iterable[Any]) -> Iterator[KeptStorage]:
        """Everything that ``nodes`` keep, and the checkpoints behind them."""
        frames: dict[int, tuple[Any, int]] = {}  # of checkpointing, each with the number of its latest node
        for node in nodes:
            number, name = node._sequence_nr(), node.name().rpartition("::")[2]
            for what, saved in self._saved(node):
                frame = checkpoint_frame(saved)
                if frame is not None:
                    frames[id(frame)] = (frame, max(frames.get(id(frame), (frame, -1))[1], number))
                yield from (KeptStorage(number, name, what, tensor) for tensor in tensors_in(_value_of(saved)))
            # A custom Function may keep tensors as attributes of its context, against torch's advice.
            for name_of_attribute, value in getattr(node, "__dict__", {}).items():
                what = f"ctx.{name_of_attribute}"
                yield from (KeptStorage(number, name, what, tensor) for tensor in tensors_in(value))
        for frame, number in frames.values():
            for what, held in held_by_checkpoint(frame):
                yield from (KeptStorage(number, CHECKPOINT, what, tensor) for tensor in tensors_in(_unwrapped(held)))

    def _saved(self, node: Any) -> Iterator[tuple[str, Any]]:
        """(the node's name for it, ``SavedTensor``) of each tensor that torch saved for it."""
        slots = self._slots.get(type(node))
        if slots is None:
            slots = self._slots[type(node)] = tuple(name for name in dir(node) if name.startswith(_RAW))
        for slot in slots:
            try:
                held = getattr(node, slot)
            except RuntimeError:  # freed by an earlier pass
                continue
            what = _WHAT.get(slot, slot.removeprefix(_RAW))
            for saved in held if isinstance(held, (tuple, list)) else (held,):
                if saved is not None:
                    yield what, saved


def _value_of(saved: Any) -> Any:
    """What a ``SavedTensor`` holds; None where an earlier pass has freed it."""
    try:
        return saved_value(saved)
    except RuntimeError:
        return None


def _unwrapped(held: Any) -> Any:
    """Containers with each ``SavedTensor`` in them replaced by what it holds."""
    if isinstance(held, SavedTensor):
        return _value_of(held)
    if isinstance(held, (list, tuple)):
        return [_unwrapped(item) for item in held]
    return held


_ROUNDED = 512  # CUDA's allocator gives whole multiples of it


class Census(NamedTuple):
    """What was alive after a step, but for what optimizers keep: the history of one (LBFGS) grows by right."""

    sizes: Mapping[int, int]  # storages by the size that the allocator gave
    graphs: int  # tensors that Python holds, and that have a graph behind them


def every_storage(reader: StorageReader, graphs: GraphReader) -> tuple[list[StorageNote], int]:
    """Storages of every tensor that Python holds, and of what the graphs keep that these tensors keep.

    Also how many of these tensors have a graph.
    """
    functions, found = [], []
    held = []  # until the graphs are read: up to torch 2.12 the object of a custom Function does not keep its node
    for tensor in all_tensors():
        found += reader.storages(tensor)
        # Some wrappers have no graph, a subclass may do anything; and a mode of the user's sees the user's calls alone.
        with IgnoringErrors(), torch._C.DisableTorchFunction():
            if tensor.grad_fn is not None:
                functions.append(tensor.grad_fn)
                held.append(tensor)
    # A quarter: the memory pass looks at the same graphs, and not from the same tensors.
    for kept in graphs.kept_by(walked(functions, most_nodes() // 4)[0]):
        found += reader.storages(kept.tensor)
    del held
    return found, len(functions)


def sizes_alive(notes: Iterable[StorageNote]) -> Counter[int]:
    """How many storages there are of each size that the allocator gave; without those that torch did not allocate."""
    sizes = {(note.device, note.pointer): _given(note) for note in notes if note.owned}
    return Counter(sizes.values())


def states_of(optimizers: Iterable[Optimizer], reader: StorageReader) -> Iterator[tuple[Any, StorageNote]]:
    """Return (parameter, storage) of each tensor that optimizers keep from step to step; of one that raises, none."""
    for optimizer in optimizers:
        entries: Any = ()
        with IgnoringErrors():
            states = optimizer.state
            entries = list(dict.items(states) if issubclass(type(states), dict) else states.items())
        for parameter, state in entries:
            for tensor in tensors_in(state):
                yield from ((parameter, note) for note in reader.storages(tensor))


def take_census(optimizers: Iterable[Optimizer]) -> Census:
    """Count what is alive now."""
    reader = StorageReader()
    return census_of(*every_storage(reader, GraphReader()), states_of(optimizers, reader))


def census_of(storages: Iterable[StorageNote], graphs: int, states: Iterable[tuple[Any, StorageNote]]) -> Census:
    """Count :func:`every_storage` without the optimizers' states."""
    kept = {(note.device, note.pointer) for _, note in states}
    return Census(sizes_alive(note for note in storages if (note.device, note.pointer) not in kept), graphs)


def _given(note: StorageNote) -> int:
    return note.bytes if note.device == "cpu" else -(-note.bytes // _ROUNDED) * _ROUNDED
