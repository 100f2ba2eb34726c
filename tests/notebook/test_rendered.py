"""The figures and tables of a notebook in a real browser: what is drawn can be read, and hostile names do nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradscope.compare import diff
from gradscope.report import Report
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures
from tests.page import runs

pytestmark = pytest.mark.browser

LEAST_SIZE = 9  # pixels
NARROW = 700


def _figures() -> dict[str, Any]:
    small, large = memory_fixtures.gpt(12), fixtures.gpt(200)
    return {
        "small": Report(small).flamegraph(),
        "small-saved": Report(small).flamegraph("saved"),
        "large": Report(large).flamegraph("both"),
        "large-each": Report(large).flamegraph(merge=False),
        "wide": Report(fixtures.many_modules(1_000)).flamegraph(),
        "hostile": Report(runs.hostile()).flamegraph(),
        "memory": Report(small).memory_timeline(),
        "hostile-memory": Report(runs.hostile()).memory_timeline(),
        "diff": diff(fixtures.gpt(12), fixtures.gpt(12, slow_block=4)).flamegraph(merge=False),
        "hostile-diff": diff(fixtures.gpt(2), runs.hostile()).flamegraph(),
    }


FLAMES = ["small", "small-saved", "large", "large-each", "wide", "hostile", "diff", "hostile-diff"]
NARROWED = ["small", "memory"]
ALL = [*FLAMES, "memory", "hostile-memory", *(f"narrow {name}" for name in NARROWED)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the browser saw of every figure, 1000 pixels wide, and of the tables on black and on white."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        reason = "no chromium on PATH: apt-get install chromium (make browser does, as root)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("figures")
    for name, figure in _figures().items():
        figure.write_html(folder / f"{name}.html", include_plotlyjs=True)
    for name, style in (("light", "background:#fff;color:#000"), ("dark", "background:#111;color:#eee")):
        table = Report(runs.hostile())._repr_html_() + diff(fixtures.gpt(2), runs.hostile())._repr_html_()
        (folder / f"table-{name}.html").write_text(f'<meta charset="utf-8"><body style="{style}">{table}')
    frames = (
        Report(memory_fixtures.gpt(12)).page()._repr_html_()
        + diff(fixtures.gpt(2), runs.hostile()).page()._repr_html_()
    )
    (folder / "frames.html").write_text(f'<meta charset="utf-8"><body>{frames}')
    paths = [str(path) for path in sorted(folder.glob("*.html"))]
    narrow = _look(program, NARROW, [str(folder / f"{name}.html") for name in NARROWED])
    return _look(program, 1000, paths) | {f"narrow {name}": narrow[name] for name in NARROWED}


def _look(program: str, width: int, paths: list[str]) -> Any:
    command = [sys.executable, "-m", "tests.notebook.browser", program, str(width), *paths]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _overlaps(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs that cover more than a pixel of each other."""
    return [
        (one["text"], other["text"])
        for one, other in itertools.combinations(texts, 2)
        if min(one["right"], other["right"]) - max(one["left"], other["left"]) > 1
        and min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > 3  # boxes hold the space of a line
    ]


@pytest.mark.parametrize("name", ALL)
def test_labels_are_legible(seen: dict[str, Any], name: str) -> None:
    for texts in (seen[name]["texts"], seen[name]["zoomed"]):
        assert [one for one in texts if one["size"] < LEAST_SIZE] == []
        assert _overlaps(texts) == []
    assert seen[name]["texts"]


@pytest.mark.parametrize("name", ALL)
def test_nothing_complains_and_nothing_runs(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["complaints"] == []
    assert seen[name]["hacked"] == 0


@pytest.mark.parametrize("name", FLAMES)
def test_labels_lie_inside_their_frames(seen: dict[str, Any], name: str) -> None:
    frames = seen[name]["slices"]
    for text in (one for one in seen[name]["texts"] if one["frame"]):
        assert any(
            frame["left"] - 1 <= text["left"] and text["right"] <= frame["right"] + 1
            for frame in frames
            if frame["top"] <= (text["top"] + text["bottom"]) / 2 <= frame["bottom"]
        ), text["text"]


def test_what_matters_has_its_name(seen: dict[str, Any]) -> None:
    for name, labels in (
        ("small", ("GPT", "transformer", "h.0-h.11 ×12", "attn", "mlp", "c_fc", "lm_head")),
        ("large", ("GPT", "transformer", "h.0-h.199 ×200", "attn", "mlp", "c_fc")),
    ):
        shown = [one["text"].partition("  ")[0].partition("\u00a0")[0] for one in seen[name]["texts"]]
        assert set(labels) <= set(shown), shown


def test_the_number_of_frames_is_bounded(seen: dict[str, Any]) -> None:
    for name in FLAMES:
        assert 0 < len(seen[name]["slices"]) <= 300


def test_hostile_names_are_shown_as_they_are(seen: dict[str, Any]) -> None:
    shown = " ".join(one["text"] for one in seen["hostile"]["texts"])
    assert "<img src=x onerror=window.hacked=1>" in shown
    assert "</script><script>window_hacked=1</script>" in seen["hostile"]["hover"]
    assert seen["small"]["hover"].startswith("transformer")


def test_pages_run_in_a_frame_and_see_nothing_of_the_notebook(seen: dict[str, Any]) -> None:
    page = seen["frames"]
    assert (page["hacked"], page["complaints"]) == (0, [])
    assert len(page["frames"]) == 2 and all("GPT" in text for text in page["frames"])


@pytest.mark.parametrize("name", ["table-light", "table-dark"])
def test_tables_take_the_notebooks_colours(seen: dict[str, Any], name: str) -> None:
    page = seen[name]
    assert set(page["colour"]) == {"rgb(0, 0, 0)" if name == "table-light" else "rgb(238, 238, 238)"}
    assert (page["hacked"], page["complaints"], page["elements"]) == (0, [], 0)
    for words in ("</script><script>window.hacked=1</script>", "${window_hacked=1}", "=HYPERLINK(1)", "Removed layers"):
        assert words in page["body"]
