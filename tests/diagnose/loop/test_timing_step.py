"""What slows the whole step, made by hand: scripts and GPUs can be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules.loop import data_loading, host_sync, unused_gradients
from gradscope.recording.graph import Node
from gradscope.tables import Finding, LineRow, OptimizerFact, ParameterFact
from tests.diagnose.timing_cases import MS, call, check_words, made_case, op, row, tensor


def _parameter(path: str, *, has_grad: bool, optimized: bool | None = None) -> ParameterFact:
    return ParameterFact(path, path.rpartition(".")[0], (4, 4), "float32", "cpu", True, has_grad, optimized)


def test_gradients_that_were_set_to_none_say_nothing() -> None:
    none = StepFacts(parameters=(_parameter("a.weight", has_grad=False), _parameter("b.weight", has_grad=False)))
    assert list(unused_gradients.find(made_case(facts=none))) == []
    some = StepFacts(parameters=(_parameter("a.weight", has_grad=True), _parameter("b.weight", has_grad=False)))
    assert len(list(unused_gradients.find(made_case(facts=some)))) == 1
    run = made_case([row("a", MS, MS), row("b", MS, 0)]).run
    ledger = replace(run.ledger, accumulate_ns=5, outside_modules_ns=run.ledger.outside_modules_ns)
    rows = [replace(each, accumulate_ns=5) if each.path == "b" else each for each in run.layers]
    rows[0] = replace(rows[0], backward_total_ns=rows[0].backward_total_ns + 5)
    ledger = replace(ledger, backward_ns=ledger.backward_ns + 5)
    step = replace(run.step, backward_ns=run.step.backward_ns + 5, other_ns=run.step.other_ns - 5)
    written = Case(replace(run, layers=tuple(rows), ledger=ledger, step=step), some)
    assert list(unused_gradients.find(written)) == []


def test_a_parameter_that_another_step_led_to_is_used() -> None:
    first, second = _parameter("a.weight", has_grad=True), _parameter("b.weight", has_grad=False)
    reached = StepFacts(parameters=(first, replace(second, reached=True)))
    assert list(unused_gradients.find(made_case(facts=reached))) == []


def test_an_expert_that_no_measured_step_led_to_is_used_where_it_was_stepped() -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ab"})
    optimizer = torch.optim.Adam(model.parameters())
    steps = 0
    with gradscope.profiling(model, steps=2, warmup=2) as prof:
        done = False
        while not done:
            optimizer.zero_grad()
            model["b" if steps == 0 else "a"](torch.ones(4, 8)).sum().backward()
            optimizer.step()
            steps += 1
            done = prof.step()
    assert "unused-gradients" not in {finding.rule for finding in prof.report.data.findings}


def test_no_optimizer_known_means_no_gradient_is_wasted() -> None:
    parameters = (_parameter("a.weight", has_grad=True, optimized=False),)
    assert list(unused_gradients.find(made_case(facts=StepFacts(parameters=parameters)))) == []
    other = _parameter("b.weight", has_grad=True, optimized=True)
    known = StepFacts(parameters=(*parameters, other), optimizers=(OptimizerFact("SGD", None, None, 1, 16),))
    assert len(list(unused_gradients.find(made_case(facts=known)))) == 1


@pytest.mark.parametrize("mode", ["script", "loop"])
def test_time_between_the_phases(mode: str) -> None:
    (found,) = data_loading.find(made_case(mode=mode, forward=20 * MS, backward=30 * MS, optimizer=10 * MS))
    check_words(found)
    assert "40.0 %" in found.evidence
    assert found.predicted_high_ns == 40 * MS  # the engine takes what is left in any case
    assert "pin_memory" not in found.code


def test_what_gradscope_takes_is_not_between_the_phases() -> None:
    own = op(None, "other", "(gradscope)", 35 * MS)
    made = made_case(ops=[own], mode="script", forward=30 * MS, backward=30 * MS)
    assert made.run.own_ns == 35 * MS
    assert list(data_loading.find(made)) == []


def test_time_between_the_phases_that_is_no_reason() -> None:
    assert list(data_loading.find(made_case(mode="model", forward=20 * MS, backward=30 * MS))) == []
    assert list(data_loading.find(made_case(mode="loop", forward=45 * MS, backward=45 * MS))) == []
    # One step of many wrote a checkpoint: the usual one did not.
    assert list(data_loading.find(made_case(mode="loop", forward=20 * MS, backward=30 * MS, median=52 * MS))) == []


def _waiting(*calls: Node, text: str = "", device: str = "cuda") -> list[Finding]:
    line = LineRow("model.py", 12, "forward", text, "body", 5 * MS, 0)
    facts = StepFacts(calls=calls, recorded=True)
    ops = [op("body", "forward", "aten::item", 2 * MS, len(calls))]
    return list(host_sync.find(made_case(ops=ops, lines=[line], facts=facts, device=device)))


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (call("item", [tensor()]), ".item()"),
        (call("__bool__", [tensor(dtype="bool")]), "if"),
        (call("nonzero", [tensor(4)], [tensor(2, 1)]), "nonzero"),
        (call("getitem", [tensor(4), tensor(4, dtype="bool")], [tensor(2)]), "a boolean mask"),
        (call("getitem", [tensor(4)], [tensor(2)], args=(tensor(4), [tensor(4, dtype="bool")])), "a boolean mask"),
        (call("cpu", [tensor(4)], [tensor(4, device="cpu")]), ".cpu()"),
        (call("to", [tensor(4)], [tensor(4, device="cpu")], args=(tensor(4), "cpu")), ".to()"),
        (call("to", [tensor(4, device="cpu")], [tensor(4)], args=(tensor(4), "cuda", False)), ".to() 1 time"),
        (call("tensor", [], [tensor(4)], args=(...,), kwargs={"device": ...}), "torch.tensor"),
        (call("__repr__", [tensor(4)]), "repr()"),
        (call("__format__", [tensor()], args=(tensor(), ".3f")), "format()"),
    ],
    ids=lambda value: value.op if isinstance(value, Node) else None,
)
def test_calls_that_wait_for_the_gpu(made: Node, what: str) -> None:
    (found,) = _waiting(made)
    check_words(found)
    assert found.severity == "warning"
    assert what in found.evidence
    assert found.predicted_saving_ns is None


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (call("item", [tensor(device="cpu")]), ""),  # a counter on the CPU
        (call("item", [tensor()]), "scaler.step(optimizer)"),
        (call("getitem", [tensor(4), tensor(4, dtype="int64")], [tensor(4)]), ""),
        (call("to", [tensor(4)], [tensor(4)]), ""),
        (call("to", [tensor(4)], [tensor(4, device="cpu")], kwargs={"non_blocking": True}), ""),
        (call("where", [tensor(4)] * 3, [tensor(4)]), ""),
        (
            call("setitem", [tensor(4), tensor(4)], [tensor(4)], args=(tensor(4), tensor(4, dtype="bool"), 0.0)),
            "",
        ),
        (call("add", [tensor(4)], [tensor(4)]), "print(x.sum().shape)"),
        (call("to", [tensor(4, device="cpu")], [tensor(4)], args=(tensor(4), "cuda", True)), ""),
        (call("cuda", [tensor(4, device="cpu")], [tensor(4)], kwargs={"non_blocking": True}), ""),
        (call("tensor", [], [tensor(4, device="cpu")]), ""),
        (call("__format__", [tensor(device="cpu")]), ""),
    ],
)
def test_calls_that_do_not_wait(made: Node, text: str) -> None:
    assert _waiting(made, text=text) == []


def test_a_look_at_the_loss_is_only_mentioned() -> None:
    (found,) = _waiting(call("item", [tensor()], layer=None), text="total += loss.item()")
    assert found.severity == "info"


def test_a_batch_that_is_copied_is_only_mentioned() -> None:
    (found,) = _waiting(*[call("to", [tensor(4, device="cpu")], [tensor(4)], layer=None, index=n) for n in range(2)])
    check_words(found)
    assert found.severity == "info"
    assert "non_blocking" in found.code
    (found,) = _waiting(call("to", [tensor(4, device="cpu")], [tensor(4)]))
    assert found.severity == "warning"
    assert "register_buffer" in found.code


def test_a_printed_tensor_waits_too() -> None:
    (found,) = _waiting(call("__repr__", [tensor(4)]), text="print(x)")
    check_words(found)
    assert found.severity == "warning"
    assert "print" in found.code
    assert _waiting(call("__repr__", [tensor(4, device="cpu")]), text="print(x)", device="cpu") == []


def test_few_looks_on_a_cpu_are_fine() -> None:
    few = [call("item", [tensor(device="cpu")], index=n) for n in range(9)]
    assert _waiting(*few, device="cpu") == []
    (found,) = _waiting(*few, replace(few[0], index=9), device="cpu")
    assert found.severity == "info"
    assert "10 times" in found.evidence
    assert "the reads take 2.00 ms" in found.evidence
    assert (found.predicted_saving_ns, found.predicted_high_ns) == (None, 2 * MS)
    assert "wait" not in found.message  # there is nothing to wait for


def test_reads_in_an_installed_package_are_left_alone_on_a_cpu() -> None:
    """As torchvision's detection models make them."""
    library = "/usr/lib/python3.12/site-packages/torchvision/models/detection/rpn.py:80"
    many = [call("item", [tensor(device="cpu")], index=n, source=library) for n in range(20)]
    assert _waiting(*many, device="cpu") == []
    own = [replace(each, source="model.py:12") for each in many]
    assert len(_waiting(*own, device="cpu")) == 1


