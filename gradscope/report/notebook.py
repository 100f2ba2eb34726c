"""A report as a notebook shows it: head, tree of layers with bars, and the ledger in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradscope import units
from gradscope.report.fold import FoldedNode
from gradscope.report.fragment import MUTED, SENTENCE, WARN, Cell, bar, box, heading, line, table, text
from gradscope.report.tree import TreeRow, ViewOptions
from gradscope.report.view import View, build_view
from gradscope.tables import RunData

# Rows of the tree: what fits a screen or two, and keeps the output of a wide model small.
_MOST_ROWS = 80
_TOP = 40
_HEAD = ("target", "device", "measured", "step", "limit", "memory", "loss")
_FINDINGS = 5


def to_fragment(run: RunData, path: Path | None = None) -> str:
    """HTML without script, style sheet or request."""
    view = build_view(run, None, path)
    if len(view.tree.rows) > _MOST_ROWS:
        view = build_view(run, ViewOptions(top=_TOP), path)
    return box([*_head(view), *_layers(view), *_ledger(view), *_end(view)])


def _head(view: View) -> list[str]:
    model = dict(view.header).get("model", "")
    parts = [line(f"<b>{text(view.title)}</b> · {text(model, SENTENCE)}")]
    if view.partial:
        parts.append(line(text(view.partial, SENTENCE), f"color:{WARN};font-weight:600"))
    rows = [(name, words) for name, words in view.header if name in _HEAD]
    parts += [line(f'<span style="{MUTED}">{text(name)}</span> {text(words, SENTENCE)}') for name, words in rows]
    return parts


def _layers(view: View) -> list[str]:
    tree = view.tree
    if not tree.rows:
        return [line("no layers were seen", MUTED)]
    saved = any(row.node.total.saved_bytes is not None for row in tree.rows)
    columns: list[tuple[str, Callable[[FoldedNode], str]]] = [
        (f"fwd {view.scale.unit}", lambda node: view.scale.text(node.total.forward_ns)),
        ("bwd:fwd", lambda node: units.ratio(node.total.ratio)),
    ]
    if any(row.node.total.backward_limited is not None for row in tree.rows):
        columns[:0] = [
            (f"limit {view.scale.unit}", lambda node: view.scale.text(node.total.limit_ns())),
            ("reached", lambda node: units.percent(node.total.reached(), 0)),
            ("bound by", lambda node: node.total.bound_by() or units.NOT_MEASURED),
        ]
    if saved:
        columns.append(("saved", lambda node: units.size(node.total.saved_bytes)))
    head = [Cell("layer"), Cell("class"), Cell(f"bwd {view.scale.unit}", right=True), Cell("share", right=True)]
    head += [Cell(""), *(Cell(text(name), right=True) for name, _ in columns)]
    rows = [cells for row in tree.rows for cells in _row(row, view, columns)]
    blank = [Cell("")] * len(columns)
    for hidden in tree.hidden:
        number = view.scale.text(hidden.own.backward_ns)
        rows.append([*_muted(hidden.text, number, hidden.share), *blank])
    if tree.rest > 0:
        rows.append([*_muted("outside the layers", view.scale.text(tree.rest), tree.rest_share), *blank])
    about = "share of the backward pass: strong is the layer itself, light the layers below it"
    return [heading("Layers", about), table(head, rows)]


def _row(row: TreeRow, view: View, columns: list[tuple[str, Callable[[FoldedNode], str]]]) -> list[list[Cell]]:
    node = row.node
    name = text(node.name)
    cells = [
        Cell(f"<b>{name}</b>" if node.repeats > 1 or not row.level else name, indent=row.level),
        Cell(text(node.class_name, 32), muted=True),
        Cell(text(view.scale.text(node.total.backward_ns)), right=True),
        Cell(text(units.percent(row.share)), right=True),
        Cell(bar(row.own_share, row.share)),
        *(Cell(text(number(node)), right=True) for _, number in columns),
    ]
    if not row.outlier:
        return [cells]
    note = f'<span style="color:{WARN}">^ {text(row.outlier, 100)}</span>'
    return [cells, [Cell(note, indent=row.level, span=len(cells))]]


def _muted(words: str, number: str, share: float) -> list[Cell]:
    return [
        Cell(text(words), muted=True),
        Cell(""),
        Cell(text(number), right=True, muted=True),
        Cell(text(units.percent(share)), right=True, muted=True),
        Cell(bar(share, share)),
    ]


def _ledger(view: View) -> list[str]:
    parts = [f"{text(part.name)} {text(units.ns(part.ns))} ({text(part.percent)})" for part in view.ledger]
    total = f"<b>backward</b> {text(units.ns(view.backward_ns))}"
    return [line(f"{total} = {' + '.join(parts)}")]


def _end(view: View) -> list[str]:
    return [*_findings(view), *(line(text(note, SENTENCE), MUTED) for note in view.notes)]


def _findings(view: View) -> list[str]:
    found = view.findings
    if not found.rows and not found.more and not found.nothing:
        return []
    about = "why it is slow and what to do; savings are estimates" if found.rows else ""
    parts = [heading("Findings", about), *(line(text(each, SENTENCE)) for each in found.nothing)]
    for row in found.rows[:_FINDINGS]:
        message = text(f"{row.severity}: {row.message}", SENTENCE)
        head = f"<b>{message}</b>" if row.severity == "info" else f'<b style="color:{WARN}">{message}</b>'
        where = text(" · ".join(part for part in (row.place, row.text) if part), SENTENCE)
        below = [
            f'<span style="{MUTED}">{where}</span>' if where else "",
            text(row.evidence, SENTENCE),
            text(row.advice, SENTENCE),
            f"<code>{text(row.code, SENTENCE)}</code>" if row.code else "",
            f"<b>{text(row.saving, SENTENCE)}</b>" if row.saving else "",
        ]
        parts += [line(head), *(line(part, "padding-left:14px") for part in below if part)]
    left = len(found.rows) - _FINDINGS
    if left > 0 or found.more:
        words = [f"… {left} more {'finding' if left == 1 else 'findings'}: print(report) has them"] if left > 0 else []
        words += [f"{found.more}: report.print(min_percent=0)"] if found.more else []
        parts.append(line(text("; ".join(words), SENTENCE), MUTED))
    return parts
