"""From a finished run to something to read: terminal, RUN.json, CSV, Markdown, speedscope, DataFrames."""

from gradscope.report.report import Report, load
from gradscope.report.tree import ViewOptions

__all__ = ["Report", "ViewOptions", "load"]
