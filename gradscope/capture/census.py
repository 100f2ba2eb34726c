"""Counts what is alive between two steps, storages by size: what grows step by step shows in the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from gradscope.capture.graphs import most_nodes, walked
from gradscope.capture.saved import GraphReader
from gradscope.capture.storages import StorageNote, StorageReader, all_tensors

_ROUNDED = 512  # CUDA's allocator gives whole multiples of it


class Census(NamedTuple):
    """What was alive after a step."""

    sizes: Mapping[int, int]  # storages by the size that the allocator gave
    graphs: int  # tensors that Python holds, and that have a graph behind them


def every_storage(reader: StorageReader, graphs: GraphReader) -> tuple[list[StorageNote], int]:
    """Storages of every tensor that Python holds, and of what the graphs keep that these tensors keep.

    Also how many of these tensors have a graph.
    """
    functions, found = [], []
    for tensor in all_tensors():
        found += reader.storages(tensor)
        # Some wrappers have no graph, a subclass may do anything; and a mode of the user's sees the user's calls alone.
        with suppress(Exception), torch._C.DisableTorchFunction():
            if tensor.grad_fn is not None:
                functions.append(tensor.grad_fn)
    # A quarter: the memory pass looks at the same graphs, and not from the same tensors.
    for kept in graphs.kept_by(walked(functions, most_nodes() // 4)[0]):
        found += reader.storages(kept.tensor)
    return found, len(functions)


def sizes_alive(notes: Iterable[StorageNote]) -> Counter[int]:
    """How many storages there are of each size that the allocator gave; without those that torch did not allocate."""
    sizes = {(note.device, note.pointer): _given(note) for note in notes if note.owned}
    return Counter(sizes.values())


def take_census() -> Census:
    """What is alive now."""
    storages, graphs = every_storage(StorageReader(), GraphReader())
    return Census(sizes_alive(storages), graphs)


def _given(note: StorageNote) -> int:
    return note.bytes if note.device == "cpu" else -(-note.bytes // _ROUNDED) * _ROUNDED
