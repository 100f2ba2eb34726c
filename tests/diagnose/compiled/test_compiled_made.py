"""The rules about torch.compile, on facts made for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradscope.capture import compiling
from gradscope.compat import GraphWatch
from gradscope.compat.dynamo.log import Compilation, Failure, GraphBreak
from gradscope.diagnose.rules import RULES
from gradscope.ops import OF_TORCH, ZEROS_OF_UNUSED
from gradscope.tables import Finding, GraphNote, NodeNote, OpRow
from tests.diagnose.compiled.facts import found
from tests.diagnose.settings.test_settings_made import made_case
from tests.diagnose.timing_cases import MS, check_words
from tests.diagnose.timing_cases import row as layer

RULES_OF_COMPILED_CODE = [
    "recompiles", "graph-break", "graph-recompute", "not-compiled", "unused-output", "compile-failed"
]  # fmt: skip
SIZE = "tensor 'x' size mismatch at index 1. expected 64, actual 32"
ROWS = "tensor 'x' size mismatch at index 0. expected 8, actual 4"


def again(function: str = "forward", place: str = "model.py:6", reason: str = SIZE, seconds: float = 2.0) -> Any:
    return {"function": function, "place": place, "reason": reason, "seconds": seconds}


@pytest.mark.parametrize("name", RULES_OF_COMPILED_CODE)
def test_says_what_it_is_and_where_it_is_from(name: str) -> None:
    rule = RULES[name]
    assert rule.title[0].islower() and not rule.title.endswith(".")
    for part in ("Example::", "Pattern:", "Evidence:", "Estimate:", "Source:"):
        assert part in rule.about


@pytest.mark.parametrize("name", RULES_OF_COMPILED_CODE)
def test_nothing_is_said_of_a_run_without_compile(name: str) -> None:
    assert not list(RULES[name].find(made_case(device="cpu")))
    assert not found(name)


def test_functions_that_are_compiled_again_and_again() -> None:
    (finding,) = found("recompiles", again=[again(reason=ROWS), again(seconds=3.0), again("step", "train.py:9")])
    check_words(finding)
    assert "forward (model.py:6)" in finding.message
    assert "2 times" in finding.evidence and "5.00 s" in finding.evidence and SIZE in finding.evidence
    assert finding.line == "model.py:6" and "dynamic=True" in finding.code
    assert finding.predicted_saving_ns is None


def test_a_size_that_changed_once_is_how_torch_finds_out() -> None:
    assert not found("recompiles", again=[again()])


def test_a_size_that_fails_again_and_again_is_one_that_the_code_fixes() -> None:
    """Layers of one class with other widths: torch.compile has found out by then that it cannot leave the size open."""
    widths = [again(reason=f"tensor 'x' size mismatch at index 1. expected {n}, actual {n + 8}") for n in (8, 16, 24)]
    (finding,) = found("recompiles", again=widths, limit=8)
    check_words(finding)
    assert "dynamic=True" not in finding.advice + finding.code and "recompile_limit" not in finding.code
    (finding,) = found("recompiles", again=widths, limit=4)
    check_words(finding)
    assert finding.code == "torch._dynamo.config.recompile_limit = 8"
    (finding,) = found("recompiles", again=[again(), again()], limit=None)
    assert "dynamic=True" not in finding.code
    other = again(reason="tensor 'y' size mismatch at index 1. expected 64, actual 32")
    (finding,) = found("recompiles", again=[again(), other])  # each is left open from then on
    assert "dynamic=True" in finding.code
    (finding,) = found(
        "recompiles", again=[again(reason="tensor 'x' stride mismatch at index 1. expected 4, actual 2")] * 2
    )
    assert "dynamic=True" in finding.code


@pytest.mark.parametrize(
    "reason",
    [
        "GLOBAL_STATE changed: grad_mode ",
        "tensor 'x' requires_grad mismatch. expected requires_grad=0",
        "L['self'].training",
    ],
)
def test_an_evaluation_is_compiled_once_too(reason: str) -> None:
    assert not found("recompiles", again=[again(reason=reason), again()])
    (finding,) = found("recompiles", again=[again(), again(reason=ROWS), again(reason=reason)], limit=4)
    assert "2 times" in finding.evidence and reason not in finding.evidence
    assert "at 4 versions" in finding.evidence  # it is a version all the same


def test_a_method_that_several_classes_inherit_is_compiled_once_for_each() -> None:
    classes = [again(reason=f"___check_type_id(self, {94179303688368 + n}), type=<class 'B{n}'>") for n in range(3)]
    assert not found("recompiles", again=[*classes, again()])  # and one size has changed
    (finding,) = found("recompiles", again=classes, limit=4)
    check_words(finding)
    assert "at 4 versions" in finding.evidence and "___check_type_id(self), type=<class 'B2'>" in finding.evidence
    (finding,) = found("recompiles", again=[*classes, again(), again(reason=ROWS)])
    assert "compiled again 5 times" in finding.evidence


def test_another_guard_than_a_size_has_other_advice() -> None:
    (finding,) = found("recompiles", again=[again(reason="L['step'] == 3"), again(reason="L['step'] == 4")])
    check_words(finding)
    assert "as a tensor" in finding.advice and finding.code.startswith("TORCH_LOGS=recompiles")
    assert "L['step'] == 4" in finding.evidence


def test_zeros_for_what_the_loss_does_not_use() -> None:
    zeros = OpRow("head", "backward", ZEROS_OF_UNUSED, 1.0, 4 * MS)
    sums = OpRow("head", "gradient_sum", "cpp_fused_add_0", 1.0, 2 * MS)
    eager = OpRow("head", "gradient_sum", "aten::add", 1.0, 9 * MS)
    (finding,) = found("unused-output", (zeros, sums, eager))
    check_words(finding)
    assert finding.layers == ("head",) and "4.00 ms" in finding.evidence and "2.00 ms" in finding.evidence
    assert finding.predicted_saving_ns == 4 * MS
    assert (finding.predicted_low_ns, finding.predicted_high_ns) == (2 * MS, 6 * MS)
    assert "detached" in finding.advice
    assert not found("unused-output", (replace(zeros, self_ns=MS // 2),))
    backward = replace(sums, phase="backward")
    (finding,) = found("unused-output", (zeros, zeros, backward))
    assert finding.layers == ("head",) and "sums of gradients" not in finding.evidence
    assert not found("unused-output", (replace(zeros, name="aten::zeros"),))  # the user's own


def eager_part(ns: int, **facts: Any) -> list[Finding]:
    """A compiled block beside a head that is not, and a loss in no module."""
    parts = (
        OpRow("head", "backward", "aten::gelu_backward", 1.0, ns // 2),
        OpRow("head", "forward", "aten::mm", 1.0, 50 * MS),  # no graph fuses it
        OpRow(None, "forward", "aten::_log_softmax", 1.0, ns - ns // 2),
        OpRow(None, "optimizer", "aten::mul_", 1.0, 50 * MS),
        OpRow("copy", "forward", "aten::gelu", 1.0, 50 * MS),  # an evaluation of another model
        OpRow("blocks.0", "backward", "cpp_fused_gelu_0", 1.0, 20 * MS),
    )
    case = made_case(ops=parts, device="cpu", compiled={"again": (), "breaks": (), **facts})
    layers = (
        layer("head", 0, 0, "Head", backward_total_ns=ns // 2, backward_self_steps_ns=(0,)),
        layer("copy", 0, 0, "Copy", backward_total_ns=0, backward_self_steps_ns=(0,)),
    )
    return list(RULES["not-compiled"].find(replace(case, run=replace(case.run, layers=layers))))


def test_what_runs_beside_compiled_graphs_and_could_be_in_one() -> None:
    (finding,) = eager_part(6 * MS, graphs=2)
    check_words(finding)
    assert finding.layers == ("head",) and "6.00 ms" in finding.evidence and "of head" in finding.evidence
    assert finding.cost_ns == 6 * MS and finding.predicted_saving_ns is None
    assert "torch.compile(lambda" in finding.code
    (finding,) = eager_part(6 * MS, graphs=2, breaks=[{"place": "model.py:8", "reason": "item"}])
    check_words(finding)
    assert "graph-break" in finding.advice and "graph_breaks" in finding.code
    (finding,) = eager_part(6 * MS, graphs=2, again=[again(reason="L['step'] == 3")] * 7, limit=8)
    check_words(finding)
    assert "see recompiles" in finding.advice and "recompiles" in finding.code


def test_little_beside_graphs_is_left_as_it_is_and_so_is_a_program_without_any() -> None:
    assert not eager_part(4 * MS, graphs=2) and not eager_part(60 * MS, graphs=0)


class Log:
    def compilations(self) -> list[Compilation]:
        return [
            Compilation("forward", "project/model.py", 6, 1.0, False, ""),
            Compilation("forward", "project/model.py", 6, 2.0, True, f"1/0: {SIZE}  # return x * 2  # model.py:7"),
            Compilation("adamw", compiling._TORCH + "optim/adamw.py", 6, 2.0, True, "1/0: x"),
            Compilation("call", compiling._OURS + "compat/dynamo/log.py", 6, 2.0, True, "1/0: x"),
        ]

    def failures(self) -> list[Failure]:
        return [
            Failure("forward", "project/model.py", 6, "no"),
            Failure("inner", compiling._CALLS_LAYERS, 6, "no"),
            Failure("adamw", compiling._TORCH + "optim/adamw.py", 6, "no"),
        ]

    def breaks(self) -> list[GraphBreak]:
        torchs, ours, users = compiling._TORCH + "optim/adamw.py", compiling._OURS + "x.py", "project/model.py"
        return [
            GraphBreak(((users, 3), (users, 8)), "item"),
            GraphBreak(((users, 4), (torchs, 9)), "of a call"),
            GraphBreak(((torchs, 9),), "an optimizer's own"),
            GraphBreak(((users, 5), (torchs, 1), (ours, 2)), "gradscope's entry into backward"),
        ]


def test_a_model_of_torchs_own_is_named_without_a_line() -> None:
    """A Sequential, say: Dynamo compiles a function of its own that calls it."""

    class OfTorch(Log):
        def compilations(self) -> list[Compilation]:
            file, reasons = compiling._CALLS_LAYERS, ("", f"1/0: {ROWS}", f"1/0: {SIZE}")
            return [Compilation("inner", file, 6, 2.0, reason != "", reason) for reason in reasons]

    again = compiling.compile_facts(OfTorch(), GraphWatch())["again"]  # type: ignore[arg-type]
    for step, each in enumerate(again):
        each["step"] = step
    (finding,) = found("recompiles", again=again)
    check_words(finding)
    assert finding.message == "torch.compile compiles a model or a function of torch's own again and again"
    assert finding.line is None and finding.code == "model = torch.compile(model, dynamic=True)"


def test_a_function_that_cannot_be_compiled_is_told_with_the_error() -> None:
    failed = [{"function": "forward", "place": "model.py:6", "reason": "backend='x' raised: RuntimeError: no"}] * 2
    (finding,) = found("compile-failed", failed=failed)
    check_words(finding)
    assert finding.line == "model.py:6" and "forward (model.py:6)" in finding.message
    assert finding.evidence == "2 times since profiling began: backend='x' raised: RuntimeError: no"
    assert "suppress_errors" in finding.code
    (finding,) = found("compile-failed", failed=[{"function": OF_TORCH, "place": "", "reason": "no"}])
    assert finding.line is None and "torch's own, which" in finding.message


def test_what_is_torchs_own_or_gradscopes_is_not_told() -> None:
    facts = compiling.compile_facts(Log(), GraphWatch())  # type: ignore[arg-type]
    assert facts["again"] == [{**again("forward", "project/model.py:6"), "step": 0}]
    assert [each["place"] for each in facts["breaks"]] == ["project/model.py:8", "project/model.py:4"]
    assert [(each["function"], each["place"]) for each in facts["failed"]] == [
        ("forward", "project/model.py:6"),
        (OF_TORCH, ""),
    ]


def recomputing(*ops: OpRow, rule: str = "graph-recompute", again: int = 10 * MS, **facts: Any) -> list[Finding]:
    compiled = {"graphs": 2, "checkpointed": False, "budget": 0.5, "recomputed_bytes": 3_000_000, **facts}
    fused = OpRow("", "recompute", "cpp_fused_0", 1.0, again)
    case = made_case(ops=ops or (fused,), device="cpu", compiled=compiled)
    ledger = replace(case.run.ledger, backward_ns=again, recompute_ns=again)
    step = replace(case.run.step, forward_ns=case.run.step.forward_ns - again, backward_ns=again)
    model = layer("", 0, 0, "Model", recompute_ns=again, backward_total_ns=again, backward_self_steps_ns=(0,))
    run = replace(case.run, step=step, ledger=ledger, layers=(model,))
    return list(RULES[rule].find(replace(case, run=run)))


def test_what_a_memory_budget_costs_and_saves() -> None:
    (finding,) = recomputing()
    check_words(finding)
    assert "10.0 ms" in finding.evidence and "3.00 MB" in finding.evidence and finding.severity == "warning"
    assert finding.code == "torch._functorch.config.activation_memory_budget = 0.7"
    assert finding.cost_ns == 10 * MS and finding.predicted_saving_ns is None
    assert not recomputing(rule="checkpoint-share"), "nothing is checkpointed"


def test_what_is_checkpointed_or_partitioned_as_usual_is_no_budgets() -> None:
    assert not recomputing(budget=1.0) and not recomputing(again=MS)
    assert not recomputing(checkpointed=True) and recomputing(rule="checkpoint-share", checkpointed=True)
    eager = OpRow("", "recompute", "aten::addmm", 1.0, 10 * MS)
    assert not recomputing(eager) and recomputing(eager, rule="checkpoint-share")


def test_bytes_that_a_graph_computes_again() -> None:
    def node(*inputs: str, forward: bool = False, op: str = "mul", is_view: bool = False, size: int = 8) -> NodeNote:
        return NodeNote(modules=(), frames=(), forward=forward, is_view=is_view, bytes=size, inputs=inputs, op=op)

    nodes = {
        "saved": node(op=""),
        "norm": node("saved", forward=True, size=100),  # read by forward alone
        "gelu": node("norm", forward=True, size=1000),
        "view": node("gelu", forward=True, is_view=True, size=1000),
        "gradient": node("view", "saved"),
    }
    assert GraphNote((), nodes).recomputed_bytes() == 1000
    assert GraphNote((), {name: nodes[name] for name in ("norm", "gelu")}).recomputed_bytes() == 0


def test_what_is_compiled_once_for_each_shape_is_not_compiled_again_and_again() -> None:
    """An optimizer's function, for each parameter's; unless these are more than there may be versions."""
    once = [{**again("adamw_step", reason="tensor 'p' rank mismatch. expected 1, actual 2"), "step": 1}] * 3
    assert not found("recompiles", again=once, limit=8)
    (finding,) = found("recompiles", again=once, limit=4)
    assert "at 4 versions" in finding.evidence
    (finding,) = found("recompiles", again=[*once, {**once[0], "step": 2}], limit=8)
    check_words(finding)
    assert "as a tensor" not in finding.advice and "sizes" in finding.advice


def test_two_things_that_change_once_each_are_not_compiled_again_and_again() -> None:
    flag, steps = again(reason="L['self'].flag == False"), again(reason=ROWS)
    assert not found("recompiles", again=[flag, steps])
    assert found("recompiles", again=[flag, steps, again(reason="L['self'].flag == True")]) == []
    assert found("recompiles", again=[again(reason="L['step'] == 3"), again(reason="L['step'] == 4")])


def test_at_the_limit_it_runs_uncompiled() -> None:
    same = [again(reason="L['step'] == 3")] * 7
    (finding,) = found("recompiles", again=same, limit=8)
    check_words(finding)
    assert "at 8 versions (recompile_limit)" in finding.evidence
    (finding,) = found("recompiles", again=same[:6], limit=8)
    assert "recompile_limit" not in finding.evidence


def test_a_size_that_a_function_branches_on_is_not_cured_by_dynamic() -> None:
    (finding,) = found("recompiles", again=[again("f", reason="11 <= x.size()[0]")] * 2)
    check_words(finding)
    assert "dynamic=True" not in finding.code and "Pad the batches" in finding.advice
    (finding,) = found("recompiles", again=[again("f", reason=ROWS), again("f")])
    assert finding.code == "f = torch.compile(f, dynamic=True)"


def test_a_guard_is_told_as_it_is() -> None:
    class Log:
        def breaks(self) -> list[GraphBreak]:
            return []

        def failures(self) -> list[Failure]:
            return []

        def compilations(self) -> list[Compilation]:
            reason = "1/0: tag == 'run # 2'  # if tag == 'run # 1':  # model.py:7"
            return [Compilation("forward", "project/model.py", 6, 1.0, True, reason)]

    facts = compiling.compile_facts(Log(), GraphWatch())  # type: ignore[arg-type]
    assert facts["again"][0]["reason"] == "tag == 'run # 2'"


def test_a_larger_budget_is_at_most_all() -> None:
    (finding,) = recomputing(budget=0.9)
    assert finding.code == "torch._functorch.config.activation_memory_budget = 1"


@pytest.mark.parametrize(("phase", "told"), [("recompute", 1), ("optimizer", 0), ("other", 0)])
def test_what_runs_beside_graphs_is_of_the_step(phase: Any, told: int) -> None:
    ops = (OpRow(None, phase, "aten::gelu", 1.0, 20 * MS),)
    assert len(found("not-compiled", ops, graphs=1)) == told


def test_what_an_operation_of_the_users_runs_in_a_graph_is_in_it() -> None:
    """But in another phase, where its layer has no graph, it is not."""
    ops = (OpRow(None, "forward", "cpp_fused_add_0", 1.0, MS), OpRow(None, "forward", "aten::gelu", 1.0, 20 * MS))
    assert not found("not-compiled", ops, graphs=1)
    assert found("not-compiled", (*ops, OpRow(None, "backward", "aten::gelu_backward", 1.0, 20 * MS)), graphs=1)


def test_other_models_of_torchs_own_are_not_one_that_is_compiled_again() -> None:
    """Dynamo compiles the same function of its own for each, and guards of which it is."""

    class OfTorch(Log):
        def compilations(self) -> list[Compilation]:
            file, other = compiling._CALLS_LAYERS, "1/0: ___check_type_id(fn._modules['1'], 94179303688368)"
            return [Compilation("inner", file, 6, 2.0, True, reason) for reason in (other, f"1/0: {ROWS}", other)]

    again = compiling.compile_facts(OfTorch(), GraphWatch())["again"]  # type: ignore[arg-type]
    assert [each["reason"] for each in again] == [ROWS]


def test_layers_of_torchs_own_on_which_compile_was_called() -> None:
    case = made_case(device="cpu", compiled={"again": (), "breaks": (), "left_alone": ["blocks.0", "head"]})
    layers = tuple(layer(path, 0, 0) for path in ("blocks.0", "blocks.1", "head"))
    case = replace(case, run=replace(case.run, layers=layers, environment={"torch": "2.13.0+cpu"}))
    (finding,) = RULES["compile-failed"].find(case)
    check_words(finding)
    assert finding.layers == ("blocks.0", "head")
    assert finding.message == "torch.compile compiles nothing of blocks.0, head"
    assert finding.code == "model.blocks[0] = torch.compile(model.blocks[0])  # for model.blocks[0].compile()"
    layers = (layer("heads", 0, 0, "ModuleDict"), layer("heads.0", 0, 0))
    case = made_case(device="cpu", compiled={"again": (), "breaks": (), "left_alone": ["heads.0"]})
    case = replace(case, run=replace(case.run, layers=layers))
    (finding,) = RULES["compile-failed"].find(case)
    assert finding.code.startswith("model.heads['0'] = torch.compile(")


@pytest.mark.parametrize("path", ["", "blocks.0"])
@pytest.mark.parametrize(
    ("calls", "region", "tells"),
    [(1.0, "head", False), (1.0, "blocks.0.act", False), (0.0, None, False), (1.0, None, True)],
)
def test_a_layer_of_which_something_is_compiled_is_not_left_alone(
    path: str, calls: float, region: str | None, tells: bool
) -> None:
    """In a graph of what is around it, where nothing calls it, or a function of the program's that it calls."""
    ops = () if region is None else (OpRow(region, "forward", "Torch-Compiled Region: 0/0", 1, 0),)
    case = made_case(ops=ops, device="cpu", compiled={"again": (), "breaks": (), "left_alone": [path]})
    case = replace(case, run=replace(case.run, layers=(layer(path, 0, 0, calls=calls),)))
    apart = path == "blocks.0" and region == "head"
    assert bool(list(RULES["compile-failed"].find(case))) is (tells or apart)
