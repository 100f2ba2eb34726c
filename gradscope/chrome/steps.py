"""Where the steps of an exported trace lie: at marks of ``prof.step()``, else at the ends of ``Optimizer.step``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradscope.chrome.host import Host
from gradscope.chrome.reading import ANNOTATION, BACKWARD, HOST
from gradscope.errors import TraceFileError
from gradscope.tables import IntColumn

PROFILER_STEP = "ProfilerStep#"
OPTIMIZER_STEP = "Optimizer.step#"
_DIGITS = 12  # of a step's number, at most


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Where the steps lie.

    Attributes:
        how: what they were cut at: "ProfilerStep", "Optimizer.step" or "" where the whole trace is taken for one.
    """

    numbers: tuple[int, ...]  # as the trace numbers them, else from 0 on
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    how: str
    turns: int = 1  # of optimizers of one name, that are one step


def find_steps(host: Host, wanted: tuple[int, int] | None) -> StepBounds:
    """The steps that count: of those that are asked for, the ones in which something ran backward."""
    found = _profiler_steps(host) or _optimizer_steps(host) or _whole(host)
    asked = [i for i, number in enumerate(found.numbers) if wanted is None or wanted[0] <= number <= wanted[1]]
    chosen = [i for i in asked if _has_backward(host, found, i)]
    if not chosen and found.how == "Optimizer.step" and wanted is None:
        return _whole(host)  # the pass lies behind the last step of the optimizer
    if not chosen:
        raise TraceFileError(_no_step(host.found.name, found.numbers, wanted, some=bool(asked)))
    return StepBounds(
        tuple(found.numbers[i] for i in chosen),
        tuple(found.start_ns[i] for i in chosen),
        tuple(found.end_ns[i] for i in chosen),
        found.how,
        found.turns,
    )


def _whole(host: Host) -> StepBounds:
    return StepBounds((0,), (int(host.start.min()),), (int(host.end.max()) + 1,), "")


def _no_step(name: str, numbers: Sequence[int], wanted: tuple[int, int] | None, *, some: bool) -> str:
    """Why no step is left; ``some``: there are steps of these numbers."""
    first, last = numbers[0], numbers[-1]
    has = f"step {first} alone" if first == last else f"steps {first} to {last}"
    if wanted is None:
        return f"{name} has {has}, and no backward pass in it.\nCall prof.step() behind each step's backward pass."
    if not some:
        return f"{name} has {has}: --steps {wanted[0]}-{wanted[1]} leaves none."
    return (
        f"{name} has no backward pass in --steps {wanted[0]}-{wanted[1]}: a step without one does not count.\n"
        f"It has {has}: give others, or leave out --steps."
    )


def _has_backward(host: Host, steps: StepBounds, i: int) -> bool:
    start = host.start[host.nodes]
    return bool(((start >= steps.start_ns[i]) & (start < steps.end_ns[i])).any())


def _profiler_steps(host: Host) -> StepBounds | None:
    rows = host.named(ANNOTATION, PROFILER_STEP)
    if not len(rows):
        rows = host.named(HOST, PROFILER_STEP)  # of torch before 1.12
    texts = [host.names[number].removeprefix(PROFILER_STEP) for number in host.name[rows].tolist()]
    kept = [i for i, text in enumerate(texts) if text.isascii() and text.isdecimal() and len(text) < _DIGITS]
    if not kept:
        return None
    start, end = host.start[rows[kept]].tolist(), host.end[rows[kept]].tolist()
    end = [min(last, following) for last, following in zip(end, [*start[1:], end[-1]], strict=True)]
    return StepBounds(tuple(int(texts[i]) for i in kept), tuple(start), tuple(end), "ProfilerStep")


def _optimizer_steps(host: Host) -> StepBounds | None:
    """Steps from the end of one ``Optimizer.step`` to that of the next, of the optimizer that steps least often."""
    rows = host.named(ANNOTATION, OPTIMIZER_STEP)
    if not len(rows):
        rows = host.named(HOST, OPTIMIZER_STEP)
    rows = _behind_passes(host, rows)
    if not len(rows):
        return None
    counts = Counter(host.name[rows].tolist())
    rarest = min(counts.values())
    last = [name for name in host.name[rows].tolist() if counts[name] == rarest][-1]
    ends = np.sort(host.end[rows[host.name[rows] == last]])
    gradients = host.nodes[[_ACCUMULATES in host.names[name] for name in host.name[host.nodes].tolist()]]
    turns = _turns(np.diff(np.searchsorted(np.sort(host.start[gradients]), ends)).tolist())
    bounds = ends[turns - 1 :: turns].tolist()
    # What precedes the first end may be a part of a step alone: it counts where there is no other.
    bounds = bounds if len(bounds) > 1 else [int(host.start.min()), *bounds]
    return StepBounds(tuple(range(len(bounds) - 1)), tuple(bounds[:-1]), tuple(bounds[1:]), "Optimizer.step", turns)


_ACCUMULATES = "AccumulateGrad"


def _behind_passes(host: Host, rows: IntColumn) -> IntColumn:
    """``rows`` but those within a backward pass: an optimizer of each parameter that steps in its hook ends no step.

    It steps in a node, on the thread that evaluates it.
    """
    around = np.concatenate([np.flatnonzero(host.kind == BACKWARD), host.nodes])
    inside = np.zeros(len(rows), bool)
    for thread in np.unique(host.thread[rows]).tolist():
        theirs, mine = around[host.thread[around] == thread], host.thread[rows] == thread
        start, end = np.sort(host.start[theirs]), np.sort(host.end[theirs])
        begins = host.start[rows[mine]]
        # As many have begun as have ended where none is open.
        inside[mine] = np.searchsorted(start, begins, side="right") > np.searchsorted(end, begins, side="right")
    return rows[~inside]


def _turns(gradients: Sequence[int]) -> int:
    """How many optimizers of one class take turns, told by how many gradients came between their steps; 1 for one.

    The profiler names an optimizer by its class alone, and in a GAN two of one class step. How many parameters each
    has differs, and comes again in each turn: twice at least. What a model does in a step may differ, too, but not the
    parameters that it has.
    """
    for turns in range(2, len(gradients) // 2 + 1):
        if len(set(gradients)) > 1 and gradients[turns:] == gradients[:-turns]:
            return turns
    return 1
