"""Where the workload of each batch size comes from: the user's batch cut to size, or their function called with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from gradscope.errors import WorkloadError
from gradscope.fitting.leaves import leaves
from gradscope.fitting.scaling import samples_in, scaled
from gradscope.workload import Batches, Workload, describe, is_one_batch


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
        return (f"the batch is {describe(self.workload.batch)}: its first item, of {self.samples} samples, was scaled",)

    def at(self, size: int) -> Workload:
        return _with_batch(self.workload, scaled(self._batch, self.samples, size))

    def keeps(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for _, leaf in leaves(self._batch) if isinstance(leaf, torch.Tensor))

    def refusal(self, size: int, error: Exception) -> WorkloadError:
        how = "its first rows" if size <= self.samples else "its rows, repeated,"
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return cannot_scale(
            f"with {how} as a batch of {size} instead of {self.samples} the model raised {said}", self.target
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
    whose = f"Let {file} make it" if file else "Give gradscope.fit a function that makes it"
    return WorkloadError(
        f"the batch cannot be made in other sizes: {reason}.\n"
        f"{whose}, with as many samples as it is asked for:\n"
        f"    def {name}(batch_size=8): return Net(), torch.randn(batch_size, 3, 32, 32)"
    )
