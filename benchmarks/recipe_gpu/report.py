"""The printed lines, and each number beside its goal."""

from __future__ import annotations

from _common import Result

from recipe_gpu.measure import LARGEST_ERROR, Figure, least_ms
from recipe_gpu.problem import RIVALS, Kind, Problem
from recipe_gpu.timer import Limits

MIB = 1 << 20
AS_FAST = 0.97  # one way timed twice differs by as much
HEADING = "way                    ms  limit    MiB  (h: ms to queue it, where that takes longer)"


def key_of(problem: Problem) -> str:
    return f"{problem.op}, {problem.name}"


def limits_line(limits: Limits) -> str:
    return f"limits: copy {limits.bytes_per_s / 1e12:.2f} TB/s, bfloat16 product {limits.flop_per_s / 1e12:.0f} TFLOP/s"


def lines_of(problem: Problem, figures: list[Figure], limits: Limits) -> list[str]:
    """A line for the problem, one for each way."""
    least = f"{problem.flop / 1e9:.0f} GFLOP" if problem.flop else f"{problem.bytes / 1e6:.0f} MB"
    lines = [f"{key_of(problem)}: {least}, {least_ms(problem, limits):.3f} ms"]
    for figure in figures:
        line = f" {figure.way[:18]:<18}"
        if figure.failure is None:
            line += f" {figure.ms:>8.3f} {figure.share:>4.0%} {figure.peak_bytes / MIB:>6.0f}{_mark(figure)}"
        else:
            line += f" {figure.failure[:90]}"
        lines.append(line)
    return lines


def _mark(figure: Figure) -> str:
    queued = f" h {figure.host_ms:.2f}" if figure.host_ms > figure.ms else ""
    wrong = f" WRONG by {figure.error:.2g}" if figure.error is not None and figure.error > LARGEST_ERROR else ""
    return queued + wrong + (" waits for the device" if figure.waits else "")


def results_of(problem: Problem, figures: list[Figure]) -> list[Result]:
    """Every number of a problem, and what is asked of its recipe."""
    key = key_of(problem)
    made: list[Result] = []
    for figure in figures:
        if figure.failure is None:
            unit = "of flop/s" if problem.flop else "of bytes/s"
            made += [
                Result(f"{key}, {figure.way}: time", figure.ms, "ms"),
                Result(f"{key}, {figure.way}: share", figure.share, unit),
                Result(f"{key}, {figure.way}: memory", figure.peak_bytes / MIB, "MiB"),
                Result(f"{key}, {figure.way}: host", figure.host_ms, "ms"),
                Result(f"{key}, {figure.way}: spread", figure.spread, "of time"),
            ]
        if figure.error is not None:
            goal = LARGEST_ERROR if figure.kind in (Kind.RECIPE, Kind.VARIANT) else None
            made.append(Result(f"{key}, {figure.way}: gradient error", min(figure.error, 1e9), "", goal))
    recipe = next((figure for figure in figures if figure.kind == Kind.RECIPE), None)
    if recipe is None or recipe.failure is not None:
        return [*made, Result(f"{key}, recipe: runs", 0, "", 1, higher=True)]
    return made + _goals(problem, key, recipe, [figure for figure in figures if figure.failure is None])


def _goals(problem: Problem, key: str, recipe: Figure, figures: list[Figure]) -> list[Result]:
    goals = {way.name: way.goal for way in problem.ways}
    made = []
    if recipe.waits is not None:
        made.append(Result(f"{key}, recipe: waits for the device", int(recipe.waits), "", 0))
    if problem.share_goal is not None:
        made.append(Result(f"{key}, recipe: share of limit", recipe.share, "", problem.share_goal, higher=True))
    best = _fastest([figure for figure in figures if figure.kind in RIVALS and goals[figure.way]])
    if best is not None:
        made.append(_faster(key, best, recipe, AS_FAST, "best, "))
    for kind in problem.faster_than:
        fastest = _fastest([figure for figure in figures if figure.kind == kind])
        if fastest is not None:
            made.append(_faster(key, fastest, recipe, 1.0, ""))
    compiled = _fastest([figure for figure in figures if figure.kind == Kind.COMPILE])
    if compiled is not None and Kind.COMPILE not in problem.faster_than:
        made.append(_faster(key, compiled, recipe, None, ""))
    first = figures[0]
    if first.way != problem.ways[0].name:
        return made
    if problem.slower_at_most is not None:
        made.append(Result(f"{key}, recipe: of {first.way}'s time", recipe.ms / first.ms, "x", problem.slower_at_most))
    if problem.leaner_at_least is not None:
        ratio = first.peak_bytes / max(recipe.peak_bytes, 1)
        made.append(Result(f"{key}, recipe: leaner than {first.way}", ratio, "x", problem.leaner_at_least, higher=True))
    return made


def _fastest(figures: list[Figure]) -> Figure | None:
    return min(figures, key=lambda figure: figure.ms, default=None)


def _faster(key: str, other: Figure, recipe: Figure, goal: float | None, what: str) -> Result:
    return Result(f"{key}, recipe: faster than {what}{other.way}", other.ms / recipe.ms, "x", goal, higher=True)


def verdict_lines(results: list[Result]) -> list[str]:
    """How many goals are met, and each that is not."""
    asked = [result for result in results if result.goal is not None]
    missed = [result for result in asked if result.verdict == "MISSED"]
    lines = [f"{len(asked) - len(missed)} of {len(asked)} goals met" + (", missed:" if missed else "")]
    for result in missed:
        unit = f" {result.unit}" if result.unit else ""
        lines.append(
            f"  {result.name}: {result.value:.3g}{unit} (goal {'>=' if result.higher else '<='} {result.goal:g})"
        )
    return lines
