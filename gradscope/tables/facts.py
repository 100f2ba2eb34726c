"""What rules know of a step beside the measured numbers: its torch calls, what recipes match, parameters, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorFact:
    """A tensor that a call was given or made."""

    shape: tuple[int, ...]
    dtype: str  # "float32"
    device: str  # "cpu", "cuda"
    requires_grad: bool
    strides: tuple[int, ...] | None  # None: sparse or nested
    producer: int | None = None  # index of the call that made it; None: there before
    users: tuple[int, ...] = ()  # indices of the calls that were given it
    storage: int = 0  # equal for tensors that share memory
    parameter: str | None = None  # path of the parameter or buffer that it is

    @property
    def elements(self) -> int:
        """The number of elements of the shape."""
        found = 1
        for size in self.shape:
            found *= size
        return found


@dataclass(frozen=True, slots=True)
class CallFact:
    """One call of torch's, as the user's code (or a module of torch's) made it."""

    index: int
    op: str  # canonical name: "matmul", "linear", "softmax", "getitem", "backward"
    layer: str | None  # path of the innermost module of the user's, or of torch's own, that made it; None: no module
    source: str | None  # "model.py:12", as LineRow has it
    function: str | None  # name of the function that stands there
    inputs: tuple[TensorFact, ...]
    outputs: tuple[TensorFact, ...]
    args: tuple[Any, ...]  # numbers, texts, None and slices as given; a tensor is its TensorFact; else Ellipsis
    kwargs: Mapping[str, Any]
    grad: bool  # gradients were recorded then
    autocast: bool
    module: str | None = None  # class of torch's own module that made the call, as "Linear"
    mask: str | None = None  # given to torch's attention on every batch: "causal", or "open", which hides nothing

    def argument(self, position: int, name: str, otherwise: Any = None) -> Any:
        """The argument by name, or by position."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else otherwise


@dataclass(frozen=True, slots=True)
class PlaceFact:
    """Where a recipe could be put in, or why not: a row of ``gradscope.plan``."""

    recipe: str
    function: str  # of gradscope.recipes that would be called
    layer: str  # path of the module whose method holds it
    source: str  # "model.py:65"
    supported: bool
    reasons: tuple[str, ...]
    idle: str  # why it would be right and gain nothing on this batch
    calls: tuple[int, ...]  # indices of the calls that would go, of all rounds
    rounds: float  # how often it runs in one call of its module
    new_text: str = ""  # the lines that would stand there
    predicted_saving_ns: int | None = None  # of a step: micro-runs at these shapes
    predicted_saving_bytes: int | None = None
    predicted_old_ns: int | None = None  # of the calls that would go, in the same micro-run


@dataclass(frozen=True, slots=True)
class ParameterFact:
    """A parameter of a model."""

    path: str
    layer: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    has_grad: bool  # after the recorded step
    optimized: bool | None  # a known optimizer holds it; None: no optimizer is known
    reached: bool = False  # a backward pass of a measured step led to it, or an optimizer has stepped it


@dataclass(frozen=True, slots=True)
class OptimizerFact:
    """An optimizer that stepped."""

    class_name: str
    fused: bool | None
    foreach: bool | None
    tensors: int
    elements: int


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts of one recorded step; empty where it was not recorded."""

    calls: Sequence[CallFact] = ()
    places: Sequence[PlaceFact] = ()
    parameters: Sequence[ParameterFact] = ()
    optimizers: Sequence[OptimizerFact] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # see gradscope.capture.torch_flags
    classes: Mapping[str, str] = field(default_factory=dict)  # path -> class of torch's own it is or derives from
    recorded: bool = False
    graphs: int = 0  # so many more tensors with a graph behind them were alive after each of the last steps


@dataclass(frozen=True, slots=True)
class Limits:
    """This machine's ceilings, as ``gradscope doctor --calibrate`` measures them.

    Attributes:
        device: its name, as ``device_name`` in the environment of a run.
        flops: dtype ("float32", and "tf32" on CUDA) -> floating-point operations a second of a large matrix product.
        bytes: a second, read and written, of a large copy.
        call_ns: of the smallest operation.
    """

    device: str
    flops: Mapping[str, float]
    bytes: float
    call_ns: float
