"""What a mask that attention is given says on every batch: one that depends on the batch says nothing certain."""

from __future__ import annotations

import math

import torch

from gradscope.ops import ATTENTION
from gradscope.patching.graph import CASTS, COPIES, remade
from gradscope.patching.matchers.masks import Mask, causal, is_causal
from gradscope.recording.graph import Node, Recording, Value

CAUSAL, OPEN = "causal", "open"

# Fewer queries than these say too little: a window over what is near looks causal.
_TELLING = 4

# Different ones that are remembered while a recording is read.
_MOST_KNOWN = 4

_SPREAD = frozenset({"expand", "expand_as"})
_FORMS = frozenset(
    {"view", "reshape", "unsqueeze", "squeeze", "getitem", "narrow", "bool", "float", "float32", "half", "bfloat16"}
    | {"detach", "eq", "ne", "logical_not", *_SPREAD, *CASTS, *COPIES}
)
_FILLED = frozenset(
    {"ones", "zeros", "ones_like", "zeros_like", "new_ones", "new_zeros", "full", "full_like", "new_full"}
)


def note_masks(recording: Recording) -> None:
    """Write down, on each call of torch's attention, what its mask says; names must be known, see recording.naming."""
    masks = _Masks()
    for node in recording.nodes:
        if node.op == ATTENTION:
            node.mask = masks.what_it_says(node)


class _Masks:
    """Reads the masks of one recording."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, bool]] = []  # each block may have a buffer of the same content

    def what_it_says(self, node: Node) -> str | None:
        """CAUSAL or OPEN (nothing is hidden or added), as a call of torch's attention is given it.

        None: something else, or it may be another with the next batch.
        """
        mask = node.argument(3, "attn_mask")
        if not isinstance(mask, Value) or mask.requires_grad or len(node.inputs) < 3:
            return None
        while mask.producer is not None and mask.producer.op in _SPREAD:
            mask = mask.producer.inputs[0]
        shape = (node.inputs[0].shape[-2], node.inputs[1].shape[-2])
        hides = "zero" if mask.dtype is torch.bool else ""
        root = _root(mask)
        if root is None or (root.producer is None and (root.parameter is None or root.requires_grad)):
            frame = node.places[-1].frame if node.places else None
            given = Mask(mask, hides, -math.inf)
            return CAUSAL if frame is not None and causal(given, shape, frame) is not None else None
        whole, part = remade(root), remade(mask)
        if whole is None or part is None:
            return None
        if _is_open(part) and (root.producer is not None or _is_even(whole)):
            return OPEN
        if root.producer is not None or min(shape) < _TELLING or not is_causal(part, hides, shape):
            return None
        return CAUSAL if self._is_causal(whole) else None

    def _is_causal(self, buffer: torch.Tensor) -> bool:
        """Return whether it is so at its full length: a window's is causal at a shorter one."""
        for known, answer in self._known:
            if known.dtype is buffer.dtype and known.device == buffer.device and torch.equal(known, buffer):
                return answer
        shape = (buffer.shape[-2], buffer.shape[-1]) if buffer.dim() >= 2 else (0, 0)
        answer = any(is_causal(buffer, hides, shape) for hides in ("zero", "nonzero", ""))
        if len(self._known) < _MOST_KNOWN:
            self._known.append((buffer, answer))
        return answer


def _root(mask: Value) -> Value | None:
    """What the mask is a form or a part of: a tensor that was there before, or one filled with a single number."""
    while mask.producer is not None:
        node = mask.producer
        if node.op in _FILLED:
            return None if node.changed else mask
        if node.op not in _FORMS or node.changed or len(node.inputs) != 1:
            return None
        mask = node.inputs[0]
    return mask


def _is_open(mask: torch.Tensor) -> bool:
    return bool(mask.all()) if mask.dtype is torch.bool else not bool(mask.any())


def _is_even(buffer: torch.Tensor) -> bool:
    """Return whether all its numbers are one: then so is every part."""
    return bool((buffer == buffer.flatten()[:1]).all())
