"""Lines between which a layer chooses where nothing that a step notes tells which it took.

``if random.random() < 0.5: x = x @ a`` with ``else: x = x @ b`` on another line runs the same operations and calls the
same layers either way. It shows only in the steps that are traced by line: the same was run, and its lines were others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ANY = -3  # layer: whichever


class LayerCall(NamedTuple):
    """A call of a layer, as the one around it made it."""

    layer: int
    caller: int  # number of the instruction; -1: not known


Ran = str | LayerCall  # the name of an operation, or a call
Names = tuple[Ran, ...]  # what a call ran, in order
Site = tuple[Names, int]  # what the caller did, and the place in it
Callers = tuple[int, ...]  # the instruction that called; while it is one of torch's containers, that which called these
Place = tuple[Site | None, Callers | None]


class KnownLines(NamedTuple):
    """What one layer ran in one call of a traced step."""

    names: Names
    lines: tuple[int, ...]  # of each; below 0 for a call, and where there is none
    site: Site | None
    callers: Callers | None = None

    @property
    def place(self) -> Place:
        """Return where it was called."""
        return self.site, self.callers


def at_instructions(names: Names) -> Names:
    """Calls by the instruction alone: a loop that calls other layers than it did, or more of them, is the same loop."""
    return tuple(
        LayerCall(ANY, each.caller) if isinstance(each, LayerCall) and each.caller >= 0 else each for each in names
    )


def calls_beside(names: Names) -> list[tuple[LayerCall | None, LayerCall | None]]:
    """Return the last call before each place and the first behind it; None where there is none."""

    def last(ran: Iterable[Ran]) -> list[LayerCall | None]:
        found: list[LayerCall | None] = [None]
        for each in ran:
            found.append(each if isinstance(each, LayerCall) else found[-1])
        return found[:-1]

    return list(zip(last(names), last(reversed(names))[::-1], strict=True))


def hidden_choices(calls: Sequence[KnownLines]) -> set[int]:
    """Return the lines of one layer that it took, and did not take, where all that is noted was alike.

    Alike is a call that ran the same at the same place of its caller. Where it called other layers from the same
    instructions, those may have decided; they have not if a layer before was seen with either line, and one behind too.
    """
    found: set[int] = set()
    for group in _others_at_a_place((call.names, call.place, call.lines) for call in calls):
        found |= group
    by_layers = list(_others_at_a_place((at_instructions(call.names), call.place, call.lines) for call in calls))
    if any(group - found for group in by_layers):
        before, behind = _lines_beside(calls)
        for group in by_layers:
            if all(any(len(group & lines) > 1 for lines in side) for side in (before, behind)):
                found |= group
    return found


def _others_at_a_place(calls: Iterable[tuple[Names, Place, tuple[int, ...]]]) -> Iterable[set[int]]:
    """The lines at each place of calls that are alike, where there are several."""
    alike: dict[tuple[Names, Place], set[tuple[int, ...]]] = defaultdict(set)
    for names, place, lines in calls:
        alike[names, place].add(lines)
    for each in alike.values():
        if len(each) > 1:
            for column in zip(*each, strict=True):
                taken = {line for line in column if line >= 0}
                if len(taken) > 1:
                    yield taken


def _lines_beside(calls: Iterable[KnownLines]) -> tuple[list[set[int]], list[set[int]]]:
    """The lines on which an operation was seen behind each call, and in front of each."""
    sides: tuple[dict[tuple[LayerCall | None, Ran], set[int]], ...] = (defaultdict(set), defaultdict(set))
    for call in {(call.names, call.lines) for call in calls}:
        for ran, line, beside in zip(*call, calls_beside(call[0]), strict=True):
            if line >= 0:
                for side, neighbour in zip(sides, beside, strict=True):
                    side[neighbour, ran].add(line)
    return list(sides[0].values()), list(sides[1].values())
