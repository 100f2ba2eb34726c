"""DIFF.json: a comparison for programs. docs/compare.md says what each field means."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from gradscope import __version__
from gradscope.compare.changes import Change, Comparison, GroupChange, LayerChange, MemoryChange, Presence
from gradscope.report.runfile import to_record
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
        "groups": [_group(group) for group in comparison.groups],
        "memory": [_memory(group) for group in comparison.memory],
        "new": [_presence(one) for one in comparison.new],
        "removed": [_presence(one) for one in comparison.removed],
        "layers": [_layer(layer) for layer in comparison.layers],
    }
    parts = [f" {json.dumps(key)}: {_part(value)}" for key, value in record.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def change_record(change: Change) -> dict[str, Any]:
    """One change; what is not known is absent."""
    record = {
        "metric": change.metric,
        "unit": change.unit,
        "before": change.before,
        "after": change.after,
        "difference": change.difference,
        "ratio": change.ratio,
        "noise": change.noise,
        "basis": change.basis,
        "real": change.real,
    }
    return {key: value for key, value in record.items() if value is not None}


def run_record(run: RunData, name: str) -> dict[str, Any]:
    """Which run it was, and on what."""
    return {
        "file": name,
        "gradscope": run.gradscope,
        "partial": run.partial,
        "environment": to_record(run.environment),
        "workload": to_record(run.workload),
    }


def _group(group: GroupChange) -> dict[str, Any]:
    return {
        "address": group.address,
        "class": group.class_name,
        "paths": list(group.paths),
        "changes": [change_record(group.backward), change_record(group.forward)],
    }


def _memory(group: MemoryChange) -> dict[str, Any]:
    return {
        "address": group.address,
        "class": group.class_name,
        "paths": list(group.paths),
        "changes": _changes(group.changes.values()),
    }


def _presence(one: Presence) -> dict[str, Any]:
    record = {"address": one.address, "class": one.class_name, "paths": list(one.paths), "layers": one.layers}
    record |= {"backward_ns": one.backward_ns, "forward_ns": one.forward_ns}
    return record if one.saved_bytes is None else {**record, "saved_bytes": one.saved_bytes}


def _layer(layer: LayerChange) -> dict[str, Any]:
    classes = {"class_before": layer.class_before, "class_after": layer.class_after}
    return {
        "path": layer.path,
        "status": layer.status,
        **{key: value for key, value in classes.items() if value is not None},
        "changes": _changes(layer.changes.values()),
    }


def _changes(changes: Iterable[Change]) -> list[dict[str, Any]]:
    return [change_record(change) for change in changes]


def _part(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {_dump(row)}" for row in value) + "\n ]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
