"""From what a run left behind to a report: trace -> attribute -> diagnose -> report."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import gradscope
from gradscope import versions
from gradscope.attribute.carry import assign
from gradscope.attribute.memory.amounts import with_memory_of_layers, with_memory_of_lines
from gradscope.attribute.memory.result import MemoryResult, read_memory
from gradscope.attribute.memory.step import MemoryInput
from gradscope.attribute.result import Result, build_result
from gradscope.attribute.rows import read_skeleton
from gradscope.attribute.survey import Notes, SurveyInput, read_survey
from gradscope.capture.budget import LINES, MEMORY_PASS, left_out_note
from gradscope.capture.environment import describe_environment
from gradscope.capture.left import Capture, SurveyStep
from gradscope.capture.memory import MemoryPass
from gradscope.capture.naming import ModuleNames, name_modules, shown_path
from gradscope.capture.phases import SETTLING_STEPS
from gradscope.diagnosis import diagnosed
from gradscope.patching.record import Recorder
from gradscope.report.report import Report
from gradscope.tables import LineInfo, Progress, RunData, SpanTable, WorkloadInfo
from gradscope.trace.join import joined
from gradscope.trace.reader import TraceReader


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
    names = name_modules(timed.recorder.called_roots(), known)
    on_cuda = torch.cuda.is_initialized()
    if timed.profiler is not None:
        timed.tables.append(TraceReader(device=on_cuda).timed(timed.profiler))
        timed.profiler = None  # its events are read: the memory goes back before the analysis needs some
    stretches = len(timed.tables)
    table = joined(timed.tables)
    timed.tables.clear()
    progress.phase(f"attributing {len(table):,} events")
    called = names.labels(timed.recorder.modules.by_number())
    parents = names.calling_parents(called)
    skeleton = read_skeleton(table, _relabelled(timed.recorder.table(), called), parents)
    notes = _read_survey(capture.survey, names, parents, on_cuda)
    skip = min(SETTLING_STEPS, timed.completed - 1)
    lines = capture.survey.lines if capture.survey is not None else []
    result = build_result(
        assign(skeleton, skip, notes),
        names.infos,
        lines,
        notes,
        _source_text(lines),
        has_flops=capture.survey is not None and capture.survey.has_flops,
    )
    memory = None
    if capture.memory is not None:
        memory = read_memory_pass(capture.memory, names, parents)
        text = _source_text(capture.memory.lines)
        result = replace(
            result,
            layers=with_memory_of_layers(result.layers, memory.layers),
            lines=with_memory_of_lines(result.lines, memory.lines, capture.memory.lines, names.infos, text),
        )
    measured = timed.completed - skip
    about = replace(
        about,
        steps=measured,
        model=", ".join(type(top).__name__ for top in names.tops if any(True for _ in top.parameters())),
        parameters=_count_parameters(names.tops),
        events=len(table),
        batch=capture.batch,
    )
    partial = measured < capture.options.steps or (capture.survey is None and LINES not in capture.left_out)
    partial = partial or (memory is None and capture.options.memory and MEMORY_PASS not in capture.left_out)
    if stretches > 1:
        capture.notes.append(
            f"the profiled steps were taken in {stretches} stretches, an unprofiled step between each two: "
            f"one makes {len(table) // timed.completed:,} rows of trace"
        )
    if capture.left_out:
        capture.notes.append(left_out_note(capture.left_out, capture.rows, capture.options.memory_budget))
    run = _run_data(capture, about, names, device, result, memory, partial=partial)
    progress.phase("looking for reasons")
    run = diagnosed(run, capture, names, recorder or Recorder())
    progress.done()
    return Report(run)


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
    if capture.survey is None and LINES not in capture.left_out:
        notes.append(
            "the run ended before the survey step: no source lines and no FLOPs; parameters and gradient sums are "
            "charged to the layer whose node ran before them"
        )
    elif memory is None and capture.options.memory and MEMORY_PASS not in capture.left_out:
        notes.append("the run ended before the steps that measure memory")
    if capture.given_way:
        notes.append(
            f"the program's own torch.profiler ran in {capture.given_way} of its {capture.steps_done} steps, "
            "which gradscope did not measure"
        )
    notes += [
        f"gradscope failed at {part} ({text}): what depends on it is missing" for part, text in capture.failed.items()
    ]
    if about.loss == "mean of outputs":
        notes.append("no loss was given: the backward pass starts from the mean of the floating outputs")
    step = result.step
    if capture.unprofiled_ns:
        unprofiled = sorted(capture.unprofiled_ns)[len(capture.unprofiled_ns) // 2]
        step = replace(step, unprofiled_wall_ns=unprofiled, overhead=step.spread["wall"].median_ns / max(unprofiled, 1))
    parameters = [parameter for top in names.tops for parameter in top.parameters()]
    dtypes = {parameter.dtype for parameter in parameters}
    where = device or (parameters[0].device if parameters else torch.device("cpu"))
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


def _read_survey(survey: SurveyStep | None, names: ModuleNames, parents: Sequence[int], on_cuda: bool) -> Notes | None:
    if survey is None:
        return None
    if survey.table is None:
        reader = TraceReader(device=on_cuda)
        survey.table = reader.surveyed(survey.profiler, shapes=survey.has_shapes, flops=survey.has_flops)
    table, survey.table, survey.profiler = survey.table, None, None
    calls = _relabelled(survey.recorder.table(), names.labels(survey.recorder.modules.by_number()))
    return read_survey(
        SurveyInput(
            read_skeleton(table, calls, parents),
            survey.line_spans,
            survey.graphs,
            names.parameters(survey.parameters.by_number()),
        )
    )


def read_memory_pass(found: MemoryPass, names: ModuleNames, parents: Sequence[int]) -> MemoryResult:
    """Read what the memory pass left behind. Its profiler's events are consumed.

    Args:
        names: the rows of the layer table.
        parents: of each row the nearest parent that is called itself, see :meth:`ModuleNames.calling_parents`.
    """
    table = TraceReader().memory(found.profiler)
    found.profiler = None
    calls = _relabelled(found.recorder.table(), names.labels(found.recorder.modules.by_number()))
    skeleton = read_skeleton(table, calls, parents)
    labels = [*names.labels(found.modules.by_number()), -1]
    figures = found.figures
    given = MemoryInput(
        survey=SurveyInput(skeleton, found.line_spans, found.graphs, names.parameters(found.parameters.by_number())),
        device=found.device,
        sightings=[replace(sighting, layer=labels[sighting.layer]) for sighting in found.sightings],
        saved=found.saved,
        lines=found.lines,
        census=found.census,
        device_used=figures.used if figures else None,
        device_reserved=figures.reserved if figures else None,
        device_total=figures.total if figures else None,
    )
    return read_memory(given, names.infos, _source_text(found.lines))


def _relabelled(spans: SpanTable, rows: Sequence[int]) -> SpanTable:
    """Spans labelled by row of the layer table instead of by order of first call."""
    mapping = np.array([*rows, -1], np.int64)
    return SpanTable(mapping[spans.label], spans.low, spans.high)


def _source_text(lines: Sequence[LineInfo]) -> dict[tuple[str, int], tuple[str, str]]:
    return {
        (info.file, info.line): (shown_path(info.file), linecache.getline(info.file, info.line).strip())
        for info in lines
    }


def _count_parameters(tops: Sequence[nn.Module]) -> int:
    unique = {id(parameter): parameter.numel() for top in tops for parameter in top.parameters()}
    return sum(unique.values())
