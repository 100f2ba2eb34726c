"""The report as GitHub-flavoured Markdown, to paste into a pull request or an issue."""

from __future__ import annotations

from collections.abc import Sequence

from gradscope import units
from gradscope.report.tree import TreeRow
from gradscope.report.view import View

_INDENT = "&nbsp;&nbsp;&nbsp;"  # leading blanks vanish in a Markdown table


def to_markdown(view: View) -> str:
    """The view's header, layers, lines, ledger, findings and notes as Markdown that ends in a newline."""
    parts = [
        _header(view),
        _layers(view),
        _lines(view),
        _ledger(view),
        _findings(view),
        _list("Notes", view.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(view: View) -> str:
    lines = [f"### {escape(view.title)}"]
    if view.partial:
        lines.append(f"**{escape(view.partial)}**")
    lines.append("\n".join(f"- **{name}**: {escape(text)}" for name, text in view.header))
    return "\n\n".join(lines)


def _layers(view: View) -> str:
    tree = view.tree
    if not tree.rows:
        return ""
    scale = view.scale
    head = ["layer", "class", f"share of {tree.metric}", f"backward {scale.unit}", f"self {scale.unit}"]
    head += [f"forward {scale.unit}", "bwd:fwd", "calls"]
    rows = [
        [
            _label(row),
            f"`{_code(row.node.class_name)}`" if row.node.class_name else "",
            units.percent(row.share),
            scale.text(row.node.total.backward_ns),
            scale.text(row.node.own.backward_self_ns),
            scale.text(row.node.total.forward_ns),
            units.ratio(row.node.total.ratio),
            units.calls(row.node.calls) if row.node.calls else units.NOT_MEASURED,
        ]
        for row in tree.rows
    ]
    for hidden in tree.hidden:
        own = hidden.own
        times = [scale.text(own.backward_ns), scale.text(own.backward_self_ns), scale.text(own.forward_ns)]
        rows.append([escape(hidden.text), "", units.percent(hidden.share), *times, units.ratio(own.ratio), ""])
    if tree.rest > 0 and tree.metric in ("backward", "forward"):
        rest = scale.text(tree.rest)
        times = [rest, "", ""] if tree.metric == "backward" else ["", "", rest]
        rows.append(["outside the layers", "", units.percent(tree.rest_share), *times, "", ""])
    odd = [f"- {escape(row.outlier)}" for row in tree.rows if row.outlier]
    table = _table(head, rows, left=2)
    return f"#### Layers\n\n{table}" + ("\n\n" + "\n".join(odd) if odd else "")


def _label(row: TreeRow) -> str:
    text = f"`{_code(row.node.label)}`"
    if row.node.repeats > 1:
        text += f" ×{row.node.repeats}"
    return _INDENT * row.level + text


def _lines(view: View) -> str:
    group = view.lines
    if not group.rows:
        return ""
    scale = view.scale
    rows = [
        [
            f"`{_code(row.place)}`",
            scale.text(row.backward_ns),
            units.percent(row.share),
            f"`{_code(row.layer)}`" if row.layer else "",
            f"`{_code(row.text)}`" if row.text else "",
        ]
        for row in group.rows
    ]
    if group.more_ns:
        rows.append([f"… {group.more} more", scale.text(group.more_ns), units.percent(group.more_share), "", ""])
    if group.without_ns:
        rows.append(["no source line", scale.text(group.without_ns), units.percent(group.without_share), "", ""])
    head = ["line", f"backward {scale.unit}", "share", "layer", "source"]
    return f"#### Source lines\n\n{_table(head, rows, left=1, left_from=3)}"


def _ledger(view: View) -> str:
    rows = [[part.name, units.ns(part.ns), part.percent, part.meaning] for part in view.ledger]
    rows.append(["**all of backward**", f"**{units.ns(view.backward_ns)}**", "**100.0 %**", ""])
    return "#### What the backward is made of\n\n" + _table(["part", "time", "share", ""], rows, left=1, left_from=3)


def _findings(view: View) -> str:
    items = []
    for finding in view.findings:
        where = f" (`{_code(finding.line)}`)" if finding.line else ""
        saving = f"; saves about {units.ns(finding.predicted_saving_ns)}" if finding.predicted_saving_ns else ""
        recipe = f"; recipe `{_code(finding.recipe)}`" if finding.recipe else ""
        items.append(
            f"- **{finding.severity}**: {escape(finding.message)}{where}. {escape(finding.evidence)}{recipe}{saving}"
        )
    return "#### Findings\n\n" + "\n".join(items) if items else ""


def _list(title: str, items: Sequence[str]) -> str:
    return f"#### {title}\n\n" + "\n".join(f"- {escape(item)}" for item in items) if items else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int, left_from: int | None = None) -> str:
    """A table whose first ``left`` columns, and those from ``left_from`` on, are aligned left."""
    after = len(head) if left_from is None else left_from
    rules = ["---" if i < left or i >= after else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rules, *rows))


def escape(text: str) -> str:
    """``text`` as it is, on one line: nothing in it is Markdown or HTML."""
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{char}" if char in "\\`*_[]|~#" else char for char in flat)


def _code(text: str) -> str:
    """``text`` for use between backticks in a table's cell."""
    return " ".join(text.split()).replace("`", "'").replace("|", "\\|")
