"""What a reader may want to do after the report: commands to copy."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from gradscope.report.tree import SAVED_MEMORY, Tree
from gradscope.tables import RunData, WorkloadInfo


@dataclass(frozen=True, slots=True)
class NextStep:
    """A command worth running now, and what for."""

    command: str
    purpose: str


def next_steps(run: RunData, tree: Tree, path: str | Path | None) -> tuple[NextStep, ...]:
    """Commands for the RUN.json at ``path``; those that need one are left out where there is none."""
    steps: list[NextStep] = []
    if any(finding.recipe for finding in run.findings):
        steps.append(NextStep(_fix(run.workload), "swap in the recipes, and prove it"))
    if _wants_limits(run):
        steps.append(NextStep("gradscope doctor --calibrate", "what limits each layer, next time"))
    if path is None:
        return tuple(steps)
    name = shlex.quote(str(path))
    if tree.hidden:
        steps.append(NextStep(f"gradscope show {name} --min-percent 0", "every layer"))
    steps.append(NextStep(f"gradscope show {name} --sort ratio", "by backward over forward"))
    if run.memory is not None and tree.metric != SAVED_MEMORY:
        steps.append(NextStep(f"gradscope show {name} --sort memory", "by what is saved for backward"))
    flame = shlex.quote(f"{str(path).removesuffix('.json')}.speedscope.json")
    steps.append(NextStep(f"gradscope show {name} --format speedscope > {flame}", "flame graph (speedscope)"))
    return tuple(steps)


def _wants_limits(run: RunData) -> bool:
    """Check that layers would have limits, had the machine been measured. A run that is there gets none later."""
    return all(row.backward_limit_ns is None for row in run.layers) and any(row.bytes for row in run.layers)


def _fix(work: WorkloadInfo) -> str:
    """How to run fix: as a command, or in Python where what was measured has no name that a command could take."""
    if not work.target or work.mode == "loop":
        return "gradscope.patch(model, batch)"
    # A script without a file's ending was run as a module, as with python -m.
    names_module = all(part.isidentifier() for part in work.target.split("."))
    module = work.mode == "script" and names_module and not work.target.endswith(".py")
    return f"gradscope fix {'-m ' if module else ''}{shlex.quote(work.target)}"
