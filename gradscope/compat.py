"""The private interfaces of torch that gradscope stands on, each named once, and checked before use.

Everything else in gradscope imports these names from here. :func:`check` runs each one on a small graph and says
whether it answers as on the versions of :mod:`gradscope.versions`; :func:`require` turns a wrong answer into one
clear error.
"""

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
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

import torch
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope import forked, versions
from gradscope.errors import UnsupportedTorchError, UsageError
from gradscope.unheard import unheard

__all__ = [
    "Check",
    "SavedTensor",
    "TraceMarker",
    "check",
    "checkpoint_frame",
    "dispatch_depth",
    "dispatch_modes",
    "end_range",
    "exports",
    "function_modes",
    "graph_task_id",
    "hook_dicts",
    "has_global_module_hooks",
    "held_by_checkpoint",
    "kineto_events",
    "kineto_tree",
    "live_device_blocks",
    "marking_recompute",
    "new_profiler",
    "open_range",
    "require_no_profiler",
    "quiet_kineto",
    "release_profiler",
    "require",
    "saved_value",
    "sequence_number",
    "start_memory_profiler",
    "start_profiler",
    "stop_profiler",
    "swap_engine_entry",
    "tracing_state",
    "transform_running",
    "transforms_run",
    "watch_profilers",
    "without_rows",
]


def _private(name: str) -> Any:
    """What a private name of torch stands for; where this torch has it no more, a function whose call says so.

    gradscope can then be imported on any torch, and :func:`require` has the chance to name what is missing.
    """
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found if found is not None else _absent(name)


def _absent(name: str) -> Callable[..., Any]:
    def absent(*args: object, **kwargs: object) -> Any:
        raise AttributeError(f"torch has no {name.removeprefix('torch.')}")

    return absent


#: Next number that a node made by this thread will get. Thread local.
sequence_number: Callable[[], int] = _private("torch.autograd._get_sequence_nr")

#: -1 outside a backward pass of this thread.
graph_task_id: Callable[[], int] = _private("torch._C._current_graph_task_id")


def _private_or(name: str, instead: Callable[[], Any]) -> Callable[[], Any]:
    """As :func:`_private`; ``instead`` where this torch has it no more, for what must go on without."""
    found: Callable[[], Any] = _private(name)
    return found if found.__module__ != __name__ else instead


#: The innermost transform of torch.func that this thread runs; None outside of one.
transform_running: Callable[[], Any] = _private_or("torch._C._functorch.peek_interpreter_stack", lambda: None)

#: What torch.jit.trace writes to; None where nothing is traced.
tracing_state: Callable[[], Any] = _private_or("torch._C._get_tracing_state", lambda: None)

#: How many modes of ``__torch_dispatch__`` this thread is in, torch's own (fake tensors, make_fx) included.
dispatch_depth: Callable[[], int] = _private_or("torch._C._len_torch_dispatch_stack", lambda: 0)


def exports() -> bool:
    """Whether torch.export traces, as Dynamo sees it too.

    ``torch.compiler.is_exporting`` is what this reads, but Dynamo of torch 2.11 takes that for True in whatever it
    compiles.
    """
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def transforms_run() -> bool:
    """Whether a transform of torch.func runs, which makes a graph in each of its passes and lets go of it."""
    return transform_running() is not None


_RecordFunctionFast: Any = _private("torch._C._profiler._RecordFunctionFast")
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


def _end_open_markers() -> None:
    with contextlib.suppress(KeyError):  # another thread has just ended the last one
        while _open_markers:
            with contextlib.suppress(RuntimeError):
                _open_markers.pop().__exit__(None, None, None)


#: The class of what a node's ``_raw_saved_*`` gives.
SavedTensor: Any = _private("torch._C._autograd.SavedTensor")

#: The modes of ``torch.overrides`` that this thread is in, the innermost last; and those of ``__torch_dispatch__``.
function_modes: Callable[[], list[Any]] = _private("torch.overrides._get_current_function_mode_stack")
dispatch_modes: Callable[[], list[Any]] = _private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")


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
    _users_ranges.watch()


