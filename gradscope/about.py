"""What a report says of the run itself: how much was measured, where, what is missing and why."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

import gradscope
from gradscope import versions
from gradscope.attribute.memory.result import MemoryResult
from gradscope.attribute.result import Attribution
from gradscope.capture.backward import STEP_ENDS
from gradscope.capture.budget import LINES, MEMORY_PASS, left_out_note
from gradscope.capture.environment import describe_environment, mesh_of
from gradscope.capture.modules import MODULE_CALLS
from gradscope.capture.naming import ModuleNames
from gradscope.capture.phases import SETTLING_STEPS, steps_to_first_result
from gradscope.capture.phases.memory import Memory
from gradscope.capture.phases.survey import Survey
from gradscope.capture.phases.timed import Timed
from gradscope.capture.result import Capture
from gradscope.capture.session import Session
from gradscope.capture.training import StepFinder
from gradscope.graphs import flops_of
from gradscope.readings import READING_MEMORY, READING_SURVEY, TimedTrace
from gradscope.tables import Options, RunData, StepTimes, TakenStep, WorkloadInfo
from gradscope.tree import parameters_of


def run_data(
    capture: Capture,
    about: WorkloadInfo,
    trace: TimedTrace,
    result: Attribution,
    memory: MemoryResult | None,
    device: torch.device | None,
) -> RunData:
    """Return the tables of a run with all that is said beside them, but for its findings.

    Args:
        about: what was run; how much of it is filled in.
        device: where the model ran; None: where its parameters are.
    """
    about = _completed(about, capture, trace)
    parameters = _parameters(trace.names.tops)
    dtypes = {parameter.dtype for parameter in parameters}
    where = device or _device_of(parameters)
    return RunData(
        gradscope=gradscope.__version__,
        partial=_is_partial(capture, about, memory),
        environment=describe_environment(
            where, dtypes.pop() if len(dtypes) == 1 else None, capture.ranks, mesh_of(parameters)
        ),
        workload=about,
        step=_with_unprofiled(result.step, capture, trace),
        ledger=result.ledger,
        layers=result.layers,
        lines=result.lines,
        ops=result.ops,
        kernels=result.kernels,
        device=result.device,
        buckets=result.buckets,
        memory=memory.info if memory is not None else None,
        notes=tuple(_notes(capture, about, trace, result, memory)),
    )


def with_failures(run: RunData, capture: Capture) -> RunData:
    """Say what of gradscope's own failed, whenever that was."""
    notes = [
        f"gradscope failed at {part} ({text}): results that depend on it are missing or incomplete"
        for part, text in capture.failed.items()
    ]
    return replace(run, notes=(*run.notes, *notes))


def _completed(about: WorkloadInfo, capture: Capture, trace: TimedTrace) -> WorkloadInfo:
    names, parameters = trace.names, _parameters(trace.names.tops)
    return replace(
        about,
        steps=trace.measured,
        steps_left_out=len(trace.timed.left_out),
        steps_compiling=trace.timed.compiling,
        steps_asked=capture.options.steps,
        model=", ".join(_models(names)),
        parameters=sum({id(parameter): parameter.numel() for parameter in parameters}.values()),
        events=trace.events,
        batch=next((text for root, text in capture.batches.items() if text and names.rows[root] >= 0), None),
        optimizer_steps=_optimizer_steps(capture, names),
    )


def _models(names: ModuleNames) -> Iterable[str]:
    """The classes of the models that have parameters; of those that are gone, whatever had them, the called roots."""
    held = [type(model).__name__ for model in names.models if any(True for _ in parameters_of(model))]
    return held or dict.fromkeys(info.class_name for info in names.infos if info.parent is None)


def _is_partial(capture: Capture, about: WorkloadInfo, memory: MemoryResult | None) -> bool:
    """Check that the run measured less than was asked for and would fit into the budget."""
    if about.steps < capture.options.steps or (capture.survey is None and LINES not in capture.left_out):
        return True
    return memory is None and capture.options.memory and MEMORY_PASS not in capture.left_out


def _with_unprofiled(step: StepTimes, capture: Capture, trace: TimedTrace) -> StepTimes:
    waited = trace.timed.waited_ns  # of what lies between steps, too, the system tells
    waited = None if waited is None else min(waited, step.wall_ns)
    step = replace(step, waited_ns=waited, taken=_all_taken(step.taken, trace.timed.taken))
    # Like with like: with those in which something was compiled where it was in steps that count, alone where in all.
    plain, compiling = capture.unprofiled_ns, capture.unprofiled_compiling_ns
    all_compile = compiling and trace.timed.compiled == trace.measured
    walls = compiling if all_compile else plain + compiling if trace.timed.compiled else plain
    if not walls:
        return step
    unprofiled = round(statistics.median(walls))
    return replace(step, unprofiled_wall_ns=unprofiled, overhead=step.spread["wall"].median_ns / max(unprofiled, 1))


