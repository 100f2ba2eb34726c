"""Calls, runs and cases made by hand, of which one can say what they take at a machine's limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.diagnose.case import Case, StepFacts
from gradscope.recording.graph import Node, Value
from gradscope.tables import Limits, RunData
from tests.diagnose.made_graph import made_call, made_value
from tests.report_fixtures import RunBuilder

# 100 GFLOP/s, 10 GB/s, 1 µs a call: a ms is 100 MFLOP or 10 MB.
LIMITS = Limits("cpu", {"float32": 1e11, "bfloat16": 4e11, "tf32": 8e11}, 1e10, 1000.0)
MS = 1_000_000


def tensor(*shape: int, dtype: str = "float32", grad: bool = True, storage: int = 0, **given: Any) -> Value:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    given = {"strides": tuple(strides[: len(shape)]), **given}
    grad = grad and dtype.startswith(("float", "bfloat"))
    return made_value(shape, dtype, requires_grad=grad, storage=storage, **given)


def call(op: str, inputs: Sequence[Value], outputs: Sequence[Value], layer: str | None = "a", **given: Any) -> Node:
    return made_call(op, inputs, outputs, layer=layer, **{"source": "model.py:5", **given})


# 1 GFLOP and 12 MB in forward: 10 ms at the limit, 20 ms in backward.
WIDE = call("linear", [tensor(1000, 1000, storage=1), tensor(1000, 1000, storage=2)], [tensor(1000, 1000, storage=3)])
PLAIN = call("gelu", [tensor(1000, 1000, storage=4)], [tensor(1000, 1000, storage=5)], layer="b")


def run(slow: int = 10, **build: Any) -> RunData:
    """Layers "h.0" and "h.1" of products, ``slow`` times slower than they need be, and "b" near its limit."""
    builder = RunBuilder()
    builder.add("", "Net", 0, 0)
    builder.add("h", "ModuleList", 0, 0, calls=0.0)
    for path in ("h.0", "h.1"):
        builder.add(
            path,
            "Linear",
            20 * slow * MS,
            10 * slow * MS,
            forward_flops=10**9,
            backward_flops=2 * 10**9,
            flops=3 * 10**9,
        )
    builder.add("b", "GELU", 30 * MS, 2 * MS, forward_flops=0, backward_flops=0, flops=0)
    return builder.build(**build)


def case(data: RunData, calls: Iterable[Node] | None = None, limits: Limits | None = LIMITS, **facts: Any) -> Case:
    if calls is None:
        big = replace(PLAIN, inputs=(tensor(10_000, 1000, storage=4),), outputs=(tensor(10_000, 1000, storage=5),))
        calls = [replace(WIDE, layer="h.0"), replace(WIDE, layer="h.1", index=1), big]
    return Case(data, StepFacts(calls=tuple(calls), recorded=True, **facts), limits)


class Net(nn.Module):
    """Two linears and what stands between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.up(x)).transpose(0, 1)
        return self.down(self.norm(h)).sum()
