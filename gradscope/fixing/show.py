"""A fix on a terminal, in a file, or as a string, in the shapes of the profile's report."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import TYPE_CHECKING

from gradscope import units
from gradscope.fixing.messages import (
    SiteRow,
    fold_sites,
    header_rows,
    model_alone,
    next_steps,
    notes_of,
    reason_of,
    verdict,
)
from gradscope.fixing.result import FixData, StepSide
from gradscope.report import glyphs as glyph_sets
from gradscope.report.glyphs import Glyphs
from gradscope.report.grid import Column, Grid, Line, Piece
from gradscope.report.style import heading, titled, wrapped
from gradscope.report.terminal import DEFAULT_WIDTH, print_lines

if TYPE_CHECKING:
    from rich.console import Console

_STATUS = {"kept": "strong", "undone": "hot", "refused": "dim", "found": "strong"}


def print_fix(data: FixData, console: Console | None = None, diff: str | None = None) -> None:
    """Print on ``console``, or on one made for stdout."""
    print_lines(lambda width, marks: fix_lines(data, width, marks, diff), console)


def to_text(data: FixData, width: int = DEFAULT_WIDTH, encoding: str = "utf-8", diff: str | None = None) -> str:
    """The report as plain text of at most ``width`` columns, without colour."""
    out = io.StringIO()
    for line in fix_lines(data, width, glyph_sets.for_encoding(encoding), diff):
        out.write("".join(text for text, _ in line).rstrip() + "\n")
    return out.getvalue()


def fix_lines(data: FixData, width: int, marks: Glyphs, diff: str | None) -> list[Line]:
    """The whole report as lines of styled pieces."""
    lines: list[Line] = [[(marks.text(f"gradscope {data.gradscope}"), "title")]]
    rows = header_rows(data)
    pad = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        lines += wrapped(text, width, marks, first=name.ljust(pad))
    for section in (_sites, _step, _curves, _verdict, _notes):
        body = section(data, width, marks)
        if body:
            lines += [[], *body]
    return lines + _next(data, width, marks, diff)


def _sites(data: FixData, width: int, marks: Glyphs) -> list[Line]:
    rows = fold_sites(data.sites)
    if not rows:
        return []
    tried = not data.dry_run
    grid = Grid(
        [
            Column("layer", "left", least=20, most=44, cut="front"),
            Column("source", "left", drop=1, least=12, most=32, cut="front"),
            Column("recipe", "left"),
            Column("", "left"),
            *([Column("time"), Column("memory")] if tried else [Column("~time"), Column("~memory", drop=5)]),
            *([Column("error", drop=2), Column("before", drop=4)] if tried else []),
        ]
    )
    for row in rows:
        _site_row(grid, row, marks, tried=tried, noise=data.change == "nothing")
        if row.first.reason:
            for line in wrapped(reason_of(row.first), width - 2, marks, style="dim"):
                grid.span([("  ", ""), *line])
    about = "what they would save in one pass, forward and backward; ~ is predicted"
    if tried:
        about = "what they save in a step" + _about_errors(grid.headers(width))
    return [*titled("Places", about, width, marks), *grid.lines(width, marks)]


def _about_errors(headers: Collection[str]) -> str:
    """Say what the columns of errors are, those that there is room for."""
    if "error" not in headers:
        return ""
    return "; error: of the worst gradient" + (", and before" if "before" in headers else "")


def _site_row(grid: Grid, row: SiteRow, marks: Glyphs, *, tried: bool, noise: bool) -> None:
    first, worst = row.first, row.worst
    name = row.address or "(the model)"
    count = f" ×{len(row.sites)}" if len(row.sites) > 1 else ""

    def number(text: str, style: str = "") -> list[Piece]:
        return [(marks.text(text), style)]

    if tried:
        savings = [
            number(_time_saved(row, noise=noise), "strong"),
            number(units.size(row.measured_saving_bytes), "strong"),
        ]
    else:
        savings = [
            number(_estimate(units.ns, row.predicted_saving_ns), "dim"),
            number(_estimate(units.size, row.predicted_saving_bytes), "dim"),
        ]
    errors = [number(_error(worst.max_grad_error)), number(_error(worst.original_grad_error), "dim")] if tried else []
    grid.row(
        [(marks.text(f"{name}{count}"), "")],
        [(marks.text(first.source), "dim")],
        [(marks.text(first.recipe), "")],
        [(first.status, _STATUS[first.status])],
        *savings,
        *errors,
    )


def _time_saved(row: SiteRow, *, noise: bool) -> str:
    """No figure where none can be told: a place that is kept for its memory would read as a loss of time."""
    saved = row.measured_saving_ns
    # The savings of what is kept add up to the step's: where that is noise, so are they.
    if saved is not None and ((noise and row.first.status == "kept") or not row.told):
        return "noise"
    return units.ns(saved)


def _estimate(text: object, value: int | None) -> str:
    shown: str = text(value)  # type: ignore[operator]
    return shown if value is None else f"~{shown}"


def _error(value: float | None) -> str:
    return units.NOT_MEASURED if value is None else f"{value:.1e}"


def _step(data: FixData, width: int, marks: Glyphs) -> list[Line]:
    before, after = data.before, data.after
    if before is None:
        return []
    sides = [("before", before), *([("after", after)] if after is not None else [])]
    # A profile's backward does not stand beside what was measured in turns: it is another step, by another clock.
    profiled = before.measured == "profile"
    backward = [Column("backward", drop=2)] if profiled else []
    grid = Grid([Column("", "left"), Column("time"), Column("spread"), *backward, Column("peak memory")])
    for name, side in sides:
        grid.row([(name, "")], *([(marks.text(text), "")] for text in _side(side, profiled=profiled)))
    if after is not None:
        texts = (
            _time_ratio(data, before.wall_ns / max(after.wall_ns, 1)),
            "",
            *([units.NOT_MEASURED] if profiled else []),
            _ratio(before.peak_bytes, after.peak_bytes),
        )
        grid.row([("before / after", "dim")], *([(marks.text(text), "strong")] for text in texts))
    name = "The model's part of a step" if model_alone(data) else "The whole step"
    lines = [heading(name, "", width, marks), *grid.lines(width, marks)]
    if data.loss_difference is not None:
        text = f"the loss differs by {data.loss_difference:.1e} of its value"
        lines += wrapped(text if data.loss_difference else "the loss is the same, bit for bit", width, marks)
    return lines


def _time_ratio(data: FixData, ratio: float) -> str:
    if data.change == "unknown":
        return units.NOT_MEASURED
    return "noise" if data.change == "nothing" else units.ratio(ratio)


def _side(side: StepSide, *, profiled: bool) -> tuple[str, ...]:
    spread = f"±{units.percent(side.spread['wall_ns'] / max(side.wall_ns, 1))}"
    backward = [units.ns(side.backward_ns)] if profiled else []
    return (units.ns(side.wall_ns), spread, *backward, units.size(side.peak_bytes))


def _ratio(before: int | None, after: int | None) -> str:
    return units.NOT_MEASURED if before is None or not after or after < 0 else units.ratio(before / after)


def _curves(data: FixData, width: int, marks: Glyphs) -> list[Line]:
    curves = data.curves
    if curves is None:
        return []
    lines = [
        heading(
            "The loss", f"of {len(curves.before)} backward passes from the same seed, without dropout", width, marks
        )
    ]
    if curves.before and curves.after:
        last = f"the last is {_loss(curves.before[-1])} before, {_loss(curves.after[-1])} after"
        lines += wrapped(f"{last}; the largest difference is {curves.largest_difference:.1e}", width, marks)
    return [*lines, *wrapped(curves.verdict, width, marks, style="" if curves.same else "warn")]


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6g}"


def _verdict(data: FixData, width: int, marks: Glyphs) -> list[Line]:
    lines = wrapped(verdict(data), width, marks, style="warn" if data.failed else "strong")
    if data.written:
        lines += wrapped(f"Written: {', '.join(data.written)}.", width, marks, style="strong")
    return lines


def _notes(data: FixData, width: int, marks: Glyphs) -> list[Line]:
    notes = list(notes_of(data))
    if not notes:
        return []
    lines = [heading("Notes", "how this was measured, and what was not", width, marks)]
    for note in notes:
        lines += wrapped(note, width, marks, first="- ")
    return lines


def _next(data: FixData, width: int, marks: Glyphs, diff: str | None) -> list[Line]:
    steps = next_steps(data, diff)
    if not steps:
        return []
    lines: list[Line] = [[], [("Next", "title")]]
    widest = max(len(step.command) for step in steps)
    for step in steps:
        command = marks.text(step.command)
        if widest + len(step.purpose) + 4 <= width:
            lines.append([("  ", ""), (command.ljust(widest), "command"), (marks.text(f"  {step.purpose}"), "dim")])
        else:
            lines += [[("  ", ""), (command, "command")], [("    ", ""), (marks.text(step.purpose), "dim")]]
    return lines
