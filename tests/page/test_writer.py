"""The page as a file: what is in it, how it is joined, and what could go wrong on the way."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gradscope.errors import OutputError
from gradscope.report import Report
from gradscope.report.page import HTML_HEAD, bundle, to_html
from gradscope.report.page.data import page_record
from gradscope.report.page.writer import to_script_json
from tests import report_fixtures as fixtures
from tests.page import runs


class _Parts(HTMLParser):
    """Text of each element by tag, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "link"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


@pytest.mark.parametrize("run", [runs.gpt(), runs.hostile()], ids=["gpt", "hostile"])
def test_the_policy_names_the_one_style_and_script(run: Any) -> None:
    parts = _Parts(to_html([run]))
    policy = next(value for tag, name, value in parts.attributes if name == "content" and "script-src" in (value or ""))
    assert policy is not None
    for tag, text in (("style", parts.texts["style"][0]), ("script", parts.texts["script"][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert len(parts.texts["script"]) == 2
    assert [value for _, name, value in parts.attributes if name in ("src", "href")] == ["data:,"]


def test_the_data_is_the_run() -> None:
    run = runs.hostile()
    data = json.loads(_Parts(to_html([run])).texts["script"][0])
    assert data == json.loads(json.dumps(page_record([run])))
    (record,) = data["runs"]
    paths: list[str] = []
    for parent, name in zip(record["layers"]["parent"], record["layers"]["name"], strict=True):
        above = paths[parent] if parent >= 0 else ""
        paths.append(f"{above}.{data['strings'][name]}" if above else data["strings"][name])
    assert paths == [row.path for row in run.layers]
    assert record["ops"]["self_ns"] == [row.self_ns for row in run.ops]
    assert record["ledger"]["backward_ns"] == run.ledger.backward_ns


def test_what_was_not_measured_is_not_there() -> None:
    (record,) = page_record([fixtures.mlp(lines=False)])["runs"]
    assert "memory" not in record
    assert "saved_bytes" not in record["layers"]
    assert record["kernels"] == {"layer": [], "phase": [], "name": [], "op": []}


def test_no_source_leaves_no_line_of_source() -> None:
    run = runs.gpt()
    texts = {row.text for row in run.lines}
    assert texts <= set(page_record([run])["strings"])
    assert not texts & set(page_record([run], source=False)["strings"])


def test_json_cannot_end_its_element() -> None:
    text = to_script_json(["</script>", "<!--", "&amp;", "\u2028\u2029", "\0", "\udcff"])
    assert not re.search("[<>&\u2028\u2029\0\udcff]", text)
    assert json.loads(text) == ["</script>", "<!--", "&amp;", "\u2028\u2029", "\0", "\udcff"]
    with pytest.raises(ValueError, match="Out of range float"):
        to_script_json([float("nan")])


def test_files_are_replaced_only_if_ours(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    report = Report(fixtures.mlp())
    assert report.to_html(path) == path
    report.to_html(path)
    assert HTML_HEAD.match(path.read_text(encoding="utf-8"))
    path.write_text("<!doctype html>\nmine")
    with pytest.raises(OutputError, match="exists and was not written by gradscope"):
        report.to_html(path)
    report.to_html(path, force=True)


def test_a_gpt2_sized_page_is_small() -> None:
    assert len(to_html([runs.gpt()]).encode()) < 300_000


# -- joining the modules -----------------------------------------------------------------------------------------------


def test_the_script_holds_every_module_once() -> None:
    folder = Path(bundle.__file__).parent / "web" / "src"
    names = re.findall(r"^// ([\w-]+\.js)$", bundle.script(), re.MULTILINE)
    assert sorted(names) == sorted(path.name for path in folder.glob("*.js"))
    assert names[-1] == bundle.ENTRY
    assert "</script" not in bundle.script() and "<!--" not in bundle.script()


def test_modules_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(bundle.BundleError, match=r"b\.js and a\.js both declare one: rename one of them\."):
        bundle.join({"a.js": "export const one = 1;\n", "b.js": "function one() {}\n"})
    with pytest.raises(bundle.BundleError, match=r"a\.js declares several names at once at its top level: const \["):
        bundle.join({"a.js": "const [one, two] = [1, 2];\n"})
    with pytest.raises(bundle.BundleError, match=r"a\.js cannot be joined with the others: export default one"):
        bundle.join({"a.js": "export default one;\n"})
    annotated = (
        "/**\n * Of * and **.\n * @param {number} x\n */\nfunction f(x) {\n  /** @type {A} */\n  const y = x * 2;\n"
    )
    annotated += "  return /** @type {B} */ (y); // a /** b */\n}\n"
    plain = "function f(x) {const y = x * 2;\nreturn (y); // a /** b */\n}\n"
    assert plain in bundle.join({"a.js": annotated}) and "@param" not in bundle.script()
    wrapped = "f(\n  one, // of two,\n  two,\n);\n"
    assert "f(one, // of two,\ntwo,);\n" in bundle.join({"a.js": wrapped})
    joined = bundle.join({"a.js": 'import { b } from "./b.js";\nexport function* one() {}\n'})
    assert joined == '"use strict";\n(() => {\n// a.js\nfunction* one() {}\n})();\n'


def test_the_page_needs_nothing_heavy() -> None:
    code = "import sys, gradscope.report.page as page; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.partition(".")[0] for name in run.stdout.split()} & {"torch", "pandas", "plotly", "triton"}


def test_the_page_says_as_the_terminal_does_why_a_run_is_partial() -> None:
    for left_out in (0, 3):
        run = runs.gpt()
        workload = dataclasses.replace(run.workload, steps_left_out=left_out)
        run = dataclasses.replace(run, partial=True, workload=workload)
        assert page_record([run])["runs"][0]["partial"] in str(Report(run))
    assert page_record([runs.gpt()])["runs"][0]["partial"] == ""
