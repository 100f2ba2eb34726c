"""The object that :func:`gradscope.diff` returns: to read, print and save."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from gradscope.compare.build import compare
from gradscope.compare.changes import COLUMNS, Comparison, Presence
from gradscope.compare.difffile import DIFF_HEAD, to_json
from gradscope.compare.document import diff_document
from gradscope.compare.options import DiffOptions
from gradscope.document.parts import Document
from gradscope.errors import UsageError
from gradscope.report import Report
from gradscope.report.dataframes import frame_of, rows_frame
from gradscope.report.figures.options import FlameMetric
from gradscope.report.outfile import write_text
from gradscope.report.runfile import load_run
from gradscope.tables import RunData

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from rich.console import Console

    from gradscope.report.page.frame import PageFrame

Run: TypeAlias = Report | RunData | str | os.PathLike[str]


class Diff:
    """What changed from one run to another.

    ``print(diff)`` shows it; :attr:`totals`, :attr:`layers`, :attr:`new` and :attr:`removed` are pandas DataFrames
    whose columns docs/compare.md describes; ``data`` is the comparison itself. Times are integer nanoseconds a step.
    """

    def __init__(self, data: Comparison) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"<gradscope.Diff of {self.data.names[0]!r} and {self.data.names[1]!r}: {len(self.data.layers)} layers>"

    def __str__(self) -> str:
        """The comparison as it is printed, 100 columns wide and without colour."""
        from gradscope.document.terminal import to_text

        return to_text(self.document())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the runs differ in, other than their code; one sentence each."""
        return tuple(mismatch.text for mismatch in self.data.mismatches)

    @functools.cached_property
    def totals(self) -> pd.DataFrame:
        """One row a total: ``metric``, ``before``, ``after``, ``difference``, ``ratio``, ``noise``, ``real`` ..."""
        return frame_of(self.data.totals, COLUMNS)

    @functools.cached_property
    def layers(self) -> pd.DataFrame:
        """One row a layer and metric: ``path``, ``class``, ``status``, and the columns of :attr:`totals`.

        Integers that may be missing are ``Int64``, ``real`` is ``boolean``.
        """
        pairs = [(layer, change) for layer in self.data.layers for change in layer.changes.values()]
        head = frame_of([layer for layer, _ in pairs], dict.fromkeys(("path", "class_name", "status"), "object"))
        return head.join(frame_of([change for _, change in pairs], COLUMNS))

    @functools.cached_property
    def changed(self) -> pd.DataFrame:
        """The rows of :attr:`layers` that are real changes, the largest difference of each metric first."""
        frame = self.layers
        real = frame[frame["real"].fillna(False).astype(bool)]
        return real.sort_values(
            ["metric", "difference"],
            key=lambda column: column if column.name == "metric" else -column.abs(),
            kind="stable",
            ignore_index=True,
        )

    @functools.cached_property
    def new(self) -> pd.DataFrame:
        """Layers that only the run after has, the topmost ones with all below them."""
        return rows_frame(self.data.new, Presence)

    @functools.cached_property
    def removed(self) -> pd.DataFrame:
        """Layers that only the run before has, as in :attr:`new`."""
        return rows_frame(self.data.removed, Presence)

    def document(self, **options: Any) -> Document:
        """What is shown, before it is known where; ``options`` as in :meth:`print`."""
        return diff_document(self.data, DiffOptions(**options))

    def print(self, console: Console | None = None, **options: Any) -> None:
        """Print on a rich ``console``, by default on stdout.

        ``options``: ``sort`` ("step", "backward", "forward", "ratio", "memory"), ``top``, ``min_percent``,
        ``within_noise``. Raises :class:`~gradscope.errors.UsageError` for a value without a meaning.
        """
        from gradscope.document.terminal import print_document

        print_document(self.document(**options), console)

    def _repr_html_(self) -> str:
        """Warnings, totals and changed layers: what Jupyter, VS Code and Colab show."""
        from gradscope.document.html import to_fragment

        return to_fragment(self.document())

    def page(self, *, source: bool = True, height: int | None = None) -> PageFrame:
        """Show the interactive page of both runs in a notebook; arguments as of a report's ``page``."""
        from gradscope.compare.page import comparison_html
        from gradscope.report.page.frame import HEIGHT, PageFrame

        return PageFrame(comparison_html(self.data, source), height or HEIGHT)

    def flamegraph(
        self,
        metric: FlameMetric = "backward",
        *,
        merge: bool = True,
        min_percent: float = 0.1,
        max_frames: int = 300,
        title: str | None = None,
    ) -> go.Figure:
        """The layers of the run after as a plotly flame graph: blue is less, orange more, grey within noise.

        Removed layers are named below it. Arguments are those of
        :meth:`gradscope.report.report.Report.flamegraph`.

        Raises:
            UsageError: an argument has no meaning, or the metric was not measured in both runs.
        """
        from gradscope.compare.figures import flamegraph
        from gradscope.report.figures.options import FlameOptions

        return flamegraph(self.data, FlameOptions(metric, merge, min_percent, max_frames, title))

    def to_markdown(self, **options: Any) -> str:
        """Markdown for a pull request; ``options`` as in :meth:`print`."""
        from gradscope.document.markdown import to_markdown

        return to_markdown(self.document(**options))

    def to_json(self) -> str:
        """The comparison as DIFF.json's text."""
        return to_json(self.data)

    def save(self, path: str | os.PathLike[str], force: bool = False) -> Path:
        """Write DIFF.json to ``path``, whole or not at all, and return the path.

        Raises :class:`~gradscope.errors.OutputError` if it cannot be written, or holds a file that gradscope did not
        write as a comparison and ``force`` is not set.
        """
        return write_text(path, self.to_json(), DIFF_HEAD, force)

    def to_html(self, path: str | os.PathLike[str], source: bool = True, force: bool = False) -> Path:
        """Write the comparison as an interactive page to ``path``, one file that works offline, and return the path.

        ``source=False`` leaves the text of source lines out of it. Raises :class:`~gradscope.errors.OutputError` if it
        cannot be written, or holds a file that gradscope did not write as a page and ``force`` is not set.
        """
        from gradscope.compare.page import comparison_html
        from gradscope.report.page import HTML_HEAD

        return write_text(path, comparison_html(self.data, source), HTML_HEAD, force)


def diff(before: Run, after: Run) -> Diff:
    """Compare two runs: what changed from ``before`` to ``after``, and whether it is more than noise.

    Args:
        before: a Report, its data, or the path of a RUN.json.
        after: as before.

    Raises:
        RunFileError: a path is not that of a RUN.json.
        UsageError: a run is none of these.
    """
    one, other = read_run(before, "before"), read_run(after, "after")
    return Diff(compare(one[0], other[0], (one[1], other[1])))


def read_run(run: Run, name: str) -> tuple[RunData, str]:
    """The run, and what to call it: its file where it has one, else ``name``.

    Raises:
        RunFileError, UsageError: as :func:`diff`.
    """
    if isinstance(run, Report):
        return run.data, name if run.path is None else str(run.path)
    if isinstance(run, RunData):
        return run, name
    if isinstance(run, (str, os.PathLike)):
        return load_run(run), str(run)
    raise UsageError(
        f"{name}: a value of type {type(run).__name__} is not a run.\nGive a Report, or the path of a RUN.json."
    )
