"""FIX.json: :class:`~gradscope.fixing.result.FixData` to JSON and back, without loss."""

from __future__ import annotations

import os
import re
from typing import Any

from gradscope.errors import RunFileError
from gradscope.fixing.result import FIX_SCHEMA_VERSION, FixData
from gradscope.report.runfile import check_version, dump_record, parse_input, read_input, to_record
from gradscope.report.schema import SchemaMismatch, read_dataclass
from gradscope.safe_text import shown_path

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
    name = shown_path(path)
    return from_json(read_input(path, name, _WRITE_ONE), name)


def from_json(text: str, name: str = "the text") -> FixData:
    """The fix in ``text``; errors as in :func:`load_fix`, with ``name`` as the place."""
    record = parse_input(text, name, _WRITE_ONE)
    if not isinstance(record, dict) or record.get("kind") != "fix" or "sites" not in record:
        raise RunFileError(f"{name} is not a FIX.json: it has no kind and sites.\n{_WRITE_ONE}")
    check_version(record, name, "FIX.json", FIX_SCHEMA_VERSION, "fix")
    try:
        fix = read_dataclass(FixData, record, "")
        _require_spreads(fix)
        return fix
    except SchemaMismatch as error:
        raise RunFileError(f"{name} is damaged: {error}.\nRun gradscope fix again to write a new one.") from error


def _require_spreads(fix: FixData) -> None:
    """Raise :class:`Mismatch` where it is not known how steady a step was."""
    for name, side in (("before", fix.before), ("after", fix.after)):
        if side is not None and "wall_ns" not in side.spread:
            raise SchemaMismatch(f"{name}.spread.wall_ns is missing")
