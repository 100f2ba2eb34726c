"""Writes down one run of a model: every torch call with its tensors, and where in the source it stands.

A mode of ``torch.overrides`` sees the calls as the user wrote them: ``F.dropout``, not what it is made of.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Number
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradscope.capture.callers import compiled_by, is_standard, stack
from gradscope.capture.guard import Guard
from gradscope.capture.hooks_aside import HooksAside
from gradscope.recording.graph import Frame, Node, Place, Span, Value, version_of
from gradscope.recording.live import LiveObjects, RecordedCall
from gradscope.recording.operations import LOOKS, SHOWS, canonical
from gradscope.recording.stack import above_logging, is_skipped
from gradscope.tensor_refs import TensorRef, tensor_ref

# Calls that read a tensor's content into Python, or need it to know how large their result is.
_READS = SHOWS | {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__contains__", "is_nonzero", "cpu", "to", "equal", "allclose", "nonzero", "argwhere", "masked_select", "unique",
    "unique_consecutive",
}  # fmt: skip

_SETTINGS = (bool, int, float, str, type(None))

# Modules of types whose objects hold no tensor.
_PLAIN = frozenset({"builtins", "torch", "torch._C"})

_T = TypeVar("_T")

# A frame of these may go on after it was left: what it holds is not ours to drop.
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Tape(TorchFunctionMode):
    """Writes down every call, with frames as far as they are the user's.

    Args:
        guard: notes what goes wrong in a hook; without one it is raised.
        aside: takes hooks out where Dynamo would see them; without one nothing may be compiled meanwhile.

    Attributes:
        nodes, values: what was written.
        live: the user's objects behind it.
    """

    def __init__(self, guard: Guard | None = None, aside: HooksAside | None = None) -> None:
        super().__init__()
        self._guard, self._aside = guard, aside
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.live = LiveObjects()
        self._latest: dict[int, Value] = {}  # by id of the tensor
        self._tensors = 0
        # By address: a number, and who uses it, by id.
        self._storages: dict[int, tuple[int, dict[int, TensorRef]]] = {}
        self._addresses = 0
        self._frames: dict[int, Frame] = {}  # by id of the interpreter's frame, which the table holds
        self._count = 0
        # By id of the code, which is held here: some cannot be hashed.
        self._positions: dict[int, tuple[CodeType, list[tuple[int | None, ...]]]] = {}
        self._bottom: FrameType | None = None
        self._only_modules = False
        self._depth = 0  # of module calls, where only these are looked into
        self._below = False  # whether no frame of the user's calls the model

    def run(self, run: Callable[[], Any]) -> Any:
        """Run the user's code: frames below this call are the user's."""
        self._bottom = sys._getframe()
        try:
            with self.hooked():
                return run()
        finally:
            self._bottom = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook modules until the block is left: frames are let go of when their module's forward ends."""
        with self._holding(partial(register_module_forward_hook, self._guarded(self._left), always_call=True)):
            yield

    @contextmanager
    def _holding(self, register: partial[RemovableHandle]) -> Iterator[None]:
        if self._aside is not None:
            with self._aside.holding(register):
                yield
            return
        hook = register()
        try:
            yield
        finally:
            hook.remove()

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        return hook if self._guard is None else self._guard.hook("recording", hook)

    def leave_frames(self) -> None:
        """Drop the frames and what their names hold: the run is over."""
        for known in self._frames.values():
            self._leave(known)
        self._frames.clear()
        self._latest.clear()

    @contextmanager
    def inside_modules(self) -> Iterator[None]:
        """Frames that call a model are not looked into: they go on, and with them what a look at their names keeps."""
        self._only_modules = True
        try:
            with self._holding(partial(register_module_forward_pre_hook, self._guarded(self._entered))):
                yield
        finally:
            self._bottom, self._depth = None, 0

    def below(self, run: Callable[[], _T]) -> _T:
        """Call ``run``, of which every frame is looked into as a model's are: when it returns they are gone."""
        self._bottom, self._depth, self._below = sys._getframe(), 1, True
        try:
            return run()
        finally:
            self._bottom, self._depth, self._below = None, 0, False
            self._let_go(sys._getframe())

    def _entered(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._bottom = _caller(sys._getframe(1))
        self._depth += 1
        if self._aside is not None and not self._depth % self._aside.room.AHEAD:
            self._aside.room.make(self._depth)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward ended: its frame and those below it need not be held any more."""
        self._let_go(sys._getframe())
        if self._only_modules:
            self._depth = max(self._depth - 1, 0)
            if self._depth == 0:
                self._bottom = None

    def _let_go(self, innermost: FrameType) -> None:
        """Let go of frames that do not run any more, and so of what their names hold."""
        if not self._frames:
            return
        running = {id(frame) for frame in stack(innermost)}
        for key in [key for key in self._frames if key not in running]:
            self._leave(self._frames.pop(key))

    def _leave(self, known: Frame) -> None:
        """Drop what the names of a frame hold that does not run any more, unless it may go on later."""
        frame = self.live.frames.pop(known.index)
        if not known.suspends:
            with suppress(RuntimeError):  # still running: it lets go of its names itself
                frame.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, sys._getframe(1), args, kwargs or {})

    def call(
        self, func: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any, run: Callable[..., Any] | None = None
    ) -> Any:
        """Call ``func(*args, **kwargs)`` from ``frame`` and write it down as a node.

        Args:
            run: called in the place of ``func``, which names the operation.
        """
        run = run or func
        self._let_go(frame)
        op = canonical(func)
        if op in LOOKS:
            return self.read(func, op, frame, args, kwargs, run) if op in SHOWS else run(*args, **kwargs)
        inputs: list[Value] = []
        held: list[Tensor] = []
        with torch._C.DisableTorchFunction():  # a mode of the user's sees the user's calls alone
            kept_args = tuple(self._replaced(argument, inputs, held) for argument in args)
            kept_kwargs = {name: self._replaced(argument, inputs, held) for name, argument in kwargs.items()}
            versions = [version_of(tensor) for tensor in held]
        result = run(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            pairs = zip(held, versions, strict=True)
            changed = frozenset(self._storage(tensor) for tensor, version in pairs if version_of(tensor) != version)
            node = self._node(op, RecordedCall(func, kept_args, kept_kwargs), inputs, changed)
            self._add(node, [args[0]] if op == "setitem" else _tensors(result))  # an assignment returns nothing
            node.places = self._places(frame, shown=op in _READS and not node.outputs)
            if not node.places and self._only_modules and not self._below:
                node.outside = next(iter(self._outside(frame, shown=False)), None)
            node.caller = self._caller(frame)
            node.compiled = _depth_compiled(frame)
        return result

    def _node(self, op: str, call: RecordedCall, inputs: Iterable[Value], changed: frozenset[int]) -> Node:
        node = Node(len(self.nodes), op, self.live, tuple(inputs), (), (), changed, torch.is_grad_enabled())
        self.live.calls[node.index] = call
        self.nodes.append(node)
        return node

    def _add(self, node: Node, made: Iterable[Tensor]) -> None:
        node.autocast = any(map(_casts, {value.device.type for value in node.inputs}))
        for value in node.inputs:
            if not value.users or value.users[-1] is not node:  # given twice
                value.users.append(node)
        node.outputs = tuple(self._new(tensor, node) for tensor in made)

    def read(
        self,
        func: Callable[..., Any],
        op: str,
        frame: FrameType,
        args: Any,
        kwargs: Any,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Write ``func(*args, **kwargs)`` down as a node that uses nothing: what is shown stands in nobody's way.

        Args:
            run: as of :meth:`call`.
        """
        inputs: list[Value] = []
        with torch._C.DisableTorchFunction():  # as in a call
            kept_args = tuple(self._replaced(argument, inputs, []) for argument in args)
            node = self._node(op, RecordedCall(func, kept_args, {}), inputs, frozenset())
            node.places = self._places(frame, shown=True)
        result = (run or func)(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            node.outputs = tuple(self._new(tensor, node) for tensor in _tensors(result))
        return result

    def _replaced(self, argument: Any, inputs: list[Value], held: list[Tensor]) -> Any:
        if isinstance(argument, Tensor):
            value = self._value(argument)
            inputs.append(value)
            held.append(argument)
            return value
        if isinstance(argument, (list, tuple)):
            parts = [self._replaced(part, inputs, held) for part in argument]
            return tuple(parts) if isinstance(argument, tuple) else parts
        if isinstance(argument, dict):
            return {name: self._replaced(part, inputs, held) for name, part in argument.items()}
        if self._only_modules and not _is_plain(argument):
            return ...  # a hook, or an object of the user's: tensors may hang on it, and the step goes on without them
        return argument

    def _value(self, tensor: Tensor) -> Value:
        """The tensor at its version now."""
        known = self._latest.get(id(tensor))
        if known is not None and known.tensor() is tensor and known.content[1] == version_of(tensor):
            return known
        return self._new(tensor, None)

    def _new(self, tensor: Tensor, producer: Node | None) -> Value:
        known = self._latest.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            serial = known.content[0]
        else:
            serial = self._tensors
            self._tensors += 1
        reference = tensor_ref(tensor)
        made = Value(
            len(self.values),
            (serial, version_of(tensor)),
            tuple(tensor.shape),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            self._storage(tensor, reference),
            reference,
            producer,
            strides=tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None,
        )
        self.values.append(made)
        self._latest[id(tensor)] = made
        return made

    def _storage(self, tensor: Tensor, reference: TensorRef | None = None) -> int:
        """A number for the tensor's memory; an address that was freed and is used again has another."""
        address = _address(tensor)
        known = self._storages.get(address)
        if known is None or not _is_used(known[1]):
            self._addresses += 1
            known = self._storages[address] = (self._addresses, {})
        user = known[1].get(id(tensor))
        if user is None or user() is not tensor:
            known[1][id(tensor)] = reference or tensor_ref(tensor)
        return known[0]

    def _places(self, innermost: FrameType, *, shown: bool) -> tuple[Place, ...]:
        """Return where the frames stand; of what is ``shown``, as by logging, it is the user's line that counts."""
        if shown:
            innermost = above_logging(innermost)
        if self._only_modules and self._bottom is None:
            return self._outside(innermost, shown=shown)
        found: list[Place] = []
        for frame in stack(innermost):
            if frame is self._bottom:
                break
            if is_skipped(frame) or (shown and not found and is_standard(frame.f_code.co_filename)):
                continue
            names = {name: self._value(held) for name, held in frame.f_locals.items() if isinstance(held, Tensor)}
            found.append(Place(self._frame(frame), self._span(frame), names))
        return tuple(found)

    def _outside(self, innermost: FrameType, *, shown: bool) -> tuple[Place, ...]:
        """The first frame of the user's: its place, and nothing of what it holds."""
        for frame in stack(innermost):
            if not (is_skipped(frame) or (shown and is_standard(frame.f_code.co_filename))):
                made = Frame(self._count, frame.f_code, False, self.live)
                self._count += 1
                return (Place(made, self._span(frame), {}),)
        return ()

    def _caller(self, innermost: FrameType) -> nn.Module | None:
        found = None
        for frame in stack(innermost):
            if frame is self._bottom or not is_skipped(frame):
                break
            if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
                found = frame.f_locals["self"]
        return found

    def _frame(self, frame: FrameType) -> Frame:
        known = self._frames.get(id(frame))
        if known is not None:
            return known
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        plain = getattr(frame.f_globals.get(code.co_name), "__code__", None) is code
        owner = first if isinstance(first, nn.Module) and not plain else None
        made = Frame(self._count, code, bool(code.co_flags & _SUSPENDS), self.live)
        made.owner = owner
        self.live.frames[made.index], self.live.globals[made.index] = frame, frame.f_globals
        self.live.settings[made.index] = {
            name: held for name, held in frame.f_locals.items() if isinstance(held, _SETTINGS)
        }
        self._count += 1
        self._frames[id(frame)] = made
        return made

    def _span(self, frame: FrameType) -> Span | None:
        code = frame.f_code
        if id(code) not in self._positions:
            self._positions[id(code)] = code, list(code.co_positions())
        _, positions = self._positions[id(code)]
        line, end_line, column, end_column = positions[frame.f_lasti // 2]
        if line is None or end_line is None or column is None or end_column is None:
            return None
        return Span(line, end_line, column, end_column)


class Reader(Protocol):
    """Writes down the calls that read a tensor's content."""

    def read(self, function: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` from ``frame``."""


def reads_content(op: str) -> bool:
    """Return whether the operation reads a tensor's content into Python, or to know how large its result is."""
    return op in _READS


class Reads(TorchFunctionMode):
    """Writes down only what reads a tensor's content."""

    def __init__(self, recorder: Reader) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.read(func, sys._getframe(1), args, kwargs or {})


def _caller(frame: FrameType) -> FrameType:
    """The frame that calls the hook: the guard's, which lies above it, is gone when the module runs."""
    while frame.f_back is not None and frame.f_globals.get("__name__") == Guard.__module__:
        frame = frame.f_back
    return frame


def _is_plain(argument: Any) -> bool:
    """Return whether it is a value that no tensor hangs on: a number, a text, a dtype, a slice."""
    kind = type(argument)
    if issubclass(kind, Number):  # NumPy's too: what np.sqrt() gives
        return True
    return kind.__module__ in _PLAIN and not isinstance(argument, (FunctionType, MethodType))


def _depth_compiled(innermost: FrameType) -> int | None:
    """Return how many user frames are inside of the nearest function that torch.compile made; None for none."""
    compiled = compiled_by(innermost)
    if compiled is None:
        return None
    inside = itertools.takewhile(lambda frame: frame is not compiled, stack(innermost))
    return sum(not is_skipped(frame) for frame in inside)


def _casts(device: str) -> bool:
    """Return whether autocast is on; some devices, as "meta", have none."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _is_used(users: dict[int, TensorRef]) -> bool:
    """Return whether one of them lives; those in front that do not are taken out."""
    while users:
        first = next(iter(users))
        if users[first]() is not None:
            return True
        del users[first]
    return False


def _address(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # no memory of its own: sparse, or wrapped by a transform
        return id(tensor)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)
