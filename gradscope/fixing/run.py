"""The order of things: profile -> plan -> prove and measure -> put in -> profile again -> take out. Read this first."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import gradscope
from gradscope import pipeline
from gradscope.capture.environment import describe_environment
from gradscope.capture.guard import text_of
from gradscope.errors import NothingMeasuredError
from gradscope.fixing.early import Check, files_of_forwards, may_refuse
from gradscope.fixing.messages import left_out, under_compile
from gradscope.fixing.options import FixOptions
from gradscope.fixing.report import Edited, FixReport
from gradscope.fixing.result import FixData, FixSite, StepSide, planned_sites, side_of, verified_sites
from gradscope.patching.patches import Patches
from gradscope.patching.places import Found
from gradscope.patching.plan import Plan, plan, plan_of
from gradscope.patching.prove.verify import verify
from gradscope.report import Report
from gradscope.tables import LossKind, Progress, RunData, WorkloadInfo
from gradscope.tree import parameters_of
from gradscope.workload import Workload, resolve_device

BASELINE = "the model as given"


@dataclass(frozen=True)
class FixOutcome:
    """What was found and proved, and the files that would change."""

    sites: tuple[FixSite, ...]
    files: tuple[Edited, ...]
    diff: str
    failed: bool = False
    before: StepSide | None = None
    after: StepSide | None = None
    time: Literal["less", "more", "nothing"] | None = None
    loss_difference: float | None = None
    notes: tuple[str, ...] = ()
    loss: LossKind | None = None  # of a script's model, which its profile does not know


def fix_workload(
    workload: Workload, settings: FixOptions, progress: Progress | None = None, check: Check | None = None
) -> FixReport:
    """Find, prove and measure what recipes can replace in a model; the model is as it was afterwards.

    Args:
        check: given the files that may change, as soon as they are known; it may raise. Where it would, that is found
            out before anything is measured.

    Raises:
        GradscopeError: the model, batch and loss do not make a training step, or nothing could be measured.
        BaseException: what the user's code raises.
    """
    progress = progress or Progress()
    if settings.dry_run:
        return _planned(workload, settings, progress)
    if check is not None:
        _check_early(workload, settings, progress, check)
    found = Found()
    try:
        before = profiled(workload, settings, progress, found)
        progress.phase("finding what can be replaced")
        planned = plan_of(found, workload, settings.recipes)
        if planned is None:
            planned = plan(workload, recipes=settings.recipes, device=settings.options.device)
        return _tried(workload, planned, before, settings, progress, check)
    finally:
        found.drop()


def _check_early(workload: Workload, settings: FixOptions, progress: Progress, check: Check) -> None:
    """Run ``check`` ahead of the profile where it may refuse a file; one step is recorded to know which would change.

    Not where the batch is an iterator, whose first batch that step would take from the profile.
    """
    files = files_of_forwards(workload.model)
    if isinstance(workload.batch, Iterator) or not may_refuse(check, files, Path.cwd()):
        return
    progress.phase("finding which files would change")
    found = plan(workload, recipes=settings.recipes, device=settings.options.device)
    try:
        check(files_of(Patches(found, tried=True)))
    finally:
        found.drop()


def _tried(
    workload: Workload, found: Plan, before: Report, settings: FixOptions, progress: Progress, check: Check | None
) -> FixReport:
    """Prove and measure a plan, and profile what is kept of it beside ``before``."""
    if check is not None:
        check(files_of(Patches(found, tried=True)))
    verified = verify(workload, found, settings.options.device, progress.phase)
    patches, gain = Patches(found, verified), verified.step
    result = FixOutcome(
        sites=verified_sites(verified, found.predicted),
        files=files_of(patches),
        diff=patches.diff,
        failed=verified.failed,
        before=None if verified.before is None else side_of(verified.before),
        after=None if gain is None else side_of(gain.after),
        time=None if gain is None else gain.time.value,
        loss_difference=None if gain is None else verified.loss_difference,
        notes=(
            *left_out(len(patches.kept) - len(patches.in_source)),
            *under_compile(verified.compiled),
        ),
    )
    after = None
    if patches.kept:
        patches.apply()
        # What the proof left in cycles would be released in the memory pass, of which torch's allocator logs a line.
        gc.collect()
        try:
            after = profiled(workload, settings, progress)
        finally:
            patches.revert()
        if patches.old_calls:  # nothing of the user's ran in between: a profile that disturbs the new code is a defect
            calls = ", ".join(f"{path or 'the model'} {count} times" for path, count in patches.old_calls.items())
            result = replace(result, notes=(*result.notes, f"the profile after ran old code: {calls}"))
    progress.done()
    return report_of(result, before, after)


def profiled(workload: Workload, settings: FixOptions, progress: Progress, found: Found | None = None) -> Report:
    """One profile; an error of the user's code is raised.

    Args:
        found: takes what the profile finds, for who drops it.
    """
    outcome = pipeline.profile_workload(workload, settings.options, progress, found)
    if isinstance(outcome.error, SystemExit):  # which would end the command without a word
        raise NothingMeasuredError(
            f"{workload.target or 'the model'} left with {text_of(outcome.error)} while it was profiled: "
            "nothing can be proved."
        )
    if outcome.error is not None:
        raise outcome.error
    assert outcome.report is not None
    return outcome.report


def _planned(workload: Workload, settings: FixOptions, progress: Progress) -> FixReport:
    progress.phase("finding what can be replaced")
    found = plan(workload, recipes=settings.recipes, device=settings.options.device)
    progress.phase("predicting what it saves")
    sites = planned_sites(found.sites, found.savings)
    patches = Patches(found, tried=True)
    progress.done()
    parameters = list(parameters_of(workload.model))
    dtypes = {parameter.dtype for parameter in parameters}
    about = WorkloadInfo(
        target=workload.target,
        mode="model",
        steps=0,
        warmup=0,
        loss=None,
        model=type(workload.model).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
    )
    where = resolve_device(settings.options.device, workload.model)
    data = FixData(
        gradscope=gradscope.__version__,
        environment=describe_environment(where, dtypes.pop() if len(dtypes) == 1 else None),
        workload=about,
        baseline=BASELINE,
        sites=sites,
        diff=patches.diff,
        failed=False,
        dry_run=True,
        notes=left_out(len(patches.kept) - len(patches.in_source)),
    )
    return FixReport(data, None, None, files_of(patches))


def files_of(patches: Patches) -> tuple[Edited, ...]:
    """The files that change, whole."""
    return tuple(Edited(name, before, after) for name, (before, after) in patches.texts.items())


def report_of(found: FixOutcome, before: Report, after: Report | None) -> FixReport:
    """What was found beside the two profiles."""
    data = FixData(
        gradscope=gradscope.__version__,
        environment=before.data.environment,
        workload=before.data.workload if found.loss is None else replace(before.data.workload, loss=found.loss),
        baseline=BASELINE,
        sites=found.sites,
        diff=found.diff,
        failed=found.failed,
        before=_with_profile(found.before, before.data),
        after=None if after is None else _with_profile(found.after, after.data),
        time=found.time,
        loss_difference=found.loss_difference,
        notes=found.notes,
    )
    return FixReport(data, before, after, found.files)


def _with_profile(side: StepSide | None, run: RunData) -> StepSide:
    """The side measured in turns with the profile's backward; without it the profile's own figures."""
    if side is None:
        step = run.step
        wall = step.wall_ns if step.unprofiled_wall_ns is None else step.unprofiled_wall_ns
        spread = {"wall_ns": step.spread["wall"].std_ns}
        peak = None if run.memory is None else run.memory.peak_bytes
        return StepSide(wall, spread, "profile", step.backward_ns, peak)
    return StepSide(side.wall_ns, side.spread, side.measured, run.step.backward_ns, side.peak_bytes)
