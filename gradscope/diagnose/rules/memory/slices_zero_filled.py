"""Slices of one tensor, each taken by its own index: backward zero-fills a full-size gradient for each.

Example::

    gate, value = h[..., :width], h[..., width:]  # h.split(width, dim=-1) instead
    states = [self.cell(x[:, step]) for step in range(steps)]  # x.unbind(1) instead

Pattern: several ``getitem`` of one tensor along one dimension that do not overlap and together cover half of it, or are
at least four, and need a gradient. Evidence: measured time of their backward nodes (``slice_backward``,
``select_backward``) and of adding their gradients. Estimate: n parts of a tensor write it n times as zeros, copy it
once and add it n - 1 times, together 4n - 1 passes; one split or unbind reads and writes it once: 2 passes, counted
twice where the parts lie between each other.

Source: derivatives.yaml of PyTorch (slice, select: a backward of zeros; split, unbind: one cat or stack);
https://pytorch.org/docs/stable/generated/torch.unbind.html.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gradscope.diagnose.case import Case, Rule, changed_in_place, layers_of, replaced_calls, text_at
from gradscope.diagnose.findings import Estimate, make_finding, number_of, shape_text
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text

_NODES = {
    "slice": ("SliceBackward0", "aten::slice_backward"),
    "select": ("SelectBackward0", "aten::select_backward"),
}


# Their layers add gradients of their own, of weights over the steps of a sequence.
_ADDS_INSIDE = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"})

_MANY = 4  # parts that need not cover the tensor
_WITHIN = 1.5


@dataclass(frozen=True)
class _Parts:
    """Parts of one tensor along one dimension."""

    kind: str  # "slice", "select"
    dimension: int
    stride: int  # of a slice
    calls: tuple[Node, ...]

    @property
    def whole(self) -> Value:
        return self.calls[0].inputs[0]

    @property
    def size(self) -> int:
        return self.whole.shape[self.dimension]


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each set of lines that take parts of a tensor."""
    folded: defaultdict[tuple[str, ...], list[_Parts]] = defaultdict(list)
    for parts in _groups(case):
        sources = tuple(dict.fromkeys(call.source for call in parts.calls if call.source is not None))
        if sources:
            folded[sources].append(parts)
    weights = _weights(case)
    for sources, found in folded.items():
        yield _finding(case, sources, found, weights)


def _groups(case: Case) -> Iterator[_Parts]:
    found: defaultdict[tuple[object, ...], list[Node]] = defaultdict(list)
    left_out, changed = replaced_calls(case), changed_in_place(case)
    # A line that a recipe rewrites is rewritten for all who run it.
    rewritten = {case.call(index).source for index in left_out}
    for call in case.facts.calls:
        cut = _cut(call)
        if cut is None or call.source in rewritten or call.index in left_out or call.inputs[0].storage in changed:
            continue
        whole = call.inputs[0]
        found[whole.producer, whole.storage, whole.shape, whole.strides, *cut].append(call)
    for key, calls in found.items():
        kind, dimension, stride = key[-3:]
        assert isinstance(kind, str) and isinstance(dimension, int) and isinstance(stride, int)
        if kind == "select":  # the same part again is one part
            calls = list({(_picked(call) or 0) % call.inputs[0].shape[dimension]: call for call in calls}.values())
        parts = _Parts(kind, dimension, stride, tuple(calls))
        if _replaceable(case, parts):
            yield parts


