"""The outcome of a check: a table for a terminal or a CI log, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gradscope import __version__, units
from gradscope.compare import messages
from gradscope.compare.budgets import Checked, Judged, allowed_text
from gradscope.compare.difffile import change_record, run_record
from gradscope.compare.document import WARNING
from gradscope.document.parts import (
    Bullets,
    Cell,
    Column,
    Document,
    KeyValues,
    Row,
    Section,
    Style,
    Table,
    Words,
    dim,
)
from gradscope.report.runfile import to_record

CHECK_SCHEMA_VERSION = 1
_MOST_OK = 20  # rows within their limit that are listed; those over it are listed all
_RESULTS = {"over": "OVER", "noise": "noise", "ok": "ok"}


def check_document(checked: Checked) -> Document:
    """The warnings, what is over its limit, the rest, and the conclusion."""
    names = [("run", checked.names[0])]
    warning, notes = "", list(checked.notes)
    reasons: tuple[str, ...] = ()
    if checked.comparison is not None:
        reasons = tuple(mismatch.text for mismatch in checked.comparison.mismatches)
        warning = WARNING if reasons else ""
        names.insert(0, ("baseline", str(checked.names[1])))
        notes = [*checked.comparison.notes, *notes]
    end: tuple[Words | Bullets, ...] = (
        Words(conclusion(checked), "strong"),
        *([Bullets(tuple(notes))] if notes else []),
    )
    return Document(
        title=f"gradscope {__version__}",
        subject="check",
        head=KeyValues(tuple(names)),
        sections=(_limits(checked), Section("result", "Result", "", end)),
        warning=warning,
        reasons=reasons,
    )


def conclusion(checked: Checked) -> str:
    """``FAILED: 2 of 5 limits are exceeded.``"""
    many = len(checked.judged)
    noisy = sum(1 for one in checked.judged if one.result == "noise")
    doubt = f" {noisy} {'is' if noisy == 1 else 'are'} over the limit, but within noise." if noisy else ""
    if checked.over:
        over = len(checked.over)
        verb = "is" if over == 1 else "are"
        return f"FAILED: {over} of {many} {'value' if many == 1 else 'values'} {verb} over the limit.{doubt}"
    if noisy:
        return f"PASSED: no value of {many} is over its limit beyond noise.{doubt}"
    return f"PASSED: {'the value is' if many == 1 else f'all {many} values are'} within the limit."


def _limits(checked: Checked) -> Section:
    columns = (
        Column("what", "", align="left"),
        Column("path", "layer", align="left", least=20, most=56, cut="front"),
        Column("metric", "metric", align="left"),
        Column("before", "before"),
        Column("after", "after"),
        Column("change", "change"),
        Column("limit", "limit"),
        Column("noise", "noise", drop=1),
    )
    listed = [one for one in checked.judged if one.result != "ok"]
    within = [one for one in checked.judged if one.result == "ok"]
    rows = [_row(one) for one in (*listed, *within[:_MOST_OK])]
    if len(within) > _MOST_OK:
        rows.append(Row(dim(["ok", f"… {len(within) - _MOST_OK} more"]), "rest"))
    about = "OVER: beyond the limit and beyond noise; noise: only beyond the limit"
    return Section("limits", "Limits", about, (Table(columns, tuple(rows)),))


def _row(judged: Judged) -> Row:
    change = judged.change
    styles: dict[str, Style] = {"over": "worse", "noise": "warm"}
    style = styles.get(judged.result, "")
    change_text = messages.mark(change) + messages.relative(change) if change.before is not None else units.NOT_MEASURED
    return Row(
        (
            Cell(_RESULTS[judged.result], style),
            Cell(_layer_name(judged), code=bool(judged.layer)),
            Cell(_METRICS[change.metric]),
            Cell(messages.value(change.before, change.unit)),
            Cell(messages.value(change.after, change.unit), style),
            Cell(change_text, style),
            Cell(allowed_text(judged)),
            Cell(messages.noise(change), "dim"),
        )
    )


def _layer_name(judged: Judged) -> str:
    return "the step" if judged.layer is None else judged.layer or "the root"


_METRICS = {
    "backward_ns": "backward",
    "backward_total_ns": "backward",
    "peak_bytes": "peak",
    "saved_bytes": "saved",
}


def to_json(checked: Checked) -> str:
    """The outcome as JSON text that ends in a newline; docs/compare.md says what each field means."""
    comparison = checked.comparison
    record: dict[str, Any] = {
        "kind": "check",
        "schema_version": CHECK_SCHEMA_VERSION,
        "gradscope": __version__,
        "passed": not checked.over,
        "run": run_record(checked.run, checked.names[0]),
    }
    if comparison is not None:
        record["baseline"] = run_record(comparison.before, str(checked.names[1]))
    record["warnings"] = [to_record(mismatch) for mismatch in comparison.mismatches] if comparison is not None else []
    record["notes"] = [*(comparison.notes if comparison is not None else ()), *checked.notes]
    record["values"] = [_judged_record(one) for one in checked.judged]
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _judged_record(judged: Judged) -> dict[str, Any]:
    record: dict[str, Any] = {"result": judged.result}
    if judged.layer is not None:
        record["layer"] = judged.layer
    record |= change_record(judged.change)
    record["limit"] = judged.limit
    if judged.allowed is not None:
        record["allowed"] = float(judged.allowed)
    return record


def offenders(judged: Sequence[Judged]) -> str:
    """The names of what is over its limit, for one line: ``backward of the step, peak of the step``."""
    names = list(dict.fromkeys(f"{_METRICS[one.change.metric]} of {_layer_name(one)}" for one in judged))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
