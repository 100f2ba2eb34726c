"""Truth: backward time by the source line of the forward code that caused it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .burning import Burn, BurnSpec, Meter
from .proof import close, in_a_loop, in_model_mode, measure

X = torch.ones(4, 8)


def line_of(mark: str) -> int:
    """The number of the line of this file that ends in ``# line: <mark>``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# line: {mark}")]
    return number


def lines_here(report: Any) -> dict[int, Any]:
    """The report's lines of this file, by number; each line at most once."""
    rows = [row for row in report.data.lines if Path(row.file).name == Path(__file__).name]
    assert len({row.line for row in rows}) == len(rows), "a line has one row"
    return {row.line: row for row in rows}


def check_lines(meter: Meter, report: Any) -> dict[int, Any]:
    """Every mark's line has its burned backward and forward time; lines without a burn have none."""
    rows, steps = lines_here(report), report.data.workload.steps
    assert rows, (
        f"no line of this file among {[(row.file, row.line) for row in report.data.lines]}: {report.data.notes}"
    )
    noise = meter.stolen_ns() / steps
    marks = {line_of(mark): total / steps for mark, total in meter.totals_ns("backward").items()}
    for number, truth in marks.items():
        assert number in rows, f"line {number} is missing"
        got = rows[number].backward_ns
        assert close(got, truth) or abs(got - truth) < noise + 0.03 * truth + 0.3e6, (number, got, truth)
    for number, row in rows.items():
        assert number in marks or row.backward_ns < 0.3e6 + noise, row
    ledger = report.data.ledger
    assert sum(row.backward_ns for row in report.data.lines) <= ledger.backward_ns
    return rows


class Lined(nn.Module):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.stem = nn.Linear(8, 8)

    def burn(self, mark: str, forward_ms: float, backward_ms: float) -> BurnSpec:
        return BurnSpec(self.meter, mark, forward_ms, backward_ms)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = Burn.apply(self.burn("first", 1, 5), x)  # line: first
        x = x * 2 + 1
        for _ in range(3):
            x = Burn.apply(self.burn("loop", 1, 1), x)  # line: loop
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        out: Tensor = Burn.apply(self.burn("helper", 1, 2), x)  # line: helper
        return out


def test_lines_of_a_module(meter: Meter) -> None:
    report = measure(meter, in_model_mode(Lined(meter), X, lambda output, batch: output.sum(), lines=True))
    rows = check_lines(meter, report)
    first = rows[line_of("first")]
    assert first.text.startswith('x = Burn.apply(self.burn("first"') and first.function.endswith("forward")
    assert first.layer == "" and first.forward_ns > 0
    assert rows[line_of("helper")].function.endswith("helper")
    order = [row.backward_ns for row in report.data.lines]
    assert order == sorted(order, reverse=True), "the dearest line comes first"


def test_lines_of_a_loss_function(meter: Meter) -> None:
    model = Lined(meter)

    def loss(output: Tensor, batch: Any) -> Tensor:
        output = Burn.apply(model.burn("loss", 1, 4), output)  # line: loss
        return output.sum()

    rows = check_lines(meter, measure(meter, in_model_mode(model, X, loss, lines=True)))
    assert rows[line_of("loss")].layer is None, "a functional loss lies outside every module"


class CallsTorch(nn.Module):
    """A Linear between two burns: its backward is the gap between theirs."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.stem = nn.Linear(1024, 1024)
        self.big = nn.Linear(1024, 1024, bias=False)
        self.big.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)  # line: stem
        x = Burn.apply(BurnSpec(self.meter, "below", 1, 1), x)  # line: below
        x = self.big(x)  # line: big
        out: Tensor = Burn.apply(BurnSpec(self.meter, "above", 1, 1), x)  # line: above
        return out


def test_torchs_own_modules_are_charged_to_the_line_that_calls_them(meter: Meter) -> None:
    report = measure(
        meter, in_model_mode(CallsTorch(meter), torch.ones(256, 1024), lambda output, batch: output.sum(), lines=True)
    )
    row = lines_here(report)[line_of("big")]
    truth = meter.gaps_ns("above", "below") / report.data.workload.steps
    assert truth > 1e6
    assert row.backward_ns == pytest.approx(truth, rel=0.1, abs=0.3e6 + meter.stolen_ns() / 3)
    assert row.layer == "big" and row.text == "x = self.big(x)  # line: big"
    assert not any("torch/nn" in row.file for row in report.data.lines)


class Checkpointed(Lined):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def bounded_lines(meter: Meter, model: nn.Module) -> None:
    """The line keeps its backward; whether its own recompute is counted with it or not is bounded by the truth."""
    report = measure(meter, in_model_mode(model, X, lambda output, batch: output.sum(), lines=True))
    rows, steps = lines_here(report), report.data.workload.steps
    # Checkpointing's own Python runs inside the node that sets the recompute off: some 0.2 ms of no line.
    noise = meter.stolen_ns() / steps + 0.6e6
    for mark, total in meter.totals_ns("backward").items():
        backward, again = total / steps, meter.totals_ns("recompute").get(mark, 0) / steps
        got = rows[line_of(mark)].backward_ns
        assert 0.97 * backward - noise <= got <= 1.03 * (backward + again) + noise, (mark, got, backward, again)


def test_lines_under_a_checkpoint(meter: Meter) -> None:
    bounded_lines(meter, Checkpointed(meter))


class Outer(nn.Module):
    """Checkpoints a child whose forward has the lines."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.inner = Lined(meter)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=False)
        return out


