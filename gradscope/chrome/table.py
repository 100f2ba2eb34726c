"""An exported trace -> the tables that attribution reads: rows of the host, calls of modules, kernels, steps.

What gradscope marks in a trace of its own is found here from what torch writes by itself: module calls from the
profiler's ``nn.Module`` rows, and the numbers that each drew from the operations around it; backward passes from
``run_backward``, or where Python was not recorded from the stretches in which the engine evaluated nodes; steps from
``ProfilerStep#N``, else from the ends of ``Optimizer.step``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradscope import markers, ops
from gradscope.attribute.nodes import innermost_pass_around, nearest, number_nodes
from gradscope.chrome.host import UNSEEN, Host
from gradscope.chrome.reading import ANNOTATION, BACKWARD, CALL, HOST, MODULE, RUNTIME, Exported, ns
from gradscope.chrome.steps import OPTIMIZER_STEP, StepBounds, find_steps
from gradscope.errors import TraceFileError
from gradscope.ops import COMPILED_REGION
from gradscope.tables import BEFORE_THE_TRACE, EventTable, Int32Column, IntColumn, KernelTable, RowKind, SpanTable
from gradscope.trace.events import launchers, make_table, parts_of_ops, row_order, sums_of_kept, without_rows
from gradscope.trace.names import USER_SCOPE
from gradscope.trace.tree import Interner, RawColumns

_COMPILED_AUTOGRAD = f"{COMPILED_REGION}: !"  # so begin the regions that dynamo made of backward passes
_REDUCERS = ("torch::distributed::reducer::", "torch.distributed.ddp.reducer::")
_BEHIND = re.compile(r"post_backward|reducer::")  # what runs behind the last node, by its name
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")


@dataclass(frozen=True, slots=True)
class CalledModule:
    """A module of the trace."""

    instance: str  # "Linear_3"
    class_name: str
    parent: int  # index of the module that called it first; -1 for none
    weights: frozenset[str] = frozenset()  # "[64, 8]", of its own linear, convolution or embedding operations


@dataclass(frozen=True, slots=True)
class Recorded:
    """What attribution reads of an exported trace."""

    table: EventTable
    calls: SpanTable  # label: index of the module
    modules: tuple[CalledModule, ...]  # in the order of their first calls
    steps: StepBounds
    left_out: frozenset[int]  # of the intervals between STEP rows, those that are no step
    has_module_rows: bool
    flops: IntColumn  # of each row of the table, with what is inside of it below autograd
    passes_guessed: bool  # backward passes are stretches of evaluated nodes: Python was not recorded


def recorded(found: Exported, steps: tuple[int, int] | None = None) -> Recorded:
    """Make the tables of a trace.

    Args:
        found: what was read.
        steps: first and last of the steps that count; None: all.

    Raises:
        TraceFileError: it holds no backward pass, or none of these steps.
    """
    host = Host(found)
    if not len(host.nodes):
        if _is_compiled(host):
            raise TraceFileError(
                f"{found.name} holds no node of autograd: compiled autograd ran the backward pass as one graph.\n"
                "Record it with torch._dynamo.config.compiled_autograd = False: layers are told by nodes."
            )
        raise TraceFileError(
            f"{found.name} holds no backward pass: no node of autograd was evaluated in it"
            f"{_instead(host)}.\nRecord one step of training, forward and backward; with schedule() give repeat=1: the "
            "last window is exported, however short it is."
        )
    _check_one_process(host)
    bounds = find_steps(host, steps)
    windows, guessed = _windows(host)
    calls, modules = _calls(host)
    columns, names, scopes, runtime = _raw(host, calls, windows, bounds)
    table = make_table(columns, names, scopes)
    order = row_order(columns)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    table = replace(table, kernels=_kernels(found, host, place))
    flops = np.concatenate([np.frombuffer(found.flops, np.int64)[_kept_rows(host)], np.zeros(len(table), np.int64)])
    flops = flops[: len(table)][order]
    for left_out in (_only_launching(table, runtime[order]), None):
        drop = parts_of_ops(table) if left_out is None else left_out
        flops, table = sums_of_kept(table, drop, flops), without_rows(table, drop)
    table = _with_graphs(table)
    weights = _weights(table, calls)
    modules = tuple(replace(module, weights=frozenset(weights[number])) for number, module in enumerate(modules))
    spans = SpanTable(calls.label, calls.low, calls.high)
    gaps = frozenset(range(1, 2 * len(bounds.numbers), 2))
    return Recorded(
        table,
        spans,
        modules,
        bounds,
        gaps,
        bool(len(calls.row)),
        flops,
        guessed,
    )


def _check_one_process(host: Host) -> None:
    """Refuse a file in which several processes went backward: they number their steps, launches and threads alike."""
    process = {number: pid for (pid, _), number in host.found.threads.items()}
    found = {process[thread] for thread in np.unique(host.thread[host.nodes]).tolist()}
    if len(found) > 1:
        raise TraceFileError(
            f"{host.found.name} holds {len(found)} processes that went backward, whose numbers are mixed up.\n"
            "Give the file of each rank by itself."
        )


def _is_compiled(host: Host) -> bool:
    """Check that a backward pass ran which has no nodes."""
    known = {number for number, name in enumerate(host.names) if name.startswith(_COMPILED_AUTOGRAD)}
    return bool(np.any(host.kind == BACKWARD) or known.intersection(host.name.tolist()))


def _instead(host: Host) -> str:
    drew = len(host.drew) or np.any(host.kind == HOST)
    if drew:
        return ", which is so of inference"
    return "; it has the device's side alone" if len(host.found.device.name) else ""


@dataclass(frozen=True, slots=True)
class _Windows:
    """Backward passes."""

    start: IntColumn
    end: IntColumn
    thread: Int32Column


def _windows(host: Host) -> tuple[_Windows, bool]:
    """The backward passes, and whether they had to be guessed."""
    rows = np.flatnonzero(host.kind == BACKWARD)
    if len(rows):
        for beginning in ("<built-in method run_backward", "torch/autograd/graph.py"):
            inner = rows[[host.names[name].startswith(beginning) for name in host.name[rows].tolist()]]
            if len(inner):
                rows = inner
                break
        return _Windows(host.start[rows], host.end[rows], host.thread[rows]), False
    return _stretches_of_nodes(host), True


def _stretches_of_nodes(host: Host) -> _Windows:
    """Evaluated nodes between which nothing ran forward: each stretch is a pass, of the thread that waits for it."""
    nodes = host.nodes[np.argsort(host.start[host.nodes], kind="stable")]
    start, end = host.start[nodes], host.end[nodes]
    until = np.maximum.accumulate(end)
    optimizer = host.named(ANNOTATION, OPTIMIZER_STEP)
    forward = np.sort(host.start[np.concatenate([host.drew, optimizer])])
    # In the gap before node i: forward that starts after all nodes before have ended.
    between = np.searchsorted(forward, start[1:]) - np.searchsorted(forward, until[:-1])
    first = np.concatenate([[0], np.flatnonzero((between > 0) & (start[1:] > until[:-1])) + 1])
    last = np.concatenate([first[1:] - 1, [len(nodes) - 1]])
    waits = host.forward_thread[nodes]
    thread = []
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        made_by = Counter(number for number in waits[low : high + 1].tolist() if 0 < number < UNSEEN)
        thread.append(made_by.most_common(1)[0][0] if made_by else int(host.thread[nodes[low]]))
    threads = np.array(thread, np.int32)
    return _Windows(start[first], _with_callbacks(host, until[last], threads, forward), threads)


def _with_callbacks(host: Host, ends: IntColumn, threads: Int32Column, forward: IntColumn) -> IntColumn:
    """When passes end that have done their last node at ``ends``: with what FSDP and DDP do behind it, in callbacks."""
    names = np.array([name.startswith((*ops.SHARDING, *_REDUCERS)) for name in host.names], bool)
    rows = np.flatnonzero(names[host.name] & np.isin(host.kind, (HOST, ANNOTATION)))
    rows = rows[np.argsort(host.start[rows], kind="stable")]
    found = ends.copy()
    for number, (end, thread) in enumerate(zip(ends.tolist(), threads.tolist(), strict=True)):
        place = np.searchsorted(forward, end)
        until = forward[place] if place < len(forward) else np.iinfo(np.int64).max
        if number + 1 < len(ends):
            until = min(until, ends[number + 1])
        behind = rows[(host.thread[rows] == thread) & (host.start[rows] >= end) & (host.end[rows] <= until)]
        # Before the next forward FSDP gathers parameters for it.
        behind = behind[[_BEHIND.search(host.names[name]) is not None for name in host.name[behind].tolist()]]
        if len(behind):
            found[number] = host.end[behind].max()
    return found


# Operations that use a weight -> which of their shapes is the weight's.
_WEIGHTED = {"aten::linear": 1, "aten::embedding": 0, "aten::embedding_bag": 0} | {
    f"aten::conv{kind}{dimensions}d": 1 for kind in ("", "_transpose") for dimensions in (1, 2, 3)
}


def _weights(table: EventTable, calls: _Calls) -> defaultdict[int, set[str]]:
    """Of each module the shapes of the weights that it used itself, where shapes were recorded."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    place = np.array([_WEIGHTED.get(name, -1) for name in table.names], np.int64)
    rows = np.flatnonzero(place[table.name] >= 0)
    around = nearest(table, rows, (RowKind.CALL,))
    for row, call in zip(rows[around >= 0].tolist(), around[around >= 0].tolist(), strict=True):
        shapes = re.findall(r"\[.*?\]", table.shapes[row] if table.shapes else "")
        if len(shapes) > (which := place[table.name[row]]):
            found[int(calls.label[table.argument[call]])].add(shapes[which])
    return found


