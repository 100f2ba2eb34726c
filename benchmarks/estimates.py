"""How well a finding estimates what following its advice saves: the corpus's bad twin against its good one.

    python benchmarks/estimates.py [--only RULE ...] [--rounds N] [--json benchmarks/results/estimates.jsonl]

Of each pair of tests/diagnose/twins_*.py both are profiled, in turns. The step of the bad one less the step of the good
one, both without a profiler, is what the advice saves; it stands beside the range of the finding on the bad one, and so
does memory. Twins are small and differ in more than the one line at times, so that no goal is set: the table is for
reading, one number says how many estimates hold what was measured, or are off by less than a factor of two.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from _common import ROOT, Result, finish, parser, print_table

sys.path.insert(0, str(ROOT))

import gradscope
from gradscope.tables import Finding, RunData

_FACTOR = 2.0


@dataclass(frozen=True)
class Pair:
    """What was said of the bad twin, and how both did."""

    name: str
    rule: str
    finding: Finding | None
    bad: list[RunData]
    good: list[RunData]

    @property
    def saved_ns(self) -> int:
        """The fastest step of the one less the fastest of the other."""
        return _step_ns(self.bad) - _step_ns(self.good)

    @property
    def step_ns(self) -> int:
        return _step_ns(self.bad)

    @property
    def freed_bytes(self) -> int:
        peaks = [run.memory.peak_bytes if run.memory is not None else 0 for run in (self.bad[0], self.good[0])]
        return peaks[0] - peaks[1]

    @property
    def holds(self) -> bool | None:
        """Whether the estimate is right; None where no time was promised."""
        found = self.finding
        if found is None or found.predicted_saving_ns is None:
            return None
        low = found.predicted_low_ns if found.predicted_low_ns is not None else found.predicted_saving_ns
        high = found.predicted_high_ns if found.predicted_high_ns is not None else found.predicted_saving_ns
        return low / _FACTOR <= self.saved_ns <= high * _FACTOR


def _step_ns(runs: list[RunData]) -> int:
    return min(run.step.unprofiled_wall_ns or run.step.wall_ns for run in runs)


def measure(twin: Any, rounds: int) -> Pair:
    """Both twins, in turns."""
    runs: dict[bool, list[RunData]] = {True: [], False: []}
    for _ in range(rounds):
        for bad in (True, False):
            torch.manual_seed(0)
            runs[bad].append(_profiled(**(twin.bad if bad else twin.good)()))
    found = [each for each in runs[True][0].findings if each.rule == twin.rule]
    return Pair(twin.name, twin.rule, found[0] if found else None, runs[True], runs[False])


def _profiled(model: Any = None, batch: Any = None, *, step: Any = None, **options: Any) -> RunData:
    """Of the model on its batch, or of a loop that does ``step`` again and again."""
    options = {**options, "steps": max(options.get("steps", 0), 5), "warmup": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if step is None:
            return gradscope.profile(model, batch, **options).data
        with gradscope.profiling(model, **options) as run:
            while True:
                step()
                if run.step():
                    break
        return run.report.data


def rows_of(pair: Pair) -> list[Result]:
    """What was promised and what came, in the step's share and in bytes."""
    found = pair.finding
    rows = [Result(f"{pair.rule}: {pair.name}: measured", 100 * pair.saved_ns / pair.step_ns, "% of step")]
    if found is not None and found.predicted_saving_ns is not None:
        bounds = (found.predicted_low_ns, found.predicted_saving_ns, found.predicted_high_ns)
        for name, ns in zip(("at least", "promised", "at most"), bounds, strict=True):
            if ns is not None:
                rows.append(Result(f"{pair.rule}: {pair.name}: {name}", 100 * ns / pair.step_ns, "% of step"))
    if found is not None and found.predicted_saving_bytes:
        rows.append(Result(f"{pair.rule}: {pair.name}: promised", found.predicted_saving_bytes / 1e6, "MB"))
        rows.append(Result(f"{pair.rule}: {pair.name}: measured", pair.freed_bytes / 1e6, "MB"))
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", metavar="RULE", help="pairs of these rules alone")
    made.add_argument("--rounds", type=int, default=3, help="profiles of each twin, in turns")
    options = made.parse_args()
    folder = importlib.import_module("tests.diagnose")
    names = [found.name for found in pkgutil.iter_modules(folder.__path__) if found.name.startswith("twins_")]
    twins = [twin for name in names for twin in importlib.import_module(f"tests.diagnose.{name}").TWINS]
    pairs, results = [], []
    for twin in twins:
        if options.only and twin.rule not in options.only:
            continue
        pairs.append(measure(twin, options.rounds))
        results += rows_of(pairs[-1])
    judged = [pair.holds for pair in pairs if pair.holds is not None]
    results.append(Result("pairs", len(pairs), ""))
    results.append(Result(f"times promised that hold within {_FACTOR:g}", sum(judged), f"of {len(judged)}"))
    print_table(f"estimates on {options.device}, {torch.get_num_threads()} threads", results)
    wrong = [f"{pair.rule}: {pair.name}" for pair in pairs if pair.holds is False]
    print("\nnot held: " + ("; ".join(wrong) or "none"))
    return finish("estimates", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
