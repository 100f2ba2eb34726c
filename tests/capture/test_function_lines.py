"""Lines of the program's own ``autograd.Function``, however it calls ``apply``. Counts, no clock."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Apart(torch.autograd.Function):
    """The same with a context of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


square = Square.apply  # kept from before anything is measured, as torch's own tutorials do
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "by its class": lambda x: Square.apply(x),
    "kept": square,
    "kept in a partial": partial(Square.apply),
    "with a context": lambda x: Apart.apply(x),
    "kept with a context": Apart.apply,
}


class Squared(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.way(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_function_of_the_programs_has_the_line_that_applies_it(way: str) -> None:
    below = torch.autograd.Function.__base__
    before = dict(vars(below))
    data = gradscope.profile(Squared(WAYS[way]), torch.ones(2, 4), steps=2, warmup=1, memory=False).data
    names = ("SquareBackward", "ApartBackward")
    whole = sum(op.self_ns for op in data.ops if op.phase == "backward" and op.name in names)
    on_lines = {row.line: row.backward_ns for row in data.lines}
    lines = {inspect.getsourcelines(Squared.forward)[1] + 2}
    if "kept" not in way:
        lines = {inspect.getsourcelines(WAYS[way])[1]}
    assert sum(on_lines.get(line, 0) for line in lines) >= whole > 0
    assert dict(vars(below)) == before, "nothing is left of the marking"
