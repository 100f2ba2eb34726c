"""How large the report page is, how soon it draws, and how long a zoom takes: GPT-2 sized and 70,000 frames.

Beside it plotly's icicle of the same run, every frame drawn, as ratios; plotly is given a minute for each page.

    python benchmarks/page.py [--frames 70000] [--no-plotly] [--json PATH]

Needs chromium on PATH and Python's playwright (the dev extra has it).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from _common import Result, finish, parser, print_table

from gradscope.report import Report
from gradscope.tables import RunData

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests import report_fixtures as fixtures
from tests.page import runs
from tests.page.conftest import FLAGS

LIMITS = {"GPT-2": (300_000, 150, 250), "large": (5_000_000, 1_000, 250)}  # bytes, ms, ms
TABS = 5  # of which the median counts: the first of a browser takes half as long again
MEDIUM = 10_000  # frames: where plotly still draws in seconds
PATIENCE_S = 60

PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()"

MEASURE = """async () => {
  const canvas = document.querySelector("canvas");
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const zooms = [];
  const time = async (action) => {
    const start = performance.now();
    action();
    await painted();
    zooms.push(performance.now() - start);
  };
  const box = canvas.getBoundingClientRect();
  const click = (row, x) => canvas.dispatchEvent(new MouseEvent("click", {
    clientX: box.left + x, clientY: box.top + row * 24 + 10, bubbles: true }));
  await time(() => document.querySelector("#merged").click());
  for (const row of [2, 3, 4, 1, 0, 3, 0]) await time(() => click(row, box.width * 0.4));
  return zooms;
}"""

# Plotly's zoom is an animation: the longest time between two of its pictures is what people feel.
MEASURE_PLOTLY = """async () => {
  let longest = 0;
  let last = performance.now();
  let running = true;
  const tick = (now) => {
    longest = Math.max(longest, now - last);
    last = now;
    if (running) requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
  const width = (frame) => frame.getBoundingClientRect().width;
  const frames = [...document.querySelectorAll(".trace.icicle .slice")].sort((a, b) => width(b) - width(a));
  const click = async (element) => {
    element?.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    await new Promise((done) => setTimeout(done, 1500));
  };
  await click(frames[Math.min(4, frames.length - 1)]);
  await click(document.querySelector(".trace.icicle .pathbar"));
  running = false;
  return Math.max(longest, performance.now() - last);
}"""


def large(frames: int) -> RunData:
    """A run of about ``frames`` frames in the flame without folding: blocks that all differ in size."""
    builder = fixtures.RunBuilder()
    builder.add("", "GPT", 31_000, 12_000, calls=1.0)
    builder.add("blocks", "ModuleList", calls=0.0)
    made = 0
    block = 0
    while made < frames:
        path = f"blocks.{block}"
        builder.add(path, "Block", 900, 700, parameters=block)
        made += 3
        for i in range(12):
            builder.add(f"{path}.attn{i}", "Attention", 9_000 + 37 * block, 4_000 + i, accumulate=50, parameters=block)
            builder.add(f"{path}.attn{i}.proj", "Linear", 3_000 + i, 1_000 + block, parameters=64)
            made += 8 + 5
        block += 1
    return builder.build(engine=1_000_000, outside=50_000)


def opened(browser: Any, path: Path) -> Any:
    """A tab with the page, once it is drawn."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_selector("#rows tr")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
    return page


def first_paint(browser: Any, path: Path) -> float:
    """Milliseconds until the first contentful paint in a fresh tab."""
    page = opened(browser, path)
    paint: float = page.evaluate(PAINTED)
    page.close()
    return paint


def measure(browser: Any, name: str, run: RunData, folder: Path) -> dict[str, float]:
    """The page of a run, opened in fresh tabs."""
    path = Report(run).to_html(folder / f"{name}.html", force=True)
    paints = [first_paint(browser, path) for _ in range(TABS - 1)]
    page = opened(browser, path)
    paints.append(page.evaluate(PAINTED))
    zooms = page.evaluate(MEASURE)
    page.close()
    return {
        "bytes": path.stat().st_size,
        "first_draw_ms": median(paints),
        "unfold_ms": zooms[0],
        "zoom_ms": max(zooms[1:]),
    }


def measure_plotly(chromium: Any, program: str, name: str, run: RunData, folder: Path) -> dict[str, float]:
    """Plotly's icicle with every frame of the same run, in a browser of its own.

    What takes longer than :data:`PATIENCE_S` is missing: a page that is frozen does not answer.
    """
    from playwright.sync_api import TimeoutError as TooLong

    figure = Report(run).flamegraph(merge=False, min_percent=0, max_frames=sys.maxsize)
    path = folder / f"{name}-plotly.html"
    figure.write_html(path, include_plotlyjs=True)
    found = {"bytes": float(path.stat().st_size), "frames": float(len(figure.data[0].ids))}
    browser = chromium.launch(executable_path=program, args=list(FLAGS))
    try:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(1_000 * PATIENCE_S)
        page.goto(path.as_uri())
        page.wait_for_selector(".trace.icicle .slice", state="attached")
        found["first_draw_ms"] = page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"
        )
        found["zoom_ms"] = page.evaluate(MEASURE_PLOTLY)
    except TooLong:
        pass
    finally:
        browser.close()
    return found


