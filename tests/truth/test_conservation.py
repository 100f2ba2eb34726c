"""The numbers add up: inside a report, in integer nanoseconds, and against a clock outside of it."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.tables import LayerRow, Ledger, Options, Progress, RunData

from .burning import Burning, Meter, Source
from .proof import in_a_loop, measure

_FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = [*sorted(map(str, _FOLDER.glob("*.py"))), f"{_FOLDER}/attention.py:non_copying"]

COLUMN_OF_PHASE = {
    "forward": "forward_self_ns",
    "backward": "backward_self_ns",
    "recompute": "recompute_ns",
    "gradient_sum": "gradient_sum_ns",
    "accumulate": "accumulate_ns",
    "hook": "hook_ns",
}


def check_sums(data: RunData) -> None:
    """Every sum that the contract promises, computed here from the rows alone."""
    integers(data)
    ledger, step = data.ledger, data.step
    assert sum(getattr(ledger, part) for part in Ledger.PARTS) == ledger.backward_ns == step.backward_ns
    assert step.forward_ns + step.backward_ns + step.optimizer_ns + step.other_ns == step.wall_ns
    parts = {
        "backward_self_ns": "layers_ns",
        **{f"{name}_ns": f"{name}_ns" for name in ("recompute", "accumulate", "hook")},
    }
    for column, part in {**parts, "gradient_sum_ns": "gradient_sum_ns"}.items():
        assert sum(getattr(row, column) for row in data.layers) == getattr(ledger, part), column
    check_totals(data.layers, ledger)
    check_ops(data)


def check_ops(data: RunData) -> None:
    """The ops of a layer and phase are the layer's column; the ops of no layer are the ledger's other rows."""
    sums: Counter[tuple[str | None, str]] = Counter()
    for op in data.ops:
        sums[op.layer, op.phase] += op.self_ns
    for row in data.layers:
        for phase, column in COLUMN_OF_PHASE.items():
            assert sums.pop((row.path, phase), 0) == getattr(row, column), (row.path, phase)
    backward = {key: total for key, total in sums.items() if key[1] not in ("forward", "optimizer", "other")}
    ledger = data.ledger
    rest = ledger.outside_modules_ns + ledger.communication_ns + ledger.engine_ns + ledger.unattributed_ns
    assert sum(backward.values()) in {rest, rest - ledger.engine_ns}, backward
    assert backward.get((None, "backward"), 0) == ledger.outside_modules_ns


def check_totals(layers: Any, ledger: Ledger) -> None:
    """A total is the row's five columns and its children's totals; every row but a root has its parent in the table."""
    by_path: dict[str, LayerRow] = {row.path: row for row in layers}
    children: Counter[str] = Counter()
    forward: Counter[str] = Counter()
    assert len(by_path) == len(layers), "a path appears twice"
    for row in layers:
        if row.parent is not None:
            assert row.parent in by_path, row
            children[row.parent] += row.backward_total_ns
            forward[row.parent] += row.forward_total_ns
    for row in layers:
        own = sum(getattr(row, column) for phase, column in COLUMN_OF_PHASE.items() if phase != "forward")
        assert row.backward_total_ns == own + children[row.path], row.path
        assert row.forward_total_ns >= row.forward_self_ns
        assert row.backward_share == pytest.approx(row.backward_total_ns / ledger.backward_ns, abs=1e-9)


def integers(data: RunData) -> None:
    """Times are integers, and none is negative."""
    for item in (data.step, data.ledger, *data.layers, *data.lines, *data.ops):
        for field in dataclasses.fields(item):
            value = getattr(item, field.name)
            if field.name.endswith("_ns") and isinstance(value, int | float):
                assert type(value) is int and value >= 0, (item, field.name)


def profile_target(text: str) -> Any:
    """As ``gradscope profile TARGET --steps 2 --warmup 1``."""
    from gradscope import pipeline, workload

    target = workload.load_target(text, [])
    options = Options(steps=2, warmup=1, device="cpu")
    if isinstance(target, workload.Script):
        outcome = pipeline.profile_script(target, options, Progress())
    else:
        outcome = pipeline.profile_workload(target, options, Progress())
    if outcome.error is not None:
        raise outcome.error
    return outcome.report


@pytest.mark.parametrize("target", EXAMPLES, ids=lambda target: Path(target).name)
def test_every_example_adds_up(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    data = profile_target(target).data
    check_sums(data)
    assert data.ledger.unattributed_ns < 0.005 * data.ledger.backward_ns
    assert data.ledger.layers_ns > 0.5 * data.ledger.backward_ns
    assert not data.partial and data.workload.steps == 2


class Mixed(nn.Module):
    """Everything that has a column: layers, recompute, gradient sums, accumulation, the functional rest."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Source(1, 2)
        self.block = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), Burning(1, 3))
        self.head = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.source(x)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        out: torch.Tensor = self.head(x + self.block(x))
        return out


