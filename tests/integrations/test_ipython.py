"""The magic of notebooks, in a shell of IPython's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

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
    assert shell.user_ns["done"] == 20  # it ran to its end
    assert {row.path for row in report.data.layers} == {"model"} or report.data.workload.model == "Linear"
    assert "Linear" in report._repr_html_()


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_measured_is_said_in_a_sentence(shell: InteractiveShell) -> None:
    with pytest.raises(UsageError, match="gradscope: cell ran to its end without a backward pass"):
        shell.run_cell_magic("gradscope", "", "x = 1")
    with pytest.raises(UsageError, match="unrecognized arguments: --stepz"):
        shell.run_cell_magic("gradscope", "--stepz 2", "x = 1")
