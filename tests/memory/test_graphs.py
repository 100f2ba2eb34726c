"""Memory of compiled graphs, on a timeline made by hand: whose allocations and saved tensors are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from gradscope.attribute.align_steps import assign
from gradscope.attribute.compiled.read import CompiledTime, read_compiled
from gradscope.attribute.memory.classify import SavedStorage
from gradscope.attribute.memory.event_owners import MemoryTrace
from gradscope.attribute.memory.graphs import at_kernels, at_reader
from gradscope.attribute.rows import Category, read_skeleton
from gradscope.capture import memory
from gradscope.capture.guard import Guard
from gradscope.capture.memory import MemoryTracer, Surroundings
from gradscope.capture.modules import CallRecorder
from gradscope.capture.registry import ModuleRegistry
from gradscope.compat.inductor import notes
from gradscope.tables import AllocationTable, CompiledGraph, FusedNode, NodeNote, RowKind, SavedTensor
from tests.attribute.hand import Row, spans, table_of

PATHS = ("", "a", "b")
ROOT, A, B = range(3)
GRAPH = "## Call CompiledFxGraph"


def node(layer: int, *inputs: str, size: int = 4, again: bool = False, line: int = -1, sequence: int = -1) -> FusedNode:
    return FusedNode(
        layer=layer,
        line=line,
        forward=again,
        is_view=False,
        bytes=size,
        inputs=inputs,
        op="mul",
        sequence=sequence,
    )


NODES = {
    "saved": node(-1),
    "p": node(A, "saved", line=7, sequence=9),
    "q": node(B, "saved", size=36, line=8, sequence=4),
    "again": node(A, "p", again=True),
}
GRAPHS = {
    0: CompiledGraph((("cpp_p", ("p",)), ("cpp_q", ("q",))), NODES, inputs=("saved", "other")),
    1: CompiledGraph((("cpp_both", ("p", "q")), ("cpp_again", ("again",))), NODES, inputs=("saved",)),
}
# Of a backward pass: graph 0 from 1000 to 1400, graph 1 from 2000 to 2400; each kernel takes 100 and lies 100 behind.
ROWS = (
    Row(RowKind.STEP, 0, 0, "step", argument=0),
    Row(RowKind.CALL, 0, 95, "call", argument=0),
    Row(RowKind.BACKWARD, 1000, 3000, "backward", argument=0),
    Row(RowKind.NODE, 1000, 3000, "CompiledFunctionBackward", sequence=5, forward_thread=1),
    Row(RowKind.GRAPH, 1000, 1400, GRAPH, argument=0),
    Row(RowKind.OP, 1100, 1200, "cpp_p"),
    Row(RowKind.OP, 1300, 1400, "cpp_q"),
    Row(RowKind.OP, 1310, 1320, "aten::empty"),
    Row(RowKind.GRAPH, 2000, 2500, GRAPH, argument=1),
    Row(RowKind.OP, 2100, 2200, "cpp_both"),
    Row(RowKind.OP, 2300, 2400, "cpp_again"),
    Row(RowKind.STEP, 10_000, 10_000, "step", argument=1),
)
NAMES = [row.name for row in ROWS]


@pytest.fixture
def made() -> tuple[MemoryTrace, CompiledTime]:
    table = table_of(*ROWS)
    assigned = assign(read_skeleton(table, spans((ROOT, 0, 9)), [-1, 0, 0], paths=PATHS), 0, None)
    compiled = read_compiled(assigned, GRAPHS, PATHS)
    assert compiled is not None and not compiled.unmatched
    nothing = cast(Any, None)
    return MemoryTrace(assigned, nothing, nothing, nothing, np.arange(len(table))), compiled


def test_in_no_modules_call_kernels_are_of_their_layers_too() -> None:
    """The node has no owner: a compiled function."""
    table = table_of(*(row for row in ROWS if row.kind != RowKind.CALL))
    assigned = assign(read_skeleton(table, spans((ROOT, 900, 909)), [-1, 0, 0], paths=PATHS), 0, None)
    compiled = read_compiled(assigned, GRAPHS, PATHS)
    assert compiled is not None
    nothing = cast(Any, None)
    trace, _ = at_kernels(
        MemoryTrace(assigned, nothing, nothing, nothing, np.arange(len(table))), allocations(), compiled
    )
    rows = np.array([table.names.index(name) for name in ("cpp_p", "cpp_q")])
    rows = np.array([int(np.flatnonzero(table.name == number)[0]) for number in rows])
    assert trace.owner(rows).tolist() == [A, B] and trace.category(rows).tolist() == [Category.LAYER] * 2


def allocations(*events: tuple[str, int, int]) -> AllocationTable:
    """Of the row around each, its time and its bytes."""
    column = np.array([[NAMES.index(row), time, size] for row, time, size in events], np.int64).reshape(-1, 3).T
    zeros = np.zeros(len(events), np.int64)
    return AllocationTable(
        column[0].astype(np.int32), column[1], zeros, column[2], ("cpu",), zeros.astype(np.int8), zeros
    )


def names_of(trace: MemoryTrace, events: AllocationTable) -> list[str]:
    return [trace.table.names[trace.table.name[row]] for row in events.row.tolist()]


def test_kernels_are_at_the_layer_that_most_of_them_is_of(made: tuple[MemoryTrace, CompiledTime]) -> None:
    trace, _ = at_kernels(made[0], allocations(), made[1])
    rows = np.array([NAMES.index(name) for name in ("cpp_p", "cpp_q", "cpp_both", "cpp_again")])
    assert trace.owner(rows).tolist() == [A, B, B, A]  # of both B makes nine times as much
    assert trace.category(rows).tolist() == [Category.LAYER] * 3 + [Category.RECOMPUTE]
    assert trace.line(rows).tolist() == [7, 8, 8, -1]
    below = np.array([NAMES.index("aten::empty")])
    assert trace.owner(below).tolist() == [B]


def test_what_a_graph_allocates_is_of_the_kernel_that_follows(made: tuple[MemoryTrace, CompiledTime]) -> None:
    events = allocations(
        (GRAPH, 1050, 8),  # in front of the first
        (GRAPH, 1250, 8),  # between the two
        ("cpp_p", 1150, 8),  # what a kernel allocates itself
        ("aten::empty", 1315, 8),
        (GRAPH, 1260, -8),  # given back: of no kernel
    )
    trace, moved = at_kernels(made[0], events, made[1])
    assert names_of(trace, moved) == ["cpp_p", "cpp_q", "cpp_p", "aten::empty", GRAPH]


def test_what_is_allocated_behind_the_last_kernel_stays_the_graphs(made: tuple[MemoryTrace, CompiledTime]) -> None:
    """The next kernel is another graph's. And what is in no graph is not moved."""
    trace, moved = at_kernels(made[0], allocations((GRAPH, 1400, 8), ("CompiledFunctionBackward", 1450, 8)), made[1])
    assert names_of(trace, moved) == [GRAPH, "CompiledFunctionBackward"]


