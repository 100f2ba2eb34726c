"""A compiled function that modules call for their parts: each has what it has eager, whatever runs one graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.tables import RunData

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo's own
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(11, 13, bias=False), nn.Linear(13, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.q(torch.tanh(self.p(x))))


class Block(nn.Module):
    """Has parts by these names, and calls what is compiled for each."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, Part())

    def forward(self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        for name in self.names:
            x = run(self.get_submodule(name), x)
        return x


class Outer(nn.Module):
    """Calls it for a part of its own, and for one of a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.block = Part(), Block("inner")

    def forward(self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        result: Tensor = self.block(run(self.own, x), run)
        return result


class Stack(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x, run)
        return x


def twice(part: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = part(x) * 2.0
    return result


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    """Where Inductor keeps what it compiles; it adds to where Python looks for modules, too."""
    from torch._inductor import config

    with pytest.MonkeyPatch.context() as patch, config.patch({"compile_threads": 1}):
        patch.setattr(sys, "path", list(sys.path))
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def measured(model: nn.Module, run: Any) -> RunData:
    """What needs no gradient goes in: the first part's graph is another one than those of all others."""
    x = torch.ones(7, 11)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while not prof.step():
            model(x, run).square().mean().backward()
            with torch.no_grad():  # an update by hand: a parameter's numbers lie elsewhere in each step
                for each in model.parameters():
                    each.data = each.data - 0.1 * each.grad
                    each.grad = None
    return prof.report.data


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stack(Block("at", "ff"), Block("at", "ff")),
        lambda: Stack(Block("attention"), Block("mixing"), Block("mlp")),
        Outer,
    ],
    ids=["two parts of each block", "parts with other names", "a part of the model and one of a block"],
)
def test_each_part_has_what_it_has_eager(make: Callable[[], nn.Module]) -> None:
    model = make()
    eager = measured(model, twice)
    compiled = measured(model, torch.compile(twice))

    def flops(run: RunData) -> dict[str, tuple[int | None, int | None]]:
        return {row.path: (row.forward_flops, row.backward_flops) for row in run.layers if row.parameters}

    def saved(run: RunData) -> dict[str, int | None]:
        """Without what multiplying by a number keeps, which is of a block: 8 bytes."""
        return {row.path: row.saved_bytes for row in run.layers if row.saved_bytes is not None and row.saved_bytes > 16}

    assert flops(compiled) == flops(eager) and (None, None) not in flops(eager).values()
    assert saved(compiled) == saved(eager) != {}
    assert all(row.backward_self_ns for row in compiled.layers if row.parameters)
