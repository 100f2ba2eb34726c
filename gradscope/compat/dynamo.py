"""Dynamo, from the moment that the program has it: what it leaves alone, and when it compiles.

It is never imported for this: it takes a second. Below a function that torch.compile made Dynamo looks at every frame,
also at those behind a graph break and of hooks, and compiles it.

Source: torch/_dynamo/eval_frame.py, decorators.py (``disable``) and callback.py, as of torch 2.11 to 2.13.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec
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
        if called is function and DYNAMO in sys.modules:
            called = sys.modules[DYNAMO].disable(function)
        return called(*args, **kwargs)

    keep_eager(call)
    return call


# Beyond torch's own limit, 8, Dynamo runs a function as it is: each way to do a step is one version of it, or several.
_VERSIONS = 1_000


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
    torch.compiler.reset()
    try:
        for name in held:
            setattr(config, name, wanted[name])
        yield
    finally:
        for name, value in held.items():
            setattr(config, name, value)
        torch.compiler.reset()


def recompile_limit() -> int:
    """The versions of a function from which on Dynamo runs it as it is."""
    return int(getattr(sys.modules.get(f"{DYNAMO}.config"), "recompile_limit", _VERSIONS))


def may_compile() -> bool:
    """Check that the program has not forbidden to compile anything new, by ``torch.compiler.set_stance``."""
    stance = getattr(getattr(sys.modules.get(f"{DYNAMO}.eval_frame"), "_stance", None), "stance", "default")
    return stance != "fail_on_recompile"


def dynamo_runs() -> bool:
    """Check that Dynamo looks at what this thread calls now."""
    if f"{DYNAMO}.eval_frame" not in sys.modules:
        return False
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None  # type: ignore[attr-defined]


class _Outermost(threading.local):
    """The call of a compiled function, of each thread, inside of which all others are."""

    def __init__(self) -> None:
        self.frame = 0  # its id; 0: none
        self.line = 0  # on which it began
        self.ends = False


@contextmanager
def following_dynamo(follow: Callable[[bool], None], failed: Callable[[Exception], None]) -> Iterator[None]:
    """Tell when a thread enters a compiled function, and when it has left the outermost one, until the block is left.

    Also of functions in there that Dynamo leaves alone nothing is told: it goes on looking once these have returned.

    Args:
        follow: called with True before, and with False behind it.
        failed: as of :func:`watching_dynamo`.
    """
    with ExitStack() as stack:

        def begin() -> None:
            try:
                stack.enter_context(_following(sys.modules[f"{DYNAMO}.eval_frame"], follow))
            except Exception as error:
                failed(error)

        with once_imported(DYNAMO, begin):
            yield


@contextmanager
def _following(frames: Any, follow: Callable[[bool], None]) -> Iterator[None]:
    """What torch.compile makes of a function calls ``set_eval_frame`` first of all, and behind the function.

    After that, and before the function too, it calls ``_maybe_set_eval_frame``.
    """
    wrappers = wrapper_codes(frames)
    first, last = frames.set_eval_frame, frames._maybe_set_eval_frame
    here = _Outermost()

    def set_eval_frame(callback: Any) -> Any:
        frame = sys._getframe(1)
        if id(frame.f_code) in wrappers and not _is_forced_eager(frames):
            if here.frame == id(frame) and here.line != frame.f_lineno:
                here.ends = True
            elif not here.frame or here.frame == id(frame) or not _is_below(frame, here.frame):
                # Of one that returned without either call the frame may lie at the same address.
                here.frame, here.line, here.ends = id(frame), frame.f_lineno, False
                follow(True)
        return first(callback)

    def maybe_set_eval_frame(callback: Any) -> Any:
        if here.ends and here.frame == id(sys._getframe(1)):
            here.frame, here.ends = 0, False
            follow(False)
        return last(callback)

    for each in (set_eval_frame, maybe_set_eval_frame):
        keep_frame_eager(each)  # with what it calls, the callback would be put back that it sets
    frames.set_eval_frame, frames._maybe_set_eval_frame = set_eval_frame, maybe_set_eval_frame
    try:
        yield
    finally:
        for name, ours, before in (
            ("set_eval_frame", set_eval_frame, first),
            ("_maybe_set_eval_frame", maybe_set_eval_frame, last),
        ):
            if getattr(frames, name) is ours:
                setattr(frames, name, before)


def _is_forced_eager(frames: Any) -> bool:
    return getattr(getattr(frames, "_stance", None), "stance", "") == "force_eager"


def _is_below(frame: FrameType, outer: int) -> bool:
    above = frame.f_back
    while above is not None:
        if id(above) == outer:
            return True
        above = above.f_back
    return False


for _each in (_is_forced_eager, _is_below):
    keep_eager(_each)


def wrapper_codes(frames: Any) -> frozenset[int]:
    """The ids of the code of what torch.compile puts around functions.

    Raises:
        AttributeError: it does not call what it is followed by.
    """
    codes = [each for each in frames._TorchDynamoContext.__call__.__code__.co_consts if isinstance(each, CodeType)]
    called = {"set_eval_frame", "_maybe_set_eval_frame"}
    if not any(called <= set(code.co_names) for code in codes):
        raise AttributeError("torch._dynamo.eval_frame sets its callback in another way")
    return frozenset(map(id, codes))


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
