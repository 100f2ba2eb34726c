"""Takes gradscope's modes off torch's stacks while compiled code runs, or is compiled.

Dynamo guards which function modes there are, and compiles nothing below a dispatch mode: with one of ours on the stack
it would compile all code once more, or run it as it stands. Generated code would be traced line by line. Nor are they
put on inside of a compiled function, behind a break of its graph or in what is left alone: Dynamo goes on with the
rest of it without a word.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gradscope.capture.modes import modes_of, put_on, take_off

FOLLOWING = "following torch.compile"  # under which the guard notes an error


class _Held(NamedTuple):
    mode: Any
    place: int | None  # on its stack, from below; None: it was to be put on meanwhile


class _Here:
    """What is so in one thread, for as long as that runs.

    No ``Thread``: of a thread that was not started by ``threading`` asking for it would leave one for good.
    """

    def __init__(self, dynamo: bool) -> None:
        self.dynamo = dynamo  # a compiled function was entered
        self.inside = 0  # of graphs that run, and compilations
        self.held: list[_Held] = []

    @property
    def off(self) -> bool:
        return self.dynamo or self.inside > 0


class _On(NamedTuple):
    mode: Any
    here: weakref.ref[_Here]  # dead once its thread has ended


class Aside:
    """The modes of one run, in each thread on its stacks or aside.

    Args:
        own: tells the modes that are meant.
    """

    def __init__(self, own: Callable[[Any], bool]) -> None:
        self._own = own
        self._threads = threading.local()
        self._entered: set[int] = set()  # threads that were in a compiled function before they were looked at
        self._on: list[_On] = []  # what was entered and not left, of all threads
        self._compiling: list[weakref.ref[_Here]] = []  # where a compilation has begun that has not ended
        self._closed = False

    @property
    def _here(self) -> _Here:
        try:
            here: _Here = self._threads.here
        except AttributeError:
            thread = threading.get_ident()
            here = self._threads.here = _Here(thread in self._entered)
            self._entered.discard(thread)
        return here

    def is_aside(self) -> bool:
        """Check that modes of ours are kept off this thread's stacks now."""
        return self._here.off

    def enter(self, mode: Any) -> None:
        """Put ``mode`` on its stack, in compiled code once that has ended."""
        here = self._here
        self._on.append(_On(mode, weakref.ref(here)))
        if here.off:
            here.held.append(_Held(mode, None))
        else:
            mode.__enter__()

    def leave(self, mode: Any) -> bool:
        """Take ``mode`` off its stack, or forget it where it is aside; False where this thread has it in neither."""
        here = self._here
        held = [each for each in here.held if each.mode is mode]
        for each in held:
            here.held.remove(each)
        if not held and not take_off(mode):
            return False
        self._forget(mode)
        return True

    def _forget(self, mode: Any) -> None:
        self._on = [each for each in self._on if each.mode is not mode]

    def follow(self, entered: bool, thread: int) -> None:
        """A compiled function is entered, or has been left, by this thread; another one is told of once, in advance."""
        if thread != threading.get_ident():
            (self._entered.add if entered else self._entered.discard)(thread)
            return
        here = self._here
        here.dynamo = entered
        self._turn(here)

    def close(self) -> bool:
        """Put on no mode any more. False where another thread has one on, until that is followed again, or ends."""
        self._closed = True
        return not any(each.here() for each in self._on)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around a graph that runs."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def compiling(self, begins: bool) -> None:
        """Dynamo compiles something, or does not any more.

        It counts over all threads: the first tells that it begins, and another one may tell that it has ended.
        """
        if begins:
            self._compiling.append(weakref.ref(self._here))
            self.begin()
            return
        began, self._compiling = self._compiling, []
        for here in filter(None, (each() for each in began)):
            here.inside = max(here.inside - 1, 0)
            if here is self._here:  # else its own thread does that, when it leaves the compiled function
                self._turn(here)

    def begin(self) -> None:
        """A graph is run until :meth:`end` is called."""
        here = self._here
        here.inside += 1
        self._turn(here)

    def end(self) -> None:
        """See :meth:`begin`."""
        here = self._here
        here.inside = max(here.inside - 1, 0)
        self._turn(here)

    def _turn(self, here: _Here) -> None:
        if here.off:
            found = [_Held(mode, place) for place, mode in modes_of(self._own)]
            for each in found:
                take_off(each.mode)
            here.held += found
        else:
            # In the order of their places: each counts those of ours below it.
            held, here.held = here.held, []
            for mode, place in held:
                if self._closed:
                    self._forget(mode)
                else:
                    put_on(mode, place)
