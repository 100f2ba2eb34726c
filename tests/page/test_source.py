"""The functions that measured lines stand in: read when the page is written, and only where they are as measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gradscope.report.page.data import page_record
from gradscope.report.page.sourcedata import MOST_FUNCTIONS, MOST_LINES, source_record
from gradscope.tables import LineRow, RunData
from tests.page import runs
from tests.page.conftest import Open

TEXT = '''"""A model."""


class Net:
    def forward(self, x):
        def inner(y):
            return y * 2

        x = x + 1  # one
        if x is None:
            return None
        return inner(x)


loss = Net().forward(1)
'''


def row(file: Path, line: int, text: str, ns: int = 10, layer: str | None = None) -> LineRow:
    return LineRow(str(file), line, "forward", text, layer, ns, 2 * ns)


@pytest.fixture(name="file")
def file_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(TEXT)
    return path


def test_a_function_is_whole_and_has_its_qualified_name(file: Path) -> None:
    rows = [row(file, 9, "x = x + 1  # one"), row(file, 12, "return inner(x)"), row(file, 7, "return y * 2", 1)]
    found = source_record(rows)
    assert [(each["function"], each["first"]) for each in found] == [("Net.forward", 5), ("Net.forward.inner", 6)]
    assert found[0]["lines"] == [line.removeprefix("    ") for line in TEXT.splitlines()[4:12]]


def test_functions_are_in_order_of_both_directions(file: Path) -> None:
    rows = [
        LineRow(str(file), 9, "forward", "x = x + 1  # one", None, 10, 0),
        LineRow(str(file), 7, "inner", "return y * 2", None, 1, 50),
    ]
    assert [each["function"] for each in source_record(rows)] == ["Net.forward.inner", "Net.forward"]


def test_a_text_that_was_cut_is_as_it_was(file: Path) -> None:
    (found,) = source_record([row(file, 9, "x = x +…")])
    assert found["function"] == "Net.forward"


def test_a_line_of_several_layers_has_all_that_they_take(open_page: Open, file: Path) -> None:
    rows = [
        row(file, 9, "x = x + 1  # one", ns, f"transformer.h.{i}.attn") for i, ns in enumerate((4_000_000, 1_000_000))
    ]
    page = open_page(dataclasses.replace(runs.gpt(), lines=rows), "#tab=source").page
    assert "10.0 ms" in page.inner_text("#source")  # backward: twice 4 and 1


def test_lines_of_no_function_have_those_around_them(file: Path) -> None:
    (found,) = source_record([row(file, 15, "loss = Net().forward(1)")])
    assert (found["function"], found["first"]) == ("", 12)
    assert found["lines"][-1] == "" and "loss = Net().forward(1)" in found["lines"]


def test_a_function_that_changed_is_left_out_and_others_stay(file: Path) -> None:
    rows = [row(file, 9, "x = x + 2"), row(file, 7, "return y * 2"), row(file, 99, "gone"), row(file, 12, "")]
    assert [each["function"] for each in source_record(rows)] == ["Net.forward.inner"]


@pytest.mark.parametrize("content", [b"def broken(:\n", b"\xff\xfe\x00", b"x = 1\0", None, "folder"])
def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path, content: bytes | str | None) -> None:
    path = tmp_path / "other.py"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    assert source_record([row(path, 1, "x = 1"), LineRow("\0", 1, "f", "x", None, 1, 1)]) == []


def test_long_functions_and_many_are_cut(tmp_path: Path) -> None:
    body = "\n".join(f"    x = {i}" for i in range(1000))
    many = "\n".join(f"def f{i}():\n    return {i}" for i in range(2 * MOST_FUNCTIONS))
    path = tmp_path / "long.py"
    path.write_text(f"def long():\n{body}\n{many}\n")
    (found,) = source_record([row(path, 500, "x = 498")])
    assert (found["first"], len(found["lines"])) == (497, 7)
    (found,) = source_record([row(path, 2, "x = 0"), row(path, 900, "x = 898")])
    assert (found["first"], len(found["lines"])) == (1, MOST_LINES)
    rows = [row(path, 1003 + 2 * i, f"return {i}", ns=i) for i in range(2 * MOST_FUNCTIONS)]
    names = [each["function"] for each in source_record(rows)]
    assert names == [f"f{i}" for i in range(2 * MOST_FUNCTIONS - 1, MOST_FUNCTIONS - 1, -1)]


def measured(file: Path) -> RunData:
    run = runs.gpt()
    layer = "transformer.h.0.attn"
    lines = [row(file, 9, "x = x + 1  # one", 4_000_000, layer), row(file, 12, "return inner(x)", 1_000_000, layer)]
    return dataclasses.replace(run, lines=lines)


def test_without_source_no_text_is_in_the_page(file: Path) -> None:
    run = measured(file)
    assert "if x is None" in str(page_record([run])) and "if x is None" not in str(page_record([run], source=False))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_line_has_its_heat(open_page: Open, file: Path, scheme: str, width: int) -> None:
    page = open_page(measured(file), "#tab=source", size=(width, 900), scheme=scheme).page
    rows = page.locator("#source tr")
    assert rows.count() == 8
    assert page.locator("#source tr.unmeasured").count() == 6
    bars = page.locator("#source .bar")
    wide = [bars.nth(i).bounding_box()["width"] for i in range(bars.count())]
    assert len(wide) == 2 and wide[1] == pytest.approx(wide[0] / 4, rel=0.05)
    assert rows.nth(4).inner_text().split() == ["9", "8.00", "ms", "x", "=", "x", "+", "1", "#", "one"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "8 lines of your source code" in page.inner_text("footer")
    page.keyboard.press("2")  # forward
    assert "4.00" in rows.nth(4).inner_text()


def test_a_click_on_a_line_selects_its_layer(open_page: Open, file: Path) -> None:
    opened = open_page(measured(file), "#tab=source")
    opened.page.click("#source tr:nth-child(5) button")
    assert "select=layer/transformer.h.0.attn" in opened.state()
    assert opened.page.locator("#source tr.marked").count() == 2
    assert opened.page.evaluate("document.activeElement.textContent") == "9"  # the list is drawn anew


def test_there_is_no_tab_without_files(open_page: Open, tmp_path: Path) -> None:
    assert open_page(measured(tmp_path / "none.py")).page.locator("#tab-source").count() == 0
