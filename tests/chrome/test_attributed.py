"""What a trace of known costs is charged to: device and host, by layer, phase and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradscope.chrome.run import read_trace
from gradscope.chrome.steps import _turns
from gradscope.report import Report
from gradscope.tables import Ledger
from gradscope.workload import Workload
from tests.chrome.made import ENGINE, MAIN, STEP_US, Made, two_layers

US = 1000  # nanoseconds


def read(made: Made, folder: Path, **how: Any) -> Report:
    return read_trace(made.save(folder / "trace.json"), **how)


def of_layers(report: Report, column: str) -> dict[str, Any]:
    return {row.path: getattr(row, column) for row in report.data.layers}


def device_parts(report: Report) -> dict[str, int]:
    device = report.data.device
    assert device is not None
    return {name: value for name in device.PARTS if (value := getattr(device, name))}


EXPECTED = {
    "forward_ns": 70 * US,  # both layers, and the loss
    "layers_ns": 150 * US,
    "accumulate_ns": 10 * US,
    "communication_ns": 140 * US,
    "optimizer_ns": 10 * US,
}


def test_the_device_s_time_is_known_by_layer_and_phase(tmp_path: Path) -> None:
    report = read(two_layers(), tmp_path)
    assert report.data.workload.steps == 2 and report.data.workload.mode == "trace"
    assert device_parts(report) == EXPECTED
    assert of_layers(report, "device_ns") == {"": 0, "Linear_0": 120 * US + 10 * US, "Linear_1": 90 * US}
    device = report.data.device
    assert device is not None and device.kernel_ns == sum(EXPECTED.values())
    # Alone: 550 to 560, and 570 to 600.
    assert (device.collectives_ns, device.exposed_ns) == (140 * US, 40 * US)


def test_a_step_is_the_device_s_work_and_what_it_idled(tmp_path: Path) -> None:
    """Each step's kernels end before the next begins, so its share of the timeline is its length."""
    step = read(two_layers(3), tmp_path).data.step
    assert step.wall_ns == STEP_US * US
    assert step.spread["wall"].std_ns == 0
    assert [one.ns for one in step.taken] == [STEP_US * US] * 3


def test_backward_is_the_kernels_and_the_idle_time_of_its_host(tmp_path: Path) -> None:
    """Of the pass, 300 to 700: 190 of compute and accumulation, 40 of the collective alone, and 160 idle."""
    ledger = read(two_layers(), tmp_path).data.ledger
    busy = {"layers_ns": 150, "accumulate_ns": 10, "communication_ns": 40}
    idle = 400 - 200  # the device works 400 to 600
    assert ledger.backward_ns == (sum(busy.values()) + idle) * US
    # Before 400, while the device idles: the nodes of Linear_1 (60) and of the loss (20); the rest is the engine's.
    assert ledger.layers_ns == (150 + 60) * US
    assert ledger.outside_modules_ns == 20 * US
    assert ledger.engine_ns == (idle - 60 - 20) * US
    assert (ledger.accumulate_ns, ledger.communication_ns) == (10 * US, 40 * US)


@pytest.mark.parametrize("how", [{"arrows": False}, {"correlated": False}, {"arrows": False, "correlated": False}])
def test_older_traces_say_the_same(tmp_path: Path, how: dict[str, bool]) -> None:
    """Threads by their numbers where there are no arrows; kernels by their operation where nothing correlates."""
    made = two_layers(**how)
    if not how.get("correlated", True):  # a collective is in no operation: it needs the number of its own row
        made.events = [event for event in made.events if "nccl" not in event["name"]]
    report = read(made, tmp_path)
    expected = dict(EXPECTED)
    if not how.get("correlated", True):
        del expected["communication_ns"]
    assert device_parts(report) == expected
    assert of_layers(report, "device_ns") == {"": 0, "Linear_0": 130 * US, "Linear_1": 90 * US}


