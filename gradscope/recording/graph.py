"""One run of a model as a graph: torch calls, the tensors between them, and where in the source each call stands.

Tensors are held by weak references only, so that what is still alive after the run is what the model itself keeps.
Other objects of the user's lie in the recording's table of live objects.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradscope.capture.storages import tensors_in
from gradscope.process import referred_to
from gradscope.recording.live import LiveObjects, RecordedCall
from gradscope.tensor_refs import TensorRef
from gradscope.tree import modules_of

# Of half the width of float32.
HALVES = frozenset({torch.float16, torch.bfloat16})

_NO_CALL = RecordedCall(type(None), (), {})


@dataclass(eq=False, slots=True)
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
    tensor: TensorRef
    producer: Node | None = None
    users: list[Node] = field(default_factory=list)
    kept: bool | None = None  # whether the tensor outlived the run, once that is settled
    same: bool = True  # whether it was still at this version then
    strides: tuple[int, ...] | None = None  # None: it has none, being sparse or nested
    parameter: str | None = None  # path of the parameter or buffer that it is; see recording.naming
    # What was found out about it, so that in a long chain it is looked up once.
    number: tuple[float | None] | None = None  # its number; see graph.number
    fixed: bool | None = None  # see graph.is_fixed
    uncast: Value | None = None  # see graph.uncast

    @property
    def elements(self) -> int:
        """Return the number of elements of the shape."""
        return math.prod(self.shape)

    @property
    def dtype_name(self) -> str:
        """Return the name of the dtype as in tables: "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        """Return the bytes of its elements; a view of a larger tensor holds more."""
        return self.elements * self.dtype.itemsize

    @property
    def alive(self) -> bool:
        """Return whether the tensor outlived the run."""
        return self.kept if self.kept is not None else self.tensor() is not None

    def settle(self, *, kept: bool = True) -> None:
        """Fix what is alive: what a later run makes under the same address is another tensor.

        Args:
            kept: False of a tensor that lives on, but for nobody to read.
        """
        tensor = self.tensor()
        self.kept = kept and tensor is not None
        with torch._C.DisableTorchFunction():  # as in the tape
            self.same = tensor is not None and version_of(tensor) == self.content[1]


def settle(values: Iterable[Value]) -> None:
    """Fix which of ``values`` are alive, once their run is over and its frames are gone.

    What only a graph keeps, as that of a loss which the model stores, nobody can read: no object of Python's refers to
    it. These are looked up only where something made in the run lives on.
    """
    values = list(values)
    made = {id(tensor) for value in values if value.producer is not None and (tensor := value.tensor()) is not None}
    seen = _referred_to(made)
    for value in values:
        tensor = value.tensor()
        value.settle(kept=tensor is not None and (value.producer is None or id(tensor) in seen))


def _referred_to(tensors: Set[int]) -> set[int]:
    """Return those of some tensors, by id, that a Python object refers to: attributes, a list, a closure."""
    if not tensors or gc.get_freeze_count():  # frozen objects are not listed: all may be referred to
        return set(tensors)
    return referred_to(tensors)


@dataclass(eq=False, slots=True)
class Frame:
    """One call of a Python function of the user's."""

    index: int
    code: CodeType
    suspends: bool
    live: LiveObjects
    held_by: weakref.ref[nn.Module] | None = None

    @property
    def globals(self) -> dict[str, Any]:
        """The global names of its file; none where it was not looked into, and after the drop."""
        return self.live.globals.get(self.index, {})

    @property
    def settings(self) -> dict[str, Any]:
        """Return its names that held numbers, texts or None at first."""
        return self.live.settings.get(self.index, {})

    @property
    def owner(self) -> nn.Module | None:
        """Return its first argument, where that is a module and the function not a file's own; None once it is gone."""
        return None if self.held_by is None else self.held_by()

    @owner.setter
    def owner(self, module: nn.Module | None) -> None:
        self.held_by = None if module is None else weakref.ref(module)


