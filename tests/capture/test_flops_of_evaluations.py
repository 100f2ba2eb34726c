"""Floating-point operations of a loop with evaluations between its passes: those have no backward."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradscope

ROWS, WIDTH = 4, 16
PRODUCT = 2 * ROWS * WIDTH * WIDTH


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("every", [1, 4])
def test_backward_is_counted_for_what_is_trained(every: int, without: Any) -> None:
    """Twenty calls without gradients in each step, or in some: forward's operations grow, backward's do not."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    number = 0
    with gradscope.profiling(model, steps=4, warmup=1) as prof:
        while True:
            if number % every == 0:
                with without():
                    for _ in range(20):
                        model(x)
            model(x).sum().backward()
            number += 1
            if prof.step():
                break
    rows = {row.path: row for row in prof.report.data.layers}
    assert rows["0"].backward_flops == PRODUCT  # of the weight alone: the input needs no gradient
    assert rows["2"].backward_flops == 2 * PRODUCT
    forward = rows["0"].forward_flops
    assert forward is not None and forward > PRODUCT
    if every == 1:
        assert forward == 21 * PRODUCT
    evaluated = 20 * 4 // every
    (note,) = [note for note in prof.report.data.notes if "no backward pass" in note]
    assert note.startswith(f"{evaluated} of {evaluated + 4} calls of Sequential")


def _in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("backward", ["there", "here"])
@pytest.mark.parametrize("often", [1, 3])
def test_what_other_threads_train_counts_too(often: int, backward: str) -> None:
    """Operations are noted in one thread: of a call of each layer there, for as many calls as there are."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(x).sum()
        return found

    with gradscope.profiling(model, steps=4, warmup=1) as prof:
        while True:
            for _ in range(often):
                if backward == "there":
                    _in_a_thread(lambda: loss().backward())
                else:
                    _in_a_thread(loss).backward()
            loss().backward()
            if prof.step():
                break
    rows = {row.path: row for row in prof.report.data.layers}
    calls = often + 1
    assert rows["0"].calls == calls
    assert [rows[path].forward_flops for path in "02"] == [calls * PRODUCT] * 2
    assert [rows[path].backward_flops for path in "02"] == [calls * 2 * PRODUCT] * 2
    assert any("also ran in other threads" in note for note in prof.report.data.notes)


def test_a_checkpoint_that_makes_no_nodes_in_forward_has_backward() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            checkpoint(model, x, use_reentrant=True).sum().backward()
            if prof.step():
                break
    rows = {row.path: row for row in prof.report.data.layers}
    for path in "01":
        row = rows[path]
        assert row.backward_flops is not None and row.backward_flops >= 2 * PRODUCT, path


def test_a_reentrant_checkpoint_beside_evaluations_has_the_backward_of_what_is_made_again() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    number = 0
    with gradscope.profiling(model, steps=4, warmup=1) as prof:
        while True:
            if number % 4 == 0:
                with torch.no_grad():
                    for _ in range(20):
                        model(x)
            checkpoint(model, x, use_reentrant=True).sum().backward()
            number += 1
            if prof.step():
                break
    rows = {row.path: row for row in prof.report.data.layers}
    for path in "01":
        assert rows[path].backward_flops == 3 * PRODUCT, path  # both gradients, and what is computed again


class Square(torch.autograd.Function):
    """Of which torch makes a node's number even where it makes no node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(self.linear(x))


@pytest.mark.parametrize("without", [torch.no_grad, torch.enable_grad])
def test_calls_whose_nodes_never_run_are_not_trained(without: Any) -> None:
    """Of a Function of the user's without gradients, and of a result that nobody goes backward from."""
    model = Squared()
    x = torch.randn(ROWS, WIDTH)
    with gradscope.profiling(model, steps=3, warmup=1) as prof:
        while True:
            with without():
                for _ in range(5):
                    model(x)
            model(x).sum().backward()
            if prof.step():
                break
    rows = {row.path: row for row in prof.report.data.layers}
    assert rows["linear"].backward_flops == PRODUCT
    assert rows["linear"].forward_flops == 6 * PRODUCT
    (note,) = [note for note in prof.report.data.notes if "no backward pass" in note]
    assert note.startswith("15 of 18 calls of Squared")


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x, x)  # type: ignore[no-any-return]


def test_a_layer_that_torch_cannot_count_is_told_so() -> None:
    """It was called in the step that counts; ``_trilinear`` has matmuls below it, but no formula."""
    model = _Both()
    x = torch.randn(ROWS, WIDTH)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            model(x).sum().backward()
            if prof.step():
                break
    rows = {row.path: row for row in prof.report.data.layers}
    assert rows["second"].flops is None and rows["first"].flops
    (note,) = [note for note in prof.report.data.notes if "FLOPs" in note]
    assert note.endswith("torch has no formula for what they compute")


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14), reason="this torch compiles it")
def test_a_layer_that_compile_left_alone_is_not_put_down_to_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch._dynamo.utils.counters, "frames", Counter())  # what other tests have compiled here
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].compile(backend="eager")
    x = torch.randn(ROWS, WIDTH)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            model(x).sum().backward()
            if prof.step():
                break
    torch._dynamo.reset()
    (finding,) = [each for each in prof.report.data.findings if each.rule == "compile-failed"]
    assert finding.layers == ("0",)
    rows = {row.path: row for row in prof.report.data.layers}
    assert rows["0"].flops is None and rows["1"].flops
    (note,) = [note for note in prof.report.data.notes if "FLOPs of 1 layer" in note]
    assert any("of which .compile() compiles nothing" in note for note in prof.report.data.notes)
    assert "they run inside of functions that torch.compile was given" in note


def test_a_layer_that_is_given_nothing_is_not_put_down_to_a_formula() -> None:
    """As an expert without tokens: how much it computes in other steps nobody knows."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            (model[0](x).sum() + model[1](x[:0]).sum()).backward()
            if prof.step():
                break
    rows = {row.path: row for row in prof.report.data.layers}
    assert rows["1"].flops is None and rows["0"].flops
    (note,) = [note for note in prof.report.data.notes if "FLOPs of 1 layer" in note]
    assert "given nothing to compute" in note
