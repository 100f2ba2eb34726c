"""What measuring memory costs a whole run, and how its peak compares with the allocator's own.

    python benchmarks/memory.py [--device cuda] [--json benchmarks/results/memory.jsonl]

Whole runs of gradscope.profile with and without memory, in turns; a ratio is the median of one over the median of the
other. On CUDA the peak of a plain step by torch.cuda.max_memory_allocated stands beside gradscope's.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from _common import ROOT, Result, TinyOps, finish, parser, print_table, workload_step

RUN_GOAL = 2.0  # a whole run with memory over one without
PEAK_GOAL = 0.01  # relative to the allocator's own peak
EXAMPLES = ("gpt.py", "attention.py", "convnet.py", "checkpoint.py")


def load(path: Path, device: str) -> object:
    """The workload of an example file."""
    from gradscope import workload

    return workload.load_target(str(path), [], device=device)


def tiny(device: str) -> object:
    """350 linears of 16x16, where every op is smaller than the cost of looking at it."""
    from gradscope.workload import Workload

    return Workload(TinyOps().to(device), torch.randn(16, 16, device=device))


def compare(name: str, workload: object, device: str, rounds: int) -> list[Result]:
    """Whole runs with and without memory, and the profiled step in each."""
    import gradscope

    seconds: dict[bool, list[float]] = {True: [], False: []}
    steps: dict[bool, list[float]] = {True: [], False: []}
    peak = 0
    for _ in range(rounds):
        for memory in (False, True):
            started = time.perf_counter()
            report = gradscope.profile(workload, device=device, memory=memory)  # type: ignore[arg-type]
            seconds[memory].append(time.perf_counter() - started)
            steps[memory].append(report.data.step.spread["wall"].median_ns)
            peak = report.data.memory.peak_bytes if report.data.memory is not None else peak
    whole, step = ({key: statistics.median(taken) for key, taken in table.items()} for table in (seconds, steps))
    results = [
        Result(f"{name}: whole run, with memory over without", whole[True] / whole[False], "x", RUN_GOAL),
        Result(f"{name}: profiled step, with memory over without", step[True] / step[False], "x"),
    ]
    if device == "cuda":
        results.append(Result(f"{name}: peak off the allocator's", _off(workload, device, peak), "", PEAK_GOAL))
    return results


def _off(workload: object, device: str, peak: int) -> float:
    _, step = workload_step(workload, device)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return abs(peak / torch.cuda.max_memory_allocated() - 1)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=4)
    options = made.parse_args()
    results = []
    for name in EXAMPLES:
        results += compare(name, load(ROOT / "examples" / name, options.device), options.device, options.rounds)
    results += compare("350 tiny ops", tiny(options.device), options.device, options.rounds)
    print_table(f"Memory on {options.device}", results)
    return finish("memory", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
