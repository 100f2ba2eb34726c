"""How well a finding estimates what following its advice saves: the same work with the problem and without it.

    python benchmarks/estimates.py [--only RULE ...] [--rounds N] [--json benchmarks/results/estimates.jsonl]

Of each pair of tests/diagnose/twins_*.py and of estimate_pairs.py both are profiled, in turns. The step of the bad one
less the step of the good one, both without a profiler, is what the advice saves; it stands beside the range of the
finding on the bad one, and so does memory. Every rule has a pair; those that need a GPU are skipped without one. Twins
are small and differ in more than the one line at times, so that no goal is set: the table is for reading. Two numbers
say how many promises hold what was measured, or are off by less than a factor of two, and how many promise more than
twice of what came. On a busy machine all of this means nothing.
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
from estimate_pairs import PAIRS

sys.path.insert(0, str(ROOT))

import gradscope
from gradscope.tables import Finding, RunData

_FACTOR = 2.0


@dataclass(frozen=True)
class Measured:
    """What was said of the bad twin, and how both did."""

    name: str
    rule: str
    finding: Finding | None
    bad: list[RunData]
    good: list[RunData]
    worth: int = 1

    @property
    def saved_ns(self) -> int:
        """The fastest step of the one less the fastest of the other, for the same work."""
        return _step_ns(self.bad) - _step_ns(self.good) // self.worth

    @property
    def step_ns(self) -> int:
        return _step_ns(self.bad)

    @property
    def freed_bytes(self) -> int:
        peaks = [run.memory.peak_bytes if run.memory is not None else 0 for run in (self.bad[0], self.good[0])]
        return peaks[0] - peaks[1]

    @property
    def range_ns(self) -> tuple[int, int] | None:
        """What was promised at least and at most; None where no time was."""
        found = self.finding
        if found is None or (found.predicted_saving_ns is None and found.predicted_high_ns is None):
            return None
        promised = found.predicted_saving_ns or 0
        low = found.predicted_low_ns if found.predicted_low_ns is not None else promised
        return low, found.predicted_high_ns if found.predicted_high_ns is not None else promised

    @property
    def holds(self) -> bool | None:
        """Whether the estimate is right; None where no time was promised."""
        if self.range_ns is None:
            return None
        low, high = self.range_ns
        return low / _FACTOR <= max(self.saved_ns, 0) <= high * _FACTOR

    @property
    def is_too_much(self) -> bool:
        """Whether far more was promised than came."""
        promised = (self.finding.predicted_saving_ns or 0) if self.finding is not None else 0
        return promised > _FACTOR * max(self.saved_ns, 0)


def _step_ns(runs: list[RunData]) -> int:
    return min(run.step.unprofiled_wall_ns or run.step.wall_ns for run in runs)


def measure(twin: Any, rounds: int) -> Measured:
    """Both twins, in turns; one after the other where the good one changes the process for good."""
    runs: dict[bool, list[RunData]] = {True: [], False: []}
    turns = [True, False] * rounds
    for bad in sorted(turns, reverse=True) if getattr(twin, "lasting", False) else turns:
        torch.manual_seed(0)
        runs[bad].append(_profiled(**(twin.bad if bad else twin.good)()))
    found = [each for each in runs[True][0].findings if each.rule == twin.rule]
    return Measured(
        twin.name, twin.rule, found[0] if found else None, runs[True], runs[False], getattr(twin, "worth", 1)
    )


def every_pair() -> list[Any]:
    """The tests' twins, then those of estimate_pairs.py; what changes the process for good comes last."""
    folder = importlib.import_module("tests.diagnose")
    names = [found.name for found in pkgutil.iter_modules(folder.__path__) if found.name.startswith("twins_")]
    twins = [twin for name in names for twin in importlib.import_module(f"tests.diagnose.{name}").TWINS]
    return sorted([*twins, *PAIRS], key=lambda each: getattr(each, "lasting", False))


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


def rows_of(pair: Measured) -> list[Result]:
    """What was promised and what came, in the step's share and in bytes."""
    found = pair.finding
    rows = [Result(f"{pair.rule}: {pair.name}: measured", 100 * pair.saved_ns / pair.step_ns, "% of step")]
    if found is not None:
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
    pairs: list[Measured] = []
    results, skipped = [], []
    for twin in every_pair():
        if options.only and twin.rule not in options.only:
            continue
        if getattr(twin, "device", "cpu") == "cuda" and not torch.cuda.is_available():
            skipped.append(twin.rule)
            continue
        pairs.append(measure(twin, options.rounds))
        results += rows_of(pairs[-1])
    judged = [pair.holds for pair in pairs if pair.holds is not None]
    results.append(Result("pairs", len(pairs), ""))
    results.append(Result(f"times promised that hold within {_FACTOR:g}", sum(judged), f"of {len(judged)}"))
    promised = [pair for pair in pairs if pair.finding is not None and pair.finding.predicted_saving_ns]
    too_much = [f"{pair.rule}: {pair.name}" for pair in promised if pair.is_too_much]
    results.append(Result(f"more than {_FACTOR:g} times what came", len(too_much), f"of {len(promised)}"))
    print_table(f"estimates on {options.device}, {torch.get_num_threads()} threads", results)
    wrong = [f"{pair.rule}: {pair.name}" for pair in pairs if pair.holds is False]
    silent = [f"{pair.rule}: {pair.name}" for pair in pairs if pair.finding is None]
    for title, names in (
        ("not held", wrong),
        ("promised too much", too_much),
        ("nothing was found", silent),
        ("skipped, for want of a GPU", skipped),
    ):
        print(f"\n{title}: " + ("; ".join(names) or "none"))
    return finish("estimates", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
