"""How well a finding estimates what following its advice saves: the same work with the problem and without it.

    python benchmarks/estimates.py [--only RULE ...] [--rounds N] [--json benchmarks/results/estimates.jsonl]

Of each pair of tests/diagnose/twins_*.py and of estimate_pairs.py the bad one is profiled, for what is promised. Then
steps of it and of the cured one are run without a profiler, in turns, and the median of what each turn saved is what
came; its interval is the one that the median lies in with 95 % confidence. Where the good twin is another model rather
than the cure, estimate_cures.py has the cure. Peaks are of one step of each. Every rule has a pair, but for those that
estimate_pairs.py gives a reason for; pairs that need a GPU are skipped without one.

A promise holds where its range, widened by a factor of two, meets the interval of what came, and is too much where it
is more than twice the upper end of that interval. What could not be told from nothing is listed beside both: such a
pair is too small a case, or the advice is worth nothing. On a busy machine all of this means nothing.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _common import ROOT, Result, finish, parser, print_table, synchronize
from _peak import peak_bytes
from estimate_pairs import PAIRS, WITHOUT

sys.path.insert(0, str(ROOT))

from estimate_cures import CURES

import gradscope
from gradscope.capture.model_steps import Stepper
from gradscope.tables import Finding, RunData
from gradscope.workload import Batches, Workload

_FACTOR = 2.0
_TURN_NS = 20_000_000  # a shorter step is done again and again in its turn
_WARMUP = 3
_CONFIDENCE = 0.95
# Settings of the process: turns would measure both with whatever was set last.
_APART = {"anomaly-mode", "denormals", "page-faults", "tf32-off", "deterministic-mode"}


@dataclass(frozen=True)
class Measured:
    """What was said of the bad one, and how both did.

    Args:
        bad_ns, cured_ns: of a step for the same work, turn by turn.
        freed_bytes: of the bad one's peak.
        profiled_ns: the bad one's step in the report, without the profiler; None is as in the turns. Few steps after a
            short warm-up take longer than many: what was promised is a share of that step.
    """

    name: str
    rule: str
    finding: Finding | None
    bad_ns: Sequence[int]
    cured_ns: Sequence[int]
    freed_bytes: int = 0
    profiled_ns: int | None = None

    @property
    def step_ns(self) -> float:
        return statistics.median(self.bad_ns)

    @property
    def saved_ns(self) -> tuple[float, float, float]:
        """At least, the median, and at most."""
        apart = sorted(bad - cured for bad, cured in zip(self.bad_ns, self.cured_ns, strict=True))
        outside = _outside(len(apart))
        return apart[outside], statistics.median(apart), apart[-1 - outside]

    @property
    def promised_ns(self) -> dict[str, float]:
        """What was promised, of a step as long as in the turns; without what was not."""
        found = self.finding
        if found is None:
            return {}
        scale = 1.0 if self.profiled_ns is None else self.step_ns / self.profiled_ns
        bounds = (found.predicted_low_ns, found.predicted_saving_ns, found.predicted_high_ns)
        named = zip(("at least", "promised", "at most"), bounds, strict=True)
        return {name: ns * scale for name, ns in named if ns is not None}

    @property
    def range_ns(self) -> tuple[float, float] | None:
        """What was promised at least and at most; None where no time was."""
        said = self.promised_ns
        if "promised" not in said and "at most" not in said:
            return None
        promised = said.get("promised", 0.0)
        return said.get("at least", promised), said.get("at most", promised)

    @property
    def holds(self) -> bool | None:
        """Check that the promised time came, within the factor; None where no time was promised."""
        if self.range_ns is None:
            return None
        low, high = self.range_ns
        least, _, most = self.saved_ns
        return low / _FACTOR <= max(most, 0) and least <= high * _FACTOR

    @property
    def is_too_much(self) -> bool:
        """Check that the rule promised far more than came."""
        return self.promised_ns.get("promised", 0.0) > _FACTOR * max(self.saved_ns[2], 0)

    @property
    def is_untold(self) -> bool:
        """Check that the rule promised time, and what came cannot be told from nothing."""
        least, _, most = self.saved_ns
        return self.range_ns is not None and least <= 0 <= most


def _outside(count: int) -> int:
    """How many of so many sorted values lie outside the interval of their median, on each side.

    By the binomial distribution of how many values lie below the median.
    """
    left, outside = (1 - _CONFIDENCE) / 2, 0
    while outside < (count - 1) // 2:
        below = sum(math.comb(count, values) for values in range(outside + 1)) / 2**count
        if below > left:
            break
        outside += 1
    return max(outside - 1, 0) if count > 1 else 0


def measure(twin: Any, rounds: int, device: str = "cpu") -> Measured:
    """Both in turns; one after the other where what is cured is a setting of the process."""
    torch.manual_seed(0)
    run = _profiled(**twin.bad())
    finding = next((each for each in run.findings if each.rule == twin.rule), None)
    made: list[Callable[[], dict[str, Any]]] = [twin.bad, CURES.get(twin.name, twin.good)]
    times: list[list[int]] = [[], []]
    peaks = [0, 0]
    for places in [(0,), (1,)] if twin.rule in _APART else [(0, 1)]:
        steps: dict[int, Callable[[], object]] = {}
        for place in places:
            torch.manual_seed(0)
            step = steps[place] = _plain(**made[place]())
            for _ in range(_WARMUP):
                step()
            peaks[place] = peak_bytes(step, device)
        for turn in range(rounds):
            for place in places if turn % 2 else reversed(places):
                times[place].append(_timed(steps[place], device))
        steps.clear()  # what the step's batches set is set back when nothing holds them
    worth = getattr(twin, "worth", 1)
    cured = [each // worth for each in times[1]]
    profiled_ns = run.step.unprofiled_wall_ns or run.step.wall_ns
    return Measured(twin.name, twin.rule, finding, times[0], cured, peaks[0] - peaks[1], profiled_ns)


def every_pair() -> list[Any]:
    """The tests' twins, then those of estimate_pairs.py; what changes the process for good comes last."""
    folder = importlib.import_module("tests.diagnose")
    names = [found.name for found in pkgutil.iter_modules(folder.__path__) if found.name.startswith("twins_")]
    twins = [twin for name in names for twin in importlib.import_module(f"tests.diagnose.{name}").TWINS]
    return sorted([*twins, *PAIRS], key=lambda each: getattr(each, "lasting", False))


