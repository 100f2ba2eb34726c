"""What rules look at, and what they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradscope import ops
from gradscope.recording.graph import Node
from gradscope.tables import (
    Finding,
    LayerRow,
    Limits,
    LineRow,
    OpRow,
    OptimizerFact,
    ParameterFact,
    PlaceFact,
    RunData,
    SavedRow,
    Severity,
)
from gradscope.units import ns as time_text
from gradscope.units import percent
from gradscope.units import size as size_text


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts of one recorded step; empty where it was not recorded."""

    calls: Sequence[Node] = ()
    places: Sequence[PlaceFact] = ()
    parameters: Sequence[ParameterFact] = ()
    optimizers: Sequence[OptimizerFact] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # see gradscope.capture.environment
    classes: Mapping[str, str] = field(default_factory=dict)  # path -> class of torch's own it is or derives from
    recorded: bool = False
    graphs: int = 0  # so many more tensors with a graph behind them were alive after each of the last steps


@dataclass(frozen=True)
class Case:
    """One run, everything that is known of it."""

    run: RunData
    facts: StepFacts
    limits: Limits | None = None

    @cached_property
    def layers(self) -> dict[str, LayerRow]:
        """Return the layers by path."""
        return {row.path: row for row in self.run.layers}

    @cached_property
    def below(self) -> dict[str, list[LayerRow]]:
        """Return, by path, the layer and all below it."""
        found: defaultdict[str, list[LayerRow]] = defaultdict(list)
        for row in self.run.layers:
            path = row.path
            while path:
                found[path].append(row)
                path = path.rpartition(".")[0]
            found[""].append(row)
        return dict(found)

    @cached_property
    def lines(self) -> dict[str, LineRow]:
        """Return what is known of each line, by source, "model.py:12"."""
        return {f"{row.file}:{row.line}": row for row in self.run.lines}

    @cached_property
    def ops(self) -> dict[tuple[str | None, str], list[OpRow]]:
        """Return the operations by layer and phase."""
        found: defaultdict[tuple[str | None, str], list[OpRow]] = defaultdict(list)
        for row in self.run.ops:
            found[row.layer, row.phase].append(row)
        return dict(found)

    @cached_property
    def calls_of_line(self) -> dict[str, list[Node]]:
        """Return the recorded calls of each line, by source, "model.py:12"."""
        found: defaultdict[str, list[Node]] = defaultdict(list)
        for call in self.facts.calls:
            if call.source is not None:
                found[call.source].append(call)
        return dict(found)

    @property
    def saved(self) -> Sequence[SavedRow]:
        """Return what is kept for backward; none where memory was not measured."""
        return () if self.run.memory is None else self.run.memory.saved

    @property
    def step_ns(self) -> int:
        """Return the ns of the whole step."""
        return self.run.step.wall_ns

    @property
    def on_cuda(self) -> bool:
        """Check that the model ran on a GPU."""
        return str(self.run.environment.get("device", "cpu")).startswith("cuda")

    def call(self, index: int) -> Node:
        """Return a call by its index."""
        return self.facts.calls[index]

    def lines_ns(self, sources: Iterable[str]) -> int:
        """Return the forward and backward time of these lines, in one step."""
        rows = (self.lines.get(source) for source in set(sources))
        return sum(row.forward_ns + row.backward_ns for row in rows if row is not None)


@dataclass(frozen=True, slots=True)
class Floor:
    """What must be saved, in time or in memory, before a finding is worth a word.

    Attributes:
        ns, of_step: both must be reached: of a step, and as a share of it.
        bytes, of_peak: both must be reached: at the peak, and as a share of it.
    """

    ns: int = 100_000
    of_step: float = 0.005
    bytes: int = 1_000_000
    of_peak: float = 0.005

    def text(self) -> str:
        """The floor in words, as ``gradscope rules NAME`` shows it."""
        return (
            f"{time_text(self.ns)} and {percent(self.of_step)} of the step, "
            f"or {size_text(self.bytes)} and {percent(self.of_peak)} of the peak"
        )