def test_without_python_time_is_known_by_phase_and_operation(tmp_path: Path) -> None:
    report = read(two_layers(python=False), tmp_path)
    assert not report.data.layers
    # A pass lasts from its first evaluated node to its last.
    assert report.data.ledger.backward_ns == read(two_layers(), tmp_path).data.ledger.backward_ns - (10 + 100) * US
    expected = {**EXPECTED, "outside_modules_ns": EXPECTED["layers_ns"] + EXPECTED["accumulate_ns"]}
    del expected["layers_ns"], expected["accumulate_ns"]
    assert device_parts(report) == expected
    notes = " ".join(report.data.notes)
    assert "with_stack=True, record_shapes=True" in notes and "first evaluated node" in notes
    assert "Python between them, with what waits in it for collectives, counts as between the phases" in notes
    ops = {(row.name, row.phase): row.shape for row in report.data.ops}
    assert ops["aten::linear", "forward"] == "[8, 64] [64, 64]"
    assert ("AddmmBackward0", "backward") in ops


@pytest.mark.parametrize("python", [True, False])
def test_a_pass_over_what_other_threads_made_counts_once(tmp_path: Path, python: bool) -> None:
    """Two workers run forward, and the thread that marks the steps goes backward, inside of its mark."""
    made = Made(python=python)
    made.annotation("ProfilerStep#1", 0, 1000)
    for number, worker in ((7, MAIN + 1), (8, MAIN + 2)):
        made.op("aten::linear", 10, 200, number, worker)
    made.pass_(300, 700)
    made.node("AddmmBackward0", 310, 400, 8, (MAIN + 2, 10), MAIN)
    made.node("AddmmBackward0", 420, 600, 7, (MAIN + 1, 10), MAIN)
    data = read(made, tmp_path).data
    assert data.ledger.outside_modules_ns == (90 + 180) * US
    # Without Python a pass lasts from its first node to its last.
    assert data.step.backward_ns == (400 if python else 290) * US


def test_what_the_trace_did_not_record_is_absent(tmp_path: Path) -> None:
    run = read(two_layers(), tmp_path).data
    assert run.memory is None and not run.lines
    assert {row.saved_bytes for row in run.layers} == {None}
    assert run.step.overhead is None and run.step.unprofiled_wall_ns is None
    assert run.environment == {
        "device": "cuda",
        "device_name": "Made GPU",
        "rank": 3,
        "world_size": 8,
        "backend": "nccl",
    }


def test_kernels_launched_before_the_trace_or_by_nobody_are_named(tmp_path: Path) -> None:
    made = two_layers()
    made.kernel(1, 9, correlation=50)  # smaller than any number of the trace
    made.kernel(900, 930, correlation=100_000)
    report = read(made, tmp_path)
    assert device_parts(report) == {**EXPECTED, "before_ns": 4 * US, "unknown_ns": 15 * US}
    assert any("before the trace began" in note for note in report.data.notes)
    text = report.to_markdown(show=("device",))
    assert "before the trace" in text and "unknown" in text


def test_a_graph_s_kernels_are_of_its_launch(tmp_path: Path) -> None:
    made = two_layers(1)
    made.numbers += 1
    for start, end in ((700, 710), (710, 740)):
        made.kernel(start, end, correlation=made.numbers)
    made.add("cuda_runtime", "cudaGraphLaunch", 650, 652, MAIN, correlation=made.numbers)
    report = read(made, tmp_path)
    graph = [row for row in report.data.kernels if row.op == "cudaGraphLaunch"]
    assert sum(row.device_ns for row in graph) == 40 * US and sum(row.calls for row in graph) == 2


def test_numbers_are_of_their_thread(tmp_path: Path) -> None:
    """Two threads draw the same numbers, as replicas do: each node belongs to the thread that it was made on."""
    made = Made()
    other = MAIN + 1
    made.annotation("ProfilerStep#1", 0, 1000)
    for tid, name, at in ((MAIN, "Linear_0", 10), (other, "Conv2d_0", 15)):
        made.call(name, at, at + 50, tid)
        made.op("aten::op", at + 10, at + 20, 7, tid)
    made.pass_(300, 600)
    op = made.node("FirstBackward0", 310, 330, 7, (MAIN, 20))
    made.launch(op, 315, 330, 340, ENGINE)
    op = made.node("SecondBackward0", 340, 360, 7, (other, 25))
    made.launch(op, 345, 360, 390, ENGINE)
    assert of_layers(read(made, tmp_path), "device_ns") == {"Linear_0": 10 * US, "Conv2d_0": 30 * US}