class _Own(threading.local):
    """Whether this thread is starting or stopping a profiler of gradscope's."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


_OWN = _Own()


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


_users_ranges = _UsersRanges()


def profiler_runs() -> bool:
    """Whether a profiler runs in this process, on any thread, or is about to: kineto has one for all."""
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
    """Until the block is left, be told of every profiler that is not gradscope's own.

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
    with _held_stderr(_is_log) as held, _no_cycle_warning(), _OWN:
        profiler.start()
        while unknown and (held is None or not _logged(held)):
            unknown.pop()
    _users_ranges.watch()
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
    """On this thread a profiler sees what is allocated, and no operation. What opens a row inside never closes one."""
    enable = torch._C._autograd._enable_record_function  # type: ignore[attr-defined]
    enable(False)
    try:
        yield
    finally:
        enable(True)


_LOGGED_EVERY = 1000


def _logged(held: int) -> bool:
    return _UNKNOWN_BLOCK in os.pread(held, os.fstat(held).st_size, 0)


def stop_profiler(profiler: Any) -> None:
    """End the ranges that are open, the user's and gradscope's, and stop it without kineto's log lines."""
    _users_ranges.end()
    _end_open_markers()
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


def saved_value(saved: Any) -> Any:
    """What a ``SavedTensor`` of a node's ``_raw_saved_*`` holds, without unpacking it.

    A tensor; or, where hooks packed it (checkpointing, ``save_on_cpu``), whatever they made of it. Unpacking would run
    a checkpoint's forward again.
    """
    return saved.data


def checkpoint_frame(saved: Any) -> Any:
    """The frame of non-reentrant checkpointing that stands behind a ``SavedTensor``; None for any other."""
    from torch.utils import checkpoint

    kind = getattr(checkpoint, "_CheckpointFrame", None)
    hook = getattr(saved, "unpack_hook", None)
    if kind is None or hook is None:
        return None
    return next((value for value in _closure(hook).values() if isinstance(value, kind)), None)


