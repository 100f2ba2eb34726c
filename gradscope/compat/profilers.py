"""kineto's profiler: made, started, stopped and read; the rows that must be ended before; the program's own."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from torch.profiler import ProfilerActivity, profile

from gradscope import process
from gradscope.compat.private import private
from gradscope.errors import UsageError
from gradscope.process import objects_of, unheard

_RecordFunctionFast: Any = private("torch._C._profiler._RecordFunctionFast")


_open_markers: set[Any] = set()  # of all threads


def open_range(name: str) -> Any:
    """Open a row of that name in a running profiler's trace, at less than 1 µs; give it to :func:`end_range`.

    One that is open, on any thread, when gradscope's profiler stops is ended before: it would write through a pointer
    into what the profiler recorded. A thread may be inside a module's call then, and an error may keep a frame alive.
    """
    opened = _RecordFunctionFast(name)
    opened.__enter__()
    _open_markers.add(opened)
    return opened


def end_range(opened: Any) -> None:
    """End a row; nothing where its profiler has stopped."""
    try:
        _open_markers.remove(opened)
    except KeyError:  # its profiler has stopped
        return
    try:
        opened.__exit__(None, None, None)
    except RuntimeError:  # the profiler has started since it was entered: there is no row to end
        return


class TraceMarker:
    """``with TraceMarker(name):`` puts one row into a running profiler's trace."""

    __slots__ = ("_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._range = open_range(self._name)

    def __exit__(self, *exc: object) -> None:
        end_range(self._range)


def end_open_markers() -> None:
    with contextlib.suppress(KeyError):  # another thread has just ended the last one
        while _open_markers:
            with contextlib.suppress(RuntimeError):
                _open_markers.pop().__exit__(None, None, None)


class _UsersRanges:
    """The ``record_function`` ranges that were entered since one of gradscope's profilers started.

    A range that outlives its profiler holds a pointer into what that recorded, which it would write through when it
    ends. Ending it twice does nothing.
    """

    def __init__(self) -> None:
        self._entered: weakref.WeakSet[Any] = weakref.WeakSet()
        self._original: Any = None
        self._enter: Any = None

    def watch(self) -> None:
        kind: Any = torch.autograd.profiler.record_function
        original, entered = kind.__enter__, self._entered

        @functools.wraps(original)  # torch.jit reads the source of what it finds here
        def enter(self: Any) -> Any:
            result = original(self)
            entered.add(self)
            return result

        kind.__enter__ = enter
        self._original, self._enter = original, enter

    def end(self) -> None:
        """End those that are open, and watch no more."""
        kind: Any = torch.autograd.profiler.record_function
        if self._enter is not None and kind.__enter__ is self._enter:
            kind.__enter__ = self._original
        self._enter = None
        entered = list(self._entered)
        self._entered.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for each in entered:
                if each.record is not None:
                    torch.ops.profiler._record_function_exit._RecordFunction(each.record)


users_ranges = _UsersRanges()


@contextlib.contextmanager
def quiet_kineto() -> Iterator[None]:
    """Drop the log lines that kineto writes to file descriptor 2 when a profiler starts or stops.

    Everything else that is written meanwhile reaches stderr afterwards. Where stderr has no descriptor, do nothing.
    """
    with held_stderr(_is_kineto_log):
        yield


@contextlib.contextmanager
def held_stderr(drop: Callable[[bytes], bool]) -> Iterator[int | None]:
    """Hold back what is written to file descriptor 2, and write it afterwards without the lines to drop.

    Yields the descriptor of the file that holds it; None where stderr has no descriptor, or nothing can hold it.
    """
    try:
        saved = os.dup(2)
    except OSError:
        yield None
        return
    _flush_stderr()
    try:
        scratch = _scratch_file()
    except OSError:  # no descriptor left, or a system without a folder that can be written
        os.close(saved)
        yield None
        return
    with scratch as held:
        os.dup2(held.fileno(), 2)
        try:
            yield held.fileno()
        finally:
            _flush_stderr()
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            kept = [line for line in held if not drop(line)]
            if kept:
                with contextlib.suppress(OSError):
                    os.write(2, b"".join(kept))


def _flush_stderr() -> None:
    with contextlib.suppress(Exception):  # the user's code may have put a stream of its own there, of any kind
        sys.stderr.flush()


def _scratch_file() -> IO[bytes]:
    """A file that needs no folder where the system has such."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            return os.fdopen(os.memfd_create("gradscope"), "w+b")
    return tempfile.TemporaryFile()


def _is_kineto_log(line: bytes) -> bool:
    level, _, rest = line.partition(b":")
    return level in {b"USDT", b"INFO", b"STAGE", b"WARNING", b"ERROR"} and b".cpp:" in rest


UNKNOWN_BLOCK = b"Memory block of unknown size"


def is_log(line: bytes) -> bool:
    return _is_kineto_log(line) or UNKNOWN_BLOCK in line


def new_profiler(*, shapes: bool = False, memory: bool = False) -> Any:
    """A stopped ``torch.profiler.profile`` over the CPU, CUDA where there is one, and every thread.

    Args:
        shapes: record input shapes. Keeps tensors alive longer: never together with a memory measurement.
        memory: record what the allocators give and take back, and nothing of the device. Such a profiler sees only the
            thread that starts it and the engine's own: one over every thread records no memory (torch 2.11 and 2.13).
    """
    if memory:
        return _CpuProfiler(profile_memory=True)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    if torch.cuda.is_available():
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        return profile(activities=activities, record_shapes=shapes, experimental_config=config)
    return _CpuProfiler(record_shapes=shapes, experimental_config=config)


class _CpuProfiler:
    """``torch.profiler.profile`` of the CPU, by the class that it stands on.

    Its own start imports torch._inductor, to ask for CUDA graphs: a second and 140 MB in a process that has not
    compiled anything. And it holds itself alive, with all its events, until Python looks for cycles.
    """

    def __init__(self, **options: Any) -> None:
        self.profiler: Any = torch.autograd.profiler.profile(use_kineto=True, **options)

    def start(self) -> None:
        self.profiler.__enter__()

    def stop(self) -> None:
        self.profiler.__exit__(None, None, None)


def start_profiler(profiler: Any) -> None:
    """Start it without kineto's log lines, and without the once-only warning of torch 2.11 that cycles are not kept."""
    process.note_profiler()
    with quiet_kineto(), _no_cycle_warning(), _OWN:
        profiler.start()
    users_ranges.watch()


class _Own(threading.local):
    """Counts how deep this thread is in code that starts or stops a profiler of gradscope's."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


_OWN = _Own()


def profiler_runs() -> bool:
    """Check that a profiler runs in this process, on any thread, or is about to: kineto has one for all."""
    module: Any = torch.autograd.profiler
    if module._is_profiler_enabled:
        return True
    # A schedule prepares its profiler a step before it starts it; that alone shows nowhere else.
    made = objects_of(module.profile, below=False) if isinstance(module.profile, type) else []
    return any(item.entered and item.kineto_results is None for item in made)


def require_no_profiler() -> None:
    """Raise :class:`UsageError` where a profiler runs in this process."""
    if profiler_runs():
        raise UsageError(
            "a torch.profiler is already running, and PyTorch allows one per process.\nCall "
            "gradscope outside of it; nothing was changed."
        )


@contextlib.contextmanager
def watch_profilers(begins: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Be told of every profiler that is not gradscope's own, until the block is left.

    All ways to a profiler in Python (``torch.profiler``, ``torch.autograd.profiler``, ``emit_nvtx``) go through three
    functions that one module looks up at each call.

    Args:
        begins: called before it is prepared, or before it starts where it was not; on its thread.
        ended: called after it has stopped.
    """
    module: Any = torch.autograd.profiler
    names = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
    originals = {name: getattr(module, name) for name in names}

    def wrap(name: str) -> Callable[..., Any]:
        original = originals[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if _OWN.depth:
                return original(*args, **kwargs)
            if name != "_disable_profiler":
                begins()
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                ended()

        return call

    replacements = {name: wrap(name) for name in names}
    vars(module).update(replacements)
    try:
        yield
    finally:
        for name in names:
            if getattr(module, name) is replacements[name]:
                setattr(module, name, originals[name])


def _no_cycle_warning() -> contextlib.AbstractContextManager[None]:
    return unheard("Warning: Profiler clears events at the end of each cycle")


def start_memory_profiler(profiler: Any) -> object:
    """Start a profiler that records memory, without the allocator's log line on stderr.

    While a profiler runs torch's CPU allocator logs the first and then every thousandth release of a block that it did
    not see allocated. It is made to log one here, where nobody sees it.

    Returns:
        What must stay alive until the profiler has stopped: its release would count for the next line.
    """
    with _without_collections():  # so many objects at once would start one, of everything that the process holds
        unknown = [torch.UntypedStorage(1) for _ in range(_LOGGED_EVERY)]
    process.note_profiler()
    with held_stderr(is_log) as held, _no_cycle_warning(), _OWN:
        profiler.start()
        while unknown and (held is None or not _logged(held)):
            unknown.pop()
    users_ranges.watch()
    return unknown


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Let this thread's profiler see what is allocated, and no operation. What opens a row inside never closes one."""
    enable = torch._C._autograd._enable_record_function  # type: ignore[attr-defined]
    enable(False)
    try:
        yield
    finally:
        enable(True)


_LOGGED_EVERY = 1000


def _logged(held: int) -> bool:
    return UNKNOWN_BLOCK in os.pread(held, os.fstat(held).st_size, 0)


def stop_profiler(profiler: Any) -> None:
    """End the ranges that are open, the user's and gradscope's, and stop it without kineto's log lines."""
    users_ranges.end()
    end_open_markers()
    with quiet_kineto(), _OWN:
        profiler.stop()


def release_profiler(profiler: Any) -> None:
    """Let go of the events of a stopped profiler, whoever still holds it."""
    profiler.profiler = None


def kineto_events(profiler: Any) -> list[Any]:
    """The raw events of a stopped profiler, ordered by start.

    Never ``profiler.events()``: building FunctionEvents took 34 s where reading these took 1.2 s (692,000 events).
    """
    events: list[Any] = profiler.profiler.kineto_results.events()
    return events


def kineto_tree(profiler: Any) -> list[Any]:
    """The CPU events of a stopped profiler as trees; each node's wrapper is made when it is asked for.

    Where ``events()`` copies every event at once (336 bytes each), walking the trees holds only the path walked.
    """
    roots: list[Any] = profiler.profiler.kineto_results.experimental_event_tree()
    return roots


def live_device_blocks(device: torch.device) -> list[tuple[int, int]]:
    """(address, bytes) of every block that the caching allocator has given out on a CUDA device."""
    found = []
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device.index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found.append((block.get("address", address), block["size"]))
            address += block["size"]
    return found
