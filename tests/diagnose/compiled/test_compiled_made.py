"""The rules about torch.compile, on facts made for them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gradscope.capture import compiling
from gradscope.compat import GraphWatch
from gradscope.compat.dynamo.log import Compilation, CompileLog, GraphBreak
from gradscope.diagnose.rules import RULES
from gradscope.ops import ZEROS_OF_UNUSED
from gradscope.tables import Finding, GraphNote, NodeNote, OpRow
from tests.diagnose.settings.test_settings_made import made_case
from tests.diagnose.timing_cases import MS, check_words
from tests.diagnose.timing_cases import row as layer

SIZE = "tensor 'x' size mismatch at index 1. expected 64, actual 32"
ROWS = "tensor 'x' size mismatch at index 0. expected 8, actual 4"


def again(function: str = "forward", place: str = "model.py:6", reason: str = SIZE, seconds: float = 2.0) -> Any:
    return {"function": function, "place": place, "reason": reason, "seconds": seconds}


def found(rule: str, ops: tuple[OpRow, ...] = (), **facts: Any) -> list[Finding]:
    return list(RULES[rule].find(made_case(ops=ops, device="cpu", compiled={"again": (), "breaks": (), **facts})))


def row(name: str, ns: int, calls: float) -> OpRow:
    return OpRow(None, "forward", name, calls, ns)


@pytest.mark.parametrize("name", ["recompiles", "graph-break", "graph-recompute", "not-compiled", "unused-output"])
def test_says_what_it_is_and_where_it_is_from(name: str) -> None:
    rule = RULES[name]
    assert rule.title[0].islower() and not rule.title.endswith(".")
    for part in ("Example::", "Pattern:", "Evidence:", "Estimate:", "Source:"):
        assert part in rule.about


@pytest.mark.parametrize("name", ["recompiles", "graph-break", "graph-recompute", "not-compiled", "unused-output"])
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


def test_another_guard_than_a_size_has_other_advice() -> None:
    (finding,) = found("recompiles", again=[again(reason="L['step'] == 3"), again(reason="L['step'] == 4")])
    check_words(finding)
    assert "as a tensor" in finding.advice and finding.code.startswith("TORCH_LOGS=recompiles")
    assert "L['step'] == 4" in finding.evidence


@pytest.mark.parametrize(("lookup", "severity"), [(MS // 10, "info"), (4 * MS, "warning")])
def test_a_break_of_a_graph_has_its_line_and_what_the_regions_take(lookup: int, severity: str) -> None:
    ops = (
        row("TorchDynamo Cache Lookup", lookup, 3),
        row("Torch-Compiled Region: 0/0", MS // 10, 1),
        row("Torch-Compiled Region: 1/1", MS // 10, 2),
        row("aten::mm", 50 * MS, 9),
    )
    same = {"place": "model.py:8", "reason": "Unsupported Tensor.item() call", "frames": ["1", "7"]}
    (finding,) = found("graph-break", ops, breaks=[same, same])
    check_words(finding)
    assert finding.line == "model.py:8" and finding.severity == severity
    assert "Tensor.item()" in finding.evidence and "3 compiled regions, 2 of them behind it" in finding.evidence
    assert finding.cost_ns == pytest.approx((lookup + MS // 5) * 2 / 3, abs=1)
    assert finding.predicted_saving_ns is None


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

    def breaks(self) -> list[GraphBreak]:
        torchs, ours, users = compiling._TORCH + "optim/adamw.py", compiling._OURS + "x.py", "project/model.py"
        return [
            GraphBreak(((users, 3), (users, 8)), "item"),
            GraphBreak(((users, 4), (torchs, 9)), "of a call"),
            GraphBreak(((torchs, 9),), "an optimizer's own"),
            GraphBreak(((users, 5), (torchs, 1), (ours, 2)), "gradscope's entry into backward"),
        ]


def test_what_is_torchs_own_or_gradscopes_is_not_told() -> None:
    facts = compiling.compile_facts(Log(), GraphWatch())  # type: ignore[arg-type]
    assert facts["again"] == [{**again("forward", "project/model.py:6"), "step": 0}]
    assert [each["place"] for each in facts["breaks"]] == ["project/model.py:8", "project/model.py:4"]


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


def test_lines_that_break_for_one_reason_are_one_finding() -> None:
    """Each is named where there is room; what is around a region behind two of them is shared among the reasons."""
    ops = (
        row("Torch-Compiled Region: 0/0", 3 * MS, 1),
        row("Torch-Compiled Region: 1/0", 3 * MS, 1),
        row("Torch-Compiled Region: 2/0", 3 * MS, 1),
    )
    breaks = [{"place": f"model.py:{line}", "reason": "item", "frames": ["1", "2"]} for line in (3, 4, 5, 6, 7)]
    branch = {"place": "model.py:9", "reason": "generic_jump TensorVariable()", "frames": ["2"]}
    items, jump = found("graph-break", ops, breaks=[*breaks, branch])
    check_words(items)
    check_words(jump)
    assert items.line == "model.py:3" and "model.py:3 and 4 more" in items.message
    assert "also at model.py:4, model.py:5, model.py:6 and 1 more" in items.evidence
    assert jump.evidence.startswith("a branch that depends on a tensor's value (generic_jump")
    assert (items.cost_ns, jump.cost_ns) == (4.5 * MS, 1.5 * MS)
    assert all("its part beside other findings" in each.evidence for each in (items, jump))


def test_a_break_that_is_not_in_the_step_costs_nothing_there() -> None:
    """However many regions the step enters: blocks that are compiled one by one, say."""
    ops = tuple(row(f"Torch-Compiled Region: {number}/0", 9 * MS, 1) for number in range(6))
    for place in (branch_at("model.py:9"), {**branch_at("model.py:9"), "frames": ["7"]}):
        (finding,) = found("graph-break", ops, breaks=[place])
        assert finding.cost_ns is None and finding.severity == "info" and "region" not in finding.evidence


def test_what_is_compiled_once_for_each_shape_is_not_compiled_again_and_again() -> None:
    """An optimizer's function, for each parameter's; unless these are more than there may be versions."""
    once = [{**again("adamw_step", reason="tensor 'p' rank mismatch. expected 1, actual 2"), "step": 1}] * 3
    assert not found("recompiles", again=once, limit=8)
    (finding,) = found("recompiles", again=once, limit=4)
    assert "at 4 versions" in finding.evidence
    (finding,) = found("recompiles", again=[*once, {**once[0], "step": 2}], limit=8)
    check_words(finding)
    assert "as a tensor" not in finding.advice and "sizes" in finding.advice


def test_a_break_in_a_loop_leaves_its_function_uncompiled() -> None:
    (finding,) = found("graph-break", breaks=[{**branch_at("model.py:9"), "skipped": True}])
    check_words(finding)
    assert finding.evidence.endswith("each by itself, but for torch's own")


def test_a_break_inside_of_a_library_names_its_line_too() -> None:
    inside = "torch/nn/modules/transformer.py:1245"
    (finding,) = found("graph-break", breaks=[{**branch_at("model.py:9"), "inside": inside}])
    check_words(finding)
    assert finding.line == "model.py:9" and f"in {inside}, which this line calls, uncompiled" in finding.evidence
    (finding,) = found("graph-break", breaks=[{**branch_at("model.py:9"), "inside": "lib/model.py:8"}])
    assert "in lib/model.py:8, which this line calls;" in finding.evidence


def test_a_function_that_cannot_be_resumed_is_told_in_words() -> None:
    (finding,) = found("graph-break", breaks=[{"place": "model.py:9", "reason": "step_unsupported"}])
    check_words(finding)
    assert finding.evidence.startswith("the function cannot be resumed behind this line")
    assert "step_unsupported" not in finding.evidence


def test_what_is_around_kernels_is_all_of_it_in_all_versions() -> None:
    around = ("TorchDynamo Cache Lookup", "Pregraph bytecode", "AOTDispatcher Runtime Wrapper Prologue")
    ops = (
        row("Torch-Compiled Region: 0/0", MS, 1),
        row("Torch-Compiled Region: 1/0", MS, 1),
        row("Torch-Compiled Region: 1/1", MS, 2),
        *(row(name, 4 * MS, 4) for name in around),
    )
    first = {**branch_at("model.py:9"), "frames": ["1"], "skipped": True}
    (finding,) = found("graph-break", ops, breaks=[first, {**branch_at("model.py:9"), "frames": [], "skipped": False}])
    assert finding.cost_ns == 15 * MS * 3 / 4
    assert "4 compiled regions, 3 of them" in finding.evidence and "each by itself" in finding.evidence
    assert "what is around their kernels" in finding.evidence and "beside other findings" not in finding.evidence
    (finding,) = found("graph-break", ops[:2], breaks=[first])
    assert "what is around that one's kernels" in finding.evidence


def test_what_some_steps_enter_is_an_average() -> None:
    ops = (row("Torch-Compiled Region: 0/0", 9 * MS, 1), row("Torch-Compiled Region: 1/0", 9 * MS, 0.8))
    (finding,) = found("graph-break", ops, breaks=[{**branch_at("model.py:9"), "frames": ["1"]}])
    assert "a step enters 2 compiled regions, on average 0.8 of them behind it" in finding.evidence
    (finding,) = found("graph-break", ops[1:], breaks=[{**branch_at("model.py:9"), "frames": ["1"]}])
    assert "a step enters 1 compiled region, on average 0.8" in finding.evidence
    (finding,) = found(
        "graph-break", (row(ops[1].name, 9, 0.3),), breaks=[{**branch_at("model.py:9"), "frames": ["1"]}]
    )
    assert "a step enters 1 compiled region, on average 0.3" in finding.evidence


def test_a_region_of_compiled_autograd_has_its_own_number() -> None:
    """``!0/1/0``: version 0 of the frame 1 behind the first of its passes."""
    ops = (row("Torch-Compiled Region: !0/1/0", 9 * MS, 1), row("Torch-Compiled Region: 1/0", 9 * MS, 1))
    (finding,) = found("graph-break", ops, breaks=[{**branch_at("model.py:9"), "frames": ["!0/1"]}])
    assert finding.cost_ns == 9 * MS


def test_frames_behind_a_break_are_its_own() -> None:
    """Torch names them after the function and the line; a break in a function that was called has those of both."""

    class Log:
        def breaks(self) -> list[GraphBreak]:
            users = "project/model.py"
            return [GraphBreak(((users, 3), (users, 8)), "item"), GraphBreak(((users, 5),), "loop", skipped=True)]

        def compilations(self) -> list[Compilation]:
            parts = [("0", None), ("1", 8), ("2", 3), ("2", 3), ("3", 4)]
            return [Compilation("f", "project/model.py", 1, 1.0, False, "", *part) for part in parts]

    found, whole = compiling.compile_facts(Log(), GraphWatch())["breaks"]  # type: ignore[arg-type]
    assert found["frames"] == ["1", "2"] and not found["skipped"]
    assert not whole["frames"] and whole["skipped"]


def branch_at(place: str) -> dict[str, Any]:
    return {"place": place, "reason": "item"}


def test_of_an_installed_package_nobody_edits_the_line() -> None:
    library, own = branch_at("/venv/lib/site-packages/lib/model.py:9"), branch_at("model.py:9")
    (finding,) = found("graph-break", breaks=[library])
    check_words(finding)
    assert "installed package" in finding.advice
    # Of several lines that which the finding names.
    (finding,) = found("graph-break", breaks=[library, own])
    assert "installed package" in finding.advice
    (finding,) = found("graph-break", breaks=[own, library])
    assert "installed package" not in finding.advice


def test_the_line_of_a_break_is_the_users_that_calls_a_library() -> None:
    class Log:
        def breaks(self) -> list[GraphBreak]:
            standard, users = json.__file__, "project/model.py"
            library = "/venv/lib/site-packages/lib/model.py"
            return [
                GraphBreak(((users, 3), (library, 8), (standard, 9)), "called"),
                GraphBreak(((library, 8), (standard, 9)), "compiled itself"),
                GraphBreak(((compiling._TORCH + "nn/parallel/distributed.py", 1), (contextlib.__file__, 105)), "DDP"),
            ]

        def compilations(self) -> list[Compilation]:
            return []

    facts = compiling.compile_facts(Log(), GraphWatch())  # type: ignore[arg-type]
    assert [each["place"] for each in facts["breaks"]] == [
        "project/model.py:3",
        "/venv/lib/site-packages/lib/model.py:8",
    ]
    assert all(each["inside"] == f"{json.__file__}:9" for each in facts["breaks"])


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


def test_what_is_noted_of_compilations_is_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps the latest 64; backward is compiled by itself, when it runs first."""

    def record(number: int, name: str | None, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(
            **{
                "co_name": name,
                "co_filename": name and "model.py",
                "co_firstlineno": 6,
                "compile_id": f"0/{number}",
                "start_time": time.time() + 1,
                "entire_frame_compile_time_s": 2.0,
                "recompile_reason": None,
                "fail_type": None,
                **more,
            }
        )

    kept: list[SimpleNamespace] = []
    utils = SimpleNamespace(get_compilation_metrics=lambda: kept, graph_break_reasons=[])
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)  # type: ignore[arg-type]
    log = CompileLog()
    for number in range(3):
        backward = record(number, None, entire_frame_compile_time_s=None, backward_cumulative_compile_time_us=500_000)
        kept[:] = [record(number, "forward"), backward]
        log.collect()
    assert [(each.function, each.again, each.seconds) for each in log.compilations()] == [
        ("forward", False, 2.5),
        ("forward", True, 2.5),
        ("forward", True, 2.5),
    ]
    kept[:] = [record(3, "torch_dynamo_resume_in_forward_at_12", compile_id="4/1_2")]
    *_, rest = log.compilations()
    assert (rest.function, rest.frame, rest.behind, rest.again) == ("forward", "4", 12, True)


