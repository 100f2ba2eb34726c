"""What a batch holds, at any depth of tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from gradscope.errors import WorkloadError
from gradscope.workload import describe

# What a batch may hold beside tensors; anything else may hide more of the batch.
_PLAIN = (type(None), str, bytes, bool, int, float, complex, Enum, torch.dtype, torch.device)


def leaves(value: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """Each tensor and plain value with the expression that finds it: ``batch['x'][1]``.

    Raises:
        WorkloadError: an object inside cannot be looked into, or a tensor's samples cannot be told apart.
    """
    parts = _parts(value, name)
    if parts is None:
        yield name, value
        return
    for part, inner in parts:
        yield from leaves(inner, part)


def mapped(value: Any, change: Callable[[str, Any], Any], name: str = "batch") -> Any:
    """``value`` with every leaf replaced by ``change(its name, itself)``."""
    parts = _parts(value, name)
    if parts is None:
        return change(name, value)
    inner = [mapped(part, change, part_name) for part_name, part in parts]
    if isinstance(value, Mapping):
        return dict(zip(value, inner, strict=True))
    if isinstance(value, (tuple, list)):
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    names = [field.name for field in dataclasses.fields(value) if field.init]
    return dataclasses.replace(value, **dict(zip(names, inner, strict=True)))


def _parts(value: Any, name: str) -> list[tuple[str, Any]] | None:
    """The parts that lie directly in ``value``, by the expressions that find them; None for a leaf."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            return None
        raise WorkloadError(f"{name} is a {'nested' if value.is_nested else 'sparse'} tensor")
    if isinstance(value, _PLAIN):
        return None
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", value[key]) for key in value]
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        return [(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f"{name}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value) if field.init
        ]
    raise WorkloadError(f"{name} is {describe(value)}")
