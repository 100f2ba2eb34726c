"""What a block is and whose, on a step made by hand: two backward passes, a recompute, an optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gradscope.attribute.memory.blocks import NEVER, Blocks, SeenAs
from gradscope.attribute.memory.classify import SavedStorage, classify, needed_until, saved_storages
from gradscope.attribute.memory.event_owners import MemoryTrace
from gradscope.attribute.rows import Category
from gradscope.tables import CHECKPOINT, AllocationTable, MemoryCategory, Role, RowKind, SavedTensor
from tests.attribute.hand import Row, table_of

START, END = 10, 1_000  # of the measured step
LEAST = int(np.iinfo(np.int64).min)

TABLE = table_of(
    Row(RowKind.OP, 15, 25, "load"),
    Row(RowKind.OP, 40, 60, "prepare"),
    Row(RowKind.CALL, 100, 300, "call"),
    Row(RowKind.OP, 110, 290, "mul"),
    Row(RowKind.BACKWARD, 400, 600, "backward"),
    Row(RowKind.NODE, 410, 450, "node"),
    Row(RowKind.OP, 412, 440, "grad"),
    Row(RowKind.OP, 442, 448, "again"),
    Row(RowKind.OPTIMIZER, 700, 800, "optimizer"),
    Row(RowKind.BACKWARD, 850, 900, "second backward"),
)
# Category, layer and line of each row.
PLACES = {
    "load": (Category.OTHER, -1, -1),
    "prepare": (Category.FORWARD, -1, 1),
    "call": (Category.FORWARD, 0, 2),
    "mul": (Category.FORWARD, 0, 3),
    "backward": (Category.ENGINE, -1, -1),
    "node": (Category.LAYER, 0, 3),
    "grad": (Category.LAYER, 0, 3),
    "again": (Category.RECOMPUTE, 1, 4),
    "optimizer": (Category.OPTIMIZER, -1, -1),
    "second backward": (Category.ENGINE, -1, -1),
}


def trace() -> MemoryTrace:
    columns = zip(*(PLACES[TABLE.names[number]] for number in TABLE.name), strict=True)
    category, owner, line = (np.array(column, np.int64) for column in columns)
    here = np.zeros(len(TABLE), np.int64)
    assigned = SimpleNamespace(
        skeleton=SimpleNamespace(table=TABLE),
        rows=SimpleNamespace(category=category, owner=owner),
        steps=SimpleNamespace(of_row=here, start_ns=np.array([START]), end_ns=np.array([END])),
        line=line,
    )
    nothing = cast(Any, None)
    return MemoryTrace(cast(Any, assigned), nothing, nothing, nothing, np.arange(len(TABLE)))


@dataclass(frozen=True)
class Block:
    """One block; ``born`` and ``died`` in ns, before the trace and never where they are left out."""

    born: int = -1
    died: int = NEVER
    seen: tuple[tuple[Role, int], ...] = ()
    saved: tuple[int, int] | None = None  # layer and line of the node that kept it


def row_at(time: int) -> int:
    """The innermost row around a moment."""
    around = np.flatnonzero((TABLE.start_ns <= time) & (time < TABLE.end_ns))
    return int(around[-1]) if len(around) else -1


def classified(block: Block) -> tuple[MemoryCategory, int, int]:
    """Category, layer and line of a block that is alone."""
    times = [time for time in (block.born, block.died) if 0 <= time < NEVER]
    count = len(times)
    events = AllocationTable(
        row=np.array([row_at(time) for time in times], np.int32),
        time_ns=np.array(times, np.int64),
        pointer=np.ones(count, np.int64),
        bytes=np.ones(count, np.int64),
        device=("cpu",),
        device_of=np.zeros(count, np.int8),
        reserved=np.zeros(count, np.int64),
    )
    blocks = Blocks(
        events=events,
        bytes=np.array([8]),
        born=np.array([-1 if block.born < 0 else 0]),
        died=np.array([NEVER if block.died == NEVER else count - 1]),
        seen=[[SeenAs(0, role, layer) for role, layer in block.seen]],
        of_saved=[],
    )
    kept = [SavedStorage(0, cast(Any, None), *block.saved)] if block.saved is not None else []
    found = classify(trace(), blocks, kept, np.array([LEAST]))
    assert found.block.tolist() == [0]
    return found.category[0], int(found.layer[0]), int(found.line[0])


@pytest.mark.parametrize(
    ("block", "category", "layer"),
    [
        # Made in forward: an activation where it is there when the next backward pass begins.
        (Block(150, 200), MemoryCategory.TEMPORARY, 0),
        (Block(150, 399), MemoryCategory.TEMPORARY, 0),
        (Block(150, 400), MemoryCategory.ACTIVATION, 0),
        (Block(150), MemoryCategory.ACTIVATION, 0),
        (Block(650, 840), MemoryCategory.TEMPORARY, -1),  # the pass before it has nothing to do with it
        (Block(650, 860), MemoryCategory.ACTIVATION, -1),
        (Block(150, seen=((Role.OTHER, 1),)), MemoryCategory.ACTIVATION, 0),
        # Made in backward: a gradient of an activation where it outlives its node.
        (Block(420, 450), MemoryCategory.TEMPORARY, 0),
        (Block(420, 451), MemoryCategory.ACTIVATION_GRADIENT, 0),
        # Made in a recompute: saved unless that lets go of it.
        (Block(443, 447), MemoryCategory.TEMPORARY, 1),
        (Block(443, 449), MemoryCategory.SAVED, 1),
        (Block(443), MemoryCategory.SAVED, 1),
        (Block(710), MemoryCategory.TEMPORARY, -1),
        # The batch: there before the first module call and at it, or given to a model.
        (Block(20, 150), MemoryCategory.INPUT, -1),
        (Block(20), MemoryCategory.INPUT, -1),
        (Block(20, 55), MemoryCategory.TEMPORARY, -1),  # an operation of forward is no call
        (Block(20, 100), MemoryCategory.TEMPORARY, -1),
        (Block(50, 150), MemoryCategory.TEMPORARY, -1),  # made by that operation
        (Block(310, seen=((Role.INPUT, -1),)), MemoryCategory.INPUT, -1),
        (Block(150, seen=((Role.INPUT, -1),)), MemoryCategory.ACTIVATION, 0),  # what one model gives to another
        # There before the trace.
        (Block(), MemoryCategory.OTHER, -1),
        (Block(seen=((Role.INPUT, -1),)), MemoryCategory.INPUT, -1),
        (Block(saved=(1, 4)), MemoryCategory.INPUT, -1),  # not the model's, and a node needs it
        # What was seen decides, and of several roles the first.
        (Block(150, seen=((Role.PARAMETER, 2),)), MemoryCategory.PARAMETER, 2),
        (Block(150, seen=((Role.PARAMETER, -1),)), MemoryCategory.PARAMETER, -1),
        (Block(420, seen=((Role.GRADIENT, 2),)), MemoryCategory.GRADIENT, 2),
        (Block(420, seen=((Role.GRADIENT, -1),)), MemoryCategory.GRADIENT, 0),  # whose node made it
        (Block(seen=((Role.OPTIMIZER, 1), (Role.INPUT, -1))), MemoryCategory.OPTIMIZER, 1),
        (Block(seen=((Role.OPTIMIZER, 1), (Role.BUFFER, 2))), MemoryCategory.BUFFER, 2),
        (Block(150, saved=(2, 9), seen=((Role.GRADIENT, 1),)), MemoryCategory.GRADIENT, 1),
    ],
)
def test_category_and_layer(block: Block, category: MemoryCategory, layer: int) -> None:
    assert classified(block)[:2] == (category, layer)


def test_what_is_saved_is_the_nodes_that_kept_it() -> None:
    assert classified(Block(150, 420, saved=(2, 9))) == (MemoryCategory.SAVED, 2, 9)
    assert classified(Block(150, 420)) == (MemoryCategory.ACTIVATION, 0, 3)


# --------------------------------------------------------------------------------------------------------------------
# Who keeps it, and until when
# --------------------------------------------------------------------------------------------------------------------


class Graph:
    """Nodes 1 to 4, of layers 1 to 4 and lines 11 to 14; node 4 never ran. Node 2 set off a recompute for layer 7."""

    def made_by(self, sequences: list[int]) -> tuple[Any, Any]:
        numbers = np.array(sequences, np.int64)
        return numbers.copy(), numbers + 10

    def last_run(self) -> dict[int, int]:
        return {1: 500, 2: 400, 3: 300}

    def recompute_owners(self) -> dict[int, int]:
        return {2: 7}


def saved(*notes: tuple[int, int, int, str]) -> tuple[Blocks, list[SavedTensor]]:
    """Notes of (mark, number of the node, block, name of the node), and their blocks."""
    entries = [
        SavedTensor(mark, node, name, "x", 100 + max(block, -2), 8, "2", "f") for mark, node, block, name in notes
    ]
    nothing = cast(Any, None)
    of_saved = [max(block, -1) for _, _, block, _ in notes]
    return Blocks(nothing, np.zeros(2, np.int64), nothing, nothing, [], of_saved), entries


def test_each_storage_counts_once_for_the_first_node_that_kept_it() -> None:
    blocks, notes = saved((1, 3, 0, "Mul"), (1, 1, 0, "Exp"), (1, 2, 1, "Sin"), (0, 4, 0, "Old"))
    found = saved_storages(cast(Any, Graph()), blocks, notes, {1})
    assert [(each.block, each.note.node, each.layer, each.line) for each in found] == [
        (0, "Exp", 1, 11),
        (1, "Sin", 2, 12),
    ]


def test_storages_that_torch_did_not_allocate_differ_by_their_address() -> None:
    blocks, notes = saved((1, 1, -1, "Exp"), (1, 2, -1, "Sin"), (1, 3, -2, "Cos"))
    found = saved_storages(cast(Any, Graph()), blocks, notes, {1})
    assert [each.note.node for each in found] == ["Exp", "Cos"]


def test_what_a_checkpoint_keeps_is_of_the_layer_that_called_it() -> None:
    blocks, notes = saved((1, 2, 0, CHECKPOINT), (1, 3, 1, CHECKPOINT))
    found = saved_storages(cast(Any, Graph()), blocks, notes, {1})
    assert [(each.layer, each.line) for each in found] == [(7, -1), (3, -1)]  # node 3 set off none


@pytest.mark.parametrize(
    ("notes", "until"),
    [
        ([(1, 1, 0, "Exp"), (1, 3, 0, "Mul")], 500),  # the last of those that keep it, in whatever order
        ([(1, 3, 0, "Mul"), (1, 1, 0, "Exp")], 500),
        ([(1, 4, 0, "Mul"), (1, 1, 0, "Exp")], NEVER),
        ([(1, 1, 0, CHECKPOINT)], NEVER),
        ([(0, 1, 0, "Exp")], LEAST),  # of another step
        ([(1, 1, -1, "Exp")], LEAST),
    ],
)
def test_what_is_kept_is_needed_until_its_last_node_has_run(notes: list[Any], until: int) -> None:
    blocks, entries = saved(*notes)
    assert needed_until(cast(Any, Graph()), blocks, entries, {1}).tolist() == [until, LEAST]
