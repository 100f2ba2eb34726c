"""What gradscope's own hooks cost is taken from the rows that it lies in, exactly, and never more than there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.attribute.align_steps import assign
from gradscope.attribute.cost_table import OWN, hook_cost, make_cells, own_contribution, take_out, totals_by_step
from gradscope.attribute.result import build_result
from gradscope.attribute.rows import Category, read_skeleton, self_times
from gradscope.tables import EventTable, ModuleInfo, RowKind, SpanTable

from .hand import Row, place, spans, table_of


def calls_of(*entries: tuple[int, int, int]) -> SpanTable:
    """Calls of layers 0, 1, ... without numbers, by (inside, around, open) in ns."""
    table = spans(*((label, 0, 0) for label in range(len(entries))))
    inside, around, opened = (np.array(part, np.int64) for part in zip(*entries, strict=True))
    return SpanTable(table.label, table.low, table.high, inside, around, opened)


def trace() -> EventTable:
    """One step of 1,000 ns: layer 0 calls layer 1 and layer 2, and layer 2 again in a recompute."""
    return table_of(
        Row(RowKind.STEP, 0, 0, "step 0", argument=0),
        Row(RowKind.CALL, 100, 500, "outer", argument=0),
        Row(RowKind.CALL, 150, 250, "first", argument=1),
        Row(RowKind.OP, 160, 240, "aten::mul"),
        Row(RowKind.CALL, 300, 400, "second", argument=2),
        Row(RowKind.BACKWARD, 600, 900, "backward", argument=0),
        Row(RowKind.CALL, 700, 800, "again", argument=3),
        Row(RowKind.STEP, 1000, 1000, "step 1", argument=1),
    )


def relabelled(calls: SpanTable, *labels: int) -> SpanTable:
    return SpanTable(np.array(labels), calls.low, calls.high, calls.inside_ns, calls.around_ns, calls.open_ns)


# The row of layer 1 is 5 ns longer than its hooks think, those of the others no longer, or shorter (another clock).
CALLS = relabelled(calls_of((30, 20, 400), (4, 25, 95), (7, 11, 100), (13, 17, 102)), 0, 1, 2, 2)
COST = {
    "outer": 30 + (25 - 5) + 11,  # its own, and what lies around the calls in it
    "first": 4 + 5,
    "second": 7,
    "backward": 17,
    "again": 13,
}


def test_cost_lies_in_the_call_and_in_the_row_around_it() -> None:
    table = trace()
    cost = hook_cost(table, CALLS)
    assert {name: int(cost[place(table, name)]) for name in table.names if cost[place(table, name)]} == COST


def test_a_row_that_was_held_up_takes_nothing_from_the_row_around_it() -> None:
    """The thread was stopped between the row's beginning and the first look at the clock: no hook of ours did that."""
    table = trace()
    calls = relabelled(calls_of((30, 20, 400), (4, 25, 40), (7, 11, 100), (13, 17, 102)), 0, 1, 2, 2)
    cost = hook_cost(table, calls)
    assert int(cost[place(table, "first")]) == 4 + 25 and int(cost[place(table, "outer")]) == 30 + 0 + 11


def test_calls_that_were_not_timed_cost_nothing() -> None:
    assert not hook_cost(trace(), spans((0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 0, 0))).any()


@pytest.mark.parametrize("factor", [1, 10, 1_000_000])
def test_nothing_is_lost_and_no_time_is_negative(factor: int) -> None:
    table = trace()
    skeleton = read_skeleton(table, CALLS, [-1, 0, 0])
    assigned = assign(skeleton, 0, None)
    own, names = own_contribution(assigned, self_times(table))
    before = make_cells(assigned, [own], names)
    parts = take_out(own, hook_cost(table, CALLS) * factor, names)
    cells = make_cells(assigned, list(parts), names)
    assert (cells.self_ns >= 0).all()
    assert cells.self_ns.sum() == before.self_ns.sum()
    hooks = (cells.category == Category.OTHER) & (cells.op == names.index(OWN))
    assert (cells.owner[hooks] == -1).all() and (cells.line[hooks] == -1).all()
    totals = totals_by_step(assigned, list(parts))
    assert sum(int(total.sum()) for total in totals.values()) == cells.self_ns.sum()
    if factor == 1:
        assert cells.self_ns[hooks].sum() == sum(COST.values())


def test_layers_phases_and_the_step_of_a_report() -> None:
    modules = [ModuleInfo(path, "M", parent, 0, None) for path, parent in (("", None), ("first", ""), ("second", ""))]
    table = trace()
    plain = relabelled(spans((0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 0, 0)), 0, 1, 2, 2)
    alone, found = (
        build_result(assign(read_skeleton(table, calls, [-1, 0, 0]), 0, None), modules, [], None, {}, has_flops=False)
        for calls in (plain, CALLS)
    )
    taken = [b.forward_self_ns - a.forward_self_ns for a, b in zip(found.layers, alone.layers, strict=True)]
    assert taken == [COST["outer"], COST["first"], COST["second"]]
    assert alone.layers[2].recompute_ns - found.layers[2].recompute_ns == COST["again"]
    assert alone.ledger.engine_ns - found.ledger.engine_ns == COST["backward"]
    assert found.step.wall_ns == alone.step.wall_ns == 1000
    assert found.step.other_ns - alone.step.other_ns == sum(COST.values())
    (row,) = [op for op in found.ops if op.name == OWN]
    assert (row.layer, row.phase, row.self_ns, row.calls) == (None, "other", sum(COST.values()), 0)
    assert found.layers[0].forward_self_steps_ns == (found.layers[0].forward_self_ns,)


class Again(nn.Module):
    """Modules inside of modules, also in a recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.idle = nn.Sequential(*(nn.Identity() for _ in range(30)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.idle, self.idle(self.stem(x)), use_reentrant=False)
        return out


def test_a_program_of_tiny_modules_has_a_row_for_it() -> None:
    data = gradscope.profile(Again(), torch.ones(2, 4), steps=2, warmup=1, memory=False, lines=False).data
    (row,) = [op for op in data.ops if op.name == OWN]
    assert (row.layer, row.phase) == (None, "other") and row.self_ns > 0
    assert all(value >= 0 for each in data.layers for value in (each.forward_self_ns, each.recompute_ns))