def _with_graphs(table: EventTable) -> EventTable:
    """Mark the passes that build a graph (``create_graph``), as the number of their marker says it.

    There gradients are on, so each operation shows a number of the counter: also the last one of a node of torch's
    own, which computes the gradient. What a checkpoint runs again in such a node comes before.
    """
    function = number_nodes(table).function
    own = np.array([name[-1:].isdigit() for name in table.names], bool)
    function = function[function >= 0]
    functions = np.zeros(len(table), bool)
    functions[function[own[table.name[function]]]] = True
    inner = np.flatnonzero(np.isin(table.kind, (RowKind.OP, RowKind.ADD)) & (table.parent >= 0))
    inner = inner[functions[table.parent[inner]]]
    last = np.full(len(table), -1, np.int64)
    last[table.parent[inner]] = inner  # rows of a thread come in order of start
    last = last[last >= 0]
    window = innermost_pass_around(table, last[(table.sequence[last] >= 0) & (table.forward_thread[last] == 0)])
    argument = table.argument.copy()
    argument[window[window >= 0]] = 1
    return replace(table, argument=argument)


@dataclass(frozen=True, slots=True)
class _Calls:
    row: IntColumn
    label: IntColumn
    low: IntColumn
    high: IntColumn


def _calls(host: Host) -> tuple[_Calls, tuple[CalledModule, ...]]:
    """Module calls in order of start, with the numbers that each drew, and the modules."""
    rows = np.flatnonzero(host.kind == CALL)
    rows = rows[np.lexsort((-host.end[rows], host.start[rows]))]
    low, high = _numbers(host, rows, host.start[rows]), _numbers(host, rows, host.end[rows])
    parents = _callers(host, rows)
    texts = [host.names[name].removeprefix(MODULE) for name in host.name[rows].tolist()]
    modules: list[CalledModule] = []
    places: dict[tuple[str, int], int] = {}  # a name, and who called it
    first: dict[str, int] = {}  # of each name
    label = np.full(len(rows), -1, np.int64)
    backward = _in_backward(host, rows)
    # A module that is run again is one that forward called, where there is one of its name.
    for again in (False, True):
        for i in np.flatnonzero(backward == again).tolist():
            above = int(label[parents[i]]) if parents[i] >= 0 else -1
            known = places.get((texts[i], above))
            if known is None and again:
                known = first.get(texts[i])
            if known is None:
                known = places[texts[i], above] = len(modules)
                first.setdefault(texts[i], known)
                modules.append(CalledModule(texts[i], texts[i].rpartition("_")[0] or texts[i], above))
            label[i] = known
    return _Calls(rows, label, low, np.maximum(low, high)), tuple(modules)


