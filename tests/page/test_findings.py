"""The findings of the page: each in full, its layers in the flame, texts to copy, and the verdict without any."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gradscope.report.page.data import page_record
from gradscope.tables import RunData
from tests import report_fixtures as fixtures
from tests.page import runs
from tests.page.conftest import Open, Opened

SIZES = [(1280, 720), (1440, 900), (1920, 1080), (900, 700), (390, 844)]
CODE = "one = 1\ntwo = '```'"


def found() -> RunData:
    """A run with one finding of every sort: with all texts, without an estimate, small, of no layer."""
    run = runs.device()
    first, *others = run.findings
    step = run.step.wall_ns
    layers = tuple(f"transformer.h.{i}.attn" for i in range(3))
    large = dataclasses.replace(
        first, advice="Put it there.", code=CODE, layers=layers, predicted_saving_ns=step // 5, recipe="attention"
    )
    gelu = dataclasses.replace(others[0], rule="gelu", layers=("transformer.h.1.mlp.act",), message="a thin layer")
    small = dataclasses.replace(first, rule="small", message="a small one", layers=(), predicted_saving_ns=step // 500)
    small = dataclasses.replace(small, predicted_saving_bytes=None)
    return dataclasses.replace(run, findings=(small, gelu, *others, large))


def pixels(opened: Opened) -> Any:
    """What the flame looks like."""
    return opened.page.evaluate("document.querySelector('canvas').toDataURL()")


# -- data --------------------------------------------------------------------------------------------------------------


def test_a_comment_holds_a_finding_and_no_markup_of_its_texts() -> None:
    run = found()
    bad = dataclasses.replace(run.findings[-1], message="<b>*no*</b> `x` [a](b)", evidence="| # ~")
    record = page_record([dataclasses.replace(run, findings=(bad,))])["runs"][0]
    comment = record["findings"][0]["comment"]
    assert "**critical**: &lt;b&gt;\\*no\\*&lt;/b&gt; \\`x\\` \\[a\\](b)" in comment and "\\| \\# \\~" in comment
    lines = "\n".join(f"   {line}" for line in CODE.splitlines())
    assert f"   ````python\n{lines}\n   ````" in comment  # no backticks in the code end its block
    assert "rule: unfused-attention · recipe attention" in comment
    assert record["comment"].startswith("### gradscope 0.1.0\n\nexamples/gpt.py · GPT, ")
    assert comment.strip() in record["comment"]


def test_texts_of_source_lines_are_in_no_comment_without_source() -> None:
    run = found()
    text = next(row.text for row in run.lines if f"{row.file}:{row.line}" == run.findings[-1].line)
    assert text in str(page_record([run])["runs"][0]["comment"])
    assert text not in str(page_record([run], source=False)["runs"][0])


def test_a_finding_without_a_recipe_has_no_command() -> None:
    record = page_record([found()])["runs"][0]
    commands = {finding["rule"]: finding["command"] for finding in record["findings"]}
    assert commands["unfused-attention"] == "gradscope fix examples/gpt.py" and commands["gelu"] == ""


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_findings_are_open_at_the_start_and_in_full(open_page: Open) -> None:
    run = found()
    opened = open_page(run)
    page = opened.page
    assert opened.state() == "" and page.get_attribute("#tab-findings", "aria-selected") == "true"
    assert page.locator("#headline").inner_text().startswith("4 findings · est. -20 % of the step: attention is")
    item = page.locator("#finding-0")
    words = item.inner_text()
    large = run.findings[-1]
    assert large.line is not None
    for expected in ("critical", large.message, large.evidence, "transformer.h.*.attn ×3", large.line, "Put it there."):
        assert expected in words
    assert item.locator(".gains li").all_inner_texts()[1] == "-400 MB of memory"
    assert item.locator(".cure").inner_text() == CODE
    assert item.locator(".source-line").inner_text().startswith("att = (q @ k.transpose")
    assert item.locator(".command").inner_text() == "gradscope fix examples/gpt.py"
    assert not page.locator("text=a small one").is_visible()
    page.click(".small-findings summary")
    assert page.locator("text=a small one").is_visible()
    assert page.locator("#finding-4 .command").inner_text() == "gradscope fix examples/gpt.py"


@pytest.mark.browser
def test_what_is_copied_is_the_exact_text(open_page: Open) -> None:
    run = found()
    page = open_page(run).page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    record = page_record([run])["runs"][0]
    first = record["findings"][0]
    wanted = [first["code"], first["command"], first["comment"]]
    for i, text in enumerate(wanted):
        button = page.locator("#finding-0 .copy").nth(i)
        button.click()
        button.filter(has_text="Copied").wait_for()  # a function that is polled is text to eval, which the page forbids
        assert page.evaluate("navigator.clipboard.readText()") == text
    assert page.locator("#said").inner_text() == "Copied"
    page.click(".verdict .copy")
    page.locator(".verdict .copy").filter(has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == record["comment"]


@pytest.mark.browser
def test_a_finding_lights_its_layers(open_page: Open) -> None:
    opened = open_page(found())
    page = opened.page
    plain = pixels(opened)
    page.hover("#finding-0 h3")
    lit = pixels(opened)
    assert lit != plain
    page.hover("#finding-1 h3")
    assert pixels(opened) not in (plain, lit)
    page.hover("#tab-findings")
    assert pixels(opened) == plain
    page.focus("#finding-0 .link")
    assert pixels(opened) == lit
    page.focus("#query")
    assert pixels(opened) == plain


@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES)
def test_its_layer_and_its_details_come_into_sight(open_page: Open, size: tuple[int, int]) -> None:
    run = found()
    opened = open_page(run, size=size)
    page = opened.page
    page.click("#finding-0 .link")
    assert "select=layer/transformer.h.0.attn" in opened.state()
    for selector in (".selection", "canvas"):
        box = page.locator(selector).bounding_box()
        assert 0 <= box["y"] < size[1] - 30, selector
    assert page.locator(".details .finding-links").inner_text().startswith("critical attention")
    assert page.locator("#finding-0").get_attribute("class") == "marked"
    page.click("#finding-1 .link")  # too thin to be seen in the whole: zoomed to
    assert "zoom=layer/transformer.h.0" in opened.state() and "mlp.act" in opened.state()


@pytest.mark.browser
def test_details_lead_back_to_a_finding(open_page: Open) -> None:
    page = open_page(found(), "#tab=layers&select=layer/transformer.h.1.attn", (1280, 720)).page
    assert page.locator("#findings").is_hidden()
    page.click(".finding-links .link")
    assert page.locator("#finding-0").is_visible()
    assert page.evaluate("document.activeElement.closest('li').id") == "finding-0"


@pytest.mark.browser
def test_without_a_finding_there_is_a_verdict(open_page: Open) -> None:
    run = dataclasses.replace(runs.gpt(), rules=37)
    page = open_page(run).page
    words = page.locator("#findings").inner_text()
    assert words.startswith("No finding: 37 rules looked at time, memory and settings. Of backward, ")
    assert "layers " in page.locator("#findings .legend").inner_text()
    assert page.locator("#findings .findings").count() == 0
    assert page.locator("#headline").inner_text() == "No finding: 37 rules looked at time, memory and settings."


@pytest.mark.browser
def test_without_rules_there_is_no_tab(open_page: Open) -> None:
    page = open_page(fixtures.mlp(), "#tab=findings").page
    assert page.locator("#tab-findings, #headline").count() == 0
    assert page.get_attribute("#tab-layers", "aria-selected") == "true"
