"""One run of a model, written down as a graph: every torch call with its tensors, and where in the source it stands.

A mode of ``torch.overrides`` sees the calls as the user wrote them: ``F.dropout``, not what it is made of. Tensors are
held by weak references only, so that what is still alive after the run is what the model itself keeps.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradscope.patching.operations import LOOKS, canonical

_SKIPPED = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent.parent}{os.sep}")

_SETTINGS = (bool, int, float, str, type(None))

# A frame of these may go on after it was left: what it holds is not ours to drop.
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(eq=False)
class Value:
    """A tensor at one version of its content, as one call made it.

    A call that returns its argument, as dropout does in evaluation, makes a value of its own with the same content.
    """

    index: int
    content: tuple[int, int]  # equal for the same tensor at the same version
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int  # equal for tensors that share memory
    tensor: weakref.ref[Tensor]
    producer: Node | None = None
    users: list[Node] = field(default_factory=list)
    kept: bool | None = None  # whether the tensor outlived the run, once that is settled
    same: bool = True  # whether it was still at this version then
    strides: tuple[int, ...] | None = None  # None: it has none, being sparse or nested

    @property
    def alive(self) -> bool:
        """Whether the tensor outlived the run."""
        return self.kept if self.kept is not None else self.tensor() is not None

    def settle(self) -> None:
        """Fix what is alive: what a later run makes under the same address is another tensor."""
        tensor = self.tensor()
        self.kept = tensor is not None
        self.same = tensor is not None and _version(tensor) == self.content[1]


@dataclass(eq=False)
class Frame:
    """One call of a Python function of the user's."""

    index: int
    code: CodeType
    globals: dict[str, Any]
    owner: object  # its first argument, where that is a module and the function not one of a file's own
    suspends: bool
    settings: dict[str, Any] = field(default_factory=dict)  # its names that held numbers, texts or None at first


@dataclass(frozen=True)
class Span:
    """A piece of source text: lines from 1, columns in bytes from 0, as :mod:`ast` counts them."""

    line: int
    end_line: int
    column: int
    end_column: int


@dataclass(frozen=True, eq=False)
class Place:
    """Where a frame stood when a call was made, and which tensors its names held then."""

    frame: Frame
    span: Span | None
    names: dict[str, Value]


@dataclass(eq=False)
class Node:
    """One torch call; in ``args`` and ``kwargs`` tensors are replaced by their values."""

    index: int
    op: str  # the canonical name, see operations.py
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    places: tuple[Place, ...]  # innermost first
    changed: frozenset[int]  # storages whose content it changed in place
    grad: bool  # whether gradients were recorded then
    caller: nn.Module | None = None  # the module of torch's own that the user's code called for it, as an nn.Linear
    autocast: bool = False  # whether torch chose dtypes then

    @property
    def output(self) -> Value:
        """The only or first output."""
        return self.outputs[0]

    def place_in(self, frame: Frame) -> Place | None:
        """Where ``frame`` stood when this call was made under it."""
        return next((place for place in self.places if place.frame is frame), None)

    def __repr__(self) -> str:
        where = f"{self.places[0].frame.code.co_name}:{self.places[0].span}" if self.places else "?"
        return f"<{self.index} {self.op} {where}>"


@dataclass
class Recording:
    """What one run did."""

    nodes: list[Node]
    values: list[Value]

    def executed_in(self, frame: Frame) -> list[Node]:
        """The calls made by ``frame`` or below it."""
        return [node for node in self.nodes if node.place_in(frame) is not None]

    def frames(self) -> list[Frame]:
        """All frames that made calls, in order of their first."""
        found: dict[int, Frame] = {}
        for node in self.nodes:
            for place in node.places:
                found.setdefault(place.frame.index, place.frame)
        return list(found.values())


def record(run: Callable[[], Any]) -> tuple[Recording, Any]:
    """Call ``run`` once; return what it did, and what it returned."""
    tape = _Tape()
    with tape:
        result = tape.run(run)
    tape.forget()
    return Recording(tape.nodes, tape.values), result


