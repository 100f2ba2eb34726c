"""Module-call spans from two process-wide forward hooks; nothing is added to the user's modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradscope import markers
from gradscope.capture.byhand import BY_HAND, classes_to_watch, watching
from gradscope.capture.guard import Guard
from gradscope.capture.registry import NOBODYS, ModuleRegistry, all_modules
from gradscope.capture.spans import CallCost, SpanRecorder, SpanStack
from gradscope.capture.variety import StepBounds, step_begins, step_ended
from gradscope.compat import graph_task_id
from gradscope.tables import SpanTable
from gradscope.unheard import unheard

MODULE_CALLS = "noting module calls"  # under which the guard notes an error

_NOTHING = CallCost()
_BELOW = 5  # frames from a hook to that which called the module: the guard's, and three of torch's
_frame = sys._getframe


class CallRecorder:
    """Notes every module call of the process while :meth:`recording`.

    Full backward hooks would be wrong here: they fire at gradients of inputs and outputs, so a layer whose inputs need
    none is timed wrongly (0.023 ms for an embedding that took 0.294), and they change the graph that is measured.
    """

    def __init__(self, guard: Guard | None = None, registry: ModuleRegistry | None = None) -> None:
        self._guard = guard or Guard()
        self.registry = registry or ModuleRegistry()  # gives modules their labels
        self.roots: dict[int, None] = {}  # labels of modules called while no other module was, each once
        self.on_root_call: Callable[[Any], None] | None = None  # told the arguments of such a call in forward
        self.root = NOBODYS  # label of the root that was called last
        self.cost = _NOTHING  # of a call by torch's hooks, beside what these time themselves
        self.steps: list[StepBounds] = []  # those that ended
        self._step: StepBounds | None = None  # that which runs
        self._spans = SpanRecorder(markers.CALL)
        self._stack = SpanStack()
        self._first_of = self.registry.callers.first_of
        self._by_hand = ExitStack()  # see byhand.py

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the registry that live now; let go of the list soon."""
        return self.registry.alive()

    def called(self) -> set[int]:
        """Labels of the modules that were called."""
        return self._spans.labels()

    def opened(self) -> int:
        """How many calls were made so far."""
        return len(self._spans)

    def layout(self, first: int, base: int) -> tuple[tuple[int, int], ...]:
        """From call ``first`` on: each one's label, and how far in front of number ``base`` its own begin."""
        return self._spans.layout(first, base)

    def begin_step(self) -> None:
        """A step begins on this thread."""
        self._step = step_begins(len(self._spans))

    def end_step(self) -> None:
        """It has ended, on the same thread."""
        if self._step is not None:
            self.steps.append(step_ended(self._step, len(self._spans)))
            self._step = None

    def table(self) -> SpanTable:
        """All calls so far, with what noting each one took."""
        return self._spans.table()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hook every module of the process; unhook on the way out, whatever happened."""
        # Global hooks run before a module's own, before and after forward: the user's forward pre-hooks count as the
        # layer's time, the user's forward hooks as the caller's.
        with ExitStack() as stack:
            stack.enter_context(no_compile_warning())
            stack.callback(self._close_above, 0)
            self._watch_by_hand(stack)
            for handle in (
                register_module_forward_pre_hook(self._guard.hook(MODULE_CALLS, self._enter)),
                register_module_forward_hook(self._guard.hook(MODULE_CALLS, self._leave), always_call=True),
            ):
                stack.callback(handle.remove)
            yield

    def look_for_calls_by_hand(self, leaves: Iterable[torch.Tensor], models: Iterable[nn.Module]) -> None:
        """See calls that hooks do not tell of from now on, where what was called so far shows that there are some.

        Args:
            leaves: what the backward passes so far have led to.
            models: those known.
        """
        labels = self.called()
        known = {id(module): module for module in (*models, *self.registry.alive(), *all_modules())}
        found = classes_to_watch(
            known.values(), set(map(id, leaves)), lambda module: self.registry.get(module) in labels
        )
        found -= self.registry.called_by_hand
        self.registry.called_by_hand |= found
        self._by_hand.enter_context(watching(found, self._enter_by_hand, self._leave_by_hand))

    def _watch_by_hand(self, stack: ExitStack) -> None:
        self._by_hand = ExitStack()
        stack.callback(self._by_hand.close)
        kinds = self.registry.called_by_hand
        with self._guard.over(BY_HAND):
            self._by_hand.enter_context(watching(kinds, self._enter_by_hand, self._leave_by_hand))

    def _enter_by_hand(self, module: nn.Module, args: Any) -> bool:
        began = perf_counter_ns()
        calls = self._stack.calls
        if calls and calls[-1][0] == id(module):
            return False  # torch's own way, or from one of the module's methods to the other
        with self._guard.over(MODULE_CALLS):
            self._open(module, args, began, self.registry.callers.number(_frame(1)), by_hand=True)
            return True
        return False

    def _leave_by_hand(self, module: nn.Module) -> None:
        with self._guard.over(MODULE_CALLS):
            self._leave(module, None, None)

    def _enter(self, module: nn.Module, args: Any) -> None:
        # Dynamo folds this to True while it traces and drops the rest: no graph break, nothing inside the region.
        if torch.compiler.is_compiling():
            return
        began = perf_counter_ns()
        calls = self._stack.calls
        if calls and calls[-1][2] and calls[-1][0] == id(module):
            calls.append((id(module), None, False, 0, 0))  # a ``__call__`` of the class's own went on to torch's
        else:
            try:
                frame = _frame(_BELOW)
                caller = self._first_of[id(frame.f_code)] + frame.f_lasti
            except (KeyError, ValueError):  # another way to the hooks than torch's, or one that is not known yet
                caller = self.registry.callers.number(_frame(1), _BELOW - 1)
            self._open(module, args, began, caller, by_hand=False)

    def _open(self, module: nn.Module, args: Any, began: int, caller: int, *, by_hand: bool) -> None:
        calls = self._stack.calls
        label = self.registry.get(module)
        if label is None or (label == NOBODYS and not calls):
            label = self.registry.label(module, [self.registry.living(number) for number, *_ in calls])
        if not calls:
            self.root = label
            self.roots[label] = None
            self.registry.note_root_call(label)
            if self.on_root_call is not None and graph_task_id() == -1:
                self.on_root_call(args)
        span = self._spans.open(label, caller)
        opened = span[2]
        inside, around = _NOTHING if by_hand else self.cost
        inside += perf_counter_ns() - opened
        # By id: a call that never returns holds nothing.
        calls.append((id(module), span, by_hand, inside, around + opened - began))

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        began = perf_counter_ns()
        calls = self._stack.calls
        if calls and calls[-1][0] == id(module):  # few looks: between a model's products each one is at cold memory
            _, span, _, inside, around = calls.pop()
            if span is not None:
                self._spans.close(span, began, inside, around)
            return
        for depth in range(len(calls) - 2, -1, -1):
            if calls[depth][0] == id(module):
                # Checkpointing stops a recompute with an exception: calls above this one never returned.
                self._close_above(depth, began)
                return

    def _close_above(self, depth: int, began: int = 0) -> None:
        calls = self._stack.calls
        while len(calls) > depth:
            _, span, _, inside, around = calls.pop()
            if span is not None:
                self._spans.close(span, began, inside, around)
                began = 0  # of those that never returned nobody knows


def no_compile_warning() -> AbstractContextManager[None]:
    """Dynamo warns that global hooks fire for a compiled module too: that is what is wanted here."""
    return unheard(r"Using `torch\.compile\(module\)` when there are global hooks")