def test_a_model_with_every_column_adds_up(meter: Meter) -> None:
    model = Mixed()
    meter.adopt(model)
    batch = torch.ones(512, 256)
    data = in_a_loop(model, lambda: model(batch).square().mean().backward())().data
    check_sums(data)
    ledger = data.ledger
    positive = ("layers_ns", "recompute_ns", "gradient_sum_ns", "accumulate_ns", "outside_modules_ns", "engine_ns")
    assert all(getattr(ledger, part) > 0 for part in positive), ledger
    assert ledger.communication_ns == 0 and ledger.unattributed_ns < 0.005 * ledger.backward_ns


@pytest.mark.parametrize("calls", [1, 3], ids=["one backward a step", "three backward calls a step"])
def test_backward_agrees_with_a_clock_outside(meter: Meter, calls: int) -> None:
    model = Mixed()
    meter.adopt(model)
    batch = torch.ones(512, 256)

    def step() -> None:
        for _ in range(calls):
            loss = model(batch).square().mean()
            with meter.burn("outer", "backward"):
                loss.backward()

    report = measure(meter, in_a_loop(model, step))
    truth = meter.totals_ns("outer")["backward"] / report.data.workload.steps
    # The clock sees what gradscope itself does inside of backward too, of which a report says how much it is in all.
    assert 0.97 * truth - report.data.own_ns <= report.data.step.backward_ns <= truth
    # The engine's own part is what is left between nodes; it must not be where time is hidden.
    assert report.data.ledger.engine_ns < 0.1 * report.data.ledger.backward_ns


def test_the_step_agrees_with_a_clock_outside(meter: Meter) -> None:
    model = Mixed()
    meter.adopt(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.ones(512, 256)

    def step() -> None:
        with meter.burn("outer", "step", 40):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    report = measure(meter, in_a_loop(model, step))
    truth = meter.totals_ns("outer")["step"] / report.data.workload.steps
    assert report.data.step.wall_ns == pytest.approx(truth, rel=0.03, abs=0.3e6)
    assert report.data.step.other_ns > 0


class Tokens(nn.Module):
    """Embeddings with sparse gradients, then what ``inner`` is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, sparse=True)
        self.bag = nn.EmbeddingBag(64, 32)
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> Any:
        return self.inner(self.embed(ids) + self.bag(ids)[:, None])


class First(nn.Module):
    """The first output of a module that gives several."""

    def __init__(self, inner: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.inner, self.copies = inner, copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(*[x] * self.copies)[0]
        return out


IDS = torch.arange(8 * 16).reshape(8, 16) % 64
IMAGE = torch.ones(4, 3, 16, 16)
ZOO: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "lstm": (lambda: First(nn.LSTM(32, 32, num_layers=2, bidirectional=True)), torch.ones(16, 8, 32)),
    "attention": (lambda: First(nn.MultiheadAttention(32, 4, batch_first=True), 3), torch.ones(8, 16, 32)),
    "transformer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.ones(8, 16, 32)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), torch.ones(8, 32)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), torch.ones(8, 32)),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d()), torch.ones(8, 16)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        IMAGE,
    ),
    "sparse gradients": (lambda: Tokens(nn.Linear(32, 32)), IDS),
    "scripted": (lambda: nn.Sequential(nn.Linear(32, 32), _scripted()), torch.ones(8, 32)),
}


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.ReLU()))
        return module


@pytest.mark.parametrize("name", ZOO)
def test_torchs_own_modules_add_up(name: str) -> None:
    """Modules that do unusual things: fused kernels, parametrizations, late parameters, sparse gradients."""
    make, batch = ZOO[name]
    data = gradscope.profile(make(), batch, steps=2, warmup=1, device="cpu").data
    check_sums(data)
    # These steps take well under a millisecond, where a single node of 5 us is more than 0.5 %.
    assert data.ledger.unattributed_ns < max(0.005 * data.ledger.backward_ns, 5000), data.ledger
    assert data.ledger.layers_ns > 0
