"""The object that :func:`gradscope.fit` returns: to read, print and save."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gradscope.fitting.result import FitData, FitRow, LayerGrowth
from gradscope.report.outfile import write_text
from gradscope.report.runfile import to_record

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from gradscope.document.parts import Document


class FitReport:
    """Which batch sizes fit.

    ``print(report)`` shows it; :attr:`table` and :attr:`layers` are pandas DataFrames whose columns docs/fit.md
    describes; ``data`` is the fit itself. Sizes are bytes.
    """

    def __init__(self, data: FitData) -> None:
        self.data = data

    def __repr__(self) -> str:
        sizes = ", ".join(str(row.batch_size) for row in self.data.rows)
        return f"<gradscope.FitReport of {self.data.target!r}: batch sizes {sizes}; largest {self.largest}>"

    def __str__(self) -> str:
        """The report as it is printed, 100 columns wide and without colour."""
        from gradscope.document.terminal import to_text

        return to_text(self.document())

    def document(self) -> Document:
        """What is shown, before it is known where."""
        from gradscope.fitting.document import fit_document

        return fit_document(self.data)

    @property
    def largest(self) -> int | None:
        """The largest batch size that fits; None where none does, or no device memory is known."""
        return self.data.largest

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """One row a batch size: the fields of ``rows`` in FIT.json; ``<NA>`` is what there is not."""
        return _frame(FitRow, self.data.rows)

    @functools.cached_property
    def layers(self) -> pd.DataFrame:
        """One row a layer: the fields of ``layers`` in FIT.json, the class's name in column ``class``."""
        return _frame(LayerGrowth, self.data.layers).rename(columns={"class_name": "class"})

    def print(self, console: Console | None = None) -> None:
        """Print on a rich ``console``, by default on stdout."""
        from gradscope.document.terminal import print_document

        print_document(self.document(), console)

    def to_json(self) -> str:
        """The fit as FIT.json's text."""
        return json.dumps(to_record(self.data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str], force: bool = False) -> Path:
        """Write FIT.json to ``path``, whole or not at all, and return the path.

        Raises :class:`~gradscope.errors.OutputError` if it cannot be written, or holds a file that gradscope did not
        write and ``force`` is not set.
        """
        return write_text(path, self.to_json(), force=force)


def _frame(kind: type, rows: object) -> pd.DataFrame:
    import pandas as pd

    assert isinstance(rows, (list, tuple))
    columns = {}
    for field in dataclasses.fields(kind):
        values = [getattr(row, field.name) for row in rows]
        is_integer = str(field.type).startswith("int")
        columns[field.name] = pd.Series(values, dtype="Int64" if is_integer else "object")
    return pd.DataFrame(columns)
