"""What the rules about recipes share: a finding for each line where a recipe could be put in."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gradscope.diagnose.calls import VIEWS
from gradscope.diagnose.case import Case, Floor, by_source, severity_of
from gradscope.tables import CallFact, Finding, PlaceFact, SavedRow, TensorFact
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

SDPA = "scaled_dot_product_attention"

# Alone, both ways find a warmer cache than in the step.
_WITHIN = 1.5

# Of the lines' time: a recipe that loses more in the micro-run would be taken out again.
_LOST = 0.1

# Views between a head and its loss.
_FAR = 4

# What this saves, the loss on another line spends.
NO_GRADIENT = "torch's other kernel on the CPU gives the mask no gradient"
_WITH_THE_LOSS = "linear_cross_entropy"

# A longer line is not advice any more.
_LONGEST = 160

# Fewer are of no weight in a step, by whatever way.
FEWEST_SCORES = 200_000

# From how many scores on the recipe pays on a CPU, whatever the number of threads: as in kernels/pays.py, which needs
# torch. (dropout, a mask, and one that learns).
FEWEST_ON_CPU = {
    (True, False, False): 1_000_000,
    (True, True, False): 1_500_000,
    (True, True, True): 4_000_000,
    (False, True, True): 8_000_000,
}
_FEWEST_WIDE = 2_000_000  # values of another size than the queries

# Of the passes over scores: low, likely, high. With dropout on the CPU the recipe took 75 ms where torch took 288, of
# which its products took about 100.
_OF_PASSES = (0.3, 0.8, 0.95)
# With a learnt bias benchmarks/crossover.py has x1.1 to x1.2 for the whole attention, whose passes are about half; a
# pair of benchmarks/estimates.py, whose scores are new pages in each step, x1.6.
OF_LEARNT_PASSES = (0.0, 0.4, 0.9)

# Of the products' time.
_MADE_AGAIN = 1 / 6

NO_DROPOUT = "torch's other kernel on the CPU has no dropout"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of what a step would save: time in ns, its range, and memory at the peak."""

    ns: int
    low: int
    high: int
    bytes: int = 0


Fallback = Callable[[Case, Sequence[PlaceFact]], Estimate | None]