class Recorder:
    """Writes down the torch calls that somebody else's mode hands to :meth:`call`, while :meth:`watching`.

    Attributes:
        recording: what was written; None before, and where there were more than MOST_CALLS.
        overflowed: whether there were.
    """

    MOST_CALLS = 100_000  # each takes a kilobyte or two

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.overflowed = False
        self._tape: _Tape | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the block is left."""
        tape = self._tape = _Tape()
        try:
            with tape.hooked(), tape.inside_modules():
                yield
        finally:
            self._tape = None
            tape.forget()
            self.recording = Recording(tape.nodes, tape.values)
            if self.overflowed:
                self.forget()
        for value in tape.values:
            value.settle()

    def call(self, function: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, called from ``frame``."""
        if self._tape is None:
            return function(*args, **kwargs)
        if len(self._tape.nodes) >= self.MOST_CALLS:
            self.overflowed = True
            return function(*args, **kwargs)
        return self._tape.call(function, frame, args, kwargs)

    def forget(self) -> None:
        """Let go of the modules and functions that were seen."""
        if self.recording is not None:
            for node in self.recording.nodes:
                for place in node.places:
                    place.frame.owner, place.frame.globals = None, {}
                    place.frame.settings.clear()
                    place.names.clear()
                node.args, node.kwargs, node.inputs, node.outputs, node.places, node.caller = (), {}, (), (), (), None
            for value in self.recording.values:
                value.producer = None
                value.users.clear()
            self.recording = None


