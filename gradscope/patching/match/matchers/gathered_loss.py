"""The losses of rows by hand: the logarithmic softmax at the targets, or the logits there and their log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gradscope.patching.match.behaviour import lifts
from gradscope.patching.match.graph import dimension
from gradscope.patching.match.match import Argument, Match, Of, why_idle
from gradscope.recording.graph import Node, Recording, Value

RECIPE = "cross_entropy"

_FORMS = frozenset({"view", "reshape", "flatten"})  # of a matrix's rows: of more dimensions sizes could change
_COLUMN = (1, (-1, 1))  # the last size that a view is given, or both


@dataclass
class _Picked:
    """One number of each row: ``output``, [...] or, if ``kept``, [..., 1], is ``rows`` at ``target``, [...]."""

    rows: Value
    target: Value
    nodes: set[Node]
    output: Value
    kept: bool
    placing: set[Node]  # those that say which dimension is the classes'
    optional: set[Node] = field(default_factory=set)  # what only gives the targets the shape of an index
    suffix: str = ""  # of the target


def matches(recording: Recording, gains: Callable[[Value], bool]) -> Iterator[Match]:
    """Yield every loss whose logits are picked at the targets, of logits that ``gains`` tells to be worth it."""
    for node in recording.nodes:
        picked = _gathered(node) if node.op == "gather" and node.places else None
        if picked is None:
            continue
        softmax = picked.rows.producer
        if softmax is not None and softmax.op == "log_softmax":
            if gains(softmax.inputs[0]):
                yield _match(softmax.inputs[0], softmax, picked, ".neg()")
        elif gains(picked.rows):
            spread = _subtracted_from(picked)
            if spread is not None:
                yield _match(picked.rows, spread, picked, "")


def _match(logits: Value, softmax: Node, picked: _Picked, suffix: str) -> Match:
    reasons, output = [], picked.output
    if dimension(softmax) != -1 or logits.shape != picked.rows.shape:
        reasons.append("the softmax and the loss use different dimensions")
    if output.dtype != logits.dtype or gives_a_dtype(softmax):
        reasons.append("log_softmax changes the dtype")
    classes_second = ".movedim(-1, 1)" if len(logits.shape) > 2 else ""
    arguments = (
        Argument("", (Of(logits, "logits", classes_second),)),
        Argument("", (Of(picked.target, "target", picked.suffix + ".long()"),)),  # gather takes int32 as well
        Argument("reduction", ('"none"',)),
    )
    return Match(
        RECIPE,
        "cross_entropy",
        arguments,
        frozenset({softmax, *picked.nodes}),
        output,
        optional=frozenset(picked.optional),
        suffix=suffix + (".unsqueeze(-1)" if picked.kept else ""),
        rows=(logits, picked.target),
        forms=_forms(logits, {softmax, *picked.placing}),
        reasons=reasons,
        idle=why_idle(RECIPE, logits, logits=math.prod(logits.shape)),
    )


def _gathered(node: Node) -> _Picked | None:
    """Match ``rows.gather(-1, target[..., None]).squeeze(-1)``."""
    rows, index = node.inputs[0], node.inputs[-1]
    if len(node.inputs) != 2 or node.kwargs.get("sparse_grad") or not _has_classes(rows) or dimension(node) != -1:
        return None
    if index.shape != (*rows.shape[:-1], 1):
        return None
    found = _Picked(rows, index, {node}, node.output, kept=True, placing={node}, suffix=".squeeze(-1)")
    form = index.producer
    if form is not None and _adds_last(form) and form.inputs[0].shape == rows.shape[:-1]:
        found.target, found.optional, found.suffix = form.inputs[0], {form}, ""
        found.placing.add(form)
    users = node.output.users
    if len(users) == 1 and _drops_last(users[0]) and users[0].output.shape == rows.shape[:-1]:
        found.nodes.add(users[0])
        found.placing.add(users[0])
        found.output, found.kept = users[0].output, False
    return found


def _adds_last(node: Node) -> bool:
    """Check that a dimension is put behind the others: one of one row could be put before them and look alike."""
    if node.op == "unsqueeze":
        return node.argument(1, "dim") in {-1, len(node.inputs[0].shape)}
    if node.op == "getitem":
        return lifts(node) and _ends_with(node, lambda part: part is None)
    return _is_form(node, 1) and node.args[-1] in _COLUMN


def _drops_last(node: Node) -> bool:
    """Check that it is the last one that goes, for the same reason."""
    if node.op == "getitem":
        return _ends_with(node, lambda part: type(part) is int)
    return (node.op == "squeeze" and dimension(node) == -1) or _is_form(node, 2)


def _ends_with(node: Node, wanted: Callable[[Any], bool]) -> bool:
    """Return whether an index leaves all dimensions as they are, up to its last part."""
    *before, last = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    whole = all(part is Ellipsis or part == slice(None) for part in before)
    reached = len(before) + (last is not None) == len(node.inputs[0].shape)
    return whole and (Ellipsis in before or reached) and wanted(last)


def _forms(logits: Value, placing: set[Node]) -> tuple[tuple[Value, str], ...]:
    """What is asked where the classes are told by another number than -1, or their place in the recipe's call is."""
    rank = len(logits.shape)
    return () if rank > 2 and all(map(_says_last, placing)) else ((logits, f".dim() == {rank}"),)


def _says_last(node: Node) -> bool:
    if node.op == "getitem":
        return Ellipsis in node.args[1]
    return node.op not in _FORMS and node.argument(1, "dim") == -1


def gives_a_dtype(softmax: Node) -> bool:
    """Return whether it says what the result's dtype is, though that be the logits' own today."""
    return any(isinstance(each, torch.dtype) for each in (*softmax.args, *softmax.kwargs.values()))


def _is_form(node: Node, rank: int) -> bool:
    return node.op in _FORMS and len(node.inputs[0].shape) == rank


def _subtracted_from(picked: _Picked) -> Node | None:
    """The log-sum-exp of the logits that what was picked is subtracted from; ``picked`` becomes the difference."""
    for node in picked.output.users:
        if node.op != "sub" or len(node.args) != 2 or node.kwargs or node.args[1] is not picked.output:
            continue
        spread = node.args[0].producer if isinstance(node.args[0], Value) else None
        if spread is None or spread.op != "logsumexp" or spread.inputs[0] is not picked.rows:
            continue
        if spread.output.shape == picked.output.shape:
            picked.nodes.add(node)
            picked.output = node.output
            return spread
    return None


def _has_classes(rows: Value) -> bool:
    return len(rows.shape) > 1 and rows.dtype.is_floating_point
