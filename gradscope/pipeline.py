"""The order of things: workload -> capture -> trace -> attribute -> diagnose -> report. Read this first."""

from __future__ import annotations

import linecache
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

import gradscope
from gradscope import compat
from gradscope.attribute.carry import assign
from gradscope.attribute.memory.amounts import with_memory_of_layers, with_memory_of_lines
from gradscope.attribute.memory.result import MemoryResult, read_memory
from gradscope.attribute.memory.step import MemoryInput
from gradscope.attribute.result import Result, build_result
from gradscope.attribute.rows import read_skeleton
from gradscope.attribute.survey import Notes, SurveyInput, read_survey
from gradscope.capture.environment import describe_environment
from gradscope.capture.memory import MemoryPass, Surroundings
from gradscope.capture.model_steps import run_steps, seed_everything
from gradscope.capture.naming import ModuleNames, name_modules, shown_path
from gradscope.capture.session import SETTLING_STEPS, Capture, Session, SurveyStep
from gradscope.capture.state import preserved
from gradscope.capture.training import StepFinder, StopRun
from gradscope.diagnose.engine import require_known
from gradscope.diagnosis import diagnosed
from gradscope.errors import NothingMeasuredError
from gradscope.patching.record import Recorder
from gradscope.report.report import Report
from gradscope.tables import LineInfo, Options, Progress, RunData, SpanTable, WorkloadInfo
from gradscope.trace.events import read_trace
from gradscope.trace.memory import read_memory_trace
from gradscope.workload import Batches, Script, Workload, import_path, resolve_device


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave: a report, and the user's own error where their code raised one."""

    report: Report | None
    error: BaseException | None


def profile(
    model: nn.Module | Workload,
    batch: Any = None,
    loss: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int = 5,
    warmup: int = 3,
    device: str = "auto",
    seed: int | None = None,
    lines: bool = True,
    memory: bool = True,
    ignore: Collection[str] = (),
) -> Report:
    """Measure training steps of ``model`` and say where the backward pass goes.

    Args:
        model: an ``nn.Module``, or a :class:`Workload` that holds everything.
        batch: a tensor (``model(batch)``), a tuple (``model(*batch)``), a dict (``model(**batch)``), or an iterator
            of these.
        loss: ``loss(output, batch)`` -> scalar tensor. Without it the output itself, ``output.loss``, the one scalar
            with a gradient in it, or else the mean of its floating tensors; the report says which.
        optimizer: stepped at the end of each step if given; parameters and its state are restored afterwards.
        steps: measured steps.
        warmup: steps before anything is measured.
        device: "cpu", "cuda", or "auto": where the model is, or CUDA where there is one.
        seed: for ``torch.manual_seed`` before the first step.
        lines: also measure by source line.
        memory: also measure memory, in two more steps.
        ignore: names of rules whose findings are left out, see ``gradscope rules``.

    Returns:
        A :class:`Report`. The model, its gradients, its buffers, the optimizer and the random state are as before.

    Raises:
        WorkloadError: the model, batch and loss do not make a training step.
        UsageError: ``ignore`` names a rule that there is not.
        NothingMeasuredError: no step could be measured.
        Exception: whatever the model raises, with its own traceback.
    """
    workload = model if isinstance(model, Workload) else Workload(model, batch, loss=loss, optimizer=optimizer)
    require_known(ignore)
    options = Options(
        steps=steps, warmup=warmup, device=device, seed=seed, lines=lines, memory=memory, ignore=tuple(ignore)
    )
    outcome = profile_workload(workload, options)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.report is not None
    return outcome.report


def profile_workload(workload: Workload, options: Options, progress: Progress | None = None) -> Outcome:
    """Model mode: gradscope runs the steps. The error of the user's code is returned, beside what was measured."""
    compat.require()
    device = resolve_device(options.device, workload.model)
    optimizers = [] if workload.optimizer is None else [workload.optimizer]
    surroundings = Surroundings(models=lambda: (workload.model,), optimizers=optimizers)
    recorder = Recorder()
    session = Session(options, progress, surroundings, recorder)
    kind: Any = "given"
    error: BaseException | None = None
    with preserved(workload.model, workload.batch, workload.optimizer, device) as copies:
        surroundings.ignored = copies
        seed_everything(options.seed)
        try:
            batches = Batches(workload.batch, device, needed=session.total_steps)
            with session, import_path(workload.folder):
                kind = run_steps(workload, batches, session)
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
    about = WorkloadInfo(target=workload.target, mode="model", steps=options.steps, warmup=options.warmup, loss=kind)
    return _outcome(session.capture, about, {"": workload.model}, device, error, progress, recorder)


def profile_script(script: Script, options: Options, progress: Progress | None = None) -> Outcome:
    """Script mode: the script runs as ``__main__``, unedited, until enough steps were measured."""
    compat.require()
    recorder = Recorder()
    session = Session(options, progress, recorder=recorder)
    finder = StepFinder(session, run_to_end=options.run_to_end)
    error: BaseException | None = None
    seed_everything(options.seed)
    try:
        with session, finder.watching():
            script.run()
    except StopRun:
        pass
    except BaseException as raised:  # SystemExit and KeyboardInterrupt too: the caller decides what they mean
        error = raised
    known = _modules_in(script.namespace)
    about = WorkloadInfo(target=script.target, mode="script", steps=options.steps, warmup=options.warmup, loss=None)
    if error is None and not finder.saw_backward:
        raise NothingMeasuredError(
            f"{script.target} ran to its end without a backward pass: there is nothing to measure.\n"
            "Profile a script that trains, or a file that defines workload() -> (model, batch)."
        )
    return _outcome(session.capture, about, known, None, error, progress, recorder)


