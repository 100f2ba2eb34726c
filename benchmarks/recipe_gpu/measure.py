"""Times the ways of one problem in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from recipe_gpu.budget import Budget
from recipe_gpu.problem import Inputs, Kind, Problem, Step, Way
from recipe_gpu.timer import Limits, Sample, error_of

ENOUGH_SECONDS = 2.0  # of timed rounds of one problem
FEWEST_ROUNDS = 3
# Of gradients of two computations in bfloat16, as the norm of their difference over their norm: each is off by up to
# 1e-2, and a wrong term, index or scale by ten times more.
LARGEST_ERROR = 0.05


class Timer(Protocol):
    """What measuring asks of a device; :class:`recipe_gpu.timer.CudaTimer` on a GPU."""

    def sample(self, step: Step, host_ms: float = 0.0) -> Sample: ...

    def peak(self, step: Step) -> int: ...

    def waits(self, step: Step) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Figure:
    """One way's numbers, or why there are none."""

    way: str
    kind: Kind
    ms: float = 0.0  # median
    spread: float = 0.0  # half the range of the middle half of the times, over the median
    host_ms: float = 0.0
    peak_bytes: int = 0
    error: float | None = (
        None  # of its gradients beside the first way's; None where masks are drawn, or it is the first
    )
    waits: bool | None = None  # the host waited for the device; None where it was not asked
    share: float = 0.0  # of the limit
    failure: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Runner:
    """A way made ready."""

    way: Way
    step: Step
    restore: Callable[[], None]
    error: float | None = None
    host_ms: float = 0.0


def measure(
    problem: Problem,
    timer: Timer,
    limits: Limits,
    budget: Budget,
    *,
    rounds: int,
    problems_after: int,
    skip: dict[str, str] | None = None,
    device: str = "cuda",
    begin: Callable[[str], None] = lambda _: None,
) -> Iterator[Figure]:
    """The figures of all ways, in their order.

    Args:
        rounds: how many times each way is timed, fewer where that takes more than ENOUGH_SECONDS.
        problems_after: how many problems follow.
        skip: names of ways that are not run -> why.
        begin: called with the name of a way before it is made ready, and with "" when all are timed.
    """
    inputs = problem.make(device, problem.dtype)
    failures: dict[str, str] = dict(skip or {})
    ready: dict[str, Runner] = {}
    expected: Sequence[Tensor] | None = None  # gradients of the first way that runs
    for way in problem.ways:
        why = failures.get(way.name) or _why_no_time(way, budget, problems_after)
        if why is not None:
            failures[way.name] = why
            continue
        begin(way.name)
        try:
            started = time.perf_counter()
            runner = _ready(problem, way, inputs)
            found = runner.step()
            timer.synchronize()
            if way.kind == Kind.COMPILE:
                budget.compiled_in(time.perf_counter() - started)
            if expected is not None and not problem.random:
                runner.error = error_of(found, expected)
            expected = found if expected is None else expected
            del found  # memory that other ways may need
            runner.restore()
            runner.host_ms = timer.sample(runner.step).host_ms
            ready[way.name] = runner
        except Exception as error:  # out of memory, not supported here, or wrong: the others go on
            failures[way.name] = reason(error)
            timer.synchronize()  # raises where the device is lost: then nothing more can be run in this process
    del expected
    begin("")
    figures = _timed(problem, timer, limits, ready, rounds, failures)
    for way in problem.ways:
        yield figures.get(way.name) or Figure(way.name, way.kind, failure=failures[way.name])


def _why_no_time(way: Way, budget: Budget, problems_after: int) -> str | None:
    return budget.why_no_compile(problems_after) if way.kind == Kind.COMPILE else None


def _ready(problem: Problem, way: Way, inputs: Inputs) -> Runner:
    run: Callable[..., Any] = way.run
    if way.kind == Kind.COMPILE:
        torch._dynamo.reset()  # a function compiled at another shape counts towards the limit of recompilations
        run = torch.compile(run, dynamic=False)
    own = inputs.copy() if way.overwrites else inputs
    restore = (lambda: own.restore(inputs)) if way.overwrites else lambda: None
    return Runner(way, problem.step(run, own), restore)


def _timed(
    problem: Problem, timer: Timer, limits: Limits, ready: dict[str, Runner], rounds: int, failures: dict[str, str]
) -> dict[str, Figure]:
    times: dict[str, list[float]] = {name: [] for name in ready}
    hosts: dict[str, list[float]] = {name: [] for name in ready}
    started = time.perf_counter()
    for turn in range(rounds):
        if turn >= FEWEST_ROUNDS and time.perf_counter() - started > ENOUGH_SECONDS:
            break
        for name, runner in list(ready.items()):
            try:
                runner.restore()
                sample = timer.sample(runner.step, runner.host_ms)
            except Exception as error:
                failures[name] = reason(error)
                del ready[name]
                timer.synchronize()
                continue
            runner.host_ms = sample.host_ms
            times[name].append(sample.device_ms)
            hosts[name].append(sample.host_ms)
    found = {}
    for name, runner in ready.items():
        try:
            runner.restore()
            peak = timer.peak(runner.step)
            runner.restore()
            waits = timer.waits(runner.step) if runner.way.kind == Kind.RECIPE else None
        except Exception as error:
            failures[name] = reason(error)
            timer.synchronize()
            continue
        ms = statistics.median(times[name])
        found[name] = Figure(
            name,
            runner.way.kind,
            ms,
            _spread(times[name]),
            statistics.median(hosts[name]),
            peak,
            runner.error,
            waits,
            least_ms(problem, limits) / ms if ms else 0.0,
        )
    return found


def least_ms(problem: Problem, limits: Limits) -> float:
    """What the bytes and the operations take at the limits; the longer of both."""
    return 1e3 * max(problem.bytes / limits.bytes_per_s, problem.flop / limits.flop_per_s)


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle else 0.0


def reason(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:100]
