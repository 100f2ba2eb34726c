"""Lines of real programs whose steps differ: each node has its own line, or none."""

from __future__ import annotations

import bisect
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope import pipeline
from gradscope.attribute.align_steps import Assigned, assign
from gradscope.tables import RunData

X = torch.ones(2, 4)
STEPS = 6


class Changing(nn.Module):
    """What it does changes from step to step; each way uses operations that no other line has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Linear(4, 4), nn.Tanh()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x)
        order = (self.first, self.second) if self.seen % 2 else (self.second, self.first)
        for each in order[: 1 + self.seen % 3]:
            x = each(x)
        for _ in range(1 + self.seen % 4):
            x = self.act(x)
        return x

    def first(self, x: Tensor) -> Tensor:
        return x.sinh()

    def second(self, x: Tensor) -> Tensor:
        return x.cosh()


def measured(model: nn.Module, *, warmup: int = 1, memory: bool = False) -> RunData:
    with gradscope.profiling(model, steps=STEPS, warmup=warmup, memory=memory) as prof:
        while True:
            model(X).sum().backward()
            if prof.step():
                return prof.report.data


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return next(first + number for number, line in enumerate(lines) if text in line)


def test_lines_of_a_program_that_changes_are_right_or_none() -> None:
    """No line has time that is not its own: sinh and cosh lie on one line each, and nowhere else."""
    data = measured(Changing())
    lines = {row.line: row.forward_ns for row in data.lines}
    for function, text in ((Changing.first, "sinh"), (Changing.second, "cosh")):
        whole = sum(op.self_ns for op in data.ops if (op.phase, op.name) == ("forward", f"aten::{text}"))
        assert lines.get(line_of(function, text), 0) <= whole
    whole = sum(op.self_ns for op in data.ops if (op.phase, op.name) == ("forward", "aten::tanh"))
    assert lines[line_of(Changing.forward, "self.act")] == whole  # one line, however often
    assert any("matched call by call" in note for note in data.notes)


class Alternating(nn.Module):
    """Does one thing in even steps and another in odd ones: whichever the survey meets, it has not met the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x)
        if self.seen % 2:
            return x.sinh()
        return x.cosh()


@pytest.mark.parametrize("warmup", [1, 2])
def test_what_only_the_memory_pass_ran_has_its_line(warmup: int) -> None:
    data = measured(Alternating(), warmup=warmup, memory=True)
    rows = {row.line: row for row in data.lines}
    for name in ("sinh", "cosh"):
        row = rows[line_of(Alternating.forward, name)]
        whole = {op.phase: op.self_ns for op in data.ops if name.title() in op.name or op.name == f"aten::{name}"}
        assert row.forward_ns == whole["forward"]
        assert row.backward_ns >= whole["backward"] > 0
    assert any("100.0 % of the operations" in note for note in data.notes)


class Turning(Alternating):
    """Three ways in turn: the memory pass meets the third first, and then that of the survey."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x)
        if self.seen % 3 == 0:
            return x.sinh()
        if self.seen % 3 == 1:
            return x.cosh()
        return x.tanh()


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_lines_of_two_passes_are_the_same_lines(warmup: int) -> None:
    """However many lines each of them met first."""
    data = measured(Turning(), warmup=warmup, memory=True)
    rows = {row.line: row.forward_ns for row in data.lines}
    found = 0
    for name in ("sinh", "cosh", "tanh"):
        line = line_of(Turning.forward, name)
        whole = sum(op.self_ns for op in data.ops if (op.phase, op.name) == ("forward", f"aten::{name}"))
        assert rows.get(line, whole) in (0, whole)  # 0: of the step that no pass was in
        found += rows.get(line) == whole
    assert found >= 2


class Turned(nn.Module):
    """Goes the other way once it is surveyed: the same operation on another line, behind another layer."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen, self.turn = 0, turn

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen < self.turn:
            return self.one(x).sinh()
        return self.other(x).sinh()


@pytest.mark.parametrize("turn", range(7, 15))
def test_the_same_operation_behind_another_layer_is_on_another_line(turn: int) -> None:
    """A line has no operation that it did not run, whichever way the traced step went."""
    data = measured(Turned(turn))
    rows = {row.line: row.forward_ns for row in data.lines}
    called = {op.layer for op in data.ops if op.phase == "forward" and op.name == "aten::addmm"}
    assert called
    for name in {"one", "other"} - called:
        assert rows.get(line_of(Turned.forward, f"self.{name}("), 0) == 0


class Branching(nn.Module):
    """One of two branches on two lines that run the same operations and call the same layer; tells what ran when."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen, self.turn = 0, turn
        self.ran: list[tuple[int, str]] = []  # when by the system's clock, in ns, and a text of the line

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.ran.append((time.time_ns(), "the one" if self.seen < self.turn else "the other"))
        return self.head(self.branch(x))

    def branch(self, x: Tensor) -> Tensor:
        if self.seen < self.turn:
            return self.stem(x).sinh()  # the one
        return self.stem(x).sinh()  # the other


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("turn", [0, *range(6, 16, 2), 99])
def test_no_branch_has_the_time_of_another_that_runs_the_same(
    turn: int, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forward and each node of the timed steps is on the line that ran then, or on none."""
    taken: list[Assigned] = []

    def kept(*args: Any, **kwargs: Any) -> Assigned:
        taken.append(assign(*args, **kwargs))
        return taken[-1]

    build = pipeline.build_result
    lines: list[Any] = []

    def built(assigned: Assigned, names: Any, infos: Any, *args: Any, **kwargs: Any) -> Any:
        lines.extend(infos)
        return build(assigned, names, infos, *args, **kwargs)

    monkeypatch.setattr(pipeline, "assign", kept)
    monkeypatch.setattr(pipeline, "build_result", built)
    model = Branching(turn)
    measured(model, memory=memory)
    (assigned,) = taken
    table = assigned.skeleton.table
    ran_at = [at for at, _ in model.ran]
    found = [place for place, name in enumerate(table.names) if name in ("aten::sinh", "SinhBackward0")]
    rows = np.flatnonzero(np.isin(table.name, found) & (assigned.steps.of_row >= 0))
    assert len(rows) >= 2 * STEPS
    told = 0
    for row in rows.tolist():
        text = model.ran[bisect.bisect(ran_at, int(table.start_ns[row])) - 1][1]
        line = int(assigned.line[row])
        told += line >= 0
        assert line < 0 or lines[line].line == line_of(Branching.branch, f"# {text}")
    assert told == len(rows) or turn not in (0, 99)


