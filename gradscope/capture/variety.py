"""How far the calls of some steps did what calls of other steps did, told without reading a trace.

A step that is timed may run what the survey's did not: layers that are dropped at random, experts, another branch. Of
each module call the recorder has noted what it called, from which instruction, and how many autograd nodes it drew.
Calls of one layer that agree in all of that are taken to have run the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradscope.compat import sequence_number
from gradscope.tables import IntColumn, SpanTable

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


_Kind = tuple[int, int, int]  # the layer, nodes that its call drew, and a hash of what it called


@dataclass(slots=True)
class _Open:
    label: int
    low: int
    high: int
    own: int  # nodes that none of what it called drew
    called: list[tuple[int, int, int, int]]


class Variety:
    """Knows what the calls of some steps did."""

    def __init__(self) -> None:
        self._steps: set[bytes] = set()
        self._kinds: set[_Kind] = set()

    def add(self, spans: SpanTable, steps: Iterable[StepBounds]) -> None:
        """Know these steps too."""
        for ran in (_ran(spans, step) for step in steps):
            if (whole := ran.tobytes()) not in self._steps:
                self._steps.add(whole)
                self._kinds.update(kind for kind, _ in _kinds(ran))

    def unseen(self, spans: SpanTable, steps: Iterable[StepBounds]) -> float:
        """The part of the autograd nodes of these steps that calls drew which did what no known call did."""
        unseen = every = 0
        for ran in (_ran(spans, step) for step in steps):
            every += int(ran[-1, 3])
            if ran.tobytes() not in self._steps:
                unseen += sum(own for kind, own in _kinds(ran) if kind not in self._kinds)
        return unseen / max(every, 1)


def _ran(spans: SpanTable, step: StepBounds) -> IntColumn:
    """The calls of a step, one a row: layer, instruction, first number, one behind the last; at last the step."""
    calls = slice(step.first, step.last)
    caller = spans.caller[calls] if spans.caller is not None else np.full(step.last - step.first, -1)
    columns = (spans.label[calls], caller, spans.low[calls] - step.low, spans.high[calls] - step.low)
    return np.vstack([np.column_stack(columns), [_OUTSIDE, -1, 0, step.high - step.low]]).astype(np.int64)


def _kinds(ran: IntColumn) -> Iterator[tuple[_Kind, int]]:
    """Of each call, and of what is outside of all, what it did, and how many nodes it drew itself."""
    *calls, (_, _, _, nodes) = ran.tolist()
    open_calls = [_Open(_OUTSIDE, 0, nodes, nodes, [])]
    for label, caller, low, high in calls:
        while len(open_calls) > 1 and not (open_calls[-1].low <= low and high <= open_calls[-1].high):
            yield _closed(open_calls.pop())
        above = open_calls[-1]
        above.called.append((label, caller, low - above.low, high - low))
        above.own -= high - low
        open_calls.append(_Open(label, low, high, high - low, []))
    while open_calls:
        yield _closed(open_calls.pop())


def _closed(call: _Open) -> tuple[_Kind, int]:
    return (call.label, call.high - call.low, hash(tuple(call.called))), call.own
