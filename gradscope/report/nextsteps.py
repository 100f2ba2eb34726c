"""What a reader may want to do after the report: commands to copy."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from gradscope.report.tree import SAVED_MEMORY, Tree
from gradscope.tables import RunData


@dataclass(frozen=True, slots=True)
class NextStep:
    """A command worth running now, and what for."""

    command: str
    purpose: str


def next_steps(run: RunData, tree: Tree, path: str | Path | None) -> tuple[NextStep, ...]:
    """Commands for the RUN.json at ``path``; those that need one are left out where there is none."""
    steps: list[NextStep] = []
    if any(finding.recipe for finding in run.findings) and run.workload.mode != "loop":
        steps.append(NextStep(f"gradscope fix {shlex.quote(run.workload.target)}", "swap in the recipes, and prove it"))
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
