"""One training step of a workload: the next batch, the call of the model, the loss."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gradscope.errors import UsageError, WorkloadError
from gradscope.tables import LossKind
from gradscope.tree import buffers_of, modules_of, parameters_of
from gradscope.workload.definition import check_item, describe, is_one_batch

_NO_GRADIENT = "Look for torch.no_grad(), .detach(), .item() or parameters that are all frozen."


def resolve_device(name: str, model: nn.Module | None = None) -> torch.device:
    """The device called ``name``: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.

    ``"auto"`` is where ``model`` is if that is not the CPU: the user has put it there. Else it is CUDA where there is
    any, or the CPU.

    Raises:
        UsageError: no device has that name, or it is not on this machine.
    """
    if name == "auto":
        placed = _accelerator_of(model) if model is not None else None
        return placed or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda"}:
        raise UsageError(f"--device {name} is not known; it is auto, cpu or cuda.")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise UsageError(
            f"--device {name}: torch {torch.__version__} finds no CUDA device on this machine.\nUse "
            "--device cpu; 'gradscope doctor' shows what can be measured here."
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA device(s), from cuda:0.")
    return device


def is_placed(model: nn.Module) -> bool:
    """Check that a parameter or buffer of ``model`` is on another device than the CPU."""
    return _accelerator_of(model) is not None


def _accelerator_of(model: nn.Module) -> torch.device | None:
    tensors = itertools.chain(parameters_of(model), buffers_of(model))
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)


# --------------------------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------------------------


class Batches(Iterator[Any]):
    """The batch of each step: one batch over and over, or the items of an iterator, on the device.

    Something that can be iterated anew, a DataLoader for one, starts again when it ends; an iterator or a generator
    does not.

    Args:
        batch: as in :class:`~gradscope.workload.Workload`.
        device: where every tensor of a batch is moved to; None leaves them.
        needed: how many batches the run takes, for the message when there are fewer.

    Raises:
        WorkloadError: from ``next()``, when the batches run out or an item is not a batch.
    """

    def __init__(self, batch: Any, device: torch.device | None = None, needed: int | None = None) -> None:
        self._device = device
        self._needed = needed
        self._given = 0
        self._repeated = to_device(batch, device) if is_one_batch(batch) else None
        self._source = batch
        self._items: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._repeated is not None:
            self._given += 1
            return self._repeated
        item = self._next_item()
        self._given += 1
        check_item(item, self._given)
        return to_device(item, self._device)

    def _next_item(self) -> Any:
        nothing = object()
        if self._items is None:
            self._items = iter(self._source)
        item = next(self._items, nothing)
        if item is nothing and self._given and self._items is not self._source:
            self._items = iter(self._source)
            item = next(self._items, nothing)
        if item is nothing:
            raise WorkloadError(self._ended())
        return item

    def _ended(self) -> str:
        if not self._given:
            return f"the batch iterator, {describe(self._source)}, returned no batch."
        needed = "" if self._needed is None else f", but this run needs {self._needed}"
        return (
            f"the batch iterator ended after {self._given} "
            f"batch{'es' if self._given > 1 else ''}{needed}.\nGive a DataLoader (it restarts), one "
            "fixed batch, or fewer --steps and --warmup."
        )


def to_device(value: Any, device: torch.device | None) -> Any:
    """``value`` with every tensor in it on ``device``: in tuples, lists, mappings, and whatever has a ``to``.

    What is there already stays the same object. A leaf that requires a gradient stays a leaf.
    """
    if device is None or isinstance(value, nn.Module):
        return value
    if isinstance(value, torch.Tensor):
        return _moved(value, device)
    if callable(getattr(value, "to", None)):  # before tuples: a PackedSequence is one
        return value.to(device)
    if isinstance(value, (tuple, list)):
        items = [to_device(item, device) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: to_device(item, device) for key, item in value.items()}
        return value if all(pairs[key] is value[key] for key in pairs) else pairs
    return value


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = tensor.to(device)
    if moved is not tensor and tensor.is_leaf and tensor.requires_grad:
        return moved.detach().requires_grad_()
    return moved


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """``model(batch)`` for a tensor, ``model(*batch)`` for a tuple or list, ``model(**batch)`` for a mapping.

    Raises:
        WorkloadError: the model's ``forward`` cannot take the batch that way.
        BaseException: whatever the model raises.
    """
    args, kwargs = _arguments(batch)
    try:
        return model(*args, **kwargs)
    except TypeError:
        problem = _misfit(model, args, kwargs)
        if problem is None:
            raise
    how = "**batch" if kwargs else "*batch"
    raise WorkloadError(
        f"{type(model).__name__}.forward cannot be called as model({how}) with {describe(batch)}: "
        f"{problem}.\nData that only the loss needs, such as targets, belongs in the loss "
        "function, not in the batch."
    )


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch), {}


def _misfit(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the signature refuses the arguments; None where it takes them, so that the error came from further in."""
    try:
        inspect.signature(model.forward if isinstance(model, nn.Module) else model).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # no signature to be had
        return None
    return None


