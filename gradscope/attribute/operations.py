"""What a step ran, call by call: the operations that Python called itself, and the layers, each with what called it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from gradscope.attribute.linechoice import Callers, LayerCall, Ran, Site
from gradscope.attribute.nodes import nearest
from gradscope.attribute.rows import Skeleton
from gradscope.tables import OF_TORCHS_LAYER, IntColumn, RowKind

_UNKNOWN = -1

Key = tuple[int, str]  # layer and name of an operation


@dataclass(frozen=True, slots=True)
class Operations:
    """What a step ran, one entry an operation that Python called itself."""

    keys: Sequence[Key]
    calls: IntColumn  # number of the innermost module call around it; -1 outside of every call
    sites: Mapping[int, Site]  # of each call
    # By call, what it ran in order: the place in ``keys`` of an operation, or a call. A call that is not here ran its
    # operations only.
    inside: Mapping[int, Sequence[int | LayerCall]] = field(default_factory=dict)
    callers: Mapping[int, Callers] = field(default_factory=dict)  # of each call
    called: tuple[LayerCall, ...] | None = None  # each module call of the step, in order; None: not noted


def operations_of(skeleton: Skeleton, units: IntColumn, keys: Sequence[Key], calls: IntColumn) -> Operations:
    """The operations of one step.

    Args:
        units: their rows.
        keys: (layer, name) of each.
        calls: rows of the step's module calls.
    """
    table = skeleton.table
    around, above = (_calls_around(skeleton, rows) for rows in (units, calls))
    numbers = table.argument[calls].tolist()
    number_of = dict(zip(calls.tolist(), numbers, strict=True))
    ran: dict[int, list[tuple[int, int | LayerCall]]] = defaultdict(list)  # rows, and what each is
    for place, (call, row) in enumerate(zip(around.tolist(), units.tolist(), strict=True)):
        ran[call].append((row, place))
    made = calls_made(skeleton, calls)
    for call, row, called in zip(above.tolist(), calls.tolist(), made, strict=True):
        ran[call].append((row, called))
    sites: dict[int, Site] = {}
    for found in ran.values():
        found.sort(key=itemgetter(0))
        did = tuple(name_of(keys, each) for _, each in found)
        sites |= {
            number_of[row]: (did, order) for order, (row, each) in enumerate(found) if isinstance(each, LayerCall)
        }
    inside = {call: [each for _, each in found] for call, found in ran.items()}
    return Operations(keys, around, sites, inside, _callers(made, numbers, above.tolist()), made)


def _callers(made: Sequence[LayerCall], numbers: Sequence[int], above: Sequence[int]) -> dict[int, Callers]:
    """By the number of each call, in order."""
    found: dict[int, Callers] = {}
    for called, number, parent in zip(made, numbers, above, strict=True):
        around = found.get(parent, ()) if called.caller >= OF_TORCHS_LAYER else ()
        found[number] = (called.caller, *around)
    return found


def calls_made(skeleton: Skeleton, calls: IntColumn) -> tuple[LayerCall, ...]:
    """The module calls whose rows these are."""
    numbers = skeleton.table.argument[calls]
    label, caller = skeleton.calls.label[numbers], skeleton.calls.caller
    callers = np.full(len(calls), _UNKNOWN, np.int64) if caller is None else caller[numbers]
    return tuple(map(LayerCall, label.tolist(), callers.tolist()))


def name_of(keys: Sequence[Key], ran: int | LayerCall) -> Ran:
    """What stands for an operation, given by its place in ``keys``, or for a call where two steps are compared."""
    return ran if isinstance(ran, LayerCall) else keys[ran][1]


def _calls_around(skeleton: Skeleton, rows: IntColumn) -> IntColumn:
    table = skeleton.table
    around = nearest(table, table.parent[rows].astype(np.int64), (RowKind.CALL,))
    return np.where(around >= 0, table.argument[around], -1)
