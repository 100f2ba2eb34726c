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

from gradscope import units
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
        _name("thread_name", _LAYERS, _layers_title(memory)),
        *(_slice(_PHASES, one.phase, one.start_ns, one.end_ns) for one in memory.phases),
        *_layers(run, memory.spans),
        *_counters(memory),
    ]
    record = {"exporter": f"gradscope {run.gradscope}", "displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def _name(kind: str, track: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": text}}


def _layers_title(memory: MemoryInfo) -> str:
    left_out = memory.spans_left_out
    return f"layers ({units.count(left_out)} shorter stretches are left out)" if left_out else "layers"


def _slice(track: int, name: str, start_ns: int, end_ns: int, **arguments: str) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "pid": _PROCESS, "tid": track, "ts": start_ns / 1e3}
    return {**event, "dur": (end_ns - start_ns) / 1e3, "args": arguments}


@dataclass(slots=True)
class _Open:
    """A slice, which may grow."""

    layer: str
    phase: str
    start_ns: int
    end_ns: int


def _layers(run: RunData, spans: Sequence[LayerSpan]) -> Iterator[dict[str, Any]]:
    """Slices of layers, each behind those around it: of two of the same time a viewer puts the second inside."""
    kinds = {row.path: row.class_name for row in run.layers}
    for one in _opened(run, spans):
        kind = kinds.get(one.layer, "")
        name = one.layer or kind
        yield _slice(_LAYERS, name, one.start_ns, one.end_ns, phase=one.phase, layer=one.layer, kind=kind)


def _opened(run: RunData, spans: Sequence[LayerSpan]) -> list[_Open]:
    """The slices of layers in the order in which they begin, as long as something below them runs in one phase."""
    parents = {row.path: row.parent for row in run.layers}
    found: list[_Open] = []
    stack: list[_Open] = []
    for span in spans:
        chain = _chain(span.layer, parents)
        level = 0
        while level < min(len(stack), len(chain)) and (stack[level].layer, stack[level].phase) == (
            chain[level],
            span.phase,
        ):
            level += 1
        stack[level:] = [_Open(layer, span.phase, span.start_ns, span.end_ns) for layer in chain[level:]]
        found += stack[level:]
        for one in stack:
            one.end_ns = span.end_ns
    return found


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
