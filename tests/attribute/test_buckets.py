"""DDP's buckets on timelines made by hand: whose time reducing them is, and when each was there and sent."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.align_steps import assign
from gradscope.attribute.buckets import split
from gradscope.attribute.result import Attribution, build_result
from gradscope.attribute.rows import read_skeleton
from gradscope.tables import EventTable, KernelTable, ModuleInfo, ReducerInfo, RowKind

from .hand import Row, spans, table_of

ACCUMULATE, COMMUNICATION = RowKind.ACCUMULATE, RowKind.COMMUNICATION
MODULES = tuple(ModuleInfo(path, "Layer", None if not path else "", 0, None) for path in ("", "a", "b", "c"))
CALLS = spans((0, 0, 9), (1, 1, 3), (2, 3, 5), (3, 5, 8))
FORWARD = (
    Row(RowKind.STEP, 0, 0, "step", argument=0),
    Row(RowKind.CALL, 0, 100, "call", argument=0),
    Row(RowKind.CALL, 10, 30, "call", argument=1),
    Row(RowKind.CALL, 40, 60, "call", argument=2),
    Row(RowKind.CALL, 70, 90, "call", argument=3),
    Row(RowKind.STEP, 1000, 1000, "step", argument=1),
)
COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
# Gradients of c and b are 30 and 10 bytes of one bucket, those of a another one.
REDUCER = ReducerInfo("", 32, False, (((3, 30), (2, 10)), ((1, 20),)))


def node(start: int, end: int, sequence: int) -> Row:
    return Row(RowKind.NODE, start, end, f"Node{sequence}", sequence=sequence, forward_thread=1)


BACKWARD = (
    Row(RowKind.BACKWARD, 100, 900, "backward", argument=0),
    node(110, 200, 6),
    Row(ACCUMULATE, 200, 210, "AccumulateGrad"),
    node(210, 300, 4),
    Row(ACCUMULATE, 300, 340, "AccumulateGrad"),
    Row(COMMUNICATION, 310, 330, "c10d::allreduce_"),
    Row(COMMUNICATION, 312, 320, "record_param_comms"),
    node(340, 400, 2),
    Row(ACCUMULATE, 400, 430, "AccumulateGrad"),
    Row(COMMUNICATION, 410, 420, "c10d::allreduce_"),
)
# The last node is done at 430; what is copied behind it takes 5 each time.
COPIES = (
    Row(COMMUNICATION, 600, 605, COPY),
    Row(COMMUNICATION, 605, 610, COPY),
    Row(COMMUNICATION, 800, 805, COPY),
    Row(RowKind.OP, 801, 804, "aten::copy_"),
)
THREADS = (
    Row(COMMUNICATION, 315, 600, "gloo:all_reduce", thread=2),
    Row(COMMUNICATION, 415, 800, "gloo:all_reduce", thread=3),
)


def result(
    *rows: Row, reducers: tuple[ReducerInfo, ...] = (REDUCER,), kernels: KernelTable | None = None
) -> Attribution:
    table: EventTable = replace(table_of(*FORWARD, *rows), kernels=kernels)
    skeleton = read_skeleton(table, CALLS, [-1, 0, 0, 0], paths=[info.path for info in MODULES])
    return build_result(assign(skeleton, 0, None), MODULES, (), None, {}, has_flops=False, reducers=reducers)


def by_layer(found: Attribution) -> dict[str, int]:
    return {row.path: row.communication_ns for row in found.layers if row.communication_ns}


def test_what_is_waited_for_a_bucket_is_its_layers() -> None:
    found = result(*BACKWARD, *COPIES, *THREADS)
    # The first until 600, the second from 610 to 800. Behind the last copy the reducer waits for nothing.
    first, second = 170, 190
    assert by_layer(found) == {
        "c": first * 3 // 4 + 15 + 5,  # 3/4 of the wait and of the 20 that it took to begin, and its copy
        "b": first - first * 3 // 4 + 5 + 5,
        "a": second + 10 + 5,
    }
    assert found.ledger.communication_ns == sum(by_layer(found).values())
    assert found.step.communication_ns == found.ledger.communication_ns
    assert found.buckets is not None
    assert [row.exposed_ns for row in found.buckets] == [first, second]


def test_it_adds_up_to_what_is_waited_without_buckets() -> None:
    plain = result(*BACKWARD, *COPIES, *THREADS, reducers=())
    found = result(*BACKWARD, *COPIES, *THREADS)
    assert plain.buckets is None
    assert found.ledger == plain.ledger and found.step == plain.step
    assert sorted(found.ops, key=str) == sorted(plain.ops, key=str)


def test_when_gradients_are_there_and_when_they_are_sent() -> None:
    found = result(*BACKWARD, *COPIES, *THREADS)
    assert found.buckets is not None
    first, second = found.buckets
    assert (first.first_at_ns, first.mean_at_ns, first.last_at_ns, first.begun_at_ns) == (100, 125, 200, 210)
    assert (second.first_at_ns, second.mean_at_ns, second.last_at_ns, second.begun_at_ns) == (300, 300, 300, 310)
    assert [(row.begun_by, list(row.layers), row.bytes, row.parameters) for row in found.buckets] == [
        ("b", ["c", "b"], 40, 2),
        ("a", ["a"], 20, 1),
    ]
    assert {row.pass_ns for row in found.buckets} == {330}


def test_a_bucket_waits_for_one_that_is_sent_before_it() -> None:
    """In the order of registration: c's gradient is there first, and sent behind a's."""
    reducer = ReducerInfo("", 32, True, (((1, 20),), ((3, 30), (2, 10))))
    rows = [row for row in BACKWARD if row.kind != COMMUNICATION]
    sent = (
        Row(COMMUNICATION, 405, 410, "c10d::allreduce_"),
        Row(COMMUNICATION, 412, 418, "c10d::allreduce_"),
        Row(COMMUNICATION, 420, 422, "c10d::allreduce_"),  # which parameters were used anywhere
    )
    found = result(*rows, *sent, reducers=(reducer,))
    assert found.buckets is not None
    a, cb = found.buckets
    assert (a.begun_by, cb.begun_by) == ("a", "a")
    assert (cb.last_at_ns, cb.begun_at_ns) == (200, 312)
    assert (a.finds_unused, a.cap_bytes) == (True, 32)


@pytest.mark.parametrize(
    ("rows", "waited"),
    [
        ((*COPIES, *THREADS), [170, 190]),
        # With copies alone; a hook that goes on behind the collective: it is there when it is copied.
        (COPIES, [170, 190]),
        ((*COPIES, *(replace(row, end=row.start + 20) for row in THREADS)), [170, 190]),
        # Gradients are views of their buckets: as the threads say.
        (THREADS, [170, 300]),
        ((), [313, 157]),  # of 470, by 40 and 20 bytes
        # The second is there before the first: nobody waits for it.
        ((THREADS[0], replace(THREADS[1], end=500)), [170, 300]),
        # One that is done behind the pass: nobody waited that long.
        ((replace(THREADS[0], end=950), THREADS[1]), [470, 0]),
        # Other collectives, before the first and behind the pass, are none of its.
        ((*THREADS, *(Row(COMMUNICATION, at, at + 50, "gloo:barrier", thread=4) for at in (20, 920))), [170, 300]),
    ],
    ids=["both", "copies", "a hook", "views", "neither", "out of order", "behind the pass", "others"],
)
def test_when_a_bucket_is_there(rows: tuple[Row, ...], waited: list[int]) -> None:
    found = result(*BACKWARD, *rows)
    assert found.buckets is not None
    assert [row.exposed_ns for row in found.buckets] == waited


@pytest.mark.parametrize("ends", list(itertools.permutations((500, 650, 800))))
def test_waits_for_buckets_are_what_is_waited_whatever_is_there_first(ends: tuple[int, ...]) -> None:
    """A bucket for each layer; each is waited for from when all before it were there."""
    reducer = ReducerInfo("", 32, False, (((3, 30),), ((2, 10),), ((1, 20),)))
    first = (Row(COMMUNICATION, 202, 206, "c10d::allreduce_"),)
    threads = [
        Row(COMMUNICATION, at, end, "gloo:all_reduce", thread=2 + at)
        for at, end in zip((203, 315, 415), ends, strict=True)
    ]
    found = result(*BACKWARD, *first, *threads, reducers=(reducer,))
    assert found.buckets is not None
    there = [430, *np.maximum.accumulate(ends[:2]).tolist(), 900]
    assert [row.exposed_ns for row in found.buckets] == np.diff(there).tolist()


def test_of_a_layer_with_several_gradients_the_last_counts() -> None:
    rows = (*BACKWARD[:4], Row(ACCUMULATE, 300, 305, "AccumulateGrad"), replace(BACKWARD[4], start=305), *BACKWARD[5:])
    found = result(*rows, *THREADS)
    assert found.buckets is not None
    first, _ = found.buckets
    assert (first.first_at_ns, first.mean_at_ns, first.last_at_ns) == (100, (3 * 100 + 205) // 4, 205)


def test_the_gradient_that_completes_a_bucket_is_in_it() -> None:
    """Also where its collective begins in the same moment."""
    rows = [replace(row, start=300) if row.start == 310 else row for row in BACKWARD]
    found = result(*rows, *THREADS)
    assert found.buckets is not None
    assert (found.buckets[0].last_at_ns, found.buckets[0].begun_at_ns) == (200, 200)


def test_layers_are_told_by_what_they_hold_the_most_first() -> None:
    for sizes in ((30, 10), (10, 30)):
        reducer = replace(REDUCER, buckets=(((3, sizes[0]), (2, sizes[1])), REDUCER.buckets[1]))
        found = result(*BACKWARD, *THREADS, reducers=(reducer,))
        assert found.buckets is not None
        assert found.buckets[0].layers == (("c", "b") if sizes[0] > sizes[1] else ("b", "c"))


@pytest.mark.parametrize("missing", [1, 4, 5])
def test_collectives_that_are_no_buckets_stay_as_they_were(missing: int) -> None:
    """A hook that sends several for a bucket, or none."""
    more = [Row(COMMUNICATION, 330 + number, 331 + number, "c10d::allreduce_") for number in range(missing)]
    found = result(*BACKWARD, *COPIES, *THREADS, *more)
    assert found.buckets is None
    assert found == replace(result(*BACKWARD, *COPIES, *THREADS, *more, reducers=()), buckets=None)


def test_a_pass_that_sends_nothing_has_no_buckets() -> None:
    """no_sync()."""
    found = result(*(row for row in BACKWARD if row.kind != COMMUNICATION))
    assert found.buckets is None and by_layer(found) == {}


def test_two_models_have_buckets_of_their_own() -> None:
    reducers = (ReducerInfo("m", 32, False, (((3, 30), (2, 10)),)), ReducerInfo("n", 32, False, (((1, 20),),)))
    found = result(*BACKWARD, *COPIES, *THREADS, reducers=reducers)
    assert found.buckets is not None
    assert [(row.model, row.number, row.exposed_ns) for row in found.buckets] == [("m", 0, 170), ("n", 0, 190)]


def test_copies_of_two_models_are_not_told_apart() -> None:
    """Either may copy first: as the threads say. Here the second model's bucket is there first."""
    reducers = (ReducerInfo("m", 32, False, (((3, 30), (2, 10)),)), ReducerInfo("n", 32, False, (((1, 20),),)))
    copies = [Row(COMMUNICATION, start, start + 5, COPY) for start in (600, 800, 805)]
    threads = (replace(THREADS[0], end=800), replace(THREADS[1], end=600))
    found = result(*BACKWARD, *copies, *threads, reducers=reducers)
    assert found.buckets is not None
    assert [(row.model, row.exposed_ns) for row in found.buckets] == [("m", 800 - 430 - 5), ("n", 0)]


