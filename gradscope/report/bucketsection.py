"""What DistributedDataParallel reduces together: when it was there, when it was sent, and what was waited for it."""

from __future__ import annotations

from gradscope import units
from gradscope.document.parts import Cell, Column, Row, Section, Table, code, plain
from gradscope.tables import BucketRow, RunData


def buckets_section(run: RunData) -> Section | None:
    """The buckets as a table; None where there are none."""
    rows = run.buckets
    if not rows:
        return None
    scale = units.time_scale(max(row.pass_ns for row in rows))
    columns = (
        Column("number", "bucket", align="left"),
        Column("layers", "layers", align="left", least=12, most=48),
        Column("bytes", "size"),
        Column("first_at_ns", "first", scale.unit, drop=3),
        Column("mean_at_ns", "mean", scale.unit, drop=2),
        Column("last_at_ns", "last", scale.unit),
        Column("begun_at_ns", "sent", scale.unit),
        Column("exposed_ns", "waited", scale.unit),
    )
    several = len({row.model for row in rows}) > 1
    about = (
        f"gradients that are reduced together: when they were there and when they were sent, of a backward pass of "
        f"{units.ns(max(row.pass_ns for row in rows))}"
    )
    table = Table(columns, tuple(Row(_cells(row, scale, several)) for row in rows))
    return Section("buckets", "Gradient buckets", about, (table,))


def _cells(row: BucketRow, scale: units.TimeScale, several: bool) -> tuple[Cell, ...]:
    name = f"{row.model} {row.number}" if several else str(row.number)
    more = f" and {len(row.layers) - 1} more" if len(row.layers) > 1 else ""
    times = (row.first_at_ns, row.mean_at_ns, row.last_at_ns, row.begun_at_ns, row.exposed_ns)
    return (
        *plain([name]),
        code(f"{row.layers[0] if row.layers else '-'}{more}"),
        *plain([units.size(row.bytes), *map(scale.text, times)]),
    )
