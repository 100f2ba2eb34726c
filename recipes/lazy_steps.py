"""Which calls on logits leave them a linear layer's output, and where their classes lie afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
TURNS = frozenset({"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT"})
CASTS = frozenset({"to", "float", "type"})
COPIES = frozenset({"contiguous"})

_PROPERTIES = frozenset({"T", "mT"})


def is_bias(bias: Sequence[int], logits: Sequence[int]) -> bool:
    """Tell the shape of a bias of logits, [classes] or [1, ..., classes], whose sum with them has theirs."""
    return 0 < len(bias) <= len(logits) and bias[-1] == logits[-1] and all(size == 1 for size in bias[:-1])


def classes_after(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: Sequence[int],
    classes: int,
    result_shape: Sequence[int],
) -> int | None:
    """The dimension of the classes after ``name(logits, *args, **kwargs)``.

    None where the result is not what the layer gives for rows picked, ordered or shaped likewise.

    Args:
        name: of the function; in all spellings of one operation the same arguments.
        shape: of the logits before.
        classes: their dimension of the classes, from 0.
        result_shape: of the result.
    """
    if any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
        return None
    if name in RESHAPES:
        return _reshaped(shape, classes, result_shape)
    if name in TURNS:
        return _turned(name, args, kwargs, len(shape), classes)
    if name == "getitem" and len(args) == 1:
        return _picked(args[0], shape, classes)
    if name in CASTS or name in COPIES:
        return classes if tuple(shape) == tuple(result_shape) else None
    return None


def features_after(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    features: Tensor,
    classes: int,
    result_shape: Sequence[int],
) -> Tensor:
    """The layer's input, its features where the classes are, after what :func:`classes_after` follows.

    Args:
        features: the input before, whose dimension ``classes`` holds the features.
        result_shape: of the logits after the call.
    """
    if name in RESHAPES:
        if classes == features.dim() - 1:
            return features.reshape(*result_shape[:-1], features.shape[-1])
        return features
    if name in TURNS:
        return getattr(features, name) if name in _PROPERTIES else getattr(features, name)(*args, **kwargs)
    if name == "getitem":
        items = _items(args[0], features.dim())
        assert items is not None
        items[_position(items, classes)] = slice(None)
        return features[tuple(items)]
    return features


def _reshaped(shape: Sequence[int], classes: int, result_shape: Sequence[int]) -> int | None:
    if tuple(shape) == tuple(result_shape):
        return classes
    last = classes == len(shape) - 1 and len(result_shape) > 0 and result_shape[-1] == shape[-1]
    return len(result_shape) - 1 if last else None


def _turned(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], rank: int, classes: int) -> int | None:
    # Sizes that differ tell the dimensions apart.
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    if name in _PROPERTIES:
        result = probe.t() if name == "T" and rank == 2 else probe.mT if name == "mT" and rank >= 2 else None
    else:
        result = getattr(probe, name)(*args, **kwargs)
    return None if result is None else list(result.shape).index(classes + 2)


def _picked(index: Any, shape: Sequence[int], classes: int) -> int | None:
    items = _items(index, len(shape))
    if items is None:
        return None
    at = _position(items, classes)
    if not isinstance(items[at], slice) or items[at].indices(shape[classes]) != (0, shape[classes], 1):
        return None
    return sum(item is None or isinstance(item, slice) for item in items[:at])


def _items(index: Any, rank: int) -> list[Any] | None:
    """One item for each dimension, and None for each new one; None where an item is a tensor or a list."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(_is_plain(item) for item in items):
        return None
    used = sum(item is not None and item is not Ellipsis for item in items)
    if items.count(Ellipsis) > 1 or used > rank:
        return None
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * (rank - used)
    return items


def _position(items: list[Any], dimension: int) -> int:
    """The position in the index of a dimension's item."""
    return [at for at, item in enumerate(items) if item is not None][dimension]


def _is_plain(item: Any) -> bool:
    """Check that the index is a number, a slice of numbers, an ellipsis or None."""
    if isinstance(item, slice):
        return all(each is None or type(each) is int for each in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or type(item) is int