def test_saved_tensors_are_of_the_layer_that_reads_them_first_in_forward(
    made: tuple[MemoryTrace, CompiledTime],
) -> None:
    def stored(run: int, place: int, layer: int = ROOT) -> SavedStorage:
        note = SavedTensor(0, 5, "CompiledFunctionBackward", "saved tensor", 1, 4, "1", "float32", (run, place))
        return SavedStorage(0, note, layer, -1)

    read = at_reader(stored(0, 0), made[1])
    assert (read.layer, read.line) == (B, 8)  # number 4 comes before 9
    for unread in (stored(0, 1), stored(-1, -1), stored(0, 0, layer=A), stored(0, 9)):
        assert at_reader(unread, made[1]) == unread


def test_a_node_that_reads_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of storages at one address that which the running node keeps, under all of its names; others are not marked."""
    tensor = torch.ones(4)
    tracer = MemoryTracer(CallRecorder(Guard(), ModuleRegistry()), Surroundings())
    (note,) = tracer._reader.storages(tensor)
    for number in (3, 5, 5):
        kept = SimpleNamespace(tensor=tensor, sequence=number, node="N", what="x")
        tracer._note_saved(0, cast(Any, kept), note)
    monkeypatch.setattr(memory, "current_node_number", lambda: 5)
    tracer.note_reads(2, [7, tensor])
    assert [each.reader for each in tracer.saved] == [(-1, -1), (2, 1), (2, 1)]
    tracer.note_reads(4, [tensor])
    assert [each.reader for each in tracer.saved] == [(-1, -1), (2, 1), (2, 1)], "the first that reads it"
    monkeypatch.setattr(memory, "current_node_number", lambda: -1)
    tracer.note_reads(4, [tensor])
    assert tracer.saved[0].reader == (-1, -1)


def test_a_node_that_a_pass_before_has_not_run_reads_what_it_kept_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient penalty goes through a part of the graph and notes all of it; forgotten when the step has ended."""
    x = torch.ones(4, requires_grad=True)
    tracer = MemoryTracer(CallRecorder(Guard(), ModuleRegistry()), Surroundings())
    tensor = torch.ones(4)
    kept = SimpleNamespace(tensor=tensor, sequence=5, node="N", what="x")
    (note,) = tracer._reader.storages(tensor)
    monkeypatch.setattr(memory, "current_node_number", lambda: 5)
    for _ in range(2):
        with tracer.around_backward([x.sin()]):
            tracer._note_saved(0, cast(Any, kept), note)
    tracer.note_reads(2, [tensor])
    mine = [each.reader for each in tracer.saved if each.node == "N"]
    assert mine == [(2, 0)] * 2
    tracer._note_saved(0, cast(Any, kept), note)
    tracer.see_all()
    tracer.note_reads(3, [tensor])
    assert tracer.saved[-1].reader == (-1, -1)


