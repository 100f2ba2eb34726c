"""Communication in backward passes, on timelines made by hand: whose it is, and where it ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.align_steps import assign
from gradscope.attribute.result import build_result
from gradscope.attribute.rows import read_skeleton
from gradscope.attribute.sharding import owners_of_pieces, piece_of
from gradscope.tables import EventTable, KernelTable, ModuleInfo, RowKind, SpanTable

from .hand import Row, spans, table_of

NODE, ACCUMULATE, COMMUNICATION, SHARDING = (
    RowKind.NODE,
    RowKind.ACCUMULATE,
    RowKind.COMMUNICATION,
    RowKind.SHARDING,
)
PATHS = ("", "a", "b")
MODULES = tuple(ModuleInfo(path, "Layer", None if not path else "", 0, None) for path in PATHS)
CALLS = spans((0, 0, 9), (1, 1, 4), (2, 4, 8))
FORWARD = (
    Row(RowKind.STEP, 0, 0, "step", argument=0),
    Row(RowKind.CALL, 0, 100, "call", argument=0),
    Row(RowKind.CALL, 10, 40, "call", argument=1),
    Row(RowKind.CALL, 50, 90, "call", argument=2),
    Row(RowKind.STEP, 1000, 1000, "step", argument=1),
)


def node(start: int, end: int, sequence: int) -> Row:
    return Row(NODE, start, end, f"Node{sequence}", sequence=sequence, forward_thread=1)


def result(*rows: Row, calls: SpanTable = CALLS):  # type: ignore[no-untyped-def]
    table: EventTable = table_of(*FORWARD, *rows)
    skeleton = read_skeleton(table, calls, [-1, 0, 0], paths=PATHS)
    return build_result(assign(skeleton, 0, None), MODULES, (), None, {}, has_flops=False)


def by_path(found, column: str) -> dict[str, int]:  # type: ignore[no-untyped-def]
    return {row.path: getattr(row, column) for row in found.layers if getattr(row, column)}


# A pass of DDP: a collective begins where a gradient is ready, and the reducer waits behind the last node, twice.
DDP = (
    Row(RowKind.BACKWARD, 100, 900, "backward", argument=0),
    node(110, 200, 5),
    node(210, 300, 2),
    Row(ACCUMULATE, 310, 360, "AccumulateGrad"),
    Row(COMMUNICATION, 330, 350, "c10d::allreduce_"),
    Row(COMMUNICATION, 700, 720, "torch.distributed.ddp.reducer::copy_bucket_to_grad"),
)


def test_what_the_reducer_waits_for_is_communication() -> None:
    found = result(*DDP)
    assert by_path(found, "backward_self_ns") == {"a": 90, "b": 90}
    # 360 to 700 is a wait; 20 for the call that begins it, 20 for what is copied.
    assert found.ledger.communication_ns == 340 + 20 + 20
    # Before the first node, between the nodes, and behind the last copy: another callback's.
    assert found.ledger.engine_ns == 10 + 10 + 10 + 180
    assert {op.name: op.self_ns for op in found.ops if op.phase == "communication"} == {
        "(waits for other ranks)": 340,
        "c10d::allreduce_": 20,
        "torch.distributed.ddp.reducer::copy_bucket_to_grad": 20,
    }
    assert found.step.communication_ns == 380


def test_a_pass_without_collectives_waits_for_nobody() -> None:
    """no_sync(), or one process: what lies behind the last node is the engine's."""
    rows = [row for row in DDP if row.kind != COMMUNICATION]
    found = result(*rows)
    assert found.ledger.communication_ns == 0
    assert found.ledger.engine_ns == 30 + 540
    assert found.step.communication_ns is None


def test_threads_of_the_process_group_are_no_part_of_the_step() -> None:
    alone = result(*DDP)
    found = result(
        *DDP,
        Row(COMMUNICATION, 335, 690, "gloo:all_reduce", thread=2),
        Row(RowKind.OP, 340, 680, "aten::copy_", thread=2),
    )
    assert (found.step, found.ledger) == (alone.step, alone.ledger)