class _Tape(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self._latest: dict[int, Value] = {}  # by id of the tensor
        self._tensors = 0
        self._storages: dict[int, tuple[int, list[weakref.ref[Tensor]]]] = {}  # by address: a number, who uses it
        self._addresses = 0
        self._frames: dict[int, tuple[FrameType, Frame]] = {}
        self._count = 0
        self._positions: dict[CodeType, list[tuple[int | None, ...]]] = {}
        self._bottom: FrameType | None = None
        self._only_modules = False
        self._depth = 0  # of module calls, where only these are looked into

    def run(self, run: Callable[[], Any]) -> Any:
        """Frames below this call are the user's."""
        self._bottom = sys._getframe()
        try:
            with self.hooked():
                return run()
        finally:
            self._bottom = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Frames are let go of when their module's forward ends."""
        hook = nn.modules.module.register_module_forward_hook(self._left, always_call=True)
        try:
            yield
        finally:
            hook.remove()

    def forget(self) -> None:
        """Drop the frames and what their names hold."""
        for frame, known in self._frames.values():
            _clear(frame, known)
        self._frames.clear()
        self._latest.clear()

    @contextmanager
    def inside_modules(self) -> Iterator[None]:
        """Frames that call a model are not looked into: they go on, and with them what a look at their names keeps."""
        self._only_modules = True
        hook = nn.modules.module.register_module_forward_pre_hook(self._entered)
        try:
            yield
        finally:
            hook.remove()
            self._bottom, self._depth = None, 0

    def _entered(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._bottom = sys._getframe(1)
        self._depth += 1

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward ended: its frame and those below it need not be held any more."""
        self._let_go(sys._getframe())
        if self._only_modules:
            self._depth = max(self._depth - 1, 0)
            if self._depth == 0:
                self._bottom = None

    def _let_go(self, innermost: FrameType) -> None:
        """Of the frames that do not run any more, and so of what their names hold."""
        if not self._frames:
            return
        running = {id(frame) for frame in _stack(innermost)}
        for key in [key for key in self._frames if key not in running]:
            frame, known = self._frames.pop(key)
            _clear(frame, known)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, sys._getframe(1), args, kwargs or {})

    def call(self, func: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any) -> Any:
        """``func(*args, **kwargs)``, called from ``frame``, as a node."""
        self._let_go(frame)
        op = canonical(func)
        if op in LOOKS:
            return func(*args, **kwargs)
        inputs: list[Value] = []
        held: list[Tensor] = []
        kept_args = tuple(self._replaced(argument, inputs, held) for argument in args)
        kept_kwargs = {name: self._replaced(argument, inputs, held) for name, argument in kwargs.items()}
        versions = [_version(tensor) for tensor in held]
        result = func(*args, **kwargs)
        pairs = zip(held, versions, strict=True)
        changed = frozenset(self._storage(tensor) for tensor, version in pairs if _version(tensor) != version)
        node = Node(
            len(self.nodes), op, func, kept_args, kept_kwargs, tuple(inputs), (), (), changed, torch.is_grad_enabled()
        )
        node.autocast = any(torch.is_autocast_enabled(device) for device in {value.device.type for value in inputs})
        self.nodes.append(node)
        for value in inputs:
            if node not in value.users:
                value.users.append(node)
        made = [args[0]] if op == "setitem" else _tensors(result)  # an assignment returns nothing
        node.outputs = tuple(self._new(tensor, node) for tensor in made)
        node.places = self._places(frame)
        node.caller = self._caller(frame)
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
        return argument

    def _value(self, tensor: Tensor) -> Value:
        """The tensor at its version now."""
        known = self._latest.get(id(tensor))
        if known is not None and known.tensor() is tensor and known.content[1] == _version(tensor):
            return known
        return self._new(tensor, None)

    def _new(self, tensor: Tensor, producer: Node | None) -> Value:
        known = self._latest.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            serial = known.content[0]
        else:
            serial = self._tensors
            self._tensors += 1
        made = Value(
            len(self.values),
            (serial, _version(tensor)),
            tuple(tensor.shape),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            self._storage(tensor),
            weakref.ref(tensor),
            producer,
            strides=tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None,
        )
        self.values.append(made)
        self._latest[id(tensor)] = made
        return made

    def _storage(self, tensor: Tensor) -> int:
        """A number for the tensor's memory; an address that was freed and is used again has another."""
        address = _address(tensor)
        known = self._storages.get(address)
        if known is None or not any(user() is not None for user in known[1]):
            self._addresses += 1
            known = self._storages[address] = (self._addresses, [])
        if not any(user() is tensor for user in known[1]):
            known[1][:] = [user for user in known[1] if user() is not None]
            known[1].append(weakref.ref(tensor))
        return known[0]

    def _places(self, innermost: FrameType) -> tuple[Place, ...]:
        if self._only_modules and self._bottom is None:
            return self._outside(innermost)
        found = []
        for frame in _stack(innermost):
            if frame is self._bottom:
                break
            if frame.f_code.co_filename.startswith(_SKIPPED):
                continue
            names = {name: self._value(held) for name, held in frame.f_locals.items() if isinstance(held, Tensor)}
            found.append(Place(self._frame(frame), self._span(frame), names))
        return tuple(found)

    def _outside(self, innermost: FrameType) -> tuple[Place, ...]:
        """The first frame of the user's: its place, and nothing of what it holds."""
        for frame in _stack(innermost):
            if not frame.f_code.co_filename.startswith(_SKIPPED):
                made = Frame(self._count, frame.f_code, {}, None, False)
                self._count += 1
                return (Place(made, self._span(frame), {}),)
        return ()

    def _caller(self, innermost: FrameType) -> nn.Module | None:
        found = None
        for frame in _stack(innermost):
            if frame is self._bottom or not frame.f_code.co_filename.startswith(_SKIPPED):
                break
            if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
                found = frame.f_locals["self"]
        return found

    def _frame(self, frame: FrameType) -> Frame:
        known = self._frames.get(id(frame))
        if known is not None:
            return known[1]
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        plain = getattr(frame.f_globals.get(code.co_name), "__code__", None) is code
        owner = first if isinstance(first, nn.Module) and not plain else None
        made = Frame(self._count, code, frame.f_globals, owner, bool(code.co_flags & _SUSPENDS))
        made.settings |= {name: held for name, held in frame.f_locals.items() if isinstance(held, _SETTINGS)}
        self._count += 1
        self._frames[id(frame)] = (frame, made)
        return made

    def _span(self, frame: FrameType) -> Span | None:
        code = frame.f_code
        positions = self._positions.get(code)
        if positions is None:
            positions = self._positions[code] = list(code.co_positions())
        line, end_line, column, end_column = positions[frame.f_lasti // 2]
        if line is None or end_line is None or column is None or end_column is None:
            return None
        return Span(line, end_line, column, end_column)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _clear(frame: FrameType, known: Frame) -> None:
    if not known.suspends:
        try:
            frame.clear()
        except RuntimeError:  # still running: it lets go of its names itself
            return


def _version(tensor: Tensor) -> int:
    """Counts the changes in place; an inference tensor has no count and cannot be told apart."""
    return 0 if tensor.is_inference() else tensor._version


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