def test_only_a_graph_all_of_whose_lines_are_an_optimizers_is_one() -> None:
    def of(*files: str) -> list[NodeNote]:
        return [
            NodeNote(
                modules=(), frames=((file, 1, "f"),) if file else (), forward=False, is_view=False, bytes=4, inputs=()
            )
            for file in files
        ]

    assert notes._is_optimizer(of("/x/torch/optim/sgd.py", "", "/x/torch/optim/adam.py"))
    assert not notes._is_optimizer(of("/x/torch/optim/sgd.py", "train.py"))
    assert not notes._is_optimizer(of(""))


def test_models_of_a_compiled_function_are_the_outermost_and_all() -> None:
    first, second, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(3, 3), nn.Linear(4, 4)
    registry = ModuleRegistry()
    found = registry.roots_with([first[0].weight, second.weight, nn.Parameter(torch.ones(1))])
    assert [registry.places[label].module() for label in found] == [first, second]
    assert registry.get(other) is None
    assert registry.roots_with([second.weight]) == [registry.get(second)]


def test_saved_tensors_are_of_the_model_whose_forward_made_the_node_that_reads_them() -> None:
    """Two models by one compiled function, whose graph of backward is run with no parameter."""
    nodes = {"saved": node(-1), "p": node(A, "saved", line=7, sequence=9)}
    kernels = (("cpp_p", ("p",)),)
    graphs = {
        0: CompiledGraph(kernels, nodes, inputs=("x",), moved=((A, A),)),
        1: CompiledGraph(kernels, nodes, inputs=("x",), moved=((A, B),)),
        2: CompiledGraph(kernels, nodes, inputs=("saved", "tangents_1")),
    }
    rows = [Row(RowKind.STEP, 0, 0, "step", argument=0), Row(RowKind.CALL, 0, 95, "call", argument=0)]
    for number, sequence in enumerate((5, 6)):
        start, back = 10 + 30 * number, 1000 + 500 * number
        rows += [
            Row(RowKind.OP, start, start + 20, "CompiledFunction", sequence=sequence),
            Row(RowKind.GRAPH, start, start + 20, GRAPH, argument=number),
            Row(RowKind.OP, start, start + 20, "cpp_p"),
            Row(RowKind.BACKWARD, back, back + 100, "backward", argument=0),
            Row(RowKind.NODE, back, back + 100, "CompiledFunctionBackward", sequence=sequence, forward_thread=1),
            Row(RowKind.GRAPH, back, back + 100, GRAPH, argument=2),
            Row(RowKind.OP, back, back + 100, "cpp_p"),
        ]
    table = table_of(*sorted(rows, key=lambda each: (each.start, -each.end)), Row(RowKind.STEP, 9000, 9000, "step"))
    assigned = assign(read_skeleton(table, spans((ROOT, 0, 9)), [-1, 0, 0], paths=PATHS), 0, None)
    compiled = read_compiled(assigned, graphs, PATHS)
    assert compiled is not None
    for sequence, layer in ((5, A), (6, B), (7, ROOT)):
        note = SavedTensor(0, sequence, "CompiledFunctionBackward", "saved tensor", 1, 4, "1", "float32", (2, 0))
        assert at_reader(SavedStorage(0, note, ROOT, -1), compiled).layer == layer
