"""The order of things: workload -> capture -> trace -> attribute -> diagnose -> report. Read this first."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradscope import compat
from gradscope.amounts import bytes_of
from gradscope.analysis import analyse
from gradscope.capture.engine import STEP_ENDS
from gradscope.capture.guard import Guard
from gradscope.capture.left import Capture
from gradscope.capture.memory import Surroundings
from gradscope.capture.model_steps import run_steps, seed_everything
from gradscope.capture.phases import steps_to_first_result
from gradscope.capture.phases.timed import Timed
from gradscope.capture.session import Session
from gradscope.capture.state import preserved
from gradscope.capture.training import StepFinder, StopRun, was_stopped
from gradscope.descriptors import room_for_files
from gradscope.diagnose.engine import require_known
from gradscope.errors import NothingMeasuredError, Terminated, UsageError
from gradscope.patching.record import Recorder
from gradscope.report.report import Report
from gradscope.tables import MEMORY_BUDGET, Options, Progress, WorkloadInfo
from gradscope.trace.reader import TraceReader
from gradscope.workload import Batches, Script, Workload, import_path, resolve_device

_WORKED_S = 0.1  # of processor time: a process that only looks something up takes less, one that trains takes more


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
    memory_budget: int | str = MEMORY_BUDGET,
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
        memory_budget: bytes, or a text as "4GiB", that the notes of one pass may take. A step of more operations is
            measured in less detail; the report says which.

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
        steps=steps,
        warmup=warmup,
        device=device,
        seed=seed,
        lines=lines,
        memory=memory,
        ignore=tuple(ignore),
        memory_budget=bytes_of(memory_budget, "memory_budget"),
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
    _leave_if_forked(process, error)
    about = WorkloadInfo(target=workload.target, mode="model", steps=options.steps, warmup=options.warmup, loss=kind)
    return _outcome(session.capture, about, {"": workload.model}, device, error, progress, recorder)


def profile_script(script: Script, options: Options, progress: Progress | None = None) -> Outcome:
    """Script mode: the script runs as ``__main__``, unedited, until enough steps were measured."""
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
            say(f"while it was being stopped the script raised {type(error).__name__}: the report is complete")
        error = None
    known = _modules_in(script.namespace)
    about = WorkloadInfo(target=script.target, mode="script", steps=options.steps, warmup=options.warmup, loss=None)
    session.capture.cycle = finder.cycle
    session.capture.passed_over = finder.cycles.passed_over
    if finder.cycles.irregular:
        session.capture.notes.append(
            "the optimizers step in no regular order: a step ends where the one that steps least often has stepped, "
            "and steps may differ"
        )
    if error is None and not session.capture.steps_done and STEP_ENDS in session.capture.failed:
        raise NothingMeasuredError(
            f"{script.target} could not be measured: {session.capture.failed[STEP_ENDS]}.\n"
            "Run 'gradscope doctor' to see why."
        )
    if error is None and not finder.backwards:
        raise NothingMeasuredError(
            f"{script.target} ran to its end without a backward pass{_that_returned(session.backward.raised)}: "
            "there is nothing to measure.\n"
            f"{_without_backward(_seconds_of_children() - seconds)}"
        )
    if error is None and not session.capture.steps_done and finder.stepped:
        raise NothingMeasuredError(
            f"{script.target} ended before its optimizers had stepped twice: "
            "a training step cannot be told from that.\n"
            "Let it run longer."
        )
    if error is None and not session.capture.steps_done:
        raise NothingMeasuredError(
            f"{script.target} went backward {finder.backwards} times, and no optimizer stepped: "
            "gradscope cannot tell where its training steps end. "
            "It has built an optimizer, whose step() ends a training step.\n"
            "For another kind of loop: with gradscope.profiling() as prof, and prof.step() where a step ends."
        )
    return _outcome(session.capture, about, known, None, error, progress, recorder)


def _leave_if_forked(process: int, error: BaseException | None) -> None:
    """A process that the user's code has forked reports nothing: it ends as it would alone."""
    if os.getpid() != process:
        raise error if error is not None else SystemExit(0)


