"""What gradscope asks of its process: room for files, an end for forked children, stops put off, warnings left out.

Data loaders that leak descriptors run into the soft limit in the middle of training. gradscope loads parts of torch and
of its own then, and writes files at the end: for as long as that takes the limit is raised, towards the hard one.

Kineto keeps a thread of its own from its first start on. A fork has no such thread, but it has what the thread waited
on, and the destructor of that waits for it: a child that ends by itself, not by ``os._exit``, never would (torch 2.13).

``warnings.catch_warnings`` and ``filterwarnings`` make it forget: every warning of the user's that is shown once a
place would come again, once for each time that gradscope did so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import operator
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, compress, starmap
from typing import Any

resource: Any
try:
    import resource
except ImportError:  # not on Windows, which has no such limit
    resource = None

_MORE = 64


def rank_of_process() -> tuple[int, int] | None:
    """This process's rank and how many there are, as ``torchrun`` tells its children; None where it is alone."""
    try:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, ranks) if 0 <= rank < ranks and ranks > 1 else None


def local_ranks(rank: int, ranks: int) -> range:
    """The ranks whose files this rank can see: those of its machine, as ``torchrun`` numbers them."""
    try:
        mine, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return range(ranks)
    first = rank - mine
    return range(first, min(first + here, ranks)) if 0 <= first < ranks and here > 0 else range(ranks)


@contextlib.contextmanager
def room_for_files() -> Iterator[None]:
    """Let the process have a few more files open until the block is left, where the hard limit allows it."""
    if resource is None:
        yield
        return
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = soft + _MORE if hard == resource.RLIM_INFINITY else min(soft + _MORE, hard)
    if soft == resource.RLIM_INFINITY or not _set(most, hard):
        yield
        return
    try:
        yield
    finally:
        # Code of the user's that set a limit of its own in the meantime keeps that.
        if resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard):
            _set(*before)


def _set(soft: int, hard: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        return False
    return True


class _Depth:
    """How deep Python lets code recurse, as it was set here last: who asks first for room may be done with it first."""

    set_here: int | None = None
    theirs = 0  # how often the program was seen to have set another one: that has no room of ours in it


@contextlib.contextmanager
def room_for_frames(more: int) -> Iterator[None]:
    """Let code recurse so many frames deeper until the block is left.

    Code of the user's that sets a limit of its own in the meantime keeps that.
    """
    before = sys.getrecursionlimit()
    if before != _Depth.set_here:
        _Depth.theirs += 1
    given, theirs = False, _Depth.theirs
    with contextlib.suppress(OverflowError):
        sys.setrecursionlimit(before + more)
        given, _Depth.set_here = True, before + more
    try:
        yield
    finally:
        if given and theirs == _Depth.theirs and sys.getrecursionlimit() == _Depth.set_here:
            with contextlib.suppress(RecursionError):  # the stack is deeper now than it was allowed to be
                sys.setrecursionlimit(_Depth.set_here - more)
                _Depth.set_here -= more


class RoomForCalls:
    """Lets code recurse deeper where calls lie so deep in each other that the frames of hooks would be too many.

    A program that never gets :attr:`AHEAD` calls deep has the depth that it set. So has a thread whose stack may be
    smaller than the main one's: what Python's own limit keeps from overflowing would overflow at another.
    """

    AHEAD = 32  # there is room for as many calls more; to be asked for at every multiple
    _BESIDE = 101  # frames on top of all calls

    def __init__(self, each: int = 1) -> None:
        """``each``: the frames that are added to each call; fewer than a call takes, else what has no end gets none."""
        self._each = each
        self._given = 0
        self._theirs = 0  # as it was when they were
        self._room = contextlib.ExitStack()

    def make(self, depth: int) -> None:
        """There are as many calls in each other now, on this thread."""
        wanted = self._BESIDE + self._each * (depth + self.AHEAD)
        if sys.getrecursionlimit() != _Depth.set_here or self._theirs != _Depth.theirs:
            self._given = 0  # the program has set a limit of its own
        if wanted > self._given and _has_a_whole_stack():
            self._room.enter_context(room_for_frames(wanted - self._given))
            self._given, self._theirs = wanted, _Depth.theirs

    def close(self) -> None:
        """Have the depth again that the program set."""
        self._room.close()
        self._given = 0


def _has_a_whole_stack() -> bool:
    """Check that this thread's is as large as the main thread's."""
    if threading.get_ident() == threading.main_thread().ident:  # to ask for a thread of C's would make an object for it
        return True
    return sys.platform == "linux" and threading.stack_size() == 0


@contextlib.contextmanager
def stops_put_off() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM to the end of the block, so that what was measured can be read; only the first one.

    What handles them is called then, at a second one at once. Nothing is put off where a signal ends the process as the
    system does it, and in threads other than the main one, which get none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def later(number: int, frame: Any) -> None:
        if waiting:
            waiting.clear()
            _handle(before[signal.Signals(number)], number, frame)
        else:
            waiting.append(number)

    ours = [number for number, handler in before.items() if callable(handler)]
    for number in ours:
        signal.signal(number, later)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is later:
                signal.signal(number, before[number])
        for each in waiting:  # also where the block failed: a stop is never lost
            _handle(before[signal.Signals(each)], each, None)


def _handle(handler: Any, number: int, frame: Any) -> None:
    if callable(handler):
        handler(number, frame)


_TOLD_S = 5.0  # until the user is told for what the end of a process waits
_THREADS_S = 30.0  # until it does no longer: for threads of the program's
_EXITING_S = 120.0  # for what it has registered to run at the end, such as what sends off a log
_ended_early = False


def note_ended_early() -> None:
    """A program that this process ran was ended before its own end."""
    global _ended_early
    _ended_early = True


def leave_all_the_same(code: int, say: Callable[[str], None]) -> None:
    """Where a program was ended early, see to it that this process ends, with this exit code, once Python ends it.

    Python waits at its end for threads and processes that are not daemons, and for exit functions. What waits for
    something that the rest of the program would have done never ends.
    """
    global _ended_early
    if _ended_early:
        _ended_early = False
        threading.Thread(target=_watch_end, args=(code, say), daemon=True, name="gradscope-leave").start()


def _python_ends() -> bool:
    """Check that the interpreter is on its way out, and waits for threads or runs exit functions."""
    return bool(getattr(threading, "_SHUTTING_DOWN", False)) or not threading.main_thread().is_alive()


def _watch_end(code: int, say: Callable[[str], None]) -> None:
    while not _python_ends():  # a caller of the command line may go on
        time.sleep(0.1)
    began = time.monotonic()
    told = False
    while (spent := time.monotonic() - began) < (_THREADS_S if threads_left() else _EXITING_S):
        if spent > _TOLD_S and not told:
            told = True
            say(f"waiting for {_what_holds()}")
        time.sleep(min(_TOLD_S, 1.0) / 10)
    if threads_left():  # else they are what does not end
        cleaning = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        cleaning.start()
        cleaning.join(_EXITING_S - _THREADS_S)
    say(f"{_what_holds()} did not end: the program was stopped before it told it to. Ended with the process")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def threads_left() -> list[str]:
    """Names of the threads that Python waits for at its end."""
    main = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]


