"""What the user types as sizes: batch sizes, and amounts of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from gradscope import units
from gradscope.errors import UsageError
from gradscope.size_parser import bytes_of

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
