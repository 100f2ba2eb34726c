"""Notes the graph of each backward pass of the timed steps, so that every AccumulateGrad has its own parameter.

Walking a graph takes some 2 µs a node. Where that is little beside the step every pass is walked. Elsewhere the first
pass of each kind is: passes are alike where the same modules were called in front of them and drew the same numbers. A
model that does the same in every step is walked in the settling step alone; one that changes is walked when it does. A
pass that runs inside of another is alike where also the pass before it is. Of passes that are alike the wiring may
differ still, ``z + (x if odd else y)``: :mod:`gradscope.attribute.passes` sees that by the sums that they made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradscope import markers
from gradscope.capture.backward import TensorHooks
from gradscope.capture.graphs import most_nodes, starts_of, walked
from gradscope.capture.modules import CallRecorder
from gradscope.capture.registry import Seen
from gradscope.capture.survey import parameter_marker
from gradscope.compat import TraceMarker
from gradscope.tables import GraphNode, PassGraph, PassNote
from gradscope.tensor_refs import TensorRef, tensor_ref

_NOT_NOTED = -1  # in the place of a graph
_MOST_NODES = 1_000_000  # of all graphs together: some 300 bytes each


@dataclass(slots=True)
class _AlikePasses:
    """Passes that are alike."""

    graph: int  # the last that was walked
    walk_ns: int  # what that took


class PassRecorder:
    """Notes every backward pass; told of the steps by :meth:`begin_step`.

    Attributes:
        spare_ns: what walking the graphs of passes that are alike may take in a step.
    """

    def __init__(self, calls: CallRecorder, hooks: TensorHooks | None = None) -> None:
        self.spare_ns = 0
        self.graphs: list[PassGraph] = []
        self.passes: list[PassNote] = []  # one a backward pass, in the order in which they began
        self.owners: list[tuple[int, ...]] = []  # of each parameter the labels of the modules that hold it
        self.leaves: Seen[torch.Tensor] = Seen()  # parameters that were reached
        self.most_nodes = 0  # that are looked at, where a pass had more
        self._calls = calls
        self._hooks = hooks or TensorHooks()
        self._from = 0
        self._before = 0  # how many calls had been opened when the last pass began
        self._known: dict[Any, _AlikePasses] = {}
        self._numbers: dict[PassGraph, int] = {}  # place of each in ``graphs``
        self._spent_ns = 0  # in this step
        self._nodes = 0
        self._seen: Seen[torch.Tensor] = Seen()
        self._parameters: dict[tuple[int, tuple[int, ...]], int] = {}  # of what was seen with these owners the index
        self._handles: list[Any] = []
        self._marked: dict[int, TensorRef] = {}  # parameters that mark themselves, by id

    def begin_step(self) -> None:
        """What is called from now on is of the next step."""
        self._from = self._calls.opened()
        self._spent_ns = 0

    @contextmanager
    def around(self, roots: Any) -> Iterator[None]:
        """Around one outermost backward pass."""
        with TraceMarker(markers.OWN + "0"):
            self._note(roots, nested=False)
        yield

    @contextmanager
    def inside(self, roots: Any) -> Iterator[None]:
        """Around one that runs inside of another."""
        with TraceMarker(markers.OWN + "0"):
            self._note(roots, nested=True)
        yield

    def forget(self) -> None:
        """Take the marks off the parameters."""
        self._marked.clear()
        while self._handles:
            self._handles.pop().remove()

    def _note(self, roots: Any, *, nested: bool) -> None:
        starts = starts_of(roots)
        numbers = [node._sequence_nr() for node in starts]
        base = max((number for number in numbers if number >= 0), default=-1)
        last = self.passes[-1] if nested and self.passes else None
        graph, own = _NOT_NOTED, False
        if last is None or last.graph != _NOT_NOTED:
            # Of the calls in front of the last pass its graph tells: a long step of many passes is looked at once.
            above = None if last is None else (last.graph, base - last.base)
            calls = self._calls.layout(self._from if last is None else self._before, base)
            key = (above, tuple(base - number for number in numbers), calls)
            kind = self._known.get(key)
            affordable = kind is None or self._spent_ns + kind.walk_ns <= self.spare_ns
            own = affordable and self._nodes < _MOST_NODES and (kind is None or kind.graph != _NOT_NOTED)
            if own:
                kind = self._walked(key, starts, base)
            graph = _NOT_NOTED if kind is None else kind.graph
        self._before = self._calls.opened()
        self.passes.append(PassNote(graph, base, nested, own))

    def _walked(self, key: Any, starts: list[Any], base: int) -> _AlikePasses:
        began = time.perf_counter_ns()
        graph = self._noted(starts, base)
        kind = self._known[key] = _AlikePasses(graph, time.perf_counter_ns() - began)
        self._spent_ns += kind.walk_ns
        return kind

    def _noted(self, starts: list[Any], base: int) -> int:
        """Index of the graph; where it is too deep to be walked, the parameters mark themselves."""
        order, whole = walked(starts)
        if not whole:
            self._nodes += len(order)
            self._mark_all()
            return _NOT_NOTED
        graph, leaves = self._graph(order, base)
        number = self._numbers.get(graph)
        if number is None:
            number = self._numbers[graph] = len(self.graphs)
            self._nodes += len(order)
            self.graphs.append(graph)
            self._mark_ambiguous(graph.nodes, leaves)
            self._mark_uncalled(leaves.values())
        return number

    def _mark_all(self) -> None:
        """Let every parameter of the modules that were called mark its AccumulateGrad."""
        if self.most_nodes:
            return
        self.most_nodes = most_nodes()
        self._mark_held(self._calls.registry.alive())

    def _mark_held(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for held in module._parameters.values():
                if held is not None and held.requires_grad and held.is_leaf and not self._is_marked(held):
                    mark = parameter_marker(self._parameter(held, reached=False))
                    self._handles.append(held.register_post_accumulate_grad_hook(mark))
                    self._marked[id(held)] = tensor_ref(held)

    def _is_marked(self, held: torch.Tensor) -> bool:
        reference = self._marked.get(id(held))
        return reference is not None and reference() is held

    def _mark_uncalled(self, leaves: Iterable[torch.Tensor]) -> None:
        """Where weights of modules that are not called are used, let those of all such modules mark themselves.

        Which of them a pass reaches no module call tells: experts whose weights a caller takes out, for example.
        """
        called, registry = self._calls.called(), self._calls.registry
        owners = [registry.owners_of(leaf) for leaf in leaves]
        if all(not labels or called.intersection(labels) for labels in owners):
            return
        self._mark_held(module for module in registry.alive() if registry.get(module) not in called)

    def _graph(self, order: list[Any], base: int) -> tuple[PassGraph, dict[int, torch.Tensor]]:
        """The graph, and its leaves by the number of their node."""
        numbers = {node: number for number, node in enumerate(order)}
        leaves: dict[int, torch.Tensor] = {}
        nodes = []
        for index, node in enumerate(order):
            below = node.next_functions
            variable = getattr(node, "variable", None) if not below else None
            if variable is None:
                edges = tuple((numbers.get(target, -1), number) for target, number in below)
                nodes.append(GraphNode(base - node._sequence_nr(), -1, edges))
            else:
                leaves[index] = variable
                nodes.append(GraphNode(-1, self._parameter(variable), ()))
        return PassGraph(tuple(nodes), tuple(node.name().rpartition("::")[2] for node in order)), leaves

    def _parameter(self, variable: torch.Tensor, *, reached: bool = True) -> int:
        owners = self._calls.registry.owners_of(variable)
        key = self._seen.number(variable), owners
        index = self._parameters.get(key)
        if index is None:
            index = self._parameters[key] = len(self.owners)
            self.owners.append(owners)
            self._hooks.adopt(variable)
        if reached:
            self.leaves.number(variable)
        return index

    def _mark_ambiguous(self, nodes: Sequence[GraphNode], leaves: dict[int, torch.Tensor]) -> None:
        """Where one node hands gradients to parameters of several layers, the engine's order among them is its own."""
        for node in nodes:
            below = {target for target, _ in node.edges if target in leaves}
            if len({self.owners[nodes[target].parameter] for target in below}) < 2:
                continue
            for target in below:
                mark = parameter_marker(nodes[target].parameter)
                self._handles.append(leaves[target].register_post_accumulate_grad_hook(mark))
