"""A step of many operations is measured within a budget, and what is left out for it is said."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn

import gradscope
from gradscope.capture.budget import Budget, left_out_note
from gradscope.capture.memory import Surroundings
from gradscope.capture.phases.base import Run
from gradscope.capture.phases.timed import Timed
from gradscope.capture.result import Capture
from gradscope.cli.options import memory_budget
from gradscope.errors import NothingMeasuredError, UsageError
from gradscope.tables import MEMORY_BUDGET, Options, RunData


def budget_of(nodes: int, limit: int = MEMORY_BUDGET) -> Budget:
    budget = Budget(limit)
    budget.nodes = nodes
    return budget


def test_ordinary_steps_lack_nothing() -> None:
    """A model of a hundred layers draws a few thousand nodes."""
    budget = budget_of(5_000)
    assert budget.steps_at_once() >= 6
    assert budget.survey().left_out == []
    assert budget.left_out(memory=True) == []
    assert budget.warning(5, 1e9, memory=True) is None


@pytest.mark.parametrize("nodes", [10_000, 20_000, 30_000])
def test_no_pass_takes_much_more_than_an_eighth_where_less_will_do(nodes: int) -> None:
    assert budget_of(nodes).most_bytes(memory=True) < 1.5 * MEMORY_BUDGET / 4
    assert budget_of(nodes).left_out(memory=True) == ["input shapes"]


@pytest.mark.parametrize("nodes", [1, 1_000, 20_000, 100_000, 200_000, 300_000])
@pytest.mark.parametrize("limit", [10**9, MEMORY_BUDGET, 10**11])
def test_within_the_budget_but_for_one_step_alone(nodes: int, limit: int) -> None:
    budget = budget_of(nodes, limit)
    one_step = nodes * 5 * 2_500
    assert budget.most_bytes(memory=True) <= max(limit, one_step)


@pytest.mark.parametrize(("part", "flops"), [(0.4, True), (0.6, False)])
def test_flops_may_take_half_of_the_budget(part: float, flops: bool) -> None:
    """They can be done without; lines, which cannot, may take all of it."""
    budget = Budget(MEMORY_BUDGET)
    budget.read(round(part * MEMORY_BUDGET / 5_500), steps=1)
    plan = budget.survey()
    assert (plan.shapes, plan.flops, plan.takes_place) == (False, flops, True)


def test_what_was_read_counts_more_than_a_guess() -> None:
    budget = budget_of(20_000)
    budget.read(6_000, steps=2)
    assert budget.rows == 3_000
    assert budget.left_out(memory=True) == []
    budget.read(1_000, steps=1)
    assert budget.rows == 3_000  # of the largest step


def test_nodes_are_counted() -> None:
    budget = Budget(MEMORY_BUDGET)
    x = torch.ones(2, requires_grad=True)
    for count in (30, 3, 7, 2):  # of the first a part may have run before, or two for one
        budget.begin_step()
        for _ in range(count):
            x.exp()
        budget.end_step()
    assert budget.nodes == 7


def test_warning_comes_with_an_estimate() -> None:
    assert budget_of(200_000).warning(5, 3.3e9, memory=True) == (
        "a step creates 200,000 autograd nodes: measuring it takes about 3.30 GB of memory and 274 s; "
        "input shapes, FLOPs and memory are not measured, to stay within the memory budget of 4.29 GB (--memory-budget)"
    )
    assert budget_of(1_000_000).warning(5, 0.5e9, memory=False) == (
        "a step creates 1,000,000 autograd nodes: measuring it takes about 12.5 GB of memory and 42 s; "
        "input shapes, FLOPs and source lines are not measured, "
        "to stay within the memory budget of 4.29 GB (--memory-budget)"
    )


def test_the_estimate_follows_what_a_step_takes_on_this_machine() -> None:
    budget = budget_of(200_000)
    assert budget.seconds(5, 6e9) == 2 * budget.seconds(5, 3e9)
    said: list[str] = []
    run = Run(Capture(Options()), Surroundings())
    run.say, run.budget.nodes = said.append, 200_000
    run.capture.unprofiled_ns = [3_300_000_000, 3_300_000_000, 90_000_000_000]
    phase = Timed(run, 6)
    with ExitStack() as exits:
        phase.enter(exits)
    assert " and 274 s" in said[0]


def test_note() -> None:
    assert left_out_note(["memory"], 1234.4, 10**9) == (
        "a step records 1,234 trace events: memory is not measured, "
        "to stay within the memory budget of 1.00 GB (--memory-budget)"
    )


def profiled(budget: str, steps: int = 3) -> RunData:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)], nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    return gradscope.profile(
        model, torch.ones(4, 8), optimizer=optimizer, steps=steps, warmup=1, memory_budget=budget
    ).data


def test_a_stretch_a_step_measures_the_same() -> None:
    """Rows, calls, lines and memory are those of a run in one stretch; RunData checks that all adds up."""
    whole, parts = profiled("4GiB"), profiled("3MB")
    assert any("were split into 3 groups" in note for note in parts.notes)
    assert not any("groups" in note for note in whole.notes)
    assert parts.workload.steps == whole.workload.steps == 3
    assert parts.workload.events == whole.workload.events
    assert not parts.partial
    assert sum(note.endswith("(--memory-budget)") for note in parts.notes) == 1

    def shape(run: RunData) -> object:
        return (
            [(row.path, row.calls, row.saved_bytes, row.flops) for row in run.layers],
            [(row.file, row.line, row.layer) for row in run.lines],
            sorted((str(row.layer), row.phase, row.name, row.calls) for row in run.ops),
        )

    assert shape(parts) == shape(whole)
    assert parts.memory is not None and whole.memory is not None
    assert parts.memory.peak_bytes == whole.memory.peak_bytes
    assert parts.memory.at_peak == whole.memory.at_peak
    assert parts.memory.start_bytes == whole.memory.start_bytes


def test_what_does_not_fit_is_left_out_and_said() -> None:
    run = profiled("200kB", steps=2)
    (note,) = (note for note in run.notes if note.endswith("(--memory-budget)"))
    assert (
        ": input shapes, FLOPs, source lines and memory are not measured, to stay within the memory budget of 200 kB"
        in note
    )
    assert not run.partial
    assert run.memory is None
    assert not run.lines
    assert run.step.backward_ns > 0
    assert not any("ended before" in note for note in run.notes)


def test_option_and_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").write_text('[tool.gradscope]\nmemory-budget = "2GiB"\n')
    assert memory_budget(None, folder) == 2 * 1024**3
    assert memory_budget("1g", folder) == 1024**3
    (folder / "pyproject.toml").write_text("[tool.gradscope]\n")
    assert memory_budget(None, folder) == MEMORY_BUDGET


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "memory-budget = 4",
            'pyproject.toml: tool.gradscope.memory-budget is not text but 4.\nWrite memory-budget = "4GiB".',
        ),
        (
            'memory-budget = "much"',
            "pyproject.toml: tool.gradscope.memory-budget: much is not an amount of memory.\n"
            "Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB; without one it is bytes.",
        ),
    ],
)
def test_bad_amounts(tmp_path_factory: pytest.TempPathFactory, text: str, message: str) -> None:
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").write_text(f"[tool.gradscope]\n{text}\n")
    with pytest.raises(UsageError) as raised:
        memory_budget(None, folder)
    assert str(raised.value).endswith(message)


def test_bad_option() -> None:
    with pytest.raises(UsageError) as raised:
        memory_budget("0")
    assert str(raised.value) == (
        "--memory-budget: 0 is not a positive amount of memory.\n"
        "Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB."
    )


def looped(steps: int, budget: str = "4GiB") -> RunData:
    """A loop of so many steps, told nothing of when enough is measured."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    with gradscope.profiling(model, steps=3, warmup=1, memory_budget=budget) as prof:
        for _ in range(steps):
            model(torch.ones(4, 8)).sum().backward()
            prof.step()
    return prof.report.data


