"""A fix as a document."""

from __future__ import annotations

from gradscope import units
from gradscope.document.parts import (
    Bullets,
    Cell,
    Column,
    Commands,
    Document,
    KeyValues,
    Row,
    Section,
    Style,
    Table,
    Words,
    code,
    dim,
    plain,
    strong,
)
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

_STATUS: dict[str, Style] = {"kept": "strong", "undone": "worse", "refused": "dim", "found": "strong"}


def fix_document(data: FixData, diff: str | None = None) -> Document:
    """The verdict, every place with its proof, the whole step before and after; ``diff`` is where the diff lies."""
    sections = (_verdict(data), _sites(data), _step(data), _curves(data), _notes(data), _next(data, diff))
    return Document(
        title=f"gradscope {data.gradscope}",
        subject="fix",
        head=KeyValues(tuple(header_rows(data))),
        sections=tuple(section for section in sections if section is not None),
    )


def _sites(data: FixData) -> Section | None:
    rows = fold_sites(data.sites)
    if not rows:
        return None
    tried = not data.dry_run
    columns = [
        Column("path", "layer", align="left", least=20, most=44, cut="front"),
        Column("source", "source", align="left", drop=1, least=12, most=32, cut="front"),
        Column("recipe", "recipe", align="left"),
        Column("status", "verdict", align="left"),
    ]
    if tried:
        columns += [Column("measured_saving_ns", "time"), Column("measured_saving_bytes", "memory")]
        columns += [Column("max_grad_error", "grad error", drop=2), Column("original_grad_error", "original's", drop=4)]
        about = "time and memory: saved per step"
    else:
        columns += [Column("predicted_saving_ns", "~time"), Column("predicted_saving_bytes", "~memory", drop=5)]
        about = "predicted savings of one forward and backward"
    table = Table(tuple(columns), tuple(_site_row(row, tried=tried, noise=data.change == "nothing") for row in rows))
    return Section("sites", "Call sites", about, (table,))


def _site_row(row: SiteRow, *, tried: bool, noise: bool) -> Row:
    first, worst = row.first, row.worst
    count = f" ×{len(row.sites)}" if len(row.sites) > 1 else ""
    if tried:
        saved = strong([_time_saved(row, noise=noise), units.size(row.measured_saving_bytes)])
        numbers = (*saved, Cell(_error(worst.max_grad_error)), Cell(_error(worst.original_grad_error), "dim"))
    else:
        estimates = (row.predicted_saving_ns, units.ns), (row.predicted_saving_bytes, units.size)
        numbers = dim([text(value) if value is None else f"~{text(value)}" for value, text in estimates])
    name = Cell(row.address or "(the model)", code=bool(row.address), after=count)
    place = (name, code(first.source, "dim"), code(first.recipe), Cell(first.status, _STATUS[first.status]))
    return Row((*place, *numbers), note=reason_of(first) if first.reason else "", note_style="dim")


def _time_saved(row: SiteRow, *, noise: bool) -> str:
    """No figure where none can be told: a place that is kept for its memory would read as a loss of time."""
    saved = row.measured_saving_ns
    # The savings of what is kept add up to the step's: where that is noise, so are they.
    if saved is not None and ((noise and row.first.status == "kept") or not row.told):
        return "noise"
    return units.ns(saved)


def _error(value: float | None) -> str:
    return units.NOT_MEASURED if value is None else f"{value:.1e}"


def _step(data: FixData) -> Section | None:
    before, after = data.before, data.after
    if before is None:
        return None
    # A profile's backward is no comparison for what was measured in alternation: another step, by another clock.
    profiled = before.measured == "profile"
    columns = (
        Column("side", "", align="left"),
        Column("wall_ns", "time"),
        Column("spread", "spread"),
        *([Column("backward_ns", "backward", drop=2)] if profiled else []),
        Column("peak_bytes", "peak memory"),
    )
    rows = [Row(plain(["before", *_side(before, profiled=profiled)]))]
    if after is not None:
        rows.append(Row(plain(["after", *_side(after, profiled=profiled)])))
        between = ["", units.NOT_MEASURED] if profiled else [""]
        times, peaks = before.wall_ns / max(after.wall_ns, 1), _ratio(before.peak_bytes, after.peak_bytes)
        rows.append(Row((Cell("before / after", "dim"), *strong([_time_ratio(data, times), *between, peaks]))))
    name = "The model's part of a step" if model_alone(data) else "The whole step"
    blocks: list[Table | Words] = [Table(columns, tuple(rows))]
    if data.loss_difference is not None:
        text = f"the loss differs by {data.loss_difference:.1e} of its value"
        blocks.append(Words(text if data.loss_difference else "the loss is the same, bit for bit"))
    # A profile's peak has all that is allocated.
    about = "" if profiled or before.peak_bytes is None else "peak memory: above what was allocated when it began"
    return Section("step", name, about, tuple(blocks))


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


def _curves(data: FixData) -> Section | None:
    curves = data.curves
    if curves is None:
        return None
    words = [Words(curves.verdict, "" if curves.same else "warn")]
    if curves.before and curves.after:
        last = f"the last is {_loss(curves.before[-1])} before, {_loss(curves.after[-1])} after"
        words.insert(0, Words(f"{last}; the largest difference is {curves.largest_difference:.1e}"))
    about = f"over {len(curves.before)} backward passes from the same seed, dropout off"
    return Section("loss", "The loss", about, tuple(words))


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6g}"


def _verdict(data: FixData) -> Section:
    words = [Words(verdict(data), "warn" if data.failed else "strong")]
    if data.written:
        words.append(Words(f"Written: {', '.join(data.written)}.", "strong"))
    return Section("verdict", "Result", "", tuple(words))


def _notes(data: FixData) -> Section | None:
    notes = tuple(notes_of(data))
    return Section("notes", "Notes", "how this was measured, and what was not", (Bullets(notes),)) if notes else None


def _next(data: FixData, diff: str | None) -> Section | None:
    steps = tuple(next_steps(data, diff))
    return Section("next", "Next", "", (Commands(steps),)) if steps else None
