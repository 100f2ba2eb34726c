"""Keeps gradscope's modes and the user's apart on torch's stacks.

Torch takes off what lies on top, whoever leaves. A phase begins and ends in the middle of the user's loop: a ``with``
block of theirs, around a step or around the loop, may be left while a mode of ours lies above theirs, and may be
entered and still be open when ours is to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.compat import default_device_mode, dispatch_modes, function_modes

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


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def run_operation(func: Any, args: Any, kwargs: Any) -> Any:
    """Run what a mode of ``__torch_dispatch__`` is handed.

    Torch hands a constant of a graph that ``torch.jit`` has traced as a number, which most operations do not take for
    themselves: to print such a graph needs none of them alone.
    """
    try:
        return func(*args, **(kwargs or {}))
    except RuntimeError:
        number = _NUMBERS.get(type(args[0])) if args else None
        if number is None or not isinstance(func._schema.arguments[0].type, torch.TensorType):
            raise
        return func(torch.scalar_tensor(args[0], dtype=number, device="cpu"), *args[1:], **(kwargs or {}))


def modes_of(own: Callable[[Any], bool]) -> list[tuple[int, Any]]:
    """The modes of this thread that are ``own``, lowest first, each with its place on its stack."""
    return [(place, mode) for modes in _STACKS.values() for place, mode in enumerate(modes()) if own(mode)]


def put_on(mode: Any, place: int | None = None) -> None:
    """Put ``mode`` onto its stack, on top, or where as many lie below it as once did."""
    kind = _kind(mode)
    modes = _STACKS[kind]()
    if place == 0 and modes and modes[0] is default_device_mode():
        place = 1  # torch looks for it at the bottom
    above = [] if place is None else modes[place:][::-1]
    for other in above:
        kind.__exit__(other, None, None, None)
    kind.__enter__(mode)
    for other in reversed(above):
        kind.__enter__(other)


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
