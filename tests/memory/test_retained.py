"""Truth: what a step leaves behind, and whether it is a leak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.pipeline import profile_script
from gradscope.tables import Options, RetainedRow, RunData
from gradscope.workload import Script, load_target

from .measuring import F32, check_sums, in_a_loop, line_of, measured, memory_of, place

ROWS, WIDTH, OUT = 8, 16, 4
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
HIDDEN, OUTPUT = ROWS * WIDTH * F32, ROWS * OUT * F32


class Network(nn.Module):
    """Linear, sigmoid, Linear: the sigmoid's output is what its graph keeps besides the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act, self.tail = nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.act(self.stem(x)))  # forward
        return out


def retained(data: RunData) -> set[tuple[str | None, str | None, str, str, int, int, bool]]:
    """(layer, line, op, phase, count, bytes, grows) of each row."""
    rows = memory_of(data).retained
    return {(row.layer, place(row.line), row.op, row.phase, row.count, row.bytes, row.grows) for row in rows}


def leaks(data: RunData) -> list[RetainedRow]:
    return [row for row in memory_of(data).retained if row.grows]


def here(tag: str) -> str:
    return line_of(tag, __file__)


# --------------------------------------------------------------------------------------------------------------------
# Nothing
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "SGD", "Adam"], ids=["no optimizer", "SGD", "Adam"])
def test_a_clean_model_retains_nothing(kind: str | None) -> None:
    model = Network()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1) if kind else None
    memory = memory_of(measured(model, X, optimizer=optimizer))
    assert memory.retained_after_step_bytes == 0 and not memory.retained
    assert memory.start_bytes == memory.end_bytes


def test_a_clean_loop_retains_nothing() -> None:
    model = Network()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        optimizer.step()

    assert memory_of(in_a_loop(model, step)).retained == ()


def test_gradients_and_buffers_are_not_retained() -> None:
    """Batch statistics are replaced by new tensors in each step, gradients made and left."""

    class Tracking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, OUT)
            self.register_buffer("seen", torch.zeros(ROWS, OUT))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            self.seen = self.seen + out.detach()
            return out

    model = Tracking()

    def step() -> None:
        model.zero_grad()
        model(X).sum().backward()

    assert memory_of(in_a_loop(model, step)).retained == ()


# --------------------------------------------------------------------------------------------------------------------
# Leaks
# --------------------------------------------------------------------------------------------------------------------


def test_a_list_of_losses_that_keep_their_graphs_is_a_leak() -> None:
    """backward frees what its nodes saved; kept graphs of retain_graph are kept whole."""
    model, losses = Network(), []

    def step() -> None:
        model.zero_grad()
        loss = model(X).sum()  # loss
        loss.backward(retain_graph=True)
        losses.append(loss)

    data = in_a_loop(model, step)
    assert retained(data) == {
        ("act", here("forward"), "aten::sigmoid", "forward", 1, HIDDEN, True),
        (None, here("loss"), "aten::sum", "forward", 1, F32, True),
    }
    memory = memory_of(data)
    assert memory.end_bytes - memory.start_bytes == memory.retained_after_step_bytes == HIDDEN + F32


def test_a_list_of_freed_losses_leaks_the_numbers_alone() -> None:
    model, losses = Network(), []

    def step() -> None:
        model.zero_grad()
        loss = model(X).sum()  # freed loss
        loss.backward()
        losses.append(loss)

    assert retained(in_a_loop(model, step)) == {(None, here("freed loss"), "aten::sum", "forward", 1, F32, True)}


def test_a_loss_outside_of_the_modules_is_a_leak_too() -> None:
    """What functional code keeps: here the output of a loss that is not reduced."""
    model, kept = Network(), []

    def step() -> None:
        model.zero_grad()
        each = model(X).square()  # each
        each.mean().backward()
        kept.append(each.detach())

    assert retained(in_a_loop(model, step)) == {(None, here("each"), "aten::square", "forward", 1, OUTPUT, True)}


def test_outputs_in_a_list_are_a_leak() -> None:
    """Detached, they hold no graph, but themselves."""

    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.history = Network(), []

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            self.history.append(out.detach())
            return out

    data = measured(nn.Sequential(Logging()), X)
    assert retained(data) == {("0.inner.tail", here("forward"), "aten::linear", "forward", 1, OUTPUT, True)}


