"""How findings put things."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gradscope.diagnose.case import Case, share
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import percent


def several(number: int, thing: str) -> str:
    """ "1 mask", "12 masks"."""
    return f"{counted(number)} {thing}{'' if number == 1 else 's'}"


def of_step(ns: int, case: Case) -> str:
    """ "1.24 ms of a step (3.1 %)"."""
    return f"{time_text(ns)} of a step ({percent(share(ns, case))})"


def shape_text(shape: Iterable[int]) -> str:
    """ "8x128x64", as the tables of memory have it."""
    return "x".join(map(str, shape))


def where(sources: Sequence[str]) -> str:
    """The lines in words: "line 12", "3 lines, 12 to 20"."""
    if not sources:
        return "lines that are not known"
    if len(sources) == 1:
        return f"line {number_of(sources[0])}"
    files = {source.rpartition(":")[0] for source in sources}
    numbers = sorted(map(number_of, sources))
    span = f", {numbers[0]} to {numbers[-1]}" if len(files) == 1 else ""
    return f"{len(sources)} lines{span}"


def number_of(source: str) -> int:
    """12 of "model.py:12"."""
    return int(source.rpartition(":")[2])


def only(sources: Iterable[str | None]) -> str | None:
    """The one line; None where there are several: a finding names none of them then."""
    found = set(sources)
    return found.pop() if len(found) == 1 else None


def is_of_a_library(source: str | None) -> bool:
    """Check that the line is of an installed package, whose files nobody edits."""
    return source is not None and re.search(r"[/\\](site|dist)-packages[/\\]", source) is not None
