"""RUN.json: :class:`~gradscope.tables.RunData` to JSON and back, without loss.

The fields are those of the dataclasses in ``gradscope.tables`` in their order, ``class_name`` being called
``class``, and ``schema_version`` the first; what is ``None`` is left out. docs/run-json.md says what each field means.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from gradscope.errors import OutputError, RunFileError
from gradscope.inputs import NotJsonError, UnreadableError, parse_json, read_text
from gradscope.report.schema import RENAMED, SchemaMismatch, read_dataclass
from gradscope.safe_text import cut, shown_path, shown_repr, visible
from gradscope.tables import SCHEMA_VERSION, ConservationError, RunData
from gradscope.tables.results import ShapeError, check_spans, check_tree


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
        pairs = ((RENAMED.get(name, name), getattr(value, name)) for name in _names(type(value)))
        return {key: to_record(item) for key, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {str(key): to_record(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_record(item) for item in value]
    return value


@functools.cache
def _names(cls: Any) -> list[str]:
    """The fields of a dataclass, the version first: a reader must know it before anything else."""
    return sorted((field.name for field in dataclasses.fields(cls)), key=lambda name: name != "schema_version")


def load_run(path: str | os.PathLike[str]) -> RunData:
    """The run in the RUN.json at ``path``.

    Raises :class:`RunFileError` if it cannot be read, is not JSON, is not a RUN.json, is of a newer schema, lacks a
    field or has one of the wrong type, or holds numbers that do not add up.
    """
    name = shown_path(path)
    return from_json(read_input(path, name, _WRITE_ONE), name)


def from_json(text: str, name: str = "the text") -> RunData:
    """The run in ``text``; errors as in :func:`load_run`, with ``name`` as the place."""
    return from_record(parse_input(text, name, _WRITE_ONE), name)


def read_input(path: str | os.PathLike[str], name: str, hint: str) -> str:
    """The text of the file at ``path``; raises :class:`RunFileError`, where ``hint`` says what to do next."""
    try:
        return read_text(path)
    except UnreadableError as error:
        reason = "no such file" if error.missing else f"cannot be read: {error}"
        raise RunFileError(f"{name}{':' if error.missing else ''} {reason}.\n{hint}") from error


def parse_input(text: str, name: str, hint: str) -> Any:
    """What the JSON in ``text`` holds; raises :class:`RunFileError` as :func:`read_input`."""
    try:
        return parse_json(text)
    except NotJsonError as error:
        raise RunFileError(f"{name} is not JSON: {error}.\n{hint}") from error


def check_version(record: Mapping[str, Any], name: str, kind: str, newest: int, again: str) -> None:
    """Raise :class:`RunFileError` unless ``record`` is of a schema that this gradscope reads.

    Args:
        record: a parsed file.
        name: what messages call it.
        kind: what it should be, ``RUN.json``.
        newest: schema_version that is read.
        again: what writes another one: ``profile``.
    """
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RunFileError(
            f"{name} is not a {kind}: its schema_version is {shown_repr(version)}.\n"
            f"Write one with: gradscope {again} TARGET"
        )
    if version > newest:
        writer = record.get("gradscope")
        raise RunFileError(
            f"{name} has schema_version {version}; this gradscope reads up to {newest}.\nIt was written by gradscope "
            f"{cut(visible(writer), 40) if isinstance(writer, str) else '?'}: update gradscope, or {again} again."
        )


def from_record(record: Any, name: str) -> RunData:
    """The run in a parsed RUN.json; errors as in :func:`load_run`, with ``name`` as the place."""
    missing = [key for key in ("schema_version", "ledger") if not isinstance(record, dict) or key not in record]
    if missing:
        kind = record.get("kind") if isinstance(record, dict) else None
        why = f"it is a {kind.upper()}.json" if kind in ("fix", "diff") else f"it has no {' and '.join(missing)}"
        raise RunFileError(f"{name} is not a RUN.json: {why}.\n{_WRITE_ONE}")
    check_version(record, name, "RUN.json", SCHEMA_VERSION, "profile")
    try:
        run = read_dataclass(RunData, record, "")
        check_tree(run.layers)
        if run.memory is not None:
            check_spans(run.memory.spans or ())
        return run
    except (SchemaMismatch, ShapeError) as error:
        raise RunFileError(f"{name} is damaged: {error}.\nProfile again to write a new one.") from error
    except ConservationError as error:
        raise RunFileError(
            f"{name} has numbers that do not add up: {cut(visible(str(error)), 300)}.\n"
            "It was changed after it was written; profile again."
        ) from error


_WRITE_ONE = "Write one with: gradscope profile TARGET"


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
