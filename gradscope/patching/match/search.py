"""Which tensors a pattern may begin and end with, around a call that gives it away."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from torch import nn

from gradscope.ops import CASTS, CASTS_TO_ONE, COPIES
from gradscope.patching.match.behaviour import FUNCTIONS, is_understood, operands
from gradscope.patching.match.graph import constant, makers, reached, uncast
from gradscope.recording.graph import Frame, Node, Value

_FAR = 14  # calls between what gives a pattern away and its ends
_MANY = 24  # tensors on either side
_MOST_FORMING = 8  # tensors between a parameter and the vector that it is made into
_LONGEST = 40  # calls of a pattern; those that are written have up to fifteen

# After so many calls at one place that are no pattern's, one after the other, the rest is taken for more of the same: a
# recurrence makes them in each of its steps, and looking at one takes 1 ms there.
_FRUITLESS = 40

NOT_CONTIGUOUS = "the result's memory layout differs from the recipe's"


@dataclass(frozen=True)
class Region:
    """Calls from given tensors to a result."""

    given: tuple[Value, ...]  # the main operand comes first
    output: Value
    nodes: frozenset[Node]
    constants: frozenset[Node]  # calls that made numbers which are read

    @property
    def x(self) -> Value:
        """The main operand."""
        return self.given[0]

    @property
    def reasons(self) -> list[str]:
        """Say why no call that gives the main operand's dtype, contiguous, can replace these."""
        reasons = []
        if self.output.dtype != self.x.dtype:
            reasons.append("the result's dtype differs from the input's")
        if self._is_identity_seen:
            reasons.append("in evaluation mode an operand is the same tensor before and after dropout")
        if any(made.dtype.itemsize < self.x.dtype.itemsize for node in self.nodes for made in node.outputs):
            reasons.append("an intermediate result is rounded to a narrower dtype than the input")
        if any(value.device != self.output.device for value in self.given):
            reasons.append("the operands are on different devices")
        return reasons

    @property
    def is_contiguous(self) -> bool:
        """Return whether the result lies in memory in the order of its dimensions."""
        count = 1
        for size, step in zip(reversed(self.output.shape), reversed(self.output.strides or ()), strict=True):
            if size > 1 and step != count:
                return False
            count *= max(size, 1)
        return True

    @property
    def _is_identity_seen(self) -> bool:
        """Return whether an operand and what it was before, say, dropout in evaluation cannot be told apart."""
        frame = common_frame(self.nodes)
        for value in self.given:
            node = uncast(value).producer
            if node is None or frame is None or node.place_in(frame) is None:
                continue
            if any(read.content == node.output.content for read in node.inputs):
                return True
        return False


class Fruitless:
    """Counts the looks in vain at each place of the source."""

    def __init__(self) -> None:
        self._looks: Counter[object] = Counter()

    def enough(self, node: Node) -> bool:
        """Tell a call at a place that was looked at often enough."""
        return self._looks[_standing(node)] >= _FRUITLESS

    def count(self, node: Node, found: object | None) -> None:
        """Count a look that ``found`` nothing; something found begins the count anew."""
        self._looks[_standing(node)] = 0 if found is not None else self._looks[_standing(node)] + 1


def _standing(node: Node) -> object:
    return (node.places[0].frame.code, node.places[0].span) if node.places else None


def begins(value: Value, shape: tuple[int, ...]) -> list[Value]:
    """The tensors of ``shape`` that a pattern may begin with whose function gets ``value``, the nearest first.

    What another function makes is the last one looked at on its way: in a recurrence, where every step is within reach
    of the next, this leaves few.
    """
    return [each for each in before(value, shape, through=False) if each.shape]


def before(value: Value, shape: tuple[int, ...], end: Value | None = None, *, through: bool = True) -> list[Value]:
    """The tensors of ``shape`` that ``value`` is made of over understood calls, the nearest first; itself too.

    Args:
        end: what it and casts of it are made of is not looked at, nor are they among them.
        through: whether what a function is called with is looked at.
    """
    last = None if end is None else uncast(end)
    found: list[Value] = []
    frontier, seen = [value], {value}
    for _ in range(_FAR):
        following: list[Value] = []
        for each in frontier:
            if last is not None and uncast(each) is last:
                continue
            if each.shape == shape and each.dtype.is_floating_point:
                found.append(each)
            node = each.producer
            if node is not None and is_understood(node) and (through or node.op not in FUNCTIONS):
                following += [read for read in node.inputs if read not in seen]
                seen |= set(node.inputs)
        frontier = following
        if not frontier or len(found) > _MANY:
            break
    return found


