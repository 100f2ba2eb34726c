"""Between the phases of a step much time goes by: the next batch is waited for, or Python works.

Example::

    loader = DataLoader(images, batch_size=32)  # num_workers=0: images are read while nothing is computed

Pattern: only in a script or a loop of the user's, where gradscope sees the whole step. What is outside of forward,
backward and optimizer is more than 15 % of the step and a millisecond. Where one step in the run took far longer than
the others, such as one that printed or wrote a checkpoint, only what the usual step spends counts.

Evidence: that time, its share, and the phases. Estimate: with the next batch prepared meanwhile nearly all of it is
hidden, up to the time of the phases; at least half of it.

Source: PyTorch, Performance Tuning Guide, "Enable asynchronous data loading and augmentation".
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, severity_of, share
from gradscope.tables import Finding
from gradscope.units import ns as time_text
from gradscope.units import percent

_SHARE, _LEAST_NS = 0.15, 1_000_000
# Workers take a batch's time from the step; handing it over stays.
_HIDDEN_LOW, _HIDDEN_HIGH = 0.5, 0.95


def find(case: Case) -> Iterator[Finding]:
    """One, where it matters."""
    step = case.run.step
    if case.run.workload.mode not in ("script", "loop"):
        return
    other = _usual_ns(case)
    if other < max(_LEAST_NS, _SHARE * step.wall_ns):
        return
    phases = step.forward_ns + step.backward_ns + step.optimizer_ns
    if phases <= 0:
        return
    high = round(min(other, phases) * _HIDDEN_HIGH)
    low = round(min(other, phases) * _HIDDEN_LOW)
    saving = (low + high) // 2
    yield Finding(
        rule=RULE.name,
        severity=severity_of(saving, case),
        layers=(),
        line=None,
        message="much of the step is spent between the phases: loading data, or waiting in Python",
        evidence=f"{time_text(other)} of {time_text(step.wall_ns)}, {percent(share(other, case))} of the step, against "
        f"{time_text(step.forward_ns)} forward, {time_text(step.backward_ns)} backward and "
        f"{time_text(step.optimizer_ns)} in the optimizer",
        predicted_saving_ns=saving,
        predicted_low_ns=low,
        predicted_high_ns=high,
        advice="Let workers prepare the next batch meanwhile, and do what is not needed in each step less often.",
        code=_code(case),
    )


def _usual_ns(case: Case) -> int:
    """Between the phases, in a usual step: the mean less what one long step adds to it."""
    step = case.run.step
    wall = step.spread.get("wall")
    if wall is None:
        return step.other_ns
    return step.other_ns - max(step.wall_ns - wall.median_ns, 0)


def _code(case: Case) -> str:
    pinned = ", pin_memory=True" if case.on_cuda else ""
    return f"DataLoader(dataset, batch_size, num_workers=4, persistent_workers=True{pinned})"


RULE = Rule("data-loading", "time between the phases: data loading, or Python", find)
