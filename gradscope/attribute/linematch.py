"""Tells the source lines of a step that did not run what the survey step ran, call by call.

Operations are compared within one call of a layer (or outside of all calls), never across calls: a call that ran what
a call of the same layer ran in the survey has its lines; where several such calls had different ones, that at the same
place of a caller that did the same decides. In any other call an operation has a line where what is before and behind
it, as much as can be found or at the least one of each, was seen in the survey around one of the same name, and always
at one line. What a call ran is its operations and the layers that it called, each with the instruction that called it:
``f(a(x))`` is not ``f(b(x))``, nor ``f(a(x))`` on another line. Around an operation that was seen between no such
layers, calls from the same instructions will do: a loop over layers may run any of them, in any number; both that are
next to it must have been seen beside that line, though, for a loop may ask which layer it is. What else there is has
none. A node has the line of the operation that drew its number.

The steps of the memory pass count as a survey too: they are traced by line, and may have run what the survey's did not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from gradscope.attribute.nodes import OUTSIDE, nearest
from gradscope.attribute.rows import INHERIT, Skeleton
from gradscope.tables import IntColumn, RowKind

NOT_TOLD = -3
_ANY = -3  # layer: whichever
_NO_LINE = _UNKNOWN = -1
_ENDS = (RowKind.NODE, RowKind.CALL, RowKind.RECOMPUTE)  # where the search for a line around an operation ends
# Operations before and behind that are compared, the most telling first. What runs once more than in the survey, as the
# closure of L-BFGS, begins or ends as it did there: one side may tell.
_AROUND = (((32, 32),), ((32, 2), (2, 32)), ((8, 8),), ((8, 2), (2, 8)), ((2, 2),), ((1, 1),))


class Called(NamedTuple):
    """A call of a layer, as the one around it made it."""

    layer: int
    caller: int  # number of the instruction; -1: not known


_Key = tuple[int, str]  # layer and name of an operation
_Ran = str | Called  # the name of an operation, or a call
Site = tuple[tuple[_Ran, ...], int]  # what the caller did, and the place in it
_Beside = tuple[Called | None, _Ran, int, bool]  # a call, what ran next to it at which line, and whether before it


@dataclass(frozen=True, slots=True)
class Operations:
    """What a step ran, one entry an operation that Python called itself."""

    keys: Sequence[_Key]
    calls: IntColumn  # number of the innermost module call around it; -1 outside of every call
    sites: Mapping[int, Site]  # of each call
    # By call, what it ran in order: the place in ``keys`` of an operation, or a call. A call that is not here ran its
    # operations only.
    inside: Mapping[int, Sequence[int | Called]] = field(default_factory=dict)
    called: tuple[Called, ...] = ()  # all calls, in order


def operations_of(skeleton: Skeleton, units: IntColumn, keys: Sequence[_Key], calls: IntColumn) -> Operations:
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
    ran: dict[int, list[tuple[int, int | Called]]] = defaultdict(list)  # rows, and what each is
    for place, (call, row) in enumerate(zip(around.tolist(), units.tolist(), strict=True)):
        ran[call].append((row, place))
    made = calls_made(skeleton, calls)
    for call, row, called in zip(above.tolist(), calls.tolist(), made, strict=True):
        ran[call].append((row, called))
    sites: dict[int, Site] = {}
    for found in ran.values():
        found.sort(key=itemgetter(0))
        did = tuple(_name(keys, each) for _, each in found)
        sites |= {number_of[row]: (did, order) for order, (row, each) in enumerate(found) if isinstance(each, Called)}
    inside = {call: [each for _, each in found] for call, found in ran.items()}
    return Operations(keys, around, sites, inside, made)


def calls_made(skeleton: Skeleton, calls: IntColumn) -> tuple[Called, ...]:
    """The module calls whose rows these are."""
    numbers = skeleton.table.argument[calls]
    label, caller = skeleton.calls.label[numbers], skeleton.calls.caller
    callers = np.full(len(calls), _UNKNOWN, np.int64) if caller is None else caller[numbers]
    return tuple(map(Called, label.tolist(), callers.tolist()))


def _name(keys: Sequence[_Key], ran: int | Called) -> _Ran:
    return ran if isinstance(ran, Called) else keys[ran][1]


def _calls_around(skeleton: Skeleton, rows: IntColumn) -> IntColumn:
    table = skeleton.table
    around = nearest(table, table.parent[rows].astype(np.int64), (RowKind.CALL,))
    return np.where(around >= 0, table.argument[around], -1)


class Traced(NamedTuple):
    """A step that was traced by line."""

    ran: Operations
    lines: IntColumn  # of each operation


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What one layer ran in one call: names of operations, with their places among all, and layers that it called."""

    owner: int
    call: int
    names: tuple[_Ran, ...]
    places: tuple[int, ...]  # -1 for a call