def test_what_is_run_again_in_backward_is_recompute(tmp_path: Path) -> None:
    """A checkpoint calls the module again on the engine's thread, where its nodes have other numbers."""
    made = Made()
    made.annotation("ProfilerStep#1", 0, 1000)
    made.call("Net_0", 10, 200)
    made.call("Linear_0", 20, 100)
    made.op("CheckpointFunction", 25, 90, 5)
    made.pass_(300, 700)
    op = made.node("CheckpointFunctionBackward", 310, 600, 5, (MAIN, 25))
    made.call("Linear_0", 320, 400, ENGINE)
    op = made.op("aten::linear", 330, 390, 40, ENGINE)
    made.launch(op, 340, 400, 420, ENGINE)
    made.pass_(410, 590, ENGINE)
    op = made.node("AddmmBackward0", 420, 580, 40, (ENGINE, 330))
    made.launch(op, 430, 450, 500, ENGINE)
    made.annotation("prefetch", 0, 50, 30)
    made.op("aten::copy_", 0, 5, tid=30)  # where the trace begins, and nothing is run again
    report = read(made, tmp_path)
    assert device_parts(report) == {"recompute_ns": 20 * US, "layers_ns": 50 * US}
    recompute = of_layers(report, "recompute_ns")
    assert recompute["Linear_0"] >= 20 * US and recompute[""] == 0


@pytest.mark.parametrize("builds", [True, False])
def test_operations_of_a_pass_that_builds_a_graph_are_no_recompute(tmp_path: Path, builds: bool) -> None:
    """With gradients on all of them show numbers; what a checkpoint runs again in a node comes before its own."""
    made = Made()
    made.annotation("ProfilerStep#1", 0, 1000)
    made.call("Net_0", 10, 200)
    made.op("aten::linear", 20, 100, 5)
    made.op("aten::linear", 100, 150, 6)
    made.pass_(300, 700)
    for number, at in ((6, 310), (5, 410)):
        made.node("AddmmBackward0", at, at + 80, number, (MAIN, 20), MAIN)
        made.op("aten::relu", at + 10, at + 40, 40, MAIN)
        made.op("aten::mm", at + 40, at + 70, 41 if builds else -1, MAIN)
    data = read(made, tmp_path).data
    times = {(op.phase, op.name): op.self_ns for op in data.ops if op.name.startswith("aten") and op.phase != "forward"}
    assert times == {("backward" if builds else "recompute", "aten::relu"): 60 * US, ("backward", "aten::mm"): 60 * US}
    assert (data.ledger.recompute_ns == 0) == builds


def test_a_module_first_seen_while_it_is_run_again_stands_where_forward_called_it(tmp_path: Path) -> None:
    """The trace begins in the middle of a backward pass."""
    made = Made()
    made.annotation("ProfilerStep#1", 0, 1000)
    made.pass_(0, 100)
    made.node("CheckpointFunctionBackward", 10, 90, 3, (MAIN, 0))
    made.call("Linear_0", 20, 40, ENGINE)
    made.op("aten::linear", 25, 35, 1, ENGINE)
    made.call("Net_0", 200, 400)
    made.call("Linear_0", 220, 300)
    made.op("aten::linear", 230, 290, 5)
    made.pass_(500, 600)
    made.node("AddmmBackward0", 510, 590, 5, (MAIN, 230))
    assert [(row.path, row.parent) for row in read(made, tmp_path).data.layers] == [("", None), ("Linear_0", "")]