def test_a_guard_is_told_as_it_is() -> None:
    class Log:
        def breaks(self) -> list[GraphBreak]:
            return []

        def compilations(self) -> list[Compilation]:
            reason = "1/0: tag == 'run # 2'  # if tag == 'run # 1':  # model.py:7"
            return [Compilation("forward", "project/model.py", 6, 1.0, True, reason)]

    facts = compiling.compile_facts(Log(), GraphWatch())  # type: ignore[arg-type]
    assert facts["again"][0]["reason"] == "tag == 'run # 2'"


@pytest.mark.parametrize(
    ("target", "mode", "named"),
    [
        ("tools/my train.py", "script", "'tools/my train.py'"),
        ("model.py:workload", "model", "train.py"),
        ("", "loop", "train.py"),
    ],
)
def test_what_to_run_names_the_script(target: str, mode: Any, named: str) -> None:
    case = made_case(device="cpu", compiled={"again": (), "breaks": [branch_at("model.py:9")]})
    about = replace(case.run.workload, target=target, mode=mode)
    (finding,) = RULES["graph-break"].find(replace(case, run=replace(case.run, workload=about)))
    assert finding.code == f"TORCH_LOGS=graph_breaks python {named}"


class Torch:
    """What Dynamo has noted, and goes on noting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: list[SimpleNamespace] = []
        self.breaks: list[SimpleNamespace] = []
        utils = SimpleNamespace(get_compilation_metrics=lambda: self.records, graph_break_reasons=self.breaks)
        monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)  # type: ignore[arg-type]

    def compiles(self, function: str, graphs: int = 1, since: float = 1, failed: str | None = None) -> None:
        self.records.append(
            SimpleNamespace(
                co_name=function,
                co_filename="model.py",
                co_firstlineno=6,
                compile_id=f"{len(self.records)}/0",
                start_time=time.time() + since,
                entire_frame_compile_time_s=2.0,
                recompile_reason=None,
                graph_op_count=graphs,
                fail_type=failed,
                fail_reason=f"{failed} of it\nand more",
                fail_user_frame_filename="model.py" if failed else None,
                fail_user_frame_lineno=9 if failed else None,
            )
        )

    def breaks_at(self, line: int) -> None:
        stack = [SimpleNamespace(filename="model.py", lineno=line)]
        self.breaks.append(SimpleNamespace(user_stack=stack, reason=f"break {line}\nand more"))


def test_what_was_noted_before_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Torch(monkeypatch)
    noted.compiles("before", since=-60)
    noted.breaks_at(1)
    log = CompileLog()
    noted.compiles("behind")
    noted.breaks_at(2)
    assert [each.function for each in log.compilations()] == ["behind"]
    assert log.breaks() == [GraphBreak((("model.py", 2),), "break 2")]
    noted.breaks.clear()  # torch._dynamo.reset()
    assert log.breaks() == []


def test_where_the_program_has_torch_forget_all_that_is_noted_then_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Torch(monkeypatch)
    for line in (1, 2, 3):
        noted.breaks_at(line)
    log = CompileLog()
    noted.breaks.clear()
    noted.breaks_at(4)
    assert [each.reason for each in log.breaks()] == ["break 4"]


def test_a_compilation_is_of_the_step_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tells of it once it is over: behind the step, it is that one's."""
    noted = Torch(monkeypatch)
    log = CompileLog()
    noted.compiles("first")
    log.end_step(1)
    noted.compiles("second")
    log.end_step(2)
    log.end_step(3)
    assert [(each.function, each.step) for each in log.compilations()] == [("first", 0), ("second", 1)]


