"""What the steps of a run left behind, before any of it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from gradscope.capture.memory import MemoryPass
from gradscope.capture.modules import CallRecorder
from gradscope.capture.passes import PassRecorder
from gradscope.capture.registry import ModuleRegistry, Seen
from gradscope.capture.storages import Census
from gradscope.compat import GraphWatch
from gradscope.tables import (
    EventTable,
    GraphNode,
    LineInfo,
    OptimizerFact,
    Options,
    ReducerInfo,
    SpanTable,
    TakenStep,
)


@dataclass
class TimedSteps:
    """What the profiled steps left behind."""

    profiler: Any  # None once its rows are in ``tables``
    recorder: CallRecorder
    passes: PassRecorder
    completed: int = 0  # steps that ended, the settling ones included
    left_out: frozenset[int] = frozenset()  # numbers of steps that do not count, see capture/system.py
    compiling: int = 0  # how many of them compiled something
    compiled: int = 0  # how many that count did
    taken: Sequence[TakenStep] = ()  # all but the settling one
    waited_ns: int | None = None  # for a core, in the mean of the other steps; None where the system does not tell
    tables: list[EventTable] = field(default_factory=list)  # one a stretch that was read while the run went on
    last_steps: int = 0  # that the last profiler saw
    reducers: tuple[tuple[int, ReducerInfo], ...] = ()  # with the label of each model; layers are labels, too


@dataclass
class SurveyStep:
    """What the survey left behind."""

    profiler: Any  # None once its rows are in ``table``
    recorder: CallRecorder
    line_spans: SpanTable
    lines: list[LineInfo]
    graphs: list[tuple[GraphNode, ...]]
    parameters: Seen[torch.Tensor]
    owners: Sequence[tuple[int, ...]]  # of each of them the labels of the modules that held it
    has_flops: bool
    has_shapes: bool = True
    compiles: bool = False  # the program does: inside of its functions operations are not counted one by one
    table: EventTable | None = None


class StepsOfOptimizer(NamedTuple):
    """How often one of several optimizers steps in a training step."""

    class_name: str
    parameters: frozenset[int]  # ids of those that it holds
    steps: int


@dataclass
class TracedSteps:
    """What further steps left behind that were traced by line, since steps differ."""

    profiler: Any  # None once its rows are in ``table``
    recorder: CallRecorder
    line_spans: SpanTable
    lines: list[LineInfo]
    table: EventTable | None = None


@dataclass
class Capture:
    """Everything that a run left behind, before any of it is read."""

    options: Options
    registry: ModuleRegistry = field(default_factory=ModuleRegistry)
    modules: list[nn.Module] = field(default_factory=list)  # those of the registry that were alive at the end
    timed: TimedSteps | None = None
    survey: SurveyStep | None = None
    memory: MemoryPass | None = None
    traced: TracedSteps | None = None
    steps_done: int = 0  # of all phases
    passed_over: int = 0  # steps before those, while it was found out where a step ends
    paused: bool = False  # something ran between steps that is left out
    steps_cut: int = 0  # steps that something of that kind ran inside of
    steps_needed: int = 0  # of all phases, for a whole report
    unprofiled_ns: list[int] = field(default_factory=list)  # wall time of each unprofiled step
    unprofiled_compiling_ns: list[int] = field(default_factory=list)  # of those in which something was compiled
    notes: list[str] = field(default_factory=list)
    cycle: list[StepsOfOptimizer] = field(default_factory=list)  # of a training step; empty where there is one
    failed: dict[str, str] = field(default_factory=dict)  # parts of gradscope's own that failed, see guard.py
    given_way: int = 0  # steps in which the user's own profiler ran
    ranks: tuple[int, int] | None = None  # rank and number of ranks of the process group, while steps ran
    captured: int = 0  # backward passes that were recorded into CUDA graphs
    passes_compiled: int = 0  # backward passes of compiled autograd
    left_out: list[str] = field(default_factory=list)  # of steps of many operations, see budget.py
    rows: float = 0.0  # of a timed trace that a step makes, where that led to it
    batches: dict[int, str] = field(default_factory=dict)  # label of a root -> what it was first given in the survey
    # See torch_flags.py, switches.py, loading.py, sampling.py and faults.py.
    settings: dict[str, Any] = field(default_factory=dict)
    optimizers: list[OptimizerFact] = field(default_factory=list)
    compiled: GraphWatch = field(default_factory=GraphWatch)  # what Inductor compiled while the run went on
    census: list[Census] = field(default_factory=list)  # see census.py; of steps before the memory pass
    with_gradient: frozenset[int] = frozenset()  # ids of the parameters that had a gradient after it
    optimized: frozenset[int] = frozenset()  # ids of the parameters that the optimizers hold
    with_state: frozenset[int] = frozenset()  # of those that one has a momentum of, say: they had a gradient once

    def hold(self) -> None:
        """Keep the user's objects that are alive, now that nothing is measured any more: the report names them."""
        self.modules = self.modules or self.registry.alive()
        for seen in self._seen():
            seen.hold()

    def let_go(self) -> None:
        """Hold nothing of the user's any more: the report is made."""
        self.modules = []
        for seen in self._seen():
            seen.clear()

    def _seen(self) -> Iterator[Seen[Any]]:
        yield from (part.parameters for part in (self.survey, self.memory) if part is not None)
        if self.memory is not None:
            yield self.memory.modules
