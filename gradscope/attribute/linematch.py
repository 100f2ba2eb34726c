"""Tells the source lines of a step that did not run what the survey step ran, call by call.

Operations are compared within one call of a layer (or outside of all calls), never across calls: a call that ran what
a call of the same layer ran in the survey has its lines; where several such calls had different ones, that at the same
place of a caller that did the same decides. In any other call an operation has a line where what is before and behind
it, as much as can be found or at the least one of each, was seen in the survey around one of the same name, and always
at one line. What a call ran is its operations and the layers that it called, each with the instruction that called it:
``f(a(x))`` is not ``f(b(x))``, nor ``f(a(x))`` on another line. Around an operation that was seen between no such
layers, calls from the same instructions will do: a loop over layers may run any of them, in any number; both that are
next to it must have been seen beside that line, though, for a loop may ask which layer it is. Between two calls, or a
call and an end, where some operation was seen nowhere between its neighbours, or some line ran more often than it
ever did and two were never so near each other, the call has left what is known: it may be in another branch that begins
or ends with the same operations, or in a loop that runs once more, and eight of them on one side must be alike. What
else there is has none. A node has the line of the operation that drew its number.

Lines between which a layer was seen to choose although all else was alike are told nowhere (``linechoice``), nor is
what one of torch's layers ran that was called from an instruction which no traced step met: the line is that one's.

The steps of the memory pass count as a survey too: they are traced by line, and may have run what the survey's did not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from gradscope.attribute.linechoice import (
    Callers,
    KnownLines,
    LayerCall,
    Names,
    Ran,
    Site,
    at_instructions,
    calls_beside,
    hidden_choices,
)
from gradscope.attribute.nodes import OUTSIDE, nearest
from gradscope.attribute.rows import INHERIT, Skeleton
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
    """Return the callers by the number of each call, in order."""
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


NOT_TOLD = -3
_NO_LINE = -1
_ENDS = (RowKind.NODE, RowKind.CALL, RowKind.RECOMPUTE)  # where the search for a line around an operation ends
# Operations before and behind that are compared, the most telling first. What runs once more than in the survey, as the
# closure of L-BFGS, begins or ends as it did there: one side may tell.
_AROUND = (((32, 32),), ((32, 2), (2, 32)), ((8, 8),), ((8, 2), (2, 8)), ((2, 2),), ((1, 1),))
_MANY = 8  # on one side, where something was seen nowhere

_At = tuple[Ran, int]  # an operation, and its line
_Beside = tuple[LayerCall | None, Ran, int, bool]  # a call, what ran next to it at which line, and whether before it


class Traced(NamedTuple):
    """A step that was traced by line."""

    ran: Operations
    lines: IntColumn  # of each operation


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What one layer ran in one call: names of operations, with their places among all, and layers that it called."""

    owner: int
    call: int
    names: Names
    places: tuple[int, ...]  # -1 for a call


