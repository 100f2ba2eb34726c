"""What the rules about recipes share: a finding for each line where a recipe could be put in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from gradscope.diagnose.case import SAME_MEMORY, Case, Floor, by_source
from gradscope.diagnose.findings import Estimate, is_of_a_library, make_finding, where
from gradscope.diagnose.worth import alive_at_peak
from gradscope.ops import CASTS, LOSSES
from gradscope.recording.graph import Node
from gradscope.tables import Finding, PlaceFact, is_unreliable
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

# Alone, both ways find a warmer cache than in the step.
_WITHIN = 1.5

# Of the lines' time: a recipe that loses more in the micro-run would be taken out again.
_LOST = 0.1

# Views and casts between a head and its loss.
_FAR = 4

# What this saves, the loss on another line spends.
_WITH_THE_LOSS = "linear_cross_entropy"

# A longer line is not advice any more.
_LONGEST = 160

Fallback = Callable[[Case, Sequence[PlaceFact]], Estimate | None]


def half_of_lines(case: Case, places: Sequence[PlaceFact]) -> Estimate | None:
    """Return what recipes for plain operations saved of these on a CPU: 0.4 to 0.75."""
    spent = case.lines_ns(lines_of(case, places))
    return Estimate(spent // 2, spent // 4, spent * 3 // 4) if spent else None


def nothing(case: Case, places: Sequence[PlaceFact]) -> Estimate | None:
    """Estimate nothing: only a micro-run can tell."""
    return None


def found_places(
    case: Case,
    rule: str,
    recipes: Collection[str],
    message: Callable[[PlaceFact], str],
    *,
    wanted: Callable[[Case, PlaceFact], bool] = lambda case, place: True,
    otherwise: Fallback = half_of_lines,
    advice: Callable[[PlaceFact], str] | None = None,
) -> Iterator[Finding]:
    """Yield a finding for each line of these recipes that is supported and gains something.

    Args:
        rule: the name of the rule.
        recipes: names, as ``gradscope.plan`` has them.
        message: what is wrong there.
        wanted: which places this rule is about.
        otherwise: an estimate from the measured operations, for places that no micro-run was made of.
        advice: what to do; without it, to put the recipe in.
    """
    for (recipe, source), places in by_source(case.facts.places).items():
        good = [each for each in places if each.supported and not each.idle and wanted(case, each)]
        if recipe not in recipes or not good:
            continue
        found = finding_of(case, rule, good, source, message(good[0]), otherwise=otherwise, advice=advice)
        if found is not None:
            yield found


def finding_of(
    case: Case,
    rule: str,
    places: Sequence[PlaceFact],
    source: str,
    message: str,
    *,
    otherwise: Fallback = half_of_lines,
    advice: Callable[[PlaceFact], str] | None = None,
) -> Finding | None:
    """Make the finding of places on one line; None where a micro-run saves neither time nor memory."""
    one = places[0]
    lines = lines_of(case, [one])
    spent = case.lines_ns(lines)
    estimate = by_micro_run(places)
    # What the machine did meanwhile may be more than the difference of two short runs: memory stands for itself then.
    trusted = not is_unreliable(case.run.step)
    if estimate is not None and loses(estimate, spent) and (trusted or estimate.bytes <= 0):
        return None
    read, is_outside = set[str](), False
    if one.recipe == _WITH_THE_LOSS:
        read = {call.source for call in _readers(case, places) if call.source is not None} - {*lines}
        is_outside = _is_loss_outside(case, one)
    cost = spent + case.lines_ns(read)
    if estimate is not None:
        estimate = as_in_the_step(case, places, {*lines, *read}, estimate)
    estimate = estimate or otherwise(case, places) or Estimate(0, 0, 0)
    evidence = f"{_calls(one)} on {where(lines)}"
    if len(places) > 1:
        evidence += f" in each of {len(places)} layers"
    if spent:
        evidence += f", {time_text(spent)} per step in forward and backward"
    if estimate.bytes >= Floor().bytes:
        evidence += f"; {size_text(estimate.bytes)} more than {one.recipe} keeps"
    return make_finding(
        rule,
        case,
        estimate,
        layers=(place.layer for place in places),
        line=source,
        message=message,
        evidence=evidence,
        recipe=one.recipe,
        advice=_of_a_script(one) if is_outside and case.run.workload.mode == "script" else (advice or put_in)(one),
        code=f"gradscope.patch(model, batch, {'loss, ' if is_outside else ''}recipes=[{one.recipe!r}])",
        cost_ns=cost,
    )


def loses(estimate: Estimate, spent: int) -> bool:
    """Check that the cure would cost time worth a word, or give nothing; ``spent``: by its lines."""
    return estimate.ns < -_LOST * spent or (estimate.ns <= 0 and estimate.bytes <= 0)


def as_in_the_step(case: Case, places: Sequence[PlaceFact], lines: Collection[str], estimate: Estimate) -> Estimate:
    """Scale a micro-run's saving down where its calls took longer than the lines take in the step.

    What the recipe itself takes stays: never all of the lines' time is saved. Nor more memory than the peak holds.
    """
    freed = _at_the_peak(case, places, lines, estimate.bytes)
    cost = case.lines_ns(lines)
    if not cost:
        return replace(estimate, bytes=freed)
    old = _summed([place.predicted_old_ns for place in places])
    part = cost / old if old is not None and old > cost else 1.0
    ns, low, high = (min(round(each * part), cost) for each in (estimate.ns, estimate.low, estimate.high))
    return Estimate(ns, low, high, freed)


def _at_the_peak(case: Case, places: Sequence[PlaceFact], lines: Collection[str], freed: int) -> int:
    """Limit the bytes that micro-runs free, each at a peak of its own, to what the step's peak holds.

    That is what all of them save for backward beyond the recipe, if it lives then, and what the one that runs then
    makes on the way beyond it, which may be less than nothing.
    """
    memory = case.run.memory
    if memory is None:
        return freed
    alive = alive_at_peak(row for row in memory.saved if row.line in lines)
    kept = _summed([place.predicted_kept_bytes for place in places])
    running = memory.peak_phase in ("forward", "backward", "recompute")
    if kept is None:
        passing = max((place.predicted_saving_bytes or 0 for place in places), default=0) if running else 0
        return min(freed, alive + passing)
    layers: set[str | None] = {row.path for place in places for row in case.below.get(place.layer, ())}
    if any(place.layer in case.layers and case.layers[place.layer].parent is None for place in places):
        layers.add(None)  # what a model itself calls may be the loss, which no layer holds
    if places[0].recipe == _WITH_THE_LOSS and _is_loss_outside(case, places[0]):
        layers.add(None)
    on_the_way = [(place.predicted_saving_bytes or 0) - (place.predicted_kept_bytes or 0) for place in places]
    return max(0, min(kept, alive)) + (max(on_the_way) if running and memory.peak_layer in layers else 0)


def _readers(case: Case, places: Sequence[PlaceFact]) -> Iterator[Node]:
    """Yield the calls that read what the places make, also through views and casts: those of the loss behind a head."""
    made = (tensor for place in places for index in place.calls for tensor in case.call(index).outputs)
    calls = [user for tensor in made for user in tensor.users]
    for _ in range(_FAR):
        yield from calls
        views = [call for call in dict.fromkeys(calls) if call.op in SAME_MEMORY | CASTS]
        calls = [user for call in views for tensor in call.outputs for user in tensor.users]


def _is_loss_outside(case: Case, place: PlaceFact) -> bool:
    """Check that the loss which a head's place is for is computed by no part of the place's own model."""
    losses = [call for call in _readers(case, [place]) if call.op in LOSSES | {"log_softmax"}]
    return bool(losses) and all(
        call.layer is None or _top(case, call.layer) != _top(case, place.layer) for call in losses
    )


def _top(case: Case, path: str) -> str:
    while path in case.layers and case.layers[path].parent is not None:
        path = str(case.layers[path].parent)
    return path


def put_in(place: PlaceFact) -> str:
    """Advise to put the recipe in: by the line that does it, where that is short and the user's own."""
    if is_of_a_library(place.source):
        return (
            f"This line is in an installed package: call gradscope.patch to swap in {place.recipe} for this model only."
        )
    return _by_fix(place)


