"""What a loop keeps of its steps: each leak is found with its line, and what is kept by right is left alone."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules.memory import leak
from gradscope.recording.graph import Value
from gradscope.report.header import head_rows
from gradscope.report.view import build_view
from gradscope.tables import Finding
from tests.diagnose.made_graph import made_value
from tests.diagnose.run_case import loop_case
from tests.diagnose.timing_cases import call, check_words, made_case

Keep = Callable[[list[Any], Tensor, Tensor], object]
HERE = Path(__file__).name


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _found(keep: Keep, **options: Any) -> Any:
    return list(leak.find(_case(keep, **options)))


def _case(keep: Keep, *, retain: bool = False, hooked: Callable[[Model, list[Any]], object] | None = None) -> Case:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    kept: list[Any] = []
    if hooked is not None:
        hooked(model, kept)
    x, y = torch.ones(32, 64), torch.zeros(32, 8)

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        loss = (output - y).pow(2).mean()
        loss.backward(retain_graph=retain)
        optimizer.step()
        keep(kept, loss, output)

    return loop_case(step, model)


def _line(found: Finding) -> str:
    assert found.line is not None
    name, _, number = found.line.rpartition(":")
    assert Path(name).name == HERE
    return Path(__file__).read_text().splitlines()[int(number) - 1].strip()


def _nothing(_kept: list[Any], _loss: Tensor, _output: Tensor) -> None:
    """Keep nothing."""


def _sum(kept: list[Any], loss: Tensor, _output: Tensor) -> None:
    kept[:] = [kept[0] + loss if kept else loss]


def _sum_in_place(kept: list[Any], loss: Tensor, _output: Tensor) -> None:
    if not kept:
        kept.append(torch.zeros(()))
    kept[0] += loss
    str(kept[0].item() / 2)


def _cycle(_kept: list[Any], _loss: Tensor, output: Tensor) -> None:
    held: list[Any] = [output]
    held.append(held)


def test_a_kept_loss_holds_its_graph() -> None:
    (found,) = _found(lambda kept, loss, output: kept.append(loss))
    check_words(found)
    assert found.severity == "warning"
    assert _line(found) == "loss = (output - y).pow(2).mean()"
    assert "their autograd graph stays too" in found.evidence
    assert found.code == "losses.append(loss.item())"


@pytest.mark.parametrize("output_too", [False, True])
def test_the_header_is_alarmed_by_no_numbers_kept_on_purpose(output_too: bool) -> None:
    """As the rule is: a loss for a curve is no leak, an output of each step is."""
    case = _case(lambda kept, loss, output: kept.append([loss.detach(), output.detach()][: 1 + output_too]))
    assert case.run.memory is not None and any(row.grows for row in case.run.memory.retained)
    view = build_view(case.run)
    assert bool(list(leak.find(case))) is output_too
    assert ("LEAK" in dict(head_rows(case.run, full=False))["memory"]) is output_too
    assert view.memory is not None
    assert any(row.leaks for row in view.memory.retained.rows) is output_too


@pytest.mark.parametrize("detached", [lambda loss: loss.detach(), lambda loss: loss.data], ids=["detach", "data"])
def test_a_loss_that_is_kept_without_its_graph_after_the_step(detached: Callable[[Tensor], Tensor]) -> None:
    """A script's step ends with its optimizer: what stands behind that is recorded with the next step."""
    model = Model()
    last: list[Tensor] = []
    kept: list[Tensor] = []

    def step() -> None:
        if last:
            kept.append(detached(last.pop()))
        loss = model(torch.ones(32, 64)).pow(2).mean()
        loss.backward()
        last.append(loss)

    assert list(leak.find(loop_case(step, model))) == []
    assert len(kept) > 3


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_that_is_kept_with_its_graph_and_detached_for_something_else(late: bool) -> None:
    """Of both the memory is the same; only one of them has a graph."""
    model = Model()
    last: list[Tensor] = []
    kept: list[Tensor] = []
    total = torch.zeros(())

    def step() -> None:
        for loss in last:
            kept.append(loss)
            total.add_(loss.detach())
        last.clear()
        loss = model(torch.ones(32, 64)).pow(2).mean()
        loss.backward()
        if late:
            last.append(loss)
        else:
            kept.append(loss)
            total.add_(loss.detach())

    (found,) = leak.find(loop_case(step, model))
    assert "their autograd graph stays too" in found.evidence
    assert len(kept) > 3


@pytest.mark.parametrize("keep", [_sum, _sum_in_place])
def test_a_sum_of_losses_holds_every_graph(keep: Keep) -> None:
    (found,) = _found(keep)
    check_words(found)
    assert found.severity == "warning"
    assert _line(found) in ("kept[:] = [kept[0] + loss if kept else loss]", "kept[0] += loss")
    assert "detach()" in found.code


