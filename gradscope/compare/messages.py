"""Differences as text: every one has its sign, and says when it is no more than noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradscope import units
from gradscope.compare.changes import Change, Unit
from gradscope.report.view import LEDGER_WORDS

WITHIN_NOISE, NOT_KNOWN = "~", "?"  # before a difference that is not known to be real

# Names of the totals, in the order of reading; parts of the backward pass stand below it.
TOTAL_WORDS: Mapping[str, str] = {
    "wall_ns": "step",
    "forward_ns": "forward",
    "backward_ns": "backward",
    **{name: words for name, (words, _) in LEDGER_WORDS.items()},
    "optimizer_ns": "optimizer",
    "other_ns": "other",
    "peak_bytes": "peak memory",
    "saved_bytes": "saved for backward",
    "held_bytes": "held by Python",
    "copied_bytes": "copied",
    "retained_after_step_bytes": "retained after the step",
    "step_allocated_bytes": "allocated in the step",
    "allocations": "allocations",
}
_VALUE: Mapping[Unit, Callable[[float | None], str]] = {"ns": units.ns, "bytes": units.size, "count": units.count}


def value(amount: float | None, unit: Unit) -> str:
    """``12.3 ms``, ``33.6 MB`` or ``120``."""
    return _VALUE[unit](amount)


def signed(difference: int | None, unit: Unit) -> str:
    """``+12.3 ms``, ``-33.6 MB``; ``0`` where there is no difference."""
    return _signed(difference, lambda size: value(size, unit))


def signed_on(scale: units.TimeScale, difference: int | None) -> str:
    """``+12.3`` in the unit of a column."""
    return _signed(difference, scale.text)


def signed_percent(part: float | None) -> str:
    """A share of one as ``+12.3 %``; ``-`` where there is no whole."""
    if part is None:
        return units.NOT_MEASURED
    return _sign(part) + units.percent(abs(part)) if part else "0 %"


def relative(change: Change) -> str:
    """``+12.3 %``; ``×31.0`` from ten times on, and ``from 0`` where there was nothing before."""
    if change.ratio is not None:
        return units.ratio(change.ratio) if change.ratio >= 10 else signed_percent(change.ratio - 1)
    return "from 0" if change.before == 0 and change.after else "0 %" if change.before == 0 else units.NOT_MEASURED


def mark(change: Change) -> str:
    """What stands before the difference: nothing where it is real."""
    if not change.difference or change.real:
        return ""
    return NOT_KNOWN if change.real is None else WITHIN_NOISE


def noise(change: Change) -> str:
    """``±3.20 ms``; ``exact`` for bytes, ``one step`` where nothing is known."""
    if change.basis == "exact":
        return "exact"
    return "one step" if change.noise is None else f"±{value(change.noise, change.unit)}"


def verdict(change: Change) -> str:
    """One or two words: ``slower``, ``within noise``, ``less``."""
    if change.real is None:
        return "not known"
    if not change.real:
        return "same" if not change.difference else "within noise"
    rises = (change.difference or 0) > 0
    if change.unit == "ns":
        return "slower" if rises else "faster"
    return "more" if rises else "less"


def repeated(address: str, repeats: int) -> str:
    """``h.*.attn ×12``."""
    return f"{address} ×{repeats}" if repeats > 1 else address


def named(texts: Sequence[str]) -> str:
    """``a, b, c and 4 more``."""
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def layers(count: int) -> str:
    """``12 layers``."""
    return f"{units.count(count)} {'layer' if count == 1 else 'layers'}"


def _signed(difference: int | None, text: Callable[[float], str]) -> str:
    if difference is None:
        return units.NOT_MEASURED
    return _sign(difference) + text(abs(difference)) if difference else "0"


def _sign(number: float) -> str:
    return "+" if number > 0 else "-"
