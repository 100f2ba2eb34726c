"""RunData -> what the page reads: columns of numbers, and every text once.

The record is ``{"format": 1, "strings": [...], "runs": [run]}``; with a comparison the run after is followed by the run
before, and ``comparison`` holds what :mod:`gradscope.compare.page` says of the two. A run holds the tables of
RUN.json as columns of equal length; a text is an index into ``strings``, a layer an index into the run's layers, and -1
stands for none. A column is absent where nothing of it was measured. Values are self values, as in RUN.json; the page
sums them. What is a single figure in RUN.json is copied under its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gradscope import units
from gradscope.report.fold import build_tree
from gradscope.report.header import interrupted_by, measured_text, partial_text
from gradscope.report.page.findingsdata import findings_record
from gradscope.report.page.memorydata import memory_record
from gradscope.report.page.sourcedata import source_record
from gradscope.report.page.tables import plain_tables
from gradscope.report.runfile import to_record
from gradscope.report.view import LEDGER_WORDS
from gradscope.tables import LayerRow, LineRow, RunData, TakenStep, WorkloadInfo, is_unreliable

FORMAT = 1

_BARS = 400  # more steps than that share bars

_LAYER_NUMBERS = (
    "calls",
    "parameters",
    "forward_self_ns",
    "backward_self_ns",
    "recompute_ns",
    "accumulate_ns",
    "gradient_sum_ns",
    "hook_ns",
    "estimated_ns",
    "forward_estimated_ns",
    "device_ns",
    "idle_ns",
    "forward_flops",
    "backward_flops",
    "bytes",
    "forward_limit_ns",
    "backward_limit_ns",
    "saved_bytes",
    "peak_bytes",
    "allocated_bytes",
    "copied_bytes",
)


class Strings:
    """Texts, each once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        """The number of ``text``; -1 for ``None``."""
        return -1 if text is None else self._numbers.setdefault(text, len(self._numbers))

    def column(self, texts: Iterable[str | None]) -> list[int]:
        """The number of each text."""
        return [self.number(text) for text in texts]

    def all(self) -> list[str]:
        """The texts in order of their numbers."""
        return list(self._numbers)


