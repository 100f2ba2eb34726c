"""The table of layers that changed in time. Its rows, shown or summed up, add up to the change of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gradscope import units
from gradscope.compare import messages
from gradscope.compare.changes import Comparison, GroupChange
from gradscope.compare.options import DiffOptions
from gradscope.document.parts import Cell, Column, Row, Section, Style, Table, code, plain


def is_changed(group: GroupChange) -> bool:
    """Check that the group's backward or forward differs by more than noise."""
    return bool(group.backward.real or group.forward.real)


def is_listed(group: GroupChange) -> bool:
    """Check that the table lists the group: it changed, or differs where one step tells nothing of noise."""
    return is_changed(group) or None in (group.backward.real, group.forward.real)


def changed_layers(comparison: Comparison, options: DiffOptions) -> Section | None:
    """Layers whose own time changed, and sums of all others."""
    shown, more, rest = choose(comparison, options)
    before, after = comparison.before.step, comparison.after.step
    scale = units.time_scale(max(before.backward_ns, after.backward_ns, before.forward_ns, after.forward_ns))
    estimated = any(group.estimated is not None for group in shown)
    columns = (
        Column("path", "layer", align="left", least=24, most=56, cut="front"),
        Column("class", "class", align="left", drop=4, least=9, most=24),
        Column("backward_before", "bwd before"),
        Column("backward_after", "bwd after"),
        Column("change", "change"),
        Column("percent", "%", drop=1),
        Column("noise", "noise", drop=3),
        Column("forward_change", "fwd change"),
        Column("of_step", "of step", drop=2),
        *([Column("estimated", "est.", drop=5)] if estimated else []),
    )
    rows = [_layer_row(group, scale, comparison.before.step.wall_ns, estimated=estimated) for group in shown]
    if rows or more:
        rows += _sums(comparison, more, rest, scale, options)
    about = f"own time in {scale.unit} a step; {messages.WITHIN_NOISE} within noise"
    if any(None in (group.backward.real, group.forward.real) for group in shown):
        about = f"own time in {scale.unit} a step; {messages.NOT_KNOWN} one step does not say whether it is noise"
    return Section("layers", "Layers", about, (Table(columns, tuple(rows)),)) if rows else None


def choose(
    comparison: Comparison, options: DiffOptions
) -> tuple[list[GroupChange], list[GroupChange], list[GroupChange]]:
    """The groups to show, sorted; those for which there was no room; all others."""
    wanted = [group for group in comparison.groups if is_listed(group) or (options.within_noise and _effect_ns(group))]
    listed = sorted(wanted, key=lambda one: _rank(one, options))
    least = options.min_percent / 100 * comparison.before.step.wall_ns
    shown = [group for group in listed if _size_ns(group) >= least][: options.top]
    kept = {id(group) for group in shown}
    more = [group for group in listed if id(group) not in kept]
    changed = {id(group) for group in listed}
    return shown, more, [group for group in comparison.groups if id(group) not in changed]


def _effect_ns(group: GroupChange) -> int:
    """The time that the change of a group adds to the step."""
    return (group.backward.difference or 0) + (group.forward.difference or 0)


def _size_ns(group: GroupChange) -> int:
    """The larger change of its two times, which may cancel each other out."""
    return max(abs(group.backward.difference or 0), abs(group.forward.difference or 0))


def _rank(group: GroupChange, options: DiffOptions) -> float:
    """Smallest first: the negated size of the change."""
    if options.sort == "backward":
        return -abs(group.backward.difference or 0)
    if options.sort == "forward":
        return -abs(group.forward.difference or 0)
    if options.sort == "ratio":
        return -_distance(group.backward.before or 0, group.backward.after or 0)
    return -abs(_effect_ns(group))


def _distance(before: int, after: int) -> float:
    """How far the ratio is from one, in either direction."""
    if before == after:
        return 0.0
    return abs(math.log(after / before)) if before > 0 and after > 0 else math.inf


