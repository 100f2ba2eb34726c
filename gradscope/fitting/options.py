"""What is asked of a fit, checked before anything runs: batch sizes, amounts of memory, settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import nn

from gradscope import units
from gradscope.errors import UsageError, WorkloadError
from gradscope.tables import MEMORY_BUDGET
from gradscope.tree import parameters_of
from gradscope.units import bytes_of
from gradscope.workload import Workload

_LARGEST_BATCH = 2**31 - 1


def batch_sizes(values: str | int | Iterable[int], name: str = "--batch-sizes") -> tuple[int, ...]:
    """Batch sizes in ascending order, each once.

    Args:
        values: ``"8,16,32"``, one number, or numbers.
        name: of the option, for messages.

    Raises:
        UsageError: there is none, or one is not a whole number of at least 1.
    """
    if isinstance(values, str):
        items: list[object] = [item.strip() for item in values.split(",")]
    elif isinstance(values, Iterable):
        items = list(values)
    else:
        items = [values]
    found = {_batch_size(item, name) for item in items}
    if not found:
        raise UsageError(f"{name} is empty.\nGive whole numbers from 1: 8,16,32")
    return tuple(sorted(found))


def _batch_size(item: object, name: str) -> int:
    if isinstance(item, str) and item.isascii() and item.isdecimal():
        item = int(item)
    if isinstance(item, int) and not isinstance(item, bool) and 1 <= item <= _LARGEST_BATCH:
        return item
    shown = item if isinstance(item, str) and item else repr(item)
    raise UsageError(f"{name}: {shown} is not a batch size.\nGive whole numbers from 1, with commas between: 8,16,32")


@dataclass(frozen=True, slots=True)
class Reserve:
    """Part of the device's memory that the step's tensors shall leave free.

    Ten percent unless the user knows better: on a card of 6 GiB that is the CUDA context (0.3 to 0.6 GiB), and on a
    larger one what the allocator loses to rounding and fragmentation, which grow with what it holds.
    """

    share: Fraction = Fraction(1, 10)  # of the device's memory
    fixed: int = 0  # bytes, instead of a share

    def of(self, device_memory: int) -> int:
        """Bytes kept free of ``device_memory``."""
        return self.fixed + int(self.share * device_memory)

    @property
    def text(self) -> str:
        """``10 %``, or an amount."""
        return units.size(self.fixed) if not self.share else units.threshold(float(self.share * 100))


def reserve_of(value: str | int | None) -> Reserve:
    """``10%``, an amount of memory, or ``0``; None is the default.

    Raises:
        UsageError: it is neither a percentage below 100 nor an amount.
    """
    if value is None:
        return Reserve()
    text = str(value).strip()
    if text == "0":
        return Reserve(Fraction(0))
    if not text.endswith("%"):
        return Reserve(Fraction(0), bytes_of(value, "--reserve"))
    try:
        share = Fraction(text[:-1].strip()) / 100
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share < 1:
        raise UsageError(
            f"--reserve: {text} is not a share of the device's memory.\nGive 0% to 99%, or an amount: 600MiB"
        )
    return Reserve(share)


Sizes = str | int | Iterable[int]
Amount = str | int

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
MEASURED = (2, 3, 4)  # 1 is special: its dimension broadcasts, and libraries take other paths for it
_FEWEST, _MOST = 3, 4


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What is asked for.

    Attributes:
        batch_sizes: to be predicted, ascending.
        measured: three batch sizes that are run for the prediction, ascending.
        check: one more that is run to compare it with.
        device_memory: bytes; None: the device's own, or nothing to fit into on a CPU.
        device_memory_text: as the user wrote it.
        optimizer: name in :data:`OPTIMIZERS` that a workload without one shall step.
        device: where the steps run: "auto", "cpu" or "cuda".
        memory_budget: bytes that measuring a step may take, beside the step itself.
    """

    batch_sizes: tuple[int, ...]
    measured: tuple[int, ...] = MEASURED
    check: int = 2 * MEASURED[-1]
    device_memory: int | None = None
    device_memory_text: str | None = None
    reserve: Reserve = field(default_factory=Reserve)
    optimizer: str | None = None
    device: str = "auto"
    seed: int | None = None
    memory_budget: int = MEMORY_BUDGET


def settings_of(
    sizes: Sizes,
    *,
    measure: Sizes | None = None,
    device_memory: Amount | None = None,
    reserve: Amount | None = None,
    optimizer: str | None = None,
    device: str = "auto",
    seed: int | None = None,
    memory_budget: Amount = MEMORY_BUDGET,
) -> FitOptions:
    """Settings from what the user typed.

    Raises:
        UsageError: a value cannot be used; the message names the option.
    """
    measured, check = _measured(measure)
    amount = None if device_memory is None else bytes_of(device_memory)
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise UsageError(f"--optimizer {optimizer} is not known; it is {', '.join(OPTIMIZERS)}.")
    return FitOptions(
        batch_sizes=batch_sizes(sizes),
        measured=measured,
        check=check,
        device_memory=amount,
        device_memory_text=None if device_memory is None else str(device_memory).strip(),
        reserve=reserve_of(reserve),
        optimizer=optimizer,
        device=device,
        seed=seed,
        memory_budget=bytes_of(memory_budget, "memory_budget"),
    )


def _measured(given: Sizes | None) -> tuple[tuple[int, ...], int]:
    sizes = MEASURED if given is None else batch_sizes(given, "--measure")
    if not _FEWEST <= len(sizes) <= _MOST:
        shown = ",".join(str(size) for size in sizes)
        raise UsageError(
            f"--measure {shown}: give three different batch sizes to predict from, and a larger fourth to check with.\n"
            "The default is 2,3,4,8."
        )
    return sizes[:_FEWEST], sizes[_FEWEST] if len(sizes) == _MOST else 2 * sizes[-1]


def add_optimizer(workload: Workload, name: str | None) -> None:
    """Give a workload without an optimizer the one called ``name``, with torch's defaults; None changes nothing.

    Raises:
        UsageError: the workload has an optimizer of its own.
        WorkloadError: no parameter of the model is trained.
    """
    if name is None:
        return
    if workload.optimizer is not None:
        whose, own = workload.target or "the workload", type(workload.optimizer).__name__
        raise UsageError(f"--optimizer {name}: {whose} has its own optimizer, {own}.\nOmit the option.")
    parameters = trained(workload.model)
    if not parameters:
        raise WorkloadError(
            f"--optimizer {name}: all parameters of the model are frozen, so there is nothing to optimize."
        )
    workload.optimizer = OPTIMIZERS[name](parameters)  # type: ignore[call-arg]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that receive a gradient."""
    return [parameter for parameter in parameters_of(model) if parameter.requires_grad]
