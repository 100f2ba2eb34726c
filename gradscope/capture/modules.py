"""Module-call spans from two process-wide forward hooks; nothing is added to the user's modules.

A hook reads the clock when it begins and ends. How torch gets to it, on the slower way that it takes as soon as any
module has a hook, is not in between: that is measured once, on an empty module.
"""

from __future__ import annotations

import itertools
import sys
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradscope import markers
from gradscope.capture.byhand import BY_HAND, TORCHS_CALL, classes_to_watch, watching, watching_compiled
from gradscope.capture.guard import Guard
from gradscope.capture.hooks_aside import HooksAside
from gradscope.capture.registry import NOBODYS, ModuleRegistry, all_modules
from gradscope.capture.variety import StepBounds, step_begins, step_ended
from gradscope.compat import (
    DYNAMO,
    end_range,
    graph_task_id,
    has_global_module_hooks,
    keep_eager,
    open_range,
    sequence_number,
)
from gradscope.process import RoomForCalls, unheard
from gradscope.tables import SpanTable
from gradscope.tree import children_of


class CallCost(NamedTuple):
    """What noting a span costs, in ns."""

    inside: int = 0  # of the span's own row
    around: int = 0  # of the row around it


Span = tuple[int, Any, int]  # one that is open: its number, its marker, when its row began by ``perf_counter_ns``


