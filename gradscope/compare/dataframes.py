"""A comparison as pandas DataFrames: one row a value of a layer, and one row a total."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradscope.compare.changes import COLUMNS, Comparison, Presence
from gradscope.report.dataframes import frame_of, rows_frame

if TYPE_CHECKING:
    import pandas as pd


def totals_frame(comparison: Comparison) -> pd.DataFrame:
    """Columns as in :func:`layers_frame` from ``metric`` on."""
    return frame_of(comparison.totals, COLUMNS)


def layers_frame(comparison: Comparison) -> pd.DataFrame:
    """``path``, ``class``, ``status``, ``metric``, ``unit``, ``before``, ``after``, ``difference``, ``ratio``,
    ``noise``, ``basis``, ``real``: integers that may be missing are ``Int64``, ``real`` is ``boolean``."""
    pairs = [(layer, change) for layer in comparison.layers for change in layer.changes.values()]
    head = frame_of([layer for layer, _ in pairs], dict.fromkeys(("path", "class_name", "status"), "object"))
    return head.join(frame_of([change for _, change in pairs], COLUMNS))


def presence_frame(found: Sequence[Presence]) -> pd.DataFrame:
    """``address``, ``class``, ``paths``, ``layers``, ``backward_ns``, ``forward_ns``, ``saved_bytes``."""
    return rows_frame(found, Presence)
