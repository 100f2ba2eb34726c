"""From what a run left behind to a report: trace -> attribute -> diagnose -> report."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

import gradscope
from gradscope import versions
from gradscope.attribute.carry import assign
from gradscope.attribute.linematch import Traced
from gradscope.attribute.memory.amounts import with_memory_of_layers, with_memory_of_lines
from gradscope.attribute.memory.result import MemoryResult, read_memory
from gradscope.attribute.memory.step import MemoryInput
from gradscope.attribute.nodes import OUTSIDE
from gradscope.attribute.passes import Passes
from gradscope.attribute.result import Result, build_result
from gradscope.attribute.rows import Skeleton, reached_roots, read_skeleton
from gradscope.attribute.survey import Notes, SurveyInput, read_survey, traced_steps
from gradscope.attribute.threads import in_other_threads
from gradscope.capture.budget import LINES, MEMORY_PASS, left_out_note
from gradscope.capture.environment import describe_environment
from gradscope.capture.guard import Guard
from gradscope.capture.left import Capture, SurveyStep, TimedSteps, TracedSteps
from gradscope.capture.memory import MemoryPass
from gradscope.capture.modules import MODULE_CALLS
from gradscope.capture.naming import ModuleNames, name_called, roots_of_models
from gradscope.capture.paths import local_path
from gradscope.capture.phases import SETTLING_STEPS
from gradscope.capture.phases.lines import Lines
from gradscope.capture.phases.memory import Memory
from gradscope.capture.phases.survey import Survey
from gradscope.diagnosis import diagnosed
from gradscope.patching.record import Recorder
from gradscope.report.report import Report
from gradscope.tables import IntColumn, LineInfo, Progress, RunData, SpanTable, WorkloadInfo
from gradscope.trace.join import joined
from gradscope.trace.reader import TraceReader
from gradscope.tree import parameters_of


def analyse(
    capture: Capture,
    about: WorkloadInfo,
    known: Mapping[str, nn.Module],
    device: torch.device | None = None,
    progress: Progress | None = None,
    recorder: Recorder | None = None,
) -> Report:
    """Read a finished capture. Its profilers' events are consumed.

    Args:
        about: what was run; steps and events are filled in from the capture.
        known: the modules that have a name, see :func:`gradscope.capture.naming.name_modules`.
        device: where the model ran; None: where its parameters are.
        progress: told when the trace is read and how many events it has.
        recorder: of the recorded step, for the rules; it forgets it.
    """
    timed = capture.timed
    assert timed is not None
    progress = progress or Progress()
    progress.phase("reading the trace")
    on_cuda = torch.cuda.is_initialized()
    if timed.profiler is not None:
        timed.tables.append(TraceReader(device=on_cuda).timed(timed.profiler, calls=MODULE_CALLS not in capture.failed))
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
    skeleton = read_skeleton(table, _relabelled(spans, rows), parents, outside)
    # What a later pass noted is added to what was timed; where that fails, the times stand without it.
    guard = Guard(capture.failed)
    passes = _passes(timed, names)
    given = _MemoryPassOnce(capture.memory, names, parents, guard)
    result = None
    with guard.over(_SURVEY):
        notes = _read_survey(capture.survey, names, parents, on_cuda)
        if notes is not None and notes.matcher is not None and capture.survey is not None:
            notes.matcher.learn(partial(given.steps, capture.survey.lines))
            notes.matcher.learn(partial(_traced_later, capture.traced, names, parents, guard, capture.survey.lines))
        result = _timed_result(skeleton, timed, names, passes, notes, capture.survey)
    if result is None:
        capture.survey = None
        result = _timed_result(skeleton, timed, names, passes, None, None)
    memory = None
    if capture.memory is not None:
        with guard.over(_MEMORY):
            found = read_memory(given.input(), names.infos, _source_text(capture.memory.lines))
            result = _with_memory(result, found, capture.memory, names)
            memory = found
            if unseen := in_other_threads(skeleton, passes.notes):
                capture.memory.notes.append(
                    f"{' and '.join(unseen)} ran in other threads too: torch does not record what they allocate, so "
                    "the figures of memory leave it out, or do not know its layer"
                )
    measured = timed.completed - _settling(timed) - len(timed.interrupted)
    about = replace(
        about,
        steps=measured,
        steps_left_out=len(timed.interrupted),
        model=", ".join(type(top).__name__ for top in names.tops if any(True for _ in parameters_of(top))),
        parameters=_count_parameters(names.tops),
        events=len(table),
        batch=next((text for root, text in capture.batches.items() if text and names.rows[root] >= 0), None),
        optimizer_steps=_optimizer_steps(capture, names),
    )
    incomplete = measured < capture.options.steps or (capture.survey is None and LINES not in capture.left_out)
    incomplete = incomplete or (memory is None and capture.options.memory and MEMORY_PASS not in capture.left_out)
    if timed.completed <= SETTLING_STEPS:
        capture.notes.append(
            "the one step that was measured is the profiler's first, which takes longer than those after it"
        )
    if stretches > 1:
        capture.notes.append(
            f"the profiled steps were taken in {stretches} stretches, an unprofiled step between each two: "
            f"one makes {len(table) // timed.completed:,} rows of trace"
        )
    if timed.passes.most_nodes:
        capture.notes.append(
            f"a backward pass runs more than {timed.passes.most_nodes:,} nodes, the most that can be looked at: whose "
            "its gradient sums are is not known, nor all that its nodes keep"
        )
    if capture.left_out:
        capture.notes.append(left_out_note(capture.left_out, capture.rows, capture.options.memory_budget))
    run = _run_data(capture, about, names, device, result, memory, partial=incomplete)
    progress.phase("looking for reasons")
    with guard.over("looking for reasons"):
        run = diagnosed(run, capture, names, recorder or Recorder())
    progress.done()
    return Report(_with_failures(run, capture))


_SURVEY, _MEMORY = "reading the survey", "reading the memory pass"  # under which the guard notes an error


def _settling(timed: TimedSteps) -> int:
    """Steps at the start that do not count; of a run that ended in the first, none."""
    return min(SETTLING_STEPS, timed.completed - 1)


def _timed_result(
    skeleton: Skeleton,
    timed: TimedSteps,
    names: ModuleNames,
    passes: Passes,
    notes: Notes | None,
    survey: SurveyStep | None,
) -> Result:
    """The timed steps, with what the survey noted where there was one."""
    skip = _settling(timed)
    assigned = assign(skeleton, skip, notes, passes, timed.interrupted)
    lines = survey.lines if survey is not None else []  # the steps of the memory pass may have added some
    return build_result(
        assigned,
        names.infos,
        lines,
        notes,
        _source_text(lines),
        has_flops=survey is not None and survey.has_flops,
    )


def _with_memory(result: Result, memory: MemoryResult, found: MemoryPass, names: ModuleNames) -> Result:
    text = _source_text(found.lines)
    return replace(
        result,
        layers=with_memory_of_layers(result.layers, memory.layers),
        lines=with_memory_of_lines(result.lines, memory.lines, found.lines, names.infos, text),
    )


def _with_failures(run: RunData, capture: Capture) -> RunData:
    """Say what of gradscope's own failed, whenever that was."""
    notes = [
        f"gradscope failed at {part} ({text}): what depends on it is missing or incomplete"
        for part, text in capture.failed.items()
    ]
    return replace(run, notes=(*run.notes, *notes))


