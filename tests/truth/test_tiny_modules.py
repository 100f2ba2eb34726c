"""Truth: many tiny modules, whose calls take less than gradscope's hooks around them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradscope

from .burning import Meter

CALLS = 400

# Of what was taken out as gradscope's own, so much may be left in the layers or be missing there: hooks run before
# code that another has just thrown out of the caches, and what they cost it, no clock of theirs can see.
LEFT = 0.2


class Tiny(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Count for half a microsecond."""
        for _ in range(20):
            pass
        return x


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.tiny = nn.ModuleList(Tiny() for _ in range(CALLS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for each in self.tiny:
            x = each(x)
        return x


def fastest(run: Callable[[], object], rounds: int = 50) -> int:
    """The least ns of some runs: another program adds to all but that."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - began)
    return min(times)


def test_the_cost_of_gradscopes_hooks_is_in_no_layer(meter: Meter) -> None:
    model, x = Many(), torch.ones(2, 4)
    whole = fastest(lambda: model(x))
    bodies = fastest(lambda: [each.forward(x) for each in model.tiny])
    report = gradscope.profile(model, x, steps=20, warmup=1, memory=False, lines=False)
    layers = report.data.layers
    tiny = sum(min(row.forward_self_steps_ns) for row in layers if row.class_name == "Tiny")
    caller = min(next(row for row in layers if row.path == "").forward_self_steps_ns)
    stem = min(next(row for row in layers if row.path == "stem").forward_self_steps_ns)
    own = sum(op.self_ns for op in report.data.ops if op.name == "(gradscope)")
    room = LEFT * own
    assert own > whole, "the hooks take more than these modules"
    assert abs(tiny + caller + stem - whole) < room, (tiny, caller, stem, whole, own)
    # What a call itself takes may count for the caller or for what is called.
    assert bodies - room < tiny < whole + room, (tiny, bodies, own)