def test_something_is_compiled_where_a_graph_was_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Torch(monkeypatch)
    log = CompileLog()
    assert log.has_compiled()  # nothing is told
    noted.compiles("empty", graphs=0)
    noted.compiles("failed", failed="Unsupported")
    assert not log.has_compiled()
    noted.compiles("graph")
    assert log.has_compiled()


def test_a_function_that_is_left_as_it_is_has_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Torch(monkeypatch)
    log = CompileLog()
    noted.compiles("loop", failed="Unsupported")
    noted.compiles("graph")
    assert log.breaks() == [GraphBreak((("model.py", 9),), "Unsupported of it", skipped=True)]


def test_a_larger_budget_is_at_most_all() -> None:
    (finding,) = recomputing(budget=0.9)
    assert finding.code == "torch._functorch.config.activation_memory_budget = 1"


def test_two_lines_that_break_are_both_named() -> None:
    breaks = [{"place": f"model.py:{line}", "reason": "item", "frames": []} for line in (3, 4)]
    (finding,) = found("graph-break", breaks=breaks)
    assert finding.evidence.endswith("also at model.py:4")


@pytest.mark.parametrize(("phase", "told"), [("recompute", 1), ("optimizer", 0), ("other", 0)])
def test_what_runs_beside_graphs_is_of_the_step(phase: Any, told: int) -> None:
    ops = (OpRow(None, phase, "aten::gelu", 1.0, 20 * MS),)
    assert len(found("not-compiled", ops, graphs=1)) == told


