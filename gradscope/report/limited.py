"""A layer's time beside what it would be at this machine's limits, for one layer or summed over many.

Like is compared with like: the limit of the layers that have one, with the measured time of these layers, and of it the
part that the limit is of, their own operations. What activation checkpointing runs again, gradient sums and writing
``.grad`` have no limit, nor have layers whose calls do not tell; see docs/limits.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradscope import units
from gradscope.tables import LayerRow

KINDS = ("compute", "bandwidth", "overhead", "waiting")
# The share of a time that must be that of layers with a limit, for their limit to stand for all of it.
ENOUGH = 0.95
# What limits less than this share of it is not named.
_LEAST = 0.005


@dataclass(frozen=True, slots=True)
class Limited:
    """What is known of the limits of one pass, forward or backward.

    Attributes:
        known_ns: measured time of the layers that have a limit, of their own operations.
        limit_ns: what these would take at it.
        by_kind_ns: the part of ``known_ns`` that each of :data:`KINDS` limits.
    """

    known_ns: int
    limit_ns: int
    by_kind_ns: tuple[int, ...]

    @property
    def reached(self) -> float | None:
        """The limit over the measured time, 1 is as fast as this machine can; None where either is nothing."""
        return self.limit_ns / self.known_ns if self.known_ns > 0 and self.limit_ns > 0 else None

    def covers(self, whole_ns: int) -> bool:
        """Check that the operations with a known limit took enough of ``whole_ns`` to stand for it."""
        return self.known_ns > 0 and self.known_ns >= ENOUGH * whole_ns

    @property
    def bound_by(self) -> str:
        """What limits most of it: ``bandwidth``, or ``bandwidth 78 %`` where something else limits a part."""
        return next(iter(self.kinds()), "")

    def kinds(self) -> list[str]:
        """All that limits it, the longest first: ``["compute 81 %", "bandwidth 19 %"]``, or ``["compute"]``."""
        shares = [(spent / self.known_ns, kind) for kind, spent in zip(KINDS, self.by_kind_ns, strict=True) if spent]
        named = sorted((pair for pair in shares if pair[0] >= _LEAST), key=lambda pair: -pair[0])
        return [kind if share > 1 - _LEAST else f"{kind} {units.percent(share, 0)}" for share, kind in named]

    def words(self, phase: str, whole_ns: int) -> str:
        """``backward 12.3 ms, at this machine's limit 4.1 ms (33 %), bound by compute``; empty where nothing ran.

        The limit is that of the operations with a known one: where they took less than ``whole_ns``, it begins with
        what they took.
        """
        if self.reached is None:
            return ""
        time = f"{phase} {units.ns(whole_ns)}"
        known = units.ns(self.known_ns)
        measured = time if known == units.ns(whole_ns) else f"{known} of {time}"
        kind = f", bound by {self.bound_by}" if self.bound_by else ""
        limit = f"{units.ns(self.limit_ns)} ({units.percent(self.reached, 0)})"
        return f"{measured}, at this machine's limit {limit}{kind}"


def limited(limit_ns: int | None, measured_ns: int, kind: str | None) -> Limited | None:
    """One layer as :class:`Limited`; None where its limit is not known."""
    if limit_ns is None:
        return None
    return Limited(measured_ns, limit_ns, tuple(measured_ns if kind == each else 0 for each in KINDS))


def sum_of(parts: Sequence[Limited]) -> Limited:
    """Several layers as one :class:`Limited`."""
    return Limited(
        sum(part.known_ns for part in parts),
        sum(part.limit_ns for part in parts),
        tuple(sum(part.by_kind_ns[i] for part in parts) for i in range(len(KINDS))),
    )


def backward_of(rows: Sequence[LayerRow]) -> Limited | None:
    """The backward of these layers; None where no limit is known."""
    each = [limited(row.backward_limit_ns, row.backward_self_ns, row.bound_by) for row in rows]
    known = [one for one in each if one is not None]
    return sum_of(known) if known else None


def header_text(found: Limited, backward_ns: int) -> str:
    """The whole backward beside its limit, what limits it, and which part of it no limit is known of."""
    reached = found.reached
    if reached is None:
        return ""
    # Faster than what was measured as the fastest: the limits are too low, or all of it was in a cache.
    doubt = ": more than there should be, are the limits of a busy machine?" if reached > 1 else ""
    known, whole = units.ns(found.known_ns), units.ns(backward_ns)
    measured = f"backward {whole}" if known == whole else f"{known} of backward {whole}"
    limit = f"{units.ns(found.limit_ns)} ({units.percent(reached, 0)}{doubt})"
    parts = [f"{measured}, at this machine's limit {limit}"]
    if kinds := found.kinds():
        parts.append(", ".join(kinds))
    without = 1 - found.known_ns / backward_ns if backward_ns else 0.0
    if without >= 0.005:
        parts.append(f"no limit is known of the other {units.percent(without, 0)}")
    return " · ".join(parts)
