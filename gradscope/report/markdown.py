"""The report as GitHub-flavoured Markdown, to paste into a pull request or an issue."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from gradscope import units
from gradscope.report.findings import FindingRow
from gradscope.report.layer_cost import Amounts
from gradscope.report.memory import Copy, Holder, KeptTensors, Largest, MemoryView
from gradscope.report.tree import SAVED_MEMORY, TreeRow
from gradscope.report.view import View
from gradscope.safe_text import visible

# Of a layer's own amounts, of those with all below it, and of its calls: None for several layers.
_Text: TypeAlias = Callable[[Amounts, Amounts, float | None], str]
# What begins a list or underlines a title, at the start of a line.
_LIST = re.compile(r"^(\d*)([-+=.)])(?![^\s=-])")
_INDENT = "&nbsp;&nbsp;&nbsp;"  # leading blanks vanish in a Markdown table


def to_markdown(view: View) -> str:
    """The view's header, layers, lines, ledger, memory, findings and notes as Markdown that ends in a newline."""
    parts = [
        _header(view),
        _layers(view),
        _lines(view),
        _ledger(view),
        *(_memory(view.memory) if view.memory is not None else ()),
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
    columns = _columns(view)
    head = ["layer", "class", f"share of {tree.metric}", *(title for title, _ in columns)]
    rows = [
        [
            _label(row),
            f"`{_code(row.node.class_name)}`" if row.node.class_name else "",
            units.percent(row.share),
            *(text(row.node.own, row.node.total, row.node.calls) for _, text in columns),
        ]
        for row in tree.rows
    ]
    for hidden in tree.hidden:
        numbers = [text(hidden.own, hidden.own, None) for _, text in columns]
        rows.append([escape(hidden.text), "", units.percent(hidden.share), *numbers])
    if tree.rest > 0:
        of_metric = "saved" if tree.metric == SAVED_MEMORY else f"{tree.metric} {view.scale.unit}"
        rest = units.size(tree.rest) if tree.metric == SAVED_MEMORY else view.scale.text(tree.rest)
        numbers = [rest if title == of_metric else "" for title, _ in columns]
        rows.append(["outside the layers", "", units.percent(tree.rest_share), *numbers])
    odd = [f"- {escape(row.outlier)}" for row in tree.rows if row.outlier]
    table = _table(head, rows, left=2)
    return f"#### Layers\n\n{table}" + ("\n\n" + "\n".join(odd) if odd else "")


def _columns(view: View) -> list[tuple[str, _Text]]:
    """The columns of numbers that this run has values for, and the text of each."""
    scale, amounts = view.scale, [row.node.total for row in view.tree.rows]
    columns: list[tuple[str, _Text]] = [
        (f"backward {scale.unit}", lambda own, total, calls: scale.text(total.backward_ns))
    ]
    if any(each.backward_limited is not None for each in amounts):
        columns += [
            (f"limit {scale.unit}", lambda own, total, calls: scale.text(total.limit_ns())),
            ("reached", lambda own, total, calls: units.percent(total.reached(), 0)),
            ("bound by", lambda own, total, calls: total.bound_by() or units.NOT_MEASURED),
        ]
    columns += [
        (f"self {scale.unit}", lambda own, total, calls: scale.text(own.backward_self_ns)),
        (f"forward {scale.unit}", lambda own, total, calls: scale.text(total.forward_ns)),
        ("bwd:fwd", lambda own, total, calls: units.ratio(total.ratio)),
        (
            "calls",
            lambda own, total, calls: "" if calls is None else units.calls(calls) if calls else units.NOT_MEASURED,
        ),
    ]
    if any(each.saved_bytes is not None for each in amounts):
        columns.append(("saved", lambda own, total, calls: units.size(total.saved_bytes)))
    return columns


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

    def numbers(spent: int, share: float, saved: int | None) -> list[str]:
        return [scale.text(spent), units.percent(share), *([units.size(saved)] if group.has_saved else [])]

    rows = [
        [
            f"`{_code(row.place)}`",
            *numbers(row.backward_ns, row.share, row.saved_bytes),
            f"`{_code(row.layer)}`" if row.layer else "",
            f"`{_code(row.text)}`" if row.text else "",
        ]
        for row in group.rows
    ]
    if group.more_ns or group.more_saved_bytes:
        more = numbers(group.more_ns, group.more_share, group.more_saved_bytes)
        rows.append([f"… {group.more} more", *more, "", ""])
    if group.without_ns or group.without_saved_bytes:
        without = numbers(group.without_ns, group.without_share, group.without_saved_bytes)
        rows.append(["no source line", *without, "", ""])
    head = ["line", f"backward {scale.unit}", "share", *(["saved"] if group.has_saved else []), "layer", "source"]
    return f"#### Source lines\n\n{_table(head, rows, left=1, left_from=len(head) - 2)}"


def _ledger(view: View) -> str:
    rows = [[part.name, units.ns(part.ns), part.percent, part.meaning] for part in view.ledger]
    rows.append(["**all of backward**", f"**{units.ns(view.backward_ns)}**", "**100.0 %**", ""])
    return "#### What the backward is made of\n\n" + _table(["part", "time", "share", ""], rows, left=1, left_from=3)


def _memory(memory: MemoryView) -> list[str]:
    """Who holds the peak, what is saved, retained, held and copied; the course over the step is for terminals."""
    retained, held, copies = memory.retained.whole, memory.held.whole, memory.copies.whole
    saved = f"{units.size(memory.saved.whole)}{memory.passes}"
    leak = f", of which {units.size(memory.leaked_bytes)} more with every step: a leak" if memory.leaked_bytes else ""
    parts = [
        _holders(memory),
        _tensors("Saved for backward", f"{saved}; each storage once.", memory.saved),
        _tensors("Retained after the step", f"{units.size(retained)}{leak}.", memory.retained),
        _tensors("Held by Python", f"{units.size(held)} that no backward node needs.", memory.held),
        _copies(f"{units.size(copies)}; the step made {memory.allocations}.", copies=memory.copies),
    ]
    if memory.figures:
        parts.append(f"#### On {escape(memory.device)}\n\n{escape(memory.figures)}. {escape(memory.outside)}".rstrip())
    return parts


def _holders(memory: MemoryView) -> str:
    holders = memory.holders
    if not holders.whole:
        return ""
    rows = [
        [f"`{_code(row.owner)}`", units.size(row.bytes), percent, escape(row.category)]
        for row, percent in zip(holders.rows, holders.percents, strict=False)
    ]
    rows += _more(holders, 4)
    rows.append(["**all of the peak**", f"**{units.size(holders.whole)}**", "**100.0 %**", ""])
    kinds = " · ".join(f"{escape(name)} {units.size(size)}" for name, size in memory.categories)
    table = _table(["owner", "held", "share", "what"], rows, left=1, left_from=3)
    return f"#### Who holds the peak\n\n{escape(memory.peak)}: {kinds}\n\n{table}"


def _tensors(title: str, about: str, tensors: Largest[KeptTensors]) -> str:
    rows = [
        [
            f"{'**leak** ' if row.leaks else ''}{escape(row.what)}",
            units.size(row.bytes),
            percent,
            units.count(row.count),
            f"`{_code(row.line)}`" if row.line else "",
            f"`{_code(row.layer)}`",
        ]
        for row, percent in zip(tensors.rows, tensors.percents, strict=False)
    ]
    rows += _more(tensors, 6)
    if not rows:
        return ""
    table = _table(["tensor", "bytes", "share", "count", "line", "layer"], rows, left=1, left_from=4)
    return f"#### {title}\n\n{about}\n\n{table}"


def _copies(about: str, copies: Largest[Copy]) -> str:
    rows = [
        [
            f"`{_code(row.line)}`" if row.line else "no source line",
            units.size(row.bytes),
            percent,
            units.count(row.calls),
            f"`{_code(row.op)}`",
            escape(row.phase),
            f"`{_code(row.layer)}`",
        ]
        for row, percent in zip(copies.rows, copies.percents, strict=False)
    ]
    rows += _more(copies, 7)
    if not rows:
        return ""
    table = _table(["line", "bytes", "share", "calls", "op", "phase", "layer"], rows, left=1, left_from=4)
    return f"#### Copies\n\n{about}\n\n{table}"


def _more(largest: Largest[Holder] | Largest[KeptTensors] | Largest[Copy], columns: int) -> list[list[str]]:
    if not largest.more:
        return []
    cells = [f"… {largest.more} more", units.size(largest.more_bytes), largest.percents[-1]]
    return [cells + [""] * (columns - len(cells))]


def _findings(view: View) -> str:
    found = view.findings
    items = [_finding(i, row) for i, row in enumerate(found.rows, 1)]
    items += [escape(" ".join(found.nothing))] if found.nothing else []
    if found.more:
        items.append(f"{found.more[0].upper()}{found.more[1:]}: `{_code(found.command)}`")
    about = "Savings are estimates.\n\n" if found.rows else ""
    return f"#### Findings\n\n{about}" + "\n\n".join(items) if items else ""


def _finding(number: int, row: FindingRow) -> str:
    """An item of a numbered list; what belongs to it is indented as far as its text."""
    where = " · ".join(f"`{_code(part)}`" for part in (row.layers, row.line) if part)
    source = f": `{_code(row.text)}`" if row.text else ""
    parts = [
        f"**{row.severity}**: {escape(row.message)}",
        f"{where}{source}",
        escape(row.evidence),
        escape(row.advice),
        f"*{escape(row.saving)}*" if row.saving else "",
        f"rule `{_code(row.rule)}`" + (f" · recipe `{_code(row.recipe)}`" if row.recipe else ""),
    ]
    lead = f"{number}. "
    indent = " " * len(lead)
    # A break at the end of each line but the last: each stands on its own.
    text = f"  \n{indent}".join(part for part in parts if part)
    return f"{lead}{text}{_block(row.code, indent)}"


def _block(code: str, indent: str) -> str:
    """A block of code, fenced so that no backticks in it end it."""
    if not code:
        return ""
    fence = "```"
    while fence in code:
        fence += "`"
    lines = [f"{fence}python", *map(visible, code.splitlines()), fence]
    return "\n\n" + "\n".join(f"{indent}{line}" for line in lines)


def _list(title: str, items: Sequence[str]) -> str:
    return f"#### {title}\n\n" + "\n".join(f"- {escape(item)}" for item in items) if items else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int, left_from: int | None = None) -> str:
    """A table whose first ``left`` columns, and those from ``left_from`` on, are aligned left."""
    after = len(head) if left_from is None else left_from
    rules = ["---" if i < left or i >= after else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rules, *rows))


def escape(text: str) -> str:
    """``text`` as it is, on one line: nothing in it is Markdown, HTML or a link, or hides or turns what follows."""
    flat = visible(" ".join(text.split()))
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = "".join(f"\\{char}" if char in "\\`*_[]|~#" else char for char in flat)
    flat = flat.replace("://", "&#58;//").replace("www.", "www&#46;")
    return _LIST.sub(r"\1\\\2", flat)


def _code(text: str) -> str:
    """``text`` for use between backticks in a table's cell."""
    flat = visible(" ".join(text.split())).replace("`", "'")
    # Behind a backslash a bar ends the cell, however it is escaped.
    return flat.replace("\\|", "\\ |").replace("|", "\\|")