def _all_taken(measured: Sequence[TakenStep], taken: Sequence[TakenStep]) -> tuple[TakenStep, ...]:
    """The steps that count by the trace's clock, in their places among those that do not: of these is no trace."""
    if len(measured) != sum(not step.left_out for step in taken):
        return tuple(measured)
    traced = iter(measured)
    return tuple(step if step.left_out else next(traced) for step in taken)


def _notes(
    capture: Capture, about: WorkloadInfo, trace: TimedTrace, result: Attribution, memory: MemoryResult | None
) -> list[str]:
    """Return what is missing and why, and what the figures stand for."""
    memory_notes = capture.memory.notes if capture.memory is not None else []
    notes = [
        *versions.untried(torch.__version__),
        *capture.notes,
        *_of_timed_steps(capture, trace),
        *memory_notes,
        *result.notes,
    ]
    if about.optimizer_steps:
        parts = ", ".join(f"{count} of {name}" for name, count in about.optimizer_steps.items())
        notes.append(f"a step holds {sum(about.optimizer_steps.values())} optimizer steps: {parts}")
    known_reasons = capture.failed.keys() | capture.left_out
    if capture.survey is None and not known_reasons & {READING_SURVEY, Survey.name, MODULE_CALLS, LINES}:
        compiled = ", but those of compiled graphs" if capture.compiled.graphs else ""
        notes.append(f"the run ended before the survey step: no source lines and no FLOPs{compiled}{_needed(capture)}")
    elif (
        memory is None
        and capture.options.memory
        and not known_reasons & {READING_MEMORY, Memory.name, MODULE_CALLS, MEMORY_PASS}
    ):
        notes.append(f"the run ended before the steps that measure memory{_needed(capture)}")
    if capture.given_way:
        notes.append(
            f"the program's own torch.profiler ran in {capture.given_way} of its {capture.steps_done} "
            "steps, so gradscope did not measure them"
        )
    if capture.paused:
        notes.append("what ran between training steps, such as an evaluation or saving, is in none of them")
    if about.loss == "mean of outputs":
        notes.append("no loss was given: the backward pass starts from the mean of the floating outputs")
    return notes


def _of_timed_steps(capture: Capture, trace: TimedTrace) -> list[str]:
    timed, notes = trace.timed, []
    if timed.completed <= SETTLING_STEPS:
        notes.append("the only measured step is the profiler's first, which takes longer than later ones")
    if trace.stretches > 1 and not capture.paused:
        notes.append(
            f"the profiled steps were split into {trace.stretches} groups with an unprofiled step "
            f"between them: one step records {trace.events // timed.completed:,} trace events"
        )
    if timed.passes.most_nodes:
        notes.append(
            f"a backward pass runs more than {timed.passes.most_nodes:,} nodes, the most that can be "
            "inspected: the layers of its gradient accumulation, and some saved tensors, are unknown"
        )
    watch = capture.compiled
    if watch.unknown_has_run and watch.graphs:
        notes.append(
            "graphs that were compiled before the measurement began, or ahead of time, are a row each, of the layer "
            "that called them: they have no source lines and no FLOPs"
        )
    if any(flops_of(ran, watch.graphs) is None for ran in watch.runs):
        notes.append(
            "compiled graphs ran with sizes that torch finds out while they run: FLOPs of these runs are not counted"
        )
    if capture.passes_compiled:
        notes.append(
            "compiled autograd makes one graph of each backward pass: torch does not tell the layers of operations "
            "whose forward ran outside of graphs, or in blocks that share one; they are outside of all modules"
        )
    if capture.left_out:
        notes.append(left_out_note(capture.left_out, capture.rows, capture.options.memory_budget))
    return notes


def _needed(capture: Capture) -> str:
    """Return how long a run must be for all that was asked for."""
    passed = capture.passed_over
    return f" (a whole report takes {passed + capture.steps_needed} steps; there were {passed + capture.steps_done})"


def _device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The parameters' device; those without storage stand for what is passed to ``functional_call``, or offloaded."""
    return next((each.device for each in parameters if not each.is_meta), torch.device("cpu"))


def _optimizer_steps(capture: Capture, names: ModuleNames) -> dict[str, int] | None:
    """How often each of several optimizers steps, by the layer that holds all that it optimizes, or by its class."""
    inside = {
        names.infos[names.index[id(module)]].path: {id(parameter) for parameter in parameters_of(module)}
        for module in names.modules
    }
    known = set().union(*inside.values())
    found: dict[str, int] = {}
    for each in capture.cycle:
        own = each.parameters & known
        wanted = name = next((path for path, held in inside.items() if path and own and held == own), each.class_name)
        number = 2
        while name in found:
            name, number = f"{wanted}#{number}", number + 1
        found[name] = each.steps
    return found or None


