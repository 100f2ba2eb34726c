"""What profiling costs a compiled program: its steps, and compiling itself.

    python benchmarks/compiled_cost.py [--device cuda] [--json benchmarks/results/compiled_cost.jsonl]

Each round compiles ``examples/gpt.py`` anew, alone, under torch.profiler and under gradscope, in turns as to which is
first. Of compiling the first step counts, with an empty cache. Of steps it is the later ones, of further rounds that
find the compiled binaries in a cache of the benchmark's own, since such a round takes seconds: one compiled model
differs from the next, in where its memory lies, by more than profiling costs, so steps want many rounds. A ratio is
that of the medians over rounds, of one run, a round's being the median of its steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

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
    options.add_argument("--rounds", type=int, default=3, help="of compiling, with an empty cache")
    options.add_argument("--step-rounds", type=int, default=9, help="two at least")
    options.add_argument("--steps", type=int, default=8, help="of a round")
    options.add_argument("--mode", default=None, help="of torch.compile")
    arguments = options.parse_args()
    of_profiler = {name: VARIANTS[name] for name in ("torch.profiler alone", "gradscope")}
    variants: dict[str, Variant] = {"alone": alone, **of_profiler}
    compiling: dict[str, list[float]] = {name: [] for name in variants}
    steps: dict[str, list[float]] = {name: [] for name in variants}
    with quiet_kineto():
        with fresh_inductor_cache():
            for name in ("alone", "gradscope"):  # imports Inductor and fills the cache: torch.profiler runs the first's
                _round(variants[name], arguments.device, arguments.mode, 1)
            for name in _in_turns(list(variants), arguments.step_rounds):
                _, ran = _round(variants[name], arguments.device, arguments.mode, arguments.steps)
                steps[name].append(statistics.median(ran))
        for name in _in_turns(list(variants), arguments.rounds):
            with fresh_inductor_cache():
                took, _ = _round(variants[name], arguments.device, arguments.mode, 0)
            compiling[name].append(took)
    step = {name: statistics.median(taken) for name, taken in steps.items()}
    first = {name: statistics.median(taken) for name, taken in compiling.items()}
    alike = statistics.quantiles(steps["alone"], n=4)
    results = [
        Result("step alone", step["alone"], "ms"),
        Result("step alone: spread of the rounds", (alike[2] - alike[0]) / step["alone"], "IQR/median"),
        Result("step: torch.profiler over alone", step["torch.profiler alone"] / step["alone"], "x"),
        Result("step: gradscope over alone", step["gradscope"] / step["alone"], "x"),
        Result("step: gradscope over torch.profiler", step["gradscope"] / step["torch.profiler alone"], "x", STEP_GOAL),
        Result("first step alone", first["alone"] / 1e3, "s"),
        Result("first step: gradscope over alone", first["gradscope"] / first["alone"], "x", COMPILE_GOAL),
    ]
    print_table(f"examples/gpt.py compiled, mode {arguments.mode or 'default'}", results)
    return finish("compiled_cost", results, arguments.device, arguments.json)


def _in_turns(names: list[str], rounds: int) -> Iterator[str]:
    """Each name once a round, another one first each time."""
    for turn in range(rounds):
        begin = turn % len(names)
        yield from names[begin:] + names[:begin]


def _round(variant: Variant, device: str, mode: str | None, count: int) -> tuple[float, list[float]]:
    """The ms of a first step, which compiles, and of ``count`` later ones."""
    torch._dynamo.reset()
    model, plain = example_step(ROOT / "examples" / "gpt.py", device)
    model.compile(mode=mode)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        plain()

    with variant(model) as ended:
        began = time.perf_counter()
        step()
        synchronize(device)
        first = (time.perf_counter() - began) * 1e3
        ended()
        taken = []
        for _ in range(_SETTLING + count if count else 0):
            taken.append(timed(step, device))
            ended()
    return first, taken[_SETTLING:]


if __name__ == "__main__":
    sys.exit(main())