def test_what_fsdp_does_is_for_the_module_that_it_names() -> None:
    """Its hooks run in the nodes of others; in forward they are a part of the layer's forward."""
    found = result(
        Row(SHARDING, 12, 22, "FSDP::pre_forward (a)"),
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        node(110, 200, 5),
        Row(SHARDING, 120, 180, "FSDP::pre_backward (b)"),
        Row(COMMUNICATION, 125, 145, "c10d::_allgather_base_"),
        Row(SHARDING, 150, 170, "FSDP::backward_prefetch for a"),
        Row(RowKind.OP, 155, 160, "aten::copy_"),
        node(210, 300, 2),
    )
    assert by_path(found, "backward_self_ns") == {"a": 90, "b": 30}
    assert by_path(found, "communication_ns") == {"a": 20, "b": 40}
    assert by_path(found, "forward_communication_ns") == {"a": 10}
    # The pass ends 100 behind its last node: FSDP waits there too.
    assert found.ledger.communication_ns == 60 + 100
    assert found.step.communication_ns == 10 + 160
    names = {op.name for op in found.ops if op.phase == "communication"}
    assert {"FSDP::pre_backward", "FSDP::backward_prefetch"} < names


def test_what_the_wrapping_fsdp_does_is_that_of_the_wrapping_module() -> None:
    """Its rows name no module: in backward they lie in nodes of the layers below it, and at their parameters."""
    found = result(
        Row(SHARDING, 2, 8, "FullyShardedDataParallel._pre_forward"),
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        node(110, 200, 5),
        Row(SHARDING, 120, 180, "FullyShardedDataParallel._pre_backward_hook"),
        Row(SHARDING, 130, 170, "FullyShardedDataParallel._pre_backward_prefetch"),
        Row(COMMUNICATION, 140, 150, "c10d::allgather_"),
        node(210, 400, 2),
        Row(SHARDING, 250, 270, "FullyShardedDataParallel.rate_limiter"),
    )
    assert by_path(found, "backward_self_ns") == {"a": 170, "b": 30}
    assert by_path(found, "communication_ns") == {"": 60 + 20}
    assert by_path(found, "forward_communication_ns") == {"": 6}


def test_what_wraps_is_the_next_around_a_layer() -> None:
    found = result(
        Row(SHARDING, 2, 8, "FullyShardedDataParallel._root_pre_forward"),
        Row(SHARDING, 12, 18, "FullyShardedDataParallel._pre_forward"),
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        node(110, 200, 5),
        Row(SHARDING, 120, 180, "FullyShardedDataParallel._pre_backward_hook"),
        node(210, 400, 2),
        Row(SHARDING, 250, 270, "FullyShardedDataParallel._pre_backward_hook"),
    )
    assert by_path(found, "communication_ns") == {"": 60, "a": 20}


def test_without_module_calls_sharding_is_forward_too() -> None:
    nothing = np.empty(0, np.int64)
    rows = (
        Row(RowKind.STEP, 0, 0, "step", argument=0),
        Row(SHARDING, 10, 60, "FullyShardedDataParallel._pre_forward"),
        Row(COMMUNICATION, 20, 40, "c10d::allgather_"),
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        Row(RowKind.STEP, 1000, 1000, "step", argument=1),
    )
    skeleton = read_skeleton(table_of(*rows), SpanTable(nothing, nothing, nothing), [], paths=())
    found = build_result(assign(skeleton, 0, None), (), (), None, {}, has_flops=False)
    assert found.step.forward_ns == 50


def test_a_collective_in_a_node_is_its_layers() -> None:
    """Tensor parallel; nothing is waited for at the end."""
    found = result(
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        node(110, 200, 5),
        Row(COMMUNICATION, 120, 180, "_c10d_functional::wait_tensor"),
        node(210, 300, 2),
    )
    assert by_path(found, "communication_ns") == {"b": 60}
    assert (found.ledger.communication_ns, found.ledger.engine_ns) == (60, 10 + 10 + 100)
    assert by_path(found, "backward_total_ns") == {"": 120, "a": 90, "b": 30}


