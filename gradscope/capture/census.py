"""Counts the storages that are alive between two steps, by size: what grows step by step shows in the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import torch

from gradscope.capture.graphs import most_nodes, walked
from gradscope.capture.saved import GraphReader
from gradscope.capture.storages import StorageNote, StorageReader, all_tensors

_ROUNDED = 512  # CUDA's allocator gives whole multiples of it


def every_storage(reader: StorageReader, graphs: GraphReader) -> list[StorageNote]:
    """Storages of every tensor that Python holds, and of what the graphs keep that these tensors keep."""
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
    return found


def sizes_alive(notes: Iterable[StorageNote]) -> Counter[int]:
    """How many storages there are of each size that the allocator gave; without those that torch did not allocate."""
    sizes = {(note.device, note.pointer): _given(note) for note in notes if note.owned}
    return Counter(sizes.values())


def take_census() -> Counter[int]:
    """How many storages of each size are alive now."""
    return sizes_alive(every_storage(StorageReader(), GraphReader()))


def _given(note: StorageNote) -> int:
    return note.bytes if note.device == "cpu" else -(-note.bytes // _ROUNDED) * _ROUNDED
