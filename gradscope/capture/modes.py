"""Keeps gradscope's modes and the user's apart on torch's stacks of modes.

Torch takes off what lies on top, whoever leaves. A phase begins and ends in the middle of the user's loop: a ``with``
block of theirs, around a step or around the loop, may be left while a mode of ours lies above theirs, and may be
entered and still be open when ours is to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.compat import dispatch_modes, function_modes

_STACKS: dict[type[Any], Callable[[], list[Any]]] = {
    TorchFunctionMode: function_modes,
    TorchDispatchMode: dispatch_modes,
}


def take_off(mode: Any) -> bool:
    """Take ``mode`` off this thread's stack, from below others too; False where it does not lie there now."""
    kind = _kind(mode)
    above = []
    for other in reversed(_STACKS[kind]()):
        if other is mode:
            break
        above.append(other)
    else:
        return False
    for other in (*above, mode):
        kind.__exit__(other, None, None, None)
    for other in reversed(above):
        kind.__enter__(other)
    return True


@contextmanager
def letting_others_leave(own: Callable[[Any], bool]) -> Iterator[None]:
    """Inside the block a mode that is left is taken off itself, also where modes that are ``own`` lie above it."""
    with ExitStack() as stack:
        for kind in _STACKS:
            stack.enter_context(_leaving(kind, own))
        yield


@contextmanager
def _leaving(kind: Any, own: Callable[[Any], bool]) -> Iterator[None]:
    original = kind.__exit__

    def leave(self: Any, *exc: Any) -> Any:
        above: list[Any] = []
        if not own(self):
            modes = _STACKS[kind]()
            while modes and own(modes[-1]):
                above.append(modes.pop())
        for mode in above:
            original(mode, None, None, None)
        try:
            return original(self, *exc)
        finally:
            for mode in reversed(above):
                kind.__enter__(mode)

    kind.__exit__ = leave
    try:
        yield
    finally:
        if kind.__exit__ is leave:
            kind.__exit__ = original


def _kind(mode: Any) -> type[Any]:
    return TorchFunctionMode if isinstance(mode, TorchFunctionMode) else TorchDispatchMode
