"""Each recipe beside what it replaces: time in turns within one process, and the memory that a step takes.

    python benchmarks/recipes.py [--only attention] [--threads 1 2] [--rounds 7] [--publish]
                                 [--json benchmarks/results/recipes.jsonl]

Every case runs in a process of its own, forward and backward, on a CPU with one thread and with two. A ratio is the
median of the baseline's times over the recipe's. Memory is the most that was allocated at one moment of a step, beyond
what lived before it. ``--publish`` writes what ``gradscope recipes NAME`` and docs/recipes show.
"""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
import subprocess
import sys

import recipe_cases
import torch
from _common import Result, environment, finish, median, parser, print_table, timed
from _pages import write_pages
from _peak import peak_bytes
from recipe_cases.case import RecipeCase

from gradscope.recipes.figures import FILE

ENOUGH_MS = 20_000  # of one case's rounds
SHORT_MS, MOST_ROUNDS = 1_500, 75  # rounds of a few ms: as many as fill this time, for a handful says nothing
MIB = 1 << 20


def all_cases(only: str | None) -> list[RecipeCase]:
    """The cases of every module of recipe_cases, in order of their recipes; those of ``only`` if it is given."""
    found: list[RecipeCase] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(recipe_cases.__path__)):
        found += getattr(importlib.import_module(f"recipe_cases.{module}"), "CASES", [])
    return [case for case in found if only in (None, case.recipe)]


def key_of(case: RecipeCase, threads: int | None) -> str:
    return f"{case.recipe}, {case.name}, beside {case.baseline}{_threads_text(threads)}"


def _threads_text(threads: int | None) -> str:
    return "" if threads is None else f", {threads} thread{'s' * (threads > 1)}"


def measure(case: RecipeCase, device: str, rounds: int) -> dict[str, float]:
    """Times in ms and memory in bytes of both sides."""
    sides = dict(zip(("baseline", "recipe"), case.make(), strict=True))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        timed(step, device)
    while _goes_on(len(times["recipe"]), sum(map(sum, times.values())), rounds):
        for name, step in sides.items():
            times[name].append(timed(step, device))
    found = {f"{name}_ms": median(values) for name, values in times.items()}
    ratios = [a / b for a, b in zip(times["baseline"], times["recipe"], strict=True)]
    found |= {"lowest": min(ratios), "highest": max(ratios)}
    return found | {f"{name}_bytes": peak_bytes(step, device) for name, step in sides.items()}


def _goes_on(done: int, taken_ms: float, rounds: int) -> bool:
    if done < rounds:
        return done < 3 or taken_ms < ENOUGH_MS
    return done < MOST_ROUNDS and taken_ms < SHORT_MS


def results_of(case: RecipeCase, threads: int | None, found: dict[str, float]) -> list[Result]:
    """Both ratios of a case, as value and goal."""
    key = key_of(case, threads)
    made = [Result(f"{key}: faster", found["baseline_ms"] / found["recipe_ms"], "x", case.faster, higher=True)]
    if found["recipe_bytes"] > 0:
        made.append(
            Result(f"{key}: leaner", found["baseline_bytes"] / found["recipe_bytes"], "x", case.leaner, higher=True)
        )
    return made


def in_a_process(index: int, threads: int | None, options: object) -> dict[str, float]:
    """One case measured in a fresh process."""
    command = [sys.executable, __file__, "--one", str(index)]
    command += [] if threads is None else ["--threads", str(threads)]
    for name in ("only", "device", "rounds"):
        value = getattr(options, name)
        command += [] if value is None else [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def publish(found: list[tuple[RecipeCase, int | None, dict[str, float]]], device: str) -> None:
    """Put these figures in place of those of the same recipes on the same device, and onto the recipes' pages."""
    old = json.loads(FILE.read_text())
    replaced = {(case.recipe, device) for case, _, _ in found}
    kept = [row for row in old["figures"] if (row["recipe"], row["device"]) not in replaced]
    machine = {name: environment(device)[name] for name in ("device", "device_name", "threads", "torch", "time")}
    rows = [
        {"recipe": case.recipe, "case": case.name, "baseline": case.baseline, **machine, **figures}
        | ({} if threads is None else {"threads": threads})
        for case, threads, figures in found
    ]
    FILE.write_text(json.dumps({"figures": kept + rows}, indent=1) + "\n")
    write_pages()


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", metavar="RECIPE")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="on a CPU")
    made.add_argument("--one", type=int, metavar="INDEX", help="measure this case here, and print one JSON line")
    made.add_argument("--publish", action="store_true", help="write recipes/figures.json and docs/recipes")
    options = made.parse_args()
    cases = all_cases(options.only)
    if options.one is not None:
        if options.device == "cpu":
            torch.set_num_threads(options.threads[0])
        print(json.dumps(measure(cases[options.one], options.device, options.rounds)))
        return 0
    if not cases:
        sys.exit(f"no case of a recipe {options.only!r}")
    found, results = [], []
    for threads, (index, case) in itertools.product(
        options.threads if options.device == "cpu" else [None], enumerate(cases)
    ):
        figures = in_a_process(index, threads, options)
        found.append((case, threads, figures))
        results += results_of(case, threads, figures)
        print(
            f"{key_of(case, threads)}: {figures['baseline_ms']:.1f} -> {figures['recipe_ms']:.1f} ms "
            f"(x{figures['lowest']:.2f} to x{figures['highest']:.2f}), "
            f"{figures['baseline_bytes'] / MIB:.1f} -> {figures['recipe_bytes'] / MIB:.1f} MiB",
            flush=True,
        )
    print_table(f"Recipes on {options.device}", results)
    if options.publish:
        publish(found, options.device)
    return finish("recipes", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
