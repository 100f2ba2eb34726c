"""A fit from end to end: what fits, what is refused, and that the user's objects do not notice."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradscope
from gradscope.errors import NothingMeasuredError, UsageError, WorkloadError
from gradscope.fitting import measure
from gradscope.fitting.align import BatchRun
from gradscope.fitting.fake import BatchShapes
from gradscope.fitting.judge import Predictor
from gradscope.fitting.measure import MeasuredRuns
from gradscope.fitting.options import settings_of
from gradscope.workload import Workload
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.fitting.test_forecast import Block, run


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))


PARAMETERS = (32 * 64 + 64 + 64 * 8 + 8) * 4


def fit(*given: Any, **options: Any) -> gradscope.FitReport:
    return gradscope.fit(*given, **{"batch_sizes": (8, 16), "device": "cpu", **options})


# --------------------------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------------------------


def test_what_fits_and_the_largest_that_does() -> None:
    report = fit(model(), torch.randn(6, 32), batch_sizes=(8, 100, 10_000), device_memory="1MB", reserve=0)
    assert report.table["fits"].tolist() == ["yes", "yes", "no"]
    largest = report.largest
    assert largest is not None
    again = fit(model(), torch.randn(6, 32), batch_sizes=(largest, largest + 1), device_memory="1MB", reserve=0)
    assert again.table["fits"].tolist() == ["yes", "no"]
    assert again.data.largest_peak_bytes == again.table["peak_bytes"][0]


def test_the_reserve_is_kept_free() -> None:
    plain = fit(model(), torch.randn(6, 32), device_memory="1MB", reserve=0).largest
    tenth = fit(model(), torch.randn(6, 32), device_memory="1MB").largest
    fixed = fit(model(), torch.randn(6, 32), device_memory="1MB", reserve="100kB").largest
    assert plain is not None
    assert tenth is not None
    assert plain > tenth == fixed


def test_not_even_one() -> None:
    report = fit(model(), torch.randn(6, 32), device_memory="10kB")
    assert report.largest is None
    assert "Not even batch size 1 fits" in str(report)


def test_an_optimizer_by_name_adds_its_state() -> None:
    without = fit(model(), torch.randn(6, 32))
    assert (without.data.adam_bytes, without.data.gradient_bytes) == (2 * PARAMETERS, PARAMETERS)
    adam = fit(model(), torch.randn(6, 32), optimizer="adam")
    assert adam.data.optimizer == "Adam"
    added = adam.table["model_bytes"][0] - without.table["model_bytes"][0]
    steps = 4 * 4  # a count of steps for each parameter
    assert added >= 2 * PARAMETERS + steps


def test_growth_by_layer() -> None:
    """The first Linear's output is kept by GELU, GELU's by the second Linear; the batch is an input."""
    report = fit(model(), torch.randn(6, 32), loss=lambda output, batch: output.sum())
    grown = report.layers.set_index("path")["saved_bytes_per_sample"]
    assert grown.to_dict() == {"": 0, "0": 0, "1": 64 * 4, "2": 64 * 4}
    assert report.layers["saved_total_bytes_per_sample"][0] == 2 * 64 * 4
    assert report.data.outside_bytes_per_sample == 0


def test_a_function_of_the_batch_size() -> None:
    asked = []

    def workload(batch_size: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
        """A batch with the samples last, which cannot be scaled."""
        asked.append(batch_size)
        return Transposed(), (torch.randn(32, batch_size), torch.randn(5, batch_size))

    report = fit(workload, device_memory="10MB")
    assert asked == [2, 3, 4, 8, 4]
    assert report.table["check"].tolist() == ["agrees", "agrees"]
    assert report.data.deviation == 0
    assert report.largest is not None


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(37, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x, y]).t()).exp()


def test_a_lazy_model() -> None:
    report = fit(nn.Sequential(nn.LazyLinear(16), nn.ReLU()), torch.randn(6, 32), optimizer="adamw")
    assert report.data.deviation == 0
    assert report.data.parameters == 33 * 16


def test_a_data_loader() -> None:
    loader = DataLoader(TensorDataset(torch.randn(24, 32)), batch_size=6)
    report = fit(model(), loader)
    # Whatever else this process holds, of other tests too, has a note of its own.
    notes = [note for note in report.data.notes if "were alive in this process" not in note]
    assert notes == ["the batch is a DataLoader: its first item (6 samples) was scaled"]
    assert report.data.deviation == 0


# --------------------------------------------------------------------------------------------------------------------
# Memory that does not follow the batch size
# --------------------------------------------------------------------------------------------------------------------


class Rough(nn.Module):
    """Keeps more at 8 than three smaller sizes tell: as much as for 16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x, x]) if len(x) == 8 else x).exp()


