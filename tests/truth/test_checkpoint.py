"""Truth: activation checkpointing of both kinds, nested, and stopped early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .burning import Burning, Meter, Source, burn
from .models import Checkpointed
from .proof import STEPS, Expected, in_model_mode, prove, prove_each_place, rows, summed

X = torch.ones(4, 8)


def around(model: nn.Module) -> Callable[[Meter, int], Expected]:
    """Checkpointing's own Python takes some 0.3 ms a call: forward time of the modules that do not burn themselves.

    Where the caller is not called again, it falls to the first layer that is: these burn long enough to bear it.
    """
    callers = frozenset(path for path, module in model.named_modules() if not isinstance(module, Burning | Part))
    return lambda meter, steps: Expected({}, working=callers)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recompute_is_a_column_of_its_own(meter: Meter, reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    meter.adopt(model)
    report = prove(meter, in_model_mode(model, X, summed), around(model))
    layers = rows(report)
    assert set(meter.totals_ns("recompute")) == {"block.0", "block.2"}
    assert layers["block.0"].calls == 1, "a recompute is not a call of forward"
    assert layers["stem"].recompute_ns == layers["tail"].recompute_ns == 0
    # What is more than burned is checkpointing's own Python, see around(): the burning layers are compared by prove().
    recompute_ns = report.data.ledger.recompute_ns
    assert recompute_ns == sum(row.recompute_ns for row in report.data.layers)
    assert recompute_ns >= sum(meter.totals_ns("recompute").values()) / STEPS
    ops = [op for op in report.data.ops if op.layer == "block.0" and op.phase == "recompute"]
    assert sum(op.self_ns for op in ops) == layers["block.0"].recompute_ns


@pytest.mark.parametrize("early", [True, False], ids=["stopped early", "to its end"])
def test_early_stop(meter: Meter, early: bool) -> None:
    """Nothing after the last saved tensor is computed again; the layer that is cut off must not confuse the rest."""
    block = nn.Sequential(Burning(2, 2), nn.Sequential(Burning(1, 2), Burning(3, 1, save=False)))
    model = Checkpointed(False, block, early)
    meter.adopt(model)
    prove(meter, in_model_mode(model, X, summed), around(model))
    assert ("block.1.1" in meter.totals_ns("recompute")) is not early


# torch's own warning: inside a reentrant checkpoint the first forward runs without gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("outer", [False, True], ids=["in non-reentrant", "in reentrant"])
@pytest.mark.parametrize("inner", [False, True], ids=["non-reentrant", "reentrant"])
def test_nested_checkpoints(meter: Meter, note_repeat: Callable[[], None], outer: bool, inner: bool) -> None:
    if inner and not outer:
        pytest.skip("torch itself refuses a reentrant checkpoint inside a non-reentrant one")

    def attempt() -> None:
        block = nn.Sequential(
            Burning(1, 2), Checkpointed(inner, nn.Sequential(Burning(2, 1), Burning(1, 1))), Burning(1, 3)
        )
        model = Checkpointed(outer, block)
        meter.adopt(model)
        prove(meter, in_model_mode(model, X, summed), around(model))

    prove_each_place(meter, attempt, note_repeat)
    counts = meter.counts()
    assert counts["recompute", "block.1.block.0"] > counts["recompute", "block.0"], "the inner block runs once more"


def test_checkpoint_sequential(meter: Meter) -> None:
    """The checkpoint lies in the parent's forward, over plain functions of slices of the children."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Source(1, 1)
            self.layers = nn.ModuleList([Burning(12, 2), Burning(2, 1), Burning(1, 1), Burning(1, 2)])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint_sequential(list(self.layers), 2, self.stem(x), use_reentrant=False)
            return out

    model = Sliced()
    meter.adopt(model)
    prove(meter, in_model_mode(model, X, summed), around(model))
    assert set(meter.totals_ns("recompute")) == {"layers.0", "layers.1"}


class Part(nn.Module):
    """Checkpoints a method of its own."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.work, x, use_reentrant=False)
        return out

    def work(self, x: Tensor) -> Tensor:
        return burn(self.meter, "1", x, forward_ms=20, backward_ms=15)


def test_checkpoint_of_a_function_inside_a_module(meter: Meter) -> None:
    """What is recomputed outside every child belongs to the module whose forward held the checkpoint."""
    model = nn.Sequential(Source(1, 1), Part(meter))
    meter.adopt(model)
    prove(meter, in_model_mode(model, X, summed), around(model))
