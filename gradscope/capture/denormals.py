"""Denormal numbers among what the products of a backward pass are given, and what they cost on this processor.

Some processors compute with numbers below float32's smallest normal one in microcode, many times slower. What is found
is run alone, with and without flushing them to zero. All of that happens in threads of its own: there is no mode of the
user's, a thread's flushing ends with it, and the threads that torch starts for it begin with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.capture.guard import Guard
from gradscope.capture.modes import run_operation, take_off

LEAST_SHARE = 0.01  # of an operand's numbers

# Multiplications: of the smallest matmul that is looked at, and about as many as are run alone.
_FEWEST, _PART = 10_000_000, 200_000_000
_MOST_MADE = 4_000_000  # numbers of a result that is made alone: matmuls of few columns by few rows make many
_SAMPLE = 128  # rows, and columns, of an operand that are looked at
_TURNS, _ROUNDS, _LONG_NS = 3, 3, 200_000_000  # a run that takes longer is not repeated
_MOST_NS = 1_000_000_000  # for all that is done here in a step
_NORMAL = torch.finfo(torch.float32).tiny

_LOOKING = "checking for denormal numbers"

R = TypeVar("R")


@dataclass
class _Product:
    """The matmuls of one shape, of which some had denormal numbers."""

    operand: tuple[int, ...]
    share: float = 0.0  # the largest that was seen
    calls: int = 0
    ns: int = 0
    kept_ns: int = 0  # of a part of one of them, run alone
    flushed_ns: int = 0


class DenormalWatch:
    """Looks at the matmuls of backward passes."""

    def __init__(self) -> None:
        self._found: dict[tuple[torch.Size, torch.Size], _Product] = {}
        self._spent_ns = 0

    @contextmanager
    def watching(self, guard: Guard) -> Iterator[None]:
        """Look until the block is left; the guard notes what goes wrong here."""
        mode = _Products(self, guard)
        mode.__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            take_off(mode)

    def look(self, first: torch.Tensor, second: torch.Tensor, ns: int) -> None:
        """At what one matmul was given, which took ``ns``."""
        start = time.perf_counter_ns()
        if self._spent_ns < _MOST_NS:
            in_a_thread(lambda: self._look(first, second, ns))
        self._spent_ns += time.perf_counter_ns() - start

    def _look(self, first: torch.Tensor, second: torch.Tensor, ns: int) -> None:
        share, operand = max((denormal_share(each), tuple(each.shape)) for each in (first, second))
        if share < LEAST_SHARE:
            return
        form = first.shape, second.shape
        known = form in self._found
        found = self._found.setdefault(form, _Product(operand))
        found.share, found.calls, found.ns = max(found.share, share), found.calls + 1, found.ns + ns
        if not known:
            found.kept_ns, found.flushed_ns = both_ways_ns(first, second)

    def facts(self) -> list[dict[str, Any]]:
        """Of each shape of matmul: ``operand``, ``share`` of its numbers, ``calls`` and ``ns`` of the step.

        ``kept_ns`` and ``flushed_ns``: of a part of one of them, run alone without and with flushing.
        """
        return [vars(each) for each in self._found.values()]


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands large matmuls of float32 on a CPU to a watch, when they are done."""

    def __init__(self, watch: DenormalWatch, guard: Guard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch, self._guard = watch, guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter_ns()
        result = run_operation(func, args, kwargs)
        taken = time.perf_counter_ns() - start
        if func._overloadpacket in _PRODUCTS:
            with self._guard.over(_LOOKING):
                first, second = args[-2:]
                if _is_looked_at(first, second):
                    self._watch.look(first, second, taken)
        return result


_PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm})


def _is_looked_at(*operands: Any) -> bool:
    """Check that these are plain float32 matrices on a CPU, and their matmul is large."""
    for each in operands:
        if type(each) not in (torch.Tensor, torch.nn.Parameter) or each.layout is not torch.strided or each.is_nested:
            return False
        if each.dtype is not torch.float32 or each.device.type != "cpu":
            return False
    return int(operands[0].numel()) * int(operands[1].shape[-1]) >= _FEWEST


def denormal_share(tensor: torch.Tensor) -> float:
    """Of the tensor's numbers, by some of its rows and columns."""
    matrix = tensor.detach()[..., :: -(-tensor.shape[-2] // _SAMPLE), :: -(-tensor.shape[-1] // _SAMPLE)]
    size = (matrix[:: -(-matrix.shape[0] // 4)] if matrix.dim() == 3 else matrix).abs()
    return float(((size > 0) & (size < _NORMAL)).double().mean())


def both_ways_ns(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int]:
    """Of a part of the matmul, run alone as this thread computes and with denormal numbers flushed to zero."""
    first, second = first.detach(), second.detach()
    step = max(-(-first.numel() * second.shape[-1] // _PART), -(-_made(first, second) // _MOST_MADE))
    first = first[::step]
    if second.dim() == 3:
        second = second[::step]
        first = first[:, :: -(-_made(first, second) // _MOST_MADE)]
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(_TURNS):
        for flush, taken in zip((False, True), times, strict=True):
            taken.append(in_a_thread(partial(_shortest_ns, first, second, flush)))
        if times[0][0] > _LONG_NS:
            break
    return min(times[0]), min(times[1])


def _made(first: torch.Tensor, second: torch.Tensor) -> int:
    """The number of elements of the product."""
    return first.shape[:-1].numel() * second.shape[-1]


def _shortest_ns(first: torch.Tensor, second: torch.Tensor, flush: bool) -> int:
    """Of some runs in this thread, whose setting this changes."""
    if flush:
        torch.set_flush_denormal(True)
    shortest = 0
    for _ in range(_ROUNDS):
        start = time.perf_counter_ns()
        torch.matmul(first, second)
        taken = time.perf_counter_ns() - start
        shortest = min(shortest or taken, taken)
        if taken > _LONG_NS:
            break
    return shortest


def in_a_thread(run: Callable[[], R]) -> R:
    """``run()`` in a new thread, which is over when this returns; what it raises is raised here."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(run).result()
