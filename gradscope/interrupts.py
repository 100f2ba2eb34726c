"""Exceptions that are of none of the code that they come out of: what interrupted it has raised them there.

Time limits are made so, by a signal's handler, a function of ``sys.settrace`` or ``sys.setprofile``, or another thread
that raises in this one (``PyThreadState_SetAsyncExc``). Whoever keeps errors of gradscope's own must let these go.
"""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from itertools import pairwise, starmap
from pathlib import Path
from types import FrameType, FunctionType, MethodType, TracebackType
from typing import Any

# What functions of sys.settrace and sys.setprofile are told of.
_EVENTS = frozenset({"call", "line", "return", "exception", "opcode", "c_call", "c_return", "c_exception"})

# Whose code gradscope runs, and whose classes its own errors are of.
_LIBRARIES = frozenset({"gradscope", "numpy", "pandas", "sympy", "torch", "triton", *sys.stdlib_module_names})
_OURS = f"{Path(__file__).parent}/"
_STANDARD = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")


class IgnoringErrors:
    """Go on behind the block where an ``Exception`` comes out of it, unless something has interrupted it."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and not is_interruption(error)


def is_interruption(error: BaseException) -> bool:
    """Check that the error is of what interrupted the code that it came out of.

    It passed through a handler that is registered with :mod:`signal`, or through what was called with a signal's number
    or a tracer's event and the frame that it was called from: the handler may have put another one in its place by now.
    Or it is of a class of the program's while no code of the program's has raised it.
    """
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(frame.f_code in handlers for frame in frames) or any(starmap(_interrupts, pairwise(frames))):
        return True
    return bool(frames) and _is_programs(type(error)) and all(map(_is_librarys, frames))


def _interrupts(interrupted: FrameType, handler: FrameType) -> bool:
    """Check that a frame was given the one that called it, behind a number, or one in front of an event's name.

    A frame that a tracer is told of as it begins or ends is on the way of no exception.
    """
    return any(
        (each is interrupted and type(before) in {int, signal.Signals})
        or (type(before) is FrameType and type(each) is str and each in _EVENTS and not _is_librarys(handler))
        for before, each in pairwise(_given(handler))
    )


def _given(frame: FrameType) -> Sequence[Any]:
    """What a frame's function was called with, as far as that still has its name."""
    code, names = frame.f_code, frame.f_locals
    given = [names.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = names.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += rest if type(rest) is tuple else ()
    return given


def _is_programs(kind: type) -> bool:
    name = type.__getattribute__(kind, "__module__")  # a metaclass may answer in a way of its own
    return type(name) is str and name.partition(".")[0] not in _LIBRARIES


def _is_librarys(frame: FrameType) -> bool:
    """Check that a frame's code is gradscope's, torch's or the interpreter's; of a notebook's it is not."""
    file = frame.f_code.co_filename
    if file.startswith(("<frozen ", "<eval_with_key>", _OURS)):
        return True
    if any(part in file for part in _INSTALLED):
        return any(f"{part}{name}/" in file for part in _INSTALLED for name in ("torch", "numpy", "sympy", "triton"))
    return file.startswith(_STANDARD)


def _code(handler: Any) -> Any:
    """Of a function, a method, or an object whose class has ``__call__``, which is asked nothing; None of others."""
    while type(handler) is functools.partial:
        handler = handler.func
    if type(handler) is MethodType:
        handler = handler.__func__
    elif type(handler) is not FunctionType:
        handler = inspect.getattr_static(type(handler), "__call__", None)
    return handler.__code__ if type(handler) is FunctionType else None