# --------------------------------------------------------------------------------------------------------------------
# Loss
# --------------------------------------------------------------------------------------------------------------------


def scalar_loss(
    output: Any, batch: Any, loss: Callable[[Any, Any], Any] | None, model: nn.Module | None = None
) -> tuple[torch.Tensor, LossKind]:
    """The scalar to call ``backward`` on, and where it came from.

    * ``"given"``: ``loss(output, batch)``.
    * ``"output"``: the output itself if it is a scalar; its ``loss``, as attribute or key; the one scalar with a
      gradient in it if it is a tuple, list or mapping; the one scalar that ``model`` has made after its output and
      keeps in an attribute.
    * ``"mean of outputs"``: the mean of the means of all its floating tensors that have a gradient. It runs the same
      backward pass as a real loss would from there on, on gradients that mean nothing.

    Raises:
        WorkloadError: the loss is not a scalar or has no gradient, or the output holds nothing that has one.
    """
    if loss is not None:
        return _given(loss(output, batch)), "given"
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return _with_gradient(output, "the model's output"), "output"
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor) and named.numel() == 1:
        return _with_gradient(named, "the loss in the model's output"), "output"
    tensors = list(_tensors(output))
    scalars = [tensor for tensor in tensors if tensor.dim() == 0 and tensor.requires_grad]
    if len(scalars) == 1:
        return scalars[0], "output"
    stored = _stored(model, tensors) if model is not None else []
    if len(stored) == 1:
        return stored[0], "output"
    return _mean(output, tensors), "mean of outputs"


def _stored(model: nn.Module, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Scalars with a gradient in attributes of the modules, made after all outputs: the loss of this call.

    What was made before them is a part of the loss, as that of a router, or of an earlier call.
    """
    with torch._C.DisableTorchFunction():  # who records the step sees the model's calls alone
        made = [tensor.grad_fn._sequence_nr() for tensor in outputs if tensor.grad_fn is not None]
        kept = {
            id(held): (held, held.grad_fn._sequence_nr())
            for module in modules_of(model)
            for held in vars(module).values()
            if isinstance(held, torch.Tensor) and held.dim() == 0 and held.grad_fn is not None
        }
    return [held for held, number in kept.values() if made and number > max(made)]


def _given(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise WorkloadError(
            f"loss(output, batch) returned {describe(value)}; it must return a scalar tensor that has a gradient."
        )
    if value.numel() != 1:
        raise WorkloadError(
            f"loss(output, batch) returned {describe(value)}: a loss is a scalar.\nEnd it with .mean() or .sum()."
        )
    return _with_gradient(value, "the result of loss(output, batch)")


def _with_gradient(value: torch.Tensor, what: str) -> torch.Tensor:
    if not value.requires_grad:
        raise WorkloadError(f"{what} is {describe(value)}: there is no backward pass to measure.\n{_NO_GRADIENT}")
    return value


def _mean(output: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    if not floating:
        holds = f" that holds {describe(tensors[0])}" if tensors and tensors[0] is not output else ""
        raise WorkloadError(
            f"the model's output is {describe(output)}{holds}, with no floating-point tensor to "
            "compute a loss from.\nGive a loss: workload() may return (model, batch, loss) with "
            "loss(output, batch)."
        )
    means = [_real(tensor).mean() for tensor in floating if tensor.requires_grad and tensor.numel()]
    if not means:
        first = f"the model's output is {describe(output)}"
        holds = "" if floating[0] is output else f" that holds {describe(floating[0])}"
        raise WorkloadError(f"{first}{holds}: there is no backward pass to measure.\n{_NO_GRADIENT}")
    if len(means) == 1:
        return means[0]
    return torch.stack([mean.to(means[0]) for mean in means]).mean()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _tensors(getattr(value, item.name))
