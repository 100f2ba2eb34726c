"""Types of a comparison: values before and after, layers, and what must be known about the two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gradscope.tables import RunData

Unit = Literal["ns", "bytes", "count"]
Status = Literal["matched", "new", "removed"]

# Where the noise of a value is known from:
#   exact     bytes and counts have none
#   steps     the value of each measured step
#   estimate  the relative spread of its layer's own backward nodes, or of the whole phase where that is larger
#   whole     the spread of the whole that it is a part of: for a layer without backward nodes, its phase
Basis = Literal["exact", "steps", "estimate", "whole"]


@dataclass(frozen=True, slots=True)
class Change:
    """One value of one thing in two runs, per step."""

    metric: str  # "backward_total_ns": a key of RUN.json
    unit: Unit
    before: int | None  # None: not there, or not measured
    after: int | None
    noise: int | None  # the largest difference that may be noise; None: not known, from one step
    basis: Basis = "exact"

    @property
    def difference(self) -> int | None:
        """After less before; ``None`` unless both are known."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def ratio(self) -> float | None:
        """After over before; ``None`` where there is nothing before to divide by."""
        if self.before is None or self.after is None or self.before <= 0:
            return None
        return self.after / self.before

    @property
    def real(self) -> bool | None:
        """Check that the difference is more than noise; ``None`` where nothing can be said."""
        difference = self.difference
        if difference is None:
            return None
        if difference == 0:
            return False
        return None if self.noise is None else abs(difference) > self.noise


# What DIFF.json and the DataFrames say of a :class:`Change`, and of which type that is to pandas.
COLUMNS: Mapping[str, str] = {
    "metric": "object",
    "unit": "object",
    "before": "Int64",
    "after": "Int64",
    "difference": "Int64",
    "ratio": "float64",
    "noise": "Int64",
    "basis": "object",
    "real": "boolean",
}


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One layer, by path, in two runs; a new one has no values before, a removed one none after."""

    path: str
    class_before: str | None
    class_after: str | None
    changes: Mapping[str, Change]  # by metric

    @property
    def status(self) -> Status:
        """Tell which runs have the layer: the second alone (new), the first alone (removed), or both."""
        if self.class_before is None:
            return "new"
        return "removed" if self.class_after is None else "matched"

    @property
    def class_name(self) -> str:
        """``Linear``, or ``GELU → ReLU`` where another class stands at the same path."""
        return class_words(self.class_before, self.class_after)


def class_words(before: str | None, after: str | None) -> str:
    """The class's name; both where they differ."""
    if before is None or after is None or before == after:
        return after or before or ""
    return f"{before} → {after}"


@dataclass(frozen=True, slots=True)
class GroupChange:
    """Repeats of one layer that changed alike, summed; or one layer."""

    address: str  # "transformer.h.*.attn"
    class_name: str
    paths: tuple[str, ...]
    backward: Change  # own: backward nodes, recompute, accumulation and gradient sums
    forward: Change  # self
    estimated: float | None = None  # the larger share of its backward that is an estimate in a run; None in neither


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Repeats of one layer with the same bytes before and the same after, summed."""

    address: str
    class_name: str
    paths: tuple[str, ...]
    changes: Mapping[str, Change]  # those that were measured


@dataclass(frozen=True, slots=True)
class Presence:
    """A layer that only one of the runs has, with all such layers below it; repeats are summed."""

    address: str
    class_name: str
    paths: tuple[str, ...]
    layers: int  # these and those below them
    backward_ns: int
    forward_ns: int
    saved_bytes: int | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing, other than the code, in which the runs differ."""

    what: str  # "torch", "input shapes"
    text: str  # "torch: 2.12.0 before, 2.13.0 after"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that two runs have to say to each other."""

    before: RunData
    after: RunData
    names: tuple[str, str]  # what the reader calls them: file names
    mismatches: Sequence[Mismatch]  # why the runs may not be comparable
    notes: Sequence[str]  # what could not be compared, and why
    totals: Sequence[Change]
    layers: Sequence[LayerChange]  # as in the run after; then those that were removed
    groups: Sequence[GroupChange]  # of the matched layers
    memory: Sequence[MemoryChange]  # of the matched layers whose bytes or allocations differ
    new: Sequence[Presence]
    removed: Sequence[Presence]
