"""Truth: whole training steps: several optimizers, closures, AMP, scripts, and models that fail."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.tables import Options, Progress
from tests.process_group import alone

from . import burning
from .burning import Burning, Meter, Source
from .proof import STEPS, WARMUP, Expected, in_a_loop, in_model_mode, prove, real_work_ns, rows, summed

X = torch.ones(4, 8)


def generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Burning(1, 3))


def critic() -> nn.Sequential:
    return nn.Sequential(Burning(2, 2), nn.Linear(8, 1))


def test_a_gan_in_the_users_loop(meter: Meter) -> None:
    """Two roots, two optimizers, three backward calls a step; both models under one holder."""
    model = nn.ModuleDict({"generator": generator(), "critic": critic()})
    meter.adopt(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in model.values()]

    def step() -> None:
        fake = model["generator"](X)
        optimizers[1].zero_grad()
        (model["critic"](fake.detach()).mean() - model["critic"](X).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-model["critic"](fake)).mean().backward()
        optimizers[0].step()

    report = prove(meter, in_a_loop(model, step))
    layers = rows(report)
    assert layers["critic.0"].calls == 3 and layers["generator.1"].calls == 1
    assert report.data.step.optimizer_ns > 0


def test_an_optimizer_in_model_mode(meter: Meter) -> None:
    model = nn.Sequential(Source(1, 2), nn.Linear(8, 8), Burning(1, 3))
    meter.adopt(model)
    optimizer = torch.optim.Adam(model.parameters())
    report = prove(meter, in_model_mode(model, X, summed, optimizer))
    assert report.data.step.optimizer_ns > 0


def test_lbfgs_closures(meter: Meter) -> None:
    """The forward and backward calls lie inside optimizer.step: they are still forward and backward."""
    model = nn.Sequential(nn.Linear(8, 8), Burning(1, 2), nn.Tanh(), Burning(1, 1))
    meter.adopt(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2, tolerance_grad=0, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    report = prove(meter, in_a_loop(model, lambda: optimizer.step(closure)))
    step, calls = report.data.step, meter.counts()["backward", "1"] / STEPS
    assert calls >= 2 and rows(report)["1"].calls == calls
    assert step.backward_ns >= calls * 3e6 and step.optimizer_ns < step.wall_ns - step.backward_ns


@pytest.mark.parametrize("scaled", [False, True], ids=["autocast", "autocast and GradScaler"])
def test_amp(meter: Meter, scaled: bool) -> None:
    model = nn.Sequential(Source(1, 2), nn.Linear(8, 8), Burning(1, 3), nn.Linear(8, 8))
    meter.adopt(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    report = prove(meter, in_a_loop(model, step))
    names = {op.name for op in report.data.ops if op.layer == "3" and op.phase == "backward"}
    assert any("ToCopy" in name for name in names), "the casts of autocast are the layer's"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_distributed_data_parallel(meter: Meter) -> None:
    """One process of DDP: its hooks and its all-reduce are no layer's self time."""
    with alone():
        inner = nn.Sequential(nn.Linear(512, 512), Burning(1, 3), nn.Linear(512, 512), Burning(2, 2))
        model = nn.parallel.DistributedDataParallel(inner)
        meter.adopt(model)
        batch = torch.ones(4, 512)

        def expected(meter: Meter, steps: int) -> Expected:
            return Expected({}, skip=frozenset({"accumulate_ns"}), unknown=frozenset({"", "module.0", "module.2"}))

        report = prove(meter, in_a_loop(model, lambda: model(batch).sum().backward()), expected)
        assert report.data.ledger.communication_ns > 0


SCRIPT = '''
"""A training script that knows nothing of the profiler."""
import argparse
import sys

import torch
from torch import nn

from {burning} import Burning, Source
from {test} import METERS

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--fail-at", type=int, default=-1)


class Generator(nn.Sequential):
    pass


class Critic(nn.Sequential):
    pass


def main():
    args = parser.parse_args()
    meter = METERS["script"]
    generator = Generator(nn.Linear(args.width, args.width), Burning(1, 3))
    critic = Critic(Burning(2, 2), nn.Linear(args.width, 1))
    METERS["models"](generator, critic)
    first = torch.optim.SGD(generator.parameters(), lr=1e-3)
    second = torch.optim.SGD(critic.parameters(), lr=1e-3)
    x = torch.ones(4, args.width)
    for step in range(50):
        if step == args.fail_at:
            raise ZeroDivisionError("the script's own mistake")
        fake = generator(x)
        second.zero_grad()
        (critic(fake.detach()).mean() - critic(x).mean()).backward()
        second.step()
        first.zero_grad()
        (-critic(fake)).mean().backward()
        first.step()


if __name__ == "__main__":
    main()
'''

