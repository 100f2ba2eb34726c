"""A comparison -> what its page reads: names, warnings, and the limits of noise that the terminal uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscope.compare.changes import Comparison
from gradscope.compare.layers import measured, time_change
from gradscope.compare.measured import RunSpread
from gradscope.report.page import to_html

# What the page shows of a layer: itself, and with all layers below it.
METRICS = ("forward_self_ns", "forward_total_ns", "backward_own_ns", "backward_total_ns")


def comparison_html(comparison: Comparison, source: bool = True, fix: Mapping[str, Any] | None = None) -> str:
    """The page of both runs; ``source=False`` leaves the text of source lines out.

    Args:
        fix: what a fix replaced between the two: its document's sections, and its diff.
    """
    record = comparison_record(comparison) | ({} if fix is None else {"fix": fix})
    return to_html((comparison.after, comparison.before), source, record)


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """What the page holds of the comparison itself; layers are numbers in the order of the run after.

    A limit is the largest difference in ns that may be noise, ``None`` where one of the runs lacks the layer or nothing
    is known. ``noise`` has one a layer, ``groups`` those of repeats that are one row in both reports, ``totals`` those
    of the step and of the ledger.
    """
    return {
        "names": list(comparison.names),
        "warnings": [mismatch.text for mismatch in comparison.mismatches],
        "notes": list(comparison.notes),
        "noise": _limits(comparison),
        "groups": _groups(comparison),
        "totals": {change.metric: change.noise for change in comparison.totals if change.unit == "ns"},
    }


def _limits(comparison: Comparison) -> dict[str, list[int | None]]:
    by_path = {layer.path: layer.changes for layer in comparison.layers}
    changes = [by_path[row.path] for row in comparison.after.layers]
    return {metric: [one[metric].noise if metric in one else None for one in changes] for metric in METRICS}


def _groups(comparison: Comparison) -> list[dict[str, Any]]:
    numbers = {row.path: index for index, row in enumerate(comparison.after.layers)}
    spreads = (RunSpread(comparison.before), RunSpread(comparison.after))
    rows = max(sum(len(group.paths) for group in comparison.groups), 1)
    found = []
    for group in comparison.groups:
        if len(group.paths) < 2:
            continue
        record: dict[str, Any] = {
            "layers": [numbers[path] for path in group.paths],
            "forward_self_ns": group.forward.noise,
            "backward_own_ns": group.backward.noise,
        }
        for metric in ("forward_total_ns", "backward_total_ns"):
            sides = [measured(spread, group.paths, metric) for spread in spreads]
            record[metric] = time_change(metric, sides, spreads, rows).noise
        found.append(record)
    return found
