"""One table of a run as CSV, for a spreadsheet: the columns of RUN.json, empty where not measured.

A spreadsheet runs what begins like a formula, so a text that does has an apostrophe before it; numbers stay numbers.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from gradscope.errors import UsageError
from gradscope.report.dataframes import TABLES, columns_of, rows_of
from gradscope.safe_text import visible
from gradscope.tables import Ledger, RunData

# What spreadsheets compute, also behind blanks and in the wide letters of East Asian keyboards.
_FORMULA = re.compile(r"[\t\r\n]|\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")

TABLE_NAMES = (*TABLES, "ledger")


def to_csv(run: RunData, table: str = "layers") -> str:
    """``table`` as CSV text with a header line; raises :class:`UsageError` for a name not in :data:`TABLE_NAMES`.

    Lists inside a cell are joined by blanks. A text that a spreadsheet would take for a formula has an apostrophe
    before it, and characters that are not printable are spelled out, ``\\x1b``.
    """
    if table not in TABLE_NAMES:
        raise UsageError(f"no table {table!r} in a report; there are {', '.join(TABLE_NAMES)}.")
    if table == "ledger":
        parts = ((name, getattr(run.ledger, name)) for name in Ledger.PARTS)
        return _write(["row", "ns"], parts)
    names = [field.name for field in dataclasses.fields(TABLES[table])]
    rows = ([getattr(row, name) for name in names] for row in rows_of(run, table))
    return _write(columns_of(TABLES[table]), rows)


def _write(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        numbers = all(isinstance(item, (int, float)) for item in value)
        text = " ".join(map(str, value))
        return text if numbers else _text(text)
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    return f"'{visible(text)}" if _FORMULA.match(text) else visible(text)