def _cut(call: Node) -> tuple[str, int, int] | None:
    """Return how one part is taken along one dimension, with a gradient: kind, dimension, stride."""
    if call.op != "getitem" or not call.grad or not call.inputs or not call.outputs:
        return None
    whole, part = call.inputs[0], call.outputs[0]
    views = part.storage == whole.storage and part.requires_grad and whole.requires_grad
    if not views or whole.strides is None or part.strides is None:
        return None
    if len(part.shape) == len(whole.shape):
        cut = [i for i, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
        if len(cut) != 1 or whole.strides[cut[0]] == 0 or part.shape[cut[0]] == 0:
            return None
        stride, rest = divmod(part.strides[cut[0]], whole.strides[cut[0]])
        return None if rest or stride < 1 else ("slice", cut[0], stride)
    if len(part.shape) == len(whole.shape) - 1 and _picked(call) is not None:
        dimensions = [
            i
            for i in range(len(whole.shape))
            if (whole.shape[:i] + whole.shape[i + 1 :], whole.strides[:i] + whole.strides[i + 1 :])
            == (part.shape, part.strides)
        ]
        return ("select", dimensions[0], 1) if len(dimensions) == 1 else None
    return None


def _picked(call: Node) -> int | None:
    """The one number in a select's index; None: there is none, or several."""
    index = call.argument(1, "index")
    numbers = [each for each in (index if isinstance(index, tuple) else (index,)) if type(each) is int]
    return numbers[0] if len(numbers) == 1 else None


def _replaceable(case: Case, parts: _Parts) -> bool:
    """Check that one split or unbind gives the same parts."""
    number = len(parts.calls)
    if parts.kind == "select":
        return number >= 2 and (number >= _MANY or 2 * number >= parts.size)
    covered = sum(call.outputs[0].shape[parts.dimension] for call in parts.calls)
    if parts.stride > 1:
        return number == parts.stride and covered == parts.size and parts.size % number == 0
    whole = covered <= parts.size and (number >= _MANY or 2 * covered >= parts.size)
    return number >= 2 and whole and not _same_twice(case, parts)


def _same_twice(case: Case, parts: _Parts) -> bool:
    """Check that the lines' texts take one part more than once."""
    texts: list[str] = []
    for source, calls in Counter(call.source for call in parts.calls).items():
        found = re.findall(r"\w+\[[^\[\]]*:[^\[\]]*\]", _read_at(case, source))
        if len(found) == calls:  # else a loop, or a line that cannot be read
            texts += found
    return len(texts) != len(set(texts))


def _weights(case: Case) -> tuple[Counter[tuple[str | None, str]], Counter[str | None]]:
    """Count the numbers that all parts' backward of a layer and kind writes, and all its gradient sums."""
    zeros: Counter[tuple[str | None, str]] = Counter()
    sums: Counter[str | None] = Counter()
    for call in case.facts.calls:
        cut = _cut(call)
        if cut is not None:
            zeros[call.layer, cut[0]] += call.inputs[0].elements
        for made in call.outputs:
            if made.requires_grad and len(made.users) > 1:
                sums[call.layer] += (len(made.users) - 1) * made.elements
    return zeros, sums


def _finding(
    case: Case,
    sources: tuple[str, ...],
    found: list[_Parts],
    weights: tuple[Counter[tuple[str | None, str]], Counter[str | None]],
) -> Finding:
    spent = saved = 0.0
    for parts in found:
        time, saving = _times(case, parts, weights)
        spent, saved = spent + time, saved + saving
    one, saving = found[0], round(saved)
    number = len(one.calls)
    lines = sorted(sources, key=lambda source: (source.rpartition(":")[0], number_of(source)))
    names = _names(_read_at(case, lines[0]))
    several = len(names) > 1 and len(found) % len(names) == 0 and len(sources) == 1
    which = f"each of {' and '.join(names)}, " if several else "a tensor "
    evidence = f"{counted(number)} slices of {which}of shape {shape_text(one.whole.shape)}"
    times = len(found) // (len(names) if several else 1)
    if times > 1:
        evidence += f", {counted(times)} times per step"
    if len(lines) > 1:
        evidence += f", on lines {', '.join(str(number_of(line)) for line in lines[:4])}"
    if spent:
        evidence += f"; backward spends {time_text(spent)} on zero-filling and adding the slices' gradients"
    how = "unbind" if one.kind == "select" or one.stride > 1 else "split"
    return make_finding(
        RULE.name,
        case,
        Estimate(saving, round(saving / _WITHIN), round(spent)),
        layers=(call.layer for parts in found for call in parts.calls),
        line=lines[0],
        message=(
            f"One tensor is indexed {counted(number)} times: backward zero-fills a full-size gradient for each slice"
        ),
        evidence=evidence,
        advice=f"Take all slices with one {how}, whose backward writes the whole gradient once.",
        code="; ".join(
            _code(one, _read_at(case, lines[0]), name)
            for name in (names if several or len(names) == 1 else ["x"])  # it is not plain which of several it is
        ),
        cost_ns=round(spent),
    )


def _times(
    case: Case, parts: _Parts, weights: tuple[Counter[tuple[str | None, str]], Counter[str | None]]
) -> tuple[float, float]:
    """Return what these parts take in backward and what of it would go, in ns of a step."""
    zeros, sums = weights
    passes = time = 0.0
    number, elements = len(parts.calls), parts.whole.elements
    for layer in {call.layer for call in parts.calls}:
        rows = [row for row in case.ops.get((layer, "backward"), ()) if row.name in _NODES[parts.kind]]
        own = elements * sum(1 for call in parts.calls if call.layer == layer)
        time += sum(row.self_ns for row in rows) * own / max(zeros[layer, parts.kind], 1)
    passes += number + 2
    if parts.whole.producer is not None and parts.whole.producer.op not in _ADDS_INSIDE:
        maker = parts.whole.producer
        paths = layers_of(case, maker)
        added = sum(row.self_ns for path in paths for row in case.ops.get((path, "gradient_sum"), ()))
        if added:
            time += added * (number - 1) * elements / max(sums[maker.layer], 1)
            passes += 3 * (number - 1)
    written = 2 if parts.stride == 1 else 4  # parts that lie between each other are read and written in pieces
    return time, time * max(1 - written / passes, 0.0)


def _code(parts: _Parts, text: str, name: str) -> str:
    number, dimension = len(parts.calls), parts.dimension
    names = ", ".join("abcdefgh"[:number]) if number <= 8 else "parts"
    if parts.kind == "select":
        names = names if number == parts.size <= 8 else "parts" if name == "x" else f"{name}_parts"
        return f"{names} = {name}.unbind({dimension})"
    if parts.stride > 1:
        return f"{names} = {name}.unflatten({dimension}, (-1, {parts.stride})).unbind({dimension + 1})"
    sizes = [call.outputs[0].shape[dimension] for call in parts.calls]
    rest = parts.size - sum(sizes)
    if not rest and len(set(sizes)) == 1:
        return f"{names} = {name}.chunk({number}, dim={dimension})"
    if not re.search(r"[\[,]\s*:\s*[^\],\s]", text):  # the first part taken may not be the first of the tensor
        return f"{names} = {name}.split([...], dim={dimension})"
    if rest:
        return f"{names}, _ = {name}.split({[*sizes, rest]}, dim={dimension})"
    return f"{names} = {name}.split({sizes}, dim={dimension})"


def _read_at(case: Case, source: str | None) -> str:
    """The line's text without the part of a tensor that it writes to."""
    return re.sub(r"^\s*[A-Za-z_][\w.]*\[[^=]*\]\s*=(?!=)", "", text_at(case, source))


def _names(text: str) -> list[str]:
    """Return what the line calls the tensors that it takes parts of; none where that is not plain."""
    found = list(re.finditer(r"([A-Za-z_]\w*)\[", text))
    plain = all(text[: each.start()].count("[") == text[: each.start()].count("]") for each in found)
    plain = plain and not any(text[: each.start()].endswith(".") for each in found)
    return list(dict.fromkeys(each[1] for each in found)) if plain else []


RULE = Rule("slices-zero-filled", "slices of one tensor, each with a full-size zero-filled gradient", find, edits=True)
