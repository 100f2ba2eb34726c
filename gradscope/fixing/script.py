"""A training script, fixed: it is run from its start in a process of its own for each thing that is measured.

Time and memory come from two profiles, of the script as it is and of the script whose models are patched at their first
forward. The losses of its first steps are compared without dropout, whose random numbers the recipes draw otherwise.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gradscope
from gradscope.capture.environment import describe_environment
from gradscope.fixing.curves import SAME, compare_curves, difference
from gradscope.fixing.early import may_refuse
from gradscope.fixing.jobs import RESULT, RUN, Job
from gradscope.fixing.options import FixOptions
from gradscope.fixing.report import Edited, FixReport
from gradscope.fixing.result import FixData, FixSite, LossCurves, StepSide
from gradscope.fixing.run import BASELINE, FixOutcome, report_of
from gradscope.report import Report, load
from gradscope.report.schema import read_dataclass
from gradscope.tables import Progress, WorkloadInfo
from gradscope.workload import Script

_STDERR = 2


def fix_script(
    script: Script,
    settings: FixOptions,
    progress: Progress | None = None,
    check: Callable[[Sequence[Edited]], None] | None = None,
    *,
    quiet: bool = False,
) -> FixReport:
    """Find, prove and measure what recipes can replace in the models of a training script.

    Raises:
        GradscopeError: of ``check``.
        SystemExit: a run of the script failed and has said why; with its exit code.
    """
    with tempfile.TemporaryDirectory(prefix="gradscope-fix-") as folder:
        return _Runs(script, settings, progress or Progress(), Path(folder), quiet).fix(check)


class _Runs:
    def __init__(self, script: Script, settings: FixOptions, progress: Progress, folder: Path, quiet: bool) -> None:
        self.script, self.settings, self.progress, self.folder, self.quiet = script, settings, progress, folder, quiet
        self.count = 0

    def fix(self, check: Callable[[Sequence[Edited]], None] | None) -> FixReport:
        if self.settings.dry_run:
            self.progress.phase("finding what can be replaced")
            return self._planned(self._found(self._run("plan")))
        if check is not None and may_refuse(check, self._own_files(), self._folder()):
            self.progress.phase("finding which files would change")
            check(self._found(self._run("plan")).files)
        self.progress.phase("profiling the script as it is")
        before = self._profile([])
        self.progress.phase("finding, proving and measuring what can be replaced")
        result = self._run("prove")
        found = self._found(result)
        if check is not None:
            check(found.files)
        kept = json.loads((result / RESULT).read_text(encoding="utf-8"))["kept"]
        if not kept:
            return report_of(found, before, None)
        self.progress.phase("profiling the patched script")
        after = self._profile(kept)
        curves, failed = self._curves(kept)
        found = replace(found, failed=found.failed or failed)
        report = report_of(found, before, after)
        report.data = replace(report.data, curves=curves)
        return report

    def _folder(self) -> Path:
        return Path.cwd() if self.script.path is None else self.script.path.resolve().parent

    def _own_files(self) -> list[str]:
        """The script and the files beside it, among which its model is most likely to be."""
        return [str(path) for path in sorted(self._folder().glob("*.py"))]

    def _profile(self, kept: list[list[str]]) -> Report:
        return load(self._run("profile", kept) / RUN)

    def _curves(self, kept: list[list[str]]) -> tuple[LossCurves, bool]:
        """The losses with and without, and whether they are not the same for no reason of the script's own."""
        self.progress.phase(f"comparing the losses of {self.settings.curve_steps} steps")
        after = self._losses(kept)
        before = self._losses([])
        again = self._losses([]) if difference(before, after) > SAME else None
        curves = compare_curves(before, after, again)
        return curves, not curves.same and bool(before)

    def _losses(self, kept: list[list[str]]) -> list[float]:
        found = self._run("curve", kept) / RESULT
        return [float(loss) for loss in json.loads(found.read_text(encoding="utf-8"))["losses"]]

    def _run(self, task: str, kept: Sequence[list[str]] = ()) -> Path:
        """Run the script in a process of its own; what it prints is shown once, on stderr."""
        folder = self.folder / str(self.count)
        folder.mkdir()
        options = self.settings.options
        job = Job(
            task=task,
            target=str(self.script.path or self.script.module),  # as it was typed: the script sees it in sys.argv
            name=self.script.target,
            args=list(self.script.args),
            module=self.script.module is not None,
            options=dataclasses.asdict(options),
            recipes=None if self.settings.recipes is None else list(self.settings.recipes),
            folder=str(folder),
            kept=list(kept),
            steps=self.settings.curve_steps,
            seed=options.seed if options.seed is not None else 0 if task == "curve" else None,
            quiet=self.quiet,
        )
        command = [sys.executable, "-m", "gradscope.cli.fix_job", str(job.save())]
        output = subprocess.DEVNULL if self.count else _STDERR
        self.count += 1
        code = subprocess.run(command, stdout=output, check=False).returncode  # noqa: S603
        if code:
            raise SystemExit(code if code > 0 else 128 - code)
        return folder

    def _found(self, folder: Path) -> FixOutcome:
        record: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return FixOutcome(
            sites=tuple(read_dataclass(FixSite, site, "site") for site in record["sites"]),
            files=tuple(Edited(*texts) for texts in record["files"]),
            diff=record["diff"],
            failed=record["failed"],
            before=_side(record.get("before")),
            after=_side(record.get("after")),
            time=record.get("time"),
            loss=record.get("loss"),
            notes=(*record["notes"], *_NOTES),
        )

    def _planned(self, found: FixOutcome) -> FixReport:
        about = WorkloadInfo(self.script.target, "script", 0, 0, None)
        data = FixData(
            gradscope=gradscope.__version__,
            environment=describe_environment(torch.device("cpu"), None),
            workload=about,
            baseline=BASELINE,
            sites=found.sites,
            diff=found.diff,
            failed=False,
            dry_run=True,
            notes=tuple(note for note in found.notes if note not in _NOTES),
        )
        return FixReport(data, None, None, found.files)


def _side(record: Any) -> StepSide | None:
    return None if record is None else read_dataclass(StepSide, record, "step")


_NOTES = (
    "the script ran from its start for each measurement, in processes of their own; only what its models do was looked "
    "at, not what the script does with their outputs",
)
