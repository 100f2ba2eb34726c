"""Which steps a run takes, and what for."""

from __future__ import annotations

from dataclasses import dataclass

from gradscope.capture.memory import STEPS as MEMORY_STEPS
from gradscope.tables import Options

# The first profiled step pays for the profiler's own first touch of every buffer (measured: x1.5 to x3): dropped.
SETTLING_STEPS = 1


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps that are measured in one way."""

    name: str
    steps: int


def plan(options: Options) -> list[Phase]:
    """The phases of a run, in order."""
    memory = Phase("memory", MEMORY_STEPS)
    if not options.timing:
        return [phase for phase in (Phase("warm-up", options.warmup), memory) if phase.steps > 0]
    # Unprofiled steps also keep the profilers apart: a record_function that is open while one stops and the next
    # starts (the one around every optimizer.step is) ends in a crash of the process.
    phases = [
        Phase("warm-up", options.warmup),
        Phase("unprofiled steps", min(options.steps, 4)),
        Phase("profiled steps", SETTLING_STEPS + options.steps),
        Phase("unprofiled steps", 2),
        Phase("survey", 1),
    ]
    phases.append(Phase("recording", 1))
    if options.memory:
        phases.append(memory)
    return [phase for phase in phases if phase.steps > 0]
