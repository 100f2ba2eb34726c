"""What the passes of a run noted, in the terms that attribution has for it: rows of the layer table, lines, blocks."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from gradscope.attribute.linematch import Traced
from gradscope.attribute.memory.result import MemoryResult, read_memory
from gradscope.attribute.memory.step import MemoryInput
from gradscope.attribute.nodes import OUTSIDE
from gradscope.attribute.passes import Passes
from gradscope.attribute.rows import Skeleton, reached_roots, read_skeleton
from gradscope.attribute.survey import Notes, SurveyInput, read_survey, traced_steps
from gradscope.capture.guard import Guard
from gradscope.capture.memory import MemoryPass
from gradscope.capture.modules import MODULE_CALLS
from gradscope.capture.naming import ModuleNames, name_called, roots_of_models
from gradscope.capture.phases import SETTLING_STEPS
from gradscope.capture.phases.lines import Lines
from gradscope.capture.registry import local_path
from gradscope.capture.result import Capture, SurveyStep, TimedSteps, TracedSteps
from gradscope.tables import (
    CompiledGraph,
    IntColumn,
    LineInfo,
    Progress,
    ReducerInfo,
    SpanTable,
)
from gradscope.trace.reader import TraceReader, joined

# Under these the guard notes an error.
READING_SURVEY, READING_MEMORY = "reading the survey", "reading the memory pass"


@dataclass(frozen=True, slots=True)
class TimedTrace:
    """The timed steps as they were traced, with the layers that were met in them."""

    timed: TimedSteps
    names: ModuleNames
    parents: Sequence[int]  # of each row of the layer table the nearest parent that is called itself
    skeleton: Skeleton
    passes: Passes
    events: int
    stretches: int  # in which the steps were profiled
    reducers: tuple[ReducerInfo, ...] = ()  # the models of DistributedDataParallel

    @property
    def settling(self) -> int:
        """Return steps at the start that do not count; of a run that ended in the first, none."""
        return min(SETTLING_STEPS, self.timed.completed - 1)

    @property
    def measured(self) -> int:
        """Return steps that count."""
        return self.timed.completed - self.settling - len(self.timed.left_out)


def read_timed(capture: Capture, known: Mapping[str, nn.Module], progress: Progress) -> TimedTrace:
    """Read what the timed steps left behind. Their profiler's events are consumed.

    Args:
        known: the modules that have a name, see :func:`gradscope.capture.naming.name_called`.
        progress: told how many events there are.
    """
    timed = capture.timed
    assert timed is not None
    if timed.profiler is not None:
        reader = TraceReader(device=torch.cuda.is_initialized())
        timed.tables.append(reader.timed(timed.profiler, calls=MODULE_CALLS not in capture.failed))
        timed.profiler = None  # its events are read: the memory goes back before the analysis needs some
    stretches = len(timed.tables)
    table = joined(timed.tables)
    timed.tables.clear()
    progress.phase(f"attributing {len(table):,} events")
    spans = timed.recorder.table()
    roots = roots_of_models(capture.registry, timed.recorder.roots, reached_roots(table, spans), known)
    names = name_called(capture.registry, roots, known)
    parents = names.calling_parents([names.rows[label] for label in timed.recorder.called() if label >= 0])
    rows, outside = _rows_of_calls(capture, names, set(timed.recorder.roots))
    skeleton = read_skeleton(table, _relabelled(spans, rows), parents, outside, _paths(names))
    return TimedTrace(
        timed, names, parents, skeleton, _passes(timed, names), len(table), stretches, _reducers(timed, names)
    )


def _reducers(timed: TimedSteps, names: ModuleNames) -> tuple[ReducerInfo, ...]:
    """The models of DDP, with layers by row."""
    rows = [*names.rows, OUTSIDE]
    return tuple(
        replace(
            info,
            path=names.infos[rows[label]].path if rows[label] >= 0 else "",
            buckets=tuple(tuple((max(rows[owner], OUTSIDE), size) for owner, size in each) for each in info.buckets),
        )
        for label, info in timed.reducers
    )


def _paths(names: ModuleNames) -> list[str]:
    return [info.path for info in names.infos]


def _rows_of_calls(capture: Capture, names: ModuleNames, roots: set[int]) -> tuple[list[int], tuple[str, ...]]:
    """Return row of each place, or -2 - k for what is called but is no layer; and the classes of these."""
    rows = list(names.rows)
    classes: dict[str, int] = {}
    for label in roots:
        if label >= 0 and rows[label] < 0:
            rows[label] = -2 - classes.setdefault(capture.registry.places[label].class_name, len(classes))
    return rows, tuple(classes)


def _passes(timed: TimedSteps, names: ModuleNames) -> Passes:
    """Return the graphs of the timed backward passes, with the rows that own their accumulators."""
    rows = [*names.rows, OUTSIDE]
    owners = [next((rows[label] for label in labels if rows[label] >= 0), OUTSIDE) for labels in timed.passes.owners]
    return Passes(timed.passes.graphs, timed.passes.passes, owners)


def read_survey_step(survey: SurveyStep | None, names: ModuleNames, parents: Sequence[int]) -> Notes | None:
    """Read what the survey step left behind; None where there was none. Its profiler's events are consumed."""
    if survey is None:
        return None
    if survey.table is None:
        reader = TraceReader(device=torch.cuda.is_initialized())
        survey.table = reader.surveyed(survey.profiler, shapes=survey.has_shapes, flops=survey.has_flops)
    table, survey.table, survey.profiler = survey.table, None, None
    calls = _relabelled(survey.recorder.table(), names.rows)
    return read_survey(
        SurveyInput(
            read_skeleton(table, calls, parents, paths=_paths(names)),
            survey.line_spans,
            survey.graphs,
            names.parameters(survey.parameters.by_number(), survey.owners),
        )
    )


