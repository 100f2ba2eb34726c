"""The run as a file for speedscope (https://www.speedscope.app): a flame graph of layers and their operations.

Two sampled profiles, ``backward`` and ``forward``, in nanoseconds. One sample is one operation of one layer, its
stack the layers around it. The weights add up to the phase: what is in no operation is a sample of the layer itself,
what is in no layer a sample under ``(outside the layers)``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradscope.report.view import LEDGER_WORDS, OUTSIDE_PHASES
from gradscope.tables import LayerRow, RunData

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

# Column of a layer -> phase of its operations, and the frame between layer and operation.
_BACKWARD = {
    "backward_self_ns": ("backward", None),
    "recompute_ns": ("recompute", "(recompute)"),
    "gradient_sum_ns": ("gradient_sum", "(gradient sum)"),
    "accumulate_ns": ("accumulate", "(accumulate)"),
    "hook_ns": ("hook", "(backward hooks)"),
}
_FORWARD = {"forward_self_ns": ("forward", None)}
_NO_LAYER = frozenset(OUTSIDE_PHASES.values()) - {"backward"}


def to_speedscope(run: RunData) -> str:
    """The run as speedscope JSON; its title is the target."""
    frames = _Frames(run.layers)
    operations = _operations(run)
    backward, forward = _Samples(), _Samples()
    for row in run.layers:
        _add_layer(backward, frames, row, _BACKWARD, operations)
        _add_layer(forward, frames, row, _FORWARD, operations)
    for part, phase in OUTSIDE_PHASES.items():
        stack = [frames.named("(outside the layers)"), frames.named(f"({LEDGER_WORDS[part][0]})")]
        backward.fill(stack, operations.get((None, phase), ()), getattr(run.ledger, part), frames)
    outside = run.step.forward_ns - sum(forward.weights)
    forward.fill([frames.named("(outside the layers)")], operations.get((None, "forward"), ()), outside, frames)
    record = {
        "$schema": SCHEMA,
        "exporter": f"gradscope {run.gradscope}",
        "name": run.workload.target,
        "activeProfileIndex": 0,
        "shared": {"frames": frames.table},
        "profiles": [backward.profile("backward"), forward.profile("forward")],
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(slots=True)
class _Samples:
    """Stacks and their weights in ns."""

    stacks: list[list[int]] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)

    def add(self, stack: list[int], weight: int) -> None:
        if weight > 0:
            self.stacks.append(stack)
            self.weights.append(weight)

    def fill(self, stack: list[int], operations: Iterable[tuple[str, int]], whole: int, frames: _Frames) -> None:
        """``whole`` ns under ``stack``: its operations as far as they go, then the stack itself."""
        left = whole
        for name, spent in operations:
            spent = min(spent, left)
            self.add([*stack, frames.named(name)], spent)
            left -= max(spent, 0)
        self.add(stack, left)

    def profile(self, name: str) -> dict[str, Any]:
        return {
            "type": "sampled",
            "name": name,
            "unit": "nanoseconds",
            "startValue": 0,
            "endValue": sum(self.weights),
            "samples": self.stacks,
            "weights": self.weights,
        }


class _Frames:
    """speedscope's table of frames: one a layer, one a name of operation."""

    def __init__(self, layers: Iterable[LayerRow]) -> None:
        self.table: list[dict[str, Any]] = []
        self._names: dict[str, int] = {}
        self._rows = {row.path: row for row in layers}
        self._stacks: dict[str, list[int]] = {}

    def named(self, name: str) -> int:
        """The frame of an operation or of a row of the ledger."""
        if name not in self._names:
            self._names[name] = self._append({"name": name})
        return self._names[name]

    def stack(self, path: str) -> list[int]:
        """The frames from the root down to the layer."""
        missing: dict[str, LayerRow] = {}  # in order
        at: str | None = path
        while at is not None and at in self._rows and at not in self._stacks and at not in missing:
            missing[at] = self._rows[at]
            at = self._rows[at].parent
        stack = self._stacks.get(at, []) if at is not None else []
        for row in reversed(missing.values()):
            stack = [*stack, self._append(_layer_frame(row))]
            self._stacks[row.path] = stack
        return stack

    def _append(self, frame: dict[str, Any]) -> int:
        self.table.append(frame)
        return len(self.table) - 1


def _layer_frame(row: LayerRow) -> dict[str, Any]:
    frame: dict[str, Any] = {"name": f"{row.path} {row.class_name}".strip()}
    file, _, line = (row.source or "").rpartition(":")
    if file and line.isdecimal() and len(line) < 10:
        frame |= {"file": file, "line": int(line)}
    return frame


def _operations(run: RunData) -> Mapping[tuple[str | None, str], list[tuple[str, int]]]:
    """(name, ns) by layer and phase; by phase alone where the ledger has a row of its own for it."""
    by_owner: dict[tuple[str | None, str], list[tuple[str, int]]] = {}
    for op in run.ops:
        layer = None if op.phase in _NO_LAYER else op.layer
        by_owner.setdefault((layer, op.phase), []).append((op.name, op.self_ns))
    return by_owner


def _add_layer(
    samples: _Samples,
    frames: _Frames,
    row: LayerRow,
    columns: Mapping[str, tuple[str, str | None]],
    operations: Mapping[tuple[str | None, str], list[tuple[str, int]]],
) -> None:
    for column, (phase, between) in columns.items():
        whole = getattr(row, column)
        if whole:
            stack = frames.stack(row.path) + ([frames.named(between)] if between else [])
            samples.fill(stack, operations.get((row.path, phase), ()), whole, frames)
