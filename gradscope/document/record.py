"""A document as plain data: what the page draws of it, in elements of its own."""

from __future__ import annotations

from typing import Any

from gradscope.document.parts import (
    Block,
    Bullets,
    Cell,
    Chart,
    Column,
    Commands,
    Document,
    Entry,
    Fact,
    KeyValues,
    Row,
    Table,
    Words,
)


def to_record(document: Document) -> list[dict[str, Any]]:
    """Return the sections in their order: key, title, what it is about, and blocks.

    A block is a table of texts, a sentence, a list of sentences, or texts to copy, which carry what they are for.
    """
    return [
        {
            "key": section.key,
            "title": section.title,
            "about": "; ".join(filter(None, [section.about, *section.legends])),
            "blocks": [part for block in section.blocks for part in _block(block)],
        }
        for section in document.sections
    ]


def _block(block: Block) -> list[dict[str, Any]]:
    match block:
        case Table():
            columns = [{"title": column.title, "align": column.align} for column in block.columns]
            rows = [{"cells": _cells(row, block.columns), "note": row.note} for row in block.rows]
            return [{"kind": "table", "columns": columns, "rows": rows}]
        case KeyValues():
            rows = [{"cells": list(pair), "note": ""} for pair in block.rows]
            return [{"kind": "table", "columns": [{"title": "", "align": "left"}] * 2, "rows": rows}]
        case Words():
            return [{"kind": "words", "text": block.text, "style": block.style}]
        case Bullets():
            return [{"kind": "list", "items": list(block.items)}]
        case Commands():
            return [{"kind": "copy", "label": step.purpose, "text": step.command} for step in block.steps]
        case Entry():
            return [{"kind": "words", "text": block.text, "style": "strong"}, *map(_fact, block.facts)]
        case Chart():
            return [{"kind": "words", "text": block.peak, "style": ""}]


def _cells(row: Row, columns: tuple[Column, ...]) -> list[str]:
    """The texts of a row, one a column; a bar says nothing that a number beside it does not."""
    texts = [cell.text + cell.after if isinstance(cell, Cell) else "" for cell in row.cells]
    return texts + [""] * (len(columns) - len(texts))


def _fact(fact: Fact) -> dict[str, Any]:
    if fact.kind == "code":
        return {"kind": "copy", "label": fact.label, "text": fact.text}
    return {"kind": "words", "text": f"{fact.label}: {fact.text}" if fact.label else fact.text, "style": ""}
