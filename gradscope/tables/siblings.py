"""Find the one of several equal layers that stands out: by its ratio to the others in each step, never by a mean.

Each layer is held against the median of the others *in the same step*, so that a step in which everything was slow
says nothing, and the median of these ratios is taken, so that one interrupted step says nothing either. The others,
held against each other in the same way, show how far equal layers scatter in this run: only what is well outside their
range stands out, and only what is so in four of five steps and more.

Source: the fence is that of J. Tukey, Exploratory Data Analysis (1977), "far out": three times the spread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from statistics import median

# How far outside the others' range a layer must be, in widths of that range.
FENCE = 3.0

# Fewer steps have no median that one of them could not make: then the ratio nearest to 1 counts.
FEWEST_STEPS = 3

# One step in so many may be otherwise.
_ONE_IN = 5


def typical_ratio(steps_ns: Sequence[int], others_ns: Sequence[Sequence[int]]) -> float | None:
    """The ratio of a layer to the median of the others, as it is in the usual step; None where it cannot be told.

    Args:
        steps_ns: of the layer, in each measured step.
        others_ns: the same of each of the others.
    """
    return _typical(_ratios(steps_ns, others_ns))


def _typical(ratios: Sequence[float]) -> float | None:
    if not ratios:
        return None
    if len(ratios) >= FEWEST_STEPS:
        return median(ratios)
    return min(ratios) if min(ratios) > 1 else min(max(ratios), 1.0)


def _ratios(steps_ns: Sequence[int], others_ns: Sequence[Sequence[int]]) -> list[float]:
    """The layer's ratio to the others in each step in which these took any time."""
    found = []
    for step, own in enumerate(steps_ns):
        there = [each[step] for each in others_ns if step < len(each)]
        usual = median(there) if there else 0
        if usual > 0:
            found.append(own / usual)
    return found


def outside_ratio(odd: Sequence[int], others: Sequence[Sequence[int]], least: float) -> float | None:
    """How many times the others' time ``odd`` usually takes; None where it does not stand out.

    Args:
        odd: ns of each measured step.
        others: the same of two or more layers like it.
        least: how many times as long it must take, or as short.
    """
    ratio = typical_ratio(odd, others)
    if ratio is None or ratio < 0 or _times(ratio, ratio > 1) < least:
        return None
    apart = [_times(each, ratio > 1) for each in _ratios(odd, others)]
    if sum(each < least for each in apart) > len(apart) // _ONE_IN:
        return None
    scatter = _scatter(others)
    if len(scatter) < 2:
        return None
    lowest, highest = min(scatter), max(scatter)
    away = ratio - highest if ratio > 1 else lowest - ratio
    return ratio if away > FENCE * (highest - lowest) * min(ratio, 1.0) else None


def _scatter(layers: Sequence[Sequence[int]]) -> list[float]:
    """The typical ratio of each layer to the others of them, where it can be told."""
    steps = range(max(map(len, layers), default=0))
    ordered = [sorted(each[step] for each in layers if step < len(each)) for step in steps]
    found = []
    for each in layers:
        usual = [_median_without(ordered[step], own) for step, own in enumerate(each)]
        typical = _typical([own / there for own, there in zip(each, usual, strict=True) if there > 0])
        if typical is not None:
            found.append(typical)
    return found


def _median_without(ordered: Sequence[int], own: int) -> float:
    """The median of a sorted list of numbers without one of them; 0 where it is the only one."""
    count, place = len(ordered) - 1, bisect_left(ordered, own)
    if not count:
        return 0
    low, high = (count - 1) // 2, count // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


def _times(ratio: float, longer: bool) -> float:
    """How many times as long, or as short, a layer takes: without end where it takes no time, as frozen in backward."""
    if longer:
        return ratio
    return 1 / ratio if ratio > 0 else inf


def typical_excess_ns(odd: Sequence[int], others: Sequence[Sequence[int]]) -> int | None:
    """How much longer than the median of the others a layer takes in the usual step; None where it cannot be told."""
    found = [
        own - median(there)
        for step, own in enumerate(odd)
        if (there := [each[step] for each in others if step < len(each)])
    ]
    if not found:
        return None
    return round(median(found) if len(found) >= FEWEST_STEPS else min(found))