def _run_data(
    capture: Capture,
    about: WorkloadInfo,
    names: ModuleNames,
    device: torch.device | None,
    result: Result,
    memory: MemoryResult | None,
    *,
    partial: bool,
) -> RunData:
    memory_notes = capture.memory.notes if capture.memory is not None else []
    notes = [*versions.untried(torch.__version__), *capture.notes, *memory_notes, *result.notes]
    if about.optimizer_steps:
        parts = ", ".join(f"{count} of {name}" for name, count in about.optimizer_steps.items())
        notes.append(f"a step holds {sum(about.optimizer_steps.values())} optimizer steps: {parts}")
    known_reasons = capture.failed.keys() | capture.left_out
    if capture.survey is None and not known_reasons & {_SURVEY, Survey.name, MODULE_CALLS, LINES}:
        notes.append(f"the run ended before the survey step: no source lines and no FLOPs{_needed(capture)}")
    elif (
        memory is None
        and capture.options.memory
        and not known_reasons & {_MEMORY, Memory.name, MODULE_CALLS, MEMORY_PASS}
    ):
        notes.append(f"the run ended before the steps that measure memory{_needed(capture)}")
    if capture.given_way:
        notes.append(
            f"the program's own torch.profiler ran in {capture.given_way} of its {capture.steps_done} steps, "
            "which gradscope did not measure"
        )
    if about.loss == "mean of outputs":
        notes.append("no loss was given: the backward pass starts from the mean of the floating outputs")
    step = result.step if capture.timed is None else replace(result.step, waited_ns=capture.timed.waited_ns)
    if capture.unprofiled_ns:
        unprofiled = sorted(capture.unprofiled_ns)[len(capture.unprofiled_ns) // 2]
        step = replace(step, unprofiled_wall_ns=unprofiled, overhead=step.spread["wall"].median_ns / max(unprofiled, 1))
    parameters = [parameter for top in names.tops for parameter in parameters_of(top)]
    dtypes = {parameter.dtype for parameter in parameters}
    where = device or _device_of(parameters)
    return RunData(
        gradscope=gradscope.__version__,
        partial=partial,
        environment=describe_environment(where, dtypes.pop() if len(dtypes) == 1 else None),
        workload=about,
        step=step,
        ledger=result.ledger,
        layers=result.layers,
        lines=result.lines,
        ops=result.ops,
        kernels=result.kernels,
        memory=memory.info if memory is not None else None,
        notes=tuple(notes),
    )


def _device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Where the parameters lie; those without storage stand for what is passed to ``functional_call``, or offloaded."""
    return next((each.device for each in parameters if not each.is_meta), torch.device("cpu"))


def _needed(capture: Capture) -> str:
    """How long a run must be for all that was asked for."""
    passed = capture.passed_over
    return f" (a whole report takes {passed + capture.steps_needed} steps; there were {passed + capture.steps_done})"


def _rows_of_calls(capture: Capture, names: ModuleNames, roots: set[int]) -> tuple[list[int], tuple[str, ...]]:
    """Row of each place, or -2 - k for what is called but is no layer; and the classes of these."""
    rows = list(names.rows)
    classes: dict[str, int] = {}
    for label in roots:
        if label >= 0 and rows[label] < 0:
            rows[label] = -2 - classes.setdefault(capture.registry.places[label].class_name, len(classes))
    return rows, tuple(classes)


def _optimizer_steps(capture: Capture, names: ModuleNames) -> dict[str, int] | None:
    """How often each of several optimizers steps, by the layer that holds all that it optimizes, or by its class."""
    inside = {
        names.infos[names.index[id(module)]].path: {id(parameter) for parameter in parameters_of(module)}
        for module in names.modules
    }
    known = set().union(*inside.values())
    found: dict[str, int] = {}
    for each in capture.cycle:
        own = each.parameters & known
        wanted = name = next((path for path, held in inside.items() if path and own and held == own), each.class_name)
        number = 2
        while name in found:
            name, number = f"{wanted}#{number}", number + 1
        found[name] = each.steps
    return found or None


def _passes(timed: TimedSteps, names: ModuleNames) -> Passes:
    rows = [*names.rows, OUTSIDE]
    owners = [next((rows[label] for label in labels if rows[label] >= 0), OUTSIDE) for labels in timed.passes.owners]
    return Passes(timed.passes.graphs, timed.passes.passes, owners)


def _read_survey(survey: SurveyStep | None, names: ModuleNames, parents: Sequence[int], on_cuda: bool) -> Notes | None:
    if survey is None:
        return None
    if survey.table is None:
        reader = TraceReader(device=on_cuda)
        survey.table = reader.surveyed(survey.profiler, shapes=survey.has_shapes, flops=survey.has_flops)
    table, survey.table, survey.profiler = survey.table, None, None
    calls = _relabelled(survey.recorder.table(), names.rows)
    return read_survey(
        SurveyInput(
            read_skeleton(table, calls, parents),
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
    return read_memory(_memory_input(found, names, parents), names.infos, _source_text(found.lines))


class _MemoryPassOnce:
    """The memory pass, whose trace is read once, by whoever needs it first: the lines of the timed steps, or memory."""

    def __init__(self, found: MemoryPass | None, names: ModuleNames, parents: Sequence[int], guard: Guard) -> None:
        self._found, self._names, self._parents, self._guard = found, names, parents, guard
        self._input: MemoryInput | None = None

    def input(self) -> MemoryInput:
        """What is to be read; only where there was a memory pass."""
        assert self._found is not None
        if self._input is None:
            self._input = _memory_input(self._found, self._names, self._parents)
        return self._input

    def steps(self, lines: list[LineInfo]) -> list[Traced]:
        """Its steps, with lines by their place in ``lines``, to which those are added that are not there yet."""
        found: list[Traced] = []
        if self._found is not None and self._found.lines:
            with self._guard.over(_MEMORY):
                found = list(traced_steps(self.input().survey, _merged(self._found.lines, lines)))
        return found


def _traced_later(
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
            skeleton = read_skeleton(table, _relabelled(traced.recorder.table(), names.rows), parents)
            found = list(traced_steps(SurveyInput(skeleton, traced.line_spans, (), ()), _merged(traced.lines, lines)))
    return found


def _merged(own: Sequence[LineInfo], lines: list[LineInfo]) -> IntColumn:
    """The place of each of ``own`` in ``lines``, to which those are added that are not there yet."""
    known = set(lines)
    lines += [info for info in own if info not in known]
    place = {info: number for number, info in enumerate(lines)}
    return np.array([place[info] for info in own], np.int64)


def _memory_input(found: MemoryPass, names: ModuleNames, parents: Sequence[int]) -> MemoryInput:
    table = TraceReader().memory(found.profiler) if found.table is None else found.table
    found.profiler = found.table = None
    calls = _relabelled(found.recorder.table(), names.rows)
    skeleton = read_skeleton(table, calls, parents)
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
    """Spans labelled by row of the layer table instead of by order of first call."""
    mapping = np.array([*rows, -1], np.int64)
    return replace(spans, label=mapping[spans.label])


def _source_text(lines: Sequence[LineInfo]) -> dict[tuple[str, int], tuple[str, str]]:
    return {
        (info.file, info.line): (local_path(info.file), linecache.getline(info.file, info.line).strip())
        for info in lines
    }


def _count_parameters(tops: Sequence[nn.Module]) -> int:
    unique = {id(parameter): parameter.numel() for top in tops for parameter in parameters_of(top)}
    return sum(unique.values())
