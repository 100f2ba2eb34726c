"""FIX.json: :class:`~gradscope.fixing.result.FixData` to JSON and back, without loss."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gradscope.errors import RunFileError
from gradscope.fixing.result import FIX_SCHEMA_VERSION, FixData
from gradscope.report.reading import Mismatch, read_dataclass
from gradscope.report.runfile import dump_record, to_record

# What a FIX.json begins with: never to be taken for a RUN.json, nor the other way round.
FIX_HEAD = re.compile(r'\s*\{\s*"kind":\s*"fix",\s*"schema_version":\s*\d+')

_WRITE_ONE = "Write one with: gradscope fix TARGET"


def to_json(fix: FixData) -> str:
    """FIX.json's text; tables have one row a line.

    Raises :class:`~gradscope.errors.OutputError` for a number that JSON cannot hold, naming where it is.
    """
    record: dict[str, Any] = to_record(fix)
    head = {"kind": "fix", "schema_version": record.pop("schema_version")}
    return dump_record({**head, **record}, "fix")


def load_fix(path: str | os.PathLike[str]) -> FixData:
    """The FIX.json at ``path``.

    Raises :class:`~gradscope.errors.RunFileError` if it cannot be read, is not a FIX.json, is of a newer schema, or
    lacks a field or has one of the wrong type.
    """
    name = str(path)
    try:
        return from_json(Path(path).read_text(encoding="utf-8"), name)
    except FileNotFoundError as error:
        raise RunFileError(f"{name}: no such file.\n{_WRITE_ONE}") from error
    except UnicodeDecodeError as error:
        raise RunFileError(f"{name} is not JSON: it is not UTF-8 text.") from error
    except OSError as error:
        raise RunFileError(f"{name} cannot be read: {error.strerror or error}.") from error


def from_json(text: str, name: str = "the text") -> FixData:
    """The fix in ``text``; errors as in :func:`load_fix`, with ``name`` as the place."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise RunFileError(f"{name} is not JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from error
    if not isinstance(record, dict) or record.get("kind") != "fix" or "sites" not in record:
        raise RunFileError(f"{name} is not a FIX.json: it has no kind and sites.\n{_WRITE_ONE}")
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RunFileError(f"{name} is not a FIX.json: its schema_version is {version!r}.\n{_WRITE_ONE}")
    if version > FIX_SCHEMA_VERSION:
        raise RunFileError(
            f"{name} has schema_version {version}; this gradscope reads up to {FIX_SCHEMA_VERSION}.\n"
            f"It was written by gradscope {record.get('gradscope', '?')}: update gradscope, or fix again."
        )
    try:
        return read_dataclass(FixData, record, "")
    except Mismatch as error:
        raise RunFileError(f"{name} is damaged: {error}.\nRun gradscope fix again to write a new one.") from error
