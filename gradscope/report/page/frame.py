"""A page as the output of a notebook's cell."""

from __future__ import annotations

import html
from dataclasses import dataclass

HEIGHT = 760  # pixels: the flame, and a table below it


@dataclass(frozen=True, slots=True)
class PageFrame:
    """A page in a frame of ``height`` pixels, as wide as the cell: what Jupyter, VS Code and Colab show.

    The page may run its script and save files; it sees nothing of the notebook.
    """

    page: str
    height: int = HEIGHT

    def __repr__(self) -> str:
        return f"<gradscope page of {len(self.page) // 1000} kB: the last value of a notebook's cell shows it>"

    def _repr_html_(self) -> str:
        source = html.escape(self.page)
        rights = 'sandbox="allow-scripts allow-downloads" allow="clipboard-write"'
        return f'<iframe {rights} style="width:100%;height:{self.height}px;border:0" srcdoc="{source}"></iframe>'
