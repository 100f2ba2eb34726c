"""Keeps gradscope's modes and the user's apart on torch's stacks, and does without torch.compile.

Torch takes off what lies on top, whoever leaves. A phase begins and ends in the middle of the user's loop: a ``with``
block of theirs, around a step or around the loop, may be left while a mode of ours lies above theirs, and may be
entered and still be open when ours is to go.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.capture.byhand import unwrapped
from gradscope.capture.callers import stack
from gradscope.capture.modules import no_compile_warning
from gradscope.compat import DYNAMO, default_device_mode, dispatch_modes, function_modes, once_imported

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


def uses_compile(modules: Iterable[nn.Module], compiled_before: int) -> bool:
    """Check that compiled code ran in these steps: compiled modules, compiled functions in reach, or a compilation."""
    if compiled_frames() > compiled_before:
        return True
    return any(
        is_compiled_module(module) or any(is_compiled(value) for value in _globals_of(module)) for module in modules
    )


def is_compiled_module(module: nn.Module) -> bool:
    """Check that ``module.compile()`` was called, or that it is what ``torch.compile`` made of a module."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def compiled_frames() -> int:
    """Frames that Dynamo has looked at so far; 0 where it was never loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """What torch.compile made runs as the user wrote it, and nothing is compiled, until the block is left.

    A mode of ours around compiled code would be compiled into it.
    """
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled, and to ask for this would load all of it
        yield
        return
    with torch.compiler.set_stance("force_eager"), no_compile_warning():
        yield


@contextmanager
def never_compiled() -> Iterator[None]:
    """:func:`uncompiled` around a whole program, which may have yet to import Dynamo."""
    with ExitStack() as eager, once_imported(DYNAMO, lambda: eager.enter_context(uncompiled())):
        yield


def compiled_by(innermost: FrameType) -> FrameType | None:
    """The nearest frame of what torch.compile made around a function, also inside :func:`uncompiled`; None for none."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_TorchDynamoContext", None)
    if kind is None:
        return None
    wrappers = {id(each) for each in kind.__call__.__code__.co_consts}
    return next((frame for frame in stack(innermost) if id(frame.f_code) in wrappers), None)


def is_compiled(value: Any) -> bool:
    """Check that it is what torch.compile made of a function."""
    try:
        # Not getattr: a global of the user's may compute something, or raise, when it is asked for an attribute.
        held = object.__getattribute__(value, "__dict__")
        return "_torchdynamo_orig_callable" in held and "_torchdynamo_disable" not in held  # which has it too
    except (AttributeError, TypeError):
        return False


def _globals_of(module: nn.Module) -> list[Any]:
    function = unwrapped(inspect.getattr_static(type(module), "forward", None))
    return list(getattr(function, "__globals__", {}).values())
