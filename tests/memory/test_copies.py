"""Truth: copies by line, op and phase; and how much each layer allocates, and how often."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from gradscope.tables import RunData

from .measuring import BF16, F32, F64, example, layer, measured, memory_of, place

N, T, C, H = 2, 4, 6, 2  # batch, tokens, width, heads
X = torch.linspace(-1, 1, N * T * C).reshape(N, T, C)
SIZE = N * T * C * F32


def copies(data: RunData, phase: str) -> dict[tuple[str | None, str | None, str], tuple[int, int]]:
    """(layer, line, op) -> (bytes, calls), without the 4 bytes that a Python number takes as a tensor."""
    return {
        (row.layer, place(row.line), row.op): (row.bytes, row.calls)
        for row in memory_of(data).copies
        if row.phase == phase and row.bytes > F32 * row.calls
    }


class Reshaping(nn.Module):
    """``function`` of the output of a Linear."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.function = nn.Linear(C, C), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.stem(x))


def heads(x: Tensor) -> Tensor:
    return x.view(N, T, H, C // H).transpose(1, 2)


COPYING: dict[str, tuple[Callable[[Tensor], Tensor], str, int]] = {
    "contiguous": (lambda x: x.transpose(0, 1).contiguous(), "aten::contiguous", SIZE),
    "clone": (lambda x: x.clone(), "aten::clone", SIZE),
    "reshape of what cannot be viewed": (lambda x: x.transpose(0, 1).reshape(T, N * C), "aten::reshape", SIZE),
    "flatten of what cannot be viewed": (lambda x: x.permute(2, 0, 1).flatten(), "aten::flatten", SIZE),
    "cat": (lambda x: torch.cat([x, x, x], dim=1), "aten::cat", 3 * SIZE),
    "stack": (lambda x: torch.stack([x, x]), "aten::stack", 2 * SIZE),
    "repeat": (lambda x: x.repeat(3, 1, 1), "aten::repeat", 3 * SIZE),
    "to another type": (lambda x: x.to(torch.bfloat16), "aten::to", N * T * C * BF16),
    "product of heads that are views": (lambda x: heads(x) @ heads(x).transpose(2, 3), "aten::matmul", 2 * SIZE),
}


@pytest.mark.parametrize("name", COPYING)
def test_what_copies_is_shown_with_its_line_and_bytes(name: str) -> None:
    function, op, size = COPYING[name]
    data = measured(Reshaping(function), X)
    line = f"{Path(__file__).name}:{function.__code__.co_firstlineno}"
    calls = 2 if op == "aten::matmul" else 1
    assert copies(data, "forward") == {("", line, op): (size, calls)}
    assert layer(data, "stem").forward_allocated_bytes == SIZE
    by_line = {f"{place(row.file)}:{row.line}": row for row in data.lines}
    assert by_line[line].copied_bytes >= size
    assert layer(data, "").copied_bytes >= size


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(N * T, C),
    "reshape of what can be viewed": lambda x: x.transpose(0, 1).reshape(T, N, H, C // H),
    "contiguous of what is": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, 2),
    "expanded": lambda x: x[:, None].expand(N, 100, T, C),
    "split": lambda x: x.split(C // H, dim=-1)[1],
    "indexed by a slice": lambda x: x[:, 1:3],
    "to the type it has": lambda x: x.to(torch.float32),
    "detached": lambda x: x + x.detach(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_views_copies_nothing(name: str) -> None:
    data = measured(Reshaping(VIEWS[name]), X)
    assert copies(data, "forward") == {}
    own = layer(data, "")
    assert own.forward_allocations == (name == "detached")  # a sum is an allocation, but no copy
    assert own.forward_allocated_bytes == (SIZE if name == "detached" else 0)


# --------------------------------------------------------------------------------------------------------------------
# examples/attention.py
# --------------------------------------------------------------------------------------------------------------------

BATCH, TOKENS, WIDTH, HEADS = 2, 4, 16, 2
UNIT = BATCH * TOKENS * WIDTH * F32  # q, k, v or the output


@pytest.fixture(scope="module")
def attention() -> ModuleType:
    """The example as a module."""
    return example("attention.py")


def profiled(attention: ModuleType, name: str) -> RunData:
    model = getattr(attention, name)(WIDTH, HEADS, TOKENS)
    return measured(model, torch.randn(BATCH, TOKENS, WIDTH), attention.loss)


class Code:
    """Looks up the lines of one class of the example."""

    def __init__(self, attention: ModuleType, name: str) -> None:
        lines, first = inspect.getsourcelines(getattr(attention, name).forward)
        self._lines = list(enumerate(lines, first))

    def __call__(self, text: str) -> str:
        """ "attention.py:42" of the one line that begins with ``text``."""
        (number,) = [number for number, line in self._lines if line.strip().startswith(text)]
        return f"attention.py:{number}"


def test_attention_that_copies_its_heads(attention: ModuleType) -> None:
    data, code = profiled(attention, "CopyingAttention"), Code(attention, "CopyingAttention")
    assert copies(data, "forward") == {
        ("", code("q = "), "aten::contiguous"): (UNIT, 1),
        ("", code("k = "), "aten::contiguous"): (UNIT, 1),
        ("", code("v = "), "aten::contiguous"): (UNIT, 1),
        ("", code("out = out.permute"), "aten::contiguous"): (UNIT, 1),
    }
    # The gradient of the merged heads, and those of q and v, come as (N, H, T, D) and are wanted as (N, T, H * D). That
    # of k comes transposed, (N, H, D, T), of which the merge of H and D is a view.
    assert copies(data, "backward") == {
        ("", code("out = F.softmax"), "UnsafeViewBackward0"): (UNIT, 1),
        ("", code("q = "), "ReshapeAliasBackward0"): (UNIT, 1),
        ("", code("v = "), "ReshapeAliasBackward0"): (UNIT, 1),
    }
    by_line = {f"{place(row.file)}:{row.line}": row.copied_bytes for row in data.lines}
    assert by_line[code("k = ")] == UNIT
    assert by_line[code("q = ")] == by_line[code("v = ")] == 2 * UNIT


def test_attention_that_views_its_heads(attention: ModuleType) -> None:
    """``@`` makes the copies that the source does not: as many bytes in forward, but on other lines."""
    data, code = profiled(attention, "ViewingAttention"), Code(attention, "ViewingAttention")
    assert copies(data, "forward") == {
        ("", code("scores = "), "aten::matmul"): (2 * UNIT, 2),  # q and k
        ("", code("out = F.softmax"), "aten::matmul"): (UNIT, 1),  # v
        ("", code("return self.c_proj"), "aten::reshape"): (UNIT, 1),
    }
    assert copies(data, "backward") == {
        ("", code("out = F.softmax"), "UnsafeViewBackward0"): (UNIT, 1),
        ("", code("q = "), "ViewBackward0"): (UNIT, 1),
        ("", code("v = "), "ViewBackward0"): (UNIT, 1),
        ("", code("q, k, v = "), "SplitBackward0"): (3 * UNIT, 1),  # puts the three gradients together
    }
    by_line = {f"{place(row.file)}:{row.line}": row.copied_bytes for row in data.lines}
    assert by_line[code("k = ")] == 0


def test_both_variants_save_the_same_bytes(attention: ModuleType) -> None:
    scores = BATCH * HEADS * TOKENS * TOKENS * F32
    kept = 3 * UNIT + scores + F64  # q, k and v as copied; the weights; size**-0.5
    for name in ("CopyingAttention", "ViewingAttention"):
        data = profiled(attention, name)
        assert layer(data, "").saved_bytes == kept
        assert layer(data, "c_attn").saved_bytes == layer(data, "c_proj").saved_bytes == UNIT
        # mse_loss keeps both of its inputs: the output, and the batch, which c_attn was the first to keep.
        assert memory_of(data).saved_bytes == kept + 3 * UNIT


# --------------------------------------------------------------------------------------------------------------------
# Allocations
# --------------------------------------------------------------------------------------------------------------------


def allocated(data: RunData, path: str) -> tuple[int, int, int, int]:
    """(allocations, bytes) of forward and of backward."""
    row = layer(data, path)
    return (
        row.forward_allocations,
        row.forward_allocated_bytes,
        row.backward_allocations,
        row.backward_allocated_bytes,
    )


def test_allocations_of_a_small_model() -> None:
    """Eight rows through 16 -> 32 -> 4: a Linear allocates its output, and the gradients of input, weight and bias."""
    rows, width, wide, out = 8, 16, 32, 4
    model = nn.Sequential(nn.Linear(width, wide), nn.ReLU(inplace=True), nn.Linear(wide, out), nn.ReLU())
    data = measured(model, torch.ones(rows, width))
    hidden, output = rows * wide * F32, rows * out * F32
    first = width * wide * F32 + wide * F32  # the batch wants no gradient
    last = hidden + wide * out * F32 + out * F32
    assert allocated(data, "0") == (1, hidden, 2, first)
    assert allocated(data, "1") == (0, 0, 1, hidden)
    assert allocated(data, "2") == (1, output, 3, last)
    assert allocated(data, "3") == (1, output, 1, output)
    assert allocated(data, "") == (0, 0, 0, 0)
    memory = memory_of(data)
    assert memory.allocations == 3 + 7 + 2  # and the loss, and the 1 that backward starts from
    assert memory.step_allocated_bytes == 2 * hidden + 3 * output + first + last + 2 * F32


def test_an_expanded_gradient_is_copied_before_it_is_multiplied() -> None:
    """The gradient of a sum is one number, expanded: each of the two products makes a matrix of it first."""
    rows, width, out = 8, 16, 4
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, out))
    data = measured(model, torch.ones(rows, width))
    copy = rows * out * F32
    gradients = rows * width * F32 + width * out * F32 + out * F32
    assert allocated(data, "1") == (1, rows * out * F32, 5, gradients + 2 * copy)
    assert layer(data, "1").copied_bytes == 2 * copy
    assert copies(data, "backward") == {("1", None, "AddmmBackward0"): (2 * copy, 2)}


def test_an_optimizer_allocates_outside_of_the_layers() -> None:
    """SGD with momentum, its buffers made: nothing but one number a parameter."""
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    without, data = measured(model, torch.ones(8, 16)), measured(model, torch.ones(8, 16), optimizer=optimizer)
    assert allocated(data, "") == allocated(without, "")
    extra = memory_of(data).step_allocated_bytes - memory_of(without).step_allocated_bytes
    assert extra == F64 + F32  # momentum as a tensor, and again in the buffer's type
