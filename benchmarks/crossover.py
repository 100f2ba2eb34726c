"""Where a recipe's own code for the CPU is sooner than torch's, over a grid: what ``backend="auto"`` goes by.

    python benchmarks/crossover.py [--only cross_entropy] [--threads 1 2] [--capability avx2 avx512]
                                   [--json benchmarks/results/crossover.jsonl]
    python benchmarks/crossover.py --overhead --tiny      # of calls so small that they go to torch

Each number of threads runs in a process of its own, each capability with ``ATEN_CPU_CAPABILITY`` set. Torch's
composition and ours take turns, forward and backward; a ratio is the median of the rounds' ratios, torch over ours, of
wall time and of processor time. Memory is the most that was allocated at one moment of a step beyond what lived before.
``SLOWER`` marks where "auto" takes ours although it is below x1.1 and not leaner at equal time, ``MISSED`` where it
takes torch although ours is x1.1 or more. At least x1.1 by two of the three quarters of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import environment, median, parser
from _peak import peak_bytes
from crossover_cases import CELLS, TINY, Cell, Step

from gradscope.compat import quiet_kineto

FASTER, EQUAL, LEANER = 1.1, 0.95, 0.8  # ours: times faster; at equal time; of torch's peak
_BLOCK_NS = 4_000_000  # of calls that are timed as one
_CELL_S = 1.2  # of all rounds of a cell
_FEWEST, _MOST = 5, 25  # rounds


def _block(step: Step, calls: int) -> tuple[int, int]:
    """Wall and processor time in ns of some calls."""
    wall, processor = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(calls):
        step()
    return time.perf_counter_ns() - wall, time.process_time_ns() - processor


def _calls(step: Step) -> int:
    """The number of calls that fill a block of the measurement."""
    step()
    return max(1, min(2000, _BLOCK_NS // max(1, min(_block(step, 1)[0] for _ in range(3)))))


def measure(cell: Cell, most: int = _MOST, enough_ns: float = _CELL_S * 1e9) -> dict[str, Any]:
    """Median ratios torch / ours of a cell, and what "auto" takes."""
    torchs, ours, _ = cell.make()
    choice = cell.explain()
    calls = [_calls(step) for step in (torchs, ours)]
    walls, processors, times = [], [], []
    spent = 0
    while len(walls) < most and (len(walls) < min(most, _FEWEST) or spent < enough_ns):
        order = (0, 1) if len(walls) % 2 else (1, 0)
        found = {side: _block((torchs, ours)[side], calls[side]) for side in order}
        spent += sum(wall for wall, _ in found.values())
        (wall, processor), (other_wall, other_processor) = (
            tuple(each / calls[side] for each in found[side]) for side in (0, 1)
        )
        walls.append(wall / other_wall)
        processors.append(processor / max(1.0, other_processor))
        times.append((wall, other_wall))
    with quiet_kineto():
        peaks = [max(1, peak_bytes(step, "cpu")) for step in (torchs, ours)]
    walls.sort()
    return {
        "recipe": cell.recipe,
        "sizes": cell.sizes,
        "auto": choice.backend,
        "own": choice.backend in cell.own,
        "ratio": median(walls),
        "low": walls[len(walls) // 4],
        "high": walls[-1 - len(walls) // 4],
        "processor_ratio": median(processors),
        "peak": peaks[1] / peaks[0],
        "torch_us": median([torchs for torchs, _ in times]) / 1e3,
        "own_us": median([ours for _, ours in times]) / 1e3,
        "rounds": len(walls),
    }


def pays(row: dict[str, Any]) -> bool:
    """Check that our code is what "auto" should take."""
    return row["ratio"] >= FASTER or (row["ratio"] >= EQUAL and row["peak"] <= LEANER)


def mark(row: dict[str, Any]) -> str:
    """``SLOWER``, ``MISSED`` or nothing."""
    if row["own"] and not pays(row):
        return "SLOWER"
    return "MISSED" if not row["own"] and row["ratio"] >= FASTER else ""


def overhead(cell: Cell, rounds: int = 41) -> dict[str, Any]:
    """What a call with "auto" takes beyond torch's in µs, forward and backward, medians of blocks in turns."""
    torchs, _, auto = cell.make()
    calls = _calls(torchs)
    for step in (torchs, auto):
        _block(step, calls)
    pairs = []
    for number in range(rounds):  # there and back: the first block of a round is the slower one
        first, second = (torchs, auto) if number % 2 else (auto, torchs)
        times = {step: _block(step, calls)[0] / calls for step in (first, second)}
        pairs.append((times[torchs], times[auto]))
    return {
        "recipe": cell.recipe,
        "sizes": cell.sizes,
        "auto": cell.explain().backend,
        "torch_us": median([plain for plain, _ in pairs]) / 1e3,
        "above_us": median([taken - plain for plain, taken in pairs]) / 1e3,
    }


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """A line a cell."""
    print(
        f"\n{title}\n  {'recipe':<21} {'sizes':<28} {'torch':>10} {'ours':>10}   ratio  (quarters)     cpu   peak  auto"
    )
    for row in rows:
        print(
            f"  {row['recipe']:<21} {row['sizes']:<28} {row['torch_us']:>7.0f} µs {row['own_us']:>7.0f} µs  "
            f"x{row['ratio']:<5.2f} ({row['low']:.2f} to {row['high']:.2f})  x{row['processor_ratio']:<5.2f} "
            f"{row['peak']:.2f}  {row['auto']:<9} {mark(row)}".rstrip()
        )


