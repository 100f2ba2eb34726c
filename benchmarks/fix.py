"""What ``gradscope fix`` gains on two examples, and what it costs to find and prove it.

    python benchmarks/fix.py [--only gpt|names] [--rounds 7] [--json benchmarks/results/fix.jsonl]

The steps without and with the recipes are taken in turns in one process. A step ends with its gradients dropped, so
that what is counted above the parameters is activations and gradients alike. ``--tiny`` runs both at sizes that say
nothing about speed: to see that the benchmark itself works.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import ROOT, Result, finish, parser, print_table

from gradscope.capture.model_steps import Stepper
from gradscope.capture.state import preserved
from gradscope.patching.choice import Gain
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from gradscope.patching.turns import Way, measured, told
from gradscope.patching.verify import verify
from gradscope.workload import Batches, Workload, load_factory

PROOF_GOAL = 20.0  # steps


def _example(name: str) -> Any:
    factory: Any = load_factory(f"{ROOT / 'examples' / name}:main", [])
    return factory.module


def gpt(tiny: bool) -> Workload:
    """examples/gpt.py with GPT-2's vocabulary."""
    module = _example("gpt.py")
    size = {"vocab_size": 50257, "n_layer": 4, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 4}
    if tiny:
        size = {"vocab_size": 500, "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "batch_size": 2}
    return Workload(*module.make(module.Config(**size)))


def names(tiny: bool) -> Workload:
    """examples/names.py as it trains."""
    module = _example("names.py")
    torch.manual_seed(3407)
    x, y = module.make_data()
    model = module.CharacterTransformer(27, 32 if tiny else 64, 4, 2 if tiny else 4, x.shape[1])
    rows = torch.randint(len(x), (8 if tiny else 64,))
    return Workload(model, (x[rows], y[rows]))


# Name: how it is made, the goals of time and of memory.
CASES: dict[str, tuple[Callable[[bool], Workload], float, float | None]] = {
    "gpt": (gpt, 1.25, 4.0),
    "names": (names, 1.17, None),
}


def measure(name: str, device: str, rounds: int, *, tiny: bool) -> list[Result]:
    """The gain of one case, and its cost in steps."""
    make, speed_goal, memory_goal = CASES[name]
    workload = make(tiny)
    workload.model.to(device)
    _import_late()
    start = time.perf_counter()
    found = plan(workload, device=device)
    planned = time.perf_counter()
    verified = verify(workload, found, device)
    proved = time.perf_counter()
    patches = Patches(found, verified)
    gain = _in_turns(workload, patches, torch.device(device), rounds)
    step = gain.before.wall_ns / 1e9
    kept = len(patches.kept)
    results = [
        Result(f"{name}: places kept of {len(found.sites)}", kept, "places"),
        Result(f"{name}: step before", gain.before.wall_ns / 1e6, "ms"),
        Result(f"{name}: step after", gain.after.wall_ns / 1e6, "ms"),
        Result(f"{name}: spread of the step before", gain.before.spread_ns / gain.before.wall_ns, "IQR/median"),
        Result(f"{name}: speed", gain.before.wall_ns / gain.after.wall_ns, "x before", speed_goal, higher=True),
        Result(f"{name}: peak above parameters before", gain.before.peak_bytes / 1e6, "MB"),
        Result(f"{name}: peak above parameters after", gain.after.peak_bytes / 1e6, "MB"),
        Result(f"{name}: memory", gain.before.peak_bytes / gain.after.peak_bytes, "x less", memory_goal, higher=True),
        Result(f"{name}: detection", (planned - start) / step, "steps"),
        Result(f"{name}: detection and proof", (proved - start) / step, "steps", PROOF_GOAL),
    ]
    if not tiny:
        return results
    return [Result(result.name, result.value, result.unit) for result in results]


def _import_late() -> None:
    """What torch imports at the first gradient with an upstream one (sympy): 0.3 s, once in a process."""
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(x * 2, x, torch.ones(2))


def _in_turns(workload: Workload, patches: Patches, device: torch.device, rounds: int) -> Gain:
    stepper, batch = Stepper(workload), next(Batches(workload.batch, device))
    parameters = list(workload.model.parameters())

    def step() -> None:
        stepper.step(batch)
        for parameter in parameters:
            parameter.grad = None

    with preserved(workload.model, workload.batch, None, device):
        try:
            (old, new), peaks = measured([Way(patches.revert, step), Way(patches.apply, step)], device)
        finally:
            patches.revert()
    return Gain(old.side(peaks[0]), new.side(peaks[1]), told(old, new))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", choices=sorted(CASES))
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--tiny", action="store_true", help="small sizes, without goals")
    options = made.parse_args()
    results = []
    for name in [options.only] if options.only else CASES:
        results += measure(name, options.device, options.rounds, tiny=options.tiny)
    print_table(f"gradscope fix on {options.device}, {torch.get_num_threads()} threads", results)
    return finish("fix", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