@dataclass(frozen=True)
class Rule:
    """One reason for a slow or large step.

    Attributes:
        name: in kebab case, as ``--ignore`` takes it.
        title: one line for ``gradscope rules``.
        find: yields the findings of a case; savings are of one step.
        about: the docstring of the rule's file.
        floor: below it a saving is not said, and a finding of nothing else is left out.
        beyond_numbers: it says something that no saving tells, such as an overflow: kept with its own severity where
            its savings are below the floor.
        grows: its memory is that of one step and adds up over the steps, so that the peak of one is no bound.
        trades: it frees memory at the price of time: a hint, however much it frees.
        edits: its advice is to write a line in another way: left out where the line is an installed package's.
        of_times: an alarm that rests on measured times alone: not given where the steps of a run are unsteady.
    """

    name: str
    title: str
    find: Callable[[Case], Iterator[Finding]]
    about: str = ""
    floor: Floor = Floor()
    beyond_numbers: bool = False
    grows: bool = False
    trades: bool = False
    edits: bool = False
    of_times: bool = False


def share(ns: int, case: Case) -> float:
    """Return the share of the step that ``ns`` are."""
    return ns / max(case.step_ns, 1)


def severity_of(saving_ns: int | None, case: Case) -> Severity:
    """Judge the share of the step that would be saved: critical from 10 % on, a warning from 3 % on."""
    part = share(saving_ns or 0, case)
    return "critical" if part >= 0.10 else "warning" if part >= 0.03 else "info"


def by_source(places: Iterable[PlaceFact]) -> dict[tuple[str, str], list[PlaceFact]]:
    """Return the places of one recipe on one line: repeated blocks are one finding."""
    found: defaultdict[tuple[str, str], list[PlaceFact]] = defaultdict(list)
    for place in places:
        found[place.recipe, place.source].append(place)
    return dict(found)


def text_at(case: Case, source: str | None) -> str:
    """The line's text, as the lines' table has it."""
    row = case.lines.get(source) if source is not None else None
    return "" if row is None else row.text


def first(names: Sequence[str], count: int = 3) -> str:
    """Return some of many names: "a, b, c and 5 more"."""
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"


# Calls whose result is the memory they were given, unchanged.
SAME_MEMORY = ops.VIEWS | {"detach", "contiguous", "to"}


def replaced_calls(case: Case) -> set[int]:
    """Return the indices of calls that some recipe would replace: the finding of that recipe speaks of them."""
    places = (place for place in case.facts.places if place.supported and not place.idle)
    return {index for place in places for index in place.calls}


def layers_of(case: Case, call: Node) -> list[str]:
    """Paths of the layers that may have made the call: a call of torch's own module is known by that module alone."""
    if call.layer is None:
        return []
    if call.module is None:
        return [call.layer]
    return [call.layer, *(row.path for row in case.below.get(call.layer, ()) if row.path != call.layer)]


def changed_in_place(case: Case, since: int = 0) -> set[int]:
    """Return the storages that some call wrote to, or may have; what an optimizer does to parameters is left out.

    Args:
        since: index of the first call that counts.
    """
    found: set[int] = set()
    for call in case.facts.calls[since:]:
        given = {tensor.storage for tensor in call.inputs}
        if call.op == "setitem" or call.op not in SAME_MEMORY:
            made = [tensor for tensor in call.outputs if call.grad or tensor.parameter is None]
            found |= {tensor.storage for tensor in made if tensor.storage in given}
    return found


def layer_code(case: Case, path: str) -> str:
    """``model.get_submodule('encoder.0')``; "" where no name of Python's leads to it, as of a second Linear#2."""
    return _code(case, path, "get_submodule")


def parameter_code(case: Case, path: str) -> str:
    """``model.get_parameter('encoder.0.weight')``; "" where no name of Python's leads to it."""
    return _code(case, path, "get_parameter")


def models_of(case: Case, paths: Iterable[str]) -> list[str]:
    """The names of the models that these are in, each once; "" for one without a name of Python's."""
    return list(dict.fromkeys(_split(case, path)[0] for path in paths))


def below(case: Case, path: str) -> str:
    """The path as its model says it."""
    return _split(case, path)[1]


def _code(case: Case, path: str, getter: str) -> str:
    model, inner = _split(case, path)
    return f"{model}.{getter}({inner!r})" if model and inner else model


def _split(case: Case, path: str) -> tuple[str, str]:
    """The model's name and the path within it."""
    first, _, rest = path.partition(".")
    row = case.layers.get(first) if first else None
    if row is None or row.parent is not None:
        return "model", path
    return (first if first.isidentifier() else ""), rest
