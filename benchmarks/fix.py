"""What ``gradscope fix`` gains on whole training steps, what it costs to find and prove it, and whether it is steady.

    python benchmarks/fix.py [--only NAME ...] [--sources FOLDER] [--json benchmarks/results/fix.jsonl]
    python benchmarks/fix.py --only makemore --busy 2 --repeat 10

The steps without and with the recipes are taken in turns in one process. A step ends with its gradients dropped, so
that what is counted above the parameters is activations and gradients alike. Public models come from clones below
--sources, as benchmarks/field.py makes them; those that are not there are left out, with a word. ``--tiny`` runs all at
sizes that say nothing about speed: to see that the benchmark itself works.

With ``--repeat`` the fix is made so often, beside ``--busy`` processes that do nothing but compute, and the table says
in how many of the runs the same places were kept: the verdict is not to follow noise.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from _common import Result, finish, parser, print_table
from _field_sources import Missing
from _fix_cases import CASES, WholeStep, workload_of

from gradscope.capture.model_steps import Stepper
from gradscope.capture.state import preserved
from gradscope.compat import many_versions
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from gradscope.patching.prove.choice import Gain, Way, measured, told
from gradscope.patching.prove.verify import COMPILED_AFTER, verify
from gradscope.workload import Batches, Workload

PROOF_GOAL = 20.0  # steps


STEADY_GOAL = 0.9  # of the runs


def measure(name: str, workload: Workload, case: WholeStep, device: str, *, tiny: bool) -> list[Result]:
    """The gain of one case, and its cost in steps."""
    workload.model.to(device)
    _import_late()
    start = time.perf_counter()
    found = plan(workload, device=device)
    planned = time.perf_counter()
    verified = verify(workload, found, device)
    proved = time.perf_counter()
    patches = Patches(found, verified)
    gain = _in_turns(workload, patches, torch.device(device))
    step = gain.before.wall_ns / 1e9
    speed, memory = gain.before.wall_ns / gain.after.wall_ns, gain.before.peak_bytes / gain.after.peak_bytes
    results = [
        Result(f"{name}: places kept of {len(found.sites)}", len(patches.kept), "places"),
        Result(f"{name}: step before", gain.before.wall_ns / 1e6, "ms"),
        Result(f"{name}: step after", gain.after.wall_ns / 1e6, "ms"),
        Result(f"{name}: spread of the step before", gain.before.spread_ns / gain.before.wall_ns, "IQR/median"),
        Result(f"{name}: speed", speed, "x before", case.speed, higher=True),
        Result(f"{name}: peak above parameters before", gain.before.peak_bytes / 1e6, "MB"),
        Result(f"{name}: peak above parameters after", gain.after.peak_bytes / 1e6, "MB"),
        Result(f"{name}: memory", memory, "x less", case.memory, higher=True),
        Result(f"{name}: detection", (planned - start) / step, "steps"),
        Result(f"{name}: detection and proof", (proved - start) / step, "steps", PROOF_GOAL),
    ]
    if case.either is not None:
        share = max(speed / case.either[0], memory / case.either[1])
        results.append(
            Result(f"{name}: of x{case.either[0]} or {case.either[1]:g} times leaner", share, "x", 1.0, higher=True)
        )
    if not tiny:
        return results
    return [Result(result.name, result.value, result.unit) for result in results]


def steadiness(name: str, workload: Workload, device: str, repeat: int, busy: int) -> list[Result]:
    """In what share of the runs the same places are kept."""
    workload.model.to(device)
    found = plan(workload, device=device)
    verdicts: Counter[str] = Counter()
    seconds: list[float] = []
    with _busy(busy):
        for _ in range(repeat):
            start = time.perf_counter()
            verified = verify(workload, found, device)
            seconds.append(time.perf_counter() - start)
            kept = Counter(
                f"{each.site.recipe} {each.site.source}" for each in verified.results if each.status == "kept"
            )
            verdicts[", ".join(f"{count} {what}" for what, count in sorted(kept.items())) or "nothing"] += 1
    for verdict, count in verdicts.most_common():
        print(f"{name}: {count} of {repeat} runs kept {verdict}")
    share = verdicts.most_common(1)[0][1] / repeat
    return [
        Result(
            f"{name}: runs with the same verdict, {busy} busy processes beside",
            share,
            "of them",
            STEADY_GOAL,
            higher=True,
        ),
        Result(f"{name}: the longest run", max(seconds), "s"),
    ]


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that compute until the block is left."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _import_late() -> None:
    """What torch imports at the first gradient with an upstream one (sympy): 0.3 s, once in a process."""
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(x * 2, x, torch.ones(2))


def _in_turns(workload: Workload, patches: Patches, device: torch.device) -> Gain:
    stepper, batch = Stepper(workload), next(Batches(workload.batch, device))
    parameters = list(workload.model.parameters())

    def step() -> None:
        stepper.step(batch)
        for parameter in parameters:
            parameter.grad = None

    compiled = any(site.compiled for site in patches.kept)
    before = COMPILED_AFTER if compiled else 0
    ways = [Way(patches.revert, step, before), Way(patches.apply, step, before)]
    with preserved(workload.model, workload.batch, None, device), many_versions() if compiled else nullcontext():
        try:
            (old, new), peaks = measured(ways, device)
        finally:
            patches.revert()
    return Gain(old.side(peaks[0]), new.side(peaks[1]), told(old, new))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=sorted(CASES), metavar="NAME", help=", ".join(CASES))
    made.add_argument("--sources", type=Path, help="a folder of clones, named OWNER+NAME")
    made.add_argument("--tiny", action="store_true", help="small sizes, without goals")
    made.add_argument("--repeat", type=int, default=0, help="fix so often, and compare the verdicts")
    made.add_argument("--busy", type=int, default=0, help="processes beside that compute")
    options = made.parse_args()
    results = []
    for name in options.only or CASES:
        try:
            workload = workload_of(CASES[name], options.sources, tiny=options.tiny)
        except Missing as missing:
            print(f"{name}: left out: {missing}")
            continue
        if options.repeat:
            results += steadiness(name, workload, options.device, options.repeat, options.busy)
        else:
            results += measure(name, workload, CASES[name], options.device, tiny=options.tiny)
    if not results:
        sys.exit("nothing was measured")
    print_table(f"gradscope fix on {options.device}, {torch.get_num_threads()} threads", results)
    return finish("fix", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
