"""RUN.json of each rank -> what differs between them.

Every rank's step takes as long as that of the slowest, for they wait for each other: wall time tells nothing. What
tells is *own work*, the step without its communication, which holds the waits. A straggler works longest and waits
least.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradscope.errors import RunFileError, UsageError
from gradscope.report.runfile import load_run
from gradscope.safe_text import shown_path
from gradscope.tables import LayerRow, RunData

# Of the median rank's own work: what a rank must have more to be called a straggler. Below it no step would get shorter
# by as much as steps differ from each other.
LEAST_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's mean step, in ns."""

    rank: int
    wall_ns: int
    communication_ns: int  # collectives and waits, in any phase
    forward_ns: int
    backward_ns: int
    spread_ns: int  # standard deviation of its steps
    steps: int
    peak_bytes: int | None
    device: str

    @property
    def own_ns(self) -> int:
        """What it did without the others."""
        return self.wall_ns - self.communication_ns


@dataclass(frozen=True, slots=True)
class RankLayer:
    """One layer over the ranks that have it."""

    path: str
    class_name: str
    own_ns: dict[int, int]  # rank -> forward and backward without communication
    communication_ns: dict[int, int]  # rank -> forward and backward

    @property
    def slowest(self) -> int:
        """The rank in which it takes longest."""
        return max(self.own_ns, key=lambda rank: self.own_ns[rank])

    @property
    def others_ns(self) -> float:
        """The median of the other ranks; its own where there is no other."""
        others = [ns for rank, ns in self.own_ns.items() if rank != self.slowest]
        return statistics.median(others) if others else float(self.own_ns[self.slowest])

    @property
    def more_ns(self) -> float:
        """By how much the slowest rank takes longer than the others' median."""
        return self.own_ns[self.slowest] - self.others_ns


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    more_ns: int  # own work above the median of the others
    saves_ns: int  # of each step, at most, if it worked no longer than the next