def test_on_a_device_kernels_are_the_layers_of_the_bucket() -> None:
    """The first bucket's kernel runs beside a matmul for half of its time."""
    table = table_of(*FORWARD, *BACKWARD)
    begins = np.flatnonzero(table.name == table.names.index("record_param_comms"))
    matmul = np.flatnonzero(table.name == table.names.index("Node2"))
    kernels = KernelTable(
        names=("ncclDevKernel_AllReduce_Sum_f32", "gemm"),
        name=np.array([0, 1]),
        start_ns=np.array([400, 420]),
        end_ns=np.array([440, 500]),
        row=np.array([begins[0], matmul[0]]),
        device=np.zeros(2, np.int64),
        stream=np.zeros(2, np.int64),
    )
    found = result(*BACKWARD, kernels=kernels)
    assert found.buckets is not None
    assert [row.exposed_ns for row in found.buckets] == [20, 0]
    plain = result(*BACKWARD, kernels=kernels, reducers=())
    assert found.ledger == plain.ledger and found.device == plain.device
    hidden = {row.path: row.overlapped_communication_ns for row in found.layers if row.overlapped_communication_ns}
    assert hidden == {"c": 15, "b": 5}
    shares = by_layer(found)
    assert shares["c"] == pytest.approx(3 * (shares["b"]), abs=2)  # of 20 for the call and 20 of its kernel


