"""What measuring costs: profiled steps beside unprofiled ones, interleaved in one run.

    python benchmarks/overhead.py [--device cuda] [--json benchmarks/results/overhead.jsonl]

Each round runs a few steps plain, then under gradscope, torch.profiler with everything on, and full backward hooks.
A ratio is the median step of a variant over the median plain step of the same run, so that a machine which slows down
slows both. The first step under each variant is dropped, as gradscope itself drops it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from _common import ROOT, Result, example_step, finish, parser, print_table, timed, tiny_step
from torch import nn
from torch.profiler import ProfilerActivity, profile

GPT_GOAL = 1.03
TINY_GOAL = 1.5

Step = Callable[[], object]
# Measures while it is open; gives what is told of the end of each step.
Variant = Callable[[nn.Module], AbstractContextManager[Step]]


def _nothing() -> None:
    pass


@contextmanager
def under_gradscope(_model: nn.Module) -> Iterator[Step]:
    """The state of gradscope's timed steps, without the analysis that follows them."""
    from gradscope.capture.phases.timed import Timed
    from gradscope.capture.session import Session
    from gradscope.tables import Options

    with Session(Options(steps=1_000_000, warmup=0, lines=False)) as session:
        while session.phase != Timed.name:
            session.boundary()
        yield session.boundary


@contextmanager
def under_torch_profiler(_model: nn.Module, **options: bool) -> Iterator[Step]:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, **options):
        yield _nothing


@contextmanager
def under_backward_hooks(model: nn.Module) -> Iterator[Step]:
    """A full backward hook pair on every module, as one writes it by hand to time backward."""
    handles = []
    for module in model.modules():
        handles.append(module.register_full_backward_pre_hook(lambda *_: None))
        handles.append(module.register_full_backward_hook(lambda *_: None))
    try:
        yield _nothing
    finally:
        for handle in handles:
            handle.remove()


def alone(_model: nn.Module) -> AbstractContextManager[Step]:
    """Nothing is measured."""
    return nullcontext(_nothing)


VARIANTS: dict[str, Variant] = {
    "gradscope": under_gradscope,
    "torch.profiler alone": under_torch_profiler,
    "torch.profiler, shapes + stack + memory": partial(
        under_torch_profiler, record_shapes=True, with_stack=True, profile_memory=True
    ),
    "full backward hooks": under_backward_hooks,
}


def compare(model: nn.Module, step: Step, device: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Step times in ms by variant, taken in turns."""
    variants: dict[str, Variant] = {"plain": alone, **VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        step()
    for _ in range(rounds):
        for name, variant in variants.items():
            with variant(model) as ended:

                def whole(ended: Step = ended) -> None:
                    step()
                    ended()

                whole()
                times[name] += [timed(whole, device) for _ in range(steps)]
    return times


def ratios(title: str, times: dict[str, list[float]], goal: float) -> list[Result]:
    plain = statistics.median(times["plain"])
    results = [Result(f"{title}: plain step", plain, "ms")]
    for name in VARIANTS:
        wanted = goal if name == "gradscope" else None
        results.append(Result(f"{title}: {name}", statistics.median(times[name]) / plain, "x plain", wanted))
    spread = statistics.quantiles(times["plain"], n=4)
    results.append(Result(f"{title}: spread of the plain step", (spread[2] - spread[0]) / plain, "IQR/median"))
    return results


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=6)
    made.add_argument("--steps", type=int, default=4, help="timed steps a round and variant")
    made.add_argument("--model", type=Path, default=ROOT / "examples" / "gpt.py")
    options = made.parse_args()
    from gradscope.compat import quiet_kineto

    results = []
    with quiet_kineto():
        model, step = example_step(options.model, options.device)
        times = compare(model, step, options.device, options.rounds, options.steps)
        results += ratios(options.model.name, times, GPT_GOAL)
        model, step = tiny_step(options.device)
        times = compare(model, step, options.device, options.rounds, 4 * options.steps)
        results += ratios("350 tiny ops", times, TINY_GOAL)
    print_table(f"Overhead on {options.device}", results)
    return finish("overhead", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
