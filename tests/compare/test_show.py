"""A comparison as it is read: the terminal's text word for word, Markdown, DIFF.json, the DataFrames."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

import gradscope
from gradscope.compare import Diff
from gradscope.document.parts import Bar, Cell, Table
from gradscope.document.terminal import to_text
from gradscope.errors import OutputError, UsageError
from gradscope.report import Report
from gradscope.tables import RunData
from tests import report_fixtures, report_memory_fixtures
from tests.diff_fixtures import CPU, MS, around, run

NOTHING = (0, 0, 0, 0, 0)


def net(fast: int, *, extra: str, torch: str = "2.13.0", saved: int = 4_000_000) -> RunData:
    """Three blocks of one layer, a head, and one more layer that only one of the runs has."""
    layers = {"": NOTHING, "h": NOTHING}
    for i in range(3):
        layers |= {f"h.{i}": NOTHING, f"h.{i}.fc": around(fast, MS)}
    layers |= {"head": around(20 * MS, MS), extra: around(5 * MS, MS // 10)}
    classes = {f"h.{i}": "Block" for i in range(3)} | {"h": "ModuleList"}
    return run(
        layers,
        classes=classes,
        forward={"head": 10 * MS},
        engine=2 * MS,
        saved={f"h.{i}.fc": saved for i in range(3)} | {"head": 1_000_000, extra: 500_000},
        environment={**CPU, "torch": torch},
        wall=around(0, MS),
    )


@pytest.fixture(name="found")
def found_fixture() -> Diff:
    return gradscope.diff(net(30 * MS, extra="old"), net(45 * MS, extra="new", torch="2.14.0", saved=3_000_000))


TEXT = """\
gradscope 0.1.0  comparison
WARNING: the runs differ in more than the code, and what follows may come from that:
- torch: 2.13.0 before, 2.14.0 after
before    net.py · 5 steps of 127 ms ±0.8 %
after     net.py · 5 steps of 172 ms ±0.6 %
backward  117 ms → 162 ms, +38.5 %: slower, beyond the noise of ±2.12 ms
layers    3 changed in time · 3 in memory · 1 new · 1 removed · 6 the same but for noise

Totals  the mean step, and the one that measured memory
                        before    after    change        %     noise
step                    127 ms   172 ms  +45.0 ms  +35.4 %  ±2.12 ms  slower
forward                10.0 ms  10.0 ms         0      0 %  ±2.12 ms  same
backward                117 ms   162 ms  +45.0 ms  +38.5 %  ±2.12 ms  slower
  layers                115 ms   160 ms  +45.0 ms  +39.1 %  ±8.70 ms  slower
  autograd overhead    2.00 ms  2.00 ms         0      0 %  ±2.12 ms  same
peak memory            27.0 MB  21.0 MB  -6.00 MB  -22.2 %     exact  less
saved for backward     13.5 MB  10.5 MB  -3.00 MB  -22.2 %     exact  less
allocated in the step  13.5 MB  10.5 MB  -3.00 MB  -22.2 %     exact  less
allocations                  5        5         0      0 %     exact  same

Layers  own time in ms a step; ~ within noise
layer                  class   bwd before  bwd after  change         %  noise  fwd change  of step
h.*.fc ×3              Linear        90.0      135.0   +45.0   +50.0 %   ±6.1           0  +35.4 %
6 layers within noise                20.0       20.0       0       0 %                  0      0 %
1 layer new                             0        5.0    +5.0                            0   +3.9 %
1 layer removed                       5.0          0    -5.0  -100.0 %                  0   -3.9 %
outside the layers                    2.0        2.0       0       0 %                  0      0 %
all                                 117.0      162.0   +45.0   +38.5 %                  0  +35.4 %

Memory of layers  each layer's own bytes, exact; numbers with a sign are differences
layer      class   saved before  saved after    change  allocated  allocs  copied
h.*.fc ×3  Linear       12.0 MB      9.00 MB  -3.00 MB   -3.00 MB       0       0