def print_overheads(title: str, rows: list[dict[str, Any]]) -> None:
    """A line a call."""
    print(f"\n{title}\n  {'recipe':<21} {'sizes':<28} {'torch':>10}   above it  auto")
    for row in rows:
        print(
            f"  {row['recipe']:<21} {row['sizes']:<28} {row['torch_us']:>7.1f} µs  {row['above_us']:>6.1f} µs  "
            f"{row['auto']}"
        )


def in_a_process(options: argparse.Namespace, threads: int, capability: str | None) -> dict[str, Any]:
    """The record of one number of threads and one capability."""
    command = [sys.executable, __file__, "--one", "--threads", str(threads), "--rounds", str(options.rounds)]
    command += ["--seconds", str(options.seconds)]
    command += ["--only", *options.only] if options.only else []
    command += [f"--{name}" for name in ("tiny", "overhead") if getattr(options, name)]
    setting = {} if capability is None else {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | setting)
    if done.returncode:
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def record_here(options: argparse.Namespace) -> dict[str, Any]:
    """Every cell, in this process."""
    torch.set_num_threads(options.threads[0])
    cells = [cell for cell in (TINY if options.tiny else CELLS) if not options.only or cell.recipe in options.only]
    rows = []
    for cell in cells:
        if options.overhead:
            rows.append(overhead(cell))
        else:
            rows.append(measure(cell, options.rounds, 0 if options.tiny else options.seconds * 1e9))
        print(".", end="", file=sys.stderr, flush=True)
    return {
        "benchmark": "crossover, overhead" if options.overhead else "crossover",
        **environment("cpu"),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "cells": rows,
    }


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", metavar="RECIPE", default=[])
    made.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    made.add_argument("--capability", nargs="+", default=[None], help="avx2, avx512; else what the CPU has")
    made.add_argument("--rounds", type=int, default=_MOST)
    made.add_argument("--seconds", type=float, default=_CELL_S, help="of all rounds of a cell")
    made.add_argument("--tiny", action="store_true", help="a few very small cells: for a test")
    made.add_argument("--overhead", action="store_true", help="calls that go to torch: what they take above it")
    made.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.one:
        print(json.dumps(record_here(options)))
        return 0
    marked = 0
    for capability in options.capability:
        for threads in options.threads:
            record = in_a_process(options, threads, capability)
            title = f"{record['capability']}, {threads} thread{'s' * (threads > 1)}, load {record['load']:.1f}"
            (print_overheads if options.overhead else print_rows)(title, record["cells"])
            if not options.overhead:
                marked += sum(bool(mark(row)) for row in record["cells"])
            if options.json is not None:
                _append(options.json, record)
    if not options.overhead:
        print(f"\n{marked} cells where another choice is the better one")
    return int(marked > 0)


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