@pytest.mark.parametrize(("steps", "wanted"), [((4, 4), 1), ((5, 9), 2), ((0, 4), 1), (None, 3)])
def test_steps_are_chosen_by_their_number(tmp_path: Path, steps: tuple[int, int] | None, wanted: int) -> None:
    report = read(two_layers(3), tmp_path, steps=steps)
    assert report.data.workload.steps == wanted
    parts = device_parts(report)
    elsewhere = parts.pop("elsewhere_ns", 0)
    assert parts == EXPECTED
    assert elsewhere == (3 - wanted) * sum(EXPECTED.values()) // wanted


def test_without_numbers_a_step_ends_where_its_optimizer_has_stepped(tmp_path: Path) -> None:
    """What precedes the first end may be a part of a step: it does not count where a whole one follows."""
    report = read(two_layers(3, marked=False), tmp_path)
    assert report.data.workload.steps == 2
    assert report.data.step.wall_ns == STEP_US * US
    assert read(two_layers(1, marked=False), tmp_path).data.workload.steps == 1
    assert any("optimizer's step ends" in note for note in report.data.notes)


@pytest.mark.parametrize("name", ["aten::randn", "Optimizer.zero_grad#SGD.zero_grad", "Optimizer.step#SGD.step"])
@pytest.mark.parametrize("marked", [True, False])
def test_what_begins_as_a_step_ends_moves_no_step(tmp_path: Path, marked: bool, name: str) -> None:
    """Files of whole microseconds have many such moments, and the first row of a trace is at its very beginning."""
    made = two_layers(4, marked=marked)
    for step in range(4):
        at = step * STEP_US + (STEP_US if marked else 800)
        if name.startswith("aten"):
            made.op(name, at, at + 5)
        elif marked or "zero_grad" in name:
            made.annotation(name, at, at + 5)
    report = read(made, tmp_path)
    assert report.data.workload.steps == (4 if marked else 3)
    assert [one.ns for one in report.data.step.taken] == [STEP_US * US] * report.data.workload.steps
    assert report.data.ledger == read(two_layers(4, marked=marked), tmp_path).data.ledger


@pytest.mark.parametrize("python", [True, False])
def test_a_trace_that_begins_with_an_operation_below_autograd_has_its_step(tmp_path: Path, python: bool) -> None:
    """As of ``profile(with_stack=True)`` around ``x = torch.randn(...)`` and one step."""
    made = two_layers(1, marked=False, python=python)
    made.op("aten::randn", -5, 5)
    report = read(made, tmp_path)
    assert report.data.workload.steps == 1
    assert report.data.step.wall_ns == 805 * US and report.data.step.forward_ns > 0


def test_a_pass_behind_the_last_step_of_the_optimizer_is_in_the_whole_trace(tmp_path: Path) -> None:
    made = two_layers(1, marked=False)
    made.annotation("Optimizer.step#SGD.step", -50, -10)
    made.events = [
        event for event in made.events if not (event["name"] == "Optimizer.step#SGD.step" and event["ts"] > 0)
    ]
    report = read(made, tmp_path)
    assert report.data.workload.steps == 1 and report.data.step.backward_ns == 400 * US
    assert any("all of it is taken for one" in note for note in report.data.notes)


def test_kernels_of_before_the_first_step_are_told(tmp_path: Path) -> None:
    notes = " ".join(read(two_layers(3, marked=False), tmp_path).data.notes)
    assert "380 µs of kernels were launched before the first of these ends and are in no step" in notes
    for made, steps in (
        (two_layers(3), None),
        (two_layers(1, marked=False), None),
        (two_layers(3, marked=False), (1, 1)),
    ):
        assert "are in no step" not in " ".join(read(made, tmp_path, steps=steps).data.notes)


