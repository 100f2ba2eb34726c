"""Bytes and floating-point operations of a graph's nodes, also of sizes that are known once it runs alone.

Source: torch/utils/flop_counter.py (the formulas); torch/_functorch/partitioners.py (``functionalize_rng_ops``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from gradscope.compat.flops import flop_formulas

# What torch puts around an operation of random numbers, attention with dropout say, that a checkpoint runs again with
# the same ones: where the operation is among the arguments.
_WITH_STATE = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}


def operation(node: Any) -> Any:
    """What a node computes: where torch calls an operation by another one, the operation."""
    return node.args[_WITH_STATE[node.target.__name__]] if has_state(node) else node.target


def has_state(node: Any) -> bool:
    """Check that a node is an operation with the state of its random numbers around."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _WITH_STATE


def bytes_of(value: Any) -> int:
    """Bytes of what a node makes; of sizes that are not fixed as far as torch has seen them."""
    if isinstance(value, (tuple, list)):
        return sum(map(bytes_of, value))
    if not hasattr(value, "element_size"):
        return 0
    return math.prod(map(seen, value.shape)) * int(value.element_size())


def seen(size: Any) -> int:
    """A number that may not be fixed, as far as torch has seen it; 0 where it has not."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 0


def flops(node: Any) -> int:
    """Floating-point operations by torch's own formulas; 0 for what these do not know, -1 where a size is not known."""
    work = work_of(node)
    if work is None:
        return 0
    try:
        return work({})
    except _UnknownSizeError:
        return -1


class _UnknownSizeError(Exception):
    """Torch finds a size out while the graph runs: how many elements are not zero, say."""


def work_of(node: Any) -> Callable[[Mapping[Any, int]], int] | None:
    """Floating-point operations of a node by the sizes that are not fixed; None for what torch has no formula for.

    Of a size that is not given it counts what torch has seen.
    """
    formula = _formula(operation(node))
    if formula is None:
        return None
    given, named, result = node.args, dict(node.kwargs), node.meta.get("val")
    if has_state(node):
        name = node.target.__name__
        given = given[_WITH_STATE[name] + 1 :]
        named.pop("rng_state", None)
        if name == "run_and_save_rng_state" and result is not None:
            result = result[1]

    def shapes(value: Any) -> Any:
        return _Shape(tuple(value.shape))

    def made(node: Any) -> Any:
        return tree_map_only(torch.Tensor, shapes, node.meta.get("val"))

    (args, kwargs), made_by = map_arg((given, named), made), tree_map_only(torch.Tensor, shapes, result)

    def count(sizes: Mapping[Any, int]) -> int:
        def sized(shape: _Shape) -> torch.Tensor:
            return torch.empty([_size(each, sizes) for each in shape.sizes], device="meta")

        mine = tree_map_only(_Shape, sized, (args, kwargs, made_by))
        return int(formula(*mine[0], **mine[1], out_val=mine[2]))

    return count


def has_formula(target: Any) -> bool:
    """Check that torch can tell the floating-point operations of an operation."""
    return _formula(target) is not None


def _formula(target: Any) -> Callable[..., int] | None:
    return flop_formulas().get(getattr(target, "overloadpacket", target))


class _Shape:
    """Of a tensor."""

    def __init__(self, sizes: tuple[Any, ...]) -> None:
        self.sizes = sizes


def _size(size: Any, sizes: Mapping[Any, int]) -> int:
    """A size where those that are not fixed are these."""
    if isinstance(size, int):
        return size
    if sizes:
        try:
            return int(size.node.expr.xreplace(sizes))
        except (TypeError, ValueError):  # sympy's, of what is no number: a size that is of none of these
            raise _UnknownSizeError from None
    if not size.node.has_hint():
        raise _UnknownSizeError
    return seen(size)


def flops_at(graph: Any) -> Callable[[Sequence[int]], Mapping[str, int] | None] | None:
    """The floating-point operations of a graph's nodes for its runs with these sizes; None: all are fixed."""
    inputs = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
    wanted = [each for each in inputs if isinstance(each, (int, torch.SymInt))]
    if not any(isinstance(each, torch.SymInt) for each in wanted):
        return None
    symbols = [each.node.expr if isinstance(each, torch.SymInt) else None for each in wanted]
    works = {node.name: work for node in graph.graph.nodes if (work := work_of(node)) is not None}

    def count(sizes: Sequence[int]) -> Mapping[str, int] | None:
        given = {symbol: size for symbol, size in zip(symbols, sizes, strict=True) if symbol is not None}
        try:
            return {name: work(given) for name, work in works.items()}
        except _UnknownSizeError:
            return None

    return count
