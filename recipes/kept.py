"""What a tensor's content says, looked at once for each content and kept as long as the tensor lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Verdicts by the tensor that holds the content; forgotten with it.
_known: dict[int, tuple[weakref.ref[Tensor], dict[tuple[Any, ...], bool]]] = {}


def kept(tensor: Tensor, question: tuple[Any, ...], look: Callable[[], bool], *, unseen: bool) -> bool:
    """``look()``, once for each version and view of ``tensor``.

    Args:
        tensor: strided, of real data; no tensor of inference mode, which counts no versions.
        question: what is asked, where several things are.
        unseen: the answer for a tensor on a GPU at its first use, and while a graph is captured: one that is made anew
            in every step costs no synchronisation.
    """
    held = tensor if tensor._base is None else tensor._base
    known = _known.get(id(held))
    if known is None or known[0]() is not held:
        known = _known[id(held)] = (weakref.ref(held, partial(_forget, id(held))), {})
        if tensor.is_cuda:
            return unseen
    verdicts = known[1]
    content = (held._version, held.data_ptr())  # `held.data = other` keeps the version
    key = (content, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, *question)
    verdict = verdicts.get(key)
    if verdict is None:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return unseen
        if any(each[0] != content for each in verdicts):
            verdicts.clear()
        verdict = verdicts[key] = look()
    return verdict


def _forget(key: int, gone: weakref.ref[Tensor]) -> None:
    if key in _known and _known[key][0] is gone:
        del _known[key]
