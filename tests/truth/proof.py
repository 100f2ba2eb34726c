"""Runs a workload under gradscope and compares every layer with what the meter recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.capture.phases.lines import Lines
from gradscope.capture.phases.timed import Timed
from gradscope.tables import LayerRow, RunData

from .burning import OUTSIDE, Burning, Meter, wait_until

STEPS = 3
WARMUP = 1

# The promise: 3 % of the truth and 0.3 ms. The truth is what a layer burned, and at most what its few real operations
# took beside that, see real_work_ns().
RELATIVE = 0.03
ABSOLUTE_NS = 300_000


@dataclass
class LastRun:
    """Which of the profiled steps of the last run were not measured."""

    left_out: set[int] = field(default_factory=set)  # numbers of those that the system interrupted
    after: int = 0  # how many followed the measured ones

    def select(self, meter: Meter, steps: int) -> list[str]:
        """As :meth:`Meter.select`."""
        return meter.select(steps, after=self.after, left_out=self.left_out)


LAST = LastRun()
AFTER = 3  # the survey, and two that measure memory


@contextmanager
def knowing_what_is_left_out() -> Iterator[None]:
    """Let each run inside the block fill :data:`LAST`."""
    timed, traced = Timed.keep, Lines.keep

    def keep(self: Timed) -> None:
        timed(self)
        LAST.left_out, LAST.after = set(self._timed.left_out), AFTER

    def keep_traced(self: Lines) -> None:
        traced(self)
        LAST.after += self.done

    Timed.keep, Lines.keep = keep, keep_traced  # type: ignore[method-assign]
    try:
        yield
    finally:
        Timed.keep, Lines.keep = timed, traced  # type: ignore[method-assign]


COLUMNS = {
    "forward_self_ns": "forward",
    "backward_self_ns": "backward",
    "recompute_ns": "recompute",
    "hook_ns": "hook",
}

FORWARD = ("forward_self_ns", "recompute_ns")


@dataclass(frozen=True)
class Expected:
    """What a test knows beyond the meter: columns given here replace the meter's, in ns a step by layer."""

    columns: Mapping[str, Mapping[str, float]]
    skip: frozenset[str] = frozenset()  # columns not compared
    unknown: frozenset[str] = frozenset()  # layers that do real work of unknown cost
    working: frozenset[str] = frozenset()  # layers that do so in forward (and its recompute) only
    checkpoints: Mapping[str, int] = field(default_factory=dict)  # calls of checkpoint whose own Python a layer bears

    @classmethod
    def nothing(cls) -> Expected:
        return cls({})


def in_model_mode(
    model: nn.Module, batch: Any, loss: Any = None, optimizer: Any = None, **options: Any
) -> Callable[[], Any]:
    """A run of :func:`gradscope.profile`."""

    def run() -> Any:
        settings: dict[str, Any] = {"steps": STEPS, "warmup": WARMUP, "device": "cpu", "lines": False, **options}
        return gradscope.profile(model, batch, loss, optimizer, **settings)

    return run


