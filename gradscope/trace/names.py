"""What a trace row is, decided from its name: once per distinct name, not per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradscope import markers
from gradscope.tables import Int8Column, Int32Column, IntColumn, RowKind

EVALUATE = "autograd::engine::evaluate_function: "
_ACCUMULATE = EVALUATE + "torch::autograd::AccumulateGrad"
_USER_SCOPE = 7  # at::RecordScope::USER_SCOPE: what torch.profiler.record_function writes
_MARKER_KINDS = {
    markers.CALL: RowKind.CALL,
    markers.BACKWARD: RowKind.BACKWARD,
    markers.RECOMPUTE: RowKind.RECOMPUTE,
    markers.STEP: RowKind.STEP,
    markers.LINE: RowKind.LINE,
    markers.FLOP: RowKind.FLOP,
    markers.PARAMETER: RowKind.PARAMETER,
}
_COMMUNICATION = ("c10d::", "nccl:", "gloo:", "mpi:", "record_param_comms", "_c10d_functional::")
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")


class _Interner(dict[str, int]):
    """Numbers texts in the order in which they are first asked for."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


class NameReader:
    """Interns the names of a trace and says what kind of row each is."""

    def __init__(self) -> None:
        self._index = _Interner()
        self._scopes: list[int] = []
        self.canonical: tuple[str, ...] = ()

    def read(self, events: Sequence[Any]) -> Int32Column:
        """Index of each event's name, in the order of the events."""
        if not events:
            return np.empty(0, np.int32)
        texts = map(type(events[0]).name, events)
        column = np.fromiter(map(self._index.__getitem__, texts), dtype=np.int32, count=len(events))
        first = np.empty(len(self._index), np.int64)
        first[column[::-1]] = np.arange(len(events))[::-1]  # of equal names the smallest row is written last
        self._scopes = [events[row].scope() for row in first.tolist()]
        return column

    def classify(self, name: Int32Column) -> tuple[Int8Column, IntColumn, Int32Column]:
        """``(kind, argument, name)`` of each row; markers lose their number from the name to the argument."""
        canonical: dict[str, int] = {}
        kinds = np.empty(len(self._index), np.int8)
        arguments = np.full(len(self._index), -1, np.int64)
        renamed = np.empty(len(self._index), np.int32)
        for text, number in self._index.items():
            kind, argument, short = classify_name(text, self._scopes[number])
            kinds[number], arguments[number] = kind, argument
            renamed[number] = canonical.setdefault(short, len(canonical))
        self.canonical = tuple(canonical)
        self._index.clear()
        return kinds[name], arguments[name], renamed[name]


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
    if text.startswith(_COMMUNICATION):
        return RowKind.COMMUNICATION, -1, text
    if text in {"aten::add", "aten::add_"}:
        return RowKind.ADD, -1, text
    if scope == _USER_SCOPE:
        return RowKind.ANNOTATION, -1, text
    return RowKind.OP, -1, text.rpartition("::")[2] if text.startswith("torch::autograd::") else text