@dataclass(frozen=True, slots=True)
class Merged:
    """All ranks that were given."""

    target: str
    world_size: int
    ranks: tuple[RankStep, ...]  # in order
    layers: tuple[RankLayer, ...]  # as the first rank that has them lists them
    straggler: Straggler | None
    notes: tuple[str, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which there is no file."""
        there = {step.rank for step in self.ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in there)

    def to_record(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        steps = [asdict(step) | {"own_ns": step.own_ns} for step in self.ranks]
        layers = [
            {
                "path": layer.path,
                "class": layer.class_name,
                "own_ns": {str(rank): ns for rank, ns in layer.own_ns.items()},
                "communication_ns": {str(rank): ns for rank, ns in layer.communication_ns.items()},
                "min_ns": min(layer.own_ns.values()),
                "median_ns": round(statistics.median(layer.own_ns.values())),
                "max_ns": max(layer.own_ns.values()),
                "slowest_rank": layer.slowest,
            }
            for layer in self.layers
        ]
        one = self.straggler
        return {
            "kind": "ranks",
            "schema_version": 1,
            "target": self.target,
            "world_size": self.world_size,
            "missing": list(self.missing),
            "ranks": steps,
            "layers": layers,
            "straggler": None if one is None else asdict(one),
            "notes": list(self.notes),
        }


def merge(paths: Sequence[str | os.PathLike[str]]) -> Merged:
    """Bring the runs of several ranks together.

    Args:
        paths: RUN.json of each rank, in any order.

    Raises:
        UsageError: fewer than two, two of one rank, or ranks of different programs.
        RunFileError: a file is no RUN.json, or of no rank.
    """
    if len(paths) < 2:
        raise UsageError("merge compares ranks: give the files of two or more, as run.rank*.json.")
    runs: dict[int, RunData] = {}
    names: dict[int, str] = {}
    for path in paths:
        run, name = load_run(path), shown_path(path)
        rank, size = run.environment.get("rank"), run.environment.get("world_size")
        if not isinstance(rank, int) or not isinstance(size, int):
            raise RunFileError(
                f"{name} is of no rank: its program ran alone.\n"
                "torchrun --nproc-per-node N -m gradscope profile train.py writes a file for each rank."
            )
        if rank in runs:
            raise UsageError(f"{names[rank]} and {name} are both of rank {rank}: give each rank once.")
        runs[rank], names[rank] = run, name
    _check_one_program(runs, names)
    ranks = tuple(_step(rank, runs[rank]) for rank in sorted(runs))
    first = runs[min(runs)]
    layers = _layers(runs)
    size = int(first.environment["world_size"])
    return Merged(first.workload.target, size, ranks, layers, _straggler(ranks), tuple(_notes(runs, ranks, size)))


def _check_one_program(runs: dict[int, RunData], names: dict[int, str]) -> None:
    first = min(runs)
    for rank in sorted(runs):
        one, other = runs[first], runs[rank]
        for what, mine, its in (
            ("ranks", one.environment["world_size"], other.environment["world_size"]),
            ("target", one.workload.target, other.workload.target),
            ("model", one.workload.model, other.workload.model),
        ):
            if mine != its:
                raise UsageError(
                    f"{names[first]} and {names[rank]} are of different programs: {what} {mine} and {its}."
                )


def _step(rank: int, run: RunData) -> RankStep:
    wall = run.step.spread.get("wall")
    return RankStep(
        rank=rank,
        wall_ns=run.step.wall_ns,
        communication_ns=run.step.communication_ns or 0,
        forward_ns=run.step.forward_ns,
        backward_ns=run.step.backward_ns,
        spread_ns=0 if wall is None else wall.std_ns,
        steps=run.workload.steps,
        peak_bytes=None if run.memory is None else run.memory.peak_bytes,
        device=str(run.environment.get("device_name", "")),
    )


def _layers(runs: dict[int, RunData]) -> tuple[RankLayer, ...]:
    found: dict[str, RankLayer] = {}
    for rank in sorted(runs):
        for row in runs[rank].layers:
            layer = found.setdefault(row.path, RankLayer(row.path, row.class_name, {}, {}))
            layer.own_ns[rank] = _own_ns(row)
            layer.communication_ns[rank] = row.communication_ns + row.forward_communication_ns
    return tuple(found.values())


def _own_ns(row: LayerRow) -> int:
    backward = row.backward_self_ns + row.recompute_ns + row.accumulate_ns + row.gradient_sum_ns + row.hook_ns
    return row.forward_self_ns - row.forward_communication_ns + backward


def _straggler(ranks: Sequence[RankStep]) -> Straggler | None:
    slowest = max(ranks, key=lambda step: step.own_ns)
    others = [step for step in ranks if step is not slowest]
    median = statistics.median(step.own_ns for step in others)
    more = slowest.own_ns - median
    if slowest.communication_ns > min(step.communication_ns for step in others):
        return None
    if more <= max(LEAST_SHARE * median, slowest.spread_ns):
        return None
    return Straggler(slowest.rank, round(more), slowest.own_ns - max(step.own_ns for step in others))


def _notes(runs: dict[int, RunData], ranks: Sequence[RankStep], size: int) -> list[str]:
    notes = []
    missing = [rank for rank in range(size) if rank not in runs]
    if missing:
        notes.append(f"no file of {_ranks(missing)}, of {size}")
    steps = {step.steps for step in ranks}
    if len(steps) > 1:
        notes.append(f"the ranks measured {min(steps)} to {max(steps)} steps")
    sets = [{row.path for row in run.layers} for run in runs.values()]
    everywhere = sets[0].intersection(*sets[1:])
    some = sets[0].union(*sets[1:]) - everywhere
    if some:
        notes.append(f"{len(some)} layer{'s are' if len(some) > 1 else ' is'} in some of the ranks alone")
    if all(run.step.communication_ns is None for run in runs.values()):
        notes.append("no rank had a collective in its steps: they do not wait for each other")
    partial = [rank for rank, run in sorted(runs.items()) if run.partial]
    if partial:
        notes.append(f"the report of {_ranks(partial)} is partial")
    return notes


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