@pytest.mark.parametrize("detached", [False, True])
def test_kept_outputs(detached: bool) -> None:
    (found,) = _found(lambda kept, loss, output: kept.append(output.detach() if detached else output))
    check_words(found)
    assert _line(found) == "return self.down(torch.relu(self.up(x)))"
    assert found.predicted_saving_bytes == 32 * 8 * 4
    assert ("graph" in found.evidence) is not detached


def test_a_graph_that_is_retained_and_kept_is_critical() -> None:
    (found,) = _found(lambda kept, loss, output: kept.append(loss), retain=True)
    assert found.severity in ("warning", "critical")  # by its share of all memory of the process
    assert found.predicted_saving_bytes is not None and found.predicted_saving_bytes >= 32 * 128 * 4


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_what_hooks_keep(kind: str) -> None:
    def hooked(model: Model, kept: list[Any]) -> None:
        if kind == "forward":
            model.up.register_forward_hook(lambda module, args, output: kept.append(output.detach()))
        else:
            model.down.register_full_backward_hook(lambda module, before, after: kept.append(before[0]))

    (found,) = _found(_nothing, hooked=hooked)
    check_words(found)
    assert found.severity in ("warning", "critical")  # by its share of all memory of the process
    assert found.predicted_saving_bytes == 32 * 128 * 4


@pytest.mark.parametrize("collects", [False, True])
def test_a_cycle_grows_where_nobody_collects(collects: bool) -> None:
    """Some programs turn Python's collector off for speed; where it is on, cycles go when it comes by."""

    def keep(*given: Any) -> None:
        _cycle(*given)
        if collects:
            gc.collect()

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        found = _found(keep)
    finally:
        if was_enabled:
            gc.enable()
    assert [each.predicted_saving_bytes for each in found] == ([] if collects else [32 * 8 * 4])


class Window:
    """Keeps the last few."""

    def __init__(self, count: int) -> None:
        self.held: deque[Tensor] = deque(maxlen=count)

    def __call__(self, _kept: list[Any], _loss: Tensor, output: Tensor) -> None:
        self.held.append(output.detach())


GOOD: dict[str, Keep] = {
    "nothing": _nothing,
    "item": lambda kept, loss, output: kept.append(loss.item()),
    "detach": lambda kept, loss, output: kept.append(loss.detach()),
    "a copy": lambda kept, loss, output: kept.append(loss.detach().clone()),
    "a sum of numbers": lambda kept, loss, output: kept.append(loss.item() + (kept[-1] if kept else 0.0)),
    "a detached sum": lambda kept, loss, output: kept.__setitem__(
        slice(0, 1), [loss.detach() + (kept[0] if kept else 0.0)]
    ),
    "the latest": lambda kept, loss, output: kept.__setitem__(slice(0, 1), [output]),
    "a window of 2": Window(2),
    "a window of 4": Window(4),
}


@pytest.mark.parametrize("keep", GOOD.values(), ids=GOOD)
def test_what_is_kept_by_right(keep: Keep) -> None:
    assert _found(keep) == []


def test_the_history_of_an_optimizer_is_kept_by_right() -> None:
    """LBFGS keeps numbers as large as a loss, some more with each step: the last losses are none of them."""
    torch.manual_seed(0)
    model, x, last = Model(), torch.ones(32, 64), deque[Tensor](maxlen=2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3, tolerance_grad=0, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    case = loop_case(lambda: last.append(optimizer.step(closure)), model)
    assert case.run.memory is not None and case.run.memory.retained
    assert not list(leak.find(case))


def test_a_retained_graph_that_nobody_keeps() -> None:
    assert _found(_nothing, retain=True) == []


def _number(storage: int) -> Value:
    return made_value((), requires_grad=True, strides=(), storage=storage)


@pytest.mark.parametrize(
    ("storage", "read_by", "is_sum"),
    [
        (1, None, True),  # total += loss
        (3, None, True),  # total = total + loss
        (3, "item", False),  # (one + other).item()
        (1, "backward", False),
    ],
)
def test_sums_after_the_optimizer_of_a_script(storage: int, read_by: str | None, is_sum: bool) -> None:
    made = _number(storage)
    calls = [call("add", [_number(1), _number(2)], [made], layer=None)]
    if read_by is not None:
        calls.append(call(read_by, [made], index=1, layer=None))
    found = list(leak.find(made_case(facts=StepFacts(calls=calls, recorded=True))))
    assert len(found) == is_sum


def test_two_losses_added_for_one_backward_pass_are_no_sum_over_steps() -> None:
    model = Model()

    def step() -> None:
        output = model(torch.ones(4, 64))
        loss = torch.zeros((), requires_grad=True) + output.mean()
        (loss + output.pow(2).mean()).backward()  # type: ignore[no-untyped-call]

    assert [each for each in leak.find(loop_case(step, model)) if "sum" in each.message] == []
