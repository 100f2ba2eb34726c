"""A headless Chromium for the tests of the page, and what each page did."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradscope.report import Report
from gradscope.tables import RunData

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One browser for all tests; skipped where there is none, and failed where CI promises one."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        reason = "no chromium on PATH: apt-get install chromium (make browser does, as root)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@dataclasses.dataclass
class Opened:
    """A page that is open, and everything it should not have done."""

    page: Any
    complaints: list[str]

    def state(self) -> str:
        """What the address keeps."""
        return str(self.page.evaluate("location.hash"))

    def values(self, column: int) -> list[float]:
        """Exact values of a column of the table, by the page's own DOM."""
        cells = self.page.query_selector_all(f"#rows tbody tr > :nth-child({column})")
        return [float(cell.get_attribute("data-value") or 0) for cell in cells]

    def frame(self, text: str) -> tuple[float, float]:
        """Where the flame's frame of the selected breadcrumb would be: the middle of the row that ``text`` counts."""
        box = self.page.locator("canvas").bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + 24 * int(text) + 11


Open = Callable[..., Opened]


@pytest.fixture
def open_page(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """Write a run's page, or take one, and open it; the test fails if it complained, or asked for anything."""
    opened: list[Opened] = []
    contexts: list[Any] = []

    def open_it(run: RunData | Path, anchor: str = "", size: tuple[int, int] = (1400, 900), **options: Any) -> Opened:
        written = {key: value for key, value in options.items() if key == "source"}
        path = run if isinstance(run, Path) else Report(run).to_html(tmp_path / "run.html", **written)
        scheme = options.get("scheme", "light")
        context = chromium.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        page, complaints = context.new_page(), []
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: None if request.url.startswith(path.as_uri()) else complaints.append(request.url[:200]),
        )
        page.goto(path.as_uri() + anchor)
        opened.append(Opened(page, complaints))
        return opened[-1]

    yield open_it
    found = [
        complaint for one in opened for complaint in one.complaints if not complaint.startswith(("blob:", "data:"))
    ]
    for context in contexts:
        context.close()
    assert not found
