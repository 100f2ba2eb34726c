"""The survey: one more step that collects what would disturb the timing.

It notes, for the nodes and ops of one step, the source line (a TorchFunctionMode), the floating-point operations (a
TorchDispatchMode over torch's own formulas), the parameter behind each AccumulateGrad, and the graph that the engine
runs. ``attribute`` carries these notes over to the timed steps: the same step makes the same nodes in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from types import FrameType
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope import markers
from gradscope.capture.aside import Aside
from gradscope.capture.callers import GENERATED, OURS, REPLACEMENTS, TORCH, is_notation, is_standard, stack
from gradscope.capture.graphs import starts_of, walked
from gradscope.capture.guard import Guard
from gradscope.capture.modes import run_operation
from gradscope.capture.modules import SpanRecorder
from gradscope.capture.registry import ModuleRegistry, Seen
from gradscope.compat import TraceMarker, flop_formulas, keep_eager, keep_frame_eager
from gradscope.process import unheard
from gradscope.tables import GraphNode, LineInfo

_RECORD = "torch._ops.profiler"  # record_function's two halves
_OWN = tuple(f"{OURS}{name}" for name in ("capture", "workload", "pipeline.py", "cli"))
# What is read like an attribute, and computed: views with a node each. None: a function that is called.
_COMPUTED = (None, "T", "H", "mT", "mH", "real", "imag")


def _attribute(function: Callable[..., Any]) -> str | None:
    """The attribute of a tensor that ``function`` reads; None where it is called as a function."""
    if getattr(function, "__name__", "") != "__get__":
        return None
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))


SOURCE_LINES, FLOPS = "recording source lines", "counting operations"  # under which the guard notes an error


class LineTracer:
    """Marks every torch function that user code calls with the source line it was called from.

    Args:
        mode: one for the whole run, see :class:`LineMode`.
        guard: notes what goes wrong here; the functions are called all the same.
    """

    def __init__(self, mode: LineMode, guard: Guard) -> None:
        self._guard = guard
        self.spans = SpanRecorder(markers.LINE)
        self.lines: list[LineInfo] = []
        self._labels: dict[tuple[str, str, int], int] = {}  # file, function, line
        self._places: dict[str, _CodeOf] = {}  # by file
        self._mode = mode

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Trace until the block is left."""
        self._mode.turn_on(self)
        try:
            # What warns of its caller's line finds the mode's own there: the steps before have shown it.
            with self._marking_functions(), unheard(module=r"gradscope\."):
                yield
        finally:
            self._mode.turn_off()

    def inside_backward(self) -> AbstractContextManager[None]:
        """Trace what runs inside the engine: ``backward`` is itself a torch function, inside which the mode is off."""
        return nullcontext() if self.is_aside() else LineMode(self)

    def is_aside(self) -> bool:
        """Check that compiled code runs, which is not traced."""
        return self._mode.aside.is_aside()

    def call(self, function: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any) -> Any:
        """Call ``function`` inside a span of the line that ``frame``, or the first user frame above it, is at."""
        # .shape, .device, .requires_grad: nothing is computed. And record_function opens a row that outlives the call:
        # inside a line's own row it would be cut off with it.
        attribute = _attribute(function)
        if attribute == "data":
            with TraceMarker(markers.OWN + "0"):  # torch detaches in it, under a dispatch mode only
                return function(*args, **kwargs)
        if attribute not in _COMPUTED or getattr(function, "__module__", "") == _RECORD:
            return function(*args, **kwargs)
        span = None
        try:
            label = self._label(frame)
            span = None if label is None else self.spans.open(label)
        except Exception as error:
            self._guard.note(SOURCE_LINES, error)
        try:
            return function(*args, **kwargs)
        finally:
            if span is not None:
                with self._guard.over(SOURCE_LINES):
                    self.spans.close(span)

    def _label(self, frame: FrameType | None) -> int | None:
        """The number of the line that ``frame`` is at, or the first user frame above it; None: of a graph's call."""
        generated = False
        while frame is not None:
            code = frame.f_code
            place = self._places.get(code.co_filename)
            if place is None:
                place = self._places[code.co_filename] = _place_of(code.co_filename)
            if place is _CodeOf.OURS:  # above it there is only what started gradscope
                break
            if place is _CodeOf.GRAPHS or (place is _CodeOf.DYNAMO and generated):
                return None
            generated |= place is _CodeOf.GENERATED
            if place is _CodeOf.USER:
                key = (code.co_filename, code.co_qualname, frame.f_lineno)
                label = self._labels.get(key)
                if label is None:
                    label = self._labels[key] = len(self.lines)
                    self.lines.append(LineInfo(code.co_filename, frame.f_lineno, code.co_qualname))
                return label
            frame = frame.f_back
        return -1

    @contextmanager
    def _marking_functions(self) -> Iterator[None]:
        """``Function.apply`` is no torch function, so the mode does not see it: mark its line here.

        In the class below ``Function``, which its ``apply`` calls: programs keep ``square = Square.apply`` from before.
        """
        base: Any = torch.autograd.Function.__base__
        tracer = self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = super(base, cls).apply  # type: ignore[misc]
            if torch.compiler.is_compiling() or tracer.is_aside():
                return bound(*args, **kwargs)
            return tracer.call(bound, sys._getframe(1), args, kwargs)

        keep_frame_eager(apply)
        base.apply = classmethod(apply)
        try:
            yield
        finally:
            del base.apply


