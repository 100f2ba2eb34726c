"""The graphs that Inductor has compiled, and what each ran with."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from gradscope import markers
from gradscope.compat.private import dispatch_depth, graph_task_id
from gradscope.compat.profilers import without_rows
from gradscope.interrupts import IgnoringErrors
from gradscope.process import objects_of
from gradscope.tables import TANGENTS, GraphNote, GraphRun
from gradscope.tensor_refs import TensorRef, tensor_ref


def _gone() -> None:
    return None


_LOOKS = 4  # at gradients that were zero; more would cost each step


class GraphWatch:
    """The graphs that Inductor compiles, and what they are run with while a profiler runs.

    A run writes the row ``## Call CompiledFxGraph <marker><number> ##`` into the trace: its place in :attr:`runs`.
    """

    def __init__(self) -> None:
        self.graphs: list[GraphNote] = []
        self.runs: list[GraphRun] = []  # each once
        self.first: dict[int, tuple[int, ...]] = {}  # of each graph the parameters of its first run, by number
        self.parameters: list[TensorRef] = []  # that graphs were run with, by number
        # Of what was together when a graph was run with it first, what ``owners_of`` has answered of each then.
        self.owners: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self.places: dict[int, tuple[int, ...]] = {}  # of each graph the inputs that are parameters
        # Of each graph the modules that it is of, by the ids that they had then, and what ``label_of`` has answered.
        self.modules: dict[int, dict[int, weakref.ref[torch.nn.Module]]] = {}
        self.labels: dict[int, dict[int, int]] = {}
        self.owners_of: Callable[[torch.Tensor], tuple[int, ...]] = lambda _: ()  # labels of modules that hold it now
        self.label_of: Callable[[int], int | None] = lambda _: None  # of the living module with that id
        # The frame of the program's that this thread is in; None where nobody can tell.
        self.frame: Callable[[], tuple[str, int, str] | None] = lambda: None
        self.has_run = False  # a graph has, also one that was compiled before
        self.unknown_has_run = False  # such a graph has run while a profiler did
        self.told: Callable[[Sequence[torch.Tensor]], Any] | None = None  # of the parameters of a run that is new
        self.around: Callable[[], AbstractContextManager[None]] | None = None  # each run, in place of a bare one
        self.reads: Callable[[int, Sequence[Any]], None] | None = None  # told of each run what it is run with
        self._known: dict[GraphRun, int] = {}
        self._numbers: dict[int, int] = {}  # of a parameter that lives, by its id
        self._living: dict[int, weakref.ref[torch.nn.Module]] = {}  # modules, by id
        self._without_lines = set[int]()  # graphs with nodes that are from none: torch's own modules call torch's
        self._looks: Counter[int] = Counter()  # of each run beyond the first

    def add(self, note: GraphNote) -> int:
        """A graph has been compiled; its number."""
        self.graphs.append(note)
        number = len(self.graphs) - 1
        self.modules[number] = self._modules({each.module for node in note.nodes.values() for each in node.modules})
        self._look_for_modules(number)
        nodes = note.nodes.values()
        if not any(node.frames for node in nodes) or any(node.modules and not node.frames for node in nodes):
            self._without_lines.add(number)
        return number

    def _modules(self, wanted: Collection[int]) -> dict[int, weakref.ref[torch.nn.Module]]:
        """The modules that have these ids now: later others may have them."""
        if any(self._living.get(each, _gone)() is None for each in wanted if each >= 0):
            self._living = {id(each): weakref.ref(each) for each in objects_of(torch.nn.Module)}
        return {each: self._living[each] for each in wanted if each in self._living}

    def name(self, number: int, inputs: Sequence[Any], *, profiled: bool) -> str:
        """What the row is to be called of this run of a graph; empty where a profiler writes none."""
        if number not in self.first:  # it has just been compiled, for these
            self.places[number] = tuple(i for i, each in enumerate(inputs) if isinstance(each, torch.nn.Parameter))
            parameters = [inputs[place] for place in self.places[number]]
            self.first[number] = tuple(map(self._number, parameters))
            self._note_owners(self.first[number], parameters)
        return f"{markers.GRAPH}{self.run(number, inputs)}" if profiled else ""

    def run(self, number: int, inputs: Sequence[Any]) -> int:
        """The number of a run of that graph."""
        parameters = [each for each in inputs if isinstance(each, torch.nn.Parameter)]
        sizes = tuple(each for each in inputs if type(each) is int)
        called_from = self.frame() if number in self._without_lines and graph_task_id() < 0 else None
        ran = GraphRun(number, tuple(map(self._number, parameters)), sizes, called_from)
        if ran not in self._known:
            self._known[ran] = len(self.runs)
            self.runs.append(replace(ran, zeros=_zeros(self.graphs[number].inputs, inputs) or ()))
            if self.told is not None and parameters:
                self.told(parameters)
            self._note_owners(ran.parameters, parameters)
            self._look_for_modules(number)
        else:
            self._look_again(self._known[ran], inputs)
        if self.reads is not None:
            self.reads(self._known[ran], inputs)
        return self._known[ran]

    def _number(self, parameter: torch.Tensor) -> int:
        """Not its id, which the next may have once it is gone, nor its address: an update by hand may change that."""
        number = self._numbers.get(id(parameter), -1)
        if number < 0 or self.parameters[number]() is not parameter:
            number = self._numbers[id(parameter)] = len(self.parameters)
            self.parameters.append(tensor_ref(parameter))
        return number

    def _note_owners(self, numbers: tuple[int, ...], parameters: Sequence[torch.Tensor]) -> None:
        """Note what holds these now: later it may be gone, or hold others."""
        if not all(self.owners.get(numbers, ((),))):
            self.owners[numbers] = tuple(map(self.owners_of, parameters))

    def _look_for_modules(self, number: int) -> None:
        """Note which modules a graph is of, while they live: the run may end behind a function whose they are."""
        labels = self.labels.setdefault(number, {})
        for each, reference in self.modules.get(number, {}).items():
            if each not in labels and reference() is not None and (label := self.label_of(each)) is not None:
                labels[each] = label

    def layers(self, numbers: tuple[int, ...], by_parameter: Mapping[int, int], rows: Sequence[int]) -> tuple[int, ...]:
        """Of parameters, by number, the row of the layer that held each when a graph was run with them; -1 for none.

        Args:
            by_parameter: the rows of those that modules hold now, by id.
            rows: of each label, -1 for one without.
        """
        found = []
        for number, labels in zip(numbers, self.owners.get(numbers, ((),) * len(numbers)), strict=True):
            held = [rows[label] for label in labels if label < len(rows) and rows[label] >= 0]
            parameter = self.parameters[number]()
            now = -1 if parameter is None else by_parameter.get(id(parameter), -1)
            found.append(min(held, default=now))  # of several the first
        return tuple(found)

    def _look_again(self, place: int, inputs: Sequence[Any]) -> None:
        """A value that another pass uses, or another step, is not unused."""
        ran = self.runs[place]
        if ran.zeros and self._looks[place] < _LOOKS:
            still = _zeros(self.graphs[ran.graph].inputs, inputs)
            if still is not None:
                self._looks[place] += 1
                self.runs[place] = replace(ran, zeros=tuple(name for name in ran.zeros if name in still))


def _zeros(names: Sequence[str], inputs: Sequence[Any]) -> tuple[str, ...] | None:
    """Gradients that are all zero, of what a graph is run with: of values that it returned and nobody used.

    None where they cannot be looked at now, below a mode of the program's say.

    Of plain tensors: another kind's answer might have to come from other ranks. No mode of the program's sees this.
    """
    if dispatch_depth():
        return None
    with IgnoringErrors(), torch.no_grad(), torch._C.DisableTorchFunction(), without_rows():
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return tuple(
                name
                for name, value in zip(names, inputs, strict=False)
                if name.startswith(TANGENTS) and type(value) is torch.Tensor and not value.any()
            )
    return None  # a device records, or a value has no storage
