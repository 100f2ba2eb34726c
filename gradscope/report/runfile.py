"""RUN.json: :class:`~gradscope.tables.RunData` to JSON and back, without loss.

The fields are those of the dataclasses in ``gradscope.tables`` in their order, ``class_name`` being called
``class``; what is ``None`` is left out. docs/run-json.md says what each field means.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from gradscope.errors import OutputError, RunFileError
from gradscope.report.reading import RENAMED, Mismatch, read_dataclass
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
    "rules",
    "notes",
)


def to_json(run: RunData) -> str:
    """The run as JSON text that ends in a newline; tables have one row a line, so that runs can be compared as text.

    Raises :class:`OutputError` for a number JSON cannot hold (NaN, infinity), naming where it is.
    """
    return dump_record(to_record(run), "run")


def dump_record(record: Mapping[str, Any], name: str) -> str:
    """A record as :func:`to_json` writes it; ``name`` is what a number that is not finite is said to be in."""
    try:
        parts = [f" {json.dumps(key)}: {_dump_part(value)}" for key, value in record.items()]
    except ValueError as error:
        where = _find_nan(record, name) or name
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
        pairs = ((RENAMED.get(name, name), getattr(value, name)) for name in names)
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
        return read_dataclass(RunData, record, "")
    except Mismatch as error:
        raise RunFileError(f"{name} is damaged: {error}.\nProfile again to write a new one.") from error
    except ConservationError as error:
        raise RunFileError(
            f"{name} has numbers that do not add up: {error}.\nIt was changed after it was written; profile again."
        ) from error


_WRITE_ONE = "Write one with: gradscope profile TARGET"


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
