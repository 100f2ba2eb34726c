"""What a reader may want to do after the report: commands to copy."""

from __future__ import annotations

import shlex
from pathlib import Path

from gradscope.document.parts import Command
from gradscope.report.tree import SAVED_MEMORY, Tree
from gradscope.tables import RunData, WorkloadInfo


def next_steps(run: RunData, tree: Tree, path: str | Path | None, *, full: bool) -> tuple[Command, ...]:
    """Commands for the RUN.json at ``path``; those that need one are left out where there is none."""
    steps: list[Command] = []
    if any(finding.recipe for finding in run.findings):
        steps.append(Command(fix_command(run.workload), "swap in the recipes and verify them"))
    if _wants_limits(run):
        steps.append(Command("gradscope doctor --calibrate", "measure this machine's limits"))
    if path is None:
        return tuple(steps)
    name = shlex.quote(str(path))
    if not full:
        return (*steps, Command(f"gradscope show {name} --full", "every table"))
    if tree.hidden:
        steps.append(Command(f"gradscope show {name} --full --min-percent 0", "every layer"))
    if run.memory is not None and tree.metric != SAVED_MEMORY:
        steps.append(Command(f"gradscope show {name} --sort memory", "layers by memory saved for backward"))
    flame = shlex.quote(f"{str(path).removesuffix('.json')}.speedscope.json")
    steps.append(Command(f"gradscope show {name} --format speedscope > {flame}", "flame graph for speedscope"))
    return tuple(steps)


def _wants_limits(run: RunData) -> bool:
    """Check that layers would have limits, had the machine been measured. A run that is there gets none later."""
    return all(row.backward_limit_ns is None for row in run.layers) and any(row.bytes for row in run.layers)


def fix_command(work: WorkloadInfo) -> str:
    """Return how to run fix: as a command, or in Python where what was measured has no name for one."""
    if not work.target or work.mode in ("loop", "trace"):
        return "gradscope.patch(model, batch)"
    # A script without a file's ending was run as a module, as with python -m.
    names_module = all(part.isidentifier() for part in work.target.split("."))
    module = work.mode == "script" and names_module and not work.target.endswith(".py")
    return f"gradscope fix {'-m ' if module else ''}{shlex.quote(work.target)}"