New layers  only in the run after, each with all below it
layer  class   bwd ms  fwd ms   saved  layers
new    Linear     5.0       0  500 kB       1

Removed layers  only in the run before, each with all below it
layer  class   bwd ms  fwd ms   saved  layers
old    Linear     5.0       0  500 kB       1
"""


def test_the_terminals_text(found: Diff) -> None:
    assert str(found) == TEXT


def test_a_narrow_terminal_keeps_names_and_changes(found: Diff) -> None:
    lines = to_text(found.document(), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "layer                  bwd before  bwd after  change         %  fwd change" in lines
    assert "h.*.fc ×3                    90.0      135.0   +45.0   +50.0 %           0" in lines


def test_rows_of_layers_add_up_to_the_change_of_the_whole() -> None:
    """What is shown and what is summed up are all of backward and forward, whatever the choice."""
    for seed in range(20):
        before, after = report_fixtures.random_run(seed), report_fixtures.random_run(seed + 7)
        for options in ({"top": 2}, {"min_percent": 5.0}, {"within_noise": True}):
            section = gradscope.diff(before, after).document(**options).section("layers")
            if section is None:
                continue
            (table,) = section.blocks
            assert isinstance(table, Table)
            *parts, whole = [[_number(row.cells[i]) for i in (2, 3, 7)] for row in table.rows]
            # Each number is rounded to two decimals at most one unit apart.
            for column in range(3):
                assert abs(sum(part[column] for part in parts) - whole[column]) <= 0.06 * len(parts)


def _number(cell: Cell | Bar) -> float:
    assert isinstance(cell, Cell)
    clean = cell.text.lstrip("~?").replace("<", "")
    return float(clean) if clean not in ("", "-") else 0.0


def test_nothing_changed() -> None:
    one = net(30 * MS, extra="old")
    text = str(gradscope.diff(one, one))
    assert "WARNING" not in text
    assert "backward  117 ms → 117 ms, 0 %: the same\n" in text
    assert "layers    0 changed in time · 0 in memory · 0 new · 0 removed · 10 the same but for noise\n" in text
    assert "Layers" not in text


def test_a_change_within_noise_is_marked_and_listed_when_asked() -> None:
    found = gradscope.diff(net(30 * MS, extra="old"), net(30 * MS + MS // 2, extra="old"))
    assert "  layers                115 ms   116 ms  ~+1.50 ms  +1.3 %  ±8.70 ms  within noise\n" in str(found)
    assert "h.*.fc ×3" not in str(found)
    assert "h.*.fc ×3           Linear        90.0       91.5   ~+1.5  +1.7 %   ±6.4           0   +1.2 %\n" in to_text(
        found.document(within_noise=True)
    )


def test_one_step_is_marked_as_not_known() -> None:
    found = gradscope.diff(run({"": (0,), "a": (MS,)}), run({"": (0,), "a": (2 * MS,)}))
    text = str(found)
    assert "backward  1.00 ms → 2.00 ms, +100.0 %: one step does not say whether that is noise\n" in text
    assert "Layers  own time in µs a step; ? one step does not say whether it is noise\n" in text
    assert "?+1000" in text
    assert "layers    0 changed in time · 0 in memory · 0 new · 0 removed · 2 the same but for noise\n" in text


def test_sorting_and_choosing() -> None:
    before = run({"": NOTHING, "a": around(10 * MS, 0), "b": around(100 * MS, 0)}, forward={"a": 9 * MS})
    after = run({"": NOTHING, "a": around(20 * MS, 0), "b": around(115 * MS, 0)}, forward={"a": 19 * MS})
    found = gradscope.diff(before, after)

    def names(**options: object) -> list[str]:
        section = found.document(**options).section("layers")
        assert section is not None and isinstance(section.blocks[0], Table)
        return [row.cells[0].text for row in section.blocks[0].rows if isinstance(row.cells[0], Cell)]

    assert names()[:2] == ["a", "b"]  # 20 ms of the step against 15
    assert names(sort="backward")[:2] == ["b", "a"]
    assert names(sort="forward")[:2] == ["a", "b"]
    assert names(sort="ratio")[:2] == ["a", "b"]
    assert names(top=1)[:2] == ["a", "… 1 more changed"]
    assert names(min_percent=12.5)[:2] == ["b", "… 1 more changed"]  # 15 ms of 119 are 12.6 %, 10 are 8.4 %


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sort": "size"}, "sort must be one of step, backward, forward, ratio, memory; got 'size'."),
        ({"top": 0}, "top must be 1 or more; got 0."),
        ({"min_percent": 101}, "min_percent must be between 0 and 100; got 101."),
    ],
)
def test_options_without_a_meaning(found: Diff, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as wrong:
        found.print(**options)
    assert str(wrong.value) == message


def test_sorting_by_memory_puts_it_first(found: Diff) -> None:
    assert [table.title for table in found.document(sort="memory").sections][:3] == [
        "Totals",
        "Memory of layers",
        "Layers",
    ]


def test_printing_on_a_console(found: Diff) -> None:
    out = io.StringIO()
    found.print(Console(file=out, width=100, force_terminal=True, color_system="truecolor"), top=1)
    assert "\x1b[" in out.getvalue()
    plain = io.StringIO()
    found.print(Console(file=plain, width=100, color_system=None))
    assert plain.getvalue() == TEXT


def test_ascii(found: Diff) -> None:
    text = to_text(found.document(), 100, "ascii")
    assert text.isascii()
    assert "h.*.fc x3" in text


def test_markdown(found: Diff) -> None:
    text = found.to_markdown()
    assert text.startswith("### gradscope 0.1.0\n\ncomparison\n\n**WARNING: the runs differ in more than the code,")
    assert "\n- torch: 2.13.0 before, 2.14.0 after\n" in text
    assert "| `h.*.fc` ×3 | `Linear` | 90.0 | 135.0 | **+45.0** | **+50.0 %** | ±6.1 | 0 | **+35.4 %** |\n" in text
    assert "| **peak memory** | 27.0 MB | 21.0 MB | **-6.00 MB** | **-22.2 %** | exact | **less** |\n" in text


def test_hostile_names_stay_in_their_cell() -> None:
    bad = "a|b`<script>\n\x1b[31m" + "x" * 4000
    before = run({"": NOTHING, bad: around(10 * MS, 0)}, target=bad)
    found = gradscope.diff(before, run({"": NOTHING, bad: around(20 * MS, 0), "c\u202e": around(MS, 0)}, target="t"))
    text = to_text(found.document(), 100)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines() if "xxx" in line) <= 100
    markdown = found.to_markdown()
    assert "<script>" not in re.sub(r"`[^`\n]*`", "", markdown)
    rows = [line for line in markdown.splitlines() if line.startswith("| `a\\|b")]
    assert rows and all(line.replace("\\|", "").count("|") == 10 for line in rows)
    assert json.loads(found.to_json())["layers"][1]["path"] == bad


# --------------------------------------------------------------------------------------------------------------------
# DIFF.json and the DataFrames
# --------------------------------------------------------------------------------------------------------------------


def test_json(found: Diff) -> None:
    record = json.loads(found.to_json())
    assert list(record) == [
        "kind",
        "schema_version",
        "gradscope",
        "before",
        "after",
        "warnings",
        "notes",
        "totals",
        "groups",
        "memory",
        "new",
        "removed",
        "layers",
    ]
    assert (record["kind"], record["schema_version"]) == ("diff", 1)
    assert record["warnings"] == [{"what": "torch", "text": "torch: 2.13.0 before, 2.14.0 after"}]
    assert record["totals"][0] == {
        "metric": "wall_ns",
        "unit": "ns",
        "before": 127 * MS,
        "after": 172 * MS,
        "difference": 45 * MS,
        "ratio": 172 / 127,
        "noise": 2_122_133,
        "basis": "steps",
        "real": True,
    }
    assert record["new"] == [
        {
            "address": "new",
            "class": "Linear",
            "paths": ["new"],
            "layers": 1,
            "backward_ns": 5 * MS,
            "forward_ns": 0,
            "saved_bytes": 500_000,
        }
    ]
    old = record["layers"][-1]
    assert (old["path"], old["status"], old["class_before"]) == ("old", "removed", "Linear")
    assert "class_after" not in old
    assert old["changes"][0] == {
        "metric": "backward_total_ns",
        "unit": "ns",
        "before": 5 * MS,
        "basis": "steps",
    }
    folded = next(one for one in record["groups"] if one["address"] == "h.*.fc")
    assert folded["paths"] == ["h.0.fc", "h.1.fc", "h.2.fc"]
    assert [change["metric"] for change in folded["changes"]] == ["backward_own_ns", "forward_self_ns"]


def test_saving(found: Diff, tmp_path: Path) -> None:
    path = found.save(tmp_path / "diff.json")
    assert path.read_text(encoding="utf-8") == found.to_json()
    found.save(path)
    saved = Report(net(MS, extra="x")).save(tmp_path / "run.json")
    with pytest.raises(OutputError, match="exists and was not written by gradscope"):
        found.save(saved)
    with pytest.raises(OutputError, match="exists and was not written by gradscope"):
        Report(net(MS, extra="x")).save(path)


def test_frames(found: Diff) -> None:
    columns = ["metric", "unit", "before", "after", "difference", "ratio", "noise", "basis", "real"]
    assert list(found.totals.columns) == columns
    assert list(found.layers.columns) == ["path", "class", "status", *columns]
    rows = found.layers.set_index(["path", "metric"])
    assert rows.loc[("h.0.fc", "backward_self_ns"), "difference"] == 15 * MS
    assert rows.loc[("new", "backward_self_ns"), "before"] is pd.NA
    assert rows["real"].dtype == "boolean"
    assert set(found.changed["path"]) == {"", "h", "h.0", "h.1", "h.2", "h.0.fc", "h.1.fc", "h.2.fc"}
    assert found.changed["real"].all()
    own = found.changed[found.changed["metric"] == "backward_total_ns"]
    assert list(own["path"])[:2] == ["", "h"]
    assert list(found.new["address"]) == ["new"]
    assert list(found.removed["address"]) == ["old"]
    assert repr(found) == "<gradscope.Diff of 'before' and 'after': 11 layers>"
    assert found.warnings == ("torch: 2.13.0 before, 2.14.0 after",)


def test_real_runs_of_every_kind_can_be_shown() -> None:
    runs = (
        report_fixtures.gpt(2, cuda=True),
        report_memory_fixtures.gpt(2),
        report_fixtures.gan(),
        report_fixtures.mlp(),
    )
    for before in runs:
        for after in runs:
            found = gradscope.diff(before, after)
            assert str(found) and found.to_markdown() and json.loads(found.to_json())
            assert len(found.layers) and len(found.totals)


# --------------------------------------------------------------------------------------------------------------------
# docs/compare.md
# --------------------------------------------------------------------------------------------------------------------

DOCS = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")


def test_the_example_of_the_docs_is_what_is_printed() -> None:
    example = DOCS.partition("$ gradscope diff before.json after.json\n")[2].partition("```")[0]
    lines = [line.replace("before.json · ", "").replace("after.json · ", "") for line in example.splitlines()]
    printed = TEXT.splitlines()
    assert len(lines) > 20
    assert [line for line in lines if line not in (*printed, "...")] == []


def test_every_key_is_documented(found: Diff) -> None:
    record = json.loads(found.to_json())
    keys = {*record, *record["before"], *record["new"][0], *record["groups"][0], *record["warnings"][0]}
    keys |= {key for layer in record["layers"] for key in (*layer, *(k for one in layer["changes"] for k in one))}
    keys |= {one["metric"] for layer in record["layers"] for one in layer["changes"]}
    keys |= {one["basis"] for one in record["totals"]} | {one["status"] for one in record["layers"]}
    assert sorted(key for key in keys if f"`{key}`" not in DOCS) == []