def half_of_lines(case: Case, places: Sequence[PlaceFact]) -> Estimate | None:
    """What recipes for plain operations saved of these on a CPU: 0.4 to 0.75."""
    spent = case.lines_ns(lines_of(case, places))
    return Estimate(spent // 2, spent // 4, spent * 3 // 4) if spent else None


def nothing(case: Case, places: Sequence[PlaceFact]) -> Estimate | None:
    """For what only a micro-run can tell."""
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
    """A finding for each line of these recipes that is supported and gains something.

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
    """Of places on one line; None where a micro-run says that neither time nor memory is saved."""
    one = places[0]
    lines = lines_of(case, [one])
    spent = case.lines_ns(lines)
    estimate = by_micro_run(places)
    if estimate is not None and loses(estimate, spent):
        return None
    read = _read_on(case, places, lines) if one.recipe == _WITH_THE_LOSS else set[str]()
    cost = spent + case.lines_ns(read)
    if estimate is not None:
        estimate = as_in_the_step(case, places, {*lines, *read}, estimate)
    estimate = estimate or otherwise(case, places) or Estimate(0, 0, 0)
    saved, memory = max(estimate.ns, 0) or None, max(estimate.bytes, 0) or None
    evidence = f"{_calls(one)} on {where(lines)}"
    if spent:
        evidence += f", {time_text(spent)} of a step, forward and backward"
    if len(places) > 1:
        evidence += f", in {len(places)} layers"
    if memory and memory >= Floor().bytes:
        evidence += f"; {size_text(memory)} are held that the recipe does not hold"
    return Finding(
        rule=rule,
        severity=severity_of(estimate.ns, case),
        layers=tuple(dict.fromkeys(place.layer for place in places)),
        line=source,
        message=message,
        evidence=evidence,
        recipe=one.recipe,
        predicted_saving_ns=saved,
        predicted_saving_bytes=memory,
        advice=(advice or put_in)(one),
        code=f"gradscope.patch(model, batch, recipes=[{one.recipe!r}])",
        predicted_low_ns=estimate.low if saved else None,
        predicted_high_ns=estimate.high if saved else None,
        cost_ns=cost or None,
    )


def loses(estimate: Estimate, spent: int) -> bool:
    """Whether the cure would cost time worth a word, or give nothing; ``spent``: by its lines."""
    return estimate.ns < -_LOST * spent or (estimate.ns <= 0 and estimate.bytes <= 0)


def as_in_the_step(case: Case, places: Sequence[PlaceFact], lines: Collection[str], estimate: Estimate) -> Estimate:
    """A micro-run's saving, where its own calls took longer than the lines in the step do: the same part of these.

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
    """Of the bytes that micro-runs free, each at a peak of its own, no more than the step's peak holds.

    That is what these lines keep for backward until then, and what one of the calls makes on the way, if any runs then.
    """
    memory = case.run.memory
    if memory is None:
        return freed
    running = memory.peak_phase in ("forward", "backward", "recompute")
    passing = max((place.predicted_saving_bytes or 0 for place in places), default=0) if running else 0
    return min(freed, alive_at_peak(row for row in memory.saved if row.line in lines) + passing)


def _read_on(case: Case, places: Sequence[PlaceFact], known: Collection[str]) -> set[str]:
    """Other lines that read what the places make: those of the loss behind a head."""
    made = (tensor for place in places for index in place.calls for tensor in case.call(index).outputs)
    left, found = [user for tensor in made for user in tensor.users], set[str]()
    for _ in range(_FAR):
        calls = [case.call(index) for index in dict.fromkeys(left)]
        found |= {call.source for call in calls if call.source is not None and call.source not in known}
        left = [user for call in calls if call.op in VIEWS for tensor in call.outputs for user in tensor.users]
    return found


def put_in(place: PlaceFact) -> str:
    """To put the recipe in: the line that does it, where that is short and the user's own."""
    if is_of_a_library(place.source):
        return f"The line is a library's: gradscope.patch puts the recipe {place.recipe} into this model alone."
    text = "; ".join(place.new_text.splitlines())
    if text and len(text) <= _LONGEST:
        own = f"gradscope_{place.function}"  # where the file has that name already
        name = f"{place.function} of gradscope.recipes" + (f" as {own}" if own in text else "")
        return f"Write `{text}` with {name}; gradscope fix does it and proves the gain."
    return f"Put the recipe {place.recipe} there: gradscope fix does it and proves the gain."


def is_of_a_library(source: str | None) -> bool:
    """Whether the line is of an installed package, whose files nobody edits."""
    return source is not None and re.search(r"[/\\](site|dist)-packages[/\\]", source) is not None


def lines_of(case: Case, places: Sequence[PlaceFact]) -> list[str]:
    """The source lines of the calls that would go."""
    calls = (case.call(index) for place in places for index in place.calls)
    return sorted({call.source for call in calls if call.source is not None})


def ops_ns(case: Case, layers: Collection[str | None], wanted: Callable[[str], bool]) -> int:
    """Self time of operations of these layers, forward and backward, by their names."""
    return sum(
        row.self_ns
        for layer in set(layers)
        for phase in ("forward", "backward")
        for row in case.ops.get((layer, phase), ())
        if wanted(row.name)
    )


def saved_of_passes(
    case: Case,
    layers: Collection[str | None],
    spent: int,
    kept: int = 0,
    of_passes: tuple[float, float, float] = _OF_PASSES,
) -> Estimate | None:
    """What a kernel without scores saves of these layers' attention; None where there is nothing to save.

    Its passes over the scores go, but for the softmax itself, which is computed with the products, and again in
    backward; of the six products (two in forward, four in backward) one is made again.

    Args:
        spent: by the lines of the attention.
        kept: bytes of scores.
        of_passes: what part of their time goes: low, likely, high.
    """
    products = ops_ns(case, layers, lambda name: "mm" in name.lower())
    passes = ops_ns(case, layers, lambda name: "mm" not in name.lower() and name != "(python)")
    found = min(passes, spent)
    # What was measured as a whole has the product in it.
    again = min(products, spent - found) * _MADE_AGAIN if of_passes is _OF_PASSES else 0
    low, likely, high = (max(round(found * part - again), 0) for part in of_passes)
    return Estimate(likely, low, high, kept) if likely or kept else None


def attention_call(case: Case, place: PlaceFact) -> CallFact | None:
    """The call of torch's own attention among those of a place."""
    return next((call for call in map(case.call, place.calls) if call.op == SDPA), None)


def is_given_mask(call: CallFact) -> bool:
    """Whether torch's attention is given a mask."""
    return isinstance(call.argument(3, "attn_mask"), TensorFact)


def is_causal_mask(case: Case, place: PlaceFact) -> bool:
    """Whether torch's attention is given a mask that was causal: the recipe leaves it out, or looks at it itself."""
    call = attention_call(case, place)
    if call is None or not is_given_mask(call):
        return False
    return place.recipe == "attention" or "**attention_mask(" in place.new_text or "is_causal=True" in place.new_text


def why_math(case: Case, call: CallFact) -> str:
    """Why torch's attention ran as plain operations; empty where it did not, or where that is the best there is."""
    ran = any("_scaled_dot_product_attention_math" in row.name for row in case.ops.get((call.layer, "forward"), ()))
    if not ran or len(call.inputs) < 3:
        return ""
    query, key, value = call.inputs[:3]
    mask, dropout = call.argument(3, "attn_mask"), call.argument(4, "dropout_p", 0.0)
    drops = isinstance(dropout, (int, float)) and dropout > 0
    if len(query.shape) != 4:
        return f"query has {len(query.shape)} dimensions, and the other kernels take 4"
    if query.device == "cuda":
        return _why_math_on_cuda(call, query, value)
    masked = isinstance(mask, TensorFact)
    learned = isinstance(mask, TensorFact) and mask.requires_grad
    scores = query.elements // query.shape[-1] * key.shape[-2]
    wide = _FEWEST_WIDE if query.shape[-1] != value.shape[-1] else 0
    if scores < FEWEST_ON_CPU.get((drops, masked, learned), wide):
        return ""  # so few are done at once sooner
    if drops:
        return NO_DROPOUT
    if learned:
        return NO_GRADIENT
    return _why_math_anywhere(call, query, value)


def _why_math_on_cuda(call: CallFact, query: TensorFact, value: TensorFact) -> str:
    if query.dtype == "float64":
        return "the other kernels do not compute in float64"
    if query.dtype == "float32" and call.argument(7, "enable_gqa", False):
        return "in float32 the other kernels have no grouped heads"
    if query.dtype == "float32" and query.shape[-1] % 4:
        return f"in float32 the other kernels take heads of multiples of 4, not of {query.shape[-1]}"
    return _why_math_anywhere(call, query, value)


def _why_math_anywhere(call: CallFact, query: TensorFact, value: TensorFact) -> str:
    if query.device != "cuda" and query.shape[-1] != value.shape[-1]:
        return f"the sizes of query ({query.shape[-1]}) and value ({value.shape[-1]}) differ"
    if any(each.strides is not None and each.strides[-1] != 1 for each in call.inputs[:3]):
        return "the last dimension of query, key or value is not contiguous"
    return ""


def scores_kept(case: Case, lines: Collection[str | None], scores: Sequence[tuple[int, ...]]) -> int:
    """Bytes of tensors the form of these scores that the lines keep for backward, and that are alive at the peak."""
    ends = tuple({f"{shape[-2]}x{shape[-1]}" for shape in scores})
    saved = case.run.memory.saved if case.run.memory is not None else ()
    return alive_at_peak(row for row in saved if row.line in lines and row.shape.endswith(ends))


def by_micro_run(places: Sequence[PlaceFact]) -> Estimate | None:
    """None where none was made: of work that would have taken too long."""
    saving = _summed([place.predicted_saving_ns for place in places])
    if saving is None:
        return None
    memory = _summed([place.predicted_saving_bytes for place in places])
    return Estimate(saving, round(saving / _WITHIN), round(saving * _WITHIN), memory or 0)


def _summed(known: Sequence[int | None]) -> int | None:
    """The sum, where what is not known is as the others are."""
    given = [each for each in known if each is not None]
    return round(sum(given) * len(known) / len(given)) if given else None


def _calls(place: PlaceFact) -> str:
    return "1 torch call" if len(place.calls) == 1 else f"{counted(len(place.calls))} torch calls"


def where(sources: Sequence[str]) -> str:
    if not sources:
        return "lines that are not known"
    if len(sources) == 1:
        return f"line {sources[0].rpartition(':')[2]}"
    files = {source.rpartition(":")[0] for source in sources}
    numbers = sorted(int(source.rpartition(":")[2]) for source in sources)
    span = f", {numbers[0]} to {numbers[-1]}" if len(files) == 1 else ""
    return f"{len(sources)} lines{span}"


def alive_at_peak(rows: Iterable[SavedRow]) -> int:
    """Bytes of what is kept for backward that are alive at the peak: no cure can free more there.

    All of them where the report does not say.
    """
    return sum(row.bytes if row.at_peak_bytes is None else min(row.bytes, row.at_peak_bytes) for row in rows)
