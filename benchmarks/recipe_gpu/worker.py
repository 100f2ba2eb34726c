"""Measures problems in a process of its own, and tells what it does as JSON lines.

A kernel that writes where it must not leaves the device unusable for the whole process: supervise.py starts another
after it, without the way that did it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from recipe_gpu.budget import Budget
from recipe_gpu.measure import Timer, measure
from recipe_gpu.problem import Problem
from recipe_gpu.timer import CudaTimer, Limits


def run(
    problems: list[Problem],
    order: dict[str, Any],
    say: Callable[[dict[str, Any]], None],
    timer: Timer | None = None,
    device: str = "cuda",
) -> None:
    """Measure ``problems`` from ``order["start"]`` on.

    Args:
        order: "start", index of a problem; "deadline", in seconds since the epoch; "rounds"; "skip", [index, way, why]
            of what is not run; "limits", those of a process before, or None.
        say: takes each line: "limits"; "begin" with index and way; "figures" with index and all figures of a problem.
    """
    timer = CudaTimer() if timer is None else timer
    limits = _limits(order["limits"], timer)
    say({"limits": asdict(limits)})
    budget = Budget(order["deadline"])
    for index in range(order["start"], len(problems)):
        skip = {way: why for at, way, why in order["skip"] if at == index}
        if budget.left() <= 0:
            skip |= {way.name: "no time left" for way in problems[index].ways}

        def begin(way: str, index: int = index) -> None:
            say({"begin": index, "way": way})

        figures = measure(
            problems[index],
            timer,
            limits,
            budget,
            rounds=order["rounds"],
            problems_after=len(problems) - index - 1,
            skip=skip,
            device=device,
            begin=begin,
        )
        say({"figures": [figure.as_dict() for figure in figures], "index": index})


def _limits(known: dict[str, float] | None, timer: Any) -> Limits:
    return timer.limits() if known is None else Limits(**known)


def main(only: str | None, order: dict[str, Any]) -> None:
    """The child process: JSON lines to stdout."""
    from recipe_gpu.ops import all_problems

    run(all_problems(only), order, lambda line: print(json.dumps(line), flush=True))
