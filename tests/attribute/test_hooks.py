"""Backward hooks of hand-made traces, and of real ones by counting: whose they are, and what is none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.attribute.align_steps import assign
from gradscope.attribute.rows import Category, Rows, assign_rows, hooked_modules, read_skeleton
from gradscope.attribute.survey import Notes, Receiver, keys
from gradscope.tables import EventTable, RowKind, RunData

from .hand import Row, place, spans, table_of

HOOKED = "BackwardHookFunctionBackward"
HOOK, SUM, LAYER = int(Category.HOOK), int(Category.GRADIENT_SUM), int(Category.LAYER)


def hooked(start: int, sequence: int, *inside: Row, end: int = 0) -> list[Row]:
    """A node of a module's hook whose function takes 1 ns, and what the hook runs."""
    function = Row(RowKind.OP, start, start + 1, HOOKED, sequence=sequence, forward_thread=1)
    return [Row(RowKind.NODE, start, end or start + 9, HOOKED, sequence=sequence, forward_thread=1), function, *inside]


def test_a_hook_belongs_to_its_module_before_and_behind_the_call() -> None:
    """Layer 0 calls layer 1 and layer 2; numbers 0, 3, 6, 8 are of nodes around inputs, 2, 5, 7, 9 around outputs."""
    calls = spans((0, 0, 6), (1, 0, 2), (2, 3, 5), (3, 6, 7), (0, 8, 9))
    table = table_of(
        Row(RowKind.CALL, 0, 50, "call", argument=0),
        Row(RowKind.CALL, 5, 15, "call", argument=1),
        Row(RowKind.CALL, 20, 30, "call", argument=2),
        Row(RowKind.CALL, 60, 70, "call", argument=3),
        Row(RowKind.CALL, 80, 90, "call", argument=4),
        Row(RowKind.BACKWARD, 100, 300, "backward", argument=0),
        *(row for number in range(10) for row in hooked(110 + 10 * number, number)),
    )
    skeleton = read_skeleton(table, calls, [-1, 0, 0, -1])
    owners = dict(zip(skeleton.nodes.sequence.tolist(), skeleton.nodes.owner.tolist(), strict=True))
    of_children, of_roots = {0: 1, 2: 1, 3: 2, 5: 2}, {6: 3, 7: 3, 8: 0, 9: 0}
    assert {number: owner for number, owner in owners.items() if number not in (1, 4)} == of_children | of_roots


def test_nodes_that_are_no_hooks_are_left_alone() -> None:
    table = table_of(
        Row(RowKind.CALL, 0, 50, "call", argument=0),
        Row(RowKind.BACKWARD, 100, 300, "backward", argument=0),
        Row(RowKind.NODE, 110, 120, "MulBackward0", sequence=0, forward_thread=1),
    )
    skeleton = read_skeleton(table, spans((0, 0, 1)), [-1])
    owner = np.array([5])
    assert hooked_modules(table, skeleton.numbers, skeleton.calls, owner) is owner


def rows_of(table: EventTable) -> Rows:
    """All rows of one call of layer 0, with the numbers 0 to 9, whose parameters are layer 1's."""
    skeleton = read_skeleton(table, spans((0, 0, 10), (1, 10, 10)), [-1, 0])
    nothing = np.empty(0, np.int64)
    return assign_rows(skeleton, np.full(len(skeleton.nodes.row), 1), nothing, nothing)


def test_a_marked_hook_belongs_to_the_node_that_it_runs_in() -> None:
    table = table_of(
        Row(RowKind.CALL, 0, 50, "call", argument=0),
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        Row(RowKind.NODE, 110, 200, "MulBackward0", sequence=1, forward_thread=1),
        Row(RowKind.HOOK, 112, 150, "on a tensor"),
        Row(RowKind.OP, 115, 120, "aten::norm"),
        Row(RowKind.COMMUNICATION, 121, 125, "c10d::allreduce_"),
        Row(RowKind.OPTIMIZER, 126, 129, "Optimizer.step#SGD.step"),
        Row(RowKind.CALL, 130, 140, "called in a hook", argument=1),
        Row(RowKind.OP, 131, 135, "aten::exp", sequence=40),
        Row(RowKind.OP, 160, 190, "MulBackward0", sequence=1, forward_thread=1),
        Row(RowKind.ACCUMULATE, 210, 300, "AccumulateGrad"),
        Row(RowKind.HOOK, 211, 250, "on a parameter"),
        Row(RowKind.OP, 260, 299, "function"),
        Row(RowKind.HOOK, 270, 298, "behind it"),
    )
    rows = rows_of(table)
    found = {
        name: (int(rows.category[place(table, name)]), int(rows.owner[place(table, name)]))
        for name in table.names
        if name not in ("MulBackward0", "call", "backward")
    }
    assert found == {
        "on a tensor": (HOOK, 0),
        "aten::norm": (HOOK, 0),
        "c10d::allreduce_": (Category.COMMUNICATION, 0),
        "Optimizer.step#SGD.step": (Category.OPTIMIZER, -1),
        "called in a hook": (HOOK, 0),  # no recompute
        "aten::exp": (HOOK, 0),
        "AccumulateGrad": (Category.ACCUMULATE, 1),
        "on a parameter": (HOOK, 1),
        "function": (Category.ACCUMULATE, 1),
        "behind it": (HOOK, 1),
    }


