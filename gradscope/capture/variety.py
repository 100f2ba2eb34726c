"""How far the calls of some steps did what calls of other steps did, told without reading a trace.

A step that is timed may run what the survey's did not: layers that are dropped at random, experts, another branch. Of
each module call the recorder has noted what it called, from which instruction, and how many autograd nodes it drew. As
many nodes of one layer next to the same calls are taken to be of the same lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from gradscope.compat import sequence_number
from gradscope.tables import OF_TORCHS_LAYER, IntColumn, SpanTable

_OUTSIDE = -1  # in the place of a layer: what a step does around all calls


class StepBounds(NamedTuple):
    """The calls of a step, and the sequence numbers of the thread that trains."""

    first: int  # number of its first call
    low: int
    last: int  # number of the first call behind it
    high: int


def step_begins(calls: int) -> StepBounds:
    """A step begins on this thread, after so many calls."""
    return StepBounds(calls, sequence_number(), calls, 0)


def step_ended(begun: StepBounds, calls: int) -> StepBounds:
    """It has ended, on the same thread."""
    return begun._replace(last=calls, high=sequence_number())


# Layer and instruction of a call. The begin or the end of what is around it: the instruction that called this one, and
# while that is one of torch's containers, the one which called these.
_Called = tuple[int, ...]
_Beside = tuple[int, int, bool, _Called]  # the layer, nodes that it drew itself, and the call behind or before these


@dataclass(slots=True)
class _Open:
    label: int
    high: int
    at: int  # up to where its nodes are known
    callers: _Called
    last: _Called | None = None


class Variety:
    """Knows what the calls of some steps did: how many nodes a layer draws itself between which two calls."""

    def __init__(self) -> None:
        self._steps: set[bytes] = set()
        self._known: set[_Beside] = set()

    def add(self, spans: SpanTable, steps: Iterable[StepBounds]) -> None:
        """Know these steps too."""
        for ran in (_ran(spans, step) for step in steps):
            if (whole := ran.tobytes()) not in self._steps:
                self._steps.add(whole)
                self._known.update(chain.from_iterable(_stretches(ran)))

    def unseen(self, spans: SpanTable, steps: Iterable[StepBounds]) -> float:
        """The part of the autograd nodes of these steps that were drawn where no known step drew as many.

        It is enough that each of the two calls around some nodes was seen beside as many of that layer's.
        """
        unseen = every = 0
        for ran in (_ran(spans, step) for step in steps):
            every += int(ran[-1, 3])
            if ran.tobytes() not in self._steps:
                unseen += sum(before[1] for before, behind in _stretches(ran) if not {before, behind} <= self._known)
        return unseen / max(every, 1)


def _ran(spans: SpanTable, step: StepBounds) -> IntColumn:
    """The calls of a step, one a row: layer, instruction, first number, one behind the last; at last the step."""
    calls = np.arange(step.first, step.last)
    # Other threads draw numbers of their own.
    calls = calls[(spans.low[calls] >= step.low) & (spans.high[calls] <= step.high)]
    caller = spans.caller[calls] if spans.caller is not None else np.full(len(calls), -1)
    columns = (spans.label[calls], caller, spans.low[calls] - step.low, spans.high[calls] - step.low)
    return np.vstack([np.column_stack(columns), [_OUTSIDE, -1, 0, step.high - step.low]]).astype(np.int64)


def _stretches(ran: IntColumn) -> Iterator[tuple[_Beside, _Beside]]:
    """Nodes that a call, or the step outside of all, drew itself, from one call below it to the next."""
    *calls, (_, _, _, nodes) = ran.tolist()
    open_calls = [_Open(_OUTSIDE, nodes, 0, ())]
    for label, caller, low, high in calls:
        while len(open_calls) > 1 and high > open_calls[-1].high:
            yield from _stretch(open_calls.pop())
        above = open_calls[-1]
        yield from _stretch(above, low, (label, caller))
        above.at, above.last = high, (label, caller)
        callers = (-1, caller, *(above.callers[1:] if caller >= OF_TORCHS_LAYER else ()))
        open_calls.append(_Open(label, high, low, callers))
    while open_calls:
        yield from _stretch(open_calls.pop())


def _stretch(
    call: _Open, until: int | None = None, following: _Called | None = None
) -> Iterator[tuple[_Beside, _Beside]]:
    drawn = (call.high if until is None else until) - call.at
    if drawn > 0:
        before, behind = (call.callers if beside is None else beside for beside in (call.last, following))
        yield (call.label, drawn, False, before), (call.label, drawn, True, behind)
