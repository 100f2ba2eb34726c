"""A comparison as pandas DataFrames: one row a value of a layer, and one row a total."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradscope.compare.changes import Change, Comparison, Presence

if TYPE_CHECKING:
    import pandas as pd


def totals_frame(comparison: Comparison) -> pd.DataFrame:
    """Columns as in :func:`layers_frame` from ``metric`` on."""
    import pandas as pd

    return pd.DataFrame(_columns(comparison.totals))


def layers_frame(comparison: Comparison) -> pd.DataFrame:
    """``path``, ``class``, ``status``, ``metric``, ``unit``, ``before``, ``after``, ``difference``, ``ratio``,
    ``noise``, ``basis``, ``real``: integers that may be missing are ``Int64``, ``real`` is ``boolean``."""
    import pandas as pd

    pairs = [(layer, change) for layer in comparison.layers for change in layer.changes.values()]
    head = {
        "path": pd.Series([layer.path for layer, _ in pairs], dtype="object"),
        "class": pd.Series([layer.class_name for layer, _ in pairs], dtype="object"),
        "status": pd.Series([layer.status for layer, _ in pairs], dtype="object"),
    }
    return pd.DataFrame({**head, **_columns([change for _, change in pairs])})


def presence_frame(found: Sequence[Presence]) -> pd.DataFrame:
    """``address``, ``class``, ``paths``, ``layers``, ``backward_ns``, ``forward_ns``, ``saved_bytes``."""
    import pandas as pd

    return pd.DataFrame(
        {
            "address": pd.Series([one.address for one in found], dtype="object"),
            "class": pd.Series([one.class_name for one in found], dtype="object"),
            "paths": pd.Series([one.paths for one in found], dtype="object"),
            "layers": pd.Series([one.layers for one in found], dtype="int64"),
            "backward_ns": pd.Series([one.backward_ns for one in found], dtype="int64"),
            "forward_ns": pd.Series([one.forward_ns for one in found], dtype="int64"),
            "saved_bytes": pd.Series([one.saved_bytes for one in found], dtype="Int64"),
        }
    )


def _columns(changes: Sequence[Change]) -> dict[str, pd.Series]:
    import pandas as pd

    return {
        "metric": pd.Series([change.metric for change in changes], dtype="object"),
        "unit": pd.Series([change.unit for change in changes], dtype="object"),
        "before": pd.Series([change.before for change in changes], dtype="Int64"),
        "after": pd.Series([change.after for change in changes], dtype="Int64"),
        "difference": pd.Series([change.difference for change in changes], dtype="Int64"),
        "ratio": pd.Series([change.ratio for change in changes], dtype="float64"),
        "noise": pd.Series([change.noise for change in changes], dtype="Int64"),
        "basis": pd.Series([change.basis for change in changes], dtype="object"),
        "real": pd.Series([change.real for change in changes], dtype="boolean"),
    }