keep_eager(LineTracer.is_aside)  # which a compiled function may call


class _CodeOf(Enum):
    USER = "user"
    LIBRARY = "library"
    OURS = "ours"
    # What torch does around a compiled graph: its line has to do with nothing that runs. A graph of torch.fx is one
    # where Dynamo calls it; it also puts functions of its own around what it leaves alone.
    GRAPHS = "graphs"
    GENERATED = "generated"
    DYNAMO = "dynamo"


_AROUND_GRAPHS = {
    f"{TORCH}_functorch/_aot_autograd/": _CodeOf.GRAPHS,
    f"{TORCH}_inductor/": _CodeOf.GRAPHS,
    f"{TORCH}_dynamo/": _CodeOf.DYNAMO,
    GENERATED: _CodeOf.GENERATED,
}


def _place_of(filename: str) -> _CodeOf:
    if filename.startswith(_OWN) and not filename.startswith(REPLACEMENTS):
        return _CodeOf.OURS
    for start, place in _AROUND_GRAPHS.items():
        if filename.startswith(start):
            return place
    # What logging prints is the line's that logs.
    if filename.startswith((TORCH, *REPLACEMENTS)) or is_standard(filename) or is_notation(filename):
        return _CodeOf.LIBRARY
    return _CodeOf.USER


def user_line(frames: Sequence[tuple[str, int, str]]) -> LineInfo | None:
    """The user's line among frames, (file, line, function), innermost last; None where there is none."""
    for file, line, function in reversed(frames):
        if _place_of(file) is _CodeOf.USER:
            return LineInfo(file, line, function)
    return None


def user_frame() -> tuple[str, int, str] | None:
    """Where this thread is in the user's code, as (file, line, function): where it called what is running now."""
    for frame in stack(sys._getframe(1)):
        code = frame.f_code
        if _place_of(code.co_filename) is _CodeOf.USER and not code.co_filename.startswith(OURS):
            return code.co_filename, frame.f_lineno, code.co_name
    return None