def held_by_checkpoint(frame: Any) -> Iterator[tuple[str, Any]]:
    """(what it is, containers of tensors and ``SavedTensor``) of what a checkpoint keeps for its recompute."""
    if hasattr(frame, "saved_args"):  # torch 2.13
        yield "input", frame.saved_args
    else:  # torch 2.11: the inputs are saved by a node that does nothing else
        node = getattr(frame.input_saver, "grad_fn", None)
        yield "input", getattr(node, "_raw_saved_tensors", ())
        yield "input", _closure(getattr(node, "get_args", None)).get("args")
    held = _closure(frame.recompute_fn)
    yield "input", held.get("kwargs")
    yield "random state", (held.get("fwd_cpu_state"), held.get("fwd_device_states"))
    # Selective checkpointing: the outputs of operations that its policy keeps, each in a wrapper.
    selected = getattr(held.get("recompute_context"), "storage", None) or {}
    yield "selected", [getattr(item, "val", item) for kept in selected.values() for item in _flat(kept)]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _closure(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    found = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # a variable that was never set
            found[name] = cell.cell_contents
    return found


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


@contextlib.contextmanager
def swap_engine_entry(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the one function through which every Python ``backward`` and ``grad`` enters the engine.

    ``torch.autograd.backward`` and ``torch.autograd.grad`` look the name up in their module at each call, so that
    user code that imported them long ago goes through the replacement too.
    """
    module: Any = torch.autograd
    original = module._engine_run_backward
    replacement = wrap(original)
    module._engine_run_backward = replacement
    try:
        yield
    finally:
        # Somebody who wrapped ours in the meantime keeps their wrapper; ours passes through when inactive.
        if module._engine_run_backward is replacement:
            module._engine_run_backward = original


def has_global_module_hooks() -> bool:
    """Whether anybody has a hook on all modules of the process."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def hook_dicts(leaf: torch.Tensor) -> list[dict[Any, Any]]:
    """The dictionaries of the hooks on a tensor without a node: on its gradient, and behind its accumulation."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [hooks for name in names if (hooks := getattr(leaf, name, None))]


@contextlib.contextmanager
def marking_recompute(name: str) -> Iterator[None]:
    """Write a row ``name`` around each recompute of non-reentrant checkpointing.

    Checkpointing enters one context of its own around exactly that. Where a torch has it no more, nothing is marked
    and a recompute shows only by the module calls and the ops with gradients inside it.
    """
    from torch.utils import checkpoint

    module: Any = checkpoint
    original = getattr(module, "_recomputation_hook", None)
    if original is None:
        yield
        return

    class Marked(original):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            self._gradscope_marker = TraceMarker(name)
            self._gradscope_marker.__enter__()
            return super().__enter__()

        def __exit__(self, *exc: object) -> Any:
            try:
                return super().__exit__(*exc)
            finally:
                self._gradscope_marker.__exit__(None, None, None)

    module._recomputation_hook = Marked
    try:
        yield
    finally:
        if module._recomputation_hook is Marked:
            module._recomputation_hook = original


@contextlib.contextmanager
def quiet_kineto() -> Iterator[None]:
    """Drop the log lines that kineto writes to file descriptor 2 when a profiler starts or stops.

    Everything else that is written meanwhile reaches stderr afterwards. Where stderr has no descriptor, do nothing.
    """
    with _held_stderr(_is_kineto_log):
        yield


@contextlib.contextmanager
def _held_stderr(drop: Callable[[bytes], bool]) -> Iterator[int | None]:
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


_UNKNOWN_BLOCK = b"Memory block of unknown size"


def _is_log(line: bytes) -> bool:
    return _is_kineto_log(line) or _UNKNOWN_BLOCK in line


# --------------------------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """The answer of one private interface."""

    name: str
    ok: bool
    detail: str


def require() -> None:
    """Raise :class:`UnsupportedTorchError` naming torch's version unless every interface answers as expected."""
    failed = [item for item in check() if not item.ok]
    if failed:
        first = failed[0]
        raise UnsupportedTorchError(
            f"torch {torch.__version__} does not answer as gradscope needs: {first.name}: {first.detail}\n"
            f"gradscope is tested on {versions.tested()}; run 'gradscope doctor' for the whole list."
        )


@cache
def check() -> tuple[Check, ...]:
    """Run every private interface once on a graph of two nodes; cached for the process.

    Raises:
        UsageError: a profiler runs in this process, which one of ours would end.
    """
    require_no_profiler()
    probes: tuple[tuple[str, Callable[[], str]], ...] = (
        ("sequence numbers", _probe_sequence),
        ("backward marker", _probe_engine_entry),
        ("profiler events", _probe_profiler),
        ("checkpoint marker", _probe_recompute),
        ("saved tensors", _probe_saved),
        ("memory events", _probe_memory),
        ("function modes", _probe_modes),
        ("transforms", _probe_transforms),
    )
    return tuple(_run_probe(name, probe) for name, probe in probes)


def _run_probe(name: str, probe: Callable[[], str]) -> Check:
    try:
        with torch._C.DisableTorchFunction():  # a mode of the user's sees the user's calls alone
            return Check(name, True, probe())
    except Exception as error:  # any failure of a private interface is the answer that is asked for
        return Check(name, False, f"{type(error).__name__}: {error}")


def _small_graph() -> torch.Tensor:
    with torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        return (leaf * 2.0).exp().sum()


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _probe_sequence() -> str:
    before = sequence_number()
    node: Any = _small_graph().grad_fn
    after = sequence_number()
    _expect(after - before == 3, f"three nodes moved the counter by {after - before}")
    _expect(before <= node._sequence_nr() < after, "a node's number lies outside the range drawn while it was made")
    _expect(graph_task_id() == -1, "a graph task is reported outside backward")
    return "torch.autograd._get_sequence_nr, torch._C._current_graph_task_id"


def _probe_engine_entry() -> str:
    seen: list[int] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def entry(*args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return original(*args, **kwargs)

        return entry

    with swap_engine_entry(wrap):
        torch.autograd.backward(_small_graph())
    _expect(len(seen) == 1, f"one backward entered the engine {len(seen)} times")
    return "torch.autograd._engine_run_backward"


def _probe_recompute() -> str:
    from torch.utils import checkpoint

    _expect(hasattr(checkpoint, "_recomputation_hook"), "torch.utils.checkpoint has no _recomputation_hook")
    return "torch.utils.checkpoint._recomputation_hook"


def _probe_saved() -> str:
    node: Any = _small_graph().grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    _expect(isinstance(node._raw_saved_result, SavedTensor), "what ExpBackward0 saved is no SavedTensor")
    _expect(isinstance(saved_value(node._raw_saved_result), torch.Tensor), "ExpBackward0 shows no saved result")
    return "SavedTensor.data"


def _probe_modes() -> str:
    outside = function_modes()
    with BaseTorchFunctionMode() as mode:
        _expect(function_modes() == [*outside, mode], "a function mode that was entered is not the current one")
    _expect(function_modes() == outside, "a function mode that was left is still the current one")
    _expect(isinstance(dispatch_modes(), list), "the dispatch modes are no list")
    return "torch.overrides and torch.utils._python_dispatch: the stacks of modes"


def _probe_transforms() -> str:
    def seen(x: torch.Tensor) -> torch.Tensor:
        inside.append(transform_running() is not None)
        return x

    inside: list[bool] = []
    torch.func.vmap(seen)(torch.ones(2))
    _expect(inside == [True] and not transforms_run(), "a transform of torch.func does not show")
    outside = dispatch_depth()
    with TorchDispatchMode():
        _expect(dispatch_depth() == outside + 1, "a dispatch mode that was entered is not counted")
    _expect(tracing_state() is None, "torch.jit seems to trace")
    return "torch._C._functorch.peek_interpreter_stack, torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state"


def _probe_memory() -> str:
    profiler = new_profiler(memory=True)
    kept = start_memory_profiler(profiler)
    try:
        torch.empty(1000)
    finally:
        stop_profiler(profiler)
        del kept
    found = 0
    stack = kineto_tree(profiler)
    while stack:
        event = stack.pop()
        found += event.name == "[memory]" and event.extra_fields.alloc_size == 4000
        stack += event.children
    _expect(found == 1, f"one tensor of 4,000 bytes was reported {found} times")
    return "Allocation nodes of .experimental_event_tree()"


def _probe_profiler() -> str:
    profiler = new_profiler()
    start_profiler(profiler)
    try:
        with TraceMarker("gradscope:probe"):
            _small_graph().backward()  # type: ignore[no-untyped-call]
    finally:
        stop_profiler(profiler)
    events = kineto_events(profiler)
    by_name = {event.name(): event for event in events}
    _expect("gradscope:probe" in by_name, "the trace lacks our marker")
    node = by_name.get("autograd::engine::evaluate_function: ExpBackward0")
    _expect(node is not None, "the trace lacks evaluate_function: ExpBackward0")
    # Inside a dispatch mode of the caller's there are two, of which one draws no number.
    forward = next((event for event in events if event.name() == "aten::exp" and event.sequence_nr() >= 0), None)
    _expect(forward is not None and node is not None and forward.sequence_nr() == node.sequence_nr(), "numbers differ")
    _expect(node is not None and node.fwd_thread_id() == forward.start_thread_id(), "forward thread differs")  # type: ignore[union-attr]
    tree = {root.name for root in kineto_tree(profiler)}
    _expect("gradscope:probe" in tree, "the event tree lacks our marker")
    return f"kineto_results.events() and .experimental_event_tree(), {len(events)} events"