def _what_holds() -> str:
    threads, multiprocessing = threads_left(), sys.modules.get("multiprocessing")
    children = [] if multiprocessing is None else multiprocessing.active_children()
    if threads:
        return f"{_counted('thread', threads)} of the program's own"
    if children:
        return f"{_counted('process', [child.name for child in children])} of the program's own"
    return "a function that the program has registered for its end"


def _counted(what: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"the {what} {names[0]},"
    plural = "processes" if what == "process" else f"{what}s"
    return f"{len(names)} {plural} ({names[0]}, ...)"


_profiler_ran = False


def note_profiler() -> None:
    """A profiler starts in this process."""
    global _profiler_ran
    _profiler_ran = True


def _after_fork() -> None:
    """Let this process end without the destructors of C++, as those that ``multiprocessing`` forks do."""
    if not _profiler_ran:
        return
    with contextlib.suppress(OSError, AttributeError):  # only glibc tells functions of the exit code
        libc = ctypes.CDLL(None)
        libc.on_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        # Called last to first, without Python, which has ended by then: files of C are written, then the process ends.
        for function in (libc._exit, libc.fcloseall):
            libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def unheard(message: str = "", *, module: str = "") -> Iterator[None]:
    """Ignore warnings whose text, and whose module, begin like these regular expressions, until the block is left."""
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    entry = ("ignore", re.compile(message, re.IGNORECASE), Warning, re.compile(module), 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        # The user's code may have put other filters in their place meanwhile.
        for each in (filters, warnings.filters):
            with suppress(ValueError):
                each.remove(entry)  # type: ignore[union-attr]


def objects_of(*classes: type, below: bool = True) -> list[Any]:
    """Every object of these classes that Python's collector knows of.

    By an object's type alone: lazy modules and proxies answer for their class by importing or computing something.

    Args:
        classes: whose objects.
        below: those of their subclasses too.
    """
    kinds = set[type]()
    left = list(classes)
    while left:
        kind = left.pop()
        if kind not in kinds:
            kinds.add(kind)
            left += type.__subclasses__(kind) if below else ()
    found: list[Any] = []
    ids = frozenset(map(id, kinds))  # a class may have an == of its own

    def steps(objects: list[object]) -> list[Callable[[], object]]:
        wanted = map(ids.__contains__, map(id, map(type, objects)))
        return [partial(found.extend, compress(objects, wanted))]

    _with_objects(steps)
    return found


def referred_to(ids: Set[int]) -> set[int]:
    """Those of some objects, by their ids, that an object which Python's collector knows of refers to."""
    seen = set[int]()

    def steps(objects: list[object]) -> list[Callable[[], object]]:
        others = filter(partial(operator.is_not, objects), objects)  # the list itself is listed, and refers to all
        referents = map(id, chain.from_iterable(map(gc.get_referents, others)))
        return [partial(seen.update, filter(ids.__contains__, referents))]

    _with_objects(steps)
    return seen


def _with_objects(steps: Callable[[list[object]], Sequence[Callable[[], object]]]) -> None:
    """Have functions of C look at all that Python's collector knows of, while no other thread runs.

    A thread that makes a tuple of an iterator needs to be the only one to hold it: of a tuple that was listed meanwhile
    Python raises SystemError in that thread. So no list of objects may be alive while another thread runs. Threads
    change places between instructions of Python's alone, and a chain of functions of C has none.

    Args:
        steps: given the list, still empty, returns what to call in this order once it is full; it is emptied behind
            them. They are functions of C that call nothing but functions of C.
    """
    objects: list[object] = []
    listed = chain.from_iterable(starmap(gc.get_objects, [()]))
    collects = gc.isenabled()  # a collection, which may call what is of Python, would begin with one of our containers
    calls: list[Callable[[], object]] = [gc.disable, partial(objects.extend, listed), *steps(objects), objects.clear]
    if collects:
        calls.append(gc.enable)
    try:
        deque(map(operator.call, calls), maxlen=0)
    except BaseException:  # no memory, or an audit hook of the program's: the rest of the chain was not called
        objects.clear()
        if collects:
            gc.enable()
        raise
