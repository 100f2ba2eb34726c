"""What bounds each layer, in every report: sums over repeats, what is left unsaid, and where it is shown."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable

import pytest
from rich.cells import cell_len

from gradscope.document.html import to_fragment
from gradscope.document.markdown import to_markdown
from gradscope.document.terminal import to_text
from gradscope.report import Report
from gradscope.report.csvfile import to_csv
from gradscope.report.document import profile_document
from gradscope.report.figures.flame import METRICS, layer_words
from gradscope.report.fold import FoldedNode, build_tree
from gradscope.report.header import head_rows
from gradscope.report.layer_cost import Amounts, add_up, amounts_of
from gradscope.report.limited import ENOUGH, Limited, backward_of, limited
from gradscope.report.page.data import page_record
from gradscope.report.view import ViewOptions
from gradscope.tables import LayerRow, RunData
from tests import report_fixtures as fixtures

KINDS = {"Linear": "compute", "Attention": "compute", "GELU": "overhead"}


def with_limits(run: RunData, known: Callable[[LayerRow], bool] = lambda row: True) -> RunData:
    """Every known layer reaches a half of its limit in backward, and a quarter in forward."""
    rows = [
        dataclasses.replace(
            row,
            bytes=1_000,
            bound_by=KINDS.get(row.class_name, "bandwidth") if row.backward_self_ns else None,
            forward_limit_ns=row.forward_self_ns // 4,
            backward_limit_ns=row.backward_self_ns // 2,
        )
        if known(row)
        else row
        for row in run.layers
    ]
    return dataclasses.replace(run, layers=rows)


GPT = with_limits(fixtures.gpt(4))


def text_of(
    run: RunData, width: int = 140, encoding: str = "utf-8", path: str | None = "run.json", **options: object
) -> str:
    return to_text(profile_document(run, ViewOptions(**options), path), width, encoding)  # type: ignore[arg-type]


def nodes_of(run: RunData) -> dict[str, FoldedNode]:
    roots = build_tree(run.layers, run.step.backward_ns)
    return {node.address: node for root in roots for node in root.walk()}


def head_of(text: str) -> str:
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("Layers")) + 1]


def rows_of(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if name in line and " %" in line).split()


# --------------------------------------------------------------------------------------------------------------------
# Sums
# --------------------------------------------------------------------------------------------------------------------


def test_limits_sum_over_repeats_and_over_what_is_below() -> None:
    nodes = nodes_of(GPT)
    rows = {row.path: row for row in GPT.layers}
    repeats = [rows[f"transformer.h.{i}.mlp.c_fc"] for i in range(4)]
    total = nodes["transformer.h.*.mlp.c_fc"].total
    assert total.backward_limited == Limited(
        known_ns=sum(row.backward_self_ns for row in repeats),
        limit_ns=sum(row.backward_limit_ns or 0 for row in repeats),
        by_kind_ns=(sum(row.backward_self_ns for row in repeats), 0, 0, 0),
    )
    whole = nodes[""].total.backward_limited
    assert whole is not None
    assert whole.known_ns == GPT.ledger.layers_ns
    assert whole.limit_ns == sum(row.backward_limit_ns or 0 for row in GPT.layers)
    assert sum(whole.by_kind_ns) == whole.known_ns
    assert whole == backward_of(GPT.layers)


def test_a_sum_keeps_like_with_like() -> None:
    """Layers without a limit add neither to it nor to the time that it is held against."""
    known, unknown = (amounts_of(row) for row in (_row(100, 40, "compute"), _row(30, None, None)))
    total = add_up([known, unknown])
    assert total.backward_limited == Limited(100, 40, (100, 0, 0, 0))
    assert total.backward_self_ns == 130
    assert add_up([unknown, unknown]).backward_limited is None
    assert add_up([known, Amounts()]).backward_limited == known.backward_limited


@pytest.mark.parametrize(("unknown_ns", "shown"), [(0, True), (5, True), (6, False), (1_000, False)])
def test_nothing_is_said_where_more_than_a_twentieth_is_unknown(unknown_ns: int, shown: bool) -> None:
    known = 95
    assert ENOUGH == 0.95
    total = add_up([amounts_of(_row(known, 19, "bandwidth")), amounts_of(_row(unknown_ns, None, None))])
    assert total.limit_ns() == (19 if shown else None)
    assert total.reached() == (pytest.approx(0.2) if shown else None)
    assert total.bound_by() == ("bandwidth" if shown else "")


def test_time_that_no_limit_is_of_hides_the_limit_but_not_what_bounds_the_operations() -> None:
    """Gradient sums are in a row's time: the limit of the operations alone must not stand beside it."""
    row = amounts_of(dataclasses.replace(_row(100, 40, "bandwidth"), gradient_sum_ns=100))
    assert row.backward_ns == 200
    assert row.limit_ns() is None
    assert row.reached() == pytest.approx(0.4)
    assert row.bound_by() == "bandwidth"


