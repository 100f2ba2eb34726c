"""The pages for users: the index names each, links lead somewhere, and what they quote is what is printed today."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer

from gradscope.cli.app import app
from gradscope.report import Report
from tests import report_fixtures, report_memory_fixtures

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_index_has_every_page() -> None:
    named = set(re.findall(r"^- \[([\w-]+\.md)\]\(\1", text_of(DOCS / "README.md"), re.MULTILINE))
    assert named == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


@EACH
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", text_of(page)):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", text_of(file), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name} links to {target}#{anchor}"


# --------------------------------------------------------------------------------------------------------------------
# What is quoted
# --------------------------------------------------------------------------------------------------------------------


def titles() -> set[str]:
    """Those of every section: as runs have them, and as the code names them where no short run has one."""
    runs = (report_memory_fixtures.gpt(2), report_fixtures.gpt(2, cuda=True))
    shown = [Report(run).document(full=full) for run in runs for full in (False, True)]
    found = {section.title for document in shown for section in document.sections}
    assert {"Layers", "Source lines", "Backward", "Backward breakdown", "Memory at peak, by owner"} <= found
    for file in (REPOSITORY / "gradscope").rglob("*.py"):
        found |= set(re.findall(r'Section\("\w+", "([^"]+)"', text_of(file)))
    return found | {"The whole step"}


@EACH
def test_headings_of_quoted_reports_are_those_of_today(page: Path) -> None:
    known = titles()
    for block in re.findall(r"^```\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE):
        if not re.search(r"^gradscope \d|^\[\.\.\.\]$|^\.\.\.$", block, re.MULTILINE):
            continue
        quoted = re.findall(r"^([A-Z][a-z]+(?:,? [a-z]+)*)(?:  \S.*)?$", block, re.MULTILINE)
        assert set(quoted) - known == set(), f"{page.name} quotes headings that no report has"


@EACH
def test_words_of_earlier_reports_are_gone(page: Path) -> None:
    old = ("Who holds the peak", "What the backward is made of", "saves about", "frees about", "savings are estimates")
    assert [words for words in old if words in text_of(page)] == []


def test_options_that_the_pages_name_exist() -> None:
    """Behind ``gradscope COMMAND``: an option of another program may be named elsewhere."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {o for p in each.params for o in p.opts} | {"--help"} for name, each in commands.items()}
    names = "|".join(options)
    wrong, seen = [], 0
    for page in PAGES:
        for line in re.findall(rf"gradscope ((?:{names})\b[^`\n#]*)", text_of(page)):
            name = line.split()[0]
            named = re.findall(r"(?<![\w-])--[a-z][\w-]*", line.partition(" -- ")[0])
            seen += len(named)
            wrong += [f"{page.name}: {name} {option}" for option in named if option not in options[name]]
    assert wrong == [] and seen > 30


# --------------------------------------------------------------------------------------------------------------------
# README.md
# --------------------------------------------------------------------------------------------------------------------


def test_the_picture_of_the_terminal_is_small_and_asks_for_nothing_from_elsewhere() -> None:
    path = DOCS / "images" / "terminal.svg"
    assert "docs/images/terminal.svg" in text_of(REPOSITORY / "README.md")
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 100_000
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert re.findall(r"https?://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"] and "url(http" not in text
    words = "".join(ET.fromstring(text).itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "gradscope profile examples/gpt.py" in words and "Findings" in words and "Source lines" in words


def test_readme_is_short() -> None:
    assert len(text_of(REPOSITORY / "README.md").splitlines()) <= 200
