"""The step over time for Perfetto (https://ui.perfetto.dev) and chrome://tracing, in the Trace Event Format.

The step that measured memory: one track of its phases, one of the layers, forward and backward, each below the layers
around it, and a counter of the memory of each category. Times are in microseconds from the step's start.

Source: Google, "Trace Event Format", complete events (``X``) and counter events (``C``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradscope.errors import UsageError
from gradscope.tables import LayerSpan, MemoryInfo, RunData

_PROCESS, _PHASES, _LAYERS = 1, 1, 2


def to_perfetto(run: RunData) -> str:
    """The run as JSON of the Trace Event Format.

    Raises:
        UsageError: it holds no times of layers: memory was not measured.
    """
    memory = run.memory
    if memory is None or memory.spans is None:
        raise UsageError("the run holds no times of its layers: they are measured with memory, without --no-memory.")
    events = [
        _name("process_name", _PHASES, f"gradscope {run.workload.target}"),
        _name("thread_name", _PHASES, "phases"),
        _name("thread_name", _LAYERS, "layers"),
        *(_slice(_PHASES, one.phase, one.start_ns, one.end_ns) for one in memory.phases),
        *_layers(run, memory.spans),
        *_counters(memory),
    ]
    record = {"exporter": f"gradscope {run.gradscope}", "displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def _name(kind: str, track: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": text}}


def _slice(track: int, name: str, start_ns: int, end_ns: int, **arguments: str) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "pid": _PROCESS, "tid": track, "ts": start_ns / 1e3}
    return {**event, "dur": (end_ns - start_ns) / 1e3, "args": arguments}


@dataclass(slots=True)
class _Open:
    """A slice that has not ended yet."""

    layer: str
    phase: str
    start_ns: int
    end_ns: int


def _layers(run: RunData, spans: Sequence[LayerSpan]) -> Iterator[dict[str, Any]]:
    """Slices of layers within those of the layers around them: as long as something below them runs in one phase."""
    rows = {row.path: row for row in run.layers}
    stack: list[_Open] = []

    def ended(level: int) -> Iterator[dict[str, Any]]:
        while len(stack) > level:
            one = stack.pop()
            kind = rows[one.layer].class_name if one.layer in rows else ""
            name = one.layer or kind
            yield _slice(_LAYERS, name, one.start_ns, one.end_ns, phase=one.phase, layer=one.layer, kind=kind)

    for span in spans:
        chain = _chain(span.layer, {path: row.parent for path, row in rows.items()})
        level = 0
        while level < min(len(stack), len(chain)) and (stack[level].layer, stack[level].phase) == (
            chain[level],
            span.phase,
        ):
            level += 1
        yield from ended(level)
        stack += [_Open(layer, span.phase, span.start_ns, span.end_ns) for layer in chain[level:]]
        for one in stack:
            one.end_ns = span.end_ns
    yield from ended(0)


def _chain(layer: str, parents: dict[str, str | None]) -> list[str]:
    """The layers around a layer, and itself; the root first."""
    found = [layer]
    while (above := parents.get(found[-1])) is not None and above not in found:
        found.append(above)
    return found[::-1]


def _counters(memory: MemoryInfo) -> Iterator[dict[str, Any]]:
    for number, point in enumerate(memory.timeline):
        values = {course.category: course.bytes[number] for course in memory.categories or ()}
        yield {
            "ph": "C",
            "name": "memory",
            "pid": _PROCESS,
            "ts": point.ns / 1e3,
            "args": values or {"allocated": point.bytes},
        }
