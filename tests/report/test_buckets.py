"""DDP's buckets as a table of the report: each number in its column."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradscope.document.parts import Table
from gradscope.report.bucketsection import buckets_section
from gradscope.tables import BucketRow
from tests import report_fixtures as fixtures

MS = 1_000_000
ROW = BucketRow(
    model="",
    number=3,
    parameters=4,
    bytes=25_000_000,
    layers=("b", "a"),
    first_at_ns=11 * MS,
    mean_at_ns=22 * MS,
    last_at_ns=33 * MS,
    begun_at_ns=44 * MS,
    begun_by="a",
    pass_ns=66 * MS,
    exposed_ns=55 * MS,
)


def cells(*rows: BucketRow) -> list[dict[str, str]]:
    section = buckets_section(replace(fixtures.mlp(), buckets=rows))
    assert section is not None
    (table,) = section.blocks
    assert isinstance(table, Table)
    return [
        {column.key: cell.text for column, cell in zip(table.columns, row.cells, strict=True)} for row in table.rows
    ]


def test_each_number_is_in_its_column() -> None:
    (found,) = cells(ROW)
    assert (found["number"], found["layers"], found["bytes"]) == ("3", "b and 1 more", "25.0 MB")
    times = [float(found[f"{what}_ns"]) for what in ("first_at", "mean_at", "last_at", "begun_at", "exposed")]
    assert times == [11, 22, 33, 44, 55]


@pytest.mark.parametrize(
    ("layers", "text"),
    [((), "-"), (("a",), "a"), (("a", "b"), "a and 1 more"), (("a", "b", "c"), "a and 2 more")],
)
def test_layers_are_counted(layers: tuple[str, ...], text: str) -> None:
    (found,) = cells(replace(ROW, layers=layers))
    assert found["layers"] == text


def test_models_are_named_where_there_are_several() -> None:
    assert [row["number"] for row in cells(ROW, replace(ROW, number=4))] == ["3", "4"]
    rows = (replace(ROW, model="actor"), replace(ROW, model="critic"))
    assert [row["number"] for row in cells(*rows)] == ["actor 3", "critic 3"]


def test_where_there_are_none_there_is_no_table() -> None:
    assert buckets_section(fixtures.mlp()) is None