class LineMatcher:
    """Knows the operations of the traced steps by call.

    Args:
        read: reads those steps, once some step is asked about.
    """

    def __init__(self, read: Callable[[], Iterable[Traced]]) -> None:
        self._unread = [read]
        self._calls: dict[int, list[KnownLines]] = defaultdict(list)
        self._windows: dict[int, dict[int, int]] = {}
        self._beside: dict[int, set[_Beside]] = {}
        self._near: dict[int, set[int]] = {}  # see _pair
        self._most: dict[int, Counter[_At]] = {}  # how often one call ran it
        self._hidden: dict[int, set[int]] = {}
        self._steps: list[Traced] = []
        self._chosen: dict[int, set[int]] = defaultdict(set)

    def learn(self, read: Callable[[], Iterable[Traced]]) -> None:
        """Know further steps, which are not read before some step is asked about."""
        self._unread.append(read)

    def lines(self, step: Operations) -> IntColumn:
        """The line of each operation of another step; :data:`NOT_TOLD` where the traced ones do not tell it."""
        self._read_all()
        result = np.full(len(step.keys), NOT_TOLD, np.int64)
        for stretch in _stretches(step):
            told = self._told(stretch, step.sites.get(stretch.call), step.callers.get(stretch.call))
            hidden = self._hidden_of(stretch.owner)
            for place, line in zip(stretch.places, told, strict=True):
                if place >= 0:
                    result[place] = NOT_TOLD if line in hidden else line
        return result

    def agreed(self, keys: Sequence[Key], called: Sequence[LayerCall], lines: IntColumn) -> IntColumn:
        """The lines of a step that ran these, without those where a traced step that ran the same had another.

        A layer that chose between two lines at one place may have done so wherever it has either.
        """
        self._read_all()
        result = lines.copy()
        for ran, others in self._steps:
            if ran.called == called and ran.keys == keys:
                result[others != lines] = _NO_LINE
        if self._chosen:
            places = enumerate(zip(keys, lines.tolist(), strict=True))
            result[[place for place, ((owner, _), line) in places if line in self._chosen.get(owner, ())]] = _NO_LINE
        return result

    def _hidden_of(self, owner: int) -> set[int]:
        if owner not in self._hidden:
            self._hidden[owner] = hidden_choices(self._calls[owner]) | self._chosen.get(owner, set())
        return self._hidden[owner]

    def _read_all(self) -> None:
        while self._unread:
            self._read(list(self._unread.pop(0)()))

    def _read(self, steps: Sequence[Traced]) -> None:
        for ran, lines in steps:
            self._compare(ran, lines)
            for stretch in _stretches(ran):
                found = tuple(int(lines[place]) if place >= 0 else NOT_TOLD for place in stretch.places)
                place = ran.sites.get(stretch.call), ran.callers.get(stretch.call)
                self._calls[stretch.owner].append(KnownLines(stretch.names, found, *place))
        self._windows.clear()
        self._hidden.clear()

    def _compare(self, ran: Operations, lines: IntColumn) -> None:
        """Note where a traced step that ran the same from begin to end did so on other lines."""
        for before, others in self._steps:
            if before.called == ran.called and before.keys == ran.keys:
                for place in np.flatnonzero((others != lines) & (others >= 0) & (lines >= 0)).tolist():
                    self._chosen[ran.keys[place][0]] |= {int(others[place]), int(lines[place])}
        if ran.called is not None:
            self._steps.append(Traced(ran, lines))

    def _told(self, stretch: _Stretch, site: Site | None, callers: Callers | None) -> Sequence[int]:
        calls = self._calls[stretch.owner]
        if callers is not None and len({known.callers for known in calls}) == 1 and callers != calls[0].callers:
            return [NOT_TOLD] * len(stretch.names)  # the line of one of torch's layers is that which called it
        same = [known for known in calls if known.names == stretch.names]
        if not same:
            return self._told_by_neighbours(stretch)
        if len({known.lines for known in same}) > 1 and site is not None:
            same = [known for known in same if known.place == (site, callers)] or same
        if len({known.lines for known in same}) > 1 and callers is not None:
            same = [known for known in same if known.callers == callers] or same
        columns = zip(*(known.lines for known in same), strict=True)
        return [column[0] if len(set(column)) == 1 else NOT_TOLD for column in columns]

    def _told_by_neighbours(self, stretch: _Stretch) -> list[int]:
        windows, names = self._windows_of(stretch.owner), stretch.names
        left = _left_what_is_known(windows, names, at_instructions(names))
        found = self._told_where(stretch, left)
        near, most = self._near[stretch.owner], self._most[stretch.owner]
        doubted = _doubted(near, most, names, found, left)
        return found if doubted == left else self._told_where(stretch, doubted)

    def _told_where(self, stretch: _Stretch, left: Sequence[bool]) -> list[int]:
        windows, names = self._windows_of(stretch.owner), stretch.names
        loose, calls_around = at_instructions(names), calls_beside(names)
        found = []
        for place, (ran, (before, behind)) in enumerate(zip(names, calls_around, strict=True)):
            if _is_seen(windows, names, place):
                found.append(_first(windows, names, place, many=left[place]))
                continue
            line = _first(windows, loose, place, many=left[place])
            # Which layer a loop calls may decide on which line it goes on: each of the two was seen beside this one.
            beside = self._beside[stretch.owner]
            known = (before, ran, line, False) in beside and (behind, ran, line, True) in beside
            found.append(line if known else NOT_TOLD)
        return found

    def _windows_of(self, owner: int) -> dict[int, int]:
        if owner not in self._windows:
            found: dict[int, int] = {}
            beside = self._beside[owner] = set()
            near = self._near[owner] = set()
            most = self._most[owner] = Counter()
            for known, lines, *_ in self._calls[owner]:
                most |= Counter(zip(known, lines, strict=True))
                for first in range(len(known)):
                    last = min(first + _MANY, len(known) - 1)
                    near.update(_pair(known, lines, first, second) for second in range(first + 1, last + 1))
                for ran, line, (before, behind) in zip(known, lines, calls_beside(known), strict=True):
                    beside |= {(before, ran, line, False), (behind, ran, line, True)}
                for names in {known, at_instructions(known)}:
                    _add_windows(found, names, lines)
            self._windows[owner] = found
        return self._windows[owner]


