"""Dynamo, from the moment that the program has it: what it leaves alone, and when it compiles.

It is never imported for this: it takes a second. Below a function that torch.compile made Dynamo looks at every frame,
also at those behind a graph break and of hooks, and compiles it.

Source: torch/_dynamo/eval_frame.py, decorators.py (``disable``) and callback.py, as of torch 2.11 to 2.14.
"""

from __future__ import annotations

import dis
import functools
import importlib.abc
import importlib.util
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

DYNAMO = "torch._dynamo"
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")  # what Dynamo calls the rest of a function behind a break

_eager: set[CodeType] = set()  # of what is left alone, once Dynamo is there
_eager_frames: set[CodeType] = set()  # the same, without what it calls


def keep_eager(function: Any) -> None:
    """Let Dynamo run a function, and what it calls, as they are, where code calls it that is not compiled.

    What it traces through on the way, a hook of a module that it compiles say, is not changed: see :func:`untraced`.
    """
    _eager.add(function.__code__)
    if DYNAMO in sys.modules:
        with suppress(Exception):  # of another torch: watching_dynamo tells of it
            _leave_alone(function.__code__)


def keep_frame_eager(function: Any) -> None:
    """Let Dynamo run a function as it is, but look at what it calls."""
    _eager_frames.add(function.__code__)
    if DYNAMO in sys.modules:
        with suppress(Exception):
            _leave_alone(function.__code__, inner=False)


def _leave_alone(code: CodeType, *, inner: bool = True) -> None:
    types: Any = sys.modules["torch._dynamo.types"]
    actions = types.FrameAction
    skip = types.FrameExecStrategy(actions.SKIP, actions.SKIP if inner else actions.DEFAULT)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(code, skip)  # type: ignore[attr-defined]


def dynamo_reads_hooks() -> bool:
    """Check that Dynamo may guard which hooks all modules have.

    But for torch 2.13 it traces through torch's ``__call__``, which asks for them, where a class calls that from one of
    its own, as Hugging Face's checkpointed layers do (seen with 2.11, 2.12 and 2.14).
    """
    return _VERSION != (2, 13) and _has_own_call(torch.nn.Module)


_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _has_own_call(kind: Any) -> bool:
    for each in kind.__subclasses__():
        if each.__call__ is not torch.nn.Module.__call__ and not each.__module__.startswith("torch."):
            return True
        if _has_own_call(each):
            return True
    return False


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


# Beyond torch's own limit, 8, Dynamo runs a function as it is: each way to do a step is one version of it, or several.
_VERSIONS = 1_000
_EXCEEDS = "exceeds_recompile_limit"


@contextmanager
def many_versions() -> Iterator[None]:
    """Let Dynamo compile as many versions of a function as are asked for, and forget its code before and afterwards.

    What a profile has had compiled tells of its kernels, and takes longer; the versions would count against the user's
    own limit.
    """
    config: Any = sys.modules.get(f"{DYNAMO}.config")
    if config is None:
        yield
        return
    wanted = {"recompile_limit": _VERSIONS, "accumulated_recompile_limit": _VERSIONS, "error_on_recompile": False}
    held = {name: getattr(config, name) for name in wanted if hasattr(config, name)}
    frames: Any = sys.modules.get(f"{DYNAMO}.convert_frame")
    asked = getattr(
        frames, _EXCEEDS, None
    )  # for the limit that torch.compile was given, too: it goes before the config's
    torch.compiler.reset()
    try:
        for name in held:
            setattr(config, name, wanted[name])
        if asked is not None:
            setattr(frames, _EXCEEDS, lambda *_: (False, ""))
        yield
    finally:
        if asked is not None:
            setattr(frames, _EXCEEDS, asked)
        for name, value in held.items():
            setattr(config, name, value)
        torch.compiler.reset()


def recompile_limit() -> int:
    """The versions of a function from which on Dynamo runs it as it is."""
    return int(getattr(sys.modules.get(f"{DYNAMO}.config"), "recompile_limit", _VERSIONS))


def compiler_stance() -> str:
    """What the program has told ``torch.compiler.set_stance``."""
    return str(getattr(getattr(sys.modules.get(f"{DYNAMO}.eval_frame"), "_stance", None), "stance", "default"))


def may_compile() -> bool:
    """Check that the program has not forbidden to compile anything new."""
    return compiler_stance() not in {"fail_on_recompile", "eager_on_recompile"}


def compiles_nothing() -> bool:
    """Check that the program has compiled code run as it stands."""
    config = sys.modules.get(f"{DYNAMO}.config")
    return compiler_stance() == "force_eager" or bool(getattr(config, "disable", False))


