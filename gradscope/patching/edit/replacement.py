"""Bytes of a file that become others, the reason why none do, and what is asked before they run."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass


class Refusal(Exception):
    """Why a match is left alone, as the plan shows it."""


@dataclass(frozen=True)
class Replacement:
    """Bytes of a file that become others."""

    start: int
    end: int
    text: str
    tidies: bool = False  # removes a line that is empty or a comment: two edits may do the same


def edited(text: bytes, replacements: Iterable[Replacement]) -> bytes:
    """Return ``text`` with ``replacements`` made.

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


def moved_by(start: int, replacements: Iterable[Replacement]) -> list[Replacement]:
    """Return ``replacements`` for a text that begins at ``start``."""
    return [Replacement(each.start - start, each.end - start, each.text, each.tidies) for each in replacements]


@dataclass(frozen=True)
class Known:
    """What an expression was in the recorded run, and must be for the new code."""

    expression: ast.expr
    text: str  # the test
