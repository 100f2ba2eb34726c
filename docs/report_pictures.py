"""The pictures of docs/report.md, from a real run: python docs/report_pictures.py RUN.json."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from gradscope.report import load

FOLDER = Path(__file__).parent / "images"
PICTURES = {
    "report.png": ("light", ""),
    "report-zoom-dark.png": ("dark", "#zoom=layer/transformer.h.0&select=layer/transformer.h.0.mlp"),
}


def main(run: str) -> None:
    """Write every picture."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("no chromium on PATH: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        path = load(run).to_html(Path(folder) / "run.html")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for name, (scheme, anchor) in PICTURES.items():
            page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
            page.goto(path.as_uri() + anchor)
            page.screenshot(path=FOLDER / name)
            page.close()
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/report_pictures.py RUN.json")
    main(sys.argv[1])
