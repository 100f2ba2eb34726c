"""What rules read off the tables of a run: time by operations, lines, memory at the peak."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from gradscope.diagnose.case import Case
from gradscope.tables import LayerRow, OpRow, SavedRow

# Settings that make every layer and every call slow, whatever it does.
SLOW_SETTINGS = ("anomaly", "launch_blocking")


def is_slowed_down(case: Case) -> bool:
    """Check that a setting for debugging was on: times of layers say nothing then."""
    return any(case.facts.settings.get(name) for name in SLOW_SETTINGS)


def self_ns(rows: Iterable[OpRow]) -> int:
    """Of all these rows together."""
    return sum(row.self_ns for row in rows)


def own_ns(row: LayerRow) -> int:
    """Forward and backward of a layer without those below it."""
    return row.forward_self_ns + row.backward_self_ns


def ops_ns(
    case: Case,
    layers: Collection[str | None],
    wanted: Callable[[str], bool],
    phases: Collection[str] = ("forward", "backward"),
) -> int:
    """Self time of operations of these layers, by their names."""
    rows = (row for layer in set(layers) for phase in phases for row in case.ops.get((layer, phase), ()))
    return self_ns(row for row in rows if wanted(row.name))


def slowest_line(case: Case, layers: Collection[str | None]) -> str | None:
    """The line of these layers on which most backward time is spent."""
    rows = [row for row in case.run.lines if row.layer in layers and row.backward_ns]
    slowest = max(rows, key=lambda row: row.backward_ns, default=None)
    return None if slowest is None else f"{slowest.file}:{slowest.line}"


def alive_at_peak(rows: Iterable[SavedRow]) -> int:
    """Bytes of what is kept for backward that are alive at the peak: no cure can free more there.

    All of them where the report does not say.
    """
    return sum(row.bytes if row.at_peak_bytes is None else min(row.bytes, row.at_peak_bytes) for row in rows)
