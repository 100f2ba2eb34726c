"""An error in any hook or pass of gradscope's own is a note of the report: the user's run goes on as it would alone.

Each case plants one error where gradscope runs between two lines of the user's, or reads what it noted afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradscope.capture import guard
from gradscope.errors import NothingMeasuredError
from gradscope.pipeline import Outcome, profile_script
from gradscope.tables import Options
from gradscope.workload import Script, load_target

_SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)


class Changing(nn.Module):
    # Another branch in each of many steps: lines are traced again behind the memory pass.
    def __init__(self):
        super().__init__()
        self.branches, self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(7)), 0

    def forward(self, x):
        self.steps += 1
        return self.branches[self.steps % 7](x)


model = nn.Sequential(Changing(), nn.GELU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model[2].weight.register_hook(lambda gradient: gradient * 2)
losses = []
for epoch in range(12):
    for x in DataLoader(torch.arange(32.0).reshape(4, 8), batch_size=1):
        out = model(x)
        out.register_hook(lambda gradient: gradient / 2)
        loss = out.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
ended = True
"""

# (module, class or None, function): what fails. Hooks, the beginnings and ends of phases and steps, readers.
_HOOKS = [
    ("capture.modules", "CallRecorder", "_enter"),
    ("capture.modules", "CallRecorder", "_leave"),
    ("capture.modules", None, "watching"),
    ("capture.backward", "TensorHooks", "marking"),
    ("capture.backward", "TensorHooks", "_registered"),
    ("capture.backward", "TensorHooks", "_mark"),
    ("capture.survey", "LineTracer", "_label"),
    ("capture.variety", "Variety", "add"),
    ("capture.variety", "Variety", "unseen"),
    ("capture.survey", "GraphTracer", "_walk"),
    ("capture.survey", "GraphTracer", "_note"),
    ("capture.survey", "FlopMode", "_count"),
    ("capture.phases.survey", None, "FlopMode"),
    ("capture.modules", "SpanRecorder", "open"),
    ("capture.modules", "SpanRecorder", "close"),
    ("capture.phases.timed", None, "measure_call_cost"),
    ("capture.phases.survey", "Survey", "_note_batch"),
    ("capture.environment", "SwitchWatch", "look"),
    ("capture.environment", "SwitchWatch", "with_seen"),
    ("capture.loop", "LoaderWatch", "_waited"),
    ("capture.loop", "LoaderWatch", "facts"),
    ("capture.loop", "LineSampler", "_sample"),
    ("capture.loop", "LineSampler", "facts"),
    ("capture.system", "FaultMeter", "start"),
    ("capture.system", "FaultMeter", "stop"),
    ("capture.memory", "Surroundings", "note_optimizer"),
    ("capture.memory", "Surroundings", "forget"),
    ("capture.result", "Capture", "hold"),
    ("capture.memory", "MemoryTracer", "_note_inputs"),
    ("capture.memory", "MemoryTracer", "_begin_backward"),
    ("capture.memory", "MemoryTracer", "_gradients"),
    ("capture.memory", "MemoryTracer", "see_all"),
    ("capture.phases.memory", "MemorySteps", "begin"),
    ("capture.phases.memory", "MemorySteps", "end_step"),
    ("capture.phases.memory", "MemorySteps", "result"),
    ("recording.tape", "Tape", "_replaced"),
    ("recording.tape", "Tape", "_places"),
    ("recording.tape", "Tape", "_entered"),
    ("recording.tape", "Tape", "_left"),
]
_PHASES = [
    (f"capture.phases.{name}", kind, function)
    for name, kind in (
        ("timed", "WarmUp"),
        ("timed", "Unprofiled"),
        ("survey", "Survey"),
        ("recording", "RecordingPhase"),
        ("memory", "Memory"),
        ("lines", "Lines"),
    )
    for function in ("enter", "end_step", "keep", "begin_step")
]
_READERS = [
    ("pipeline", None, "read_survey_step"),
    ("readings", None, "_merged"),
    ("pipeline", None, "read_memory"),
    ("readings", None, "_memory_input"),
    ("pipeline", None, "_diagnosed"),
    ("pipeline", None, "known_facts"),
    ("pipeline", None, "bounded"),
]


