"""Where nodes are from that a pass of Inductor's has put in the place of others.

Torch tells it of what replaces the last node of a pattern alone: of attention that was written by hand, and that
Inductor computes another way, neither the matmuls nor the softmax are in a module any more.

Source: torch/_inductor/pattern_matcher.py (``ReplacementPatternEntry.replace_with_graph``), as of torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from gradscope.compat.inductor import PATTERNS
from gradscope.compat.inductor.work import has_formula, operation
from gradscope.compat.private import replaced

_FROM = "gradscope_from"  # in what torch keeps of a node, and copies with it: the same of the one that was there
_FORWARD_STACK, _STACK, _TRACE = "fwd_nn_module_stack", "nn_module_stack", "stack_trace"
_TOLD = (_FORWARD_STACK, _STACK, _TRACE, "seq_nr")
_TAG = "partitioner_tag"


def told_of(node: Any) -> Mapping[str, Any]:
    """What torch tells of a node, or of that in whose place it is."""
    meta: Mapping[str, Any] = node.meta
    instead = meta.get(_FROM)
    return meta if instead is None else {**meta, **{key: told for key, told in instead.items() if not meta.get(key)}}


@contextmanager
def watching_replacements(wanted: Callable[[], bool], failed: Callable[[Exception], None]) -> Iterator[None]:
    """Have nodes that replace others keep where these are from, until the block is left.

    Args:
        wanted: whether what is compiled now is noted at all.
        failed: called with an error of the noting; the pass goes on.
    """
    entry: Any = sys.modules[PATTERNS].ReplacementPatternEntry
    original = entry.replace_with_graph
    tells = original.__annotations__.get("return") not in {None, "None"}  # it returns what it has added

    @functools.wraps(original)
    def replace_with_graph(match: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if not wanted():
            return original(match, graph, *args, **kwargs)
        before = frozenset[Any]()
        old = list[tuple[Any, Mapping[str, Any]]]()
        try:
            before = before if tells else frozenset(graph.nodes)
            old += [(operation(each), dict(told_of(each))) for each in sorted(match.nodes)]  # in the graph's order
        except Exception as error:
            failed(error)
        made = original(match, graph, *args, **kwargs)
        try:
            _give(old, made if tells else [each for each in graph.nodes if each not in before])
        except Exception as error:
            failed(error)
        return made

    with replaced(entry, "replace_with_graph", staticmethod(replace_with_graph)):
        yield


def _give(old: Sequence[tuple[Any, Mapping[str, Any]]], new: Sequence[Any]) -> None:
    """Note of each node in ``new``, of which torch tells nothing, which of ``old`` it is in the place of.

    Where there are as many that compute the same, or that are matmuls, forward and backward apart, in their order;
    otherwise what all of them are in.
    """
    known = [(target, told) for target, told in old if _is_told(told)]
    if not known:
        return
    before, behind = defaultdict[Any, list[Mapping[str, Any]]](list), defaultdict[Any, list[Any]](list)
    for target, told in known:
        before[_kind(target), told.get(_TAG)].append(told)
    for node in new:
        if node.op == "call_function":
            behind[_kind(operation(node)), node.meta.get(_TAG)].append(node)
    around = _around(known)
    for kind, nodes in behind.items():
        same = before[kind]
        for place, node in enumerate(nodes):
            if not _is_told(node.meta):
                told = same[place] if len(same) == len(nodes) else around
                node.meta[_FROM] = {key: told[key] for key in _TOLD if told.get(key) is not None}


def _is_told(told: Mapping[str, Any]) -> bool:
    return any(told.get(key) for key in (_FORWARD_STACK, _STACK, _TRACE))


def _kind(target: Any) -> Any:
    """What is taken for the same computation: matmuls are another's where what is around them is."""
    return True if has_formula(target) else getattr(target, "overloadpacket", target)


def _around(old: Sequence[tuple[Any, Mapping[str, Any]]]) -> Mapping[str, Any]:
    """The modules that all are in, and the line of the first matmul, or of the first."""
    stacks = [list((told.get(_FORWARD_STACK) or told.get(_STACK) or {}).items()) for _, told in old]
    alike = takewhile(lambda keys: len(set(keys)) == 1, zip(*[dict(stack) for stack in stacks], strict=False))
    first = next((told for target, told in old if has_formula(target)), old[0][1])
    return {**first, _FORWARD_STACK: None, _STACK: dict(stacks[0][: len(list(alike))])}
