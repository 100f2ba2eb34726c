"""What reading a trace costs: from the profiler's stop to a Report, by number of events.

    python benchmarks/analysis.py [--events 250000 500000 1000000] [--json benchmarks/results/analysis.jsonl]

Each size runs in a process of its own: a run of the model of tiny ops, long enough for that many events, then
``gradscope.pipeline.read``, timed, with the peak of resident memory above what the stopped profiler held before.
``key_averages()`` on the same profiler follows, at the largest size only unless told otherwise: it needs a minute and
gigabytes where gradscope needs seconds. The survey's one step costs the same at every size.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import Result, finish, parser, print_table, tiny_step
from torch import nn

NS_GOAL = 4000.0
BYTES_GOAL = 300.0
SPEEDUP_GOAL = 20.0
LINEAR_GOAL = 1.25  # time an event at the largest size over that at the smallest


def measure(events: int, device: str, with_key_averages: bool) -> dict[str, float]:
    """Capture about ``events`` events, analyse them, and say what it took."""
    a_step = _events_a_step(device)
    steps = max(1, round(events / a_step))
    model, capture = _capture(steps, device)
    from gradscope import pipeline
    from gradscope.tables import WorkloadInfo

    about = WorkloadInfo(target="", mode="loop", steps=steps, warmup=1, loss=None)
    parts = [part for part in (capture.timed, capture.survey) if part is not None]
    # The analysis lets go of the profilers as it reads them; only for key_averages() are they kept.
    kept = [part.profiler.profiler for part in parts] if with_key_averages else []
    in_list = _in_a_child(lambda: _bytes_of_event_list(parts[0].profiler)) if with_key_averages else 0
    _release_memory()
    before, start = _resident_bytes(), time.perf_counter_ns()
    report = pipeline.read(capture, about, {"": model}).report
    elapsed, peak = time.perf_counter_ns() - start, _peak_bytes()
    assert report is not None and report.data.ledger.backward_ns > 0
    found = {"events": round(a_step * (steps + 1)), "ns": elapsed, "bytes": max(0, peak - before)}
    if with_key_averages:
        found["list_bytes"] = in_list
        start = time.perf_counter_ns()
        for profiler in kept:
            profiler.key_averages()
        found["key_averages_ns"] = time.perf_counter_ns() - start
    return found


def _capture(steps: int, device: str) -> tuple[nn.Module, Any]:
    from gradscope.capture.session import Session
    from gradscope.tables import Options

    model, step = tiny_step(device)
    with Session(Options(steps=steps, warmup=1)) as session:
        finished = False
        while not finished:
            step()
            finished = session.boundary()
    return model, session.capture


def _events_a_step(device: str) -> float:
    from gradscope.compat import kineto_events

    _model, capture = _capture(2, device)
    return len(kineto_events(capture.timed.profiler)) / 3  # one more step settles


def _bytes_of_event_list(profiler: Any) -> int:
    """Resident memory of the list in which torch hands out its events, before anything is read from it."""
    from gradscope.compat import kineto_events

    _release_memory()
    before = _resident_bytes()
    events = kineto_events(profiler)
    return max(0, _resident_bytes() - before) if events else 0


def _in_a_child(work: Callable[[], int]) -> int:
    """``work()`` in a forked process, so that its memory does not count here; 0 where there is no fork."""
    if not hasattr(os, "fork"):
        return 0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(work()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return int(text or 0)


def _release_memory() -> None:
    """Give freed memory back and forget the peak so far, so that the peak which follows is the analysis's own."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _resident_bytes() -> int:
    return _status("VmRSS") or _peak_bytes()


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(key: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def in_a_process(events: int, device: str, with_key_averages: bool) -> dict[str, float]:
    """:func:`measure` in a fresh interpreter: the peak of memory is a figure of the whole process."""
    command = [sys.executable, __file__, "--device", device, "--one", str(events)]
    command += ["--key-averages"] if with_key_averages else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def results_of(sizes: list[dict[str, float]]) -> list[Result]:
    """A result a size and quantity, then how linear the time is."""
    results = []
    largest = max(size["events"] for size in sizes)
    for size in sizes:
        name = f"{size['events']:,.0f} events"
        held_to_goal = size["events"] == largest
        results.append(Result(f"{name}: stop to Report", size["ns"] / 1e9, "s"))
        ns, each = size["ns"] / size["events"], size["bytes"] / size["events"]
        results.append(Result(f"{name}: time an event", ns, "ns", NS_GOAL if held_to_goal else None))
        results.append(Result(f"{name}: memory an event", each, "bytes", BYTES_GOAL if held_to_goal else None))
        if "key_averages_ns" in size:
            listed = size["list_bytes"] / size["events"]
            results.append(Result(f"{name}: torch's own list of events, for comparison", listed, "bytes"))
            slow = size["key_averages_ns"]
            results.append(Result(f"{name}: key_averages()", slow / 1e9, "s"))
            results.append(
                Result(
                    f"{name}: key_averages() over ours",
                    slow / size["ns"],
                    "x",
                    SPEEDUP_GOAL if held_to_goal else None,
                    True,
                )
            )
    if len(sizes) > 1:
        each = [size["ns"] / size["events"] for size in sorted(sizes, key=lambda size: size["events"])]
        results.append(Result("time an event, largest over smallest", each[-1] / each[0], "x", LINEAR_GOAL))
    return results


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--events", type=int, nargs="+", default=[250_000, 500_000, 1_000_000])
    made.add_argument("--key-averages", action="store_true", help="run key_averages() at every size")
    made.add_argument("--one", type=int, metavar="EVENTS", help="measure one size in this process and print JSON")
    options = made.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.device, options.key_averages)))
        return 0
    largest = max(options.events)
    sizes = [
        in_a_process(events, options.device, options.key_averages or events == largest) for events in options.events
    ]
    results = results_of(sizes)
    print_table(f"Analysis, model of tiny ops on {options.device}", results)
    return finish("analysis", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
