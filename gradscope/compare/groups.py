"""Repeated blocks that changed alike, as one row; those that did not, apart.

Blocks are repeated where the report folds them: in the tree of the run before and in that of the run after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradscope.compare.changes import Change, GroupChange, MemoryChange, Presence, class_words
from gradscope.compare.layers import SIZES, TIMES, Spreads, measured, time_changes
from gradscope.compare.noise import odd_one
from gradscope.report.fold import FoldedNode, build_tree
from gradscope.report.layer_cost import add_up, amounts_of
from gradscope.tables import LayerRow, RunData

_BACKWARD, _FORWARD = "backward_own_ns", "forward_self_ns"

# Values of a layer alone. The peak is not: it is that of everything below it too, and repeats do not peak together.
OWN_SIZES = ("saved_bytes", "allocated_bytes", "allocations", "copied_bytes")


@dataclass(frozen=True, slots=True)
class _Group:
    """Repeats of one layer."""

    address: str
    paths: tuple[str, ...]


def time_groups(spreads: Spreads) -> tuple[GroupChange, ...]:
    """Every layer that both runs have is in exactly one group."""
    groups = [part for group in _repeats(spreads[0].run, spreads[1].run) for part in _alike(group, spreads)]
    backward, forward = (
        time_changes(spreads, [group.paths for group in groups], metric) for metric in (_BACKWARD, _FORWARD)
    )
    return tuple(
        GroupChange(group.address, _class_name(group, spreads), group.paths, one, other, _estimated(group, spreads))
        for group, one, other in zip(groups, backward, forward, strict=True)
    )


def _estimated(group: _Group, spreads: Spreads) -> float | None:
    """The share of the layers' backward that is an estimate, of fused kernels, in the run where it is larger."""
    found = []
    for spread in spreads:
        rows = [spread.by_path[path] for path in group.paths]
        if any(row.estimated_ns is not None for row in rows):
            found.append(add_up([amounts_of(row) for row in rows]).estimated or 0.0)
    return max(found, default=None)


def memory_groups(spreads: Spreads) -> tuple[MemoryChange, ...]:
    """Layers of both runs whose own bytes or allocations differ; repeats are one where theirs are the same."""
    before, after = (spread.by_path for spread in spreads)
    found = []
    for group in _repeats(spreads[0].run, spreads[1].run):
        alike: dict[tuple[int | None, ...], list[str]] = {}
        for path in group.paths:
            values = tuple(getattr(row, metric) for metric in OWN_SIZES for row in (before[path], after[path]))
            alike.setdefault(values, []).append(path)
        for values, paths in alike.items():
            changes = {}
            for metric, was, now in zip(OWN_SIZES, values[::2], values[1::2], strict=True):
                if was is not None and now is not None:
                    changes[metric] = Change(metric, SIZES[metric], was * len(paths), now * len(paths), 0)
            part = _part(group, paths)
            if any(change.real for change in changes.values()):
                found.append(MemoryChange(part.address, _class_name(part, spreads), part.paths, changes))
    return tuple(found)


def present(run: RunData, other: RunData) -> tuple[Presence, ...]:
    """Layers of ``run`` that ``other`` has not: each topmost one with all below it, repeats as one, costliest first."""
    known, rows = {row.path for row in other.layers}, {row.path: row for row in run.layers}
    inside: dict[str, list[LayerRow]] = {}
    for row in run.layers:
        if row.path not in known:
            inside.setdefault(_topmost(row, rows, known), []).append(row)
    found = []
    for node in _nodes(run):
        tops = tuple(path for path in node.paths if path in inside)
        if tops:
            sums = add_up([amounts_of(row) for path in tops for row in inside[path]])
            amounts = (sums.layers, sums.backward_ns, sums.forward_ns, sums.saved_bytes)
            found.append(Presence(node.place, rows[tops[0]].class_name, tops, *amounts))
    return tuple(sorted(found, key=lambda one: -(one.backward_ns + one.forward_ns)))


def _topmost(row: LayerRow, rows: Mapping[str, LayerRow], known: Collection[str]) -> str:
    """The highest layer above ``row`` that only this run has, by way of others that only this run has."""
    seen: set[str] = set()
    while row.parent is not None and row.parent in rows and row.parent not in known and row.path not in seen:
        seen.add(row.path)
        row = rows[row.parent]
    return row.path


def _repeats(before: RunData, after: RunData) -> Iterator[_Group]:
    """Layers that both runs have, together where both runs' trees fold them together."""
    folded = {path: number for number, node in enumerate(_nodes(before)) for path in node.paths}
    for node in _nodes(after):
        together: dict[int, list[str]] = {}
        for path in node.paths:
            if path in folded:
                together.setdefault(folded[path], []).append(path)
        for paths in together.values():
            yield _part(_Group(node.place, node.paths), paths)


def _nodes(run: RunData) -> list[FoldedNode]:
    """Nodes of the folded tree, also of those rows that stand for a container and its only child."""
    return [node for root in build_tree(run.layers, 0, run.workload.model) for node in root.walk()]


def _part(group: _Group, paths: Sequence[str]) -> _Group:
    """Some of a group: one of several repeats goes by its own path."""
    return _Group(paths[0] if len(paths) == 1 < len(group.paths) else group.address, tuple(paths))


def _class_name(group: _Group, spreads: Spreads) -> str:
    return class_words(*(spread.by_path[group.paths[0]].class_name for spread in spreads))


def _alike(group: _Group, spreads: Spreads) -> Iterator[_Group]:
    """The repeats whose change is that of the others but for noise, and each odd one by itself."""
    paths, odd = list(group.paths), []
    while len(paths) > 1:
        index = None
        for metric in (_BACKWARD, _FORWARD):
            if index is None:
                index = _odd(paths, spreads, metric)
        if index is None:
            break
        odd.append(paths.pop(index))
    yield _part(group, paths)
    for path in odd:
        yield _part(group, [path])


def _odd(paths: Sequence[str], spreads: Spreads, metric: str) -> int | None:
    before, after = ([measured(spread, [path], metric)[0] for path in paths] for spread in spreads)
    floor = max(spread.relative(TIMES[metric].phase) for spread in spreads)
    return odd_one(list(zip(before, after, strict=True)), floor)
