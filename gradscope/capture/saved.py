"""What the nodes of an autograd graph keep for backward, read without unpacking anything.

The nodes' own attributes are read, no hooks are set: with hooks for saved tensors ``torch.func`` refuses to run, and a
user's own hooks would not be called. What hooks have packed is looked into where it holds tensors; what a checkpoint
keeps for its recompute counts as saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gradscope.capture.storages import tensors_in
from gradscope.compat import SavedTensor, checkpoint_frame, held_by_checkpoint, saved_value
from gradscope.tables import CHECKPOINT

_RAW = "_raw_saved_"
_WHAT = {"_raw_saved_result": "output", "_raw_saved_tensors": "saved tensor"}


class KeptStorage(NamedTuple):
    """A tensor that a node keeps. Let go of it at once: it is alive only because something else holds it."""

    sequence: int  # of the node
    node: str  # "SoftmaxBackward0"
    what: str  # the node's own name for it
    tensor: torch.Tensor


class GraphReader:
    """Reads graphs; remembers which attributes each kind of node has."""

    def __init__(self) -> None:
        self._slots: dict[type, tuple[str, ...]] = {}

    def kept_by(self, nodes: Iterable[Any]) -> Iterator[KeptStorage]:
        """Everything that ``nodes`` keep, and the checkpoints behind them."""
        frames: dict[int, tuple[Any, int]] = {}  # of checkpointing, each with the number of its latest node
        for node in nodes:
            number, name = node._sequence_nr(), node.name().rpartition("::")[2]
            for what, saved in self._saved(node):
                frame = checkpoint_frame(saved)
                if frame is not None:
                    frames[id(frame)] = (frame, max(frames.get(id(frame), (frame, -1))[1], number))
                yield from (KeptStorage(number, name, what, tensor) for tensor in tensors_in(_value_of(saved)))
            # A custom Function may keep tensors as attributes of its context, against torch's advice.
            for name_of_attribute, value in getattr(node, "__dict__", {}).items():
                what = f"ctx.{name_of_attribute}"
                yield from (KeptStorage(number, name, what, tensor) for tensor in tensors_in(value))
        for frame, number in frames.values():
            for what, held in held_by_checkpoint(frame):
                yield from (KeptStorage(number, CHECKPOINT, what, tensor) for tensor in tensors_in(_unwrapped(held)))

    def _saved(self, node: Any) -> Iterator[tuple[str, Any]]:
        """(the node's name for it, ``SavedTensor``) of each tensor that torch saved for it."""
        slots = self._slots.get(type(node))
        if slots is None:
            slots = self._slots[type(node)] = tuple(name for name in dir(node) if name.startswith(_RAW))
        for slot in slots:
            try:
                held = getattr(node, slot)
            except RuntimeError:  # freed by an earlier pass
                continue
            what = _WHAT.get(slot, slot.removeprefix(_RAW))
            for saved in held if isinstance(held, (tuple, list)) else (held,):
                if saved is not None:
                    yield what, saved


def _value_of(saved: Any) -> Any:
    """What a ``SavedTensor`` holds; None where an earlier pass has freed it."""
    try:
        return saved_value(saved)
    except RuntimeError:
        return None


def _unwrapped(held: Any) -> Any:
    """Containers with each ``SavedTensor`` in them replaced by what it holds."""
    if isinstance(held, SavedTensor):
        return _value_of(held)
    if isinstance(held, (list, tuple)):
        return [_unwrapped(item) for item in held]
    return held