def in_a_loop(model: nn.Module | None, step: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    """A run of a user's own loop, one ``step()`` a step."""

    def run() -> Any:
        settings: dict[str, Any] = {"steps": STEPS, "warmup": WARMUP, **options}
        with gradscope.profiling(model, **settings) as prof:
            for _ in range(100):
                step()
                if prof.step():
                    break
            else:
                raise AssertionError("prof.step() never said that enough is measured")
        return prof.report

    return run


def prove(meter: Meter, run: Callable[[], Any], expected: Callable[[Meter, int], Expected] | None = None) -> Any:
    """Run, compare with the meter, and return the report; the disagreements are the test's failure."""
    meter.clear()
    report = run()
    steps = report.data.workload.steps
    problems = dict.fromkeys(LAST.select(meter, steps), "")
    problems |= compare(report.data, meter, expected(meter, steps) if expected else Expected.nothing())
    if problems:
        raise Disagreement(problems, meter, report.data)
    return report


class Disagreement(AssertionError):
    """The report is further from the truth than promised.

    Attributes:
        problems: what each place (a column and a layer) shows.
    """

    def __init__(self, problems: Mapping[str, str], meter: Meter, data: RunData) -> None:
        self.problems = problems
        stolen_us = meter.stolen_ns() / data.workload.steps / 1e3
        lines = [f"{place}: {text}" for place, text in problems.items()]
        super().__init__(
            "\n".join([*lines, f"(taken by other programs: {stolen_us:.0f} us a step)", *table(data, meter)])
        )


# Gradscope's faults stay: they put the same time into the same wrong row in every run. What a busy machine adds falls
# on another row each time, the more of them the longer a step is.
ATTEMPTS = 6


def prove_each_place(meter: Meter, attempt: Callable[[], Any], note: Callable[[], None]) -> None:
    """Prove that each layer and column is within the promise in one of some runs; in the first, where nobody disturbs.

    Args:
        attempt: builds everything afresh and proves it.
        note: called where that has to be repeated.
    """
    wrong: set[str] | None = None
    for number in range(ATTEMPTS):
        try:
            attempt()
        except Disagreement as error:
            places = set(error.problems)
            wrong = places if wrong is None else wrong & places
            if not wrong:
                return
            last = error
        else:
            return
        if number + 1 < ATTEMPTS:
            note()
            meter.clear()
            time.sleep(0.3 * number)
    assert wrong is not None
    raise AssertionError(f"in each of {ATTEMPTS} runs: {', '.join(sorted(wrong))}\nin the last:\n{last}") from None


def compare(data: RunData, meter: Meter, expected: Expected) -> dict[str, str]:
    """By place, "recompute_ns of 'h.0'", every layer and column that is further from the truth than promised."""
    steps = data.workload.steps
    problems: dict[str, str] = {}
    for column in (*COLUMNS, "gradient_sum_ns", "accumulate_ns"):
        if column in expected.skip:
            continue
        truth = _truth(column, meter, expected, steps)
        missing = set(truth) - {row.path for row in data.layers} - {OUTSIDE}
        problems |= {f"{column} of {path!r}": "not in the report" for path in sorted(missing) if truth[path] > 0}
        for row in data.layers:
            want, got = truth.get(row.path, 0.0), getattr(row, column)
            if column in FORWARD and row.path in expected.working:
                continue
            if not close(got, want) and got > want:
                got = max(want, got - real_work_ns(data, row, column))
            if not close(got, want) and got > want and row.path in expected.checkpoints:
                got = max(want, got - expected.checkpoints[row.path] * _one_checkpoint_ns(column))
            if not close(got, want) and row.path not in expected.unknown:
                problems[f"{column} of {row.path!r}"] = f"{got / 1e6:.3f} ms, truth {want / 1e6:.3f} ms"
    outside = _truth("backward_self_ns", meter, expected, steps).get(OUTSIDE, 0.0)
    if "outside" not in expected.skip:
        got = data.ledger.outside_modules_ns
        if not close(got, outside) and got > outside:
            got = max(outside, got - real_work_outside_ns(data))
        if not close(got, outside):
            problems["outside modules"] = f"{data.ledger.outside_modules_ns / 1e6:.3f} ms, truth {outside / 1e6:.3f} ms"
    if not close(data.ledger.unattributed_ns, 0):
        problems["unattributed"] = f"{data.ledger.unattributed_ns / 1e6:.3f} ms"
    return problems


def real_work_ns(data: RunData, row: LayerRow, column: str) -> float:
    """What the layer's operations take beside its burns: a Linear of 8 by 8, a clone.

    Their number is the report's; what one takes is measured here and now, for a machine may be several times slower
    than it was a minute ago. The first of each call takes longer where it comes after a burn.
    """
    phase = column.removesuffix("_ns").removesuffix("_self")
    operations = sum(op.calls for op in data.ops if (op.layer or "", op.phase) == (row.path, phase))
    return operations * _one_operation_ns() + row.calls * _waking_ns(column)


def real_work_outside_ns(data: RunData) -> float:
    """What the nodes of the loss and of the script's own formulas take in backward: those of a PINN are some fifteen.

    Only nodes are counted, for what they call is part of them: less is allowed than where operations are.
    """
    nodes = (op.calls for op in data.ops if op.layer is None and op.phase == "backward" and "Backward" in op.name)
    return sum(nodes) * _one_operation_ns()


def _one_operation_ns() -> float:
    """Mean wall time of one operation of a small Linear under torch's profiler, forward and backward.

    Each comes after a rest, as in the models here: after a burn the caches are cold, which doubles it.
    """
    layer, x = nn.Linear(8, 8), torch.ones(4, 8)
    rounds = 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        layer(x).sum().backward()
        took = 0
        for _ in range(rounds):
            time.sleep(0.003)
            start = time.perf_counter_ns()
            layer(x).sum().backward()
            took += time.perf_counter_ns() - start
    # Parts of an operation are no operations of a report: only what is called by no other is counted.
    whole = [event for event in profiler.events() if event.cpu_parent is None or "Backward" in event.cpu_parent.name]
    return took / (len(whole) * rounds / (rounds + 1))


def _waking_ns(column: str) -> float:
    """Mean time that the first operation after a rest takes longer than the same one behind it.

    The caches are cold, and a virtual machine's core has to be woken: 0.1 ms on some, next to nothing on others.
    """
    rounds = 20
    if column in FORWARD:
        x, both = torch.ones(4, 8, requires_grad=True), [0, 0]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            for _ in range(rounds):
                wait_until(time.perf_counter_ns() + 3_000_000)
                for place in range(2):
                    start = time.perf_counter_ns()
                    torch.tanh(x)
                    both[place] += time.perf_counter_ns() - start
        return max(0.0, both[0] - both[1]) / rounds
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.GELU(), Burning(0, 3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(rounds):
            model(torch.ones(4, 8)).sum().backward()
    nodes = [event.cpu_time_total for event in profiler.events() if event.name.endswith(": GeluBackward0")]
    return max(0.0, sum(nodes[::2]) - sum(nodes[1::2])) / rounds * 1e3


def _one_checkpoint_ns(column: str) -> float:
    """Mean wall time that a checkpoint adds to a small Linear under torch's profiler, 0 in columns of other phases.

    Of both kinds the slower: they differ by less than one machine does from one minute to the next.
    """
    if column not in FORWARD:
        return 0.0
    layer, x = nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)
    kinds = [partial(checkpoint, layer, use_reentrant=reentrant) for reentrant in (False, True)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        plain, *checkpointed = [_forward_and_backward_ns(run, x) for run in (layer, *kinds)]
    phase = FORWARD.index(column)
    return max(0.0, *(kind[phase] - plain[phase] for kind in checkpointed))


def _forward_and_backward_ns(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Mean wall times of ``run(x)`` and of its backward, each after a rest, as in :func:`_one_operation_ns`."""
    rounds, forward, backward = 20, 0, 0
    run(x).sum().backward()
    for _ in range(rounds):
        time.sleep(0.003)
        start = time.perf_counter_ns()
        out = run(x)
        forward += time.perf_counter_ns() - start
        loss = out.sum()
        time.sleep(0.003)
        start = time.perf_counter_ns()
        loss.backward()
        backward += time.perf_counter_ns() - start
    return forward / rounds, backward / rounds


def close(got_ns: float, want_ns: float) -> bool:
    """Within 3 % and 0.3 ms."""
    return abs(got_ns - want_ns) <= RELATIVE * want_ns + ABSOLUTE_NS


def _truth(column: str, meter: Meter, expected: Expected, steps: int) -> dict[str, float]:
    if column in expected.columns:
        return dict(expected.columns[column])
    kind = COLUMNS.get(column)
    return {} if kind is None else {owner: total / steps for owner, total in meter.totals_ns(kind).items()}


def table(data: RunData, meter: Meter) -> list[str]:
    """The report beside the truth, for the message of a failing test."""
    steps = data.workload.steps
    kinds = {kind: meter.totals_ns(kind) for kind in COLUMNS.values()}
    lines = [
        f"ledger: {data.ledger}",
        "layer: forward | backward | recompute | hooks, each truth/report; sum; accumulate (ms)",
    ]
    for row in data.layers:
        cells = [
            f"{kinds[kind].get(row.path, 0) / steps / 1e6:.2f}/{getattr(row, column) / 1e6:.2f}"
            for column, kind in COLUMNS.items()
        ]
        cells += [f"{row.gradient_sum_ns / 1e6:.2f}", f"{row.accumulate_ns / 1e6:.2f}"]
        lines.append(f"  {row.path or '(root)'}: " + " | ".join(cells))
    return lines


def measure(meter: Meter, run: Callable[[], Any]) -> Any:
    """Run once, without a comparison, for tests that look at one thing only."""
    meter.clear()
    report = run()
    assert LAST.select(meter, report.data.workload.steps) == []
    return report


def rows(report: Any) -> dict[str, Any]:
    """The report's layers by path."""
    return {row.path: row for row in report.data.layers}


def summed(output: Tensor, batch: Any) -> Tensor:
    """A loss that costs next to nothing."""
    return output.sum()
