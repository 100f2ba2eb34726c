"""The ranks of a program as a document: who waits for whom, each rank's step, and the layers that differ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from gradscope import __version__, units
from gradscope.document.parts import (
    Bullets,
    Cell,
    Column,
    Document,
    KeyValues,
    Row,
    Section,
    Table,
    Words,
    code,
    plain,
)
from gradscope.ranks.merged import LEAST_SHARE, Merged, RankLayer, RankStep, Straggler

TOP = 12
_SHOWN = 0.005  # of a step's own work: layers that differ by less, or communicate less, are left out


def ranks_document(merged: Merged, top: int = TOP) -> Document:
    """The document of ``merged``, with at most ``top`` layers a table."""
    return Document(
        title=f"gradscope {__version__}",
        subject="ranks",
        head=KeyValues((("target", merged.target), ("ranks", _header(merged)))),
        sections=ranks_sections(merged, top),
    )


def ranks_sections(merged: Merged, top: int = TOP) -> tuple[Section, ...]:
    """The sections alone, as they stand behind the first rank's report."""
    sections = [_verdict(merged), _steps(merged), _layers(merged, top), _communication(merged, top)]
    if merged.notes:
        sections.append(Section("notes", "Notes", "what could not be compared", (Bullets(merged.notes),)))
    return tuple(section for section in sections if section is not None)


def _header(merged: Merged) -> str:
    walls = [step.wall_ns for step in merged.ranks]
    low, high = units.ns(min(walls)), units.ns(max(walls))
    return f"{len(merged.ranks)} of {merged.world_size} · a step of {low}" + ("" if low == high else f" to {high}")


def _verdict(merged: Merged) -> Section:
    one = merged.straggler
    if one is None:
        return Section("straggler", "Straggler", "", (Words(_nobody(merged)),))
    share = one.saves_ns / max(step.wall_ns for step in merged.ranks)
    slow = ", ".join(map(str, one.ranks[:4])) + (f" and {len(one.ranks) - 4} more" if len(one.ranks) > 4 else "")
    who = f"Rank {slow} works" if len(one.ranks) == 1 else f"Ranks {slow} work"
    waits = "waits" if len(one.ranks) == 1 else "wait"
    text = (
        f"{who} {units.ns(one.more_ns)} a step longer than the others, and {waits} least: they wait for "
        f"{'it' if len(one.ranks) == 1 else 'them'}.{_where(merged, one)} Without that a step would be up to "
        f"{units.ns(one.saves_ns)} shorter ({units.percent(share)})."
    )
    return Section("straggler", "Straggler", "", (Words(text, "warm"),))


def _where(merged: Merged, one: Straggler) -> str:
    """In which layer they work longer, where one has much of it."""
    layers = [
        layer for layer in merged.layers if layer.slowest in one.ranks and not set(layer.own_ns) <= set(one.ranks)
    ]
    if not layers:
        return ""
    worst = max(layers, key=lambda layer: layer.more_than(one.ranks))
    if worst.more_than(one.ranks) <= 0.2 * one.more_ns:
        return ""
    there, elsewhere = worst.own_ns[worst.slowest], worst.beside(one.ranks)
    return f" {worst.path or worst.class_name} takes {units.ns(there)} there and {units.ns(elsewhere)} elsewhere."


def _nobody(merged: Merged) -> str:
    """Why no rank is called slow."""
    own = [step.own_ns for step in merged.ranks]
    text = f"own work is {units.ns(min(own))} to {units.ns(max(own))} a step"
    if not merged.communicates:
        return f"No rank waits for another: none had a collective in its steps; {text}."
    within = max(own) - min(own) > LEAST_SHARE * min(own) and merged.spread_ns > 0
    return f"No rank stands out: {text}{f', known to ±{units.ns(merged.spread_ns)}' if within else ''}."


