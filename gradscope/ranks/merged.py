"""RUN.json of each rank -> what differs between them.

Every rank's step takes as long as that of the slowest, for they wait for each other: wall time tells nothing. What
tells is *own work*, the step without its communication, which holds the waits. Stragglers work longest and wait
least.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradscope.errors import RunFileError, UsageError
from gradscope.report.runfile import load_run
from gradscope.safe_text import shown_path
from gradscope.tables import LayerRow, RunData

# Of the other ranks' own work: what stragglers must have more. Below it no step would get shorter by as much as steps
# differ from each other.
LEAST_SHARE = 0.03
# Standard errors of the mean step, by which they must stand out of the others.
_ERRORS = 2.0
# A file that names more ranks was not written by a run.
_MOST_RANKS = 1 << 20


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

    def beside(self, ranks: Collection[int]) -> int:
        """The median of all ranks but these; 0 where no other has it."""
        others = [ns for rank, ns in self.own_ns.items() if rank not in ranks]
        return round(statistics.median(others)) if others else 0

    def more_than(self, ranks: Collection[int]) -> int:
        """By how much the slowest takes longer than all but these ranks."""
        return self.own_ns[self.slowest] - self.beside(ranks)


@dataclass(frozen=True, slots=True)
class Straggler:
    """The ranks that the others wait for: one, or several that work about as long."""

    ranks: tuple[int, ...]  # the slowest first
    more_ns: int  # own work of theirs above that of the others, medians
    saves_ns: int  # of each step, at most, if they worked no longer than the slowest of the others


@dataclass(frozen=True, slots=True)
class Merged:
    """All ranks that were given."""

    target: str
    world_size: int
    ranks: tuple[RankStep, ...]  # in order
    layers: tuple[RankLayer, ...]  # as the first rank that has them lists them
    straggler: Straggler | None
    spread_ns: int  # by which the slowest rank's mean step is uncertain
    notes: tuple[str, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which there is no file."""
        there = {step.rank for step in self.ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in there)

    @property
    def communicates(self) -> bool:
        """Check that the ranks talked to each other in their steps: else nobody waits for anybody."""
        return any(step.communication_ns > 0 for step in self.ranks)

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
        if type(rank) is not int or type(size) is not int:
            raise RunFileError(
                f"{name} is of no rank: its program ran alone.\n"
                "torchrun --nproc-per-node N -m gradscope profile train.py writes a file for each rank."
            )
        if not 0 <= rank < size <= _MOST_RANKS:
            raise RunFileError(f"{name} is of rank {rank} of {size}, which no run is of: profile again.")
        if rank in runs:
            raise UsageError(f"{names[rank]} and {name} are both of rank {rank}: give each rank once.")
        runs[rank], names[rank] = run, name
    _check_one_program(runs, names)
    ranks = tuple(_step(rank, runs[rank]) for rank in sorted(runs))
    first = runs[min(runs)]
    size = int(first.environment["world_size"])
    return Merged(
        target=first.workload.target,
        world_size=size,
        ranks=ranks,
        layers=_layers(runs),
        straggler=_straggler(ranks),
        spread_ns=round(_uncertain(max(ranks, key=lambda step: step.own_ns))),
        notes=tuple(_notes(runs, ranks, size)),
    )


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
    """The ranks beyond the widest gap between two that follow each other in own work, where it is no accident.

    They are half of all at most: where one works less than all others, it is that one that stands out.
    """
    if not any(step.communication_ns for step in ranks):
        return None
    order = sorted(ranks, key=lambda step: step.own_ns)
    least = len(order) - len(order) // 2
    cut = max(range(least, len(order)), key=lambda place: order[place].own_ns - order[place - 1].own_ns)
    others, slow = order[:cut], order[: cut - 1 : -1]
    gap = slow[-1].own_ns - others[-1].own_ns
    if gap <= max(LEAST_SHARE * others[-1].own_ns, *(_uncertain(step) for step in ranks)):
        return None
    inside = others[-1].own_ns - others[0].own_ns
    if len(order) > 2 and gap <= inside:  # the others differ from each other by as much
        return None
    if statistics.mean(step.communication_ns for step in slow) > statistics.mean(
        step.communication_ns for step in others
    ):
        return None
    more = statistics.median(step.own_ns for step in slow) - statistics.median(step.own_ns for step in others)
    return Straggler(tuple(step.rank for step in slow), round(more), slow[0].own_ns - others[-1].own_ns)


def _uncertain(step: RankStep) -> float:
    """By how much the mean of its steps may be off."""
    return _ERRORS * step.spread_ns / math.sqrt(max(step.steps, 1))


def _notes(runs: dict[int, RunData], ranks: Sequence[RankStep], size: int) -> list[str]:
    notes = []
    if len(runs) < size:
        notes.append(f"no file of {_ranks(_missing(sorted(runs), size))}, of {size}")
    steps = {step.steps for step in ranks}
    if len(steps) > 1:
        notes.append(f"the ranks measured {min(steps)} to {max(steps)} steps")
    if len({tuple(step.left_out for step in run.step.taken) for run in runs.values()}) > 1:
        notes.append("the ranks left out different steps, which were interrupted: means are not of the same")
    sets = [{row.path for row in run.layers} for run in runs.values()]
    everywhere = sets[0].intersection(*sets[1:])
    some = sets[0].union(*sets[1:]) - everywhere
    if some:
        notes.append(f"{len(some)} layer{'s are' if len(some) > 1 else ' is'} in some of the ranks alone")
    for what, found in (
        ("parameters", {f"{run.workload.parameters:,}" for run in runs.values()}),
        ("device meshes", {str(run.environment.get("mesh", "none")) for run in runs.values()}),
        ("devices", {str(run.environment.get("device_name", "unknown")) for run in runs.values()}),
    ):
        if len(found) > 1:
            notes.append(f"the ranks have different {what}: {', '.join(sorted(found)[:4])}")
    if all(run.step.communication_ns is None for run in runs.values()):
        notes.append("no rank had a collective in its steps: they do not wait for each other")
    partial = [rank for rank, run in sorted(runs.items()) if run.partial]
    if partial:
        notes.append(f"the report of {_ranks([(rank, rank) for rank in partial])} is partial")
    return notes


def _missing(there: Sequence[int], size: int) -> list[tuple[int, int]]:
    """First and last of each stretch of ranks that are not there."""
    bounds = [-1, *there, size]
    return [(low + 1, high - 1) for low, high in itertools.pairwise(bounds) if high - low > 1]


def _ranks(stretches: Sequence[tuple[int, int]]) -> str:
    several = len(stretches) > 1 or stretches[0][0] < stretches[0][1]
    texts = [f"{low}" if low == high else f"{low} to {high}" for low, high in stretches]
    return f"rank{'s' if several else ''} {', '.join(texts)}"
