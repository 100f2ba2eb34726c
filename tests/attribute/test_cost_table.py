"""Cells of hand-made rows: what is grouped, how means are rounded, and what is counted as a call."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from math import floor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.cost_table import (
    ENGINE,
    PYTHON,
    Cells,
    Contribution,
    layer_steps,
    make_cells,
    move_recompute_gaps,
    own_contribution,
    totals_by_step,
)
from gradscope.attribute.nodes import OUTSIDE
from gradscope.attribute.rows import Category, Rows, Steps, read_skeleton, self_times
from gradscope.attribute.survey import NO_LINE
from gradscope.tables import RowKind

from .hand import NO_SPANS, Row, place, spans, table_of


def assigned(
    category: list[int], owner: list[int], line: list[int], step: list[int], steps: int, skeleton: Any = None
) -> Assigned:
    """Rows with these marks; ``step`` is -1 for a row that is not measured."""
    rows = Rows(np.array(category, np.int8), np.array(owner, np.int64))
    cuts = Steps(np.arange(steps), np.arange(1, steps + 1), np.array(step, np.int64))
    return Assigned(skeleton, rows, cuts, np.array(line, np.int64), ())


def part(row: list[int], op: list[int], ns: list[int], calls: list[int]) -> Contribution:
    return Contribution(*(np.array(values, np.int64) for values in (row, op, ns, calls)))


def as_dict(cells: Cells) -> dict[tuple[int, ...], tuple[int, int]]:
    keys = zip(*(getattr(cells, name).tolist() for name in ("category", "owner", "line", "op")), strict=True)
    values = zip(cells.self_ns.tolist(), cells.calls.tolist(), strict=True)
    found = dict(zip(keys, values, strict=True))
    assert len(found) == len(cells.self_ns), "a cell comes twice"
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_cell_is_the_sum_over_its_rows_rounded_once(seed: int) -> None:
    """Against a sum by hand, in fractions: a half is rounded up, so a cell of few ns does not vanish."""
    rng = np.random.default_rng(seed)
    rows, steps = 60, int(rng.integers(1, 6))
    made = assigned(
        rng.integers(0, 10, rows).tolist(),
        rng.integers(-1, 4, rows).tolist(),
        rng.integers(-1, 3, rows).tolist(),
        rng.integers(-1, steps, rows).tolist(),
        steps,
    )
    parts = [
        part(*(rng.integers(0, high, 80).tolist() for high in (rows, 3, 8, 2))),
        part(*(rng.integers(0, high, 40).tolist() for high in (rows, 3, 8, 2))),
    ]
    expected: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0])
    for each in parts:
        for row, op, ns, calls in zip(
            *(getattr(each, name).tolist() for name in ("row", "op", "ns", "calls")), strict=True
        ):
            if made.steps.of_row[row] >= 0:
                key = (int(made.rows.category[row]), int(made.rows.owner[row]), int(made.line[row]), op)
                expected[key][0] += ns
                expected[key][1] += calls
    found = make_cells(made, parts, ("a", "b", "c"))
    assert as_dict(found) == {
        key: (floor(Fraction(ns, steps) + Fraction(1, 2)), calls) for key, (ns, calls) in expected.items()
    }
    assert (found.steps, found.ops) == (steps, ("a", "b", "c"))


@pytest.mark.parametrize(("ns", "steps", "mean"), [(1, 2, 1), (1, 3, 0), (2, 3, 1), (7, 5, 1), (8, 5, 2), (5, 1, 5)])
def test_means_go_to_the_nearest(ns: int, steps: int, mean: int) -> None:
    found = make_cells(assigned([2], [0], [0], [0], steps), [part([0], [0], [ns], [1])], ("a",))
    assert found.self_ns.tolist() == [mean]


def test_totals_of_steps_and_layers_are_those_of_the_rows() -> None:
    layer, forward = int(Category.LAYER), int(Category.FORWARD)
    made = assigned([layer, layer, layer, forward, layer], [0, 1, 0, 0, -1], [0] * 5, [0, 1, 1, 1, 0], 2)
    parts = [part([0, 1, 2, 3, 4], [0] * 5, [1, 2, 4, 8, 16], [1] * 5), part([0, 2], [0, 0], [32, 64], [0, 0])]
    totals = totals_by_step(made, parts)
    assert totals[Category.LAYER].tolist() == [49, 70]
    assert totals[Category.FORWARD].tolist() == [0, 8]
    assert sum(int(total.sum()) for total in totals.values()) == 127
    assert layer_steps(made, parts, 3).tolist() == [[33, 68], [0, 2], [0, 0]]


def test_what_is_not_measured_is_in_no_total() -> None:
    made = assigned([int(Category.LAYER)] * 2, [0, 0], [0, 0], [-1, 0], 1)
    parts = [part([0, 1], [0, 0], [5, 7], [1, 1])]
    assert totals_by_step(made, parts)[Category.LAYER].tolist() == [7]
    assert layer_steps(made, parts, 1).tolist() == [[7]]
    assert as_dict(make_cells(made, parts, ("a",))) == {(int(Category.LAYER), 0, 0, 0): (7, 1)}


def test_a_nodes_function_is_no_second_call_and_markers_are_python() -> None:
    table = table_of(
        Row(RowKind.CALL, 0, 40, "call", argument=0),
        Row(RowKind.OP, 10, 20, "aten::mm"),
        Row(RowKind.BACKWARD, 50, 100, "backward", argument=0),
        Row(RowKind.NODE, 60, 90, "MmBackward0", sequence=1, forward_thread=1),
        Row(RowKind.OP, 62, 88, "MmBackward0", sequence=1, forward_thread=1),
        Row(RowKind.OP, 65, 70, "aten::mm"),
    )
    made = assigned([0] * 6, [0] * 6, [0] * 6, [0] * 6, 1, read_skeleton(table, spans((0, 0, 2)), [-1]))
    own, names = own_contribution(made, self_times(table))
    called = {row: names[op] for row, op in zip(own.row.tolist(), own.op.tolist(), strict=True)}
    assert [called[row] for row in range(6)] == [PYTHON, "aten::mm", ENGINE, "MmBackward0", "MmBackward0", "aten::mm"]
    assert own.calls.tolist() == [1, 1, 1, 1, 0, 1]
    assert own.ns.tolist() == [30, 10, 20, 4, 21, 5]


@pytest.mark.parametrize("before", [0, 3])
def test_python_before_the_last_recomputed_op_is_the_recomputes(before: int) -> None:
    """A function of 100 ns: 10 of Python, an op of 20 again, 5 of Python, another, then its own op of 15.

    Each piece is of the recomputed op that follows.
    """
    table = table_of(
        Row(RowKind.BACKWARD, 0, 200, "backward"),
        Row(RowKind.NODE, 50, 160, "node", sequence=1, forward_thread=1),
        Row(RowKind.OP, 55, 155, "function", sequence=1, forward_thread=1),
        Row(RowKind.OP, 65, 85, "first", sequence=7),
        Row(RowKind.OP, 90, 110, "second", sequence=8),
        Row(RowKind.OP, 120, 135, "its own"),
    )
    category = [0, int(Category.LAYER), int(Category.LAYER), int(Category.RECOMPUTE), int(Category.RECOMPUTE)]
    made = assigned([*category, int(Category.LAYER)], [0] * 6, [0] * 6, [0] * 6, 1, read_skeleton(table, NO_SPANS, []))
    own, names = own_contribution(made, self_times(table))
    if before:  # less is left to the function than the gaps are: no time is made
        ns = own.ns.copy()
        ns[place(table, "function")] = before
        own = Contribution(own.row, own.op, ns, own.calls)
    plain, moved = move_recompute_gaps(made, own)
    gaps = [2, 1] if before else [10, 5]
    gap = sum(gaps)
    assert [names[op] for op in moved.op.tolist()] == [PYTHON, PYTHON]
    rows = [place(table, "first"), place(table, "second")]
    assert (moved.row.tolist(), moved.ns.tolist(), moved.calls.tolist()) == (rows, gaps, [0, 0])
    assert plain.ns.sum() + moved.ns.sum() == own.ns.sum()
    assert plain.ns[place(table, "function")] == own.ns[place(table, "function")] - gap


@pytest.mark.parametrize("around", [RowKind.OP, RowKind.NODE])
def test_only_a_function_that_runs_forward_again_hands_python_on(around: RowKind) -> None:
    """What a recomputed operation does before those in it is its own; so is what a node takes to call its function."""
    table = table_of(
        Row(RowKind.BACKWARD, 0, 200, "backward"),
        Row(around, 50, 160, "around", sequence=1, forward_thread=1),
        Row(RowKind.OP, 65, 85, "inside", sequence=7),
    )
    again, layer = int(Category.RECOMPUTE), int(Category.LAYER)
    category = [0, again if around == RowKind.OP else layer, again]
    made = assigned(category, [0] * 3, [0] * 3, [0] * 3, 1, read_skeleton(table, NO_SPANS, []))
    own, _ = own_contribution(made, self_times(table))
    assert move_recompute_gaps(made, own) == [own]


@pytest.mark.parametrize("category", [Category.OTHER, Category.RECOMPUTE])
def test_what_is_no_layer_names_what_it_runs_between_the_phases(category: Category) -> None:
    """A transform of a Dataset is one row; what a checkpoint runs again keeps the names of its operations."""
    table = table_of(
        Row(RowKind.CALL, 0, 40, "call", argument=0),
        Row(RowKind.OP, 10, 20, "aten::mm"),
    )
    skeleton = read_skeleton(table, spans((-2, 0, 2)), [], ("Transform",))
    own, names = own_contribution(assigned([int(category)] * 2, [-1] * 2, [0] * 2, [0] * 2, 1, skeleton), table.end_ns)
    expected = ["(Transform)"] * 2 if category == Category.OTHER else [PYTHON, "aten::mm"]
    assert [names[op] for op in own.op.tolist()] == expected


def test_what_is_apart_has_nothing_of_its_row_but_its_step() -> None:
    """A wait is of no line, of no layer or one that is given, and spent on what is said."""
    category = np.array([Category.FORWARD, Category.LAYER], np.int8)
    rows = SimpleNamespace(category=category, owner=np.array([3, 4]))
    assigned: Any = SimpleNamespace(rows=rows, line=np.array([5, 6]))
    row, zero = np.array([1, 0]), np.zeros(2, np.int64)
    plain = Contribution(row, zero, zero, zero)
    apart = Contribution(row, zero, zero, zero, Category.COMMUNICATION)
    given = Contribution(row, zero, zero, zero, Category.COMMUNICATION, np.array([8, 9]))
    for part, categories, owners, lines in (
        (plain, [Category.LAYER, Category.FORWARD], [4, 3], [6, 5]),
        (apart, [Category.COMMUNICATION] * 2, [OUTSIDE] * 2, [NO_LINE] * 2),
        (given, [Category.COMMUNICATION] * 2, [8, 9], [NO_LINE] * 2),
    ):
        assert part.category(assigned).tolist() == categories
        assert part.owner(assigned).tolist() == owners
        assert part.line(assigned).tolist() == lines