class Mixed(nn.Module):
    """Experts in another order in each step, some of them twice: every layer does what it always does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x)
        for number in range(3 + self.seen % 3):
            x = self.experts[(self.seen + number) % 3](x)
        return x


class Expert(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.sinh()
        return x.mul(2).cosh()


def test_every_node_of_layers_that_come_and_go_is_on_its_own_line() -> None:
    data = measured(Mixed())
    first, second = (line_of(Expert.forward, text) for text in ("x.sinh()", "cosh"))
    rows = {row.line: row.backward_ns for row in data.lines}
    experts = [op for op in data.ops if op.phase == "backward" and (op.layer or "").startswith("experts")]
    assert rows[first] > 0 and rows[second] > 0
    assert rows[first] + rows[second] == pytest.approx(sum(op.self_ns for op in experts), abs=len(experts))


class Impatient(torch.optim.SGD):
    """Calls its closure one to three times in a step, as a line search does."""

    def step(self, closure: Any = None) -> Any:
        self.turns = getattr(self, "turns", 0) + 1
        with torch.enable_grad():
            losses = [closure() for _ in range(1 + self.turns % 3)]
        super().step()
        return losses[-1]


def test_what_a_closure_does_outside_of_the_layers_has_its_lines() -> None:
    model = nn.Linear(4, 4)
    optimizer = Impatient(model.parameters(), 1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).sinh().sum()
        penalty = model.weight.cosh().sum()
        (loss + penalty).backward()
        return loss

    with gradscope.profiling(model, steps=STEPS, warmup=1, memory=False) as prof:
        while True:
            optimizer.step(closure)
            if prof.step():
                break
    data = prof.report.data
    rows = {row.line: row.backward_ns for row in data.lines}
    forward = {row.line: row.forward_ns for row in data.lines}
    for name in ("sinh", "cosh"):
        phases = {op.phase: op.self_ns for op in data.ops if op.name == f"aten::{name}"}
        assert set(phases) <= {"forward", "backward"}, "it is no work of the optimizer's"
        assert forward[line_of(closure, name)] >= phases["forward"] > 0
        whole = sum(op.self_ns for op in data.ops if op.phase == "backward" and op.name == f"{name.title()}Backward0")
        assert rows[line_of(closure, name)] >= whole > 0
    assert not [line for line in rows if line is None]


class Compiled(Changing):
    def __init__(self) -> None:
        super().__init__()
        self.way = torch.compile(torch.sin, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.way(x))


def test_where_no_lines_are_noted_none_are_said_to_be_told() -> None:
    """Neither are those of a compiled model: one note says so, and no other that most operations have one."""
    data = measured(Compiled())
    assert not data.lines
    (note,) = [note for note in data.notes if "source lines" in note]
    assert note.startswith("the program uses torch.compile, but gradscope saw Inductor compile nothing")


class Averages(nn.Module):
    """Keeps an average of what it sees, as vector quantizers do, by ``data``, and makes a parameter in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.data.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
        return self.linear(x) * nn.Parameter(torch.ones(4)) * self.linear.weight.data.detach().sum()


def test_the_survey_finds_the_same_operations_where_a_program_takes_data() -> None:
    """Under a dispatch mode torch detaches in ``x.data``, which is no operation of the program's."""
    assert not [note for note in measured(Averages()).notes if "survey step" in note]


ATTRIBUTES: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "H": lambda x: x.H,
    "mH": lambda x: x.mH,
    "real": lambda x: torch.view_as_complex(x.unflatten(1, (2, 2))).real,
    "imag": lambda x: torch.view_as_complex(x.unflatten(1, (2, 2))).imag,
}


class Reading(nn.Module):
    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear(x))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_what_is_computed_by_reading_an_attribute_has_its_line(name: str) -> None:
    data = measured(Reading(ATTRIBUTES[name]))
    nodes = data.ledger.layers_ns + data.ledger.outside_modules_ns
    assert sum(row.backward_ns for row in data.lines) == nodes


class Again(nn.Module):
    """What it computes in a reentrant checkpoint is run in backward alone with gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, self.linear(x), use_reentrant=True)

    def inner(self, x: Tensor) -> Tensor:
        return x.sinh()


@pytest.mark.parametrize("memory", [False, True])
def test_what_is_run_in_backward_has_its_lines_too(memory: bool) -> None:
    data = measured(Again(), memory=memory)
    whole = sum(op.self_ns for op in data.ops if op.name == "SinhBackward0")
    (row,) = [row for row in data.lines if row.line == line_of(Again.inner, "sinh")]
    assert row.backward_ns >= whole > 0
