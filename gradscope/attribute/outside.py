"""Which operations outside of every module are forward: a functional loss is, data and clipped gradients are not."""

from __future__ import annotations

import numpy as np

from gradscope.attribute.nodes import nearest
from gradscope.attribute.rows import BoolColumn, Category, Rows, Steps
from gradscope.tables import EventTable, IntColumn, RowKind

_LOADING = "enumerate(DataLoader)#"
_LOOKUP = "TorchDynamo Cache Lookup"


def adopt_outside_ops(table: EventTable, rows: Rows, steps: Steps) -> Rows:
    """Count ops outside of every module as forward once a step's forward has begun: a functional loss, say.

    What a step computes before its first module call prepares data and stays between the phases, as do the batches of
    a DataLoader at any time, and what is done with gradients once they are there: clipping them, unscaling them, an
    update by hand. The forward pass of a step without any module call begins with what makes the first node: an update
    by hand may lie in front of it, where steps end with the backward pass.
    """
    step = steps.of_row
    sharding = _inside_sharding(table)
    loose = (rows.category == Category.OTHER) & (step >= 0)
    loose &= np.isin(table.kind, (RowKind.OP, RowKind.ADD)) | sharding
    loose &= ~_is_loading(table, loose)
    begun = _begun(table, rows, loose, steps)
    loose[loose] = table.start_ns[loose] >= begun[step[loose]]
    loose &= ~_is_behind_passes(table, rows, loose, step) | sharding
    loose &= ~_below_collectives(table, loose) | sharding
    asked = np.flatnonzero(loose)
    loose[asked] = nearest(table, asked, (RowKind.CALL,)) < 0  # all others are forward already, or no layer's
    category = rows.category.copy()
    category[loose] = Category.FORWARD
    return Rows(category, rows.owner)


def _begun(table: EventTable, rows: Rows, loose: BoolColumn, steps: Steps) -> IntColumn:
    """Return when the forward pass of each step begins; the step itself where nothing tells."""
    calls = np.flatnonzero((table.kind == RowKind.CALL) & (rows.category == Category.FORWARD) & (steps.of_row >= 0))
    found = _first(table, calls, steps)
    asked = np.flatnonzero(loose)
    asked = asked[found[steps.of_row[asked]] < 0]  # in steps without a call
    makes = np.zeros(len(table), bool)
    makes[asked] = _makes_nodes(table, _outermost(table, loose)[asked])
    _follow_lookups(table, makes, asked)
    found = np.where(found < 0, _first(table, np.flatnonzero(makes), steps), found)
    return np.where(found < 0, steps.start_ns, found)


def _first(table: EventTable, rows: IntColumn, steps: Steps) -> IntColumn:
    """Return when the first of these rows of each step begins; -1 where there is none."""
    latest = np.iinfo(np.int64).max
    first = np.full(len(steps.start_ns), latest)
    np.minimum.at(first, steps.of_row[rows], table.start_ns[rows])
    return np.where(first < latest, first, -1)


def _is_behind_passes(table: EventTable, rows: Rows, asked: BoolColumn, step: IntColumn) -> BoolColumn:
    """Return which of the rows that are ``asked`` for are what is done with gradients, or with what was trained.

    The last thing in front of them is a backward pass or an update, and they make no node of autograd's: else they are
    a loss, or in a trace without calls of modules the forward pass of the next step.
    """
    found = np.zeros(len(table), bool)
    places = np.flatnonzero(asked)
    marks = np.isin(table.kind, (RowKind.BACKWARD, RowKind.OPTIMIZER))
    marks |= (table.kind == RowKind.CALL) & (rows.category == Category.FORWARD)
    before = np.flatnonzero(marks & (step >= 0))
    if not len(places) or not len(before):
        return found
    before = before[np.argsort(table.start_ns[before], kind="stable")]
    place = np.searchsorted(table.start_ns[before], table.start_ns[places], side="right") - 1
    last = before[np.maximum(place, 0)]
    passed = (place >= 0) & (step[last] == step[places]) & (table.kind[last] != RowKind.CALL)
    passed &= table.end_ns[last] <= table.start_ns[places]
    found[places] = passed & ~_makes_nodes(table, _outermost(table, asked)[places])
    _follow_lookups(table, found, places)
    return found


