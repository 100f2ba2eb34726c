"""In what the runs differ other than in their code: reasons why their numbers may not be comparable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gradscope import units
from gradscope.compare.changes import Mismatch
from gradscope.ops import COMPILED_REGION
from gradscope.report.header import interrupters
from gradscope.tables import LayerRow, RunData

# Keys of ``environment`` that matter to time or memory, and what they are called.
_ENVIRONMENT: Mapping[str, str] = {
    "device_name": "machine",
    "device": "device",
    "platform": "platform",
    "cpus": "CPUs",
    "threads": "threads",
    "dtype": "dtype",
    "torch": "torch",
    "cuda": "CUDA",
    "triton": "triton",
    "python": "python",
    "deterministic": "deterministic algorithms",
    "anomaly_mode": "anomaly mode",
    "tf32": "TF32",
    "world_size": "ranks",
    "mesh": "device mesh",
}

# What an absent key says, where that is known.
_ABSENT: Mapping[str, Any] = {"world_size": 1, "mesh": "none"}


def find_mismatches(before: RunData, after: RunData) -> tuple[Mismatch, ...]:
    """Each difference of machine, versions, settings, target or size; and runs that are partial."""
    return (
        *_partial(before, "before"),
        *_partial(after, "after"),
        *_environment(before, after),
        *_workload(before, after),
        *_shapes(before, after),
        *_layers(before, after),
    )


def _partial(run: RunData, name: str) -> Iterator[Mismatch]:
    if run.partial:
        steps = run.workload.steps
        count = f"{steps} measured {'step' if steps == 1 else 'steps'}"
        why = f"it ended early, after {count}"
        if who := interrupters(run.workload):
            why = f"{count}; {who} interrupted the rest"
        text = f"the run {name} is partial: {why}"
        yield Mismatch("partial", text)


def _environment(before: RunData, after: RunData) -> Iterator[Mismatch]:
    for key, name in _ENVIRONMENT.items():
        absent = _ABSENT.get(key)
        yield from _differ(name, before.environment.get(key, absent), after.environment.get(key, absent))


def _workload(before: RunData, after: RunData) -> Iterator[Mismatch]:
    one, other = before.workload, after.workload
    yield from _differ("gradscope", before.gradscope, after.gradscope)
    for name in ("target", "mode", "model", "parameters", "loss"):
        yield from _differ(name, getattr(one, name), getattr(other, name))
    if one.batch is not None and other.batch is not None:
        yield from _differ("batch", one.batch, other.batch)
    yield from _differ("warm-up steps", one.warmup, other.warmup)
    if before.memory is not None and after.memory is not None:
        yield from _differ("device of the memory", before.memory.device, after.memory.device)


def _differ(name: str, before: Any, after: Any) -> Iterator[Mismatch]:
    if before != after:
        yield Mismatch(name, f"{name}: {_text(before)} before, {_text(after)} after")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not known" if value is None or value == "" else str(value)


def _shapes(before: RunData, after: RunData) -> Iterator[Mismatch]:
    """Operations of the same layer and phase that were given tensors of other sizes: another batch, most likely."""
    # A gradient is written for each parameter of a layer, under one name: the shape is that of one of them. So it is
    # where one run has other calls of that name too, of which a compiled one has few.
    shapes = {
        (op.layer, op.phase, op.name, op.calls): op.shape for op in before.ops if op.shape and op.phase != "accumulate"
    }
    others = []
    for op in after.ops:
        shape = shapes.get((op.layer, op.phase, op.name, op.calls))
        if shape and op.shape and shape != op.shape:
            others.append((op, shape))
    if not others:
        return
    op, shape = others[0]
    where = f" of {op.layer}" if op.layer else ""
    text = f"input shapes: {op.name}{where} got {shape} before, {op.shape} after"
    yield Mismatch("input shapes", text + _more(len(others) - 1, "operation"))


def _layers(before: RunData, after: RunData) -> Iterator[Mismatch]:
    rows = {row.path: row for row in before.layers}
    pairs = [(rows[row.path], row) for row in after.layers if row.path in rows]
    yield from _layers_differ("parameters by layer", pairs, lambda row: str(row.parameters))
    # Inside of a compiled graph no module is called.
    if is_compiled(before) == is_compiled(after):
        called = [pair for pair in pairs if all(row.calls or row.estimated_ns is None for row in pair)]
    else:
        called = [pair for pair in pairs if pair[0].parent is None and all(row.calls for row in pair)]
    yield from _layers_differ("calls a step by layer", called, lambda row: units.calls(row.calls))


def is_compiled(run: RunData) -> bool:
    """Check that functions which Dynamo made ran in its steps."""
    return any(op.name.startswith(COMPILED_REGION) for op in run.ops)


def _layers_differ(
    what: str, pairs: Sequence[tuple[LayerRow, LayerRow]], value: Callable[[LayerRow], str]
) -> Iterator[Mismatch]:
    others = [(one, other) for one, other in pairs if value(one) != value(other)]
    if others:
        one, other = others[0]
        text = f"{what}: {one.path or 'the root'} has {value(one)} before, {value(other)} after"
        yield Mismatch(what, text + _more(len(others) - 1, "layer"))


def _more(count: int, thing: str) -> str:
    """``; 3 more layers differ``."""
    if not count:
        return ""
    return f"; {units.count(count)} more {thing}{' differs' if count == 1 else 's differ'}"
