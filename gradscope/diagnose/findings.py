"""How a rule makes a finding: where, its words, its evidence, and what it promises."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradscope.diagnose.case import Case, severity_of, share
from gradscope.tables import Finding, Severity
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import percent


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of what a step would save: time in ns, its range, and memory at the peak.

    Without a likely time, ``high`` is the most that there is to gain.
    """

    ns: int = 0
    low: int = 0
    high: int = 0
    bytes: int = 0


def parts_of(spent: float, parts: tuple[float, float, float], freed: int = 0) -> Estimate:
    """Estimate by low, likely and high parts of a measured time, and the bytes that are freed."""
    low, likely, high = (round(spent * part) for part in parts)
    return Estimate(likely, low, high, freed)


def at_most(ns: int) -> Estimate:
    """Estimate a saving between nothing and all of a time: nobody knows how much."""
    return Estimate(high=ns)


def make_finding(
    rule: str,
    case: Case,
    gain: Estimate | None,
    *,
    layers: Iterable[str | None],
    line: str | None,
    message: str,
    evidence: str,
    advice: str,
    code: str,
    severity: Severity | None = None,
    cost_ns: int = 0,
    recipe: str | None = None,
) -> Finding:
    """Make a finding with what ``gain`` says.

    Args:
        gain: None where nothing can be promised.
        layers: paths, each told once; None is no layer.
        severity: without it, by the time that would be saved.
        cost_ns: measured, of one step; 0: not known.
    """
    gain = gain or Estimate()
    saved = max(gain.ns, 0) or None
    return Finding(
        rule=rule,
        severity=severity or severity_of(saved, case),
        layers=tuple(dict.fromkeys(path for path in layers if path is not None)),
        line=line,
        message=message,
        evidence=evidence,
        recipe=recipe,
        predicted_saving_ns=saved,
        predicted_saving_bytes=max(gain.bytes, 0) or None,
        advice=advice,
        code=code,
        predicted_low_ns=gain.low if saved else None,
        predicted_high_ns=max(gain.high, 0) or None,
        cost_ns=cost_ns or None,
    )


def script_of(case: Case) -> str:
    """The program as a command line names it: the script that was measured, or a stand-in where it was none."""
    about = case.run.workload
    return shlex.quote(about.target) if about.mode == "script" and about.target.endswith(".py") else "train.py"


def several(number: int, thing: str) -> str:
    """ "1 mask", "12 masks"."""
    return f"{counted(number)} {thing}{'' if number == 1 else 's'}"


def of_step(ns: int, case: Case) -> str:
    """ "1.24 ms per step (3.1 %)"."""
    return f"{time_text(ns)} per step ({percent(share(ns, case))})"


def shape_text(shape: Iterable[int]) -> str:
    """ "8x128x64", as the tables of memory have it."""
    return "x".join(map(str, shape))


def where(sources: Sequence[str]) -> str:
    """The lines in words: "line 12", "3 lines, 12 to 20"."""
    if not sources:
        return "unknown lines"
    if len(sources) == 1:
        return f"line {number_of(sources[0])}"
    files = {source.rpartition(":")[0] for source in sources}
    numbers = sorted(map(number_of, sources))
    span = f", {numbers[0]} to {numbers[-1]}" if len(files) == 1 else ""
    return f"{len(sources)} lines{span}"


def number_of(source: str) -> int:
    """Return the number of a line: 12 of "model.py:12"."""
    return int(source.rpartition(":")[2])


def only(sources: Iterable[str | None]) -> str | None:
    """The one line; None where there are several: a finding names none of them then."""
    found = set(sources)
    return found.pop() if len(found) == 1 else None


def of_package(source: str) -> str:
    """The line as a title has it: of an installed package from the package on."""
    return re.split(r"[/\\](?:site|dist)-packages[/\\]", source)[-1]


def is_of_a_library(source: str | None) -> bool:
    """Check that the line is of an installed package, whose files nobody edits."""
    return source is not None and re.search(r"[/\\](site|dist)-packages[/\\]", source) is not None