def test_reads_that_cost_next_to_nothing_are_fine() -> None:
    """However much the rest of their line takes."""
    many = [call("item", [tensor(device="cpu")], index=n) for n in range(20)]
    line = LineRow("model.py", 12, "forward", "", "body", 50 * MS, 20 * MS)
    ops = [op("body", "forward", "aten::item", MS // 10, 20)]
    facts = StepFacts(calls=tuple(many), recorded=True)
    assert list(host_sync.find(made_case(ops=ops, lines=[line], facts=facts, device="cpu"))) == []


@pytest.mark.parametrize(
    ("more", "never"),
    [
        ({}, True),
        ({"calls": 2.0}, False),
        ({"estimated_ns": 0, "flops": 0}, True),  # in a run with compiled code too
        ({"estimated_ns": 0, "flops": 7}, False),
        ({"estimated_ns": 0, "flops": None}, False),
        ({"estimated_ns": 0, "flops": 0, "forward_self_ns": 5, "forward_total_ns": 5}, False),
    ],
)
def test_a_layer_of_compiled_code_is_not_said_to_be_never_called(more: dict[str, Any], never: bool) -> None:
    """A teacher that is compiled and needs no gradient: its layers have no calls."""
    facts = StepFacts(parameters=(_parameter("a.weight", has_grad=True), _parameter("b.weight", has_grad=False)))
    layers = [row("a", MS, MS), replace(row("b", 0, 0), **{"calls": 0.0, **more})]
    (found,) = unused_gradients.find(made_case(layers, facts=facts))
    check_words(found)
    assert ("never called" in found.evidence) is never
