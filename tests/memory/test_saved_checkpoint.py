"""Truth: what checkpointing keeps from forward to backward, and what its recompute keeps while backward runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .measuring import F32, Kept, assert_saved, at_peak, layer, line_of, measured, memory_of, place, saved

ROWS, WIDTH = 64, 16
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
SIZE = ROWS * WIDTH * F32  # of every activation here: 4,096 bytes
STATE = torch.get_rng_state().nbytes  # of the CPU's generator
LINEAR = (WIDTH * WIDTH + WIDTH) * F32


class Checkpointed(nn.Module):
    """A stem, and a block that keeps 2 * SIZE where it is not checkpointed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if not self.settings:
            out: Tensor = self.block(x)
        else:
            out = checkpoint(self.block, x, **self.settings)  # the checkpoint
        return out


STEM = Kept("stem", "AddmmBackward0", "mat1", "64x16", "float32", SIZE)
INPUT = Kept("", "checkpoint", "input", "64x16", "float32", SIZE)  # of the block, by the module that called it


def test_without_a_checkpoint() -> None:
    assert_saved(
        measured(Checkpointed(), X),
        STEM,
        Kept("block.0", "AddmmBackward0", "mat1", "64x16", "float32", SIZE),
        Kept("block.1", "SigmoidBackward0", "output", "64x16", "float32", SIZE),  # the input of block.2
    )


@pytest.mark.parametrize("early", [True, False], ids=["stopped early", "to its end"])
def test_a_checkpoint_keeps_its_input_alone(early: bool) -> None:
    model = Checkpointed(use_reentrant=False, early_stop=early, preserve_rng_state=False)
    assert_saved(measured(model, X), STEM, INPUT)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_what_a_recompute_allocates_is_of_backward(reentrant: bool) -> None:
    checkpointed = Checkpointed(use_reentrant=reentrant, preserve_rng_state=False)
    plain, again = (layer(measured(model, X), "block.1") for model in (Checkpointed(), checkpointed))
    assert (plain.forward_allocations, plain.forward_allocated_bytes) == (1, SIZE)
    assert (again.forward_allocations, again.forward_allocated_bytes) == (1, SIZE)
    assert again.backward_allocations == plain.backward_allocations + 1
    assert again.backward_allocated_bytes == plain.backward_allocated_bytes + SIZE


def test_a_reentrant_checkpoint_keeps_its_input_alone() -> None:
    data = measured(Checkpointed(use_reentrant=True, preserve_rng_state=False), X)
    assert_saved(data, STEM, Kept("", "CheckpointFunctionBackward", "saved tensor", "64x16", "float32", SIZE))
    (row,) = (row for row in memory_of(data).saved if row.layer == "")
    assert place(row.line) == line_of("the checkpoint", __file__)


def test_a_reentrant_checkpoint_keeps_the_random_state() -> None:
    """An attribute of its context."""
    node = "CheckpointFunctionBackward"
    assert_saved(
        measured(Checkpointed(use_reentrant=True), X),
        STEM,
        Kept("", node, "saved tensor", "64x16", "float32", SIZE),
        Kept("", node, "ctx.fwd_cpu_state", str(STATE), "uint8", STATE),
    )


def test_a_checkpoint_keeps_the_random_state_and_arguments_by_name() -> None:
    """Also tensors in containers and keyword arguments wait for the recompute."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            pair, scale = [x[0] * 1.5, x[1] * 1.5], x[:2] * 1.5
            out: Tensor = checkpoint(self.inside, x, pair, scale=scale, use_reentrant=False)
            return out

        def inside(self, x: Tensor, pair: list[Tensor], scale: Tensor) -> Tensor:
            return (x * pair[0] + pair[1]).exp() * scale[0]

    data = measured(Many(), X)
    kept = [row for row in saved(data) if row.node == "checkpoint"]
    assert kept == [
        Kept("", "checkpoint", "input", "16", "float32", 2 * WIDTH * F32, count=2),
        Kept("", "checkpoint", "input", "2x16", "float32", 2 * WIDTH * F32),
        Kept("", "checkpoint", "input", "64x16", "float32", SIZE),
        Kept("", "checkpoint", "random state", str(STATE), "uint8", STATE),
    ]


class Residual(nn.Module):
    """Two checkpoints in a row and a use of what goes into the second by a node outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False, preserve_rng_state=False)
        y = checkpoint(self.second, x, use_reentrant=False, preserve_rng_state=False)
        return y + x * self.scale