@pytest.mark.parametrize(
    ("text", "piece", "owner"),
    [
        ("FSDP::all_gather (a)", "FSDP::all_gather", 1),
        ("FSDP::backward_prefetch for b", "FSDP::backward_prefetch", 2),
        ("FSDP::root_pre_forward", "FSDP::root_pre_forward", -5),
        ("FSDP::all_gather (a, b)", "FSDP::all_gather", 1),
        ("FSDP::all_gather (inner.c)", "FSDP::all_gather", 3),
        ("FSDP::all_gather (d)", "FSDP::all_gather", -5),  # of two modules nobody knows which
        ("FSDP::all_gather (e)", "FSDP::all_gather", -5),
        ("aten::mm", "aten::mm", -5),
    ],
)
def test_names_of_pieces(text: str, piece: str, owner: int) -> None:
    paths = ["", "a", "b", "model.inner.c", "x.d", "y.d"]
    assert piece_of(text) == piece
    assert owners_of_pieces([text], paths, -5).tolist() == [owner]


def test_two_pieces_of_one_name_are_one_operation() -> None:
    found = result(
        Row(RowKind.BACKWARD, 100, 400, "backward", argument=0),
        node(110, 390, 5),
        Row(SHARDING, 120, 130, "FSDP::all_gather (a)"),
        Row(SHARDING, 140, 160, "FSDP::all_gather (b)"),
    )
    (row,) = [op for op in found.ops if op.name == "FSDP::all_gather"]
    assert (row.layer, row.calls, row.self_ns) == (None, 2, 30)


def test_on_a_device_it_is_a_stream_that_waits() -> None:
    """The callback tells it to, and returns: what the host does behind the last node is no wait for ranks."""
    table = table_of(*FORWARD, *DDP)
    row = int(np.flatnonzero(table.kind == NODE)[0])
    one = np.array([0])
    kernels = KernelTable(("gemm",), one, one + 400, one + 600, one, one, one + row)
    skeleton = read_skeleton(replace(table, kernels=kernels), CALLS, [-1, 0, 0], paths=PATHS)
    found = build_result(assign(skeleton, 0, None), MODULES, (), None, {}, has_flops=False)
    assert found.ledger.communication_ns == 20 + 20
    assert found.ledger.engine_ns == 30 + 520 - 200
    assert found.ledger.backward_ns == 800


# --------------------------------------------------------------------------------------------------------------------
# Waits that leave no row
# --------------------------------------------------------------------------------------------------------------------

US = 1_000