def test_gradients_in_a_list_are_a_leak() -> None:
    """Made in backward, by the layer whose weight they belong to."""
    model, history = nn.Sequential(nn.Linear(WIDTH, OUT, bias=False)), []

    def step() -> None:
        model(X).sum().backward()
        history.append(model[0].weight.grad)
        model[0].weight.grad = None

    rows = retained(in_a_loop(model, step))
    assert {row[:1] + row[2:] for row in rows} == {("0", "MmBackward0", "backward", 1, WIDTH * OUT * F32, True)}


def test_several_at_one_place_are_counted() -> None:
    model, kept = Network(), []

    def step() -> None:
        model.zero_grad()
        for _ in range(3):
            out = model(X)
            out.sum().backward()
            kept.append(out.detach())
        del out

    rows = retained(in_a_loop(model, step))
    assert rows == {("tail", here("forward"), "aten::linear", "forward", 3, 3 * OUTPUT, True)}


# --------------------------------------------------------------------------------------------------------------------
# Held over the step, but replaced
# --------------------------------------------------------------------------------------------------------------------


def test_a_variable_that_each_step_replaces_is_no_leak() -> None:
    """The last loss and output: alive after the step, as many bytes as before it."""
    model, last = Network(), {}

    def step() -> None:
        model.zero_grad()
        last["output"] = model(X)
        last["loss"] = last["output"].sum()  # last loss
        last["loss"].backward()

    data = in_a_loop(model, step)
    assert retained(data) == {
        ("tail", here("forward"), "aten::linear", "forward", 1, OUTPUT, False),
        (None, here("last loss"), "aten::sum", "forward", 1, F32, False),
    }
    assert leaks(data) == []
    memory = memory_of(data)
    assert memory.start_bytes == memory.end_bytes


def test_the_state_of_a_recurrent_model_is_no_leak() -> None:
    """Truncated backpropagation through time: the state of the last step goes into the next."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.state = nn.Linear(WIDTH, WIDTH), torch.zeros(ROWS, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.tanh(self.inner(x) + self.state)  # state
            self.state = state.detach()
            return state

    model = Stateful()

    def step() -> None:
        model.zero_grad()
        model(X).sum().backward()

    assert retained(in_a_loop(model, step)) == {("", here("state"), "aten::tanh", "forward", 1, HIDDEN, False)}


def test_a_cache_that_is_filled_once_is_none() -> None:
    """Made in the first step, it is there before the measured one."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.cache = nn.Linear(WIDTH, WIDTH), None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = torch.ones(ROWS, WIDTH) * 2
            out: Tensor = self.inner(x) * self.cache
            return out

    model = Cached()

    def step() -> None:
        model.zero_grad()
        model(X).sum().backward()

    memory = memory_of(in_a_loop(model, step))
    assert memory.retained == ()


# --------------------------------------------------------------------------------------------------------------------
# Scripts
# --------------------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(8, 16)
history = []
for epoch in range(100):
    optimizer.zero_grad()
    output = model(x)
    loss = output.square().mean()
    loss.backward()
    optimizer.step()
    history.append({entry})
"""


def run(folder: Path, entry: str) -> RunData:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("{entry}", entry))
    script: Any = load_target(str(path))
    assert isinstance(script, Script)
    outcome = profile_script(script, Options(steps=1, warmup=1))
    assert outcome.error is None and outcome.report is not None
    check_sums(outcome.report.data)
    return outcome.report.data


def test_a_script_that_logs_numbers_has_no_leak(tmp_path: Path) -> None:
    """Its variables hold the last loss and output: alive when the step ends, which is in optimizer.step."""
    data = run(tmp_path, "loss.item()")
    assert leaks(data) == []
    assert {(row[0], row[2], row[5], row[6]) for row in retained(data)} == {
        ("2", "aten::linear", OUTPUT, False),
        (None, "aten::mean", F32, False),
    }


LEAKS: dict[str, tuple[str, set[tuple[str | None, str, int]]]] = {
    "losses": ("loss", {(None, "aten::mean", F32)}),
    "outputs": ("output", {("2", "aten::linear", OUTPUT)}),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_script_that_logs_tensors_leaks_them(name: str, tmp_path: Path) -> None:
    entry, expected = LEAKS[name]
    assert {(row.layer, row.op, row.bytes) for row in leaks(run(tmp_path, entry))} == expected
