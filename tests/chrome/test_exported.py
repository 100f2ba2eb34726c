"""Traces that this torch exports on a CPU: names of layers by the model, and time against the file's own rows."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from gradscope.chrome.run import read_trace
from gradscope.errors import TraceFileError
from gradscope.report import Report
from gradscope.tables import LayerRow
from gradscope.workload import Workload

STEPS = 2


class Rest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.005)
        return grad


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Rest.apply(self.fc(x))  # type: ignore[no-any-return, no-untyped-call]


class Net(nn.Module):
    """Called out of the order of its definition, one layer twice, one never, and one run again by a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.slow = Slow()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.slow(x)
        x = checkpoint(self.last, x, use_reentrant=False)
        return self.last(x)


def exported(path: Path, *, stack: bool = True) -> Path:
    torch.manual_seed(0)
    net, loss_of = Net(), nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    x, wanted = torch.randn(4, 8), torch.randn(4, 8)

    def done(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))

    plan = schedule(wait=1, warmup=1, active=STEPS)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, with_stack=stack, record_shapes=True, on_trace_ready=done
    ) as profiler:
        for _ in range(2 + STEPS):
            optimizer.zero_grad()
            loss_of(net(x), wanted).backward()
            optimizer.step()
            profiler.step()
    return path


@pytest.fixture(scope="module", name="with_stack")
def with_stack_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("exported") / "trace.json.gz")


def events(path: Path, fits: Callable[[str], bool]) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    return [event for event in found if event.get("ph") == "X" and fits(event["name"])]


def sum_ns(found: list[dict[str, Any]]) -> float:
    return sum(float(event["dur"]) for event in found) * 1000 / STEPS


def layers(report: Report) -> dict[str, LayerRow]:
    return {row.path: row for row in report.data.layers}


def test_layers_have_the_model_s_names(with_stack: Path) -> None:
    report = read_trace(with_stack, model=Workload(Net(), torch.randn(4, 8)))
    found = layers(report)
    assert set(found) == {name for name, _ in Net().named_modules()}
    assert report.data.workload.parameters == sum(each.numel() for each in Net().parameters())
    assert {path: row.calls for path, row in found.items() if row.calls} == {
        **dict.fromkeys(("", "blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1"), 1),
        **dict.fromkeys(("slow", "slow.fc"), 1),
        "last": 2,
    }
    assert found["last"].recompute_ns > 0 and found["last"].parameters == 72
    assert {row.parent for path, row in found.items() if path.startswith("blocks.1.")} == {"blocks.1"}
    note = "the model has 1 more module of class Linear that this batch does not call"  # self.unused
    assert any(each.startswith(note) for each in report.data.notes)


def test_without_a_model_the_callers_name_them(with_stack: Path) -> None:
    found = layers(read_trace(with_stack))
    assert {"Net_0", "Net_0.Sequential_1.Linear_1", "Net_0.Slow_0.Linear_2", "MSELoss_0"} <= set(found)
    assert found["Net_0.Linear_3"].calls == 2  # self.last


def test_the_slow_node_s_time_is_that_of_its_row(with_stack: Path) -> None:
    """Against the file: nothing else of that layer runs backward by itself but what is below it."""
    rows = events(with_stack, lambda name: name == "autograd::engine::evaluate_function: RestBackward")
    assert len(rows) == STEPS
    own = layers(read_trace(with_stack, model=Workload(Net(), torch.randn(4, 8))))["slow"].backward_self_ns
    assert own == pytest.approx(sum_ns(rows), abs=2)  # rounding, of the file's decimals and of the mean
    assert own > 5_000_000


def test_the_whole_of_backward_is_what_the_engine_ran(with_stack: Path) -> None:
    rows = events(with_stack, lambda name: name.startswith("<built-in method run_backward"))
    data = read_trace(with_stack).data
    assert data.ledger.backward_ns == pytest.approx(sum_ns(rows), abs=200)  # each cell is rounded once
    steps = events(with_stack, lambda name: name.startswith("ProfilerStep#"))
    assert data.step.wall_ns == pytest.approx(sum_ns(steps), rel=0.02)  # what lies between two steps' rows


def test_operations_have_their_shapes(with_stack: Path) -> None:
    ops = {(row.layer, row.phase, row.name): row.shape for row in read_trace(with_stack).data.ops}
    assert ops["Net_0.Slow_0.Linear_2", "forward", "aten::linear"] == "[4, 8] [8, 8] [8]"


