"""What the rules about recipes share: a finding for each line where a recipe could be put in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from gradscope.diagnose.case import Case, by_source, severity_of
from gradscope.tables import Finding, PlaceFact
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

# Alone, both ways find a warmer cache than in the step.
_WITHIN = 1.5


def found_places(
    case: Case,
    rule: str,
    recipes: Collection[str],
    message: Callable[[PlaceFact], str],
    *,
    wanted: Callable[[Case, PlaceFact], bool] = lambda case, place: True,
) -> Iterator[Finding]:
    """A finding for each line of these recipes that is supported and gains something.

    Args:
        rule: the name of the rule.
        recipes: names, as ``gradscope.plan`` has them.
        message: what is wrong there.
        wanted: which places this rule is about.
    """
    for (recipe, source), places in by_source(case.facts.places).items():
        good = [each for each in places if each.supported and not each.idle and wanted(case, each)]
        if recipe not in recipes or not good:
            continue
        yield finding_of(case, rule, good, source, message(good[0]))


def finding_of(case: Case, rule: str, places: list[PlaceFact], source: str, message: str) -> Finding:
    """Of places on one line, with what the micro-run or the lines' own time says."""
    one = places[0]
    layers = tuple(dict.fromkeys(place.layer for place in places))
    rounds = sum(place.rounds for place in places)
    savings = [place.predicted_saving_ns for place in places if place.predicted_saving_ns is not None]
    saving = round(sum(savings) * len(places) / len(savings)) if savings else None
    sizes = [place.predicted_saving_bytes for place in places if place.predicted_saving_bytes is not None]
    memory = sum(sizes) or None
    lines = sorted({call.source for call in map(case.call, one.calls) if call.source is not None})
    spent = case.lines_ns(lines)
    evidence = f"{counted(len(one.calls))} torch calls on {_lines(lines)}"
    if spent:
        evidence += f", {time_text(spent)} of a step, forward and backward"
    if rounds > 1:
        evidence += f", run {counted(round(rounds))} times"
    if memory and memory > 0:
        evidence += f"; they hold {size_text(memory)} that the recipe does not"
    return Finding(
        rule=rule,
        severity=severity_of(saving, case),
        layers=layers,
        line=source,
        message=message,
        evidence=evidence,
        recipe=one.recipe,
        predicted_saving_ns=saving if saving is not None and saving > 0 else None,
        predicted_saving_bytes=memory if memory is not None and memory > 0 else None,
        advice=f"Put the recipe {one.recipe} there: gradscope fix does it and proves the gain.",
        code=f"gradscope.patch(model, batch, recipes=[{one.recipe!r}])",
        predicted_low_ns=round(saving / _WITHIN) if saving is not None and saving > 0 else None,
        predicted_high_ns=round(saving * _WITHIN) if saving is not None and saving > 0 else None,
    )


def _lines(sources: list[str]) -> str:
    if not sources:
        return "lines that are not known"
    if len(sources) == 1:
        return f"line {sources[0].rpartition(':')[2]}"
    return f"{len(sources)} lines"
