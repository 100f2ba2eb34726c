"""Gives what compiled kernels take to the layers and lines of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.compiled.fused import split
from gradscope.attribute.compiled.read import CompiledTime
from gradscope.attribute.cost_table import Contribution, Given
from gradscope.attribute.rows import Category
from gradscope.tables import IntColumn


def with_names(compiled: CompiledTime, names: tuple[str, ...]) -> tuple[CompiledTime, tuple[str, ...]]:
    """``compiled`` with the places of what no row names among ``names``, and these with what they lack."""
    known = list(names)
    place: dict[str, int] = {}
    for number, name in enumerate(known):
        place.setdefault(name, number)
    for name in compiled.called:
        if name and name not in place:
            place[name] = len(known)
            known.append(name)
    op = np.array([place[name] if name else -1 for name in compiled.called], np.int64)
    return replace(compiled, op=op), tuple(known)


def give_to_origins(assigned: Assigned, parts: Sequence[Contribution], compiled: CompiledTime) -> list[Contribution]:
    """``parts`` with what compiled kernels take at the layers and lines that they were made of."""
    found: list[Contribution] = []
    for part in parts:
        inside = compiled.inside(part)
        found.append(part.only(np.flatnonzero(inside < 0)))
        places = np.flatnonzero(inside >= 0)
        if len(places):
            found.append(_given(assigned, part.only(places), inside[places], compiled))
    return found


def _given(assigned: Assigned, part: Contribution, kernels: IntColumn, compiled: CompiledTime) -> Contribution:
    """Each entry in as many pieces as its kernel has shares."""
    entry, ns, layer, line, kind = (list[int]() for _ in range(5))
    owner, category = assigned.rows.owner[part.row], assigned.rows.category[part.row]
    for place, kernel in enumerate(kernels.tolist()):
        shares = compiled.kernels[kernel]
        for share, piece in split(int(part.ns[place]), [(one, one.weight) for one in shares]):
            entry.append(place)
            ns.append(piece)
            layer.append(int(owner[place]) if share.layer is None else share.layer)
            line.append(share.line)
            kind.append(share.spent)
    pieces = part.only(np.array(entry, np.int64))
    layers = np.array(layer, np.int64)
    spent = category[entry]
    # Outside of every module nodes have no owner, and forward is between the phases: here both are known.
    spent[(spent == Category.UNATTRIBUTED) & (layers >= 0)] = Category.LAYER
    spent[(spent == Category.OTHER) & (layers >= 0)] = Category.FORWARD
    spent = np.where(spent == Category.LAYER, np.array(kind, np.int8), spent)
    first = np.diff(np.array(entry), prepend=-1) != 0  # it is one call, not one for each layer
    estimated = np.array(compiled.estimated, bool)[kernels[entry]]
    op = compiled.op[kernels[entry]]
    calls = pieces.calls
    if pieces.kernel is not None:  # what has no row of its own was called where it began
        calls = np.maximum(calls, compiled.begins[pieces.kernel])
    return replace(
        pieces,
        op=np.where(op >= 0, op, pieces.op),
        ns=np.array(ns, np.int64),
        calls=np.where(first, calls, 0),
        given=Given(spent, layers, np.array(line, np.int64), estimated),
    )


def estimated_ns(assigned: Assigned, parts: Sequence[Contribution], layers: int) -> tuple[IntColumn, IntColumn]:
    """Of each layer the ns of a mean step's backward, and of its forward, that are an estimate."""
    found = np.zeros((2, layers), np.int64)
    for part in parts:
        if part.given is None:
            continue
        owner, category = part.owner(assigned), part.category(assigned)
        mine = part.given.estimated & (owner >= 0) & (assigned.steps.of_row[part.row] >= 0)
        for which, forward in enumerate((False, True)):
            wanted = mine & ((category == Category.FORWARD) == forward)
            np.add.at(found[which], owner[wanted], part.ns[wanted])
    steps = max(len(assigned.steps), 1)
    return found[0] // steps, found[1] // steps
