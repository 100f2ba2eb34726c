"""One tensor filled by slice assignments: backward copies the whole gradient for each.

Example::

    outputs = torch.zeros(steps, batch, classes)
    for step in range(steps):
        outputs[step] = self.head(state)  # append to a list, and torch.stack after the loop

Pattern: at least four assignments of values with a gradient to parts of one tensor, by numbers or by a slice in one
dimension, which follow each other forwards or backwards, each place once, and together cover half of it. Between the
first and the last nothing but single parts is read: what needs the whole each time, a cache of keys say, cannot be
joined behind the loop. Evidence: measured time of the copies in their layer's backward. Estimate: each assignment's
node copies the whole gradient before it takes its part out, a list joined once copies none; what remains is the parts'
own copies.

Source: CopySlices of PyTorch's engine (torch/csrc/autograd/functions/tensor.cpp), which clones the gradient
of the whole; derivatives.yaml (stack: unbind, a view).
"""

from __future__ import annotations

import ast
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from typing import Any

from gradscope.diagnose.case import SAME_MEMORY, Case, Rule, changed_in_place, text_at
from gradscope.diagnose.findings import Estimate, make_finding, number_of, shape_text
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text

_FEWEST = 4  # parts
_COVERED = 0.5  # of the tensor, by all parts
_WITHIN = 1.5
_COPIES = ("aten::copy_", "aten::new_empty_strided", "CopySlices")


@dataclass(frozen=True)
class _PartPlace:
    """Where a part lies: in one dimension, or in neighbours that numbers pick together, counted through."""

    dimensions: tuple[int, ...]
    picked: bool  # by numbers, not by a slice
    first: int
    end: int