def _stretches(step: Operations) -> list[_Stretch]:
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, ((owner, _), call) in enumerate(zip(step.keys, step.calls.tolist(), strict=True)):
        places[owner, call].append(place)
    result = []
    for (owner, call), own in places.items():
        ran: Sequence[int | LayerCall] = own
        if call >= 0 or owner == OUTSIDE:  # what is recomputed lies in no call, nor among what runs outside of all
            mine = set(own)
            ran = [each for each in step.inside.get(call, ran) if isinstance(each, LayerCall) or each in mine]
        names = tuple(name_of(step.keys, each) for each in ran)
        result.append(_Stretch(owner, call, names, tuple(-1 if isinstance(each, LayerCall) else each for each in ran)))
    return result


def _add_windows(found: dict[int, int], names: Names, lines: Sequence[int]) -> None:
    for place, line in enumerate(lines):
        if isinstance(names[place], LayerCall):
            continue
        for size in chain.from_iterable(_AROUND):
            window = _window(names, place, *size)
            found[window] = line if found.get(window, line) == line else NOT_TOLD


def _is_seen(windows: dict[int, int], names: Names, place: int) -> bool:
    """Check that the neighbours were seen at all, if at several lines: then what the layers are may matter."""
    return _window(names, place, *_AROUND[-1][0]) in windows


def _left_what_is_known(windows: dict[int, int], names: Names, loose: Names) -> list[bool]:
    """Of each place, whether between the calls around it some operation was seen nowhere between its neighbours."""
    result: list[bool] = []
    for is_call, places in _between_calls(names):
        seen = is_call or all(_is_seen(windows, names, at) or _is_seen(windows, loose, at) for at in places)
        result += [not seen] * len(places)
    return result


def _doubted(
    seen: set[int], most: Counter[_At], names: Names, lines: Sequence[int], left: Sequence[bool]
) -> list[bool]:
    """Of each place, whether between the calls around it what is known was left, now that its lines seem to be these.

    Where a loop runs once more than it ever did, its end is next to its begin as others in the middle of it may be:
    some line ran more often than it ever did, and two were never so near.
    """
    result: list[bool] = []
    for is_call, places in _between_calls(names):
        told = [at for at in places if not is_call and lines[at] != NOT_TOLD]
        more = Counter((names[at], lines[at]) for at in told) - most
        near = (pair for pair in pairwise(told) if pair[1] - pair[0] <= _MANY)
        strange = bool(more) and any(_pair(names, lines, *pair) not in seen for pair in near)
        result += [left[places[0]] or strange] * len(places)
    return result


def _between_calls(names: Names) -> Iterator[tuple[bool, list[int]]]:
    for is_call, group in groupby(range(len(names)), lambda place: isinstance(names[place], LayerCall)):
        yield is_call, list(group)


def _pair(names: Names, lines: Sequence[int], first: int, second: int) -> int:
    """A key of two operations and their lines, so far from each other."""
    return hash((names[first], lines[first], second - first, names[second], lines[second]))


def _window(names: Names, place: int, before: int, behind: int) -> int:
    """A key of the name at ``place`` between so many neighbours; "" stands for what is outside of the call.

    A hash, for the names themselves would take 30 kB an operation.
    """
    first, last = place - before, place + behind + 1
    outside = ("",) * max(0, -first), ("",) * max(0, last - len(names))
    return hash((before, behind, *outside[0], *names[max(first, 0) : last], *outside[1]))


def _first(windows: dict[int, int], names: Names, place: int, *, many: bool) -> int:
    """The line by the most telling window that was seen; where ``many``, by one with as many names on one side."""
    there = place, len(names) - place - 1
    for sizes in _AROUND:
        on_a_side = [(size, max(map(min, zip(size, there, strict=True)))) for size in sizes]
        enough = [size for size, names_there in on_a_side if not many or names_there >= _MANY]
        told = {windows.get(_window(names, place, *size), NOT_TOLD) for size in enough} - {NOT_TOLD}
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
