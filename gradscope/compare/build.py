"""Two runs -> one :class:`~gradscope.compare.changes.Comparison`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gradscope import units
from gradscope.compare.changes import Basis, Change, Comparison, Unit
from gradscope.compare.groups import memory_groups, present, time_groups
from gradscope.compare.layers import Spreads, matched_layers
from gradscope.compare.measured import Phase, RunSpread
from gradscope.compare.mismatches import find_mismatches, is_compiled
from gradscope.compare.noise import Measured, limit_ns
from gradscope.report.header import UNSTEADY
from gradscope.tables import Ledger, RunData

# What is compared of ``memory``: one step's, exact.
MEMORY_TOTALS: Mapping[str, Unit] = {
    "peak_bytes": "bytes",
    "saved_bytes": "bytes",
    "held_bytes": "bytes",
    "copied_bytes": "bytes",
    "retained_after_step_bytes": "bytes",
    "step_allocated_bytes": "bytes",
    "allocations": "count",
}
_PHASES: Mapping[str, Phase] = {"wall_ns": "wall", "forward_ns": "forward", "backward_ns": "backward"}


def compare(before: RunData, after: RunData, names: tuple[str, str] = ("before", "after")) -> Comparison:
    """What changed from ``before`` to ``after``, and what of it is more than noise; ``names`` are those of the runs."""
    spreads = (RunSpread(before), RunSpread(after))
    return Comparison(
        before=before,
        after=after,
        names=names,
        mismatches=find_mismatches(before, after),
        notes=tuple(_notes(spreads)),
        totals=(*_times(spreads), *_memory(before, after)),
        layers=matched_layers(spreads),
        groups=time_groups(spreads),
        memory=memory_groups(spreads),
        new=present(after, before),
        removed=present(before, after),
    )


def _times(spreads: Spreads) -> list[Change]:
    """The step and its phases, then the ledger's parts; what is zero in both runs is left out, but for the phases."""
    names = (*_PHASES, "optimizer_ns", "other_ns", *Ledger.PARTS)
    sides = {name: (_total(spreads[0], name), _total(spreads[1], name)) for name in names}
    nonzero = [name for name, ((one, _), (other, _)) in sides.items() if one.mean or other.mean]
    changes = []
    for name, ((one, basis), (other, _)) in sides.items():
        if name in nonzero or name in _PHASES:
            floor = max(spread.relative(_phase(name)) for spread in spreads)
            noise = limit_ns(one, other, floor, max(len(nonzero), 1))
            changes.append(Change(name, "ns", int(one.mean), int(other.mean), noise, basis))
    return changes


def _phase(name: str) -> Phase:
    return _PHASES.get(name, "backward" if name in Ledger.PARTS else "wall")


def _total(spread: RunSpread, name: str) -> tuple[Measured, Basis]:
    step, ledger = spread.run.step, spread.run.ledger
    if name in _PHASES:
        return spread.whole(_PHASES[name]), "steps"
    if name == "layers_ns":
        return spread.layers(spread.run.layers, ledger.layers_ns, "backward", holds_nodes=True)
    value = getattr(ledger if name in Ledger.PARTS else step, name)
    return spread.part(value, _phase(name)), "whole"


def _memory(before: RunData, after: RunData) -> Iterator[Change]:
    if before.memory is None or after.memory is None:
        return
    for name, unit in MEMORY_TOTALS.items():
        values = getattr(before.memory, name), getattr(after.memory, name)
        if any(values):
            yield Change(name, unit, *values, 0)


def _notes(spreads: Spreads) -> Iterator[str]:
    for spread, name in zip(spreads, ("before", "after"), strict=True):
        if spread.steps < 2:
            yield f"the run {name} has one measured step, so nothing is said about what is noise: use --steps 5 or more"
        elif spread.relative("wall") > UNSTEADY:
            apart = units.percent(spread.relative("wall"))
            yield f"the steps of the run {name} are apart by ±{apart}, so only large differences are beyond noise"
    compiled = [
        name
        for spread, name in zip(spreads, ("before", "after"), strict=True)
        if any(row.estimated_ns for row in spread.run.layers)
    ]
    if len(compiled) == 1:
        yield f"the run {compiled[0]} was compiled, the other was not: a part of its times is an estimate (est.)"
    whole = [
        name
        for spread, name in zip(spreads, ("before", "after"), strict=True)
        if is_compiled(spread.run) and all(row.estimated_ns is None for row in spread.run.layers)
    ]
    if len(whole) == 1:
        yield (
            f"the graphs of the run {whole[0]} are a row each: what its layers compute there is the caller's, so "
            "layers and lines cannot be compared"
        )
    lacking = [name for spread, name in zip(spreads, ("before", "after"), strict=True) if spread.run.memory is None]
    if len(lacking) == 1:
        yield f"memory was not measured in the run {lacking[0]}, so it is not compared"
