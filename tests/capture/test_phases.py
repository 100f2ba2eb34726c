"""What single phases note and ask for. Counts, no clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.capture.budget import Budget, SurveyPlan
from gradscope.capture.memory import Surroundings
from gradscope.capture.phases import base, plan, survey
from gradscope.capture.phases.base import Phase, Run
from gradscope.capture.phases.memory import Memory
from gradscope.capture.phases.survey import Survey
from gradscope.capture.phases.timed import Timed, Unprofiled, WarmUp, read_timed
from gradscope.capture.result import Capture
from gradscope.capture.session import Session
from gradscope.capture.system import StepCost
from gradscope.errors import UsageError
from gradscope.tables import Options

X = torch.ones(2, 4)


def run_of(**options: Any) -> Run:
    return Run(Capture(Options(**options)), Surroundings())


class Reader:
    """Stands in for what reads profilers: each has so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.read: list[Any] = []

    def timed(self, profiler: Any, *, calls: bool = True) -> Any:
        self.read.append(profiler)
        return range(self.rows)


@pytest.mark.parametrize("kind", [WarmUp, Unprofiled])
def test_a_step_has_the_nodes_that_it_drew_itself(kind: type[Phase]) -> None:
    """Not those of all that the process did before: else what is measured is cut short for want of memory."""
    for _ in range(50):
        X.clone().requires_grad_().exp()
    run = run_of()
    phase = kind(run, 1)
    phase.begin_step()
    X.clone().requires_grad_().exp().sin()
    phase.done = 1
    phase.end_step()
    assert run.budget.nodes == 2 and run.sampler._thread is None  # no step follows in which lines are looked at


def test_what_is_left_out_says_how_large_a_step_was() -> None:
    run = run_of()
    run.budget.read(1200, steps=3)
    run.leave_out(["one"])
    run.leave_out(["other"])
    assert run.capture.left_out == ["one", "other"] and run.capture.rows == 400


def test_a_trace_is_of_the_steps_that_its_profiler_saw() -> None:
    run = run_of()
    run.reader = Reader(300)  # type: ignore[assignment]
    timed: Any = SimpleNamespace(profiler="profiler", tables=[], completed=30)
    read_timed(run, timed, 3)
    assert run.budget.rows == 100 and timed.profiler is None and len(timed.tables) == 1
    read_timed(run, timed, 3)
    timed.profiler = "of a stretch that has just begun"
    read_timed(run, timed, 0)
    assert len(timed.tables) == 1 and timed.profiler is not None


def test_how_many_steps_there_will_be_where_a_profiler_sees_few_at_once() -> None:
    """Seven to be timed, three at once: one in between, twice, also while the first stretch runs."""
    run = run_of()
    run.reader = Reader(1)  # type: ignore[assignment]
    run.budget.steps_at_once = lambda: 3  # type: ignore[method-assign]
    phase = Timed(run, 7)
    assert phase.steps_in_all() == 9
    phase._timed.profiler, phase._timed.completed, phase._in_stretch = "profiler", 1, 1
    assert phase.steps_in_all() == 9


def test_the_last_stretch_is_of_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "steps_at_once", lambda _: 4)
    model = nn.Linear(4, 4)
    with gradscope.profiling(model, steps=5, warmup=0, memory=False) as prof:
        while True:
            model(X).sum().backward()
            if prof.step():
                break
    timed = prof._session.capture.timed  # type: ignore[union-attr]
    assert timed is not None and (timed.completed, timed.last_steps, len(timed.tables)) == (6, 2, 2)


def test_the_timed_steps_are_read_before_the_survey_needs_the_memory() -> None:
    run, reader = run_of(), Reader(30)
    run.reader = reader  # type: ignore[assignment]
    run.capture.timed = SimpleNamespace(profiler="theirs", tables=[], last_steps=3)  # type: ignore[assignment]
    assert Survey(run, 1).fits() and reader.read == ["theirs"] and run.budget.rows == 10


def test_shapes_that_there_is_no_room_for_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    made = survey.new_profiler

    def noting(*, shapes: bool = False) -> Any:
        asked.append(shapes)
        return made(shapes=shapes)

    monkeypatch.setattr(survey, "new_profiler", noting)
    for shapes in (True, False):
        monkeypatch.setattr(Budget, "survey", lambda _, shapes=shapes: SurveyPlan(shapes=shapes))
        gradscope.profile(nn.Linear(4, 4), X, steps=1, warmup=0, memory=False)
    assert asked == [True, False]