class _Known(NamedTuple):
    """A stretch of a traced step."""

    names: tuple[_Ran, ...]
    lines: tuple[int, ...]  # NOT_TOLD for a call
    site: Site | None


class LineMatcher:
    """Knows the operations of the traced steps by call.

    Args:
        read: reads those steps, once some step is asked about.
    """

    def __init__(self, read: Callable[[], Iterable[Traced]]) -> None:
        self._unread = [read]
        self._steps: list[Traced] = []
        self._calls: dict[int, list[_Known]] = defaultdict(list)
        self._windows: dict[int, dict[int, int]] = {}
        self._beside: dict[int, set[_Beside]] = {}

    def learn(self, read: Callable[[], Iterable[Traced]]) -> None:
        """Know further steps, which are not read before some step is asked about."""
        self._unread.append(read)

    def lines(self, step: Operations) -> IntColumn:
        """The line of each operation of another step; :data:`NOT_TOLD` where the traced ones do not tell it."""
        self._read_all()
        result = np.full(len(step.keys), NOT_TOLD, np.int64)
        for stretch in _stretches(step):
            told = self._told(stretch, step.sites.get(stretch.call))
            for place, line in zip(stretch.places, told, strict=True):
                if place >= 0:
                    result[place] = line
        return result

    def agreed(self, keys: Sequence[_Key], called: Sequence[Called], lines: IntColumn) -> IntColumn:
        """The lines of a step that ran these, without those where a traced step that ran the same had another."""
        self._read_all()
        result = lines.copy()
        for ran, others in self._steps:
            if ran.called == called and ran.keys == keys:
                result[others != lines] = _NO_LINE
        return result

    def _read_all(self) -> None:
        while self._unread:
            self._read(list(self._unread.pop(0)()))

    def _read(self, steps: Sequence[Traced]) -> None:
        self._steps += steps
        for ran, lines in steps:
            for stretch in _stretches(ran):
                found = tuple(int(lines[place]) if place >= 0 else NOT_TOLD for place in stretch.places)
                self._calls[stretch.owner].append(_Known(stretch.names, found, ran.sites.get(stretch.call)))
        self._windows.clear()

    def _told(self, stretch: _Stretch, site: Site | None) -> Sequence[int]:
        same = [known for known in self._calls[stretch.owner] if known.names == stretch.names]
        if not same:
            return self._told_by_neighbours(stretch)
        if len({known.lines for known in same}) > 1 and site is not None:
            same = [known for known in same if known.site == site] or same
        columns = zip(*(known.lines for known in same), strict=True)
        return [column[0] if len(set(column)) == 1 else NOT_TOLD for column in columns]

    def _told_by_neighbours(self, stretch: _Stretch) -> list[int]:
        windows, names = self._windows_of(stretch.owner), stretch.names
        loose, calls_around = _at_instructions(names), _calls_beside(names)
        found = []
        for place, (ran, (before, behind)) in enumerate(zip(names, calls_around, strict=True)):
            if _is_seen(windows, names, place):
                found.append(_first(windows, names, place))
                continue
            line = _first(windows, loose, place)
            # Which layer a loop calls may decide on which line it goes on: each of the two was seen beside this one.
            beside = self._beside[stretch.owner]
            known = (before, ran, line, False) in beside and (behind, ran, line, True) in beside
            found.append(line if known else NOT_TOLD)
        return found

    def _windows_of(self, owner: int) -> dict[int, int]:
        if owner not in self._windows:
            found: dict[int, int] = {}
            beside = self._beside[owner] = set()
            for known, lines, _ in self._calls[owner]:
                for ran, line, (before, behind) in zip(known, lines, _calls_beside(known), strict=True):
                    beside |= {(before, ran, line, False), (behind, ran, line, True)}
                for names in {known, _at_instructions(known)}:
                    _add_windows(found, names, lines)
            self._windows[owner] = found
        return self._windows[owner]


def _stretches(step: Operations) -> list[_Stretch]:
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, ((owner, _), call) in enumerate(zip(step.keys, step.calls.tolist(), strict=True)):
        places[owner, call].append(place)
    result = []
    for (owner, call), own in places.items():
        ran: Sequence[int | Called] = own
        if call >= 0 or owner == OUTSIDE:  # what is recomputed lies in no call, nor among what runs outside of all
            mine = set(own)
            ran = [each for each in step.inside.get(call, ran) if isinstance(each, Called) or each in mine]
        names = tuple(_name(step.keys, each) for each in ran)
        result.append(_Stretch(owner, call, names, tuple(-1 if isinstance(each, Called) else each for each in ran)))
    return result