def test_kernels_of_unknown_launch_are_work_of_the_device(tmp_path: Path) -> None:
    """They are no idle time, and hide the collective: 570 to 600 of it is beside one. The wall is as it was."""
    made = two_layers()
    for step in range(2):
        for start, end in ((570, 600), (602, 742)):
            made.kernel(step * STEP_US + start, step * STEP_US + end, correlation=100_000)
    data, plain = read(made, tmp_path).data, read(two_layers(), tmp_path).data
    assert data.device is not None and plain.device is not None
    assert data.device.unknown_ns == 170 * US
    assert data.device.idle_ns == plain.device.idle_ns - 140 * US
    assert data.device.exposed_ns == plain.device.exposed_ns - 30 * US
    assert data.step == plain.step and data.ledger == plain.ledger


def test_of_several_optimizers_the_one_that_steps_least_ends_a_step(tmp_path: Path) -> None:
    made = two_layers(3, marked=False)
    for step in range(3):
        made.annotation("Optimizer.step#Critic.step", step * STEP_US + 610, step * STEP_US + 620)
        made.annotation("Optimizer.step#Critic.step", step * STEP_US + 630, step * STEP_US + 640)
    report = read(made, tmp_path)
    assert report.data.workload.steps == 2 and report.data.step.wall_ns == STEP_US * US


def test_optimizers_of_one_class_take_turns(tmp_path: Path) -> None:
    """A GAN with two of Adam: the critic's loss has one node, the generator's two. Two turns are one step."""
    made = Made()
    for turn in range(6):
        at, number = turn * 100.0, 10 * turn
        nodes = 1 + turn % 2
        made.call("Linear_0", at + 10, at + 30)
        for node in range(nodes):
            made.op("aten::linear", at + 12 + 5 * node, at + 14 + 5 * node, number + node)
        made.pass_(at + 40, at + 80)
        for node in range(nodes):
            made.node("AddmmBackward0", at + 50 + 10 * node, at + 55 + 10 * node, number + node, (MAIN, at + 12))
            made.accumulate(at + 56 + 10 * node, at + 58 + 10 * node)
        made.annotation("Optimizer.step#Adam.step", at + 85, at + 95)
    report = read(made, tmp_path)
    assert any("2 steps of an optimizer are taken for one" in note for note in report.data.notes)
    assert report.data.workload.steps == 2 and report.data.step.wall_ns == 200 * US
    (node,) = [op for op in report.data.ops if op.phase == "backward"]
    assert node.calls == 3


def test_one_optimizer_takes_no_turns_with_itself(tmp_path: Path) -> None:
    """Every second sequence is longer, and so has more nodes: the same parameters."""
    made = Made()
    for step in range(6):
        at, number = step * 100.0, 10 * step
        made.call("Linear_0", at + 10, at + 30)
        made.pass_(at + 40, at + 80)
        for node in range(1 + step % 2):
            made.op("aten::linear", at + 12 + 5 * node, at + 14 + 5 * node, number + node)
            made.node("AddmmBackward0", at + 50 + 10 * node, at + 55 + 10 * node, number + node, (MAIN, at + 12))
        made.accumulate(at + 76, at + 78)
        made.annotation("Optimizer.step#Adam.step", at + 85, at + 95)
    assert read(made, tmp_path).data.workload.steps == 5


def test_an_optimizer_that_steps_within_a_pass_ends_no_step(tmp_path: Path) -> None:
    """One for each parameter, in its hook."""
    made = two_layers(3, marked=False)
    for step in range(3):
        made.annotation("Optimizer.step#Adam.step", step * STEP_US + 610, step * STEP_US + 620)
    report = read(made, tmp_path)
    assert report.data.workload.steps == 2 and report.data.step.wall_ns == STEP_US * US


def test_a_step_of_several_turns_ends_with_the_last_of_them(tmp_path: Path) -> None:
    """Iterations of other lengths: each is a step by itself, and none a part of two."""
    made = Made()
    at, number, lengths = 0.0, 0, (1, 2, 4, 7)
    for length in lengths:
        for nodes in (1, 2):
            made.call("Linear_0", at + 10, at + 30)
            for node in range(nodes):
                made.op("aten::linear", at + 12 + 5 * node, at + 14 + 5 * node, number + node)
            made.pass_(at + 40, at + 80)
            for node in range(nodes):
                made.node("AddmmBackward0", at + 50 + 10 * node, at + 55 + 10 * node, number + node, (MAIN, at + 12))
                made.accumulate(at + 56 + 10 * node, at + 58 + 10 * node)
            made.annotation("Optimizer.step#Adam.step", at + 85, at + 100 * length)
            at, number = at + 100 * length, number + nodes
    report = read(made, tmp_path)
    assert [step.ns for step in report.data.step.taken] == [200 * length * US for length in lengths[1:]]