METERS: dict[str, Any] = {}


@pytest.fixture
def script(tmp_path: Path, meter: Meter) -> Iterator[Path]:
    def adopt(*models: nn.Module) -> None:
        for model in models:
            for name, module in model.named_modules():
                if isinstance(module, Burning):
                    module.owner, module.meter = f"{type(model).__name__}/{name}", meter

    METERS.update(script=meter, models=adopt)
    path = tmp_path / "gan.py"
    path.write_text(SCRIPT.format(burning=burning.__name__, test=__name__))
    yield path
    METERS.clear()


def run_script(path: Path, *args: str) -> Any:
    from gradscope import pipeline, workload

    target = workload.load_target(str(path), list(args))
    return pipeline.profile_script(target, Options(steps=STEPS, warmup=WARMUP, lines=False), Progress())


def burning_rows(report: Any) -> dict[str, Any]:
    """The rows of the two burning layers, by the name the meter knows them by, whatever their roots are called."""
    found = {}
    for row in report.data.layers:
        if row.class_name == "Burning":
            which = "Generator/1" if row.path.endswith("1") else "Critic/0"
            assert which not in found, f"two rows for {which}"
            found[which] = row
    return found


def test_a_gan_script(meter: Meter, script: Path) -> None:
    outcome = run_script(script, "--width", "8")
    assert outcome.error is None
    report = outcome.report
    found, steps = burning_rows(report), report.data.workload.steps
    assert meter.select(steps) == []
    assert set(found) == {"Generator/1", "Critic/0"} and steps == STEPS
    noise = meter.stolen_ns() / steps
    for kind, column in (("forward", "forward_self_ns"), ("backward", "backward_self_ns")):
        for owner, total in meter.totals_ns(kind).items():
            got, truth = getattr(found[owner], column), total / steps
            work = real_work_ns(report.data, found[owner], column) if got > truth else 0
            assert abs(got - truth) <= 0.03 * truth + 300_000 + noise + work, (owner, column, got, truth)
    assert found["Critic/0"].calls == 3
    for row in report.data.layers:
        if row.class_name != "Burning" and row.backward_self_ns >= 300_000 + noise:
            assert row.backward_self_ns < 300_000 + noise + real_work_ns(report.data, row, "backward_self_ns"), row
    assert report.data.ledger.unattributed_ns < 0.005 * report.data.ledger.backward_ns
    assert "Generator" in report.data.workload.model and "Critic" in report.data.workload.model


def test_a_script_that_fails_after_some_measured_steps(meter: Meter, script: Path) -> None:
    """It keeps its own exception and traceback, and what was measured is reported as partial."""
    fail_at = WARMUP + 2 * STEPS - 1  # inside the profiled steps, whether or not unprofiled ones come first
    outcome = run_script(script, "--fail-at", str(min(fail_at, WARMUP + 2)))
    assert isinstance(outcome.error, ZeroDivisionError)
    text = "".join(traceback.format_exception(outcome.error))
    assert "gan.py" in text and "the script's own mistake" in text and "in main" in text
    if outcome.report is not None:
        assert outcome.report.data.partial


class Fails(nn.Module):
    """Raises half way through forward, from the ``at``-th call on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.seen = at, 0
        self.first, self.second = Source(1, 2), nn.Sequential(Burning(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.first(x)
        if self.seen >= self.at:
            self.inner_mistake()
        out: Tensor = self.second(x)
        return out

    def inner_mistake(self) -> None:
        raise KeyError("a mistake of the model")


@pytest.mark.parametrize("at", [1, WARMUP + 1, WARMUP + 5])
def test_a_model_that_raises_half_way(meter: Meter, at: int) -> None:
    model = Fails(at)
    meter.adopt(model)
    with pytest.raises(KeyError, match="a mistake of the model") as caught:
        gradscope.profile(model, X, summed, steps=STEPS, warmup=WARMUP, device="cpu", lines=False)
    assert [frame.name for frame in caught.traceback][-1] == "inner_mistake"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not burning.profiler_runs()


def test_a_layer_that_raises_and_is_caught(meter: Meter) -> None:
    """The model survives a failing part: the call that never returned must not own what comes after it."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Burning(1, 9)

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            raise ValueError("not this way")

    class Survivor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.part, self.other = Source(1, 2), Part(), Burning(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.source(x)
            try:
                return self.part(x)  # type: ignore[no-any-return]
            except ValueError:
                return self.other(x)  # type: ignore[no-any-return]

    model = Survivor()
    meter.adopt(model)
    prove(meter, in_model_mode(model, X, summed))