def waits(found) -> dict[tuple[str, str], int]:  # type: ignore[no-untyped-def]
    """(phase, name) of what is waited for, in microseconds."""
    return {(op.phase, op.name): op.self_ns // US for op in found.ops if op.name.startswith("(waits for")}


def us(kind: RowKind, start: int, end: int, name: str = "op", **more: int) -> Row:
    return Row(kind, start * US, end * US, name, **more)


def result_us(*rows: Row, calls: SpanTable = CALLS):  # type: ignore[no-untyped-def]
    """A step of 1,000 microseconds, of which the first 600 are a call of the root with one of ``a`` inside of it."""
    table = table_of(
        us(RowKind.STEP, 0, 0, "step", argument=0),
        us(RowKind.CALL, 0, 600, "call", argument=0),
        us(RowKind.CALL, 10, 500, "call", argument=1),
        us(RowKind.STEP, 1000, 1000, "step", argument=1),
        *rows,
    )
    skeleton = read_skeleton(table, calls, [-1, 0, 0], paths=PATHS)
    return build_result(assign(skeleton, 0, None), MODULES, (), None, {}, has_flops=False)


def test_a_wait_in_forward_is_communication_of_its_layer() -> None:
    """As DDP waits in C++ until its buffers are there, before it calls the model; here ``a`` does."""
    found = result_us(
        us(COMMUNICATION, 20, 30, "c10d::broadcast_"),
        us(COMMUNICATION, 25, 400, "gloo:broadcast", thread=2),
        us(RowKind.OP, 410, 480, "aten::mm"),
    )
    assert waits(found) == {("forward", "(waits for gloo:broadcast)"): 380}
    assert by_path(found, "forward_communication_ns") == {"a": 390 * US}
    assert found.step.communication_ns == 390 * US
    assert found.step.forward_ns == 600 * US


def test_waits_of_python_have_rows_of_gradscopes() -> None:
    """A loss that is averaged for the log between the phases, and tensors that a node exchanges."""
    found = result_us(
        us(RowKind.BACKWARD, 620, 800, "backward", argument=0),
        us(NODE, 630, 790, "_AlltoAllBackward", sequence=2, forward_thread=1),
        us(COMMUNICATION, 640, 650, "c10d::alltoall_"),
        us(COMMUNICATION, 650, 780, "c10d::wait for all_to_all"),
        us(COMMUNICATION, 810, 820, "c10d::allreduce_"),
        us(COMMUNICATION, 820, 905, "c10d::wait for all_reduce"),
        us(COMMUNICATION, 645, 779, "gloo:all_to_all", thread=2),
        us(COMMUNICATION, 815, 900, "gloo:all_reduce", thread=2),
    )
    assert by_path(found, "communication_ns") == {"a": 140 * US}
    assert by_path(found, "backward_self_ns") == {"a": 20 * US}
    assert found.ledger.communication_ns == 140 * US
    assert found.step.communication_ns == (140 + 95) * US
    assert found.step.other_ns == (1000 - 600 - 180) * US


@pytest.mark.parametrize(
    "rows",
    [
        # An operation works by itself, also when a collective is done meanwhile.
        [us(RowKind.OP, 40, 405, "aten::mm")],
        # Python went on for longer than a thread takes to be woken.
        [us(RowKind.OP, 405 + 1_100, 405 + 1_110, "aten::mm")],
        # The same, sooner: it did not wait at once, and is not woken so late.
        [us(RowKind.OP, 40, 50, "aten::mm"), us(RowKind.OP, 801, 811, "aten::mm")],
        # Rows follow each other closely.
        [us(RowKind.OP, at, at + 10, "aten::add") for at in range(30, 500, 15)],
    ],
    ids=["an operation", "Python", "Python behind an operation", "many rows"],
)
def test_what_is_no_wait(rows: list[Row]) -> None:
    longer = max(row.end for row in rows) // US > 600
    table = [
        us(RowKind.STEP, 0, 0, "step", argument=0),
        us(RowKind.CALL, 0, 2_000 if longer else 600, "call", argument=0),
        us(RowKind.STEP, 3000, 3000, "step", argument=1),
        us(COMMUNICATION, 20, 30, "c10d::allreduce_"),
        us(COMMUNICATION, 25, 400, "gloo:all_reduce", thread=2),
    ]
    skeleton = read_skeleton(table_of(*table, *rows), CALLS, [-1, 0, 0], paths=PATHS)
    found = build_result(assign(skeleton, 0, None), MODULES, (), None, {}, has_flops=False)
    assert waits(found) == {}
    assert found.step.communication_ns == 10 * US


def test_rows_of_the_process_group_are_no_part_of_a_step() -> None:
    found = result_us(
        us(COMMUNICATION, 20, 30, "c10d::allreduce_"),
        us(COMMUNICATION, 25, 5_000, "gloo:all_reduce", thread=2),
        us(RowKind.OP, 30, 4_000, "aten::copy_", thread=2),
    )
    assert {op.name for op in found.ops} == {"(python)", "c10d::allreduce_"}


def ddp_us(*behind: Row, until: int = 980) -> tuple[Row, ...]:
    """A pass of DDP whose last node is done at 660."""
    return (
        us(RowKind.BACKWARD, 620, until, "backward", argument=0),
        us(NODE, 630, 640, "Node2", sequence=2, forward_thread=1),
        us(ACCUMULATE, 640, 660, "AccumulateGrad"),
        us(COMMUNICATION, 645, 650, "c10d::allreduce_"),
        us(COMMUNICATION, 648, 900, "gloo:all_reduce", thread=2),
        us(COMMUNICATION, 905, 910, "torch.distributed.ddp.reducer::copy_bucket_to_grad"),
        *behind,
    )


def test_a_wait_behind_the_last_node_is_told_once() -> None:
    """The thread of the process group tells of it too."""
    found = result_us(*ddp_us())
    assert waits(found) == {("communication", "(waits for other ranks)"): 905 - 660}
    assert found.ledger.engine_ns == (10 + 980 - 910) * US


def test_what_runs_directly_behind_the_last_node_is_no_wait() -> None:
    found = result_us(*ddp_us(us(RowKind.OP, 660, 700, "aten::div_")))
    assert waits(found) == {("communication", "(waits for other ranks)"): 905 - 700}


def test_what_is_communicated_behind_a_pass_is_none_of_its_waits() -> None:
    """FSDP gathers for the next forward; a collective that the loop begins."""
    rows = [row for row in DDP if row.kind != COMMUNICATION]
    found = result(*rows, Row(SHARDING, 950, 960, "FSDP::pre_forward (a)"))
    assert (found.ledger.communication_ns, found.ledger.engine_ns) == (0, 30 + 540)


def test_a_collective_in_a_node_leaves_no_wait_to_the_end_of_the_pass() -> None:
    """Tensor parallel waits for its own at once."""
    found = result_us(
        us(RowKind.BACKWARD, 620, 980, "backward", argument=0),
        us(NODE, 630, 700, "Node2", sequence=2, forward_thread=1),
        us(COMMUNICATION, 640, 650, "c10d::allreduce_"),
    )
    assert waits(found) == {}
    assert found.ledger.engine_ns == (10 + 280) * US


def test_threads_of_the_process_group_alone_are_no_communication() -> None:
    """What was begun before: nothing in the step waits for it."""
    found = result(
        Row(COMMUNICATION, 335, 690, "gloo:all_reduce", thread=2),
        Row(RowKind.OP, 340, 680, "aten::copy_", thread=2),
    )
    assert found.step.communication_ns is None


@pytest.mark.parametrize("taken", [0, 100, 400, 1_000])
def test_what_hooks_took_of_a_wait_is_not_counted_twice(taken: int) -> None:
    """gradscope's own hooks ran in the call that waits: how much of it, they timed themselves."""
    rows = (
        us(COMMUNICATION, 20, 30, "c10d::broadcast_"),
        us(COMMUNICATION, 25, 400, "gloo:broadcast", thread=2),
        us(RowKind.OP, 410, 480, "aten::mm"),
    )
    none = np.zeros(3, np.int64)
    calls = replace(CALLS, inside_ns=np.array([0, taken * US, 0]), around_ns=none, open_ns=none)
    found, plain = result_us(*rows, calls=calls), result_us(*rows)
    assert all(op.self_ns >= 0 for op in found.ops)
    assert sum(op.self_ns for op in found.ops) == sum(op.self_ns for op in plain.ops)
    own = 490 - 10 - 70  # of the call, the wait of 380 in it
    assert sum(waits(found).values()) == min(380, max(own - taken, 0))


@pytest.mark.parametrize(("woken", "waited"), [(100, 100), (300, 300), (900, 300)])
def test_a_wait_ends_soon_behind_its_collective(woken: int, waited: int) -> None:
    """Then Python goes on with something of its own."""
    table = table_of(
        us(RowKind.STEP, 0, 0, "step", argument=0),
        us(RowKind.CALL, 0, 60_000, "call", argument=0),
        us(COMMUNICATION, 20, 30, "c10d::broadcast_"),
        us(COMMUNICATION, 25, 1_030, "gloo:broadcast", thread=2),
        us(RowKind.OP, 1_030 + woken, 59_000, "aten::mm"),
        us(RowKind.STEP, 61_000, 61_000, "step", argument=1),
    )
    skeleton = read_skeleton(table, CALLS, [-1, 0, 0], paths=PATHS)
    found = build_result(assign(skeleton, 0, None), MODULES, (), None, {}, has_flops=False)
    assert waits(found) == {("forward", "(waits for gloo:broadcast)"): 1_000 + waited}


@pytest.mark.parametrize("at", [-3_000, 3_500])
def test_a_wait_outside_of_the_steps_is_in_none(at: int) -> None:
    """Before the first or behind the last, as where a model is sent to all ranks."""
    rows = (
        us(COMMUNICATION, 610, 620, "c10d::allreduce_"),
        us(COMMUNICATION, 615, 900, "gloo:all_reduce", thread=2),
        us(RowKind.OP, 905, 910, "aten::item"),
    )
    outside = [
        us(COMMUNICATION, at, at + 10, "c10d::broadcast_"),
        us(COMMUNICATION, at + 5, at + 300, "gloo:broadcast", thread=2),
        us(RowKind.OP, at + 305, at + 310, "aten::item"),
        us(RowKind.OP, at + 320, at + 330, "aten::item"),
    ]
    found, plain = result_us(*rows, *outside), result_us(*rows)
    assert (found.ops, found.step.communication_ns) == (plain.ops, plain.step.communication_ns)


# --------------------------------------------------------------------------------------------------------------------
# What others do meanwhile
# --------------------------------------------------------------------------------------------------------------------

VIEWS = tuple(row for row in ddp_us() if not row.name.endswith("copy_bucket_to_grad"))  # until 900, of 980


@pytest.mark.parametrize("until", [100, 640, 905, 970, 2_000])
@pytest.mark.parametrize("begun", [5, 615, 640])
def test_collectives_begun_before_those_of_a_pass_lengthen_no_wait(begun: int, until: int) -> None:
    """The program's own, which nobody waits for there: begun in forward, in front of the pass, in it."""
    found = result_us(*_long(VIEWS), us(COMMUNICATION, begun, max(until, begun + 1), "gloo:all_reduce", thread=9))
    assert found.ledger == result_us(*_long(VIEWS)).ledger


def _long(rows: tuple[Row, ...]) -> list[Row]:
    """The pass goes on for long enough behind its last collective that it does not end its wait."""
    return [replace(row, end=3_000 * US) if row.kind == RowKind.BACKWARD else row for row in rows]


@pytest.mark.parametrize("until", [605, 640, 950, 1_400, 5_000])
def test_what_an_earlier_pass_began_lengthens_no_wait_of_a_later_one(until: int) -> None:
    earlier = (
        us(RowKind.BACKWARD, 601, 619, "backward", argument=0),
        us(ACCUMULATE, 602, 610, "AccumulateGrad"),
        us(COMMUNICATION, 603, 604, "c10d::allreduce_"),
    )
    thread = us(COMMUNICATION, 604, until, "gloo:all_reduce", thread=9)
    found, alone = result_us(*_long(VIEWS), *earlier, thread), result_us(*_long(VIEWS))
    # The earlier pass waits to its end: the thread is woken by then at the latest.
    assert sum(waits(found).values()) == 619 - 610 + sum(waits(alone).values())


def test_a_collective_of_a_module_called_at_a_gradient_is_that_modules_to_wait_for() -> None:
    found = result_us(
        us(RowKind.BACKWARD, 620, 980, "backward", argument=0),
        us(ACCUMULATE, 630, 700, "AccumulateGrad"),
        us(RowKind.CALL, 635, 690, "call", argument=2),
        us(COMMUNICATION, 640, 650, "c10d::allreduce_"),
    )
    assert waits(found) == {}


@pytest.mark.parametrize("taken", [0, 50, 100, 150, 200, 400, 1_000])
def test_several_waits_of_a_call_are_no_more_than_its_own_time(taken: int) -> None:
    """gradscope's own hooks took a part of the call, whatever the part in which it waited."""
    rows = [
        row
        for at in (20, 170, 320)
        for row in (
            us(COMMUNICATION, at, at + 10, "c10d::broadcast_"),
            us(COMMUNICATION, at + 5, at + 130, "gloo:broadcast", thread=2 + at),
            us(RowKind.OP, at + 135, at + 150, "aten::mm"),
        )
    ]
    none = np.zeros(3, np.int64)
    calls = replace(CALLS, inside_ns=np.array([0, taken * US, 0]), around_ns=none, open_ns=none)
    found, plain = result_us(*rows, calls=calls), result_us(*rows)
    assert all(op.self_ns >= 0 for op in found.ops)
    assert sum(op.self_ns for op in found.ops) == sum(op.self_ns for op in plain.ops)
    own = 490 - 3 * (10 + 15)
    assert sum(waits(found).values()) == min(3 * 125, max(own - taken, 0))


def test_what_is_gathered_ahead_is_for_the_module_that_fsdp_names() -> None:
    """Also in the forward of another."""
    found = result(Row(SHARDING, 12, 32, "FSDP::all_gather (b)"), Row(COMMUNICATION, 15, 25, "c10d::_allgather_base_"))
    assert by_path(found, "forward_communication_ns") == {"b": 20}
    assert [op.name for op in found.ops if "c10d" in op.name] == ["FSDP::all_gather: c10d::_allgather_base_"]


def test_a_wait_in_a_call_that_is_run_again_is_communication() -> None:
    """DDP inside a checkpoint: recompute sends its buffers again, and waits in C++."""
    found = result_us(
        us(RowKind.BACKWARD, 620, 980, "backward", argument=0),
        us(NODE, 630, 960, "CheckpointFunctionBackward", sequence=2, forward_thread=1),
        us(RowKind.CALL, 640, 900, "call", argument=1),
        us(COMMUNICATION, 650, 660, "c10d::broadcast_"),
        us(COMMUNICATION, 655, 800, "gloo:broadcast", thread=2),
        us(RowKind.OP, 805, 890, "aten::mm"),
    )
    waited = found.step.communication_ns
    assert waited == found.ledger.communication_ns == sum(by_path(found, "communication_ns").values())
    assert by_path(found, "recompute_ns") == {"a": 260_000 - waited}


@pytest.mark.parametrize("thread", [1, 3])
def test_what_the_reducer_waits_for_does_not_depend_on_the_engines_thread(thread: int) -> None:
    """3: nodes, and the callbacks behind them, on a thread of the engine's own, in a trace without kernels."""
    rows = [row if row.kind == RowKind.BACKWARD else replace(row, thread=thread) for row in DDP]
    found = result(*rows)
    assert {op.name: op.self_ns for op in found.ops if op.name.startswith("(waits")} == {"(waits for other ranks)": 340}
    assert (found.ledger.engine_ns, found.ledger.communication_ns) == (210, 380)


@pytest.mark.parametrize("ends", range(110, 125))
def test_communication_of_the_pass_is_rounded_once(ends: int) -> None:
    """In a mean over three steps the ledger's sum and that of the step are the same."""
    steps = [Row(RowKind.STEP, 1000 * number, 1000 * number, "step", argument=number) for number in range(4)]
    rows: list[Row] = []
    for number in range(3):
        at, late = 1000 * number, number < 2
        rows += [
            Row(RowKind.CALL, at, at + 90, "call", argument=0),
            Row(RowKind.BACKWARD, at + 100, at + 300, "backward", argument=0),
            Row(NODE, at + 105, at + 300, "Node5", sequence=5, forward_thread=1),
            *(
                Row(COMMUNICATION, at + ends + 30 * k, at + ends + 30 * k + 10 + late, name)
                for k, name in enumerate(("c10d::allreduce_", "c10d::reduce_", "c10d::send"))
            ),
        ]
    skeleton = read_skeleton(table_of(*steps, *rows), CALLS, [-1, 0, 0], paths=PATHS)
    found = build_result(assign(skeleton, 0, None), MODULES, (), None, {}, has_flops=False)
    assert found.step.communication_ns == found.ledger.communication_ns > 0