def _layer_row(group: GroupChange, scale: units.TimeScale, step_ns: int, *, estimated: bool) -> Row:
    backward, forward = group.backward, group.forward
    style = style_of(_effect_ns(group)) if is_changed(group) else "dim"
    changed = style if backward.real else "dim"
    differences = [messages.mark(one) + messages.signed_on(scale, one.difference) for one in (backward, forward)]
    noise = f"±{scale.text(backward.noise)}" if backward.noise is not None else messages.NOT_KNOWN
    return Row(
        (
            layer_cell(group.address, len(group.paths)),
            code(group.class_name, "dim"),
            *plain([scale.text(backward.before), scale.text(backward.after)]),
            Cell(differences[0], changed),
            Cell(messages.relative(backward), changed),
            Cell(noise, "dim"),
            Cell(differences[1], style if forward.real else "dim"),
            Cell(messages.signed_percent(_effect_ns(group) / step_ns if step_ns else None), style),
            *([Cell(units.percent(group.estimated or 0.0, 0), "dim")] if estimated else []),
        )
    )


def layer_cell(address: str, repeats: int) -> Cell:
    """Make the cell of a layer's name: ``h.*.attn ×12``."""
    return Cell(address, code=True, after=f" ×{repeats}" if repeats > 1 else "")


def style_of(difference: int) -> Style:
    """An accent; the sign says the same."""
    return "worse" if difference > 0 else "strong"


def _sums(
    comparison: Comparison,
    more: Sequence[GroupChange],
    rest: Sequence[GroupChange],
    scale: units.TimeScale,
    options: DiffOptions,
) -> list[Row]:
    """Rows of the sums: of what is not shown, line by line, and of the whole."""
    before, after = comparison.before, comparison.after
    lines = [
        (f"… {_count(more)} more changed", _sum(more)),
        (f"{messages.layers(_count(rest))} {'unchanged' if options.within_noise else 'within noise'}", _sum(rest)),
        (f"{messages.layers(sum(one.layers for one in comparison.new))} new", _present(comparison, 1)),
        (f"{messages.layers(sum(one.layers for one in comparison.removed))} removed", _present(comparison, -1)),
    ]
    whole = (before.step.backward_ns, after.step.backward_ns, before.step.forward_ns, after.step.forward_ns)
    inside = [_sum(comparison.groups), _present(comparison, 1), _present(comparison, -1)]
    outside = tuple(all_of - sum(part[i] for part in inside) for i, all_of in enumerate(whole))
    lines.append(("outside the layers", outside))
    rows = [_sum_row(label, values, scale, before.step.wall_ns, "dim") for label, values in lines if any(values)]
    return [*rows, _sum_row("all", whole, scale, before.step.wall_ns, "strong")]


def _sum_row(label: str, values: tuple[int, ...], scale: units.TimeScale, step_ns: int, style: Style) -> Row:
    before, after, forward_before, forward_after = values
    backward, forward = after - before, forward_after - forward_before
    percent = messages.signed_percent(backward / before) if before else ""
    texts = (
        label,
        "",
        scale.text(before),
        scale.text(after),
        messages.signed_on(scale, backward),
        percent,
        "",
        messages.signed_on(scale, forward),
        messages.signed_percent((backward + forward) / step_ns if step_ns else None),
    )
    return Row(tuple(Cell(text, style) for text in texts), "whole" if style == "strong" else "rest")


def _count(groups: Iterable[GroupChange]) -> int:
    return sum(len(group.paths) for group in groups)


def _sum(groups: Sequence[GroupChange]) -> tuple[int, ...]:
    """Backward before and after, forward before and after."""
    changes = [(group.backward, group.forward) for group in groups]
    amounts = [(one.before, one.after, other.before, other.after) for one, other in changes]
    return tuple(sum(values) for values in zip((0, 0, 0, 0), *amounts, strict=True))


def _present(comparison: Comparison, side: int) -> tuple[int, ...]:
    """Sum the new layers (1) or the removed ones (-1), as :func:`_sum` sums changes."""
    found = comparison.new if side > 0 else comparison.removed
    backward, forward = sum(one.backward_ns for one in found), sum(one.forward_ns for one in found)
    return (0, backward, 0, forward) if side > 0 else (backward, 0, forward, 0)
