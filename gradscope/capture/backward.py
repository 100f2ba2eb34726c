"""Watches backward passes: every entry into the engine, and the user's hooks on tensors.

A hook runs inside the engine's row of the node that made the tensor, or of its AccumulateGrad: without a mark its time
is theirs. Hooks of modules need none, for torch gives them nodes (``attribute.rows``).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from gradscope import markers
from gradscope.capture.guard import Guard
from gradscope.compat import (
    TraceMarker,
    compiles_backward,
    graph_task_id,
    hook_dicts,
    keep_eager,
    swap_engine_entry,
    traces_for_compile,
    transforms_run,
    untraced,
)
from gradscope.devices import is_capturing

Around = Callable[[Any], AbstractContextManager[None]]


BACKWARD_PASSES = "inspecting a backward pass"  # under which the guard notes an error
STEP_ENDS = "detecting the ends of steps"  # the same


class BackwardWatch:
    """One wrapper around the engine for the whole run; what it does changes with the phase of the run.

    With everything off it costs a function call. The callbacks see outermost passes only, but for ``nested``: those of
    reentrant checkpointing, hooks, and Functions that run the engine in their backward.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.mark = False  # write a BACKWARD row around each entry
        self.around: Around | None = None  # of the roots; outside the row
        self.nested: Around | None = None  # the same, of a pass inside of a pass
        # Last of all, only when backward returned: whether it made a graph of itself, to be gone through later.
        self.ended: Callable[[bool], None] | None = None
        self.settled: Callable[[], None] | None = None  # after that, also when it raised: no graph task runs
        self.raised = 0  # outermost passes that ended in an error
        self.captured = 0  # outermost passes that were recorded into a CUDA graph: nothing ran, no step ends with them
        self.compiled = 0  # outermost passes of compiled autograd
        self._counter = itertools.count()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch until the block is left."""
        with swap_engine_entry(self._wrap):
            yield

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if traces_for_compile():
                return original(roots, *args, **kwargs)  # of torch's own: no pass of the program's
            outermost = graph_task_id() == -1
            ends_step = outermost and not is_capturing()
            self.captured += outermost and not ends_step
            try:
                # The call is made here in every phase: what warns of its caller's line then names the same one each
                # time, and Python shows it once.
                with self._surroundings(outermost, roots), self._row(args, kwargs):
                    result = original(roots, *args, **kwargs)
                if ends_step and self.ended is not None:
                    with self._guard.over(STEP_ENDS):
                        self.ended(_creates_graph(args, kwargs) and not transforms_run())
                return result
            except BaseException:
                self.raised += outermost
                raise
            finally:
                if ends_step and self.settled is not None:
                    with self._guard.over(STEP_ENDS):
                        self.settled()

        # A function that torch.compile made may go backward: torch's own entry breaks its graph too.
        keep_eager(run_backward)
        return untraced(run_backward)

    def _row(self, args: Any, kwargs: Any) -> AbstractContextManager[object]:
        # The device is not waited for here: each kernel is told from the row that launched it, whenever it runs.
        if not self.mark:
            return nullcontext()
        return TraceMarker(markers.BACKWARD + str(2 * next(self._counter) + _creates_graph(args, kwargs)))

    def _surroundings(self, outermost: bool, roots: Any) -> AbstractContextManager[None]:
        around = self.around if outermost else self.nested
        if compiles_backward():  # a hook on a parameter would be compiled into the pass
            self.compiled += outermost
            around = None
        if around is None:
            return nullcontext()
        return self._guard.around(BACKWARD_PASSES, lambda: around(roots))


def _creates_graph(args: Any, kwargs: Any) -> bool:
    """Check that the backward pass builds a graph of itself: the fourth argument, after roots, gradients and keep."""
    return bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False))


TENSOR_HOOKS = "marking hooks on tensors"  # under which the guard notes an error

_REGISTER = ("register_hook", "register_post_accumulate_grad_hook")
_ORIGINAL = "_gradscope_original"


class TensorHooks:
    """Marks hooks on tensors while :meth:`marking`, and puts all of them back at its end.

    Hooks are looked up by torch in a dictionary of each tensor, where the marked hook takes the original's place: the
    user's handle removes it as before. Only the dictionaries are known here, by weak references.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self._on = False
        self._changed: dict[int, weakref.ref[Any]] = {}  # by id of the dictionary

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Mark what is registered until the block is left."""
        with ExitStack() as stack:
            stack.callback(self._restore)
            for name in _REGISTER:
                self._watch(name, stack)
            self._on = True
            yield

    def adopt(self, leaf: torch.Tensor) -> None:
        """Mark the hooks that a tensor without a node has already."""
        if self._on:
            with self._guard.over(TENSOR_HOOKS):
                for hooks in hook_dicts(leaf):
                    for key in list(hooks):
                        self._mark(hooks, key)

    def _watch(self, name: str, stack: ExitStack) -> None:
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            handle = original(*args, **kwargs)
            if self._on:
                with self._guard.over(TENSOR_HOOKS):
                    self._registered(handle)
            return handle

        def undo() -> None:
            # Somebody who wrapped ours in the meantime keeps their wrapper; ours passes through when it is off.
            if getattr(torch.Tensor, name) is register:
                setattr(torch.Tensor, name, original)

        setattr(torch.Tensor, name, register)
        stack.callback(undo)

    def _registered(self, handle: Any) -> None:
        if not isinstance(handle, torch.utils.hooks.RemovableHandle):
            return  # of a tensor class with hooks of its own kind
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            self._mark(hooks, handle.id)

    def _mark(self, hooks: Any, key: Any) -> None:
        hook = hooks[key]
        if _original(hook) is not None or not _is_users(hook):
            return
        hooks[key] = _marked(hook)
        number = id(hooks)
        if number not in self._changed:
            changed = self._changed
            self._changed[number] = weakref.ref(hooks, lambda _: changed.pop(number, None))

    def _restore(self) -> None:
        self._on = False
        changed, self._changed = list(self._changed.values()), {}
        for reference in changed:
            hooks = reference() or {}
            for key, hook in list(hooks.items()):
                original = _original(hook)
                if original is not None:
                    hooks[key] = original


def _original(hook: Any) -> Callable[..., Any] | None:
    """What was marked, where ``hook`` is a mark."""
    return vars(hook).get(_ORIGINAL) if type(hook) is FunctionType else None


def _is_users(hook: Any) -> bool:
    """Check that the hook is the user's: none of torch's own (FSDP has some), nor of gradscope's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = _of_several(hook)
    module = getattr(hook, "__module__", None) or ""
    return not str(module).startswith(("torch.", "gradscope."))


def _of_several(hook: Any) -> Any:
    """The user's hook behind one that torch puts on each of several tensors; another as it is."""
    if type(hook) is not FunctionType or hook.__module__ != register_multi_grad_hook.__module__:
        return hook
    try:
        return inspect.getclosurevars(hook).nonlocals.get("fn", hook)
    except ValueError:  # a variable of it is not set any more
        return hook


def _marked(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return hook(*args, **kwargs)
        with TraceMarker(markers.HOOK + "0"):
            return hook(*args, **kwargs)

    setattr(marked, _ORIGINAL, hook)
    return marked
