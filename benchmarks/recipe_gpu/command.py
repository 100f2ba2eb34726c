"""Every recipe on a GPU, beside what else there is.

    python benchmarks/recipe_gpu [--only attention] [--rounds 25] [--seconds 240]
        [--json benchmarks/results/recipes_gpu.jsonl]
    python benchmarks/recipe_gpu --publish      what that file's last line says, onto docs/recipes; needs no GPU

Forward and backward at GPT-2's and Llama-8B's shapes in bfloat16. A time is a median of device time from a cold cache,
the ways taking turns; the limit is this device's copy bandwidth or its rate of a large product, measured in this run;
memory is the peak above what lived before the step; host is the time to queue it. benchmarks/README.md says more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import Result, finish

from recipe_gpu import liger, worker
from recipe_gpu.measure import Figure
from recipe_gpu.ops import OPS, all_problems
from recipe_gpu.problem import Problem
from recipe_gpu.published import publish
from recipe_gpu.report import HEADING, key_of, limits_line, lines_of, results_of, verdict_lines
from recipe_gpu.supervise import supervise
from recipe_gpu.timer import Limits

SECONDS = 240
ROUNDS = 25


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 where a goal is missed or a problem was lost, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(OPS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each way is timed, at most")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of the whole run; the compiler is left out first"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results as one JSON line to FILE")
    parser.add_argument("--publish", action="store_true", help="measure nothing: write figures.json and docs/recipes")
    parser.add_argument("--worker", metavar="ORDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.publish:
        publish()
        return 0
    if options.worker is not None:
        worker.main(options.only, json.loads(options.worker))
        return 0
    if not torch.cuda.is_available():
        print("this machine has no CUDA device that torch can use", file=sys.stderr)
        return 2
    order = {
        "start": 0,
        "deadline": time.time() + options.seconds,
        "rounds": options.rounds,
        "skip": [],
        "limits": None,
    }
    return run(all_problems(options.only), options.only, order, options.json)


def run(problems: list[Problem], only: str | None, order: dict[str, Any], path: Path | None) -> int:
    """Measure and print; see :func:`main`."""

    def command(order: dict[str, Any]) -> list[str]:
        chosen = [] if only is None else ["--only", only]
        return [sys.executable, str(Path(__file__).parent), *chosen, "--worker", json.dumps(order)]

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {_versions()}")
    results: list[Result] = []
    limits: Limits | None = None
    for line in supervise(command, order, len(problems)):
        if "lost" in line:
            problem = problems[line["lost"]]
            print(f"{key_of(problem)}: LOST, {line['why']}", flush=True)
            results.append(Result(f"{key_of(problem)}, recipe: runs", 0, "", 1, higher=True))
        elif "limits" in line:
            if limits is None:
                print(limits_line(Limits(**line["limits"])), HEADING, sep="\n", flush=True)
            limits = Limits(**line["limits"])
        elif limits is not None:
            problem, figures = problems[line["index"]], [Figure(**figure) for figure in line["figures"]]
            print(*lines_of(problem, figures, limits), sep="\n", flush=True)
            results += results_of(problem, figures)
    if limits is not None:
        results.insert(0, Result("limit: copy", limits.bytes_per_s / 1e12, "TB/s"))
        results.insert(1, Result("limit: bfloat16 product", limits.flop_per_s / 1e12, "TFLOP/s"))
    print(*verdict_lines(results), sep="\n")
    return finish("recipes_gpu", results, "cuda", path)


def _versions() -> str:
    try:
        import triton
    except ImportError:
        found = "no triton"
    else:
        found = f"triton {triton.__version__}"
    why = liger.why_not()
    return f"{found}, Liger {liger.version() if why is None else why}"
