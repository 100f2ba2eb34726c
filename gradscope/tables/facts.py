"""What is known of a step beside the measured numbers and its graph: what recipes match, parameters, optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    new_text: str = ""  # the lines that would stand there
    predicted_saving_ns: int | None = None  # of a step: micro-runs at these shapes
    predicted_saving_bytes: int | None = None
    predicted_old_ns: int | None = None  # of the calls that would go, in the same micro-run
    predicted_kept_bytes: int | None = None  # less saved for backward, in the same micro-run


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
