"""The order of things: workload -> capture -> trace -> attribute -> diagnose -> report. Read this first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradscope import compat
from gradscope.about import LOOP, run_data, why_no_result, why_no_steps, with_failures
from gradscope.attribute.align_steps import assign
from gradscope.attribute.memory.by_layer import with_memory_of_layers, with_memory_of_lines
from gradscope.attribute.memory.result import MemoryResult, read_memory
from gradscope.attribute.result import Attribution, build_result
from gradscope.attribute.rows import in_other_threads
from gradscope.attribute.survey import Notes
from gradscope.capture.compiler_watch import COMPILED_GRAPHS
from gradscope.capture.guard import Guard
from gradscope.capture.memory import Surroundings
from gradscope.capture.model_steps import run_steps, seed_everything
from gradscope.capture.naming import ModuleNames
from gradscope.capture.result import Capture, SurveyStep
from gradscope.capture.session import Session
from gradscope.capture.state import preserved
from gradscope.capture.training import StepFinder, StopRun, was_stopped
from gradscope.diagnose.bounds import bounded
from gradscope.diagnose.case import Case
from gradscope.diagnose.engine import diagnose, every_rule
from gradscope.errors import NothingMeasuredError, Terminated
from gradscope.evidence import known_facts, with_recording
from gradscope.graphs import graphs_of
from gradscope.interrupts import is_interruption
from gradscope.limits import kept
from gradscope.process import room_for_files, stops_put_off
from gradscope.readings import (
    READING_MEMORY,
    READING_SURVEY,
    MemoryPassOnce,
    TimedTrace,
    read_survey_step,
    read_timed,
    source_text,
    traced_later,
)
from gradscope.recording.record import Recorder
from gradscope.report.report import Report
from gradscope.tables import (
    Limits,
    Options,
    Progress,
    RunData,
    WorkloadInfo,
    is_starved,
    is_unreliable,
)
from gradscope.trace.reader import TraceReader
from gradscope.workload import Batches, Script, Workload, import_path, resolve_device

if TYPE_CHECKING:
    from gradscope.patching.places import Found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave: a report, and the user's own error where their code raised one."""

    report: Report | None
    error: BaseException | None


def profile_workload(
    workload: Workload, options: Options, progress: Progress | None = None, found: Found | None = None
) -> Outcome:
    """Run the steps of a model (model mode); return what was measured, and the error of the user's code if any.

    Args:
        found: takes the recorded step and what was found in it, for who drops it.
    """
    compat.require()
    device = resolve_device(options.device, workload.model)
    optimizers = [] if workload.optimizer is None else [workload.optimizer]
    surroundings = Surroundings(models=lambda: (workload.model,), optimizers=optimizers)
    recorder = Recorder()
    session = Session(options, progress, surroundings, recorder, TraceReader())
    kind: Any = "given"
    error: BaseException | None = None
    process = os.getpid()
    with preserved(workload.model, workload.batch, workload.optimizer, device) as copies:
        surroundings.ignored = copies
        seed_everything(options.seed)
        try:
            batches = Batches(workload.batch, device, needed=session.total_steps)
            with session, import_path(workload.folder):
                kind = run_steps(workload, batches, session)
        except (Exception, KeyboardInterrupt, SystemExit, Terminated) as raised:
            error = raised
    about = WorkloadInfo(target=workload.target, mode="model", steps=options.steps, warmup=options.warmup, loss=kind)
    try:
        _leave_if_forked(process, error)
        return outcome_of(session.capture, about, {"": workload.model}, device, error, progress, recorder, found)
    finally:
        del error  # its traceback holds this frame, and the caller's above it: they would live until Python looks


def profile_script(script: Script, options: Options, progress: Progress | None = None) -> Outcome:
    """Run a script as ``__main__``, unedited, until enough steps were measured (script mode)."""
    compat.require()
    recorder = Recorder()
    session = Session(options, progress, recorder=recorder, reader=TraceReader())
    say = (progress or Progress()).say
    finder = StepFinder(session, run_to_end=options.run_to_end, say=say, guard=session.run.guard)
    error: BaseException | None = None
    seed_everything(options.seed)
    process, seconds = os.getpid(), _seconds_of_children()
    try:
        with session, finder.watching():
            script.run()
    except BaseException as raised:  # SystemExit and KeyboardInterrupt too: the caller decides what they mean
        error = raised
    _leave_if_forked(process, error)
    if error is not None and was_stopped(error):
        if not isinstance(error, StopRun):
            say(f"the script raised {type(error).__name__} while it was being stopped; the report is complete")
        error = None
    known = modules_in(script.namespace)
    about = WorkloadInfo(target=script.target, mode="script", steps=options.steps, warmup=options.warmup, loss=None)
    session.capture.cycle = finder.cycle
    session.capture.passed_over = finder.cycles.passed_over
    if finder.cycles.irregular:
        session.capture.notes.append(
            "the optimizers do not step in a regular order: a training step ends after the least "
            "frequent one has stepped, so steps may differ"
        )
    why = why_no_steps(script.target, session, finder, _seconds_of_children() - seconds)
    if error is None and why is not None:
        raise NothingMeasuredError(why)
    return outcome_of(session.capture, about, known, None, error, progress, recorder)


