"""Texts from strangers, valid but odd: shown everywhere, and they do nothing."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

import pytest

from gradscope.fixing import load_fix
from gradscope.report.runfile import from_json, to_json
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.report.strange_files import (
    FIX,
    RECORDS,
    changed,
    require_harmless,
)
from tests.report.strange_fixtures import (
    hostile_texts,
    render_diff,
    render_fix,
    render_run,
)

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("seed", range(6))
def test_hostile_texts_are_shown_and_do_nothing(seed: int, no_plotly: None) -> None:
    rng = random.Random(seed)
    for base in RECORDS[:2]:
        run = from_json(json.dumps(hostile_texts(rng, base)))
        assert from_json(to_json(run)) == run
        for name, text in {**render_run(run), **{f"diff {k}": v for k, v in render_diff(run, run).items()}}.items():
            require_harmless(name.removeprefix("diff "), text)
    fix = load_fix(_written(json.dumps(hostile_texts(rng, FIX))))
    for name, text in render_fix(fix).items():
        require_harmless(name, text)


def _written(text: str) -> Path:
    Path("x.json").write_text(text)
    return Path("x.json")


def test_numbers_of_a_csv_stay_numbers() -> None:
    text = changed("findings/0/predicted_saving_ns", "-3")
    rows = list(csv.DictReader(io.StringIO(render_csv(text, "findings"))))
    assert rows[0]["predicted_saving_ns"] == "-3"


def render_csv(text: str, table: str) -> str:
    """One table of the run in ``text``."""
    from gradscope.report.csvfile import to_csv

    return to_csv(from_json(text), table)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-x", "'-x"),
        ("@torch.no_grad()", "'@torch.no_grad()"),
        (" =1", "' =1"),
        ("\t=1", "' =1"),
        ("\rx", "' x"),
        ("\uff1d1", "'\uff1d1"),
        ("a=1", "a=1"),
        ("'a", "'a"),
        ("\x1b[31m", "\\x1b[31m"),
    ],
)
def test_formulas_in_a_csv(text: str, cell: str) -> None:
    rows = list(csv.DictReader(io.StringIO(render_csv(changed("lines/0/text", json.dumps(text)), "lines"))))
    assert rows[0]["text"] == cell


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\\|b", "`a\\ \\|b`"),
        ("a|b", "`a\\|b`"),
        ("`x`", "`'x'`"),
        ("\x1b[31m\u202e", "`\\x1b[31m\\u202e`"),
    ],
)
def test_code_in_markdown(text: str, shown: str) -> None:
    from gradscope.document.markdown import _code

    assert f"`{_code(text)}`" == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("- x", "\\- x"),
        ("1. x", "1\\. x"),
        ("---", "\\---"),
        ("-1.5 ms", "-1.5 ms"),
        ("1.5 ms", "1.5 ms"),
        ("http://x", "http&#58;//x"),
        ("www.x.y", "www&#46;x.y"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("a\u202eb\x07", "a\\\\u202eb\\\\x07"),
        ("a\n# b", "a \\# b"),
    ],
)
def test_text_in_markdown(text: str, shown: str) -> None:
    from gradscope.document.markdown import escape

    assert escape(text) == shown