def test_what_bounds_a_row_is_what_bounds_most_of_its_time() -> None:
    parts = [_row(600, 60, "compute"), _row(397, 30, "overhead"), _row(3, 1, "waiting")]
    total = add_up([amounts_of(row) for row in parts])
    assert total.bound_by() == "compute 60 %"
    assert total.backward_limited is not None
    assert total.backward_limited.kinds() == ["compute 60 %", "overhead 40 %"]  # what is next to nothing is not named
    assert amounts_of(parts[0]).bound_by() == "compute"


def test_layers_without_time_or_limit_say_nothing() -> None:
    idle = amounts_of(_row(0, 0, None))
    assert (idle.limit_ns(), idle.reached(), idle.bound_by()) == (None, None, "")
    nothing_to_do = amounts_of(_row(50, 0, "overhead"))
    assert (nothing_to_do.limit_ns(), nothing_to_do.reached(), nothing_to_do.bound_by()) == (0, None, "overhead")
    assert limited(None, 50, "compute") is None
    assert Limited(0, 0, (0, 0, 0, 0)).words("backward", 0) == ""


def test_words() -> None:
    found = Limited(12_300_000, 4_100_000, (0, 12_300_000, 0, 0))
    assert found.words("backward", 12_300_000) == (
        "backward 12.3 ms, at this machine's limit 4.10 ms (33 %), bound by bandwidth"
    )
    assert found.words("backward", 20_000_000).startswith("12.3 ms of backward 20.0 ms, at this machine's limit")


def _row(backward: int, limit: int | None, kind: str | None) -> LayerRow:
    builder = fixtures.RunBuilder()
    builder.add("", "Linear", backward, backward_limit_ns=limit, bound_by=kind)
    return builder.build().layers[0]


# --------------------------------------------------------------------------------------------------------------------
# The head
# --------------------------------------------------------------------------------------------------------------------


def test_the_head_compares_the_whole_backward() -> None:
    limit = dict(head_rows(GPT, full=True))["limit"]
    assert " of backward " in limit
    assert "at this machine's limit" in limit
    assert "(50 %)" in limit
    assert "compute 67 %, bandwidth 27 %, overhead 6 %" in limit
    assert "no limit is known of the other 4 %" in limit  # gradient sums, .grad, the engine


def test_the_head_says_how_much_has_no_limit() -> None:
    run = with_limits(fixtures.gpt(4), lambda row: row.class_name == "Linear")
    limit = dict(head_rows(run, full=True))["limit"]
    spent = sum(row.backward_self_ns for row in run.layers if row.class_name == "Linear")
    rest = round(100 * (1 - spent / run.step.backward_ns))
    assert limit.endswith(f"(50 %) · compute · no limit is known of the other {rest} %")


def test_faster_than_the_limit_is_doubted() -> None:
    rows = [dataclasses.replace(row, backward_limit_ns=2 * row.backward_self_ns) for row in GPT.layers]
    limit = dict(head_rows(dataclasses.replace(GPT, layers=rows), full=True))["limit"]
    assert "(200 %: more than there should be, are the limits of a busy machine?)" in limit


# --------------------------------------------------------------------------------------------------------------------
# The terminal
# --------------------------------------------------------------------------------------------------------------------


def test_columns_of_limits_go_before_what_all_need() -> None:
    heads = {width: head_of(text_of(GPT, width)) for width in (60, 80, 90, 120, 140)}
    assert all(word in heads[140] for word in ("limit", "reached", "bound by", "class"))
    assert "limit" in heads[120]
    assert "bound by" in heads[120]
    assert "reached" not in heads[120]
    assert "limit" in heads[90]
    assert heads[60] == head_of(text_of(fixtures.gpt(4), 60))
    assert all(re.search(r"\nlimit  [\d.]+ ms of backward", text_of(GPT, width)) for width in heads)
    saved = dataclasses.replace(GPT, layers=[dataclasses.replace(row, saved_bytes=10_000_000) for row in GPT.layers])
    assert head_of(text_of(saved, 80)).split() == ["layer", "bwd", "ms", "share", "fwd", "ms", "bwd:fwd", "saved"]


def test_the_table_says_what_the_sums_say() -> None:
    row = rows_of(text_of(GPT), "c_fc")
    total = nodes_of(GPT)["transformer.h.*.mlp.c_fc"].total
    assert f"{total.backward_ns / 1e6:.1f}" in row
    assert f"{total.backward_limited.limit_ns / 1e6:.1f}" in row  # type: ignore[union-attr]
    assert row[row.index("50") + 1 : row.index("50") + 3] == ["%", "compute"]
    assert "bwd limit" in head_of(text_of(GPT))


def test_by_forward_the_limits_are_those_of_forward() -> None:
    text = text_of(GPT, sort="forward")
    assert "fwd limit" in head_of(text)
    row = rows_of(text, "c_fc")
    assert row[row.index("25") + 1 : row.index("25") + 3] == ["%", "compute"]