def _leave_if_forked(process: int, error: BaseException | None) -> None:
    """End a process that the user's code has forked as it would end alone: it reports nothing."""
    if os.getpid() != process:
        raise error if error is not None else SystemExit(0)


def _seconds_of_children() -> float:
    """Return the processor time, in seconds, of all processes that this one has started and waited for."""
    used = os.times()
    return used.children_user + used.children_system


def modules_in(namespace: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the script's modules by variable name."""
    # type(), not isinstance: that asks the object for its __class__, which may compute something, or raise.
    return {name: value for name, value in namespace.items() if issubclass(type(value), nn.Module) and name}


def outcome_of(
    capture: Capture,
    about: WorkloadInfo,
    known: Mapping[str, nn.Module],
    device: torch.device | None,
    error: BaseException | None,
    progress: Progress | None = None,
    recorder: Recorder | None = None,
    found: Found | None = None,
) -> Outcome:
    """Read what was measured into a report, and hand it on with the user's error.

    Raises:
        NothingMeasuredError: no step was measured, and nothing else says why.
    """
    timed = capture.timed
    if timed is None or timed.completed == 0:
        if error is not None:
            return Outcome(None, error)
        raise NothingMeasuredError(why_no_result(about.target or LOOP, capture))
    guard = Guard()
    try:
        with guard.over(_READING), room_for_files():
            return read(capture, about, known, device, error, progress, recorder, found)
    finally:
        capture.let_go()
    if error is not None:
        return Outcome(None, error)
    raise NothingMeasuredError(
        f"{about.target or LOOP} was measured, but gradscope cannot read its own recording: "
        f"{guard.failed[_READING]}.\nThis is a bug in gradscope: GRADSCOPE_DEBUG=1 shows where."
    )


_READING = "reading the measurements"  # under which the guard notes an error


def read(
    capture: Capture,
    about: WorkloadInfo,
    known: Mapping[str, nn.Module],
    device: torch.device | None = None,
    error: BaseException | None = None,
    progress: Progress | None = None,
    recorder: Recorder | None = None,
    found: Found | None = None,
) -> Outcome:
    """Read a finished capture. Its profilers' events are consumed.

    Who stops the program meanwhile has what was measured, without reasons and marked partial: the trace is read first.

    Args:
        about: what was run; steps and events are filled in from the capture.
        known: the modules that have a name, see :func:`gradscope.capture.naming.name_called`.
        device: where the model ran; None: where its parameters are.
        error: what ended the run, if it was an error.
        progress: told when the trace is read and how many events it has.
        recorder: of the recorded step, for the rules; it forgets it.
        found: takes that step and the places that were found in it; without it they are dropped.
    """
    progress = progress or Progress()
    run: RunData | None = None
    try:
        with stops_put_off():
            run, names = _read_run(capture, about, known, device, progress)
        progress.phase("running the rules")
        with Guard(capture.failed).over("running the rules"):
            run = _diagnosed(run, capture, names, recorder or Recorder(), found)
    except (KeyboardInterrupt, Terminated) as stopped:
        if run is None:  # stopped twice
            raise
        error = error or stopped
        run = replace(run, partial=True, notes=(*run.notes, "interrupted before the rules had run: no findings"))
    progress.done()
    return Outcome(Report(with_failures(run, capture)), error)


def _read_run(
    capture: Capture,
    about: WorkloadInfo,
    known: Mapping[str, nn.Module],
    device: torch.device | None,
    progress: Progress,
) -> tuple[RunData, ModuleNames]:
    """Read the trace, the survey and the memory pass; arguments as of :func:`read`."""
    progress.phase("reading the trace")
    trace = read_timed(capture, known, progress)
    # What a later pass noted is added to what was timed; where that fails, the times stand without it.
    guard = Guard(capture.failed)
    watch = capture.compiled
    graphs = partial(graphs_of, watch, trace.names)
    memory_pass = MemoryPassOnce(capture.memory, trace.names, trace.parents, guard, graphs)
    result = _timed_with_survey(capture, trace, memory_pass, guard)
    if result is None:
        capture.survey = None
        with guard.over(COMPILED_GRAPHS):
            result = _timed_result(trace, None, None, capture.compiled)
    if result is None:
        result = _timed_result(trace, None, None, compat.GraphWatch())
    memory = None
    with guard.over(READING_MEMORY):
        result, memory = _with_memory(result, capture, trace, memory_pass)
    return run_data(capture, about, trace, result, memory, device), trace.names


def _timed_with_survey(
    capture: Capture, trace: TimedTrace, memory_pass: MemoryPassOnce, guard: Guard
) -> Attribution | None:
    """Attribute the timed steps, with lines and FLOPs of the survey; None where that cannot be read."""
    with guard.over(READING_SURVEY):
        notes = read_survey_step(capture.survey, trace.names, trace.parents)
        if notes is not None and notes.matcher is not None and capture.survey is not None:
            lines = capture.survey.lines
            notes.matcher.learn(partial(memory_pass.steps, lines))
            notes.matcher.learn(partial(traced_later, capture.traced, trace.names, trace.parents, guard, lines))
        return _timed_result(trace, notes, capture.survey, capture.compiled)
    return None


def _timed_result(
    trace: TimedTrace, notes: Notes | None, survey: SurveyStep | None, watch: compat.GraphWatch
) -> Attribution:
    assigned = assign(trace.skeleton, trace.settling, notes, trace.passes, trace.timed.left_out)
    lines = survey.lines if survey is not None else []  # the steps of the memory pass may have added some
    compiled = graphs_of(watch, trace.names, lines)
    return build_result(
        assigned,
        trace.names.infos,
        lines,
        notes,
        source_text(lines),
        has_flops=survey is not None and survey.has_flops,
        reducers=trace.reducers,
        graphs=compiled,
        compiles=survey is not None and survey.compiles,
    )


def _with_memory(
    result: Attribution, capture: Capture, trace: TimedTrace, memory_pass: MemoryPassOnce
) -> tuple[Attribution, MemoryResult | None]:
    """Add what the memory pass measured to the tables, where there was one."""
    noted, infos = capture.memory, trace.names.infos
    if noted is None:
        return result, None
    given = memory_pass.input()  # which may add lines, of compiled graphs
    text = source_text(noted.lines)
    memory = read_memory(given, infos, text)
    result = replace(
        result,
        layers=with_memory_of_layers(result.layers, memory.layers),
        lines=with_memory_of_lines(result.lines, memory.lines, noted.lines, infos, text),
    )
    if unseen := in_other_threads(trace.skeleton, trace.passes.notes):
        noted.notes.append(
            f"{' and '.join(unseen)} also ran in other threads: torch does not record their "
            "allocations, so the memory figures omit them or do not know their layer"
        )
    return result, memory


def _diagnosed(run: RunData, capture: Capture, names: ModuleNames, recorder: Recorder, found: Found | None) -> RunData:
    """Add what bounds each layer and the rules' findings to ``run``; the recorded step goes to ``found``."""
    recording, recorder.recording = recorder.recording, None
    into = found
    if recording is not None:
        # Patterns, recipes and kernels are a third of gradscope: they are loaded when there is a recorded step to read.
        from gradscope.patching.places import Found

        into = Found() if found is None else found
        into.recording = recording
    try:
        return _with_findings(run, capture, names, recorder, into)
    finally:
        if found is None and into is not None:
            into.drop()


def _with_ceilings(environment: Mapping[str, Any], limits: Limits | None) -> Mapping[str, Any]:
    """Add the ceilings that the page draws the roof of: of matmuls in the model's dtype, and of memory."""
    if limits is None:
        return environment
    dtype = next((each for each in (str(environment.get("dtype")), "float32") if each in limits.flops), None)
    if dtype is None:
        return environment
    return {**environment, "limit_dtype": dtype, "limit_flops": limits.flops[dtype], "limit_bytes": limits.bytes}


def _with_findings(
    run: RunData, capture: Capture, names: ModuleNames, recorder: Recorder, found: Found | None
) -> RunData:
    """Add findings to ``run``. What goes wrong here becomes a note: what was measured stays."""
    facts = known_facts(capture, names)
    notes = []
    if recorder.overflowed:
        notes.append(
            f"rules that need the recorded torch calls were skipped: the step makes more than {recorder.MOST_CALLS:,}"
        )
    try:
        if found is not None and found.recording is not None:
            facts = with_recording(facts, names, found.recording, run.step.wall_ns, found)
    except Exception as error:  # a user's objects are behind it
        if is_interruption(error):
            raise
        notes.append(f"the recorded step could not be read: {type(error).__name__}: {error}")
    limits = kept(str(run.environment["device_name"]), int(run.environment["threads"]))
    try:
        environment = _with_ceilings(run.environment, None if is_unreliable(run.step) else limits)
        measured = None if is_unreliable(run.step) else limits  # times that are not its own come near no limit
        run = replace(run, layers=bounded(Case(run, facts, measured)), environment=environment)
    except Exception as error:
        if is_interruption(error):
            raise
        notes.append(f"the layers' limits are unknown: {type(error).__name__}: {error}")
    steady = not is_unreliable(run.step)
    if not steady:
        why = "waited too long for a core" if is_starved(run.step) else "vary too much"
        notes.append(f"the steps {why}, so no time-based findings, time savings or limits are given")
    findings, failed = diagnose(Case(run, facts, limits), capture.options.ignore, steady=steady)
    left_out = {rule.name for rule in every_rule() if rule.of_times and not steady} | set(capture.options.ignore)
    looked = len(every_rule()) - len(left_out) - len(failed)
    return replace(run, findings=tuple(findings), rules=looked, notes=(*run.notes, *notes, *failed))
