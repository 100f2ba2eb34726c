"""Compiled code on a GPU: kernels have the layers that they have in eager, also where a CUDA graph replays them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradscope
from gradscope.tables import RunData

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Inductor's: of settings that would be faster
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WIDTH, LENGTH, BATCH, WORDS, STEPS = 512, 256, 16, 2048, 5
PRODUCT = re.compile("gemm|cutlass|nvjet")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, 8, WIDTH // 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.drop(self.down(F.gelu(self.up(self.after(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def regional(model: Model) -> Callable[[Tensor], Tensor]:
    for block in model.blocks:
        block.compile()
    return model


WAYS: dict[str, Callable[[Model], Any]] = {
    "whole": torch.compile,
    "regional": regional,
    "CUDA graphs": lambda model: torch.compile(model, mode="reduce-overhead"),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_float32_matmul_precision(before)


def trained(way: Callable[[Model], Any] | None, going_on: Callable[[], bool], *, drop: float = 0.1) -> list[float]:
    """The losses of a program's own loop."""
    torch.manual_seed(0)
    model = Model().cuda()
    for block in model.blocks:
        block.drop.p = drop
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH), device="cuda")
    run: Any = model if way is None else way(model)
    losses: list[float] = []
    while True:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        loss = run(tokens)
        loss.backward()
        losses.append(loss.item())
        if not going_on():
            return losses


def profiled(way: Callable[[Model], Any] | None, *, drop: float = 0.1) -> tuple[RunData, list[float]]:
    """A run in such a loop, and its losses."""
    with gradscope.profiling(steps=STEPS) as prof:
        losses = trained(way, lambda: not prof.step(), drop=drop)
    return prof.report.data, losses


def products(data: RunData) -> dict[str | None, float]:
    """Of each layer its share of the time of all products of matrices."""
    spent: dict[str | None, int] = defaultdict(int)
    for kernel in data.kernels:
        if PRODUCT.search(kernel.name) and "fmha" not in kernel.name:
            spent[kernel.layer] += kernel.device_ns
    whole = sum(spent.values())
    return {layer: ns / whole for layer, ns in spent.items()}


@pytest.fixture(scope="module")
def eager() -> RunData:
    return profiled(None)[0]


@pytest.mark.parametrize("way", WAYS)
def test_kernels_have_the_layers_that_they_have_in_eager(way: str, eager: RunData) -> None:
    data, losses = profiled(WAYS[way])
    assert not [note for note in data.notes if "other kernels" in note or "one row" in note]
    assert len(set(losses)) > 1 and all(loss == loss for loss in losses)  # dropout draws anew; nothing is NaN
    mine, theirs = products(data), products(eager)
    assert None not in mine and "" not in mine
    for layer in theirs:
        # Two points: runs differ in clocks, and Inductor computes some products by other kernels.
        assert mine[layer] == pytest.approx(theirs[layer], abs=0.02), layer
    spent: dict[str | None, int] = defaultdict(int)
    for kernel in data.kernels:
        spent[kernel.layer] += kernel.device_ns
    whole = sum(spent.values())
    assert data.device is not None
    assert whole == pytest.approx(data.device.kernel_ns, rel=1e-3)  # each rounded down
    assert spent[None] < 0.02 * whole  # zero_grad and what reads the loss
    # The loss is in the model's own forward; nothing else is.
    assert spent[""] < 0.25 * whole
    norms = sum(ns for layer, ns in spent.items() if layer and "norm" in layer)
    assert norms > 0.01 * whole


def test_a_cuda_graphs_kernels_are_those_of_the_same_graph_without() -> None:
    """Layer by layer: what is told by order and names is what rows tell."""
    rows, replay = (profiled(WAYS[way])[0] for way in ("whole", "CUDA graphs"))

    def shares(data: RunData) -> dict[tuple[str | None, str], float]:
        spent: dict[tuple[str | None, str], int] = defaultdict(int)
        for kernel in data.kernels:
            if kernel.layer is not None:
                spent[kernel.layer, "backward" if kernel.phase == "gradient_sum" else kernel.phase] += kernel.device_ns
        return {key: ns / sum(spent.values()) for key, ns in spent.items()}

    one, other = shares(rows), shares(replay)
    for key in one.keys() | other.keys():
        assert other.get(key, 0.0) == pytest.approx(one.get(key, 0.0), abs=0.02), key
    lines = {row.line for row in rows.lines if row.backward_ns}
    assert lines == {row.line for row in replay.lines if row.backward_ns}


def test_a_capture_is_not_disturbed() -> None:
    """The losses are those of the same loop alone."""
    left = iter([True] * 5)
    alone = trained(WAYS["CUDA graphs"], lambda: next(left, False), drop=0.0)
    torch._dynamo.reset()
    _, losses = profiled(WAYS["CUDA graphs"], drop=0.0)
    # The same sums by the same kernels: nothing but the order in which a few of them add atomically may differ.
    assert losses[: len(alone)] == pytest.approx(alone, rel=1e-5)
