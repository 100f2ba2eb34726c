"""Where allocator events happened: category, layer, line and op of each, from the trace row around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.attribute.align_steps import Assigned, assign_surveyed
from gradscope.attribute.nodes import NodeLabels, NodeNumbers, nearest
from gradscope.attribute.rows import Category, Skeleton
from gradscope.attribute.survey import SurveyInput, read_survey
from gradscope.tables import EventTable, IntColumn, RowKind

NO_PLACE = -1
PHASES = {
    Category.OTHER: "other",
    Category.FORWARD: "forward",
    Category.RECOMPUTE: "recompute",
    Category.OPTIMIZER: "optimizer",
}
_OPS = (RowKind.OP, RowKind.ADD, RowKind.COMMUNICATION)
_BACKWARD = "backward"


def phase_of(category: int) -> str:
    """ "forward", "backward", "recompute", "optimizer" or "other"."""
    return PHASES.get(Category(category), _BACKWARD)


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """The memory pass's trace with every row assigned."""

    assigned: Assigned
    call_labels: NodeLabels
    line_labels: NodeLabels
    numbers: NodeNumbers
    outer_op: IntColumn  # of each row the outermost op around it, itself included; NO_PLACE

    @property
    def table(self) -> EventTable:
        return self.assigned.skeleton.table

    @property
    def start_ns(self) -> int:
        """Start of the measured step."""
        return int(self.assigned.steps.start_ns[0])

    @property
    def end_ns(self) -> int:
        """End of the measured step."""
        return int(self.assigned.steps.end_ns[0])

    def category(self, rows: IntColumn) -> IntColumn:
        """Return the category of each row; OTHER for no row."""
        return np.where(rows >= 0, self.assigned.rows.category[rows], Category.OTHER)

    def owner(self, rows: IntColumn) -> IntColumn:
        """Return the layer of each row; -1 outside every module."""
        return np.where(rows >= 0, np.maximum(self.assigned.rows.owner[rows], NO_PLACE), NO_PLACE)

    def line(self, rows: IntColumn) -> IntColumn:
        """Return the source line of each row; -1 for none."""
        return np.where(rows >= 0, np.maximum(self.assigned.line[rows], NO_PLACE), NO_PLACE)

    def op(self, rows: IntColumn) -> list[str]:
        """Name of the outermost op or node around each row; "" for none."""
        outer = np.where(rows >= 0, self.outer_op[rows], NO_PLACE)
        return self._names(outer)

    def leaf(self, rows: IntColumn) -> list[str]:
        """Name of each row itself where it is an op; "" for none."""
        own = np.where((rows >= 0) & np.isin(self.table.kind[rows], _OPS), rows, NO_PLACE)
        return self._names(own)

    def _names(self, rows: IntColumn) -> list[str]:
        names = self.table.names
        return [names[number] if row >= 0 else "" for row, number in zip(rows, self.table.name[rows], strict=True)]

    def made_by(self, sequences: Sequence[int]) -> tuple[IntColumn, IntColumn]:
        """Return the layer and line that made the node of each sequence number; -1 for none."""
        numbers = np.array(sequences, np.int64)
        thread = np.full(len(numbers), _forward_thread(self.table), np.int32)
        layer = np.maximum(self.call_labels.look_up(thread, numbers), NO_PLACE)
        line = np.maximum(self.line_labels.look_up(thread, numbers), NO_PLACE)
        # A node made while backward ran lies in no span: it belongs where its own row was put.
        row_of = dict(zip(self.numbers.sequence.tolist(), self.numbers.row.tolist(), strict=True))
        rows = np.array([row_of.get(number, NO_PLACE) for number in numbers.tolist()], np.int64)
        ran = rows >= 0
        return np.where(ran, self.owner(rows), layer), np.where(ran, self.line(rows), line)

    def last_run(self) -> dict[int, int]:
        """Return the sequence number of each node that ran in the measured step -> when it ended."""
        ends = self.table.end_ns[self.numbers.row]
        inside = self.assigned.steps.of_row[self.numbers.row] >= 0
        return dict(zip(self.numbers.sequence[inside].tolist(), ends[inside].tolist(), strict=True))

    def recompute_owners(self) -> dict[int, int]:
        """Sequence number of each node that set off a recompute in the measured step -> the layer that called it."""
        table, assigned = self.table, self.assigned
        rows = assigned.skeleton.recomputed
        rows = rows[assigned.steps.of_row[rows] == 0]
        node = nearest(table, rows, (RowKind.NODE,))
        number = dict(zip(self.numbers.row.tolist(), self.numbers.sequence.tolist(), strict=True))
        owner = np.maximum(assigned.rows.owner[rows], NO_PLACE)
        return {number[at]: layer for at, layer in zip(node.tolist(), owner.tolist(), strict=True) if at in number}


def read_places(survey: SurveyInput) -> MemoryTrace:
    """Assign every row of the memory pass's trace, from its own notes: it is its own survey."""
    skeleton = survey.skeleton
    notes = read_survey(survey)
    assigned = assign_surveyed(skeleton, 1, notes, survey.line_spans)
    table = skeleton.table
    return MemoryTrace(
        assigned,
        NodeLabels(table, skeleton.calls, RowKind.CALL),
        NodeLabels(table, survey.line_spans, RowKind.LINE),
        skeleton.numbers,
        _outer_ops(skeleton),
    )


def _outer_ops(skeleton: Skeleton) -> IntColumn:
    """Return the outermost op between each row and the module, line or node that called it."""
    table = skeleton.table
    is_op = np.isin(table.kind, _OPS)
    above_is_op = (table.parent >= 0) & is_op[table.parent]
    marks = np.where(is_op & above_is_op, -9, np.where(is_op, np.arange(len(table)), NO_PLACE))
    return skeleton.levels.propagate(marks, NO_PLACE).astype(np.int64)


def _forward_thread(table: EventTable) -> int:
    rows = np.flatnonzero(table.forward_thread > 0)
    return int(table.forward_thread[rows[0]]) if len(rows) else 0


def enclosing_node_end(table: EventTable, rows: IntColumn) -> IntColumn:
    """End of the backward node around each row; the smallest number where there is none."""
    found = np.full(len(rows), np.iinfo(np.int64).min)
    real = np.flatnonzero(rows >= 0)
    node = nearest(table, rows[real], (RowKind.NODE, RowKind.ACCUMULATE))
    inside = node >= 0
    found[real[inside]] = table.end_ns[node[inside]]
    return found