def _in_backward(host: Host, rows: IntColumn) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each call began while its thread evaluated a node."""
    found = np.zeros(len(rows), bool)
    for thread in np.unique(host.thread[rows]).tolist():
        mine = np.flatnonzero(host.thread[rows] == thread)
        nodes = host.nodes[host.thread[host.nodes] == thread]
        nodes = nodes[np.argsort(host.start[nodes], kind="stable")]
        if not len(nodes):
            continue
        until = np.maximum.accumulate(host.end[nodes])
        place = np.searchsorted(host.start[nodes], host.start[rows[mine]], side="right") - 1
        found[mine] = (place >= 0) & (host.start[rows[mine]] < until[np.maximum(place, 0)])
    return found


def _numbers(host: Host, rows: IntColumn, time: IntColumn) -> IntColumn:
    """The number that the next node would have had on each row's thread at that time."""
    found = np.zeros(len(rows), np.int64)
    for thread in np.unique(host.thread[rows]).tolist():
        mine = np.flatnonzero(host.thread[rows] == thread)
        drew = host.drew[host.thread[host.drew] == thread]
        if not len(drew):
            continue
        drew = drew[np.argsort(host.start[drew], kind="stable")]
        numbers = np.maximum.accumulate(host.sequence[drew])
        following = np.append(numbers, numbers[-1] + 1)
        found[mine] = following[np.searchsorted(host.start[drew], time[mine], side="left")]
    return found


