"""The report on a terminal, in a file, or as a string: a :class:`~gradscope.report.view.View` in columns.

Nothing is said by colour alone, and nothing is written that the output's encoding cannot hold.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from gradscope import units
from gradscope.report import glyphs as glyph_sets
from gradscope.report.findings import FindingRow
from gradscope.report.glyphs import Glyphs
from gradscope.report.grid import Column, Grid, Line, cut_line, width_of
from gradscope.report.layertable import layer_lines
from gradscope.report.memorytable import memory_sections
from gradscope.report.style import STYLES, heading, heat, share_bar, wrapped
from gradscope.report.tree import SAVED_MEMORY
from gradscope.report.view import View

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_WIDTH = 100
MAX_WIDTH = 160  # beyond it numbers are too far from their names


def print_view(view: View, console: Console | None = None) -> None:
    """Print on ``console``, or on one made for stdout by :func:`make_console`."""
    print_lines(lambda width, marks: view_lines(view, width, marks), console)


def print_lines(lines_of: Callable[[int, Glyphs], list[Line]], console: Console | None = None) -> None:
    """Print lines of styled pieces on ``console``, or on one made for stdout by :func:`make_console`.

    Args:
        lines_of: the lines for a width and a set of glyphs.
    """
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = console or make_console()
    marks = glyph_sets.for_encoding(console.encoding)
    styles = {name: Style.parse(text) for name, text in STYLES.items()}
    segments: list[Segment] = []
    for line in lines_of(min(console.width, MAX_WIDTH), marks):
        segments.extend(Segment(text, styles.get(style)) for text, style in line)
        segments.append(Segment.line())
    console.print(Segments(segments), end="", soft_wrap=True)


def make_console(file: IO[str] | None = None, color: bool | None = None) -> Console:
    """A console on ``file`` (default stdout).

    As wide as the terminal; :data:`DEFAULT_WIDTH` where there is none, or less if what is piped will most likely be
    read in a narrower terminal (a pager); ``COLUMNS`` overrules all. ``color`` is ``None`` for "if it is a terminal
    and ``NO_COLOR`` is not set".
    """
    from rich.console import Console

    file = sys.stdout if file is None else file
    columns = os.environ.get("COLUMNS", "")
    terminal = file.isatty()
    width = (
        int(columns)
        if columns.isdecimal() and len(columns) < 6 and int(columns) > 0
        else None
        if terminal
        else _piped_width()
    )
    return Console(
        file=file,
        width=width,
        force_terminal=terminal if color is None else color,
        no_color=None if color is None else not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def _piped_width() -> int:
    try:
        return min(DEFAULT_WIDTH, os.get_terminal_size(2).columns or DEFAULT_WIDTH)
    except OSError:  # stderr is no terminal either
        return DEFAULT_WIDTH


def to_text(view: View, width: int = DEFAULT_WIDTH, encoding: str = "utf-8") -> str:
    """The report as plain text of at most ``width`` columns, without colour."""
    out = io.StringIO()
    for line in view_lines(view, width, glyph_sets.for_encoding(encoding)):
        out.write("".join(text for text, _ in line).rstrip() + "\n")
    return out.getvalue()


def view_lines(view: View, width: int, marks: Glyphs) -> list[Line]:
    """The whole report as lines of styled pieces."""
    lines = _header(view, width, marks)
    time = [section(view, width, marks) for section in (_source_lines, _operations, _kernels, _ledger)]
    memory = memory_sections(view, width, marks)
    # Whoever sorts by memory asks about memory.
    middle = [*memory, *time] if view.tree.metric == SAVED_MEMORY else [*time, *memory]
    end = [section(view, width, marks) for section in (_findings, _notes, _next_steps)]
    for body in (layer_lines(view, width, marks), *middle, *end):
        if body:
            lines.append([])
            lines.extend(body)
    return lines


def _header(view: View, width: int, marks: Glyphs) -> list[Line]:
    lines: list[Line] = [[(marks.text(view.title), "title")]]
    if view.partial:
        lines += wrapped(view.partial, width, marks, style="warn")
    pad = max(len(name) for name, _ in view.header) + 2
    for name, text in view.header:
        lines += wrapped(text, width, marks, first=name.ljust(pad))
    return lines


def _source_lines(view: View, width: int, marks: Glyphs) -> list[Line]:
    group = view.lines
    if not group.rows:
        return []
    scale = view.scale
    grid = Grid(
        [
            Column("line", "left", least=16, most=36, cut="front"),
            Column(marks.text(f"bwd {scale.unit}")),
            Column("share"),
            *([Column("saved", drop=1)] if group.has_saved else []),
            Column("layer", "left", drop=2, least=12, most=28, cut="front"),
            Column("source", "left", least=32),
        ]
    )
    for row in group.rows:
        grid.row(
            [(marks.text(row.place), "")],
            [(scale.text(row.backward_ns), heat(row.share))],
            [(units.percent(row.share), heat(row.share))],
            *([[(units.size(row.saved_bytes), "")]] if group.has_saved else []),
            [(marks.text(row.layer), "dim")],
            [(marks.text(row.text), "")],
        )
    rest = (
        (f"… {group.more} more", group.more_ns, group.more_share, group.more_saved_bytes),
        ("no source line", group.without_ns, group.without_share, group.without_saved_bytes),
    )
    for label, spent, share, saved in rest:
        if spent or saved:
            cells = [[(marks.text(label), "dim")], [(scale.text(spent), "dim")], [(units.percent(share), "dim")]]
            cells += [[(units.size(saved), "dim")]] if group.has_saved else []
            grid.row(*cells, [], [])
    about = "backward time by the line of the forward code that caused it"
    return [heading("Source lines", about, width, marks), *grid.lines(width, marks)]


def _operations(view: View, width: int, marks: Glyphs) -> list[Line]:
    if not view.ops:
        return []
    scale = view.scale
    grid = Grid(
        [
            Column("layer / operation", "left", least=26, most=58),
            Column(marks.text(f"bwd {scale.unit}")),
            Column("share"),
            Column("calls", drop=2),
            Column("shapes", "left", drop=1, least=16),
        ]
    )
    for group in view.ops:
        name: Line = [(marks.text(group.address), "strong"), (marks.text(f"  {group.class_name}"), "dim")]
        grid.row(name, [(scale.text(group.ns), "strong")], [(units.percent(group.share), "strong")], [], [])
        for op in group.ops:
            grid.row(
                [(f"  {marks.text(op.name)}", "")],
                [(scale.text(op.ns), "")],
                [(units.percent(op.share), "")],
                [(units.calls(op.calls), "")],
                [(marks.text(op.shape), "dim")],
            )
        if group.more_ns:
            grid.row([(marks.text(f"  … {group.more} more"), "dim")], [(scale.text(group.more_ns), "dim")], [], [], [])
    about = "what the costliest layers run in backward by themselves"
    return [heading("Operations", about, width, marks), *grid.lines(width, marks)]


def _kernels(view: View, width: int, marks: Glyphs) -> list[Line]:
    if not view.kernels:
        return []
    grid = Grid(
        [
            Column("kernel", "left", least=24, most=72),
            Column("device"),
            Column("calls", drop=2),
            Column("mostly in", "left", drop=1, least=10),
        ]
    )
    for kernel in view.kernels:
        grid.row(
            [(marks.text(kernel.name), "")],
            [(marks.text(units.ns(kernel.device_ns)), "")],
            [(units.calls(kernel.calls), "")],
            [(marks.text(kernel.layer or "outside the layers"), "dim")],
        )
    return [heading("Kernels", "device time, forward and backward", width, marks), *grid.lines(width, marks)]


def _ledger(view: View, width: int, marks: Glyphs) -> list[Line]:
    grid = Grid(
        [
            Column("part", "left"),
            Column("time"),
            Column("share"),
            Column("", "left", drop=2, least=10, most=20),
            Column("", "left", drop=1, least=45),
        ]
    )
    for part in view.ledger:
        grid.row(
            [(part.name, "")],
            [(marks.text(units.ns(part.ns)), "")],
            [(part.percent, "")],
            share_bar(part.share, marks),
            [(part.meaning, "dim")],
        )
    total = (
        [("all of backward", "strong")],
        [(marks.text(units.ns(view.backward_ns)), "strong")],
        [("100.0 %", "strong")],
    )
    grid.row(*total, [], [])
    about = "every nanosecond is in exactly one row"
    return [heading("What the backward is made of", about, width, marks), *grid.lines(width, marks)]


def _findings(view: View, width: int, marks: Glyphs) -> list[Line]:
    found = view.findings
    if not found.rows and not found.more and not found.nothing:
        return []
    about = "why it is slow and what to do; savings are estimates" if found.rows else ""
    lines = [heading("Findings", about, width, marks)]
    for sentence in found.nothing:
        lines += wrapped(sentence, width, marks)
    for i, row in enumerate(found.rows, 1):
        first = f"{i}. {row.severity}: "
        style = {"critical": "hot", "warning": "warn"}.get(row.severity, "")
        lines += wrapped(row.message, width, marks, first=first, style=style)
        lines += _about_finding(row, width, marks)
    if found.more:
        rest = f"{found.more[0].upper()}{found.more[1:]}: "
        command: Line = [(marks.text(found.command), "command")]
        fits = width_of([(rest, "")]) + width_of(command) <= width
        lines += [[(rest, "dim"), *command]] if fits else [[(rest.rstrip(), "dim")], [("    ", ""), *command]]
    return lines


def _about_finding(row: FindingRow, width: int, marks: Glyphs) -> list[Line]:
    """Where, the line's text, why, what to do, how, and what for."""
    lines: list[Line] = []

    def add(label: str, text: str, style: str = "") -> None:
        if text:
            lines.extend(wrapped(text, width, marks, first=f"   {label:<7}", style=style))

    add("where", row.place)
    if row.text:
        lines.append(cut_line([(" " * 10, ""), (marks.text(row.text), "dim")], width, marks))
    add("why", row.evidence)
    add("do", row.advice)
    # Code is for copying: never cut.
    lines += [[(" " * 10, ""), (marks.text(line), "command")] for line in row.code.splitlines()]
    add("gain", row.saving, "strong")
    add("rule", f"{row.rule} · recipe {row.recipe}" if row.recipe else row.rule, "dim")
    return lines


def _notes(view: View, width: int, marks: Glyphs) -> list[Line]:
    if not view.notes:
        return []
    lines = [heading("Notes", "what was not measured or is an estimate, and why", width, marks)]
    for note in view.notes:
        lines += wrapped(note, width, marks, first="- ")
    return lines


def _next_steps(view: View, width: int, marks: Glyphs) -> list[Line]:
    if not view.next_steps:
        return []
    lines = [heading("Next", "", width, marks)]
    pad = max(len(step.purpose) for step in view.next_steps) + 2
    for step in view.next_steps:
        purpose: Line = [(marks.text(f"  {step.purpose}"), "dim")]
        command: Line = [(marks.text(step.command), "command")]
        # A command is for copying: never cut, and on a line of its own when it is long.
        fits = 2 + pad + width_of(command) <= width
        gap = " " * (pad - len(step.purpose))
        lines += [[*purpose, (gap, ""), *command]] if fits else [purpose, [("    ", ""), *command]]
    return lines
