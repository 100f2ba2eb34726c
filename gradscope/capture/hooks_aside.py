"""Takes gradscope's hooks on all modules out of torch's tables where Dynamo reads these.

While anything is compiled, first of all: it would guard which hooks there are, compile all again once ours are gone,
and raise where one goes before its guards are made. Code that was compiled without them runs with them as well. But
where a module has hooks of its own, or the program has some on all modules, or, with some versions, a class has a
``__call__`` of its own, as Hugging Face's checkpointed layers, Dynamo traces through torch's call and guards that there
are none of ours: then they are out from the moment that compiled code is entered until it has returned, and what is
called between the graphs of a function is seen by no hook.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

from gradscope.capture.registry import all_modules
from gradscope.compat import dynamo_reads_hooks, has_hooks, hook_tables, others_global_hooks


class HooksAside:
    """Hooks on all modules, in torch's tables or, while any thread is in compiled code, out of them."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._inside: set[threading.Thread] = set()
        self._away: list[_Away] = []
        self._lock = threading.RLock()  # a signal may come while it is held
        self._compiles = False
        self._entered = False  # any thread has entered compiled code
        self._guarded: bool | None = None  # not known yet
        _asides.add(self)

    @contextmanager
    def holding(self, *register: Callable[[], RemovableHandle]) -> Iterator[None]:
        """Register these hooks; they are removed when the block is left."""
        handles: list[RemovableHandle] = []
        try:
            with self._lock:
                self._put_back()
                handles.extend(each() for each in register)  # those before one that raises, too
                self._handles += handles
                if not self._guarded:  # between steps rather than in one
                    self._guarded = self._is_guarded() if self._entered else None
                self._turn()
            yield
        finally:
            with self._lock:
                self._put_back()
                self._handles = [each for each in self._handles if each not in handles]
                for handle in handles:
                    handle.remove()
                self._turn()

    def follow(self, entered: bool) -> None:
        """A compiled function is entered by this thread, or has been left."""
        with self._lock:
            self._entered = True
            (self._inside.add if entered else self._inside.discard)(threading.current_thread())
            self._put_back()
            self._turn()

    def compiling(self, begins: bool) -> None:
        """Some thread compiles something, or none does any more."""
        with self._lock:
            self._compiles = begins
            self._put_back()
            self._turn()

    def _turn(self) -> None:
        self._inside = {each for each in self._inside if each.is_alive()}
        if self._inside and self._handles and self._guarded is None:
            self._guarded = self._is_guarded()
        if self._compiles or (self._inside and self._guarded):
            ids = {each.id for each in self._handles}
            self._away = [_Away(table, ids) for handle in self._handles for table in hook_tables(handle)]

    def _put_back(self) -> None:
        for each in reversed(self._away):
            each.put_back()
        self._away = []

    def _is_guarded(self) -> bool:
        """Check that Dynamo guards which hooks there are. Ours are in torch's tables."""
        own = {each.id for each in self._handles}
        return dynamo_reads_hooks() or others_global_hooks(own) or any(map(has_hooks, all_modules()))

    def forked(self) -> None:
        """This process is a child, without the thread that may have held the lock."""
        self._lock = threading.RLock()


_asides: weakref.WeakSet[HooksAside] = weakref.WeakSet()


def _after_fork() -> None:
    for aside in _asides:
        aside.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)  # before the session's, which takes the hooks out


class _Away:
    """Our entries of one table, taken out of it."""

    def __init__(self, table: Any, ids: set[int]) -> None:
        self._table, self._before = table, list(table.items())
        self._mine = [(key, hook) for key, hook in self._before if key in ids]
        for key, _ in self._mine:
            del table[key]

    def put_back(self) -> None:
        """At their places, where the table is otherwise as it was; else behind what is there."""
        others = [key for key, _ in self._before if key not in dict(self._mine)]
        if list(self._table) == others:
            self._table.clear()
            self._table.update(self._before)
        else:
            self._table.update(self._mine)