def test_without_rows_of_python_backward_is_found_by_its_nodes(tmp_path: Path) -> None:
    path = exported(tmp_path / "trace.json.gz", stack=False)
    data = read_trace(path).data
    assert data.workload.steps == STEPS and not data.layers
    nodes = events(path, lambda name: name.startswith("autograd::engine::evaluate_function: "))
    # Nodes inside of nodes there are none: the pass is they, and what lies between them.
    assert sum_ns(nodes) <= data.ledger.backward_ns < sum_ns(nodes) + 2_000_000


def traced(path: Path, train: Callable[[], None]) -> Report:
    """Two steps of ``train``, as read from what the profiler exports of them."""
    train()
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True) as profiler:
        for number in range(STEPS):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                train()
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


def _penalty(net: nn.Module, x: Tensor) -> None:
    """A gradient penalty, as of a WGAN."""
    (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    grad.square().mean().backward()


def _vectorized(net: nn.Module, x: Tensor) -> None:
    """Per-sample gradients: torch.func builds a graph in each pass, whether or not anybody uses it."""
    weights = dict(net.named_parameters())
    torch.func.grad(lambda held: torch.func.functional_call(net, held, (x,)).sum())(weights)
    net(x).sum().backward()


@pytest.mark.parametrize("train", [_penalty, _vectorized])
def test_double_backward_is_no_recompute(train: Callable[[nn.Module, Tensor], None], tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    data = traced(tmp_path / "trace.json.gz", lambda: train(net, torch.randn(32, 64, requires_grad=True))).data
    assert data.ledger.recompute_ns == 0 < data.ledger.layers_ns
    assert "checkpoint-share" not in {finding.rule for finding in data.findings}


class Checkpointed(nn.Module):
    """What is run again calls no module, so that only the numbers of its operations tell it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh() @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return out.square().sum()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_that_a_checkpoint_runs_again_is_recompute(reentrant: bool, tmp_path: Path) -> None:
    net = Checkpointed(reentrant=reentrant)
    data = traced(tmp_path / "trace.json.gz", lambda: net(torch.randn(32, 64, requires_grad=True)).backward()).data
    assert 0 < data.ledger.recompute_ns < data.ledger.backward_ns


class Ordered(nn.Module):
    """Calls two modules of one class in an order that depends on the size of the batch."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        called = (self.first, self.second) if len(x) > 2 else (self.second, self.first)
        return sum(module(x).sum() for module in called)  # type: ignore[return-value]


LINEAR = nn.Linear(8, 4), nn.Linear(8, 2)
CONVOLUTION = nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(3, 4, 1)
TRANSPOSED = nn.ConvTranspose2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 1)
EMBEDDING = nn.Embedding(10, 4), nn.Embedding(20, 4)


@pytest.mark.parametrize(
    ("modules", "x", "used", "paired"),
    [
        (LINEAR, torch.ones(4, 8), "[4, 8]", "[2, 8]"),
        (CONVOLUTION, torch.ones(4, 3, 9), "[4, 3, 3]", "[4, 3, 1]"),
        (TRANSPOSED, torch.ones(4, 3, 9, 9), "[3, 4, 3, 3]", "[3, 4, 1, 1]"),
        (EMBEDDING, torch.ones(4, 5, dtype=torch.long), "[10, 4]", "[20, 4]"),
    ],
    ids=["linear", "convolution", "transposed convolution", "embedding"],
)
def test_names_that_the_shapes_contradict_are_refused(
    modules: tuple[nn.Module, nn.Module], x: Tensor, used: str, paired: str, tmp_path: Path
) -> None:
    """A batch for which the model calls them in another order would exchange their names."""
    net, path = Ordered(*modules), tmp_path / "trace.json.gz"
    traced(path, lambda: net(x).backward())
    assert set(layers(read_trace(path, model=Workload(net, x)))) == {"", "first", "second"}
    name = type(modules[0]).__name__
    with pytest.raises(TraceFileError) as raised:
        read_trace(path, model=Workload(net, x[:2]))
    assert f"{name}_0 has a weight of {used}, and second, which the model calls in its place, one of {paired}" in str(
        raised.value
    )
    assert str(raised.value).count("\n") == 1


class Slim(nn.Linear):
    """Uses a part of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[:2])


def test_a_layer_that_uses_its_weight_in_its_own_way_is_paired(tmp_path: Path) -> None:
    net, x, path = nn.Sequential(Slim(8, 4, bias=False)), torch.ones(4, 8), tmp_path / "trace.json.gz"
    traced(path, lambda: net(x).sum().backward())
    assert set(layers(read_trace(path, model=Workload(net, x)))) == {"", "0"}


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.only(x)
        return out


def test_another_model_is_refused(with_stack: Path) -> None:
    with pytest.raises(TraceFileError, match=r"calls 0 modules of class Other, and Other calls 1"):
        read_trace(with_stack, model=Workload(Other(), torch.randn(4, 8)))
