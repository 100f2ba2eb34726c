"""What the tests of strange files share: good files to damage, and what a rendered text may not hold."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace

from gradscope.fixing.result import to_json as fix_json
from gradscope.report.runfile import to_json
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.fixing.test_document import fixed

BASES = (
    replace(memory_fixtures.mlp(), findings=fixtures.findings()[:2], notes=("a note",)),
    fixtures.gan(),
    replace(fixtures.gpt(1, cuda=True, recompute=True), findings=fixtures.findings()[:1]),
)
RECORDS = tuple(json.loads(to_json(base)) for base in BASES)
FIX = json.loads(fix_json(fixed()))
LIMITS = {
    "gradscope_limits": 1,
    "entries": [
        {
            "device": "cpu",
            "threads": 2,
            "torch": "2.13.0",
            "measured": 1.7e9,
            "flops": {"float32": 1e11},
            "bytes": 2e10,
            "call_ns": 900.0,
        }
    ],
}
SETTINGS = """[tool.gradscope]
ignore = ["attention-by-hand"]

[tool.gradscope.check]
baseline = "base.json"
max-regression = ["5%", "h.*=10%"]
max-memory-regression = "2%"
max-peak = "6GiB"
max-saved = "2GiB"
"""


def changed(place: str, value: str, base: int = 0) -> str:
    """The text of a run with ``value``, as JSON, at ``place``."""
    record = json.loads(to_json(BASES[base]))
    *above, last = [int(key) if key.isdecimal() else key for key in place.split("/")]
    at = record
    for key in above:
        at = at[key]
    at[last] = "@@"
    return json.dumps(record).replace('"@@"', value)


def require_harmless(name: str, text: str) -> None:
    kind = name.split(" ")[0]
    check = _HARMLESS.get(kind)
    if check is not None:
        check(text)


def _plain(text: str) -> None:
    odd = {char for char in text if not char.isprintable() and char != "\n"}
    assert not odd, odd


def _narrow(text: str) -> None:
    _plain(text)
    assert text.isascii()


def _markdown(text: str) -> None:
    _plain(text)
    columns = 0
    for line in text.split("\n"):
        if not line.startswith("| "):
            columns = 0
            if line.startswith(" "):
                continue  # code, or what belongs to an item: below
            assert not re.search(r"[<>]", re.sub(r"`[^`]*`|\\.", "", line)), line
            continue
        # As GitHub's parser splits a row: what follows a backslash belongs to it.
        cells = re.findall(r"(?:\\.|[^\\|])*", line.strip().strip("|"))
        cells = [cell for cell in cells if cell]
        columns = columns or len(cells)
        assert len(cells) == columns, line
        for cell in cells:
            assert not re.search(r"[<>`]", re.sub(r"`[^`]*`|\\.", "", cell)), cell


def _csv(text: str) -> None:
    _plain(text)
    for row in csv.reader(io.StringIO(text)):
        for cell in row:
            assert not re.match(r"\s*[=+@\uff1d\uff0b\uff20]|[\t\r\n]|\s*-(?![\d.]+$)", cell), cell


def _page(text: str) -> None:
    assert not re.search("[\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f\ud800-\udfff\x1b]", text)
    data = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    assert json.loads(data[1])["runs"]
    assert len(re.findall("</script", text, re.IGNORECASE)) == 2


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(name for name, _ in attrs)}


def _notebook(text: str) -> None:
    _plain(text)
    tags = _Tags()
    tags.feed(text)
    assert tags.found <= {
        "div",
        "b",
        "span",
        "table",
        "thead",
        "tbody",
        "tr",
        "td",
        "th",
        "code",
        "style",
        "class",
        "colspan",
    }


def _json(text: str) -> None:
    json.loads(text)


_HARMLESS: dict[str, Callable[[str], None]] = {
    "terminal": _plain,
    "narrow": _narrow,
    "markdown": _markdown,
    "csv": _csv,
    "page": _page,
    "notebook": _notebook,
    "json": _json,
    "speedscope": _json,
}