def test_parts_add_up() -> None:
    assert split(10, [(1, 1), (2, 1), (3, 1)]) == [(1, 3), (2, 3), (3, 4)]
    assert split(7, [(1, 0), (2, 0)]) == [(1, 3), (2, 4)]
    assert split(7, []) == []


# --------------------------------------------------------------------------------------------------------------------
# A hook of the program's own
# --------------------------------------------------------------------------------------------------------------------


def _hooked(seed: int) -> tuple[list[Row], ReducerInfo, list[int], list[int], list[list[int]]]:
    """A pass whose hook begins collectives at these gradients, of which each has a layer and a bucket.

    Half of them begin where DDP would begin them, the others anywhere.

    Returns:
        rows, the model, the layer of each gradient, at which gradient each collective begins, gradients of each bucket.
    """
    rng = np.random.default_rng(seed)
    layers = rng.permutation([*range(1, 4), *rng.integers(1, 4, rng.integers(0, 4))]).tolist()
    count = int(rng.integers(1, len(layers)))
    held: list[list[int]] = [[] for _ in range(count)]
    bucket_of = {layer: int(rng.integers(count)) for layer in range(1, 4)}
    for place, layer in enumerate(layers):
        split_up = seed % 3 == 0  # a layer may be in several buckets
        held[int(rng.integers(count)) if split_up else bucket_of[layer]].append(place)
    held = [each for each in held if each]
    begun = np.maximum.accumulate([max(each) for each in held]).tolist()
    if seed % 2:
        begun = np.sort(rng.integers(0, len(layers), len(held))).tolist()
    rows = [Row(RowKind.BACKWARD, 100, 900, "backward", argument=0)]
    for place, layer in enumerate(layers):
        at = 110 + 60 * place
        rows += [node(at, at + 20, 2 * layer), Row(ACCUMULATE, at + 20, at + 55, "AccumulateGrad")]
        rows += [
            Row(COMMUNICATION, at + 25 + 5 * nth, at + 28 + 5 * nth, "c10d::allreduce_")
            for nth in range(begun.count(place))
        ]
    buckets = tuple(tuple((layers[place], 8) for place in each) for each in held)
    return rows, ReducerInfo("", 32, False, buckets, hooked=True), layers, begun, held