def _callers(host: Host, rows: IntColumn) -> list[int]:
    """For each call the index of the call around it; -1 for none."""
    open_calls: dict[int, list[int]] = defaultdict(list)
    found = []
    starts, ends, threads = host.start[rows].tolist(), host.end[rows].tolist(), host.thread[rows].tolist()
    for i, (start, end, thread) in enumerate(zip(starts, ends, threads, strict=True)):
        stack = open_calls[thread]
        while stack and ends[stack[-1]] <= start and not (start == end == ends[stack[-1]]):
            stack.pop()
        found.append(stack[-1] if stack else -1)
        stack.append(i)
    return found


def _kept_rows(host: Host) -> IntColumn:
    """The host's events that become rows of the table, in the file's order."""
    return np.flatnonzero(np.isin(host.kind, (HOST, ANNOTATION, RUNTIME)))


def _raw(
    host: Host, calls: _Calls, windows: _Windows, steps: StepBounds
) -> tuple[RawColumns, Interner, Sequence[int], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """The rows of the table before they are sorted: the host's events, and the marks of gradscope's own."""
    kept = _kept_rows(host)
    names = Interner()
    scopes: list[int] = []
    number_of = np.full(len(host.names) * 2, -1, np.int32)  # an annotation may have the name of an operation
    is_annotation = (host.kind[kept] == ANNOTATION).astype(np.int64)
    keys = host.name[kept].astype(np.int64) * 2 + is_annotation
    for key in np.unique(keys).tolist():
        text = host.names[key // 2]
        number = names[text]
        if number == len(scopes):
            scopes.append(USER_SCOPE if key % 2 else 0)
        number_of[key] = number
    marks: list[tuple[str, int, int, int]] = []
    for k, row in enumerate(calls.row.tolist()):
        marks.append((f"{markers.CALL}{k}", int(host.start[row]), int(host.end[row]), int(host.thread[row])))
    for start, end, thread in zip(windows.start.tolist(), windows.end.tolist(), windows.thread.tolist(), strict=True):
        marks.append((f"{markers.BACKWARD}0", start, end, thread))
    trains = _training_thread(host)
    for k, (start, end) in enumerate(zip(steps.start_ns, steps.end_ns, strict=True)):
        marks.append((f"{markers.STEP}{2 * k}", start, start, trains))
        marks.append((f"{markers.STEP}{2 * k + 1}", end, end, trains))
    mark_names = np.array([names[text] for text, *_ in marks], np.int32)
    scopes.extend([0] * (len(names) - len(scopes)))

    def column(values: IntColumn, of_marks: list[int] | int) -> IntColumn:
        tail = np.full(len(marks), of_marks) if isinstance(of_marks, int) else np.array(of_marks, np.int64)
        return np.concatenate([values, tail.astype(np.int64)])

    shapes = np.frombuffer(host.found.shapes, np.int32)[kept]
    texts = [*host.found.shape_texts, ""]
    columns = RawColumns(
        name=np.concatenate([number_of[keys], mark_names]),
        start_ns=column(host.start[kept], [mark[1] for mark in marks]),
        end_ns=column(host.end[kept], [mark[2] for mark in marks]),
        thread=column(host.thread[kept].astype(np.int64), [mark[3] for mark in marks]).astype(np.int32),
        sequence=column(host.sequence[kept], -1),
        forward_thread=column(host.forward_thread[kept].astype(np.int64), 0).astype(np.int32),
        shapes=[texts[number] for number in shapes.tolist()] + [""] * len(marks),
    )
    runtime = np.concatenate([host.kind[kept] == RUNTIME, np.zeros(len(marks), bool)])
    return columns, names, scopes, runtime


def _training_thread(host: Host) -> int:
    """The thread whose counter most nodes have their numbers from."""
    threads = host.forward_thread[host.forward_thread > 0]
    threads = threads[threads < UNSEEN]
    if not len(threads):
        threads = host.thread[host.nodes]
    return int(np.bincount(threads).argmax())


def _kernels(found: Exported, host: Host, place: IntColumn) -> KernelTable | None:
    """The device's activities, each with the row that launched it: by correlation, else by the operation's number."""
    device = found.device
    if not len(device.name):
        return None
    start = ns(device.start, host.base)
    order = np.argsort(start, kind="stable")
    kept = np.flatnonzero(np.isin(host.kind, (HOST, ANNOTATION, RUNTIME)))
    runtime = np.where(host.kind[kept] == RUNTIME, host.correlation[kept], -1)
    correlation = np.frombuffer(device.correlation, np.int64)[order]
    external = np.frombuffer(device.external, np.int64)[order]
    rows = _row_of(runtime, correlation)
    ops = np.where(host.kind[kept] == HOST, host.external[kept], -1)
    by_operation = _row_of(ops, external)
    # A call of the runtime on a thread of its own is in no operation: the operation's number tells it.
    alone = np.zeros(len(kept), bool)
    threads = host.thread[kept]
    for thread in np.unique(threads).tolist():
        alone[threads == thread] = not (host.kind[kept[threads == thread]] != RUNTIME).any()
    lost = (rows < 0) | (alone[np.maximum(rows, 0)] & (by_operation >= 0))
    rows = np.where(lost, by_operation, rows)
    # These numbers grow: smaller ones than any in the trace were given before it began.
    numbers = np.where(correlation > 0, correlation, external)
    known = runtime if (correlation > 0).any() else ops
    earliest = int(known[known > 0].min(initial=np.iinfo(np.int64).max))
    early = np.where(numbers > 0, numbers < earliest, start[order] < host.start.min())
    rows = np.where((rows < 0) & early & (earliest < np.iinfo(np.int64).max), BEFORE_THE_TRACE, rows)
    return KernelTable(
        names=tuple(found.kernels),
        name=np.frombuffer(device.name, np.int32)[order].astype(np.int64),
        start_ns=start[order],
        end_ns=start[order] + ns(device.duration, 0.0)[order],
        device=np.frombuffer(device.device, np.int64)[order],
        stream=np.frombuffer(device.stream, np.int64)[order],
        row=np.where(rows >= 0, place[np.maximum(rows, 0)], rows),
    )


def _row_of(of_rows: IntColumn, wanted: IntColumn) -> IntColumn:
    """The row of each number; -1 where it is none, or no row has it."""
    found = launchers(of_rows, np.where(wanted > 0, wanted, -2))
    return np.where(wanted > 0, found, -1)


def _only_launching(
    table: EventTable, runtime: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Calls of the device's runtime to leave out: their time is their operation's.

    One that is in nothing stays, where it launched something, and so does the launch of a graph: all of its kernels.
    """
    graphs = np.array([name.startswith(_GRAPH_LAUNCHES) for name in table.names], bool)[table.name]
    launched = np.zeros(len(table), bool)
    if table.kernels is not None:
        launched[table.kernels.row[table.kernels.row >= 0]] = True
    return runtime & ~graphs & ~((table.parent < 0) & launched)
