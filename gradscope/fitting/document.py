"""A fit as a document, and its sentences."""

from __future__ import annotations

from collections.abc import Iterator

from gradscope import units
from gradscope.document.parts import (
    Bar,
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
    code,
    dim,
)
from gradscope.document.style import heat
from gradscope.fitting.result import FitData, FitRow, folded_growth

# From which deviation at the check on memory does not follow the batch size smoothly.
UNSTEADY = 0.05
# Share of the peak from which on what no curve explains is spoken of.
_UNMATCHED = 0.01


def header_rows(data: FitData) -> list[tuple[str, str]]:
    """(name, text) of each row above the table."""
    rows = [
        ("target", data.target or "a model in Python"),
        ("model", f"{data.model}, {units.count(data.parameters)} parameters"),
        ("optimizer", _optimizer(data)),
        ("device", _device(data)),
        ("measured", _measured(data)),
    ]
    budget = data.budget_bytes
    if budget is not None:
        given, amount = data.device_memory or "", units.size(data.device_memory_bytes)
        memory = given if given == amount.replace(" ", "") else f"{given} = {amount}"
        rows.append(
            ("memory", f"{memory} · less {data.reserve} in reserve · {units.size(budget)} for the tensors of a step")
        )
    return rows


def _optimizer(data: FitData) -> str:
    if data.optimizer is not None:
        return data.optimizer
    adam = f"; Adam's would add {units.size(data.adam_bytes)} (2 x parameters)" if data.adam_bytes else ""
    return f"none, so no optimizer state is included{adam} · add it with --optimizer adam, adamw or sgd"


def _device(data: FitData) -> str:
    device, name = str(data.environment.get("device", "?")), data.environment.get("device_name")
    parts = [f"{device} ({name})" if name and name != device else device]
    parts += [f"{key} {data.environment[key]}" for key in ("torch", "python") if data.environment.get(key)]
    return " · ".join(parts)


def _measured(data: FitData) -> str:
    used = [str(row.batch_size) for row in data.measured if row.use == "prediction"]
    parts = [f"batch sizes {', '.join(used)}"]
    check = next((row for row in data.measured if row.use == "check"), None)
    if check is not None and data.deviation is not None:
        parts.append(
            f"checked at {check.batch_size}: {units.size(check.predicted_bytes)} predicted, "
            f"{units.size(check.peak_bytes)} measured, {data.deviation * 100:+.1f} %"
        )
    else:
        parts.append("not checked")
    return " · ".join(parts)


def largest_text(data: FitData) -> str:
    """The answer in one sentence; empty where no device memory was given."""
    if data.device_memory_bytes is None:
        return ""
    if data.largest is None:
        return f"Not even batch size 1 fits: it needs {units.size(data.smallest_peak_bytes)}."
    if data.unlimited:
        return f"Every batch size up to {data.largest:,} fits; the search ended there."
    peak = units.size(data.largest_peak_bytes)
    return f"The largest batch size that fits is {data.largest}, with a peak of {peak}."


def check_text(row: FitRow) -> str:
    """What fake tensors say of a row."""
    if row.check != "corrected":
        return row.check
    sign = "+" if row.correction_bytes > 0 else "-"
    return f"corrected, {sign}{units.size(abs(row.correction_bytes))}"


def notes_of(data: FitData) -> Iterator[str]:
    """What is an estimate, and why."""
    yield from _accuracy(data)
    yield from _checks(data)
    if data.optimizer is None and data.gradient_bytes:
        yield (
            f"gradients kept during forward (gradient accumulation, "
            f"zero_grad(set_to_none=False)) would add {units.size(data.gradient_bytes)}"
        )
    if data.environment.get("device") == "cpu" and data.device_memory_bytes is not None:
        yield (
            "measured on the CPU, this is what the tensors of a step need. On a CUDA device its context (0.3 to 0.6 "
            "GiB), the allocator's rounding (512 bytes a tensor, 2 MiB a segment) and fragmentation come on top, and "
            "kernels may want other workspaces: that is what --reserve is for"
        )
    yield from data.notes


def _accuracy(data: FitData) -> Iterator[str]:
    if data.deviation is None:
        yield "the prediction was not checked against a measured batch size"
    elif abs(data.deviation) > UNSTEADY:
        yield (
            f"memory does not grow smoothly with the batch size: at the check the prediction is "
            f"{data.deviation * 100:+.1f} % off. The table gives the range of what any three of the measured sizes "
            "predict; --measure with larger sizes narrows it"
        )
    peak = data.rows[-1].peak_bytes
    if data.unmatched_bytes > _UNMATCHED * peak:
        share = units.percent(data.unmatched_bytes / peak)
        yield (
            f"{units.size(data.unmatched_bytes)} ({share}) of the peak at batch size {data.rows[-1].batch_size} is a "
            "trend only: blocks that not every measured size has, or whose sizes follow no curve"
        )


