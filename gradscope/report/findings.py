"""Findings as every report shows them: which are worth showing, in what order, and in what words.

What is shown is a choice, what is not shown is counted. Savings are estimates, and read as such: two digits, a range.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradscope import units
from gradscope.report.fold import FoldedNode
from gradscope.report.nextsteps import fix_command
from gradscope.report.nofinding import nothing_found
from gradscope.report.tree import ViewOptions
from gradscope.tables import Finding, RunData

# Hints of which nobody knows what they save: more of them would bury the rest.
MOST_HINTS = 3
FIX_COMMAND = "gradscope fix FILE"  # in a finding's advice: of the target that was measured
# Layers named one by one, where they are no repeats of each other.
_MOST_NAMES = 3
# The part of a step that a severity stands for where a finding has no estimate: as gradscope.diagnose judges it.
_WORTH = {"critical": 0.10, "warning": 0.03, "info": 0.0}

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_SIZES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One finding in words; a text is empty where there is nothing to say."""

    rule: str
    severity: str
    message: str
    layers: str  # repeats folded: "transformer.h.*.attn ×12"
    line: str  # "model.py:12"
    text: str  # what stands on that line
    evidence: str
    recipe: str
    advice: str
    code: str
    saving: str  # "est. -48 ms/step (32 to 72), 18 % of the step · -95 MB of memory, 7 % of the peak"
    worth: str  # the same for lists: "est. -18 % of the step"

    @property
    def place(self) -> str:
        """Layers and line."""
        return " · ".join(part for part in (self.layers, self.line) if part)


@dataclass(frozen=True, slots=True)
class FindingsView:
    """The findings worth showing, the largest saving first, and how many there are beside them."""

    rows: tuple[FindingRow, ...] = ()
    more: str = ""  # "and 3 smaller ones"
    command: str = ""  # that shows all of them, the small ones too
    all_command: str = ""  # that shows these in full
    nothing: tuple[str, ...] = ()  # where none is shown: who looked, where the time is, how near the limit


def build_findings(
    run: RunData, nodes: Mapping[str, FoldedNode], options: ViewOptions | None = None, path: str | Path | None = None
) -> FindingsView:
    """What to show of a run's findings.

    Args:
        nodes: of the folded tree, by the paths of the layers that they stand for.
        path: of RUN.json, for the command that shows all.
    """
    options = options or ViewOptions()
    shown, small, hints = chosen(run, options)
    rows = tuple(finding_row(finding, run, nodes) for finding in shown)
    full, every = "report.print(show=['findings'])", "report.print(show=['findings'], min_percent=0)"
    if path is not None:
        full = f"gradscope show {shlex.quote(str(path))} --show findings"
        every = f"{full} --min-percent 0"
    return FindingsView(
        rows=rows,
        more=_more(len(small), len(hints), first=not rows),
        command=every if small or hints else "",
        all_command=full if rows else "",
        nothing=() if rows else nothing_found(run),
    )


def chosen(run: RunData, options: ViewOptions) -> tuple[list[Finding], list[Finding], list[Finding]]:
    """Findings that are shown, those too small to be, and hints without an estimate beyond the first few.

    A finding is too small if less than ``min_percent`` of the step would be saved, and of the peak be freed.
    """
    by_memory = options.sort == "memory"
    ordered = sorted(run.findings, key=lambda finding: _rank(finding, run, by_memory=by_memory), reverse=True)
    shown: list[Finding] = []
    small: list[Finding] = []
    hints: list[Finding] = []
    for finding in ordered:
        if _estimated(finding):
            (small if _is_small(finding, run, options.min_percent / 100) else shown).append(finding)
        elif finding.severity == "info" and options.min_percent > 0:
            hints.append(finding)
        else:
            shown.append(finding)
    return shown + hints[:MOST_HINTS], small, hints[MOST_HINTS:]


def finding_row(finding: Finding, run: RunData, nodes: Mapping[str, FoldedNode]) -> FindingRow:
    """A finding in words."""
    texts = {f"{row.file}:{row.line}": row.text for row in run.lines}
    line = finding.line or ""
    return FindingRow(
        rule=finding.rule,
        severity=finding.severity,
        message=finding.message,
        layers=layers_text(finding.layers, nodes, run.workload.model),
        line=line,
        text=texts.get(line, ""),
        evidence=finding.evidence,
        recipe=finding.recipe or "",
        advice=finding.advice.replace(FIX_COMMAND, fix_command(run.workload)),
        code=finding.code,
        saving=saving_text(finding, run),
        worth=_worth_text(finding, run),
    )