def _at_instructions(names: tuple[_Ran, ...]) -> tuple[_Ran, ...]:
    """Calls by the instruction alone: a loop that calls other layers than it did, or more of them, is the same loop."""
    return tuple(Called(_ANY, each.caller) if isinstance(each, Called) and each.caller >= 0 else each for each in names)


def _calls_beside(names: tuple[_Ran, ...]) -> list[tuple[Called | None, Called | None]]:
    """Of each place the last call before it and the first behind it; None where there is none."""

    def last(ran: Iterable[_Ran]) -> list[Called | None]:
        found: list[Called | None] = [None]
        for each in ran:
            found.append(each if isinstance(each, Called) else found[-1])
        return found[:-1]

    return list(zip(last(names), last(reversed(names))[::-1], strict=True))


def _add_windows(found: dict[int, int], names: tuple[_Ran, ...], lines: Sequence[int]) -> None:
    for place, line in enumerate(lines):
        if isinstance(names[place], Called):
            continue
        for size in chain.from_iterable(_AROUND):
            window = _window(names, place, *size)
            found[window] = line if found.get(window, line) == line else NOT_TOLD


def _is_seen(windows: dict[int, int], names: tuple[_Ran, ...], place: int) -> bool:
    """Whether the neighbours were seen at all, if at several lines: then what the layers are may matter."""
    return _window(names, place, *_AROUND[-1][0]) in windows


def _window(names: tuple[_Ran, ...], place: int, before: int, behind: int) -> int:
    """A key of the name at ``place`` between so many neighbours; "" stands for what is outside of the call.

    A hash, for the names themselves would take 30 kB an operation.
    """
    first, last = place - before, place + behind + 1
    outside = ("",) * max(0, -first), ("",) * max(0, last - len(names))
    return hash((before, behind, *outside[0], *names[max(first, 0) : last], *outside[1]))


def _first(windows: dict[int, int], names: tuple[_Ran, ...], place: int) -> int:
    for sizes in _AROUND:
        told = {windows.get(_window(names, place, *size), NOT_TOLD) for size in sizes} - {NOT_TOLD}
        if told:
            return told.pop() if len(told) == 1 else NOT_TOLD
    return NOT_TOLD


def lines_of_nodes(skeleton: Skeleton, places: IntColumn, units: IntColumn, line: IntColumn) -> IntColumn:
    """The line of each of the nodes at ``places`` of ``skeleton.nodes``: that of the operation that drew its number.

    Args:
        units: rows of operations whose ``line``, by row, is known or known to be none; INHERIT stands for that of
            the node around it.
    """
    table = skeleton.table
    drew = np.flatnonzero((table.sequence >= 0) & (table.forward_thread == 0))
    has_line = np.zeros(len(table), bool)
    has_line[units] = line[units] != INHERIT
    number_of = dict(zip(skeleton.numbers.row.tolist(), range(len(skeleton.numbers.row)), strict=True))
    rows = skeleton.nodes.row[places]
    found = np.full(len(places), _NO_LINE, np.int64)
    by_row: dict[int, int] = {}
    makers = _makers(skeleton, drew)
    for index, row in enumerate(rows.tolist()):  # in the order in which they ran: what made a node has run before it
        maker = int(makers[number_of[row]]) if row in number_of else -1
        while maker >= 0 and not has_line[maker] and table.kind[maker] not in _ENDS:
            maker = int(table.parent[maker])
        if maker >= 0:
            found[index] = line[maker] if has_line[maker] else by_row.get(maker, _NO_LINE)
        by_row[row] = int(found[index])
    return found


def _makers(skeleton: Skeleton, drew: IntColumn) -> IntColumn:
    """Of each node of ``skeleton.numbers`` the last row of its thread that started with its number, or a lower one."""
    table, numbers = skeleton.table, skeleton.numbers
    found = np.full(len(numbers.row), -1, np.int64)
    for thread in np.unique(numbers.thread).tolist():
        mine = drew[table.thread[drew] == thread]
        nodes = np.flatnonzero((numbers.thread == thread) & (numbers.sequence >= 0))
        if len(mine) and len(nodes):
            drawn = np.maximum.accumulate(table.sequence[mine])
            place = np.searchsorted(drawn, numbers.sequence[nodes], side="right") - 1
            found[nodes] = np.where(place >= 0, mine[place], -1)
    return found