@dataclass(frozen=True)
class _Written:
    """The assignments to parts of one tensor."""

    calls: tuple[Node, ...]
    places: tuple[_PartPlace, ...]
    is_read: bool  # what was written, by those that follow
    changes: bool  # a value, behind its assignment: a list would hold what it is then

    @property
    def whole(self) -> Value:
        return self.calls[0].inputs[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the dimensions in which the parts lie."""
        return tuple(self.whole.shape[i] for i in self.places[0].dimensions)

    @property
    def is_backwards(self) -> bool:
        return self.places[0].first > self.places[-1].first

    @property
    def covered(self) -> float:
        """Return what part of the tensor is written."""
        return sum(place.end - place.first for place in self.places) / max(math.prod(self.sizes), 1)


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each set of lines that write parts."""
    folded: defaultdict[tuple[str, ...], list[_Written]] = defaultdict(list)
    for written in _groups(case):
        sources = Counter(call.source for call in written.calls if call.source is not None)
        if sources:
            folded[tuple(source for source, _ in sources.most_common())].append(written)
    weights = _weights(case)
    for lines, found in folded.items():
        yield _finding(case, lines, found, weights)


def _groups(case: Case) -> Iterator[_Written]:
    found: defaultdict[int, list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        if call.op == "setitem" and call.inputs:
            found[call.inputs[0].storage].append(call)
    for calls in found.values():
        written = _written(case, list(dropwhile(lambda call: not _copies(call), calls)))
        if written is not None:
            yield written


def _copies(call: Node) -> bool:
    """Check that the assignment's backward copies the whole gradient, and hands a part of it on."""
    value = call.argument(2, "value")
    return call.grad and isinstance(value, Value) and value.requires_grad


def _written(case: Case, calls: Sequence[Node]) -> _Written | None:
    """Return the writes of one tensor's parts; None where no one call could join these."""
    if sum(map(_copies, calls)) < _FEWEST or _is_a_part(calls[0].inputs[0]):
        return None
    places = [place for place in map(_place_of_value, calls) if place is not None]
    forms = {(call.inputs[0].shape, call.inputs[0].strides, call.grad) for call in calls}
    if len(places) < len(calls) or len(forms) > 1 or len({(each.dimensions, each.picked) for each in places}) > 1:
        return None
    forwards = all(one.end <= other.first for one, other in pairwise(places))
    if not forwards and not all(other.end <= one.first for one, other in pairwise(places)):
        return None  # one place twice, or in an order of their own
    is_read = _is_read(case, calls, places)
    if is_read is None:
        return None
    changed = changed_in_place(case, calls[0].index)
    changes = any(call.argument(2, "value").storage in changed for call in calls)
    written = _Written(tuple(calls), tuple(places), is_read, changes)
    fewest = 1.0 if len(written.sizes) > 1 else _COVERED
    return written if written.covered >= fewest else None


def _is_a_part(whole: Value) -> bool:
    """Check that ``whole`` is a view of a part of a tensor: what is written is that tensor."""
    maker = whole.producer
    return maker is not None and any(
        each.storage == whole.storage and each.elements > whole.elements for each in maker.inputs
    )


def _place(call: Node) -> _PartPlace | None:
    """Return where in its tensor a call reads or writes; None where that is not plain."""
    shape, index = call.inputs[0].shape, call.argument(1, "indices")
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(each is ... or type(each) is int or _is_plain(each) for each in parts) or parts.count(...) > 1:
        return None
    if ... in parts:
        at = parts.index(...)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    spans = [(i, type(each) is int, range(shape[i])[each]) for i, each in enumerate(parts)]
    cuts = [(i, picked, span) for i, picked, span in spans if picked or span != range(shape[i])]
    if not cuts:
        return None
    dimensions = tuple(i for i, _, _ in cuts)
    if all(picked for _, picked, _ in cuts) and dimensions[-1] - dimensions[0] == len(cuts) - 1:
        first = 0
        for i, _, number in cuts:
            first = first * shape[i] + number
        return _PartPlace(dimensions, True, first, first + 1)
    (_, picked, span), several = cuts[0], len(cuts) > 1
    return None if several or picked or span.step != 1 else _PartPlace(dimensions, False, span.start, span.stop)


def _is_plain(index: Any) -> bool:
    """Check that this is a slice between numbers: a tensor that says where may have been changed since."""
    return type(index) is slice and {type(each) for each in (index.start, index.stop, index.step)} <= {int, type(None)}


def _place_of_value(call: Node) -> _PartPlace | None:
    """The place that an assignment writes; None also where the value is not as large, and is repeated there."""
    place, value = _place(call), call.argument(2, "value")
    if place is None or not isinstance(value, Value):
        return None
    shape = list(call.inputs[0].shape)
    shape[place.dimensions[0] : place.dimensions[-1] + 1] = [] if place.picked else [place.end - place.first]
    return place if value.shape == tuple(shape) else None


def _is_read(case: Case, calls: Sequence[Node], places: Sequence[_PartPlace]) -> bool | None:
    """Check that parts are read before the last one is written; None where more than single parts are."""
    whole, written = calls[0].inputs[0], dict(zip((call.index for call in calls), places, strict=True))
    views: set[Node | None] = set()
    done: list[_PartPlace] = []
    found = False
    for call in case.facts.calls[calls[0].index : calls[-1].index]:
        held = [each for each in call.inputs if each.storage == whole.storage]
        if call.index in written:
            done.append(written[call.index])
            held = held[1:]  # a value that is the tensor's own memory
        shared = any(each.storage == whole.storage for each in call.outputs)
        if call.op == "getitem" and held and (held[0].shape, held[0].strides) == (whole.shape, whole.strides):
            place = _place(call)
            met = [each for each in done if place is not None and each.first < place.end and place.first < each.end]
            if place is None or place.dimensions != places[0].dimensions or met not in ([], [place]):
                return None
            found = found or bool(met)
        elif any(each.producer not in views for each in held) or (held and shared and call.op not in SAME_MEMORY):
            return None
        if held and shared:
            views.add(call)
    return found


def _weights(case: Case) -> Counter[str | None]:
    """Count the numbers that the backward of a layer's calls copies: of assignments, and of casts."""
    found: Counter[str | None] = Counter()
    for call in case.facts.calls:
        if _copies(call):
            found[call.layer] += call.inputs[0].elements
        elif call.grad and call.op != "setitem" and len(call.inputs) == len(call.outputs) == 1:
            (given,), (made,) = call.inputs, call.outputs
            if given.requires_grad and given.shape == made.shape and given.dtype != made.dtype:
                found[call.layer] += made.elements
    return found


def _finding(case: Case, lines: tuple[str, ...], found: list[_Written], weights: Counter[str | None]) -> Finding:
    one = found[0]
    spent = _copies_ns(case, lines, found, weights)
    wholes = sum(len(written.calls) * written.whole.elements for written in found)
    parts = sum(written.covered * written.whole.elements for written in found)
    saving = round(spent * wholes / max(wholes + parts, 1))
    evidence = f"{counted(len(one.calls))} slices of a tensor of shape {shape_text(one.whole.shape)}"
    if len(found) > 1:
        evidence += f", {counted(len(found))} times per step"
    if len(lines) > 1:
        numbers = sorted(map(number_of, lines))
        evidence += f", on lines {', '.join(map(str, numbers[:4]))}"
    if spent:
        evidence += f"; backward spends {time_text(spent)} copying its gradient"
    return make_finding(
        RULE.name,
        case,
        Estimate(saving, round(saving / _WITHIN), round(spent)),
        layers=(call.layer for each in found for call in each.calls),
        line=lines[0],
        message=(
            f"A tensor is filled by {counted(len(one.calls))} slice assignments: backward copies the "
            "whole gradient for each"
        ),
        evidence=evidence,
        advice=_advice(found, len(lines)),
        code=_code(one, text_at(case, lines[0])),
        cost_ns=round(spent),
    )


def _copies_ns(case: Case, lines: Sequence[str], found: Sequence[_Written], weights: Counter[str | None]) -> float:
    """Return what these copies take of a step: no more than backward spends on the lines."""
    own: Counter[str | None] = Counter()
    for call in (call for written in found for call in written.calls if _copies(call)):
        own[call.layer] += call.inputs[0].elements
    spent = 0.0
    for layer, elements in own.items():
        rows = (row for row in case.ops.get((layer, "backward"), ()) if row.name in _COPIES)
        spent += sum(row.self_ns for row in rows) * elements / max(weights[layer], 1)
    return min(spent, sum(case.lines[line].backward_ns for line in lines if line in case.lines))


def _advice(found: Sequence[_Written], lines: int) -> str:
    advice = "Append the parts to a list and join them once after " + ("the loop" if lines == 1 else "the last one")
    if any(written.is_read for written in found):
        advice += "; read earlier parts from the list"
    return advice + (
        "." if all(each.covered == 1 for each in found) else "; append parts that are never written (zeros) too."
    )


def _code(written: _Written, text: str) -> str:
    name, value = _spelled(text)
    place, kind = written.places[0], written.whole.dtype
    at = place.dimensions[0]
    code = "torch.stack" if place.picked else "torch.cat"
    code += f"(parts{'[::-1]' if written.is_backwards else ''}{f', dim={at}' if at else ''})"
    if len(written.sizes) > 1:
        code += f".unflatten({at}, {written.sizes})"
    if {call.argument(2, "value").dtype for call in written.calls} != {kind}:
        code += f".to({kind})"
    if written.changes:
        value = f"{value if value.isidentifier() else 'part'}.clone()"
    return f"parts.append({value}); {name} = {code}"


def _spelled(text: str) -> tuple[str, str]:
    """Return what the line calls the tensor and the value; "y" and "part" where that is not plain."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip())))
    except SyntaxError:  # it goes on behind the line
        return "y", "part"
    found = [each for each in nodes if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Subscript)]
    if len(found) != 1 or len(found[0].targets) > 1:
        return "y", "part"
    target = found[0].targets[0]
    assert isinstance(target, ast.Subscript)
    name, value = ast.unparse(target.value), ast.get_source_segment(text.strip(), found[0].value)
    if not all(part.isidentifier() for part in name.split(".")):
        return "y", "part"
    reads_it = any(
        isinstance(each, ast.Subscript) and ast.unparse(each.value) == name for each in ast.walk(found[0].value)
    )
    return name, "part" if reads_it or value is None else value


RULE = Rule(
    "slices-written",
    "a tensor filled by slice assignment, whose backward copies its gradient for each slice",
    find,
    edits=True,
)
