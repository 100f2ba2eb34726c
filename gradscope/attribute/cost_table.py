"""Sums self times into cells of (category, layer, line, op): the one table from which all results are grouped.

Means over the steps are rounded once, cell by cell. Every number in a report is a sum of cells, so all of them add up
to the nanosecond, whichever way they are grouped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradscope import ops
from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.gaps import names_of_waits
from gradscope.attribute.nodes import OUTSIDE, nearest
from gradscope.attribute.rows import OWN_ROWS, BoolColumn, Category, outside_of
from gradscope.attribute.sharding import piece_of
from gradscope.attribute.survey import NO_LINE
from gradscope.tables import OWN, EventTable, Int8Column, IntColumn, RowKind, SpanTable

PYTHON = "(python)"  # a module's own time outside every op
ENGINE = "(engine)"

_PYTHON_ROWS = (
    RowKind.CALL,
    RowKind.ANNOTATION,
    RowKind.GRAPH,
    RowKind.LINE,
    RowKind.STEP,
    RowKind.RECOMPUTE,
    RowKind.HOOK,
)


@dataclass(frozen=True, slots=True)
class Cells:
    """One row a cell; times per step."""

    category: Int8Column
    owner: IntColumn
    line: IntColumn
    op: IntColumn  # index into ``ops``
    self_ns: IntColumn
    calls: IntColumn  # over all steps
    ops: tuple[str, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Given:
    """What entries were spent on, where that is not what their rows were: pieces of compiled kernels."""

    category: Int8Column
    owner: IntColumn  # OUTSIDE for no layer
    line: IntColumn  # NO_LINE for none
    estimated: BoolColumn  # the kernel was split by an estimate

    def only(self, places: IntColumn) -> Given:
        """Those at these places."""
        return Given(self.category[places], self.owner[places], self.line[places], self.estimated[places])


@dataclass(frozen=True, slots=True)
class Contribution:
    """Time that belongs to a row: the row's own CPU time, or a kernel that it launched."""

    row: IntColumn
    op: IntColumn
    ns: IntColumn
    calls: IntColumn
    apart: Category | None = None  # of no line, and spent on this; None: as its row
    layer: IntColumn | None = None  # of each entry, where it is apart; None: of no layer
    communicates: bool = False  # waits for other ranks, whatever the row does
    kernel: IntColumn | None = None  # of each entry its place among those of the device; None: the row's own time
    given: Given | None = None

    def only(self, places: IntColumn) -> Contribution:
        """The entries at these places."""
        return Contribution(
            self.row[places],
            self.op[places],
            self.ns[places],
            self.calls[places],
            self.apart,
            None if self.layer is None else self.layer[places],
            self.communicates,
            None if self.kernel is None else self.kernel[places],
            None if self.given is None else self.given.only(places),
        )

    def category(self, assigned: Assigned) -> Int8Column:
        """Return what each entry was spent on."""
        if self.given is not None:
            return self.given.category
        if self.apart is None:
            return assigned.rows.category[self.row]
        return np.full(len(self.row), self.apart, np.int8)

    def owner(self, assigned: Assigned) -> IntColumn:
        """Return the layer of each entry; OUTSIDE for none."""
        if self.given is not None:
            return self.given.owner
        if self.apart is None:
            return assigned.rows.owner[self.row]
        return np.full(len(self.row), OUTSIDE, np.int64) if self.layer is None else self.layer

    def line(self, assigned: Assigned) -> IntColumn:
        """Return the source line of each entry; NO_LINE for none."""
        if self.given is not None:
            return self.given.line
        return assigned.line[self.row] if self.apart is None else np.full(len(self.row), NO_LINE, np.int64)


