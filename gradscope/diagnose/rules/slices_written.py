"""One tensor written part by part: backward copies the gradient of the whole for every part.

Example::

    outputs = torch.zeros(steps, batch, classes)
    for step in range(steps):
        outputs[step] = self.head(state)  # append to a list, and torch.stack behind the loop

Pattern: at least four assignments of values with a gradient to parts of one tensor, by a number or a slice in one
dimension, which together cover half of it. Evidence: measured time of the copies in their layer's backward. Estimate:
each assignment's node copies the whole gradient before it takes its part out, a list joined once copies none; what
remains is the parts' own copies.

Source: CopySlices of PyTorch's engine (torch/csrc/autograd/functions/tensor.cpp), which clones the gradient
of the whole; derivatives.yaml (stack: unbind, a view).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gradscope.diagnose.case import Case, Rule, severity_of, text_at
from gradscope.tables import CallFact, Finding, TensorFact
from gradscope.units import count as counted
from gradscope.units import ns as time_text

_FEWEST = 4  # parts
_COVERED = 0.5  # of the tensor, by all parts
_WITHIN = 1.5
_COPIES = ("aten::copy_", "aten::new_empty_strided", "CopySlices")


@dataclass(frozen=True)
class _Written:
    """The assignments to parts of one tensor."""

    calls: tuple[CallFact, ...]
    dimension: int
    picks: bool  # by a number each, not by a slice

    @property
    def whole(self) -> TensorFact:
        return self.calls[0].inputs[0]

    @property
    def part(self) -> int:
        """Elements that the largest value has: one that is broadcast is less."""
        return max(_value(call).elements for call in self.calls)


def find(case: Case) -> Iterator[Finding]:
    """One for each line that writes parts."""
    folded: defaultdict[str, list[_Written]] = defaultdict(list)
    for written in _groups(case):
        source = written.calls[0].source
        if source is not None:
            folded[source].append(written)
    for source, found in folded.items():
        yield _finding(case, source, found)


def _groups(case: Case) -> Iterator[_Written]:
    found: defaultdict[tuple[int, str | None], list[CallFact]] = defaultdict(list)
    for call in case.facts.calls:
        if call.op == "setitem" and call.grad and len(call.inputs) == 2 and _value(call).requires_grad:
            found[call.inputs[0].storage, call.source].append(call)
    for calls in found.values():
        cuts = {_cut(call) for call in calls}
        cut = cuts.pop()
        if cut is None or cuts or len(calls) < _FEWEST:
            continue
        written = _Written(tuple(calls), *cut)
        if sum(_value(call).elements for call in calls) >= _COVERED * written.whole.elements:
            yield written


def _value(call: CallFact) -> TensorFact:
    return call.inputs[1]


def _is_covered(written: _Written) -> bool:
    return sum(_value(call).elements for call in written.calls) >= written.whole.elements


def _cut(call: CallFact) -> tuple[int, bool] | None:
    """The dimension in which a part lies, and whether a number picks it; None where that is not plain."""
    whole, value = call.inputs[0].shape, _value(call).shape
    index = call.argument(1, "indices")
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, (TensorFact, bool)) or each is None for each in parts):
        return None
    numbers = sum(type(each) is int for each in parts)
    if numbers == 1:
        fits = [i for i in range(len(whole)) if whole[:i] + whole[i + 1 :] == value]
        place = next(i for i, each in enumerate(parts) if type(each) is int)
        return (place if place in fits else fits[0], True) if fits else None
    if numbers or len(value) != len(whole):
        return None
    apart = [i for i, (one, other) in enumerate(zip(whole, value, strict=True)) if one != other]
    return (apart[0], False) if len(apart) == 1 else None


def _finding(case: Case, source: str, found: list[_Written]) -> Finding:
    one = found[0]
    spent = _copies_ns(case, source, found)
    parts = sum(len(written.calls) * written.part for written in found)
    wholes = sum(len(written.calls) * written.whole.elements for written in found)
    saving = round(spent * wholes / max(wholes + parts, 1))
    layers = tuple(dict.fromkeys(call.layer for each in found for call in each.calls if call.layer is not None))
    evidence = f"{counted(len(one.calls))} parts of a tensor of {'x'.join(map(str, one.whole.shape))}"
    if len(found) > 1:
        evidence += f", {counted(len(found))} times a step"
    if spent:
        evidence += f"; {time_text(spent)} of backward copy its gradient"
    return Finding(
        rule=RULE.name,
        severity=severity_of(saving, case),
        layers=layers,
        line=source,
        message=f"a tensor is written in {counted(len(one.calls))} parts: backward copies its whole gradient for each",
        evidence=evidence,
        predicted_saving_ns=saving or None,
        advice="Append the parts to a list and join them once, behind the loop"
        + ("." if all(map(_is_covered, found)) else "; what is never written, zeros say, is a part too."),
        code=_code(one, text_at(case, source)),
        predicted_low_ns=round(saving / _WITHIN) or None,
        predicted_high_ns=round(spent) or None,
        cost_ns=round(spent) or None,
    )


def _copies_ns(case: Case, source: str, found: list[_Written]) -> float:
    """What these copies take of a step: no more than backward spends on the line."""
    line = case.lines.get(source)
    layers = {call.layer for written in found for call in written.calls}
    rows = (row for layer in layers for row in case.ops.get((layer, "backward"), ()) if row.name in _COPIES)
    return min(sum(row.self_ns for row in rows), 0 if line is None else line.backward_ns)


def _code(written: _Written, text: str) -> str:
    plain = re.match(r"\s*([A-Za-z_][\w.]*)\[[^=]*\]\s*=\s*(.+?)\s*(#.*)?$", text)
    name, value = (plain[1], plain[2]) if plain is not None else ("y", "part")
    joined = "stack" if written.picks else "cat"
    dimension = f", dim={written.dimension}" if written.dimension else ""
    return f"parts.append({value}); {name} = torch.{joined}(parts{dimension})"


RULE = Rule("slices-written", "a tensor written part by part, whose backward copies it for each", find, edits=True)