@contextmanager
def following_dynamo(
    follow: Callable[[bool], None],
    ahead: Callable[[], AbstractContextManager[None]],
    failed: Callable[[Exception], None],
) -> Iterator[None]:
    """Tell when a thread enters a compiled function, and when it has left the outermost one, until the block is left.

    Also of functions in there that Dynamo leaves alone nothing is told: it goes on looking once these have returned.

    Args:
        follow: called with True before, and with False behind it.
        ahead: made around each call of what was compiled ahead of time, which looks at its guards itself.
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
        yield


class _Wrapper(NamedTuple):
    """The code that torch.compile puts around a function: up to where it opens, and where it calls the function."""

    opens: int  # the first of its bytes that is behind the call of set_eval_frame that opens it
    calls: (
        range  # the bytes of the call of _maybe_set_eval_frame in front of the function; every other one is behind it
    )


class _Outermost(threading.local):
    """The call of a compiled function, of each thread, inside of which all others are."""

    frame = 0  # its id; 0: none
    known = False  # whether the thread was in one when it was first looked at


@contextmanager
def _following(frames: Any, follow: Callable[[bool], None]) -> Iterator[None]:
    """What torch.compile makes of a function calls ``set_eval_frame`` first of all.

    It calls ``_maybe_set_eval_frame`` in front of the function and last of all, wherever it returns.
    """
    calls = _Calls(frames, follow)
    before = {name: getattr(frames, name) for name in ("set_eval_frame", "_maybe_set_eval_frame")}

    def set_eval_frame(callback: Any) -> Any:
        calls.opens(sys._getframe(1))
        return before["set_eval_frame"](callback)

    def maybe_set_eval_frame(callback: Any) -> Any:
        calls.closes(sys._getframe(1))
        return before["_maybe_set_eval_frame"](callback)

    ours = dict(zip(before, (set_eval_frame, maybe_set_eval_frame), strict=True))
    calls.look(sys._getframe())
    for name, function in ours.items():
        keep_frame_eager(function)  # with what it calls, the callback would be put back that it sets
        setattr(frames, name, function)
    try:
        yield
    finally:
        for name, function in ours.items():
            if getattr(frames, name) is function:
                setattr(frames, name, before[name])


class _Calls:
    """Tells of the outermost compiled function that each thread is in."""

    def __init__(self, frames: Any, follow: Callable[[bool], None]) -> None:
        self._frames, self._follow = frames, follow
        self._wrappers = wrappers_of(frames)
        self._here = _Outermost()

    def look(self, frame: FrameType | None) -> None:
        """Find the compiled function that this thread was in before anything was followed."""
        self._here.known = True
        while frame is not None:
            if id(frame.f_code) in self._wrappers:
                self._here.frame = id(frame)
            frame = frame.f_back
        if self._here.frame:
            self._follow(True)

    def opens(self, frame: FrameType) -> None:
        """``frame`` has called ``set_eval_frame``."""
        wrapper, here = self._wrappers.get(id(frame.f_code)), self._here
        if wrapper is None or frame.f_lasti >= wrapper.opens:
            return
        if not here.known:
            self.look(frame.f_back)
        # One that ended in another way may have lain at the same address.
        outermost = here.frame in (0, id(frame)) or not _is_below(frame, here.frame)
        if outermost and not _is_forced_eager(self._frames):
            here.frame = id(frame)
            self._follow(True)

    def closes(self, frame: FrameType) -> None:
        """``frame`` has called ``_maybe_set_eval_frame``."""
        if self._here.frame == id(frame) and frame.f_lasti not in self._wrappers[id(frame.f_code)].calls:
            self._here.frame = 0
            self._follow(False)


@contextmanager
def _around_ahead(module: Any, ahead: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    kind = getattr(module, "AOTCompiledFunction", None)
    if kind is None:  # of another torch
        yield
        return
    original = kind.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ahead():
            return original(self, *args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        if kind.__call__ is call:
            kind.__call__ = original


def _is_forced_eager(frames: Any) -> bool:
    return getattr(getattr(frames, "_stance", None), "stance", "") == "force_eager"


def _is_below(frame: FrameType, outer: int) -> bool:
    above = frame.f_back
    while above is not None:
        if id(above) == outer:
            return True
        above = above.f_back
    return False


for _each in (_is_forced_eager, _is_below, _Calls.opens, _Calls.closes, _Calls.look):
    keep_eager(_each)


def wrappers_of(frames: Any) -> dict[int, _Wrapper]:
    """What torch.compile puts around functions, by the id of its code.

    Raises:
        AttributeError: it does not call what it is followed by.
    """
    codes = [each for each in frames._TorchDynamoContext.__call__.__code__.co_consts if isinstance(each, CodeType)]
    found = {}
    for code in codes:
        loads = [each for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
        opens = [each.offset for each in loads if each.argval == "set_eval_frame"]
        names = [each.argval for each in loads]
        if len(opens) > 1 and ("_maybe_set_eval_frame", "_callback_from_stance") in pairwise(names):
            place = list(pairwise(names)).index(("_maybe_set_eval_frame", "_callback_from_stance"))
            found[id(code)] = _Wrapper(opens[1], range(loads[place].offset, loads[place + 2].offset))
    if not found:
        raise AttributeError("torch._dynamo.eval_frame sets its callback in another way")
    return found


def compiles_backward() -> bool:
    """Check that compiled autograd makes one graph of the backward pass that runs, hooks and all."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


