"""Which phases a run takes, and in which order."""

from __future__ import annotations

from gradscope.capture.memory import STEPS as MEMORY_STEPS
from gradscope.capture.memory import Surroundings
from gradscope.capture.phases.base import Phase, Run
from gradscope.capture.phases.lines import Lines
from gradscope.capture.phases.memory import Memory
from gradscope.capture.phases.recording import RecordingPhase
from gradscope.capture.phases.survey import Survey
from gradscope.capture.phases.timed import SETTLING_STEPS, Timed, Unprofiled, WarmUp
from gradscope.capture.result import Capture
from gradscope.tables import Options

__all__ = ["SETTLING_STEPS", "plan", "steps_to_first_result"]


def plan(run: Run) -> list[Phase]:
    """The phases of a run, in order."""
    options = run.capture.options
    phases: list[Phase] = [WarmUp(run, options.warmup)]
    if options.timing:
        # Unprofiled steps also keep the profilers apart.
        phases += [
            Unprofiled(run, min(options.steps, 4)),
            Timed(run, SETTLING_STEPS + options.steps),
            Unprofiled(run, 2),
            Survey(run, 1),
            RecordingPhase(run, 1),
        ]
    if options.memory:
        phases.append(Memory(run, MEMORY_STEPS))
    phases = [phase for phase in phases if phase.steps > 0]
    if options.timing and options.lines:
        phases.append(Lines(run, 0))
    return phases


def steps_to_first_result(options: Options) -> int:
    """Training steps until there is a report: of the settling step, where the run ends with that."""
    phases = plan(Run(Capture(options), Surroundings()))
    before = next(number for number, phase in enumerate(phases) if isinstance(phase, Timed))
    return sum(phase.steps for phase in phases[:before]) + SETTLING_STEPS
