"""The rule about breaks of graphs, on facts made for it."""

from __future__ import annotations

import contextlib
import importlib
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gradscope.capture import compiling
from gradscope.compat import GraphWatch
from gradscope.compat.dynamo.log import Compilation, Failure, GraphBreak
from gradscope.diagnose.rules import RULES
from tests.diagnose.compiled.facts import found, row
from tests.diagnose.settings.test_settings_made import made_case
from tests.diagnose.timing_cases import MS, check_words

SIZE = "tensor 'x' size mismatch at index 1. expected 64, actual 32"
ROWS = "tensor 'x' size mismatch at index 0. expected 8, actual 4"


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


def test_a_break_in_a_loop_leaves_its_function_uncompiled() -> None:
    (finding,) = found("graph-break", breaks=[{**branch_at("model.py:9"), "skipped": "forward (model.py:4)"}])
    check_words(finding)
    assert finding.evidence.endswith("each by itself, but for torch's own")


def test_a_break_in_two_loops_leaves_both_functions_uncompiled() -> None:
    """One that is called in a loop of the other's; each is tried again in later steps, and the same line breaks."""
    functions = ("forward (model.py:4)", "forward (model.py:12)") * 2
    breaks = [{**branch_at("model.py:9"), "skipped": skipped} for skipped in functions]
    (finding,) = found("graph-break", breaks=breaks)
    check_words(finding)
    assert (
        "forward (model.py:4) and forward (model.py:12) are not compiled; functions that they call" in finding.evidence
    )
    assert "4 breaks since profiling began" in finding.evidence and "also at" not in finding.evidence


def test_a_break_inside_of_a_library_names_its_line_too() -> None:
    inside = "torch/nn/modules/transformer.py:1245"
    (finding,) = found("graph-break", breaks=[{**branch_at("model.py:9"), "inside": inside}])
    check_words(finding)
    assert finding.line == "model.py:9" and f"in {inside}, which this line calls, uncompiled" in finding.evidence
    (finding,) = found("graph-break", breaks=[{**branch_at("model.py:9"), "inside": "lib/model.py:8"}])
    assert "in lib/model.py:8, which this line calls;" in finding.evidence
    lines = [{**branch_at(f"model.py:{9 + n}"), "inside": f"lib/model.py:{8 + n}"} for n in range(2)]
    (finding,) = found("graph-break", breaks=lines)
    assert finding.line == "model.py:9" and "in lib/model.py:8, which" in finding.evidence


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
    first = {**branch_at("model.py:9"), "frames": ["1"], "skipped": "forward (model.py:4)"}
    (finding,) = found("graph-break", ops, breaks=[first, {**branch_at("model.py:9"), "frames": [], "skipped": ""}])
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
            return [
                GraphBreak(((users, 3), (users, 8)), "item"),
                GraphBreak(((users, 5),), "loop", ("forward", users, 4)),
            ]

        def failures(self) -> list[Failure]:
            return []

        def compilations(self) -> list[Compilation]:
            parts = [("0", None), ("1", 8), ("2", 3), ("2", 3), ("3", 4)]
            return [Compilation("f", "project/model.py", 1, 1.0, False, "", *part) for part in parts]

    found, whole = compiling.compile_facts(Log(), GraphWatch())["breaks"]  # type: ignore[arg-type]
    assert found["frames"] == ["1", "2"] and not found["skipped"]
    assert not whole["frames"] and whole["skipped"] == "forward (project/model.py:4)"


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
                GraphBreak(((users, 2), (compiling._OURS + "capture/modules.py", 5)), "gradscope's own"),
                GraphBreak(((users, 3), (library, 8), (standard, 9)), "called"),
                GraphBreak(((library, 8), (standard, 9)), "compiled itself"),
                GraphBreak(((compiling._TORCH + "nn/parallel/distributed.py", 1), (contextlib.__file__, 105)), "DDP"),
            ]

        def failures(self) -> list[Failure]:
            return []

        def compilations(self) -> list[Compilation]:
            return []

    facts = compiling.compile_facts(Log(), GraphWatch())  # type: ignore[arg-type]
    assert [each["place"] for each in facts["breaks"]] == [
        "project/model.py:3",
        "/venv/lib/site-packages/lib/model.py:8",
    ]
    assert all(each["inside"] == f"{json.__file__}:9" for each in facts["breaks"])


