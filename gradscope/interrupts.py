"""Exceptions that are of none of the code that they come out of: what interrupted it has raised them there.

Time limits are made so, by a signal's handler, a function of ``sys.settrace`` or ``sys.setprofile``, or another thread
that raises in this one (``PyThreadState_SetAsyncExc``). Whoever keeps errors of gradscope's own must let these go; and
must keep what objects of the program's raise while gradscope looks at them, of which the program knows nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise, product, starmap
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any

# What functions of sys.settrace and sys.setprofile are told of.
_EVENTS = frozenset({"call", "line", "return", "exception", "opcode", "c_call", "c_return", "c_exception"})

_OURS = f"{Path(__file__).parent}/"
_TORCH = find_spec("torch")  # which is not loaded for this
# Whose code runs where gradscope's own does.
_BESIDE = (_OURS, contextlib.__file__, *([f"{Path(_TORCH.origin).parent}/"] if _TORCH and _TORCH.origin else ()))
_STANDARD = (*{f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")}, "<frozen ")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_GONE = object()  # in the place of a value whose name was deleted
_LIBRARIES = frozenset({"gradscope", "numpy", "sympy", "torch", "triton", *sys.stdlib_module_names})


class IgnoringErrors:
    """Go on behind the block where an ``Exception`` comes out of it, unless something has interrupted it."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and not is_interruption(error)


def is_interruption(error: BaseException, *, in_own_code: bool = False) -> bool:
    """Check that the error is of what interrupted the code that it came out of.

    It passed through a handler that is registered with :mod:`signal`, or through what was called with a signal's number
    or a tracer's event and the frame that it was called from: the handler may have put another one in its place by now.

    Args:
        in_own_code: no object of the program's was looked into. An error of a class of the program's is another
            thread's then, which has no frame on the way.
    """
    handlers = [*filter(None, map(_called, map(signal.getsignal, signal.valid_signals())))]
    trace: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    if any(starmap(_handles, product(frames, handlers))) or any(starmap(_interrupts, pairwise(frames))):
        return True
    return in_own_code and bool(frames) and _is_anothers(error) and all(map(_is_own, frames))


def _handles(frame: FrameType, handler: tuple[CodeType, Any]) -> bool:
    """Check that a frame is that handler's, and no other object's of its class."""
    code, owner = handler
    if frame.f_code is not code:
        return False
    first = next(iter(_given(frame)), _GONE)
    return owner is None or first is owner or first is _GONE


def _interrupts(interrupted: FrameType, handler: FrameType) -> bool:
    """Check that a frame was given the one that called it, behind a number, or one in front of an event's name.

    It must be one of code that gradscope runs: others may hand frames about. One that a tracer is told of as it begins
    or ends is on the way of no exception.
    """
    if _is_own(handler):
        return False
    return any(
        (each is interrupted and type(before) in {int, signal.Signals} and _runs_here(interrupted))
        or (type(before) is FrameType and type(each) is str and each in _EVENTS and _runs_here(before))
        for before, each in pairwise(_given(handler))
    )


def _runs_here(frame: FrameType) -> bool:
    """Check that a frame's code is gradscope's, torch's or the interpreter's."""
    file = frame.f_code.co_filename
    return _is_own(frame) or (file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED))


def _given(frame: FrameType) -> Sequence[Any]:
    """What a frame's function was called with: what its names are now, or that they are gone."""
    code, names = frame.f_code, frame.f_locals
    given = [names.get(name, _GONE) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = names.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], _GONE)
        given += rest if type(rest) is tuple else (rest,)
    return given


def _is_anothers(error: BaseException) -> bool:
    """Check that the error is of a class of the program's, and made of nothing but that: so another thread gives it."""
    kind = type(error)
    name = next((vars(each).get("__module__") for each in kind.__mro__ if "__module__" in vars(each)), None)
    if type(name) is not str or name.partition(".")[0] in _LIBRARIES:
        return False
    makes = [each for each in kind.__mro__ if "__init__" in vars(each) or "__new__" in vars(each)]
    return not error.args and all(each.__module__ == "builtins" for each in makes)


def _is_own(frame: FrameType) -> bool:
    """Check that a frame's code is gradscope's, or torch's, or made for one of gradscope's classes."""
    file = frame.f_code.co_filename
    made_for = frame.f_globals.get("__name__", "")
    return file.startswith(_BESIDE) or (file == "<string>" and str(made_for).startswith("gradscope."))


def _called(handler: Any) -> tuple[CodeType, Any] | None:
    """The code that runs where a handler is called, and whose method that is; None of what has no code of its own.

    Of a function, a method, or an object whose class has ``__call__``, which is asked nothing. What a decorator made
    has none of its own, others share it: that is told by what it was called with.
    """
    owner, seen = None, set[int]()
    while id(handler) not in seen:
        seen.add(id(handler))
        if type(handler) is functools.partial:
            handler = handler.func
        elif type(handler) is MethodType:
            handler, owner = handler.__func__, handler.__self__
        elif type(handler) is not FunctionType:
            handler, owner = inspect.getattr_static(type(handler), "__call__", None), handler
            return (handler.__code__, owner) if type(handler) is FunctionType else None
        elif "__wrapped__" in vars(handler):
            handler = vars(handler)["__wrapped__"]
        else:
            return (handler.__code__, owner) if handler.__closure__ is None else None
    return None  # it wraps itself