def test_a_range_is_given() -> None:
    report = fit(Rough(), torch.randn(6, 32), batch_sizes=(16, 64), device_memory="500kB", reserve=0)
    assert report.data.deviation is not None
    assert report.data.deviation < -0.05
    assert (report.table["low_bytes"] < report.table["high_bytes"]).all()
    assert (report.table["low_bytes"] <= report.table["peak_bytes"]).all()
    assert "memory does not grow smoothly with the batch size" in str(report)


@pytest.mark.parametrize(("budget", "fits"), [(10_000, "yes"), (1250, "unsure"), (900, "no")])
def test_a_budget_inside_the_range(budget: int, fits: str) -> None:
    """100 a sample by 2, 3 and 4, but 1000 at 8: by 3, 4 and 8 it is 140 a sample."""

    def measured_at(size: int) -> BatchRun:
        total = 1000 if size == 8 else 100 * size
        return run(size, [Block("aten::mul", total, 0, 1)], 2)

    runs = {size: measured_at(size) for size in (2, 3, 4, 8)}
    shapes = BatchShapes("")
    for size in runs:
        shapes.note(size, torch.zeros(size, 32))
    cpu = torch.device("cpu")
    measured = MeasuredRuns("", cpu, runs, (), Workload(nn.Linear(32, 1), torch.zeros(4, 32)), shapes, ())
    predictor = Predictor(measured, settings_of("10"))
    row = predictor.row(10, budget)
    assert predictor.deviation == -0.2
    assert (row.peak_bytes, row.low_bytes, row.fits) == (1000, 1000, fits)
    assert predictor.largest(1000) == 8  # the upper end of the range counts: 1140 at 9


# --------------------------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Works at its own batch size only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(6, 8)


def test_a_model_that_fails_at_another_size() -> None:
    with pytest.raises(WorkloadError) as raised:
        fit(Fixed(), torch.randn(6, 32))
    assert str(raised.value).splitlines()[0] == (
        "the batch cannot be resized: with its first rows as a batch of 2 instead of 6, the model raised "
        "RuntimeError: shape '[6, 8]' is invalid for input of size 16."
    )
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_defect_of_gradscope_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        torch.ones(2).view(3)

    monkeypatch.setattr(measure, "name_called", broken)
    with pytest.raises(RuntimeError, match=r"^shape '\[3\]' is invalid"):
        fit(model(), torch.randn(6, 32))


def test_a_batch_of_time_first() -> None:
    with pytest.raises(WorkloadError) as raised:
        fit(nn.Sequential(nn.LSTM(4, 4)), torch.randn(7, 5, 4))
    assert str(raised.value).splitlines()[0] == (
        "the batch cannot be resized: 0 (LSTM) treats its first dimension as time (batch_first=False)."
    )


def test_the_error_of_a_users_function_is_theirs() -> None:
    def workload(batch_size: int) -> Any:
        return Fixed(), torch.randn(batch_size, 32)

    with pytest.raises(RuntimeError, match=r"^shape '\[6, 8\]' is invalid for input of size 16$"):
        fit(workload)


