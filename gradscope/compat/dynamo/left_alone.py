"""What Dynamo is to run as it stands, gradscope's own code, and when it compiles something."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch

from gradscope.compat.dynamo import DYNAMO
from gradscope.compat.imports import once_imported
from gradscope.interrupts import IgnoringErrors

_eager: set[CodeType] = set()  # of what is left alone, once Dynamo is there
_eager_frames: set[CodeType] = set()  # the same, without what it calls


def keep_eager(function: Any) -> None:
    """Let Dynamo run a function, and what it calls, as they are, where code calls it that is not compiled.

    What it traces through on the way, a hook of a module that it compiles say, is not changed: see :func:`untraced`.
    """
    _eager.add(function.__code__)
    if DYNAMO in sys.modules:
        with IgnoringErrors():  # of another torch: watching_dynamo tells of it
            _leave_alone(function.__code__)


def keep_frame_eager(function: Any) -> None:
    """Let Dynamo run a function as it is, but look at what it calls."""
    _eager_frames.add(function.__code__)
    if DYNAMO in sys.modules:
        with IgnoringErrors():
            _leave_alone(function.__code__, inner=False)


def _leave_alone(code: CodeType, *, inner: bool = True) -> None:
    types: Any = sys.modules[f"{DYNAMO}.types"]
    actions = types.FrameAction
    skip = types.FrameExecStrategy(actions.SKIP, actions.SKIP if inner else actions.DEFAULT)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(code, skip)  # type: ignore[attr-defined]


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as Dynamo calls it and never looks into it, for what breaks the graph of itself in any case."""
    called = function

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if called is function:
            # None while another thread imports it.
            disable = getattr(sys.modules.get(DYNAMO), "disable", None)
            if disable is not None:
                called = disable(function)
        return called(*args, **kwargs)

    keep_eager(call)
    return call


class CompiledSteps:
    """A hook of optimizers' steps that breaks no graph: of compiled ones it is told afterwards, by :meth:`take`.

    Dynamo makes of an attribute that is set while it traces one that is set at the end of each run of the graph.
    """

    def __init__(self) -> None:
        self.optimizer: Any = None  # that has stepped in compiled code

    def hook(self, function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        """``function``, for steps that are not compiled."""

        def call(optimizer: Any, args: Any, kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                self.optimizer = optimizer
                return None
            return function(optimizer, args, kwargs)

        keep_eager(call)
        return call

    def take(self) -> Any:
        """The optimizer that has stepped in compiled code since the last time; None for none."""
        found, self.optimizer = self.optimizer, None
        return found


@contextmanager
def watching_dynamo(
    compiling: Callable[[bool], None], failed: Callable[[Exception], None]
) -> Iterator[Callable[[], None]]:
    """Keep away from Dynamo what :func:`keep_eager` was called for, and tell when it compiles, until the block is left.

    Yields what tells of it again where ``torch._dynamo.reset()`` has made Dynamo forget.

    Args:
        compiling: called with True when a compilation begins, of a frame, of the backward pass, or by autotuning; with
            False when that has ended.
        failed: called with an error, where this torch does not have what is used; the program goes on.
    """

    callbacks = _Callbacks(compiling)

    def begin() -> None:
        try:
            for code in _eager:
                _leave_alone(code)
            for code in _eager_frames:
                _leave_alone(code, inner=False)
            callbacks.register(sys.modules[f"{DYNAMO}.callback"].callback_handler)
        except Exception as error:
            failed(error)

    with once_imported(DYNAMO, begin):
        try:
            yield callbacks.again
        finally:
            callbacks.remove()


_RUNNING = "_CompilationCallbackHandler__pending_callbacks_counter"  # how many compilations run
_PATIENCE_S = 1.0  # torch holds the lock while callbacks run


class _Callbacks:
    """Of one watch, in Dynamo's lists."""

    def __init__(self, compiling: Callable[[bool], None]) -> None:
        def begins(_args: Any) -> None:
            compiling(True)

        def ends(_args: Any) -> None:
            try:
                compiling(False)
            except BaseException:  # a signal's handler raises: torch would wait for good for what has ended
                counted = getattr(self._handler, _RUNNING, 0)
                if counted > 0:
                    setattr(self._handler, _RUNNING, counted - 1)  # it counts behind this call
                raise

        self._compiling, self._begins, self._ends = compiling, begins, ends
        self._handler: Any = None

    def register(self, handler: Any) -> None:
        self._handler = handler
        lock = getattr(handler, f"{_RUNNING}_lock", None)
        held = lock is not None and lock.acquire(timeout=_PATIENCE_S)  # else it might end before its begin is told
        try:
            handler.register_start_callback(self._begins)
            handler.register_end_callback(self._ends)
            if held and getattr(handler, _RUNNING, 0):  # another thread compiles already
                self._compiling(True)
        finally:
            if lock is not None and held:
                lock.release()

    def again(self) -> None:
        """Register them where the program has cleared the lists."""
        if self._handler is not None and self._begins not in self._handler.start_callbacks:
            self.remove()
            self.register(self._handler)

    def remove(self) -> None:
        if self._handler is None:
            return
        lists = (self._handler.start_callbacks, self._begins), (self._handler.end_callbacks, self._ends)
        for callbacks, callback in lists:
            if callback in callbacks:  # the program may have cleared them
                callbacks.remove(callback)
