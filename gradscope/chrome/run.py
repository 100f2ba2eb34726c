"""``gradscope trace``: an exported trace -> a report. Start here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import gradscope
from gradscope import units
from gradscope.attribute.align_steps import Assigned, assign
from gradscope.attribute.result import Attribution, build_result
from gradscope.attribute.rows import BACKWARD_CATEGORIES, Category, read_skeleton
from gradscope.attribute.survey import shapes_of
from gradscope.chrome.names import LayerNames, by_calls, by_model, called_by_several
from gradscope.chrome.reading import Exported, read_exported
from gradscope.chrome.table import Recorded, recorded
from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.engine import diagnose, every_rule
from gradscope.errors import UsageError
from gradscope.report.report import Report
from gradscope.safe_text import shown_path
from gradscope.tables import EventTable, LayerRow, Progress, RunData, WorkloadInfo, is_unreliable
from gradscope.workload import Workload

RECORD = (
    "torch.profiler.profile(with_stack=True, record_shapes=True) records module calls; without them time is known by "
    "operation and autograd node"
)


def read_trace(
    path: str | os.PathLike[str],
    *,
    model: Workload | None = None,
    steps: tuple[int, int] | None = None,
    ignore: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Report:
    """Read a trace that ``torch.profiler`` exported into a report.

    Args:
        path: ``.json`` or ``.json.gz``, as ``export_chrome_trace`` and ``tensorboard_trace_handler`` write it.
        model: the model that was traced, for the names of its layers; None: they are named by who called them.
        steps: first and last step that count, as ``ProfilerStep#N`` numbers them; None: all.
        ignore: rules whose findings are left out.

    Raises:
        TraceFileError: the file is no such trace, or holds no backward pass, none of the steps, or another model.
    """
    progress = progress or Progress()
    progress.phase(f"reading {shown_path(path)}")
    found = read_exported(path)
    progress.phase(f"attributing {found.events:,} events")
    tables = recorded(found, steps)
    names = by_calls(tables.modules) if model is None else by_model(tables.modules, model, found.name)
    run = _run_data(found, tables, names, *_attributed(tables, names))
    progress.phase("running the rules")
    return Report(_diagnosed(run, ignore))


def _attributed(tables: Recorded, names: LayerNames) -> tuple[Assigned, Attribution]:
    label = np.array([*names.label, -1], np.int64)[tables.calls.label]
    skeleton = read_skeleton(
        tables.table, replace(tables.calls, label=label), names.parents, paths=[info.path for info in names.infos]
    )
    assigned = assign(skeleton, 0, None, None, tables.left_out)
    assert len(assigned.steps) == len(tables.steps.numbers), "a mark of a step is lost"
    result = build_result(
        assigned,
        names.infos,
        (),
        None,
        {},
        has_flops=False,
        shapes=shapes_of(tables.table, assigned.rows),
        whole_device=True,
    )
    return assigned, replace(result, layers=_with_flops(result.layers, assigned, tables))


def _with_flops(rows: Sequence[LayerRow], assigned: Assigned, tables: Recorded) -> tuple[LayerRow, ...]:
    """Add the layers' floating-point operations of a step, where shapes were recorded."""
    if not tables.flops.any():
        return tuple(rows)
    steps = max(len(assigned.steps), 1)
    owner, category = assigned.rows.owner, assigned.rows.category
    measured = (assigned.steps.of_row >= 0) & (owner >= 0) & (tables.flops > 0)
    forward, backward = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for sums, wanted in ((forward, (Category.FORWARD,)), (backward, BACKWARD_CATEGORIES)):
        mine = np.flatnonzero(measured & np.isin(category, wanted))
        np.add.at(sums, owner[mine], tables.flops[mine])
    counts = zip(rows, (forward // steps).tolist(), (backward // steps).tolist(), strict=True)
    return tuple(
        replace(row, flops=first + second, forward_flops=first, backward_flops=second) for row, first, second in counts
    )


def _run_data(found: Exported, tables: Recorded, names: LayerNames, assigned: Assigned, result: Attribution) -> RunData:
    roots = [info.class_name for info in names.infos if info.parent is None]
    return RunData(
        gradscope=gradscope.__version__,
        partial=False,
        environment=_environment(found.about, tables.table),
        workload=WorkloadInfo(
            target=found.name,
            mode="trace",
            steps=len(assigned.steps),
            warmup=0,
            loss=None,
            model=", ".join(dict.fromkeys(roots)),
            parameters=names.parameters,
            events=found.events,
        ),
        step=result.step,
        ledger=result.ledger,
        layers=result.layers,
        lines=(),
        ops=result.ops,
        kernels=result.kernels,
        device=result.device,
        notes=tuple(_notes(found, tables, names, result)),
    )


def _notes(found: Exported, tables: Recorded, names: LayerNames, result: Attribution) -> list[str]:
    notes = ["read from a trace: it holds no source lines and no memory, and what profiling cost is not known"]
    if found.unread:
        notes.append(f"{found.unread:,} of {found.unread + found.events:,} events could not be read: they are left out")
    if not tables.has_module_rows:
        notes.append(f"the trace has no module calls, so no layers. {RECORD}")
    several = called_by_several(tables.modules)
    if several:
        shared = ", ".join(several[:3]) + (f" and {len(several) - 3} more" if len(several) > 3 else "")
        notes.append(
            f"several modules call {shared}: a layer below each of them, for the profiler gives shared modules, and "
            "modules of two classes of one name, the same name"
        )
    notes += names.notes
    if tables.passes_guessed:
        notes.append(
            "the trace has no rows of Python: a backward pass is taken to last from its first evaluated node to "
            "its last; forward is what its operations took, and Python between them, with what waits in it for "
            "collectives, counts as between the phases"
        )
    if not tables.steps.how:
        notes.append("the trace marks no steps: all of it is taken for one. prof.step() after each step marks them")
    elif tables.steps.how == "Optimizer.step":
        notes.append("steps are cut where an optimizer's step ends; prof.step() after each step marks them")
        if tables.steps.turns > 1:
            notes.append(
                f"{tables.steps.turns} steps of an optimizer are taken for one training step: several of its class "
                "seem to take turns"
            )
        if early := _before_steps_ns(tables):
            notes.append(
                f"{units.ns(early)} of kernels were launched before the first of these ends and are in no step: see "
                "--show device"
            )
    device = result.device
    if device is not None and device.before_ns:
        notes.append("kernels that were launched before the trace began are in no layer: see --show device")
    return [*notes, *result.notes]


def _before_steps_ns(tables: Recorded) -> int:
    """Durations of the kernels that were launched in the trace before its first step began."""
    kernels, bounds = tables.table.kernels, tables.steps
    if kernels is None or bounds.numbers[0] > 0:  # what --steps leaves out is no news
        return 0
    early = (kernels.row >= 0) & (tables.table.start_ns[np.maximum(kernels.row, 0)] < bounds.start_ns[0])
    return int((kernels.end_ns - kernels.start_ns)[early].sum())


_DEVICE_TYPES = (("cuda", "cuda"), ("roctracer", "cuda"), ("hip", "cuda"), ("mtia", "mtia"), ("xpu", "xpu"))


def _environment(about: Mapping[str, Any], table: EventTable) -> dict[str, Any]:
    """What the file says of the machine, by the names of RUN.json; what it does not say is left out."""
    found: dict[str, Any] = {"device": "cpu"}
    devices = about.get("deviceProperties")
    if table.kernels is not None:
        kind = next((word for key in about for part, word in _DEVICE_TYPES if str(key).startswith(part)), "cuda")
        found["device"] = kind
        used = set(table.kernels.device.tolist())
        if isinstance(devices, list):
            names = [
                str(each["name"])
                for each in devices
                if isinstance(each, dict) and each.get("name") and each.get("id") in used
            ]
            if names:
                found["device_name"] = ", ".join(dict.fromkeys(names))
    ranks = about.get("distributedInfo")
    if isinstance(ranks, dict):
        for key in ("rank", "world_size", "backend"):
            value = ranks.get(key)
            if isinstance(value, (int, str)) and not isinstance(value, bool):
                found[key] = value
    for key, name in (("pytorch_version", "torch"), ("cuda_runtime_version", "cuda_runtime")):
        if isinstance(about.get(key), (int, str)):
            found[name] = about[key]
    return found


def _diagnosed(run: RunData, ignore: tuple[str, ...]) -> RunData:
    """Add what the rules find without a recorded step; a run of unsteady steps gets no rule that rests on times."""
    steady = not is_unreliable(run.step)
    findings, failed = diagnose(Case(run, StepFacts(), None), ignore, steady=steady)
    left_out = {rule.name for rule in every_rule() if rule.of_times and not steady} | set(ignore)
    looked = len(every_rule()) - len(left_out) - len(failed)
    return replace(run, findings=tuple(findings), rules=looked, notes=(*run.notes, *failed))


_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def steps_of(text: str) -> tuple[int, int]:
    """``"3-5"`` -> (3, 5); ``"3"`` -> (3, 3).

    Raises:
        UsageError: it is neither.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None or len(text) > 30:
        raise UsageError(f"--steps {text or repr(text)}: give the first and the last, as 3-5, or one step.")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise UsageError(f"--steps {text}: the last step comes before the first.")
    return first, last