def test_a_function_that_ignores_the_batch_size() -> None:
    with pytest.raises(WorkloadError, match=r"^workload\(\): the batches for batch_size=2 and batch_size=3 have the"):
        fit(lambda batch_size: (model(), torch.randn(6, 32)))


def test_an_optimizer_beside_an_own_one() -> None:
    net = model()
    workload = Workload(net, torch.randn(6, 32), optimizer=torch.optim.SGD(net.parameters()))
    with pytest.raises(UsageError, match=r"^--optimizer adam: the workload has its own optimizer, SGD"):
        fit(workload, optimizer="adam")


def test_without_a_backward_pass() -> None:
    net = model().requires_grad_(False)
    with pytest.raises(WorkloadError, match="there is no backward pass to measure"):
        fit(net, torch.randn(6, 32))


def test_no_room_for_a_measured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 2 the model needs 20 kB or so; a step at 3 is expected to need half as much again."""
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1000)
    with pytest.raises(WorkloadError) as raised:
        fit(model(), torch.randn(6, 32))
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("a step at batch size 3 would take about ")
    assert lines[0].endswith(", and 1.00 kB are free.")
    assert lines[1] == "Measure smaller batches: --measure 1,2,3"


def test_no_room_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "free_bytes", lambda device: 10**6)
    report = fit(model(), torch.randn(6, 32), measure=(2, 3, 4, 10**6))
    assert report.data.deviation is None
    assert len(report.data.measured) == 3
    assert report.data.notes[0].startswith("a step at batch size 1000000 would take about ")
    assert report.data.notes[0].endswith("are free: the prediction was not checked there")


@pytest.mark.parametrize(
    ("peaks", "size", "free", "lacks"),
    [
        ({}, 8, 10, False),
        ({2: 100}, 4, 112, False),  # 200 in all, of which 100 are in use: 100 of 112
        ({2: 100}, 4, 110, True),
        ({2: 100, 3: 110}, 8, 100, False),  # 10 a sample
        ({2: 100, 3: 110}, 100, 1000, True),
        ({2: 100}, 4, None, False),
        ({2: 100}, 4, 1000, False),
        ({2: 1000, 3: 1900}, 4, 2000, False),  # 2,800 in all, of which 1,000 are in use: nine tenths of 2,000
        ({2: 1000, 3: 1900}, 4, 1999, True),
        ({2: 300, 4: 100}, 100, 1, False),  # what shrinks is not taken to shrink on, nor to grow
        ({2: 100, 4: 300}, 6, 440, True),  # 100 a sample, whatever the largest size
        ({2: 100, 4: 300}, 6, 445, False),
    ],
)
def test_room(peaks: dict[int, int], size: int, free: int | None, lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "free_bytes", lambda device: free)
    assert (measure.lacks_room(size, peaks, torch.device("cpu")) is not None) is lacks


def test_free_memory_of_this_machine() -> None:
    free = measure.free_bytes(torch.device("cpu"))
    assert free is None or free > 10**6


class Exhausted(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
)
def test_out_of_memory(error: Exception) -> None:
    with pytest.raises(WorkloadError) as raised:
        fit(Exhausted(error), torch.randn(6, 32))
    assert str(raised.value) == ("a step at batch size 2 runs out of memory.\nMeasure smaller batches: --measure 1,2,3")


# --------------------------------------------------------------------------------------------------------------------
# Nothing is left behind
# --------------------------------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.calls: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(x)
        if len(x) in self.refused:
            raise ValueError("refused")
        return self.drop(self.norm(self.layer(x)))

    refused: tuple[int, ...] = ()


@pytest.mark.parametrize("refused", [(), (3,), (40,)])
def test_everything_is_as_before(refused: tuple[int, ...]) -> None:
    """Also when a measured size raises, and when one that is only checked on fake tensors does."""
    net = Stateful()
    net.refused = refused
    optimizer = torch.optim.Adam(net.parameters())
    batch = torch.randn(6, 32)
    net(batch).sum().backward()
    optimizer.step()
    net.calls.clear()
    before, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    gradients = {name: (id(p.grad), p.grad.clone()) for name, p in net.named_parameters() if p.grad is not None}
    random, batch_before = torch.get_rng_state(), batch.clone()
    workload = Workload(net, batch, optimizer=optimizer)
    try:
        report = fit(workload, batch_sizes=(16, 40))
    except WorkloadError:
        assert refused == (3,)
    else:
        assert report.table["check"].tolist() == ["agrees", "unchecked" if refused else "agrees"]
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[key][name], value) for key in state for name, value in state[key].items())
    assert {name: id(p.grad) for name, p in net.named_parameters()} == {name: i for name, (i, _) in gradients.items()}
    assert all(torch.equal(p.grad, gradients[name][1]) for name, p in net.named_parameters() if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(batch, batch_before)
    assert net.calls == []
    assert workload.optimizer is optimizer
    assert workload.batch is batch
    assert set(vars(net)) == set(vars(Stateful())) | {"refused"}


def test_an_optimizer_by_name_does_not_stay() -> None:
    workload = Workload(model(), torch.randn(6, 32))
    fit(workload, optimizer="adamw")
    assert workload.optimizer is None


# --------------------------------------------------------------------------------------------------------------------
# From the command line
# --------------------------------------------------------------------------------------------------------------------

FILE = """
import torch
from torch import nn