def test_the_phases_in_order() -> None:
    """Those that take no step are left out; steps without a profiler lie before and behind those with one."""

    def phases(**options: Any) -> list[tuple[str, int]]:
        return [(phase.name, phase.steps) for phase in plan(run_of(**options))]

    free, lines = "unprofiled steps", ("source lines of more steps", 0)
    timed = [(free, 4), ("profiled steps", 6), (free, 2), ("survey", 1), ("recording", 1)]
    assert phases(steps=5, warmup=2) == [("warm-up", 2), *timed, ("memory", 2), lines]
    assert phases(steps=5, warmup=0, memory=False, lines=False) == timed
    assert phases(warmup=0, timing=False) == [("memory", 2)]


def test_only_steps_that_are_kept_have_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradscope.capture.phases.timed.interrupted", lambda costs: [1])
    run = run_of()
    phase = Timed(run, 4)
    phase._waited, phase._costs = 0, [StepCost(100, 10, waited) for waited in (2, 90, 4)]
    phase.keep()
    assert run.capture.timed is not None
    assert (run.capture.timed.waited_ns, run.capture.timed.left_out) == (3, {2})
    assert [step.left_out for step in run.capture.timed.taken] == [False, True, False]


def test_each_step_that_was_taken_is_told_of() -> None:
    data = gradscope.profile(nn.Linear(4, 4), X, steps=4, warmup=0, memory=False).data
    kept = [step.ns for step in data.step.taken if not step.left_out]
    assert len(kept) == data.workload.steps and len(data.step.taken) - len(kept) == data.workload.steps_left_out
    assert min(kept) > 0


@pytest.mark.parametrize("memory", [True, False])
def test_a_run_without_memory_counts_nothing(memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, the calls of its steps are known, as those of the survey are."""
    counted: list[int] = []
    taken = base.take_census
    monkeypatch.setattr(base, "take_census", lambda optimizers: counted.append(1) or taken(optimizers))
    model = nn.Linear(4, 4)
    with gradscope.profiling(model, steps=1, warmup=0, memory=memory) as prof:
        while True:
            model(X).sum().backward()
            if prof.step():
                break
    capture = prof._session.capture  # type: ignore[union-attr]
    assert len(counted) == (2 if memory else 0)
    assert (capture.memory is not None and len(capture.memory.recorder.steps) == 2) is memory


@pytest.mark.parametrize("flops", [True, False])
def test_flops_that_were_not_counted_are_not_known(flops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "survey", lambda _: SurveyPlan(flops=flops))
    data = gradscope.profile(nn.Linear(4, 4), X, steps=1, warmup=0, memory=False).data
    assert [row.flops is not None for row in data.layers] == [flops] * len(data.layers)


@pytest.mark.parametrize(
    ("seen", "note"),
    [
        (["1x8", "6x8"], None),
        ([], None),
        (["1x8", "2x8"], "memory was measured in a step whose batch was 1x8, not 6x8"),
    ],
)
def test_a_memory_pass_with_another_batch_says_so(seen: list[str], note: str | None) -> None:
    """A root is called several times in a step: one of them is enough."""
    run = run_of()
    run.capture.batches = {3: "6x8"}
    assert Memory(run, 2)._other_batch({3: seen}) == ([note] if note else [])


def test_the_batch_is_that_of_the_first_call() -> None:
    model = nn.Linear(4, 4)
    with gradscope.profiling(model, steps=1, warmup=0, memory=False) as prof:
        while True:
            (model(torch.ones(6, 4)).sum() + model(X).sum()).backward()
            if prof.step():
                break
    assert prof.report is not None and prof.report.data.workload.batch == "6x4 float32"


@pytest.mark.parametrize("given", [True, False])
def test_every_group_of_an_optimizer_and_every_layer_counts(given: bool) -> None:
    """Also where the loop does not tell its model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], 0.1, momentum=0.9)
    with gradscope.profiling(*([model] if given else []), steps=1, warmup=0, memory=False) as prof:
        while True:
            optimizer.zero_grad(set_to_none=True)
            model(X).sum().backward()
            optimizer.step()
            if prof.step():
                break
    capture = prof._session.capture  # type: ignore[union-attr]
    numbers = set(map(id, model.parameters()))
    assert capture.optimized == capture.with_state == numbers <= capture.with_gradient


