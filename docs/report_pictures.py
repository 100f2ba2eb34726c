"""The pictures of docs/report.md and docs/compare.md, from real runs.

python docs/report_pictures.py RUN.json                the page
python docs/report_pictures.py BEFORE.json AFTER.json  the page of a comparison
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import gradscope
from gradscope.report import load

FOLDER = Path(__file__).parent / "images"
PICTURES = {
    "report.png": ("light", ""),
    "report-zoom-dark.png": ("dark", "#zoom=layer/transformer.h.0&select=layer/transformer.h.0.mlp"),
}
COMPARED = {"compare-dark.png": ("dark", "#tab=ops")}


def main(runs: list[str]) -> None:
    """Write every picture of one run, or of two that are compared."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("no chromium on PATH: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        report = load(runs[0]) if len(runs) == 1 else gradscope.diff(*runs)
        path = report.to_html(Path(folder) / "run.html")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for name, (scheme, anchor) in (PICTURES if len(runs) == 1 else COMPARED).items():
            page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
            page.goto(path.as_uri() + anchor)
            page.wait_for_timeout(300)  # what lies below is drawn last
            page.screenshot(path=FOLDER / name)
            page.close()
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python docs/report_pictures.py RUN.json, or BEFORE.json AFTER.json")
    main(sys.argv[1:])
