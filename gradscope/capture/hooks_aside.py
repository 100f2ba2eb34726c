"""Takes gradscope's hooks on all modules out of torch's tables where Dynamo reads these.

While anything is compiled, first of all: it would guard which hooks there are, compile all again once ours are gone,
and raise where one goes before its guards are made. Code that was compiled without them runs with them as well. But
where a module has hooks of its own, or the program has some on all modules, or, with some versions, a class has a
``__call__`` of its own, as Hugging Face's checkpointed layers, Dynamo traces through torch's call and guards that there
are none of ours: then they are out from the moment that compiled code is entered until it has returned, and what is
called between the graphs of a function is seen by no hook.

Other threads may go through the table meanwhile. While hooks of ours are in it torch is given a copy of it to go
through, so that they may go at any time; and they come once nobody goes through the table itself any more.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle

from gradscope.capture.registry import all_modules
from gradscope.compat import (
    dynamo_reads_hooks,
    goes_through_hooks,
    hooks_made,
    keep_hooks_steady,
    others_global_hooks,
    reads_hooks_of,
    remove_global_hooks,
)
from gradscope.process import RoomForCalls

_WAITS, _WAIT_S = 50, 0.001


class HooksAside:
    """Hooks on all modules, registered or, while Dynamo may read torch's tables, not."""

    def __init__(self) -> None:
        self.room = RoomForCalls()  # for the frames of hooks
        self._hooks: list[_Hook] = []
        self._functions: list[Callable[..., Any]] = []  # of all that there have been
        self._inside: set[int] = set()  # threads, by their ident
        self._lock = threading.RLock()  # a signal may come while it is held
        self._compiles = False
        self._compiled = False  # anything was since this began
        self._away = 0  # for how many it is to be as if there were none
        self._entered = False  # any thread has entered compiled code
        self._until_compiled: list[ExitStack] = []
        self._guarded: bool | None = None  # not known yet
        self._made = 0  # handles of ours so far
        self.looks = 0  # at all modules, which takes as long as a step
        self._none_among: int | None = None  # of others' handles, when no module had hooks
        _asides.add(self)

    @contextmanager
    def holding(self, *register: partial[RemovableHandle]) -> Iterator[None]:
        """Have these hooks until the block is left, each by what registers it, whose first argument it is."""
        mine = [_Hook(each) for each in register]
        self._functions += [each.function for each in mine]
        try:
            with self._lock:
                if self._entered and not self._guarded:  # between steps rather than in one
                    self._guarded = self._is_guarded()
                self._hooks += mine
                self._turn()
            self._wait_for_others()
            yield
        finally:
            with self._lock:
                self._hooks = [each for each in self._hooks if each not in mine]
                for each in mine:
                    each.take_out()
                remove_global_hooks([each.function for each in mine])
                if not self._hooks:
                    keep_hooks_steady(False)

    @contextmanager
    def until_compiled(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Have ``context`` until the block is left, but not from where any thread compiles, or enters compiled code.

        For what Dynamo would guard: a ``forward`` with other code than before.
        """
        mine = ExitStack()
        try:
            with self._lock:
                if not self._compiled and not self._entered:
                    self._until_compiled.append(mine)
                    mine.enter_context(context)
            yield
        finally:
            with self._lock:
                mine.close()
                self._until_compiled = [each for each in self._until_compiled if each is not mine]

    def _leave_for_good(self) -> None:
        leaving, self._until_compiled = self._until_compiled, []
        for each in leaving:
            each.close()

    def follow(self, entered: bool, thread: int) -> None:
        """A compiled function is entered by the thread of that ident, or has been left."""
        with self._lock:
            self._entered = True
            self._leave_for_good()
            (self._inside.add if entered else self._inside.discard)(thread)
            self._turn()

    def compiling(self, begins: bool) -> None:
        """Some thread compiles something, or none does any more."""
        with self._lock:
            self._compiles = begins
            self._compiled = True
            self._leave_for_good()
            if not begins and not self._guarded:
                self._guarded = None  # what was compiled may have hooks by now
            self._turn()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Have no hooks until the block is left, nor what Dynamo would guard from here on."""
        with self._lock:
            self._away += 1
            self._compiled = True
            self._leave_for_good()
            self._turn()
        try:
            yield
        finally:
            with self._lock:
                self._away -= 1
                self._turn()

    def step(self) -> None:
        """A step begins: hooks that others kept from coming may come."""
        with self._lock:
            self._turn()

    def end(self) -> None:
        """No hook is to be there any more: a signal's handler may have raised while one was put in."""
        with self._lock:
            self._hooks, functions = [], self._functions
            self._functions = []
            remove_global_hooks(functions)
            keep_hooks_steady(False)
            self._leave_for_good()

    def are_read(self) -> None:
        """Dynamo has been seen to guard which hooks there are."""
        self._guarded = True

    @property
    def is_guarded(self) -> bool:
        """Whether there are none where compiled code is entered, as far as is known."""
        return bool(self._guarded)

    def _turn(self) -> None:
        self._inside.intersection_update(sys._current_frames())  # the others have ended
        if self._inside and self._hooks and self._guarded is None and not self._compiles:
            self._guarded = self._is_guarded()
        if not self._may_be_in():
            for each in self._hooks:
                each.take_out()
            keep_hooks_steady(False)
        elif any(each.handle is None for each in self._hooks):
            keep_hooks_steady(True)
            if not goes_through_hooks():  # else they come at the next turn
                for each in self._hooks:
                    self._made += each.put_in()

    def _may_be_in(self) -> bool:
        return not self._compiles and not self._away and not (self._inside and self._guarded)

    def _wait_for_others(self) -> None:
        """Wait for threads that go through the table, for as long as the program's hooks take."""
        for _ in range(_WAITS):
            with self._lock:
                if not self._may_be_in() or all(each.handle is not None for each in self._hooks):
                    return
                self._turn()
            time.sleep(_WAIT_S)

    def _is_guarded(self) -> bool:
        """Check that Dynamo guards which hooks there are."""
        own = {each.handle.id for each in self._hooks if each.handle is not None}
        if dynamo_reads_hooks() or others_global_hooks(own):
            return True
        made = hooks_made()
        others = None if made is None else made - self._made
        if others is not None and others == self._none_among:
            return False  # to look at all objects takes a second where there are millions
        self.looks += 1
        found = any(map(reads_hooks_of, all_modules()))
        self._none_among = None if found else others
        return found

    def forked(self) -> None:
        """This process is a child, without the thread that may have held the lock."""
        self._lock = threading.RLock()


class _Hook:
    """One of ours. It never touches others' entries: other threads call these meanwhile."""

    def __init__(self, register: partial[RemovableHandle]) -> None:
        self._register = register
        self.function: Callable[..., Any] = register.args[0]
        self.handle: RemovableHandle | None = None  # None: it is not registered

    def put_in(self) -> bool:
        """Register it; False where it is."""
        if self.handle is not None:
            return False
        try:
            self.handle = self._register()
        except BaseException:  # a signal's handler raises: nobody has the handle
            remove_global_hooks([self.function])
            raise
        return True

    def take_out(self) -> None:
        """Remove it."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


_asides: weakref.WeakSet[HooksAside] = weakref.WeakSet()


def _after_fork() -> None:
    for aside in _asides:
        aside.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)  # before the session's, which takes the hooks out
