"""What forward keeps at a size that is not run, from fake tensors; and that the model does not notice."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscope.fitting.batches import scaled
from gradscope.fitting.fake import BatchShapes, FakeCheck, UncheckedError, held_by_forward
from gradscope.workload import Workload

SCALAR = 4  # the loss itself


def shapes_of(batch: Any, samples: int) -> BatchShapes:
    shapes = BatchShapes("model.py")
    for size in (2, 3, 4):
        shapes.note(size, scaled(batch, samples, size))
    return shapes


def held(model: nn.Module, batch: torch.Tensor, size: int, loss: Any = None) -> int:
    return held_by_forward(Workload(model, batch, loss=loss), shapes_of(batch, batch.shape[0]), size)


def summed(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.sum()


def test_a_linear_layer_keeps_its_output_only_for_the_caller() -> None:
    """Its input is the batch and its weight a parameter: what is made and alive is the output and the loss."""
    assert held(nn.Linear(8, 5), torch.ones(6, 8), 100, summed) == 100 * 5 * 4 + SCALAR


def test_what_a_network_keeps() -> None:
    """Linear's output is GELU's input, GELU's the second Linear's; the last output is alive until backward."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    assert held(model, torch.ones(6, 8), 100, summed) == 100 * (16 + 16 + 3) * 4 + SCALAR


def test_storages_are_counted_once() -> None:
    """Softmax keeps its output, which the product keeps too; a view of it is no second storage."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = (x * self.scale).softmax(-1)
            return (weights.view(-1, 2, 2) ** 2).sum()

    assert held(Net(), torch.ones(6, 4), 50) == 50 * 4 * 4 + SCALAR


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant).sum()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_keeps_its_input(use_reentrant: bool) -> None:
    """What is inside is not kept; its output is dropped once it is summed."""
    assert held(Checkpointed(use_reentrant), torch.ones(6, 8), 100) == 100 * 8 * 4 + SCALAR


def test_nothing_is_allocated() -> None:
    """32 terabytes of activations: only shapes are computed."""
    assert held(nn.Linear(8, 8), torch.ones(2, 8), 10**12, summed) == 32 * 10**12 + SCALAR


# --------------------------------------------------------------------------------------------------------------------
# Another path from some size on
# --------------------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Keeps an exp more for batches above 16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).exp()
        return (x.exp() if x.shape[0] > 16 else x).sum()


def check_of(model: nn.Module, batch: torch.Tensor) -> FakeCheck:
    return FakeCheck(Workload(model, batch), shapes_of(batch, batch.shape[0]), (2, 3, 4))


def test_a_branch_on_the_batch_size_is_found() -> None:
    check = check_of(Branching(), torch.ones(6, 8))
    assert check.unchecked is None
    assert [check.difference(size) for size in (8, 16, 17, 64)] == [0, 0, 17 * 8 * 4, 64 * 8 * 4]
    assert [check.agrees(size) for size in (16, 17)] == [True, False]


def test_a_square_of_the_batch_size_is_expected() -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.linear(x)
            return F.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))

    check = check_of(Contrastive(), torch.ones(6, 8))
    assert check.difference(1000) == 0


# --------------------------------------------------------------------------------------------------------------------
# What cannot be checked
# --------------------------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)).sum()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x: x * x.max().item(),
            "the model reads a tensor value (.item(), bool() or a comparison) for control flow",
        ),
        (
            lambda x: x if x.sum() > 0 else -x,
            "the model reads a tensor value (.item(), bool() or a comparison) for control flow",
        ),
        (lambda x: x[x > 0], "the shape of a result depends on values (nonzero, a mask as an index, unique)"),
        (lambda x: x.view(2, -1, 3), "RuntimeError: shape '[2, -1, 3]' is invalid for input of size 32"),
    ],
)
def test_why_a_model_is_not_checked(function: Any, reason: str) -> None:
    with pytest.raises(UncheckedError) as raised:
        held(Calls(function), torch.ones(6, 4), 8)
    assert str(raised.value) == reason


def test_an_unchecked_model_says_so_at_every_size() -> None:
    check = check_of(Calls(lambda x: x * x.max().item()), torch.ones(6, 4))
    assert check.unchecked == "the model reads a tensor value (.item(), bool() or a comparison) for control flow"
    with pytest.raises(UncheckedError):
        check.agrees(8)


def test_one_size_that_cannot_be_checked() -> None:
    check = check_of(Calls(lambda x: x * x.max().item() if len(x) > 4 else x), torch.ones(6, 4))
    assert check.unchecked is None
    assert check.difference(4) == 0
    with pytest.raises(UncheckedError):
        check.difference(5)


def test_a_compiled_model_is_not_checked() -> None:
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    with pytest.raises(UncheckedError, match=r"^torch\.compile does not run on fake tensors$"):
        held(model, torch.ones(6, 4), 8)


# --------------------------------------------------------------------------------------------------------------------
# Nothing is left behind
# --------------------------------------------------------------------------------------------------------------------


class Caching(nn.Module):
    """Everything that a forward may change: running statistics, a cache, a list, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.calls: list[torch.Tensor] = []
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = self.drop(self.norm(x))
        self.calls.append(self.cache)
        self.made_in_forward = self.cache
        return self.cache.sum()


@pytest.mark.parametrize("raises", [False, True])
def test_the_model_is_untouched(raises: bool) -> None:
    model = Caching()
    if raises:
        model.norm.register_forward_hook(lambda module, args, output: output.max().item() and None)
    before, names = copy.deepcopy(model.state_dict()), set(vars(model))
    identities = {name: (id(value), value.data_ptr()) for name, value in model.named_parameters()}
    random = torch.get_rng_state()
    if raises:
        with pytest.raises(UncheckedError):
            held(model, torch.ones(6, 4), 8)
    else:
        held(model, torch.ones(6, 4), 8)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {name: (id(value), value.data_ptr()) for name, value in model.named_parameters()} == identities
    assert set(vars(model)) == names
    assert (model.cache, model.calls) == (None, [])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert type(model.norm.weight) is nn.Parameter


def test_no_fake_tensor_survives() -> None:
    found: list[weakref.ref[torch.Tensor]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(weakref.ref(x))
        return x

    held(Calls(note), torch.ones(6, 4), 8)
    gc.collect()
    assert len(found) == 1
    assert found[0]() is None
