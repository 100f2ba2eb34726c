"""Where sums of gradients are from, which autograd adds for every value that is used more than once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gradscope.tables import NodeNote

_T = TypeVar("_T")


def with_owners(nodes: Mapping[str, NodeNote]) -> dict[str, NodeNote]:
    """``nodes`` with sums of gradients where the node that waits for the sum is from, as in eager.

    The engine makes them in no module, and torch leaves them the line of whatever ran before. A node that computes
    something reads the sum. That of an addition does not: it hands the sum on to both sides, where one may be added up
    in turn. So it lies in what is around all that reads the sum, or is added to it then. Where nothing reads it, a
    parameter's gradient say, it is of what is around that which is added up.
    """
    readers: dict[str, list[str]] = {}
    for name, node in nodes.items():
        for each in node.inputs:
            readers.setdefault(each, []).append(name)
    found = dict(nodes)
    for name in reversed(tuple(nodes)):  # what reads a node comes behind it
        node = nodes[name]
        if not node.is_sum:
            continue
        read_by = [each for each in readers.get(name, ()) if nodes[each].op and not nodes[each].forward]
        reading = [nodes[each] for each in read_by]
        if reading and all(each.is_sum for each in reading):  # a part of a larger sum
            whole = found[read_by[0]]
            found[name] = replace(node, modules=whole.modules, frames=whole.frames)
            continue
        beside = [_added_up(nodes, each, but=name) for each in read_by if nodes[each].is_sum]
        around = [each for each in (*reading, *itertools.chain(*beside)) if not each.is_sum]
        if not around:
            around = _added_up(nodes, name)
        frames = _shared([each.frames for each in around])
        found[name] = replace(
            node,
            modules=_shared([each.modules for each in around]),
            # In the function that all of these are called in, the line of the first.
            frames=around[0].frames[: len(frames) + 1] if around else (),
        )
    return found


def _added_up(nodes: Mapping[str, NodeNote], name: str, *, but: str = "") -> list[NodeNote]:
    """What a sum adds up, and the sums that it is of, but for one of these, in the order of the graph."""
    parts, left = set[str](), [name]
    while left:
        for each in nodes[left.pop()].inputs:
            if each in nodes and each != but and each not in parts:
                parts.add(each)
                if nodes[each].is_sum:
                    left.append(each)
    return [node for each, node in nodes.items() if each in parts and not node.is_sum]


def _shared(stacks: Sequence[tuple[_T, ...]]) -> tuple[_T, ...]:
    """What all of these begin with."""
    same = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*stacks, strict=False))
    return tuple(level[0] for level in same)