def read_memory_pass(found: MemoryPass, names: ModuleNames, parents: Sequence[int]) -> MemoryResult:
    """Read what the memory pass left behind. Its profiler's events are consumed.

    Args:
        names: the rows of the layer table.
        parents: of each row the nearest parent that is called itself, see :meth:`ModuleNames.calling_parents`.
    """
    return read_memory(_memory_input(found, names, parents), names.infos, source_text(found.lines))


class MemoryPassOnce:
    """The memory pass, whose trace is read once, by whoever needs it first: the lines of the timed steps, or memory."""

    def __init__(
        self,
        found: MemoryPass | None,
        names: ModuleNames,
        parents: Sequence[int],
        guard: Guard,
        graphs: Callable[[list[LineInfo]], dict[int, CompiledGraph]] | None = None,
    ) -> None:
        self._found, self._names, self._parents, self._guard, self._graphs = found, names, parents, guard, graphs
        self._input: MemoryInput | None = None

    def input(self) -> MemoryInput:
        """Return the input of the memory's attribution; only where there was a memory pass."""
        assert self._found is not None
        if self._input is None:
            found = _memory_input(self._found, self._names, self._parents)
            self._input = found if self._graphs is None else replace(found, graphs=self._graphs(self._found.lines))
        return self._input

    def steps(self, lines: list[LineInfo]) -> list[Traced]:
        """Return steps of the memory pass, with lines by their place in ``lines``, which gets those that it lacks."""
        found: list[Traced] = []
        if self._found is not None and self._found.lines:
            with self._guard.over(READING_MEMORY):
                found = list(traced_steps(self.input().survey, _merged(self._found.lines, lines)))
        return found


def traced_later(
    traced: TracedSteps | None,
    names: ModuleNames,
    parents: Sequence[int],
    guard: Guard,
    lines: list[LineInfo],
) -> list[Traced]:
    """The further steps that were traced, with lines by their place in ``lines``, which gets those that it lacks."""
    found: list[Traced] = []
    if traced is not None and traced.lines:
        with guard.over(Lines.name):
            table = traced.table
            if table is None:
                table = TraceReader().surveyed(traced.profiler, shapes=False, flops=False)
            traced.table = traced.profiler = None
            calls = _relabelled(traced.recorder.table(), names.rows)
            skeleton = read_skeleton(table, calls, parents, paths=_paths(names))
            found = list(traced_steps(SurveyInput(skeleton, traced.line_spans, (), ()), _merged(traced.lines, lines)))
    return found


def _merged(own: Sequence[LineInfo], lines: list[LineInfo]) -> IntColumn:
    """Return the place of each of ``own`` in ``lines``, to which those are added that are not there yet."""
    known = set(lines)
    lines += [info for info in own if info not in known]
    place = {info: number for number, info in enumerate(lines)}
    return np.array([place[info] for info in own], np.int64)


def _memory_input(found: MemoryPass, names: ModuleNames, parents: Sequence[int]) -> MemoryInput:
    """Return the blocks and notes of the memory pass. Its profiler's events are consumed."""
    table = TraceReader().memory(found.profiler) if found.table is None else found.table
    found.profiler = found.table = None
    calls = _relabelled(found.recorder.table(), names.rows)
    skeleton = read_skeleton(table, calls, parents, paths=_paths(names))
    labels = [*names.labels(found.modules.by_number()), -1]
    for number, place in found.places.items():
        labels[number] = names.rows[place] if labels[number] < 0 else labels[number]
    figures = found.figures
    return MemoryInput(
        survey=SurveyInput(
            skeleton,
            found.line_spans,
            found.graphs,
            names.parameters(found.parameters.by_number(), found.owners),
        ),
        device=found.device,
        sightings=[replace(sighting, layer=labels[sighting.layer]) for sighting in found.sightings],
        saved=found.saved,
        lines=found.lines,
        census=[each.sizes for each in found.census],
        device_used=figures.used if figures else None,
        device_reserved=figures.reserved if figures else None,
        device_total=figures.total if figures else None,
    )


def _relabelled(spans: SpanTable, rows: Sequence[int]) -> SpanTable:
    """Return spans labelled by row of the layer table instead of by order of first call."""
    mapping = np.array([*rows, -1], np.int64)
    return replace(spans, label=mapping[spans.label])


def source_text(lines: Sequence[LineInfo]) -> dict[tuple[str, int], tuple[str, str]]:
    """Return the text of each file and line, with the file's name for the report."""
    return {
        (info.file, info.line): (local_path(info.file), linecache.getline(info.file, info.line).strip())
        for info in lines
    }
