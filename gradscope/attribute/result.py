"""Cells -> the rows of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.buckets import bucket_rows, give_to_layers, sent_buckets
from gradscope.attribute.compiled.give import estimated_ns, give_to_origins, with_names
from gradscope.attribute.compiled.read import read_compiled, with_phases
from gradscope.attribute.cost_table import (
    PYTHON,
    Cells,
    Contribution,
    hook_cost,
    layer_steps,
    make_cells,
    move_recompute_gaps,
    own_contribution,
    take_out,
    totals_by_step,
)
from gradscope.attribute.device import DeviceTime, duration_contributions, kernel_contributions, overlapped, read_device
from gradscope.attribute.layer_columns import (
    with_communication,
    with_device,
    with_estimates,
    with_flops,
    with_graph_flops,
    with_overlapped,
    without_backward_flops,
    without_flops,
)
from gradscope.attribute.nodes import OUTSIDE
from gradscope.attribute.rows import BACKWARD_CATEGORIES, BoolColumn, Category, self_times
from gradscope.attribute.survey import Notes, is_trained
from gradscope.attribute.untold import BESIDE, EMPTY, NO_FORMULA, NO_FORMULA_OR_COMPILED, WITHIN, uncounted, untold
from gradscope.attribute.waits import take_out_waits, without_process_group
from gradscope.tables import (
    BEFORE_THE_TRACE,
    BucketRow,
    CompiledGraph,
    DeviceLedger,
    IntColumn,
    KernelRow,
    LayerRow,
    Ledger,
    LineInfo,
    LineRow,
    ModuleInfo,
    OpRow,
    ReducerInfo,
    RowKind,
    Spread,
    StepTimes,
    TakenStep,
)

PHASES = {
    Category.FORWARD: "forward",
    Category.LAYER: "backward",
    Category.RECOMPUTE: "recompute",
    Category.GRADIENT_SUM: "gradient_sum",
    Category.ACCUMULATE: "accumulate",
    Category.HOOK: "hook",
    Category.COMMUNICATION: "communication",
    Category.ENGINE: "engine",
    Category.UNATTRIBUTED: "unattributed",
    Category.OPTIMIZER: "optimizer",
    Category.OTHER: "other",
}
_LAYER_COLUMNS = {
    Category.LAYER: "backward_self_ns",
    Category.RECOMPUTE: "recompute_ns",
    Category.GRADIENT_SUM: "gradient_sum_ns",
    Category.ACCUMULATE: "accumulate_ns",
    Category.HOOK: "hook_ns",
    Category.FORWARD: "forward_self_ns",
}


@dataclass(frozen=True, slots=True)
class Attribution:
    """What attribution gives a report."""

    step: StepTimes
    ledger: Ledger
    layers: tuple[LayerRow, ...]
    lines: tuple[LineRow, ...]
    ops: tuple[OpRow, ...]
    kernels: tuple[KernelRow, ...]
    device: DeviceLedger | None
    buckets: tuple[BucketRow, ...] | None
    notes: tuple[str, ...]


_ELSEWHERE = (
    "layers also ran in other threads, where FLOPs are not counted: those of a call there are taken to be as here"
)


def build_result(
    assigned: Assigned,
    modules: Sequence[ModuleInfo],
    lines: Sequence[LineInfo],
    survey: Notes | None,
    source_text: Mapping[tuple[str, int], tuple[str, str]],
    *,
    has_flops: bool,
    shapes: Mapping[tuple[int, int, str], str] | None = None,
    whole_device: bool = False,
    reducers: Sequence[ReducerInfo] = (),
    graphs: Mapping[int, CompiledGraph] | None = None,
    compiles: bool = False,
) -> Attribution:
    """Group the rows of the timed trace into a report's tables.

    Args:
        lines: what the line indices stand for.
        source_text: (file, line) -> (name to show, text of the line).
        has_flops: the survey counted floating-point operations.
        shapes: (layer, category, op) -> its most frequent input shapes; None: the survey's.
        whole_device: the device's ledger counts every kernel of the trace, also those of steps that do not count.
        reducers: the models of DistributedDataParallel.
        graphs: that Inductor compiled, by number.
        compiles: the program uses torch.compile, inside of whose functions the survey counts nothing.
    """
    assigned = with_phases(without_process_group(assigned), graphs or {})
    table = assigned.skeleton.table
    device = read_device(table, table.kernels) if table.kernels is not None and len(table.kernels.name) else None
    own_ns = self_times(table) if device is None else self_times(table, device.start_ns, device.end_ns)
    own, names = own_contribution(assigned, own_ns)
    if device is None:  # else a part of it is hidden behind the device's work, nobody knows which
        own, hooks = take_out(own, hook_cost(table, assigned.skeleton.calls), names)
        own, waits = take_out_waits(assigned, own, names, hooked=any(one.hooked for one in reducers))
        parts = [*move_recompute_gaps(assigned, own), hooks, *waits]
    else:
        parts = move_recompute_gaps(assigned, own)
        parts += kernel_contributions(device, own.op, assigned)
    sent = sent_buckets(assigned, reducers, device)
    parts = give_to_layers(assigned, sent, parts, names)
    compiled = read_compiled(assigned, graphs or {}, [info.path for info in modules])
    if compiled is not None:
        compiled, names = with_names(compiled, names)
        parts = give_to_origins(assigned, parts, compiled)
    cells = make_cells(assigned, parts, names)
    wall_ns = assigned.steps.wall_ns if device is None else device.steps_ns(assigned.steps)
    step, notes = _step_times(wall_ns, cells, totals_by_step(assigned, parts))
    ledger = _ledger(cells)
    calls, trained = _calls(assigned, len(modules))
    notes += _not_trained(modules, calls, trained)
    samples = {each: layer_steps(assigned, parts, len(modules), each) for each in (Category.LAYER, Category.FORWARD)}
    rows = _layers(cells, modules, calls, samples, ledger.backward_ns)
    rows, step = with_communication(rows, step, assigned, parts, ledger.communication_ns)
    beside, within = frozenset[int](), frozenset[int]()
    if survey is not None and has_flops:
        rows = with_flops(rows, survey, [per_step(count, len(assigned.steps)) for count in trained.tolist()])
        notes += [_ELSEWHERE] if survey.elsewhere else []
        beside, within = uncounted(assigned, parts, names, rows)
        rows = without_flops(rows, beside | within)
    if compiled is not None:
        rows = with_estimates(rows, *estimated_ns(assigned, parts, len(rows)))
        unknown = compiled.uncounted | compiled.unknown | beside | within
        rows = with_graph_flops(rows, compiled.flops, unknown, len(assigned.steps))
        rows = without_backward_flops(rows) if compiled.passes_untold else rows
        notes += compiled.notes()
        notes += untold(len(compiled.unknown), why=NO_FORMULA)
        counted = {layer for layer, _ in compiled.flops}
        notes += untold(len(beside & counted), why=BESIDE)
        notes += untold(len(beside - counted), why=NO_FORMULA_OR_COMPILED)
        notes += untold(len(within - beside) if not compiled.unmatched else 0, why=WITHIN)
    elif survey is not None and has_flops:
        without = [number for number, row in enumerate(rows) if row.calls and row.flops is None]
        called = [number for number in without if survey.calls.get(number)]
        empty = sum((number, int(Category.FORWARD)) in survey.flops for number in called)
        notes += untold(len(without) - len(called))
        notes += untold(empty, why=EMPTY)
        notes += untold(len(called) - empty, why=NO_FORMULA_OR_COMPILED if compiles else NO_FORMULA)

    def by_origin(part: Contribution) -> list[Contribution]:
        return [part] if compiled is None else give_to_origins(assigned, [part], compiled)

    kernels = () if device is None else _kernels(assigned, modules, device, by_origin, own.op, names)
    if device is not None:
        launch, idle = (by_origin(replace(own, ns=ns)) for ns in (self_times(table), own_ns))
        rows = with_device(rows, assigned, kernels, launch, idle)
        rows = with_overlapped(rows, assigned, give_to_layers(assigned, sent, [overlapped(device, own.op)], names))
    return Attribution(
        step=step,
        ledger=ledger,
        layers=rows,
        lines=_lines(cells, modules, lines, source_text),
        ops=_ops(cells, modules, (survey.shapes if survey is not None else {}) if shapes is None else shapes),
        kernels=kernels,
        device=None
        if device is None
        else _device_ledger(assigned, device, by_origin(duration_contributions(device, own.op)), whole_device),
        buckets=bucket_rows(assigned, reducers, sent, modules),
        notes=(*assigned.notes, *notes),
    )


def _sum(cells: Cells, mask: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(cells.self_ns[mask].sum())


def _ledger(cells: Cells) -> Ledger:
    part = {category: _sum(cells, (cells.category == category) & (cells.owner >= 0)) for category in Category}
    owned = tuple(category for category in _LAYER_COLUMNS if category != Category.FORWARD)
    outside = _sum(cells, np.isin(cells.category, owned) & (cells.owner < 0))
    whole = {category: _sum(cells, cells.category == category) for category in Category}
    return Ledger(
        backward_ns=sum(whole[category] for category in BACKWARD_CATEGORIES),
        layers_ns=part[Category.LAYER],
        recompute_ns=part[Category.RECOMPUTE],
        gradient_sum_ns=part[Category.GRADIENT_SUM],
        accumulate_ns=part[Category.ACCUMULATE],
        hook_ns=part[Category.HOOK],
        outside_modules_ns=outside,
        communication_ns=whole[Category.COMMUNICATION],
        engine_ns=whole[Category.ENGINE],
        unattributed_ns=whole[Category.UNATTRIBUTED],
    )


def _step_times(wall: IntColumn, cells: Cells, by_step: Mapping[Category, IntColumn]) -> tuple[StepTimes, list[str]]:
    backward = np.sum([by_step[category] for category in BACKWARD_CATEGORIES], axis=0)
    forward_ns = _sum(cells, cells.category == Category.FORWARD)
    backward_ns = _sum(cells, np.isin(cells.category, BACKWARD_CATEGORIES))
    optimizer_ns = _sum(cells, cells.category == Category.OPTIMIZER)
    steps = max(len(wall), 1)
    wall_ns = (int(wall.sum()) + steps // 2) // steps
    other_ns = wall_ns - forward_ns - backward_ns - optimizer_ns
    notes = []
    if other_ns < 0:
        notes.append(
            "several threads worked at the same time: forward and backward are sums over threads, so "
            "'other' is negative by their overlap"
        )
    step = StepTimes(
        wall_ns=wall_ns,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        optimizer_ns=optimizer_ns,
        other_ns=other_ns,
        spread={
            "wall": spread(wall),
            "forward": spread(by_step[Category.FORWARD]),
            "backward": spread(backward),
        },
        overhead=None,
        unprofiled_wall_ns=None,
        taken=tuple(TakenStep(ns, left_out=False) for ns in wall.tolist()),
    )
    return step, notes


def spread(samples: IntColumn) -> Spread:
    """Return how steady one quantity was: ns of each step."""
    if not len(samples):
        return Spread(0, 0, 0, 0)
    deviation = int(samples.std(ddof=1)) if len(samples) > 1 else 0
    return Spread(int(samples.min()), int(np.median(samples)), int(samples.max()), deviation)


def _calls(assigned: Assigned, layers: int) -> tuple[IntColumn, IntColumn]:
    """Return the forward calls of each layer over all measured steps, and the calls that backward follows."""
    table, calls = assigned.skeleton.table, assigned.skeleton.calls
    measured, category = assigned.steps.of_row >= 0, assigned.rows.category
    forward = (table.kind == RowKind.CALL) & (category == Category.FORWARD)
    counts = []
    for rows in (forward, is_trained(assigned.skeleton, category)):
        label = calls.label[table.argument[np.flatnonzero(rows & measured)]]
        counts.append(np.bincount(label[label >= 0], minlength=layers))
    return counts[0], counts[1]


def _not_trained(modules: Sequence[ModuleInfo], calls: IntColumn, trained: IntColumn) -> list[str]:
    """Say of models that are trained which of their calls were not for that."""
    return [
        f"{calls[number] - trained[number]} of {calls[number]} calls of {info.path or info.class_name} in the measured "
        "steps led to no backward pass, those of an evaluation say: their time is forward's"
        for number, info in enumerate(modules)
        if info.parent is None and 0 < trained[number] < calls[number]
    ]


def _layers(
    cells: Cells,
    modules: Sequence[ModuleInfo],
    calls: IntColumn,
    samples: Mapping[Category, IntColumn],
    backward_ns: int,
) -> tuple[LayerRow, ...]:
    own: dict[str, IntColumn] = {}
    for category, column in _LAYER_COLUMNS.items():
        total = np.zeros(len(modules), np.int64)
        mine = (cells.category == category) & (cells.owner >= 0)
        np.add.at(total, cells.owner[mine], cells.self_ns[mine])
        own[column] = total
    communication = np.zeros(len(modules), np.int64)
    mine = (cells.category == Category.COMMUNICATION) & (cells.owner >= 0)
    np.add.at(communication, cells.owner[mine], cells.self_ns[mine])
    backward_columns = [own[column] for column in own if column != "forward_self_ns"]
    forward_total = _totals(modules, own["forward_self_ns"])
    backward_total = _totals(modules, np.sum(backward_columns, axis=0))
    return tuple(
        LayerRow(
            path=info.path,
            class_name=info.class_name,
            parent=info.parent,
            calls=per_step(int(calls[index]), cells.steps),
            parameters=info.parameters,
            source=info.source,
            forward_self_ns=int(own["forward_self_ns"][index]),
            forward_total_ns=int(forward_total[index]),
            backward_self_ns=int(own["backward_self_ns"][index]),
            backward_total_ns=int(backward_total[index]),
            recompute_ns=int(own["recompute_ns"][index]),
            accumulate_ns=int(own["accumulate_ns"][index]),
            hook_ns=int(own["hook_ns"][index]),
            gradient_sum_ns=int(own["gradient_sum_ns"][index]),
            communication_ns=int(communication[index]),
            backward_share=int(backward_total[index]) / backward_ns if backward_ns else 0.0,
            backward_self_steps_ns=tuple(samples[Category.LAYER][index].tolist()),
            forward_self_steps_ns=tuple(samples[Category.FORWARD][index].tolist()),
            tied=info.tied,
        )
        for index, info in enumerate(modules)
    )


def _totals(modules: Sequence[ModuleInfo], own: IntColumn) -> IntColumn:
    """Own value plus everything below, in the tree of paths; children come after their parents."""
    index = {info.path: number for number, info in enumerate(modules)}
    total = own.copy()
    for number in range(len(modules) - 1, -1, -1):
        parent = modules[number].parent
        if parent is not None:
            total[index[parent]] += total[number]
    return total


def per_step(count: int, steps: int) -> float:
    """Return the mean per step; a whole number stays one."""
    return count // steps if count % steps == 0 else count / steps


_DEVICE_COLUMNS = {
    Category.FORWARD: "forward_ns",
    Category.LAYER: "layers_ns",
    Category.RECOMPUTE: "recompute_ns",
    Category.GRADIENT_SUM: "gradient_sum_ns",
    Category.ACCUMULATE: "accumulate_ns",
    Category.HOOK: "hook_ns",
    Category.COMMUNICATION: "communication_ns",
    Category.ENGINE: "engine_ns",
    Category.UNATTRIBUTED: "unattributed_ns",
    Category.OPTIMIZER: "optimizer_ns",
    Category.OTHER: "other_ns",
}


def _device_ledger(assigned: Assigned, device: DeviceTime, ran: Sequence[Contribution], whole: bool) -> DeviceLedger:
    """Sum the kernels' durations by what launched them, over the measured steps, or with what lies beside them.

    Args:
        ran: how long each ran, those of several layers in pieces.
    """
    steps = max(len(assigned.steps), 1)
    row, ns = (np.concatenate([getattr(part, column) for part in ran]) for column in ("row", "ns"))
    category = np.concatenate([part.category(assigned) for part in ran])
    owned = np.concatenate([part.owner(assigned) for part in ran]) >= 0
    measured = assigned.steps.of_row[row] >= 0
    layers = np.isin(category, [each for each in _LAYER_COLUMNS if each != Category.FORWARD])
    unknown = device.row < 0
    before = device.row == BEFORE_THE_TRACE
    communicates = device.communicates & ~unknown & (assigned.steps.of_row[np.maximum(device.row, 0)] >= 0)

    def spent(mask: BoolColumn, of: IntColumn) -> int:
        return int(of[mask].sum()) // steps

    # What no layer owns of these is outside the modules, as in the ledger of the pass.
    parts = {
        name: spent(measured & (category == each) & (owned | ~layers), ns) for each, name in _DEVICE_COLUMNS.items()
    }
    parts["outside_modules_ns"] = spent(measured & layers & ~owned, ns)
    parts["elsewhere_ns"] = spent(~measured & whole, ns)
    parts["before_ns"] = spent(before, device.duration_ns)
    parts["unknown_ns"] = spent(unknown & ~before, device.duration_ns)
    return DeviceLedger(
        kernel_ns=sum(parts.values()),
        collectives_ns=spent(communicates, device.duration_ns),
        exposed_ns=spent(communicates, device.exposed_ns),
        idle_ns=int(device.idle_ns(assigned.steps).sum()) // steps,
        **parts,
    )


def _path(modules: Sequence[ModuleInfo], owner: int) -> str | None:
    return modules[owner].path if owner >= 0 else None


def _lines(
    cells: Cells,
    modules: Sequence[ModuleInfo],
    lines: Sequence[LineInfo],
    source_text: Mapping[tuple[str, int], tuple[str, str]],
) -> tuple[LineRow, ...]:
    forward: dict[tuple[str, int], int] = defaultdict(int)
    backward: dict[tuple[str, int], int] = defaultdict(int)
    by_layer: dict[tuple[str, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    function: dict[tuple[str, int], str] = {}
    for row in np.flatnonzero(cells.line >= 0).tolist():
        info = lines[int(cells.line[row])]
        place = (info.file, info.line)
        function[place] = info.function
        ns = int(cells.self_ns[row])
        if cells.category[row] == Category.FORWARD:
            forward[place] += ns
        elif cells.category[row] in BACKWARD_CATEGORIES:
            backward[place] += ns
        by_layer[place][int(cells.owner[row])] += ns
    found = []
    for place, name in function.items():
        shown, text = source_text.get(place, (place[0], ""))
        owner = max(by_layer[place], key=lambda layer: by_layer[place][layer])
        found.append(LineRow(shown, place[1], name, text, _path(modules, owner), forward[place], backward[place]))
    return tuple(sorted(found, key=lambda row: -row.backward_ns))


def _listed_under(owner: int, category: int) -> int:
    """Communication stands by itself, beside the layers: a layer has a column of it."""
    return OUTSIDE if category == Category.COMMUNICATION else owner


def _ops(cells: Cells, modules: Sequence[ModuleInfo], shapes: Mapping[tuple[int, int, str], str]) -> tuple[OpRow, ...]:
    time: dict[tuple[int, int, int], int] = defaultdict(int)
    calls: dict[tuple[int, int, int], int] = defaultdict(int)
    shown = np.flatnonzero(np.isin(cells.category, list(PHASES)))
    columns = (cells.category, cells.owner, cells.op, cells.self_ns, cells.calls)
    for category, owner, op, ns, count in zip(*(column[shown].tolist() for column in columns), strict=True):
        owner = _listed_under(owner, category)
        time[owner, category, op] += ns
        calls[owner, category, op] += count
    return tuple(
        OpRow(
            layer=_path(modules, owner),
            phase=PHASES[Category(category)],
            name=cells.ops[op],
            calls=per_step(calls[owner, category, op], cells.steps),
            self_ns=ns,
            # What prepares the data may be given other sizes in each step.
            shape=shapes.get((owner, category, cells.ops[op])) if category != Category.OTHER else None,
        )
        for (owner, category, op), ns in sorted(time.items(), key=lambda item: (item[0][0], -item[1]))
        # Python between the phases is in no row: what is there of it are the markers' own.
        if category != Category.OTHER or cells.ops[op] != PYTHON
    )


def _kernels(
    assigned: Assigned,
    modules: Sequence[ModuleInfo],
    device: DeviceTime,
    by_origin: Callable[[Contribution], list[Contribution]],
    ops: IntColumn,
    names: Sequence[str],
) -> tuple[KernelRow, ...]:
    kernels = assigned.skeleton.table.kernels
    assert kernels is not None
    steps = max(len(assigned.steps), 1)
    sums: dict[tuple[int, int, int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    ran = duration_contributions(device, ops)
    # One that several layers were fused into is in as many pieces, of both.
    busy = by_origin(replace(ran, ns=device.busy_ns[ran.kernel]))
    for part, worked in zip(by_origin(ran), busy, strict=True):
        assert part.kernel is not None
        owners, categories = part.owner(assigned).tolist(), part.category(assigned).tolist()
        for place in np.flatnonzero(assigned.steps.of_row[part.row] >= 0).tolist():
            owner, category, kernel = owners[place], categories[place], int(part.kernel[place])
            entry = sums[_listed_under(owner, category), category, int(part.op[place]), int(kernels.name[kernel])]
            entry[0] += int(part.ns[place])
            entry[1] += int(worked.ns[place])
            entry[2] += int(part.calls[place])
    return tuple(
        KernelRow(
            layer=_path(modules, owner),
            phase=PHASES[Category(category)],
            op=names[op],
            name=kernels.names[name],
            calls=per_step(count, steps),
            device_ns=duration // steps,
            busy_ns=busy // steps,
        )
        for (owner, category, op, name), (duration, busy, count) in sorted(sums.items(), key=lambda item: -item[1][0])
    )
