"""Every output of one run shows the same: the terminal, Markdown and a notebook, cell by cell and number by number."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from gradscope.compare.build import compare
from gradscope.compare.document import diff_document
from gradscope.document.html import to_fragment
from gradscope.document.markdown import to_markdown
from gradscope.document.parts import Bar, Bullets, Cell, Commands, Document, Entry, KeyValues, Row, Table, Words
from gradscope.document.record import to_record
from gradscope.document.terminal import to_text
from gradscope.report.document import profile_document
from gradscope.report.tree import ViewOptions
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures

WIDE = 2_000  # columns: nothing is cut or left out

RUNS = {
    "gpt": replace(memory_fixtures.gpt(leak=True), findings=fixtures.findings(), notes=("a note", "another")),
    "cuda": fixtures.gpt(2, cuda=True, recompute=True),
    "memory on cuda": memory_fixtures.gpt(3, cuda=True),
    "mlp": fixtures.mlp(partial=True),
    "two roots": fixtures.gan(),
    "nothing": fixtures.RunBuilder().build(),
    **{f"random {seed}": fixtures.random_run(seed) for seed in range(8)},
}
OPTIONS = (
    ViewOptions(),
    ViewOptions(full=True),
    ViewOptions(sort="memory"),
    ViewOptions(full=True, sort="forward", min_percent=0),
    ViewOptions(show=("ops", "saved"), depth=1),
)


def documents() -> Iterator[tuple[str, Document]]:
    for name, run in RUNS.items():
        for number, options in enumerate(OPTIONS):
            yield f"{name}, {number}", profile_document(run, options, "run.json")
    names = list(RUNS)
    for one, other in pairwise(names):
        yield f"{one} against {other}", diff_document(compare(RUNS[one], RUNS[other], (one, other)))


DOCUMENTS = dict(documents())


class Tables(HTMLParser):
    """The rows of a fragment's tables, notes left out, a list of texts each."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self._open = "colspan" not in dict(attrs)
            if self._open:
                self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.rows[-1][-1] += data


def tables(document: Document) -> list[Table]:
    return [block for section in document.sections for block in section.blocks if isinstance(block, Table)]


def texts(row: Row, table: Table, *, bars: bool) -> list[str]:
    """A row's texts, empty ones for the cells that it lacks; a bar is none."""
    cells = [*row.cells, *(Cell() for _ in table.columns[len(row.cells) :])]
    drawn = {i for each in table.rows for i, cell in enumerate(each.cells) if isinstance(cell, Bar)}
    shown = [cell for i, cell in enumerate(cells) if bars or i not in drawn]
    return [cell.text + cell.after if isinstance(cell, Cell) else "" for cell in shown]


def plain(cell: str) -> str:
    """A cell of a Markdown table as it is read."""
    text = re.sub(r"\\([\\`*_\[\]|~#.=+-])", r"\1", cell.replace("&nbsp;", "").replace("**", ""))
    return " ".join(html.unescape(text.replace("`", "")).split())


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_tables_are_the_same_everywhere(document: Document) -> None:
    markdown = [
        [plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in to_markdown(document).splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]
    fragment = Tables()
    fragment.feed(to_fragment(document))
    read = [row for row in fragment.rows if row]
    terminal = [" ".join(line.split()) for line in to_text(document, WIDE).splitlines()]
    for table in tables(document):
        titles = [column.title for column in table.columns]
        assert read.pop(0) == titles
        markdown.pop(0)
        for row in table.rows:
            assert read.pop(0) == texts(row, table, bars=True)
            assert markdown.pop(0) == [" ".join(text.split()) for text in texts(row, table, bars=False)]
            numbers = " ".join(text for text in texts(row, table, bars=False) if text).split()
            assert any(is_in_order(numbers, line.split()) for line in terminal), numbers
    assert not read and not markdown


def is_in_order(words: list[str], line: list[str]) -> bool:
    """Check that a line has the words in this order, with a tree's guides and bars between."""
    rest = iter(line)
    return all(word in rest for word in words)


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_sentences_are_the_same_everywhere(document: Document) -> None:
    outputs = (
        " ".join(to_text(document, WIDE).split()),
        " ".join(plain(to_markdown(document)).split()),
        " ".join(html.unescape(re.sub(r"<[^>]*>", " ", to_fragment(document))).split()),
    )
    for sentence in sentences(document):
        words = " ".join(sentence.split())
        assert len(words) < 400  # what a notebook cuts
        for output in outputs:
            assert words in " ".join(output.split()), words


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_the_pages_record_has_all_of_it(document: Document) -> None:
    record = to_record(document)
    blocks = [block for section in record for block in section["blocks"]]
    drawn = [block for block in blocks if block["kind"] == "table" and any(each["title"] for each in block["columns"])]
    for table, block in zip(tables(document), drawn, strict=True):
        assert [column["title"] for column in block["columns"]] == [column.title for column in table.columns]
        assert [row["cells"] for row in block["rows"]] == [texts(row, table, bars=True) for row in table.rows]
        assert [row["note"] for row in block["rows"]] == [row.note for row in table.rows]
    said = json.dumps([{**section, "key": ""} for section in record], ensure_ascii=False)
    above = {document.title, document.subject, document.warning, *document.reasons, *dict(document.head.rows).values()}
    for sentence in set(sentences(document)) - above:
        assert json.dumps(sentence, ensure_ascii=False)[1:-1] in said


def sentences(document: Document) -> Iterator[str]:
    yield document.title
    yield document.subject
    yield document.warning
    yield from document.reasons
    for _, text in document.head.rows:
        yield text
    for section in document.sections:
        yield section.title
        yield section.about
        for block in section.blocks:
            match block:
                case KeyValues():
                    yield from (text for _, text in block.rows)
                case Words():
                    yield block.text
                case Bullets():
                    yield from block.items
                case Commands():
                    yield from (step.command for step in block.steps)
                case Entry():
                    yield block.text
                    yield from (fact.text for fact in block.facts if fact.kind == "text")


def test_a_row_with_more_cells_than_columns_is_refused() -> None:
    with pytest.raises(AssertionError, match="1 cells under 0 columns"):
        Table((), (Row((Cell("x"),)),))


def test_no_column_has_two_meanings() -> None:
    """A heading stands for one key, and a key has one heading, in all tables of a kind of document."""
    for prefix in ("gpt", "cuda", "memory"):
        meaning: dict[tuple[str, str], set[str]] = {}
        for name, document in DOCUMENTS.items():
            if "against" in name or not name.startswith(prefix):
                continue
            for section in document.sections:
                for block in section.blocks:
                    for column in block.columns if isinstance(block, Table) else ():
                        if column.title:
                            meaning.setdefault((section.key, column.title), set()).add(column.key)
        assert all(len(keys) == 1 for keys in meaning.values()), meaning
