"""What profiling costs a compiled program: its steps, and compiling itself.

    python benchmarks/compiled_cost.py [--device cuda] [--json benchmarks/results/compiled_cost.jsonl]

Each round compiles ``examples/gpt.py`` anew, with an empty cache, alone, under torch.profiler and under gradscope, in
turns as to which comes first, and runs some steps of each. A ratio is a median over those of the same run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict

import torch
from _common import ROOT, Result, example_step, finish, parser, print_table, synchronize, timed
from overhead import VARIANTS, Variant, alone
from torch._inductor.utils import fresh_inductor_cache

from gradscope.compat import quiet_kineto

STEP_GOAL = 1.10  # beside torch.profiler alone
COMPILE_GOAL = 1.20
_SETTLING = 3  # steps behind the first: CUDA graphs are captured in the second


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--mode", default=None, help="of torch.compile")
    arguments = options.parse_args()
    variants = {"alone": alone, **{name: VARIANTS[name] for name in ("torch.profiler alone", "gradscope")}}
    compiling: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    with quiet_kineto():
        _round(alone, arguments.device, arguments.mode, 1)  # which imports Inductor
        for turn in range(arguments.rounds):
            names = list(variants)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                took, ran = _round(variants[name], arguments.device, arguments.mode, arguments.steps)
                compiling[name].append(took)
                steps[name] += ran
    step = {name: statistics.median(taken) for name, taken in steps.items()}
    first = {name: statistics.median(taken) for name, taken in compiling.items()}
    results = [
        Result("step alone", step["alone"], "ms"),
        Result("step: torch.profiler over alone", step["torch.profiler alone"] / step["alone"], "x"),
        Result("step: gradscope over alone", step["gradscope"] / step["alone"], "x"),
        Result("step: gradscope over torch.profiler", step["gradscope"] / step["torch.profiler alone"], "x", STEP_GOAL),
        Result("first step alone", first["alone"] / 1e3, "s"),
        Result("first step: gradscope over alone", first["gradscope"] / first["alone"], "x", COMPILE_GOAL),
    ]
    print_table(f"examples/gpt.py compiled, mode {arguments.mode or 'default'}", results)
    return finish("compiled_cost", results, arguments.device, arguments.json)


def _round(variant: Variant, device: str, mode: str | None, count: int) -> tuple[float, list[float]]:
    """The ms of a first step, which compiles, and of ``count`` later ones."""
    torch._dynamo.reset()
    model, plain = example_step(ROOT / "examples" / "gpt.py", device)
    model.compile(mode=mode)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        plain()

    with fresh_inductor_cache(), variant(model) as ended:
        began = time.perf_counter()
        step()
        synchronize(device)
        first = (time.perf_counter() - began) * 1e3
        ended()
        taken = []
        for _ in range(_SETTLING + count):
            taken.append(timed(step, device))
            ended()
    return first, taken[_SETTLING:]


if __name__ == "__main__":
    sys.exit(main())
