"""What a trace row is, decided from its name: once per distinct name, not per row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gradscope import markers, ops
from gradscope.tables import Int8Column, Int32Column, IntColumn, RowKind

EVALUATE = "autograd::engine::evaluate_function: "
_ACCUMULATE = EVALUATE + "torch::autograd::AccumulateGrad"
USER_SCOPE = 7  # at::RecordScope::USER_SCOPE: what torch.profiler.record_function writes
_MARKER_KINDS = {
    markers.CALL: RowKind.CALL,
    markers.BACKWARD: RowKind.BACKWARD,
    markers.RECOMPUTE: RowKind.RECOMPUTE,
    markers.STEP: RowKind.STEP,
    markers.LINE: RowKind.LINE,
    markers.FLOP: RowKind.FLOP,
    markers.PARAMETER: RowKind.PARAMETER,
    markers.SEEN: RowKind.SEEN,
    markers.OWN: RowKind.OWN,
    markers.HOOK: RowKind.HOOK,
}
_GRAPH = re.compile(re.escape(markers.GRAPH) + r"(\d+)")
_GENERATED = re.compile(r"graph_\d+_(?=cpp_)")  # Inductor's kernels on the CPU: the number tells nothing
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")


@dataclass(frozen=True, slots=True)
class ClassifiedNames:
    """What each distinct name of a trace stands for; one entry a name."""

    kind: Int8Column
    argument: IntColumn
    renamed: Int32Column  # index into ``canonical``
    canonical: tuple[str, ...]


def classify_names(names: Iterable[str], scopes: Sequence[int]) -> ClassifiedNames:
    """Classify every distinct name; markers lose their number from the name to the argument."""
    canonical: dict[str, int] = {}
    kinds = np.empty(len(scopes), np.int8)
    arguments = np.full(len(scopes), -1, np.int64)
    renamed = np.empty(len(scopes), np.int32)
    for number, (text, scope) in enumerate(zip(names, scopes, strict=True)):
        kinds[number], arguments[number], short = classify_name(text, scope)
        renamed[number] = canonical.setdefault(short, len(canonical))
    return ClassifiedNames(kinds, arguments, renamed, tuple(canonical))


def classify_name(text: str, scope: int = 0) -> tuple[RowKind, int, str]:
    """``(kind, argument, canonical name)`` of one row's name.

    Canonical: markers without their number, backward nodes without the engine's prefix and C++ namespaces.
    """
    if text.startswith(markers.PREFIX):
        head, _, number = text.rpartition(":")
        kind = _MARKER_KINDS.get(head + ":")
        if kind is not None:
            return kind, int(number), head
    if text.startswith(EVALUATE):
        # The profiler cuts nothing here, but C++ nodes carry their namespace.
        kind = RowKind.ACCUMULATE if text.startswith(_ACCUMULATE) else RowKind.NODE
        return kind, -1, text[len(EVALUATE) :].rpartition("::")[2]
    if text.startswith(_OPTIMIZER):
        return RowKind.OPTIMIZER, -1, text
    if text.startswith(ops.COMPILED_GRAPH) and (graph := _GRAPH.search(text)):
        return RowKind.GRAPH, int(graph[1]), ops.COMPILED_GRAPH
    if (kernel := _GENERATED.match(text)) is not None:
        return RowKind.OP, -1, text[kernel.end() :]
    if text.startswith(ops.COLLECTIVES):
        return RowKind.COMMUNICATION, -1, text
    if text.startswith(ops.SHARDING):
        return RowKind.SHARDING, -1, text
    if text in {"aten::add", "aten::add_"}:
        return RowKind.ADD, -1, text
    if scope == USER_SCOPE:
        return RowKind.ANNOTATION, -1, text
    return RowKind.OP, -1, text.rpartition("::")[2] if text.startswith("torch::autograd::") else text
