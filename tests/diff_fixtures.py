"""Pairs of small runs whose every number is worked out by hand, for the tests of the comparison."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradscope.tables import HolderRow, MemoryInfo, RunData, SavedRow, Spread
from tests.report_fixtures import CPU, RunBuilder

MS = 1_000_000


def spread(steps: Sequence[int]) -> Spread:
    """As gradscope writes it: the sample standard deviation; no time is negative."""
    values = (min(steps), int(statistics.median(steps)), max(steps))
    return Spread(*(max(value, 0) for value in values), int(statistics.stdev(steps) if len(steps) > 1 else 0))


def run(
    layers: Mapping[str, Sequence[int]],
    *,
    steps: int | None = None,
    wall: Sequence[int] = (),
    classes: Mapping[str, str] | None = None,
    forward: Mapping[str, int] | None = None,
    recompute: Mapping[str, int] | None = None,
    saved: Mapping[str, int] | None = None,
    parameters: Mapping[str, int] | None = None,
    environment: Mapping[str, Any] = CPU,
    **build: Any,
) -> RunData:
    """A run of which each layer's backward nodes are given by step, in ns; the first path is the root.

    Args:
        wall: deviations of the whole step, of its forward and of its backward from their means, step by step;
            none: they do not vary at all.
        saved: measures memory: bytes by path, also allocated once each; the peak is twice what is saved.
    """
    builder = RunBuilder(file="net.py")
    for path, values in layers.items():
        sizes: dict[str, Any] = {}
        if saved is not None:
            size = saved.get(path, 0)
            sizes = {
                "saved_bytes": size,
                "saved_total_bytes": sum(v for k, v in saved.items() if not path or f"{k}.".startswith(f"{path}.")),
                "allocated_bytes": size,
                "allocations": 1 if size else 0,
                "copied_bytes": 0,
                "peak_bytes": size,
            }
        builder.add(
            path,
            (classes or {}).get(path, "Linear" if path else "Net"),
            round(statistics.fmean(values)),
            (forward or {}).get(path, 0),
            recompute=(recompute or {}).get(path, 0),
            parameters=(parameters or {}).get(path, 0),
            backward_self_steps_ns=tuple(values),
            **sizes,
        )
    settings = {"target": "net.py", "model": "Net", "environment": environment, "overhead": None}
    made = builder.build(**{**settings, **build})
    count = len(next(iter(layers.values()))) if steps is None else steps
    deviations = list(wall) or [0] * count
    step = made.step
    means = {"wall": step.wall_ns, "forward": step.forward_ns, "backward": step.backward_ns}
    return dataclasses.replace(
        made,
        step=dataclasses.replace(step, spread={k: spread([v + d for d in deviations]) for k, v in means.items()}),
        workload=dataclasses.replace(made.workload, steps=count),
        memory=None if saved is None else _memory(saved),
    )


def _memory(saved: Mapping[str, int]) -> MemoryInfo:
    whole = sum(saved.values())
    return MemoryInfo(
        device="cpu",
        peak_bytes=2 * whole,
        peak_ns=1,
        peak_phase="backward",
        peak_layer=None,
        peak_op="",
        at_peak=(HolderRow(None, "saved activations", 2 * whole),),
        start_bytes=0,
        end_bytes=0,
        timeline=(),
        phases=(),
        saved_bytes=whole,
        saved=tuple(SavedRow(path, None, "N", "self", "1", "float32", 1, size) for path, size in saved.items()),
        held_bytes=0,
        held=(),
        copied_bytes=0,
        copies=(),
        allocations=len(saved),
        step_allocated_bytes=whole,
        retained_after_step_bytes=0,
        retained=(),
    )


def around(mean: int, by: int) -> tuple[int, int, int, int, int]:
    """Five steps of that mean whose sample variance is ``by`` squared."""
    return (mean - by, mean - by, mean, mean + by, mean + by)