class Tracer(Protocol):
    """Sees the torch functions that user code calls."""

    def call(self, function: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, called from ``frame``."""


class LineMode(TorchFunctionMode):
    """Hands the torch functions that user code calls to a :class:`Tracer`, where one is at work.

    A step that ends inside ``backward()`` ends inside a torch function, for which torch has taken the mode off its
    stack and will put it back; only from outside of that call can it be removed for good. So it may stay on from one
    tracer to the next: call :meth:`release` once the loop is left.
    """

    def __init__(self, tracer: Tracer | None = None, aside: Aside | None = None) -> None:
        super().__init__()
        self._tracer = tracer
        self.aside = aside or Aside(is_own)
        self._entered = False

    def turn_on(self, tracer: Tracer) -> None:
        """Let ``tracer`` see every call from now on."""
        self._tracer = tracer
        if not self._entered:
            self._entered = True
            self.aside.enter(self)

    def turn_off(self) -> None:
        """Let nobody see a call any more."""
        self._tracer = None
        self.release()

    def release(self) -> None:
        """Take the mode off torch's stack, where it lies there, or is to."""
        if self._entered and self.aside.leave(self):
            self._entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._tracer is None:
            return func(*args, **(kwargs or {}))
        return self._tracer.call(func, sys._getframe(1), args, kwargs or {})


class FlopMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes a FLOP marker for each op that torch's registry has a formula for."""

    def __init__(self, guard: Guard, aside: Aside) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard, self._aside = guard, aside
        self._formulas = flop_formulas()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Until the block is left, on whatever part of torch's stack the mode lies then."""
        self._aside.enter(self)
        try:
            yield
        finally:
            self._aside.leave(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = self._formulas.get(func._overloadpacket)
        if formula is None and torch.is_inference_mode_enabled():
            with self:  # there a mode is given what consists of others whole: a linear, say
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = run_operation(func, args, kwargs)
        if formula is not None:
            with self._guard.over(FLOPS):
                self._count(formula(*args, **kwargs, out_val=result))
        return result

    def _count(self, flops: int) -> None:
        with TraceMarker(markers.FLOP + str(int(flops))):
            pass


def is_own(mode: Any) -> bool:
    """Check that a mode is gradscope's."""
    return isinstance(mode, (LineMode, FlopMode))


class GraphTracer:
    """Notes the graph of each backward pass, and marks each AccumulateGrad with its parameter."""

    def __init__(self, registry: ModuleRegistry | None = None) -> None:
        self.graphs: list[tuple[GraphNode, ...]] = []  # one a backward pass, in order
        self.parameters: Seen[torch.Tensor] = Seen()
        self.owners: list[tuple[int, ...]] = []  # of each of them the labels of the modules that held it
        self._registry = registry or ModuleRegistry()
        self._handles: list[Any] = []

    @contextmanager
    def tracing(self, roots: Any, visit: Callable[[list[Any]], None] | None = None) -> Iterator[None]:
        """Note the graph below ``roots``; inside the block the parameters it reaches mark their AccumulateGrad.

        Args:
            visit: called with all nodes of the graph before it runs.
        """
        self._walk(roots, visit)
        try:
            yield
        finally:
            while self._handles:
                self._handles.pop().remove()

    def _walk(self, roots: Any, visit: Callable[[list[Any]], None] | None) -> None:
        order, whole = walked(starts_of(roots))
        numbers = {node: number for number, node in enumerate(order)}
        notes = tuple(self._note(node, numbers) for node in order)
        # By a part of a graph no sum of gradients can be told.
        self.graphs.append(notes if whole else ())
        if visit is not None:
            visit(order)

    def _note(self, node: Any, numbers: dict[Any, int]) -> GraphNode:
        edges = tuple((numbers.get(next_node, -1), number) for next_node, number in node.next_functions)
        variable = getattr(node, "variable", None) if not node.next_functions else None
        if variable is None:
            return GraphNode(node._sequence_nr(), -1, edges)
        index = self.parameters.number(variable)
        if index == len(self.owners):
            self.owners.append(self._registry.owners_of(variable))
        self._handles.append(variable.register_post_accumulate_grad_hook(parameter_marker(index)))
        return GraphNode(-1, index, edges)


def parameter_marker(index: int) -> Callable[[torch.Tensor], None]:
    name = markers.PARAMETER + str(index)

    def mark(_parameter: torch.Tensor) -> None:
        with TraceMarker(name):
            pass

    return mark
