"""Opens figures in headless Chromium and says what is drawn: python -m tests.notebook.browser CHROMIUM WIDTH PAGE ...

A process of its own: playwright's synchronous interface runs once in a thread, and other tests hold it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.page.conftest import FLAGS

TEXTS = """() => [...document.querySelectorAll("svg text")].map((element) => {
  const box = element.getBoundingClientRect();
  const matrix = element.getScreenCTM();
  const size = parseFloat(getComputedStyle(element).fontSize) * Math.hypot(matrix.a, matrix.b);
  return { text: element.textContent, size, frame: element.closest(".slice") !== null,
           hover: element.closest(".hoverlayer") !== null,
           left: box.left, top: box.top, right: box.right, bottom: box.bottom };
}).filter((one) => !one.hover && one.right > one.left && one.size > 0 && one.text.trim())"""
SLICES = """() => [...document.querySelectorAll(".trace.icicle .slice path.surface")].map((element) => {
  const box = element.getBoundingClientRect();
  return { left: box.left, top: box.top, right: box.right, bottom: box.bottom };
})"""


def look(browser: Any, path: str, width: int) -> dict[str, Any]:
    """Texts and frames as drawn, texts after a click on the fourth frame, the first hover text, and complaints."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    uri = Path(path).as_uri()
    page.on(
        "request",
        lambda request: None if request.url.startswith((uri, "data:", "blob:")) else complaints.append(request.url),
    )
    page.goto(uri)
    page.wait_for_selector("svg text" if "js-plotly-plot" in page.content() else "body", state="attached")
    page.wait_for_timeout(300)
    texts, slices = page.evaluate(TEXTS), page.evaluate(SLICES)
    hover, zoomed = "", []
    if len(slices) > 3:
        box = slices[3]
        at = (box["left"] + 4, (box["top"] + box["bottom"]) / 2)
        page.mouse.move(*at)
        page.wait_for_timeout(300)
        hover = page.evaluate(
            "[...document.querySelectorAll('.hoverlayer tspan.line')].map(e => e.textContent).join('|')"
        )
        page.mouse.click(*at)
        page.wait_for_timeout(1300)
        zoomed = page.evaluate(TEXTS)
    found = {
        "texts": texts,
        "slices": slices,
        "hover": hover,
        "zoomed": zoomed,
        "complaints": complaints,
        "hacked": page.evaluate("window.hacked ?? 0"),
        "body": page.inner_text("body"),
        "colour": page.evaluate("[...document.querySelectorAll('td')].map(e => getComputedStyle(e).color)"),
        "frames": [frame.inner_text("body") for frame in page.frames[1:]],
        "elements": page.evaluate("document.querySelectorAll('script, style, link, img, iframe, a').length"),
    }
    page.close()
    return found


def main() -> None:
    """Write what was seen as JSON."""
    program, width, *paths = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        found = {Path(path).stem: look(browser, path, int(width)) for path in paths}
        browser.close()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
