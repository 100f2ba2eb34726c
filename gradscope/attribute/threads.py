"""What ran in other threads than the one whose steps count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradscope.attribute.rows import Skeleton
from gradscope.tables import PassNote, RowKind


def in_other_threads(skeleton: Skeleton, notes: Sequence[PassNote]) -> tuple[str, ...]:
    """Name which of "forward" and "backward" other threads ran: what they allocate torch's profiler does not record.

    It does record what the engine's own threads allocate for a pass of the thread that ends the steps.

    Args:
        notes: one for each backward pass, in the order in which they began.
    """
    table = skeleton.table
    trains = np.unique(table.thread[table.kind == RowKind.STEP])
    elsewhere = ~np.isin(table.thread, trains)
    calls = (table.kind == RowKind.CALL) & elsewhere & ~skeleton.in_backward
    layers = skeleton.calls.label[table.argument[calls]] >= 0
    windows = np.flatnonzero(table.kind == RowKind.BACKWARD)
    windows = windows[np.argsort(table.start_ns[windows], kind="stable")]
    nested = np.array([number < len(notes) and notes[number].nested for number in range(len(windows))], bool)
    found = {"forward": bool(layers.any()), "backward": bool(elsewhere[windows[~nested]].any())}
    return tuple(name for name, ran in found.items() if ran)
