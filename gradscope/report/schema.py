"""Values of parsed JSON, checked against the annotations of the dataclass that they are the fields of.

The dataclasses are the schema: a field's annotation is its type, its name tells its range. A time, a size or a count is
never negative and fits 64 bits, but for the fields of :data:`SIGNED`; no number is infinite or none.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from gradscope.safe_text import kind_of, shown_value

# Fields that are called otherwise in JSON.
RENAMED = {"class_name": "class"}

# Fields that may be negative or of any size: what may be a loss as well as a saving, and errors and losses of a model.
SIGNED = frozenset(
    (
        "predicted_saving_ns",
        "predicted_saving_bytes",
        "predicted_low_ns",
        "predicted_high_ns",
        "measured_saving_ns",
        "measured_saving_bytes",
        "other_ns",  # of threads that work at the same time: see StepTimes
        "outside_allocator_bytes",
        "max_grad_error",
        "original_grad_error",
        "before",
        "after",
        "largest_difference",
        "loss_difference",
    )
)
# A hundred days, nine petabytes: sums over a thousand layers still are of 64 bits, as integers of DataFrames are. What
# nobody sums may be larger: a step of a large model has more operations.
_MOST = 2**53
_UNSUMMED = frozenset(("flops", "forward_flops", "backward_flops"))
_MOST_UNSUMMED = 2**63 - 1
_MOST_FLOAT = sys.float_info.max


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    """What a number may be."""

    signed: bool
    most: int  # of an integer
    most_float: float


_COUNT = _Range(False, _MOST, _MOST)
_ANY = _Range(True, _MOST, _MOST_FLOAT)
_RANGES = dict.fromkeys(SIGNED, _ANY) | {name: _Range(False, _MOST_UNSUMMED, _MOST) for name in _UNSUMMED}

T = TypeVar("T")


class SchemaMismatch(ValueError):
    """A value that does not fit its field; the message says where."""


@functools.cache
def _plan(cls: Any) -> tuple[tuple[str, str, Any, bool], ...]:
    """(field, key in JSON, annotation, may be absent) of each field of a dataclass."""
    hints = get_type_hints(cls)
    return tuple(
        (
            field.name,
            RENAMED.get(field.name, field.name),
            hints[field.name],
            _optional(hints[field.name])
            or field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    )


def read_dataclass(cls: type[T], record: Any, where: str) -> T:
    """``record`` as an object of ``cls``; ``where`` is its place, for the message of a :class:`Mismatch`."""
    if not isinstance(record, dict):
        raise SchemaMismatch(f"{where or 'it'} is {kind_of(record)}, not an object")
    values: dict[str, Any] = {}
    for name, key, annotation, may_lack in _plan(cast(Any, cls)):
        place = f"{where}.{key}" if where else key
        if record.get(key) is not None:
            values[name] = _read(annotation, record[key], place, _RANGES.get(name, _COUNT))
        elif not may_lack:
            raise SchemaMismatch(f"{place} is missing")
        elif _optional(annotation):
            values[name] = None
    return cls(**values)


def _read(annotation: Any, value: Any, where: str, limits: _Range) -> Any:
    """``value`` as ``annotation`` wants it; lists become tuples."""
    if annotation is int or annotation is float:
        return _read_number(annotation, value, where, limits)
    if annotation is Any:
        return _read_plain(value, where)
    if annotation is str or annotation is bool:
        return _read_simple(annotation, value, where)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        if value is None and _optional(annotation):
            return None
        return _read(next(one for one in arguments if one is not types.NoneType), value, where, limits)
    if origin is Literal:
        if value not in arguments:
            raise SchemaMismatch(f"{where} is {shown_value(value)}, not one of {', '.join(map(str, arguments))}")
        return value
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise SchemaMismatch(f"{where} is {kind_of(value)}, not an object")
        return {key: _read(arguments[1], item, f"{where}.{_key(key)}", limits) for key, item in value.items()}
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(value, list):
            raise SchemaMismatch(f"{where} is {kind_of(value)}, not a list")
        return tuple(_read(arguments[0], item, f"{where}[{i}]", limits) for i, item in enumerate(value))
    return read_dataclass(annotation, value, where)


def _key(key: str) -> str:
    """A key that the file chose."""
    return key if key.isidentifier() and len(key) < 40 else shown_value(key)


def _read_number(annotation: type, value: Any, where: str, limits: _Range) -> int | float:
    whole = annotation is int
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise SchemaMismatch(f"{where} is {kind_of(value)}, not {'an integer' if whole else 'a number'}")
    if not abs(value) <= (limits.most if whole else limits.most_float):  # not "greater": that holds of no NaN
        raise SchemaMismatch(f"{where} is too large a number")
    if whole and not isinstance(value, int):
        raise SchemaMismatch(f"{where} is {kind_of(value)}, not an integer")
    if value < 0 and not limits.signed:
        raise SchemaMismatch(f"{where} is {kind_of(value)}, and cannot be negative")
    return value if whole else float(value)


def _read_simple(kind: type, value: Any, where: str) -> Any:
    if isinstance(value, kind):
        return value
    raise SchemaMismatch(f"{where} is {kind_of(value)}, not {'a string' if kind is str else 'true or false'}")


def _read_plain(value: Any, where: str) -> Any:
    """A string, a number or a bool: what stands under a key that is not known beforehand."""
    if isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        return _read_number(type(value), value, where, _ANY)
    raise SchemaMismatch(f"{where} is {kind_of(value)}, not a string, a number, true or false")


def _optional(annotation: Any) -> bool:
    return types.NoneType in get_args(annotation)
