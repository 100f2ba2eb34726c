"""Where the workload of each batch size comes from: the user's batch cut to size, or their function called.

The errors raised here are reasons, without a full stop: :mod:`gradscope.fitting.batches` says what to do instead.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from gradscope.errors import WorkloadError
from gradscope.workload import Batches, Workload, describe, is_one_batch

# What a batch may hold beside tensors; anything else may hide more of the batch.
_PLAIN = (type(None), str, bytes, bool, int, float, complex, Enum, torch.dtype, torch.device)


def leaves(value: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """Each tensor and plain value with the expression that finds it: ``batch['x'][1]``.

    Raises:
        WorkloadError: an object inside cannot be looked into, or a tensor's samples cannot be told apart.
    """
    parts = _parts(value, name)
    if parts is None:
        yield name, value
        return
    for part, inner in parts:
        yield from leaves(inner, part)


def mapped(value: Any, change: Callable[[str, Any], Any], name: str = "batch") -> Any:
    """``value`` with every leaf replaced by ``change(its name, itself)``."""
    parts = _parts(value, name)
    if parts is None:
        return change(name, value)
    inner = [mapped(part, change, part_name) for part_name, part in parts]
    if isinstance(value, Mapping):
        return dict(zip(value, inner, strict=True))
    if isinstance(value, (tuple, list)):
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    names = [field.name for field in dataclasses.fields(value) if field.init]
    return dataclasses.replace(value, **dict(zip(names, inner, strict=True)))


def _parts(value: Any, name: str) -> list[tuple[str, Any]] | None:
    """The parts that lie directly in ``value``, by the expressions that find them; None for a leaf."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            return None
        raise WorkloadError(f"{name} is a {'nested' if value.is_nested else 'sparse'} tensor")
    if isinstance(value, _PLAIN):
        return None
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", value[key]) for key in value]
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        return [(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f"{name}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value) if field.init
        ]
    raise WorkloadError(f"{name} is {describe(value)}")


_Named = tuple[str, torch.Tensor]


def samples_in(batch: Any) -> int:
    """The batch size of ``batch``: the first dimension that its tensors have in common.

    Tensors with another first dimension are taken for something that all samples share, a mask of T x T for one.

    Raises:
        WorkloadError: there is no tensor, no common first dimension, or one that may be the batch's by chance only.
    """
    tensors = [(name, leaf) for name, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise WorkloadError("it contains no tensor with a dimension")
    firsts = Counter(tensor.shape[0] for _, tensor in tensors)
    size = next(iter(firsts)) if len(firsts) == 1 else _commonest(firsts, tensors)
    if size == 0:
        raise WorkloadError("it contains no samples: the first dimension of its tensors is 0")
    _check_chance(size, tensors)
    return size


def _commonest(firsts: Counter[int], tensors: Sequence[_Named]) -> int:
    """The first dimension of most tensors; of two as common, the one that is not a later dimension of the other's."""
    several = Counter({size: count for size, count in firsts.items() if size != 1})  # 1 is for broadcasting
    most = max(several.values())
    leading = [size for size, count in several.items() if count == most]
    if len(leading) > 1:
        # A mask of T x T beside sequences of B x T: T is a length, for it is one elsewhere.
        leading = [size for size in leading if not any(size in tensor.shape[1:] for _, tensor in tensors)]
    if len(leading) == 1:
        return leading[0]
    raise WorkloadError(f"its tensors do not share a first dimension ({_shapes(tensors)})")


def _check_chance(size: int, tensors: Sequence[_Named]) -> None:
    """Refuse a square of the batch size beside a tensor that has it as its second dimension too."""
    for name, tensor in tensors:
        if size == 1 or tuple(tensor.shape) != (size, size):
            continue
        for other_name, other in tensors:
            alike = other.dim() == 2 and other.dtype == tensor.dtype
            if tuple(other.shape[:2]) == (size, size) and not alike:
                raise WorkloadError(
                    f"{name} is {_shape(tensor)} and {other_name} {_shape(other)}: "
                    f"the first dimension of {name} may be the batch's or the sequence's"
                )


def scaled(batch: Any, samples: int, size: int) -> Any:
    """``batch`` of ``samples`` samples with ``size`` instead: its first rows, or all of them again and again.

    Rows are copied, so that token numbers stay valid and the small batch does not hold the memory of the large one.
    Strides keep their order, and gaps between rows stay, for they decide what the model has to copy.
    """

    def change(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples:
            return _rows(leaf, size)
        return leaf

    return mapped(batch, change)


def _rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    with torch.no_grad():
        plain = tensor.detach()
        if plain.stride(0) == 0 and plain.shape[0] > 1:
            return plain[:1].expand(size, *plain.shape[1:])
        which = torch.arange(size, device=plain.device) % plain.shape[0]
        rows = _empty_like(plain, size).copy_(plain.index_select(0, which))
    return rows.requires_grad_(tensor.requires_grad)


def _empty_like(tensor: torch.Tensor, size: int) -> torch.Tensor:
    shape, strides = (size, *tensor.shape[1:]), tensor.stride()
    within = sum(stride * (length - 1) for stride, length in zip(strides[1:], shape[1:], strict=True))
    repeated = any(stride == 0 and length > 1 for stride, length in zip(strides, shape, strict=True))
    if strides[0] > within and not repeated:  # rows lie one after the other
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    order = sorted(range(tensor.dim()), key=lambda k: -strides[k])
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


def _shapes(tensors: Sequence[_Named]) -> str:
    shown = [f"{name} {_shape(tensor)}" for name, tensor in tensors[:4]]
    return ", ".join(shown) + (", ..." if len(tensors) > 4 else "")


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(str(length) for length in tensor.shape)


class SizeSource(Protocol):
    """Gives the same training step at any batch size."""

    @property
    def target(self) -> str:
        """The TARGET as the user wrote it, for messages."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know of how batches are made."""

    def at(self, size: int) -> Workload:
        """The workload whose batch, one and not an iterator, holds ``size`` samples."""

    def keeps(self) -> tuple[torch.Tensor, ...]:
        """Tensors of its own that are alive during a step though training would not hold them."""

    def refusal(self, size: int, error: Exception) -> WorkloadError | None:
        """What to say of an error that the model raised at ``size``; None: it is the user's own, to be shown whole."""


class ScaledSource:
    """One model for all sizes; its batch is cut or repeated along the first dimension.

    Raises:
        WorkloadError: the batch cannot be scaled; the message shows how to supply ``workload(batch_size=...)``.
    """

    def __init__(self, workload: Workload) -> None:
        self.target = workload.target
        self.workload = workload
        self._batch = _first_batch(workload.batch, self.target)
        try:
            self.samples = samples_in(self._batch)
        except WorkloadError as reason:
            raise cannot_scale(str(reason), self.target) from None

    @property
    def notes(self) -> tuple[str, ...]:
        if is_one_batch(self.workload.batch):
            return ()
        return (f"the batch is {describe(self.workload.batch)}: its first item ({self.samples} samples) was scaled",)

    def at(self, size: int) -> Workload:
        return _with_batch(self.workload, scaled(self._batch, self.samples, size))

    def keeps(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for _, leaf in leaves(self._batch) if isinstance(leaf, torch.Tensor))

    def refusal(self, size: int, error: Exception) -> WorkloadError:
        how = "its first rows" if size <= self.samples else "its rows, repeated,"
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return cannot_scale(
            f"with {how} as a batch of {size} instead of {self.samples}, the model raised {said}", self.target
        )


class FactorySource:
    """The user's function makes model and batch anew for each size.

    Args:
        make: gives the workload of a batch size.
        target: for messages.
    """

    def __init__(self, make: Callable[[int], Workload], target: str) -> None:
        self.target = target
        self.notes: tuple[str, ...] = ()
        self._make = make

    def at(self, size: int) -> Workload:
        made = self._make(size)
        return _with_batch(made, _first_batch(made.batch, self.target))

    def keeps(self) -> tuple[torch.Tensor, ...]:
        return ()

    def refusal(self, size: int, error: Exception) -> WorkloadError | None:
        return None


def _first_batch(batch: Any, target: str) -> Any:
    if is_one_batch(batch):
        return batch
    try:
        return next(Batches(batch))
    except WorkloadError as error:
        raise cannot_scale(str(error).splitlines()[0].rstrip("."), target) from None


def _with_batch(workload: Workload, batch: Any) -> Workload:
    # A list is what a DataLoader gives; as a workload's own batch it would not say whether it is one or several.
    made = dataclasses.replace(workload, batch=tuple(batch) if isinstance(batch, list) else batch)
    made.folder = workload.folder
    return made


def cannot_scale(reason: str, target: str) -> WorkloadError:
    """The error for a batch that gradscope cannot make in another size."""
    file, _, name = target.rpartition(":") if ":" in target else (target, "", "workload")
    whose = f"Let {file} create it" if file else "Give gradscope.fit a function that creates it"
    return WorkloadError(
        f"the batch cannot be resized: {reason}.\n{whose}, with batch_size samples:\n    def "
        f"{name}(batch_size=8): return Net(), torch.randn(batch_size, 3, 32, 32)"
    )