def test_what_an_operation_of_the_users_runs_in_a_graph_is_in_it() -> None:
    """But in another phase, where its layer has no graph, it is not."""
    ops = (OpRow(None, "forward", "cpp_fused_add_0", 1.0, MS), OpRow(None, "forward", "aten::gelu", 1.0, 20 * MS))
    assert not found("not-compiled", ops, graphs=1)
    assert found("not-compiled", (*ops, OpRow(None, "backward", "aten::gelu_backward", 1.0, 20 * MS)), graphs=1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("step_unsupported", "step_unsupported"),
        (
            "Failed to trace builtin operator\n  Explanation: Dynamo does not know how to trace operator `print` "
            "with argument types ['str']\n  Hint: Avoid `print`",
            "Failed to trace builtin operator `print`",
        ),
        ("Unsupported Tensor.item() call\n  Explanation: `Tensor.item` is\n", "Unsupported Tensor.item() call"),
        ("Data-dependent branching\n  Hint: use `torch.cond`", "Data-dependent branching"),
    ],
)
def test_a_reason_names_what_its_explanation_does(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Torch(monkeypatch)
    log = CompileLog()
    noted.breaks.append(SimpleNamespace(user_stack=[SimpleNamespace(filename="model.py", lineno=3)], reason=text))
    assert [each.reason for each in log.breaks()] == [reason]
