"""A table of text, before anything is known of where it will be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Cell: TypeAlias = tuple[str, str]  # (text, name of a style): the text says everything, the style repeats it


@dataclass(frozen=True, slots=True)
class Field:
    """One column; what its fields mean is said in :class:`gradscope.report.grid.Column`."""

    header: str
    align: Literal["left", "right"] = "right"
    drop: int = 0
    least: int | None = None
    cut: Literal["end", "front"] = "end"
    most: int | None = None


class Row(tuple[Cell, ...]):
    """One cell for every column."""

    __slots__ = ()

    def __new__(cls, *cells: Cell) -> Row:
        return super().__new__(cls, cells)


@dataclass(frozen=True, slots=True)
class AlignedTable:
    """Rows under columns, and what its numbers mean."""

    title: str
    about: str
    fields: tuple[Field, ...]
    rows: tuple[Row, ...]
    after: tuple[str, ...] = ()  # sentences below it


def repeated(address: str, repeats: int) -> str:
    """``h.*.attn ×12``."""
    return f"{address} ×{repeats}" if repeats > 1 else address