def test_a_module_called_in_a_modules_hook_is_no_recompute() -> None:
    table = table_of(
        Row(RowKind.CALL, 0, 50, "call", argument=0),
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        *hooked(110, 1, Row(RowKind.CALL, 120, 130, "in the hook", argument=1), end=150),
        Row(RowKind.NODE, 200, 300, "MulBackward0", sequence=2, forward_thread=1),
        Row(RowKind.CALL, 210, 220, "recomputed", argument=1),
    )
    rows = rows_of(table)
    assert int(rows.category[place(table, "in the hook")]) == HOOK
    assert int(rows.category[place(table, "recomputed")]) == Category.RECOMPUTE


def test_a_module_called_in_a_backward_pass_of_a_hooks_own_is_recompute() -> None:
    """A hook may start a pass, which may run a checkpoint again."""
    table = table_of(
        Row(RowKind.CALL, 0, 50, "call", argument=0),
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        Row(RowKind.NODE, 110, 300, "MulBackward0", sequence=1, forward_thread=1),
        Row(RowKind.HOOK, 120, 290, "on a tensor"),
        Row(RowKind.CALL, 125, 130, "in the hook", argument=1),
        Row(RowKind.BACKWARD, 140, 280, "of the hook", argument=1),
        Row(RowKind.NODE, 150, 270, "ExpBackward0", sequence=2, forward_thread=1),
        Row(RowKind.CALL, 160, 170, "recomputed", argument=1),
    )
    rows = rows_of(table)
    assert int(rows.category[place(table, "in the hook")]) == HOOK
    assert int(rows.category[place(table, "recomputed")]) == Category.RECOMPUTE


def test_the_hook_of_a_node_from_before_the_trace_is_unattributed() -> None:
    table = table_of(
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        Row(RowKind.NODE, 110, 120, HOOKED, sequence=1, forward_thread=7),
    )
    rows = rows_of(table)
    assert int(rows.category[place(table, HOOKED)]) == Category.UNATTRIBUTED


@pytest.mark.parametrize(("additions", "receivers", "sums"), [(3, 1, 1), (2, 2, 2), (1, 2, 1), (2, 0, 0)])
def test_additions_of_a_hook_are_no_gradient_sums(additions: int, receivers: int, sums: int) -> None:
    """A hook runs behind its node's function, as the engine's additions do: these come last."""
    adds = [Row(RowKind.ADD, 80 + 10 * number, 85 + 10 * number, f"add {number}") for number in range(additions)]
    table = table_of(
        Row(RowKind.STEP, 0, 0, "step 0", argument=0),
        Row(RowKind.CALL, 10, 20, "call", argument=0),
        Row(RowKind.BACKWARD, 50, 200, "backward", argument=0),
        *hooked(60, 0, *adds, end=150),
        Row(RowKind.STEP, 300, 300, "step 1", argument=1),
    )
    node = np.flatnonzero(table.kind == RowKind.NODE)
    survey = Notes(
        unit_key=(),
        unit_line=np.empty(0, np.int64),
        node_key=keys(table.names, np.array([0]), table.name[node]),
        node_line=np.array([4]),
        parameter_owner=np.array([-1]),
        receivers=((Receiver(1, 3),) * receivers,),
        flops={},
        shapes={},
    )
    found = assign(read_skeleton(table, spans((0, 0, 1)), [-1, 0]), 0, survey)
    kinds = [int(found.rows.category[place(table, f"add {number}")]) for number in range(additions)]
    assert kinds == [HOOK] * (additions - sums) + [SUM] * sums


# -- counted in real programs ------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """A module with every kind of hook: each runs an operation that nobody else does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_full_backward_hook(lambda module, inputs, outputs: _run(torch.sinh))
        self.second.register_full_backward_pre_hook(lambda module, outputs: _run(torch.cosh))
        self.second.weight.register_hook(lambda gradient: _run(torch.tanh))
        self.second.bias.register_post_accumulate_grad_hook(lambda parameter: _run(torch.atan))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x.register_hook(lambda gradient: _run(torch.asinh))
        out: Tensor = self.second(self.first(x).relu())
        out.register_hook(lambda gradient: _run(torch.acosh))
        return out


def _run(function: Any) -> None:
    function(torch.ones(2))


def _hook_ops(data: RunData) -> dict[str, str | None]:
    return {op.name: op.layer for op in data.ops if op.phase == "hook" and op.name.startswith("aten::") and op.calls}


def _measure(model: nn.Module) -> RunData:
    return gradscope.profile(
        model, torch.ones(2, 4), lambda out, batch: out.sum(), steps=2, warmup=1, memory=False, lines=False
    ).data


def test_every_kind_of_hook_is_at_its_module() -> None:
    model = Hooked()
    data = _measure(model)
    found = {name: layer for name, layer in _hook_ops(data).items() if name != "aten::ones"}
    assert {name: found[name] for name in found if name not in ("aten::empty", "aten::fill_")} == {
        "aten::sinh": "first",
        "aten::cosh": "second",
        "aten::tanh": "second",
        "aten::atan": "second",
        "aten::asinh": "stem",  # on what the stem made
        "aten::acosh": "second",
    }
    times = Counter({row.path: row.hook_ns for row in data.layers})
    assert all(times[path] > 0 for path in ("stem", "first", "second")) and times[""] == 0
    assert sum(times.values()) == data.ledger.hook_ns


def test_a_model_without_hooks_has_no_time_in_them() -> None:
    data = _measure(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert data.ledger.hook_ns == 0
    assert not _hook_ops(data)


def test_hooks_of_a_checkpointed_module_are_its_own() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
            self.inner.register_full_backward_hook(lambda *_: _run(torch.sinh))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.utils.checkpoint.checkpoint(self.inner, self.stem(x), use_reentrant=False)
            return out

    assert _hook_ops(_measure(Outer()))["aten::sinh"] == "inner"
