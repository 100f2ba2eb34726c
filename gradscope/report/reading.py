"""Values of parsed JSON, checked against the annotations of the dataclass that they are the fields of."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

# Fields that are called otherwise in JSON.
RENAMED = {"class_name": "class"}

T = TypeVar("T")


class Mismatch(ValueError):
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
        raise Mismatch(f"{where or 'it'} is {_kind(record)}, not an object")
    values: dict[str, Any] = {}
    for name, key, annotation, may_lack in _plan(cast(Any, cls)):
        place = f"{where}.{key}" if where else key
        if record.get(key) is not None:
            values[name] = _read(annotation, record[key], place)
        elif not may_lack:
            raise Mismatch(f"{place} is missing")
        elif _optional(annotation):
            values[name] = None
    return cls(**values)


def _read(annotation: Any, value: Any, where: str) -> Any:
    """``value`` as ``annotation`` wants it; lists become tuples."""
    reader = _READERS.get(annotation)
    if reader is not None:
        return reader(value, where)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _read(next(one for one in arguments if one is not types.NoneType), value, where)
    if origin is Literal:
        if value not in arguments:
            raise Mismatch(f"{where} is {value!r}, not one of {', '.join(map(str, arguments))}")
        return value
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise Mismatch(f"{where} is {_kind(value)}, not an object")
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(value, list):
            raise Mismatch(f"{where} is {_kind(value)}, not a list")
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    return read_dataclass(annotation, value, where)


def _read_int(value: Any, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Mismatch(f"{where} is {_kind(value)}, not an integer")


def _read_float(value: Any, where: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise Mismatch(f"{where} is {_kind(value)}, not a number")


def _read_str(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    raise Mismatch(f"{where} is {_kind(value)}, not a string")


def _read_bool(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    raise Mismatch(f"{where} is {_kind(value)}, not true or false")


_READERS: Mapping[Any, Any] = {
    int: _read_int,
    float: _read_float,
    str: _read_str,
    bool: _read_bool,
    Any: lambda value, where: value,
}


def _optional(annotation: Any) -> bool:
    return types.NoneType in get_args(annotation)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value}")
