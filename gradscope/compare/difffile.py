"""DIFF.json: a comparison for programs. docs/compare.md says what each field means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from gradscope import __version__
from gradscope.compare.changes import COLUMNS, Change, Comparison, GroupChange, LayerChange, MemoryChange
from gradscope.report.runfile import dump_record, to_record
from gradscope.tables import RunData

DIFF_SCHEMA_VERSION = 1
# What a DIFF.json begins with: never to be taken for a RUN.json, nor the other way round.
DIFF_HEAD = re.compile(r'\s*\{\s*"kind":\s*"diff",\s*"schema_version":\s*\d+')


def to_json(comparison: Comparison) -> str:
    """The comparison as JSON text that ends in a newline; tables have one row a line."""
    record = {
        "kind": "diff",
        "schema_version": DIFF_SCHEMA_VERSION,
        "gradscope": __version__,
        "before": run_record(comparison.before, comparison.names[0]),
        "after": run_record(comparison.after, comparison.names[1]),
        "warnings": [to_record(mismatch) for mismatch in comparison.mismatches],
        "notes": list(comparison.notes),
        "totals": [change_record(change) for change in comparison.totals],
        "groups": [_timed_group(group) for group in comparison.groups],
        "memory": [_group(group, group.changes.values()) for group in comparison.memory],
        "new": to_record(comparison.new),
        "removed": to_record(comparison.removed),
        "layers": [_layer(layer) for layer in comparison.layers],
    }
    return dump_record(record, "comparison")


def change_record(change: Change) -> dict[str, Any]:
    """One change; what is not known is absent."""
    return {name: value for name in COLUMNS if (value := getattr(change, name)) is not None}


def run_record(run: RunData, name: str) -> dict[str, Any]:
    """Which run it was, and on what."""
    return {
        "file": name,
        "gradscope": run.gradscope,
        "partial": run.partial,
        "environment": to_record(run.environment),
        "workload": to_record(run.workload),
    }


def _group(group: GroupChange | MemoryChange, changes: Iterable[Change]) -> dict[str, Any]:
    record = {"address": group.address, "class": group.class_name, "paths": list(group.paths)}
    return {**record, "changes": [change_record(change) for change in changes]}


def _timed_group(group: GroupChange) -> dict[str, Any]:
    estimated = {} if group.estimated is None else {"estimated": group.estimated}
    return {**_group(group, (group.backward, group.forward)), **estimated}


def _layer(layer: LayerChange) -> dict[str, Any]:
    classes = {"class_before": layer.class_before, "class_after": layer.class_after}
    return {
        "path": layer.path,
        "status": layer.status,
        **{key: value for key, value in classes.items() if value is not None},
        "changes": [change_record(change) for change in layer.changes.values()],
    }
