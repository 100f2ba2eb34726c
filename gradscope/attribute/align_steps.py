"""Carries the survey's notes over to every timed step, and assigns all rows of the timed trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from gradscope.attribute.linematch import NOT_TOLD, calls_made, lines_of_nodes, operations_of
from gradscope.attribute.nodes import OUTSIDE, UNKNOWN, nearest
from gradscope.attribute.outside import adopt_outside_ops
from gradscope.attribute.passes import Passes, Replayed, replay
from gradscope.attribute.rows import (
    INHERIT,
    BoolColumn,
    Rows,
    Skeleton,
    Steps,
    assign_rows,
    find_steps,
    is_module_hook,
)
from gradscope.attribute.survey import NO_LINE, Notes, Receiver, keys, match_step, unit_rows
from gradscope.tables import IntColumn, RowKind, SpanTable


@dataclass(frozen=True, slots=True)
class Assigned:
    """Every row of the timed trace with all that it is charged to."""

    skeleton: Skeleton
    rows: Rows
    steps: Steps
    line: IntColumn  # index of the source line; NO_LINE
    notes: tuple[str, ...]


def assign(
    skeleton: Skeleton,
    skip: int,
    survey: Notes | None,
    passes: Passes | None = None,
    left_out: Collection[int] = (),
) -> Assigned:
    """Assign every row; ``survey`` None leaves lines out.

    Args:
        skip: steps at the start of the trace that do not count.
        left_out: numbers of other steps that do not count, from the start of the trace.
        passes: the graphs of the backward passes; where a pass was not noted, parameters are the survey's, or else
            guessed from their neighbours.
    """
    nodes = skeleton.nodes
    steps = find_steps(skeleton, skip, left_out=left_out)
    carried = _Carried(len(skeleton.table), len(nodes.row))
    units = unit_rows(skeleton)
    units = units[steps.of_row[units] >= 0]
    # Owners of forward units are needed as keys; what the survey adds later changes backward rows only.
    plain = assign_rows(skeleton, np.full(len(nodes.row), OUTSIDE), *_no_sums())
    if survey is not None:
        carried.fill(skeleton, steps, survey, units, plain.owner[units])
    if passes is not None:
        carried.fill_passes(skeleton, replay(skeleton, passes))
    return _assigned(skeleton, steps, carried, surveyed=survey is not None and survey.graphs_known)


def assign_surveyed(skeleton: Skeleton, skip: int, notes: Notes, line_spans: SpanTable) -> Assigned:
    """Assign every row of the very trace that the notes were read from.

    Args:
        skip: steps at the start of the trace that do not count.
        line_spans: the source lines marked in the trace.
    """
    table = skeleton.table
    carried = _Carried(len(table), len(skeleton.nodes.row))
    carried.fill_own(skeleton, notes)
    marked = np.flatnonzero(table.kind == RowKind.LINE)
    carried.line[marked] = line_spans.label[table.argument[marked]]
    carried.line[marked[carried.line[marked] < 0]] = INHERIT
    return _assigned(skeleton, find_steps(skeleton, skip, at_markers=True), carried, surveyed=notes.graphs_known)


def _assigned(skeleton: Skeleton, steps: Steps, carried: _Carried, *, surveyed: bool) -> Assigned:
    table = skeleton.table
    accumulate_owner = _accumulate_owners(skeleton, carried.parameter_owner)
    sum_rows, sum_owner = _sums(skeleton, carried, surveyed)
    rows = assign_rows(skeleton, accumulate_owner, sum_rows, sum_owner)
    rows = adopt_outside_ops(table, rows, steps)
    carried.line[_without_line(skeleton)] = NO_LINE
    line = skeleton.levels.propagate(carried.line, NO_LINE).astype(np.int64)
    return Assigned(skeleton, rows, steps, line, tuple(carried.describe()))


def _without_line(skeleton: Skeleton) -> IntColumn:
    """Return rows whose Python has no line: around ops that are recomputed since some node unpacked what it had saved.

    The line of that node has nothing to do with it, nor with the hooks on what it made. A Function of Python's that
    calls modules in its backward does so itself: theirs is the line that applied it.
    """
    table = skeleton.table
    hooks = np.flatnonzero(table.kind == RowKind.HOOK)
    again = np.flatnonzero(skeleton.in_backward & np.isin(table.kind, (RowKind.CALL, RowKind.RECOMPUTE)))
    around = nearest(table, again, (RowKind.NODE,))
    # Torch's own nodes are numbered: MulBackward0.
    of_python = np.array([not name[-1:].isdigit() for name in table.names], bool)
    again = again[(around < 0) | ~of_python[table.name[around]] | (table.kind[again] == RowKind.RECOMPUTE)]
    return np.concatenate([again, hooks])


def _no_sums() -> tuple[IntColumn, IntColumn]:
    return np.empty(0, np.int64), np.empty(0, np.int64)


class _Carried:
    """The survey's notes on the rows of the timed trace."""

    def __init__(self, rows: int, nodes: int) -> None:
        self.line = np.full(rows, INHERIT, np.int64)
        self.parameter_owner = np.full(nodes, UNKNOWN, np.int64)
        self.receivers: dict[int, tuple[Receiver, ...]] = {}  # by row of the node
        self.covered: set[int] = set()  # rows of nodes whose pass was noted
        self.misfits: frozenset[int] = frozenset()  # rows of nodes of passes that were wired otherwise
        self.misfit_passes = 0
        self.steps = 0
        self.exact = 0
        self.units = 0
        self.matched = 0
        self.lines_known = False
        self.doubtful = False  # whether steps ran the same operations on several lines

    def fill(self, skeleton: Skeleton, steps: Steps, survey: Notes, units: IntColumn, owner: IntColumn) -> None:
        table, nodes = skeleton.table, skeleton.nodes
        survey = self._agreed(survey)
        self.lines_known = bool((survey.unit_line != NO_LINE).any())
        unit_step, node_step = steps.of_row[units], steps.of_row[nodes.row]
        names = table.names
        differing: list[IntColumn] = []
        for step in range(len(steps)):
            in_step = np.flatnonzero(unit_step == step)
            node_places = np.flatnonzero(node_step == step)
            unit_keys = keys(names, owner[in_step], table.name[units[in_step]])
            node_keys = keys(names, nodes.owner[node_places], table.name[nodes.row[node_places]])
            unit_match, node_match, exact = match_step(survey, unit_keys, node_keys)
            self._note_nodes(skeleton, node_places, np.array(node_match, np.int64), survey)
            calls = np.flatnonzero((table.kind == RowKind.CALL) & (steps.of_row == step))
            # The same operations may be those of another branch, whose calls stand on other lines.
            same_calls = survey.called is None or survey.called == calls_made(skeleton, calls)
            if survey.matcher is None or (unit_keys == survey.unit_key and same_calls):
                found = np.array(unit_match, np.int64)
                self._note_units(units[in_step], found, survey, skeleton.in_backward)
            else:
                ran = operations_of(skeleton, units[in_step], unit_keys, calls)
                self._tell_lines(units[in_step], survey.matcher.lines(ran), skeleton.in_backward)
            if node_keys != survey.node_key or not same_calls or self.doubtful:
                differing.append(node_places)
            self.steps += 1
            self.exact += exact and same_calls
        if differing:
            places = np.sort(np.concatenate(differing))
            self.line[nodes.row[places]] = lines_of_nodes(skeleton, places, units, self.line)

    def _agreed(self, survey: Notes) -> Notes:
        """Without the lines of operations that another traced step, which ran the same, had on others."""
        if survey.matcher is None or survey.called is None:
            return survey
        lines = survey.matcher.agreed(survey.unit_key, survey.called, survey.unit_line)
        self.doubtful = not np.array_equal(lines, survey.unit_line)
        return replace(survey, unit_line=lines) if self.doubtful else survey

    def fill_own(self, skeleton: Skeleton, notes: Notes) -> None:
        """Fill from notes that were read from this very trace."""
        units = unit_rows(skeleton)
        self._note_units(units, np.arange(len(units)), notes, skeleton.in_backward)
        places = np.arange(len(skeleton.nodes.row))
        self._note_nodes(skeleton, places, places, notes)

    def _note_units(self, rows: IntColumn, match: IntColumn, survey: Notes, in_backward: BoolColumn) -> None:
        found = match >= 0
        line = survey.unit_line[match[found]]
        # Inside a node what has no line of its own has the node's.
        line[(line == NO_LINE) & in_backward[rows[found]]] = INHERIT
        self.line[rows[found]] = line
        self.units += len(rows)
        self.matched += int(found.sum())

    def _tell_lines(self, rows: IntColumn, line: IntColumn, in_backward: BoolColumn) -> None:
        told = line != NOT_TOLD
        line = np.where(told, line, NO_LINE)
        line[(line == NO_LINE) & in_backward[rows]] = INHERIT
        self.line[rows] = line
        self.units += len(rows)
        self.matched += int(told.sum())

    def _note_nodes(self, skeleton: Skeleton, places: IntColumn, match: IntColumn, survey: Notes) -> None:
        found = match >= 0
        places, match = places[found], match[found]
        rows = skeleton.nodes.row[places]
        self.line[rows] = survey.node_line[match]
        accumulate = skeleton.table.kind[rows] == RowKind.ACCUMULATE
        self.parameter_owner[places[accumulate]] = survey.parameter_owner[match[accumulate]]
        for row, place in zip(rows.tolist(), match.tolist(), strict=True):
            if survey.receivers[place]:
                self.receivers[row] = survey.receivers[place]

    def fill_passes(self, skeleton: Skeleton, replayed: Replayed) -> None:
        """Fill from the graphs of the very passes that were timed: they know better than the survey."""
        nodes, numbers = skeleton.nodes, skeleton.numbers
        covered = np.flatnonzero(replayed.covered)
        self.covered = set(nodes.row[covered].tolist())
        self.parameter_owner[covered] = replayed.accumulate_owner[covered]
        self.misfits, self.misfit_passes = replayed.misfits, replayed.misfit_passes
        known = self.covered | self.misfits
        self.receivers = {row: found for row, found in self.receivers.items() if row not in known}
        if not replayed.receivers:
            return
        owner_of = dict(zip(nodes.row.tolist(), nodes.owner.tolist(), strict=True))
        keys_of = zip(numbers.thread.tolist(), numbers.sequence.tolist(), strict=True)
        row_of = dict(zip(keys_of, numbers.row.tolist(), strict=True))
        thread_of = dict(zip(numbers.row.tolist(), numbers.thread.tolist(), strict=True))

        def receiver(row: int, code: int) -> Receiver:
            if code < 0:
                return Receiver(-2 - code, NO_LINE)
            target = row_of.get((thread_of[row], code))
            return Receiver(OUTSIDE, NO_LINE) if target is None else Receiver(owner_of[target], int(self.line[target]))

        for row, codes in replayed.receivers.items():
            self.receivers[row] = tuple(receiver(row, code) for code in codes)

    def describe(self) -> list[str]:
        """Return what the report must say about the fit."""
        notes = []
        if self.misfit_passes:
            passes = "1 backward pass" if self.misfit_passes == 1 else f"{self.misfit_passes} backward passes"
            notes.append(
                f"{passes} made the same calls as another one but used their values differently: "
                "accumulated gradients there are attributed to the layer that delivered the last one"
            )
        if self.doubtful:
            notes.append(
                "some operations ran on different lines in different steps. Which step used which line "
                "is unknown, so they have no line"
            )
        if self.steps == 0 or self.exact == self.steps or not self.lines_known:
            return notes
        share = 100.0 * self.matched / max(self.units, 1)
        return [
            *notes,
            (
                f"{self.steps - self.exact} of {self.steps} steps did not run the same lines and "
                "operations as the survey step: their source lines are matched call by call, and "
                f"{share:.1f} % of the operations that Python called have one"
            ),
        ]