def after(value: Value, shape: tuple[int, ...]) -> list[Value]:
    """The tensors of ``shape`` that are made of ``value`` over understood calls, in the order of the run."""
    found: set[Value] = set()
    frontier, seen = [value], {value}
    for _ in range(_FAR):
        following = []
        for each in frontier:
            for node in each.users:
                if is_understood(node):
                    following += [made for made in node.outputs if made not in seen]
                    seen |= set(node.outputs)
        found |= {made for made in following if made.shape == shape}
        frontier = following
        if not frontier or len(found) > _MANY:
            break
    return sorted(found, key=lambda made: made.index)


def read_by(output: Value, given: Iterable[Value]) -> list[Value] | None:
    """Return which of ``given`` ``output`` is made of; None where it is made of others too."""
    given = tuple(given)
    walk = _Walk(output, given, through=False)
    return [each for each in given if uncast(each).index in walk.met] if walk.complete and walk.nodes else None


def region(output: Value, given: Iterable[Value]) -> Region | None:
    """The calls that make ``output`` of ``given``; None where it is not made of these alone.

    The main operand, the first, is what it was before a cast where the result is cast back; otherwise a cast is none of
    the pattern's business: what it does in another dtype is not known.
    """
    main, *others = given
    loose = _Walk(output, (main, *others), through=False)
    if not loose.complete or not loose.nodes:
        return None
    read = [min(loose.met.get(uncast(each).index, {each}), key=_index) for each in (main, *others)]
    if any(node.op in CASTS for node in loose.nodes):
        read[0] = _before_casts(read[0], output, common_frame(loose.nodes))
    walk = _Walk(output, tuple(read), through=True)
    upwards = any(node.op in CASTS and uncast(node.output) is uncast(main) for node in walk.nodes)
    assert output.producer is not None
    if not walk.complete or (output.producer.op in CASTS and (not upwards or output.producer.op in CASTS_TO_ONE)):
        return None
    return Region(tuple(read), output, frozenset(walk.nodes), frozenset(walk.constants))


def _before_casts(value: Value, output: Value, frame: Frame | None) -> Value:
    found = value
    while (node := found.producer) is not None and node.op in CASTS and frame is not None:
        if node.place_in(frame) is None:
            break
        found = node.inputs[0]
        if found.dtype == output.dtype:
            value = found
    return value


class _Walk:
    """Backwards from a result to given tensors.

    Attributes:
        nodes: the calls on the way.
        constants: those that only made numbers.
        met: by the index of a given tensor, itself or casts of it where the walk came upon them.
        complete: whether it ended at given tensors everywhere.
    """

    def __init__(self, output: Value, given: tuple[Value, ...], *, through: bool) -> None:
        self.nodes: set[Node] = set()
        self.constants: set[Node] = set()
        self.met: dict[int, set[Value]] = {}
        self.complete = True
        self._given, self._through, self._seen = given, through, set[Value]()
        self._classes = {uncast(each).index for each in given}
        self._left = [output]
        while self._left and self.complete:
            value = self._left.pop()
            if value not in self._seen:
                self._seen.add(value)
                self._visit(value)
                self.complete = self.complete and len(self.nodes) <= _LONGEST

    def _visit(self, value: Value) -> None:
        origin = uncast(value).index
        node = value.producer
        if origin in self._classes:
            self.met.setdefault(origin, set()).add(value)
            if not self._through or not self._leads_to_given(value) or node is None:
                return
        elif constant(value) is not None:
            self.constants |= makers(value)
            return
        elif node is None or not is_understood(node):
            self.complete = False
            return
        self.nodes.add(node)
        self._left += operands(node)

    def _leads_to_given(self, value: Value) -> bool:
        """Return whether it is a cast or copy of a given tensor, and not that itself."""
        while value not in self._given:
            node = value.producer
            if node is None or node.op not in CASTS | COPIES:
                return False
            value = node.inputs[0]
            if value in self._given:
                return True
        return False


def _index(value: Value) -> int:
    return value.index


def common_frame(nodes: Iterable[Node]) -> Frame | None:
    """The innermost function under which all calls were made."""
    nodes = list(nodes)
    last = max(nodes, key=lambda node: node.index)
    for place in last.places:
        if all(node.place_in(place.frame) is not None for node in nodes):
            return place.frame
    return None


def keeps_its_form(value: Value) -> bool:
    """Return whether it is made of parameters of as many numbers.

    [1, 1, C] of data has more rows in a larger batch, and a row of [B, C] is a matrix of [B, T, C].
    """
    way = list(islice(reached(value), _MOST_FORMING + 1))
    return len(way) <= _MOST_FORMING and all(
        math.prod(each.shape) == value.shape[-1]
        and (each.producer is not None or isinstance(each.tensor(), nn.Parameter))
        for each in way
    )


def asked_forms(vectors: Iterable[Value]) -> tuple[tuple[Value, str], ...]:
    """Return what is asked of vectors of the features that may have another shape next time: a row of data, say."""
    return tuple((each, f".shape == {tuple(each.shape)}") for each in vectors if not keeps_its_form(uncast(each)))