def _that_returned(raised: int) -> str:
    if not raised:
        return ""
    return f" that returned ({raised} raised an error, which the script caught)"


def _seconds_of_children() -> float:
    """Processor time of all processes that this one has started and waited for."""
    used = os.times()
    return used.children_user + used.children_system


def _without_backward(children: float) -> str:
    """What to do next, where processes that the script started took so many seconds of processor time."""
    advice = "Profile a script that trains, or a file that defines workload() -> (model, batch)."
    if children < _WORKED_S:
        return advice
    return (
        f"Processes that it started worked for {children:.1f} s: only the script's own process is measured.\n"
        "Let it train there, or profile a file that defines workload() -> (model, batch)."
    )


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
        steps, warmup, lines, memory, ignore, memory_budget: as in :func:`profile`.
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
        memory_budget: int | str = MEMORY_BUDGET,
    ) -> None:
        require_known(ignore)
        compat.require()
        self._model = model
        self._options = Options(
            steps=steps,
            warmup=warmup,
            lines=lines,
            memory=memory,
            ignore=tuple(ignore),
            memory_budget=bytes_of(memory_budget, "memory_budget"),
        )
        models = () if model is None else (model,)
        self._recorder = Recorder()
        surroundings = Surroundings(models=lambda: models)
        self._session = Session(self._options, None, surroundings, self._recorder, TraceReader())
        self._report: Report | None = None
        self._used = False

    def __enter__(self) -> profiling:
        if self._used:
            raise UsageError(
                "this gradscope.profiling has been used: it measures one loop.\n"
                "Make another one for the next: with gradscope.profiling(model) as prof:"
            )
        self._session.__enter__()
        self._used = True
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
    # type(), not isinstance: that asks the object for its __class__, which may compute something, or raise.
    return {name: value for name, value in namespace.items() if issubclass(type(value), nn.Module) and name}


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
        raise NothingMeasuredError(_nothing_measured(about, capture))
    guard = Guard()
    try:
        with guard.over(_READING), room_for_files():
            return Outcome(analyse(capture, about, known, device, progress, recorder), error)
    finally:
        capture.let_go()
    if error is not None:
        return Outcome(None, error)
    raise NothingMeasuredError(
        f"{about.target or 'the loop'} was measured, but gradscope cannot read what it noted: "
        f"{guard.failed[_READING]}.\n"
        "This is a defect of gradscope: GRADSCOPE_DEBUG=1 shows where."
    )


_READING = "reading what was measured"  # under which the guard notes an error


def _nothing_measured(about: WorkloadInfo, capture: Capture) -> str:
    target = about.target or "the loop"
    if capture.given_way:
        return (
            f"{target} ran a torch.profiler of its own in {capture.given_way} of its {capture.steps_done} steps; "
            "gradscope gave way to it, and measured nothing.\n"
            "Turn that profiler off, or let it end earlier: PyTorch has one for a whole process."
        )
    if Timed.name in capture.failed:
        return f"{target} could not be measured: {capture.failed[Timed.name]}.\nRun 'gradscope doctor' to see why."
    return _too_short(target, capture)


def _too_short(target: str, capture: Capture) -> str:
    passed, options = capture.passed_over, capture.options
    ran = passed + capture.steps_done
    steps = f"{ran} training step{'' if ran == 1 else 's'}"
    needed = passed + steps_to_first_result(options)
    least = passed + steps_to_first_result(Options(steps=1, warmup=1))
    less = f", or measure less: --warmup 1 --steps 1 needs {least}" if least < needed else ""
    return (
        f"{target} ended after {steps}; nothing is measured before step {needed} "
        f"with --warmup {options.warmup} --steps {options.steps}, "
        f"and a whole report takes {passed + capture.steps_needed}.\n"
        f"Let it run longer{less}."
    )
