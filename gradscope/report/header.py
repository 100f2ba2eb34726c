"""The head of a report: what was measured, on what, how, and how steady it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradscope import units
from gradscope.report.limited import backward_of, header_text
from gradscope.report.memorywords import leaked_bytes, peak_place
from gradscope.tables import MemoryInfo, RunData, StepTimes, WorkloadInfo, is_starved, is_unreliable

# Standard deviation of the step's time over its mean, from which on the header warns.
DISTURBED = 0.9  # an overhead below this says nothing; above it, it is within the spread of steps
UNSTEADY = 0.10

MEAN_OF_OUTPUTS = "mean of outputs"  # a workload's loss where the target gives none
NOT_ITS_LOSS = "mean of the floating outputs: the target gives none, so this is not its real loss"


def interrupters(work: WorkloadInfo) -> str:
    """Why fewer steps than asked for count: "other work", "torch.compile", or both; "" where the run ended before."""
    lacks = not work.steps_asked or work.steps < work.steps_asked <= work.steps + work.steps_left_out
    if not work.steps_left_out or not lacks:
        return ""
    if not work.steps_compiling:
        return "other work"
    return "torch.compile" if work.steps_compiling == work.steps_left_out else "other work and torch.compile"


def interrupted_by(work: WorkloadInfo) -> str:
    """Why steps do not count: "interrupted by the system", "1 interrupted by torch.compile, 2 by the system"."""
    compiling = work.steps_compiling
    if not compiling:
        return "interrupted by the system"
    others = work.steps_left_out - compiling
    return (
        f"{compiling} interrupted by torch.compile, {others} by the system"
        if others
        else "interrupted by torch.compile"
    )


def partial_text(run: RunData) -> str:
    """A sentence where the run was cut short, else nothing."""
    if not run.partial:
        return ""
    work = run.workload
    steps, who = work.steps, interrupters(work)
    why = f"{who} interrupted the other steps" if who else "the run ended early"
    return f"PARTIAL: {why}; what follows is from {steps} measured {'step' if steps == 1 else 'steps'}."


def subject(run: RunData) -> str:
    """What was measured: ``examples/gpt.py · GPT, 3.29 M parameters · batch 4x256 int64``."""
    work = run.workload
    parts = [f"{work.target} ({_MODES[work.mode]})" if work.mode in _MODES else work.target]
    unknown = "" if work.mode == "trace" else "?"  # a trace without modules does not say
    parts.append((work.model or unknown) + (f", {units.count(work.parameters)} parameters" if work.parameters else ""))
    if work.batch:
        parts.append(f"batch {work.batch}")
    return " · ".join(part for part in parts if part)


def head_rows(run: RunData, *, full: bool) -> tuple[tuple[str, str], ...]:
    """(name, text) of each row; the device and how it was measured take one row, or ``full`` ones."""
    if full:
        rows = [("device", device_text(run.environment)), ("measured", measured_text(run, full=True))]
    else:
        rows = [("run", f"{device_text(run.environment, _SHORT_VERSIONS)} · {measured_text(run, full=False)}")]
    rows.append(("step", _step(run)))
    if idle := _idle(run):
        rows.append(("idle", idle))
    found = backward_of(run.layers)
    if found is not None and (limit := header_text(found, run.step.backward_ns)):
        rows.append(("limit", limit))
    if run.memory is not None:
        rows.append(("memory", _memory(run.memory, run.workload.model)))
    if run.workload.loss == MEAN_OF_OUTPUTS:
        rows.append(("loss", NOT_ITS_LOSS))
    return tuple(rows)


_IDLE = 1 / 3  # of a step, from which on it is to be said first


def _idle(run: RunData) -> str:
    """How long the device does nothing, where that is much of the step: no layer is to blame for it."""
    idle = 0 if run.device is None or run.device.idle_ns is None else run.device.idle_ns
    share = idle / run.step.wall_ns if run.step.wall_ns > 0 else 0.0
    if share <= _IDLE:
        return ""
    return (
        f"the device waits for the host for {units.percent(share, 0)} of the step ({units.ns(idle)}): larger batches, "
        "torch.compile or CUDA graphs, or a faster loader give it work"
    )


_MODES = {"script": "script", "loop": "own loop", "trace": "trace"}


_VERSIONS = ("torch", "triton", "python")
_SHORT_VERSIONS = ("torch",)


def device_text(environment: Mapping[str, object], versions: Sequence[str] = _VERSIONS) -> str:
    """The device, its threads, versions, the type of the parameters, and what slows it."""
    device, name = str(environment.get("device", "?")), environment.get("device_name")
    parts = [f"{device} ({name})" if name and name != device else device]
    if threads := environment.get("threads"):
        parts.append(f"{threads} {'thread' if threads == 1 else 'threads'}")
    parts += [f"{key} {environment[key]}" for key in versions if environment.get(key)]
    if "rank" in environment and "world_size" in environment:
        parts.append(f"rank {environment['rank']} of {environment['world_size']}")
    if environment.get("mesh"):
        parts.append(f"mesh {environment['mesh']}")
    if environment.get("dtype"):
        parts.append(str(environment["dtype"]))
    parts += [words for key, words in _SLOWING.items() if environment.get(key)]
    return " · ".join(parts)


# Settings that cost time, said where they are on.
_SLOWING = {"deterministic": "deterministic algorithms", "anomaly_mode": "anomaly mode ON: backward is slower"}


def measured_text(run: RunData, *, full: bool) -> str:
    """How many steps, how steady they were, and what profiling cost; ``full``: with figures behind these."""
    work, step = run.workload, run.step
    left_out = work.steps_left_out
    taken = f"{work.steps} of {work.steps + left_out}" if left_out else f"{work.steps}"
    warmup = f" after {work.warmup} warm-up" if full else ""
    steps = f"{taken} {'step' if taken == '1' else 'steps'}{warmup}"
    parts = [steps]
    if left_out:
        parts.append(f"{left_out} left out, {interrupted_by(work)}")
    spread = step.spread.get("wall")
    if spread and step.wall_ns and work.steps > 1:
        deviation = spread.std_ns / step.wall_ns
        idle = "" if work.mode == "trace" else ": is the machine idle?"  # a trace's machine is another, long since
        unsteady = f" (unsteady{idle})" if deviation > UNSTEADY else ""
        if is_unreliable(step) and not is_starved(step):
            unsteady = f" (too unsteady for alarms and savings{idle})"
        between = f"{units.ns(spread.min_ns)} to {units.ns(spread.max_ns)}, " if full else ""
        steady = f"{between}±{units.percent(deviation)}{unsteady}"
        parts = [*parts, steady] if full else [f"{steps} {steady}"]
    if step.waited_ns is not None and is_starved(step):
        share = units.percent(step.waited_ns / step.wall_ns)
        parts.append(f"{share} of it waiting for a core (too much for alarms and savings: is the machine idle?)")
    if step.overhead is None:
        parts.append("overhead not measured")
    else:
        bare = step.unprofiled_wall_ns
        against = f" (unprofiled step {units.ns(bare)})" if bare is not None and full else ""
        # Nothing gets faster by being profiled: something else slowed the unprofiled steps.
        doubt = " (disturbed: is the machine idle?)" if step.overhead < DISTURBED else ""
        parts.append(f"overhead {units.ratio(step.overhead)}{against}{doubt}")
    return " · ".join(parts)


def _step(run: RunData) -> str:
    step = run.step
    phases = phases_of(step)
    if not phases:
        return units.ns(step.wall_ns)
    ratio = f", {units.ratio(step.backward_ns / step.forward_ns)} forward" if step.forward_ns else ""
    spelled = [
        f"{name} {units.ns(ns)} ({share}{ratio if name == 'backward' else ''})" for name, (ns, share) in phases.items()
    ]
    return f"{units.ns(step.wall_ns)} = {' + '.join(spelled)}"


def phases_of(step: StepTimes) -> dict[str, tuple[int, str]]:
    """The time of each phase that took some, and its share of the step, rounded so that all add up to 100 %."""
    parts = {
        "forward": step.forward_ns,
        "backward": step.backward_ns,
        "optimizer": step.optimizer_ns,
        "other": step.other_ns,
    }
    shares = units.percents_of(list(parts.values()), step.wall_ns, decimals=0)
    return {name: (ns, share) for (name, ns), share in zip(parts.items(), shares, strict=True) if ns}


def _memory(memory: MemoryInfo, model: str) -> str:
    parts = [
        f"peak {units.size(memory.peak_bytes)} {peak_place(memory, model)}",
        f"saved for backward {units.size(memory.saved_bytes)}{units.over_passes(memory.backward_passes)}",
    ]
    if leaked := leaked_bytes(memory):
        parts.append(f"LEAK: {units.size(leaked)} more with every step")
    return " · ".join(parts)