@pytest.mark.parametrize("given", [True, False])
def test_parameters_at_the_peak_are_known_where_no_model_is_told(given: bool) -> None:
    model = nn.Linear(4, 4)
    with gradscope.profiling(*([model] if given else []), steps=1, warmup=0) as prof:
        while True:
            model(X).sum().backward()
            if prof.step():
                break
    assert prof.report is not None and prof.report.data.memory is not None
    held = {row.category: row.bytes for row in prof.report.data.memory.at_peak if row.owner == ""}
    assert held["parameters"] == held["gradients"] == 4 * (4 * 4 + 4)


def test_lines_are_not_looked_at_in_a_pause_of_the_warm_up() -> None:
    run = run_of()
    phase = WarmUp(run, 3)
    try:
        phase.resume()
        assert run.sampler._thread is None  # a loop begins in the first step
        phase.begin_step()
        phase.done = 1
        phase.end_step()
        assert run.sampler._thread is not None
        assert phase.pause() and run.sampler._thread is None
        phase.resume()
        assert run.sampler._thread is not None and run.sampler._thread.is_alive()
    finally:
        run.sampler.stop()


def test_a_pause_reads_the_steps_that_were_timed_and_drops_the_rest() -> None:
    """A profiler would hold the rows of an evaluation; one that saw no whole step has nothing to be read."""
    run = run_of()
    run.reader = reader = Reader(300)  # type: ignore[assignment]
    phase = Timed(run, 3)
    with ExitStack() as exits:
        phase.enter(exits)
        assert phase.pause() and not reader.read and run.profiler is None
        phase.resume()
        for _ in range(2):
            phase.begin_step()
            phase.end_step()
        assert phase.pause() and len(reader.read) == 1 and run.budget.rows == 150 and run.profiler is None
        phase.resume()
        assert run.profiler is not None and run.loaders.counting
    assert run.profiler is None


def test_a_pause_ends_a_phase_that_the_report_is_whole_without() -> None:
    """Begun anew after each evaluation it would never end, and no report come before the training's end."""

    class More(Phase):
        name, optional, kept = "more", True, False

        def keep(self) -> None:
            self.kept = True

    session = Session(Options(steps=1, warmup=1))
    more = More(session.run, 5)
    session._phases = [more]
    with session:
        assert not session.boundary()
        session.pause()
        session.resume()
        assert more.kept and session.boundary()


# ----------------------------------------------------------------------------------------------------------------------
# Other threads
# ----------------------------------------------------------------------------------------------------------------------


def elsewhere(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_after_a_pause_no_profiler_begins_beside_that_of_another_thread() -> None:
    """Kineto has one for all: two of them end the process."""
    session = Session(Options(steps=2, warmup=1), reader=Reader(1))  # type: ignore[arg-type]
    session._phases = [Timed(session.run, 3)]
    with session:
        session.boundary()
        session.pause()
        elsewhere(session._give_way)
        session.resume()
        assert session.run.profiler is None
        session.boundary()
        assert session.run.profiler is None
        session._other_ended()
        session.boundary()
        session.boundary()  # its rows are all closed by now
        assert session.run.profiler is not None
    assert session.steps_given_way == 1


def test_another_thread_that_pauses_does_not_take_over() -> None:
    """Else it lives on, and no step of the training counts."""
    wait = threading.Event()
    model = nn.Linear(4, 4)
    with gradscope.profiling(model, steps=1, warmup=1, memory=False) as prof:
        paused = threading.Event()

        def pauses() -> None:
            prof.pause()
            prof.resume()
            paused.set()
            wait.wait()

        thread = threading.Thread(target=pauses)
        thread.start()
        paused.wait()
        for _ in range(20):
            model(X).sum().backward()
            if prof.step():
                break
    wait.set()
    thread.join()
    assert prof.report.data.workload.steps == 1


def test_only_the_thread_that_trains_resumes() -> None:
    session = Session(Options(steps=1, warmup=1))
    session._phases = [Timed(session.run, 3)]
    with session:
        session.boundary()
        session.pause()
        elsewhere(session.resume)
        assert session.run.profiler is None
        session.boundary()
        assert session.run.profiler is not None and session.capture.steps_cut == 1


def test_a_session_of_another_thread_is_not_displaced() -> None:
    """Its modes and profilers are that thread's, so it cannot be undone from here."""
    session = Session(Options(steps=1, warmup=1))
    session.displaceable = True
    hold = threading.Event()
    begun = threading.Event()

    def trains() -> None:
        with session:
            session.boundary()
            begun.set()
            hold.wait()

    thread = threading.Thread(target=trains)
    thread.start()
    begun.wait()
    try:
        with pytest.raises(UsageError, match="already measuring in this process"):
            Session(Options()).__enter__()
        assert not session._closed
    finally:
        hold.set()
        thread.join()