class Span(NamedTuple):
    """A piece of source text: lines from 1, columns in bytes from 0, as :mod:`ast` counts them."""

    line: int
    end_line: int
    column: int
    end_column: int


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where a frame stood when a call was made, and which tensors its names held then."""

    frame: Frame
    span: Span | None
    names: dict[str, Value]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Node:
    """One torch call; in ``args`` and ``kwargs`` tensors are replaced by their values."""

    index: int
    op: str  # the canonical name, see operations.py
    live: LiveObjects
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    places: tuple[Place, ...]  # innermost first
    changed: frozenset[int]  # storages whose content it changed in place
    grad: bool  # whether gradients were recorded then
    autocast: bool = False  # whether torch chose dtypes then
    compiled: int | None = None  # how many of its places run inside of what torch.compile made; None: of nothing
    called_by: weakref.ref[nn.Module] | None = None
    outside: Place | None = None  # where there are no places: the line of the user's that called torch's container
    # Names that stay when frames and modules are gone; see recording.naming.
    layer: str | None = None  # path of the innermost module of the user's, or of torch's own, that made it
    source: str | None = None  # "model.py:12", as the table of lines has it
    function_name: str | None = None  # of the function of the user's that stands there
    module: str | None = None  # class of torch's own module that made it, as "Linear"
    mask: str | None = None  # given to torch's attention on every batch: "causal", or "open", which hides nothing

    @property
    def function(self) -> Callable[..., Any]:
        """Return what was called."""
        return self.live.calls.get(self.index, _NO_CALL).function

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments by position; none after the drop."""
        return self.live.calls.get(self.index, _NO_CALL).args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments by name; none after the drop."""
        return self.live.calls.get(self.index, _NO_CALL).kwargs

    @property
    def caller(self) -> nn.Module | None:
        """The module of torch's own that the user's code called for it, as an nn.Linear.

        One without tensors is kept, for it may be made for a single call. In the place of a loss that is gone stands
        one without its classes' weights; of any other None.
        """
        held = None if self.called_by is None else self.called_by()
        return self.live.callers.get(self.index) if held is None else held

    @caller.setter
    def caller(self, module: nn.Module | None) -> None:
        if module is None:
            return
        kept: nn.Module | None = module
        if _holds_tensors(module):
            self.called_by, kept = weakref.ref(module), _without_weights(module)
        if kept is not None:
            self.live.callers[self.index] = kept

    @property
    def output(self) -> Value:
        """The only or first output."""
        return self.outputs[0]

    def argument(self, position: int, name: str, otherwise: Any = None) -> Any:
        """The argument by name, or by position."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else otherwise

    def place_in(self, frame: Frame) -> Place | None:
        """Return where ``frame`` stood when this call was made under it."""
        return next((place for place in self.places if place.frame is frame), None)

    def __repr__(self) -> str:
        where = f"{self.places[0].frame.code.co_name}:{self.places[0].span}" if self.places else "?"
        return f"<{self.index} {self.op} {where}>"


def _holds_tensors(module: nn.Module) -> bool:
    """Return whether one hangs on it anywhere: a replica of DataParallel's has its parameters as plain attributes."""
    return any(True for each in modules_of(module) for _ in tensors_in(vars(each)))


def _without_weights(module: nn.Module) -> nn.Module | None:
    """A loss with the same settings and hooks and without its buffers; None of any other, or where it holds more."""
    if not isinstance(module, nn.modules.loss._Loss) or any(True for _ in module.children()):
        return None
    settings = {name: value for name, value in vars(module).items() if name != "_buffers"}
    if any(True for _ in tensors_in(settings)):
        return None
    bare = type(module).__new__(type(module))
    vars(bare).update(settings, _buffers={})
    return bare


@dataclass
class Recording:
    """What one run did."""

    nodes: list[Node]
    values: list[Value]
    live: LiveObjects
    found: dict[str, Any] = field(default_factory=dict)  # what one matcher found and others ask for again, by its name

    def executed_in(self, frame: Frame) -> list[Node]:
        """The calls made by ``frame`` or below it."""
        return self._below.get(frame, [])

    @cached_property
    def _below(self) -> dict[Frame, list[Node]]:
        found: defaultdict[Frame, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for frame in dict.fromkeys(place.frame for place in node.places):
                found[frame].append(node)
        return dict(found)

    def standing_at(self, code: CodeType, span: Span | None) -> list[tuple[Node, Frame]]:
        """The calls made while a frame of ``code`` stood there, and that frame."""
        return self._standing.get((id(code), span), [])

    @cached_property
    def _standing(self) -> dict[tuple[int, Span | None], list[tuple[Node, Frame]]]:
        found: defaultdict[tuple[int, Span | None], list[tuple[Node, Frame]]] = defaultdict(list)
        for node in self.nodes:
            for place in node.places:
                found[id(place.frame.code), place.span].append((node, place.frame))
        return dict(found)

    def frames(self) -> list[Frame]:
        """Return all frames that made calls, in order of their first."""
        found: dict[int, Frame] = {}
        for node in self.nodes:
            for place in node.places:
                found.setdefault(place.frame.index, place.frame)
        return list(found.values())

    def drop(self) -> None:
        """Let go of the user's objects, and of the graph, which refers to itself.

        Its tensors no longer know of their calls, so that it is freed without Python's collector.
        """
        self.live.drop()
        for value in self.values:
            value.producer = None
            value.users.clear()
        self.found.clear()


def version_of(tensor: Tensor) -> int:
    """Count the changes in place; an inference tensor has no count and cannot be told apart."""
    return 0 if tensor.is_inference() else tensor._version
