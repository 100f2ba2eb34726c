"""Programs that run a torch.profiler of their own: it works as it does alone, and gradscope measures around it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import gradscope
from gradscope.errors import NothingMeasuredError, UsageError

_CPU = [ProfilerActivity.CPU]

_SCRIPT = """
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()

def counts(prof):
    return {row.key: row.count for row in prof.key_averages() if "gradscope" in row.key or row.key == "aten::addmm"}
"""

_SCHEDULED = """
found = []
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=2, warmup=1, active=3, repeat=1),
    on_trace_ready=lambda prof: found.append(counts(prof)),
) as prof:
    for _ in range(60):
        step()
        prof.step()
print(found)
"""
_EACH_STEP = """
for _ in range(12):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
print(counts(prof))
"""
_IN_THE_MIDDLE = """
for number in range(40):
    if number == 9:
        with record_function("outer"), profile(activities=[ProfilerActivity.CPU]) as prof:
            step()
    else:
        step()
print(counts(prof))
"""


def _gradscope(folder: Path, text: str, *options: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """The script under gradscope, and what it prints alone."""
    path = folder / "train.py"
    path.write_text(_SCRIPT + text)
    alone = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True, cwd=folder)
    command = [sys.executable, "-m", "gradscope", "profile", str(path), "--no-html", "--run-to-end", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder), alone.stdout


@pytest.mark.parametrize(
    "text", [_SCHEDULED, _IN_THE_MIDDLE], ids=["a schedule", "in the middle of the measured steps"]
)
def test_the_scripts_profiler_works_and_steps_without_it_are_measured(text: str, tmp_path: Path) -> None:
    found, alone = _gradscope(tmp_path, text, "--steps", "3")
    assert found.returncode == 0, found.stderr
    assert alone.strip() in found.stdout  # what it counted is what it counts alone: no row of ours, none missing
    assert "the program's own torch.profiler ran in " in found.stdout
    run = json.loads((tmp_path / "gradscope-train.json").read_text())
    assert not run["partial"]
    # Steps that the machine interrupted are left out and, up to a number, measured again.
    assert 0 < run["workload"]["steps"] <= 3


def test_a_profiler_in_every_step_leaves_nothing_to_measure(tmp_path: Path) -> None:
    found, alone = _gradscope(tmp_path, _EACH_STEP)
    assert alone.strip() in found.stdout
    assert found.returncode == 3
    # The first step shows only that there is one optimizer, three are warm-up; from then on each is waited for.
    assert found.stderr.splitlines()[-2:] == [
        "gradscope: error: train.py ran its own torch.profiler in 8 of its 11 steps, so gradscope measured nothing.",
        "Turn that profiler off, or stop it earlier: PyTorch allows one per process.",
    ]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def _addmm(prof: Any) -> int:
    return sum(row.count for row in prof.key_averages() if row.key == "aten::addmm")


@pytest.mark.parametrize("how", ["running", "prepared"])
def test_inside_another_profiler_it_refuses_and_changes_nothing(how: str) -> None:
    model, x = _model(), torch.ones(4, 8)
    wanted = schedule(wait=0, warmup=1, active=1) if how == "prepared" else None
    with profile(activities=_CPU, schedule=wanted, acc_events=True) as prof:
        with pytest.raises(UsageError, match=r"a torch\.profiler is already running"):
            gradscope.profile(model, x)
        if how == "prepared":
            prof.step()
        model(x)
    assert _addmm(prof) == 2


def test_one_measurement_at_a_time() -> None:
    model, x = _model(), torch.ones(4, 8)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        model(x).mean().backward()
        with pytest.raises(UsageError, match="gradscope is already measuring in this process"):
            gradscope.profile(model, x)
        raised: list[BaseException] = []

        def elsewhere() -> None:
            try:
                gradscope.profile(_model(), x)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(raised) == 1 and isinstance(raised[0], UsageError)
        while not prof.step():
            model(x).mean().backward()
    assert prof.report.data.workload.steps == 2
    assert gradscope.profile(model, x, steps=1, warmup=1).data.workload.steps == 1


def test_a_loop_with_a_profiler_inside_each_step() -> None:
    model, x = _model(), torch.ones(4, 8)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        for _ in range(8):
            with profile(activities=_CPU) as own:
                model(x).mean().backward()
            prof.step()
    assert _addmm(own) == 2
    with pytest.raises(NothingMeasuredError, match=r"ran its own torch\.profiler in 7 of its 8 steps"):
        _ = prof.report


def test_a_model_that_profiles_itself_ends_all_the_same() -> None:
    class Profiled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with profile(activities=_CPU):
                return super().forward(x)

    with pytest.raises(NothingMeasuredError, match=r"ran its own torch\.profiler in 100 of its 103 steps"):
        gradscope.profile(Profiled(8, 1), torch.ones(4, 8))


def test_another_thread_may_start_one() -> None:
    model, x = _model(), torch.ones(4, 8)
    counted: list[int] = []

    def elsewhere() -> None:
        with profile(activities=_CPU) as own:
            model(x)
        counted.append(_addmm(own))

    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        number = 0
        while not prof.step():
            model(x).mean().backward()
            number += 1
            if number == 5:  # in the middle of the profiled steps
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
    assert counted == [2]
    assert prof.report.data.workload.steps == 2
    assert any("own torch.profiler ran in 1 of" in note for note in prof.report.data.notes)