WHOLE = 1 + 3 + 4 + 2 + 1 + 1 + 2  # warm-up, unprofiled, one that settles and the measured, ..., memory


def test_batches_that_end_early_are_told_how_many_are_needed() -> None:
    assert not looped(WHOLE).partial
    run = looped(9)
    assert run.partial
    assert (
        f"the run ended before the survey step: no source lines and no FLOPs (a whole report takes {WHOLE} steps; "
        "there were 9)"
    ) in run.notes
    run = looped(WHOLE - 1)
    assert run.partial
    assert (
        f"the run ended before the steps that measure memory (a whole report takes {WHOLE} steps; "
        f"there were {WHOLE - 1})"
    ) in run.notes


def test_steps_between_stretches_are_counted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stretches need three more steps, which are known as soon as the first stretch has begun."""
    monkeypatch.setattr("gradscope.capture.phases.timed.interrupted", lambda costs: frozenset())
    assert not looped(WHOLE + 3, "1MB").partial
    for steps in (6, 9, WHOLE):
        run = looped(steps, "1MB")
        assert run.partial
        assert any(f"(a whole report takes {WHOLE + 3} steps; there were {steps})" in note for note in run.notes)


FIRST_PROFILED = "the only measured step is the profiler's first, which takes longer than later ones"


def test_nothing_measured_says_how_long_a_run_must_be() -> None:
    with pytest.raises(NothingMeasuredError) as raised:
        looped(4)
    assert str(raised.value) == (
        "the loop ended after 4 training steps; nothing is measured before step 5 with warmup=1, steps=3, "
        f"and a whole report takes {WHOLE}.\n"
        "Let it run longer, or measure less: warmup=1, steps=1 needs 3."
    )
    assert looped(5).workload.steps == looped(6).workload.steps == 1
    assert FIRST_PROFILED in looped(5).notes and FIRST_PROFILED not in looped(6).notes