def _steps(merged: Merged) -> Section:
    scale = units.time_scale(max(step.wall_ns for step in merged.ranks))
    columns = (
        Column("rank", "rank", align="left"),
        Column("wall_ns", "step", scale.unit),
        Column("own_ns", "own work", scale.unit),
        Column("communication_ns", "with others", scale.unit),
        Column("share", "share"),
        Column("peak_bytes", "peak memory", drop=1),
        Column("mark", "", align="left", drop=2),
    )
    least = min(step.communication_ns for step in merged.ranks)
    rows = [Row(_step_cells(step, merged, scale, least)) for step in merged.ranks]
    about = "of a mean step; with others: collectives, and waits for the other ranks"
    return Section("ranks", "Ranks", about, (Table(columns, tuple(rows)),))


def _step_cells(step: RankStep, merged: Merged, scale: units.TimeScale, least: int) -> tuple[Cell, ...]:
    slow = merged.straggler is not None and step.rank in merged.straggler.ranks
    marks = ["works longer"] * slow + ["waits least"] * (step.communication_ns == least and merged.communicates)
    return (
        Cell(str(step.rank), "strong"),
        *plain([scale.text(step.wall_ns), scale.text(step.own_ns), scale.text(step.communication_ns)]),
        Cell(units.percent(step.communication_ns / step.wall_ns if step.wall_ns else 0.0)),
        Cell("" if step.peak_bytes is None else units.size(step.peak_bytes)),
        Cell(", ".join(marks), "warm" if slow else "dim"),
    )


def _layers(merged: Merged, top: int) -> Section | None:
    own = statistics.median(step.own_ns for step in merged.ranks)
    shown = [layer for layer in merged.layers if len(layer.own_ns) > 1 and layer.more_ns > _SHOWN * own]
    shown.sort(key=lambda layer: -layer.more_ns)
    if not shown:
        return None
    scale = units.time_scale(max(max(layer.own_ns.values()) for layer in shown))
    columns = (*_layer_columns(scale), Column("slowest_rank", "slowest"), Column("ratio", "others"))
    rows = _first(top, [Row(_own_cells(layer, scale)) for layer in shown])
    about = "own work in forward and backward, over the ranks; others: the slowest beside the median of the others"
    return Section("layers", "Layers that differ", about, (Table(columns, rows),))


def _own_cells(layer: RankLayer, scale: units.TimeScale) -> tuple[Cell, ...]:
    ratio = layer.own_ns[layer.slowest] / layer.others_ns if layer.others_ns > 0 else 0.0
    return (
        *_layer_cells(layer, layer.own_ns, scale),
        Cell(f"rank {layer.slowest}"),
        Cell(units.ratio(ratio) if ratio else "-"),
    )


def _communication(merged: Merged, top: int) -> Section | None:
    wall = statistics.median(step.wall_ns for step in merged.ranks)
    shown = [layer for layer in merged.layers if max(layer.communication_ns.values()) > _SHOWN * wall]
    shown.sort(key=lambda layer: -statistics.median(layer.communication_ns.values()))
    if not shown:
        return None
    scale = units.time_scale(max(max(layer.communication_ns.values()) for layer in shown))
    rows = _first(top, [Row(_layer_cells(layer, layer.communication_ns, scale)) for layer in shown])
    about = "for each layer, forward and backward, over the ranks; waits for a slow rank are in it"
    return Section("communication", "Communication", about, (Table(_layer_columns(scale), rows),))


def _layer_columns(scale: units.TimeScale) -> tuple[Column, ...]:
    """Of a layer, and a time over the ranks."""
    return (
        Column("path", "layer", align="left", least=12, most=48, cut="front"),
        Column("class", "class", align="left", drop=2),
        Column("min_ns", "min", scale.unit),
        Column("median_ns", "median", scale.unit),
        Column("max_ns", "max", scale.unit),
    )


def _layer_cells(layer: RankLayer, by_rank: Mapping[int, int], scale: units.TimeScale) -> tuple[Cell, ...]:
    values = list(by_rank.values())
    three = (min(values), statistics.median(values), max(values))
    return (
        code(layer.path or layer.class_name),
        code(layer.class_name, "dim"),
        *plain([scale.text(round(value)) for value in three]),
    )


def _first(top: int, rows: Sequence[Row]) -> tuple[Row, ...]:
    """So many of them, and how many more there are."""
    rest = (Row((Cell(f"… {len(rows) - top} more", "dim"),), "rest"),) if rows[top:] else ()
    return (*rows[:top], *rest)
