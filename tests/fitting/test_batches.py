"""Batches of other sizes: which dimension is the batch's, what becomes of the rows, and what cannot be scaled."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from gradscope.errors import WorkloadError
from gradscope.fitting.batches import FactorySource, ScaledSource, leaves, samples_in, scaled
from gradscope.fitting.fake import BatchShapes, UnknownShapeError
from gradscope.fitting.measure import find_time_major
from gradscope.workload import Workload

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    name: str = "item"


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# --------------------------------------------------------------------------------------------------------------------
# Which dimension is the batch's
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (t(16, 3), 16),
        ((t(16, 3), t(16)), 16),
        ({"x": t(16, 5, 8), "mask": t(5, 5), "scale": t()}, 16),
        ((t(5, 5), t(16, 5)), 16),  # a length is a dimension elsewhere; the batch size is not
        ((t(16, 5), t(16), t(7, 3)), 16),  # the first dimension of most
        ((t(16, 5), t(1, 5)), 16),
        ((t(1, 5), t(1)), 1),
        ([t(4, 2), [t(4), {"z": t(4, 4, 4)}]], 4),
        ({"input_ids": t(8, 8, dtype=torch.long), "attention_mask": t(8, 8, dtype=torch.long)}, 8),
        ((t(8, 8), t(8)), 8),
        (Item(t(6, 2)), 6),
        (Pair(t(6, 2), 3.0), 6),
    ],
)
def test_samples(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (t(), "it contains no tensor with a dimension"),
        ({"text": "words"}, "it contains no tensor with a dimension"),
        ((t(0, 3), t(0)), "it contains no samples: the first dimension of its tensors is 0"),
        ((t(8, 2), t(5, 3)), "its tensors do not share a first dimension (batch[0] 8 x 2, batch[1] 5 x 3)"),
        (
            {"x": t(16, 16, 4), "mask": t(16, 16)},
            "batch['mask'] is 16 x 16 and batch['x'] 16 x 16 x 4: the first dimension of batch['mask'] may be the "
            "batch's or the sequence's",
        ),
        (
            (t(8, 8, dtype=torch.long), t(8, 8, dtype=torch.bool)),
            "batch[0] is 8 x 8 and batch[1] 8 x 8: the first dimension of batch[0] may be the batch's or the "
            "sequence's",
        ),
        ((t(4, 2), [np.zeros(4)]), "batch[1][0] is a ndarray"),
        ({"x": pack_sequence([t(3), t(2)])}, "batch['x'] is a PackedSequence of 4"),
        (t(4, 2).to_sparse(), "batch is a sparse tensor"),
    ],
)
def test_what_cannot_be_scaled(batch: Any, reason: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        samples_in(batch)
    assert str(raised.value) == reason


# --------------------------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------------------------


def test_rows_are_cut_and_repeated() -> None:
    x = torch.arange(6).view(3, 2)
    assert scaled(x, 3, 2).tolist() == [[0, 1], [2, 3]]
    assert scaled(x, 3, 7).tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5], [0, 1]]


def test_structure_and_all_else_stay() -> None:
    mask, note = t(5, 5), "as it is"
    small = scaled({"pair": Pair(t(4, 5), [t(4)]), "mask": mask, "note": note, "none": None}, 4, 2)
    assert isinstance(small["pair"], Pair)
    assert [leaf.shape[0] for leaf in (small["pair"].x, small["pair"].y[0])] == [2, 2]
    assert small["mask"] is mask
    assert small["note"] is note
    made = scaled(Item(t(4, 2), "own"), 4, 3)
    assert (made.x.shape, made.name) == ((3, 2), "own")


def test_a_small_batch_holds_no_large_memory() -> None:
    assert scaled(t(1000, 8), 1000, 2).untyped_storage().nbytes() == 2 * 8 * 4


def test_layout_stays() -> None:
    channels_last = t(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert scaled(channels_last, 4, 9).stride() == (75, 1, 15, 3)
    gaps = t(4, 33)[:, 1:]  # flatten() of it has to copy, and shall have to at any batch size
    assert scaled(gaps, 4, 6).stride() == (33, 1)
    batch_last = t(5, 4).t()
    assert scaled(batch_last, 4, 6).stride() == (1, 6)
    expanded = t(1, 3).expand(4, 3)
    assert scaled(expanded, 4, 100).untyped_storage().nbytes() == 12
    repeated_inside = t(4, 1).expand(4, 3)
    assert scaled(repeated_inside, 4, 2).shape == (2, 3)


def test_a_leaf_stays_a_leaf() -> None:
    made = scaled(torch.ones(4, 2, requires_grad=True), 4, 2)
    assert made.is_leaf
    assert made.requires_grad
    assert not scaled(torch.ones(4, 2), 4, 2).requires_grad


# --------------------------------------------------------------------------------------------------------------------
# Sources
# --------------------------------------------------------------------------------------------------------------------


def message(raised: pytest.ExceptionInfo[WorkloadError]) -> list[str]:
    return str(raised.value).splitlines()


def test_the_message_shows_what_to_write() -> None:
    with pytest.raises(WorkloadError) as raised:
        ScaledSource(Workload(nn.Identity(), (t(8, 2), t(5, 3)), target="zoo/model.py:small"))
    assert message(raised) == [
        "the batch cannot be resized: its tensors do not share a first dimension (batch[0] 8 x 2, batch[1] 5 x 3).",
        "Let zoo/model.py create it, with batch_size samples:",
        "    def small(batch_size=8): return Net(), torch.randn(batch_size, 3, 32, 32)",
    ]


def test_the_message_in_python() -> None:
    with pytest.raises(WorkloadError) as raised:
        ScaledSource(Workload(nn.Identity(), t()))
    assert message(raised)[1:] == [
        "Give gradscope.fit a function that creates it, with batch_size samples:",
        "    def workload(batch_size=8): return Net(), torch.randn(batch_size, 3, 32, 32)",
    ]


def test_the_first_item_of_an_iterator_is_scaled() -> None:
    source = ScaledSource(Workload(nn.Identity(), iter([[t(6, 2), t(6)], [t(5, 2), t(5)]])))
    small = source.at(2).batch
    assert isinstance(small, tuple)
    assert [tensor.shape[0] for tensor in small] == [2, 2]
    assert source.notes == ("the batch is a list_iterator: its first item (6 samples) was scaled",)


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([], "the batch iterator, a list_iterator, returned no batch"),
        (["words"], "item 1 of the batch iterator is a str"),
    ],
)
def test_an_opaque_iterator(items: list[Any], reason: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        ScaledSource(Workload(nn.Identity(), iter(items), target="model.py"))
    assert message(raised)[0] == f"the batch cannot be resized: {reason}."


def test_an_error_of_the_model_at_another_size() -> None:
    source = ScaledSource(Workload(nn.Identity(), t(8, 2), target="model.py"))
    refusal = source.refusal(2, ValueError("shape '[8, 2]' is invalid\nfor input of size 4"))
    assert str(refusal).splitlines()[0] == (
        "the batch cannot be resized: with its first rows as a batch of 2 instead of 8, the model raised "
        "ValueError: shape '[8, 2]' is invalid."
    )
    assert "with its rows, repeated, as a batch of 9 instead of 8" in str(source.refusal(9, KeyError()))


def test_a_factory_gives_the_batch_of_each_size() -> None:
    source = FactorySource(lambda size: Workload(nn.Identity(), iter([[t(size, 2)]])), "model.py")
    assert [leaf.shape for _, leaf in leaves(source.at(3).batch)] == [(3, 2)]
    assert source.refusal(3, ValueError()) is None


# --------------------------------------------------------------------------------------------------------------------
# Recurrent layers
# --------------------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.transpose(0, 1))[0]


@pytest.mark.parametrize(
    ("model", "shape", "found"),
    [
        (nn.Sequential(nn.GRU(4, 4)), (7, 5, 4), "0 (GRU)"),
        (nn.LSTM(4, 4), (7, 5, 4), "LSTM (LSTM)"),
        (nn.RNN(4, 4), (7, 4), "RNN (RNN)"),
        (nn.LSTM(4, 4, batch_first=True), (7, 5, 4), None),
        (Turned(), (7, 5, 4), None),
        (nn.Linear(4, 4), (7, 5, 4), None),
    ],
)
def test_time_major(model: nn.Module, shape: tuple[int, ...], found: str | None) -> None:
    batch = t(*shape)
    assert find_time_major(model, [scaled(batch, 7, 2), scaled(batch, 7, 3)]) == found
    assert not any(module._forward_pre_hooks for module in model.modules())


# --------------------------------------------------------------------------------------------------------------------
# Shapes
# --------------------------------------------------------------------------------------------------------------------


def noted(*batches: tuple[int, Any]) -> BatchShapes:
    shapes = BatchShapes("model.py")
    for size, batch in batches:
        shapes.note(size, batch)
    return shapes


def test_shapes_grow_with_the_batch() -> None:
    shapes = noted(*((size, {"x": t(2 * size, 3), "m": t(3, size + 1), "n": 7}) for size in (2, 3, 5)))
    shapes.require_growth()
    made = shapes.empty(10)
    assert (made["x"].shape, made["m"].shape, made["n"]) == ((20, 3), (3, 11), 7)


def test_strides_and_kinds_stay() -> None:
    shapes = noted(
        *((size, (t(4, size).t(), torch.ones(size, requires_grad=True), t(size, dtype=torch.bool))) for size in (2, 3))
    )
    x, leaf, mask = shapes.empty(8)
    assert (x.shape, x.stride()) == ((8, 4), (1, 8))
    assert leaf.requires_grad
    assert mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("second", "third", "reason"),
    [
        ((t(3), 3), (t(4), 4), "batch[1] changes with the batch size"),
        ((t(4), 2), (t(9), 2), "the shape of batch[0] does not grow linearly with the batch size"),
        ((t(3, 1), 2), (t(4, 1), 2), "the number of dimensions of batch[0] changes with the batch size"),
    ],
)
def test_shapes_that_follow_no_law(second: Any, third: Any, reason: str) -> None:
    shapes = noted((2, (t(2), 2)), (3, second), (4, third))
    with pytest.raises(UnknownShapeError) as raised:
        shapes.empty(8)
    assert str(raised.value) == reason


def test_a_factory_that_ignores_the_batch_size() -> None:
    with pytest.raises(WorkloadError) as raised:
        noted((2, t(8, 3)), (3, t(8, 3))).require_growth()
    assert str(raised.value) == (
        "model.py: the batches for batch_size=2 and batch_size=3 have the same shapes.\n"
        "Create a batch with batch_size samples."
    )