def test_by_memory_there_are_none() -> None:
    run = dataclasses.replace(GPT, layers=[dataclasses.replace(row, saved_bytes=8) for row in GPT.layers])
    assert "bound by" not in head_of(text_of(run, sort="memory"))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 160])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_too_wide_and_ascii_is_ascii(width: int, encoding: str) -> None:
    partly = with_limits(fixtures.gpt(3, cuda=True, recompute=True), lambda row: row.class_name != "Attention")
    for run in (GPT, partly):
        text = text_of(run, width, encoding, path=None)
        assert all(cell_len(line) <= width for line in text.splitlines())
        assert encoding == "utf-8" or text.isascii()


def test_rows_that_hold_too_much_of_the_unknown_are_blank() -> None:
    run = with_limits(fixtures.gpt(4), lambda row: row.class_name != "Attention")
    text = text_of(run)
    assert rows_of(text, "─ c_fc")[-10:].count("-") == 0
    attention = rows_of(text, "─ attn")
    assert attention.count("-") == 3  # limit, reached, bound by
    assert "no limit is known of the other" in text


# --------------------------------------------------------------------------------------------------------------------
# Without limits
# --------------------------------------------------------------------------------------------------------------------


def test_without_limits_nothing_is_shown_and_the_next_step_says_how() -> None:
    run = dataclasses.replace(GPT, layers=[_without_limits(row) for row in GPT.layers])
    text = text_of(run)
    assert "\nlimit" not in text
    assert "bound by" not in text
    assert "  gradscope doctor --calibrate    measure this machine's limits\n" in text
    assert "gradscope doctor --calibrate" in text_of(run, path=None)
    assert "--calibrate" not in text_of(GPT)


def test_no_step_where_calibrating_would_not_help() -> None:
    """Without a recorded step, or from a gradscope that knew no bytes: there would be no limits either."""
    assert "--calibrate" not in text_of(fixtures.gpt(4))


def _without_limits(row: LayerRow) -> LayerRow:
    return dataclasses.replace(row, bound_by=None, forward_limit_ns=None, backward_limit_ns=None)


# --------------------------------------------------------------------------------------------------------------------
# Other reports
# --------------------------------------------------------------------------------------------------------------------


def test_markdown_has_the_columns() -> None:
    text = to_markdown(profile_document(GPT))
    assert re.search(r"- \*\*limit\*\*: [\d.]+ ms of backward ", text)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0].startswith("| layer | class | bwd ms | share | bwd limit | reached | bound by | bwd self |")
    assert len({line.replace("\\|", "").count("|") for line in table[: table.index(table[1]) + 10]}) == 1
    assert any("`c_fc`" in line and "| 50 % | compute |" in line for line in table)
    assert "bound by" not in to_markdown(profile_document(fixtures.gpt(4)))


def test_notebooks_have_them() -> None:
    html = to_fragment(profile_document(GPT))
    assert "bound by" in html
    assert "at this machine&#x27;s limit" in html
    assert "compute" in html
    assert "bound by" not in to_fragment(profile_document(fixtures.gpt(4)))


def test_frames_and_csv_have_the_columns_of_the_file() -> None:
    layers = Report(GPT).layers
    names = ["bytes", "bound_by", "forward_limit_ns", "backward_limit_ns"]
    assert set(names) <= set(layers.columns)
    assert layers["backward_limit_ns"].sum() == sum(row.backward_limit_ns or 0 for row in GPT.layers)
    assert str(layers["backward_limit_ns"].dtype) == "Int64"
    assert set(names) <= set(to_csv(GPT).splitlines()[0].split(","))


def test_hover_texts_say_it() -> None:
    words = layer_words(nodes_of(GPT)["transformer.h.*.mlp.c_fc"], METRICS["backward"])
    assert any("backward " in line and line.endswith("(50 %), bound by compute") for line in words)
    assert any("forward " in line and line.endswith("(25 %), bound by compute") for line in words)


def test_the_page_has_the_columns_where_there_are_limits() -> None:
    record = json.loads(json.dumps(page_record([GPT])))
    layers = record["runs"][0]["layers"]
    place = [row.path for row in GPT.layers].index("lm_head")
    row = GPT.layers[place]
    assert layers["backward_limit_ns"][place] == row.backward_limit_ns
    assert layers["forward_limit_ns"][place] == row.forward_limit_ns
    assert record["strings"][layers["bound_by"][place]] == "compute"
    assert "backward_limit_ns" not in page_record([fixtures.gpt(4)])["runs"][0]["layers"]


@pytest.mark.parametrize(("time", "whole"), [(0, 7), (5, None)])
def test_operations_of_what_takes_time_and_has_none_told_leave_the_sum_unknown(time: int, whole: int | None) -> None:
    """A rate over all of the time, of a part of the operations, would be too low."""
    known, unknown = Amounts(flops=7, backward_flops=7, backward_self_ns=3), Amounts(backward_self_ns=time)
    assert (add_up([known, unknown]).flops, add_up([known, unknown]).backward_flops) == (whole, whole)
    forward = Amounts(forward_ns=time)
    assert (add_up([known, forward]).flops, add_up([known, forward]).backward_flops) == (whole, 7)
