"""Cases for rules: a small model, really profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradscope import diagnosis
from gradscope.diagnose.case import Case
from gradscope.pipeline import profile_workload, profiling
from gradscope.tables import Finding, Options
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

    def keep(case: Case, ignore: Any = ()) -> Any:
        seen.append(case)
        return real(case, ignore)

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
    **options: Any,
) -> list[Finding]:
    """All findings of a profiled run, also the small ones; a rule that fails is an error.

    Args:
        step: a step of a loop of the user's, instead of a batch.
    """
    case = loop_case(step, model, **options) if step is not None else case_of(model, batch, loss, optimizer, **options)
    found, notes = diagnosis.diagnose(case)
    assert not notes, notes
    return found


def of_rule(rule: str, found: list[Finding]) -> list[Finding]:
    """Those of one rule."""
    return [each for each in found if each.rule == rule]


def in_case(case: Case, rule: str) -> list[Finding]:
    """What one rule finds; a rule that fails is an error."""
    found, notes = diagnosis.diagnose(case)
    assert not notes, notes
    return of_rule(rule, found)