def make_cells(assigned: Assigned, contributions: list[Contribution], ops: tuple[str, ...]) -> Cells:
    """Group the contributions of the measured steps by category, layer, line and op."""
    row = np.concatenate([part.row for part in contributions])
    op = np.concatenate([part.op for part in contributions])
    ns = np.concatenate([part.ns for part in contributions])
    calls = np.concatenate([part.calls for part in contributions])
    category = np.concatenate([part.category(assigned) for part in contributions])
    owner = np.concatenate([part.owner(assigned) for part in contributions])
    line = np.concatenate([part.line(assigned) for part in contributions])
    measured = assigned.steps.of_row[row] >= 0
    op, ns, calls = op[measured], ns[measured], calls[measured]
    category, owner, line = category[measured], owner[measured], line[measured]
    # One integer key a row: np.unique over it is a single sort.
    owners, lines = int(owner.max(initial=0)) + 3, int(line.max(initial=0)) + 3
    key = ((category.astype(np.int64) * owners + owner + 2) * lines + line + 2) * len(ops) + op
    unique, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    total = np.zeros(len(unique), np.int64)
    np.add.at(total, inverse, ns)
    count = np.zeros(len(unique), np.int64)
    np.add.at(count, inverse, calls)
    steps = max(len(assigned.steps), 1)
    return Cells(
        category=category[first],
        owner=owner[first],
        line=line[first],
        op=op[first],
        self_ns=(total + steps // 2) // steps,
        calls=count,
        ops=ops,
        steps=steps,
    )


def own_contribution(assigned: Assigned, self_ns: IntColumn) -> tuple[Contribution, tuple[str, ...]]:
    """Return each row's own time, under the name that a reader knows it by."""
    table = assigned.skeleton.table
    skeleton = assigned.skeleton
    names = (*map(piece_of, table.names), PYTHON, ENGINE, OWN, ops.WAIT, *(f"({name})" for name in skeleton.outside))
    names += names_of_waits(table)
    first: dict[str, int] = {}
    op = np.array([first.setdefault(name, place) for place, name in enumerate(names)], np.int64)[table.name]
    op, names = _with_pieces(table, op, names)
    python = np.isin(table.kind, _PYTHON_ROWS)
    op[python] = len(table.names)
    op[table.kind == RowKind.BACKWARD] = len(table.names) + 1
    op[np.isin(table.kind, OWN_ROWS)] = len(table.names) + 2
    if skeleton.outside:
        inside = outside_of(skeleton)
        mine = (inside >= 0) & (assigned.rows.category == Category.OTHER)
        op[mine] = len(table.names) + 4 + inside[mine]
    # The row of a node's function repeats the name of the engine's row around it: one call, not two.
    calls = np.ones(len(table), np.int64)
    inner = np.flatnonzero(table.parent >= 0)
    above = table.parent[inner]
    repeats = np.isin(table.kind[above], (RowKind.NODE, RowKind.ACCUMULATE)) & (table.name[inner] == table.name[above])
    calls[inner[repeats]] = 0
    calls[table.kind == RowKind.PARAMETER] = 0  # a mark within what is counted
    return Contribution(np.arange(len(table)), op, self_ns, calls), names


def _with_pieces(table: EventTable, op: IntColumn, names: tuple[str, ...]) -> tuple[IntColumn, tuple[str, ...]]:
    """Call collectives, and waits for them, by the piece of FSDP's work that they are a part of, where they are."""
    rows = np.flatnonzero(table.kind == RowKind.COMMUNICATION)
    around = nearest(table, rows, (RowKind.SHARDING,))
    rows, around = rows[around >= 0], around[around >= 0]
    if not len(rows):
        return op, names
    pieces: dict[tuple[int, int], int] = {}
    op = op.copy()
    for row, piece in zip(rows.tolist(), around.tolist(), strict=True):
        op[row] = pieces.setdefault((int(op[piece]), int(op[row])), len(names) + len(pieces))
    return op, (*names, *(f"{names[piece]}: {names[inner]}" for piece, inner in pieces))


def move_recompute_gaps(assigned: Assigned, own: Contribution) -> list[Contribution]:
    """Charge the Python code between recomputed ops to the recompute instead of to the node that triggered it.

    A function that runs forward again (reentrant checkpointing, or one written by hand) does so before anything
    else: what it spends up to the end of the last recomputed op is the recompute's, each piece of it that of the
    recomputed row that follows.
    """
    table, category = assigned.skeleton.table, assigned.rows.category
    again = np.flatnonzero((category == Category.RECOMPUTE) & (table.parent >= 0))
    above = table.parent[again]
    again = again[(category[above] == Category.LAYER) & (table.kind[above] == RowKind.OP)]
    if not len(again):
        return [own]
    until = np.full(len(table), np.iinfo(np.int64).min)  # no child of a function that recomputes nothing counts
    np.maximum.at(until, table.parent[again], table.start_ns[again])
    children = np.flatnonzero(table.parent >= 0)
    children = children[table.start_ns[children] <= until[table.parent[children]]]
    children = children[np.lexsort((table.start_ns[children], table.parent[children]))]
    parent = table.parent[children]
    first = np.diff(parent, prepend=-1) != 0
    before = np.where(first, table.start_ns[parent], np.concatenate([[0], table.end_ns[children[:-1]]]))
    gap = np.maximum(table.start_ns[children] - before, 0)
    # The last child of each function that is looked at is a recomputed one: there is always one that follows.
    place = np.where(np.isin(children, again), np.arange(len(children)), len(children))
    follows = children[np.minimum.accumulate(place[::-1])[::-1]]
    gap = _at_most(gap, parent.astype(np.int64), own.ns)
    ns = own.ns.copy()
    np.subtract.at(ns, parent, gap)
    python = np.full(len(children), len(table.names), np.int64)  # PYTHON, see own_contribution
    return [Contribution(own.row, own.op, ns, own.calls), Contribution(follows, python, gap, np.zeros_like(gap))]


def _at_most(gap: IntColumn, parent: IntColumn, own_ns: IntColumn) -> IntColumn:
    """The gaps of each function, cut where they add up to more than its own time: children on other threads overlap."""
    total = np.zeros(len(own_ns), np.int64)
    np.add.at(total, parent, gap)
    over = total[parent] > own_ns[parent]
    cut: IntColumn = np.where(over, gap * own_ns[parent] // np.maximum(total[parent], 1), gap)
    return cut


def totals_by_step(assigned: Assigned, contributions: list[Contribution]) -> dict[Category, IntColumn]:
    """Return the ns of each measured step, by category."""
    steps = len(assigned.steps)
    found = {category: np.zeros(max(steps, 0), np.int64) for category in Category}
    for part in contributions:
        step, of_part = assigned.steps.of_row[part.row], part.category(assigned)
        for category, total in found.items():
            mine = (step >= 0) & (of_part == category)
            np.add.at(total, step[mine], part.ns[mine])
    return found


def layer_steps(
    assigned: Assigned, contributions: list[Contribution], layers: int, category: Category = Category.LAYER
) -> IntColumn:
    """``[layer, step]``: ns of the layers' own rows of one category, for the spread of each layer."""
    steps = len(assigned.steps)
    total = np.zeros((layers, steps), np.int64)
    for part in contributions:
        step, owner = assigned.steps.of_row[part.row], part.owner(assigned)
        mine = (step >= 0) & (owner >= 0) & (part.category(assigned) == category)
        np.add.at(total, (owner[mine], step[mine]), part.ns[mine])
    return total


def hook_cost(table: EventTable, calls: SpanTable) -> IntColumn:
    """For each row the ns of its own time in which gradscope's hooks ran, as they timed themselves.

    A hook that opens or closes a call's row runs in part before and behind it, which is the time of the row around it.
    The hook reads the clock behind the row's beginning and before its end: the little that the row is longer than the
    hooks think is a part of opening and closing it.
    """
    cost = np.zeros(len(table), np.int64)
    if calls.inside_ns is None or calls.around_ns is None or calls.open_ns is None:
        return cost
    rows = np.flatnonzero(table.kind == RowKind.CALL)
    number = table.argument[rows]
    around = calls.around_ns[number]
    within = np.clip(table.end_ns[rows] - table.start_ns[rows] - calls.open_ns[number], 0, around)
    cost[rows] = calls.inside_ns[number] + within
    above = table.parent[rows]
    np.add.at(cost, above[above >= 0], (around - within)[above >= 0])
    return cost


def take_out(own: Contribution, cost: IntColumn, names: tuple[str, ...]) -> tuple[Contribution, Contribution]:
    """``own`` without the cost, and the cost, which is no layer's; never more than a row's own time.

    Args:
        own: every row's own time, in the order of the rows.
        cost: of each row, see :func:`hook_cost`.
        names: of the operations; the cost is named as all that gradscope does in a step.
    """
    taken = np.minimum(cost, own.ns)
    rows = np.flatnonzero(taken > 0)
    op = np.full(len(rows), names.index(OWN), np.int64)
    hooks = Contribution(own.row[rows], op, taken[rows], np.zeros(len(rows), np.int64), Category.OTHER)
    return Contribution(own.row, own.op, own.ns - taken, own.calls), hooks