def _of_a_script(place: PlaceFact) -> str:
    """Advise the same for what gains with a loss that no model of the script computes."""
    written = "" if is_of_a_library(place.source) else _written(place)
    by_hand = f"Write {written}, or call" if written else "Call"
    return (
        f"{by_hand} gradscope.patch with the model and the loss to swap in {place.recipe} and verify it: "
        "`gradscope fix` sees only a script's models, not its loss."
    )


def _by_fix(place: PlaceFact) -> str:
    written = _written(place)
    if not written:
        return f"Run `gradscope fix FILE` to swap in {place.recipe} and verify it."
    return f"Write {written}; `gradscope fix FILE` does this and verifies it."


def _written(place: PlaceFact) -> str:
    """Spell the new line and its import; empty where it is too long to be advice."""
    text = "; ".join(place.new_text.splitlines())
    if not text or len(text) > _LONGEST:
        return ""
    own = f"gradscope_{place.function}"  # where the file has that name already
    imported = f"from gradscope.recipes import {place.function}" + (f" as {own}" if own in text else "")
    return f"`{text}` with `{imported}`"


def lines_of(case: Case, places: Sequence[PlaceFact]) -> list[str]:
    """Return the source lines of the calls that would go."""
    calls = (case.call(index) for place in places for index in place.calls)
    return sorted({call.source for call in calls if call.source is not None})


def by_micro_run(places: Sequence[PlaceFact]) -> Estimate | None:
    """Sum the micro-runs of places; None where none was made: it would have taken too long."""
    saving = _summed([place.predicted_saving_ns for place in places])
    if saving is None:
        return None
    memory = _summed([place.predicted_saving_bytes for place in places])
    return Estimate(saving, round(saving / _WITHIN), round(saving * _WITHIN), memory or 0)


def _summed(known: Sequence[int | None]) -> int | None:
    """Sum up; what is not known is taken to be as the others are."""
    given = [each for each in known if each is not None]
    return round(sum(given) * len(known) / len(given)) if given else None


def _calls(place: PlaceFact) -> str:
    return "1 torch call" if len(place.calls) == 1 else f"{counted(len(place.calls))} torch calls"
