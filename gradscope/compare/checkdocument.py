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

CHECK_SCHEMA_VERSION = 2
_MOST = 20  # rows of one result that are listed; those over their limit are listed all
_RESULTS = {"over": "OVER", "inconclusive": "inconclusive", "ok": "ok"}
_MORE = "Measure more steps (gradscope profile --steps 20) on a quiet machine, or raise the limit."


def passes(checked: Checked, *, strict: bool = False) -> bool:
    """Check that no value is over its limit and, where ``strict``, that noise hides none of the limits."""
    return not checked.over and not (strict and checked.inconclusive)


def check_document(checked: Checked, *, strict: bool = False) -> Document:
    """The warnings, what is over its limit, the rest, and the conclusion; ``strict`` as of :func:`passes`."""
    names = [("run", checked.names[0])]
    warning, notes = "", list(checked.notes)
    reasons: tuple[str, ...] = ()
    if checked.comparison is not None:
        reasons = tuple(mismatch.text for mismatch in checked.comparison.mismatches)
        warning = WARNING if reasons else ""
        names.insert(0, ("baseline", str(checked.names[1])))
        notes = [*checked.comparison.notes, *notes]
    notes += [f"inconclusive: {hidden_text(one)}" for one in checked.inconclusive[:_MOST]]
    end: tuple[Words | Bullets, ...] = (
        Words(conclusion(checked, strict=strict), "strong"),
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


def hidden_text(judged: Judged) -> str:
    """``backward of the step: cannot see below 49 %``."""
    share = judged.visible
    seen = (
        "noise is not known" if share is None else f"cannot see below {units.percent(share, 0 if share > 0.1 else 1)}"
    )
    return f"{_name(judged)}: {seen}"


def conclusion(checked: Checked, *, strict: bool = False) -> str:
    """``FAILED: 2 of 5 limits are exceeded.``"""
    many = len(checked.judged)
    hidden = len(checked.inconclusive)
    if checked.over:
        over = len(checked.over)
        verb = "is" if over == 1 else "are"
        more = f" {hidden} {'is' if hidden == 1 else 'are'} inconclusive: noise hides the limit." if hidden else ""
        return f"FAILED: {over} of {many} {'value' if many == 1 else 'values'} {verb} over the limit.{more}"
    if hidden:
        rest = "" if hidden == many else "; the others are within the limit"
        failed = "FAILED (--strict): " if strict else ""
        values = f"{hidden} of {many} {'value is' if many == 1 else 'values are' if hidden > 1 else 'values is'}"
        return f"{failed}INCONCLUSIVE: {values} inconclusive, because noise hides the limit{rest}. {_MORE}"
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
    rows = [_row(one) for one in checked.over]
    for result in ("inconclusive", "ok"):
        found = [one for one in checked.judged if one.result == result]
        rows += [_row(one) for one in found[:_MOST]]
        if len(found) > _MOST:
            rows.append(Row(dim([result, f"… {len(found) - _MOST} more"]), "rest"))
    about = "OVER: beyond the limit and beyond noise; inconclusive: noise hides the limit"
    return Section("limits", "Limits", about, (Table(columns, tuple(rows)),))


def _row(judged: Judged) -> Row:
    change = judged.change
    styles: dict[str, Style] = {"over": "worse", "inconclusive": "warm"}
    style = styles.get(judged.result, "")
    change_text = messages.mark(change) + messages.relative(change) if change.before is not None else units.NOT_MEASURED
    before, after = (messages.value(amount, change.unit) for amount in (change.before, change.after))
    names = Cell(_RESULTS[judged.result], style), Cell(_layer_name(judged), code=bool(judged.layer))
    changed = Cell(_METRICS[change.metric]), Cell(before), Cell(after, style), Cell(change_text, style)
    return Row((*names, *changed, Cell(allowed_text(judged)), Cell(messages.noise(change), "dim")))


def _layer_name(judged: Judged) -> str:
    return "the step" if judged.layer is None else judged.layer or "the root"


_METRICS = {
    "backward_ns": "backward",
    "backward_total_ns": "backward",
    "peak_bytes": "peak",
    "saved_bytes": "saved",
}


def to_json(checked: Checked, *, strict: bool = False) -> str:
    """The outcome as JSON text that ends in a newline; docs/compare.md says what each field means."""
    comparison = checked.comparison
    record: dict[str, Any] = {
        "kind": "check",
        "schema_version": CHECK_SCHEMA_VERSION,
        "gradscope": __version__,
        "passed": passes(checked, strict=strict),
        "result": "over" if checked.over else "inconclusive" if checked.inconclusive else "ok",
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
    if judged.visible is not None and judged.allowed is not None:
        record["visible"] = judged.visible
    return record


def offenders(judged: Sequence[Judged]) -> str:
    """The names of what is over its limit, for one line: ``backward of the step, peak of the step``."""
    return messages.named(list(dict.fromkeys(_name(one) for one in judged)))


def _name(judged: Judged) -> str:
    return f"{_METRICS[judged.change.metric]} of {_layer_name(judged)}"


def hidden(judged: Sequence[Judged]) -> str:
    """What noise hides, for one line: ``backward of the step: cannot see below 49 %``."""
    return messages.named([hidden_text(one) for one in judged])
