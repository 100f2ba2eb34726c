"""What is done in processes of their own for a training script: each runs the script anew, from its start."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from gradscope import pipeline
from gradscope.capture.naming import ModuleNames, name_modules
from gradscope.capture.uncompiled import never_compiled
from gradscope.compat import compiled_frames
from gradscope.errors import NothingMeasuredError, WorkloadError
from gradscope.fixing.curves import StepLimit
from gradscope.fixing.early import files_of_forwards
from gradscope.fixing.messages import IN_A_FUNCTION, left_out, under_compile
from gradscope.fixing.result import FixSite, key_of, planned_sites, side_of, verified_sites
from gradscope.fixing.roots import Roots
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from gradscope.patching.prove.proof import dropout_off
from gradscope.patching.prove.unit import WithoutDropout, in_backward
from gradscope.patching.prove.verify import Verified, verify
from gradscope.report.runfile import to_record
from gradscope.tables import Options, Progress
from gradscope.tree import parameters_of
from gradscope.workload import Script, Workload, load_target

RESULT = "result.json"
RUN = "run.json"


@dataclass(frozen=True)
class Job:
    """One run of a script, as JSON in the folder that its result is written to."""

    task: str  # of TASKS
    target: str
    args: list[str]
    module: bool
    options: dict[str, Any]  # of tables.Options
    recipes: list[str] | None
    folder: str
    kept: list[list[str]] = field(default_factory=list)  # keys of the sites that are put in
    steps: int = 1
    seed: int | None = None
    quiet: bool = False
    name: str = ""  # what reports and messages call the target

    def save(self) -> Path:
        """Write it and return its path."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str) -> Job:
        """The one that :meth:`save` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def run_job(job: Job, progress: Progress) -> None:
    """Do a job and write its result.

    Raises:
        GradscopeError: it cannot be done.
        BaseException: what the script raises.
    """
    loaded = load_target(job.target, job.args, module=job.module, seed=job.seed)
    assert isinstance(loaded, Script)
    loaded = replace(loaded, target=job.name or job.target)
    result = _TASKS[job.task](job, loaded, progress)
    if result is not None:
        (Path(job.folder) / RESULT).write_text(json.dumps(result), encoding="utf-8")


def _profile(job: Job, script: Script, progress: Progress) -> None:
    """RUN.json of the script, with what is kept."""
    with ExitStack() as stack:
        if job.kept:
            stack.enter_context(Roots(_Putter(job, stack).put).watching())
        outcome = pipeline.profile_script(script, Options(**job.options), progress)
    if outcome.error is not None:
        raise outcome.error
    if outcome.report is None:
        raise NothingMeasuredError(f"{script.target} left before one step was measured: there is nothing to report.")
    outcome.report.save(Path(job.folder) / RUN, force=True)


def _prove(job: Job, script: Script, progress: Progress) -> dict[str, Any]:
    """Find what can be replaced in the script's models, and prove it where asked; the script runs one step.

    Raises:
        NothingMeasuredError: it ended without a backward pass: what its models do in training is not known.
    """
    found = _ModelPlanner(job, progress)
    limit = StepLimit(1)
    roots = Roots(limit.unnoted(found.look))
    with roots.watching():
        limit.run(script)
    if not limit.losses:
        raise NothingMeasuredError(
            f"{script.target} ran to its end without a backward pass: there is nothing to look for.\n"
            "Give a script that trains, or a file that defines workload() -> (model, batch)."
        )
    if not found.models and compiled_frames():
        found.notes.append(IN_A_FUNCTION)
    return found.result(name_modules(roots.called, pipeline.modules_in(script.namespace)))


def _curve(job: Job, script: Script, progress: Progress) -> dict[str, Any]:
    """The losses of the script's steps, with what is kept and without dropout.

    Without torch.compile as well: it would make a part of its graphs of what turns dropout off.
    """
    limit = StepLimit(job.steps)
    with never_compiled(), WithoutDropout() as off, in_backward([off]), ExitStack() as stack:
        if job.kept:
            put = limit.unnoted(_Putter(job, stack, dropout=False).put)
            stack.enter_context(Roots(put).watching())
        limit.run(script)
    return {"losses": [repr(loss) for loss in limit.losses]}


_TASKS: dict[str, Callable[[Job, Script, Progress], dict[str, Any] | None]] = {
    "profile": _profile,
    "plan": _prove,
    "prove": _prove,
    "curve": _curve,
}


class _Putter:
    """Puts the kept sites into each model, until ``stack`` is left."""

    def __init__(self, job: Job, stack: ExitStack, *, dropout: bool = True) -> None:
        self._job, self._stack, self._dropout = job, stack, dropout
        self._kept = {tuple(key) for key in job.kept}

    def put(self, name: str, workload: Workload) -> bool:
        """True when nothing is left to put in."""
        try:
            found = plan(workload, recipes=self._job.recipes, device=_device(workload))
        except WorkloadError:
            return False
        found.sites = [site for site in found.sites if _key(name, key_of(site)) in self._kept]
        patches = Patches(found)
        patches.apply()
        self._stack.callback(patches.revert)
        if not self._dropout:
            for swap in patches.swaps:
                self._stack.enter_context(dropout_off(swap))
        self._kept -= {_key(name, key_of(site)) for site in found.sites}
        return not self._kept


class _ModelPlanner:
    """Plans, and proves, each model."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self._job, self._progress = job, progress
        self._sites: list[tuple[nn.Module, FixSite]] = []  # with the model
        self._keys: list[tuple[str, ...]] = []
        self.models: list[_Texts] = []
        self.notes: list[str] = []
        self._failed = False
        self._steps: list[Verified] = []  # of each model

    def look(self, name: str, workload: Workload) -> bool:
        """False: there may be another model."""
        device = _device(workload)
        texts = _Texts(files_of_forwards(workload.model))
        self.models.append(texts)
        try:
            found = plan(workload, recipes=self._job.recipes, device=device)
        except WorkloadError as error:
            self.notes.append(f"{type(workload.model).__name__} was not looked at: {str(error).splitlines()[0]}")
            return False
        if self._job.task == "plan":
            patches, rows = Patches(found, tried=True), planned_sites(found.sites, found.savings)
        else:
            verified = verify(workload, found, device, self._progress.phase)
            patches, rows = Patches(found, verified), verified_sites(verified)
            self._failed |= verified.failed
            self._steps.append(verified)
            self.notes += [note for note in under_compile(verified.compiled) if note not in self.notes]
        self._sites += [(workload.model, row) for row in rows]
        self._keys += [_key(name, key_of(site)) for site in patches.kept]
        self.notes += left_out(len(patches.kept) - len(patches.in_source))
        texts.changed = {file: (*both, patches.diff_of(file)) for file, both in patches.texts.items()}
        return False

    def result(self, names: ModuleNames) -> dict[str, Any]:
        """The result of the job, as it is handed on: each model has the name that a profile gives it."""
        changed = self._changed()
        return {
            "sites": to_record([_renamed(site, names.path_of(model)) for model, site in self._sites]),
            "kept": self._keys,
            "files": [[file, before, after] for file, (before, after, _) in changed.items()],
            "diff": "".join(diff for _, _, diff in changed.values()),
            "failed": self._failed,
            "notes": self.notes,
            **self._sides(),
        }

    def _changed(self) -> dict[str, tuple[str, str, str]]:
        """The files whose text may change for every model that has classes in them."""
        found: dict[str, tuple[str, str, str]] = {}
        for file, texts in [pair for model in self.models for pair in model.changed.items()]:
            if all(model.changed.get(file) == texts for model in self.models if file in model.files):
                found[file] = texts
            else:
                note = f"{file} is not in the diff: several models run it, and not all may have the same text"
                self.notes += [note] if note not in self.notes else []
        return found

    def _sides(self) -> dict[str, Any]:
        """The model's step in turns; of several models together nothing is known."""
        if len(self.models) != 1 or not self._steps or self._steps[0].before is None:
            return {}
        before, gain = self._steps[0].before, self._steps[0].step
        if gain is None:
            return {"before": to_record(side_of(before)), "loss": self._steps[0].loss}
        return {
            "loss": self._steps[0].loss,
            "before": to_record(side_of(gain.before)),
            "after": to_record(side_of(gain.after)),
            "time": gain.time.value,
        }


@dataclass
class _Texts:
    """A model's files: those that hold its classes, and those that would change: text before, after, and diff."""

    files: set[str]
    changed: dict[str, tuple[str, str, str]] = field(default_factory=dict)


def _device(workload: Workload) -> str:
    """The device that the script has put its model on."""
    return str(next(parameter.device for parameter in parameters_of(workload.model)))


def _key(name: str, key: tuple[str, str, str]) -> tuple[str, ...]:
    return (_joined(name, key[0]), *key[1:])


def _renamed(site: FixSite, name: str) -> FixSite:
    return replace(site, path=_joined(name, site.path))


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if name and path else name or path
