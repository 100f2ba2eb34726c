"""What several tests of reports are run in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.strange_fixtures import NoPlotly


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(name="no_plotly")
def no_plotly_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Figures without plotly's own part, which is nine tenths of the time; tests/notebook draws them."""
    import plotly

    monkeypatch.setattr(plotly, "graph_objects", NoPlotly())
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", plotly.graph_objects)
    yield