class SpanRecorder:
    """Opens and closes spans on any thread; one call that extends an array each, so that threads need no lock.

    Span ``k`` writes a marker row ``<prefix>k`` around itself and notes the sequence numbers before and after.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counter = itertools.count()
        # Numbers in arrays, for tuples that stay would make Python look for garbage more often.
        self._opened = array("q")  # k, label, low, caller
        self._closed = array("q")  # k, high, ns that the row was open, ns of noting it inside of the row, and around it
        self._timed = False

    def open(self, label: int, caller: int = -1) -> Span:
        """Open a span; hand the result to :meth:`close`, on the same thread.

        Args:
            caller: number of the instruction that it was called from.
        """
        number = next(self._counter)
        self._opened.extend((number, label, sequence_number(), caller))
        return number, open_range(self._prefix + str(number)), perf_counter_ns()

    def close(self, span: Span, began: int = 0, inside_ns: int = 0, around_ns: int = 0) -> None:
        """Close a span.

        Args:
            began: when the work of closing it did, by ``perf_counter_ns``; 0 where it was not timed.
            inside_ns, around_ns: what opening it took, in its own row and in the row around it.
        """
        number, marker, opened = span
        ended = perf_counter_ns()  # the row ends at the beginning of what follows, as it began at the end of its enter
        end_range(marker)
        if began:
            self._timed = True
            inside_ns += ended - began
            around_ns += perf_counter_ns() - ended
        self._closed.extend((number, sequence_number(), ended - opened, inside_ns, around_ns))

    def __len__(self) -> int:
        """How many were opened so far."""
        return len(self._opened) // 4

    def layout(self, first: int, base: int) -> tuple[tuple[int, int], ...]:
        """Label and distance to number ``base`` of the spans from ``first`` on."""
        opened = self._opened[4 * first :]
        return tuple((label, base - low) for label, low in zip(opened[1::4], opened[2::4], strict=True))

    def labels(self) -> set[int]:
        """Labels of all spans so far."""
        return set(self._opened[1::4])

    def table(self) -> SpanTable:
        """All spans so far, row k for span k; a handler of a signal that raised may have kept some from being noted."""
        number, labels, first, callers = _columns(self._opened, 4)
        count = int(number.max(initial=-1)) + 1
        label, caller = np.full((2, count), -1, np.int64)
        low, opened = np.zeros((2, count), np.int64)
        label[number], low[number], caller[number] = labels, first, callers
        high = low.copy()
        number, *noted = _columns(self._closed, 5)
        inside, around = np.zeros((2, len(label)), np.int64)
        for column, values in zip((high, opened, inside, around), noted, strict=True):
            column[number] = values
        if not self._timed:
            return SpanTable(label, low, high, caller=caller)
        return SpanTable(label, low, high, inside, around, opened, caller)


def _columns(numbers: array[int], count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64).reshape(-1, count).T


class SpanStack(threading.local):
    """The open module calls of one thread, innermost last."""

    def __init__(self) -> None:
        # id of the module, its span, whether no hook of torch's has told of the call, and what opening the span took,
        # inside of its row and around it.
        self.calls: list[tuple[int, Span | None, bool, int, int]] = []


MODULE_CALLS = "recording module calls"  # under which the guard notes an error

_NOTHING = CallCost()
_BELOW = 5  # frames from a hook to that which called the module: the guard's, and three of torch's
_frame = sys._getframe
_AHEAD = RoomForCalls.AHEAD


class CallRecorder:
    """Notes every module call of the process while :meth:`recording`.

    Full backward hooks would be wrong here: they fire at gradients of inputs and outputs, so a layer whose inputs need
    none is timed wrongly (0.023 ms for an embedding that took 0.294), and they change the graph that is measured.
    """

    def __init__(
        self, guard: Guard | None = None, registry: ModuleRegistry | None = None, aside: HooksAside | None = None
    ) -> None:
        self._guard = guard or Guard()
        self._aside = aside or HooksAside()
        self.registry = registry or ModuleRegistry()  # gives modules their labels
        self.roots: dict[int, None] = {}  # labels of modules called while no other module was, each once
        self._alone: set[int] = set()  # of those, what was called outside of a backward pass
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
            enter, leave = (self._guard.hook(MODULE_CALLS, hook) for hook in (self._enter, self._leave))
            keep_eager(enter)  # and the other, whose code is the same
            hooks = self._aside.holding(
                partial(register_module_forward_pre_hook, enter),
                partial(register_module_forward_hook, leave, always_call=True),
            )
            stack.enter_context(hooks)
            yield

    def look_for_models(self, parameters: Sequence[torch.Tensor]) -> None:
        """A compiled function was run with these: it calls modules in which nothing is called."""
        if self._stack.calls:
            return
        for label in self.registry.roots_with(parameters):
            self.roots[label] = None
            self.registry.note_root_call(label)

    def look_for_calls_by_hand(self, leaves: Iterable[torch.Tensor], models: Iterable[nn.Module]) -> None:
        """See calls that hooks do not tell of from now on, where what was called so far shows that there are some.

        Args:
            leaves: what the backward passes so far have led to.
            models: those known.
        """
        known = {id(module): module for module in (*models, *self.registry.alive(), *all_modules())}
        found = classes_to_watch(known.values(), set(map(id, leaves)), self._is_always_told_of)
        found -= self.registry.called_by_hand
        self.registry.called_by_hand |= found
        self._by_hand.enter_context(self._watching(found))

    def _watching(self, kinds: Collection[type[nn.Module]]) -> AbstractContextManager[None]:
        return self._aside.until_compiled(watching(kinds, self._enter_by_hand, self._leave_by_hand))

    def _is_always_told_of(self, module: nn.Module) -> bool:
        """Check that hooks told of the module's calls, and of none of its parts while no module was open.

        Such a part was called by the user's code, or by a ``module.forward(x)`` beside calls that hooks tell of; not
        so where backward makes a checkpointed forward again, which torch does function by function.
        """
        get, parts = self.registry.get, children_of(module)
        return get(module) in self._spans.labels() and not any(get(part) in self._alone for part in parts)

    def _watch_by_hand(self, stack: ExitStack) -> None:
        self._by_hand = ExitStack()
        stack.callback(self._by_hand.close)
        with self._guard.over(BY_HAND):
            self._by_hand.enter_context(self._watching(self.registry.called_by_hand))
        if DYNAMO in sys.modules:
            with self._guard.over(BY_HAND):
                stack.enter_context(watching_compiled(all_modules(), self._enter_by_hand, self._leave_by_hand))

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
        elif calls and self.registry.inside.get(calls[-1][0]) == id(module):
            calls.append(
                (id(module), None, False, 0, 0)
            )  # what torch.compile made runs it as it is: one place, one call
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
        if not calls and label != NOBODYS:
            self.root = label
            self.roots[label] = None
            self.registry.note_root_call(label)
            if graph_task_id() == -1:
                self._alone.add(label)
                if self.on_root_call is not None:
                    self.on_root_call(args)
        span = self._spans.open(label, caller)
        opened = span[2]
        inside, around = _NOTHING if by_hand else self.cost
        inside += perf_counter_ns() - opened
        # By id: a call that never returns holds nothing.
        calls.append((id(module), span, by_hand, inside, around + opened - began))
        if not len(calls) % _AHEAD:
            self._aside.room.make(len(calls))

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


CALL_COST = "measuring the overhead of a module call"  # under which the guard notes an error

_CALLS = 200


class _Empty(nn.Module):
    def forward(self) -> None:
        """Do nothing."""


def measure_call_cost(guard: Guard) -> CallCost:
    """The usual cost of a call of an empty module, less what the hooks timed.

    Nothing is measured where other hooks on all modules are in place, or another function in the place of torch's
    call, for these would see the empty module. Hooks make torch take its slower way in any case; what is then not
    known is the way to one more hook.
    """
    if has_global_module_hooks() or nn.Module.__call__ is not TORCHS_CALL or torch.compiler.is_compiling():
        return CallCost()
    module, recorder = _Empty(), CallRecorder(guard, ModuleRegistry())
    plain = np.median([_timed(module) for _ in range(_CALLS)])
    with recorder.recording():
        whole = np.array([_timed(module) for _ in range(_CALLS)])
    calls = recorder.table()
    if calls.inside_ns is None or calls.around_ns is None or calls.open_ns is None or len(calls) != _CALLS:
        return CallCost()  # another thread called modules meanwhile
    inside = np.median(calls.open_ns - calls.inside_ns)
    around = np.median(whole - calls.open_ns - calls.around_ns)
    return shared_cost(int(inside), int(around), int(plain))


def shared_cost(inside_ns: int, around_ns: int, plain_ns: int) -> CallCost:
    """What a call takes more than the ``plain_ns`` that it takes without hooks, in the proportion of its two parts."""
    whole = inside_ns + around_ns
    more = max(whole - plain_ns, 0)
    inside = more * inside_ns // whole if whole > 0 else 0
    return CallCost(inside, more - inside)


def _timed(module: nn.Module) -> int:
    began = perf_counter_ns()
    module()
    return perf_counter_ns() - began
