"""The form of a call's arguments: all that a recipe's choice goes by, and nothing that changes with their contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Form: TypeAlias = tuple[Any, ...]
_PLAIN = frozenset({Tensor, nn.Parameter})
_SEQUENCES = frozenset({tuple, list, torch.Size})
_SETTINGS = frozenset({int, float, bool, str, type(None)})


def form_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form | None:
    """Shapes, dtypes, devices and settings, threads and autocast among them; None where a value is of another kind."""
    parts = _parts(args)
    if kwargs and parts is not None:
        named = _parts(kwargs.values())
        parts = None if named is None else (parts, *kwargs, *named)
    if parts is None:
        return None
    return parts, torch.get_num_threads(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _parts(values: Iterable[Any]) -> tuple[Any, ...] | None:
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN and not value.is_nested:  # the strided ones have no shape
            parts += (value.shape, value.dtype, value.device, value.requires_grad)
        elif kind in _SETTINGS:
            parts.append(value)
        elif kind in _SEQUENCES:
            inner = _parts(value)
            if inner is None:
                return None
            parts.append(inner)
        else:
            return None
    return tuple(parts)
