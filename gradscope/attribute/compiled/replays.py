"""What a device did for the graphs that ran: of a CUDA graph's replay no row tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.compiled.order import is_of
from gradscope.attribute.nodes import nearest
from gradscope.attribute.rows import INHERIT
from gradscope.ops import COLLECTIVE_KERNEL
from gradscope.tables import EventTable, IntColumn, RowKind

_OPERATIONS = (RowKind.OP, RowKind.ADD, RowKind.COMMUNICATION)


def rows_below(table: EventTable, regions: IntColumn) -> dict[int, list[int]]:
    """The rows directly below each of these, and below annotations in these, in the order of time."""
    found: dict[int, list[int]] = defaultdict(list)
    rows = np.flatnonzero((table.parent >= 0) & (table.kind != RowKind.ANNOTATION))
    above = table.parent[rows].astype(np.int64)
    around = nearest(table, above, (RowKind.GRAPH, *_OPERATIONS))
    inside = np.isin(around, regions)
    for row, region in zip(rows[inside].tolist(), around[inside].tolist(), strict=True):
        found[region].append(row)
    return found


def zeros_beside(table: EventTable, regions: IntColumn) -> dict[int, list[int]]:
    """Of each of these runs the rows in front of it, in the same node of backward, that make zeros.

    Autograd makes them for what a graph returned and no gradient has come for.
    """
    if "aten::zeros" not in table.names:
        return {}
    rows = np.flatnonzero(table.name == table.names.index("aten::zeros"))
    node_of = table.parent[regions]
    found: dict[int, list[int]] = defaultdict(list)
    for row in rows[np.isin(table.parent[rows], node_of[node_of >= 0])].tolist():
        behind = regions[(node_of == table.parent[row]) & (regions > row)]
        if len(behind):
            found[int(behind[0])].append(row)
    return found


@dataclass(frozen=True, slots=True)
class Launched:
    """What a device did for the graphs that ran.

    Attributes:
        below: of each run its rows.
        by_row: of the row of a run, or a row directly below one, the activities launched there, in order of start.
    """

    table: EventTable
    below: Mapping[int, Sequence[int]]
    by_row: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, assigned: Assigned, regions: IntColumn, below: Mapping[int, Sequence[int]]) -> Launched:
        table = assigned.skeleton.table
        found: dict[int, list[int]] = defaultdict(list)
        if table.kernels is not None:
            marks = np.full(len(table), INHERIT, np.int64)
            tops = np.array([*regions.tolist(), *(row for rows in below.values() for row in rows)], np.int64)
            marks[tops] = tops
            top = assigned.skeleton.levels.propagate(marks, -1).astype(np.int64)
            communicates = np.array([bool(COLLECTIVE_KERNEL.search(name)) for name in table.kernels.names], bool)
            wanted = (table.kernels.row >= 0) & ~communicates[table.kernels.name]
            for activity in np.flatnonzero(wanted).tolist():
                row = int(top[table.kernels.row[activity]])
                if row >= 0:
                    found[row].append(activity)
        return cls(table, below, found)

    def activities(self, region: int, kernels: Sequence[str], *, with_rows: bool) -> list[int]:
        """What a run launched under no operation: a CUDA graph's replay.

        Args:
            with_rows: what its operations launched, too: a graph that is replayed in parts runs others between them.
        """
        found = list(self.by_row.get(region, ()))
        if found and with_rows:
            for row in self.below.get(region, ()):
                name = self.table.names[self.table.name[row]]
                if any(is_of(name, kernel) for kernel in kernels):
                    found += self.by_row.get(row, ())
        return sorted(found)

    def names(self, activities: Sequence[int]) -> list[str]:
        """What the device calls these."""
        kernels = self.table.kernels
        return [] if kernels is None else [kernels.names[kernels.name[each]] for each in activities]
