"""Training scripts of every shape, run in script mode through the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradscope.pipeline import Outcome, profile_script
from gradscope.tables import Options, RunData
from gradscope.workload import Script, load_target

_SETUP = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
x = torch.ones(256, 128)
done = 0
"""

_SCRIPTS = {
    # Each ends a step inside backward(), which torch handles with the survey's mode taken off its stack.
    "backward without an optimizer": """
for done in range(60):
    model(x).mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None
""",
    "autograd.grad without an optimizer": """
for done in range(60):
    torch.autograd.grad(model(x).mean(), list(model.parameters()))
""",
    "accumulation": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for done in range(60):
    for _ in range(3):
        model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a record_function around each step": """
optimizer = torch.optim.Adam(model.parameters())
for done in range(60):
    with torch.profiler.record_function("step"):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
""",
    "a record_function around the loop": """
optimizer = torch.optim.Adam(model.parameters())
with torch.profiler.record_function("epoch"):
    for done in range(60):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
""",
    "modules called without their parent": """
model = nn.ModuleDict({"encoder": nn.Linear(128, 256), "decoder": nn.Linear(256, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for done in range(60):
    optimizer.zero_grad()
    model["decoder"](model["encoder"](x).relu()).mean().backward()
    optimizer.step()
""",
}


def _run(folder: Path, text: str, **options: bool) -> tuple[Outcome, Script]:
    path = folder / "train.py"
    path.write_text(_SETUP + text)
    script = load_target(str(path))
    assert isinstance(script, Script)
    return profile_script(script, Options(steps=3, warmup=2, **options)), script


def _checked(outcome: Outcome) -> RunData:
    assert outcome.error is None
    assert outcome.report is not None
    run = outcome.report.data
    assert not run.partial
    assert run.workload.steps == 3
    assert run.ledger.unattributed_ns == 0
    # Each has a loss of a few operations outside of its modules, and no more.
    nodes = [op for op in run.ops if op.phase == "backward"]
    assert sum(op.calls for op in nodes if op.layer is not None) > 0.5 * sum(op.calls for op in nodes)
    assert sum(line.backward_ns for line in run.lines if line.file.endswith("train.py")) > 0
    return run


@pytest.mark.parametrize("text", _SCRIPTS.values(), ids=_SCRIPTS.keys())
def test_steps_are_found_and_the_script_is_stopped(text: str, tmp_path: Path) -> None:
    outcome, script = _run(tmp_path, text)
    _checked(outcome)
    assert script.namespace["done"] < 59


@pytest.mark.parametrize("text", _SCRIPTS.values(), ids=_SCRIPTS.keys())
def test_a_script_may_run_to_its_end(text: str, tmp_path: Path) -> None:
    outcome, script = _run(tmp_path, text, run_to_end=True)
    _checked(outcome)
    assert script.namespace["done"] == 59


def test_three_backward_passes_make_one_step(tmp_path: Path) -> None:
    run = _checked(_run(tmp_path, _SCRIPTS["accumulation"])[0])
    assert {row.path: row.calls for row in run.layers} == {"": 3, "0": 3, "1": 3, "2": 3}


def test_a_parent_that_is_never_called_names_its_parts(tmp_path: Path) -> None:
    run = _checked(_run(tmp_path, _SCRIPTS["modules called without their parent"])[0])
    assert [row.path for row in run.layers] == ["", "encoder", "decoder"]
    assert run.workload.model == "ModuleDict"


def test_an_optimizer_of_somebody_elses_is_not_the_scripts() -> None:
    """It was built before the script ran: a step still ends at each backward pass."""
    from gradscope.capture.training import StepFinder

    boundaries: list[int] = []

    class Counting:
        backward = type("Watch", (), {"ended": None})()

        def boundary(self) -> bool:
            boundaries.append(1)
            return False

    kept = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    session: Any = Counting()
    with StepFinder(session).watching():
        session.backward.ended()
        session.backward.ended()
    assert len(boundaries) == 2 and kept.param_groups