def workload(batch_size=6):
    return nn.Linear(32, 8), torch.randn(batch_size, 32)

def transposed():
    return nn.LSTM(4, 4), torch.randn(7, 5, 4)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(FILE)
    yield
    sys.modules.pop("net", None)


def test_the_command(folder: None, run: Runner) -> None:
    command = "fit net.py --batch-sizes 64,8 --device-memory 1MB --device cpu --optimizer sgd --json fit.json"
    ran = run(*command.split())
    assert ran.code == 0, ran.err
    assert ran.err == (
        "gradscope: measuring small batches, 4 steps\ngradscope: predicting\ngradscope: wrote fit.json\n"
    )
    record = json.loads(Path("fit.json").read_text())
    assert [row["batch_size"] for row in record["rows"]] == [8, 64]
    assert record["device_memory_bytes"] == 10**6
    assert record["optimizer"] == "SGD"
    assert ran.out.splitlines()[1] == "target     net.py"
    assert f"The largest batch size that fits is {record['largest']}" in ran.out


def test_a_refusal_of_the_command(folder: None, run: Runner) -> None:
    ran = run("fit", "net.py:transposed", "--batch-sizes", "8", "--device", "cpu", "-q")
    assert ran.code == 2
    assert ran.err.splitlines() == [
        "gradscope: error: the batch cannot be resized: LSTM (LSTM) treats its first dimension "
        "as time (batch_first=False).",
        "Let net.py create it, with batch_size samples:",
        "    def transposed(batch_size=8): return Net(), torch.randn(batch_size, 3, 32, 32)",
    ]


def test_tensors_that_are_not_the_models_are_not_counted() -> None:
    plain = gradscope.fit(nn.Linear(64, 64), torch.randn(2, 64), batch_sizes=[16], device="cpu").data
    dataset = torch.zeros(10_000_000)
    beside = gradscope.fit(nn.Linear(64, 64), torch.randn(2, 64), batch_sizes=[16], device="cpu").data
    del dataset
    assert beside.rows[0].peak_bytes == plain.rows[0].peak_bytes
    assert any(
        " of tensors outside the model were alive in this process; they are not counted" in note
        for note in beside.notes
    )


def test_a_step_that_is_too_large_for_the_memory_budget() -> None:
    with pytest.raises(NothingMeasuredError) as raised:
        gradscope.fit(nn.Linear(2, 1), torch.ones(4, 2), batch_sizes="8", memory_budget=1000)
    assert str(raised.value) == (
        "a step records 15 trace events: memory is not measured, to stay within the memory budget of 1.00 kB "
        "(--memory-budget)."
    )
