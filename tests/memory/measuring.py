"""Runs a small model under gradscope and gives the memory part of its report, with every sum checked by hand."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

import gradscope
from gradscope.attribute.memory.timeline import MOST_OWNERS
from gradscope.tables import MemoryInfo, RunData

#: Bytes of one element.
F32, F64, BF16, I64, BOOL = 4, 8, 2, 8, 1


class Kept(NamedTuple):
    """A row of ``memory.saved`` as a test works it out."""

    layer: str | None
    node: str
    what: str
    shape: str
    dtype: str
    bytes: int  # of all ``count`` storages
    count: int = 1


def summed(output: Tensor, _batch: Any) -> Tensor:
    """A loss whose node keeps nothing: the gradient of a sum is an expanded one."""
    return output.sum()


def measured(
    model: nn.Module, batch: Any, loss: Any = summed, optimizer: Any = None, *, steps: int = 1, **options: Any
) -> RunData:
    """The report of :func:`gradscope.profile` on the CPU, its sums checked."""
    data = gradscope.profile(model, batch, loss, optimizer, steps=steps, warmup=1, device="cpu", **options).data
    check_sums(data)
    return data


def in_a_loop(model: nn.Module | None, step: Callable[[], Any], **options: Any) -> RunData:
    """The report of a user's own loop of ``step()`` calls, its sums checked."""
    with gradscope.profiling(model, steps=1, warmup=1, **options) as prof:
        for _ in range(100):
            step()
            if prof.step():
                break
        else:
            raise AssertionError("prof.step() never said that enough is measured")
    data = prof.report.data
    check_sums(data)
    return data


def memory_of(data: RunData) -> MemoryInfo:
    """The memory part, which must be there."""
    assert data.memory is not None
    return data.memory


def saved(data: RunData) -> list[Kept]:
    """What was kept for backward, the lines of a layer together, sorted."""
    sizes: Counter[tuple[str | None, str, str, str, str]] = Counter()
    counts = sizes.copy()
    for row in memory_of(data).saved:
        key = (row.layer, row.node, row.what, row.shape, row.dtype)
        sizes[key] += row.bytes
        counts[key] += row.count
    return _sorted(Kept(*key, size, counts[key]) for key, size in sizes.items())


def _sorted(rows: Iterable[Kept]) -> list[Kept]:
    return sorted(rows, key=lambda row: (row.layer or "", *row[1:]))


def assert_saved(data: RunData, *expected: Kept) -> None:
    """Exactly these rows, and the same bytes in the columns of the layers: self and total."""
    assert saved(data) == _sorted(expected)
    own: Counter[str] = Counter()
    for row in expected:
        if row.layer is not None:
            own[row.layer] += row.bytes
    for layer in data.layers:
        below = f"{layer.path}." if layer.path else ""
        total = sum(size for path, size in own.items() if path == layer.path or path.startswith(below))
        assert layer.saved_bytes == own[layer.path], layer.path
        assert layer.saved_total_bytes == total, layer.path
    assert memory_of(data).saved_bytes == sum(row.bytes for row in expected)


def at_peak(data: RunData) -> dict[tuple[str | None, str], int]:
    """Bytes of the live set at the peak by (owner, category), without what others hold in this process."""
    rows = {(row.owner, row.category): row.bytes for row in memory_of(data).at_peak}
    rows.pop((None, "other tensors"), None)
    return rows


def layer(data: RunData, path: str) -> Any:
    """The row of one layer."""
    return next(row for row in data.layers if row.path == path)


def line_of(tag: str, path: str) -> str:
    """ "file.py:12" of the one line of a file that ends in the comment ``tag``."""
    lines = Path(path).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {tag}")]
    assert len(found) == 1, f"the comment {tag!r} ends lines {found} of {path}"
    return f"{Path(path).name}:{found[0]}"


def place(line: str | None) -> str | None:
    """A report's "folder/file.py:12" without its folder."""
    return line and Path(line).name


def example(name: str) -> ModuleType:
    """One of the example files, imported afresh."""
    path = Path(__file__).parents[2] / "examples" / name
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def bytes_of_all_tensors() -> int:
    """Bytes of all storages that Python holds."""
    storages: dict[int, int] = {}
    for tensor in [item for item in gc.get_objects() if issubclass(type(item), Tensor)]:
        with suppress(RuntimeError, NotImplementedError):  # not every wrapper has a storage
            storage = tensor.untyped_storage()
            if storage.device.type != "meta":  # as fake tensors are
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def moment(memory: MemoryInfo, ns: int) -> dict[str, int]:
    """Bytes by category from the last point of the timeline that is not after ``ns``, without those of others."""
    assert memory.categories is not None
    index = max(i for i, point in enumerate(memory.timeline) if point.ns <= ns)
    found = {course.category: course.bytes[index] for course in memory.categories if course.bytes[index]}
    found.pop("other tensors", None)
    return found