def _fits(layers: list[int], begun: list[int], held: list[list[int]]) -> bool:
    """Whether each bucket began at the last gradient of it or of one before, so far as its layers tell."""
    for number, at in enumerate(begun):
        before = held[: number + 1]
        shared = {layer for layer in layers if sum(any(layers[place] == layer for place in each) for each in held) > 1}
        # A layer's gradients are told by the layer alone: the last of a bucket is its last that is in no other.
        last = max((place for each in before for place in each if layers[place] not in shared), default=-1)
        if at < last or (at > last and not any(layers[place] in shared for each in before for place in each)):
            return False
    return True


@pytest.mark.parametrize("seed", range(90))
def test_collectives_of_a_hook_are_buckets_where_each_begins_when_it_is_complete(seed: int) -> None:
    rows, reducer, layers, begun, held = _hooked(seed)
    found = result(*rows, reducers=(reducer,)).buckets
    assert (found is not None) == _fits(layers, begun, held)
    if found is not None:
        assert [row.begun_by for row in found] == [MODULES[layers[place]].path for place in begun]


def test_some_hooks_send_buckets_and_some_do_not() -> None:
    fits = [_fits(*_hooked(seed)[2:]) for seed in range(90)]
    assert all(fits[::2]) and 5 < sum(fits[1::2]) < 40


# --------------------------------------------------------------------------------------------------------------------
# When buckets are there
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", list(itertools.product((320, 425, 500, 650, 950), repeat=2)))
def test_nobody_waits_for_a_bucket_that_is_there_before_the_last_node(ends: tuple[int, int]) -> None:
    threads = [replace(row, end=max(end, row.start + 1)) for row, end in zip(THREADS, ends, strict=True)]
    found = result(*BACKWARD, *threads)
    assert found.buckets is not None
    there = [430, min(max(ends[0], 430), 900), 900]
    assert [row.exposed_ns for row in found.buckets] == np.diff(there).tolist()


@pytest.mark.parametrize("at", [20, 120, 250, 299, 901])
def test_other_collectives_do_not_tell_when_buckets_are_there(at: int) -> None:
    """Those that are done before the pass began its first, or behind the pass."""
    found = result(*BACKWARD, *THREADS, Row(COMMUNICATION, at, at + 5, "gloo:barrier", thread=9))
    assert found.buckets == result(*BACKWARD, *THREADS).buckets


def test_a_collective_in_a_row_of_another_is_none_of_its_own() -> None:
    """One thread's row tells of both."""
    around = [
        replace(row, start=row.start - 2, end=row.end + 2, name="c10d::allreduce_coalesced_")
        for row in BACKWARD
        if row.name == "c10d::allreduce_"
    ]
    found = result(*BACKWARD, *around, *THREADS)
    assert found.buckets is not None
    assert [row.exposed_ns for row in found.buckets] == [170, 300]


def test_a_pass_that_does_not_ask_which_gradients_are_unused_has_its_buckets() -> None:
    """It asks in a collective of its own, where it does."""
    asked = Row(COMMUNICATION, 422, 424, "c10d::allreduce_")
    for more in ((), (asked,)):
        found = result(*BACKWARD, *more, reducers=(replace(REDUCER, finds_unused=True),))
        assert found.buckets is not None and len(found.buckets) == 2
    assert result(*BACKWARD, asked).buckets is None