class profiling:  # noqa: N801 - used like a function: with gradscope.profiling(model) as prof
    """Measure a training loop of one's own.

    ::

        with gradscope.profiling(model, steps=5, warmup=3) as prof:
            for x, y in loader:
                train_step(x, y)
                if prof.step():  # True when enough is measured
                    break
        print(prof.report)

    Args:
        model: names the layers; without it the modules that run are named by their classes.
        steps, warmup, lines, memory, ignore: as in :func:`profile`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        steps: int = 5,
        warmup: int = 3,
        lines: bool = True,
        memory: bool = True,
        ignore: Collection[str] = (),
    ) -> None:
        require_known(ignore)
        compat.require()
        self._model = model
        self._options = Options(steps=steps, warmup=warmup, lines=lines, memory=memory, ignore=tuple(ignore))
        models = () if model is None else (model,)
        self._recorder = Recorder()
        surroundings = Surroundings(models=lambda: models)
        self._session = Session(self._options, None, surroundings, self._recorder)
        self._report: Report | None = None

    def __enter__(self) -> profiling:
        self._session.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._session.close()

    def step(self) -> bool:
        """A training step has ended. True when enough has been measured."""
        return self._session.boundary()

    @property
    def report(self) -> Report:
        """The report of the steps measured so far; ask for it after the ``with`` block.

        Raises:
            NothingMeasuredError: the loop ended before one step was measured.
        """
        if self._report is None:
            self._session.close()
            about = WorkloadInfo(
                target="", mode="loop", steps=self._options.steps, warmup=self._options.warmup, loss=None
            )
            known = {"": self._model} if self._model is not None else {}
            outcome = _outcome(self._session.capture, about, known, None, None, None, self._recorder)
            assert outcome.report is not None
            self._report = outcome.report
        return self._report


def _modules_in(namespace: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The script's modules by variable name."""
    return {name: value for name, value in namespace.items() if isinstance(value, nn.Module) and name}


def _outcome(
    capture: Capture,
    about: WorkloadInfo,
    known: Mapping[str, nn.Module],
    device: torch.device | None,
    error: BaseException | None,
    progress: Progress | None = None,
    recorder: Recorder | None = None,
) -> Outcome:
    timed = capture.timed
    if timed is None or timed.completed == 0:
        if error is not None:
            return Outcome(None, error)
        raise NothingMeasuredError(_too_short(about, capture))
    return Outcome(analyse(capture, about, known, device, progress, recorder), error)


def _too_short(about: WorkloadInfo, capture: Capture) -> str:
    steps = f"{capture.steps_done} training step{'' if capture.steps_done == 1 else 's'}"
    options = capture.options
    needed = Session(options).steps_to_first_result
    return (
        f"{about.target or 'the loop'} ended after {steps}; nothing is measured before step {needed} "
        f"with --warmup {options.warmup} --steps {options.steps}.\n"
        "Let it run longer, or measure less: --warmup 1 --steps 1 needs {least}.".format(
            least=Session(Options(steps=1, warmup=1)).steps_to_first_result
        )
    )


# --------------------------------------------------------------------------------------------------------------------
# From what a run left behind to a report
# --------------------------------------------------------------------------------------------------------------------


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
    names = name_modules([timed.recorder.modules[label] for label in timed.recorder.roots], known)
    on_cuda = torch.cuda.is_initialized()
    table = read_trace(timed.profiler, device=on_cuda)
    progress.phase(f"attributing {len(table):,} events")
    timed.profiler = None  # its events are read: the memory goes back before the analysis needs some
    called = names.labels(timed.recorder.modules)
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
    partial = measured < capture.options.steps or capture.survey is None
    partial = partial or (memory is None and capture.options.memory)
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
    notes = [*capture.notes, *result.notes]
    if capture.survey is None:
        notes.append(
            "the run ended before the survey step: no source lines and no FLOPs; parameters and gradient sums are "
            "charged to the layer whose node ran before them"
        )
    elif memory is None and capture.options.memory:
        notes.append("the run ended before the steps that measure memory")
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
    table = read_trace(survey.profiler, device=on_cuda, shapes=True)
    survey.profiler = None
    calls = _relabelled(survey.recorder.table(), names.labels(survey.recorder.modules))
    return read_survey(
        SurveyInput(
            read_skeleton(table, calls, parents), survey.line_spans, survey.graphs, names.parameters(survey.parameters)
        )
    )


def read_memory_pass(found: MemoryPass, names: ModuleNames, parents: Sequence[int]) -> MemoryResult:
    """Read what the memory pass left behind. Its profiler's events are consumed.

    Args:
        names: the rows of the layer table.
        parents: of each row the nearest parent that is called itself, see :meth:`ModuleNames.calling_parents`.
    """
    table = read_memory_trace(found.profiler)
    found.profiler = None
    calls = _relabelled(found.recorder.table(), names.labels(found.recorder.modules))
    skeleton = read_skeleton(table, calls, parents)
    labels = [*names.labels(found.modules), -1]
    figures = found.figures
    given = MemoryInput(
        survey=SurveyInput(skeleton, found.line_spans, found.graphs, names.parameters(found.parameters)),
        device=found.device,
        sightings=[replace(sighting, layer=labels[sighting.layer]) for sighting in found.sightings],
        saved=found.saved,
        lines=found.lines,
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