def _check_course(data: RunData) -> None:
    """Categories add up at every point, and to the live set at the peak; spans are in order, and none overlaps."""
    memory = memory_of(data)
    assert memory.categories is not None and memory.spans is not None and memory.spans_left_out is not None
    for i, point in enumerate(memory.timeline):
        assert sum(course.bytes[i] for course in memory.categories) == point.bytes
    for course in memory.categories:
        assert len(course.bytes) == len(memory.timeline) and min(course.bytes) >= 0 and max(course.bytes) > 0
    held: Counter[str] = Counter()
    for row in memory.at_peak:
        held[row.category] += row.bytes
    at_peak = {
        course.category: {
            size
            for point, size in zip(memory.timeline, course.bytes, strict=True)
            if (point.ns, point.bytes) == (memory.peak_ns, memory.peak_bytes)
        }
        for course in memory.categories
    }
    assert all(size in at_peak[category] for category, size in held.items())
    _check_owners(data)
    end = memory.phases[-1].end_ns
    assert all(0 <= span.start_ns < span.end_ns <= end for span in memory.spans)
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(memory.spans))
    assert {span.layer for span in memory.spans} <= {row.path for row in data.layers}
    assert {span.phase for span in memory.spans} <= {"forward", "backward", "recompute"}


def _check_owners(data: RunData) -> None:
    """Owners add up to no more than a point's bytes, and at the peak each has what the live set says."""
    memory = memory_of(data)
    assert memory.owners is not None
    for i, point in enumerate(memory.timeline):
        assert 0 <= sum(course.bytes[i] for course in memory.owners) <= point.bytes
    held: Counter[str | None] = Counter()
    for row in memory.at_peak:
        held[None if row.owner is None else _folded(row.owner, data)] += row.bytes
    peaks = [
        i for i, point in enumerate(memory.timeline) if (point.ns, point.bytes) == (memory.peak_ns, memory.peak_bytes)
    ]
    found = [{course.owner: course.bytes[i] for course in memory.owners if course.bytes[i]} for i in peaks]
    shown = {course.owner for course in memory.owners}
    most = [max(course.bytes) for course in memory.owners]
    assert most == sorted(most, reverse=True)
    assert len(shown) == MOST_OWNERS or {owner for owner, size in held.items() if size} <= shown
    assert {owner: size for owner, size in held.items() if owner in shown} in found


def _folded(owner: str, data: RunData) -> str:
    """The path with a "*" for the number of each block, which is what holds layers."""
    parts = owner.split(".")
    blocks = [".".join(parts[: i + 1]) + "." for i in range(len(parts))]
    holds = [any(row.path.startswith(block) for row in data.layers) for block in blocks]
    return ".".join("*" if part.isdigit() and above else part for part, above in zip(parts, holds, strict=True))


def check_sums(data: RunData) -> None:
    """Every sum that the report promises, from its rows alone, and no negative number."""
    memory = memory_of(data)
    assert sum(row.bytes for row in memory.at_peak) == memory.peak_bytes
    assert len({(row.owner, row.category) for row in memory.at_peak}) == len(memory.at_peak)
    assert sum(row.bytes for row in memory.saved) == memory.saved_bytes
    assert sum(row.bytes for row in memory.held) == memory.held_bytes
    assert sum(row.bytes for row in memory.copies) == memory.copied_bytes
    assert sum(row.bytes for row in memory.retained) == memory.retained_after_step_bytes
    for rows in (memory.at_peak, memory.saved, memory.held, memory.copies, memory.retained):
        assert all(row.bytes > 0 for row in rows)
    assert max(point.bytes for point in memory.timeline) == memory.peak_bytes
    assert memory.timeline[0].bytes == memory.start_bytes
    assert memory.timeline[-1].bytes == memory.end_bytes
    assert min(point.bytes for point in memory.timeline) >= 0
    assert memory.peak_ns in {point.ns for point in memory.timeline}
    _check_course(data)
    spans = memory.phases
    assert spans[0].start_ns == 0 and all(span.start_ns < span.end_ns for span in spans)
    assert all(first.end_ns == second.start_ns for first, second in pairwise(spans))
    for row in data.layers:
        assert row.forward_allocated_bytes + row.backward_allocated_bytes == row.allocated_bytes
        assert row.forward_allocations + row.backward_allocations == row.allocations
    assert sum(row.allocations for row in data.layers) <= memory.allocations
    assert sum(row.allocated_bytes for row in data.layers) <= memory.step_allocated_bytes
    assert sum(row.copied_bytes for row in data.layers) <= memory.copied_bytes
    if data.lines:
        for column, rows in (("saved_bytes", memory.saved), ("copied_bytes", memory.copies)):
            by_line: Counter[str] = Counter()
            for found in rows:
                by_line[found.line or ""] += found.bytes
            del by_line[""]
            sizes = {f"{row.file}:{row.line}": getattr(row, column) for row in data.lines}
            assert {line: size for line, size in sizes.items() if size} == dict(by_line)
