"""Steps that are traced by line since timed ones did what the survey and the memory pass did not. Counts, no clock."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.capture.phases.lines import Lines
from gradscope.capture.session import Session
from gradscope.errors import WorkloadError
from gradscope.tables import Options

from .test_lines_of_programs import STEPS, Expert, X, line_of, measured


class Choosing(nn.Module):
    """One of nine branches in each step, from one instruction; which of two lines follows depends on the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Expert() for _ in range(9))
        self.stem = nn.Linear(4, 4)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        number = self.seen * 5 % 9
        x = self.branches[number](self.stem(x))
        if number % 2:
            return x.exp()
        return x.exp()  # on the other line

    def line_of(self, number: int) -> int:
        lines, first = inspect.getsourcelines(Choosing.forward)
        return first + next(
            at for at, text in enumerate(lines) if "exp()" in text and ("#" in text) != bool(number % 2)
        )


def test_steps_are_traced_until_they_have_done_what_the_timed_ones_did() -> None:
    model = Choosing()
    with gradscope.profiling(model, steps=STEPS, warmup=1) as prof:
        for _ in range(100):
            model(X).sum().backward()
            if prof.step():
                break
    data = prof.report.data
    lines = {row.line: row for row in data.lines}
    timed = {number for number in range(9) if any(op.layer == f"branches.{number}" for op in data.ops)}
    assert len(timed) >= STEPS - 1, "they ran what neither the survey nor the memory pass did"
    first, second = (line_of(Expert.forward, text) for text in ("x.sinh()", "cosh"))
    of_branches = sum(
        op.self_ns for op in data.ops if op.phase == "backward" and (op.layer or "").startswith("branches")
    )
    assert lines[first].backward_ns + lines[second].backward_ns == pytest.approx(of_branches, abs=9)
    exp = {number: lines[model.line_of(number)].backward_ns for number in (0, 1)}
    of_exp = sum(op.self_ns for op in data.ops if op.phase == "backward" and op.layer == "" and "mul" in op.name)
    assert min(exp.values()) > 0 and sum(exp.values()) >= of_exp
    assert model.seen < 1 + 4 + 1 + STEPS + 2 + 1 + 1 + 2 + 12, "it ended before the most that is ever traced"


class Rerunning(Choosing):
    """One of nine branches, which a reentrant checkpoint runs with gradients in backward alone."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = checkpoint(self.branches[self.seen * 5 % 9], self.stem(x), use_reentrant=True)
        return out


def test_what_is_run_in_backward_is_traced_there() -> None:
    data = measured(Rerunning())
    rows = {row.line: row.backward_ns for row in data.lines}
    for text, names in (("x.sinh()", {"SinhBackward0"}), ("cosh", {"MulBackward0", "CoshBackward0"})):
        whole = sum(op.self_ns for op in data.ops if op.name in names)
        assert rows[line_of(Expert.forward, text)] >= whole > 0


def test_steps_that_are_alike_are_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Lines] = []
    enter = Lines.enter

    def noting(self: Lines, exits: ExitStack) -> None:
        entered.append(self)
        enter(self, exits)

    monkeypatch.setattr(Lines, "enter", noting)
    measured(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert not entered
    measured(Choosing())
    assert entered


def test_a_model_is_given_no_more_batches_than_were_asked_for() -> None:
    """Tracing more steps is no reason to fail where batches run out."""
    needed = Session(Options(steps=STEPS, warmup=1)).total_steps
    for spare in (0, 1, 2):
        batches = iter([X] * (needed + spare))
        report = gradscope.profile(Choosing(), batches, steps=STEPS, warmup=1)
        assert report.data.memory is not None and not report.data.partial
    with pytest.raises(WorkloadError, match=f"but this run needs {needed}"):
        gradscope.profile(Choosing(), iter([X] * (needed - 1)), steps=STEPS, warmup=1)


class Coin(nn.Module):
    """The same operations on another line in every second step: what the survey met says nothing of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x).cosh()
        if self.seen % 2:
            return x.sinh()  # odd
        return x.sinh()  # even


@pytest.mark.parametrize("warmup", [1, 2])
def test_the_same_operations_on_other_lines_have_none(warmup: int) -> None:
    data = measured(Coin(), warmup=warmup, memory=True)
    lines = {row.line for row in data.lines if row.backward_ns or row.forward_ns}
    assert line_of(Coin.forward, "cosh") in lines
    assert not lines & {line_of(Coin.forward, branch) for branch in ("# odd", "# even")}
    assert any("some operations ran on different lines in different steps" in note for note in data.notes)
    steady = measured(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), warmup=warmup, memory=True)
    assert not any("other lines" in note for note in steady.notes)


@pytest.mark.parametrize("step", [2, 4])
def test_an_error_in_a_step_that_nobody_asked_for_is_a_note(step: int) -> None:
    """The model's, and that of what gives batches; before, each goes to the caller."""
    needed = Session(Options(steps=STEPS, warmup=1)).total_steps

    def batches(last: int) -> Iterator[Tensor]:
        yield from [X] * last
        raise RuntimeError("no more")

    class Failing(Choosing):
        def forward(self, x: Tensor) -> Tensor:
            if self.seen == self.last:
                raise RuntimeError("no more")
            return super().forward(x)

    for batch, last in ((batches(needed + step), 10**6), (X, needed + step)):
        model = Failing()
        model.last = last
        report = gradscope.profile(model, batch, steps=STEPS, warmup=1)
        assert not report.data.partial
        assert any("run to find more source lines, raised RuntimeError: no more" in note for note in report.data.notes)
    with pytest.raises(RuntimeError, match="no more"):
        gradscope.profile(Choosing(), batches(needed - 1), steps=STEPS, warmup=1)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("it cannot be said")


class Raising(Choosing):
    """Does something in the second step that nobody has asked for."""

    def __init__(self, does: Callable[[], None]) -> None:
        super().__init__()
        self.does, self.last = does, Session(Options(steps=STEPS, warmup=1)).total_steps + 2

    def forward(self, x: Tensor) -> Tensor:
        if self.seen == self.last:
            self.does()
        return super().forward(x)


def fail() -> None:
    raise Unspeakable


@pytest.mark.parametrize(("does", "name"), [(fail, "Unspeakable"), (lambda: sys.exit(7), "SystemExit: 7")])
def test_nor_does_it_end_the_process_whatever_it_is(does: Callable[[], None], name: str) -> None:
    report = gradscope.profile(Raising(does), X, steps=STEPS, warmup=1)
    assert not report.data.partial
    assert any(note.endswith(f"source lines, raised {name}") for note in report.data.notes)


def interrupt() -> None:
    raise KeyboardInterrupt


def ring() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(("does", "kind"), [(interrupt, KeyboardInterrupt), (ring, TimeoutError)])
def test_what_the_user_or_a_handler_raises_meanwhile_is_theirs(
    does: Callable[[], None], kind: type[BaseException]
) -> None:
    """A limit of time that the user has set ends what it was set for, in whichever step it rings."""

    def handler(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(kind):
            gradscope.profile(Raising(does), X, steps=STEPS, warmup=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
