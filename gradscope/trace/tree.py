"""Reads CPU events by walking kineto's event trees: 55 bytes an event at the peak, where the list of events takes 350.

The trees do not say which thread ran the forward of a backward node. Where only one thread has drawn sequence numbers
it can be no other; where several have, :func:`read_tree` gives up and the list has to be read.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from gradscope.tables import IntColumn
from gradscope.trace.columns import Interner, RawColumns

_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION
_EVALUATE = "autograd::engine::evaluate_function: "


def read_tree(roots: list[Any]) -> tuple[RawColumns, Interner, list[int]] | None:
    """Columns, names and the scope of each name; None where several threads ran forward. Empties ``roots``."""
    names, scopes = Interner(), array("b")
    name, thread, start, end, sequence = array("i"), array("i"), array("q"), array("q"), array("q")
    stack = roots
    while stack:
        event = stack.pop()
        text = event.name
        fields = event.extra_fields
        number = names[text]
        if number == len(scopes):
            scopes.append(int(fields.scope))
        name.append(number)
        start.append(event.start_time_ns)
        end.append(event.end_time_ns)
        thread.append(event.start_tid)
        sequence.append(fields.sequence_number)
        children = event.children
        if children:
            stack.extend(children)
    is_backward = np.array(
        [scope == _BACKWARD_SCOPE or text.startswith(_EVALUATE) for text, scope in zip(names, scopes, strict=True)],
        bool,
    )
    numbers: IntColumn = np.frombuffer(sequence, np.int64)
    threads = np.frombuffer(thread, np.int32)
    name_column = np.frombuffer(name, np.int32)
    backward = is_backward[name_column]
    drew = np.unique(threads[(numbers >= 0) & ~backward])
    if len(drew) > 1:
        return None
    made_by = int(drew[0]) if len(drew) else 0
    columns = RawColumns(
        name=name_column,
        start_ns=np.frombuffer(start, np.int64),
        end_ns=np.frombuffer(end, np.int64),
        thread=threads,
        sequence=numbers,
        forward_thread=np.where(backward & (numbers >= 0), made_by, 0).astype(np.int32),
    )
    return columns, names, scopes.tolist()
