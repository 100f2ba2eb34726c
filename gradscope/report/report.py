"""The object users hold: a finished run, to read, print, save and convert."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradscope.report import runfile
from gradscope.report.figures.options import FlameMetric
from gradscope.report.outfile import write_text
from gradscope.report.tree import ViewOptions
from gradscope.tables import RunData

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from rich.console import Console

    from gradscope.document.parts import Document
    from gradscope.report.page.frame import PageFrame


class Report:
    """A profiled run.

    ``print(report)`` shows it; :attr:`layers`, :attr:`lines`, :attr:`ops` and the rest are pandas DataFrames whose
    columns docs/run-json.md describes; :meth:`save` and the ``to_`` methods write it. ``data`` is the run itself,
    ``path`` the RUN.json it was saved to or loaded from. Times are integer nanoseconds per step.
    """

    def __init__(self, data: RunData, path: str | os.PathLike[str] | None = None) -> None:
        self.data = data
        self.path = None if path is None else Path(path)

    def __repr__(self) -> str:
        work = self.data.workload
        partial = ", partial" if self.data.partial else ""
        return f"<gradscope.Report of {work.target!r}: {len(self.data.layers)} layers, {work.steps} steps{partial}>"

    def __str__(self) -> str:
        """The report as it is printed, 100 columns wide and without colour."""
        from gradscope.document.terminal import to_text

        return to_text(self.document())

    # -- tables ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def layers(self) -> pd.DataFrame:
        """One row a module: the fields of ``layers`` in RUN.json, the class's name in column ``class``."""
        return self._table("layers")

    @functools.cached_property
    def lines(self) -> pd.DataFrame:
        """One row a source line of the forward code: ``file``, ``line``, ``text``, ``backward_ns`` and so on."""
        return self._table("lines")

    @functools.cached_property
    def ops(self) -> pd.DataFrame:
        """One row an operation of one layer in one phase: ``layer``, ``phase``, ``name``, ``calls``, ``self_ns``."""
        return self._table("ops")

    @functools.cached_property
    def kernels(self) -> pd.DataFrame:
        """One row a device kernel of one layer in one phase; empty without a device."""
        return self._table("kernels")

    @functools.cached_property
    def findings(self) -> pd.DataFrame:
        """One row a finding: ``rule``, ``severity``, ``layers``, ``message`` and so on."""
        return self._table("findings")

    @functools.cached_property
    def ledger(self) -> pd.DataFrame:
        """What the backward pass is made of: columns ``row``, ``ns``, ``share``; ``ns`` adds up to the whole."""
        from gradscope.report.dataframes import ledger_frame

        return ledger_frame(self.data.ledger)

    @functools.cached_property
    def step(self) -> pd.DataFrame:
        """One row a phase of the step and one for all: ``phase``, ``ns``, ``share`` and the spread over steps."""
        from gradscope.report.dataframes import step_frame

        return step_frame(self.data)

    @functools.cached_property
    def memory(self) -> pd.DataFrame:
        """Who holds memory at its peak: ``owner``, ``category``, ``bytes``; ``bytes`` adds up to the peak.

        This frame and the six below are empty when memory was not measured; ``data.memory`` has the single figures.
        """
        return self._table("memory")

    @functools.cached_property
    def saved(self) -> pd.DataFrame:
        """What is saved for backward: ``layer``, ``line``, ``node``, ``what``, ``shape``, ``count``, ``bytes``."""
        return self._table("saved")

    @functools.cached_property
    def held(self) -> pd.DataFrame:
        """What is alive when backward begins though no node needs it: ``layer``, ``line``, ``op``, ``bytes``."""
        return self._table("held")

    @functools.cached_property
    def copies(self) -> pd.DataFrame:
        """Copies by layer, line and op: ``layer``, ``line``, ``phase``, ``op``, ``calls``, ``bytes``."""
        return self._table("copies")

    @functools.cached_property
    def retained(self) -> pd.DataFrame:
        """What a step leaves alive: ``layer``, ``line``, ``op``, ``phase``, ``count``, ``bytes``, ``grows``."""
        return self._table("retained")

    @functools.cached_property
    def timeline(self) -> pd.DataFrame:
        """Bytes allocated over the step that measured memory: ``ns`` from its start, ``bytes``."""
        return self._table("timeline")

    @functools.cached_property
    def phases(self) -> pd.DataFrame:
        """The stretches of that step: ``phase``, ``start_ns``, ``end_ns``."""
        return self._table("phases")

    def _table(self, name: str) -> pd.DataFrame:
        from gradscope.report.dataframes import table_frame

        return table_frame(self.data, name)

    # -- reading -----------------------------------------------------------------------------------------------------

    def document(self, **options: Any) -> Document:
        """What is shown, before it is known where; ``options`` as in :meth:`print`."""
        from gradscope.report.document import profile_document

        return profile_document(self.data, ViewOptions(**options), self.path)

    def print(self, console: Console | None = None, **options: Any) -> None:
        """Print the report on a rich ``console``, by default on stdout.

        ``options``: ``full``, ``show`` (names of sections to show in full: "findings", "layers", "lines", "ops",
        "kernels", "ledger", "device", "buckets", "memory", "saved", "retained", "held", "copies"), ``depth``,
        ``sort`` ("backward", "forward", "ratio", "memory"), ``top``, ``min_percent``, ``lines``. Raises
        :class:`~gradscope.errors.UsageError` for a value without a meaning.
        """
        from gradscope.document.terminal import print_document

        print_document(self.document(**options), console)

    # -- in a notebook -----------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        """The report in short: what Jupyter, VS Code and Colab show."""
        from gradscope.document.html import to_fragment

        return to_fragment(self.document())

    def page(self, *, source: bool = True, height: int | None = None) -> PageFrame:
        """Show the interactive page in a notebook; ``source=False`` leaves the text of source lines out.

        Args:
            source: whether source lines are in it.
            height: of the frame, in pixels.
        """
        from gradscope.report.page import to_html
        from gradscope.report.page.frame import HEIGHT, PageFrame

        return PageFrame(to_html([self.data], source), height or HEIGHT)

    def flamegraph(
        self,
        metric: FlameMetric = "backward",
        *,
        merge: bool = True,
        min_percent: float = 0.1,
        max_frames: int = 300,
        title: str | None = None,
    ) -> go.Figure:
        """A flame graph as a plotly figure: layers, and in each its own operations; a click zooms.

        Values are nanoseconds a step, or bytes, as in RUN.json; the outermost frame is the ledger's total.

        Args:
            metric: what the widths are parts of: "backward", "forward", "both", or what is "saved" for backward.
            merge: draw repeated blocks as one frame with their sum.
            min_percent: frames below this share of the whole are drawn together, as "other".
            max_frames: the most frames drawn, the largest first; the figure says what was left out.
            title: plain text instead of the usual title.

        Raises:
            UsageError: an argument has no meaning, or the metric was not measured.
        """
        from gradscope.report.figures.flame import flamegraph
        from gradscope.report.figures.options import FlameOptions

        return flamegraph(self.data, FlameOptions(metric, merge, min_percent, max_frames, title))

    def memory_timeline(self, *, title: str | None = None) -> go.Figure:
        """Memory over the step as a plotly figure: bytes allocated, phases, and the peak.

        Args:
            title: plain text instead of the usual title.

        Raises:
            UsageError: memory was not measured, or ``title`` is no text.
        """
        from gradscope.report.figures.memory import memory_timeline

        return memory_timeline(self.data, title)

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], force: bool = False) -> Path:
        """Write RUN.json to ``path``, whole or not at all, and return the path.

        Raises :class:`~gradscope.errors.OutputError` if it cannot be written, or holds a file that gradscope did not
        write and ``force`` is not set.
        """
        self.path = write_text(path, self.to_json(), force=force)
        return self.path

    def to_json(self) -> str:
        """The run as RUN.json's text."""
        return runfile.to_json(self.data)

    def to_csv(self, table: str = "layers") -> str:
        """One table as CSV, by the name it has here: "layers", "lines", "ledger", "saved" ...; else ``UsageError``."""
        from gradscope.report.csvfile import to_csv

        return to_csv(self.data, table)

    def to_markdown(self, **options: Any) -> str:
        """The report as Markdown for a pull request; ``options`` as in :meth:`print`."""
        from gradscope.document.markdown import to_markdown

        return to_markdown(self.document(**options))

    def to_perfetto(self) -> str:
        """The step over time, by layer, in the Trace Event Format, which Perfetto reads."""
        from gradscope.report.perfetto import to_perfetto

        return to_perfetto(self.data)

    def to_speedscope(self) -> str:
        """A flame graph of backward and forward in speedscope's file format."""
        from gradscope.report.speedscope import to_speedscope

        return to_speedscope(self.data)

    def to_html(self, path: str | os.PathLike[str], source: bool = True, force: bool = False) -> Path:
        """Write the interactive page to ``path``, one file that works offline, and return the path.

        ``source=False`` leaves the text of source lines out of it. Raises
        :class:`~gradscope.errors.OutputError` as :meth:`save` does.
        """
        from gradscope.report.page import HTML_HEAD, to_html

        return write_text(path, to_html([self.data], source), HTML_HEAD, force=force)


def load(path: str | os.PathLike[str]) -> Report:
    """The report saved at ``path``; raises :class:`~gradscope.errors.RunFileError` if it is not a RUN.json."""
    return Report(runfile.load_run(path), path)
