"""What is known of the spread of each value of a run.

RUN.json has the backward nodes of each layer for every measured step, and the spread of the whole step and of its
forward and backward. What has neither is estimated, always on the side of more noise.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from gradscope.compare.changes import Basis
from gradscope.compare.noise import Measured
from gradscope.tables import LayerRow, RunData
from gradscope.tables.results import parent_path

Phase = Literal["wall", "forward", "backward"]


class RunSpread:
    """The spread of the values of one run."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.steps = run.workload.steps
        self.by_path = {row.path: row for row in run.layers}
        self._means = {"wall": run.step.wall_ns, "forward": run.step.forward_ns, "backward": run.step.backward_ns}

    @functools.cached_property
    def below(self) -> Mapping[str, Sequence[LayerRow]]:
        """Each layer with all layers below it. A parent that has no row is skipped."""
        found = {row.path: [row] for row in self.run.layers}
        for row in self.run.layers:
            at, seen = parent_path(row, found), {row.path}
            while at is not None and at not in seen:
                seen.add(at)
                found[at].append(row)
                at = parent_path(self.by_path[at], found)
        return found

    def relative(self, phase: Phase) -> float:
        """Standard deviation of a whole step over its mean; 0 where it is not known."""
        mean = self._means[phase]
        return self._deviation(phase) / mean if mean > 0 else 0.0

    def whole(self, phase: Phase) -> Measured:
        """The step, or all of one of its phases."""
        return Measured(self._means[phase], self._deviation(phase), self._known_steps(phase))

    def part(self, value: int, phase: Phase) -> Measured:
        """A part of ``phase`` that was not followed by step.

        It is taken to vary as much as the whole: parts that slow down together do not vary more than their sum.
        """
        return Measured(value, self._deviation(phase), self._known_steps(phase))

    def layers(
        self, rows: Sequence[LayerRow], value: int, phase: Phase, *, holds_nodes: bool
    ) -> tuple[Measured, Basis]:
        """A value of one layer, or the sum of it over several.

        Where it is what the layers' backward nodes cost, its spread is that of their sum by step. Any other one is
        taken to be as unsteady, relatively, as these nodes or as all of ``phase``, whichever is more. Without such
        nodes it is taken for a part of ``phase`` like any other: small parts are relatively less steady than large
        ones, so the phase's relative spread would be too little for the forward of a container.

        Args:
            holds_nodes: the backward nodes are in ``value``, perhaps with something else.
        """
        steps = _by_step(rows)
        mean = statistics.fmean(steps) if steps else 0.0
        deviation = statistics.stdev(steps) if len(steps) > 1 else 0.0
        if steps and holds_nodes and value == sum(row.backward_self_ns for row in rows):
            return Measured(value, deviation, len(steps)), "steps"
        if not value:
            return Measured(0, 0.0, self._known_steps(phase)), "estimate"
        if mean <= 0:
            return self.part(value, phase), "whole"
        relative = max(deviation / mean, self.relative(phase))
        return Measured(value, relative * abs(value), self._known_steps(phase)), "estimate"

    def _deviation(self, phase: Phase) -> float:
        spread = self.run.step.spread.get(phase)
        if spread is None or self.steps < 2:
            return 0.0
        return spread.std_ns

    def _known_steps(self, phase: Phase) -> int:
        return self.steps if phase in self.run.step.spread else 1


def _by_step(rows: Sequence[LayerRow]) -> list[int]:
    """The sum of the layers' own backward nodes in each step; nothing where a layer that has some was not followed."""
    followed = [row.backward_self_steps_ns for row in rows if row.backward_self_ns or row.backward_self_steps_ns]
    if not followed or len({len(steps) for steps in followed}) != 1:
        return []
    return [sum(values) for values in zip(*followed, strict=True)]
