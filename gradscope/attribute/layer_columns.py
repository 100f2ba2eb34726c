"""What is added to the rows of layers, one column after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.cost_table import Contribution
from gradscope.attribute.rows import BACKWARD_CATEGORIES, Category
from gradscope.attribute.survey import Notes
from gradscope.attribute.waits import communication_rows
from gradscope.tables import IntColumn, KernelRow, LayerRow, StepTimes


def with_communication(
    rows: tuple[LayerRow, ...],
    step: StepTimes,
    assigned: Assigned,
    parts: Sequence[Contribution],
    backward_ns: int,
) -> tuple[tuple[LayerRow, ...], StepTimes]:
    """Add what the layers' forward spent on communication, and what the whole step did, where there was any.

    Args:
        backward_ns: what the backward pass did.
    """
    communicates = communication_rows(assigned.skeleton)
    waits = any(len(part.row) and (part.communicates or part.apart == Category.COMMUNICATION) for part in parts)
    if not waits and not communicates.any():
        return rows, step
    steps = max(len(assigned.steps), 1)
    elsewhere = 0
    forward = np.zeros(len(rows), np.int64)
    for part in parts:
        measured = assigned.steps.of_row[part.row] >= 0
        category = part.category(assigned)
        # What the pass spends on it is in the ledger: that is not rounded a second time.
        measured &= category != Category.COMMUNICATION
        if part.apart is not None:
            elsewhere += int(part.ns[measured].sum()) if part.communicates else 0
            continue
        mine = measured & (communicates[part.row] | part.communicates)
        elsewhere += int(part.ns[mine].sum())
        owner = part.owner(assigned)
        mine &= (category == Category.FORWARD) & (owner >= 0)
        np.add.at(forward, owner[mine], part.ns[mine])
    own = (min(row.forward_self_ns, int(ns) // steps) for row, ns in zip(rows, forward, strict=True))
    rows = tuple(replace(row, forward_communication_ns=ns) for row, ns in zip(rows, own, strict=True))
    return rows, replace(step, communication_ns=min(backward_ns + elsewhere // steps, step.wall_ns))


def with_estimates(rows: tuple[LayerRow, ...], backward: IntColumn, forward: IntColumn) -> tuple[LayerRow, ...]:
    """Add how many nanoseconds of each layer are a share of a fused kernel."""
    return tuple(
        replace(
            row,
            estimated_ns=min(
                int(ns), row.backward_self_ns + row.recompute_ns + row.gradient_sum_ns
            ),  # rounded cell by cell
            forward_estimated_ns=min(int(forward_ns), row.forward_self_ns),
        )
        for row, ns, forward_ns in zip(rows, backward, forward, strict=True)
    )


def with_graph_flops(
    rows: tuple[LayerRow, ...], flops: Mapping[tuple[int, bool], int], uncounted: Collection[int], steps: int
) -> tuple[LayerRow, ...]:
    """Add the floating-point operations of compiled graphs, per step, to what the layers run outside of these.

    Args:
        uncounted: layers that run something of which nobody counted the operations: theirs are not known.
    """
    known = {layer for layer, _ in flops}
    found = []
    for number, row in enumerate(rows):
        if number in known:
            forward, backward = (flops.get((number, which), 0) // steps for which in (False, True))
            forward, backward = forward + (row.forward_flops or 0), backward + (row.backward_flops or 0)
            row = replace(row, flops=forward + backward, forward_flops=forward, backward_flops=backward)
            if backward and not forward:  # that ran in a graph that nobody told of
                row = replace(row, flops=None, forward_flops=None)
        found.append(row)
    return without_flops(tuple(found), uncounted)


def without_flops(rows: tuple[LayerRow, ...], layers: Collection[int]) -> tuple[LayerRow, ...]:
    """Say of these layers that their operations are not known."""
    return tuple(
        replace(row, flops=None, forward_flops=None, backward_flops=None) if number in layers else row
        for number, row in enumerate(rows)
    )


def without_backward_flops(rows: tuple[LayerRow, ...]) -> tuple[LayerRow, ...]:
    """Say of layers that have operations in forward alone that those of backward are not known."""
    return tuple(
        replace(row, flops=None, backward_flops=None) if row.forward_flops and not row.backward_flops else row
        for row in rows
    )


def with_flops(rows: tuple[LayerRow, ...], survey: Notes, trained: Sequence[float]) -> tuple[LayerRow, ...]:
    """Return the floating-point operations of a mean step: the survey's of one call of each layer, times its calls.

    What is called, or trained, in the timed steps but was not in the survey has none: they are not known.

    Args:
        trained: of each layer the calls that backward follows, per step: those of an evaluation have no backward.
    """
    flops, calls = survey.flops, survey.calls
    forward: dict[int, int] = defaultdict(int)
    backward: dict[int, int] = defaultdict(int)
    for (owner, category), count in flops.items():
        if category == Category.FORWARD:
            forward[owner] += count
        elif category in BACKWARD_CATEGORIES:
            backward[owner] += count
    result = []
    for index, row in enumerate(rows):
        seen = calls.get(index, 0)
        followed = survey.trained.get(index, 0)  # none: a checkpoint's forward makes no nodes
        untrained = trained[index] and not followed and forward[index] and not backward[index]
        if (row.calls and not seen) or untrained:
            result.append(row)
            continue
        often = row.calls / seen if seen else 1
        first = round(forward[index] * often)
        second = round(backward[index] * (trained[index] / followed if followed else often))
        result.append(replace(row, flops=first + second, forward_flops=first, backward_flops=second))
    return tuple(result)


def with_device(
    rows: tuple[LayerRow, ...],
    assigned: Assigned,
    kernels: Sequence[KernelRow],
    launch: Sequence[Contribution],
    idle: Sequence[Contribution],
) -> tuple[LayerRow, ...]:
    """Add the time of kernels, and what the host spends on launching and waiting, per step."""
    steps = max(len(assigned.steps), 1)
    ran: dict[str | None, int] = defaultdict(int)  # what is listed adds up, to the nanosecond
    for kernel in kernels:
        ran[kernel.layer] += kernel.device_ns

    def sums(parts: Sequence[Contribution]) -> list[int]:
        found = np.zeros(len(rows), np.int64)
        for part in parts:
            owner = part.owner(assigned)
            mine = (assigned.steps.of_row[part.row] >= 0) & (owner >= 0) & (part.category(assigned) == Category.LAYER)
            np.add.at(found, owner[mine], part.ns[mine])
        return [int(ns) // steps for ns in found]

    launch_ns, idle_ns = sums(launch), sums(idle)
    return tuple(
        replace(
            row,
            device_ns=ran[row.path],
            launch_ns=launch_ns[index],
            idle_ns=idle_ns[index],
        )
        for index, row in enumerate(rows)
    )


def with_overlapped(
    rows: tuple[LayerRow, ...], assigned: Assigned, parts: Sequence[Contribution]
) -> tuple[LayerRow, ...]:
    """Add what other work hides of the collectives' kernels, given as ``parts``."""
    steps = max(len(assigned.steps), 1)
    hidden = np.zeros(len(rows), np.int64)
    for part in parts:
        owner = part.owner(assigned)
        mine = (assigned.steps.of_row[part.row] >= 0) & (owner >= 0)
        np.add.at(hidden, owner[mine], part.ns[mine])
    return tuple(
        replace(row, overlapped_communication_ns=int(ns) // steps) for row, ns in zip(rows, hidden, strict=True)
    )
