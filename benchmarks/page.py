"""How large the report page is, how soon it draws, and how long a zoom takes: GPT-2 sized and 70,000 frames.

    python benchmarks/page.py [--frames 70000] [--json PATH]

Needs chromium on PATH and Python's playwright (the dev extra has it).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from gradscope.report import Report
from gradscope.tables import RunData

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests import report_fixtures as fixtures
from tests.page import runs
from tests.page.conftest import FLAGS

LIMITS = {"GPT-2": (300_000, 300, 250), "large": (5_000_000, 2_000, 250)}  # bytes, ms, ms

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


def measure(browser: object, name: str, run: RunData, folder: Path) -> dict[str, object]:
    """One page, opened in a fresh tab."""
    path = Report(run).to_html(folder / f"{name}.html", force=True)
    page = browser.new_page(viewport={"width": 1400, "height": 900})  # type: ignore[attr-defined]
    page.goto(path.as_uri())
    page.wait_for_selector("#rows tr")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()")
    zooms = page.evaluate(MEASURE)
    page.close()
    return {
        "page": name,
        "frames": len(run.layers) + len({(row.layer, row.phase, row.name) for row in run.ops}),
        "bytes": path.stat().st_size,
        "first_draw_ms": round(paint),
        "unfold_ms": round(zooms[0]),
        "longest_zoom_ms": round(max(zooms[1:])),
    }


def main() -> None:
    """Measure and print; the exit code is 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=70_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        sys.exit("no chromium on PATH: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        results = [
            measure(browser, "GPT-2", runs.gpt(), Path(folder)),
            measure(browser, "large", large(options.frames), Path(folder)),
        ]
        browser.close()
    missed = False
    for result in results:
        limits = dict(zip(("bytes", "first_draw_ms", "longest_zoom_ms"), LIMITS[str(result["page"])], strict=True))
        over = [key for key, limit in limits.items() if int(str(result[key])) > limit]
        missed = missed or bool(over)
        print(json.dumps(result), "over the limit: " + ", ".join(over) if over else "")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
