"""What a step of many operations costs: peak of resident memory above the script alone, and processor time over it.

    python benchmarks/huge_steps.py [--operations 20000 200000] [--json benchmarks/results/huge_steps.jsonl]

Each size runs twice in processes of their own: a script that trains on a chain of small operations by itself, for as
many steps as gradscope takes of it, and the same script under ``gradscope profile`` with default options.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from _common import Result, finish, parser, print_table

# Peak above the script alone, in bytes, by operations a step.
GOALS = {20_000: 800e6, 200_000: 4e9}
STEPS = 15  # that gradscope takes of a script of small steps, about
LINEAR_GOAL = 1.5  # processor time an operation at the largest size over that at the smallest

_SCRIPT = """\
import sys

import torch

operations, steps = int(sys.argv[1]), int(sys.argv[2])
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        h = self.layer(x)
        for _ in range(operations // 2):
            h = h * 0.999
            h = torch.tanh(h)
        return h.sum()


model = Chain()
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).backward()
    optimizer.step()
"""


def cost_of(command: list[str], folder: Path) -> tuple[float, float]:
    """Peak of resident memory in bytes and processor time in s of a process."""
    watched = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_maxrss, used.ru_utime + used.ru_stime)"
    )
    done = subprocess.run(
        [sys.executable, "-c", watched, *command], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    peak, seconds = done.stdout.split()
    return float(peak) * (1 if sys.platform == "darwin" else 1024), float(seconds)


def measure(operations: int) -> tuple[list[Result], float]:
    """The results of one size, and gradscope's processor time an operation in µs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "chain.py").write_text(_SCRIPT)
        alone_bytes, alone_s = cost_of([sys.executable, "chain.py", str(operations), str(STEPS)], folder)
        command = [sys.executable, "-m", "gradscope", "profile", "chain.py", "--quiet", "--", str(operations), "1000"]
        peak_bytes, seconds = cost_of(command, folder)
        page = sum(file.stat().st_size for file in folder.glob("gradscope-chain.*"))
    title = f"{operations:,} operations"
    above = (peak_bytes - alone_bytes) / 1e6
    goal = GOALS.get(operations)
    return [
        Result(f"{title}: script alone", alone_bytes / 1e6, "MB"),
        Result(f"{title}: peak above the script alone", above, "MB", None if goal is None else goal / 1e6),
        Result(f"{title}: processor time", seconds, "s"),
        Result(f"{title}: processor time over {STEPS} steps alone", seconds / alone_s, "x"),
        Result(f"{title}: RUN.json and page", page / 1e6, "MB"),
    ], seconds / operations * 1e6


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--operations", type=int, nargs="+", default=sorted(GOALS))
    options = made.parse_args()
    results, each = [], []
    for operations in options.operations:
        found, microseconds = measure(operations)
        results += found
        each.append(microseconds)
    if len(each) > 1:
        results.append(
            Result("processor time an operation, largest over smallest", each[-1] / each[0], "x", LINEAR_GOAL)
        )
    print_table("A step of many operations", results)
    return finish("huge_steps", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
