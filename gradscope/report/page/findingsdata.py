"""Findings of a run -> texts that the page shows and copies as they are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradscope import units
from gradscope.document.markdown import to_markdown
from gradscope.document.parts import Section
from gradscope.report.document import finding_entry, profile_document
from gradscope.report.findings import FindingRow, build_findings, chosen, finding_row
from gradscope.report.fold import build_tree
from gradscope.report.nextsteps import fix_command
from gradscope.report.tree import ViewOptions
from gradscope.tables import Finding, RunData


def findings_record(run: RunData, *, source: bool) -> dict[str, Any]:
    """What the page says of a run's findings, in the order and words of every report.

    ``findings`` has all of them; those that other reports only count are marked as small. ``nothing_found`` is the
    verdict where none is worth showing, ``headline`` one line for both cases, ``""`` where no rule looked.
    ``comment`` is the whole as a comment for GitHub, as is that of each finding.
    """
    rows = _rows(run, source=source)
    nothing = build_findings(run, {}).nothing
    shown = [row for row, _, small in rows if not small]
    whole, comments = _comments(run, [row for row, _, _ in rows], source=source)
    return {
        "findings": [
            {
                **{key: getattr(row, key) for key in _TEXTS},
                "where": row.layers,
                "layers": list(finding.layers),
                "saved_ns": finding.predicted_saving_ns or 0,
                "saved_bytes": finding.predicted_saving_bytes or 0,
                "small": small,
                "command": fix_command(run.workload) if row.recipe else "",  # makes the change and verifies it
                "comment": comment,
                "key": key,
            }
            for (row, finding, small), comment, key in zip(rows, comments, _keys(rows), strict=True)
        ],
        "nothing_found": list(nothing),
        "headline": _headline(shown, nothing),
        "comment": whole,
    }


_TEXTS = ("rule", "severity", "message", "line", "text", "evidence", "recipe", "advice", "code", "saving", "worth")


def _rows(run: RunData, *, source: bool) -> list[tuple[FindingRow, Finding, bool]]:
    """Each finding in words, as it was found, and whether other reports only count it."""
    if not run.findings:
        return []
    roots = build_tree(run.layers, run.step.backward_ns, run.workload.model)
    nodes = {path: node for root in roots for node in root.walk() for path in node.paths}
    shown, small, hints = chosen(run, ViewOptions())
    rows = []
    for index, finding in enumerate((*shown, *small, *hints)):
        row = finding_row(finding, run, nodes)
        row = row if source else dataclasses.replace(row, text="")
        rows.append((row, finding, index >= len(shown)))
    return rows


def _keys(rows: Sequence[tuple[FindingRow, Finding, bool]]) -> list[str]:
    """A name for each that an address can hold: of the same model it is the same in another run."""
    seen: Counter[str] = Counter()
    keys = []
    for row, finding, _ in rows:
        text = "/".join((row.rule, *finding.layers[:1], row.line)).encode("utf-8", "replace").decode()
        seen[text] += 1
        keys.append(text if seen[text] == 1 else f"{text}/{seen[text]}")
    return keys


def _headline(shown: Sequence[FindingRow], nothing: Sequence[str]) -> str:
    if not shown:
        return nothing[0] if nothing else ""
    first, count = shown[0], len(shown)
    worth = f"{first.worth}: " if first.worth else ""
    return f"{units.count(count)} finding{'s' * (count != 1)} · {worth}{first.message}"


def _comments(run: RunData, rows: Sequence[FindingRow], *, source: bool) -> tuple[str, list[str]]:
    """All findings worth showing, or the verdict, as a comment for GitHub; and each of ``rows`` as one."""
    told = run if source else dataclasses.replace(run, lines=())
    document = profile_document(told, ViewOptions(show=("findings",)))
    section = document.section("findings") or Section("findings", "Findings", "")
    whole = dataclasses.replace(document, sections=(section,))
    each = [dataclasses.replace(section, blocks=(finding_entry(1, row, full=True),)) for row in rows]
    return to_markdown(whole), [to_markdown(dataclasses.replace(document, sections=(one,))) for one in each]