def layers_text(paths: Sequence[str], nodes: Mapping[str, FoldedNode], model: str) -> str:
    """Layers by name, repeats as one: ``transformer.h.*.attn ×12``, ``3 of 12 transformer.h.*.attn``."""
    by_node: dict[object, list[str]] = {}
    for path in dict.fromkeys(paths):
        node = nodes.get(path)
        by_node.setdefault(path if node is None else id(node), []).append(path)
    names: list[str] = []
    for members in by_node.values():
        node = nodes.get(members[0])
        every = 0 if node is None else len(node.paths)
        if node is None or len(members) == 1:
            names += [path or model or "the model" for path in members]
        elif len(members) == every:
            names.append(f"{node.address} ×{every}")
        else:
            names.append(f"{len(members)} of {every} {node.address}")
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def saving_text(finding: Finding, run: RunData) -> str:
    """What a step saves, and which part of the step and of the peak that is: ``est. -57 ms/step (38 to 85), 13 %``."""
    parts = []
    saved, freed = finding.predicted_saving_ns or 0, finding.predicted_saving_bytes or 0
    if saved > 0:
        spread = _range(finding, _unit(saved, _TIMES)[0])
        parts.append(f"-{_about(saved, _TIMES)}/step{spread}{_part(saved, run.step.wall_ns, 'step')}")
    if freed > 0:
        parts.append(f"-{_about(freed, _SIZES)} of memory{_part(freed, _peak(run), 'peak')}")
    return f"est. {' · '.join(parts)}" if parts else ""


def _worth_text(finding: Finding, run: RunData) -> str:
    """The larger of the two, for lists: ``est. -13 % of the step``."""
    saved, freed = finding.predicted_saving_ns or 0, finding.predicted_saving_bytes or 0
    parts = (_part(saved, run.step.wall_ns, "step"), _part(freed, _peak(run), "peak memory"))
    return next((f"est. -{part.removeprefix(', ')}" for part in parts if part), "")


def _range(finding: Finding, unit: int) -> str:
    low, high = finding.predicted_low_ns, finding.predicted_high_ns
    if low is None or high is None or low >= high:
        return ""
    return f" ({_two_digits(low / unit)} to {_two_digits(high / unit)})"


def _part(amount: int, whole: int, of: str) -> str:
    """An estimate as a share of the whole; nothing where it is beyond that."""
    if not 0 < amount < whole:
        return ""
    share = amount / whole
    return f", {units.percent(share, 0 if share >= 0.01 else 1)} of the {of}"


def _about(amount: int, scales: Sequence[tuple[int, str]]) -> str:
    unit, name = _unit(amount, scales)
    return f"{_two_digits(amount / unit)} {name}"


def _unit(amount: int, scales: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """The largest that it is at least one of, once it is rounded."""
    return next((scale for scale in scales if amount >= 0.995 * scale[0]), scales[-1])


def _two_digits(value: float) -> str:
    """An estimate has no more: ``48``, ``4.8``, ``480``."""
    if value < 0.01:
        return "0"
    rounded = float(f"{value:.1e}")
    return f"{rounded:.0f}" if rounded >= 10 or rounded == int(rounded) else f"{rounded:g}"


def _estimated(finding: Finding) -> bool:
    return (finding.predicted_saving_ns or 0) > 0 or (finding.predicted_saving_bytes or 0) > 0


def _is_small(finding: Finding, run: RunData, least: float) -> bool:
    saved, freed = _shares(finding, run)
    return saved < least and freed < least


def _shares(finding: Finding, run: RunData) -> tuple[float, float]:
    """Shares of the step and of the peak. A whole that was not measured counts nothing if the other is known."""
    saved, freed = max(finding.predicted_saving_ns or 0, 0), max(finding.predicted_saving_bytes or 0, 0)
    peak = _peak(run)
    unknown = 1.0 if freed and not saved else 0.0
    return saved / max(run.step.wall_ns, 1), freed / peak if peak else unknown


def _peak(run: RunData) -> int:
    return 0 if run.memory is None else run.memory.peak_bytes


def _rank(finding: Finding, run: RunData, *, by_memory: bool) -> tuple[float, float, float]:
    """The largest saving first; without an estimate, by what the severity stands for."""
    saved, freed = _shares(finding, run)
    worth = _WORTH.get(finding.severity, 0.0)
    if not _estimated(finding):
        # Behind all that has a number, unless it is more than a hint.
        return (worth, worth, -1.0) if worth else (-1.0, -1.0, -1.0)
    return (freed, saved, worth) if by_memory else (saved, freed, worth)


def _more(small: int, hints: int, *, first: bool) -> str:
    parts = []
    if small:
        kind = "small" if first else "smaller"
        parts.append(f"{units.count(small)} {kind} {'one' if small == 1 else 'ones'}")
    if hints:
        parts.append(f"{units.count(hints)} without an estimate")
    words = " and ".join(parts)
    return words if first or not words else f"and {words}"
