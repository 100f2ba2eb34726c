"""Findings of a run -> texts that the page shows and copies as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gradscope import units
from gradscope.report.findings import FindingRow, build_findings, chosen, finding_row
from gradscope.report.fold import build_tree
from gradscope.report.markdown import escape
from gradscope.report.nextsteps import _fix as fix_command
from gradscope.report.tree import ViewOptions
from gradscope.safe_text import visible
from gradscope.tables import RunData


def findings_record(run: RunData, *, source: bool) -> dict[str, Any]:
    """What the page says of a run's findings, in the order and words of every report.

    ``findings`` has all of them; those that other reports only count are marked as small. ``nothing_found`` is the
    verdict where none is worth showing, ``headline`` one line for both cases, ``""`` where no rule looked.
    ``comment`` is the whole as a comment for GitHub, as is that of each finding.
    """
    rows = _rows(run, source=source)
    nothing = build_findings(run, {}).nothing
    shown = [row for row, _, small in rows if not small]
    return {
        "findings": [
            {
                **{key: getattr(row, key) for key in _TEXTS},
                "where": row.layers,
                "layers": layers,
                "small": small,
                "gains": _gains(row),
                "command": _command(row, run),
                "comment": _comment(row, run),
            }
            for row, layers, small in rows
        ],
        "nothing_found": list(nothing),
        "headline": _headline(shown, nothing),
        "comment": _whole_comment(run, shown, len(rows) - len(shown), nothing),
    }


_TEXTS = ("rule", "severity", "message", "line", "text", "evidence", "recipe", "advice", "code", "worth")


def _rows(run: RunData, *, source: bool) -> list[tuple[FindingRow, list[str], bool]]:
    """Each finding in words, the paths of its layers, and whether other reports only count it."""
    if not run.findings:
        return []
    roots = build_tree(run.layers, run.step.backward_ns, run.workload.model)
    nodes = {path: node for root in roots for node in root.walk() for path in node.paths}
    shown, small, hints = chosen(run, ViewOptions())
    rows = []
    for index, finding in enumerate((*shown, *small, *hints)):
        row = finding_row(finding, run, nodes)
        row = row if source else dataclasses.replace(row, text="")
        rows.append((row, list(finding.layers), index >= len(shown)))
    return rows


def _gains(row: FindingRow) -> list[str]:
    """What is gained in time and in memory, as far as it is estimated."""
    return row.saving.split(" · ") if row.saving else []


def _command(row: FindingRow, run: RunData) -> str:
    """The command that makes the change and verifies it; ``""`` for a finding without a recipe."""
    return fix_command(run.workload) if row.recipe else ""


def _headline(shown: Sequence[FindingRow], nothing: Sequence[str]) -> str:
    if not shown:
        return nothing[0] if nothing else ""
    first, count = shown[0], len(shown)
    worth = f"{first.worth}: " if first.worth else ""
    return f"{units.count(count)} finding{'s' * (count != 1)} · {worth}{first.message}"


# -- comments for GitHub -----------------------------------------------------------------------------------------------


def _whole_comment(run: RunData, shown: Sequence[FindingRow], more: int, nothing: Sequence[str]) -> str:
    """All findings worth showing, or the verdict; what was measured stands before, what is left out behind them."""
    work = run.workload
    title = " · ".join(filter(None, (work.model or "model", work.target)))
    times = f"backward {units.ns(run.step.backward_ns)}, forward {units.ns(run.step.forward_ns)}"
    peak = f", peak {units.size(run.memory.peak_bytes)}" if run.memory is not None else ""
    parts = [f"### gradscope: {escape(title)}", f"{times}{peak}"]
    parts += [_comment(row, run) for row in shown] or ([escape(" ".join(nothing))] if nothing else [])
    if more:
        parts.append(f"{units.count(more)} more: small ones, and hints")
    if shown:
        parts.append("Savings are estimates.")
    return "\n\n".join(parts) + "\n"


def _comment(row: FindingRow, run: RunData) -> str:
    """One finding as Markdown: nothing in its texts is markup, or ends the code that it stands in."""
    where = " · ".join(_code(part) for part in (row.layers, row.line) if part)
    command = _command(row, run)
    lines = [
        f"**{row.severity}: {escape(row.message)}**",
        where + (f": {_code(row.text)}" if row.text and where else ""),
        escape(row.evidence),
        escape(row.advice),
        f"*{escape(row.saving)}*" if row.saving else "",
        f"{_code(command)} makes the change and verifies it" if command else "",
        f"rule {_code(row.rule)}" + (f" · recipe {_code(row.recipe)}" if row.recipe else ""),
    ]
    text = "  \n".join(line for line in lines if line)
    return f"{text}\n\n{_block(row.code)}" if row.code else text


def _code(text: str) -> str:
    flat = visible(" ".join(text.split())).replace("`", "'")
    return f"`{flat}`"


def _block(code: str) -> str:
    """A fenced block that no backticks inside it can end."""
    fence = "```"
    while fence in code:
        fence += "`"
    return "\n".join((f"{fence}python", *map(visible, code.splitlines()), fence))
