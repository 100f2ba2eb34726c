"""What a step of many operations may cost in memory: how many steps a profiler sees at once, and what is left out.

A profiler needs some 1.4 kB a row of its trace when it stops, more with shapes or allocations. How many rows a step
makes is guessed from the autograd nodes that it draws, until a stretch of it has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradscope import units
from gradscope.compat import sequence_number

# Bytes at the peak for each row that is read of a timed step, on torch 2.13 (benchmarks/huge_steps.py); what an op
# calls below autograd is recorded, and is in these figures, but is not read.
TIMED = 2_500
SURVEY_WITH_SHAPES = 13_000
SURVEY_WITH_FLOPS = 5_500
SURVEY = 3_300
MEMORY_TWO_STEPS = 12_000
MEMORY = 7_000

ROWS_A_NODE = 5  # of a timed trace: 4.5 of elementwise operations

# A profiler that sees few rows is also truer: with 20,000 operations a step the sixth step that one saw took 1.3 times
# as long as the first (torch 2.13, CPU).
_COMFORT = 8  # what can be had in another way, or done without, takes at most this part of the budget

LINES, MEMORY_PASS = "source lines", "memory"  # what is left out when a pass is

_WARN_BYTES = 1024**3
# What a profiled step takes, with reading and assigning its rows, over one without a profiler: 5 to 9 where operations
# are small, as they are where a step has many (benchmarks/huge_steps.py).
_OVER_UNPROFILED = 8
_OTHER_PROFILED = 3  # the survey and the memory pass, beside the measured steps
_UNPROFILED = 6  # between and behind them


@dataclass(frozen=True, slots=True)
class SurveyPlan:
    """What the survey collects."""

    shapes: bool = True
    flops: bool = True
    takes_place: bool = True

    @property
    def left_out(self) -> list[str]:
        """What it does not collect, in words."""
        words = {"input shapes": self.shapes, "FLOPs": self.flops, LINES: self.takes_place}
        return [word for word, wanted in words.items() if not (wanted and self.takes_place)]


class Budget:
    """Follows what steps are made of, and says what fits.

    Args:
        limit: bytes that the notes of one pass may take.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nodes = 0  # autograd nodes of the largest step so far; the first may be half a step, or two
        self._steps = 0
        self._rows = 0.0  # of a timed step, once one was read
        self._number = 0

    def begin_step(self) -> None:
        """A step begins on this thread."""
        self._number = sequence_number()

    def end_step(self) -> None:
        """It has ended, on the same thread."""
        drawn = sequence_number() - self._number
        self.nodes = drawn if self._steps < 2 else max(self.nodes, drawn)
        self._steps += 1

    def read(self, rows: int, steps: int) -> None:
        """A trace of ``steps`` steps held so many rows."""
        self._rows = max(self._rows, rows / max(steps, 1))

    @property
    def rows(self) -> float:
        """Rows of a timed trace that a step makes, known or guessed."""
        return self._rows or float(ROWS_A_NODE * self.nodes)

    def steps_at_once(self) -> int:
        """Steps that one profiler may see."""
        return max(1, int(self.limit / _COMFORT / max(self.rows * TIMED, 1.0)))

    def survey(self) -> SurveyPlan:
        """What the survey may collect."""
        if self.rows * SURVEY_WITH_SHAPES <= self.limit / _COMFORT:
            return SurveyPlan()
        flops = self.rows * SURVEY_WITH_FLOPS <= self.limit / 2
        return SurveyPlan(shapes=False, flops=flops, takes_place=self.rows * SURVEY <= self.limit)

    def traced_steps(self) -> int:
        """Steps more that one profiler may see for their source lines."""
        return int(self.limit / _COMFORT / max(self.rows * SURVEY, 1.0))

    def settles_lightly(self) -> bool:
        """Check that the first step of the memory pass is to be watched for allocations alone."""
        return self.rows * MEMORY_TWO_STEPS > self.limit / _COMFORT

    def has_memory_pass(self) -> bool:
        return self.rows * MEMORY <= self.limit

    def left_out(self, *, memory: bool) -> list[str]:
        """What is not measured, in words; nothing for most steps.

        Args:
            memory: whether memory was asked for.
        """
        return [*self.survey().left_out, *([MEMORY_PASS] if memory and not self.has_memory_pass() else [])]

    def most_bytes(self, *, memory: bool) -> int:
        """What the largest pass is likely to take."""
        survey = self.survey()
        each = SURVEY_WITH_SHAPES if survey.shapes else SURVEY_WITH_FLOPS if survey.flops else SURVEY
        passes = [TIMED * self.steps_at_once(), each if survey.takes_place else 0]
        if memory and self.has_memory_pass():
            passes.append(MEMORY if self.settles_lightly() else MEMORY_TWO_STEPS)
        return round(self.rows * max(passes))

    def seconds(self, steps: int, step_ns: float) -> float:
        """How long a run is likely to take from the first profiled step on.

        Args:
            steps: that are measured.
            step_ns: of a step without a profiler.
        """
        return step_ns * ((steps + 1 + _OTHER_PROFILED) * _OVER_UNPROFILED + _UNPROFILED + steps) / 1e9

    def warning(self, steps: int, step_ns: float, *, memory: bool) -> str | None:
        """What the user should know before the profiler starts; None for most steps.

        Args:
            steps: that are measured.
            step_ns: of a step without a profiler.
            memory: whether memory was asked for.
        """
        wanted = self.most_bytes(memory=memory)
        left_out = self.left_out(memory=memory)
        if wanted < min(_WARN_BYTES, self.limit) and not left_out:
            return None
        text = (
            f"a step creates {self.nodes:,} autograd nodes: measuring it takes about "
            f"{units.size(wanted)} of memory and {self.seconds(steps, step_ns):.0f} s"
        )
        if left_out:
            text += f"; {_not_measured(left_out)}, {_within(self.limit)}"
        elif wanted > self.limit:
            text += f", more than the memory budget of {units.size(self.limit)} (--memory-budget)"
        return text


def left_out_note(left_out: Sequence[str], rows: float, limit: int) -> str:
    """What the report says of what was left out.

    Args:
        rows: of a timed trace that a step makes.
        limit: the budget in bytes.
    """
    return f"a step records {rows:,.0f} trace events: {_not_measured(left_out)}, {_within(limit)}"


def _not_measured(left_out: Sequence[str]) -> str:
    words = left_out[0] if len(left_out) == 1 else f"{', '.join(left_out[:-1])} and {left_out[-1]}"
    return f"{words} {'is' if list(left_out) == [MEMORY_PASS] else 'are'} not measured"


def _within(limit: int) -> str:
    return f"to stay within the memory budget of {units.size(limit)} (--memory-budget)"
