"""The pictures of docs/notebooks.md, from a real run: python docs/notebook_pictures.py RUN.json."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from gradscope.report import Report, load

FOLDER = Path(__file__).parent / "images"
WIDTH = 1160


def pages(report: Report) -> dict[str, str]:
    """HTML of each picture, by its name."""
    table = f'<meta charset="utf-8"><body style="margin:12px">{report._repr_html_()}'
    figures = {"notebook-flamegraph.png": report.flamegraph()}
    if report.data.memory is not None:
        figures["notebook-memory.png"] = report.memory_timeline()
    drawn = {name: figure.to_html(include_plotlyjs=True) for name, figure in figures.items()}
    return {"notebook-table.png": table, **drawn}


def main(run: str) -> None:
    """Write every picture, as high as what is in it."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("no chromium on PATH: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for name, content in pages(load(run)).items():
            path = Path(folder) / "page.html"
            path.write_text(content, encoding="utf-8")
            page = browser.new_page(viewport={"width": WIDTH, "height": 200})
            page.goto(path.as_uri())
            page.wait_for_timeout(500)
            page.screenshot(path=FOLDER / name, full_page=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/notebook_pictures.py RUN.json")
    main(sys.argv[1])
