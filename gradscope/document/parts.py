"""The parts of a document: sections of tables, lists and sentences, whose texts are ready.

Every number is a text with its unit here, so that all outputs of one run print the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradscope import units

# What a text is marked as. The text says everything, a style only repeats it: see gradscope.document.style.STYLES.
Style = Literal["", "dim", "strong", "hot", "warm", "warn", "worse"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table."""

    text: str = ""
    style: Style = ""
    code: bool = False  # a name or a source text, which is set as code where there is code
    after: str = ""  # words behind a name: " ×12"
    guides: tuple[bool, ...] = ()  # of a tree: for each level above, whether what stands there is the last
    level: int = 0  # levels that it is indented by, where nothing draws guides


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell that is drawn: shares 0..1, of a thing alone and with all below it."""

    own: float
    total: float


@dataclass(frozen=True, slots=True)
class Column:
    """One column, declared once: what it is called, its unit, and how it gives way where it is narrow."""

    key: str  # a field of RUN.json where it shows one
    heading: str
    unit: str = ""
    align: Literal["left", "right"] = "right"
    drop: int = 0  # the highest is left out first; 0 never is
    least: int | None = None  # may be cut down to this width; None: as wide as its cells, never cut
    most: int | None = None
    cut: Literal["end", "front"] = "end"  # a path is told apart by its end: cut its front
    legend: str = ""  # what its numbers mean: said with what the section is about, where the column is shown

    @property
    def title(self) -> str:
        """Heading and unit."""
        return f"{self.heading} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Row:
    """A cell for each column, or for the first ones: the others are empty.

    ``kind``: a thing ("row"), the sum of what is not shown ("rest"), or of all ("whole").
    """

    cells: tuple[Cell | Bar, ...]
    kind: Literal["row", "rest", "whole"] = "row"
    note: str = ""  # a sentence below it
    note_style: Style = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def legends(self) -> list[str]:
        """What the columns' numbers mean, of those that say it."""
        return [column.legend for column in self.columns if column.legend]

    def __post_init__(self) -> None:
        width = len(self.columns)
        wrong = [row for row in self.rows if len(row.cells) > width]
        assert not wrong, f"{len(wrong[0].cells)} cells under {width} columns"


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Names, and a text for each."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Words:
    """A sentence, or a few."""

    text: str
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Bullets:
    """Sentences with a dash before each."""

    items: tuple[str, ...]
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """A labelled text of an :class:`Entry`: a sentence, names with dots between, a source line, or code to copy."""

    label: str
    text: str
    style: Style = ""
    kind: Literal["text", "names", "source", "code"] = "text"


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of a numbered list: in full, with facts below it, or in one line, with what is most worth saying.

    ``brief``: said behind the text where there is room, the last most of all.
    """

    number: int
    label: str  # "critical"
    text: str
    facts: tuple[Fact, ...] = ()
    brief: tuple[str, ...] = ()
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command worth running now, and what for."""

    command: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands to copy."""

    steps: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Bytes over the time of a step, with phases and the peak; where nothing can be drawn, the peak in words."""

    points: Sequence[tuple[int, int]]  # (ns, bytes) in order of time; the bytes hold until the next one
    phases: Sequence[tuple[str, int, int]]  # (name, start ns, end ns)
    duration_ns: int
    peak_ns: int
    peak_bytes: int

    @property
    def peak(self) -> str:
        """``peak 22.4 GB at 5.75 s``."""
        return f"peak {units.size(self.peak_bytes)} at {units.ns(self.peak_ns)}"


Block: TypeAlias = Table | KeyValues | Words | Bullets | Entry | Commands | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """A title, what its numbers mean, and what stands below."""

    key: str  # what asks for it: --show ops
    title: str
    about: str
    blocks: tuple[Block, ...] = ()
    bars: str = ""  # what bars mean: said with what it is about, where they are drawn

    @property
    def legends(self) -> list[str]:
        """What its tables' columns mean, where all of them are shown."""
        return [legend for block in self.blocks if isinstance(block, Table) for legend in block.legends]


@dataclass(frozen=True, slots=True)
class Document:
    """Everything that is shown, in the order of reading."""

    title: str
    subject: str  # what it is about, beside the title
    head: KeyValues
    sections: tuple[Section, ...]
    warning: str = ""  # what must be known before anything is believed
    reasons: tuple[str, ...] = ()  # of the warning

    def section(self, key: str) -> Section | None:
        """Return the section of that key, None where it is not shown."""
        return next((section for section in self.sections if section.key == key), None)


def code(text: str, style: Style = "") -> Cell:
    """Make a cell of a name or a source text."""
    return Cell(text, style, code=True)


def plain(texts: Sequence[str]) -> tuple[Cell, ...]:
    """Make the cells of plain texts."""
    return tuple(Cell(text) for text in texts)


def strong(texts: Sequence[str]) -> tuple[Cell, ...]:
    """Make the cells of a sum."""
    return tuple(Cell(text, "strong") for text in texts)


def dim(texts: Sequence[str]) -> tuple[Cell, ...]:
    """Make the cells of what is not shown by itself."""
    return tuple(Cell(text, "dim") for text in texts)
