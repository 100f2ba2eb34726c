"""Weak references to tensors, which do not keep a program from swapping what two tensors are.

``torch.utils.swap_tensors`` refuses a tensor that a weak reference leads to, and ends with it what torch swaps by
itself: ``module.to()`` and ``load_state_dict`` of DTensors and of quantized weights. So it is told of while there are
references of ours, which let go of the tensors before.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch

from gradscope.trampoline import can_be_told_of, is_told_of, tell

_MOST_LOOKED_AT = 100_000  # objects


def _torchs_own(function: Any) -> Any:
    """The function itself, also where a program has put one of its own in its place by now, which leads to it."""
    near, seen = [function], set[int]()
    while near and len(seen) < _MOST_LOOKED_AT:
        for each in near:
            if _is_torchs(each):
                return each
        seen.update(map(id, near))
        near = [
            each for each in gc.get_referents(*near) if id(each) not in seen and type(each) not in {ModuleType, type}
        ]
    return function


def _is_torchs(function: Any) -> bool:
    code = function.__code__ if type(function) is FunctionType else None
    return code is not None and (code.co_filename, code.co_name) == (torch.utils.__file__, "swap_tensors")


_SWAP: Any = _torchs_own(torch.utils.swap_tensors)


class TensorRef:
    """Leads to a tensor while it lives and is what it was, as :func:`tensor_ref` made it."""

    __slots__ = ("__weakref__", "_counts", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counts = False
        self._tensor: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        _swaps.references += 1
        self._counts = True  # no signal's handler is called between these two

    def __call__(self) -> torch.Tensor | None:
        return self._tensor()

    def let_go(self) -> None:
        """Lead to nothing from now on."""
        self._tensor = _nothing

    def __del__(self) -> None:
        with _swaps.lock:
            _swaps.references -= getattr(self, "_counts", False)  # a signal may have come before it was made
            if not _swaps.references:
                _swaps.end()


class _Swaps:
    """``torch.utils.swap_tensors``, told of as long as there are references.

    Attributes:
        references: how many there are.
        seen: how often the program has called it meanwhile.
        before: what else is told before it swaps.
    """

    def __init__(self) -> None:
        self.references = self.seen = 0
        self.before: list[Callable[[], None]] = []
        self.lock = threading.RLock()  # a collection may come while it is held
        self._undo: Callable[[], None] | None = None

    def begin(self) -> None:
        """Be told of swaps: there is a first reference."""
        if can_be_told_of(_SWAP) and not is_told_of(_SWAP):
            self._undo = tell(_SWAP, _let_go, lambda *_: None)

    def end(self) -> None:
        """Be told of none: there are no references any more."""
        if self._undo is not None:
            self._undo()
            self._undo = None


_swaps = _Swaps()
_refs: weakref.WeakValueDictionary[int, TensorRef] = weakref.WeakValueDictionary()  # by id of the tensor


def tensor_ref(tensor: torch.Tensor) -> TensorRef:
    """A weak reference to a tensor: the same one for all that ask while somebody holds it."""
    with _swaps.lock:  # of two that are made at once one would be let go of
        known = _refs.get(id(tensor))
        if known is None or known._tensor() is not tensor:  # a recorded step asks for each of its tensors
            if not _swaps.references:
                _swaps.begin()
            known = _refs[id(tensor)] = TensorRef(tensor)
        return known


def swaps_seen() -> int:
    """Return how often tensors were swapped in this process while there were references."""
    return _swaps.seen


@contextmanager
def before_swaps(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before each swap that is seen until the block is left."""
    _swaps.before.append(act)
    try:
        yield
    finally:
        _swaps.before.remove(act)


def _nothing() -> None:
    return None


def _let_go(*tensors: Any) -> bool:
    _swaps.seen += 1
    for act in list(_swaps.before):
        act()
    with _swaps.lock:
        for tensor in tensors:
            known = _refs.pop(id(tensor), None)
            if known is not None and known() is tensor:
                known.let_go()
    return False
