"""Where the steps of a trace are cut, and what a trace without nodes is said to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradscope.chrome.reading import read_exported
from gradscope.chrome.table import recorded
from gradscope.errors import TraceFileError
from gradscope.tables import RowKind, RunData

from .made import MAIN, STEP_US, Made, two_layers
from .test_attributed import US, read


def _walls(run: RunData) -> list[int]:
    return [step.ns for step in run.step.taken]


@pytest.mark.parametrize("ends", [1, 2, 3, 4])
def test_steps_lie_between_the_ends_of_an_optimizer(tmp_path: Path, ends: int) -> None:
    """What precedes the first end may be a part of a step; it is one where there is no other."""
    run = read(two_layers(ends, marked=False), tmp_path).data
    assert run.workload.steps == max(ends - 1, 1)
    assert _walls(run)[1:] == [STEP_US * US] * (ends - 2)


@pytest.mark.parametrize("late", [0, 0.001, 1, 40, STEP_US - 1])
def test_a_step_ends_no_later_than_the_next_begins(tmp_path: Path, late: float) -> None:
    """Its mark may: then no nanosecond is in both."""
    made = two_layers(3)
    for event in made.events:
        if event["name"].startswith("ProfilerStep#"):
            event["dur"] += late
    run = read(made, tmp_path).data
    assert _walls(run)[:2] == [STEP_US * US] * 2
    assert sum(_walls(run)) == round((3 * STEP_US + late) * US)


@pytest.mark.parametrize("python", [True, False])
@pytest.mark.parametrize("region", ["Torch-Compiled Region: !0/0", "Torch-Compiled Region: 0/0", ""])
def test_a_trace_without_nodes_is_of_inference_or_compiled(tmp_path: Path, python: bool, region: str) -> None:
    """A pass that ran shows by its Python row, or by the region that was made of it."""
    made = Made(python=python)
    made.op("aten::linear", 10, 20, 5)
    made.pass_(30, 60)
    if region:
        made.op(region, 35, 55)
    with pytest.raises(TraceFileError) as raised:
        read(made, tmp_path)
    assert ("compiled autograd" in str(raised.value)) == (python or "!" in region)
    assert ("inference" in str(raised.value)) != ("compiled autograd" in str(raised.value))


@pytest.mark.parametrize("begins", [298, 300, 301, 500, 690])
def test_whatever_begins_in_a_pass_ends_no_step(tmp_path: Path, begins: int) -> None:
    """298 is where ``backward`` is called, 300 where the engine is: an optimizer that steps from there on is in it."""
    made = two_layers(4, marked=False)
    for step in (1, 2):  # less often than the other: it would end the steps
        made.annotation("Optimizer.step#Adam.step", step * STEP_US + begins, step * STEP_US + begins + 5, MAIN)
    run = read(made, tmp_path).data
    assert run.workload.steps == 3 and _walls(run) == [STEP_US * US] * 3


@pytest.mark.parametrize("swapped", [False, True])
def test_of_optimizers_that_step_alike_the_last_ends_a_step(tmp_path: Path, swapped: bool) -> None:
    """Whatever they are called; here the last takes longer from step to step."""
    names = ["Optimizer.step#SGD.step", "Optimizer.step#Adam.step"]
    first, last = reversed(names) if swapped else names
    made = Made()
    for step in range(4):
        at = step * STEP_US
        made.op("aten::linear", at + 10, at + 90, 5 + step)
        made.pass_(at + 300, at + 700)
        made.node("AddmmBackward0", at + 310, at + 390, 5 + step, tid=MAIN)
        made.annotation(first, at + 750, at + 800)
        made.annotation(last, at + 810, at + 850 + 10 * step)
    assert _walls(read(made, tmp_path).data) == [(STEP_US + 10) * US] * 3


def test_an_optimizer_between_two_passes_is_in_neither(tmp_path: Path) -> None:
    """Of two losses over one forward: without Python rows passes are told by what lies between their nodes."""
    made = Made(python=False)
    made.annotation("ProfilerStep#1", 0, STEP_US)
    made.op("aten::linear", 10, 50, 5)
    made.op("aten::linear", 60, 90, 6)
    for number, at in ((6, 300), (5, 500)):
        made.node("AddmmBackward0", at, at + 90, number, tid=MAIN)
        made.annotation("Optimizer.step#SGD.step", at + 100, at + 160)
    step = read(made, tmp_path).data.step
    assert (step.backward_ns, step.optimizer_ns) == (2 * 90 * US, 2 * 60 * US)


def test_passes_lie_in_threads_of_the_trace(tmp_path: Path) -> None:
    """Also where forward ran in a thread, or before the trace, that it does not show."""
    made = Made(python=False, arrows=False)
    made.op("aten::linear", 10, 50, 900)
    for number in (5, 6):
        made.node("AddmmBackward0", 100 * number, 100 * number + 90, number, (MAIN + 7, 0))
    table = recorded(read_exported(made.save(tmp_path / "trace.json"))).table
    shown = table.thread[np.isin(table.kind, (RowKind.OP, RowKind.NODE))]
    assert np.isin(table.thread[table.kind == RowKind.BACKWARD], shown).all()


@pytest.mark.parametrize("python", [True, False])
def test_optimizers_that_step_in_nodes_end_no_step(tmp_path: Path, python: bool) -> None:
    """One of each parameter, in the row of its gradient; also where Python's rows do not tell of the pass."""
    made = Made(python=python)
    for step in range(3):
        at = 1000 * step
        made.op("aten::linear", at + 30, at + 100, step)
        made.pass_(at + 300, at + 700)
        made.node("AddmmBackward0", at + 310, at + 370, step, tid=MAIN)
        made.accumulate(at + 370, at + 430, MAIN)
        made.annotation("Optimizer.step#SGD.step", at + 380, at + 420)
    assert read(made, tmp_path).data.workload.steps == 1


