"""Layers matched by path, each with its values in both runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradscope.compare.changes import Basis, Change, LayerChange, Unit
from gradscope.compare.measured import Phase, RunSpread
from gradscope.compare.noise import Measured, limit_ns
from gradscope.report.layer_cost import amounts_of
from gradscope.tables import LayerRow

Spreads = tuple[RunSpread, RunSpread]


@dataclass(frozen=True, slots=True)
class _Time:
    """One column of times."""

    phase: Phase
    holds_nodes: bool = False  # the layer's own backward nodes are in it
    total: bool = False  # with the layers below


# "own" is what RUN.json has in five columns: backward nodes, recompute, accumulation, gradient sums and hooks.
TIMES: Mapping[str, _Time] = {
    "backward_total_ns": _Time("backward", holds_nodes=True, total=True),
    "backward_own_ns": _Time("backward", holds_nodes=True),
    "backward_self_ns": _Time("backward", holds_nodes=True),
    "recompute_ns": _Time("backward"),
    "accumulate_ns": _Time("backward"),
    "gradient_sum_ns": _Time("backward"),
    "hook_ns": _Time("backward"),
    "forward_total_ns": _Time("forward", total=True),
    "forward_self_ns": _Time("forward"),
}
SIZES: Mapping[str, Unit] = {
    "saved_bytes": "bytes",
    "saved_total_bytes": "bytes",
    "peak_bytes": "bytes",
    "allocated_bytes": "bytes",
    "allocations": "count",
    "copied_bytes": "bytes",
}


def matched_layers(spreads: Spreads) -> tuple[LayerChange, ...]:
    """Every layer of either run, by path: in the order of the run after, then those that it lacks."""
    before, after = (spread.by_path for spread in spreads)
    paths = [*after, *(path for path in before if path not in after)]
    columns = [*(_times(spreads, metric) for metric in TIMES), *(_sizes(spreads, metric) for metric in SIZES)]
    return tuple(
        LayerChange(
            path=path,
            class_before=before[path].class_name if path in before else None,
            class_after=after[path].class_name if path in after else None,
            changes={column[path].metric: column[path] for column in columns if path in column},
        )
        for path in paths
    )


def time_of(row: LayerRow, metric: str) -> int:
    """One of :data:`TIMES` of one layer, in ns."""
    return amounts_of(row).backward_ns if metric == "backward_own_ns" else int(getattr(row, metric))


def time_change(metric: str, sides: Sequence[tuple[Measured, Basis]], spreads: Spreads, rows: int) -> Change:
    """A change of one of :data:`TIMES` that both runs have, tested together with ``rows`` others."""
    (before, one), (after, other) = sides
    floor = max(spread.relative(TIMES[metric].phase) for spread in spreads)
    basis: Basis = one if one == other else "whole" if "whole" in (one, other) else "estimate"
    return Change(metric, "ns", int(before.mean), int(after.mean), limit_ns(before, after, floor, rows), basis)


def measured(spread: RunSpread, paths: Sequence[str], metric: str) -> tuple[Measured, Basis]:
    """One of :data:`TIMES`, summed over some layers of one run."""
    rows, column = [spread.by_path[path] for path in paths], TIMES[metric]
    inside = [row for path in paths for row in spread.below[path]] if column.total else rows
    value = sum(time_of(row, metric) for row in rows)
    return spread.layers(inside, value, column.phase, holds_nodes=column.holds_nodes)


def time_changes(spreads: Spreads, groups: Sequence[Sequence[str]], metric: str) -> list[Change]:
    """The changes of one of :data:`TIMES` in groups of layers that both runs have, tested together.

    A layer counts by itself, however it is grouped: a group of one has the limit that the layer has alone.
    """
    pairs = [[measured(spread, paths, metric) for spread in spreads] for paths in groups]
    paths = {path for group in groups for path in group}
    tested = sum(any(time_of(spread.by_path[path], metric) for spread in spreads) for path in paths)
    return [time_change(metric, pair, spreads, max(tested, 1)) for pair in pairs]


def _times(spreads: Spreads, metric: str) -> dict[str, Change]:
    before, after = (spread.by_path for spread in spreads)
    both = [path for path in before if path in after]
    found = dict(zip(both, time_changes(spreads, [[path] for path in both], metric), strict=True))
    for spread in spreads:
        for path in spread.by_path.keys() - found.keys():
            value, basis = measured(spread, [path], metric)
            one, other = (int(value.mean) if path in rows else None for rows in (before, after))
            found[path] = Change(metric, "ns", one, other, None, basis)
    return found


def _sizes(spreads: Spreads, metric: str) -> dict[str, Change]:
    """Bytes and counts: one step's, exact. Only what was measured."""
    before, after = ({row.path: getattr(row, metric) for row in spread.run.layers} for spread in spreads)
    found = {}
    for path in {**before, **after}:
        change = Change(metric, SIZES[metric], before.get(path), after.get(path), 0)
        lacking = (path in before and change.before is None) or (path in after and change.after is None)
        if not lacking:
            found[path] = change
    return found
