"""A model with what it needs for one training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradscope.errors import WorkloadError
from gradscope.tree import named_parameters_of


def describe(value: Any) -> str:
    """``a float32 tensor of shape (8, 10) with requires_grad=False``, ``a list of 2``, ``None``, ``a Net``."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        # A size prints as torch.Size([8, 10]); as a tuple it is what the user wrote.
        return f"{_article(dtype)} tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if isinstance(value, (list, tuple, Mapping)):
        return f"{_article(name)} of {len(value)}"
    return _article(name)


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


#: Names that a factory's dict may use and a module-level workload may define.
PARTS = ("model", "batch", "loss", "optimizer")

_BATCHES = "A batch is a tensor, a tuple (positional), a dict (keyword), or an iterator of these."


@dataclass(eq=False, repr=False)
class Workload:
    """A model and the batch to train it on.

    Attributes:
        model: the root module. Profiling puts its state back as it was.
        batch: a tensor (``model(batch)``), a tuple (``model(*batch)``), a mapping (``model(**batch)``), or an iterator
            or DataLoader of these, one item a step.
        loss: ``loss(output, batch)`` gives a scalar tensor. None: see :func:`gradscope.workload.scalar_loss`.
        optimizer: stepped after each backward and put back as it was; None: a step ends with backward.
        target: where the workload came from, for the report: ``model.py:small``.

    Raises:
        WorkloadError: on construction, when a part has a type that cannot be used.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    target: str = ""

    # Folder that the target's own imports are found in; a forward may import as late as in the first step.
    folder: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_batch(self.batch)
        if self.loss is not None and not callable(self.loss):
            raise WorkloadError(
                f"loss is {describe(self.loss)}, which is not callable.\nGive a function loss(output, "
                "batch), or omit it."
            )
        if self.loss is not None:
            _check_signature(self.loss)
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise WorkloadError(f"optimizer is {describe(self.optimizer)}; it must be a torch.optim.Optimizer.")

    def __repr__(self) -> str:
        loss = "" if self.loss is None else ", loss given"
        return f"<Workload {self.target or type(self.model).__name__}: batch {describe(self.batch)}{loss}>"


def _check_signature(loss: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise WorkloadError(
            f"loss is {name}{signature}, which cannot be called as loss(output, batch): {error}.\n"
            "Give a function of both, as lambda output, batch: mean_error(output, batch[1])."
        ) from None


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = " Create it: Net(), not Net." if isinstance(model, type) and issubclass(model, nn.Module) else ""
        raise WorkloadError(f"model is {describe(model)}; it must be a torch.nn.Module.{hint}")
    for name, parameter in named_parameters_of(model):
        if parameter.is_meta:
            raise WorkloadError(
                f"model has parameters on the meta device (such as {name}), which have no data.\nAllocate "
                "them with model.to_empty(device=...) and initialize them."
            )


def _check_batch(batch: Any) -> None:
    if isinstance(batch, list):
        raise WorkloadError(
            f"batch is {describe(batch)}, which may be one batch or several.\nGive tuple(batch) for "
            "the positional arguments of one call, or iter(batch) for one batch per step."
        )
    if is_one_batch(batch):
        return
    arrays = hasattr(batch, "__array__") or isinstance(batch, (str, bytes))
    if arrays or isinstance(batch, type) or not isinstance(batch, Iterable):
        raise WorkloadError(f"batch is {describe(batch)}.\n{_BATCHES}")


def is_one_batch(value: Any) -> bool:
    """Check that ``value`` is itself what one call of the model takes. A list is: DataLoaders collate to lists."""
    return isinstance(value, (torch.Tensor, tuple, list, Mapping))


def check_item(value: Any, number: int) -> None:
    """Raise :class:`WorkloadError` unless item ``number`` (from 1) of a batch iterator is one batch."""
    if not is_one_batch(value):
        raise WorkloadError(f"item {number} of the batch iterator is {describe(value)}.\n{_BATCHES}")


def workload_from(value: Any, *, where: str, target: str) -> Workload:
    """The workload that a factory returned or a module defines.

    Args:
        value: ``(model, batch)``, ``(model, batch, loss)``, a mapping of :data:`PARTS`, or a :class:`Workload`.
        where: what gave it, for messages: ``model.py: workload()``.
        target: as the user wrote it.

    Raises:
        WorkloadError: ``value`` is none of these, or a part cannot be used.
    """
    parts = _parts(value, where)
    try:
        made = value if isinstance(value, Workload) else Workload(**parts)
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None
    made.target = made.target or target
    return made


def _parts(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, Workload):
        return {}
    if isinstance(value, tuple) and len(value) in (2, 3):
        return dict(zip(PARTS, value, strict=False))
    if isinstance(value, Mapping) and "model" in value and "batch" in value:
        unknown = [str(key) for key in value if key not in PARTS]
        if not unknown:
            return dict(value)
        raise WorkloadError(
            f"{where} returned a dict with the unknown key {unknown[0]!r}.\nKnown keys: {', '.join(PARTS)}."
        )
    forgotten = " (is a return missing?)" if value is None else ""
    raise WorkloadError(
        f"{where} returned {describe(value)}{forgotten}.\n"
        "Return (model, batch), (model, batch, loss), a dict with 'model' and 'batch', or a gradscope.Workload."
    )