def _parameters(tops: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for top in tops for parameter in parameters_of(top)]


_WITHOUT_GRAPHS = (
    "The replay of a graph tells nothing of layers: profile the training step without torch.cuda.graph and "
    "make_graphed_callables."
)
_WORKED_S = 0.1  # of processor time: a process that only looks something up takes less, one that trains takes more


def why_no_steps(target: str, session: Session, finder: StepFinder, children_s: float) -> str | None:
    """Return why no training steps were found in a script that ran to its end; None where some were.

    Args:
        children_s: processor time of the processes that the script started, in seconds.
    """
    capture = session.capture
    if not capture.steps_done and STEP_ENDS in capture.failed:
        return f"{target} could not be measured: {capture.failed[STEP_ENDS]}.\nRun 'gradscope doctor' to see why."
    if capture.captured and not finder.backwards:
        return f"{target} ran no backward pass but into CUDA graphs: there is nothing to measure.\n{_WITHOUT_GRAPHS}"
    if not finder.backwards:
        return (
            f"{target} ran to its end without a backward pass{_that_returned(session.backward.raised)}: "
            "there is nothing to measure.\n"
            f"{_without_backward(children_s)}"
        )
    optimizers, steps = finder.cycles.unordered
    if not capture.steps_done and steps > 2 * optimizers > 2:
        return (
            f"{target} ended before its training steps could be told: {optimizers} optimizers stepped {steps} times, "
            "in an order that does not come back.\nLet it run longer, or say where a step ends: with "
            "gradscope.profiling() as prof, and prof.step()."
        )
    if not capture.steps_done and finder.stepped:
        return (
            f"{target} ended before its optimizers had stepped twice, so a training step cannot be "
            "identified.\nLet it run longer."
        )
    if not capture.steps_done:
        return (
            f"{target} ran backward {finder.backwards} times, but no optimizer stepped, so gradscope "
            "cannot tell where training steps end. It created an optimizer, whose step() ends a "
            "training step.\nFor another kind of loop: with gradscope.profiling() as prof, and "
            "prof.step() where a step ends."
        )
    return None


def _that_returned(raised: int) -> str:
    if not raised:
        return ""
    return f" that returned ({raised} raised an error, which the script caught)"


def _without_backward(children: float) -> str:
    """Return what to do next, where processes that the script started took so many seconds of processor time."""
    advice = "Profile a script that trains, or a file that defines workload() -> (model, batch)."
    if children < _WORKED_S:
        return advice
    return (
        f"Its child processes worked for {children:.1f} s, but only the script's own process is "
        "measured.\nTrain in that process, or profile a file that defines workload() -> (model, "
        "batch)."
    )


LOOP = "the loop"  # what a target without a name is called: a loop of the user's own


def why_no_result(target: str, capture: Capture) -> str:
    """Return why none of the steps that ran was measured."""
    if capture.given_way:
        return (
            f"{target} ran its own torch.profiler in {capture.given_way} of its {capture.steps_done} "
            "steps, so gradscope measured nothing.\nTurn that profiler off, or stop it earlier: "
            "PyTorch allows one per process."
        )
    if Timed.name in capture.failed:
        return f"{target} could not be measured: {capture.failed[Timed.name]}.\nRun 'gradscope doctor' to see why."
    return _too_short(target, capture)


def _as_asked(target: str, warmup: int, steps: int) -> str:
    """Spell both options as the command line has them, or Python, where a loop is the user's own."""
    return f"warmup={warmup}, steps={steps}" if target == LOOP else f"--warmup {warmup} --steps {steps}"


def _too_short(target: str, capture: Capture) -> str:
    if capture.steps_cut > capture.steps_done:
        return (
            f"an evaluation, or something like it, ran inside {capture.steps_cut} training steps of {target}, so "
            "gradscope left these out.\nEvaluate between steps, or less often."
        )
    passed, options = capture.passed_over, capture.options
    ran = passed + capture.steps_done
    steps = f"{ran} training step{'' if ran == 1 else 's'}"
    needed = passed + steps_to_first_result(options)
    least = passed + steps_to_first_result(Options(steps=1, warmup=1))
    asked, smallest = _as_asked(target, options.warmup, options.steps), _as_asked(target, 1, 1)
    less = f", or measure less: {smallest} needs {least}" if least < needed else ""
    further = f"Let it run longer{less}."
    if capture.captured:
        further = _WITHOUT_GRAPHS
    return (
        f"{target} ended after {steps}; nothing is measured before step {needed} "
        f"with {asked}, "
        f"and a whole report takes {passed + capture.steps_needed}.\n"
        f"{further}"
    )