def test_a_pass_of_another_thread_is_not_around_an_optimizer(tmp_path: Path) -> None:
    made = two_layers(4, marked=False)
    alone = read(made, tmp_path).data.workload.steps
    for step in range(4):
        made.op("aten::linear", 1000 * step + 30, 1000 * step + 40, 900 + step, tid=MAIN + 1)
        made.pass_(1000 * step + 710, 1000 * step + 820, MAIN + 1)
    assert read(made, tmp_path).data.workload.steps == alone == 3


@pytest.mark.parametrize("python", [True, False])
def test_what_fsdp_does_behind_the_last_node_is_of_the_pass(tmp_path: Path, python: bool) -> None:
    made = Made(python=python)
    made.annotation("ProfilerStep#0", 0, 1000)
    made.op("aten::linear", 50, 90, 5)
    made.pass_(300, 700)
    made.node("AddmmBackward0", 340, 400, 5, tid=MAIN)
    made.annotation("FSDP::root_post_backward_callback", 420, 600)
    made.annotation("FSDP::post_backward_reduce", 430, 500)
    made.op("c10d::_reduce_scatter_base_", 460, 490)
    made.annotation("FSDP::pre_forward (l0)", 800, 850)  # of the next forward
    made.op("aten::linear", 860, 890, 6)
    run = read(made, tmp_path).data
    assert run.step.forward_ns == (40 + 50 + 30) * US
    assert run.ledger.communication_ns >= 180 * US
    assert run.step.backward_ns == (400 if python else 260) * US


def test_what_a_process_groups_thread_launches_takes_nothing_from_the_step(tmp_path: Path) -> None:
    """gloo copies tensors of a GPU, and the step waits for it: the time of the step is that of its host."""
    made = Made()
    for step in range(2):
        at = 1000 * step
        made.annotation(f"ProfilerStep#{step}", at, at + 1000)
        made.launch(made.op("aten::linear", at + 30, at + 80, 5 + 10 * step), at + 40, at + 60, at + 150)
        made.pass_(at + 300, at + 700)
        made.node("AddmmBackward0", at + 400, at + 480, 5 + 10 * step)
        made.annotation("gloo:all_reduce", at + 500, at + 640, 30)
        copy = made.op("aten::copy_", at + 510, at + 530, tid=30)
        made.launch(copy, at + 515, at + 520, at + 600, 30, name="Memcpy DtoH", stream=9)
    run = read(made, tmp_path).data
    assert (run.step.wall_ns, run.step.backward_ns) == (1000 * US, 400 * US)
    assert run.device is not None and run.device.kernel_ns > 0
