"""How a rule makes a finding: where, its words, its evidence, and what it promises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradscope.diagnose.case import Case, Severity, severity_of
from gradscope.tables import Finding


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
    """Low, likely and high parts of a measured time, and the bytes that are freed."""
    low, likely, high = (round(spent * part) for part in parts)
    return Estimate(likely, low, high, freed)


def at_most(ns: int) -> Estimate:
    """Nobody knows how much of this time is saved."""
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
    """One, with what ``gain`` says.

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
