"""kineto's profiler: made, started, stopped and read, and the program's own, which goes first."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gradscope import forked
from gradscope.compat.ranges import end_open_markers, users_ranges
from gradscope.compat.stderr import UNKNOWN_BLOCK, held_stderr, is_log, quiet_kineto
from gradscope.errors import UsageError
from gradscope.unheard import unheard


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
    forked.note_profiler()
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
    made = (item for item in gc.get_objects() if type(item) is module.profile)
    return any(item.entered and item.kineto_results is None for item in made)


def require_no_profiler() -> None:
    """Raise :class:`UsageError` where a profiler runs in this process."""
    if profiler_runs():
        raise UsageError(
            "a torch.profiler is running in this process, and PyTorch's profiler exists once in a process.\n"
            "Call gradscope outside of it; nothing was changed."
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
    forked.note_profiler()
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
