"""Numbers to text, and amounts of memory from text: the only place that words nanoseconds, bytes, FLOP and ratios.

Every function takes a plain number and gives a short text of three significant digits with its unit, for instance
``12.3 ms``, ``1.24 GB`` or ``×2.10``. ``None`` means not measured and reads ``-``. Multiples of bytes are of 1000
(MB, GB), as the sizes in PyTorch's documentation and on a device's data sheet are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gradscope.errors import UsageError
from gradscope.safe_text import cut, visible

NOT_MEASURED = "-"

_TIME_UNITS = (("ns", 1), ("µs", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))
_BYTE_UNITS = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12), ("PB", 10**15))
_FLOP_UNITS = (("FLOP", 1), ("kFLOP", 10**3), ("MFLOP", 10**6), ("GFLOP", 10**9), ("TFLOP", 10**12), ("PFLOP", 10**15))
_COUNT_UNITS = (("", 1), ("k", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12))


def ns(value: float | None) -> str:
    """Nanoseconds as ``540 ns``, ``12.3 µs``, ``1.24 ms`` or ``61.0 s``."""
    return _scaled(value, _TIME_UNITS)


def size(value: float | None) -> str:
    """Return bytes as ``512 B``, ``33.6 MB`` or ``1.24 GB``."""
    return _scaled(value, _BYTE_UNITS)


def flop(value: float | None) -> str:
    """Floating point operations as ``812 MFLOP`` or ``1.30 TFLOP``."""
    return _scaled(value, _FLOP_UNITS)


def count(value: float | None) -> str:
    """A number of things as ``12``, ``3.26 M`` or ``124 M``; whole numbers below 10,000 are spelled out."""
    if value is not None and abs(value) < 10_000 and float(value).is_integer():
        return f"{int(value)}"
    return _scaled(value, _COUNT_UNITS).rstrip()


def over_passes(passes: int | None) -> str:
    """Return what to say behind an amount of a step that each backward pass has a part of, where there are several."""
    return f", summed over {passes} backward passes" if passes is not None and passes > 1 else ""


def calls(value: float | None) -> str:
    """Return calls per step: ``12``, or ``0.5`` where a step makes a call only now and then."""
    if value is None:
        return NOT_MEASURED
    if value == 0 or value >= 100 or float(value).is_integer():
        return f"{round(value)}"
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def ratio(value: float | None) -> str:
    """A factor as ``×2.10``, ``×16.0`` or ``×350``."""
    if value is None:
        return NOT_MEASURED
    return f"×{_three_digits(value)}" if abs(value) < 10_000 else f"×{value:.0e}"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share of one as ``12.3 %``; what is there but rounds to nothing reads ``<0.1 %``."""
    if share is None:
        return NOT_MEASURED
    least = 10.0**-decimals
    if 0 < share * 100 < least / 2:
        return f"<{least:.{decimals}f} %"
    return f"{share * 100 + 0.0:.{decimals}f} %"


def threshold(percents: float) -> str:
    """A percentage given by the user, as short as it was given: ``1 %``, ``0.5 %``."""
    return f"{percents:g} %"


def rate_gflops(flops: float | None, duration_ns: float | None) -> str:
    """FLOP per nanosecond, which is GFLOP/s, without the unit: ``812``, ``1.30``; ``-`` where there is none."""
    if not flops or not duration_ns:
        return NOT_MEASURED
    value = flops / duration_ns
    return f"{value:.0f}" if value >= 1000 else _three_digits(value)


def percents_of(parts: Sequence[int], whole: int, decimals: int = 1) -> list[str]:
    """Return each part's share of ``whole``, rounded so that the texts add up to what the parts make of it.

    Plain rounding of eight shares can print 99.8 %; a table that says it is complete must not. The largest
    remainders are rounded up (Hamilton's method). Parts that sum to ``whole`` give texts that sum to 100.
    """
    if whole <= 0:
        return [percent(0.0, decimals) for _ in parts]
    unit = 10**decimals
    exact = [part * 100 * unit / whole for part in parts]
    floors = [int(value // 1) for value in exact]
    missing = round(sum(exact)) - sum(floors)
    by_remainder = sorted(range(len(parts)), key=lambda i: floors[i] - exact[i])
    for i in by_remainder[: max(missing, 0)]:
        floors[i] += 1
    return [f"{value / unit:.{decimals}f} %" for value in floors]


@dataclass(frozen=True, slots=True)
class TimeScale:
    """One unit and number of decimals for a whole column, so that its digits line up."""

    unit: str
    unit_ns: int
    decimals: int

    def text(self, value: float | None) -> str:
        """Nanoseconds in this column's unit, without it: ``12.30``; ``<0.01`` where something rounds to nothing."""
        if value is None:
            return NOT_MEASURED
        if value == 0:
            return "0"
        least = 10.0**-self.decimals
        if 0 < value / self.unit_ns < least / 2:
            return f"<{least:.{self.decimals}f}"
        return f"{value / self.unit_ns:.{self.decimals}f}"


def time_scale(largest_ns: float) -> TimeScale:
    """Return the scale for values up to ``largest_ns``: at least two and at most five digits before the point.

    A unit smaller than :func:`ns` would take, so that what is a thousandth of the largest still has a digit.
    """
    unit, unit_ns = _unit_of(largest_ns / 10, _TIME_UNITS)
    if unit_ns == 1:
        return TimeScale(unit, unit_ns, 0)
    return TimeScale(unit, unit_ns, 1 if largest_ns / unit_ns >= 100 else 2)


def _scaled(value: float | None, units: Sequence[tuple[str, int]]) -> str:
    if value is None:
        return NOT_MEASURED
    unit, factor = _unit_of(value, units)
    scaled = value / factor
    text = f"{scaled:.0f}" if factor == 1 and float(value).is_integer() else _three_digits(scaled)
    return f"{text} {unit}"


def _unit_of(value: float, units: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """The largest unit of which ``value`` is at least one, after rounding: 999,950 ns is 1.00 ms, not 1000 µs."""
    chosen = units[0]
    for unit in units:
        if abs(value) >= unit[1] * 0.9995:
            chosen = unit
    return chosen


def _three_digits(value: float) -> str:
    """``1.24``, ``12.4``, ``124``: the decimals that make three digits, never more than two."""
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


# "24g" means 24 GiB: on a memory card, in Docker and to Java a bare letter is the binary multiple.
_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{letter}{suffix}": 1024**power for power, letter in enumerate("kmgt", 1) for suffix in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_AMOUNT = re.compile(r"\s*(\d{1,18}(?:\.\d{0,9})?|\.\d{1,9})\s*([a-z]*)\s*", re.IGNORECASE)


def bytes_of(value: str | int, name: str = "--device-memory") -> int:
    """An amount of memory in bytes: ``6GiB``, ``6GB``, ``24g`` (GiB), ``512MiB``, ``1.5g``, or a number of bytes.

    Raises:
        UsageError: it is none of these, or nothing.
    """
    text = str(value)
    match = _AMOUNT.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or isinstance(value, (bool, float)):
        raise UsageError(
            f"{name}: {cut(visible(text), 60) or repr(text)} is not an amount of memory.\n"
            "Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB; without one it is bytes."
        )
    amount = int(Fraction(match[1].rstrip(".") if not match[1].startswith(".") else f"0{match[1]}") * factor)
    if amount < 1:
        raise UsageError(
            f"{name}: {text} is not a positive amount of memory.\nGive a number with a unit: 6GiB, "
            "6GB, 24g (GiB), 512MiB."
        )
    return amount