def _accumulate_owners(skeleton: Skeleton, known: IntColumn) -> IntColumn:
    """Return owner of each ACCUMULATE; where the survey does not say, the layer of the node that ran just before it."""
    nodes = skeleton.nodes
    is_node = skeleton.table.kind[nodes.row] == RowKind.NODE
    before = np.maximum.accumulate(np.where(is_node, np.arange(len(nodes.row)), -1))
    guess = np.where(before >= 0, np.maximum(nodes.owner[before], OUTSIDE), OUTSIDE) if len(before) else known
    return np.where(known == UNKNOWN, guess, known)


def _sums(skeleton: Skeleton, carried: _Carried, surveyed: bool) -> tuple[IntColumn, IntColumn]:
    """The gradient sums and their owners: the layer whose value has several users.

    Without a survey, or where its graph was too deep, the receiver is not known: the sum stays with the layer that
    delivered the gradient.
    """
    table = skeleton.table
    owner_of_node = dict(zip(skeleton.nodes.row.tolist(), skeleton.nodes.owner.tolist(), strict=True))
    rows, owners = [], []
    above = table.parent[skeleton.sums].astype(np.int64)
    # Additions still to come, by node of a hook.
    left: Counter[int] = Counter(above[is_module_hook(table, above)].tolist())
    position: dict[int, int] = {}
    for row in skeleton.sums.tolist():
        node = int(table.parent[row])
        receivers = carried.receivers.get(node, ())
        if node in left:
            left[node] -= 1
            if left[node] >= len(receivers):
                continue  # the hook's own: the engine's come last
        order = position.get(node, 0)
        position[node] = order + 1
        if receivers:
            receiver = receivers[min(order, len(receivers) - 1)]
            owners.append(max(receiver.owner, OUTSIDE))
            carried.line[row] = receiver.line
            rows.append(row)
        elif node in carried.misfits or (not surveyed and node not in carried.covered):
            owners.append(max(owner_of_node.get(node, OUTSIDE), OUTSIDE))
            rows.append(row)
    return np.array(rows, np.int64), np.array(owners, np.int64)
