"""Much of the step is outside forward, backward and optimizer: waiting for a batch, or Python code.

Example::

    loader = DataLoader(images, batch_size=32)  # num_workers=0: images are read while nothing is computed

Pattern: only in a script or a loop of the user's, where gradscope sees the whole step. What is outside of forward,
backward and optimizer is more than 15 % of the step and a millisecond of one that is not profiled. Where one step in
the run took far longer than the others, such as one that printed or wrote a checkpoint, only what the usual step
spends counts. It is data loading where half of that time is spent in calls for a DataLoader's next batch, and workers
that are started again where half is spent in making its iterator; else it is Python, less what torch's operations
take there, and no DataLoader is spoken of. Workers are advised as far as there are cores that this process may use,
and none on a single core.

Evidence: that time, its share, and the phases; how long the DataLoader is waited for, and its workers; the line where
samples of the stack in the warm-up found most of the time. Estimate: workers make batches while the phases run, several
at the same time: up to 95 % of what that hides; at least half of what one worker hides. With workers already there, and
on a CPU whose cores compute the step as well, it may be nothing. Of Python only the most that there is to gain.

Source: PyTorch, Performance Tuning Guide, "Enable asynchronous data loading and augmentation"; torch.utils.data,
"Single- and Multi-process Data Loading".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradscope import ops
from gradscope.diagnose.case import Case, Rule, share
from gradscope.diagnose.findings import Estimate, at_most, is_of_a_library, make_finding, where
from gradscope.tables import Finding
from gradscope.units import ns as time_text
from gradscope.units import percent

_SHARE, _LEAST_NS = 0.15, 1_000_000
# Workers take a batch's time from the step; handing it over stays.
_HIDDEN_LOW, _HIDDEN_HIGH = 0.5, 0.95
# Of the time between the phases: what is that much has a name.
_MOST = 0.5
_STARTS = 0.25
# Of the samples there: a line that has fewer is not the reason.
_LINE = 0.3


@dataclass(frozen=True, slots=True)
class _Reason:
    """What goes on between the phases.

    Attributes:
        low, high: what may be saved of a step, in ns.
    """

    low: int
    high: int
    message: str
    evidence: str
    advice: str
    code: str
    line: str | None
    estimated: bool = True  # else ``high`` is the most that there is to gain


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding, where it matters."""
    step = case.run.step
    if case.run.workload.mode not in ("script", "loop"):
        return
    other = _usual_ns(case)
    if not _is_much(case, other):
        return
    phases = step.forward_ns + step.backward_ns + step.optimizer_ns
    if phases <= 0:
        return
    reason = _reason(case, other, phases)
    if reason is None:
        return
    low, high = min(reason.low, reason.high), reason.high
    yield make_finding(
        RULE.name,
        case,
        Estimate((low + high) // 2, low, high) if reason.estimated else at_most(high),
        layers=(),
        line=reason.line,
        message=reason.message,
        evidence=(
            f"{time_text(other)} of {time_text(step.wall_ns)}, {percent(share(other, case))} of the "
            f"step, compared with {time_text(step.forward_ns)} forward, {time_text(step.backward_ns)} "
            f"backward and {time_text(step.optimizer_ns)} optimizer{reason.evidence}"
        ),
        cost_ns=other,
        advice=reason.advice,
        code=reason.code,
    )


def _reason(case: Case, other: int, phases: int) -> _Reason | None:
    """Return why the time passes; None where torch's operations are most of it."""
    loaders = case.facts.settings.get("loaders") or ()
    for each in loaders:  # a worker that was just started is waited for too
        lost = min(each["start_ns"] + each["ns"], other)
        if each["workers"] and not each["persistent"] and each["start_ns"] >= _STARTS * other and lost >= _MOST * other:
            return _restarted(case, each, lost)
    waited = sum(each["ns"] for each in loaders)
    if waited >= _MOST * other:
        loader = max(loaders, key=lambda each: each["ns"])
        return (_waiting if loader["workers"] else _alone)(case, loader, min(waited, other), phases)
    return _python(case, other)


def _python(case: Case, other: int) -> _Reason | None:
    """The loop's own code, which no DataLoader is behind: batches made by hand, logging, metrics."""
    between = [row for row in case.run.ops if row.phase == "other"]
    with_others = sum(row.self_ns for row in between if row.name.startswith((*ops.COLLECTIVES, ops.WAITS)))
    if with_others and case.on_cuda:
        return None  # what Python waits for other ranks has no row there: it cannot be told from what Python does
    torch_ns = sum(row.self_ns for row in between if row.name.startswith(ops.ATEN))
    python = other - torch_ns - with_others
    if not _is_much(case, python):
        return None
    line, told = _line(case, loading=False)
    place = where([line]) if line is not None else "the loop's own code"
    return _Reason(
        low=0,
        high=python,
        message="Much of the step is Python code outside forward, backward and optimizer",
        evidence=told + (f"; torch operations take {time_text(torch_ns)} of it" if torch_ns else ""),
        advice=f"Check what {place} does between the steps, and do less often what is not needed every step.",
        code=f"python -m cProfile -s tottime {_script(case)}",
        line=line,
        estimated=False,
    )


def _script(case: Case) -> str:
    return case.run.workload.target or "train.py"


def _alone(case: Case, loader: Mapping[str, Any], ns: int, phases: int) -> _Reason:
    line, told = _line(case, loading=True)
    if _cores(case) < 2 and not case.on_cuda:
        return _Reason(
            low=0,
            high=round(ns * _HIDDEN_HIGH),
            message="Training waits while each batch is loaded: the DataLoader has no workers",
            evidence=f"; {time_text(ns)} in the DataLoader of {loader['dataset']}{told}; this process may use 1 core",
            advice="Do less work per sample, or do it once before training: a worker needs a core of its own.",
            code="samples = [prepare(sample) for sample in samples]  # once; or load the result from a file",
            line=line or loader["line"],
            estimated=False,
        )
    workers = max(min(math.ceil(ns / phases), _cores(case)), 1)
    return _Reason(
        low=_overlapped(case, ns, phases),
        high=round((phases + ns - max(phases, ns // workers)) * _HIDDEN_HIGH),
        message="Training waits while each batch is loaded: the DataLoader has no workers",
        evidence=f"; {time_text(ns)} in the DataLoader of {loader['dataset']}{told}",
        advice="Add worker processes that load the next batches during the step.",
        code=_code(case, loader, workers),
        line=line or loader["line"],
    )


def _waiting(case: Case, loader: Mapping[str, Any], ns: int, phases: int) -> _Reason:
    workers, cores = int(loader["workers"]), _cores(case)
    needed = math.ceil(workers * case.step_ns / phases)
    more = min(needed, cores)
    evidence = f"; {time_text(ns)} waiting for {workers} {'worker' if workers == 1 else 'workers'} of the DataLoader"
    evidence += f" of {loader['dataset']}; {needed} would keep up"
    high = ns
    if more > workers:
        advice, code = "Use more workers.", _code(case, loader, more)
        high = min(ns, case.step_ns - case.step_ns * workers // more)
    else:
        advice = (
            f"Do less work per sample, or do it once before training: more workers than the {cores} "
            f"core{'s' * (cores > 1)} this process may use do not help."
        )
        code = "samples = [prepare(sample) for sample in samples]  # once; or load the result from a file"
    return _Reason(
        low=0,
        high=round(high * _HIDDEN_HIGH),
        message="The step waits for the next batch: the DataLoader's workers are slower than the step",
        evidence=evidence,
        advice=advice,
        code=code,
        line=loader["line"],
    )


def _restarted(case: Case, loader: Mapping[str, Any], ns: int) -> _Reason:
    return _Reason(
        low=round(ns * _HIDDEN_LOW),
        high=round(ns * _HIDDEN_HIGH),
        message="The DataLoader restarts its workers for every epoch",
        evidence=f"; {time_text(ns)} per step until {loader['workers']} workers have started",
        advice="Keep the workers alive between epochs.",
        code=_code(case, loader, int(loader["workers"])),
        line=loader["line"],
    )


def _line(case: Case, *, loading: bool) -> tuple[str | None, str]:
    """Where most of the time between the phases is spent, and words for it; lines that torch worked on are not."""
    samples = [each for each in case.facts.settings.get("between") or () if bool(each["loading"]) is loading]
    for each in samples:
        row = case.lines.get(each["line"])
        computed = 0 if row is None else row.forward_ns + row.backward_ns
        if each["share"] >= _LINE and computed < each["share"] * case.run.step.other_ns * _MOST:
            return each["line"], f"; {where([each['line']])} takes {percent(each['share'])} of it"
    return None, ""


def _overlapped(case: Case, ns: int, phases: int) -> int:
    """Return what one worker hides at least; where all cores compute the step, perhaps nothing."""
    free = case.on_cuda or _cores(case) > int(case.run.environment.get("threads") or 1)
    return round(min(ns, phases) * _HIDDEN_LOW) if free else 0


def _cores(case: Case) -> int:
    """Count the cores of this process: fewer than the machine's in a container or under taskset."""
    environment = case.run.environment
    return int(environment.get("usable_cpus") or environment.get("cpus") or 1)


def _is_much(case: Case, ns: int) -> bool:
    """Check that a time between the phases is a share of the step, and a millisecond of one that is not profiled.

    A profiler slows small calls most: two milliseconds of them are one where nothing watches.
    """
    step = case.run.step
    unprofiled = ns * min((step.unprofiled_wall_ns or step.wall_ns) / step.wall_ns, 1.0)
    return ns >= _SHARE * step.wall_ns and unprofiled >= _LEAST_NS


def _usual_ns(case: Case) -> int:
    """Return the time between phases of a usual step: the mean without one long step and gradscope's own.

    Less, too, what the step waited for a core: where is not known, and other programs are no reason of this one's.
    """
    step = case.run.step
    other = step.other_ns - case.run.own_ns - (step.waited_ns or 0)
    wall = step.spread.get("wall")
    return other if wall is None else other - max(step.wall_ns - wall.median_ns, 0)


def _code(case: Case, loader: Mapping[str, Any], workers: int) -> str:
    """The setting, with what is not set yet; of a library's loader the name that the library gives it."""
    if is_of_a_library(loader["line"]):
        return f"dataloader_num_workers={workers}  # as transformers.TrainingArguments calls num_workers"
    settings = [f"num_workers={workers}"]
    settings += [] if loader["persistent"] else ["persistent_workers=True"]
    settings += ["pin_memory=True"] if case.on_cuda and not loader["pinned"] else []
    return f"DataLoader(dataset, batch_size, {', '.join(settings)})"


RULE = Rule("data-loading", "time outside forward, backward and optimizer: data loading or Python", find, of_times=True)
