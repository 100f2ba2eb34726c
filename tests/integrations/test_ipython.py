"""The magic of notebooks, in a shell of IPython's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from gradscope.report.report import Report

CELL = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
done = 0
for _ in range(20):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    done += 1
"""


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    main = sys.modules["__main__"]  # a shell puts its own there
    made = InteractiveShell.instance()
    made.extension_manager.load_extension("gradscope")
    yield made
    made.history_manager.end_session()
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


@pytest.mark.filterwarnings("ignore")  # of IPython's own
def test_a_cell_gives_its_report_and_leaves_its_variables(shell: InteractiveShell) -> None:
    report = shell.run_cell_magic("gradscope", "--steps 2 --warmup 1 --no-memory", CELL)
    assert isinstance(report, Report)
    assert report.data.workload.steps == 2 and report.data.workload.target == "cell"
    assert report.data.workload.warmup == 1 and report.data.memory is None and report.data.lines
    assert shell.user_ns["done"] == 20  # it ran to its end
    assert {row.path for row in report.data.layers} == {"model"} or report.data.workload.model == "Linear"
    assert "Linear" in report._repr_html_()


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_measured_is_said_in_a_sentence(shell: InteractiveShell) -> None:
    with pytest.raises(UsageError, match="gradscope: cell ran to its end without a backward pass"):
        shell.run_cell_magic("gradscope", "", "x = 1")
    with pytest.raises(UsageError, match="unrecognized arguments: --stepz"):
        shell.run_cell_magic("gradscope", "--stepz 2", "x = 1")
    for line, message in {
        "--steps 0": "gradscope: steps is 0; it must be a whole number of at least 1",
        "--warmup -1": "gradscope: warmup is -1; it must be",
        "--steps '2": "%%gradscope: no closing quotation in: --steps '2",
    }.items():
        with pytest.raises(UsageError, match=message):
            shell.run_cell_magic("gradscope", line, "ran = 1")
    assert "ran" not in shell.user_ns


@pytest.mark.filterwarnings("ignore")
def test_help_runs_nothing(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_cell_magic("gradscope", "--help", "ran = 1") is None
    assert "--no-memory" in capsys.readouterr().out and "ran" not in shell.user_ns


@pytest.mark.filterwarnings("ignore")
def test_options_of_the_cell_are_taken(shell: InteractiveShell) -> None:
    report = shell.run_cell_magic("gradscope", "--steps 1 --warmup 2 --no-lines", CELL)
    assert (report.data.workload.steps, report.data.workload.warmup) == (1, 2)
    assert report.data.memory is not None and not report.data.lines


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("magic", ["%%time", "%%gradscope --steps 2 --warmup 1 --no-memory"])
@pytest.mark.parametrize(
    ("end", "error", "shown"),
    [
        ("raise ValueError('broken')", ValueError, "ValueError"),
        ("raise KeyboardInterrupt", KeyboardInterrupt, "KeyboardInterrupt"),
        ("for x in :", SyntaxError, "SyntaxError"),
    ],
)
def test_a_cell_that_fails_does_so_here_as_under_time(
    magic: str, end: str, error: type[BaseException], shown: str, shell: InteractiveShell, capsys: Any
) -> None:
    result = shell.run_cell(f"{magic}\n{CELL}\n{end}")
    assert not result.success and isinstance(result.error_in_exec or result.error_before_exec, error)
    out = capsys.readouterr().out
    assert out.count("(most recent call last)") == 1  # it comes out once
    assert shown in out and ("gradscope.Report of 'cell'" in out) == (error is not SyntaxError and "scope" in magic)
    assert shell.user_ns.get("done") == (None if error is SyntaxError else 20)


@pytest.mark.filterwarnings("ignore")
def test_what_the_last_line_is_worth_is_shown(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell_magic("gradscope", "--steps 2 --warmup 1 --no-memory", CELL + "\ndone * 111")
    assert "2220" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_semicolon_hides_what_the_last_line_is_worth(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    end = "\ndef more():\n    global ran\n    ran = 3\n    return done * 111\nmore();  # it runs all the same"
    report = shell.run_cell_magic("gradscope", "--steps 2 --warmup 1 --no-memory", CELL + end)
    assert "2220" not in capsys.readouterr().out
    assert isinstance(report, Report) and shell.user_ns["ran"] == 3
