"""RUN.json: :class:`~gradscope.tables.RunData` to JSON and back, without loss.

The fields are those of the dataclasses in ``gradscope.tables`` in their order, ``class_name`` being called
``class``; what is ``None`` is left out. docs/run-json.md says what each field means.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from gradscope.errors import OutputError, RunFileError
from gradscope.tables import SCHEMA_VERSION, ConservationError, RunData

_ORDER = (
    "schema_version",
    "gradscope",
    "partial",
    "environment",
    "workload",
    "step",
    "ledger",
    "layers",
    "lines",
    "ops",
    "kernels",
    "memory",
    "findings",
    "notes",
)
_RENAMED = {"class_name": "class"}

T = TypeVar("T")


def to_json(run: RunData) -> str:
    """The run as JSON text that ends in a newline; tables have one row a line, so that runs can be compared as text.

    Raises :class:`OutputError` for a number JSON cannot hold (NaN, infinity), naming where it is.
    """
    record = to_record(run)
    try:
        parts = [f" {json.dumps(key)}: {_dump_part(value)}" for key, value in record.items()]
    except ValueError as error:
        where = _find_nan(record, "run") or "run"
        raise OutputError(f"{where} is not a finite number, so it cannot be written as JSON.") from error
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _dump_part(value: Any, indent: str = " ") -> str:
    """``value`` as JSON; a table has one row a line, also where it is a part of an object."""
    if isinstance(value, list) and value:
        rows = ",\n".join(f"{indent} {_dump(row)}" for row in value)
        return f"[\n{rows}\n{indent}]"
    if isinstance(value, dict) and any(isinstance(part, list) for part in value.values()):
        parts = ",\n".join(f"{indent} {_dump(key)}: {_dump_part(part, indent + ' ')}" for key, part in value.items())
        return f"{{\n{parts}\n{indent}}}"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain_number)


def to_record(value: Any) -> Any:
    """``value`` as dicts, lists and plain values, in the order of RUN.json; ``None`` fields are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _ORDER if isinstance(value, RunData) else tuple(field.name for field in dataclasses.fields(value))
        pairs = ((_RENAMED.get(name, name), getattr(value, name)) for name in names)
        return {key: to_record(item) for key, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {str(key): to_record(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_record(item) for item in value]
    return value


def load_run(path: str | os.PathLike[str]) -> RunData:
    """The run in the RUN.json at ``path``.

    Raises :class:`RunFileError` if it cannot be read, is not JSON, is not a RUN.json, is of a newer schema, lacks a
    field or has one of the wrong type, or holds numbers that do not add up.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RunFileError(f"{name}: no such file.\nWrite one with: gradscope profile TARGET") from error
    except UnicodeDecodeError as error:
        raise RunFileError(f"{name} is not JSON: it is not UTF-8 text.") from error
    except OSError as error:
        raise RunFileError(f"{name} cannot be read: {error.strerror or error}.") from error
    return from_json(text, name)


def from_json(text: str, name: str = "the text") -> RunData:
    """The run in ``text``; errors as in :func:`load_run`, with ``name`` as the place."""
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RunFileError(f"{name} is not JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from error
    except (_NotFinite, RecursionError) as error:
        raise RunFileError(f"{name} is not JSON: {error}.") from error
    return from_record(record, name)


def from_record(record: Any, name: str) -> RunData:
    """The run in a parsed RUN.json; errors as in :func:`load_run`, with ``name`` as the place."""
    if not isinstance(record, dict) or "schema_version" not in record or "ledger" not in record:
        raise RunFileError(f"{name} is not a RUN.json: it has no schema_version and ledger.\n{_WRITE_ONE}")
    version = record["schema_version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RunFileError(f"{name} is not a RUN.json: its schema_version is {version!r}.\n{_WRITE_ONE}")
    if version > SCHEMA_VERSION:
        raise RunFileError(
            f"{name} has schema_version {version}; this gradscope reads up to {SCHEMA_VERSION}.\n"
            f"It was written by gradscope {record.get('gradscope', '?')}: update gradscope, or profile again."
        )
    try:
        return _read_dataclass(RunData, record, "")
    except _Mismatch as error:
        raise RunFileError(f"{name} is damaged: {error}.\nProfile again to write a new one.") from error
    except ConservationError as error:
        raise RunFileError(
            f"{name} has numbers that do not add up: {error}.\nIt was changed after it was written; profile again."
        ) from error


_WRITE_ONE = "Write one with: gradscope profile TARGET"


class _Mismatch(ValueError):
    """A value that does not fit its field; the message says where."""


class _NotFinite(ValueError):
    """A constant that JSON does not have."""


def _refuse_constant(constant: str) -> NoReturn:
    raise _NotFinite(f"it contains {constant}")


def _plain_number(value: Any) -> Any:
    """numpy's numbers as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a value RUN.json can hold")


def _find_nan(value: Any, where: str) -> str | None:
    if isinstance(value, Mapping):
        return next((hit for key, item in value.items() if (hit := _find_nan(item, f"{where}.{key}"))), None)
    if isinstance(value, list):
        return next((hit for i, item in enumerate(value) if (hit := _find_nan(item, f"{where}[{i}]"))), None)
    return where if isinstance(value, float) and not math.isfinite(value) else None


# --------------------------------------------------------------------------------------------------------------------
# Reading: values checked against the annotations of the dataclasses
# --------------------------------------------------------------------------------------------------------------------


@functools.cache
def _plan(cls: Any) -> tuple[tuple[str, str, Any, bool], ...]:
    """(field, key in JSON, annotation, may be absent) of each field of a dataclass."""
    hints = get_type_hints(cls)
    return tuple(
        (
            field.name,
            _RENAMED.get(field.name, field.name),
            hints[field.name],
            _optional(hints[field.name])
            or field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    )


def _read_dataclass(cls: type[T], record: Any, where: str) -> T:
    if not isinstance(record, dict):
        raise _Mismatch(f"{where or 'it'} is {_kind(record)}, not an object")
    values: dict[str, Any] = {}
    for name, key, annotation, may_lack in _plan(cast(Any, cls)):
        place = f"{where}.{key}" if where else key
        if record.get(key) is not None:
            values[name] = _read(annotation, record[key], place)
        elif not may_lack:
            raise _Mismatch(f"{place} is missing")
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
            raise _Mismatch(f"{where} is {value!r}, not one of {', '.join(map(str, arguments))}")
        return value
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _Mismatch(f"{where} is {_kind(value)}, not an object")
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(value, list):
            raise _Mismatch(f"{where} is {_kind(value)}, not a list")
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    return _read_dataclass(annotation, value, where)


def _read_int(value: Any, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _Mismatch(f"{where} is {_kind(value)}, not an integer")


def _read_float(value: Any, where: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise _Mismatch(f"{where} is {_kind(value)}, not a number")


def _read_str(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    raise _Mismatch(f"{where} is {_kind(value)}, not a string")


def _read_bool(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _Mismatch(f"{where} is {_kind(value)}, not true or false")


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