def test_what_several_checkpoints_and_nodes_keep_counts_once() -> None:
    """The batch is the input of the first; what ``x * scale`` keeps is the input of the second."""
    assert_saved(
        measured(Residual(), X),
        Kept("", "checkpoint", "input", "64x16", "float32", 2 * SIZE, count=2),
    )


def keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy of those who keep matrix products and compute the rest again."""
    wanted = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_selective_checkpoint_keeps_what_its_policy_says() -> None:
    """The outputs of both products, and the input."""
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    model = Checkpointed(use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    assert_saved(
        measured(model, X),
        STEM,
        INPUT,
        Kept("", "checkpoint", "selected", "64x16", "float32", 2 * SIZE, count=2),
    )


# --------------------------------------------------------------------------------------------------------------------
# While backward runs
# --------------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A checkpointed block whose inside is four times as wide as its input."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Sigmoid(), nn.Softmax(-1), nn.Linear(4 * WIDTH, 1))
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, self.stem(x), preserve_rng_state=False, **self.settings)
        return out


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_what_a_recompute_keeps_is_at_the_peak(reentrant: bool) -> None:
    """The peak is in the softmax's node, when block.3 has its gradients: its input's was just used."""
    data = measured(Wide(use_reentrant=reentrant), X)
    wide, out = ROWS * 4 * WIDTH * F32, ROWS * 1 * F32
    expected = {
        (None, "inputs"): SIZE,
        ("stem", "parameters"): LINEAR,
        ("block.0", "parameters"): (WIDTH * 4 * WIDTH + 4 * WIDTH) * F32,
        ("block.3", "parameters"): (4 * WIDTH + 1) * F32,
        ("block.3", "gradients"): (4 * WIDTH + 1) * F32,
        ("", "saved activations"): SIZE,  # the input of the block
        ("block.1", "saved activations"): wide,  # the output of Sigmoid, made again
        ("block.2", "saved activations"): wide,  # and that of Softmax
        ("block.3", "activation gradients"): wide,
        ("block.2", "activation gradients"): wide,
        ("block.3", "other activations"): out,  # the output of forward, which the loop holds
        (None, "other activations"): F32 + F32,  # the loss, and the 1 that backward starts from
    }
    if reentrant:
        expected["block.3", "saved activations"] = out  # made again: the inner backward starts from it
    assert at_peak(data) == expected
    memory = memory_of(data)
    assert (memory.peak_phase, memory.peak_layer, memory.peak_op) == ("backward", "block.2", "SoftmaxBackward0")


class Busy(nn.Module):
    """Needs 32 times its input for a moment, and keeps its output."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cat([x] * 32)
        return torch.sigmoid(x)


def test_a_peak_inside_a_recompute() -> None:
    """Forward reaches as high, but for the output and the loss, which are there when it is run again."""
    model = Wide(use_reentrant=False)
    model.block = nn.Sequential(Busy())
    data = measured(model, X)
    assert at_peak(data) == {
        (None, "inputs"): SIZE,
        ("stem", "parameters"): LINEAR,
        ("", "saved activations"): SIZE,  # the input of the block
        ("block.0", "temporaries"): 32 * SIZE,
        ("block.0", "other activations"): SIZE,  # the output, of which the checkpoint let go
        (None, "other activations"): F32 + F32,  # the loss, and the 1 that backward starts from
    }
    memory = memory_of(data)
    assert (memory.peak_phase, memory.peak_layer, memory.peak_op) == ("recompute", "block.0", "aten::cat")
