"""A step that enters compiled blocks, of which one breaks; a metric that broke once, before anything was measured."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

import gradscope


class Block(nn.Module):
    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).tanh()
        if self.broken:
            torch._dynamo.graph_break()
        return x + 1


@torch.compile(backend="aot_eager")
def metric(x: Tensor) -> Tensor:
    return (
        x / x.abs().mean().item()  # the number is Python's
    )


def main() -> None:
    model = nn.Sequential(*[Block(broken=number == 2) for number in range(4)])
    for block in model:
        block.compile(backend="aot_eager")
    with gradscope.profiling(model, steps=3, warmup=2) as prof:
        for number in range(16):
            if number == 0:
                metric(torch.ones(8))
            model(torch.ones(4, 8)).sum().backward()
            prof.step()
    found = [each for each in prof.report.data.findings if each.rule == "graph-break"]
    print(json.dumps([[each.line, each.evidence, each.cost_ns, each.severity] for each in found]))


if __name__ == "__main__":
    main()
