"""Modules whose true cost is known: each burns a set time and writes down what it really took.

A burn lasts *at least* what it was asked for; on a machine that other programs share it may last longer. The truth is
therefore what the meter measured, not what was asked for. What the meter cannot see, the time other programs took
*between* two burns, it measures as stolen time: wall clock that passed without this thread's CPU clock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

OUTSIDE = "(outside every module)"

# A sleeping thread is less likely to be preempted when it goes on; the last part is spun for exactness.
_SPIN_NS = 400_000


@dataclass(frozen=True)
class Burned:
    """One burn: ``kind`` is forward, recompute, backward, accumulate, hook or outer; times of ``perf_counter_ns``.

    ``step`` counts the steps of which :meth:`Meter.begin_step` was told; 0 where nobody tells.
    """

    kind: str
    owner: str
    start_ns: int
    end_ns: int
    start_cpu_ns: int
    end_cpu_ns: int
    thread: int
    profiled: bool
    step: int

    @property
    def elapsed_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass
class Meter:
    """Collects the burns of one run.

    A burn is ``profiled`` where it ran while torch's profiler was on. A run profiles one step more at its start, to
    settle, and one at its end, the survey: :meth:`select` keeps the steps between, which are the measured ones.

    Attributes:
        scale: of the length of every burn; 0 where only bytes are counted.
    """

    records: list[Burned] = field(default_factory=list)
    measured: list[Burned] = field(default_factory=list)
    scale: float = 1.0
    profiled_steps: list[int] = field(default_factory=list)  # numbers of those that began under a profiler
    steps: int = 0  # of which it was told

    def __deepcopy__(self, memo: Any) -> Meter:
        return self  # a copy of a layer burns into the same meter

    def clear(self) -> None:
        self.records.clear()
        self.measured.clear()
        self.profiled_steps.clear()
        self.steps = 0

    def begin_step(self) -> None:
        """A step begins; called in every step, or in none."""
        self.steps += 1
        if profiler_runs():
            self.profiled_steps.append(self.steps)

    @contextmanager
    def burn(self, kind: str, owner: str, ms: float = 0.0) -> Iterator[None]:
        """Make the body last at least ``ms`` and record how long it lasted."""
        start, start_cpu = time.perf_counter_ns(), time.thread_time_ns()
        yield
        wait_until(start + int(ms * self.scale * 1e6))
        end, end_cpu = time.perf_counter_ns(), time.thread_time_ns()
        thread, profiled = threading.get_ident(), profiler_runs()
        self.records.append(Burned(kind, owner, start, end, start_cpu, end_cpu, thread, profiled, self.steps))

    def adopt(self, model: nn.Module) -> None:
        """Tell every burning module of ``model`` its path, under which its burns are recorded."""
        for path, module in model.named_modules():
            if isinstance(module, Burning):
                module.owner, module.meter = path, self

    def select(
        self, steps: int, *, settling: int = 1, after: int = 3, left_out: Collection[int] = frozenset()
    ) -> list[str]:
        """Keep the burns of the ``steps`` measured steps.

        Args:
            steps: measured steps.
            settling: profiled steps before them.
            after: profiled steps behind them: the survey, and two that measure memory.
            left_out: numbers of profiled steps that were interrupted, from 0 for the settling one.

        Returns:
            What does not fit: one text for each burn that not every step has equally, where nobody told of the steps.
        """
        total = settling + steps + len(left_out) + after
        kept = [number for number in range(settling, total - after) if number not in left_out]
        if self.profiled_steps:
            return self._select_told(total, kept)
        by_key: dict[tuple[str, str], list[Burned]] = {}
        for record in sorted(self.records, key=lambda record: record.start_ns):
            if record.profiled:
                by_key.setdefault((record.kind, record.owner), []).append(record)
        self.measured, problems = [], []
        for key, burns in by_key.items():
            each, uneven = divmod(len(burns), total)
            if uneven:
                problems.append(f"{key}: {len(burns)} burns in {total} profiled steps")
            self.measured += [burned for number in kept for burned in burns[each * number : each * (number + 1)]]
        self.measured.sort(key=lambda record: record.start_ns)
        return problems

    def _select_told(self, total: int, kept: list[int]) -> list[str]:
        if len(self.profiled_steps) != total:
            return [f"{len(self.profiled_steps)} steps were profiled, not {total}"]
        wanted = {self.profiled_steps[number] for number in kept}
        self.measured = [record for record in self.records if record.step in wanted]
        return []

    def totals_ns(self, kind: str) -> dict[str, int]:
        """Measured time by owner, over all measured steps."""
        totals: Counter[str] = Counter()
        for record in self.measured:
            if record.kind == kind:
                totals[record.owner] += record.elapsed_ns
        return dict(totals)

    def counts(self) -> dict[tuple[str, str], int]:
        """Number of measured burns by kind and owner."""
        return dict(Counter((record.kind, record.owner) for record in self.measured))

    def gaps_ns(self, after: str, before: str, kind: str = "backward") -> int:
        """Time from the end of each measured burn of ``after`` to the start of ``before``'s, where that is the next."""
        burns = [record for record in self.measured if record.kind == kind]
        return sum(b.start_ns - a.end_ns for a, b in pairwise(burns) if (a.owner, b.owner) == (after, before))

    def stolen_ns(self) -> int:
        """Wall clock between measured burns of one thread in which that thread did not run."""
        total = 0
        last: dict[int, Burned] = {}
        for record in self.measured:
            before = last.get(record.thread)
            if before is not None and before.end_ns <= record.start_ns:
                wall = record.start_ns - before.end_ns
                total += max(0, wall - (record.start_cpu_ns - before.end_cpu_ns))
            last[record.thread] = record
        return total


