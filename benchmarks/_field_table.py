"""The field's results as a table in markdown, and which of its goals are missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

UNATTRIBUTED_GOAL = 0.005
NO_LINE_GOAL = 0.02

Record = dict[str, Any]


def missed(record: Record) -> list[str]:
    """The goals that one program misses, in words; none when all is well."""
    said = []
    if record["exit_alone"] != record["exit_profiled"]:
        said.append(f"exit code {record['exit_profiled']}, alone {record['exit_alone']}")
    elif record["exit_alone"] != record["exit_expected"]:
        said.append(f"exit code {record['exit_alone']} alone: the list expects {record['exit_expected']}")
    if record.get("varies_alone"):
        said.append("differs from run to run without gradscope as well")
    elif not record["prints_alike"]:
        said.append("prints something else")
    elif not record["files_alike"]:
        said.append("writes other files")
    elif not record["numbers"] + record["files"]:
        said.append("prints and writes nothing that could be compared")
    if record["left_behind"]:
        said.append(f"leaves {', '.join(record['left_behind'])} behind")
    if not record["measured"]:
        return [*said, "nothing measured"]
    if (record["unattributed"] or 0) > UNATTRIBUTED_GOAL:
        said.append(f"{record['unattributed']:.1%} unattributed")
    if _why_no_lines(record) is None and (record["no_line"] or 0) > NO_LINE_GOAL:
        said.append(f"{record['no_line']:.1%} without a line")
    return said


def _why_no_lines(record: Record) -> str | None:
    """Why backward has no lines of the program's own, where the report says so."""
    if record["library"]:
        return "(library)"
    return "(torch.compile)" if any("uses torch.compile" in note for note in record["notes"]) else None


def _percent(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{100 * value:.2f} %"


def _alike(record: Record) -> str:
    if record.get("varies_alone"):
        return "vary alone"
    if not (record["prints_alike"] and record["files_alike"]):
        return "**no**"
    files = f", {record['files']} files" if record["files"] else ""
    return f"{record['numbers']:,} numbers{files}"


def _exits(record: Record) -> str:
    alone, profiled = record["exit_alone"], record["exit_profiled"]
    return str(alone) if alone == profiled else f"**{profiled}**, alone {alone}"


def _ratio(record: Record, what: str) -> str:
    alone = record[f"{what}_alone_s"]
    if record["endless"]:
        return "–"
    return f"×{record[f'{what}_profiled_s'] / alone:.1f}" if alone else "–"


def _row(record: Record) -> list[str]:
    seen = record["measured"]
    loaded = " (loaded)" if record["load"] > (record["cpus"] or 1) else ""
    return [
        record["name"],
        f"{record['repo']}: `{record['command'].split()[0 if not record['command'].startswith('-m') else 1]}`",
        _exits(record),
        _alike(record),
        str(record["steps"]) if seen else "none",
        _percent(record["unattributed"]) if seen else "–",
        " ".join(filter(None, (_percent(record["no_line"]), _why_no_lines(record)))) if seen else "–",
        str(len(record["notes"])) if seen else "–",
        str(len(record["findings"])) if seen else "–",
        _ratio(record, "wall") + loaded,
        _ratio(record, "processor"),
    ]


HEAD = (
    "program", "source", "exit code", "alike", "steps", "unattributed", "backward without a line", "notes", "findings",
    "wall time over alone", "processor time over alone",
)  # fmt: skip


def markdown(records: Sequence[Record], environment: Record) -> str:
    """The page: what ran on what, a row a program, goals missed, and how many had which finding and note."""
    lines = [
        f"{len(records)} programs, gradscope at {environment['commit']}, torch {environment['torch']}, "
        f"{environment['device_name']}, {environment['threads']} threads, {environment['time'][:10]}.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in _row(record)) + " |" for record in records),
        "",
        "## Goals missed",
        "",
        *(f"- {record['name']}: {'; '.join(said)}" for record in records if (said := missed(record))),
    ]
    if not any(missed(record) for record in records):
        lines.append("None.")
    return (
        "\n".join([*lines, "", *_counted("Findings", records, "findings"), "", *_counted("Notes", records, "notes")])
        + "\n"
    )


def _counted(title: str, records: Sequence[Record], key: str) -> list[str]:
    who: dict[str, list[str]] = {}
    for record in records:
        for said in dict.fromkeys(record.get(key) or ()):
            who.setdefault(_general(said), []).append(record["name"])
    counts = Counter({said: len(names) for said, names in who.items()})
    rows = [
        f"| {said.replace('|', chr(92) + '|')} | {count} | {', '.join(who[said][:8])}{' …' if count > 8 else ''} |"
        for said, count in counts.most_common()
    ]
    return [f"## {title}", "", f"| {title.lower()[:-1]} | programs | which |", "|---|---|---|", *rows]


def _general(said: str) -> str:
    """A note without its numbers, so that one of two programs counts as the same note."""
    import re

    return re.sub(r"\d[\d,.]*", "N", said)[:160]