class Planted(RuntimeError):
    """The error that is planted."""


@pytest.fixture
def kept() -> Iterator[list[BaseException]]:
    """What guards have kept to themselves in this test, which none of the others may have."""
    found: list[BaseException] = []
    before = list(guard.listeners)
    guard.listeners[:] = [found.append]
    yield found
    guard.listeners[:] = before


def _plant(monkeypatch: pytest.MonkeyPatch, module: str, owner: str | None, name: str) -> list[int]:
    """Let it raise whenever it is called; the list grows each time."""
    calls: list[int] = []

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        calls.append(1)
        raise Planted(f"{name} was called")

    holder: Any = importlib.import_module(f"gradscope.{module}")
    monkeypatch.setattr(holder if owner is None else getattr(holder, owner), name, fail)
    return calls


def _profiled(folder: Path) -> tuple[Outcome, dict[str, Any]]:
    path = folder / "train.py"
    path.write_text(_SCRIPT)
    script = load_target(str(path))
    assert isinstance(script, Script)
    outcome = profile_script(script, Options(steps=2, warmup=2, run_to_end=True))
    return outcome, dict(script.namespace)


def _alone() -> list[float]:
    names: dict[str, Any] = {}
    exec(compile(_SCRIPT, "alone.py", "exec"), names)
    return list(names["losses"])


@pytest.mark.parametrize(("module", "owner", "name"), [*_HOOKS, *_PHASES, *_READERS])
def test_the_run_goes_on_and_the_report_says_what_failed(
    module: str,
    owner: str | None,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: list[BaseException],
) -> None:
    calls = _plant(monkeypatch, module, owner, name)
    outcome, names = _profiled(tmp_path)
    assert calls, "the planted error was never reached: the case tests nothing"
    assert outcome.error is None
    assert names["ended"] and names["losses"] == _alone()
    assert outcome.report is not None
    run = outcome.report.data
    assert run.workload.steps == 2 and run.step.backward_ns > 0
    assert any("Planted: " in note for note in run.notes)
    assert all(isinstance(error, Planted) for error in kept)


@pytest.mark.parametrize("name", ["enter", "end_step", "keep"])
def test_without_the_timed_steps_there_is_one_clear_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: list[BaseException]
) -> None:
    _plant(monkeypatch, "capture.phases.timed", "Timed", name)
    with pytest.raises(NothingMeasuredError) as caught:
        _profiled(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/train.py could not be measured: Planted: {name} was called.\nRun 'gradscope doctor' to see why."
    )
    assert kept


def test_what_cannot_be_read_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: list[BaseException]
) -> None:
    _plant(monkeypatch, "capture.modules", "CallRecorder", "table")
    with pytest.raises(NothingMeasuredError) as caught:
        _profiled(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/train.py was measured, but gradscope cannot read its own recording: Planted: table was called.\n"
        "This is a bug in gradscope: GRADSCOPE_DEBUG=1 shows where."
    )


def test_an_error_of_the_users_is_theirs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT.replace("losses.append(loss.item())", "losses.append(loss.item()); 1 / (9 - len(losses))"))
    script = load_target(str(path))
    assert isinstance(script, Script)
    outcome = profile_script(script, Options(steps=2, warmup=2))
    assert isinstance(outcome.error, ZeroDivisionError)


@pytest.mark.parametrize("name", ["_stepped", "_went_backward"])
def test_without_the_ends_of_steps_there_is_one_clear_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: list[BaseException]
) -> None:
    _plant(monkeypatch, "capture.training", "StepFinder", name)
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT.replace("optimizer.step()", "") if name == "_went_backward" else _SCRIPT)
    script = load_target(str(path))
    assert isinstance(script, Script)
    with pytest.raises(NothingMeasuredError) as caught:
        profile_script(script, Options(steps=2, warmup=2, run_to_end=True))
    assert script.namespace["ended"]
    assert str(caught.value) == (
        f"{path} could not be measured: Planted: {name} was called.\nRun 'gradscope doctor' to see why."
    )
    assert kept