def _checks(data: FitData) -> Iterator[str]:
    if data.unchecked is not None:
        yield f"no size was checked with fake tensors: {data.unchecked}"
    for row in (row for row in data.rows if row.check == "corrected"):
        more = "more" if row.correction_bytes > 0 else "less"
        yield (
            f"at batch size {row.batch_size} the model keeps {units.size(abs(row.correction_bytes))} {more} for "
            "backward than the small sizes lead to expect: it does something else there. Its figures are corrected by "
            "that, and its temporaries are not known"
        )


_TOP_LAYERS = 10
_FITS: dict[str, Style] = {"no": "hot", "unsure": "warm"}


def fit_document(data: FitData) -> Document:
    """The answer, the peak of each batch size, and what grows with it."""
    return Document(
        title=f"gradscope {data.gradscope}",
        subject="",
        head=KeyValues(tuple(header_rows(data))),
        sections=tuple(section for section in (_sizes(data), _layers(data), _notes(data)) if section is not None),
    )


def _sizes(data: FitData) -> Section:
    ranged = any(row.low_bytes is not None for row in data.rows)
    judged = data.device_memory_bytes is not None
    columns = (
        Column("batch_size", "batch size"),
        Column("peak_bytes", "peak"),
        *([Column("range", "range")] if ranged else []),
        *([Column("fits", "fits", align="left")] if judged else []),
        Column("saved_bytes", "saved", drop=1),
        Column("model_bytes", "model", drop=2),
        Column("rest_bytes", "rest", drop=3),
        Column("check", "fake tensors", align="left", drop=4),
    )
    rows = tuple(_size_row(row, ranged=ranged, judged=judged) for row in data.rows)
    about = "predicted for one step: saved + model, gradients, optimizer + rest"
    answer = (Words(largest_text(data), "strong"),) if judged else ()
    return Section("sizes", "Peak memory", about, (Table(columns, rows), *answer))


def _size_row(row: FitRow, *, ranged: bool, judged: bool) -> Row:
    accent = _FITS.get(row.fits or "", "")
    cells = [Cell(str(row.batch_size), "strong"), Cell(units.size(row.peak_bytes), accent)]
    if ranged:
        between = "" if row.low_bytes is None else f"{units.size(row.low_bytes)} to {units.size(row.high_bytes)}"
        cells.append(Cell(between, "dim"))
    if judged:
        cells.append(Cell(row.fits or "", accent))
    cells += [Cell(units.size(value)) for value in (row.saved_bytes, row.model_bytes, row.rest_bytes)]
    return Row((*cells, Cell(check_text(row), "warn" if row.check == "corrected" else "dim")))


def _layers(data: FitData) -> Section | None:
    grown = folded_growth(data.layers, data.model)
    whole = sum(item.bytes for item in grown) + data.outside_bytes_per_sample
    if whole <= 0:
        return None
    columns = (
        Column("path", "layer", align="left", least=24, most=56, cut="front"),
        Column("class", "class", align="left", drop=3, least=9, most=22),
        Column("bytes_per_sample", "a sample"),
        Column("share", "share"),
        Column("bar", "", align="left", drop=1, least=10, most=20),
        Column("layers", "layers", drop=2),
    )
    rows = []
    for item in grown[:_TOP_LAYERS]:
        share = item.bytes / whole
        numbers = (Cell(text, heat(share)) for text in (units.size(item.bytes), units.percent(share)))
        name = (code(item.address), code(item.class_name, "dim"))
        rows.append(Row((*name, *numbers, Bar(share, share), Cell(str(item.layers)))))
    others = grown[_TOP_LAYERS:]
    rest = (
        (f"… {len(others)} more", sum(item.bytes for item in others)),
        ("outside the layers", data.outside_bytes_per_sample),
    )
    for label, amount in rest:
        if amount:
            share = amount / whole
            texts = (label, "", units.size(amount), units.percent(share))
            rows.append(Row((*dim(texts), Bar(share, share)), "rest"))
    about = f"saved for backward by the last sample of {data.growth_at}: {units.size(whole)}"
    return Section("layers", "What grows", about, (Table(columns, tuple(rows)),))


def _notes(data: FitData) -> Section | None:
    notes = tuple(notes_of(data))
    about = "what was not measured or is an estimate, and why"
    return Section("notes", "Notes", about, (Bullets(notes),)) if notes else None
