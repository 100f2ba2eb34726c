"""Which storages are counted after a step, and under which size."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gradscope.capture.storages import (
    GraphReader,
    StorageNote,
    StorageReader,
    every_storage,
    sizes_alive,
    states_of,
    take_census,
)


def test_a_storage_that_several_tensors_share_counts_once() -> None:
    notes = [StorageNote(64, 100, "cpu", True), StorageNote(64, 100, "cpu", True), StorageNote(128, 100, "cpu", True)]
    assert sizes_alive(notes) == {100: 2}


def test_addresses_of_two_devices_are_two() -> None:
    assert sizes_alive([StorageNote(64, 512, f"cuda:{number}", True) for number in range(2)]) == {512: 2}


def test_sizes_are_the_allocators() -> None:
    """Those of a GPU are rounded up: tensors of nearly the same size are then one size, as what is freed and reused."""
    notes = [StorageNote(number, size, "cuda:0", True) for number, size in enumerate((1, 511, 512, 513))]
    assert sizes_alive(notes) == {512: 3, 1024: 1}
    assert sizes_alive([note._replace(device="cpu") for note in notes]) == {1: 1, 511: 1, 512: 1, 513: 1}


def test_memory_that_torch_did_not_allocate_is_not_counted() -> None:
    lent = torch.from_numpy(np.zeros(12_347, np.uint8))
    own = torch.zeros(12_349, dtype=torch.uint8)
    sizes = sizes_alive(every_storage(StorageReader(), GraphReader())[0])
    assert (sizes[lent.numel()], sizes[own.numel()]) == (0, 1)


def test_what_a_graph_keeps_is_counted_with_it() -> None:
    kept = torch.rand(12_373, requires_grad=True).exp().sum()  # exp keeps its result, which no name holds
    sizes = sizes_alive(every_storage(StorageReader(), GraphReader())[0])
    assert sizes[12_373 * 4] == 2
    del kept
    assert Counter(sizes_alive(every_storage(StorageReader(), GraphReader())[0]))[12_373 * 4] == 0


class _Counts(dict[Any, Any]):
    def _counted(self) -> Any:
        raise AssertionError("a method of the program's was called")

    items = values = __iter__ = _counted  # type: ignore[assignment]


def test_the_states_of_optimizers_are_read_without_their_methods() -> None:
    """And of one that cannot be read none are."""
    parameter = torch.ones(12_401)
    own, strange = SimpleNamespace(state=_Counts()), SimpleNamespace()
    own.state[parameter] = _Counts(history=[parameter + 1])
    found = list(states_of([strange, own], StorageReader()))  # type: ignore[list-item]
    assert [(each is parameter, note.bytes) for each, note in found] == [(True, 12_401 * 4)]
    history = own.state[parameter]["history"][0]
    assert sizes_alive(every_storage(StorageReader(), GraphReader())[0])[history.nbytes] == 2
    assert take_census([own]).sizes[history.nbytes] == 1  # type: ignore[list-item]
