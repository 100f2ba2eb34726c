"""Cases for rules: a small model, really profiled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import nn

from gradscope import pipeline
from gradscope.api import profiling
from gradscope.diagnose.case import Case
from gradscope.pipeline import profile_workload
from gradscope.recording.graph import Recording
from gradscope.tables import Finding, LayerRow, Ledger, LineRow, OpRow, Options, RunData, Spread, StepTimes
from gradscope.workload import Workload

STEPS, WARMUP = 2, 1

# Matrix products take a millisecond, as for :func:`timed_by_operations`.
DEAR_PRODUCTS = MappingProxyType({r"aten::\w*mm": 1_000_000})
# What rules that compare operations are given: a sort takes as long as a small block.
_COMPARED_NS, _COMPARED_DEAR = 100_000, MappingProxyType({"aten::sort": 2_000_000})
# Phase of an operation -> the ledger's row, and the layers' column, that it is counted in.
_OF_LAYERS = {
    "backward": ("layers_ns", "backward_self_ns"),
    "recompute": ("recompute_ns", "recompute_ns"),
    "gradient_sum": ("gradient_sum_ns", "gradient_sum_ns"),
    "accumulate": ("accumulate_ns", "accumulate_ns"),
    "hook": ("hook_ns", "hook_ns"),
}


@dataclass(frozen=True)
class Twin:
    """A model with one planted problem, and the same without it.

    Args:
        name: of the pair.
        rule: that must fire on the one and must not on the other.
        bad, good: make the keyword arguments of :func:`findings_of`.
        also: other rules that are right on the good twin too: it is small, and has but this one problem less.
    """

    name: str
    rule: str
    bad: Callable[[], dict[str, Any]]
    good: Callable[[], dict[str, Any]]
    also: frozenset[str] = frozenset()


def case_of(model: nn.Module, batch: Any, loss: Any = None, optimizer: Any = None, **options: Any) -> Case:
    """What the rules are given for a profiled run of these."""
    with _seen_cases() as seen:
        settings = Options(**{"steps": STEPS, "warmup": WARMUP, **options})
        outcome = profile_workload(Workload(model, batch, loss=loss, optimizer=optimizer), settings)
    if outcome.error is not None:
        raise outcome.error
    return seen[0]


def loop_case(step: Callable[[], Any], model: nn.Module | None = None, **options: Any) -> Case:
    """What the rules are given for a loop that does this step again and again."""
    with _seen_cases() as seen:
        with profiling(model, **{"steps": STEPS, "warmup": WARMUP, **options}) as run:
            while True:
                step()
                if run.step():
                    break
        run.report  # noqa: B018 - asking for it diagnoses
    return seen[0]


@contextmanager
def _seen_cases() -> Iterator[list[Case]]:
    """What is diagnosed inside the block, with the graph of the recorded step, which a run drops when it is over."""
    seen: list[Case] = []
    real, drop = pipeline.diagnose, Recording.drop

    def keep(case: Case, ignore: Any = (), **options: Any) -> Any:
        seen.append(case)
        return real(case, ignore, **options)

    pipeline.diagnose = keep  # type: ignore[assignment]
    Recording.drop = lambda self: None  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        pipeline.diagnose, Recording.drop = real, drop  # type: ignore[method-assign]


def findings_of(
    model: nn.Module,
    batch: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    *,
    step: Callable[[], Any] | None = None,
    by_calls: Collection[str] = (),
    by_operations: Collection[str] = (),
    **options: Any,
) -> list[Finding]:
    """All findings of a profiled run, also the small ones; a rule that fails is an error.

    Args:
        step: a step of a loop of the user's, instead of a batch.
        by_calls: rules that judge what a call takes: each takes the same, see :func:`timed_by_calls`.
        by_operations: rules that compare what operations take: each takes the same, see :func:`timed_by_operations`.
    """
    case = loop_case(step, model, **options) if step is not None else case_of(model, batch, loss, optimizer, **options)
    found = [each for each in _all_of(case) if each.rule not in {*by_calls, *by_operations}]
    if by_calls:
        found += [each for each in _all_of(timed_by_calls(case)) if each.rule in by_calls]
    if by_operations:
        timed = timed_by_operations(case, _COMPARED_NS, _COMPARED_DEAR)
        found += [each for each in _all_of(timed) if each.rule in by_operations]
    return found


def _all_of(case: Case) -> list[Finding]:
    found, notes = pipeline.diagnose(case)
    assert not notes, notes
    return found


@dataclass(frozen=True)
class TimedByCalls(Case):
    """A case by a clock that gives each recorded call the same time: what a busy machine measured decides nothing.

    Args:
        each_ns: of a call with its backward, half of it each.
        rest_ns: of the step, in which none of them runs.
    """

    each_ns: int = 10_000
    rest_ns: int = 0

    @cached_property
    def lines(self) -> dict[str, LineRow]:
        """By source, "model.py:12"."""
        calls = Counter(call.source for call in self.facts.calls)
        found = {f"{row.file}:{row.line}": row for row in self.run.lines}
        half = self.each_ns // 2
        return {
            source: replace(row, forward_ns=half * calls[source], backward_ns=half * calls[source])
            for source, row in found.items()
        }

    @property
    def step_ns(self) -> int:
        """Of the whole step."""
        return self.each_ns * len(self.facts.calls) + self.rest_ns


def timed_by_calls(case: Case, each_ns: int = 10_000, rest_ns: int = 0) -> Case:
    """The same case by that clock."""
    return TimedByCalls(case.run, case.facts, case.limits, each_ns, rest_ns)


def timed_by_operations(case: Case, each_ns: int = 10_000, dear: Mapping[str, int] = MappingProxyType({})) -> Case:
    """The same case by a clock that gives each operation of the step the same time, and each call an equal part of it.

    Every table of the run is made anew of its operations, so that its numbers add up: what a busy machine measured
    decides nothing.

    Args:
        each_ns: of an operation.
        dear: patterns of operations that take another time -> ns.
    """
    ops = [replace(row, self_ns=round(row.calls * _time_of(row.name, each_ns, dear))) for row in case.run.ops]
    run = _timed_by(ops, case.run)
    each_call = (run.step.forward_ns + run.step.backward_ns) // max(len(case.facts.calls), 1)
    lines = TimedByCalls(run, case.facts, case.limits, each_call).lines
    return Case(replace(run, lines=tuple(lines.values())), case.facts, case.limits)


def _time_of(name: str, each_ns: int, dear: Mapping[str, int]) -> int:
    return next((ns for pattern, ns in dear.items() if re.search(pattern, name)), each_ns)


def _timed_by(ops: Sequence[OpRow], run: RunData) -> RunData:
    """The run with the times of these operations in each of its tables but that of the lines."""
    whole: Counter[str] = Counter()
    own: Counter[tuple[str, str]] = Counter()
    for row in ops:
        whole[row.phase] += row.self_ns
        if row.layer is not None:
            own[row.layer, row.phase] += row.self_ns
    ledger = _ledger_of(whole, own)
    step = _step_of(whole, ledger)
    layers = tuple(_layer_of(row, own, ledger.backward_ns, run.workload.steps) for row in run.layers)
    return replace(run, ops=tuple(ops), ledger=ledger, step=step, layers=layers)


def with_quick_phases(case: Case, between_ns: int | None = None) -> Case:
    """The same case of a model without work of its own, each step alike: what lies between the phases is as measured.

    A loop that sleeps takes no less on a busy machine; what its model takes there may be anything.

    Args:
        between_ns: what lies between the phases, instead of what was measured.
    """
    timed = timed_by_operations(case, each_ns=1_000).run
    step, other = timed.step, case.run.step.other_ns if between_ns is None else between_ns
    wall = step.wall_ns - step.other_ns + other
    spread = {**step.spread, "wall": Spread(wall, wall, wall, 0)}
    step = replace(step, wall_ns=wall, other_ns=other, spread=spread, unprofiled_wall_ns=wall)
    ops = [row for row in timed.ops if row.phase != "other"] + [row for row in case.run.ops if row.phase == "other"]
    return Case(replace(timed, step=step, ops=tuple(ops)), case.facts, case.limits)


def _ledger_of(whole: Counter[str], own: Counter[tuple[str, str]]) -> Ledger:
    part = {phase: sum(ns for (_, each), ns in own.items() if each == phase) for phase in _OF_LAYERS}
    outside = sum(whole[phase] - part[phase] for phase in _OF_LAYERS)
    rest = {phase: whole[phase] for phase in ("communication", "engine", "unattributed")}
    return Ledger(
        backward_ns=sum(part.values()) + outside + sum(rest.values()),
        outside_modules_ns=outside,
        **{_OF_LAYERS[phase][0]: ns for phase, ns in part.items()},
        **{f"{phase}_ns": ns for phase, ns in rest.items()},
    )


def _step_of(whole: Counter[str], ledger: Ledger) -> StepTimes:
    """A steady one, and as long without a profiler."""
    forward, backward = whole["forward"], ledger.backward_ns
    wall = forward + backward + whole["optimizer"] + whole["other"]
    spread = {"wall": wall, "forward": forward, "backward": backward}
    return StepTimes(
        wall_ns=wall,
        forward_ns=forward,
        backward_ns=backward,
        optimizer_ns=whole["optimizer"],
        other_ns=whole["other"],
        spread={name: Spread(ns, ns, ns, 0) for name, ns in spread.items()},
        overhead=1.0,
        unprofiled_wall_ns=wall,
        waited_ns=0,
    )


def _layer_of(row: LayerRow, own: Counter[tuple[str, str]], backward_ns: int, steps: int) -> LayerRow:
    below = [each for each in own if not row.path or each[0] == row.path or each[0].startswith(f"{row.path}.")]
    backward = sum(own[each] for each in below if each[1] in _OF_LAYERS)
    return replace(
        row,
        forward_self_ns=own[row.path, "forward"],
        forward_total_ns=sum(own[each] for each in below if each[1] == "forward"),
        backward_total_ns=backward,
        backward_share=backward / backward_ns if backward_ns else 0.0,
        forward_self_steps_ns=(own[row.path, "forward"],) * steps,
        backward_self_steps_ns=(own[row.path, "backward"],) * steps,
        **{column: own[row.path, phase] for phase, (_, column) in _OF_LAYERS.items()},
    )


def of_rule(rule: str, found: list[Finding]) -> list[Finding]:
    """Those of one rule."""
    return [each for each in found if each.rule == rule]


def in_case(case: Case, rule: str) -> list[Finding]:
    """What one rule finds; a rule that fails is an error."""
    return of_rule(rule, _all_of(case))