@pytest.mark.parametrize(
    ("gradients", "turns"),
    [
        ([5, 5, 5, 5], 1),
        ([5, 9, 5, 9], 2),
        ([5, 9, 5], 1),
        ([5, 9, 9, 5], 1),
        ([5, 9], 1),
        ([1, 2, 3] * 2, 3),
        ([1, 2, 3, 4] * 2, 4),
        ([7, 7, 7, 7, 7, 3] * 2, 6),  # five of a critic, one of a generator
        ([], 1),
    ],
)
def test_turns_are_told_by_what_comes_again(gradients: list[int], turns: int) -> None:
    assert _turns(gradients) == turns


def test_a_step_that_runs_ahead_of_the_device_takes_what_its_kernels_take(tmp_path: Path) -> None:
    """The host queues both steps within 200 microseconds; the device works until 2,000."""
    made = Made()
    for step in range(2):
        at, number = step * 100.0, 3 * step
        made.annotation(f"ProfilerStep#{step}", at, at + 100)
        made.call("Linear_0", at + 10, at + 30)
        op = made.op("aten::linear", at + 12, at + 28, number)
        made.launch(op, at + 15, 300 + 1000 * step, 700 + 1000 * step)
        made.pass_(at + 40, at + 90)
        op = made.node("AddmmBackward0", at + 50, at + 80, number, (MAIN, at + 12))
        made.launch(op, at + 60, 700 + 1000 * step, 1300 + 1000 * step, ENGINE)
    report = read(made, tmp_path)
    step = report.data.step
    assert step.wall_ns == (100 + 1000) * US  # idle while it was queued, and its kernels
    assert step.forward_ns == (400 + 20) * US and step.backward_ns == (600 + 50) * US and step.other_ns == 30 * US


def test_two_files_of_one_step_are_alike_packed_or_not(tmp_path: Path) -> None:
    plain = read_trace(two_layers().save(tmp_path / "trace.json"))
    packed = read_trace(two_layers().save(tmp_path / "trace.json.gz"))
    assert plain.data.ledger == packed.data.ledger and plain.data.layers == packed.data.layers


def test_a_trace_is_a_run_like_any_other(tmp_path: Path) -> None:
    report = read(two_layers(), tmp_path)
    saved = report.save(tmp_path / "run.json")
    from gradscope.report import load

    assert load(saved).data == report.data
    assert "AddmmBackward0" in report.to_speedscope()
    page = report.to_html(tmp_path / "run.html").read_text(encoding="utf-8")
    assert "Linear_1" in page
    assert sum(getattr(report.data.ledger, name) for name in Ledger.PARTS) == report.data.step.backward_ns


def _two_threads(made: Made) -> Made:
    """Each draws number 7, without arrows: nothing tells whose node is whose."""
    made.arrows = False
    made.annotation("ProfilerStep#1", 0, 1000)
    for tid, name, at in ((MAIN, "Linear_0", 10), (MAIN + 1, "Conv2d_0", 15)):
        made.call(name, at, at + 50, tid)
        made.op("aten::op", at + 10, at + 20, 7, tid)
    made.pass_(300, 600)
    made.node("FirstBackward0", 310, 330, 7, (MAIN, 20))
    made.node("SecondBackward0", 340, 400, 7, (MAIN + 1, 25))
    return made


def test_nodes_that_may_be_of_several_threads_are_of_none(tmp_path: Path) -> None:
    report = read(_two_threads(Made()), tmp_path)
    assert of_layers(report, "backward_self_ns") == {"Linear_0": 0, "Conv2d_0": 0}
    assert report.data.ledger.unattributed_ns == 80 * US


