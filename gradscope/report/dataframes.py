"""The tables of a run as pandas DataFrames: one row a layer, line, operation, kernel or part, and those of memory.

Columns are named as in RUN.json, so ``class`` for the class's name. Integers that may be missing are of pandas'
``Int64``, where ``<NA>`` is not measured and ``0`` is a measured zero.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from gradscope.report.schema import RENAMED
from gradscope.tables import Ledger, MemoryInfo, RunData

if TYPE_CHECKING:
    import pandas as pd

_OF_RUN = ("layers", "lines", "ops", "kernels", "findings")
# Tables of RUN.json's ``memory``, by the name that they have there.
_OF_MEMORY = {"memory": "at_peak"} | {
    name: name for name in ("saved", "held", "copies", "retained", "timeline", "phases")
}
# The dataclass of the rows of each table, as the run is annotated.
TABLES: Mapping[str, type] = {name: get_args(get_type_hints(RunData)[name])[0] for name in _OF_RUN} | {
    name: get_args(get_type_hints(MemoryInfo)[field])[0] for name, field in _OF_MEMORY.items()
}


def columns_of(cls: type) -> list[str]:
    """Names of the columns of one of :data:`TABLES`."""
    return [RENAMED.get(field.name, field.name) for field in dataclasses.fields(cls)]


def rows_of(run: RunData, table: str) -> Sequence[Any]:
    """The rows of one of :data:`TABLES`; none where it was not measured."""
    if table not in _OF_MEMORY:
        return getattr(run, table)
    return () if run.memory is None else getattr(run.memory, _OF_MEMORY[table])


def table_frame(run: RunData, table: str) -> pd.DataFrame:
    """The DataFrame of one of :data:`TABLES`; with all its columns also when it has no row."""
    return rows_frame(rows_of(run, table), TABLES[table])


def rows_frame(rows: Sequence[Any], cls: type) -> pd.DataFrame:
    """A column for each field of ``cls``, the dataclass of the rows."""
    hints = get_type_hints(cls)
    return frame_of(rows, {field.name: _dtype(hints[field.name]) for field in dataclasses.fields(cls)})


def frame_of(rows: Sequence[Any], types: Mapping[str, str]) -> pd.DataFrame:
    """A column for each of these attributes of the rows, of that type."""
    import pandas as pd

    return pd.DataFrame(
        {
            RENAMED.get(name, name): pd.Series([getattr(row, name) for row in rows], dtype=kind)
            for name, kind in types.items()
        }
    )


def ledger_frame(ledger: Ledger) -> pd.DataFrame:
    """Columns ``row`` (name as in RUN.json), ``ns`` and ``share`` (0..1); the rows add up to the backward pass."""
    import pandas as pd

    values = [getattr(ledger, name) for name in Ledger.PARTS]
    whole = ledger.backward_ns
    return pd.DataFrame(
        {
            "row": list(Ledger.PARTS),
            "ns": pd.Series(values, dtype="int64"),
            "share": pd.Series([value / whole if whole else 0.0 for value in values], dtype="float64"),
        }
    )


def step_frame(run: RunData) -> pd.DataFrame:
    """One row a phase, and ``wall`` for all of them.

    Columns ``phase``, ``ns``, ``share`` of the step (0..1), and the spread over the measured steps where it is known:
    ``min_ns``, ``median_ns``, ``max_ns``, ``std_ns``.
    """
    import pandas as pd

    step = run.step
    phases = ("forward", "backward", "optimizer", "other", "wall")
    values = [getattr(step, f"{phase}_ns") for phase in phases]
    frame = pd.DataFrame(
        {
            "phase": list(phases),
            "ns": pd.Series(values, dtype="int64"),
            "share": pd.Series([value / step.wall_ns if step.wall_ns else 0.0 for value in values], dtype="float64"),
        }
    )
    for name in ("min_ns", "median_ns", "max_ns", "std_ns"):
        spreads = [getattr(step.spread[phase], name) if phase in step.spread else None for phase in phases]
        frame[name] = pd.Series(spreads, dtype="Int64")
    return frame


def _dtype(annotation: Any) -> str:
    arguments = get_args(annotation)
    optional = types.NoneType in arguments
    kinds = set(arguments) - {types.NoneType} if optional else {annotation}
    if kinds == {int}:
        return "Int64" if optional else "int64"
    if kinds == {bool}:
        return "boolean" if optional else "bool"
    return "float64" if kinds == {float} else "object"
