"""The outcome of a check: a table for a terminal or a CI log, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradscope import __version__, units
from gradscope.compare import messages
from gradscope.compare.budgets import Checked, Judged, allowed_text
from gradscope.compare.difffile import change_record, run_record
from gradscope.compare.table import AlignedTable, Field, Row
from gradscope.compare.terminal import plain, table_lines, warning_lines
from gradscope.report import glyphs as glyph_sets
from gradscope.report.glyphs import Glyphs
from gradscope.report.grid import Line
from gradscope.report.runfile import to_record
from gradscope.report.style import wrapped
from gradscope.report.terminal import DEFAULT_WIDTH, print_lines

if TYPE_CHECKING:
    from rich.console import Console

CHECK_SCHEMA_VERSION = 1
_MOST_OK = 20  # rows within their limit that are listed; those over it are listed all
_RESULTS = {"over": "OVER", "noise": "noise", "ok": "ok"}


def print_check(checked: Checked, console: Console | None = None) -> None:
    """Print on a rich ``console``, by default on stdout."""
    print_lines(lambda width, marks: check_lines(checked, width, marks), console)


def to_text(checked: Checked, width: int = DEFAULT_WIDTH, encoding: str = "utf-8") -> str:
    """The outcome as plain text of at most ``width`` columns."""
    return plain(check_lines(checked, width, glyph_sets.for_encoding(encoding)))


def check_lines(checked: Checked, width: int, marks: Glyphs) -> list[Line]:
    """The warnings, what is over its limit, and the rest."""
    lines: list[Line] = [[(marks.text(f"gradscope {__version__}  check"), "title")]]
    if checked.comparison is not None:
        warnings = tuple(mismatch.text for mismatch in checked.comparison.mismatches)
        lines += warning_lines(warnings, width, marks)
        lines += wrapped(marks.text(str(checked.names[1])), width, marks, first="baseline  ")
    lines += wrapped(marks.text(checked.names[0]), width, marks, first="run       ")
    lines += [[], *table_lines(_table(checked), width, marks), []]
    notes = [*(checked.comparison.notes if checked.comparison is not None else ()), *checked.notes]
    for note in notes:
        lines += wrapped(marks.text(note), width, marks, first="- ")
    return [*lines, *wrapped(conclusion(checked), width, marks, style="strong")]


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


def _table(checked: Checked) -> AlignedTable:
    fields = (
        Field("", "left"),
        Field("layer", "left", least=20, most=56, cut="front"),
        Field("metric", "left"),
        Field("before"),
        Field("after"),
        Field("change"),
        Field("limit"),
        Field("noise", drop=1),
    )
    listed = [one for one in checked.judged if one.result != "ok"]
    within = [one for one in checked.judged if one.result == "ok"]
    rows = [_row(one) for one in (*listed, *within[:_MOST_OK])]
    if len(within) > _MOST_OK:
        rows.append(Row(("ok", "dim"), (f"… {len(within) - _MOST_OK} more", "dim"), *[("", "")] * 6))
    about = "OVER: beyond the limit and beyond noise; noise: only beyond the limit"
    return AlignedTable("Limits", about, fields, tuple(rows))


def _row(judged: Judged) -> Row:
    change = judged.change
    style = {"over": "hot", "noise": "warm", "ok": ""}[judged.result]
    change_text = messages.mark(change) + messages.relative(change) if change.before is not None else units.NOT_MEASURED
    return Row(
        (_RESULTS[judged.result], style),
        (_layer_name(judged), ""),
        (_METRICS[change.metric], ""),
        (messages.value(change.before, change.unit), ""),
        (messages.value(change.after, change.unit), style),
        (change_text, style),
        (allowed_text(judged), ""),
        (messages.noise(change), "dim"),
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
