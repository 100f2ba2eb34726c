"""Whose the time is that DistributedDataParallel spends on reducing gradients: that of the layers in each bucket.

A bucket's collective begins in the hook on whatever gradient completes it, or completes one that is sent before it,
and is waited for behind the last node of the pass. What beginning it takes, what its kernels take, and what is waited
for it belong to the layers whose gradients it holds, by their bytes; what is copied out of it to the parameter's.

Buckets are sent in one order, and each takes one collective: those of a pass are matched with them in order, where
there are as many. Source: torch/csrc/distributed/c10d/reducer.cpp (``mark_bucket_ready``, ``finalize_backward``);
S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB 2020), section 3.2.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradscope import ops
from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.cost_table import Contribution
from gradscope.attribute.device import DeviceTime
from gradscope.attribute.gaps import begins, done_elsewhere
from gradscope.attribute.nodes import nearest, passes_around
from gradscope.attribute.rows import INHERIT, Category
from gradscope.attribute.waits import Behind, behind_last_nodes, copies_of_gradients, waits_behind
from gradscope.tables import BucketRow, EventTable, IntColumn, ModuleInfo, ReducerInfo, RowKind

Shares = Sequence[tuple[int, int]]  # (layer, weight)


@dataclass(frozen=True, slots=True)
class Sent:
    """A bucket in one pass.

    Attributes:
        reducer, number: which bucket of which model.
        window: row of the pass.
        row: that begins the collective.
        by: layer of the gradient that let it begin; -1 where that is not known.
        layers: bytes of each layer in it.
        copies: rows that copy a gradient out of it, and the layer of each.
        times: what `_times` says of it.
        exposed_ns: what is waited for it while nothing else is done.
    """

    reducer: int
    number: int
    window: int
    row: int
    by: int
    layers: tuple[tuple[int, int], ...]
    times: tuple[float, ...]
    copies: tuple[tuple[int, int], ...] = ()
    exposed_ns: int = 0


def sent_buckets(assigned: Assigned, reducers: Sequence[ReducerInfo], device: DeviceTime | None) -> tuple[Sent, ...]:
    """Return the buckets that passes of the trace sent, in order.

    Args:
        device: None: nothing ran on one, and what is waited for behind the last node is exposed.
    """
    if not reducers:
        return ()
    table = assigned.skeleton.table
    begun = _begun(table)
    around = passes_around(table, begun)
    windows = np.unique(around[around >= 0])
    gradients = _Gradients.read(assigned)
    waited = waits_behind(table, hooked=any(reducer.hooked for reducer in reducers))
    found: list[Sent] = []
    for window, behind in behind_last_nodes(table, windows).items():
        rows = begun[around == window]
        in_pass = list(_matched(assigned, reducers, window, rows, gradients, behind.last_ns))
        in_pass = _with_copies(table, reducers, window, in_pass)
        if in_pass and device is None:
            # For a parameter that had no gradient the reducer waits for the last collective before it copies anything.
            # A hook may go on behind a collective: then copies tell more.
            mine = [reducers[bucket.reducer] for bucket in in_pass]
            by_copies = all(one.hooked or not one.finds_unused for one in mine)
            in_pass = _with_waits(table, window, in_pass, behind, int(waited[window]), by_copies=by_copies)
        found += in_pass
    return tuple(found if device is None else _with_kernels(assigned, found, device))


def give_to_layers(
    assigned: Assigned, sent: Sequence[Sent], parts: Sequence[Contribution], names: tuple[str, ...]
) -> list[Contribution]:
    """``parts`` with what reducing takes at the layers whose gradients it is for.

    Args:
        names: of the operations.
    """
    if not sent:
        return list(parts)
    begins = _inside(assigned, [bucket.row for bucket in sent])
    copies = [copy for bucket in sent for copy in bucket.copies]
    copied = _inside(assigned, [row for row, _ in copies])
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for bucket in sent:
        waits[bucket.window] += split(bucket.exposed_ns, bucket.layers)
    waited = names.index(ops.WAIT)
    found: list[Contribution] = []
    for part in parts:
        shares: dict[int, Shares] = {}
        if part.apart is None:
            inside = begins[part.row]
            shares |= {place: sent[inside[place]].layers for place in np.flatnonzero(inside >= 0).tolist()}
            inside = copied[part.row]
            shares |= {place: [(copies[inside[place]][1], 1)] for place in np.flatnonzero(inside >= 0).tolist()}
        elif part.apart == Category.COMMUNICATION:
            mine = np.flatnonzero((part.op == waited) & np.isin(part.row, list(waits)))
            shares |= {place: waits[int(part.row[place])] for place in mine.tolist()}
        found += _spread(part, shares)
    return found


def bucket_rows(
    assigned: Assigned, reducers: Sequence[ReducerInfo], sent: Sequence[Sent], modules: Sequence[ModuleInfo]
) -> tuple[BucketRow, ...] | None:
    """Return what became of each bucket over the measured steps; None where none was sent."""
    by_bucket: dict[tuple[int, int], list[Sent]] = defaultdict(list)
    for bucket in sent:
        if assigned.steps.of_row[bucket.window] >= 0:
            by_bucket[bucket.reducer, bucket.number].append(bucket)
    rows = [
        _row(assigned, reducers[reducer], number, passes, modules)
        for (reducer, number), passes in sorted(by_bucket.items())
    ]
    return tuple(rows) or None


def split(whole: int, shares: Shares) -> list[tuple[int, int]]:
    """``whole`` by these weights, equally where there are none; the parts add up to it."""
    if not shares:
        return []
    total = sum(weight for _, weight in shares)
    parts, until, given = [], 0, 0
    for number, (layer, weight) in enumerate(shares, 1):
        until += weight
        upto = whole * until // total if total else whole * number // len(shares)
        parts.append((layer, upto - given))
        given = upto
    return parts


def _spread(part: Contribution, shares: Mapping[int, Shares]) -> Iterator[Contribution]:
    """``part`` without the entries at these places, and those, spread over layers."""
    shares = {place: each for place, each in shares.items() if each}
    if not shares:
        yield part
        return
    places = np.array(list(shares), np.int64)
    rest = np.delete(np.arange(len(part.row)), places)
    layer = part.layer if part.layer is None else part.layer[rest]
    yield Contribution(part.row[rest], part.op[rest], part.ns[rest], part.calls[rest], part.apart, layer)
    pieces = [split(int(part.ns[place]), each) for place, each in shares.items()]
    repeats = np.repeat(places, [len(each) for each in pieces])
    first = np.concatenate([np.arange(len(each)) for each in pieces]) == 0  # it is one call, not one for each layer
    layers, ns = (np.array([piece[what] for each in pieces for piece in each], np.int64) for what in (0, 1))
    calls = np.where(first, part.calls[repeats], 0)
    yield Contribution(part.row[repeats], part.op[repeats], ns, calls, Category.COMMUNICATION, layers)


# --------------------------------------------------------------------------------------------------------------------
# The collectives of a pass
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gradients:
    """When gradients of which layer were there, in order of time."""

    start_ns: IntColumn
    owner: IntColumn

    @classmethod
    def read(cls, assigned: Assigned) -> _Gradients:
        table = assigned.skeleton.table
        rows = np.flatnonzero(table.kind == RowKind.ACCUMULATE)
        rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
        return cls(table.start_ns[rows], assigned.rows.owner[rows])

    def times(self, layers: Shares, begin: int, begun: int) -> tuple[float, float, float]:
        """The first, the mean by bytes and the last of these layers' gradients until ``begun``, from ``begin``.

        Of a layer with several parameters the last counts.
        """
        mine = slice(np.searchsorted(self.start_ns, begin), np.searchsorted(self.start_ns, begun, side="right"))
        there = dict(zip(self.owner[mine].tolist(), self.start_ns[mine].tolist(), strict=True))
        ready = [(there[layer], size) for layer, size in layers if layer in there] or [(begun, 1)]
        mean = sum((at - begin) * size for at, size in ready) / max(sum(size for _, size in ready), 1)
        return min(ready)[0] - begin, mean, max(ready)[0] - begin

    def last(self, layers: Collection[int], begin: int, end: int) -> int:
        """When the last gradient of these layers was there, from ``begin`` to ``end``; ``begin`` where none was."""
        mine = slice(np.searchsorted(self.start_ns, begin), np.searchsorted(self.start_ns, end))
        there = self.start_ns[mine][np.isin(self.owner[mine], list(layers))]
        return int(there.max()) if len(there) else begin


def _begun(table: EventTable) -> IntColumn:
    """Rows that begin a collective in the hook on a gradient, in order of time."""
    rows = begins(table)
    rows = rows[table.parent[rows] >= 0]
    # One that another row of communication is around is a part of that one.
    around = (RowKind.ACCUMULATE, RowKind.NODE, RowKind.COMMUNICATION)
    above = nearest(table, table.parent[rows].astype(np.int64), around)
    return rows[(above >= 0) & (table.kind[above] == RowKind.ACCUMULATE)]


def _matched(
    assigned: Assigned,
    reducers: Sequence[ReducerInfo],
    window: int,
    rows: IntColumn,
    gradients: _Gradients,
    last: int,
) -> Iterator[Sent]:
    """The buckets of a pass: the collectives begun at gradients of a model's layers, in order, are its buckets.

    Args:
        rows: that begin a collective in this pass.
        last: when the last node was done.
    """
    table = assigned.skeleton.table
    by = assigned.rows.owner[nearest(table, rows, (RowKind.ACCUMULATE,))]
    for place, reducer in enumerate(reducers):
        layers = [_by_layer(bucket) for bucket in reducer.buckets]
        mine = np.flatnonzero(np.isin(by, [layer for bucket in layers for layer, _ in bucket if layer >= 0]))
        # Which parameters had no gradient anywhere is asked in a collective of its own, behind the last bucket.
        if len(mine) != len(layers) + reducer.finds_unused and len(mine) != len(layers):
            continue
        if reducer.hooked and not _in_order(table, window, layers, rows[mine], gradients):
            continue
        for number, (bucket, at) in enumerate(zip(layers, mine.tolist(), strict=False)):
            row = int(rows[at])
            begin, begun = int(table.start_ns[window]), int(table.start_ns[row])
            times = (*gradients.times(bucket, begin, begun), begun - begin, last - begin)
            yield Sent(place, number, window, row, int(by[at]), bucket, times)


def _in_order(table: EventTable, window: int, layers: Sequence[Shares], rows: IntColumn, gradients: _Gradients) -> bool:
    """Check that each bucket's collective began at the last gradient of it, or of one that is sent before it.

    A hook of the program's own may begin several for one bucket and none for another, and wait for them itself.
    """
    begin, end = int(table.start_ns[window]), int(table.end_ns[window])
    within = nearest(table, rows, (RowKind.ACCUMULATE,))
    waits = np.flatnonzero([name.startswith(ops.WAIT_ROW) for name in table.names])
    waits = np.flatnonzero(np.isin(table.name, waits))
    if np.isin(nearest(table, waits, (RowKind.ACCUMULATE,)), within).any():
        return False  # it waits itself: not behind the last node
    held = Counter(layer for bucket in layers for layer, _ in bucket)
    began = table.start_ns[within].tolist()
    ready = begin
    for number, (bucket, at) in enumerate(zip(layers, began, strict=False)):
        # Of a layer in several buckets a gradient does not tell in which it is.
        whole = [layer for layer, _ in bucket if held[layer] == 1]
        ready = max(ready, gradients.last(whole, begin, end))
        known = all(held[layer] == 1 for before in layers[: number + 1] for layer, _ in before)
        if at < ready or (known and at > ready):
            return False
    return True


def _by_layer(bucket: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    held: Counter[int] = Counter()
    for layer, size in bucket:
        held[layer] += size
    return tuple(held.items())


def _with_copies(table: EventTable, reducers: Sequence[ReducerInfo], window: int, sent: Sequence[Sent]) -> list[Sent]:
    """Add the rows that copy gradients out: of each bucket in turn one for each parameter, where there are as many."""
    rows = np.flatnonzero(copies_of_gradients(table))
    rows = rows[passes_around(table, rows) == window]
    rows = rows[np.argsort(table.start_ns[rows], kind="stable")].tolist()
    held = [[layer for layer, _ in reducers[bucket.reducer].buckets[bucket.number]] for bucket in sent]
    if len(rows) != sum(map(len, held)) or len({bucket.reducer for bucket in sent}) > 1:
        return list(sent)
    copied = iter(rows)
    return [
        replace(bucket, copies=tuple((next(copied), layer) for layer in layers))
        for bucket, layers in zip(sent, held, strict=True)
    ]


def _with_waits(
    table: EventTable, window: int, sent: Sequence[Sent], behind: Behind, waited: int, *, by_copies: bool
) -> list[Sent]:
    """Add what was waited for each bucket behind the last node: from when the one before it was there until it was.

    It is there when the first gradient is copied out of it. Where none is, since gradients are views of it, the row
    tells that the process group's thread writes for its collective, in the order in which they were begun; where those
    are missing too, what was waited for all is split by bytes.
    """
    there = _there(table, window, sent, by_copies=by_copies)
    if there is None:
        shares = [(number, sum(size for _, size in bucket.layers)) for number, bucket in enumerate(sent)]
    else:
        # What is left behind the last one went by until the thread that waits for it was woken.
        upto = np.maximum.accumulate([behind.waited_ns(at) for at in (*there[:-1], behind.until_ns)])
        shares = list(enumerate(np.diff(upto, prepend=0).tolist()))
    return [replace(sent[number], exposed_ns=ns) for number, ns in split(waited, shares)]


def _there(table: EventTable, window: int, sent: Sequence[Sent], *, by_copies: bool) -> list[int] | None:
    """When each bucket was there; None where the trace does not say."""
    if by_copies and all(bucket.copies for bucket in sent):
        return [int(table.start_ns[bucket.copies[0][0]]) for bucket in sent]
    ends = _ends(table, window)
    return None if ends is None else [ends[bucket.row] for bucket in sent]


def _ends(table: EventTable, window: int) -> dict[int, int] | None:
    """When each collective that the pass began was done; None where the trace does not say."""
    rows = begins(table)
    rows = rows[(table.start_ns[rows] >= table.start_ns[window]) & (table.start_ns[rows] <= table.end_ns[window])]
    inside = nearest(table, table.parent[rows].astype(np.int64), (RowKind.COMMUNICATION,)) >= 0
    rows = rows[~inside]
    done = done_elsewhere(table)
    done = done[(table.start_ns[done] >= table.start_ns[rows[0]]) & (table.start_ns[done] <= table.end_ns[window])]
    if len(done) != len(rows):
        return None
    done = done[np.argsort(table.start_ns[done], kind="stable")]
    return dict(zip(rows.tolist(), table.end_ns[done].tolist(), strict=True))


def _with_kernels(assigned: Assigned, sent: Sequence[Sent], device: DeviceTime) -> list[Sent]:
    """Add what of each bucket's kernels overlaps nothing else."""
    begins = _inside(assigned, [bucket.row for bucket in sent])
    known = device.row >= 0
    exposed = np.zeros(len(sent) + 1, np.int64)  # the last is that of no bucket
    np.add.at(exposed, begins[device.row[known]], device.exposed_ns[known])
    return [replace(bucket, exposed_ns=int(exposed[number])) for number, bucket in enumerate(sent)]


