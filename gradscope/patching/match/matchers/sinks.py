"""Sinks: a number a head that is joined to the scores as one more column, and dropped after the softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gradscope.ops import COPIES
from gradscope.patching.match.graph import cast_source, dimension, is_view, replayed
from gradscope.patching.match.match import Of
from gradscope.patching.match.products import leads_to_product
from gradscope.recording.graph import Node, Value

_WHOLE = (Ellipsis, slice(None))


@dataclass(frozen=True, eq=False)
class Sinks:
    """The column, as the recipe takes it."""

    piece: Of  # [heads]
    nodes: frozenset[Node]  # that make a column of it


def without_last(node: Node) -> Value | None:
    """Return what ``node`` takes all columns but the last of, however many they are: ``weights[..., :-1]``."""
    if node.op != "getitem" or len(node.inputs) != 1 or not isinstance(node.args[1], tuple):
        return None
    source, (*before, last) = node.inputs[0], node.args[1]
    if not all(any(part is each or part == each for each in _WHOLE) for part in before) or not isinstance(last, slice):
        return None
    first = last.start is None and last.step is None
    return source if first and node.output.shape == (*source.shape[:-1], source.shape[-1] - 1) else None


def unshifted(value: Value) -> tuple[Value, set[Node]]:
    """Return what stands before casts and before row maxima are taken off, and these calls."""
    nodes: set[Node] = set()
    while (node := value.producer) is not None:
        source = cast_source(value) or (node.inputs[0] if node.op in COPIES else None)
        if source is None:
            made = _largest(node)
            if made is None:
                break
            source, nodes = node.inputs[0], nodes | made
        nodes.add(node)
        value = source
    return value, nodes


def _largest(node: Node) -> set[Node] | None:
    """The calls that find the largest of each row that ``node`` subtracts from it; None where it does not."""
    if node.op != "sub" or node.kwargs or len(node.inputs) != 2 or node.changed:
        return None
    scores, largest = node.inputs
    nodes = set()
    if largest.producer is not None and largest.producer.op == "detach":
        nodes.add(largest.producer)
        largest = largest.producer.inputs[0]
    made = largest.producer
    if made is None or made.op not in {"max", "amax"} or made.outputs[0] is not largest or made.inputs != (scores,):
        return None
    is_row = dimension(made) == -1 and made.argument(2, "keepdim", False) is True
    return nodes | {made} if is_row else None


def column_of(node: Node | None) -> tuple[Value, Value] | None:
    """The scores and the column that ``node`` joins to them as the last; None where it does not."""
    if node is None or node.op != "cat" or len(node.inputs) != 2:
        return None
    scores, column = node.inputs
    last = node.argument(1, "dim", 0) in (-1, len(scores.shape) - 1)
    return (scores, column) if last and column.shape[-1] == 1 and leads_to_product(scores) else None


def sinks_of(column: Value) -> Sinks | None:
    """The sinks of which a column [batch, heads, queries, 1] has each head's in every row; None where it has not."""
    if len(column.shape) != 4 or column.shape[1] < 2:  # of a single head a number of a sample or query looks alike
        return None
    heads, value, nodes = torch.arange(column.shape[1]), column, set[Node]()
    while True:
        held = len(value.shape) == 1 or isinstance(value.tensor(), nn.Parameter)
        if held and value.shape.count(1) == len(value.shape) - 1 and len(heads) in value.shape:
            shown = replayed(column, value, heads.view(value.shape))
            if shown is None or not torch.equal(shown, heads[:, None, None].expand(column.shape)):
                return None
            return Sinks(Of(value, "sinks", "" if len(value.shape) == 1 else ".flatten()"), frozenset(nodes))
        node = value.producer
        if node is None or not (is_view(node) or (cast_source(value) is not None and len(node.inputs) == 1)):
            return None
        nodes.add(node)
        value = node.inputs[0]
