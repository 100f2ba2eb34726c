"""Finds the storages behind tensors, and all tensors of a process, without keeping one of them alive."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch


class StorageNote(NamedTuple):
    """A storage as numbers: nothing of it stays alive."""

    pointer: int
    bytes: int
    device: str  # "cpu", "cuda:0"
    owned: bool  # allocated by torch, not lent by NumPy, a mapped file or another process


def storages_of(tensor: torch.Tensor) -> Iterator[StorageNote]:
    """The storages of a tensor: one, or those of its parts where it is sparse or a wrapper; none without memory."""
    yield from StorageReader().storages(tensor)


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
            f"the memory of {len(found)} tensor{'s' * (len(found) > 1)} of class {kind} is not known: {error}"
            for (kind, error), found in self._untold.items()
        ]

    def storages(self, tensor: torch.Tensor, depth: int = 4) -> list[StorageNote]:
        """Those of ``tensor``, and of the tensors it is made of."""
        try:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return self._found(tensor, depth)
        except Exception as error:  # a subclass's own code is behind it
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
    """The tensors in nested tuples, lists, mappings and dataclasses; of what raises when it is looked into, none."""
    if is_tensor(value):
        yield value
    elif depth > 0:
        for item in _items(value):
            yield from tensors_in(item, depth - 1)


def _items(value: Any) -> list[Any]:
    kind = type(value)
    if issubclass(kind, (str, bytes, int, float)):
        return []
    with suppress(Exception):  # the user's own container
        if issubclass(kind, Mapping):
            return list(value.values())
        if issubclass(kind, (tuple, list, set)):
            return list(value)
        if is_dataclass(kind):
            return [getattr(value, field.name, None) for field in fields(kind)]
    return []


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
    except Exception:
        return type(tensor).__name__, "?"


def all_tensors() -> Iterator[torch.Tensor]:
    """Every tensor that Python holds in this process."""
    kinds = set(_subclasses(torch.Tensor))
    # type(), never isinstance: lazy modules and proxies answer for their class by importing or computing something.
    return (item for item in gc.get_objects() if type(item) in kinds)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    below: list[type[Any]] = type.__subclasses__(kind)
    for other in below:
        yield from _subclasses(other)
