"""What a run says of memory, ready to be written down: words and exact bytes, in the order of reading.

Each table holds its largest rows and what they leave out, so that what is printed adds up to the whole it is a share
of. Repeated blocks are folded as in the tree of layers: one row for ``transformer.h.*.attn``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

from gradscope import units
from gradscope.document.parts import Chart
from gradscope.report.memorywords import end_ns, leaked_bytes, tensor_words
from gradscope.report.tree import ViewOptions
from gradscope.tables import MemoryInfo

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
Key = TypeVar("Key")


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
class MemoryView:
    """All that a report shows of memory. A table without rows has nothing worth saying."""

    holders: Largest[Holder]
    categories: tuple[tuple[str, int], ...]  # (category, bytes), largest first; add up to the peak
    course: Chart  # bytes allocated over the step that measured memory
    saved: Largest[KeptTensors]
    retained: Largest[KeptTensors]
    leaked_bytes: int  # part of what is retained
    held: Largest[KeptTensors]
    copies: Largest[Copy]


def build_memory(memory: MemoryInfo, options: ViewOptions, name: Callable[[str | None], str]) -> MemoryView:
    """The view of ``memory``.

    Args:
        memory: as measured.
        options: ``top`` is the number of rows of each table; rows below ``min_percent`` of their whole are summed up,
            and copies, held and retained memory below that share of the peak are left out altogether, but for leaks.
        name: path of a layer to the name it is shown under, repeats folded; ``""`` for ``None``.
    """

    def choose(rows: Iterable[Row], whole: int, usual: int, least: int = 0) -> Largest[Row]:
        return _largest(rows, whole, options.top or usual, options.min_percent, least)

    def layer(path: str | None) -> str:
        return name(path) or OUTSIDE

    def tensors(rows: Iterable[Any], what: Callable[[Any], str], *, alarmed: bool = False) -> list[KeptTensors]:
        found = _alike(rows, lambda row: (what(row), layer(row.layer), row.line or "", alarmed and row.grows))
        return [
            KeptTensors(made, _bytes(same), sum(row.count for row in same), where, line, leaks)
            for (made, where, line, leaks), same in found
        ]

    worth = round(memory.peak_bytes * options.min_percent / 100)
    leaked = leaked_bytes(memory)
    holders = _alike(memory.at_peak, lambda row: (layer(row.owner), row.category))
    categories = [(category, _bytes(same)) for category, same in _alike(memory.at_peak, lambda row: row.category)]
    saved = tensors(memory.saved, lambda row: tensor_words(row.node, row.what, row.shape, row.dtype))
    retained = tensors(memory.retained, lambda row: f"{row.op}, {row.phase}", alarmed=leaked > 0)
    copies = _alike(memory.copies, lambda row: (row.line or "", row.op, row.phase, layer(row.layer)))
    copied = [Copy(*key, sum(row.calls for row in same), _bytes(same)) for key, same in copies]
    return MemoryView(
        holders=choose([Holder(*key, _bytes(same)) for key, same in holders], memory.peak_bytes, HOLDERS),
        categories=tuple(sorted((pair for pair in categories if pair[1]), key=lambda pair: -pair[1])),
        course=Chart(
            points=sorted(((point.ns, point.bytes) for point in memory.timeline), key=itemgetter(0)),
            phases=sorted(((span.phase, span.start_ns, span.end_ns) for span in memory.phases), key=itemgetter(1)),
            duration_ns=end_ns(memory),
            peak_ns=memory.peak_ns,
            peak_bytes=memory.peak_bytes,
        ),
        saved=choose(saved, memory.saved_bytes, TENSORS),
        retained=choose(retained, memory.retained_after_step_bytes, LEFTOVERS, 0 if leaked else worth),
        leaked_bytes=leaked,
        held=choose(tensors(memory.held, lambda row: row.op), memory.held_bytes, LEFTOVERS, worth),
        copies=choose(copied, memory.copied_bytes, COPIES, worth),
    )


def _alike(rows: Iterable[Any], key: Callable[[Any], Key]) -> Iterable[tuple[Key, list[Any]]]:
    """The rows of each key: repeats, which are shown as one."""
    found: dict[Key, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found.items()


def _bytes(rows: Iterable[_Sized]) -> int:
    return sum(row.bytes for row in rows)


def _largest(rows: Iterable[Row], whole: int, limit: int, min_percent: float, least: int) -> Largest[Row]:
    """The ``limit`` largest of at least ``min_percent`` of ``whole``; leaks first, and whatever their size.

    Nothing at all where the whole is less than ``least`` bytes.
    """
    if whole <= 0 or whole < least:
        return Largest((), 0, 0, 0)
    ordered = sorted((row for row in rows if row.bytes), key=lambda row: (not _leaks(row), -row.bytes))
    shown = [row for row in ordered if _leaks(row) or row.bytes * 100 >= min_percent * whole][:limit]
    return Largest(tuple(shown), len(ordered) - len(shown), whole - _bytes(shown), whole)


def _leaks(row: Any) -> bool:
    return isinstance(row, KeptTensors) and row.leaks
