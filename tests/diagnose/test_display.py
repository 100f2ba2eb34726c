"""How findings are shown: which, in what order, and in what words, on the terminal and everywhere else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.cells import cell_len

from gradscope.document.markdown import to_markdown
from gradscope.document.terminal import to_text
from gradscope.report import Report
from gradscope.report.document import profile_document
from gradscope.report.findings import MOST_HINTS, FindingsView, build_findings, chosen, saving_text
from gradscope.report.nextsteps import next_steps
from gradscope.report.page.data import page_record
from gradscope.report.tree import ViewOptions
from gradscope.report.view import build_view
from gradscope.tables import Finding, RunData
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures

RUN = memory_fixtures.gpt(12)
STEP, PEAK = RUN.step.wall_ns, RUN.memory.peak_bytes if RUN.memory is not None else 0
ATTENTION = tuple(f"transformer.h.{i}.attn" for i in range(12))
CODE = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)"


def finding(name: str, share: float | None = None, peak: float | None = None, **more: Any) -> Finding:
    """One that saves these parts of the step and the peak."""
    fields: dict[str, Any] = {
        "rule": name,
        "severity": "info",
        "layers": (),
        "line": None,
        "message": f"{name} is slow",
        "evidence": f"evidence of {name}",
        "predicted_saving_ns": None if share is None else round(share * STEP),
        "predicted_saving_bytes": None if peak is None else round(peak * PEAK),
    }
    return Finding(**{**fields, **more})


LARGE = finding(
    "large",
    0.18,
    0.07,
    severity="critical",
    layers=ATTENTION,
    line="examples/gpt.py:58",
    predicted_low_ns=round(0.12 * STEP),
    predicted_high_ns=round(0.27 * STEP),
    recipe="attention",
    advice="Put the recipe attention there.",
    code="gradscope.patch(model, batch, recipes=['attention'])",
)


def with_findings(*findings: Finding, run: RunData = RUN) -> RunData:
    return dataclasses.replace(run, findings=findings)


def shown(*findings: Finding, run: RunData = RUN, **options: Any) -> FindingsView:
    return build_view(with_findings(*findings, run=run), ViewOptions(**options), "run.json").findings


def names(view: FindingsView) -> list[str]:
    return [row.rule for row in view.rows]


# -- which, and in what order --------------------------------------------------------------------------------------


def test_the_largest_saving_comes_first() -> None:
    view = shown(
        finding("a", 0.03), finding("hint"), LARGE, finding("memory", peak=0.4), finding("b", 0.05), finding("c", 0.03)
    )
    assert names(view) == ["large", "b", "a", "c", "memory", "hint"]
    assert view.more == view.command == ""


def test_those_who_sort_by_memory_see_memory_first() -> None:
    found = (finding("time", 0.5), finding("both", 0.02, 0.2), finding("memory", peak=0.4))
    assert names(shown(*found)) == ["time", "both", "memory"]
    assert names(shown(*found, sort="memory")) == ["memory", "both", "time"]


def test_without_a_number_a_severity_stands_for_one() -> None:
    found = (finding("w", severity="warning"), finding("few", 0.02), finding("c", severity="critical"), finding("hint"))
    assert names(shown(*found, finding("mid", 0.05), finding("much", 0.3))) == ["much", "c", "mid", "w", "few", "hint"]


def test_small_ones_are_counted() -> None:
    small = [finding(f"s{i}", 0.004, 0.002) for i in range(3)]
    view = shown(LARGE, *small, finding("lean", 0.001, 0.05), finding("edge", 0.0101))
    assert names(view) == ["large", "edge", "lean"]
    assert (view.more, view.command) == (
        "and 3 smaller ones",
        "gradscope show run.json --show findings --min-percent 0",
    )
    assert names(shown(LARGE, *small, min_percent=0)) == ["large", "s0", "s1", "s2"]
    assert shown(*small[:1]).more == "1 small one"
    assert names(shown(LARGE, finding("mid", 0.05), min_percent=10)) == ["large"]


def test_hints_do_not_bury_the_rest() -> None:
    hints = [finding(f"h{i}") for i in range(MOST_HINTS + 2)]
    view = shown(*hints, LARGE, finding("s", 0.001))
    assert names(view) == ["large", "h0", "h1", "h2"]
    assert view.more == "and 1 smaller one and 2 without an estimate"
    assert len(shown(*hints, LARGE, min_percent=0).rows) == len(hints) + 1


def test_without_a_file_python_shows_all() -> None:
    view = build_view(with_findings(finding("s", 0.001))).findings
    command = "report.print(show=['findings'], min_percent=0)"
    assert view.command == command
    assert f"  {command}  shows 1 small one\n" in to_text(profile_document(with_findings(finding("s", 0.001))))


@pytest.mark.parametrize(
    ("saves", "frees", "is_shown"),
    [(None, 10, True), (1, 10, False), (10_000_000_000, 10, True), (None, None, True), (0, 0, True), (-5, None, True)],
)
def test_a_peak_that_was_not_measured(saves: int | None, frees: int | None, is_shown: bool) -> None:
    odd = dataclasses.replace(finding("odd"), predicted_saving_ns=saves, predicted_saving_bytes=frees)
    run = with_findings(odd, run=fixtures.gpt(2))
    assert bool(chosen(run, ViewOptions())[0]) is is_shown
    assert "peak" not in saving_text(odd, run)


def test_a_run_of_nothing() -> None:
    empty = with_findings(LARGE, finding("hint"), run=fixtures.RunBuilder().build())
    assert names(build_findings(empty, {})) == ["large", "hint"]
    assert build_findings(dataclasses.replace(empty, findings=()), {}) == FindingsView()


# -- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((), ""),
        (("",), "GPT"),
        (ATTENTION, "transformer.h.*.attn ×12"),
        (ATTENTION[:5], "5 of 12 transformer.h.*.attn"),
        (ATTENTION[:1], "transformer.h.0.attn"),
        ((*ATTENTION, "lm_head", "transformer.wte"), "transformer.h.*.attn ×12, lm_head, transformer.wte"),
        (("a", "b", "c", "d", "e", "a"), "a, b, c and 2 more"),
    ],
)
def test_repeated_layers_are_folded(layers: tuple[str, ...], words: str) -> None:
    assert shown(finding("f", layers=layers)).rows[0].layers == words


@pytest.mark.parametrize(
    ("amounts", "words"),
    [
        ((48_123_456, 32_000_000, 71_900_000, 95_400_000), "est. -48 ms/step (32 to 72) · -95 MB of memory"),
        ((480_000, None, None, None), "est. -480 µs/step"),
        ((999_600, 1, 2_000_000, None), "est. -1 ms/step (0 to 2)"),
        ((1_234_000_000, 900_000_000, 1_300_000_000, None), "est. -1.2 s/step (0.9 to 1.3)"),
        ((700, 700, 700, 999), "est. -700 ns/step · -1 kB of memory"),
        ((None, None, None, 402_000_000), "est. -400 MB of memory"),
        ((-4, None, None, 0), ""),
    ],
)
def test_savings_are_estimates(amounts: tuple[int | None, ...], words: str) -> None:
    saved, low, high, freed = amounts
    one = dataclasses.replace(
        finding("f"),
        predicted_saving_ns=saved,
        predicted_low_ns=low,
        predicted_high_ns=high,
        predicted_saving_bytes=freed,
    )
    assert saving_text(one, with_findings(run=fixtures.RunBuilder().build())) == words


def test_shares_of_the_step_and_the_peak() -> None:
    row = shown(LARGE).rows[0]
    assert row.saving.startswith("est. -") and ", 18 % of the step · -" in row.saving
    assert row.saving.endswith(", 7 % of the peak")
    assert row.worth == "est. -18 % of the step"
    assert shown(finding("m", peak=0.3)).rows[0].worth == "est. -30 % of the peak memory"
    assert shown(finding("f", 0.004), min_percent=0).rows[0].saving.endswith(", 0.4 % of the step")
    assert "of the step" not in shown(finding("more than there is", 1.7)).rows[0].saving


# -- terminal ------------------------------------------------------------------------------------------------------


def section(width: int = 140, *findings: Finding, encoding: str = "utf-8") -> list[str]:
    run = with_findings(*findings)
    options = ViewOptions(show=("findings",))
    lines = to_text(profile_document(run, options, "run.json"), width, encoding).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Findings"))
    return lines[start : lines.index("", start)]


def test_a_finding_on_the_terminal() -> None:
    text = next(row.text for row in RUN.lines if row.line == 58)
    lines = section(140, LARGE, finding("small", 0.001))
    assert lines[0] == "Findings  why it is slow and what to do; gains are estimates"
    assert lines[1:8] == [
        "1. critical: large is slow",
        "   where  transformer.h.*.attn ×12 · examples/gpt.py:58",
        f"          {text}",
        "   why    evidence of large",
        "   do     Put the recipe attention there.",
        "          gradscope.patch(model, batch, recipes=['attention'])",
        f"   gain   {shown(LARGE).rows[0].saving}",
    ]
    assert lines[8:] == [
        "   rule   large · recipe attention",
        "  gradscope show run.json --show findings --min-percent 0  shows 1 smaller one",
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [40, 80, 140])
def test_code_is_never_cut(width: int, encoding: str) -> None:
    lines = section(width, LARGE, finding("optimizer", 0.04, code=CODE), finding("s", 0.001), encoding=encoding)
    assert f"          {CODE}" in lines  # on a line of its own, to be copied
    for line in lines:
        assert cell_len(line) <= width or line.strip() in {CODE, LARGE.code} or "gradscope show" in line
        assert line.isascii() or encoding == "utf-8"


def test_text_from_outside_is_made_visible() -> None:
    lines = section(100, finding("f", 0.5, message="a \x1b[31mred message", code="x = 1\nprint('\x1b')"))
    assert "\x1b" not in "".join(lines)
    assert "          x = 1" in lines and "          print('\\x1b')" in lines


# -- elsewhere -----------------------------------------------------------------------------------------------------


def test_markdown() -> None:
    odd = finding("odd", 0.05, message="a | b <c> `d`", code="x = '```'\ny = 1")
    run = with_findings(LARGE, odd, finding("s", 0.001))
    text = to_markdown(profile_document(run, ViewOptions(show=("findings",)), "run.json"))
    part = text.partition("#### Findings\n\n")[2]
    assert part.startswith(
        "why it is slow and what to do; gains are estimates\n\n"
        "1. **critical**: large is slow  \n   `transformer.h.*.attn ×12` · "
    )
    assert f"\n   gain: *{shown(LARGE).rows[0].saving}*  \n   rule: large · recipe attention\n\n" in part
    assert f"   ```python\n   {LARGE.code}\n   ```\n" in part
    assert "2. **info**: a \\| b &lt;c&gt; \\`d\\`  \n" in part
    assert "   ````python\n   x = '```'\n   y = 1\n   ````\n" in part
    assert "- shows 1 smaller one: `gradscope show run.json --show findings --min-percent 0`\n" in part


def test_notebook() -> None:
    many = [finding(f"f{i}", 0.05) for i in range(8)]
    html = Report(with_findings(LARGE, *many, finding("s", 0.001)))._repr_html_()
    for words in ("critical:", "large is slow", "Put the recipe attention there.", "of the peak", "×12"):
        assert words in html
    more = "shows 2 more and 1 smaller one: <code>report.print(show=[&#x27;findings&#x27;], min_percent=0)</code>"
    assert more in html
    assert "<code>gradscope.patch(model, batch" in html
    alone = Report(with_findings(finding("s", 0.001)))._repr_html_()
    assert "shows 1 small one: <code>report.print(" in alone


def test_frames() -> None:
    frame = Report(with_findings(LARGE, finding("hint"))).findings
    assert list(frame.columns) == [field.name for field in dataclasses.fields(Finding)]
    assert frame["predicted_low_ns"].dtype == frame["predicted_saving_bytes"].dtype == "Int64"
    assert frame["predicted_high_ns"].isna().tolist() == [False, True]
    assert frame["code"].tolist() == [LARGE.code, ""]


def test_the_page_has_all_of_them_and_marks_small_ones() -> None:
    run = with_findings(finding("s", 0.001), finding("hint"), LARGE)
    found = page_record([run])["runs"][0]["findings"]
    assert [(one["rule"], one["small"]) for one in found] == [("large", False), ("hint", False), ("s", True)]
    first = found[0]
    assert (first["layers"], first["where"]) == (list(ATTENTION), "transformer.h.*.attn ×12")
    assert first["text"] and first["saving"] == shown(LARGE).rows[0].saving
    assert page_record([run], source=False)["runs"][0]["findings"][0]["text"] == ""
    assert page_record([with_findings()])["runs"][0]["findings"] == []


# -- what to do next -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "mode", "command"),
    [
        ("examples/gpt.py", "model", "gradscope fix examples/gpt.py"),
        ("my models/gpt.py:small", "model", "gradscope fix 'my models/gpt.py:small'"),
        ("train.py", "script", "gradscope fix train.py"),
        ("package.train", "script", "gradscope fix -m package.train"),
        ("", "model", "gradscope.patch(model, batch)"),
        ("", "loop", "gradscope.patch(model, batch)"),
    ],
)
def test_a_recipe_is_put_in_by_a_command_with_a_target(target: str, mode: Any, command: str) -> None:
    run = with_findings(LARGE)
    run = dataclasses.replace(run, workload=dataclasses.replace(run.workload, target=target, mode=mode))
    assert next_steps(run, build_view(run).tree, None, full=False)[0].command == command
    assert "gradscope fix ''" not in to_text(profile_document(run, None, "run.json"))
    without = dataclasses.replace(run, findings=(finding("hint"),))
    assert not any("fix" in step.command for step in next_steps(without, build_view(run).tree, "run.json", full=True))