def page_record(
    runs: Sequence[RunData], source: bool = True, comparison: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the page of ``runs`` holds, ready for JSON; without ``source``, no text of a source line is in it.

    Args:
        runs: one run, or with ``comparison`` the run after and the run before.
    """
    strings = Strings()
    records = [_run_record(run, strings, source) for run in runs]
    record = {"format": FORMAT, "strings": strings.all(), "runs": records}
    return record if comparison is None else {**record, "comparison": dict(comparison)}


def _run_record(run: RunData, strings: Strings, source: bool) -> dict[str, Any]:
    layers = _Layers(run.layers)
    record = {
        "gradscope": run.gradscope,
        "partial": partial_text(run),
        "source": source,
        "environment": dict(run.environment),
        "workload": to_record(run.workload),
        "step": {key: value for key, value in to_record(run.step).items() if key != "taken"},
        "taken": _taken(run.step.taken, run.workload),
        "measured": measured_text(run, full=False).split(" · "),
        "ledger": to_record(run.ledger),
        "ledger_words": [[key, *words] for key, words in LEDGER_WORDS.items()],
        **findings_record(run, source=source),
        "odd": layers.column(_odd_repeats(run)),
        "notes": list(run.notes),
        "tables": plain_tables(run, layers.rows),
        "layers": _layer_columns(run.layers, layers, strings),
        "ops": _op_columns(run.ops, layers, strings, "shape", ("calls", "self_ns")),
        "kernels": _op_columns(run.kernels, layers, strings, "op", ("calls", "device_ns", "busy_ns")),
        "lines": _line_columns(run.lines, layers, strings, source),
        "functions": source_record(run.lines) if source else [],
    }
    if run.memory is not None:
        record["memory"] = memory_record(run.memory, layers.column, strings.column)
    return record


def _op_columns(
    rows: Sequence[Any], layers: _Layers, strings: Strings, text: str, numbers: Sequence[str]
) -> dict[str, Any]:
    """The columns of operations or kernels, which have one more text and these numbers."""
    texts = {name: strings.column(getattr(row, name) for row in rows) for name in ("phase", "name", text)}
    return {"layer": layers.column(row.layer for row in rows), **texts, **_numbers(rows, numbers)}


def _taken(steps: Sequence[TakenStep], work: WorkloadInfo) -> dict[str, Any] | None:
    """A bar for each step, or for so many of them, of which the longest stands for all."""
    if len(steps) < 2:
        return None
    each = -(-len(steps) // _BARS)
    groups = [steps[first : first + each] for first in range(0, len(steps), each)]
    times, out = [step.ns for step in steps], sum(step.left_out for step in steps)
    left_out = f"; {units.count(out)} left out: {interrupted_by(work)}" if out else ""
    return {
        "words": f"{units.count(len(steps))} steps, {units.ns(min(times))} to {units.ns(max(times))}{left_out}",
        "each": each,
        "ns": [max(step.ns for step in group) for group in groups],
        "left_out": [int(any(step.left_out for step in group)) for group in groups],
    }


def _odd_repeats(run: RunData) -> Iterator[str]:
    """Paths of the layers whose backward is unlike that of all their repeats, as in the other reports."""
    steady = not is_unreliable(run.step)
    for root in build_tree(run.layers, run.step.backward_ns, run.workload.model, steady=steady):
        yield from (node.outlier.path for node in root.walk() if node.outlier is not None)


class _Layers:
    """Rows of layers by path, and where each stands in the tree."""

    def __init__(self, rows: Sequence[LayerRow]) -> None:
        self.rows = {row.path: index for index, row in enumerate(rows)}

    def number(self, path: str | None) -> int:
        return -1 if path is None else self.rows.get(path, -1)

    def column(self, paths: Iterable[str | None]) -> list[int]:
        return [self.number(path) for path in paths]

    def parent(self, row: LayerRow) -> int:
        """The nearest layer above that has a row, if the path of ``row`` continues it."""
        path = row.parent
        while path is not None and (path not in self.rows or path == row.path):
            path = path.rpartition(".")[0] if path else None
        if path is None or not (path == "" or row.path.startswith(f"{path}.")):
            return -1
        return self.rows[path]


def _layer_columns(rows: Sequence[LayerRow], layers: _Layers, strings: Strings) -> dict[str, Any]:
    parents = [layers.parent(row) for row in rows]
    return {
        "parent": parents,
        # A path is its parent's path, a dot, and this.
        "name": strings.column(_below(row, parent, rows) for row, parent in zip(rows, parents, strict=True)),
        "class": strings.column(row.class_name for row in rows),
        "source": strings.column(row.source for row in rows),
        "bound_by": strings.column(row.bound_by for row in rows),
        "steps_ns": [list(row.backward_self_steps_ns) for row in rows],
        "tied": {str(index): list(row.tied) for index, row in enumerate(rows) if row.tied},
        **_numbers(rows, _LAYER_NUMBERS),
    }


def _below(row: LayerRow, parent: int, rows: Sequence[LayerRow]) -> str:
    above = rows[parent].path if parent >= 0 else ""
    return row.path[len(above) + 1 :] if above else row.path


def _line_columns(rows: Sequence[LineRow], layers: _Layers, strings: Strings, source: bool) -> dict[str, Any]:
    return {
        "file": strings.column(row.file for row in rows),
        "function": strings.column(row.function for row in rows),
        "text": strings.column((row.text if source else "") for row in rows),
        "layer": layers.column(row.layer for row in rows),
        **_numbers(rows, ("line", "forward_ns", "backward_ns", "saved_bytes", "allocated_bytes", "copied_bytes")),
    }


def _numbers(rows: Sequence[Any], names: Sequence[str]) -> Mapping[str, list[Any]]:
    """A column for each of ``names``, but for those that were measured in no row; ``None`` stays ``None``."""
    columns = {name: [_short(getattr(row, name)) for row in rows] for name in names}
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def _short(value: Any) -> Any:
    """A mean over steps that is whole without its ``.0``: the script knows one kind of number, the page is smaller."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