@pytest.mark.parametrize(
    ("file", "is_models"),
    [
        ("project/model.py", True),
        (compiling._TORCH + "nn/modules/rnn.py", True),
        (compiling._TORCH + "optim/adam.py", False),
        (compiling._OURS + "capture/modules.py", False),
    ],
)
def test_a_break_of_a_models_is_none_of_an_optimizers(file: str, is_models: bool) -> None:
    log = SimpleNamespace(breaks=lambda: [GraphBreak((("train.py", 9), (file, 3)), "item")])
    assert compiling.breaks_in_models(log) is is_models  # type: ignore[arg-type]


def test_each_time_that_a_line_breaks_counts() -> None:
    (finding,) = found("graph-break", breaks=[branch_at("model.py:9")] * 3)
    assert "3 breaks since profiling began" in finding.evidence


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


def test_a_function_that_is_left_as_it_is_has_a_finding_of_its_own() -> None:
    """Beside lines that break for the same reason: what follows from it is another thing."""
    left_out = ("", "Model.forward (model.py:2)")
    breaks = [
        {"place": f"model.py:{line}", "reason": "print", "frames": [], "skipped": skipped}
        for line, skipped in zip((3, 4), left_out, strict=True)
    ]
    broken, left = found("graph-break", breaks=breaks)
    assert (broken.line, left.line) == ("model.py:3", "model.py:4")
    assert "Model.forward (model.py:2) is not compiled" in left.evidence and "not compiled" not in broken.evidence


def test_two_lines_that_break_are_both_named() -> None:
    breaks = [{"place": f"model.py:{line}", "reason": "item", "frames": []} for line in (3, 4)]
    (finding,) = found("graph-break", breaks=breaks)
    assert finding.evidence.endswith("also at model.py:4")


def test_a_branch_for_which_torch_has_two_names_is_one_finding() -> None:
    """One where the function goes on behind it, and one where it is in a loop, say."""
    names = ("generic_jump TensorVariable()", "Data-dependent branching")
    breaks = [{"place": "model.py:9", "reason": reason, "frames": []} for reason in names]
    (finding,) = found("graph-break", breaks=breaks)
    assert finding.evidence.startswith("Data-dependent branching; 2 breaks since")
    other = {**breaks[1], "place": "model.py:8"}
    assert len(found("graph-break", breaks=[breaks[0], other])) == 2


@pytest.mark.parametrize(
    ("reason", "setting"),
    [
        ("Dynamic shape operator `aten.nonzero.default`", "capture_dynamic_output_shape_ops = True"),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "capture_scalar_outputs = True"),
        (
            "logging.Logger method not supported for non-export cases",
            "ignore_logging_functions.add(logging.Logger.warning)  # which the line calls",
        ),
    ],
)
def test_what_torch_captures_or_leaves_out_if_it_is_told_to(reason: str, setting: str) -> None:
    (finding,) = found("graph-break", breaks=[{**branch_at("model.py:9"), "reason": reason}])
    check_words(finding)
    assert finding.code == f"torch._dynamo.config.{setting}"
    name = setting.partition(".")[0].partition(" ")[0]
    assert hasattr(importlib.import_module("torch._dynamo.config"), name)


@pytest.mark.parametrize("name", ["debug", "info", "exception", "log"])
def test_the_method_that_is_left_out_is_the_one_that_the_line_calls(name: str) -> None:
    reason, text = "logging.Logger method not supported for non-export cases", f'self.log.{name}("%s", x.shape)'
    (finding,) = found("graph-break", breaks=[{**branch_at("model.py:9"), "reason": reason, "text": text}])
    assert finding.code == f"torch._dynamo.config.ignore_logging_functions.add(logging.Logger.{name})"


def test_a_title_names_a_librarys_line_from_its_package_on() -> None:
    place = "/venv/lib/python3.11/site-packages/geometric/utils/loop.py:650"
    (finding,) = found("graph-break", breaks=[branch_at(place)])
    assert finding.message.endswith(" at geometric/utils/loop.py:650") and finding.line == place