def _profiled(model: Any = None, batch: Any = None, *, step: Any = None, **options: Any) -> RunData:
    """The report of the model on its batch, or of a loop that does ``step`` again and again."""
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


def _plain(
    model: Any = None, batch: Any = None, *, step: Any = None, loss: Any = None, optimizer: Any = None, **options: Any
) -> Callable[[], object]:
    """A step of what :func:`_profiled` takes, as it is without gradscope."""
    del options
    if step is not None:
        return step  # type: ignore[no-any-return]
    stepper, batches = Stepper(Workload(model, batch, loss, optimizer)), Batches(batch)
    return lambda: stepper.step(next(batches))


def _timed(step: Callable[[], object], device: str) -> int:
    synchronize(device)
    start = time.perf_counter_ns()
    done = 0
    while time.perf_counter_ns() - start < _TURN_NS:
        step()
        done += 1
    synchronize(device)
    return (time.perf_counter_ns() - start) // done


def rows_of(pair: Measured) -> list[Result]:
    """What was promised and what came, in the step's share and in bytes."""
    found, name = pair.finding, f"{pair.rule}: {pair.name}"
    least, median, most = (100 * ns / pair.step_ns for ns in pair.saved_ns)
    rows = [Result(f"{name}: came", median, f"% of step ({least:.1f} to {most:.1f})")]
    rows += [Result(f"{name}: {what}", 100 * ns / pair.step_ns, "% of step") for what, ns in pair.promised_ns.items()]
    if found is not None and found.predicted_saving_bytes:
        rows.append(Result(f"{name}: promised", found.predicted_saving_bytes / 1e6, "MB"))
        rows.append(Result(f"{name}: came", pair.freed_bytes / 1e6, "MB"))
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", metavar="RULE", help="pairs of these rules alone")
    made.add_argument("--rounds", type=int, default=25, help="turns of each")
    options = made.parse_args()
    pairs: list[Measured] = []
    results, skipped = [], []
    for twin in every_pair():
        if options.only and twin.rule not in options.only:
            continue
        if getattr(twin, "device", "cpu") == "cuda" and not torch.cuda.is_available():
            skipped.append(twin.rule)
            continue
        pairs.append(measure(twin, options.rounds, options.device))
        results += rows_of(pairs[-1])
    judged = [pair.holds for pair in pairs if pair.holds is not None]
    results.append(Result("pairs", len(pairs), ""))
    results.append(Result(f"times promised that hold within {_FACTOR:g}", sum(judged), f"of {len(judged)}"))
    promised = [pair for pair in pairs if pair.finding is not None and pair.finding.predicted_saving_ns]
    too_much = [f"{pair.rule}: {pair.name}" for pair in promised if pair.is_too_much]
    results.append(Result(f"more than {_FACTOR:g} times what came", len(too_much), f"of {len(promised)}"))
    print_table(f"estimates on {options.device}, {torch.get_num_threads()} threads", results)
    wrong = [f"{pair.rule}: {pair.name}" for pair in pairs if pair.holds is False]
    untold = [f"{pair.rule}: {pair.name}" for pair in pairs if pair.is_untold]
    silent = [f"{pair.rule}: {pair.name}" for pair in pairs if pair.finding is None]
    for title, names in (
        ("not held", wrong),
        ("promised too much", too_much),
        ("not told from nothing", untold),
        ("nothing was found", silent),
        ("skipped, for want of a GPU", skipped),
        ("without a pair", [f"{rule} ({why})" for rule, why in WITHOUT.items()]),
    ):
        print(f"\n{title}: " + ("; ".join(names) or "none"))
    return finish("estimates", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
