"""What a user waits for besides the measurement: the program's start, and a large report on the screen.

    python benchmarks/responsiveness.py [--json benchmarks/results/responsiveness.jsonl]

Start: ``gradscope --help`` as a whole process, beside Python itself and beside importing torch; the best of several.
Reports: a GPT of 48 layers and models of 5,000 modules, with and without folding.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from _common import ROOT, Result, finish, parser, print_table

HELP_GOAL_S = 0.4
RENDER_GOAL_S = 1.0


def best(run: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of several runs: what others do on the machine only adds."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def process(*arguments: str) -> Callable[[], object]:
    def run() -> object:
        return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)

    return run


def start_up() -> Sequence[Result]:
    shown = best(process("-m", "gradscope", "--help"))
    bare, torch = best(process("-c", "pass")), best(process("-c", "import torch"))
    return [
        Result("gradscope --help", shown, "s", HELP_GOAL_S),
        Result("gradscope --help over python itself", shown / bare, "x"),
        Result("gradscope --help over importing torch", shown / torch, "x"),
    ]


def rendering() -> Sequence[Result]:
    sys.path.insert(0, str(ROOT))
    from gradscope.document.terminal import make_console
    from gradscope.report.report import Report
    from tests import report_fixtures

    wide = report_fixtures.RunBuilder()
    wide.add("", "Wide", 10, 10)
    for number in range(5_000):
        wide.add(f"layer{number}", "Linear", 1_000 + number, 500)
    runs = {
        "GPT of 48 layers": report_fixtures.gpt(48),
        "5,000 modules, folded": report_fixtures.many_modules(5_000),
        "5,000 modules, none folded": wide.build(),
    }
    return [
        Result(
            f"print {name}",
            best(lambda run=run: Report(run).print(make_console(io.StringIO(), color=True), min_percent=0)),
            "s",
            RENDER_GOAL_S,
        )
        for name, run in runs.items()
    ]


def main() -> int:
    options = parser(__doc__).parse_args()
    results = [*start_up(), *rendering()]
    print_table("Responsiveness", results)
    return finish("responsiveness", results, "cpu", options.json)


if __name__ == "__main__":
    sys.exit(main())