def profiler_runs() -> bool:
    """Check that torch's profiler runs anywhere in the process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def wait_until(deadline_ns: int) -> None:
    """Rest until ``perf_counter_ns`` says so."""
    left = deadline_ns - time.perf_counter_ns()
    if left > _SPIN_NS:
        time.sleep((left - _SPIN_NS) / 1e9)
    while time.perf_counter_ns() < deadline_ns:
        pass


class Burn(torch.autograd.Function):
    """Identity of its first tensor that burns in forward and in backward; later tensors get a zero gradient.

    It saves its input, so that activation checkpointing has something to recompute, unless told not to.
    """

    @staticmethod
    def forward(ctx: Any, spec: BurnSpec, *tensors: Tensor) -> Tensor:
        ctx.spec, ctx.inputs = spec, len(tensors)
        if spec.save:
            ctx.save_for_backward(*tensors)
        recomputing = torch._C._current_graph_task_id() != -1
        with spec.meter.burn("recompute" if recomputing else "forward", spec.owner, spec.forward_ms):
            return tensors[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        others = ctx.saved_tensors[1:] if ctx.spec.save else ()
        if torch.is_grad_enabled():  # create_graph: the backward burn needs a node of its own
            return (None, BurnBackward.apply(grad, ctx.spec), *[torch.zeros_like(other) for other in others])
        with ctx.spec.meter.burn("backward", ctx.spec.owner, ctx.spec.backward_ms):
            return (None, grad.view_as(grad), *[torch.zeros_like(other) for other in others])


class BurnBackward(torch.autograd.Function):
    """The backward burn, itself differentiable: in a double backward its node burns as much again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, spec: BurnSpec) -> Tensor:
        ctx.spec = spec
        with spec.meter.burn("backward", spec.owner, spec.backward_ms):
            return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with ctx.spec.meter.burn("backward", ctx.spec.owner, ctx.spec.backward_ms):
            return grad.view_as(grad), None


@dataclass
class BurnSpec:
    """What one burn costs and whose it is."""

    meter: Meter
    owner: str
    forward_ms: float
    backward_ms: float
    save: bool = True


def burn(meter: Meter, owner: str, *tensors: Tensor, forward_ms: float = 0.0, backward_ms: float = 0.0) -> Tensor:
    """Burn as a plain function, recorded under ``owner``."""
    result: Tensor = Burn.apply(BurnSpec(meter, owner, forward_ms, backward_ms), *tensors)
    return result


class Burning(nn.Module):
    """A layer that burns ``forward_ms`` and ``backward_ms`` a call; without parameters."""

    def __init__(self, forward_ms: float = 1.0, backward_ms: float = 2.0, *, save: bool = True) -> None:
        super().__init__()
        self.forward_ms, self.backward_ms, self.save = forward_ms, backward_ms, save
        self.owner = "(not adopted)"
        self.meter = Meter()

    def spec(self) -> BurnSpec:
        return BurnSpec(self.meter, self.owner, self.forward_ms, self.backward_ms, self.save)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Burn.apply(self.spec(), x)
        return result


class Source(Burning):
    """A burning first layer: its input needs no gradient, its one parameter does."""

    def __init__(self, forward_ms: float = 1.0, backward_ms: float = 2.0) -> None:
        super().__init__(forward_ms, backward_ms)
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Burn.apply(self.spec(), x, self.anchor)
        return result


class Transformed(torch.autograd.Function):
    """A function that torch.func can transform, and whose backward burns; once for all that ``vmap`` maps over.

    What torch's machinery for such a function takes around it, some 0.4 ms, is inside the burn.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(spec: BurnSpec, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.spec = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        with ctx.spec.meter.burn("backward", ctx.spec.owner, ctx.spec.backward_ms):
            return None, Transformed.apply(ctx.spec, grad)


class Transformable(Burning):
    """A burning layer for torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        with self.meter.burn("forward", self.owner, self.forward_ms):
            result: Tensor = Transformed.apply(self.spec(), x)
            return result
