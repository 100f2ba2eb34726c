"""The page of a fix: what was replaced, its proof and its diff."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gradscope
from gradscope.fixing.report import FixReport
from gradscope.report.page.writer import to_script_json
from tests.fixing.fix_fixtures import fixed_fixture, folder_fixture, gains_fixture  # noqa: F401 (used by their names)
from tests.page.conftest import Open


def test_the_page_says_what_was_replaced_its_proof_and_its_diff(
    fixed: FixReport, tmp_path: Path, open_page: Open
) -> None:
    path = fixed.to_html(tmp_path / "fix.html", force=True)
    assert path is not None
    page = open_page(path, size=(1280, 900)).page
    tab = page.locator("#fixed")
    assert page.get_attribute("#tab-fixed", "aria-selected") == "true"
    text = tab.inner_text()
    for section in fixed.document().sections:
        assert section.title in text
    assert "attention" in text and "call sites replaced" in text
    shown = tab.locator(".diff").inner_text()
    assert shown.strip() == fixed.data.diff.strip()
    assert tab.locator(".copy").first.get_attribute("data-copy") == fixed.data.diff
    assert "call sites replaced" in page.inner_text("#headline")
    assert not page.get_by_text("differ in more than the code").count()  # it does not warn of its own change
    assert "measured in alternation, which alone decides" in page.inner_text(".warnings")
    page.click("#tab-layers")
    page.click("#headline")
    assert tab.is_visible()


def test_without_source_the_page_holds_no_diff(fixed: FixReport, tmp_path: Path) -> None:
    path = fixed.to_html(tmp_path / "fix.html", source=False, force=True)
    assert path is not None
    text = path.read_text()
    added = next(line for line in fixed.data.diff.splitlines() if line.startswith("+") and "attention(" in line)
    assert added.strip("+ ") not in text and to_script_json(fixed.data.diff)[1:-1] not in text


def test_other_differences_of_the_two_runs_are_still_said(fixed: FixReport, tmp_path: Path) -> None:
    assert fixed.after is not None
    other = replace(fixed.after.data, environment={**fixed.after.data.environment, "threads": 7})
    after = gradscope.Report(other)
    path = FixReport(fixed.data, fixed.before, after, fixed.files).to_html(tmp_path / "fix.html", force=True)
    assert path is not None and "7 after" in path.read_text()