def _follow_lookups(table: EventTable, found: BoolColumn, places: IntColumn) -> None:
    """Where Dynamo looks for compiled code is found to be what that code is, which comes next in its thread."""
    lookups = [number for number, name in enumerate(table.names) if name.startswith(_LOOKUP)]
    for row in places[np.isin(table.name[places], lookups)].tolist():
        mine = places[(table.thread[places] == table.thread[row]) & (table.start_ns[places] >= table.end_ns[row])]
        if len(mine):
            found[row] = found[mine[np.argmin(table.start_ns[mine])]]


def _makes_nodes(table: EventTable, asked: IntColumn) -> BoolColumn:
    """Check of each of these rows that the next operation of its thread sees another number for the next node.

    Where gradients may be asked for each operation's row has the number that is next, whether it makes a node or not.
    One that has none itself, a compiled region say, begins with that of the first inside.
    """
    found = np.zeros(len(asked), bool)
    unknown = not (table.kind == RowKind.CALL).any()  # of the last: where modules are seen, it is more likely none
    sees = np.isin(table.kind, (RowKind.OP, RowKind.ADD)) & (table.sequence >= 0) & (table.forward_thread == 0)
    for thread in np.unique(table.thread[asked]).tolist():
        mine = table.thread[asked] == thread
        seen = np.flatnonzero(sees & (table.thread == thread))
        first, behind = (
            np.searchsorted(table.start_ns[seen], edges[asked[mine]], side="left")
            for edges in (table.start_ns, table.end_ns)
        )
        inside, known = first < behind, behind < len(seen)
        made = (table.kind == RowKind.NODE) & (table.forward_thread == thread)
        latest = int(table.sequence[made].max(initial=-1))
        moved = np.full(len(behind), unknown)
        last = inside & ~known  # a node that is run later tells that it was made
        moved[last] |= table.sequence[seen[first[last]]] <= latest
        moved[known] = table.sequence[seen[behind[known]]] > table.sequence[seen[first[known]]]
        found[mine] = inside & moved
    return found


def _outermost(table: EventTable, asked: BoolColumn) -> IntColumn:
    """Of each row that is ``asked`` for the outermost around it that is, itself where there is none.

    What lies between may be another one: the row of a compiled graph, say.
    """
    above = table.parent.astype(np.int64)
    while (between := (above >= 0) & ~asked[above]).any():
        above[between] = above[above[between]]
    top = np.arange(len(table))
    inner = asked & (above >= 0)
    top[inner] = above[inner]
    while not np.array_equal(above := top[top], top):
        top = above
    return top


def _below_collectives(table: EventTable, asked: BoolColumn) -> BoolColumn:
    """Return which of the rows that are ``asked`` for a collective runs: a thread of the process group, meanwhile."""
    found = np.zeros(len(table), bool)
    rows = np.flatnonzero(asked)
    found[rows] = nearest(table, rows, (RowKind.COMMUNICATION,)) >= 0
    return found


def _inside_sharding(table: EventTable) -> BoolColumn:
    """Return which rows are FSDP's or lie in one that is."""
    if not (table.kind == RowKind.SHARDING).any():
        return np.zeros(len(table), bool)
    return nearest(table, np.arange(len(table)), (RowKind.SHARDING,)) >= 0


def _is_loading(table: EventTable, asked: BoolColumn) -> BoolColumn:
    """Return which of the rows that are ``asked`` for are of a DataLoader's next batch: torch marks it in the trace."""
    found = np.zeros(len(table), bool)
    names = [number for number, name in enumerate(table.names) if name.startswith(_LOADING)]
    if names:
        rows = np.flatnonzero(asked)
        around = nearest(table, rows, (RowKind.ANNOTATION,))
        found[rows] = (around >= 0) & np.isin(table.name[around], names)
    return found
