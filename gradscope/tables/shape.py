"""The tree of layers in a file: its rows may come from anywhere, and what shows them walks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradscope.safe_text import shown_value
from gradscope.tables.results import LayerRow

# Python itself calls no deeper model: a module's call takes three of its thousand frames.
MOST_LEVELS = 1_000


class ShapeError(ValueError):
    """The layers are no tree; the message says which of them, and why."""


def check_tree(rows: Sequence[LayerRow]) -> None:
    """Raise :class:`ShapeError` unless paths differ, no layer is inside itself, and none is too deep.

    A parent that has no row is skipped: the nearest one on its path that has a row counts.
    """
    known = {row.path: number for number, row in enumerate(rows)}
    if len(known) < len(rows):
        number, row = next((i, row) for i, row in enumerate(rows) if known[row.path] != i)
        raise ShapeError(f"layers[{known[row.path]}].path is {shown_value(row.path)}, as that of layers[{number}]")
    levels: dict[str, int] = {}
    for number, row in enumerate(rows):
        _level(number, row, rows, known, levels)


def _level(
    number: int, row: LayerRow, rows: Sequence[LayerRow], known: Mapping[str, int], levels: dict[str, int]
) -> None:
    """Note how deep ``row`` lies, and all above it."""
    chain: list[LayerRow] = []
    seen: set[str] = set()
    at: LayerRow | None = row
    while at is not None and at.path not in levels:
        if at.path in seen:
            raise ShapeError(
                f"layers[{number}].parent is {shown_value(row.parent)}, which makes a layer its own parent"
            )
        seen.add(at.path)
        chain.append(at)
        above = parent_path(at, known)
        at = None if above is None else rows[known[above]]
    level = 0 if at is None else levels[at.path] + 1
    for one in reversed(chain):
        levels[one.path] = level
        level += 1
    if levels[row.path] >= MOST_LEVELS:
        raise ShapeError(f"layers[{number}] is more than {MOST_LEVELS} levels deep")


def parent_path(row: LayerRow, known: Mapping[str, object]) -> str | None:
    """The path of the nearest layer above ``row`` that is in ``known``; None for a root."""
    path = row.parent
    while path is not None and path not in known:
        path = path.rpartition(".")[0] if path else None
    return None if path == row.path and row.parent != row.path else path