def _inside(assigned: Assigned, rows: Sequence[int]) -> IntColumn:
    """For each row which of ``rows`` it is or lies in; -1 for none."""
    marks = np.full(len(assigned.skeleton.table), INHERIT, np.int64)
    marks[np.array(rows, np.int64)] = np.arange(len(rows))
    found: IntColumn = assigned.skeleton.levels.propagate(marks, -1).astype(np.int64)
    return found


# --------------------------------------------------------------------------------------------------------------------
# Rows of the report
# --------------------------------------------------------------------------------------------------------------------


def _row(
    assigned: Assigned, reducer: ReducerInfo, number: int, passes: Sequence[Sent], modules: Sequence[ModuleInfo]
) -> BucketRow:
    times = np.array([bucket.times for bucket in passes], np.float64).mean(axis=0)
    first, mean, last, begun, whole = (int(ns) for ns in times)
    by = Counter(bucket.by for bucket in passes).most_common(1)[0][0]
    layers = sorted(passes[0].layers, key=lambda layer: -layer[1])
    parameters = reducer.buckets[number]
    return BucketRow(
        model=reducer.path,
        number=number,
        parameters=len(parameters),
        bytes=sum(size for _, size in parameters),
        layers=tuple(modules[layer].path for layer, _ in layers if layer >= 0),
        first_at_ns=first,
        mean_at_ns=mean,
        last_at_ns=last,
        begun_at_ns=begun,
        begun_by=modules[by].path if by >= 0 else None,
        pass_ns=whole,
        exposed_ns=sum(bucket.exposed_ns for bucket in passes) // max(len(assigned.steps), 1),
        cap_bytes=reducer.cap_bytes,
        finds_unused=reducer.finds_unused,
    )
