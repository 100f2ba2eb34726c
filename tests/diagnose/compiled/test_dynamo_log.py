"""What Dynamo notes of what it compiles, as it is read."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gradscope.compat.dynamo.log import CompileLog, Failure, GraphBreak

SIZE = "tensor 'x' size mismatch at index 1. expected 64, actual 32"
ROWS = "tensor 'x' size mismatch at index 0. expected 8, actual 4"


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
    assert log.breaks() == [GraphBreak((("model.py", 9),), "Unsupported of it", ("loop", "model.py", 6))]
    assert log.failures() == []


@pytest.mark.parametrize("suppressed", [True, False])
@pytest.mark.parametrize(
    "error", ["BackendCompilerFailed", "InternalTorchDynamoError", "InductorError", "TorchRuntimeError"]
)
def test_an_error_that_is_suppressed_is_a_failure(
    error: str, suppressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No break of a graph; one that the program was told of, and caught, is neither."""
    noted = Torch(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", SimpleNamespace(suppress_errors=suppressed))  # type: ignore[arg-type]
    log = CompileLog()
    log.begin()
    noted.compiles("many", failed="RecompileLimitExceeded")  # the rule about those tells it
    noted.compiles("torch_dynamo_resume_in_forward_at_8", failed=error)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", SimpleNamespace(suppress_errors=not suppressed))  # type: ignore[arg-type]
    log.begin()  # another one
    assert log.failures() == [Failure("forward", "model.py", 6, f"{error} of it and more")] * suppressed
    assert [each.skipped for each in log.breaks()] == [("many", "model.py", 6)]


def test_it_is_told_of_hooks_by_any_of_the_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Torch(monkeypatch)
    log = CompileLog()
    noted.compiles("forward")
    noted.compiles("forward")
    log.collect()
    assert not log.tells_of_hooks()
    noted.records[1].recompile_reason = "len(_global_forward_hooks) == 0"
    assert log.tells_of_hooks()


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
        ("Skip calling `<function off at 0x7fb5d2>`", "Skip calling `<function off>`"),
        ("Data-dependent branching\n  Hint: use `torch.cond`", "Data-dependent branching"),
        (
            "Data-dependent branching\n  Explanation: Detected data-dependent branching (e.g. `if a.sum() > 0:`).",
            "Data-dependent branching",
        ),
    ],
)
def test_a_reason_names_what_its_explanation_does(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Torch(monkeypatch)
    log = CompileLog()
    noted.breaks.append(SimpleNamespace(user_stack=[SimpleNamespace(filename="model.py", lineno=3)], reason=text))
    assert [each.reason for each in log.breaks()] == [reason]