def test_lines_of_a_checkpointed_child(meter: Meter) -> None:
    bounded_lines(meter, Outer(meter))


class Fickle(Lined):
    """Data-dependent control flow: no step is like the one before."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.stem(x)
        for _ in range(self.seen % 5):
            x = x.tanh() if self.seen % 2 else x.sigmoid()
        out: Tensor = Burn.apply(self.burn("fickle", 1, 4), x)  # line: fickle
        for _ in range(self.seen % 3):
            out = out.cos()
        return out


def test_control_flow_that_changes_falls_back_and_says_so(meter: Meter) -> None:
    report = measure(meter, in_model_mode(Fickle(meter), X, lambda output, batch: output.sum(), lines=True))
    assert any("line" in note.lower() for note in report.data.notes), report.data.notes
    # What it still says about lines must not be wrong: nothing but the burning line may hold the burned time.
    for number, row in lines_here(report).items():
        assert number == line_of("fickle") or row.backward_ns < 1e6, row


def test_lines_in_the_users_loop(meter: Meter) -> None:
    """Either measured rightly, or said not to be measured."""
    model = Lined(meter)

    def step() -> None:
        out = Burn.apply(model.burn("user's loop", 1, 3), model(X))  # line: user's loop
        out.sum().backward()

    report = measure(meter, in_a_loop(model, step))
    if report.data.lines:
        check_lines(meter, report)
    else:
        assert any("line" in note.lower() for note in report.data.notes), report.data.notes


def test_no_lines_when_not_asked_for(meter: Meter) -> None:
    report = in_model_mode(Lined(meter), X, lambda output, batch: output.sum(), lines=False)()
    assert not report.data.lines


class Adjoint(torch.autograd.Function):
    """Solves backwards in time, as torchdiffeq's adjoint does: calls its module again, and has it differentiated."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, field: nn.Module, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.meter, ctx.field = meter, field
        with torch.no_grad():
            y = y + field(y)
        ctx.save_for_backward(y, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(3):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                with ctx.meter.burn("python", "between", 1):  # Python between the operations
                    pass
                out = ctx.field(y)
            slope, *found = torch.autograd.grad(out, (y, *parameters), -grad)
            with ctx.meter.burn("python", "between", 1):
                grad = grad - 0.1 * slope
            for total, value in zip(sums, found, strict=True):
                total.add_(value)
        return (None, None, grad, *sums)


class Field(nn.Module):
    """Calls a module of its own, and burns between its operations."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter, self.inner = meter, nn.Linear(8, 8)

    def forward(self, y: Tensor) -> Tensor:
        y = self.inner(y)
        with self.meter.burn("python", "field", 1):
            return y.tanh()


def test_everything_inside_a_functions_backward_has_a_line(meter: Meter) -> None:
    """Python between its operations too: that of the operation that follows, or of the line that applied it."""
    model = Field(meter)

    def step() -> None:
        Adjoint.apply(meter, model, X.clone().requires_grad_(), *model.parameters()).sum().backward()

    report = measure(meter, in_a_loop(model, step))
    ledger, steps = report.data.ledger, report.data.workload.steps
    burned = sum(meter.totals_ns("python").values()) / steps
    nodes = ledger.backward_ns - ledger.engine_ns
    with_line = sum(row.backward_ns for row in report.data.lines)
    assert burned > 9e6 and nodes > 9e6  # three rounds of three burns, and one that is forward
    assert nodes - with_line <= 0.02 * nodes, (nodes, with_line, ledger)