def blank(browser: Any, folder: Path) -> float:
    """Milliseconds until a page of one word is drawn, as a median: no page is sooner in this browser."""
    path = folder / "blank.html"
    path.write_text('<!doctype html><title>blank</title><table id="rows"><tr><td>blank</table>', encoding="utf-8")
    return median([first_paint(browser, path) for _ in range(TABS)])


def page_results(name: str, page: dict[str, float]) -> list[Result]:
    """The page's own numbers beside their goals, where it has some."""
    size, draw, zoom = LIMITS.get(name, (None, None, None))
    return [
        Result(f"{name}: file", page["bytes"] / 1e6, "MB", None if size is None else size / 1e6),
        Result(f"{name}: first draw", page["first_draw_ms"], "ms", draw),
        Result(f"{name}: unfold", page["unfold_ms"], "ms"),
        Result(f"{name}: longest zoom", page["zoom_ms"], "ms", zoom),
    ]


def plotly_results(name: str, page: dict[str, float], plotly: dict[str, float]) -> list[Result]:
    """Plotly's numbers over the page's; where plotly did not answer, the ratio is more than the one given."""
    results = [
        Result(f"{name}: frames in plotly", plotly["frames"], "frames"),
        Result(f"{name}: plotly's file over the page's", plotly["bytes"] / page["bytes"], "x"),
    ]
    for key, words in (("first_draw_ms", "first draw"), ("zoom_ms", "longest freeze in a zoom")):
        if key in plotly:
            results.append(Result(f"{name}: plotly's {words} over the page's", plotly[key] / page[key], "x"))
        elif key == "first_draw_ms":
            least = 1_000 * PATIENCE_S / page[key]
            results.append(Result(f"{name}: plotly over {PATIENCE_S} s: {words} at least", least, "x"))
    return results


def main() -> int:
    """Measure and print; the exit code is 1 where a goal is missed."""
    options = parser(__doc__)
    options.add_argument("--frames", type=int, default=70_000, help="of the large page")
    options.add_argument("--no-plotly", action="store_true", help="measure the page alone")
    arguments = options.parse_args()
    program = shutil.which("chromium")
    if program is None:
        sys.exit("no chromium on PATH: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    runs_by_name = {"GPT-2": runs.gpt(), "medium": large(MEDIUM), "large": large(arguments.frames)}
    results: list[Result] = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        results.append(Result("a page of one word: first draw", blank(browser, Path(folder)), "ms"))
        pages = {name: measure(browser, name, run, Path(folder)) for name, run in runs_by_name.items()}
        browser.close()
        for name, run in runs_by_name.items():
            results += page_results(name, pages[name])
            if not arguments.no_plotly:
                plotly = measure_plotly(playwright.chromium, program, name, run, Path(folder))
                results += plotly_results(name, pages[name], plotly)
    print_table("The report page, and plotly's icicle of the same run", results)
    return finish("page", results, "cpu", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