def test_many_threads_are_told_as_fast_as_few(tmp_path: Path) -> None:
    """2,000 threads of one node each took over a minute when each was asked for each."""
    made = Made()
    made.arrows = False
    made.annotation("ProfilerStep#1", 0, 100_000)
    for thread in range(2_000):
        made.op("aten::op", 10 + thread, 10.5 + thread, thread, 1_000 + thread)
    made.pass_(50_000, 90_000)
    for thread in range(2_000):
        made.node("OpBackward0", 50_010 + 10 * thread, 50_015 + 10 * thread, thread, (1_000 + thread, 0))
    assert read(made, tmp_path).data.ledger.backward_ns > 0


def _classes_of_one_name() -> Made:
    """weight_norm: the two Linears are of two classes, and both are the first of their name."""
    made = Made()
    made.annotation("ProfilerStep#1", 0, 1000)
    made.call("Net_0", 5, 250)
    for number, (outer, at) in enumerate((("Encoder_0", 10), ("Decoder_0", 110))):
        made.call(outer, at, at + 90)
        made.call("ParametrizedLinear_0", at + 5, at + 80)
        made.op("aten::op", at + 10, at + 20, 7 + number)
    made.pass_(300, 600)
    made.node("SecondBackward0", 310, 510, 8, (MAIN, 120))
    made.node("FirstBackward0", 520, 530, 7, (MAIN, 20))
    return made


def test_modules_of_one_name_below_two_others_are_two_layers(tmp_path: Path) -> None:
    report = read(_classes_of_one_name(), tmp_path)
    found = of_layers(report, "backward_self_ns")
    assert (found["Encoder_0.ParametrizedLinear_0"], found["Decoder_0.ParametrizedLinear_0"]) == (10 * US, 200 * US)
    assert any("several modules call ParametrizedLinear_0" in note for note in report.data.notes)


def test_a_model_tells_modules_of_one_name(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = type("ParametrizedLinear", (nn.Linear,), {})(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    class Decoder(Encoder):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Encoder(), Decoder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.encoder(x))

    report = read(_classes_of_one_name(), tmp_path, model=Workload(Net(), torch.ones(2, 4)))
    found = of_layers(report, "backward_self_ns")
    assert (found["encoder.linear"], found["decoder.linear"]) == (10 * US, 200 * US)


def test_collectives_are_those_of_the_steps_that_count(tmp_path: Path) -> None:
    made = two_layers(3)
    every = read(made, tmp_path).data.device
    one = read(made, tmp_path, steps=(5, 5)).data.device
    assert every is not None and one is not None
    assert one.collectives_ns == every.collectives_ns > 0
    assert one.exposed_ns == every.exposed_ns


@pytest.mark.parametrize(
    "name", ["vllm::all_reduce", "mylib::gather_rows", "symm_mem::one_shot_all_reduce", "_c10d_functional::all_reduce"]
)
def test_a_collective_is_communication_whatever_launched_it(name: str, tmp_path: Path) -> None:
    made = Made()
    for step in range(2):
        at, number = step * STEP_US, 100 * step
        made.annotation(f"ProfilerStep#{step}", at, at + STEP_US)
        made.call("Linear_0", at + 20, at + 150)
        made.launch(made.op("aten::linear", at + 30, at + 50, number), at + 40, at + 60, at + 100)
        made.launch(made.op(name, at + 60, at + 80), at + 70, at + 80, at + 280, name="ncclDevKernel_X", stream=9)
        made.pass_(at + 300, at + 700)
        made.node("AddmmBackward0", at + 310, at + 400, number, (MAIN, at + 30))
    report = read(made, tmp_path)
    (layer,) = report.data.layers
    # 180 of the kernel while nothing else runs, and what the host took for an operation that is known to be one.
    assert layer.forward_communication_ns in (180 * US, 200 * US)
    assert layer.overlapped_communication_ns == 20 * US
