"""Cases for rules: a small model, really profiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from gradscope import diagnosis
from gradscope.diagnose.case import Case
from gradscope.pipeline import profile_workload, profiling
from gradscope.tables import Finding, LineRow, Options
from gradscope.workload import Workload

STEPS, WARMUP = 2, 1


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
    """What is diagnosed inside the block."""
    seen: list[Case] = []
    real = diagnosis.diagnose

    def keep(case: Case, ignore: Any = (), **options: Any) -> Any:
        seen.append(case)
        return real(case, ignore, **options)

    diagnosis.diagnose = keep  # type: ignore[assignment]
    try:
        yield seen
    finally:
        diagnosis.diagnose = real


def findings_of(
    model: nn.Module,
    batch: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    *,
    step: Callable[[], Any] | None = None,
    by_calls: Collection[str] = (),
    **options: Any,
) -> list[Finding]:
    """All findings of a profiled run, also the small ones; a rule that fails is an error.

    Args:
        step: a step of a loop of the user's, instead of a batch.
        by_calls: rules that judge what a call takes: each takes the same, see :func:`timed_by_calls`.
    """
    case = loop_case(step, model, **options) if step is not None else case_of(model, batch, loss, optimizer, **options)
    found = [each for each in _all_of(case) if each.rule not in by_calls]
    return found + [each for each in (_all_of(timed_by_calls(case)) if by_calls else ()) if each.rule in by_calls]


def _all_of(case: Case) -> list[Finding]:
    found, notes = diagnosis.diagnose(case)
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


def of_rule(rule: str, found: list[Finding]) -> list[Finding]:
    """Those of one rule."""
    return [each for each in found if each.rule == rule]


def in_case(case: Case, rule: str) -> list[Finding]:
    """What one rule finds; a rule that fails is an error."""
    return of_rule(rule, _all_of(case))
