"""Traces of our own that were recorded on a GPU: tests/data/gpu/README.md says what of."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from gradscope.chrome.run import read_trace
from gradscope.tables import RunData

DATA = Path(__file__).parents[1] / "data" / "gpu"
# A million cycles at the clock of that recording, in ns: what the kernels of layer a show.
MEGACYCLES = 505_600


def durations(name: str) -> dict[str, float]:
    """ns by name of every kernel and copy in the file."""
    found: dict[str, float] = {}
    for event in json.loads(gzip.decompress((DATA / name).read_bytes()))["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[event["name"]] = found.get(event["name"], 0.0) + event["dur"] * 1e3
    return found


@pytest.fixture(scope="module")
def streams() -> RunData:
    return read_trace(DATA / "streams.json.gz").data


@pytest.mark.parametrize("name", ["streams.json.gz", "compiled.json.gz"])
def test_the_device_s_ledger_is_the_files_kernel_time(name: str) -> None:
    data = read_trace(DATA / name).data
    assert data.device is not None and data.workload.steps == 3
    # Each part is rounded down.
    assert data.device.kernel_ns * 3 == pytest.approx(sum(durations(name).values()), abs=100)


def test_each_layer_has_what_it_spun(streams: RunData) -> None:
    """Forward once and backward twice, whatever else ran; the multiplication before it is a layer's too."""
    device = {row.path: row.device_ns for row in streams.layers}
    for layer, cycles in (("Layer_0", 4), ("Layer_1", 3), ("Layer_2", 2)):
        assert device[layer] == pytest.approx(3 * cycles * MEGACYCLES, rel=0.01), layer


def test_what_lies_beside_longer_compute_takes_no_time_of_the_step(streams: RunData) -> None:
    """b runs beside a: in forward it ends before a does, in backward the first of both to start has the time."""
    rows = {row.path: row for row in streams.layers}
    forward = {path: row.forward_self_ns for path, row in rows.items()}
    assert forward["Layer_1"] < 0.1 * 3 * MEGACYCLES
    assert forward["Layer_2"] == pytest.approx(2 * MEGACYCLES, rel=0.05)
    beside = rows["Layer_0"].backward_self_ns + rows["Layer_1"].backward_self_ns
    assert beside == pytest.approx(8 * MEGACYCLES, rel=0.05)


def events_of(name: str, category: str) -> list[tuple[float, float]]:
    """Start and end in microseconds, in order."""
    events = json.loads(gzip.decompress((DATA / name).read_bytes()))["traceEvents"]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == category)


def test_a_copy_costs_what_is_left_of_it(streams: RunData) -> None:
    """What lies beside a kernel, on whatever stream, is the kernel's: counted here instant by instant."""
    copies = [row for row in streams.kernels if "Memcpy HtoD (Pinned" in row.name]
    assert {row.layer for row in copies} == {""}
    alone = 0.0
    kernels = events_of("streams.json.gz", "kernel")
    for start, end in events_of("streams.json.gz", "gpu_memcpy"):
        if end - start < 1000:
            continue  # of single numbers
        moments = sorted({start, end, *(time for pair in kernels for time in pair if start < time < end)})
        for first, last in pairwise(moments):
            alone += (last - first) * (not any(begin <= first and last <= until for begin, until in kernels))
    assert sum(row.busy_ns or 0 for row in copies) == pytest.approx(alone * 1e3 / 3, rel=0.001)
