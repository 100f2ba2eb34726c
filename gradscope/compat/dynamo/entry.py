"""When a thread enters a function that torch.compile made, and when it has left the outermost one."""

from __future__ import annotations

import dis
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

from gradscope.compat.dynamo import DYNAMO
from gradscope.compat.dynamo.compiled import wrapper_codes
from gradscope.compat.dynamo.left_alone import keep_eager, keep_frame_eager
from gradscope.compat.dynamo.versions import compiler_stance, is_forced_eager, is_switched_off
from gradscope.compat.engine import items_of_now
from gradscope.compat.imports import once_imported
from gradscope.compat.private import surrounded
from gradscope.trampoline import can_be_told_of, is_told_of, surround


@contextmanager
def following_dynamo(
    follow: Callable[[bool, int], None],
    ahead: Callable[[], AbstractContextManager[None]],
    captures: Callable[[], AbstractContextManager[None]],
    failed: Callable[[Exception], None],
) -> Iterator[None]:
    """Tell when a thread enters a compiled function, and when it has left the outermost one, until the block is left.

    Also of functions in there that Dynamo leaves alone nothing is told: it goes on looking once these have returned.

    Args:
        follow: called with True before, and with False behind it, and the ident of the thread; at first of each thread
            that is in one already.
        ahead: made around each call of what was compiled ahead of time, which looks at its guards itself.
        captures: made around what looks for a module's hooks, to export it say, and around what traces it then: of that
            Dynamo tells nobody.
        failed: as of :func:`watching_dynamo`.
    """
    with ExitStack() as stack:

        def guarded(enter: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
            def begin() -> None:
                try:
                    stack.enter_context(enter())
                except Exception as error:
                    failed(error)

            return begin

        frames = f"{DYNAMO}.eval_frame"
        stack.enter_context(once_imported(DYNAMO, guarded(lambda: _following(sys.modules[frames], follow))))
        module = f"{DYNAMO}.aot_compile"
        stack.enter_context(once_imported(module, guarded(lambda: _around_ahead(sys.modules[module], ahead))))
        for name in _CAPTURES:
            enter = partial(_around_captures, name, captures)
            stack.enter_context(once_imported(name, guarded(enter)))
        yield


_FOLLOWED = ("set_eval_frame", "_maybe_set_eval_frame")
_CAPTURES = (f"{DYNAMO}.convert_frame", f"{DYNAMO}.functional_export")  # the second has names of the first as its own


def probe_entry() -> None:
    """Look for what is followed here, in Dynamo, which is imported for that.

    Raises:
        AttributeError, ImportError: this torch lacks something; what runs between graphs has no lines and FLOPs then.
    """
    frames = importlib.import_module(f"{DYNAMO}.eval_frame")
    wrappers()
    for name in _FOLLOWED:
        getattr(frames, name)


class _Wrapper(NamedTuple):
    """The code that torch.compile puts around a function: up to where it opens, and where it calls the function."""

    opens: int  # the first of its bytes that is behind the call of set_eval_frame that opens it
    # The bytes of the call of _maybe_set_eval_frame in front of the function; every other one is behind it.
    calls: range


class _Outermost(threading.local):
    """The call of a compiled function, of each thread, inside of which all others are."""

    frame = 0  # its id; 0: none
    known = False  # whether the thread was in one when it was first looked at


@contextmanager
def _following(frames: Any, follow: Callable[[bool, int], None]) -> Iterator[None]:
    """What torch.compile makes of a function calls ``set_eval_frame`` first of all.

    It calls ``_maybe_set_eval_frame`` in front of the function and last of all, wherever it returns.
    """
    calls = _Calls(follow)
    before = {name: getattr(frames, name) for name in _FOLLOWED}

    def set_eval_frame(callback: Any) -> Any:
        calls.opens(sys._getframe(1))
        return before["set_eval_frame"](callback)

    def maybe_set_eval_frame(callback: Any) -> Any:
        try:
            calls.closes(sys._getframe(1))
        finally:  # a limit of the program's may come there
            earlier = before["_maybe_set_eval_frame"](callback)
        return earlier

    ours = dict(zip(before, (set_eval_frame, maybe_set_eval_frame), strict=True))
    calls.look(sys._getframe())
    for name, function in ours.items():
        keep_frame_eager(function)  # with what it calls, the callback would be put back that it sets
        setattr(frames, name, function)
    try:
        calls.look_at_others()
        yield
    finally:
        for name, function in ours.items():
            if getattr(frames, name) is function:
                setattr(frames, name, before[name])


class _Calls:
    """Tells of the outermost compiled function that each thread is in."""

    def __init__(self, follow: Callable[[bool, int], None]) -> None:
        self._follow = follow
        self._wrappers = wrappers()
        self._here = _Outermost()

    def look(self, frame: FrameType | None) -> None:
        """Find the compiled function that this thread was in before anything was followed."""
        self._here.known = True
        self._here.frame = self._outermost(frame)
        if self._here.frame:
            self._follow(True, threading.get_ident())

    def look_at_others(self) -> None:
        """Find the threads that were in one: each looks at itself when it enters another, or has left it."""
        here = threading.get_ident()
        inside = {thread: self._outermost(frame) for thread, frame in sys._current_frames().items() if thread != here}
        for thread, outermost in inside.items():
            if outermost:
                self._follow(True, thread)
                # It may have told of itself that it has left it before that.
                if self._outermost(sys._current_frames().get(thread)) != outermost:
                    self._follow(False, thread)

    def _outermost(self, frame: FrameType | None) -> int:
        """The id of the outermost frame around a compiled function, from ``frame`` on; 0 for none."""
        found = 0
        while frame is not None:
            if id(frame.f_code) in self._wrappers:
                found = id(frame)
            frame = frame.f_back
        return found

    def opens(self, frame: FrameType) -> None:
        """``frame`` has called ``set_eval_frame``."""
        wrapper, here = self._wrappers.get(id(frame.f_code)), self._here
        if wrapper is None or frame.f_lasti >= wrapper.opens:
            return
        if not here.known:
            self.look(frame.f_back)
        # One that ended in another way may have lain at the same address, or another frame may lie there now.
        outermost = here.frame in (0, id(frame)) or not self._is_below(frame, here.frame)
        if outermost and not is_forced_eager() and not is_switched_off():
            here.frame = id(frame)
            self._follow(True, threading.get_ident())

    def _is_below(self, frame: FrameType, outer: int) -> bool:
        above = frame.f_back
        while above is not None:
            if id(above) == outer and id(above.f_code) in self._wrappers:
                return True
            above = above.f_back
        return False

    def closes(self, frame: FrameType) -> None:
        """``frame`` has called ``_maybe_set_eval_frame``."""
        if not self._here.known:
            self.look(frame)
        if self._here.frame == id(frame) and frame.f_lasti not in self._wrappers[id(frame.f_code)].calls:
            self._here.frame = 0
            self._follow(False, threading.get_ident())


@contextmanager
def _around_ahead(module: Any, ahead: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    kind = getattr(module, "AOTCompiledFunction", None)
    if kind is None:  # of another torch
        yield
        return
    with surrounded(kind, "__call__", ahead):
        yield


@contextmanager
def _around_captures(module: str, captures: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("get_traced_fn", "fullgraph_capture"):
            function = getattr(sys.modules[module], name, None)  # None: of another torch
            if can_be_told_of(function) and not is_told_of(function):
                stack.callback(surround(function, captures))
        yield


for _each in (
    items_of_now,
    compiler_stance,
    is_forced_eager,
    is_switched_off,
    _Calls._is_below,
    _Calls.opens,
    _Calls.closes,
    _Calls.look,
    _Calls._outermost,
):
    keep_eager(_each)


def wrappers() -> dict[int, _Wrapper]:
    """What torch.compile puts around functions, by the id of its code.

    Raises:
        AttributeError: it does not call what it is followed by.
    """
    found = {}
    for code in wrapper_codes():
        loads = [each for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
        opens = [each.offset for each in loads if each.argval == "set_eval_frame"]
        names = [each.argval for each in loads]
        if len(opens) > 1 and ("_maybe_set_eval_frame", "_callback_from_stance") in pairwise(names):
            place = list(pairwise(names)).index(("_maybe_set_eval_frame", "_callback_from_stance"))
            found[id(code)] = _Wrapper(opens[1], range(loads[place].offset, loads[place + 2].offset))
    if not found:
        raise AttributeError(f"{DYNAMO}.eval_frame._TorchDynamoContext calls compiled functions in another way")
    return found
