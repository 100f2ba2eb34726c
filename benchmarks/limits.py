"""This machine's ceilings as ``gradscope doctor --calibrate`` measures them, how long that takes, and how steady it is.

    python benchmarks/limits.py [--device cuda] [--json benchmarks/results/limits.jsonl]

Nothing is kept. Twice in one run: a ceiling that another run finds a tenth lower is none.
"""

from __future__ import annotations

import sys
import time

import torch
from _common import Result, finish, parser, print_table

from gradscope.limits.measure import measure

GOAL_SECONDS = 20.0
GOAL_STEADY = 1.1


def main() -> int:
    options = parser(__doc__).parse_args()
    began = time.perf_counter()
    first = measure(torch.device(options.device))
    took = time.perf_counter() - began
    second = measure(torch.device(options.device))
    results = [Result(f"products of {name}", rate / 1e9, "GFLOP/s") for name, rate in first.flops.items()]
    results += [
        Result("copies", first.bytes / 1e9, "GB/s"),
        Result("smallest call", first.call_ns, "ns"),
        Result("time", took, "s", GOAL_SECONDS),
        Result("float32, twice", _apart(first.flops["float32"], second.flops["float32"]), "x", GOAL_STEADY),
        Result("copies, twice", _apart(first.bytes, second.bytes), "x", GOAL_STEADY),
    ]
    print_table(f"limits of {first.device}, {torch.get_num_threads()} threads", results)
    return finish("limits", results, options.device, options.json)


def _apart(one: float, other: float) -> float:
    return max(one, other) / min(one, other)


if __name__ == "__main__":
    sys.exit(main())
