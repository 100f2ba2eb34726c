"""What a finding may promise, and from where on it is worth a word: one place for all rules.

A rule says what it found and what it estimates. Here the estimate is held against what was measured: no more is
promised than the finding's own cost and the step allow, nothing is freed that the peak does not hold, what lies below
the rule's floor is not said, and the severity is that of the gain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from gradscope.diagnose.case import Case, Rule, severity_of
from gradscope.diagnose.findings import is_of_a_library
from gradscope.tables import Finding, LayerRow, OpRow, SavedRow, Severity

# Of what is measured this much is left at least, whatever the cure: something does the work after it.
LEFT = 0.05

# Of the peak: from here on memory is worth a warning.
MUCH = 0.10


def weighed(finding: Finding, rule: Rule, case: Case, *, steady: bool) -> Finding | None:
    """The finding with what it may promise; None where that is below the rule's floor, or nobody could follow it.

    Args:
        steady: False for a run whose steps differ too much for a time to be promised.
    """
    if rule.edits and finding.recipe is None and is_of_a_library(finding.line):
        return None
    had_numbers = _has_numbers(finding) or bool(finding.predicted_high_ns)
    finding = _within_peak(_within_step(finding, case), rule, case)
    finding = _above_floor(finding, rule, case)
    if not steady:
        finding = without_times(finding)
    if not _has_numbers(finding) and not finding.predicted_high_ns and had_numbers and not rule.beyond_numbers:
        return None
    return replace(finding, severity=_severity(finding, rule, case, steady=steady))


def without_times(finding: Finding) -> Finding:
    """The finding without what it promises in time."""
    return replace(finding, predicted_saving_ns=None, predicted_low_ns=None, predicted_high_ns=None)


def _within_step(finding: Finding, case: Case) -> Finding:
    """Limit a saving to the finding's own cost and the unprofiled step; the range stays in order."""
    step = case.run.step
    most = min(step.wall_ns, step.unprofiled_wall_ns or step.wall_ns)
    if finding.cost_ns is not None:
        most = min(most, finding.cost_ns)
    most = int(most * (1 - LEFT))
    saving, low, high = finding.predicted_saving_ns, finding.predicted_low_ns, finding.predicted_high_ns
    if high is not None:
        high = min(high, most)
    if saving is None or saving <= 0:
        return replace(finding, predicted_saving_ns=None, predicted_low_ns=None, predicted_high_ns=high)
    saving = min(saving, most)
    low = max(0, min(saving if low is None else low, saving))
    return replace(
        finding,
        predicted_saving_ns=saving,
        predicted_low_ns=low,
        predicted_high_ns=max(saving if high is None else high, saving),
    )


def _within_peak(finding: Finding, rule: Rule, case: Case) -> Finding:
    """Limit freed bytes to what its layers hold at the peak; where that is not known, as estimated."""
    memory = case.run.memory
    freed = finding.predicted_saving_bytes
    if memory is None or freed is None or rule.grows:
        return finding
    held = int(memory.peak_bytes * (1 - LEFT))
    if finding.layers and memory.at_peak:
        held = min(held, held_at_peak(case, finding))
    return replace(finding, predicted_saving_bytes=min(freed, held) or None)


def held_at_peak(case: Case, finding: Finding) -> int:
    """Bytes of the live set at the peak that the finding's layers own, or those below them, or code outside layers."""
    memory = case.run.memory
    assert memory is not None
    mine = {row.path for path in finding.layers for row in case.below.get(path, ())}
    return sum(row.bytes for row in memory.at_peak if row.owner in mine or row.owner not in case.layers)


def _above_floor(finding: Finding, rule: Rule, case: Case) -> Finding:
    """Drop the numbers that are below the floor."""
    floor = rule.floor
    least_ns = max(floor.ns, floor.of_step * case.step_ns)
    if (finding.predicted_saving_ns or finding.predicted_high_ns or 0) < least_ns:
        finding = without_times(finding)
    peak = case.run.memory.peak_bytes if case.run.memory is not None else 0
    if (finding.predicted_saving_bytes or 0) < max(floor.bytes, floor.of_peak * peak):
        finding = replace(finding, predicted_saving_bytes=None)
    return finding


def _severity(finding: Finding, rule: Rule, case: Case, *, steady: bool) -> Severity:
    """Judge by the numbers where there are any; an alarm of a time that cannot be trusted is a hint."""
    if not steady and not rule.beyond_numbers:
        return "info"
    if rule.beyond_numbers or not _has_numbers(finding):
        return finding.severity
    severity = severity_of(finding.predicted_saving_ns, case)
    peak = case.run.memory.peak_bytes if case.run.memory is not None else 0
    large = bool(peak) and not rule.trades and (finding.predicted_saving_bytes or 0) >= MUCH * peak
    return "warning" if severity == "info" and large else severity


def _has_numbers(finding: Finding) -> bool:
    return bool(finding.predicted_saving_ns or finding.predicted_saving_bytes)


# Settings that make every layer and every call slow, whatever it does.
SLOW_SETTINGS = ("anomaly", "launch_blocking")


def is_slowed_down(case: Case) -> bool:
    """Check that a setting for debugging was on: times of layers say nothing then."""
    return any(case.facts.settings.get(name) for name in SLOW_SETTINGS)


def self_ns(rows: Iterable[OpRow]) -> int:
    """Return the self time of all these rows together."""
    return sum(row.self_ns for row in rows)


def own_ns(row: LayerRow) -> int:
    """Return the forward and backward of a layer without those below it."""
    return row.forward_self_ns + row.backward_self_ns


def ops_ns(
    case: Case,
    layers: Collection[str | None],
    wanted: Callable[[str], bool],
    phases: Collection[str] = ("forward", "backward"),
) -> int:
    """Return the self time of operations of these layers, by their names."""
    rows = (row for layer in set(layers) for phase in phases for row in case.ops.get((layer, phase), ()))
    return self_ns(row for row in rows if wanted(row.name))


def slowest_line(case: Case, layers: Collection[str | None]) -> str | None:
    """The line of these layers on which most backward time is spent."""
    rows = [row for row in case.run.lines if row.layer in layers and row.backward_ns]
    slowest = max(rows, key=lambda row: row.backward_ns, default=None)
    return None if slowest is None else f"{slowest.file}:{slowest.line}"


def alive_at_peak(rows: Iterable[SavedRow]) -> int:
    """Return the bytes of what is kept for backward that are alive at the peak: no cure can free more there.

    All of them where the report does not say.
    """
    return sum(row.bytes if row.at_peak_bytes is None else min(row.bytes, row.at_peak_bytes) for row in rows)
