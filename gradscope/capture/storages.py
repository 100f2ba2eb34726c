"""Finds the storages behind tensors, and all tensors of a process, without keeping one of them alive."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
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
    parts = _parts(tensor)
    if parts is not None:
        for part in parts:
            yield from storages_of(part)
        return
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # a fake tensor's too, which would warn when it is asked for its address
            return
        pointer, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # functional or batched tensors: no memory of their own
        return
    if pointer and size:
        # Only of a CPU storage do these two say who allocated it.
        owned = storage.device.type != "cpu" or (storage.resizable() and not storage.is_shared())
        yield StorageNote(pointer, size, str(storage.device), owned)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that hold the data of one that has no storage of its own; None for an ordinary one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return None
    names = flatten(tensor)[0]
    return [getattr(tensor, name) for name in names]


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or isinstance(value, (str, bytes, int, float)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth - 1)


def sizes_text(tensors: Iterable[torch.Tensor], most: int = 3) -> str:
    """``4x256 int64``, or of several ``8x3x32x32 float32, 8 int64 and 2 more``; nothing for none."""
    texts = [f"{_shape_text(tensor)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors]
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def _shape_text(tensor: torch.Tensor) -> str:
    if tensor.is_nested:  # has no shape to ask for
        return "nested"
    return "x".join(map(str, tensor.shape)) or "scalar"


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
