"""What a run says of memory, ready to be written down: words and exact bytes, in the order of reading.

Each table holds its largest rows and what they leave out, so that what is printed adds up to the whole it is a share
of. Repeated blocks are folded as in the tree of layers: one row for ``transformer.h.*.attn``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from gradscope import units
from gradscope.report.memorywords import (
    allocator_words,
    leaked_bytes,
    outside_words,
    peak_words,
    tensor_words,
)
from gradscope.report.tree import ViewOptions
from gradscope.tables import CopyRow, HeldRow, HolderRow, MemoryInfo, PhaseSpan, RetainedRow, SavedRow, TimelinePoint

OUTSIDE = "outside the layers"

# Rows of each table unless the reader says how many (``top``).
HOLDERS = 6
TENSORS = 5
COPIES = 3
LEFTOVERS = 3


class _Sized(Protocol):
    @property
    def bytes(self) -> int: ...


Row = TypeVar("Row", bound=_Sized)


@dataclass(frozen=True, slots=True)
class Largest(Generic[Row]):
    """The largest rows of a table, and what they leave out; together they are ``whole``."""

    rows: tuple[Row, ...]
    more: int  # rows not shown
    more_bytes: int
    whole: int  # bytes

    @property
    def percents(self) -> list[str]:
        """The share of each row and, last, of what is left out; the texts add up to 100.0 %."""
        return units.percents_of([*(row.bytes for row in self.rows), self.more_bytes], self.whole)

    def share(self, part: int) -> float:
        """``part`` bytes as a share of the whole, 0..1."""
        return part / self.whole if self.whole else 0.0


@dataclass(frozen=True, slots=True)
class Holder:
    """What one layer, or one set of repeats, held at the peak in one category."""

    owner: str
    category: str
    bytes: int


@dataclass(frozen=True, slots=True)
class KeptTensors:
    """Tensors of one kind that one line of one layer, or of its repeats, keeps alive."""

    what: str  # "softmax output 8x12x1024x1024 float32", or the op that made it: "aten::linear, forward"
    bytes: int
    count: int
    layer: str
    line: str  # "model.py:52"; "" where it has none
    leaks: bool = False  # grows with every step, by more than is kept on purpose

    @property
    def each(self) -> int | None:
        """Bytes of one of them; ``None`` where they differ, or there is one only."""
        return self.bytes // self.count if self.count > 1 and self.bytes % self.count == 0 else None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies made by one op of one line in one phase."""

    line: str
    op: str
    phase: str
    layer: str
    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes allocated over the step that measured memory."""

    points: Sequence[TimelinePoint]  # in order of time; between two of them the first one's bytes are allocated
    phases: Sequence[PhaseSpan]
    duration_ns: int
    peak_ns: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryView:
    """All that a report shows of memory. A table without rows has nothing worth saying."""

    peak: str  # "9.38 GB in backward, at 1.02 s of 2.40 s, while transformer.h.11.attn ran SoftmaxBackward0"
    holders: Largest[Holder]
    categories: tuple[tuple[str, int], ...]  # (category, bytes), largest first; add up to the peak
    timeline: Timeline
    saved: Largest[KeptTensors]
    passes: str  # behind what is saved: ", summed over 4 backward passes"; "" of one
    retained: Largest[KeptTensors]
    leaked_bytes: int  # part of what is retained
    held: Largest[KeptTensors]
    copies: Largest[Copy]
    allocations: str  # what the whole step allocated: "4812 allocations, 52.7 GB in all"
    device: str  # "cuda:0"
    figures: str  # the allocator's own figures, "" where the device has none
    outside: str  # a sentence on why nvidia-smi shows more, "" where the device has no such figure


def build_memory(memory: MemoryInfo, options: ViewOptions, name: Callable[[str | None], str], model: str) -> MemoryView:
    """The view of ``memory``.

    Args:
        memory: as measured.
        options: ``top`` is the number of rows of each table; rows below ``min_percent`` of their whole are summed up,
            and copies, held and retained memory below that share of the peak are left out altogether, but for leaks.
        name: path of a layer to the name it is shown under, repeats folded; ``""`` for ``None``.
        model: what the root is called.
    """

    def choose(rows: Iterable[Row], whole: int, usual: int, least: int = 0) -> Largest[Row]:
        return _largest(rows, whole, options.top or usual, options.min_percent, least)

    worth = round(memory.peak_bytes * options.min_percent / 100)
    leaked = leaked_bytes(memory)
    named = _Namer(name, alarmed=leaked > 0)
    end = max([memory.peak_ns, *(point.ns for point in memory.timeline), *(span.end_ns for span in memory.phases)])
    return MemoryView(
        peak=peak_words(memory, model, end),
        holders=choose(named.holders(memory.at_peak), memory.peak_bytes, HOLDERS),
        categories=_categories(memory.at_peak),
        timeline=Timeline(
            points=sorted(memory.timeline, key=lambda point: point.ns),
            phases=sorted(memory.phases, key=lambda span: span.start_ns),
            duration_ns=end,
            peak_ns=memory.peak_ns,
            peak_bytes=memory.peak_bytes,
        ),
        saved=choose(named.saved(memory.saved), memory.saved_bytes, TENSORS),
        passes=units.over_passes(memory.backward_passes),
        retained=choose(
            named.retained(memory.retained), memory.retained_after_step_bytes, LEFTOVERS, 0 if leaked else worth
        ),
        leaked_bytes=leaked,
        held=choose(named.held(memory.held), memory.held_bytes, LEFTOVERS, worth),
        copies=choose(named.copies(memory.copies), memory.copied_bytes, COPIES, worth),
        allocations=(
            f"{units.count(memory.allocations)} {'allocation' if memory.allocations == 1 else 'allocations'}, "
            f"{units.size(memory.step_allocated_bytes)} in all"
        ),
        device=memory.device,
        figures=allocator_words(memory),
        outside=outside_words(memory),
    )


# --------------------------------------------------------------------------------------------------------------------
# Rows, repeats summed
# --------------------------------------------------------------------------------------------------------------------


class _Namer:
    """Rows of the run to rows of the view: layers by the names they are shown under, rows of one name summed.

    Args:
        name: of a layer's path.
        alarmed: whether what grows is called a leak.
    """

    def __init__(self, name: Callable[[str | None], str], *, alarmed: bool) -> None:
        self._name, self._alarmed = name, alarmed

    def holders(self, rows: Sequence[HolderRow]) -> list[Holder]:
        sums: dict[tuple[str, str], int] = {}
        for row in rows:
            key = (self._layer(row.owner), row.category)
            sums[key] = sums.get(key, 0) + row.bytes
        return [Holder(*key, size) for key, size in sums.items()]

    def saved(self, rows: Sequence[SavedRow]) -> list[KeptTensors]:
        return self._tensors((tensor_words(row.node, row.what, row.shape, row.dtype), row) for row in rows)

    def held(self, rows: Sequence[HeldRow]) -> list[KeptTensors]:
        return self._tensors((row.op, row) for row in rows)

    def retained(self, rows: Sequence[RetainedRow]) -> list[KeptTensors]:
        return self._tensors((f"{row.op}, {row.phase}", row) for row in rows)

    def _tensors(self, rows: Iterable[tuple[str, SavedRow | HeldRow | RetainedRow]]) -> list[KeptTensors]:
        sums: dict[tuple[str, str, str, bool], tuple[int, int]] = {}
        for what, row in rows:
            key = (
                what,
                self._layer(row.layer),
                row.line or "",
                self._alarmed and isinstance(row, RetainedRow) and row.grows,
            )
            size, count = sums.get(key, (0, 0))
            sums[key] = size + row.bytes, count + row.count
        return [
            KeptTensors(what, size, count, layer, line, leaks)
            for (what, layer, line, leaks), (size, count) in sums.items()
        ]

    def copies(self, rows: Sequence[CopyRow]) -> list[Copy]:
        sums: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        for row in rows:
            key = (row.line or "", row.op, row.phase, self._layer(row.layer))
            calls, size = sums.get(key, (0, 0))
            sums[key] = calls + row.calls, size + row.bytes
        return [Copy(*key, calls, size) for key, (calls, size) in sums.items()]

    def _layer(self, path: str | None) -> str:
        return self._name(path) or OUTSIDE


def _largest(rows: Iterable[Row], whole: int, limit: int, min_percent: float, least: int) -> Largest[Row]:
    """The ``limit`` largest of at least ``min_percent`` of ``whole``; leaks first, and whatever their size.

    Nothing at all where the whole is less than ``least`` bytes.
    """
    if whole <= 0 or whole < least:
        return Largest((), 0, 0, 0)
    ordered = sorted((row for row in rows if row.bytes), key=lambda row: (not _leaks(row), -row.bytes))
    shown = [row for row in ordered if _leaks(row) or row.bytes * 100 >= min_percent * whole][:limit]
    return Largest(tuple(shown), len(ordered) - len(shown), whole - sum(row.bytes for row in shown), whole)


def _leaks(row: Any) -> bool:
    return isinstance(row, KeptTensors) and row.leaks


def _categories(rows: Sequence[HolderRow]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for row in rows:
        sums[row.category] = sums.get(row.category, 0) + row.bytes
    return tuple(sorted(((name, size) for name, size in sums.items() if size), key=lambda pair: -pair[1]))
