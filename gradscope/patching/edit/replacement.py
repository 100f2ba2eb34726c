"""Bytes of a file that become others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradscope.patching.edit.refusal import Refusal


@dataclass(frozen=True)
class Replacement:
    """Bytes of a file that become others."""

    start: int
    end: int
    text: str
    tidies: bool = False  # takes one line away that is empty or a comment: two edits may do it


def edited(text: bytes, replacements: Iterable[Replacement]) -> bytes:
    """``text`` with its replacements made.

    Raises:
        Refusal: two of them overlap.
    """
    end = len(text) + 1
    for part in sorted(set(replacements), key=lambda part: (part.start, part.end), reverse=True):
        if part.end > end:
            raise Refusal("two patterns overlap in the source")
        text = text[: part.start] + part.text.encode() + text[part.end :]
        end = part.start
    return text
