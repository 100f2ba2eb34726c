"""A layer that takes one of two lines that run the same: the right one or none, never the other. Counts, no clock."""

from __future__ import annotations

import bisect
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope import pipeline
from gradscope.attribute.align_steps import Assigned, assign

X = torch.ones(2, 4)
STEPS = 6


class Telling(nn.Module):
    """Tells when it went on to which line."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.shortcut = nn.Sequential(nn.Softsign())
        self.act = nn.Softsign()
        self.seen = 0
        self.ran: list[tuple[int, int]] = []

    def on_next_line(self) -> None:
        self.ran.append((time.time_ns(), sys._getframe(1).f_lineno + 1))


class Once(Telling):
    """Nothing but the line is another."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x)
        if self.seen % 2:
            self.on_next_line()
            return x.sinh()
        self.on_next_line()
        return x.sinh()


class Often(Telling):
    """Two choices in a step; each pair of them comes up again after four steps."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for bit in (1, 2):
            if self.seen & bit:
                self.on_next_line()
                x = x.sinh()
            else:
                self.on_next_line()
                x = x.sinh()
            x = x.tanh()
        return x


class BesideLayers(Telling):
    """Which layers it calls from one instruction has nothing to do with the line behind them."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for turn in range(2):
            x = self.layers[(self.seen * 2 + turn * 3) % 5](x)
            if (self.seen + turn) // 2 % 2:
                self.on_next_line()
                x = x.sinh()
            else:
                self.on_next_line()
                x = x.sinh()
        return x


class Container(Telling):
    """Calls one container from two lines: as ResNets that drop what is beside a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen % 2:
            self.on_next_line()
            return self.shortcut(self.stem(x))
        self.on_next_line()
        return self.shortcut(x)


class Later(Telling):
    """Calls one of torch's layers from a line that no traced step meets."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen != 1 + 4 + 1 + 3:
            self.on_next_line()
            return self.act(x.mul(2))
        self.on_next_line()
        return self.act(x.mul(2))


def told(model: Telling, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[bool]:
    """Tell of each timed operation of these names whether it has a line; check that it is the right one."""
    taken: list[Assigned] = []
    lines: list[Any] = []
    build = pipeline.build_result

    def kept(*args: Any, **kwargs: Any) -> Assigned:
        taken.append(assign(*args, **kwargs))
        return taken[-1]

    def built(assigned: Assigned, names: Any, infos: Any, *args: Any, **kwargs: Any) -> Any:
        lines.extend(infos)
        return build(assigned, names, infos, *args, **kwargs)

    monkeypatch.setattr(pipeline, "assign", kept)
    monkeypatch.setattr(pipeline, "build_result", built)
    with gradscope.profiling(model, steps=STEPS, warmup=1) as prof:
        for _ in range(100):
            model(X.clone().requires_grad_()).sum().backward()
            if prof.step():
                break
        assert prof.report.data.step.backward_ns > 0
    (assigned,) = taken
    table = assigned.skeleton.table
    found = np.isin(table.name, [place for place, name in enumerate(table.names) if name in names])
    found &= (assigned.steps.of_row >= 0) & ~assigned.skeleton.in_backward
    ran_at = [at for at, _ in model.ran]
    result = []
    line_of_number = {}
    for row in np.flatnonzero(found).tolist():
        right = model.ran[bisect.bisect(ran_at, int(table.start_ns[row])) - 1][1]
        line_of_number[int(table.sequence[row])] = right
        line = int(assigned.line[row])
        assert line < 0 or lines[line].line == right
        result.append(line >= 0)
    nodes = assigned.skeleton.nodes
    for row, number in zip(nodes.row.tolist(), nodes.sequence.tolist(), strict=True):
        if number in line_of_number:
            line = int(assigned.line[row])
            assert line < 0 or lines[line].line == line_of_number[number]
    assert len(result) >= STEPS
    return result


@pytest.mark.parametrize("kind", [Once, Often, BesideLayers])
def test_a_choice_that_nothing_tells_gives_no_line(kind: type[Telling], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(told(kind(), monkeypatch, "aten::sinh"))


def test_what_a_container_calls_is_on_the_line_that_called_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(told(Container(), monkeypatch, "aten::abs", "aten::div"))


def test_one_of_torchs_layers_is_on_no_line_that_did_not_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(Later(), monkeypatch, "aten::abs")
    assert sum(found) * STEPS == len(found) * (STEPS - 1), "of all but the one step that called it there"
