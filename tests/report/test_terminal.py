"""The terminal's report: columns, widths, encodings, and what it looks like to a pipe."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

import gradscope
from gradscope.document.glyphs import for_encoding
from gradscope.document.grid import cut_line, width_of
from gradscope.document.terminal import DEFAULT_WIDTH, make_console, print_document, to_text
from gradscope.errors import UsageError
from gradscope.report import Report
from gradscope.report.document import profile_document
from gradscope.report.tree import SECTIONS, ViewOptions
from gradscope.tables import LineRow, RunData
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures

RUNS = {
    "gpt": fixtures.gpt(slow_block=3, findings=fixtures.findings(), notes=("FLOP of custom Functions: unknown " * 5,)),
    "cuda": fixtures.gpt(2, cuda=True, recompute=True),
    "mlp": fixtures.mlp(partial=True),
    "gan": fixtures.gan(),
}
COMMAND = "gradscope show "


def text_of(run: RunData, width: int = 100, encoding: str = "utf-8", full: bool = True, **options: object) -> str:
    document = profile_document(run, ViewOptions(full=full, **options), "run.json")  # type: ignore[arg-type]
    return to_text(document, width, encoding)


def section(text: str, title: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    body = lines[start + 1 : end]
    while body and body[0].startswith(" " * (len(title) + 2)):  # what it is about, in a second line
        body.pop(0)
    return body


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 160])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_no_line_is_wider_than_asked(run: RunData, encoding: str, width: int) -> None:
    lines = text_of(run, width, encoding).splitlines()
    assert len(lines) > 20
    for line in lines:
        assert cell_len(line) <= width or COMMAND in line  # a command is for copying: never cut
        assert line == line.rstrip()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_ascii_is_ascii(run: RunData) -> None:
    text = text_of(run, encoding="latin-1")
    assert text.isascii()
    assert "\\x" not in text
    assert "#" in text


def test_columns_are_dropped_in_order_of_use() -> None:
    heads = {width: section(text_of(RUNS["cuda"], width), "Layers")[0].split() for width in (60, 80, 140)}
    assert heads[140] == [
        *("layer", "class", "bwd", "ms", "share", "bwd", "self", "fwd", "ms", "bwd:fwd"),
        *("recompute", "device", "launch", "GFLOP/s", "accum", "calls"),
    ]
    assert heads[80] == ["layer", "bwd", "ms", "share", "fwd", "ms", "bwd:fwd", "device"]
    assert heads[60] == ["layer", "bwd", "ms", "share", "fwd", "ms", "device"]
    assert section(text_of(RUNS["gpt"], 80), "Layers")[0].split() == [
        *("layer", "bwd", "ms", "share", "bwd", "self", "fwd", "ms", "bwd:fwd")
    ]


def test_columns_without_values_are_not_there() -> None:
    head = section(text_of(RUNS["mlp"], 160), "Layers")[0]
    assert "recompute" not in head
    assert "device" not in head
    assert "grad sum" not in head
    assert "accum" in head


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("options", [{}, {"min_percent": 20}, {"depth": 1}, {"top": 2}], ids=str)
def test_printed_rows_add_up_to_the_whole(seed: int, options: dict[str, object]) -> None:
    run = fixtures.random_run(seed)
    rows = section(text_of(run, 160, **options), "Layers") if run.step.backward_ns else []
    numbers = [found for row in rows[1:] if (found := re.search(r" ([\d.<]+) +([\d.<]+) %", row))]
    if not numbers:
        return
    roots = [n for row, n in zip(rows[1:], numbers, strict=True) if not re.match(r"[│├└ …]", row)]
    percents = [float(n[2].lstrip("<")) for n in roots]
    assert sum(percents) == pytest.approx(100, abs=0.051 * len(percents))
    # The layers' own time: self, recompute, accumulate and gradient sums of shown and hidden rows.
    head = rows[0]
    unit = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[re.search(r"bwd (\S+)", head)[1]]  # type: ignore[index]
    end = head.index(" self") + len(" self")
    layers = [row for row in rows[1:] if not row.lstrip("│ ").startswith("^")]
    own = [row[:end].split()[-1] for row in layers if row[end - 1 : end].strip()]
    # Half of the last digit each, and "<0.01" stands for anything below.
    rounding = sum(10.0 ** -len(cell.partition(".")[2]) * (1 if "<" in cell else 0.51) for cell in own)
    total = sum(float(cell) for cell in own if "<" not in cell)
    assert total * unit == pytest.approx(run.ledger.layers_ns, abs=rounding * unit)


def test_the_ledger_sums_to_a_hundred() -> None:
    for run in RUNS.values():
        rows = section(text_of(run), "Backward breakdown")[1:]
        percents = [float(re.search(r"([\d.]+) %", row)[1]) for row in rows]  # type: ignore[index]
        assert rows[-1].startswith("all of backward")
        assert sum(round(10 * p) for p in percents[:-1]) == 1000


def test_what_the_report_says() -> None:
    text = text_of(RUNS["gpt"], 140)
    for expected in (
        "gradscope 0.1.0  examples/gpt.py · GPT, 9.63 M parameters\n",
        "5 steps after 3 warm-up",
        "overhead ×1.03",
        "│  └─ h.0-h.11 ×12",
        "^ transformer.h.3.attn takes ×1.",
        "… 16 layers under 1 %",
        "examples/gpt.py:60 ",
        "att = F.softmax(att, dim=-1)",
        "no source line",
        "1. critical: attention is computed by hand",
        "transformer.h.*.attn ×12 · examples/gpt.py:58",
        " · recipe attention",
        "est. -61 ms/step",
        "-400 MB of memory",
        "- FLOP of custom Functions: unknown",
        "gradscope show run.json --full --min-percent 0",
    ):
        assert expected in text
    assert "PARTIAL: the run ended early" in text_of(RUNS["mlp"])


def test_in_short_the_answer_comes_first() -> None:
    """Why it is slow, what to do, what it gives: on the first 24 lines of about 50."""
    lines = text_of(RUNS["gpt"], full=False).splitlines()
    assert len(lines) <= 60
    first = "\n".join(lines[:24])
    for expected in ("Findings", "1. critical: ", "examples/gpt.py:58", "   why ", "est. -61 ms/step", "\n2. "):
        assert expected in first
    titles = [line.split("  ")[0] for line, above in zip(lines[1:], lines, strict=False) if not above]
    assert titles == ["Findings", "Layers", "Source lines", "Backward", "Notes", "Next"]
    assert sum(line.startswith("examples/gpt.py:") for line in lines) == 8


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "kernels"])
def test_a_section_that_is_asked_for_is_shown_as_in_full(name: str) -> None:
    run = memory_fixtures.gpt(leak=True)
    run = dataclasses.replace(run, findings=fixtures.findings(), device=fixtures.device(), buckets=fixtures.buckets())
    whole, asked = (profile_document(run, options) for options in (ViewOptions(full=True), ViewOptions(show=(name,))))
    found = [section for section in asked.sections if section.key == name]
    assert found and found == [section for section in whole.sections if section.key == name]
    short = profile_document(run)
    others = [section for section in asked.sections if section.key != name]
    assert others == [section for section in short.sections if section.key != name]


def test_bars_show_own_and_below() -> None:
    marks = for_encoding("utf-8")
    assert marks.bar(0.5, 1.0, 10) == ("█████", "░░░░░")
    assert marks.bar(0.26, 0.26, 10) == ("██▋", "")
    assert marks.bar(0.0, 0.4, 10) == ("", "░░░░")
    assert marks.bar(0.0001, 0.0001, 10) == ("▏", "")
    assert marks.bar(0.0, 0.0, 10) == ("", "")
    assert marks.bar(0.0, 0.001, 10) == ("", "▏")
    plain = for_encoding("ascii")
    assert plain.bar(0.5, 1.0, 10) == ("#####", "-----")
    assert plain.bar(0.001, 0.001, 10) == (".", "")


def test_foreign_text_cannot_move_the_cursor_or_break_columns() -> None:
    odd = LineRow("m\x1b[31m.py", 1, "f", "y = '\x1b]0;title\x07' + \"漢字漢字漢字\" + '\t'", None, 1, 1_000)
    run = fixtures.mlp()
    for encoding in ("utf-8", "ascii"):
        for width in (80, 100):
            text = text_of(dataclass_replace(run, lines=(odd, *run.lines)), width, encoding)
            assert "\x1b" not in text
            assert "\x07" not in text
            assert "\\x1b" in text
            assert all(cell_len(line) <= width or COMMAND in line for line in text.splitlines())


def dataclass_replace(run: RunData, **changes: object) -> RunData:
    import dataclasses

    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def test_cutting_counts_cells_not_characters() -> None:
    marks = for_encoding("utf-8")
    assert marks.cut("漢字漢字", 8) == "漢字漢字"
    assert marks.cut("漢字漢字", 6) == "漢字…"
    assert cell_len(marks.cut("漢字漢字", 5)) <= 5
    line = [("abc", "x"), ("defgh", "y")]
    for width in range(1, 9):
        assert width_of(cut_line(line, width, marks)) <= width
    assert cut_line(line, 8, marks) == line
    assert "".join(text for text, _ in cut_line(line, 6, marks)) == "abcde…"


# -- where it is printed -----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, color: bool | None = None) -> str:
    print_document(profile_document(RUNS["gpt"]), make_console(stream, color))
    return stream.getvalue()


def test_a_pipe_gets_no_control_codes_and_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console(io.StringIO()).width == DEFAULT_WIDTH == 100
    text = printed(io.StringIO())
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 100
    monkeypatch.setenv("COLUMNS", "72")
    assert max(len(line) for line in printed(io.StringIO()).splitlines()) <= 72
    monkeypatch.setenv("COLUMNS", "nonsense")
    assert make_console(io.StringIO()).width == 100


def test_colour_changes_nothing_but_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = printed(Terminal())
    assert "\x1b[" in coloured
    assert "\x1b[31m" in coloured or "\x1b[1;31m" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert plain == printed(io.StringIO())
    assert printed(Terminal(), color=False).count("\x1b[31m") == 0
    assert "\x1b[" in printed(io.StringIO(), color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*3\dm", printed(Terminal()))


def test_str_and_print_agree(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    report = Report(RUNS["mlp"])
    report.print()
    assert capsys.readouterr().out == str(report)
    stream = io.StringIO()
    report.print(Console(file=stream, width=100), depth=0, lines=2)
    assert "… 3 layers deeper than level 0" in stream.getvalue()
    with pytest.raises(UsageError, match=r"depth must be 0 or more; got -3\."):
        report.print(depth=-3)


def test_a_stream_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with path.open("w", encoding="cp1252") as stream:
        print_document(profile_document(RUNS["gpt"]), make_console(stream))
    assert path.read_bytes().isascii()


def test_importing_the_report_loads_neither_torch_nor_pandas_nor_rich() -> None:
    code = (
        "import sys, gradscope.report; "
        "print([m for m in ('torch', 'pandas', 'plotly', 'rich', 'triton') if m in sys.modules])"
    )
    root = Path(next(iter(gradscope.__path__))).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("run", [fixtures.gpt(48), fixtures.many_modules(5_000)], ids=["gpt 48", "5,000 modules"])
def test_large_models_render(run: RunData) -> None:
    assert 20 < len(str(Report(run)).splitlines()) < 60


def test_five_thousand_rows_render() -> None:
    builder = fixtures.RunBuilder()
    builder.add("", "Wide", 10, 10)
    for i in range(5_000):
        builder.add(f"layer{i}", "Linear", 1_000 + i, 500)
    run = builder.build()
    stream = io.StringIO()
    Report(run).print(make_console(stream, color=True), min_percent=0)
    assert stream.getvalue().count("layer") >= 5_000


@pytest.mark.parametrize(("overhead", "doubted"), [(0.10, True), (0.97, False), (1.04, False)])
def test_an_overhead_that_cannot_be_is_doubted(overhead: float, doubted: bool) -> None:
    run = fixtures.mlp()
    run = dataclasses.replace(run, step=dataclasses.replace(run.step, overhead=overhead))
    assert ("(disturbed: is the machine idle?)" in " ".join(str(Report(run)).split())) is doubted