def users_name(function: str) -> str:
    """The function's name in the user's code."""
    return _RESUMED.sub(r"\1", function)


class Compilation(NamedTuple):
    """Of one frame by Dynamo: the function, where it stands, and what made it necessary if it was compiled before."""

    function: str
    file: str
    line: int
    seconds: float
    again: bool
    reason: str  # the guard that failed; empty where torch does not tell


class GraphBreak(NamedTuple):
    """Where the code of a frame could not be traced, and why."""

    frames: tuple[tuple[str, int], ...]  # file and line, innermost last
    reason: str


class CompileLog:
    """What Dynamo notes of its compilations, from the moment that this is made."""

    def __init__(self) -> None:
        self._began = time.time()
        self._broken = len(_noted_breaks())
        self._records: dict[int, Any] = {}  # by id, which is theirs for as long as they are held here

    def collect(self) -> None:
        """Take what there is: torch itself keeps the latest 64 alone."""
        utils = sys.modules.get("torch._dynamo.utils")
        for each in () if utils is None else utils.get_compilation_metrics():
            if (each.start_time or 0.0) >= self._began:
                self._records[id(each)] = each

    def compilations(self) -> list[Compilation]:
        """Each frame that was compiled, with its backward pass, which is compiled when that runs first."""
        backward = Counter[str]()
        for each in self._metrics():
            if not each.co_filename:
                backward[str(each.compile_id)] += getattr(each, "backward_cumulative_compile_time_us", None) or 0
        return [
            Compilation(
                users_name(each.co_name or ""),
                each.co_filename,
                each.co_firstlineno or 0,
                (each.entire_frame_compile_time_s or 0.0) + backward[str(each.compile_id)] / 1e6,
                str(each.compile_id).rpartition("/")[2] not in {"", "0"},
                _first_line(getattr(each, "recompile_reason", None) or ""),
            )
            for each in self._metrics()
            if each.co_filename
        ]

    def _metrics(self) -> list[Any]:
        self.collect()
        return list(self._records.values())

    def breaks(self) -> list[GraphBreak]:
        """Each break of a graph, and each function that is not compiled for one, in a loop say."""
        noted = _noted_breaks()
        new = noted[self._broken :] if len(noted) >= self._broken else noted  # else torch._dynamo.reset() was called
        found = [
            GraphBreak(
                tuple((frame.filename, frame.lineno or 0) for frame in each.user_stack), _first_line(each.reason)
            )
            for each in new
        ]
        return found + [
            GraphBreak(
                ((each.fail_user_frame_filename, each.fail_user_frame_lineno or 0),), _first_line(each.fail_reason)
            )
            for each in self._metrics()
            if each.fail_type and each.fail_user_frame_filename
        ]


def _first_line(text: Any) -> str:
    return str(text).strip().partition("\n")[0]


def _noted_breaks() -> list[Any]:
    utils = sys.modules.get("torch._dynamo.utils")
    return [] if utils is None else utils.graph_break_reasons


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
            callbacks.register(sys.modules["torch._dynamo.callback"].callback_handler)
        except Exception as error:
            failed(error)

    with once_imported(DYNAMO, begin):
        try:
            yield callbacks.again
        finally:
            callbacks.remove()


class _Callbacks:
    """Of one watch, in Dynamo's lists."""

    def __init__(self, compiling: Callable[[bool], None]) -> None:
        def begins(_args: Any) -> None:
            compiling(True)

        def ends(_args: Any) -> None:
            compiling(False)

        self._begins, self._ends = begins, ends
        self._handler: Any = None

    def register(self, handler: Any) -> None:
        self._handler = handler
        handler.register_start_callback(self._begins)
        handler.register_end_callback(self._ends)

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


@contextmanager
def once_imported(name: str, then: Callable[[], object]) -> Iterator[None]:
    """Call a function as soon as a module is there: now, or when the program imports it before the block is left."""
    if name in sys.modules:
        then()
        yield
        return
    finder = _AtImport(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.forget()


class _AtImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True  # the finders behind this one
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = original
            self.forget()
            original(module)
            self._then()

        loader.exec_module = exec_module
        return spec

    def forget(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
