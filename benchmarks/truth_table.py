"""Known costs beside two answers: gradscope's, and that of full backward hooks.

    python benchmarks/truth_table.py [--json benchmarks/results/truth.jsonl]

The models burn a set time in forward and backward (tests/truth). Backward self time of each layer, in ms a step; a
value further from the truth than 3 % + 0.3 ms is marked with ``!``. Hooks time a layer from its pre-hook to its hook
and subtract its children, which is all that they can know.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _common import ROOT, Result, finish, parser, print_table
from torch import nn

sys.path.insert(0, str(ROOT / "tests"))

from truth.burning import Burning, Meter
from truth.models import Chain, Checkpointed, Flood, KeywordOnly, Residual, Shared, Table
from truth.proof import close, in_model_mode, knowing_what_is_left_out, measure, rows

X = torch.ones(4, 8)


@dataclass(frozen=True)
class KnownCosts:
    """A model whose layers burn known times."""

    name: str
    model: Callable[[], nn.Module]
    batch: Any


CASES = (
    KnownCosts("plain chain", Chain, X),
    KnownCosts("residual sums", Residual, torch.ones(2048, 2048)),
    KnownCosts("shared module", Shared, X),
    KnownCosts("in-place ReLU", Flood, X),
    KnownCosts("embedding first", lambda: nn.Sequential(Table(), Burning(1, 2)), torch.arange(4)),
    KnownCosts("keyword-only inputs", KeywordOnly, {"x": X, "scale": 2.0}),
    KnownCosts("checkpoint", lambda: Checkpointed(False), X),
    KnownCosts("reentrant checkpoint", lambda: Checkpointed(True), X),
)


def loss_of(output: torch.Tensor, _batch: Any) -> torch.Tensor:
    return output.sum()


def by_gradscope(model: nn.Module, batch: Any, meter: Meter) -> tuple[dict[str, float], dict[str, float]]:
    """Truth and gradscope's answer by layer, in ns."""
    with knowing_what_is_left_out():
        report = measure(meter, in_model_mode(model, batch, loss_of))
    truth = {path: total / report.data.workload.steps for path, total in meter.totals_ns("backward").items()}
    return truth, {path: float(row.backward_self_ns) for path, row in rows(report).items()}


def by_hooks(model: nn.Module, batch: Any, steps: int = 5) -> dict[str, float] | str:
    """The answer of full backward hooks by layer, in ns; or why there is none."""
    clock = HookClock(model)
    try:
        totals = []
        for _ in range(steps):
            clock.times.clear()
            output = model(**batch) if isinstance(batch, dict) else model(batch)
            loss_of(output, batch).backward()
            totals.append(dict(clock.times))
    except RuntimeError as error:
        return str(error).split(".")[0]
    finally:
        clock.remove()
    return {path: max(0.0, statistics.mean(step.get(path, 0.0) for step in totals)) for path in clock.paths}


class HookClock:
    """Backward time of each module by full backward hooks: from its pre-hook to its hook, less its children's."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = [path for path, _ in model.named_modules()]
        self.times: dict[str, float] = defaultdict(float)
        self._started: dict[str, list[int]] = defaultdict(list)
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_full_backward_pre_hook(self._enter(path)))
            self._handles.append(module.register_full_backward_hook(self._leave(path)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._started[path].append(time.perf_counter_ns())

        return enter

    def _leave(self, path: str) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            if self._started[path]:
                total = time.perf_counter_ns() - self._started[path].pop()
                self.times[path] += total
                if path:
                    self.times[path.rpartition(".")[0]] -= total

        return leave


def print_case(
    case: KnownCosts, truth: dict[str, float], ours: dict[str, float], hooks: dict[str, float] | str
) -> None:
    print(f"\n{case.name}")
    if isinstance(hooks, str):
        print(f"  full backward hooks: {hooks}")
    print(f"  {'layer':<16} {'truth':>9} {'gradscope':>11} {'full hooks':>11}")
    for path in ours:
        want = truth.get(path, 0.0)
        theirs = "failed" if isinstance(hooks, str) else _cell(hooks.get(path, 0.0), want)
        print(f"  {path or '(root)':<16} {want / 1e6:>9.2f} {_cell(ours[path], want):>11} {theirs:>11}")


def _cell(got: float, want: float) -> str:
    return f"{got / 1e6:.2f}{' ' if close(got, want) else '!'}"


def main() -> int:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    right, hooks_right, layers = 0, 0, 0
    worst = 0.0
    for case in CASES:
        meter, model = Meter(), case.model()
        meter.adopt(model)
        truth, ours = by_gradscope(model, case.batch, meter)
        hooks = by_hooks(model, case.batch)
        print_case(case, truth, ours, hooks)
        layers += len(ours)
        right += sum(close(value, truth.get(path, 0.0)) for path, value in ours.items())
        worst = max(worst, *(abs(value - truth.get(path, 0.0)) / 1e6 for path, value in ours.items()))
        if not isinstance(hooks, str):
            hooks_right += sum(close(hooks.get(path, 0.0), truth.get(path, 0.0)) for path in ours)
    results = [
        Result("layers within 3 % + 0.3 ms, gradscope", 100 * right / layers, "%", 100.0, True),
        Result("layers within 3 % + 0.3 ms, full backward hooks", 100 * hooks_right / layers, "%"),
        Result("worst layer, gradscope", worst, "ms off"),
    ]
    print_table(f"Backward self time of {layers} layers", results)
    return finish("truth_table", results, "cpu", options.json)


if __name__ == "__main__":
    sys.exit(main())
