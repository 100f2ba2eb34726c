"""Truth: custom functions, hooks on saved tensors, and other precisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from .measuring import BF16, F32, Kept, assert_saved, layer, measured

ROWS, WIDTH = 8, 16
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
SIZE = ROWS * WIDTH * F32
STEM = Kept("stem", "AddmmBackward0", "mat1", "8x16", "float32", SIZE)


class OnStem(nn.Module):
    """``function`` of the output of a Linear."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.stem(x))


# --------------------------------------------------------------------------------------------------------------------
# Custom functions
# --------------------------------------------------------------------------------------------------------------------


class Proper(torch.autograd.Function):
    """Keeps its input, an intermediate result, and a view of the latter, as torch advises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(x, square, square[0])
        return square.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, square, _ = ctx.saved_tensors
        return grad * square.cos() * 2 * x


class Sloppy(torch.autograd.Function):
    """Keeps tensors as attributes of its context, alone and in containers: alive for as long as the graph is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.result = x.exp()
        ctx.more = [x, {"sum": x.sum(0)}]
        ctx.shape, ctx.factor = x.shape, 2.0
        return ctx.result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.result


def test_a_custom_function_keeps_what_it_saved() -> None:
    """Two storages of one shape: its input and the square, of which the view is a part."""
    expected = Kept("", "ProperBackward", "saved tensor", "8x16", "float32", 2 * SIZE, count=2)
    assert_saved(measured(OnStem(Proper.apply), X), STEM, expected)


def test_a_custom_function_keeps_what_is_on_its_context() -> None:
    node = "SloppyBackward"
    assert_saved(
        measured(OnStem(Sloppy.apply), X),
        STEM,
        Kept("", node, "ctx.result", "8x16", "float32", SIZE),
        Kept("", node, "ctx.more", "8x16", "float32", SIZE),
        Kept("", node, "ctx.more", "16", "float32", WIDTH * F32),
    )


# --------------------------------------------------------------------------------------------------------------------
# Hooks on saved tensors
# --------------------------------------------------------------------------------------------------------------------


def inside(hooks: Callable[[], Any]) -> nn.Module:
    """A Linear and the exp of its output under saved-tensor hooks; they keep the batch and the output of exp."""

    class Inside(OnStem):
        def forward(self, x: Tensor) -> Tensor:
            with hooks():
                return super().forward(x)

    return Inside(torch.exp)


def halved() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda x: (x.dtype, x.bfloat16()), lambda packed: packed[1].to(packed[0]))


def test_what_is_kept_on_the_cpu_by_hooks_counts_as_it_is() -> None:
    """On the CPU, save_on_cpu without pinning moves nothing."""
    expected = Kept("", "ExpBackward0", "output", "8x16", "float32", SIZE)
    assert_saved(measured(inside(save_on_cpu), X), STEM, expected)


def test_what_hooks_made_of_a_tensor_is_what_is_kept() -> None:
    """A copy in bfloat16 of each of the two; the originals die with their last user."""
    data = measured(inside(halved), X)
    half = ROWS * WIDTH * BF16
    assert_saved(
        data,
        Kept("stem", "AddmmBackward0", "mat1", "8x16", "bfloat16", half),
        Kept("", "ExpBackward0", "output", "8x16", "bfloat16", half),
    )


def test_a_tensor_that_hooks_put_elsewhere_is_not_kept() -> None:
    shelf: dict[int, list[float]] = {}

    def pack(x: Tensor) -> int:
        shelf[len(shelf)] = x.flatten().tolist()
        return len(shelf) - 1

    def unpack(key: int) -> Tensor:
        return torch.tensor(shelf[key]).reshape(ROWS, WIDTH)

    assert_saved(measured(inside(lambda: saved_tensors_hooks(pack, unpack)), X))


# --------------------------------------------------------------------------------------------------------------------
# Precision
# --------------------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Two Linears under autocast."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.tail = self.stem if shared else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.stem(x)
            return self.tail(x)


HALF, WEIGHT = ROWS * WIDTH * BF16, WIDTH * WIDTH * BF16


def test_autocast_keeps_the_casts() -> None:
    """The batch in bfloat16, and the activation, which is made so. The second weight's cast is kept for the gradient
    of its input; nobody needs the first one's, for the batch wants no gradient. Parameters count for nothing."""
    data = measured(Mixed(shared=False), X)
    assert_saved(
        data,
        Kept("stem", "AddmmBackward0", "mat1", "8x16", "bfloat16", HALF),
        Kept("tail", "AddmmBackward0", "mat1", "8x16", "bfloat16", HALF),
        Kept("tail", "AddmmBackward0", "mat2", "16x16", "bfloat16", WEIGHT),
    )
    cast = WEIGHT + WIDTH * BF16  # of weight and bias; the stem casts the batch, too
    stem, tail = layer(data, "stem"), layer(data, "tail")
    assert stem.forward_allocated_bytes == cast + HALF + HALF  # the last one is the output
    assert tail.forward_allocated_bytes == cast + HALF
    # Gradients of weight and bias are cast back. The gradient of the sum is an expanded number, which each of the
    # tail's two products copies first.
    back = WIDTH * (WIDTH + 1) * F32
    assert stem.copied_bytes == cast + HALF + back
    assert tail.copied_bytes == cast + back + 2 * HALF


def test_autocast_casts_a_shared_weight_once() -> None:
    """Autocast's cache: the weight's cast is kept once, by the second use."""
    data = measured(Mixed(shared=True), X)
    assert_saved(
        data,
        Kept("stem", "AddmmBackward0", "mat1", "8x16", "bfloat16", 2 * HALF, count=2),
        Kept("stem", "AddmmBackward0", "mat2", "16x16", "bfloat16", WEIGHT),
    )


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 8), (torch.bfloat16, 2)], ids=["float64", "bfloat16"])
def test_a_model_of_another_precision(dtype: torch.dtype, size: int) -> None:
    name = str(dtype).removeprefix("torch.")
    assert_saved(
        measured(OnStem(torch.exp).to(dtype), X.to(dtype)),
        Kept("stem", "AddmmBackward0", "mat1", "8x16", name, ROWS * WIDTH * size),
        Kept("", "ExpBackward0", "output", "8x16", name, ROWS * WIDTH * size),
    )
